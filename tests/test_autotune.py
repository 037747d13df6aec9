"""`hadagen.autotune`: one problem, measured within a program, on a GPU that is made up."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from real_compilers import needs_nvrtc
from sample_bundle import hide_bundles, write_trials
from sample_trials import H100, PROBLEM, make_kernel, make_trial, times
from test_runners import FakeService

import hadagen
from hadagen import Match
from hadagen.compiler.programs import Stopped
from hadagen.errors import DeviceError, DisturbedError, StorageError, ToolchainError, UsageError
from hadagen.files import lock_file
from hadagen.files.lock_file import turn
from hadagen.measure import DeviceRunner, Variant, all_cells, autotuner
from hadagen.measure.autotuner import MEASURING_SHARE, Measuring, add_winners, first_knobs
from hadagen.measure.messages import Answer, Measure
from hadagen.plan.arch import load_arch
from hadagen.plan.knobs import Knobs, plan_of
from hadagen.plan.space import Space
from hadagen.problem.launch import Source
from hadagen.problem.problem import Numerics, Problem, Rows
from hadagen.problem.regimes import Destination
from hadagen.problem.trial import Disturbed, Environment, Kernel, NotTried, Outcome, Provenance, Timing, Trial
from hadagen.runtime import warmup
from hadagen.runtime.call import slow
from hadagen.runtime.choose import bundles, tables
from hadagen.runtime.choose.device import Device
from hadagen.runtime.launch import autotune as asking
from hadagen.runtime.launch import kernels
from hadagen.tuning_db.bundle import FORMAT, Bundle
from hadagen.tuning_db.bundle_writer import write_bundle
from hadagen.tuning_db.winners import portfolio

A100 = Environment("NVIDIA A100-SXM4-80GB", "8.0", 108, 40 << 20, "580.65", "13.0", "", 1410, 1593)
A30 = replace(A100, gpu="NVIDIA A30", sms=56, l2_bytes=24 << 20, memory_clock_mhz=1215)
FAST = PROBLEM.with_io(numerics=Numerics.FAST)
SLOWER = 0.05  # how much slower each kernel is than the one before it


class Clock:
    """Stands in for `time` where it is looked at."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class FakeToolchain:
    """Compiles each source to a kernel whose code is its text. `refused`: takes the place of every kernel, or is
    raised."""

    refused: ClassVar[Any] = None
    cubin: ClassVar[bytes] = b""  # if not empty, that of every kernel
    built: ClassVar[list[str]] = []

    def __init__(self, compiler: object) -> None:
        pass

    def build_all(self, sources: Sequence[Source], arch: Any, **_: object) -> list[Kernel]:
        texts = [self.cubin or source.text.encode() for source in sources]
        return [make_kernel(t, launch=s.launch, arch=arch.name) for t, s in zip(texts, sources, strict=True)]

    def build(self, sources: Sequence[Source], arch: Any, **_: object) -> list[Any]:
        self.built.extend(source.text for source in sources)
        refused = self.refused  # read once: the test may set it while another thread is here
        if isinstance(refused, Exception):
            raise refused
        return [refused or kernel for kernel in self.build_all(sources, arch)]


class FakeRunner:
    """Measures in no time, but the clock says a second for each kernel. The first is the fastest. As the real one, it
    draws the next variant before it yields a trial."""

    def __init__(self, machine: "Machine", deadline: float) -> None:
        self._machine, self._deadline = machine, deadline
        machine.runs.append([])

    def __enter__(self) -> "FakeRunner":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, variants: Iterable[Variant]) -> Iterator[tuple[Variant, Trial]]:
        machine, following = self._machine, iter(variants)
        variant = next(following, None)
        while variant is not None:
            machine.clock.now += 1.0
            if machine.clock.now > self._deadline:
                return
            current, variant = variant, next(following, None)
            yield current, self.trial(current)

    def trial(self, variant: Variant) -> Trial:
        machine = self._machine
        us = 1.0 + SLOWER * len(machine.runs[-1])
        cells = all_cells(variant.problem, machine.gpu.l2_bytes)
        machine.runs[-1].append(Knobs.from_dict(variant.knobs))
        return Trial(
            problem=variant.problem,
            arch=variant.kernel.arch,
            knobs=variant.knobs,
            outcome=machine.outcome,
            provenance=Provenance.MEASURED,
            kernel=variant.kernel,
            detail="out of memory" if machine.outcome is not Outcome.OK else "",
            errors={"normal": 1e-5},
            timings=tuple(Timing(*cell, us, us, us, 1.0) for cell in cells),
            environment=replace(machine.gpu, nvcc=variant.kernel.nvcc),
            date="2026-01-02T03:04:05+00:00",
        )


class Machine:
    """A machine with one GPU. `runs`: the knobs that each run measured, in order."""

    def __init__(self) -> None:
        self.gpu, self.arch = A100, "sm80"
        self.outcome = Outcome.OK
        self.clock = Clock()
        self.runs: list[list[Knobs]] = []

    @property
    def device(self) -> Device:
        return Device(self.arch, self.gpu.gpu)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """An A100, and a user's bundle with recipes for an H100 for `PROBLEM`."""
    machine = Machine()
    hide_bundles(tmp_path, monkeypatch)
    known = [make_trial(i, knobs=knobs.to_dict(), timings=times({1 << 13 + i: 2.0})) for i, knobs in enumerate(KNOWN)]
    write_trials(bundles.user_directory() / "sm90.db", known)
    monkeypatch.setattr(autotuner, "time", machine.clock)
    monkeypatch.setattr(autotuner, "device_environment", lambda index: machine.gpu)
    monkeypatch.setattr(autotuner, "DeviceRunner", lambda index, copies, deadline: FakeRunner(machine, deadline))
    monkeypatch.setattr(autotuner, "NvrtcProgram", SimpleNamespace(find=lambda: None))
    monkeypatch.setattr(autotuner, "Toolchain", FakeToolchain)
    for name, value in (("refused", None), ("cubin", b""), ("built", [])):
        monkeypatch.setattr(FakeToolchain, name, value)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(asking, "_tried", set())
    for module in (asking, warmup, kernels, slow):
        monkeypatch.setattr(module, "cuda_device", lambda index: machine.device)
    for module in (asking, warmup):
        monkeypatch.setattr(module, "cuda_index", lambda device: device if device in (0, 1) else 0)
    tables.clear()
    for name in ("_told", "_seen"):
        monkeypatch.setattr(slow, name, set())
    monkeypatch.delenv(kernels.AUTOTUNE, raising=False)
    yield machine
    tables.clear()


def _some_knobs() -> list[Knobs]:
    """Legal on an H100 and on an A100, launched alike, and not what a search would begin with: the last seed and two of
    its neighbours."""
    newer, older = (Space(PROBLEM, load_arch(arch)) for arch in ("sm90", "sm80"))
    last = older.seeds()[-1]
    near = (knobs for knobs in older.neighbors(last) if newer.closest(knobs) == knobs and launch(knobs) == launch(last))
    return [last, *islice(near, 2)]


def launch(knobs: Knobs) -> object:
    return plan_of(PROBLEM, knobs, starts_early=False).launch.digested()


KNOWN = _some_knobs()


def own_bundle() -> Bundle:
    return Bundle.open(asking.bundle_path("sm80"))


def test_winners_are_found_by_later_calls(machine: Machine) -> None:
    where = {"arch": "sm80", "device": A100.gpu}
    assert hadagen.best_config(PROBLEM, 64, **where).match is Match.GENERIC
    path = hadagen.autotune({"n": 256, "dtype": "float16"})
    assert path == bundles.user_directory() / "sm80_autotuned.db"
    for inplace in (False, True):
        best = hadagen.best_config(PROBLEM, 64, **where, inplace=inplace)
        assert (best.match, best.us) == (Match.SAME_GPU, 1.0)
        assert (best.knobs, best.provenance["kind"]) == (machine.runs[0][0].to_dict(), "measured")
    Bundle.open(path).verify()


def test_known_recipes_come_first_and_then_new_neighbours_of_winners(machine: Machine) -> None:
    hadagen.autotune(PROBLEM, seconds=20)
    (asked,) = machine.runs
    assert set(asked[: len(KNOWN)]) == set(KNOWN)
    assert len(asked) == len(set(asked)) > len(KNOWN)
    near = set(Space(PROBLEM, load_arch("sm80")).neighbors(asked[0]))
    assert near & set(asked[len(KNOWN) :])
    assert len(FakeToolchain.built) == len(set(FakeToolchain.built))


def test_a_single_recipe_has_neighbours_too(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the second kernel is wanted before the trial of the first is there."""
    monkeypatch.setattr(autotuner, "first_knobs", lambda space, known: KNOWN[:1])
    hadagen.autotune(PROBLEM)
    assert len(machine.runs[0]) > 2


def test_a_kernel_is_measured_once(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though other knobs may compile to the same one."""
    monkeypatch.setattr(FakeToolchain, "cubin", b"all the same")
    monkeypatch.setattr(Measuring, "_look_ahead", lambda self: None)
    hadagen.autotune(PROBLEM)
    assert len(machine.runs[0]) == 1


def test_what_was_measured_counts_when_compilers_are_stopped(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = FakeRunner.run

    def run(self: FakeRunner, variants: Iterable[Variant]) -> Iterator[tuple[Variant, Trial]]:
        for each in measured(self, variants):
            FakeToolchain.refused = Stopped()  # for the neighbours
            yield each

    monkeypatch.setattr(FakeRunner, "run", run)
    hadagen.autotune(PROBLEM)
    assert 0 < len(machine.runs[0]) <= len(KNOWN)
    assert own_bundle().entries(PROBLEM)


def test_recipes_of_most_entries_come_first() -> None:
    space = Space(PROBLEM, load_arch("sm80"))
    stored = [knobs.to_dict() for knobs in (KNOWN[0], KNOWN[1], KNOWN[1], KNOWN[2])]
    assert first_knobs(space, stored) == [KNOWN[1], KNOWN[0], KNOWN[2]]
    illegal = {**KNOWN[0].to_dict(), "load": "multicast", "cluster": 16, "gone": 1}
    assert first_knobs(space, [illegal]) == [space.closest(Knobs.like(illegal))]
    assert first_knobs(space, []) == space.seeds()


@pytest.mark.parametrize("problem", [PROBLEM.with_io(rows=Rows.PITCHED), FAST])
def test_a_problem_without_recipes_begins_with_those_of_its_parent_or_seeds(problem: Problem, machine: Machine) -> None:
    hadagen.autotune(problem, seconds=5)
    space = Space(problem, load_arch("sm80"))
    first = {space.closest(knobs) for knobs in KNOWN} if problem.parent else set(space.seeds()[: len(KNOWN)])
    assert set(machine.runs[0][: len(first)]) == first


def test_a_second_call_returns_at_once(machine: Machine) -> None:
    first = hadagen.autotune(PROBLEM)
    content = first.read_bytes()
    assert hadagen.autotune(PROBLEM.key, 0) == first
    assert len(machine.runs) == 1
    assert first.read_bytes() == content


def test_what_was_measured_before_is_not_measured_again(machine: Machine) -> None:
    """By a longer search, whose kernels need not have recipes any more."""
    both = tuple(each for destination in Destination for each in times({1 << 13: 2.0}, destination))
    longer, own = bundles.user_directory() / "sm80.db", asking.bundle_path("sm80")
    kernel = make_kernel(b"not to be built", arch="sm80")
    for timings, wanted in ((both[:2], own), (both, longer)):
        trial = make_trial(8, arch="sm80", environment=machine.gpu, kernel=kernel, timings=timings)
        write_bundle(longer, "sm80", portfolio([trial]), lambda _: kernel, {})
        assert hadagen.autotune(PROBLEM) == wanted
        own.unlink(missing_ok=True)
    assert len(machine.runs) == 1


def test_winners_of_other_problems_and_gpus_are_kept(machine: Machine) -> None:
    hadagen.autotune(PROBLEM, seconds=3)
    hadagen.autotune(FAST, seconds=3)
    machine.gpu = A30
    hadagen.autotune(PROBLEM, seconds=3)
    before = {(e.problem, e.gpu, e.destination, e.elements): e for e in own_bundle().all_entries()}
    assert {(problem, gpu) for problem, gpu, *_ in before} == {
        (PROBLEM, A100.gpu),
        (FAST, A100.gpu),
        (PROBLEM, A30.gpu),
    }
    hadagen.autotune(FAST, seconds=3)
    after = {(e.problem, e.gpu, e.destination, e.elements): e for e in own_bundle().all_entries()}
    assert {place: after[place] for place in before} == before
    assert len(after) > len(before)
    own_bundle().verify()


def test_a_gpu_of_the_same_name_but_another_class_is_measured(machine: Machine) -> None:
    """Such as a part of a GPU. Its winners take the place of the others, because calls know the name alone."""
    hadagen.autotune(PROBLEM, seconds=3)
    machine.gpu = replace(A100, sms=42)
    hadagen.autotune(PROBLEM, seconds=3)
    assert len(machine.runs) == 2
    assert {entry.environment.sms for entry in own_bundle().all_entries()} == {42}


@pytest.mark.parametrize("seconds", [3, 5, 8.5])
def test_the_deadline_ends_the_measuring(seconds: float, machine: Machine) -> None:
    hadagen.autotune(PROBLEM, seconds=seconds)
    assert len(machine.runs[0]) == int(MEASURING_SHARE * seconds)
    assert machine.clock.now <= seconds


def test_nothing_measured_says_how_long_it_took(machine: Machine) -> None:
    with pytest.raises(
        DeviceError, match=r"nothing was measured of n256-float16-accurate on NVIDIA A100.* in 1\.0 s; "
    ) as caught:
        hadagen.autotune(PROBLEM, seconds=0.5)
    assert "seconds=1" in str(caught.value)
    assert not asking.bundle_path("sm80").exists()


@pytest.mark.parametrize("busy_from", [0, 1])
def test_what_a_busy_gpu_prevents_is_left_out(
    busy_from: int, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The winners come from what was measured before, if anything was."""

    def run(self: FakeRunner, variants: Iterable[Variant]) -> Iterator[tuple[Variant, Any]]:
        for number, variant in enumerate(variants):
            busy = Disturbed("process 12 uses the GPU", "stop it")
            if number > busy_from:
                raise DisturbedError("nothing can be timed: process 12 uses the GPU")
            yield variant, self.trial(variant) if number < busy_from else busy

    monkeypatch.setattr(FakeRunner, "run", run)
    if busy_from:
        hadagen.autotune(PROBLEM)
        assert {Knobs.like(entry.knobs) for entry in own_bundle().all_entries()} == {machine.runs[0][0]}
    else:
        with pytest.raises(DeviceError, match=r"\(nothing can be timed: process 12 uses the GPU\); pass more seconds"):
            hadagen.autotune(PROBLEM)


def test_a_machine_that_starts_no_process_in_time_says_so(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object, deadline: float) -> FakeRunner:
        machine.clock.now = deadline
        raise DeviceError("the measuring process did not start")

    monkeypatch.setattr(autotuner, "DeviceRunner", start)
    with pytest.raises(DeviceError, match=r"in 13\.5 s \(the measuring process did not start\); pass more seconds"):
        hadagen.autotune(PROBLEM)


def test_a_device_that_fails_before_the_deadline_says_why(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, deadline: float) -> FakeRunner:
        raise DeviceError("all CUDA-capable devices are busy")

    monkeypatch.setattr(autotuner, "DeviceRunner", fail)
    with pytest.raises(DeviceError, match=r"^all CUDA-capable devices are busy$"):
        hadagen.autotune(PROBLEM)


def test_kernels_that_all_fail_are_no_winners(machine: Machine) -> None:
    machine.outcome = Outcome.LAUNCH_FAILED
    with pytest.raises(DeviceError, match=r"none of \d+ kernels .* as launch_failed \(out of memory\)"):
        hadagen.autotune(PROBLEM, seconds=5)
    assert not asking.bundle_path("sm80").exists()


def test_a_compiler_that_refuses_all_is_named(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeToolchain, "refused", NotTried("nvrtc was killed by signal 9"))
    with pytest.raises(DeviceError, match=r"\(nvrtc was killed by signal 9\)"):
        hadagen.autotune(PROBLEM)


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2 :] = bytes(len(content) - len(content) // 2)
    path.write_bytes(content)


def make_newer(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[63] = 200  # the format, in the header of the file
    path.write_bytes(content)


def replace_by_text(path: Path) -> None:
    path.write_text("notes")


def replace_by_another_arch(path: Path) -> None:
    shutil.copy(bundles.user_directory() / "sm90.db", path)


@pytest.mark.filterwarnings("ignore")  # of calls that go on without the bundle
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (damage, "is damaged"),
        (make_newer, f"is a bundle of format 200, later than {FORMAT}; upgrade hadagen"),
        (replace_by_text, "is not a hadagen bundle"),
        (replace_by_another_arch, "its winners are of sm90, not of sm80"),
    ],
)
def test_a_file_that_cannot_be_added_to_is_left_as_it_is(change: Any, reason: str, machine: Machine) -> None:
    path = hadagen.autotune(FAST, seconds=3)
    change(path)
    content = path.read_bytes()
    with pytest.raises(StorageError, match=f"would be lost: .*{reason}.*; or move it away"):
        hadagen.autotune(PROBLEM, seconds=3)
    assert path.read_bytes() == content
    assert len(machine.runs) == 1  # nothing was measured in vain


def test_a_directory_that_cannot_be_written_is_one_sentence(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/proc/none")
    with pytest.raises(StorageError, match=r"sm80_autotuned\.lock cannot be written"):
        hadagen.autotune(PROBLEM)
    assert machine.runs == []


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (({"n": 100, "dtype": "float16"},), "n must be a power of two"),
        (("n256",), "names no problem"),
        ((5,), "names no problem; give a Problem"),
        ((PROBLEM, "cuda:99"), "'cuda:99' is not a CUDA device"),
        ((PROBLEM, None, 0), "seconds = 0 is not"),
        ((PROBLEM, None, float("inf")), "seconds = inf is not"),
        ((PROBLEM, None, float("nan")), "seconds = nan is not"),
        ((PROBLEM, None, True), "seconds = True is not"),
        ((PROBLEM, None, "15"), "seconds = '15' is not"),
    ],
)
def test_bad_arguments_of_autotune_are_a_sentence(
    arguments: tuple[Any, ...], reason: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "cuda_index", lambda device: None if device == "cuda:99" else 0)
    problem, device, seconds = (*arguments, *(None, 15.0)[len(arguments) - 1 :])
    with pytest.raises(UsageError, match=reason):
        hadagen.autotune(problem, device, seconds=seconds)
    assert machine.runs == []


@pytest.mark.parametrize("lacking", ["gpu", "cuda", "arch"])
def test_without_a_gpu_to_tune_for(lacking: str, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    if lacking == "gpu":
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    elif lacking == "cuda":
        monkeypatch.setattr(asking, "cuda_device", lambda index: None)
    else:
        machine.arch = "sm70"
    with pytest.raises(DeviceError, match=r"NVIDIA GPU|hadagen makes kernels for sm75"):
        hadagen.autotune(PROBLEM)


@pytest.mark.parametrize("package", ["numpy", "jinja2"])
def test_a_missing_package_is_named(package: str, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch needs no numpy."""
    if package == "numpy":
        monkeypatch.setattr(asking, "find_spec", lambda name: None)
    else:
        monkeypatch.setitem(sys.modules, "hadagen.measure.autotuner", None)
    with pytest.raises(ToolchainError, match=f"pip install {package}"):
        hadagen.autotune(PROBLEM)


# ---- the variable ----------------------------------------------------------------------------------------------------
@pytest.fixture
def loads(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The cubins that calls load."""
    found: list[bytes] = []

    def load(bundle: Bundle, entry: Any, device: int, target: Device) -> Any:
        kernel = bundle.kernel(entry.kernel)
        found.append(kernel.cubin)
        return SimpleNamespace(cubin=kernel.cubin, entry=entry)

    monkeypatch.setattr(kernels, "load", load)
    return found


def call(problem: Problem = PROBLEM, in_place: bool = True, device: int = 0) -> Any:
    return kernels.find(kernels.Kind(device, problem, in_place), 1 << 14)


def test_the_first_call_measures_once(machine: Machine, loads: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernels.AUTOTUNE, "1")
    assert call().entry.arch == "sm80"
    assert call(in_place=False).entry.us == 1.0
    assert call(device=1).entry.arch == "sm80"
    assert len(machine.runs) == 1


@pytest.mark.parametrize("value", [None, "", "0"])
def test_without_the_variable_no_call_measures(
    value: str | None, machine: Machine, loads: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    if value is not None:
        monkeypatch.setenv(kernels.AUTOTUNE, value)
    monkeypatch.setitem(sys.modules, "hadagen.runtime.launch.autotune", None)
    assert call() is None
    assert machine.runs == []


@pytest.mark.parametrize("why", ["captured", "measured", "pinned"])
def test_calls_that_do_not_measure(
    why: str, machine: Machine, loads: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(kernels.AUTOTUNE, "1")
    machine.gpu, machine.arch = replace(A100, gpu="NVIDIA H800", compute_capability="9.0"), "sm90"
    if why == "captured":
        monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
    elif why == "measured":
        machine.gpu = H100
    else:
        monkeypatch.setenv(bundles.VARIABLE, str(bundles.user_directory() / "sm90.db"))
    assert call().entry.gpu == H100.gpu
    assert machine.runs == []
    assert tables.timed


def test_a_failure_is_one_warning_and_calls_go_on(
    machine: Machine, loads: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(kernels.AUTOTUNE, "1")
    machine.gpu, machine.arch = replace(A100, gpu="NVIDIA H800", compute_capability="9.0"), "sm90"
    machine.outcome = Outcome.WRONG_ANSWER
    with pytest.warns(RuntimeWarning, match="n256-float16-accurate is not autotuned: none of") as caught:
        assert call().entry.gpu == H100.gpu
    assert len(caught) == 1
    tables.forget(PROBLEM)
    assert call().entry.gpu == H100.gpu  # without a warning, which would be an error
    assert len(machine.runs) == 1


def test_a_warm_up_measures_too(machine: Machine, loads: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernels.AUTOTUNE, "1")
    compiled: list[str] = []
    monkeypatch.setattr(warmup, "compile_missing", lambda chosen, _: compiled.extend(e.arch for e, _ in chosen))
    assert hadagen.warmup(256, "float16", rows=64, inplace=True, numerics="accurate") >= 1
    assert len(machine.runs) == 2  # contiguous and pitched rows
    assert set(compiled) == {"sm80"}  # nothing that is not used any more


def test_later_calls_of_this_process_run_the_new_winners(
    machine: Machine, loads: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.gpu, machine.arch = replace(A100, gpu="NVIDIA H800", compute_capability="9.0"), "sm90"
    monkeypatch.setitem(tables.calls, ("a call",), None)
    assert call(FAST) is None
    others = dict(tables.timed)
    assert call().entry.gpu == H100.gpu
    loaded = dict(tables.loaded)
    hadagen.autotune(PROBLEM)
    assert call().entry.gpu == "NVIDIA H800"
    assert tables.loaded.items() > loaded.items()  # graphs may hold them
    assert tables.timed.items() > others.items()
    assert not tables.calls


# ---- several processes -----------------------------------------------------------------------------------------------
PROCESS = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from sample_trials import H100, PROBLEM, make_trial
from hadagen.measure import autotuner
folder = Path(sys.argv[2])
class Measured:
    failure = ""
    def __init__(self, *_):
        self.trials = [make_trial()]
    def run(self):
        with open(folder / "measured", "a") as file:
            file.write("once ")
        while len(list(folder.glob("*.here"))) < 2:
            time.sleep(0.01)
autotuner.Measuring = Measured
autotuner.device_environment = lambda index: H100
(folder / f"{sys.argv[3]}.here").touch()
autotuner.add_winners(folder / "a.db", PROBLEM, 0, "sm90", [], 1000.0, 1)
print("done")
"""


def test_of_two_processes_one_measures(tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", PROCESS, os.path.dirname(__file__), str(tmp_path)]
    started = [subprocess.Popen([*arguments, name], stdout=subprocess.PIPE, text=True) for name in "ab"]
    assert [process.communicate(timeout=100)[0] for process in started] == ["done\n", "done\n"]
    assert (tmp_path / "measured").read_text() == "once "
    assert Bundle.open(tmp_path / "a.db").entries(PROBLEM)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    with turn(path, 1.0, lambda: False) as ours:
        assert ours
        yield


def test_who_waits_in_vain_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, clock = tmp_path / "a.db", Clock()
    monkeypatch.setattr(lock_file, "time", clock)
    with (
        locked(path),
        pytest.raises(StorageError, match=r"another process has locked .*a\.lock for 60 s"),
        turn(path, 60.0, lambda: False),
    ):
        pass
    assert 60 < clock.now < 61
    with locked(path):  # what is left of it locks nobody out
        pass


def test_who_waits_has_patience_while_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, clock = tmp_path / "a.db", Clock()

    def sleep(seconds: float) -> None:
        clock.now += 30.0
        path.write_text(str(clock.now))

    monkeypatch.setattr(clock, "sleep", sleep)
    monkeypatch.setattr(lock_file, "time", clock)
    with locked(path), turn(path, 60.0, lambda: clock.now >= 300.0) as ours:
        assert not ours
    assert clock.now == 300.0


def test_what_was_done_before_the_lock_was_free_is_not_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, clock, others = tmp_path / "a.db", Clock(), ExitStack()
    others.enter_context(locked(path))
    monkeypatch.setattr(clock, "sleep", lambda seconds: others.close())
    monkeypatch.setattr(lock_file, "time", clock)
    done = iter([False, True])
    with turn(path, 60.0, lambda: next(done)) as ours:
        assert not ours


FORK = """
import os, sys
from pathlib import Path
from hadagen.files.lock_file import turn
path = Path(sys.argv[1], "a.db")
end, hold = os.pipe()
with turn(path, 1000.0, lambda: False):
    if not os.fork():
        os.close(hold)
        os.read(end, 1)  # until the parent ends
        os._exit(0)
with turn(path, 0.0, lambda: False) as ours:
    print(ours)
"""


def test_a_child_that_was_forked_meanwhile_does_not_keep_the_lock(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FORK, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr


def test_a_file_system_without_locks_makes_nobody_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", refuse)
    with locked(tmp_path / "a.db"), locked(tmp_path / "a.db"):
        pass


# ---- what it needs ---------------------------------------------------------------------------------------------------
class RightService(FakeService):
    """Stands in for the GPU in the measuring process."""

    greeting = A100

    def handle(self, request: Measure) -> Answer:
        timings = tuple(Timing(*cell, 2.0, 2.0, 2.0, 1.0) for cell in all_cells(request.problem, A100.l2_bytes))
        return Answer(Outcome.OK, "", {"normal": 1e-5}, timings, 0.1)


def test_problems_with_signs_are_not_measured(tmp_path: Path) -> None:
    signed = Problem.of(256, "float16", signed=True)
    with pytest.raises(
        UsageError, match=r"^n256-signed-float16-accurate is not tuned, .*; tune n256-float16-accurate$"
    ):
        add_winners(tmp_path / "a.db", signed, 0, "sm80", [], 1000.0, 2)
    assert not any(tmp_path.iterdir())


@needs_nvrtc
def test_with_a_compiler_and_a_measuring_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HADAGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(autotuner, "device_environment", lambda index: A100)
    monkeypatch.setattr(
        autotuner,
        "DeviceRunner",
        lambda *arguments, deadline: DeviceRunner(*arguments, deadline=deadline, make_service=RightService),
    )
    monkeypatch.setattr(Measuring, "_look_ahead", lambda self: None)
    add_winners(tmp_path / "a.db", PROBLEM, 0, "sm80", [knobs.to_dict() for knobs in KNOWN[:2]], 1000.0, 2)
    bundle = Bundle.open(tmp_path / "a.db")
    bundle.verify()
    (knobs,) = {Knobs.from_dict(entry.knobs) for entry in bundle.entries(PROBLEM)}
    assert knobs in KNOWN[:2]
    assert {entry.destination for entry in bundle.entries(PROBLEM)} == set(Destination)


def test_it_imports_nothing_of_the_tuner() -> None:
    program = """
import sys
import hadagen.runtime.launch.autotune, hadagen.measure.autotuner
from hadagen.measure.runner import _device_service
import hadagen.measure.service
print(sorted({name.partition(".")[0] for name in sys.modules} & {
    "optuna", "sqlalchemy", "alembic", "pydantic", "yaml", "rich", "click"}))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr
