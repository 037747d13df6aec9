"""The operands of hadagen's kernels, and lists of those of a problem. All that handles operands is a loop over
`operands_of`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from hadagen.problem.formats import TENSOR, Format, Layout
from hadagen.problem.launch import PARAMS, ROW_PARAMS, Param
from hadagen.problem.operand import Operand
from hadagen.problem.problem import DType, Problem, Rows
from hadagen.problem.prologues import prologue_of

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

# Name of an operand → its values: "matrix", its entries [order, order], float64 if real; "right_matrix", those of
# C [length, length], float64; "signs_before" and "signs_after", as the params of these names; "tensor_scale", float32
# with an element for each head, or one. A name without a value means no signs.
OperandValues = Mapping[str, "NDArray[Any]"]


# ---- the matrix ------------------------------------------------------------------------------------------------------
# A byte for each entry, 0 for 0, `ENTRY_BYTES` for −1 and 1, in the order in which they are operands of mma.m16n8k16.
# The matrix is filled up with zeros to a multiple of 16 rows and columns. Of each 16×16 part of it, row by row of
# parts, come the eight entries of lane 0, 1, … 31, two for each word ("Matrix fragments for mma.m16n8k16", A, in the
# PTX ISA).
ENTRY_BYTES = {-1: 0xBC, 1: 0x3C}
# Shifted left by 8, the byte is ±1 times a power of two.
ENTRY_FACTOR = {DType.FLOAT16: 1.0, DType.BFLOAT16: 2.0**-7}


def pack_matrix(matrix: torch.Tensor) -> torch.Tensor:
    """The bytes that a kernel takes for a matrix [K, K] of −1, 0 and 1, uint8 [side²] on its device, with side the
    order up to a multiple of 16."""
    import torch

    return _fragments((matrix > 0).to(torch.uint8) * ENTRY_BYTES[1] + (matrix < 0).to(torch.uint8) * ENTRY_BYTES[-1])


def _fragments(entries: torch.Tensor) -> torch.Tensor:
    """Entries [K, K] in the order of operands, [side²]."""
    import torch

    fill = -len(entries) % 16
    padded = torch.nn.functional.pad(entries, (0, fill, 0, fill))
    count = len(padded) // 16
    # Row 16 i + 8 a + g and column 16 j + 8 b + 2 t + c → part (i, j), lane 4 g + t, word 2 b + a, half c.
    return padded.view(count, 2, 8, count, 2, 4, 2).permute(0, 3, 2, 5, 4, 1, 6).flatten()


# A real matrix has `PIECES` such tables of 16-bit numbers of x's type, one behind the other: its entries rounded, and
# what the rounding left, rounded. So an entry keeps 16 significant bits of bfloat16, and 22 of float16. Kernels for
# float16 divide by the factor `1 << LIFT`, with which fewer numbers are subnormal. No entry overflows if the mean
# square of the norms of up to `MAX_REAL_ORDER` rows is below 16.
PIECES = 2
LIFT = {DType.FLOAT16: 10, DType.BFLOAT16: 0}


def pack_real(matrix: torch.Tensor, dtype: DType) -> torch.Tensor:
    """The bytes that a kernel for x of a 16-bit type takes for a matrix [K, K] of real numbers, uint8 [4 · side²] on
    its device."""
    import torch

    left, pieces = matrix.double() * float(1 << LIFT[dtype]), []
    for _ in range(PIECES):
        pieces.append(left.to(getattr(torch, dtype.value)))
        left = left - pieces[-1].double()
    return torch.cat([_fragments(piece.view(torch.int16)) for piece in pieces]).view(torch.uint8)


def _packed_matrix(problem: Problem, matrix: NDArray[Any]) -> NDArray[Any]:
    import torch

    values = torch.from_numpy(matrix.copy())
    return (pack_real(values, problem.io.input) if problem.transform.real else pack_matrix(values)).numpy()


def _random_matrix(problem: Problem, units: int, random: np.random.Generator) -> NDArray[Any]:
    """A matrix with few zeros. Its rows are no more orthogonal than random rows, and it is not symmetric, so that the
    transposed matrix gives another result. A real one has normal entries."""
    if problem.transform.real:
        return random.standard_normal((problem.order, problem.order))
    return random.choice((-1, 0, 1), (problem.order, problem.order), p=(0.48, 0.04, 0.48))


# ---- the second of two matrices --------------------------------------------------------------------------------------
# C has `PIECES` tables of bfloat16, whatever the type of x, because products with A have the range of fp32. The bytes
# of a left operand of 16 rows of C are those of two right operands, of its transpose. The rows of C, which are columns
# of the result, are in such an order that a thread gets eight neighbors.
def pack_right(matrix: torch.Tensor) -> torch.Tensor:
    """The bytes that a kernel takes for C, a matrix [M, M] of real numbers, uint8 [4 · M²] on its device."""
    return pack_real(matrix[rows_of_right(len(matrix))], DType.BFLOAT16)


def rows_of_right(order: int) -> torch.Tensor:
    """The rows of C in the order of operands. An mma leaves two of eight columns in each of four lanes, as the two of
    number l in lane l. So four mma, one after the other, get the pairs of eight neighbors, and lane l all of the l-th
    eight."""
    import torch

    return torch.arange(order).view(-1, 4, 4, 2).transpose(1, 2).flatten()


def _packed_right(problem: Problem, matrix: NDArray[Any]) -> NDArray[Any]:
    import torch

    return pack_right(torch.from_numpy(matrix.copy())).numpy()


def _random_right(problem: Problem, units: int, random: np.random.Generator) -> NDArray[Any]:
    """Normal entries."""
    return random.standard_normal((problem.length, problem.length))


# ---- signs -----------------------------------------------------------------------------------------------------------
def _random_signs(problem: Problem, units: int, random: np.random.Generator) -> NDArray[Any]:
    """n bits; bit i % 8 of byte i / 8 is 1 where sign i is −1."""
    return random.integers(0, 256, -(-problem.n // 8), "uint8")


# ---- what a kernel that quantizes takes ------------------------------------------------------------------------------
def _has_scales(problem: Problem) -> bool:
    return problem.io.form is not None and problem.io.form.group != TENSOR


def _needs_scale(problem: Problem) -> bool:
    """Whether a call gives a scale, or one for each head."""
    return problem.io.form is not None and problem.io.form.needs_scale


def _numbers_of_heads(problem: Problem) -> tuple[Param, ...]:
    """How many times `Problem.unit` elements a head has."""
    return (Param("u32", "units_in_head"),) if problem.io.form and problem.io.form.by_head else ()


def _numbers_of_layout(problem: Problem) -> tuple[Param, ...]:
    """How many scales a row has, and how far apart columns of scales are."""
    form = problem.io.form
    in_row, pitch = Param("u32", "scales_in_row"), Param("i64", "scale_pitch")
    return {Layout.COLUMN_MAJOR: (in_row, pitch), Layout.SWIZZLED: (in_row,)}.get(form.layout, ()) if form else ()


def sample_scales(form: Format, heads: int) -> NDArray[Any]:
    """Scales that a call may give for values near 1, float32: one without a dimension, or one for each of so many
    heads; neighboring heads have different scales."""
    import numpy as np

    if not form.by_head:
        return np.full((), 0.01, np.float32)
    scales = np.float32(0.01) * (1 + np.arange(heads, dtype=np.float32) % 3)
    return scales * np.float32(448) if form.rule == "fa3" else scales


def _sample_scales(problem: Problem, units: int, random: np.random.Generator) -> NDArray[Any]:
    assert problem.io.form is not None
    return sample_scales(problem.io.form, units).reshape(-1)


MATRIX = Operand("matrix", attrgetter("transform.has_matrix"), _random_matrix, _packed_matrix)
SIGNS = tuple(
    Operand(name, attrgetter("transform.signed"), _random_signs, is_optional=True)
    for name in ("signs_before", "signs_after")
)
SCALES = Operand("scales", _has_scales, None, numbers=_numbers_of_layout)
TENSOR_SCALE = Operand("tensor_scale", _needs_scale, _sample_scales, numbers=_numbers_of_heads)
RIGHT_MATRIX = Operand("right_matrix", attrgetter("transform.paired"), _random_right, _packed_right)
OPERANDS = (MATRIX, *SIGNS, SCALES, TENSOR_SCALE, RIGHT_MATRIX)
# Kernels take `PARAMS` first, then other params in this order, then the params of operands that are not listed here.
_NUMBERS = "units_in_head", "scales_in_row", "scale_pitch"
_NAMES = *(param.name for param in ROW_PARAMS), *(operand.name for operand in OPERANDS), *_NUMBERS
_ORDER = {name: at for at, name in enumerate(_NAMES)}


def operands_of(problem: Problem) -> list[Operand]:
    """The operands that the kernels of a problem take."""
    prologue = prologue_of(problem)
    operands = (*OPERANDS, *prologue.operands) if prologue else OPERANDS
    return [operand for operand in operands if operand.is_taken(problem)]


def params_for(problem: Problem, operands: Iterable[Operand] | None = None) -> tuple[Param, ...]:
    """The params of the kernels of a problem. operands: the operands to choose from; by default all that are known."""
    known = operands_of(problem) if operands is None else operands
    taken = [each for each in dict.fromkeys(known) if each.is_taken(problem)]
    others = [param for each in taken for param in (each.param, *each.numbers(problem))]
    prologue = prologue_of(problem)
    others += prologue.params(problem) if prologue else ()
    rows = ROW_PARAMS if problem.io.rows is Rows.PITCHED else ()
    return *PARAMS, *sorted((*rows, *others), key=lambda param: _ORDER.get(param.name, len(_ORDER)))


def sizes_for(form: Format, rows: int, columns: int, units_in_head: int = 1) -> dict[str, int]:
    """The numbers that a kernel may take to quantize [rows, columns], by the names of their params."""
    pitch = Layout.COLUMN_MAJOR.filled_up(rows, 1, form.scale_bytes(4))[0]
    return {"scales_in_row": form.scales_in_row(columns), "scale_pitch": pitch, "units_in_head": units_in_head}


def verification_operands(problem: Problem, units: int = 1) -> dict[str, NDArray[Any]]:
    """Random values of all operands that the kernels of a problem read."""
    import numpy as np

    random = np.random.default_rng(problem.order)
    return {each.name: each.sample(problem, units, random) for each in operands_of(problem) if each.sample}


def kernel_operands(problem: Problem, values: OperandValues) -> dict[str, NDArray[Any]]:
    """Values as kernels take them."""
    return {each.name: each.packed(problem, values[each.name]) for each in operands_of(problem) if each.name in values}
