"""`Spec`: what a call computes, whatever its tensors are. As text, it is an argument of the operators and a part of the
key of a call that comes again."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import index
from typing import Any

from hadagen.errors import UsageError, shown
from hadagen.problem.formats import Format
from hadagen.problem.prologues import Prologue, parsed
from hadagen.runtime.checks import check_numerics


@dataclass(frozen=True)
class Spec:
    """What a call computes, without its tensors and its scale: a prologue, a rotation over blocks of the last
    dimension, and a quantizer, each of which may be left out.

    n: the elements of a block; 0 for whole rows, zero-padded to the next power of two; 1 without a rotation.
    orders: K of each matrix A1, A2, …; n is the product of all K times a power of two, the order of H.
    signs, signs_after: whether the rotation has the diagonal D_in, or D_out.
    swapped: the two bits of each base-4 digit of an output's index are exchanged, between H and D_out. n is a power of
        4, and there are no matrices.
    transposed: multiply by the transpose of D_in · (A1 ⊗ A2 ⊗ … ⊗ H)ᵀ · D_out.
    numerics, batch_invariant: as for `hadagen.hadamard_transform`.
    inplace: the result replaces x.
    before: a `Prologue.text`; "" for none.
    to, group, rule, layout, round_first: the format of `hadagen.rotate_quantize`, with all defaults filled in; "" for a
        result of x's type.
    """

    n: int = 0
    orders: tuple[int, ...] = ()
    signs: bool = False
    signs_after: bool = False
    swapped: bool = False
    transposed: bool = False
    numerics: str = "accurate"
    batch_invariant: bool = False
    inplace: bool = False
    before: str = ""
    to: str = ""
    group: int = 0
    rule: str = ""
    layout: str = ""
    round_first: bool = False

    @functools.cached_property
    def text(self) -> str:
        """The fields that are not the default, from which `Spec.parse` makes it again."""
        return text_of(**{each.name: getattr(self, each.name) for each in fields(self)})

    @staticmethod
    @functools.lru_cache(maxsize=4096)
    def parse(text: str) -> Spec:
        """The spec of a text. Raises `UsageError` for any other text."""
        found: dict[str, object] = {}
        for word in text.split():
            name, is_value, value = word.partition("=")
            kind = _KINDS.get(name)
            try:
                if kind is None or name in found or (kind is bool) is bool(is_value):
                    raise ValueError
                found[name] = True if kind is bool else kind(value)
            except ValueError:
                raise UsageError(
                    f"spec {shown(text)} has {shown(word)}, which is not known; call a function of hadagen"
                ) from None
        made = Spec(**found)  # type: ignore[arg-type]
        check_numerics(made.numerics)
        _ = made.form, made.prologue
        return made

    @functools.cached_property
    def form(self) -> Format | None:
        """The format of the result; None for x's type."""
        return Format.choose(self.to, self.group, self.rule, self.layout) if self.to else None

    @functools.cached_property
    def prologue(self) -> Prologue | None:
        return parsed(self.before) if self.before else None

    @functools.cached_property
    def width(self) -> int:
        """The number of elements of x for each element of a row that is rotated."""
        return self.prologue.width if self.prologue else 1

    @functools.cached_property
    def is_h_alone(self) -> bool:
        """Whether the rotation is H, without matrices, signs and exchanged bits."""
        return not (self.orders or self.signs or self.signs_after or self.swapped)

    @functools.cached_property
    def rotates(self) -> bool:
        """Whether there is a rotation, and not a prologue or a quantizer alone."""
        return self.n != 1 or not self.is_h_alone

    @functools.cached_property
    def is_linear(self) -> bool:
        """Whether the call is linear in x: neither prologue nor quantizer."""
        return not (self.before or self.to)

    @functools.cached_property
    def roles(self) -> tuple[bool, bool, bool, bool, int]:
        """Whether a call has matrices, signs, signs_after and a tensor_scale, and how many tensors its prologue
        reads."""
        needs_scale = self.form is not None and self.form.needs_scale
        read = len(self.prologue.read) if self.prologue else 0
        return bool(self.orders), self.signs, self.signs_after, needs_scale, read


def _orders(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


_TYPES: dict[str, Any] = {"n": int, "orders": _orders, "group": int}
_TYPES |= dict.fromkeys(("numerics", "before", "to", "rule", "layout"), str)
_KINDS = {each.name: _TYPES.get(each.name, bool) for each in fields(Spec)}


def text_of(
    n: int = 0,
    orders: Sequence[int] = (),
    signs: bool = False,
    signs_after: bool = False,
    swapped: bool = False,
    transposed: bool = False,
    numerics: str = "accurate",
    batch_invariant: bool = False,
    inplace: bool = False,
    before: str = "",
    to: str = "",
    group: int = 0,
    rule: str = "",
    layout: str = "",
    round_first: bool = False,
) -> str:
    """The text of a `Spec` of these fields. torch.compile traces this function, and no `Spec`."""
    words = [f"n={index(n)}"] if n else []  # where PyTorch compiles, a size without a value gets one
    if orders:
        words.append("orders=" + ",".join([str(order) for order in orders]))
    flags = ("signs", signs), ("signs_after", signs_after), ("swapped", swapped), ("transposed", transposed)
    words += [name for name, flag in flags if flag]
    if numerics != "accurate":
        words.append(f"numerics={numerics}")
    words += [name for name, flag in (("batch_invariant", batch_invariant), ("inplace", inplace)) if flag]
    if before:
        words.append(f"before={before}")
    if to:
        words += [f"to={to}", f"group={group}", f"rule={rule}", f"layout={layout}"]
    if round_first:
        words.append("round_first")
    return " ".join(words)


def transposed(text: str) -> str:
    """The text of the transposed map of a linear call. torch.compile traces this function too."""
    words = text.split()
    if "transposed" in words:
        words.remove("transposed")
        return " ".join(words)
    rotation = [word for word in words if word.split("=")[0] in _ROTATION]
    if [word for word in rotation if not word.startswith("n=")]:  # else it is H alone, which is symmetric
        words = [*rotation, "transposed", *words[len(rotation) :]]
    return " ".join(words)


_ROTATION = "n", "orders", "signs", "signs_after", "swapped"
