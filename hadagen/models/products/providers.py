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

from hadagen.models.products.library import capability, fp8_product, int8_product, multiplies

KINDS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
LIBRARY = "library"
_WGMMA = 64  # the fewest rows of a tile that wgmma multiplies, which takes FP8 as it is
_BOXES = 90  # the least capability with tensor descriptors
_TOGETHER = 8  # rows of tiles whose blocks run at about the same time, and share the codes of a weight in L2
_NAME = re.compile(r"(tile|boxes) (\d+)x(\d+)x(\d+), (\d+), (\d+)")
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

    @property
    def shared_bytes(self) -> int:
        """Of the stages; boxes keep a tile of results too."""
        results = 2 * self.rows * self.columns if self.kind == "boxes" else 0
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


def supports(name: str, codes: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a provider multiplies codes [rows, n] by those of a weight [out, n] on their GPU."""
    tile = tile_of(name)
    if tile is None:
        return multiplies(codes, weight, capability(codes.device))
    if weight.dtype != codes.dtype or not codes.numel() or not has_tiles(codes.dtype, capability(codes.device)):
        return False
    shared: int = getattr(torch.cuda.get_device_properties(codes.device), "shared_memory_per_block_optin", 0)
    if tile.shared_bytes > shared:
        return False
    if tile.kind == "boxes":  # whose sums are int32, and whose rows begin at multiples of 16 bytes
        aligned = codes.shape[1] % 16 == 0 and not (codes.data_ptr() % 16 or weight.data_ptr() % 16)
        return codes.dtype == torch.int8 and capability(codes.device) >= _BOXES and aligned
    return True


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
        return _launch(tile, codes, scales, weight, weight_scale, bias, dtype)
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
