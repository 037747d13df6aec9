"""Rotations with a quantizer, by the names of the projects that need them.

Given the same finite rotated values, each preset gives the codes and scales of the project's reference, bit for bit.
docs/formats.md names the code with which each preset was compared. `numerics` is as for `hadagen.rotate_quantize`.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from hadagen.errors import TensorError, UsageError
from hadagen.problem.choices import NumericsName
from hadagen.runtime.checks import check_is_flag
from hadagen.runtime.operands.given import as_count
from hadagen.runtime.operands.packed import Factors
from hadagen.runtime.quantize import check_values, rotate_quantize
from hadagen.runtime.quantized import Quantized
from hadagen.runtime.rotation import Rotation, factors_of
from hadagen.truth import quantizer

__all__ = [
    "convrot_int4",
    "convrot_int8",
    "deepseek_v4_fp4",
    "deepseek_v32_indexer",
    "fa3_fp8",
    "quarot_int4",
    "qutlass_mxfp4",
    "transformer_engine_nvfp4",
]

# The signs of TransformerEngine's random Hadamard transform, which are always these.
_TRANSFORMER_ENGINE_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)

# g^-½ in bfloat16.
_QUTLASS_SCALES = {32: 181 / 1024, 64: 1 / 8, 128: 181 / 2048}


def __dir__() -> list[str]:
    """The public names."""
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__})


def deepseek_v32_indexer(
    x: torch.Tensor, *, power_of_two: bool = False, numerics: NumericsName = "accurate"
) -> Quantized:
    """The activations of DeepSeek V3.2's indexer: H_128 · 128^-½, rounded to x's type, then FP8 by groups of 128.

    x: [..., 128] or several heads of 128, after RoPE. power_of_two: whether to round scales up to powers of two, as
        DeepSeek's `scale_fmt` does. Scales are float32.
    """
    check_is_flag(power_of_two, "power_of_two")
    rule = "power_of_two" if power_of_two else "exact"
    return rotate_quantize(x, 128, to="fp8-group", rule=rule, round_first=True, numerics=numerics)


def deepseek_v4_fp4(x: torch.Tensor, *, numerics: NumericsName = "accurate") -> Quantized:
    """The activations of DeepSeek V4's indexer: H_128 · 128^-½, rounded to x's type, then MXFP4.

    x: [..., 128] or several heads of 128, after RoPE. Scales are rounded up to powers of two.
    """
    return rotate_quantize(x, 128, to="mxfp4", rule="deepseek_v4", round_first=True, numerics=numerics)


def convrot_int8(x: torch.Tensor, block: int = 256, *, numerics: NumericsName = "accurate") -> Quantized:
    """ConvRot in ComfyUI, W8A8: the regular Hadamard matrix over blocks, rounded to x's type, then INT8 by rows.

    block: a power of four that divides the last dimension of x. ComfyUI has 16, 64 and 256.
    """
    return rotate_quantize(x, _rotation(x, block, regular=True), to="int8-row", rule="convrot", numerics=numerics)


def convrot_int4(x: torch.Tensor, block: int = 256, *, numerics: NumericsName = "accurate") -> Quantized:
    """ConvRot in ComfyUI, W4A4: as `convrot_int8`, with INT4. ComfyUI keeps the same scales as float32."""
    return rotate_quantize(x, _rotation(x, block, regular=True), to="int4-row", numerics=numerics)


def quarot_int4(
    x: torch.Tensor, rotation: Rotation | int | None = None, *, numerics: NumericsName = "accurate"
) -> Quantized:
    """QuaRot's quantizer of activations, after a rotation that rounds to x's type. QuaRot takes only float16.

    rotation: as for `hadagen.rotate_quantize`; a power of two is orthonormal.
    """
    return rotate_quantize(x, rotation, to="int4-row", rule="quarot", numerics=numerics)


def qutlass_mxfp4(x: torch.Tensor, block: int = 32, *, numerics: NumericsName = "accurate") -> Quantized:
    """QuTLASS's fused quantizer with the method abs_max (its default is quest).

    block: 32, 64 or 128. The matrix is H · block^-½ in bfloat16. A code is 3 · value / scale, rounded. QuTLASS swizzles
        scales in a second kernel; `hadagen.rotate_quantize` with layout="swizzled" writes swizzled scales directly.
    """
    block = as_count(block, "block")
    if block not in _QUTLASS_SCALES:
        raise UsageError(f"block = {block} is not one of QuTLASS's; choose 32, 64 or 128")
    return rotate_quantize(x, block, to="mxfp4", scale=_QUTLASS_SCALES[block], rule="qutlass", numerics=numerics)


def transformer_engine_nvfp4(x: torch.Tensor, *, numerics: NumericsName = "accurate") -> Quantized:
    """TransformerEngine's NVFP4 of a transposed tensor, for gradients of weights: signs and H_16 over 16 tokens.

    x: [N, M], such as `tensor.t()`. A first kernel computes the amax of all rotated values. Scales are not padded.
    """
    rotation = _rotation(x, 16, regular=False)
    x = x.contiguous()
    group = 16
    if not torch.compiler.is_compiling():  # where the number of tokens may be unknown
        group = next(size for size in (128, 64, 32, 16) if x.shape[-1] % size == 0)
    magnitudes = rotate_quantize(x, rotation, to="largest", group=group, round_first=True, numerics=numerics).scales
    return rotate_quantize(
        x,
        rotation,
        to="nvfp4",
        rule="transformer_engine",
        tensor_scale=_largest(magnitudes.flatten()),
        round_first=True,
        numerics=numerics,
    )


def fa3_fp8(
    x: torch.Tensor, kv_heads: int | None = None, *, rotate: bool = True, numerics: NumericsName = "accurate"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries, keys or values for FlashAttention 3, as torchao quantizes them: H · D^-½ over each head, then FP8.

    x: [batch, heads, sequence, D], with any strides. kv_heads: the number of heads of keys, which divides the number of
        heads of x; None is the number of heads of x. rotate: False for values, which torchao does not rotate.

    Returns float8_e4m3fn of x's shape, and float32 [batch, kv_heads]: amax / 448.
    """
    check_values(x)
    check_is_flag(rotate, "rotate")
    if x.dim() != 4 or not x.shape[1]:
        raise TensorError(f"x has the shape {tuple(x.shape)}; pass [batch, heads, sequence, D] with at least one head")
    heads = x.shape[1] if kv_heads is None else as_count(kv_heads, "kv_heads")
    if x.shape[1] % heads:
        raise UsageError(f"kv_heads = {heads} does not divide the {x.shape[1]} heads of x; choose one that does")
    n = x.shape[-1] if rotate else 1
    by_head = x.contiguous().view(x.shape[0], heads, x.shape[1] // heads, *x.shape[2:])
    magnitudes = rotate_quantize(by_head, n, to="largest", numerics=numerics).scales
    largest = _largest(magnitudes.flatten(2))
    quantized = rotate_quantize(
        by_head, n, to="fp8-head", rule="fa3", tensor_scale=largest, round_first=True, numerics=numerics
    )
    return quantized.codes.view(x.shape), quantizer.fa3_scales(largest)


def _largest(magnitudes: torch.Tensor) -> torch.Tensor:
    """The maximum over the last dimension, or 0 if it is empty. Works without knowing the size."""
    return torch.nn.functional.pad(magnitudes, (0, 1)).amax(-1)


def _rotation(x: torch.Tensor, block: int, *, regular: bool) -> Any:  # which is no public type
    """The operands of ConvRot's or TransformerEngine's rotation over blocks of x. Signs are made only once for each
    block and device."""
    check_values(x)
    block = as_count(block, "block")
    if x.shape[-1] % block:
        raise UsageError(f"block = {block} does not divide the {x.shape[-1]} columns of x; choose one that does")
    of_x = x.fake_mode if not torch.compiler.is_dynamo_compiling() and isinstance(x, FakeTensor) else nullcontext()
    with of_x:
        signs = _signs(block, regular, x.device)
    after = signs if regular else None
    return Factors(block, (), regular, block**-0.5, None, signs, after)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _signs(block: int, regular: bool, device: torch.device) -> torch.Tensor:
    if not torch._C._len_torch_dispatch_stack():
        return _made_signs(block, regular, device)
    with _disable_current_modes():
        values = _made_signs(block, regular, torch.device("cpu")).tolist()
    return torch.tensor(values, dtype=torch.uint8, device=device)  # for these modes, such as that of fake tensors


@functools.cache  # without a limit, because CUDA graphs keep addresses; there are few blocks
def _made_signs(block: int, regular: bool, device: torch.device) -> torch.Tensor:
    with torch.device(device), torch.inference_mode(False):  # whose tensors no other mode takes
        rotation = Rotation(block, "regular") if regular else Rotation(block, signs=_TRANSFORMER_ENGINE_SIGNS)
        signs = factors_of(rotation, torch.empty(block)).signs
    assert signs is not None
    return signs
