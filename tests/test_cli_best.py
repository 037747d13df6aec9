"""`hadagen best`: the kernel that a call would take, and what is known of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import BEST, run, sentence, succeed
from sample_trials import H100, make_trial, times

from hadagen.problem import DType, Problem
from hadagen.runtime.device import Device
from hadagen.target import known_archs
from hadagen.trial import Environment, Provenance
from hadagen.tuning_db.bundle import shipped
from hadagen.tuning_db.bundle_writer import write_bundle
from hadagen.tuning_db.winners import portfolio

pytestmark = pytest.mark.usefixtures("machine")


def test_best_prints_one_object(sample: Path) -> None:
    found = json.loads(succeed(*BEST, "256", "--rows", "256", "--inplace", "--device", H100.gpu, "--json"))
    assert found["problem"] == "n256-float16-accurate"
    assert (found["rows"], found["destination"], found["match"]) == (256, "in-place", "same-gpu")
    assert found["kernel"] == make_trial(1).kernel.digest
    assert found["knobs"] == {"chunks": 1, "grid": "tiles"}
    assert found["launch"]["threads"] == 256
    assert (found["us"], found["copy_us"], found["fraction_of_copy"]) == (4.0, 1.9, 1.9 / 4.0)
    assert found["relative_error"] == 2e-4
    assert found["provenance"]["kind"] == "measured"
    assert {"gpu", "driver", "nvcc", "date"} <= found["provenance"].keys()


def test_best_says_how_a_kernel_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HADAGEN_BUNDLE", str(shipped()["sm90"]))
    assert "elements a tile, starts early\n" in succeed(*BEST, "4096", "--rows", "1024")


def test_best_names_what_a_batch_invariant_call_runs(sample: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = run(*BEST, "256", "--rows", "32", "--inplace", "--batch-invariant")
    assert "n256-float16-accurate has no kernels that give the same bits in every call; leave out" in sentence(
        refused, 2
    )
    monkeypatch.setenv("HADAGEN_BUNDLE", str(shipped()["sm90"]))
    found = [
        json.loads(succeed(*BEST, "8192", "--rows", str(rows), "--batch-invariant", "--json"))["launch"]["arithmetic"]
        for rows in (1, 64, 4096)
    ]
    assert len(set(found)) == 1


def test_best_is_readable(sample: Path) -> None:
    text = succeed(*BEST, "256", "--inplace", "--rows", "32", "--device", H100.gpu)
    assert "match     same-gpu" in text
    assert "chunks=1 grid=tiles" in text
    assert "time      2.00 µs for 8192 elements, 0.95 of a plain copy (1.90 µs)\n" in text
    assert f"measured  {H100.gpu}, driver 580.65, compiler 13.0.48" in text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), f"measured on {H100.gpu}, not on every GPU of sm90"),
        (("--device", "NVIDIA H200"), f"measured on {H100.gpu}, not on NVIDIA H200"),
        (("--device", "RTX"), f"measured on {H100.gpu}, not on RTX"),
        (("--device", H100.gpu, "--rows", str(10**9)), "measured at 65536 elements, not at 256000000000"),
        (("--rows", "1"), f"measured on {H100.gpu} at 8192 elements, not on every GPU of sm90 at 256"),
    ],
)
def test_estimated_is_said_first(options: tuple[str, ...], said: str, sample: Path) -> None:
    _, first, *others = succeed(*BEST, "256", "--rows", "32", "--inplace", *options).splitlines()
    assert first == f"estimated: {said}"
    (time,) = [line for line in others if line.startswith("time")]
    assert (f"elements on {H100.gpu}, 0." in time) == (f"on {H100.gpu}" in said)


def test_the_time_of_the_cost_model_is_not_told(sample: Path) -> None:
    trial = make_trial(environment=Environment(), provenance=Provenance.ESTIMATED)
    write_bundle(sample, "sm90", portfolio([trial]), {trial.kernel.digest: trial.kernel}.__getitem__, {})
    text = succeed(*BEST, "256", "--inplace")
    assert "estimated: no GPU has timed it\nmatch     estimated\n" in text
    assert "µs" not in text


def test_best_tells_pitched_rows_from_contiguous_ones(sample: Path) -> None:
    pitched = json.loads(succeed(*BEST, "256", "--inplace", "--pitched", "--json"))
    assert (pitched["problem"], pitched["match"]) == ("n256-float16-accurate-pitched", "generic")
    trial = make_trial(problem=Problem.of(4096, DType.FLOAT32, rows="pitched"), errors={"normal": 1e-7})
    trial = replace(trial, timings=times({1 << 16: 2.0}))
    write_bundle(sample, "sm90", portfolio([trial]), {trial.kernel.digest: trial.kernel}.__getitem__, {})
    asked = ("best", "--arch", "sm90", "--n", "4096", "--dtype", "float32", "--rows", "8", "--inplace")
    shown = succeed(*asked, "--pitched")
    assert f"65536 elements, rows of 3072 on {H100.gpu}, 0.95 of a plain copy" in shown
    assert json.loads(succeed(*asked, "--json"))["match"] == "generic"


def test_best_on_a_gpu_that_there_is_no_target_for(sample: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hadagen.runtime.choose.find_device", lambda name, arch: Device(arch or "sm70", "Tesla V100"))
    known = ", ".join(known_archs())
    said = succeed("best", "--n", "256", "--rows", "4")
    assert f"no kernel, PyTorch computes it; hadagen makes kernels for {known} only" in said
    asked = sentence(run("best", "--arch", "sm70", "--n", "256", "--rows", "4"), 2)
    assert asked == f"arch 'sm70' is not known and no bundle serves it; choose one of {known}"


def test_best_says_that_there_is_no_kernel(sample: Path) -> None:
    assert "no kernel, PyTorch computes it; to make some: hadagen tune --arch sm90" in succeed(*BEST, "512")
    assert json.loads(succeed(*BEST, "512", "--json"))["match"] == "generic"
