"""`Problem`: what is computed. No hardware and no choice of the search is in it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from hadagen.errors import UsageError

MAX_LOG2_N = 17


class DType(str, Enum):
    """Element type of input and output."""

    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"

    @property
    def bytes(self) -> int:
        return 4 if self is DType.FLOAT32 else 2


class Numerics(str, Enum):
    """`accurate` rounds to the type once, at the store; `fast` may round between steps, no more often than HadaCore.
    float32 has only `accurate`."""

    ACCURATE = "accurate"
    FAST = "fast"


# Largest ‖out − ref‖ / ‖ref‖ against float64 that a kernel may show and still be used: of `accurate` ones at every n,
ACCURATE_BOUND = {DType.FLOAT16: 2.2e-4, DType.BFLOAT16: 1.8e-3, DType.FLOAT32: 3e-7}
# and of `fast` ones HadaCore's at the same n, so that they are nowhere less accurate than the fast kernels in use; here
# for n = 2, 4, 8 … 32768 as measured on an H100 over 4 M normal elements. They show how often it rounds: once up to
# n = 16, twice up to 256, three times up to 4096, four times beyond. It has no longer rows; ours round no more often.
HADACORE_ERROR = {
    DType.FLOAT16: [1e-6 * e for e in (234, 212, 233, 208, 313, 297, 313, 294, 375, 362, 375, 360, 429, 418, 429)],
    DType.BFLOAT16: [1e-5 * e for e in (166, 169, 166, 166, 235, 238, 235, 235, 288, 290, 288, 288, 333, 334, 332)],
}
# The error of one rounding of normal values, which do not fill their range evenly.
ROUNDING_ERROR = {DType.FLOAT16: 2.08e-4, DType.BFLOAT16: 1.66e-3}
# By so much more a sample may err that is as small as those that kernels are verified with.
_SAMPLED = 1.03


@dataclass(frozen=True, order=True)
class Problem:
    """y = (x · H_n) · scale over the last dimension of a contiguous [rows, n] array.

    `pitched`: rows have any number of elements up to n, count as zeros beyond it, and lie any number of elements apart.
    For float32 `fast` means `accurate`.

    Raises `UsageError` where n is not a power of two from 2 to 131072, or dtype or numerics is unknown.
    """

    n: int
    dtype: DType
    numerics: Numerics = Numerics.ACCURATE
    pitched: bool = False

    def __post_init__(self) -> None:
        if (
            isinstance(self.n, bool)
            or not isinstance(self.n, int)
            or not (2 <= self.n <= 1 << MAX_LOG2_N)
            or self.n & (self.n - 1)
        ):
            raise UsageError(f"n = {self.n!r} is not supported; n must be a power of two from 2 to {1 << MAX_LOG2_N}")
        if not isinstance(self.pitched, bool):
            raise UsageError(f"pitched = {self.pitched!r} is not supported; choose True or False")
        object.__setattr__(self, "dtype", _member(DType, self.dtype, "dtype"))
        numerics = _member(Numerics, self.numerics, "numerics")
        object.__setattr__(self, "numerics", Numerics.ACCURATE if self.dtype is DType.FLOAT32 else numerics)

    @property
    def log2_n(self) -> int:
        return self.n.bit_length() - 1

    @property
    def error_bound(self) -> float:
        """Largest ‖out − ref‖ / ‖ref‖ against float64, on any class of input, with which a kernel may be used."""
        if self.numerics is Numerics.ACCURATE:
            return ACCURATE_BOUND[self.dtype]
        return _SAMPLED * self._hadacore_error

    @property
    def roundings(self) -> float:
        """How many roundings of 16-bit values may add up, independent as they are: by their squares."""
        if self.dtype is DType.FLOAT32:
            return 0.0
        if self.numerics is Numerics.ACCURATE:
            return (ACCURATE_BOUND[self.dtype] / ROUNDING_ERROR[self.dtype]) ** 2
        return (self._hadacore_error / ROUNDING_ERROR[self.dtype]) ** 2

    @property
    def _hadacore_error(self) -> float:
        errors = HADACORE_ERROR[self.dtype]
        return errors[min(self.log2_n, len(errors)) - 1]

    @property
    def name(self) -> str:
        return f"n{self.n}-{self.dtype.value}-{self.numerics.value}" + ("-pitched" if self.pitched else "")

    def to_dict(self) -> dict[str, Any]:
        return {
            "n": self.n,
            "dtype": self.dtype.value,
            "numerics": self.numerics.value,
            "pitched": self.pitched,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Problem:
        return cls(values["n"], values["dtype"], values["numerics"], values["pitched"])


def padded_length(columns: int) -> int:
    """The least power of two that is no less than `columns`, which is at least 1: what such rows are padded to."""
    return 1 << (columns - 1).bit_length()


def _member(kind: type[Enum], value: Any, what: str) -> Any:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(str(member.value) for member in kind)
        raise UsageError(f"{what} {value!r} is not supported; choose one of {known}") from None
