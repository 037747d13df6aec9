"""docs/reliability.md: its tests exist, and its figures are those of what was measured."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import bundle_damage
import compare_tunes
import pytest
import refresh_files as files
import refresh_reliability
import sanitize
from refresh_fleet import fleet_numbers
from refresh_reliability import PROMISES
from sample_bundle import write_trials
from sample_trials import H100, make_timing, make_trial

from hadagen.measure import Cell, Variant
from hadagen.regimes import Destination
from hadagen.tuning_db.bundle import Bundle

TESTS = Path(__file__).resolve().parent


@pytest.mark.parametrize("area", PROMISES)
def test_every_test_that_is_named_exists(area: str) -> None:
    for promise in PROMISES[area]:
        assert promise.tests, promise.text
        for test in promise.tests:
            file, _, name = test.partition("::")
            assert re.search(rf"(?m)^def {name}\(", (TESTS / file).read_text()), test


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No figures yet."""
    for name in (
        "KILLS",
        "FAULTS",
        "LAWS",
        "SANITIZER",
        "TUNES",
        "BUNDLE_DAMAGE",
        "FLEET",
        "FLEET_GPUS",
        "FLEET_KILLS",
    ):
        monkeypatch.setattr(files, name, tmp_path / getattr(files, name).name)
    return tmp_path


def figures() -> set[str]:
    return {promise.figure() for promises in PROMISES.values() for promise in promises}


def test_figures_are_those_of_the_data(data: Path) -> None:
    assert figures() == {""}
    files.KILLS.write_text(json.dumps({"tune": 5, "worker": 3, "compiler": 2, "databases": 4, "trials": 96}))
    fault = {"fault": "deadlock", "outcome": "timeout", "lost_s": 7.25}
    trap = {"fault": "trap", "outcome": "launch_failed", "lost_s": 3.0}
    found: dict[str, Any] = {"gpu": "NVIDIA H200", "cells": 9, "same_winners": 8, "faults": [fault, fault, trap]}
    files.FAULTS.write_text(json.dumps(found))
    files.LAWS.write_text(json.dumps({"gpu": "NVIDIA H200", "kernels": 7, "problems": 3, "broken": {"a": ["norm"]}}))
    row = dict.fromkeys(sanitize.COLUMNS, "") | {"gpu": "NVIDIA H200", "launches": "6"}
    a = row | {"kernel": "a", "problem": "n2-float16-fast", "memcheck": "0", "racecheck": "2", "own_barrier": "3"}
    control = row | {"kernel": "c", "problem": sanitize.CONTROL, "memcheck": "1"}
    sanitize.write_table(files.SANITIZER, {("", str(i), ""): each for i, each in enumerate((a, control))})
    timed = [("NVIDIA H200", "n2-float16-fast", 8, "", "", us, 1, "", "") for us in (1, 1.02, 1.03, 0.9)]
    with files.TUNES.open("w", newline="") as file:
        csv.writer(file).writerows([compare_tunes.COLUMNS, *timed])
    with files.BUNDLE_DAMAGE.open("w", newline="") as file:
        csv.writer(file).writerows([bundle_damage.COLUMNS, ("flips", "made anew", 9, 4, 3, 2, 6, 3, 40, 1)])
    search = {"workers": 16, "more": 1.3, "seeds": 20, "problems": 6, "one_by_one": 0.99594, "in_parallel": 0.99695}
    simulated = {"search": search, "workers": 9, "classes": {"A": 5, "B": 4}, "busy": {"A": 0.984, "B": 0.966}}
    simulated |= {"trials_per_second": 8.61, "coordinator_ms_per_trial": 12.11}
    files.FLEET.write_text(json.dumps(simulated))
    counted = [{"gpus": gpus, "new_trials": trials} for gpus, trials in ((1, 100), (2, 195))]
    of_gpus = {"gpu": "NVIDIA H100", "cpus": 32, "command": "hadagen tune", "runs": counted}
    files.FLEET_GPUS.write_text(json.dumps(of_gpus))
    faults = {"a worker hangs": 7, "the tune is killed": 5, "a gpu breaks": 0}
    killed = {"schedules": 4, "faults": faults, "runs": 9, "trials": 64, "equal": 3}
    files.FLEET_KILLS.write_text(json.dumps(killed))
    assert figures() == {
        "",
        "12 faults of 2 kinds in 9 runs: 3 of 4 databases have every trial once, 64 in all",
        "9 simulated GPUs of 2 classes: 9 trials a second, at least 96% busy; 2 NVIDIA H100: 1.95 times the trials "
        "of 1",
        "16 in progress: 0.997 of the best speed; one: 0.996; 6 problems, 20 seeds",
        "9 cases: 4 refused, 3 as before, 2 hold something else with digests made anew; where a signature is asked "
        "for, 6 and 3, and no other; at most 40 ms and 1 MB",
        "10 kills (5 of the tune, 3 of its measuring process, 2 of compilers): 4 of 4 databases equal, of 96 trials "
        "each",
        "NVIDIA H200: 3 broken kernels of 2 kinds; 8 of 9 winners the same",
        "NVIDIA H200: 7.2 s at most, of 2",
        "NVIDIA H200: 7 kernels of 3 problems; 1 break a law",
        "NVIDIA H200: 1 kernels of 1 problems; findings: memcheck 0 (1 kernels), racecheck 2 (1 kernels), initcheck 0 "
        "(0 kernels), synccheck 0 (0 kernels); 1 kernels with warnings of a barrier that one thread prepares",
        "NVIDIA H200: 50.0% of 4 cells, of 1 problems",
    }


def test_the_page_about_fleets_has_what_they_do(data: Path) -> None:
    assert fleet_numbers() == files.NO_DATA
    runs = [{"gpus": gpus, "new_trials": trials} for gpus, trials in ((1, 100), (2, 195))]
    files.FLEET_GPUS.write_text(json.dumps({"gpu": "H100", "cpus": 8, "command": "hadagen tune", "runs": runs}))
    assert "2 GPUs finished 195 trials, and 1 finished 100 in the same time" in " ".join(fleet_numbers().split())


class Racer:
    """Of two kernels, the second always takes twice as long, but for one race."""

    def __init__(self) -> None:
        self.raced: list[tuple[Any, ...]] = []

    def race(self, a: Variant, b: Variant, cells: list[Cell]) -> list[tuple[float, float]]:
        self.raced.append((a.kernel.digest, b.kernel.digest, tuple(cells)))
        return [(1.0, 9.0 if len(self.raced) == 1 else 2.0) for _ in cells]


def test_two_tunes_are_compared_cell_by_cell(tmp_path: Path) -> None:
    small, large, only_a = 1 << 13, 1 << 16, 1 << 20
    a = make_trial(1, timings=tuple(make_timing(2.0, elements) for elements in (small, large, only_a)))
    b = [make_trial(1, timings=(make_timing(2.0, small),)), make_trial(2, timings=(make_timing(2.0, large),))]
    of_a, of_b = (Bundle.open(write_trials(tmp_path / name, some)) for name, some in (("a.db", [a]), ("b.db", b)))
    racer = Racer()
    rows = compare_tunes.compared(racer, of_a, of_b, H100.gpu)  # type: ignore[arg-type]
    assert [(row["elements"], row["us_a"], row["us_b"]) for row in rows] == [(small, 2.0, 2.0), (large, 1.0, 2.0)]
    assert [row["kernel_a"] == row["kernel_b"] for row in rows] == [True, False]
    assert len(racer.raced) == compare_tunes.RACES
    assert {cells for *_, cells in racer.raced} == {(Cell(large, Destination.IN_PLACE, rows[1]["cache"]),)}
    assert compare_tunes.compared(racer, of_a, of_b, "Another GPU") == []  # type: ignore[arg-type]


def test_a_promise_is_a_row_with_its_tests(data: Path) -> None:
    table = refresh_reliability.promises_table("kernels").splitlines()
    assert len(table) == 2 + len(PROMISES["kernels"])
    assert "[test_gpu_laws.py](../tests/test_gpu_laws.py) every shipped kernel keeps the laws" in table[2]
    assert table[2].endswith("| – |")
