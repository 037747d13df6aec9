"""Laws that every kernel keeps, whatever it computes inside. They need no reference.

- *linear*: T(a + b) = T(a) + T(b), but for rounding.
- *norm*: with an orthonormal matrix, rows keep their norm.
- *inverse*: the same kernel with its matrix transposed and its signs exchanged takes its result back to x.
- *rows*: a row has the same bits whatever the other rows hold, NaNs and infinities too.
- *ragged*: a few rows alone, one to two tiles of them, have the bits that they have among many.
- *outside*: nothing is written but the result: not beyond it, not between pitched rows, not to x, matrix or signs.

And of a kernel that quantizes, besides *rows*, *ragged* and *outside*:

- *range*: finite values, large ones too, have codes and scales that stand for finite values, and no row of values is
  lost.
- *scale*: of twice the values, scales are twice as large, and codes are the same.

Before SiLU·mul, x is the half that is not activated, and all of the other half is 1: a product of x and silu(1).
"""

from collections.abc import Iterable
from itertools import product

import torch

from hadagen.measure.device_operands import DeviceOperands, orthogonal_matrix
from hadagen.measure.verify import _BITS, TORCH_DTYPE, Arrangement, Case, Launchable, Verifier, _Findings, arrangements
from hadagen.problem.formats import TENSOR, Element, Format
from hadagen.problem.operands import OperandValues, verification_operands
from hadagen.problem.problem import LARGE, Problem
from hadagen.truth import quantizer
from hadagen.truth.reference import verification_scale

MOST_ROWS = 300  # of a transform; of kernels with more rows in a tile, tiles are ragged anyway
# Errors of few values do not average out, so some elements allow more than the bound of a problem.
SLACK = 3


def broken_laws(kernel: Launchable, problem: Problem, device: torch.device, stream: int) -> list[str]:
    """The laws that a kernel breaks, each with what shows it. Raises what a failed launch raises."""
    laws = _Laws(kernel, problem, device, stream)
    return laws.of_codes(problem.io.form) if problem.io.form else laws.of_values()


class _Laws:
    def __init__(self, kernel: Launchable, problem: Problem, device: torch.device, stream: int) -> None:
        self._kernel, self._problem, self._device = kernel, problem, device
        self._verifier, self._findings = Verifier(device, stream), _Findings()
        given: OperandValues = verification_operands(problem)
        turned = dict(given)
        if problem.order > 1:
            matrix = orthogonal_matrix(problem.order)
            given, turned = {**given, "matrix": matrix.numpy()}, {**turned, "matrix": matrix.T.numpy()}
        if problem.transform.signed:
            turned |= {"signs_before": given["signs_after"], "signs_after": given["signs_before"]}
        self._operands, self._turned = (DeviceOperands(problem, each, device) for each in (given, turned))
        self._prologue = problem.prologue != ""
        assert problem.prologue in ("", "silu_mul"), problem.prologue
        self._dtype = TORCH_DTYPE[problem.io.input]
        self._random = torch.Generator().manual_seed(0)
        unit_rows = max(1, kernel.spec.tile_elements // problem.unit)
        self._counts = sorted({1, unit_rows, unit_rows + 1, min(2 * unit_rows + 1, max(MOST_ROWS, unit_rows + 2))})
        self._broken: list[str] = []

    def of_values(self) -> list[str]:
        for arranged, in_place in product(arrangements(self._problem), (False, True)[: 1 + (not self._prologue)]):
            way = arranged.in_place if in_place else arranged
            where = f"{way.rows.columns} columns, {'in place' if in_place else 'out of place'}"
            columns, whole = way.rows.columns, way.rows.columns == self._problem.n
            rows = self._counts[-1]
            x = self._normal(rows, columns)
            y = self._run(x, way, in_place)
            self._check_rows(x, y, way, in_place, where)
            for few in self._counts[:-1]:
                if not _same(self._run(x[:few], way, in_place), y[:few]):
                    self._broken.append(f"ragged: {few} rows have other bits than among {rows} ({where})")
            a, b = (torch.randint(-8, 9, (rows, columns), generator=self._random).to(self._device) for _ in "ab")
            one, other, both = (self._run(each.to(self._dtype), way, in_place).double() for each in (a, b, a + b))
            self._check_near("linear", both, one + other, 2, where)
            if whole:
                factor = self._factor()
                norms, wanted = (torch.linalg.vector_norm(each.double(), dim=1) for each in (y, x))
                self._check_near("norm", norms, wanted * factor, 1, where)
                if self._prologue:
                    continue
                back = self._run(y, way, in_place, self._turned)
                self._check_near("inverse", back.double(), x.double() * factor**2, 2, where)
        return self._finished()

    def of_codes(self, form: Format) -> list[str]:
        units = self._counts[-1]
        x = self._normal(units, self._problem.unit)
        x[::2] *= 50
        codes, scales = self._quantize(x, form)
        for value in (torch.nan, torch.inf):
            among = x.clone()
            others = torch.arange(units) % 3 != 1
            among[others] = value
            kept = ~others if units > 1 else others.new_zeros(units)
            for mine, theirs in zip(self._quantize(among, form), (codes, scales), strict=True):
                if theirs is not None and mine is not None and not torch.equal(_bits(mine)[kept], _bits(theirs)[kept]):
                    self._broken.append(f"rows: other rows of {value} change a row")
        for few in self._counts[:-1]:
            for mine, theirs in zip(self._quantize(x[:few], form), (codes, scales), strict=True):
                if theirs is not None and mine is not None and not _same(mine, theirs[:few]):
                    self._broken.append(f"ragged: {few} rows have other codes or scales than among {units}")
        self._check_range(form, codes, scales)
        large = torch.randn(units, self._problem.unit, generator=self._random) * LARGE[self._problem.io.input]
        self._check_range(form, *self._quantize(large.to(self._device, self._dtype), form))
        if scales is not None and not form.needs_scale and scales.dtype != torch.uint8:
            twice = self._quantize(x * 2, form)
            self._check_near("scale", twice[1].double(), 2 * scales.double(), 1, "scales of twice the values")
            apart = (twice[0].view(torch.uint8) != codes.view(torch.uint8)).double().mean() if codes.numel() else 0.0
            if apart > 1e-3:
                self._broken.append(f"scale: {float(apart):.2%} of the codes of twice the values are others")
        return self._finished()

    def _normal(self, rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=self._random).to(self._device, self._dtype)

    def _among_parts(self, x: torch.Tensor) -> torch.Tensor:
        """x with the other parts of its rows, [rows, width · n]."""
        return torch.cat([torch.ones_like(x), x], 1) if self._prologue else x

    def _factor(self) -> float:
        """What the transform multiplies norms by."""
        square = int(orthogonal_matrix(self._problem.order)[0].abs().sum()) if self._problem.order > 1 else 1
        active = float(torch.nn.functional.silu(torch.ones(()))) if self._prologue else 1.0
        return float(active * verification_scale(self._problem) * (square * self._problem.length) ** 0.5)

    def _run(
        self, x: torch.Tensor, way: Arrangement, in_place: bool, operands: DeviceOperands | None = None
    ) -> torch.Tensor:
        bits = self._among_parts(x).contiguous().view(_BITS[self._problem.io.input.bytes])
        given = self._operands if operands is None else operands
        case = Case(bits, bits, {}, {})
        (out,) = self._verifier.run(self._kernel, self._problem, case, given, way, in_place, self._findings)
        return out.view(self._dtype)

    def _quantize(self, x: torch.Tensor, form: Format) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Codes, and scales [rows, groups], None where these say nothing of rows."""
        bits = self._among_parts(x.view(-1, self._problem.n)).view(_BITS[self._problem.io.input.bytes])
        (way,) = arrangements(self._problem)
        case = Case(bits, bits, {}, {})
        found = self._verifier.run(self._kernel, self._problem, case, self._operands, way, False, self._findings)
        return found[0], found[1] if form.group != TENSOR else None

    def _check_rows(self, x: torch.Tensor, y: torch.Tensor, way: Arrangement, in_place: bool, where: str) -> None:
        kept = torch.arange(len(x)) % 3 == 1
        for value in (torch.nan, torch.inf):
            among = x.clone()
            among[~kept] = value
            if not _same(self._run(among, way, in_place)[kept], y[kept]):
                self._broken.append(f"rows: other rows of {value} change a row ({where})")

    def _check_range(self, form: Format, codes: torch.Tensor, scales: torch.Tensor | None) -> None:
        if scales is not None and not bool(torch.isfinite(quantizer._decode_scales(scales)).all()):
            self._broken.append("range: a scale of finite values is not finite")
        if form.element is Element.NONE or not codes.numel():
            return
        values = quantizer._decode(form, codes)
        if not bool(torch.isfinite(values.float()).all()):
            self._broken.append("range: a code of finite values stands for none")
        if scales is not None and not bool((values != 0).any(dim=1).all()):
            self._broken.append("range: a row of values became a row of zeros")

    def _check_near(self, law: str, found: torch.Tensor, wanted: torch.Tensor, roundings: int, where: str) -> None:
        """roundings: how many results of the kernel an error is made of, beside the first."""
        apart = torch.linalg.vector_norm(found - wanted) / torch.linalg.vector_norm(wanted)
        allowed = SLACK * (1 + roundings) * self._problem.error_bound
        if not apart <= allowed:
            self._broken.append(f"{law}: off by {float(apart):.2e}, more than {allowed:.2e} ({where})")

    def _finished(self) -> list[str]:
        whole: Iterable[bool] = (bool(each) for each in self._findings.outside)
        if not (all(whole) and self._operands.are_whole() and self._turned.are_whole()):
            self._broken.append("outside: something was written that is no part of the result")
        return self._broken


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of elements as integers, which every release of PyTorch compares and indexes."""
    return tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])
