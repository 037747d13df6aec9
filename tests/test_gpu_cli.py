"""The command line on a machine with a GPU: from a measured tune to a bench that times its winners."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import stand_in_peers
import torch
from command_line import run, succeed
from sample_bundle import hide_bundles

from hadagen.cli import options
from hadagen.problem.problem import Problem
from hadagen.problem.regimes import Destination, element_buckets
from hadagen.tuning_db.bundle import Bundle

pytestmark = pytest.mark.gpu

TUNE = ("tune", "--n", "128,4096", "--kind", "transform", "--dtype", "float16", "--numerics", "accurate")
TUNE += ("--trials", "3", "--no-refine")
BENCH = ("bench", "--n", "128,4096", "--numerics", "accurate", "--inplace", "--elements", "65536,8388608", "--json")
BETWEEN = ("bench", "between", "--n", "128,4096", "--inplace", "--out-of-place", "--counts", "6")


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hide_bundles(tmp_path, monkeypatch)


def place(row: dict[str, Any]) -> tuple[int, int]:
    """The n and the elements of a result of `bench`."""
    return Problem.parse(row["problem"]).n, row["elements"]


def test_winners_are_measured_chosen_and_timed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = json.loads(succeed(*TUNE, "--json"))
    assert not tuned["estimated"]
    assert tuned["gpu"] == torch.cuda.get_device_name(0)
    assert {winner["provenance"] for winner in tuned["winners"]} == {"measured"}
    assert {winner["problem"].endswith("pitched") for winner in tuned["winners"]} == {False, True}
    title, *_, small, large = succeed(*BENCH[:-1], "--pitched").splitlines()
    assert "pitched" in title
    assert [line.split()[0] for line in (small, large)] == ["128", "4096"]
    best = json.loads(succeed("best", "--n", "4096", "--numerics", "accurate", "--rows", "2048", "--inplace", "--json"))
    assert best["match"] == "same-gpu"

    stand_in_peers.install(tmp_path, monkeypatch)
    rows = json.loads(succeed(*BENCH))["results"]
    places = [(n, elements) for n in (128, 4096) for elements in (65536, 8388608)]
    results = [row for row in rows if row["library"] == "hadagen"]
    assert [place(result) for result in results] == places
    for result in results:
        assert 0.05 < result["fraction_of_copy"] < 2.0
        assert 0 < result["error"] <= Problem.parse(result["problem"]).error_bound
    for name in ("fast_hadamard_transform", "HadaCore"):
        theirs = [row for row in rows if row["library"] == name]
        assert [place(row) for row in theirs] == places
        assert all(row["us"] > row["copy_us"] for row in theirs)
        assert all(1.9e-4 < row["error"] < 2.2e-4 for row in theirs)  # they round once
    timed_again = next(result for result in results if place(result) == (4096, 8388608))
    assert (timed_again["kernel"], timed_again["us"]) == (best["kernel"], pytest.approx(best["us"], rel=0.3))

    table = tmp_path / "between.csv"
    report = json.loads(succeed(*BETWEEN, "--db", options.default_db(), "--csv", table, "--json"))
    assert len(report["results"]) == 2 * 6 == len(table.read_text().splitlines()) - 1
    assert {row["variants"] for row in report["results"]} <= {1, 2, 3}
    for row in report["results"]:
        assert 0 <= row["loss"] <= report["worst_loss"]
        assert (row["loss"] == 0) == (row["kernel"] == row["best_kernel"])


def winners(path: Path) -> dict[tuple[Problem, Destination, int], str]:
    """Kernels by cell."""
    entries = Bundle.open(path).all_entries()
    return {(entry.problem, entry.destination, entry.elements): entry.kernel for entry in entries}


def test_winners_are_found_between_the_sizes_that_were_tuned() -> None:
    succeed(*TUNE, "--contiguous")
    path = options.default_bundle("sm90")
    before = winners(path)
    report = json.loads(succeed("tune", "--n", "128", "--trials", "0", "--json"))
    Bundle.open(path).verify()
    after = winners(path)
    assert before.items() <= after.items()
    assert {winner["problem"] for winner in report["winners"]} == {"n128-float16-accurate"}
    assert report["between"] == len(after) - len(before)
    for problem, _, elements in after.keys() - before.keys():
        assert problem.n == 128
        assert elements % 128 == 0
    with options.open_db(None) as store:
        for trial in store.trials(blobs=False):
            counts = {timing.elements for timing in trial.timings}
            assert (len(counts) > len(element_buckets(trial.problem))) == (trial.problem.n == 128)


def test_the_doctor_finds_the_gpu() -> None:
    checks = {check["name"]: check for check in json.loads(run("doctor", "--json").stdout)["checks"]}
    assert checks["gpu"]["state"] == "ok"
    assert torch.cuda.get_device_name(0) in checks["gpu"]["says"]


def test_a_row_length_is_tuned_within_its_time_and_refined() -> None:
    """The second half of a minute is for starting, and for a machine that is slower."""
    began = time.monotonic()
    report = json.loads(succeed("tune", "--n", "4096", "--quick", "--json"))
    assert time.monotonic() - began < 60
    assert report["seconds"] < 40
    assert report["trials"] > 19
    assert {gain["problem"].partition("-")[0] for gain in report["faster"]} == {"n4096"}
    assert all(gain["faster"] <= gain["sizes"] for gain in report["faster"])
