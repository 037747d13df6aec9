"""Operators of earlier versions, which stored programs of `torch.export` and packages of AOTInductor call by name. Each
calls an operator of today, so it has no rules of its own."""

from __future__ import annotations

from typing import Any

import torch

from hadagen.runtime.call.named import OPERAND
from hadagen.runtime.call.operators import LIBRARY
from hadagen.runtime.call.rules import CALL, INTO, LINEAR
from hadagen.runtime.operands.packed import present
from hadagen.runtime.operands.spec import text_of

_ROTATION = "Tensor? matrices, int[] orders, Tensor? signs, Tensor? signs_after, int n, bool swapped"
_QUANTIZER = (
    f"{_ROTATION}, Scalar scale, str numerics, bool batch_invariant, str to, int group, str rule, str layout, "
    "bool round_first"
)


def _rotation(matrices: Any, orders: Any, signs: Any, signs_after: Any, n: int, swapped: bool) -> dict[str, Any]:
    """Fields of a spec. Without matrices, the orders were [1]."""
    has = {"signs": signs is not None, "signs_after": signs_after is not None}
    return {"n": n, "orders": () if matrices is None else tuple(orders), **has, "swapped": swapped}


def _write_in_place(x: torch.Tensor, operands: list[torch.Tensor], scale: Any, **fields: Any) -> None:
    INTO.default([x], operands or [torch.empty(1, device=x.device)], scale, text_of(inplace=True, **fields))


def _transform(x: torch.Tensor, scale: Any, numerics: str, invariant: bool = False) -> torch.Tensor:
    text = text_of(numerics=numerics, batch_invariant=invariant)
    return LINEAR.default(x, None, None, None, scale, text)  # type: ignore[no-any-return]


def _transform_(x: torch.Tensor, scale: Any, numerics: str, invariant: bool = False) -> None:
    _write_in_place(x, [], scale, numerics=numerics, batch_invariant=invariant)


def _transform_out(x: torch.Tensor, scale: Any, numerics: str, out: torch.Tensor, invariant: bool = False) -> None:
    INTO.default([out], [x], scale, text_of(numerics=numerics, batch_invariant=invariant))


def _asked(transposed: bool, numerics: str, invariant: bool = False) -> dict[str, Any]:
    return {"transposed": transposed, "numerics": numerics, "batch_invariant": invariant}


def _rotate(x: torch.Tensor, *of: Any) -> torch.Tensor:
    *rotation, transposed, scale, numerics = of[:9]
    text = text_of(**_rotation(*rotation), **_asked(transposed, numerics, *of[9:]))
    return LINEAR.default(x, of[0], of[2], of[3], scale, text)  # type: ignore[no-any-return]


def _rotate_(x: torch.Tensor, *of: Any) -> None:
    *rotation, transposed, scale, numerics = of[:9]
    operands = present(of[0], of[2], of[3])
    _write_in_place(x, operands, scale, **_rotation(*rotation), **_asked(transposed, numerics, *of[9:]))


def _rotate_out(x: torch.Tensor, *of: Any) -> None:
    *rotation, transposed, scale, numerics, out = of[:10]
    text = text_of(**_rotation(*rotation), **_asked(transposed, numerics, *of[10:]))
    INTO.default([out], [x, *present(of[0], of[2], of[3])], scale, text)


def _quantizer(before: str, *of: Any) -> str:
    *rotation, _, numerics, invariant, to, group, rule, layout, round_first = of[:14]
    fields = {"numerics": numerics, "batch_invariant": invariant, "before": before}
    form = {"to": to, "group": group, "rule": rule, "layout": layout, "round_first": round_first}
    return text_of(**_rotation(*rotation), **fields, **form)


def _quantize(x: torch.Tensor, *of: Any) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales = CALL.default([x, *present(of[0], of[2], of[3], of[14])], of[6], _quantizer("", *of))
    return codes, scales


def _quantize_into(x: torch.Tensor, *of: Any) -> None:
    INTO.default(present(*of[15:]), [x, *present(of[0], of[2], of[3], of[14])], of[6], _quantizer("", *of))


def _after(tensors: list[torch.Tensor], before: str, *of: Any) -> list[torch.Tensor]:
    x, *values = tensors
    given = [x, *present(of[0], of[2], of[3], of[14]), *values]
    return CALL.default(given, of[6], _quantizer(before, *of))  # type: ignore[no-any-return]


def _named_matrix(name: str, orders: Any, n: int, device: str) -> torch.Tensor:
    return OPERAND(None, None, None, name, orders, n, "", device)  # type: ignore[no-any-return]


def _stored_matrix(*asked: Any) -> torch.Tensor:
    return OPERAND(*asked, "")  # type: ignore[no-any-return]


_LINEAR = f"{_ROTATION}, bool transposed, Scalar scale, str numerics"
_INVARIANT = "bool batch_invariant=False"
for _schema, _function in {
    f"hadamard_transform(Tensor x, Scalar scale, str numerics, {_INVARIANT}) -> Tensor": _transform,
    f"hadamard_transform_(Tensor(a!) x, Scalar scale, str numerics, {_INVARIANT}) -> ()": _transform_,
    f"hadamard_transform_out(Tensor x, Scalar scale, str numerics, Tensor(a!) out, {_INVARIANT}) -> ()": _transform_out,
    f"rotate(Tensor x, {_LINEAR}, {_INVARIANT}) -> Tensor": _rotate,
    f"rotate_(Tensor(a!) x, {_LINEAR}, {_INVARIANT}) -> ()": _rotate_,
    f"rotate_out(Tensor x, {_LINEAR}, Tensor(a!) out, {_INVARIANT}) -> ()": _rotate_out,
    f"rotate_quantize(Tensor x, {_QUANTIZER}, Tensor? given) -> (Tensor, Tensor)": _quantize,
    f"rotate_quantize_into(Tensor x, {_QUANTIZER}, Tensor? given, Tensor(a!) codes, Tensor(b!)? scales) -> ()": (
        _quantize_into
    ),
    "named_matrix(str name, int[] orders, int n, str device) -> Tensor": _named_matrix,
    "stored_matrix(Tensor? matrices, Tensor? signs, Tensor? signs_after, str name, int[] orders, int n, str scale) "
    "-> Tensor": _stored_matrix,
    f"rotate_after(Tensor[] tensors, str prologue, {_QUANTIZER}, Tensor? tensor_scale) -> Tensor[]": _after,
}.items():
    LIBRARY.define(_schema)
    LIBRARY.impl(_schema.partition("(")[0], _function, "CompositeImplicitAutograd")
