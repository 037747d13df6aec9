"""Names of archs and GPUs: one rule wherever such a name is read, and what a GPU's name tells."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from sample_bundle import hide_bundles, write_sample
from sample_trials import PROBLEM, make_trial

import hadagen
from hadagen.errors import StorageError, UsageError
from hadagen.plan.arch import read_arch
from hadagen.problem.target import (
    ARCH_DIRECTORY,
    arch_named,
    arch_of_gpu,
    generation,
    is_model,
    known_archs,
    nearest_arch,
)
from hadagen.runtime.choose import bundles
from hadagen.runtime.choose.device import Device, how_to_get_kernels
from hadagen.tuning_db import bundle_writer
from hadagen.tuning_db.winners import portfolio

BAD = pytest.mark.parametrize(
    "arch", ["sm90-rtx", "sm90a", "sm9", "SM90", "sm1000", "sm09", "sm9\N{BENGALI DIGIT FOUR}"]
)


def write_bundle_of(arch: str, path: Path) -> None:
    trial = make_trial(arch=arch)
    path.parent.mkdir(parents=True, exist_ok=True)
    bundle_writer.write_bundle(path, arch, portfolio([trial]), {trial.kernel.digest: trial.kernel}.__getitem__, {})


@BAD
def test_a_bad_name_of_an_arch_is_refused_wherever_one_is_read(arch: str, tmp_path: Path) -> None:
    shutil.copy(ARCH_DIRECTORY / "sm90.yaml", file := tmp_path / f"{arch}.yaml")
    readers: list[Callable[[], Any]] = [
        lambda: read_arch(file),
        lambda: Device(arch),
        lambda: write_bundle_of(arch, tmp_path / "x.db"),
    ]
    for read in readers:
        with pytest.raises(UsageError, match=f"^arch {arch!r} is no valid name; write sm and the compute capability"):
            read()


@BAD
def test_a_bundle_of_an_arch_that_is_none_breaks_no_call(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_bundles(tmp_path, monkeypatch)
    bad = bundles.user_directory() / "bad.db"
    with monkeypatch.context() as unchecked:
        unchecked.setattr(bundle_writer, "check_arch", lambda arch: None)
        unchecked.setattr(bundle_writer, "Bundle", MagicMock())
        write_bundle_of(arch, bad)
    write_sample(bundles.user_directory() / "good.db", chunks=2)
    with pytest.warns(RuntimeWarning, match=rf"goes on without a bundle: .*bad\.db .*arch {arch!r}") as caught:
        best = hadagen.best_config(PROBLEM, 32, arch="sm90", inplace=True)
    assert len(caught) == 1
    assert best.knobs == {"chunks": 2, "grid": "tiles"}
    monkeypatch.setenv(bundles.VARIABLE, str(bad))
    with pytest.raises(StorageError, match=f"arch {arch!r} is no valid name"):
        hadagen.best_config(PROBLEM, 32, arch="sm90", inplace=True)


@pytest.mark.parametrize(
    ("gpu", "arch"),
    [
        ("NVIDIA H100 80GB HBM3", "sm90"),
        ("NVIDIA H20", "sm90"),
        ("h200", "sm90"),
        ("NVIDIA A100-SXM4-80GB", "sm80"),
        ("NVIDIA A10G", "sm86"),
        ("Tesla T4", "sm75"),
        ("Orin", "sm87"),
        ("NVIDIA B200", "sm100"),
        ("NVIDIA Thor", "sm110"),
        ("NVIDIA GeForce RTX 5090", "sm120"),
        ("NVIDIA H200, 450 W, 3060 MHz", "sm90"),  # a clock is no model
        ("NVIDIA RTX 6000 Ada Generation", "sm89"),
        ("Quadro RTX 6000", None),  # one of three archs
        ("RTX", None),
        ("H100 or A100", None),
        ("", None),
    ],
)
def test_what_the_name_of_a_gpu_tells(gpu: str, arch: str | None) -> None:
    assert arch_of_gpu(gpu) == arch


@pytest.mark.parametrize(
    ("given", "arch"),
    [
        *((arch, arch) for arch in ("sm90", "sm121")),
        *((gpu, "sm89") for gpu in ("4090", "RTX 4090", "rtx-4090", "rtx_4090", "RTX4090", "4070Ti", "4090D", "L40S")),
        *((gpu, "sm90") for gpu in ("h100", "H100", "NVIDIA H100 80GB HBM3")),
        ("b200", "sm100"),
    ],
)
def test_a_gpu_names_its_arch(given: str, arch: str) -> None:
    assert arch_named(given) == arch
    assert hadagen.best_config(PROBLEM, 32, arch=given).device.arch == arch
    assert is_model(given) == (given not in ("sm90", "sm121", "NVIDIA H100 80GB HBM3"))


@pytest.mark.parametrize("given", ["", "hopper", "sm90a", "SM90", "RTX", "H100 or A100", 90, None, "sm9\n0"])
def test_another_name_is_refused_with_all_archs(given: object) -> None:
    with pytest.raises(UsageError, match=r"is not known; choose one of sm75, .*sm121, or name a GPU, such as H100"):
        arch_named(given)


@pytest.mark.parametrize(
    ("arch", "nearest"),
    [
        ("sm70", None),
        ("sm75", "sm75"),
        ("sm88", "sm87"),
        ("sm89", "sm89"),
        ("sm101", "sm100"),
        ("sm121", "sm121"),
        ("sm130", "sm121"),
    ],
)
def test_a_gpu_of_an_unknown_arch_takes_the_nearest_older_one(arch: str, nearest: str | None) -> None:
    assert nearest_arch(arch) == nearest
    advice = f"hadagen tune --arch {nearest}" if nearest else "hadagen makes kernels for sm75, sm80, sm86"
    assert advice in how_to_get_kernels(arch)


def test_the_nearest_arch_is_one_of_those_there_are() -> None:
    assert nearest_arch("sm103", ["sm120", "sm75", "sm90"]) == "sm90"
    assert nearest_arch("sm103", []) is None


def test_archs_are_in_the_order_of_their_generation() -> None:
    generations = [generation(arch) for arch in known_archs()]
    assert (generations, generations[0]) == (sorted(generations), 75)
    assert max(generations) > 100
