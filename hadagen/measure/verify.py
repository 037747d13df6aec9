"""Is a kernel right? Asked before anything is timed, with every buffer poisoned beforehand.

Each class of input is transformed out of place and in place and compared with float64. Inputs end in a ragged tile,
and the normal ones are many enough for a persistent grid to loop. Rows do not depend on each other, so fewer rows must
come out as the very same bits; the same holds for a second run.

Of pitched problems all of this is asked for rows of several shapes, with poison between the rows too: were it read as
anything but zeros, no result would be finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import product
from typing import NamedTuple, Protocol

import torch

from hadagen.bits import encode
from hadagen.errors import told_apart
from hadagen.launch import LaunchSpec, RowShape
from hadagen.measure.messages import Answer
from hadagen.problem import DType, Numerics, Problem
from hadagen.reference import INPUT_CLASSES, hadamard, input_classes, verification_scale
from hadagen.trial import Outcome, timed_rows

TORCH_DTYPE = {DType.FLOAT16: torch.float16, DType.BFLOAT16: torch.bfloat16, DType.FLOAT32: torch.float32}
# Of the raw bits of an element, by its bytes.
_BITS = {2: torch.int16, 4: torch.int32}

# A NaN of every type of that many bytes. What no kernel wrote still holds it.
_POISON = {2: 0x7FFF, 4: 0x7FFF7FFF}
_GUARD_ELEMENTS = 1 << 15  # 64 KiB or more
# Error measures are stable to a few per mille over this many elements.
_LEAST_ELEMENTS = 1 << 17
_LOOPED_CLASS = "normal"
_WHOLE_CLASS = "constant"


class Launchable(Protocol):
    """What is verified: `hadagen.driver.LoadedKernel`, or a stand-in."""

    @property
    def spec(self) -> LaunchSpec: ...

    @property
    def resident_blocks(self) -> int: ...

    def launch(self, stream: int, x: int, y: int, elements: int, scale: float, rows: RowShape) -> None: ...


class RowCounts(NamedTuple):
    """How many rows are transformed: `base` by every class, `looped` by the normal one, `few` compared by bits."""

    base: int
    looped: int
    few: tuple[int, ...]


def row_counts(spec: LaunchSpec, n: int, resident_blocks: int) -> RowCounts:
    """Row counts whose last tile is ragged wherever a tile has several rows.

    `base`: at least three tiles. `looped`: where the grid is persistent, every block gets two tiles and half of them
    a third. `few`: a single row, and a whole tile plus one row.
    """
    tile_rows = spec.tile_elements // n

    def ragged(tiles: int) -> int:
        return tiles * tile_rows - (1 if tile_rows > 1 else 0)

    tiles = max(3, -(-_LEAST_ELEMENTS // spec.tile_elements))
    clusters = resident_blocks // spec.cluster if spec.persistent else 0
    return RowCounts(ragged(tiles), ragged(max(tiles, 2 * clusters + clusters // 2 + 1)), (1, tile_rows + 1))


class Arrangement(NamedTuple):
    """How the rows of a verification lie: their shape, and by how many elements the first ones of x and y miss a
    boundary of 16 bytes. In place y's rows lie as x's do."""

    rows: RowShape
    x_offset: int = 0
    y_offset: int = 0

    @property
    def in_place(self) -> Arrangement:
        columns, x_pitch, _ = self.rows
        return Arrangement(RowShape(columns, x_pitch, x_pitch), self.x_offset, self.x_offset)


def arrangements(problem: Problem) -> tuple[Arrangement, ...]:
    """The rows to verify with. Those of a pitched problem: as they are timed; apart, and as long as n; with 16-byte
    boundaries nowhere; with them in x alone, and as short as may be."""
    timed = timed_rows(problem)
    if not problem.pitched:
        return (Arrangement(timed),)
    n, vector = problem.n, 16 // problem.dtype.bytes
    most, least = max(n - 1, 1), n // 2 + (n > 2)
    aligned = -(-least // vector) * vector
    return (
        Arrangement(timed),
        Arrangement(RowShape(n, n + vector, n + 2 * vector)),
        Arrangement(RowShape(most, most + 4, most + 2), x_offset=1, y_offset=3),
        Arrangement(RowShape(least, aligned + vector, least), y_offset=1),
    )


class _Case(NamedTuple):
    """Rows that are repeated to any number. There are an odd number of them, so no whole tiles are alike."""

    bits: torch.Tensor  # [rows, columns] int16 or int32
    reference: torch.Tensor  # [rows, columns] float64

    def rows(self, count: int) -> torch.Tensor:
        """Which of them to take, to have `count`."""
        return torch.arange(count, device=self.bits.device) % len(self.bits)

    def to(self, device: torch.device) -> _Case:
        return _Case(self.bits.to(device, copy=True), self.reference.to(device, copy=True))


# By class of input and columns. Constant rows that are cut short are left out: a few values would come out over and
# over, and the rounding of so few does not average out.
_Cases = dict[tuple[str, int], _Case]


def _cases(problem: Problem) -> _Cases:
    rows = _LEAST_ELEMENTS // problem.n + 1
    scale = verification_scale(problem)
    cases = {}
    for name, values in input_classes(problem, rows).items():
        for columns in {arrangement.rows.columns for arrangement in arrangements(problem)}:
            if name == _WHOLE_CLASS and columns < problem.n:
                continue
            padded = values.copy()
            padded[:, columns:] = 0.0
            bits = torch.from_numpy(encode(problem.dtype, padded[:, :columns])).view(_BITS[problem.dtype.bytes])
            cases[name, columns] = _Case(bits, torch.from_numpy(hadamard(padded, scale)[:, :columns].copy()))
    return cases


@dataclass
class _Findings:
    """What is still on the device: read once, at the end."""

    errors: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    outside: list[torch.Tensor] = field(default_factory=list)  # true: nothing but the output was written
    repeated: list[torch.Tensor] = field(default_factory=list)  # true: the same bits again
    fewer: list[torch.Tensor] = field(default_factory=list)  # true: fewer rows gave the same bits


class Verifier:
    """Verifies kernels on one device. The inputs and the reference of the last problem are kept.

    `stream`: handle of the stream that is current for PyTorch.
    """

    def __init__(self, device: torch.device, stream: int) -> None:
        self._device = device
        self._stream = stream
        self._problem: Problem | None = None
        self._host_cases: _Cases = {}
        self._device_cases: _Cases = {}

    def check(self, kernel: Launchable, problem: Problem) -> Answer:
        """Whether it is right; nothing is timed. Raises what a failed launch raises: `DeviceError`, or PyTorch's
        `RuntimeError`."""
        cases = self._cases_of(problem)
        self._device_cases = {}  # a wrong kernel may have written anywhere
        answer = self._judge(kernel, problem, cases)
        if answer.outcome is Outcome.OK:
            self._device_cases = cases
        return answer

    def errors_of(self, transform: Callable[[torch.Tensor], torch.Tensor], problem: Problem) -> dict[str, float]:
        """Relative error, by class of input, of an orthonormal transform of [rows, columns] that is no kernel of ours.

        The rows are those that kernels are verified with, as they are timed; but a power of two of them, as other
        libraries may need. Raises what `transform` raises.
        """
        columns = timed_rows(problem).columns
        errors = {}
        for (name, of_columns), case in self._cases_of(problem).items():
            if of_columns == columns:
                x = case.bits[: len(case.bits) - 1].view(TORCH_DTYPE[problem.dtype]).clone()
                out = transform(x).contiguous().view(case.bits.dtype)
                errors[name] = [_relative_error(out, case.reference[: len(x)], problem.dtype)]
        return {name: _largest(values) for name, values in errors.items()}

    def _cases_of(self, problem: Problem) -> _Cases:
        """On the device. Both numerics have the same."""
        problem = replace(problem, numerics=Numerics.ACCURATE)
        if problem != self._problem:
            self._host_cases, self._problem, self._device_cases = _cases(problem), problem, {}
        if not self._device_cases:
            self._device_cases = {key: case.to(self._device) for key, case in self._host_cases.items()}
        return self._device_cases

    def _judge(self, kernel: Launchable, problem: Problem, cases: _Cases) -> Answer:
        counts = row_counts(kernel.spec, problem.n, kernel.resident_blocks)
        findings = _Findings()
        for arranged, name in product(arrangements(problem), INPUT_CLASSES):
            if (name, arranged.rows.columns) not in cases:
                continue
            case = cases[name, arranged.rows.columns]
            rows = case.rows(counts.looped if name == _LOOPED_CLASS else counts.base)
            x, reference = case.bits[rows], case.reference[rows]
            ways = (arranged, False), (arranged.in_place, True)
            out, again = (self._run(kernel, problem, x, *way, findings) for way in ways)
            errors = findings.errors.setdefault(name, [])
            errors += [_relative_error(y, reference, problem.dtype) for y in (out, again)]
            findings.repeated.append((out == again).all())
            if name == _LOOPED_CLASS:
                findings.repeated.append((out == self._run(kernel, problem, x, arranged, False, findings)).all())
                for few, way in product(counts.few, ways):
                    part = self._run(kernel, problem, x[:few], *way, findings)
                    findings.fewer.append((part == out[:few]).all())
        return _answer(problem, findings)

    def _run(
        self,
        kernel: Launchable,
        problem: Problem,
        x: torch.Tensor,
        arranged: Arrangement,
        in_place: bool,
        findings: _Findings,
    ) -> torch.Tensor:
        """The bits of the transform of x, both [rows, columns], from amid poison that must be there afterwards."""
        count, (columns, *pitches) = len(x), arranged.rows
        extent = (count - 1) * max(pitches) + columns
        stride = -(-extent // _GUARD_ELEMENTS) * _GUARD_ELEMENTS + _GUARD_ELEMENTS  # keeps y as aligned as x
        poison = _POISON[problem.dtype.bytes]
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
        kernel.launch(self._stream, source.data_ptr(), target.data_ptr(), elements, scale, arranged.rows)
        result = target.clone(memory_format=torch.contiguous_format)
        if not in_place:
            findings.outside.append((source == x).all())
        source.fill_(poison)
        target.fill_(poison)
        findings.outside.append((memory == poison).all())
        return result


def _relative_error(bits: torch.Tensor, reference: torch.Tensor, dtype: DType) -> torch.Tensor:
    """‖out − reference‖ / ‖reference‖, not finite where `out` is not."""
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
        detail = f"relative error {found} for {worst} inputs; {problem.name} allows {bound}"
        return Answer(Outcome.WRONG_ANSWER, detail, errors)
    if not repeated:
        return Answer(Outcome.UNSTABLE, "the same input came out differently a second time", errors)
    if not fewer:
        return Answer(Outcome.WRONG_ANSWER, "a few rows alone came out differently than among many", errors)
    return Answer(Outcome.OK, "", errors)


def _largest(values: list[torch.Tensor]) -> float:
    errors = [float(value) for value in values]
    return max(errors) if all(math.isfinite(error) for error in errors) else math.inf
