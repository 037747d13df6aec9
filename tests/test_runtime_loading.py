"""Cubin, recipe or PTX: what of an entry is loaded, and what is compared with PyTorch first."""

import sqlite3
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sample_bundle import remake, write_trials
from sample_trials import H100, LAUNCH, PROBLEM, make_kernel, make_trial

from hadagen.compiler import recipes
from hadagen.compiler.recipes import Recipe
from hadagen.errors import DeviceError, NoCompilerError, StorageError, ToolchainError, UsageError
from hadagen.gpu.driver import DoesNotFit, DriverError, LoadedKernel
from hadagen.problem.launch import ENTRY
from hadagen.problem.trial import Kernel, Trial, recipe_digest
from hadagen.runtime.choose.device import Device
from hadagen.runtime.launch import loading
from hadagen.tuning_db.bundle import Bundle

HERE = Device("sm90", H100.gpu)
NEWER = Device("sm100", "NVIDIA B200")


class Machine:
    """Stands in for the driver, NVRTC and the comparison with PyTorch. `asked`: what each was given, in order."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.refused: dict[bytes, Exception] = {}
        self.compiled: bytes | Exception = b"made here"
        self.right = True

    def load(self, image: bytes, entry: str, spec: Any, device: int) -> LoadedKernel:
        self.asked.append((image, entry))
        if image in self.refused:
            raise self.refused[image]
        return LoadedKernel(entry, spec, device, 1, "module", "function")

    def unload(self, kernel: LoadedKernel) -> None:
        self.asked.append("unloaded")

    def image_of(self, recipe: Recipe, target: str) -> bytes:
        self.asked.append((recipe.problem, recipe.arch, target))
        if isinstance(self.compiled, Exception):
            raise self.compiled
        return self.compiled

    def is_right(self, kernel: LoadedKernel, problem: Any) -> bool:
        self.asked.append("compared")
        return self.right


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    for module, names in {
        loading.driver: {"load": machine.load, "driver_version": lambda: "580", "unload": machine.unload},
        torch.cuda: {"device": lambda index: nullcontext(), "is_current_stream_capturing": lambda: False},
        recipes: {"image_of": machine.image_of, "_roots": [tmp_path / "cache"]},
        loading: {"is_right": machine.is_right},
    }.items():
        for name, value in names.items():
            monkeypatch.setattr(module, name, value)
    return machine


def recipe_trial() -> Trial:
    """A trial whose kernel is only a recipe."""
    trial = make_trial()
    digest = recipe_digest(trial.problem, trial.knobs, LAUNCH)
    return replace(trial, kernel=Kernel(digest, ENTRY, "sm90", "", b"", b"", LAUNCH, 0, 0, ""))


def load(tmp_path: Path, trial: Trial, target: Device = HERE) -> LoadedKernel:
    bundle = Bundle.open(write_trials(tmp_path / "a.db", [trial]))
    (entry, *_) = bundle.entries(PROBLEM)
    return loading.load(bundle, entry, 0, target)


CUBIN, PTX, MADE = (b"cubin 1", "k"), (b"// ptx of cubin 1", "k"), (b"made here", ENTRY)


def made_for(target: Device) -> tuple[Any, ...]:
    return PROBLEM, "sm90", target.arch


@pytest.mark.parametrize(
    ("target", "compiled", "refused", "asked"),
    [
        (HERE, b"made here", {}, [CUBIN]),
        (NEWER, b"made here", {}, [made_for(NEWER), MADE, "compared"]),
        *(
            (NEWER, nothing, {}, [made_for(NEWER), PTX, "compared"])
            for nothing in (NoCompilerError("no NVRTC"), ToolchainError("refused"), UsageError("not legal"))
        ),
        *(
            (HERE, b"made here", {b"cubin 1": code}, [CUBIN, made_for(HERE), MADE, "compared"])
            for code in ("CUDA_ERROR_NO_BINARY_FOR_GPU", "CUDA_ERROR_INVALID_IMAGE")  # the driver is too old
        ),
        (
            NEWER,
            b"made here",
            {b"made here": "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"},
            [made_for(NEWER), MADE, PTX, "compared"],
        ),
    ],
)
def test_the_cubin_is_loaded_else_what_the_recipe_makes_else_the_ptx(
    target: Device,
    compiled: bytes | Exception,
    refused: dict[bytes, str],
    asked: list[Any],
    machine: Machine,
    tmp_path: Path,
) -> None:
    """What was not compiled for this GPU before is compared."""
    machine.compiled = compiled
    machine.refused = {image: DriverError(code, "loading failed") for image, code in refused.items()}
    load(tmp_path, make_trial(), target)
    assert machine.asked == asked


def test_a_recipe_is_compiled_and_compared_once(machine: Machine, tmp_path: Path) -> None:
    assert load(tmp_path, recipe_trial()).spec == LAUNCH
    assert machine.asked == [made_for(HERE), MADE, "compared"]
    load(tmp_path, recipe_trial())  # as another process would
    assert machine.asked[3:] == [made_for(HERE), MADE]


@pytest.mark.parametrize("why", [NoCompilerError("no NVRTC"), UsageError("not legal")])
def test_where_there_is_nothing_else_the_error_says_why(why: Exception, machine: Machine, tmp_path: Path) -> None:
    machine.compiled = why
    with pytest.raises(ToolchainError, match=str(why)):
        load(tmp_path, recipe_trial())


@pytest.mark.parametrize(
    "error",
    [
        DriverError("CUDA_ERROR_OUT_OF_MEMORY", "no room"),
        DoesNotFit("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too large"),
    ],
)
def test_other_errors_of_the_driver_are_not_those_of_the_image(
    error: Exception, machine: Machine, tmp_path: Path
) -> None:
    machine.refused[b"cubin 1"] = error
    with pytest.raises(type(error), match=str(error)):
        load(tmp_path, make_trial())
    assert machine.asked == [CUBIN]


def test_a_wrong_kernel_is_never_used_nor_tried_again(machine: Machine, tmp_path: Path) -> None:
    machine.right = False
    for _ in range(2):
        with pytest.raises(ToolchainError, match="was compiled here is wrong on NVIDIA H100"):
            load(tmp_path, recipe_trial())
    assert (machine.asked.count("compared"), machine.asked.count("unloaded")) == (1, 2)


def test_ptx_with_multicasts_in_place_is_for_its_own_arch_alone(machine: Machine, tmp_path: Path) -> None:
    machine.compiled = UsageError("lacks multicast_in_place")
    with pytest.raises(ToolchainError, match="lacks multicast_in_place"):
        load(tmp_path, make_trial(knobs={"load": "multicast"}), NEWER)
    assert machine.asked == [made_for(NEWER)]


def test_where_memory_runs_out_nothing_is_known_of_a_kernel(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(kernel: LoadedKernel, problem: Any) -> bool:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(loading, "is_right", no_memory)
    with pytest.raises(DeviceError, match="could not be checked"):
        load(tmp_path, recipe_trial())
    monkeypatch.setattr(loading, "is_right", machine.is_right)
    assert load(tmp_path, recipe_trial())


def test_in_a_capture_only_kernels_that_were_compared_before_are_used(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
    with pytest.raises(DeviceError, match=r"call hadagen\.warmup before"):
        load(tmp_path, recipe_trial())
    assert "compared" not in machine.asked
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    load(tmp_path, recipe_trial())
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
    assert load(tmp_path, recipe_trial())


def test_what_has_a_cubin_is_not_compiled_beforehand(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[tuple[int, str, int]] = []
    monkeypatch.setattr(
        recipes, "compile_all", lambda several, target, jobs: compiled.append((len(several), target, jobs))
    )
    for trial, target, count in ((make_trial(), HERE, 0), (make_trial(), NEWER, 1), (recipe_trial(), HERE, 1)):
        bundle = Bundle.open(write_trials(tmp_path / "a.db", [trial]))
        compiled.clear()
        loading.compile_missing([(entry, bundle) for entry in bundle.entries(PROBLEM)], target)
        assert compiled == [(1, target.arch, 1)] * count


def test_a_recipe_of_a_bundle_names_what_it_is_made_from(tmp_path: Path) -> None:
    """So that a changed bundle does not make another kernel of the same name."""
    trial = recipe_trial()
    bundle = Bundle.open(write_trials(tmp_path / "a.db", [trial]))
    assert [entry.compiled for entry in bundle.entries(PROBLEM)] == [False]
    assert bundle.kernel(bundle.entries(PROBLEM)[0].kernel) == trial.kernel
    other = replace(trial, knobs={**trial.knobs, "chunks": 2})
    with pytest.raises(UsageError, match="has no cubin"):
        write_trials(tmp_path / "b.db", [other])
    assert make_kernel().cubin


def test_a_recipe_whose_knobs_were_changed_is_refused(tmp_path: Path) -> None:
    path = write_trials(tmp_path / "a.db", [recipe_trial()])
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("""UPDATE trials SET knobs = '{"chunks":2,"grid":"tiles"}'""")
    remake(path)
    with pytest.raises(StorageError, match="that is not of its recipe"):
        Bundle.open(path).entries(PROBLEM)
