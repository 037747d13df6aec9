"""Verifies kernels before they are timed. Every buffer is poisoned beforehand.

Each class of input is transformed out of place and in place, and compared with float64. Inputs end in a ragged tile.
The normal inputs have so many rows that a persistent grid loops. Rows do not depend on each other, so a call with fewer
rows must give the very same bits, and so must a second run.

A kernel that reads a `RowShape` is verified with rows of several shapes, and with poison between the rows too. If it
read poison as anything but zeros, no result would be finite.

A kernel that takes a matrix is verified with the transpose of the matrix too, and a kernel that takes signs is verified
without signs too. No kernel may change its matrix or its signs, and out of place, it may not change x.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any, NamedTuple, Protocol

import torch

from hadagen.errors import told_apart
from hadagen.measure.device_operands import DeviceOperands
from hadagen.measure.messages import Answer
from hadagen.measure.watch import Watch
from hadagen.problem.bits import encode
from hadagen.problem.formats import TENSOR
from hadagen.problem.launch import LaunchSpec, RowShape
from hadagen.problem.operands import MATRIX, OperandValues, operands_of, sizes_for, verification_operands
from hadagen.problem.problem import Numerics, Problem, Rows
from hadagen.problem.prologues import Prologue, prologue_of
from hadagen.problem.regimes import destinations, timed_rows
from hadagen.problem.trial import Outcome
from hadagen.truth import quantizer
from hadagen.truth.accuracy import TORCH_DTYPE, error_of, relative_error, sample_scale, scales_in_rows
from hadagen.truth.reference import exact_results, input_classes, input_parts, verification_scale

# Bytes of an element → type of its raw bits.
_BITS = {2: torch.int16, 4: torch.int32}

# Bytes of an element → a NaN in every type of this size, or a large code. Memory that no kernel wrote keeps it.
_POISON = {1: 0x7F, 2: 0x7FFF, 4: 0x7FFF7FFF}
_GUARD_ELEMENTS = 1 << 15  # 64 KiB or more
# With this many elements, measured errors are stable to a few per mille.
_LEAST_ELEMENTS = 1 << 17
_LOOPED_CLASS = "normal"
_UNITS_IN_ROW = 3  # so that rows end within tiles
_WHOLE_CLASS = "constant"


class Launchable(Protocol):
    """A kernel to verify: `hadagen.gpu.driver.LoadedKernel`, or a stand-in."""

    @property
    def spec(self) -> LaunchSpec: ...

    @property
    def resident_blocks(self) -> int: ...

    def launch(
        self,
        stream: int,
        x: int,
        y: int,
        elements: int,
        scale: float,
        rows: RowShape,
        operands: Mapping[str, int],
    ) -> None: ...


class RowCounts(NamedTuple):
    """Numbers of rows: `base` for every class, `looped` for the normal one, `few` for calls whose bits are compared."""

    base: int
    looped: int
    few: tuple[int, ...]


def row_counts(spec: LaunchSpec, n: int, resident_blocks: int) -> RowCounts:
    """Row counts whose last tile is ragged if a tile has several rows.

    `base`: at least three tiles. `looped`: if the grid is persistent, every block gets two tiles, and half of the
    blocks a third. `few`: a single row, and a whole tile plus one row.
    """
    tile_rows = spec.tile_elements // n

    def ragged(tiles: int) -> int:
        return tiles * tile_rows - (1 if tile_rows > 1 else 0)

    tiles = max(3, -(-_LEAST_ELEMENTS // spec.tile_elements))
    clusters = resident_blocks // spec.cluster if spec.persistent else 0
    return RowCounts(ragged(tiles), ragged(max(tiles, 2 * clusters + clusters // 2 + 1)), (1, tile_rows + 1))


class Arrangement(NamedTuple):
    """The layout of the rows of a verification: their shape, and how many elements after a multiple of 16 bytes x and y
    begin. In place, the rows of y lie as those of x."""

    rows: RowShape
    x_offset: int = 0
    y_offset: int = 0

    @property
    def in_place(self) -> Arrangement:
        columns, x_pitch, _ = self.rows
        return Arrangement(RowShape(columns, x_pitch, x_pitch), self.x_offset, self.x_offset)


def arrangements(problem: Problem) -> tuple[Arrangement, ...]:
    """The layouts to verify a problem with. If its kernels read a `RowShape`: as rows are timed; with gaps, and as long
    as n; never at a multiple of 16 bytes; at one in x alone, and as short as possible."""
    timed = timed_rows(problem)
    if problem.io.rows is Rows.CONTIGUOUS:
        return (Arrangement(timed),)
    n, vector = problem.n, 16 // problem.io.input.bytes
    most, least = max(n - 1, 1), n // 2 + (n > 2)
    aligned = -(-least // vector) * vector
    return (
        Arrangement(timed),
        Arrangement(RowShape(n, n + vector, n + 2 * vector)),
        Arrangement(RowShape(most, most + 4, most + 2), x_offset=1, y_offset=3),
        Arrangement(RowShape(least, aligned + vector, least), y_offset=1),
    )


def operand_sets(problem: Problem) -> list[OperandValues]:
    """The operands to verify a problem with, those of most classes of input first: the matrix as it is, with signs;
    the matrix transposed, with signs; and no signs."""
    operands = verification_operands(problem, _case_rows(problem))
    optional = [each.name for each in operands_of(problem) if each.is_optional]
    sets: list[OperandValues] = [operands]
    if MATRIX.is_taken(problem):
        sets.append({**operands, "matrix": operands["matrix"].T})
    if optional:
        sets.append({name: each for name, each in operands.items() if name not in optional})
    return sets


class Case(NamedTuple):
    """Rows that are repeated to any number. Their number is odd, so that neighboring tiles differ."""

    bits: torch.Tensor  # [rows, columns] int16 or int32; if x has several parts, [rows, parts · n]
    reference: torch.Tensor  # [rows, columns] float64
    inputs: dict[str, torch.Tensor]  # operands like x, by name: bits [rows, n]
    written: dict[str, torch.Tensor]  # other results by name: [rows, n] float64

    def rows(self, count: int) -> torch.Tensor:
        """The indices of `count` rows, repeated in turn."""
        return torch.arange(count, device=self.bits.device) % len(self.bits)

    def mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Case:
        """The same with all tensors changed."""
        inputs, written = (
            {name: change(each) for name, each in several.items()} for several in (self.inputs, self.written)
        )
        return Case(change(self.bits), change(self.reference), inputs, written)


class _CaseKey(NamedTuple):
    """The key of a case among the cases of a problem. `operands`: an index into `operand_sets`."""

    input_class: str
    columns: int
    operands: int = 0


# The bits of a transform; or codes, and scales if groups have some.
_Results = tuple[torch.Tensor, ...]
# Constant rows with fewer columns than n are left out: their results have only a few values, and the rounding of so few
# does not average out.
_Cases = dict[_CaseKey, Case]


def _case_rows(problem: Problem) -> int:
    """Rows of a case, an odd number."""
    return _LEAST_ELEMENTS // problem.n | 1


def _cases(problem: Problem, operands: list[OperandValues]) -> _Cases:
    """Each class of input with the first operands, and the normal one with all others too."""
    like_x = [each for each in operands_of(problem) if each.like_x and not each.is_written]
    scale = verification_scale(problem)
    cases = {}
    for name, values in input_parts(problem, input_classes(problem, _case_rows(problem))).items():
        for columns in {arrangement.rows.columns for arrangement in arrangements(problem)}:
            if name == _WHOLE_CLASS and columns < problem.n:
                continue
            padded = values.copy()
            padded[..., columns:] = 0.0
            in_rows = padded.swapaxes(0, 1).reshape(padded.shape[1], -1) if padded.ndim > 2 else padded[:, :columns]
            bits = _bits(problem, encode(problem.io.input, in_rows))
            for position, given in enumerate(operands if name == _LOOPED_CLASS else operands[:1]):
                exact, second = exact_results(problem, padded, scale, given)
                reference = torch.from_numpy(exact[:, :columns].copy())
                inputs = {each.name: _bits(problem, each.packed(problem, given[each.name])) for each in like_x}
                written = {key: torch.from_numpy(one) for key, one in second.items()}
                cases[_CaseKey(name, columns, position)] = Case(bits, reference, inputs, written)
    return cases


def _bits(problem: Problem, encoded: Any) -> torch.Tensor:
    return torch.from_numpy(encoded).view(_BITS[problem.io.input.bytes])


@dataclass
class _Findings:
    """Results that are still on the device, to be read once, at the end."""

    errors: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    outside: list[torch.Tensor] = field(default_factory=list)  # true: only the output was written
    repeated: list[torch.Tensor] = field(default_factory=list)  # true: the same bits again
    fewer: list[torch.Tensor] = field(default_factory=list)  # true: fewer rows gave the same bits


class Verifier:
    """Verifies kernels on one device. It keeps the inputs and the reference of the last problem.

    `stream`: handle of PyTorch's current stream. `watch` is told of each launch.
    """

    def __init__(self, device: torch.device, stream: int, watch: Watch | None = None) -> None:
        self._device = device
        self._watch = watch or Watch()
        self._stream = stream
        self._problem: Problem | None = None
        self._operands: list[OperandValues] = []
        self._host_cases: _Cases = {}
        self._device_cases: _Cases = {}

    def prepare(self, problem: Problem) -> None:
        """Compute the reference of a problem, which may take seconds, before any kernel runs."""
        self._cases_of(problem)

    def check(self, kernel: Launchable, problem: Problem) -> Answer:
        """Whether a kernel is right; nothing is timed. Raises what a failed launch raises: `DeviceError`, or PyTorch's
        `RuntimeError`."""
        cases = self._cases_of(problem)
        self._device_cases = {}  # a wrong kernel may have written anywhere
        answer = self._judge(kernel, problem, cases)
        if answer.outcome is Outcome.OK:
            self._device_cases = cases
        return answer

    def errors_of(self, peer: Callable[[torch.Tensor], torch.Tensor], problem: Problem) -> dict[str, float]:
        """Class of input → relative error of an orthonormal transform of [rows, columns] by another library.

        The rows have the layout in which kernels are timed. Their number is a power of two, which other libraries may
        need. Raises what `peer` raises.
        """
        columns = timed_rows(problem).columns
        errors = {}
        for (name, of_columns, position), case in self._cases_of(problem).items():
            if (of_columns, position) == (columns, 0):
                x = case.bits[: len(case.bits) - 1].view(TORCH_DTYPE[problem.io.input]).clone()
                out = peer(x).contiguous()
                errors[name] = _largest([error_of(problem, [out], case.reference[: len(x)])])
        return errors

    def _cases_of(self, problem: Problem) -> _Cases:
        """The cases of a problem, on the device. Both numerics share them."""
        problem = problem.with_io(numerics=Numerics.ACCURATE)
        if problem != self._problem:
            self._operands = operand_sets(problem)
            self._host_cases, self._problem, self._device_cases = _cases(problem, self._operands), problem, {}
        if not self._device_cases:
            to_device = partial(torch.Tensor.to, device=self._device, copy=True)
            self._device_cases = {key: case.mapped(to_device) for key, case in self._host_cases.items()}
        return self._device_cases

    def _judge(self, kernel: Launchable, problem: Problem, cases: _Cases) -> Answer:
        counts = row_counts(kernel.spec, problem.unit, kernel.resident_blocks)
        together = problem.unit // problem.n  # rows of x
        findings = _Findings()
        given = [DeviceOperands(problem, operands, self._device) for operands in self._operands]
        for arranged, (key, case) in product(arrangements(problem), cases.items()):
            if key.columns != arranged.rows.columns:
                continue
            operands, loops = given[key.operands], key.input_class == _LOOPED_CLASS and key.operands == 0
            rows = case.rows((counts.looped if loops else counts.base) * together)
            taken = case.mapped(lambda each: each[rows])  # noqa: B023
            ways = [(arranged, False), (arranged.in_place, True)][: len(destinations(problem))]
            several = [self.run(kernel, problem, taken, operands, *way, findings) for way in ways]
            errors = findings.errors.setdefault(key.input_class, [])
            for results in several:
                errors += self._errors(problem, results, taken)
            if loops or problem.io.form:
                several.append(self.run(kernel, problem, taken, operands, *ways[0], findings))
            for other in several[1:]:
                findings.repeated += _same_bits(other, several[0])
            for few, way in product(counts.few if loops else (), ways):
                first = taken.mapped(lambda each: each[: few * together])  # noqa: B023
                part = self.run(kernel, problem, first, operands, *way, findings)
                findings.fewer += _same_bits(part, several[0])
        findings.outside += [torch.tensor(each.are_whole(), device=self._device) for each in given]
        return _answer(problem, findings)

    def _errors(self, problem: Problem, results: _Results, case: Case) -> list[torch.Tensor]:
        """The errors of the results of a kernel for a case."""
        dtype, form = TORCH_DTYPE[problem.io.input], problem.io.form
        first = len(results) - len(case.written)
        made = results[:first] if form else [results[0].view(dtype)]
        scale = sample_scale(form, len(results[0]), self._device) if form else None
        others = zip(results[first:], case.written.values(), strict=True)
        errors = [relative_error(found.view(dtype), wanted) for found, wanted in others]
        return [error_of(problem, made, case.reference, scale), *errors]

    def run(
        self,
        kernel: Launchable,
        problem: Problem,
        case: Case,
        operands: DeviceOperands,
        arranged: Arrangement,
        in_place: bool,
        findings: _Findings,
    ) -> _Results:
        """The results of a kernel for the rows of a case: the bits of the transform; or codes [units, …] of each
        `Problem.unit`, and their scales if groups have some; then the bits of the other operands that it writes. All
        other memory must be as it was before."""
        form, (_, x_pitch, y_pitch), prologue = problem.io.form, arranged.rows, prologue_of(problem)
        x = case.bits if prologue is None else case.bits[:, : problem.n]  # its shape is that of results
        if prologue is not None and prologue.width > 1:
            source = _Buffer(_in_rows(problem, prologue, case.bits), is_output=False)
        else:
            source = self._rows(x, x_pitch, arranged.x_offset, is_output=in_place)
            source.view.copy_(x)
        like_x = [each for each in operands_of(problem) if each.like_x]
        besides = {each.name: self._rows(x, x_pitch, 0, is_output=each.is_written) for each in like_x}
        for name, bits in case.inputs.items():
            besides[name].view.copy_(bits)
        written = [besides[each.name] for each in like_x if each.is_written]
        buffers = [source, *besides.values()]
        addresses = operands | {name: each.view.data_ptr() for name, each in besides.items()}
        addresses |= prologue.numbers(_units_in_row(problem, prologue)) if prologue else {}
        units = x.numel() // problem.unit
        if form is None:
            target = source if in_place else self._rows(x, y_pitch, arranged.y_offset, is_output=True)
            buffers += [] if in_place else [target]
        else:
            of_codes, of_scales = quantizer.types(form, TORCH_DTYPE[problem.io.input])
            target = _Buffer(self._poisoned(x.numel() * form.element.bits // 8))
            groups = form.scales_in_row(problem.unit)
            # Poison where scales go, and zeros where the layout is filled up.
            poison = self._poisoned(units, groups * of_scales.itemsize).view(of_scales)
            memory = quantizer.memory_of(quantizer.laid_out(poison, form.layout))
            scales = _Buffer(memory, kept=memory == 0)
            buffers += [target, scales]
            scale = sample_scale(form, units, self._device)
            addresses |= sizes_for(form, units, problem.unit)
            addresses |= {"scales": scales.view.data_ptr(), "tensor_scale": 0 if scale is None else scale.data_ptr()}
        before = [each.memory.clone() for each in buffers]
        self._watch.beat()
        elements, scale_of_rows = len(x) * problem.n, verification_scale(problem)
        places = source.view.data_ptr(), target.view.data_ptr()
        kernel.launch(self._stream, *places, elements, scale_of_rows, arranged.rows, addresses)
        findings.outside += [each.is_whole(was) for each, was in zip(buffers, before, strict=True)]
        others = [each.view.contiguous() for each in written]
        if form is None:
            return target.view.contiguous(), *others
        codes = target.view.view(of_codes).view(units, -1)
        if form.group == TENSOR:
            return codes, *others
        laid_out = quantizer.arranged(scales.view.view(of_scales), units, groups, form.layout)
        return codes, scales_in_rows(problem, laid_out, units), *others

    def _rows(self, bits: torch.Tensor, pitch: int, offset: int, *, is_output: bool) -> _Buffer:
        """Memory for rows of bits, `pitch` elements apart and so many after a multiple of 16 bytes."""
        count, columns = bits.shape
        poison = bits.new_full(((count - 1) * pitch + columns,), _POISON[bits.itemsize])
        return _Buffer(poison, (count, columns), (pitch, 1), offset, is_output=is_output)

    def _poisoned(self, *shape: int) -> torch.Tensor:
        return torch.full(shape, _POISON[1], dtype=torch.uint8, device=self._device)


def _units_in_row(problem: Problem, prologue: Prologue) -> int:
    """How many units a row of results has, if a kernel takes that number."""
    return _UNITS_IN_ROW if prologue.takes_rows(problem) else 1


def _in_rows(problem: Problem, prologue: Prologue, bits: torch.Tensor) -> torch.Tensor:
    """x in memory, of the parts of rows of n, [rows, width · n]. Poison fills up the last row."""
    parts = bits.view(len(bits), prologue.width, -1).movedim(1, 0).reshape(prologue.width, -1)
    columns = _units_in_row(problem, prologue) * problem.unit
    return prologue.in_rows(parts, columns, _POISON[bits.itemsize]).flatten()


class _Buffer:
    """Memory of a launch, with poison around. `view`: what a kernel reads or writes of it. kept: where an output must
    stay as it is."""

    def __init__(
        self,
        content: torch.Tensor,
        shape: tuple[int, ...] | None = None,
        strides: tuple[int, ...] = (1,),
        offset: int = 0,
        *,
        is_output: bool = True,
        kept: torch.Tensor | None = None,
    ) -> None:
        guard = content.new_full((_GUARD_ELEMENTS + offset,), _POISON[content.itemsize])
        self.memory = torch.cat((guard, content, guard))
        self._place = shape or content.shape, strides, len(guard)
        self._is_output, self._kept = is_output, kept
        self.view = self.memory.as_strided(*self._place)

    def is_whole(self, before: torch.Tensor) -> torch.Tensor:
        """Whether only what a kernel may write has changed. before: a copy of the memory, which is overwritten."""
        if self._is_output:
            was = before.as_strided(*self._place)
            was.copy_(self.view if self._kept is None else torch.where(self._kept, was, self.view))
        return (self.memory == before).all()


_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def _same_bits(few: _Results, among: _Results) -> list[torch.Tensor]:
    """Whether the rows of each result have the bits of the first rows among others."""
    kinds = [_AS_INTEGERS[each.element_size()] for each in few]
    pairs = zip(kinds, few, among, strict=True)
    return [(mine.view(kind) == theirs[: len(mine)].view(kind)).all() for kind, mine, theirs in pairs]


def _answer(problem: Problem, findings: _Findings) -> Answer:
    errors = {name: _largest(values) for name, values in findings.errors.items()}
    outside, repeated, fewer = (
        bool(torch.stack(flags).all()) for flags in (findings.outside, findings.repeated, findings.fewer)
    )
    wrong = [name for name, error in errors.items() if not error <= problem.error_bound]
    if not outside:
        return Answer(Outcome.WRONG_ANSWER, "it wrote outside its output", errors)
    if wrong:
        worst = max(wrong, key=lambda name: errors[name])
        found, bound = told_apart(errors[worst], problem.error_bound)
        detail = f"relative error {found} for {worst} inputs; {problem.key} allows {bound}"
        return Answer(Outcome.WRONG_ANSWER, detail, errors)
    if not repeated:
        return Answer(Outcome.UNSTABLE, "the same input came out differently a second time", errors)
    if not fewer:
        return Answer(Outcome.WRONG_ANSWER, "a few rows alone came out differently than among many", errors)
    return Answer(Outcome.OK, "", errors)


def _largest(values: list[torch.Tensor]) -> float:
    errors = [float(value) for value in values]
    return max(errors) if all(math.isfinite(error) for error in errors) else math.inf
