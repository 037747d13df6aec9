"""What multiplies codes on a GPU: a function of PyTorch, or a kernel of Triton with a tile.

A provider has a name, which times are kept by:

    library                    `torch._int_mm` or `torch._scaled_mm`
    tile 64x128x128, 4, 4      `kernels.multiply`: rows, columns and elements of a tile, warps, stages
    boxes 128x256x128, 8, 3    `kernels.multiply_boxes`, on GPUs with tensor descriptors
    pairs 64x64x128, 4, 4, 2   `kernels.multiply_pairs`, for weights of 4 bits; last the blocks that share a tile
    unpack                     makes INT8 codes of a weight of 4 bits, for the provider of these
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from hadagen.models import int4
from hadagen.models.products import library
from hadagen.models.products.library import capability, fp8_product, int8_product, multiplies
from hadagen.models.products.operands import Operands

KINDS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": torch.uint8}  # of weights
LIBRARY, UNPACK = "library", "unpack"
_WGMMA = 64  # the fewest rows of a tile that wgmma multiplies, which takes FP8 as it is
_SHARED_BYTES, _LEAST_SHARED_BYTES = {80: 166912, 87: 166912, 90: 232448, 100: 232448, 103: 232448}, 101376
ALIGNMENT = 16  # bytes, of the first codes of boxes, and of weights of 4 bits and their factors
_BOXES = 90  # the least capability with tensor descriptors
_TOGETHER = 8  # rows of tiles whose blocks run at about the same time, and share the codes of a weight in L2
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # of the factors of spans of a step
_UNPACKED = 32  # spans of a block
_LEAST_SPAN = 64  # whose halves fill a product of tensor cores
_NAME = re.compile(
    r"(tile|boxes|pairs) ([1-9]\d*)x([1-9]\d*)x([1-9]\d*), ([1-9]\d*), ([1-9]\d*)(?:, ([1-9]\d*))?", re.ASCII
)
_TILES = """
    tile 16x32x512, 4, 4;  tile 16x32x256, 4, 5;  tile 16x64x256, 4, 4;  tile 16x64x128, 4, 6;  tile 16x128x128, 4, 4
    tile 32x32x256, 4, 4;  tile 32x64x256, 4, 4;  tile 32x64x128, 4, 6
    tile 64x32x256, 4, 4;  tile 64x64x256, 4, 4;  tile 64x64x128, 4, 5;  tile 64x128x128, 4, 4
    tile 128x64x128, 4, 4;  tile 128x128x128, 8, 4;  tile 128x256x128, 8, 3
    boxes 64x128x128, 4, 4;  boxes 128x128x128, 4, 4;  boxes 128x256x128, 8, 3;  boxes 256x128x128, 8, 3
    pairs 16x16x512, 2, 4, 1;  pairs 16x32x512, 4, 4, 1;  pairs 16x64x256, 4, 5, 4;  pairs 16x64x256, 4, 5, 8
    pairs 16x128x128, 4, 6, 1;  pairs 16x128x128, 4, 6, 2;  pairs 16x128x128, 4, 6, 4;  pairs 16x128x128, 4, 6, 8
    pairs 32x64x128, 4, 6, 1;  pairs 32x64x256, 4, 4, 2;  pairs 32x128x128, 4, 5, 1;  pairs 32x128x128, 4, 5, 4
    pairs 64x32x256, 4, 4, 1;  pairs 64x64x256, 4, 4, 1;  pairs 64x64x128, 4, 5, 4;  pairs 64x128x128, 4, 4, 1
    pairs 64x128x128, 4, 4, 2;  pairs 64x128x128, 4, 4, 4;  pairs 64x256x128, 8, 4, 1;  pairs 128x128x128, 4, 4, 1
    pairs 128x128x128, 4, 3, 1;  pairs 128x128x128, 4, 4, 2;  pairs 128x256x128, 8, 3, 1
"""
NAMES = (LIBRARY, UNPACK, *filter(None, map(str.strip, re.split(r"[;\n]", _TILES))))


class Tile(NamedTuple):
    """kind: "tile", "boxes" or "pairs". rows, columns, depth: of a tile. warps, stages: of a block. splits: the blocks
    that share a tile of pairs."""

    kind: str
    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    splits: int = 1

    def shared_bytes(self, codes: torch.dtype, results: torch.dtype) -> int:
        """Of the stages, and for boxes of a tile of results."""
        of_weight = self.columns * self.depth // (2 if self.kind == "pairs" else 1)
        of_results = results.itemsize * self.rows * self.columns if self.kind == "boxes" else 0
        return (self.rows * self.depth * codes.itemsize + of_weight) * self.stages + of_results


@cache
def tile_of(name: str) -> Tile | None:
    """The tile of a provider; None for one without. Raises `ValueError` for a name that is none."""
    if name in (LIBRARY, UNPACK):
        return None
    found = _NAME.fullmatch(name)
    if found is None:
        raise ValueError(name)
    return Tile(found[1], *map(int, filter(None, found.groups()[1:])))


def fits(name: str, weight: torch.dtype, n: int, out: int) -> bool:
    """Whether a provider takes a weight [out, n] with codes of a type, on any GPU."""
    tile, is_packed = tile_of(name), weight == torch.uint8
    if is_packed and n % 2:
        return False
    if tile is None:
        return is_packed if name == UNPACK else not is_packed and library.fits(weight, out, n)
    if tile.kind == "pairs":
        span = int4.span_of(n)
        return is_packed and n % tile.depth == 0 and tile.depth // span in _WORDS and span >= _LEAST_SPAN
    # The rows of boxes begin at multiples of 16 bytes, and their sums are int32.
    return not is_packed and (tile.kind != "boxes" or (weight == torch.int8 and n % 16 == 0))


def supports(name: str, of: Operands) -> bool:
    """Whether a provider multiplies these on their GPU."""
    tile, device = tile_of(name), of.codes.device
    if not fits(name, of.weight.dtype, of.n, of.out):
        return False
    if name == UNPACK:
        return of.codes.dtype == torch.int8
    if tile is None:
        return multiplies(of.codes, of.weight, capability(device))
    if not has_tile(of.codes.dtype, of.weight.dtype, of.n) or not has_tiles(of.codes.dtype, capability(device)):
        return False
    if tile.splits > 1 and of.codes.dtype != torch.int8:  # whose sums are the same in any order
        return False
    if tile.shared_bytes(of.codes.dtype, of.dtype) > _shared_bytes(device):
        return False
    is_aligned = (of.codes.data_ptr() | of.weight.data_ptr()) % ALIGNMENT == 0
    return tile.kind != "boxes" or (is_aligned and capability(device) >= _BOXES and _has_boxes())


@cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _shared_bytes(device: torch.device) -> int:
    """What a block may have. PyTorch before 2.7 does not say."""
    found = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", None)
    return int(found or _SHARED_BYTES.get(capability(device), _LEAST_SHARED_BYTES))


@cache
def _has_boxes() -> bool:
    return find_spec("triton.tools.tensor_descriptor") is not None


def has_tile(codes: torch.dtype, weight: torch.dtype, n: int) -> bool:
    """Whether tiles multiply rows of n by a weight with codes of another type, or the same."""
    if weight == torch.uint8:
        return n % _LEAST_SPAN == 0 and ((codes.is_floating_point and codes.itemsize <= 2) or codes == torch.int8)
    return codes == weight


def has_tiles(codes: torch.dtype, capability: int) -> bool:
    """Whether Triton is there, which PyTorch for GPUs brings on Linux, and multiplies such codes or values on a GPU."""
    return capability >= (89 if codes == torch.float8_e4m3fn else 80) and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def invariant(of: Operands) -> str:
    """The provider whose sums of codes or values are those of each row alone, in one order."""
    return f"pairs 64x64x{int4.span_of(of.n)}, 4, 4, 1" if of.weight.dtype == torch.uint8 else "tile 64x64x128, 4, 5"


def run(name: str, of: Operands) -> torch.Tensor:
    """The result [rows, out] of a provider that supports these operands, which are contiguous, with at least one row.
    `UNPACK` is none by itself."""
    tile = tile_of(name)
    if tile is not None:
        # A kernel rounds before it adds a bias, and has no rounding of float32.
        y = _launch(tile, of if of.dtype != torch.float32 else of._replace(bias=None))
        return y if of.bias is None or of.dtype != torch.float32 else y + of.bias
    if of.codes.dtype == torch.int8:
        y = int8_product(of)
    else:
        # Other GPUs have no kernel with scales of rows, and this one gives no type but bfloat16.
        by_row = of.dtype == torch.bfloat16 and capability(of.codes.device) // 10 in (9, 10)
        y = fp8_product(of, by_row=by_row)
    y = y.to(of.dtype)
    return y if of.bias is None else y + of.bias


def int8_weight(of: Operands) -> torch.Tensor:
    """The INT8 codes [out, n] of a weight of 4 bits, times their factors."""
    half = int4.span_of(of.n) // 2
    if not has_tiles(torch.int8, capability(of.codes.device)) or half * 2 < _LEAST_SPAN:
        return library.with_int8_weight(of).weight
    from hadagen.models.products import kernels

    made = of.weight.new_empty((of.out, of.n), dtype=torch.int8)
    spans = made.numel() // (2 * half)
    factors = of.weight if of.factors is None else of.factors
    with torch.cuda.device(of.codes.device):
        kernels.unpack[(-(-spans // _UNPACKED),)](
            of.weight, factors, made, spans, HAS_FACTORS=of.factors is not None, HALF=half, COUNT=_UNPACKED
        )
    return made


def _launch(tile: Tile, of: Operands) -> torch.Tensor:
    from hadagen.models.products import kernels

    y = of.codes.new_empty((of.rows, of.out), dtype=of.dtype)
    tiles = -(-of.rows // tile.rows) * -(-of.out // tile.columns)
    bias = y if of.bias is None else of.bias
    scales = of.weight_scale if of.scales is None else of.scales
    is_wide = of.codes.dtype == torch.float8_e4m3fn
    options: dict[str, Any] = {
        "SCALES": "none" if of.scales is None else "rows" if scales.numel() == of.rows else "one",
        "HAS_BIAS": of.bias is not None,
        "BM": tile.rows,
        "BN": tile.columns,
        "GROUP": _TOGETHER,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    with torch.cuda.device(of.codes.device):
        if tile.kind == "pairs":
            span = int4.span_of(of.n)
            spans = tile.depth // span
            factors = of.weight if of.factors is None else of.factors.view(_WORDS[spans])
            options |= {"HAS_FACTORS": of.factors is not None, "WIDE": is_wide, "HALF": span // 2, "SPANS": spans}
            options["SPLITS"] = tile.splits
            sums = y if tile.splits == 1 else y.new_zeros(y.numel() + tiles, dtype=torch.int32)
            sizes = of.rows, of.out, of.n // 2
            kernels.multiply_pairs[(tiles * tile.splits,)](
                of.codes, of.weight, y, scales, of.weight_scale, factors, bias, sums, *sizes, **options
            )
            return y
        operands = y, scales, of.weight_scale, bias, of.rows, of.out, of.n
        options["BK"] = tile.depth
        if tile.kind == "tile":
            kernels.multiply[(tiles,)](of.codes, of.weight, *operands, WIDE=is_wide and tile.rows < _WGMMA, **options)
            return y
        from triton.tools.tensor_descriptor import TensorDescriptor  # type: ignore[import-not-found, unused-ignore]

        boxes: Callable[..., Any] = TensorDescriptor.from_tensor
        blocks = min(tiles, _processors(of.codes.device))
        codes, weight = boxes(of.codes, [tile.rows, tile.depth]), boxes(of.weight, [tile.columns, tile.depth])
        kernels.multiply_boxes[(blocks,)](codes, weight, *operands, blocks, **options)
    return y
