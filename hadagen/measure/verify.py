"""Verifies kernels before they are timed. Every buffer is poisoned beforehand.

Each class of input is transformed out of place and in place, and compared with float64. Inputs end in a ragged tile.
The normal inputs have so many rows that a persistent grid loops. Rows do not depend on each other, so a call with fewer
rows must give the very same bits, and so must a second run.

A kernel that reads a `RowShape` is verified with rows of several shapes, and with poison between the rows too. If it
read poison as anything but zeros, no result would be finite.

A kernel with a matrix is verified with it transposed too, and one with signs without any too. Both must stay as they
are, as x must out of place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple, Protocol

import torch

from hadagen import quantizer
from hadagen.bits import encode
from hadagen.errors import told_apart
from hadagen.formats import Format
from hadagen.launch import LaunchSpec, RowShape, sizes_for
from hadagen.measure.messages import Answer
from hadagen.measure.operands import DeviceOperands
from hadagen.measure.watch import Watch
from hadagen.problem import DType, Numerics, Problem, Rows
from hadagen.reference import Operands, input_classes, transform, verification_operands, verification_scale
from hadagen.regimes import timed_rows
from hadagen.trial import Outcome

TORCH_DTYPE = {DType.FLOAT16: torch.float16, DType.BFLOAT16: torch.bfloat16, DType.FLOAT32: torch.float32}
# Bytes of an element → type of its raw bits.
_BITS = {2: torch.int16, 4: torch.int32}

# Bytes of an element → a NaN in every type of this size. Memory that no kernel wrote keeps it.
_POISON = {2: 0x7FFF, 4: 0x7FFF7FFF}
_BYTE = 0x7F
_GUARD_ELEMENTS = 1 << 15  # 64 KiB or more
# With this many elements, measured errors are stable to a few per mille.
_LEAST_ELEMENTS = 1 << 17
_LOOPED_CLASS = "normal"
_WHOLE_CLASS = "constant"


class Launchable(Protocol):
    """A kernel to verify: `hadagen.driver.LoadedKernel`, or a stand-in."""

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


def operand_sets(problem: Problem) -> list[Operands]:
    """The operands to verify a problem with, those of most classes of input first: the matrix as it is, with signs;
    the matrix transposed, with signs; and no signs."""
    operands = verification_operands(problem)
    sets: list[Operands] = [operands]
    if problem.order > 1:
        sets.append({**operands, "matrix": operands["matrix"].T})
    if problem.transform.signed:
        sets.append({name: each for name, each in operands.items() if name == "matrix"})
    return sets


class _Case(NamedTuple):
    """Rows that are repeated to any number. Their number is odd, so that neighboring tiles differ."""

    bits: torch.Tensor  # [rows, columns] int16 or int32
    reference: torch.Tensor  # [rows, columns] float64

    def rows(self, count: int) -> torch.Tensor:
        """The indices of `count` rows, repeated in turn."""
        return torch.arange(count, device=self.bits.device) % len(self.bits)

    def to(self, device: torch.device) -> _Case:
        return _Case(self.bits.to(device, copy=True), self.reference.to(device, copy=True))


class _CaseKey(NamedTuple):
    """What tells the cases of a problem apart. `operands`: a position in `operand_sets`."""

    input_class: str
    columns: int
    operands: int = 0


# Constant rows with fewer columns than n are left out: their results have only a few values, and the rounding of so few
# does not average out.
_Cases = dict[_CaseKey, _Case]


def _cases(problem: Problem, operands: list[Operands]) -> _Cases:
    """Each class of input with the first operands, and the normal one with all others too."""
    rows = _LEAST_ELEMENTS // problem.n + 1
    rows += problem.order > 1 and rows % 2 == 0
    scale = verification_scale(problem)
    cases = {}
    for name, values in input_classes(problem, rows).items():
        for columns in {arrangement.rows.columns for arrangement in arrangements(problem)}:
            if name == _WHOLE_CLASS and columns < problem.n:
                continue
            padded = values.copy()
            padded[:, columns:] = 0.0
            bits = torch.from_numpy(encode(problem.io.input, padded[:, :columns])).view(_BITS[problem.io.input.bytes])
            for position, given in enumerate(operands if name == _LOOPED_CLASS else operands[:1]):
                reference = torch.from_numpy(transform(problem, padded, scale, given)[:, :columns].copy())
                cases[_CaseKey(name, columns, position)] = _Case(bits, reference)
    return cases


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
        self._operands: list[Operands] = []
        self._host_cases: _Cases = {}
        self._device_cases: _Cases = {}

    def prepare(self, problem: Problem) -> None:
        """Compute the reference of a problem, which may take seconds, before any kernel runs."""
        self._cases_of(problem)

    def check(self, kernel: Launchable, problem: Problem) -> Answer:
        """Whether it is right; nothing is timed. Raises what a failed launch raises: `DeviceError`, or PyTorch's
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
                out = peer(x).contiguous().view(case.bits.dtype)
                errors[name] = [_relative_error(out, case.reference[: len(x)], problem.io.input)]
        return {name: _largest(values) for name, values in errors.items()}

    def _cases_of(self, problem: Problem) -> _Cases:
        """The cases of a problem, on the device. Both numerics share them."""
        problem = problem.with_io(numerics=Numerics.ACCURATE)
        if problem != self._problem:
            self._operands = operand_sets(problem)
            self._host_cases, self._problem, self._device_cases = _cases(problem, self._operands), problem, {}
        if not self._device_cases:
            self._device_cases = {key: case.to(self._device) for key, case in self._host_cases.items()}
        return self._device_cases

    def _judge(self, kernel: Launchable, problem: Problem, cases: _Cases) -> Answer:
        if problem.io.form:
            return self._judge_codes(kernel, problem, problem.io.form, cases)
        counts = row_counts(kernel.spec, problem.n, kernel.resident_blocks)
        findings = _Findings()
        given = [DeviceOperands(problem, operands, self._device) for operands in self._operands]
        for arranged, (key, case) in product(arrangements(problem), cases.items()):
            if key.columns != arranged.rows.columns:
                continue
            operands, loops = given[key.operands], key.input_class == _LOOPED_CLASS and key.operands == 0
            rows = case.rows(counts.looped if loops else counts.base)
            x, reference = case.bits[rows], case.reference[rows]
            ways = (arranged, False), (arranged.in_place, True)
            out, again = (self._run(kernel, problem, x, operands, *way, findings) for way in ways)
            errors = findings.errors.setdefault(key.input_class, [])
            errors += [_relative_error(y, reference, problem.io.input) for y in (out, again)]
            findings.repeated.append((out == again).all())
            if loops:
                findings.repeated.append((out == self._run(kernel, problem, x, operands, *ways[0], findings)).all())
                for few, way in product(counts.few, ways):
                    part = self._run(kernel, problem, x[:few], operands, *way, findings)
                    findings.fewer.append((part == out[:few]).all())
        findings.outside += [torch.tensor(each.are_whole(), device=self._device) for each in given]
        return _answer(problem, findings)

    def _judge_codes(self, kernel: Launchable, problem: Problem, form: Format, cases: _Cases) -> Answer:
        """The same for a kernel that quantizes. Its errors are those of `quantizer.excess_error`."""
        counts = row_counts(kernel.spec, problem.unit, kernel.resident_blocks)
        together = problem.unit // problem.n  # rows of x
        findings = _Findings()
        given = [DeviceOperands(problem, operands, self._device) for operands in self._operands]
        for key, case in cases.items():
            operands, loops = given[key.operands], key.input_class == _LOOPED_CLASS and key.operands == 0
            rows = case.rows((counts.looped if loops else counts.base) * together)
            x = case.bits[rows]
            exact = case.reference[rows].view(-1, problem.unit)
            scale = quantizer.sample_scales(form, len(exact), self._device)
            first = self._quantize(kernel, problem, form, x, operands, findings)
            codes, scales = first
            dtype = TORCH_DTYPE[problem.io.input]
            error = quantizer.excess_error(codes, scales, exact, form, dtype, scale)
            findings.errors.setdefault(key.input_class, []).append(error)
            again = self._quantize(kernel, problem, form, x, operands, findings)
            findings.repeated += [_same_bits(*each) for each in zip(first, again, strict=True)]
            for few in counts.few if loops else ():
                part = self._quantize(kernel, problem, form, x[: few * together], operands, findings)
                findings.fewer.append(_same_bits(part[0], codes[:few]))
                if form.group > 0:
                    groups = form.scales_in_row(problem.unit)
                    of_few, of_all = (
                        quantizer.rows_of_scales(each, form.layout, rows, groups)
                        for each, rows in ((part[1], few), (scales, len(codes)))
                    )
                    findings.fewer.append(_same_bits(of_few, of_all[:few]))
        findings.outside += [torch.tensor(each.are_whole(), device=self._device) for each in given]
        return _answer(problem, findings)

    def _quantize(
        self,
        kernel: Launchable,
        problem: Problem,
        form: Format,
        x: torch.Tensor,
        operands: DeviceOperands,
        findings: _Findings,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales of the bits of rows, of which each is a head. The poison around codes must be intact
        afterwards, and so must x."""
        rows, groups = x.numel() // problem.unit, form.scales_in_row(problem.unit)
        of_codes, of_scales = quantizer.types(form, TORCH_DTYPE[problem.io.input])
        size = x.numel() * form.element.bits // 8
        memory = torch.full((size + 2 * _GUARD_ELEMENTS,), _BYTE, dtype=torch.uint8, device=self._device)
        codes = memory[_GUARD_ELEMENTS:][:size]
        # Poison where scales go, zeros where the layout is filled up, and poison around.
        poisoned = torch.full((rows, groups * of_scales.itemsize), _BYTE, dtype=torch.uint8, device=self._device)
        wanted = quantizer.memory_of(quantizer.laid_out(poisoned.view(of_scales), form.layout))
        around = memory[:_GUARD_ELEMENTS]
        scale_memory = torch.cat((around, wanted, around))
        inside = scale_memory[_GUARD_ELEMENTS:-_GUARD_ELEMENTS]
        scales = quantizer.arranged(inside.view(of_scales), rows, groups, form.layout)
        source = x.clone()
        scale = quantizer.sample_scales(form, rows, self._device)
        addresses = {
            **operands,
            "scales": scales.data_ptr(),
            "tensor_scale": 0 if scale is None else scale.data_ptr(),
            **sizes_for(form, rows, problem.unit),
        }
        shape = RowShape(problem.n, problem.n, problem.n)
        with_scale = verification_scale(problem)
        self._watch.beat()
        kernel.launch(self._stream, source.data_ptr(), codes.data_ptr(), x.numel(), with_scale, shape, addresses)
        result = codes.clone().view(of_codes).view(rows, -1), scales.clone()
        codes.fill_(_BYTE)
        whole = torch.cat((around, wanted, around))
        is_of_scale = torch.cat((around == 0, wanted == _BYTE, around == 0))
        untouched = is_of_scale | (scale_memory == whole)
        findings.outside += [(memory == _BYTE).all(), untouched.all(), (source == x).all()]
        return result

    def _run(
        self,
        kernel: Launchable,
        problem: Problem,
        x: torch.Tensor,
        operands: DeviceOperands,
        arranged: Arrangement,
        in_place: bool,
        findings: _Findings,
    ) -> torch.Tensor:
        """The bits of the transform of x, both [rows, columns]. The poison around them must be intact afterwards."""
        count, (columns, *pitches) = len(x), arranged.rows
        extent = (count - 1) * max(pitches) + columns
        stride = -(-extent // _GUARD_ELEMENTS) * _GUARD_ELEMENTS + _GUARD_ELEMENTS  # keeps y as aligned as x
        poison = _POISON[problem.io.input.bytes]
        memory = torch.full((2 * stride + _GUARD_ELEMENTS,), poison, dtype=x.dtype, device=self._device)
        starts = _GUARD_ELEMENTS + arranged.x_offset, _GUARD_ELEMENTS + stride + arranged.y_offset
        source, target = (
            memory.as_strided((count, columns), (pitch, 1), start) for pitch, start in zip(pitches, starts, strict=True)
        )
        if in_place:
            target = source
        source.copy_(x)
        scale = verification_scale(problem)
        elements = count * problem.n
        self._watch.beat()
        kernel.launch(self._stream, source.data_ptr(), target.data_ptr(), elements, scale, arranged.rows, operands)
        result = target.clone(memory_format=torch.contiguous_format)
        if not in_place:
            findings.outside.append((source == x).all())
        source.fill_(poison)
        target.fill_(poison)
        findings.outside.append((memory == poison).all())
        return result


_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    whole = _AS_INTEGERS[one.element_size()]  # of the same size, as strides may be any
    return (one.view(whole) == other.view(whole)).all()


def _relative_error(bits: torch.Tensor, reference: torch.Tensor, dtype: DType) -> torch.Tensor:
    """‖out − reference‖ / ‖reference‖; not finite if `out` is not."""
    out = bits.view(TORCH_DTYPE[dtype]).double()
    error: torch.Tensor = torch.linalg.vector_norm(out - reference) / torch.linalg.vector_norm(reference)
    return error


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
