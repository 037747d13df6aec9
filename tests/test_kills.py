"""A tune that is killed again and again, and one whose kernels are broken: it ends like one that nobody disturbed."""

import os
import random
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_search
from fake_search import arch, make_kernel, options, problems, processes
from faulty_tune import FAULTS, FaultyTune, broken_kernel, broken_source
from measure_sample import SPEC
from real_compilers import needs_compiler
from running import is_running, wait_until
from timed_by_digest import TimesByDigest

from hadagen.compiler import programs
from hadagen.compiler.codegen import render
from hadagen.compiler.toolchain import BuildFailure, Toolchain
from hadagen.measure import DeviceRunner
from hadagen.measure.messages import Answer, Measure, Race
from hadagen.plan.arch import Arch, load_arch
from hadagen.plan.space import Space, build_plan
from hadagen.problem.launch import Source
from hadagen.problem.problem import Problem
from hadagen.problem.trial import Kernel, NotTried, Outcome, knobs_key
from hadagen.tuner.search import tune
from hadagen.tuning_db.store import Store
from hadagen.tuning_db.winners import portfolio

PROBLEMS = problems(64, 256)
FIXED: dict[str, tuple[int | str, ...]] = {"warps": (1, 2), "butterfly_carrier": ("fp32",), "min_blocks": (1,)}
# What is searched with few kills, and with many. All legal knobs are tried, so that finished runs have tried the same.
SMALL = arch(**FIXED, chunks=(1,), load=("plain",), stages=(1,))
LARGE = arch(**FIXED, chunks=(1, 2))
FEW_KILLS = 8
COMPILERS = 4  # at a time


def compile_one(source: Source) -> Kernel | BuildFailure | NotTried:
    """With a program that may be killed."""
    answer = programs.run(["sh", "-c", "sleep 0.02"])
    return NotTried(f"sh {answer.passing}") if answer.passing else make_kernel(source)


def build(sources: Sequence[Source]) -> list[Kernel | BuildFailure | NotTried]:
    with ThreadPoolExecutor(COMPILERS) as pool:
        return list(pool.map(compile_one, sources))


def search(database: Path, arch: Arch) -> None:
    """What is killed."""
    trials = max(len(Space(problem, arch).legal) for problem in PROBLEMS)
    copy = make_kernel(Source("copy", "", SPEC))
    with Store.open(database) as store, DeviceRunner(0, [copy], make_service=TimesByDigest) as runner:
        tune(options(store, runner, arch=arch, problems=PROBLEMS, build=build, trials=trials))


def content(database: Path) -> dict[tuple[str, str], tuple[Any, ...]]:
    """By problem and knobs, all that the database says of a trial but for dates, durations and which of several knobs
    with the same kernel came first. Fails where the file is damaged, or anything is there twice or still claimed."""
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert connection.execute("SELECT count(*) FROM hadagen_claims").fetchone() == (0,)
    with Store.open(database) as store:
        trials = store.checked()
    found = {
        (trial.problem.key, knobs_key(trial.knobs)): (
            trial.outcome,
            trial.kernel,
            sorted(trial.errors.items()),
            trial.timings,
            trial.environment,
        )
        for trial in trials
    }
    assert len(found) == len(trials)
    return found


def winners(database: Path) -> dict[str, str]:
    with Store.open(database) as store:
        chosen = portfolio(store.trials())
    return {str(cell): trial.kernel.digest for cell, trial in chosen.items() if trial.kernel}


def helpers_of(pid: int) -> dict[int, str]:
    """The processes that a process started: their ids, and what they are."""
    found: dict[int, str] = {}
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, children.read_text().split()):
                program = Path(f"/proc/{child}/cmdline").read_bytes()
                found[child] = "worker" if b"hadagen.measure" in program else "compiler"
    return found


class Killer:
    """Starts `search` and kills it, or one of its helpers, at random moments, `left` times in all. `killed`: how often
    it killed what. `seen`: all helpers."""

    def __init__(self, left: int, arch: Arch) -> None:
        self._random, self._left, self._arch = random.Random(1), left, arch
        self.killed: Counter[str] = Counter()
        self.seen: set[int] = set()

    @property
    def left(self) -> int:
        return self._left - self.killed.total()

    def run(self, database: Path, seconds: float) -> None:
        """Start the same search again until one ends by itself. seconds: what that takes undisturbed."""
        while True:
            process = processes.Process(target=search, args=(database, self._arch))
            process.start()
            self._disturb(process, seconds)
            process.join()
            assert process.exitcode in (0, -signal.SIGKILL)
            if process.exitcode == 0:
                return

    def _disturb(self, process: Any, seconds: float) -> None:
        while self.left:
            process.join(self._random.uniform(0, 0.5 * seconds))
            if process.exitcode is not None:
                return
            helpers = helpers_of(process.pid)
            self.seen |= helpers.keys()
            kind = self._random.choice(["tune", "worker", "worker", "compiler"])  # if one is there
            if victims := [pid for pid, is_one in [(process.pid, "tune"), *helpers.items()] if is_one == kind]:
                with suppress(ProcessLookupError):
                    os.kill(self._random.choice(victims), signal.SIGKILL)
                    self.killed[kind] += 1
            if kind == "tune":
                return


def test_a_tune_that_is_killed_at_random_moments_ends_like_one_that_was_not(
    tmp_path: Path, kills: int | None, figure: Callable[[str, Any], None]
) -> None:
    undisturbed, schedules, started = tmp_path / "undisturbed.db", 0, time.monotonic()
    arch = SMALL if kills is None else LARGE
    search(undisturbed, arch)
    seconds = time.monotonic() - started
    expected = content(undisturbed)
    assert len(expected) == sum(len(Space(problem, arch).legal) for problem in PROBLEMS)
    killer = Killer(FEW_KILLS if kills is None else kills, arch)
    while killer.left:
        database = tmp_path / f"{schedules}.db"
        killer.run(database, seconds)
        assert content(database) == expected
        assert winners(database) == winners(undisturbed)
        schedules += 1
    wait_until(lambda: not any(map(is_running, killer.seen)))
    figure("kills", {**dict(sorted(killer.killed.items())), "databases": schedules, "trials": len(expected)})


# ---- broken kernels --------------------------------------------------------------------------------------------------
# What a process with a GPU meets, and how its trial ends.
ENDS = {
    "crashes": Outcome.LAUNCH_FAILED,
    "hangs": Outcome.TIMEOUT,
    "loses_the_device": Outcome.LAUNCH_FAILED,
    "is_refused": Outcome.LAUNCH_FAILED,
    "garbage": Outcome.WRONG_ANSWER,
    "unstable": Outcome.UNSTABLE,
}
SILENCE_S = 0.5


class FaultyService(TimesByDigest):
    """Kernels do what their entry says."""

    usable = True

    def handle(self, request: Measure | Race) -> Any:
        assert isinstance(request, Measure)
        entry = request.kernel.entry
        if entry == "crashes":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif entry == "hangs":
            with self._watch.on():
                time.sleep(1e6)
        elif entry in ("loses_the_device", "is_refused"):
            self.usable = entry == "is_refused"
            raise RuntimeError("an illegal memory access was encountered")
        elif entry in ENDS:
            return Answer(ENDS[entry], entry)
        return super().handle(request)

    def is_usable(self) -> bool:
        return self.usable


def named(entry: str) -> Callable[[Source], Kernel]:
    return lambda source: replace(make_kernel(source), entry=entry)


def test_broken_kernels_end_as_what_they_are_and_spoil_nothing_else(tmp_path: Path) -> None:
    searched = arch(chunks=(1, 2), warps=(1, 2), butterfly_carrier=("fp32",), min_blocks=(1,))
    faults = {entry: named(entry) for entry in ENDS}
    faulty = FaultyTune(tmp_path, searched, problems(256), 24, fake_search.build, faults)
    with DeviceRunner(
        0, [make_kernel(Source("copy", "", SPEC))], silence_s=SILENCE_S, make_service=FaultyService
    ) as runner:
        compared = faulty.compare(runner)
    assert {found.fault: found.trial.outcome for found in compared.found} == ENDS
    assert compared.changed == []
    sound, with_faults = compared.winners
    assert sound == with_faults != {}
    assert all(found.lost < runner._timeout_s for found in compared.found)  # a hang is noticed by its silence


@needs_compiler
def test_the_faults_for_a_gpu_compile() -> None:
    problem, sm90 = Problem.of(1024, "float16"), load_arch("sm90")
    source = render(build_plan(problem, Space(problem, sm90).seeds()[0], sm90))
    sources = [broken_source(source, fault) for fault in FAULTS.values()]
    built = dict(zip(FAULTS, Toolchain.find().build_all(sources, sm90), strict=True))
    kernels = [
        *Toolchain.find().build_all([source], sm90),
        *(kernel if FAULTS[name].body else broken_kernel(kernel, name) for name, kernel in built.items()),
    ]
    assert len({kernel.digest for kernel in kernels}) == len(FAULTS) + 1
    for kernel in kernels:
        kernel.check()
