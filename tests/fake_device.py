"""A GPU that is made up, for commands that measure: its times follow a rule, and it remembers what it was asked."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from fake_search import FakeRunner

from hadagen import measure
from hadagen.measure import Answer, Cell, Choice, ChoiceResult, Comparison, Ranking, Times, Variant
from hadagen.problem.problem import Problem
from hadagen.problem.trial import Kernel, Outcome, Timing, Trial


class FakeDevice(FakeRunner):
    """Stands for a `DeviceRunner` on an H100. `peers`: other libraries and what they take; what does not begin with
    "one" serves n = 4 alone. `refusals`: what is found of kernels, by n."""

    peers: ClassVar[dict[str, float]] = {}
    refusals: ClassVar[dict[int, Answer]] = {}
    compared: ClassVar[list[tuple[list[Problem], list[Cell]]]] = []
    ranked: ClassVar[list[tuple[list[Variant], list[Choice]]]] = []

    def __init__(self, device_index: int, copy_kernels: Sequence[Kernel], cells: Any = None, **others: object) -> None:
        super().__init__()
        self.cells = cells
        assert cells is None or others["give_up"] == math.inf
        assert device_index == 0
        assert len(copy_kernels) == len(measure.copy_sources())

    def trial(self, variant: Variant) -> Trial:
        """Every kernel takes at other cells what it takes at the first of those of a search."""
        trial = super().trial(variant)
        cells = self.cells_of(variant)
        if cells is None:
            return trial
        us = trial.timings[0].us
        return replace(trial, timings=tuple(Timing(*cell, us, us, us, 1.0) for cell in cells))

    def cells_of(self, variant: Variant) -> Sequence[Cell] | None:
        """The cells that are asked for, of this variant or of all; None for those of a search. None is given up
        there."""
        assert variant.cells is None or variant.limits == {}
        return variant.cells if self.cells is None else self.cells[variant.problem]

    def compare(self, variants: Sequence[Variant], cells: Sequence[tuple[Cell, Sequence[int]]]) -> Comparison:
        """Ours take 1 µs at the position in `variants`, and one more at each after it; the copy takes 0.5 µs."""
        self.compared.append(([variant.problem for variant in variants], [cell for cell, _ in cells]))
        answers = [self.refusals.get(c.problem.n, Answer(Outcome.OK, "", {"normal": 2e-4})) for c in variants]
        peers = {name: us for name, us in self.peers.items() if name == "one" or variants[0].problem.n == 4}
        times = [
            Times(0.5, {i: 1.0 + i for i in wanted if answers[i].outcome is Outcome.OK}, peers) for _, wanted in cells
        ]
        return Comparison(tuple(answers), {name: {"normal": 3e-4} for name in self.peers}, tuple(times))

    def rank(self, variants: Sequence[Variant], choices: Sequence[Choice]) -> Ranking:
        """Each choice is lost by one percent more than the one before it."""
        self.ranked.append((list(variants), list(choices)))
        answers = [self.refusals.get(c.problem.n, Answer(Outcome.OK, "")) for c in variants]
        right = all(answer.outcome is Outcome.OK for answer in answers)
        results = [ChoiceResult(0, 2.0 + i / 50, 2.0, i / 100) if right else None for i, _ in enumerate(choices)]
        return Ranking(tuple(answers), tuple(results))

    def __enter__(self) -> "FakeDevice":
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, empty in (("peers", {}), ("refusals", {}), ("compared", []), ("ranked", [])):
        monkeypatch.setattr(FakeDevice, name, empty)
    monkeypatch.setattr(measure, "device_environment", lambda index=0: FakeDevice.environment)
    monkeypatch.setattr(measure, "DeviceRunner", FakeDevice)
