"""Tensors of kinds that few functions expect, and the calls of this package that take tensors."""

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch._subclasses import FakeTensorMode

import hadagen
from hadagen import Quantized, Rotation, presets, prologues, rotate_quantize
from hadagen.compat import fast_hadamard_transform, hadacore, quarot, sglang
from hadagen.problem import matrices

Tensor = torch.Tensor
ONE = torch.ones(())


def _fake(t: Tensor) -> Tensor:
    with FakeTensorMode() as mode:
        return mode.from_tensor(t)


def _freed(t: Tensor) -> Tensor:
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


# Of a dense float32 tensor; some need two dimensions.
KINDS: dict[str, Callable[[Tensor], Any]] = {
    "jagged": lambda t: torch.nested.nested_tensor([t[0:1], t], layout=torch.jagged),
    "strided nested": lambda t: torch.nested.nested_tensor([t[0:1], t]),
    "sparse": lambda t: t.to_sparse(),
    "csr": lambda t: t.to_sparse_csr(),
    "mkldnn": lambda t: t.to_mkldnn(),
    "meta": lambda t: t.to("meta"),
    "fake": _fake,
    "functional": torch._to_functional_tensor,
    "complex": lambda t: t.to(torch.complex64),
    "conjugated": lambda t: t.to(torch.complex64).conj(),
    "negated": lambda t: t.to(torch.complex64).conj().imag,
    "quantized": lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
    "bool": lambda t: t.bool(),
    "float8": lambda t: t.to(torch.float8_e4m3fn),
    "freed": _freed,
    "uninitialized": lambda t: torch.nn.UninitializedParameter(),
    "dense": lambda t: t,
    "without rows": lambda t: t[:0],
    "a number": lambda t: t.sum(),
}


R, SIGNED = Rotation(8), Rotation(8, signs=[1, -1] * 4, signs_after=[-1] * 8)
GIVEN = Rotation(6, torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, 1.0], [1.0, 0.0, 3.0]]))
X = torch.ones(2, 8)
WIDE, SILU, GELU = torch.ones(2, 16), prologues.SiluMul(limit=7), prologues.Gelu()


def _quantized(name: str, **parts: Any) -> Quantized:
    given = {"nvfp4": {"tensor_scale": 1.0}}.get(name, {})
    q = rotate_quantize(torch.ones(2, 32), to=name, **given)  # type: ignore[arg-type]
    for part, value in parts.items():
        setattr(q, part, value)
    return q


def _backward(y: Any) -> Any:
    y.dequantize()
    return y


# (name, a dense tensor of the right shape, the call). All kinds are put in the place of that tensor.
CALLS: dict[str, tuple[Tensor, Callable[[Any], Any]]] = {
    "hadamard_transform x": (X, hadagen.hadamard_transform),
    "hadamard_transform in place": (X, lambda t: hadagen.hadamard_transform(t, inplace=True)),
    "hadamard_transform out": (X, lambda t: hadagen.hadamard_transform(X, out=t)),
    "hadamard_transform scale": (ONE, lambda t: hadagen.hadamard_transform(X, t)),
    "Rotation x": (X, R),
    "Rotation x, signed": (X, SIGNED),
    "Rotation x, given": (torch.ones(2, 6), GIVEN),
    "Rotation in place": (X, lambda t: SIGNED(t, inplace=True)),
    "Rotation out": (X, lambda t: SIGNED(X, out=t)),
    "Rotation inverse": (X, SIGNED.inverse),
    "hadamard_transform x, before": (WIDE, lambda t: hadagen.hadamard_transform(t, before=SILU)),
    "hadamard_transform out, before": (X, lambda t: hadagen.hadamard_transform(WIDE, before=SILU, out=t)),
    "hadamard_transform x, padded, before": (torch.ones(2, 12), lambda t: hadagen.hadamard_transform(t, before=SILU)),
    "hadamard_transform before": (X, lambda t: hadagen.hadamard_transform(X, before=t)),
    "Rotation x, before": (WIDE, lambda t: SIGNED(t, before=SILU)),
    "Rotation in place, before": (X, lambda t: SIGNED(t, before=GELU, inplace=True)),
    "Rotation out, before": (X, lambda t: SIGNED(WIDE, before=SILU, out=t)),
    "rotate_quantize x, before": (WIDE, lambda t: rotate_quantize(t, SIGNED, to="int8-row", before=SILU)),
    "rotate_quantize codes, before": (
        X,
        lambda t: rotate_quantize(WIDE, to="int8-row", before=SILU, out=(t, torch.ones(2, 1))),
    ),
    "rotate_quantize x, before, gradient": (
        WIDE,
        lambda t: _backward(rotate_quantize(t, SIGNED, to="int8-row", before=SILU, gradient=True)),
    ),
    "SiluMul limit": (ONE, lambda t: prologues.SiluMul(limit=t)),
    "Rotation weight": (torch.ones(8, 8), lambda t: SIGNED.fold_into(t, "input")),
    "Rotation weight, output": (torch.ones(8, 8), lambda t: R.fold_into(t, "output", torch.ones(8))),
    "Rotation bias": (torch.ones(8), lambda t: R.fold_into(torch.ones(8, 8), "output", t)),
    "Rotation signs": (torch.ones(8), lambda t: Rotation(8, signs=t)),
    "Rotation signs_after": (torch.ones(8), lambda t: Rotation(8, signs_after=t)),
    "Rotation matrix": (torch.eye(8), lambda t: Rotation(8, t)),
    "Rotation matrices": (torch.eye(2), lambda t: Rotation(8, [torch.eye(2), t])),
    "Rotation n": (ONE, lambda t: Rotation(t)),
    "from_compressed_tensors": (torch.ones(1, 1), Rotation.from_compressed_tensors),
    "rotate_quantize x": (X, lambda t: rotate_quantize(t, to="int8-row")),
    "rotate_quantize x, signed": (X, lambda t: rotate_quantize(t, SIGNED, to="int8-row")),
    "rotate_quantize x, int": (X, lambda t: rotate_quantize(t, 8, to="int8-row")),
    "rotate_quantize x, gradient": (X, lambda t: _backward(rotate_quantize(t, SIGNED, to="int8-row", gradient=True))),
    "rotate_quantize x, out": (X, lambda t: rotate_quantize(t, to="int8-row", out=rotate_quantize(X, to="int8-row"))),
    "rotate_quantize scale": (ONE, lambda t: rotate_quantize(X, to="int8-row", scale=t)),
    "rotate_quantize rotation": (X, lambda t: rotate_quantize(X, t, to="int8-row")),
    "rotate_quantize tensor_scale": (ONE, lambda t: rotate_quantize(X, to="fp8-tensor", tensor_scale=t)),
    "rotate_quantize tensor_scale, gradient": (
        ONE,
        lambda t: rotate_quantize(X.clone().requires_grad_(), to="fp8-tensor", tensor_scale=t, gradient=True),
    ),
    "rotate_quantize tensor_scale of heads": (
        torch.ones(2),
        lambda t: rotate_quantize(X, to="fp8-head", tensor_scale=t),
    ),
    "rotate_quantize codes": (X, lambda t: rotate_quantize(X, to="int8-row", out=(t, torch.ones(2, 1)))),
    "rotate_quantize scales": (
        torch.ones(2, 1),
        lambda t: rotate_quantize(X, to="int8-row", out=(torch.ones(2, 8, dtype=torch.int8), t)),
    ),
    "rotate_quantize out": (X, lambda t: rotate_quantize(X, to="int8-row", out=t)),
    "dequantize codes": (torch.ones(2, 32), lambda t: _quantized("int8-row", codes=t).dequantize()),
    "dequantize scales": (torch.ones(2, 1), lambda t: _quantized("int8-row", scales=t).dequantize()),
    "dequantize tensor_scale": (ONE, lambda t: _quantized("nvfp4", tensor_scale=t).dequantize()),
    "Quantized to": (X, lambda t: _quantized("nvfp4").to(t)),
    **{
        f"Quantized {part}, {does}": (dense, lambda t, part=part, call=call: call(_quantized("nvfp4", **{part: t})))
        for part, dense in (("codes", torch.ones(2, 32)), ("scales", torch.ones(2, 1)), ("tensor_scale", ONE))
        for does, call in {
            "to": lambda q: q.to("cpu", copy=True),
            "as_torch_types": Quantized.as_torch_types,
            "pickle": pickle.dumps,
            "repr": repr,
        }.items()
    },
    "deepseek_v32_indexer": (torch.ones(2, 128), presets.deepseek_v32_indexer),
    "deepseek_v4_fp4": (torch.ones(2, 128), presets.deepseek_v4_fp4),
    "convrot_int8": (torch.ones(2, 256), presets.convrot_int8),
    "convrot_int4": (torch.ones(2, 256), presets.convrot_int4),
    "quarot_int4": (X, presets.quarot_int4),
    "qutlass_mxfp4": (torch.ones(2, 32), presets.qutlass_mxfp4),
    "transformer_engine_nvfp4": (torch.ones(2, 32), presets.transformer_engine_nvfp4),
    "fa3_fp8": (torch.ones(1, 2, 3, 8), presets.fa3_fp8),
    "fast_hadamard_transform": (X, fast_hadamard_transform.hadamard_transform),
    "fast_hadamard_transform scale": (ONE, lambda t: fast_hadamard_transform.hadamard_transform(X, t)),
    "fast_hadamard_transform_ref": (X, fast_hadamard_transform.hadamard_transform_ref),
    "fast_hadamard_transform_12N": (torch.ones(2, 48), fast_hadamard_transform.hadamard_transform_12N),
    "hadacore": (X, hadacore.hadamard_transform),
    "hadacore in place": (X, hadacore.hadacore_transform),
    "quarot matmul_hadU": (X, quarot.matmul_hadU),
    "quarot matmul_hadUt": (X, quarot.matmul_hadUt),
    "quarot matmul_hadU_cuda": (torch.ones(2, 12), lambda t: quarot.matmul_hadU_cuda(t, torch.eye(3), 3)),
    "quarot hadK": (torch.eye(3), lambda t: quarot.matmul_hadU_cuda(torch.ones(2, 12), t, 3)),
    "quarot HadamardTransform": (X, quarot.HadamardTransform.apply),
    "quarot R2": (
        torch.eye(4),
        lambda t: quarot.apply_exact_had_to_linear(torch.nn.Linear(8, 8), 4, R2=t),
    ),
    "quarot n": (ONE, quarot.get_hadK),
    "sglang x": (X, lambda t: sglang.hadamard_transform_with_signs(t, torch.ones(8), torch.ones(8))),
    "sglang signs": (torch.ones(8), lambda t: sglang.hadamard_transform_with_signs(X, t, torch.ones(8))),
    "sglang out": (X, lambda t: sglang.hadamard_transform_with_signs(X, torch.ones(8), torch.ones(8), out=t)),
    "warmup n": (ONE, lambda t: hadagen.warmup(t, torch.float16)),
    "warmup rotation": (ONE, lambda t: hadagen.warmup(t, torch.float16, to="int8-row")),
    "warmup rows": (ONE, lambda t: hadagen.warmup(8, torch.float16, rows=t)),
}


def exotic(kind: str, dense: Tensor, gradient: bool) -> Any:
    """None where there is no such tensor of this shape, or none that requires a gradient."""
    try:
        made = KINDS[kind](dense)
        return made.requires_grad_() if gradient else made
    except (RuntimeError, IndexError, ValueError):
        return None


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


# Values of which no function may say more than a little, or that are hard to write at all.
LONG: dict[str, Any] = {
    "text": "x" * 5000,
    "lines": "x\n" * 2500,
    "integer": 10**400,
    "longer integer": 10**5000,
    "negative integer": -(10**5000),
    "list": ["x" * 5000] * 3,
    "numbers": list(range(3000)),
    "integers in a list": [10**5000],
    "dictionary": {"x" * 5000: "y" * 5000},
    "unprintable": Unprintable(),
    "a dtype": torch.float16,
    "array": np.array([[1.5] * 40] * 40),
    "true": np.True_,
    "a true tensor": torch.tensor(True),
}

# Functions, and arguments with which they work; each argument of each is replaced.
ARGUMENTS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "hadamard_transform": (hadagen.hadamard_transform, {"x": X}),
    "Rotation": (Rotation, {"n": 8}),
    "Rotation, regular": (Rotation, {"n": 16, "matrix": "regular"}),
    "Rotation.forward": (R, {"x": X}),
    "Rotation.inverse": (R.inverse, {"x": X}),
    "Rotation.matrix": (R.matrix, {}),
    "Rotation.fold_into": (R.fold_into, {"weight": torch.eye(8), "side": "output"}),
    "Rotation.shard": (Rotation(8, block=4).shard, {"rank": 0, "world": 2}),
    "Rotation.from_dict": (Rotation.from_dict, {"data": SIGNED.to_dict()}),
    "Rotation.from_compressed_tensors": (Rotation.from_compressed_tensors, {"weight": torch.ones(1, 1)}),
    "rotate_quantize": (rotate_quantize, {"x": X, "to": "int8-row"}),
    "rotate_quantize, groups": (rotate_quantize, {"x": torch.ones(2, 128), "to": "fp8-group", "rule": "power_of_two"}),
    "rotate_quantize, scale": (rotate_quantize, {"x": X, "to": "fp8-tensor", "tensor_scale": 1.0}),
    "Quantized.dequantize": (_quantized("int8-row").dequantize, {}),
    "Quantized.to": (_quantized("int8-row").to, {"device": "cpu"}),
    "SiluMul": (prologues.SiluMul, {}),
    "GeluMul": (prologues.GeluMul, {}),
    "Gelu": (prologues.Gelu, {}),
    "Relu2": (prologues.Relu2, {}),
    "Mul": (prologues.Mul, {}),
    "Arithmetic": (prologues.Arithmetic, {}),
    "warmup": (hadagen.warmup, {"n": 8, "dtype": "float16"}),
    "warmup, before": (hadagen.warmup, {"n": 8, "dtype": "float16", "before": SILU}),
    "warmup, quantized": (hadagen.warmup, {"n": 8, "dtype": "float16", "to": "int8-row"}),
    "best_config": (hadagen.best_config, {"problem": "n64-float16-fast", "rows": 8, "arch": "sm90"}),
    "autotune": (hadagen.autotune, {"problem": "n64-float16-fast"}),
    "Problem": (hadagen.Problem, {"transform": 1, "io": 1}),
    "Problem.of": (hadagen.Problem.of, {"n": 64, "dtype": "float16"}),
    "Problem.parse": (hadagen.Problem.parse, {"key": "n64-float16-fast"}),
    "deepseek_v32_indexer": (presets.deepseek_v32_indexer, {"x": torch.ones(2, 128)}),
    "convrot_int8": (presets.convrot_int8, {"x": torch.ones(2, 256)}),
    "quarot_int4": (presets.quarot_int4, {"x": X}),
    "qutlass_mxfp4": (presets.qutlass_mxfp4, {"x": torch.ones(2, 32)}),
    "transformer_engine_nvfp4": (presets.transformer_engine_nvfp4, {"x": torch.ones(2, 32)}),
    "fa3_fp8": (presets.fa3_fp8, {"x": torch.ones(1, 2, 3, 8)}),
    "fast_hadamard_transform": (fast_hadamard_transform.hadamard_transform, {"x": X}),
    "fast_hadamard_transform_12N": (fast_hadamard_transform.hadamard_transform_12N, {"x": torch.ones(2, 48)}),
    "hadacore": (hadacore.hadamard_transform, {"x": X}),
    "quarot get_hadK": (quarot.get_hadK, {"n": 12}),
    "quarot matmul_hadU_cuda": (quarot.matmul_hadU_cuda, {"X": torch.ones(2, 12), "hadK": torch.eye(3), "K": 3}),
    "quarot had_dim": (quarot.apply_exact_had_to_linear, {"module": torch.nn.Linear(8, 8)}),
    "sglang": (
        sglang.hadamard_transform_with_signs,
        {"x": X, "signs1": torch.ones(8), "signs2": torch.ones(8)},
    ),
    "find_matrix": (matrices.find_matrix, {"name": "auto", "order": 12}),
    "find_orders": (matrices.find_orders, {"name": "auto", "n": 12}),
}
