"""`hadagen doctor`: what it finds sound, missing or broken on a machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import machine, run, sample, succeed

from hadagen.cli import options

__all__ = ["machine", "sample"]  # fixtures
pytestmark = pytest.mark.usefixtures("machine")


def test_the_doctor_finds_a_machine_without_a_gpu_sound(sample: Path) -> None:
    report = json.loads(succeed("doctor", "--json"))
    states = {check["name"]: check["state"] for check in report["checks"]}
    assert states == {
        "python": "ok",
        "torch": "ok",
        "cuda-bindings": "ok",
        "gpu": "missing",
        "kernels": "missing",
        "tune extra": "ok",
        "nvrtc": "ok",
        "nvcc": "ok",
        "emulator": "ok",
        "cache": "ok",
        "bundle": "ok",
    }
    assert report["can"] == {"run_kernels": "no", "tune": "estimated"}
    assert "winners are estimated" in succeed("doctor")


def test_the_doctor_blames_the_cache_where_it_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HADAGEN_CACHE", str(tmp_path / "file" / "cache"))
    result = run("doctor", "--json")
    assert result.exit_code == 1
    checks = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    assert [name for name, check in checks.items() if check["state"] == "broken"] == ["cache"]
    assert "cannot be written (Not a directory)" in checks["cache"]["says"]
    for name in ("nvrtc", "nvcc", "emulator"):
        assert (checks[name]["state"], checks[name]["says"]) == (
            "untried",
            "it cannot be tried without the cache, see above",
        )


def test_the_doctor_finds_an_emulator_that_computes_nonsense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hadagen.emulator.verify", lambda *_: {"normal": 1e-4, "large": 0.5})
    result = run("doctor", "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    (broken,) = [check for check in report["checks"] if check["state"] == "broken"]
    assert broken["name"] == "emulator"
    assert broken["says"].startswith("a kernel is off by 5.0e-01 in the emulator; use another C++ compiler")
    assert report["can"]["tune"] == "no"


def test_the_doctor_finds_a_damaged_bundle() -> None:
    path = options.default_bundle("sm90")
    path.parent.mkdir(parents=True)
    path.write_text("no bundle")
    result = run("doctor")
    assert result.exit_code == 1
    assert "bundle         broken" in result.stdout
    assert "is not a hadagen bundle" in result.stdout
