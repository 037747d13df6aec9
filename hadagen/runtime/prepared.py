"""`prepare`: a call whose arguments are checked once, for those who make it often."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.autograd import forward_ad

from hadagen.errors import UsageError, shown
from hadagen.problem.choices import FormatName, LayoutName, NumericsName, RuleName
from hadagen.problem.formats import TENSOR, Format
from hadagen.problem.problem import check_no_format
from hadagen.problem.prologues import Prologue, text_of_value
from hadagen.runtime.arguments import as_int
from hadagen.runtime.best import BestConfig, best_config
from hadagen.runtime.call.entry import rotate
from hadagen.runtime.call.outputs import empty_results
from hadagen.runtime.call.rules import Linear
from hadagen.runtime.call.runs import has_only_memory, is_plain, known
from hadagen.runtime.checks import check_is_flag, check_options
from hadagen.runtime.choose.entries import BATCH_INVARIANT
from hadagen.runtime.operands.call import key_of, result_like
from hadagen.runtime.operands.packed import structure_of
from hadagen.runtime.operands.spec import text_of
from hadagen.runtime.quantize import check_values, factors, fields_of, rotate_quantize
from hadagen.runtime.quantized import Quantized
from hadagen.runtime.rotation import Rotation
from hadagen.runtime.warmup import warmup
from hadagen.truth import quantizer


def prepare(
    rotation: Rotation | int | None = None,
    *,
    to: FormatName | None = None,
    scale: float | None = None,
    group: int | None = None,
    rule: RuleName | None = None,
    layout: LayoutName = "row-major",
    round_first: bool = False,
    numerics: NumericsName = "accurate",
    batch_invariant: bool | None = None,
    before: Prologue | None = None,
) -> Prepared:
    """A function of x that rotates and quantizes as `hadagen.rotate_quantize` does with these arguments; without `to`
    it returns the rotated rows, of x's type, as `hadagen.Rotation` does. Its calls have less to check.

    rotation, to, scale, group, rule, layout, round_first, numerics, batch_invariant, before: as for
        `hadagen.rotate_quantize`. A `Rotation` is not copied: the function follows it where it is moved or loaded.

    Returns a function p, which can be stored with pickle, copied and compiled:
        p(x, tensor_scale=None, out=None): the result, a tensor or a `Quantized`. Without `to`, out may be x.
        p.out_like(x): memory for out=.
        p.warmup(dtype), p.best(dtype, rows=…): `hadagen.warmup` and `hadagen.best_config` of its calls.
        p.rotation, p.format, p.dtype: the rotation; the format, or None; the type of the codes, or None.

    Raises TypeError for an argument of a wrong type, and `UsageError` for one that is not possible.
    """
    if to is None:
        check_no_format(None, group, rule, layout, bool(round_first))
    form = None if to is None else Format.choose(to, as_int(group), rule, layout)
    if batch_invariant is None:
        batch_invariant = BATCH_INVARIANT
    check_is_flag(round_first, "round_first")
    check_is_flag(batch_invariant, "batch_invariant")
    check_options(1.0 if scale is None else scale, numerics, torch.float32)
    prologue = text_of_value(before)
    if not isinstance(rotation, Rotation):
        n = 1 if rotation is None else as_int(rotation)
        if isinstance(n, bool) or not isinstance(n, int):
            raise TypeError(f"rotation is a {type(rotation).__name__}; pass a Rotation, a power of two, or None")
        if n < 1 or n & (n - 1):
            raise UsageError(f"rotation = {shown(n)} is no power of two; choose one, or pass a Rotation")
        if n == 1 and form is None and not prologue:
            raise UsageError("nothing is asked for; pass a rotation, or a format as to=")
        rotation = n
    options = {"group": as_int(group), "rule": rule, "layout": layout, "round_first": bool(round_first)}
    asked = {"numerics": numerics, "batch_invariant": bool(batch_invariant), "before": before}
    return Prepared(rotation, form, None if scale is None else float(scale), {"to": to, **options, **asked})


class Prepared:
    """What `prepare` returns.

    p(x): the rotated rows, or codes and scales as a `Quantized`.
    p.out_like(x): memory for out=.
    p.warmup(dtype), p.best(dtype, rows=…): `hadagen.warmup` and `hadagen.best_config` of its calls.

    rotation: the `Rotation`, or a power of two, 1 for no rotation. format: the format of the result; None for x's type.
    dtype: the type of the codes, or None for x's type.

    It can be stored with pickle and copied, and torch.compile looks into it.
    """

    def __init__(self, rotation: Rotation | int, form: Format | None, scale: float | None, asked: Any) -> None:
        self.rotation, self.format, self._scale = rotation, form, scale
        self._asked: dict[str, Any] = asked
        self._width = 1 if asked["before"] is None else asked["before"].width
        # Of the last call: its key, and the operands of its Rotation.
        self._key = 0
        self._made: Any = None
        self._columns = 0  # of x

    @property
    def dtype(self) -> torch.dtype | None:
        return None if self.format is None else quantizer.types(self.format, torch.float32)[0]

    def __call__(self, x: torch.Tensor, *, tensor_scale: torch.Tensor | float | None = None, out: Any = None) -> Any:
        """The rotated rows, or codes and scales.

        x, tensor_scale, out: as for `hadagen.rotate_quantize`; without a format, out is a tensor like the result, and
        may be x. Raises what that function raises.
        """
        if out is None and tensor_scale is None and is_plain(x):
            run = known(x, self._key)
            if (
                run is not None
                and not (x.requires_grad and torch.is_grad_enabled())
                and forward_ad._current_level < 0
                and (self._made is None or self._fits(x))
            ):
                results = run.new(x)
                return results if self.format is None else Quantized(results[0], results[1], self.format)
        asked = self._asked
        made: Any
        if self.format is not None:
            made = rotate_quantize(x, self.rotation, scale=self._scale, tensor_scale=tensor_scale, out=out, **asked)
        elif tensor_scale is not None:
            raise UsageError("rotated rows have no tensor_scale; leave it out")
        else:
            made = self._rotated(x, out, asked["numerics"], asked["batch_invariant"], asked["before"])
        if has_only_memory(x) and (self.format is None or not self.format.needs_scale):
            self._remember(x)
        return made

    def _fits(self, x: torch.Tensor) -> bool:
        """Whether rows of x are as the Rotation takes them, and its operands are those of the last call."""
        made, rotation = self._made, cast(Rotation, self.rotation)
        is_same = rotation._made is made and x.shape[-1] == self._columns
        return is_same and (not made.watched or made.is_whole(rotation._buffers))

    def _remember(self, x: torch.Tensor) -> None:
        """Let the next call find what this one did."""
        asked, form = self._asked, self.format
        of = factors(self.rotation, result_like(x, self._width), self._scale, asked["before"])
        words = asked["numerics"], asked["batch_invariant"], False, text_of_value(asked["before"])
        text = text_of(*structure_of(of), *words, *((*fields_of(form), asked["round_first"]) if form else ()))
        self._key = key_of(text, of.scale, of.matrices, of.signs, of.signs_after)
        if isinstance(self.rotation, Rotation):
            self._made, self._columns = self.rotation._made, self._width * self.rotation.n

    def _rotated(
        self, x: Any, out: torch.Tensor | None, numerics: str, batch_invariant: bool, before: Prologue | None
    ) -> torch.Tensor:
        rotation = self.rotation
        if isinstance(rotation, Rotation):
            return rotation._run(x, False, out, numerics, batch_invariant, False, before, self._scale)
        scale, words = rotation**-0.5 if self._scale is None else self._scale, text_of_value(before)
        text = text_of(rotation, numerics=numerics, batch_invariant=batch_invariant, before=words)
        return rotate(x, lambda _: Linear(None, None, None, scale, text), unit=rotation, before=before, out=out)

    def out_like(self, x: torch.Tensor) -> Any:
        """Memory for the result for x, as out= takes it: a tensor, or codes and scales; scales are None if the call has
        one scale. It holds any values."""
        rows = x if self._asked["before"] is None else result_like(x, self._width)
        if self.format is None:
            return torch.empty_like(rows, memory_format=torch.contiguous_format)
        check_values(x)
        codes, scales = empty_results(rows, self.format)
        return codes, None if self.format.group == TENSOR else scales

    def warmup(self, dtype: Any, **options: Any) -> int:
        """`hadagen.warmup` of these calls. options: rows, device, columns and strict."""
        return warmup(self.rotation, dtype, **self._asked, **options)

    def best(self, dtype: Any, **options: Any) -> BestConfig:
        """`hadagen.best_config` of one of these calls. options: rows, device, arch, columns and inplace."""
        return best_config(self.rotation, dtype, **self._asked, **options)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_key": 0, "_made": None}

    def __repr__(self) -> str:
        said = {"to": self._asked["to"], "scale": self._scale, "before": self._asked["before"]}
        words = [f"{name}={value!r}" for name, value in said.items() if value is not None]
        return f"prepare({', '.join([repr(self.rotation), *words])})"
