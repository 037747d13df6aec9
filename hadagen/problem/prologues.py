"""Prologues: changes of the values of rows before signs and transform, in the same kernel.

`Prologue` is what a program may derive from. `Activated` has what engines run before the second product of an MLP: an
activation, usually of one half of x, times the other half. The public values are in `hadagen.prologues`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from hadagen.errors import UsageError, choice, shown
from hadagen.problem.formats import ROW
from hadagen.problem.launch import Param
from hadagen.problem.operand import Operand
from hadagen.problem.problem import Problem

if TYPE_CHECKING:
    import torch


class Prologue:
    """A change of the values of rows before signs and transform, in the same kernel.

    name: a name for keys of problems, of lower-case letters, digits and underscores, that begins with a letter.
    operands: its operands besides x. Operands that it writes are like x.
    width: the number of elements of x for each element of its result.
    is_halved: whether a row of x has the first of these for all elements, then the second. Else they are neighbors.
    is_rounded: whether its result has numbers of x's type only.
    text: the text from which `parsed` makes it again, the name and numbers that are no part of it; "" for the name.
    """

    name: str
    operands: tuple[Operand, ...] = ()
    width: int = 1
    is_halved: bool = False
    is_rounded: bool = False
    text: str = ""

    def step(self) -> Any:
        """The step that computes it, a `hadagen.plan.steps.base.Step` with `is_prologue`."""
        raise NotImplementedError

    def results(
        self, x: torch.Tensor, values: Mapping[str, torch.Tensor], dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """Its formula in PyTorch. Returns "x", the values to transform, and the operands that it writes, by name.

        x: float32 or float64 [rows, n], or [width, rows, n] if the width is not 1. values: the operands that it reads,
        by name, of x's type: like x, or [n]. All are numbers that `dtype` holds, as x and y have it in memory;
        `rounded` rounds to it. The function must be differentiable in all of them.
        """
        raise NotImplementedError

    def parts(self, x: torch.Tensor) -> torch.Tensor:
        """The parts that `results` takes, of x as it lies in memory, [..., width · m]: [width, ..., m], or x itself if
        the width is 1."""
        if self.width == 1:
            return x
        m = x.shape[-1] // self.width
        if self.is_halved:
            return x.reshape(*x.shape[:-1], self.width, m).movedim(-2, 0)
        return x.reshape(*x.shape[:-1], m, self.width).movedim(-1, 0)

    def joined(self, parts: torch.Tensor) -> torch.Tensor:
        """x as it lies in memory, contiguous, of its parts: the inverse of `parts`."""
        if self.width == 1:
            return parts
        return parts.movedim(0, -2 if self.is_halved else -1).flatten(-2).contiguous()

    def in_rows(self, parts: torch.Tensor, columns: int, filled_with: float) -> torch.Tensor:
        """x as it lies in memory, of its parts [width, elements], for results in rows of `columns` elements. The value
        `filled_with` fills up the last row."""
        import torch

        filled = torch.nn.functional.pad(parts, (0, -parts.shape[1] % columns), value=filled_with)
        return self.joined(filled.view(self.width, -1, columns))

    def takes_rows(self, problem: Problem) -> bool:
        """Whether its kernels take the number of units in a row. If not, a row of its result is one unit."""
        return any(param.name == "units_in_row" for param in self.params(problem))

    def params(self, problem: Problem) -> tuple[Param, ...]:
        """Params of its kernels for a problem, besides those of its operands: numbers of the kind u32."""
        return ()

    def numbers(self, units_in_row: int) -> dict[str, int]:
        """The values of `params` by name. units_in_row: how many times `Problem.unit` elements a row of its result
        has, which is 1 if a row has one scale."""
        return {}

    @property
    def read(self) -> list[str]:
        """The names of the operands that it reads, in order."""
        return [each.name for each in self.operands if not each.is_written]

    @property
    def written(self) -> list[str]:
        """The names of the operands that it writes, in order."""
        return [each.name for each in self.operands if each.is_written]


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers of a type that are nearest to values, in the type of the values."""
    return values.to(dtype).to(values.dtype)


# ---- how an activation is computed -----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Arithmetic:
    """How an activation and a product are computed in float32, down to the last bit. No operation is contracted with
    another one, except for the fma in the cubic of GELU.

    rounds: the values that are rounded to x's type: "nothing", "product", or "activation and product". "activation and
        product" also rounds clamped inputs.
    exp: "expf", with an error of 1 ulp, or "__expf", with 2 ulp and more for arguments far from 0.
    divide: "/", rounded correctly, "__fdividef", with 2 ulp, or "div.full.f32" of PTX, with 2 ulp for all divisors.
        "__expf" and "__fdividef" are as `nvcc -use_fast_math` has them: subnormal numbers are zeros.
    sigmoid: whether x · sigmoid(x) is x · (1 / (1 + e)) or x / (1 + e), with e = exp(−x).
    tanh: "tanhf", or "tanh.approx.f32" of PTX, with a relative error of 2^-11.
    """

    rounds: str = "nothing"
    exp: str = "__expf"
    divide: str = "__fdividef"
    sigmoid: bool = False
    tanh: str = "tanhf"

    def __post_init__(self) -> None:
        for name, words in _WORDS.items():
            value, kind = getattr(self, name), bool if name == "sigmoid" else str
            if not isinstance(value, kind) or value not in words:
                known = list(words) if name != "sigmoid" else ["True", "False"]
                raise UsageError(f"{name} = {shown(value)} is not supported; {choice(value, known)}")

    def suffix(self, fields: Iterable[str]) -> str:
        """Some of its fields in the name of a prologue; "" if they have their defaults."""
        words = (_WORDS[name][getattr(self, name)] for name in fields)
        return "".join(f"_{word}" for word in words if word)


# Field → value → the word for it in names of prologues, "" for the default. `choice` needs texts.
_WORDS: dict[str, dict[Any, str]] = {
    "rounds": {"nothing": "", "product": "rounded", "activation and product": "rounded_twice"},
    "exp": {"__expf": "", "expf": "expf"},
    "divide": {"__fdividef": "", "/": "div", "div.full.f32": "fulldiv"},
    "sigmoid": {False: "", True: "sigmoid"},
    "tanh": {"tanhf": "", "tanh.approx.f32": "fasttanh"},
}

# Name of an arithmetic → the arithmetic. "exact" rounds nothing before the result. The others give the bits of an
# engine's own functions.
#
# "eager": aten/src/ATen/native/cuda/ActivationSiluKernel.cu and ActivationGeluKernel.cu of PyTorch, then mul. "vllm":
#     csrc/activation_kernels.cu, whose activation returns x's type. Both are compiled without fast math.
# "sglang": act_and_mul_kernel in include/flashinfer/activation.cuh with the functors of flashinfer/jit/activation.py,
#     whose __expf and math::tanh are explicit, and which flashinfer/jit/core.py compiles with -use_fast_math, so that
#     "/" is __fdividef. sgl-kernel calls the same kernel with expf, "/" and tanhf, which -use_fast_math makes the same,
#     in its library for GPUs before sm100; its library for sm100 is compiled without (sgl-kernel/CMakeLists.txt).
# "inductor": the decomposition of silu in torch/_inductor/decomposition.py of PyTorch 2.13, x / (1 + exp(−x)), with
#     libdevice.exp; Triton's "/" is div.full.f32. Earlier releases, such as 2.8, have x · tl.sigmoid(x), where tl.exp
#     is ex2.approx.f32 of a product: Arithmetic("product", "__expf", "div.full.f32", sigmoid=True).
ARITHMETIC = {
    "exact": Arithmetic(),
    "eager": Arithmetic("activation and product", "expf", "/"),
    "vllm": Arithmetic("activation and product", "expf", "/"),
    "sglang": Arithmetic("product", "__expf", "__fdividef", tanh="tanh.approx.f32"),
    "inductor": Arithmetic("product", "expf", "div.full.f32"),
}


# ---- activations -----------------------------------------------------------------------------------------------------
def _silu(g: torch.Tensor, alpha: float, how: Arithmetic) -> torch.Tensor:
    import torch

    inner = g * alpha if alpha != 1.0 else g
    e = torch.exp(-inner)
    value = g * (1 / (1 + e)) if how.sigmoid else g / (1 + e)
    if not torch.is_grad_enabled() and torch.autograd.forward_ad._current_level < 0:
        return value
    # The derivative of this formula is NaN where e is infinite, so the result has the derivative of another formula.
    smooth = g * torch.sigmoid(inner)
    return value.detach() - (smooth.detach() - smooth).nan_to_num(0.0)  # x − 0 is x, of −0 too


def _gelu(x: torch.Tensor, alpha: float, how: Arithmetic) -> torch.Tensor:
    import torch

    return x * 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))


def _gelu_tanh(x: torch.Tensor, alpha: float, how: Arithmetic) -> torch.Tensor:
    import torch

    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def _gelu_quick(x: torch.Tensor, alpha: float, how: Arithmetic) -> torch.Tensor:
    return _silu(x, QUICK, how)


def _relu2(x: torch.Tensor, alpha: float, how: Arithmetic) -> torch.Tensor:
    positive = x.clamp(min=0)
    return positive * positive


def _same(x: torch.Tensor, alpha: float, how: Arithmetic) -> torch.Tensor:
    return x


# Activation → the fields of `Arithmetic` that matter to it, besides `rounds`.
_USES = dict.fromkeys(("silu", "gelu_quick"), ("exp", "divide", "sigmoid")) | {"gelu_tanh": ("tanh",)}
QUICK = 1.702  # of GELU by a sigmoid, x · sigmoid(1.702 x)
ACTIVATIONS: dict[str, Callable[[torch.Tensor, float, Arithmetic], torch.Tensor]] = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "gelu_quick": _gelu_quick,
    "relu2": _relu2,
    "": _same,
}
LAYOUTS = "halves", "interleaved"
NUMBERS = "limit", "alpha", "beta"  # of what is clamped, in their order in texts
_UNCLAMPED = math.inf, 1.0, 0.0  # what they are where nothing is clamped
_WRITTEN = {"silu": "Silu", "gelu": "Gelu", "relu2": "Relu2", "": ""}  # in the names of functions


@dataclass(frozen=True, repr=False)
class Activated(Prologue):
    """act(g), or act(g) · u if it `multiplies`. Then a row of x has the elements of g and u: first all of g and then
    all of u, if the layout is "halves", or g0 u0 g1 u1 … if it is "interleaved".

    If it is `clamped`, act is SiLU and the result is g · sigmoid(alpha · g) · (u + beta), with g clamped to at most
    `limit` and u to ±limit. These three numbers are params of the kernel; they belong to a call, not to the name.

    Raises `UsageError` for other values.
    """

    activation: str
    multiplies: bool = True
    layout: str = "halves"
    clamped: bool = False
    arithmetic: Arithmetic = ARITHMETIC["exact"]
    limit: float = math.inf
    alpha: float = 1.0
    beta: float = 0.0

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS or (not self.activation and not self.multiplies):
            raise UsageError(
                f"activation {shown(self.activation)} is not known; {choice(self.activation, ACTIVATIONS)}"
            )
        if self.layout not in LAYOUTS:
            raise UsageError(f"layout {shown(self.layout)} is not known; {choice(self.layout, LAYOUTS)}")
        if self.clamped and (self.activation != "silu" or not self.multiplies):
            raise UsageError("only SiLU times the other half of x is clamped")
        words = [self.activation] * bool(self.activation) + ["mul"] * self.multiplies
        words += ["interleaved"] * (self.layout == "interleaved" and self.multiplies) + ["clamped"] * self.clamped
        name = "_".join(words) + self.arithmetic.suffix(("rounds", *_USES.get(self.activation, ())))
        numbers = [getattr(self, each) for each in NUMBERS] if self.clamped else []
        # Not properties, because every call asks for the text, and because Dynamo takes attributes of an object only.
        made: dict[str, Any] = {
            "name": name,
            "text": ":".join([name, *map(repr, numbers)]),
            "operands": (),
            "width": 2 if self.multiplies else 1,
            "is_rounded": self.arithmetic.rounds in _ROUNDING,
        }
        for attribute, value in made.items():
            object.__setattr__(self, attribute, value)

    def __repr__(self) -> str:
        """The call of a function of `hadagen.prologues` that makes it."""
        word, _, approximation = self.activation.partition("_")
        numbers = zip(NUMBERS, _UNCLAMPED, strict=True)
        given: dict[str, Any] = {each: getattr(self, each) for each, usual in numbers if getattr(self, each) != usual}
        given |= {"approximate": approximation} if approximation else {}
        given |= {"layout": self.layout} if self.multiplies and not self.is_halved else {}
        alike = (name for name, each in ARITHMETIC.items() if canonical(replace(self, arithmetic=each)) == self)
        how: Any = next(alike, self.arithmetic)
        given |= {} if how == "exact" else {"numerics": how}
        called = f"{_WRITTEN[word]}{'Mul' if self.multiplies else ''}"
        return f"{called}({', '.join(f'{name}={value!r}' for name, value in given.items())})"

    @property
    def added(self) -> float:
        """beta, or −0 if it is 0: the sum of −0 and 0 is 0, but the sum of −0 and −0 is −0."""
        return self.beta or -0.0

    @property
    def is_halved(self) -> bool:  # type: ignore[override]
        """Whether a row of x has all of g first."""
        return self.multiplies and self.layout == "halves"

    def params(self, problem: Problem) -> tuple[Param, ...]:
        whole = problem.io.form is not None and problem.io.form.groups == (ROW,)
        names = _NUMBERS_OF_ROWS * (self.is_halved and not whole) + [*NUMBERS] * self.clamped
        return tuple(Param("u32", name) for name in names)

    def numbers(self, units_in_row: int) -> dict[str, int]:
        of_rows = dict(zip(_NUMBERS_OF_ROWS, (units_in_row, *reciprocal(units_in_row)), strict=True))
        return of_rows | {"limit": _word(self.limit), "alpha": _word(self.alpha), "beta": _word(self.added)}

    def results(
        self, x: torch.Tensor, values: Mapping[str, torch.Tensor], dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        how = self.arithmetic

        def round_if(value: torch.Tensor, *kinds: str) -> torch.Tensor:
            return rounded(value, dtype) if how.rounds in kinds else value

        if not self.multiplies:
            return {"x": round_if(ACTIVATIONS[self.activation](x, 1.0, how), *_ROUNDING)}
        g, u = x
        if self.clamped:
            g = round_if(g.clamp(max=self.limit), _TWICE)
            u = round_if(u.clamp(-self.limit, self.limit), _TWICE)
            u = u + self.added
        active = round_if(ACTIVATIONS[self.activation](g, self.alpha, how), _TWICE)
        return {"x": round_if(active * u, *_ROUNDING)}


_TWICE = "activation and product"
_ROUNDING = "product", _TWICE


def canonical(of: Activated) -> Activated:
    """The same value, without what makes no difference: fields of the arithmetic that the activation does not use, and
    a rounding of values that are of the type."""
    how, known = of.arithmetic, Arithmetic()
    uses = _USES.get(of.activation, ())
    fields = {each: getattr(how if each in uses else known, each) for each in _WORDS}
    is_once = how.rounds == _TWICE and not (of.activation and of.multiplies)
    return replace(of, arithmetic=Arithmetic(**fields | {"rounds": "product" if is_once else how.rounds}))


_NUMBERS_OF_ROWS = ["units_in_row", "row_reciprocal", "row_shift"]


def reciprocal(divisor: int) -> tuple[int, int]:
    """m < 2^32 and s, such that floor(a / divisor) = (2 a · m / 2^32) >> s for all a < 2^31, with both quotients
    rounded down (Granlund and Montgomery, "Division by Invariant Integers using Multiplication", 1994). divisor: from
    1 to 2^31."""
    shift = (divisor - 1).bit_length()
    return -(-(1 << 31 + shift) // divisor), shift


def _word(value: float) -> int:
    """The bits of a float32."""
    return int.from_bytes(struct.pack("<f", value), "little")


# ---- by name ---------------------------------------------------------------------------------------------------------
# Name → prologue. A program may add its own.
PROLOGUES: dict[str, Prologue] = {}
# `limit`, `alpha` and `beta` that clamped kernels are verified with: most normal values are within the limit.
SAMPLE = 1.5, QUICK, 1.0


@cache
def _activated() -> dict[str, Activated]:
    """Name → the prologue with that name, for all that there are."""
    found: dict[str, Activated] = {}
    ways = [
        Arithmetic(rounds, exp, divide, sigmoid, tanh)
        for rounds in _WORDS["rounds"]
        for exp in _WORDS["exp"]
        for divide in _WORDS["divide"]
        for sigmoid in _WORDS["sigmoid"]
        for tanh in _WORDS["tanh"]
    ]
    for how in ways:
        for activation in ACTIVATIONS:
            for each in (
                *([Activated(activation, False, arithmetic=how)] if activation else ()),
                *(Activated(activation, layout=layout, arithmetic=how) for layout in LAYOUTS),
            ):
                found.setdefault(each.name, each)
        for layout in LAYOUTS:
            each = Activated("silu", True, layout, True, how, *SAMPLE)
            found.setdefault(each.name, each)
    return found


def prologue_of(problem: Problem) -> Prologue | None:
    """The prologue of a problem; None if it has none. Raises `UsageError` for one that is not known."""
    return named(problem.prologue) if problem.prologue else None


def named(name: str) -> Prologue:
    """The prologue of a name. Numbers that are no part of a name have values to verify kernels with. Raises
    `UsageError` for a name that is not known."""
    check_prologue(name)
    return PROLOGUES.get(name) or _activated()[name]


def parsed(text: str) -> Prologue:
    """The prologue of a `Prologue.text`. Raises `UsageError` for any other text."""
    name, *numbers = text.split(":")
    prologue = named(name)
    wanted = len(NUMBERS) if isinstance(prologue, Activated) and prologue.clamped else 0
    try:
        values = [float(each) for each in numbers]
    except ValueError:
        values = []
    if len(numbers) != wanted or len(values) != wanted:
        said = f"{name} and {', '.join(NUMBERS)}, such as {name}:7.0:1.702:1.0" if wanted else f"{name} alone"
        raise UsageError(f"prologue {shown(text)} is not known; write {said}")
    return replace(prologue, **dict(zip(NUMBERS, values, strict=True))) if wanted else prologue  # type: ignore[type-var]


def name_of(before: Any) -> str:
    """The name of a prologue that a program gives by itself or by its name; "" for None. Raises `UsageError` for
    anything else."""
    name = "" if before is None else before.name if isinstance(before, Prologue) else before
    check_prologue(name)
    return str(name)


def text_of_value(before: Any) -> str:
    """The text of a value of `before=`; "" for None. Raises TypeError, and `UsageError` for a prologue with tensors of
    its own, which the public functions do not take."""
    if before is None:
        return ""
    if not isinstance(before, Prologue):
        raise TypeError(
            f"before is a {type(before).__name__}; pass a value of hadagen.prologues, such as "
            "hadagen.prologues.SiluMul(), or None"
        )
    if before.operands:
        names = ", ".join(each.name for each in before.operands)
        raise UsageError(f"before = {before.name} has tensors of its own, {names}, which this call does not take")
    return before.text or before.name


def check_prologue(name: Any) -> None:
    """Raises `UsageError` for a name that is neither that of a prologue nor "", which means no prologue."""
    if not isinstance(name, str) or (name and name not in PROLOGUES and name not in _activated()):
        common = [each for each, prologue in _activated().items() if prologue.arithmetic == ARITHMETIC["exact"]]
        raise UsageError(f"prologue {shown(name)} is not known; {choice(name, [*PROLOGUES, *common])}")


def width_of(problem: Problem) -> int:
    """The elements of x for each element that a kernel transforms."""
    prologue = prologue_of(problem)
    return prologue.width if prologue else 1
