"""What multiplies codes on a GPU: a function of PyTorch, or a kernel of Triton with a tile.

A provider has a name, which times are kept by:

    library                    `torch._int_mm` or `torch._scaled_mm`
    tile 64x128x128, 4, 4      `kernels.multiply`: rows, columns and elements of a tile, warps, stages
    boxes 128x256x128, 8, 3    `kernels.multiply_boxes`, on GPUs with tensor descriptors
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from hadagen.models.products import library
from hadagen.models.products.library import capability, fp8_product, int8_product, multiplies

KINDS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
LIBRARY = "library"
_WGMMA = 64  # the fewest rows of a tile that wgmma multiplies, which takes FP8 as it is
_SHARED_BYTES, _LEAST_SHARED_BYTES = {80: 166912, 87: 166912, 90: 232448, 100: 232448, 103: 232448}, 101376
_BOXES = 90  # the least capability with tensor descriptors
_TOGETHER = 8  # rows of tiles whose blocks run at about the same time, and share the codes of a weight in L2
_NAME = re.compile(r"(tile|boxes) ([1-9]\d*)x([1-9]\d*)x([1-9]\d*), ([1-9]\d*), ([1-9]\d*)", re.ASCII)
_TILES = """
    tile 16x32x512, 4, 4;  tile 16x32x256, 4, 5;  tile 16x64x256, 4, 4;  tile 16x64x128, 4, 6;  tile 16x128x128, 4, 4
    tile 32x32x256, 4, 4;  tile 32x64x256, 4, 4;  tile 32x64x128, 4, 6
    tile 64x32x256, 4, 4;  tile 64x64x256, 4, 4;  tile 64x64x128, 4, 5;  tile 64x128x128, 4, 4
    tile 128x64x128, 4, 4;  tile 128x128x128, 8, 4;  tile 128x256x128, 8, 3
    boxes 64x128x128, 4, 4;  boxes 128x128x128, 4, 4;  boxes 128x256x128, 8, 3;  boxes 256x128x128, 8, 3
"""
NAMES = (LIBRARY, *filter(None, map(str.strip, re.split(r"[;\n]", _TILES))))


class Tile(NamedTuple):
    """kind: "tile" or "boxes". rows, columns, depth: of a tile. warps, stages: of a block."""

    kind: str
    rows: int
    columns: int
    depth: int
    warps: int
    stages: int

    def shared_bytes(self, dtype: torch.dtype) -> int:
        """Of the stages, and for boxes of a tile of results of a type."""
        results = dtype.itemsize * self.rows * self.columns if self.kind == "boxes" else 0
        return (self.rows + self.columns) * self.depth * self.stages + results


@cache
def tile_of(name: str) -> Tile | None:
    """The tile of a provider; None for a library. Raises `ValueError` for a name that is none."""
    if name == LIBRARY:
        return None
    found = _NAME.fullmatch(name)
    if found is None:
        raise ValueError(name)
    return Tile(found[1], *map(int, found.groups()[1:]))


def fits(name: str, dtype: torch.dtype, n: int, out: int) -> bool:
    """Whether a provider takes codes of these sizes, on any GPU."""
    tile = tile_of(name)
    if tile is None:
        return library.fits(dtype, out, n)
    # The rows of boxes begin at multiples of 16 bytes, and their sums are int32.
    return tile.kind != "boxes" or (dtype == torch.int8 and n % 16 == 0)


def supports(name: str, codes: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a provider multiplies codes [rows, n] by those of a weight [out, n] on their GPU, to results of dtype."""
    tile, device = tile_of(name), codes.device
    if tile is None:
        return multiplies(codes, weight, capability(device))
    out, n = weight.shape
    if weight.dtype != codes.dtype or not has_tiles(codes.dtype, capability(device)):
        return False
    if not fits(name, codes.dtype, n, out) or tile.shared_bytes(dtype) > _shared_bytes(device):
        return False
    is_aligned = codes.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0
    return tile.kind != "boxes" or (is_aligned and capability(device) >= _BOXES and _has_boxes())


def _shared_bytes(device: torch.device) -> int:
    """What a block may have. PyTorch before 2.7 does not say."""
    found = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", None)
    return int(found or _SHARED_BYTES.get(capability(device), _LEAST_SHARED_BYTES))


@cache
def _has_boxes() -> bool:
    return find_spec("triton.tools.tensor_descriptor") is not None


def has_tiles(kind: torch.dtype, capability: int) -> bool:
    """Whether Triton is there, which PyTorch for GPUs brings on Linux, and multiplies codes of this type on a GPU."""
    return kind in KINDS.values() and capability >= (80 if kind == torch.int8 else 89) and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def run(
    name: str,
    codes: torch.Tensor,
    scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The result [rows, out] of a provider that supports these codes; the arguments of `multiply_codes`, with at least
    one row and contiguous."""
    tile = tile_of(name)
    if tile is not None:
        rounds = dtype != torch.float32  # before the bias is added, else a kernel would round once
        y = _launch(tile, codes, scales, weight, weight_scale, bias if rounds else None, dtype)
        return y if bias is None or rounds else y + bias
    if codes.dtype == torch.int8:
        y = int8_product(codes, scales, weight, weight_scale)
    else:
        # Other GPUs have no kernel with scales of rows, and this one gives no type but bfloat16.
        by_row = dtype == torch.bfloat16 and capability(codes.device) // 10 in (9, 10)
        y = fp8_product(codes, scales, weight, weight_scale, by_row=by_row)
    y = y.to(dtype)
    return y if bias is None else y + bias


def _launch(
    tile: Tile,
    codes: torch.Tensor,
    scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    from hadagen.models.products import kernels

    (rows, n), out = codes.shape, weight.shape[0]
    y = codes.new_empty((rows, out), dtype=dtype)
    tiles = -(-rows // tile.rows) * -(-out // tile.columns)
    sizes = y, scales, weight_scale, y if bias is None else bias, rows, out, n
    options: dict[str, Any] = {
        "BY_ROW": scales.numel() == rows,
        "HAS_BIAS": bias is not None,
        "BM": tile.rows,
        "BN": tile.columns,
        "BK": tile.depth,
        "GROUP": _TOGETHER,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    with torch.cuda.device(codes.device):
        if tile.kind == "tile":
            kernels.multiply[(tiles,)](
                codes, weight, *sizes, WIDE=codes.dtype != torch.int8 and tile.rows < _WGMMA, **options
            )
            return y
        from triton.tools.tensor_descriptor import TensorDescriptor  # type: ignore[import-not-found, unused-ignore]

        boxes: Callable[..., Any] = TensorDescriptor.from_tensor
        blocks = min(tiles, torch.cuda.get_device_properties(codes.device).multi_processor_count)
        operands = boxes(codes, [tile.rows, tile.depth]), boxes(weight, [tile.columns, tile.depth])
        kernels.multiply_boxes[(blocks,)](*operands, *sizes, blocks, **options)
    return y
