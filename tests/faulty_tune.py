"""Ways to break a kernel, and a tune some of whose kernels are broken, beside the same tune with sound ones: what
becomes of each broken kernel, whether the winners are the same, and the time that is lost to it.

All variants of the first tune come again in the second. Sound ones keep the times of the first there, so that winners
can only differ where a broken kernel has spoiled something else.
"""

import re
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hadagen.compiler.codegen import render
from hadagen.measure import DeviceRunner, Variant
from hadagen.plan.arch import Arch
from hadagen.plan.knobs import Knobs, plan_of
from hadagen.problem.launch import ENTRY, Source
from hadagen.problem.problem import Problem
from hadagen.problem.trial import Kernel, Outcome, Trial, kernel_digest, knobs_key
from hadagen.tuner.pipeline import Build
from hadagen.tuner.search import TuneOptions, tune
from hadagen.tuning_db.store import Store
from hadagen.tuning_db.winners import portfolio

Key = tuple[Problem, str]


def key_of(trial: Trial | Variant) -> Key:
    return trial.problem, knobs_key(trial.knobs)


@dataclass
class Recorded:
    """Measures on a device. Sound kernels keep the times of an earlier tune. `lost`: by broken variant, the seconds
    from the trial before it to the trial after it, without those that the latter took."""

    runner: DeviceRunner
    earlier: Mapping[Key, Trial] = field(default_factory=dict)
    lost: dict[Key, float] = field(default_factory=dict)

    @property
    def environment(self) -> Any:
        return self.runner.environment

    def run(self, variants: Iterable[Variant]) -> Iterator[tuple[Variant, Trial]]:
        before = time.monotonic()
        waiting: list[Key] = []
        for variant, trial in self.runner.run(variants):
            now = time.monotonic()
            if trial.outcome is Outcome.OK:
                self.lost |= dict.fromkeys(waiting, (now - before - trial.seconds) / max(1, len(waiting)))
                waiting, before = [], now
                if key_of(trial) in self.earlier:
                    trial = replace(trial, timings=self.earlier[key_of(trial)].timings)
            else:
                waiting.append(key_of(trial))
                self.lost[key_of(trial)] = (now - before) / len(waiting)
            yield variant, trial


@dataclass(frozen=True)
class Found:
    """What became of a broken kernel."""

    fault: str
    trial: Trial
    lost: float  # seconds


@dataclass(frozen=True)
class Compared:
    """`found`: what became of the broken kernels. `winners`: the kernels that win with and without them, by cell.
    `changed`: sound variants that ended otherwise than in the first tune."""

    found: list[Found]
    winners: tuple[dict[str, str], dict[str, str]]
    changed: list[Trial]


@dataclass(frozen=True)
class FaultyTune:
    """`breaks`: fault → what builds a source with it. Every fault is tried `each` times."""

    folder: Path
    arch: Arch
    problems: Sequence[Problem]
    trials: int
    build: Build
    breaks: Mapping[str, Callable[[Source], Kernel]]
    each: int = 1

    def compare(self, runner: DeviceRunner) -> Compared:
        sound = self._tuned("sound", Recorded(runner), self.build, {})
        names = _winners(sound)
        broken = self._broken(sound, set(names.values()))
        known: dict[Problem, list[Knobs]] = {problem: [] for problem in self.problems}
        for trial in sound:
            known[trial.problem].append(Knobs.from_dict(trial.knobs))

        def build(sources: Sequence[Source]) -> Sequence[Any]:
            kernels = list(self.build(sources))
            for position, source in enumerate(sources):
                if source.entry in broken:
                    kernels[position] = self.breaks[broken[source.entry]](source)
            return kernels

        recorded = Recorded(runner, {key_of(trial): trial for trial in sound})
        trials = self._tuned("faulty", recorded, build, known)
        faults = {key_of(trial): broken[entry] for trial in trials if (entry := self._entry(trial)) in broken}
        found = [
            Found(faults[key], trial, recorded.lost.get(key, 0.0))
            for trial in trials
            if (key := key_of(trial)) in faults
        ]
        before = {key_of(trial): trial.outcome for trial in sound}
        assert before.keys() == {key_of(trial) for trial in trials}
        changed = [
            trial for trial in trials if key_of(trial) not in faults and trial.outcome is not before[key_of(trial)]
        ]
        return Compared(found, (names, _winners(trials)), changed)

    def _tuned(
        self, name: str, runner: Recorded, build: Build, known: Mapping[Problem, Sequence[Knobs]]
    ) -> list[Trial]:
        with Store.open(self.folder / f"{name}.db") as store:
            tune(
                TuneOptions(
                    arch=self.arch,
                    problems=self.problems,
                    store=store,
                    runner=runner,
                    build=build,
                    trials=self.trials,
                    known=known,
                )
            )
            return store.trials()

    def _entry(self, trial: Trial) -> str:
        plan = plan_of(trial.problem, Knobs.from_dict(trial.knobs), starts_early=self.arch.starts_early)
        return render(plan).entry

    def _broken(self, sound: Sequence[Trial], winners: set[str]) -> dict[str, str]:
        """Fault by entry: each fault for some of the kernels that win nowhere, over all problems."""
        may_break = [
            self._entry(trial)
            for trial in sound
            if trial.outcome is Outcome.OK and trial.kernel and trial.kernel.digest not in winners
        ]
        wanted = [fault for fault in self.breaks for _ in range(self.each)]
        assert len(may_break) >= len(wanted), "too few trials: not every fault has a kernel"
        step = len(may_break) / len(wanted)
        return {may_break[int(i * step)]: fault for i, fault in enumerate(wanted)}


def _winners(trials: Sequence[Trial]) -> dict[str, str]:
    chosen = portfolio(trials)
    return {str(cell): trial.kernel.digest for cell, trial in chosen.items() if trial.kernel}


_FAILED, _WRONG, _HUNG = Outcome.LAUNCH_FAILED, Outcome.WRONG_ANSWER, Outcome.TIMEOUT


@dataclass(frozen=True)
class Fault:
    """`body`: what the kernel begins with, for the float16 kernels of a search; "" if its code or launch is changed.
    `says`: a part of the detail of its trial. `few_threads`: whether it is compiled for fewer than it is launched with.
    """

    outcome: Outcome
    says: str = ""
    body: str = ""
    few_threads: bool = False


FAULTS = {
    "writes far outside": Fault(_FAILED, "", "*reinterpret_cast<volatile u32*>(16) = 1;"),
    "writes behind the output": Fault(
        _WRONG, "outside", "if (block_index() == 0 && thread_index() == 0) static_cast<u16*>(y)[elements] = 0;"
    ),
    "writes in front of the output": Fault(
        _WRONG, "outside", "if (block_index() == 0 && thread_index() == 0) static_cast<u16*>(y)[-1] = 0;"
    ),
    "writes at an odd address": Fault(_FAILED, "", "*reinterpret_cast<volatile u32*>(static_cast<byte*>(y) + 1) = 0;"),
    "loops for ever": Fault(_HUNG, "nothing", 'while (true) asm volatile("nanosleep.u32 1000;");'),
    # The first warp waits for another one, and so it does in a block of one warp.
    "deadlock": Fault(_HUNG, "nothing", 'if (thread_index() < 32) asm volatile("bar.sync 1, 64;");'),
    "writes nothing": Fault(_WRONG, "", "if (elements) return;"),
    "writes garbage": Fault(
        _WRONG,
        "",
        "for (i64 i = block_index() * {threads}ll + thread_index(); i < elements; i += gridDim.x * {threads}ll)"
        " static_cast<u16*>(y)[i] = static_cast<u16>((i * 2654435761u) >> 7 & 0x3fff); if (elements) return;",
    ),
    "trap": Fault(_FAILED, "", 'asm volatile("trap;");'),
    "no instruction": Fault(_FAILED),
    "half of its code": Fault(_FAILED),
    "more threads than it was compiled for": Fault(_FAILED, few_threads=True),
}


def broken_source(source: Source, fault: Fault) -> Source:
    """The source with a body in front of that of the kernel, or compiled for fewer threads than it is launched with."""
    if fault.few_threads:
        text, count = re.subn(r"__launch_bounds__\(\d+", "__launch_bounds__(32", source.text)
        assert count == 1
        return replace(source, text=text)
    if not fault.body:
        return source
    body = fault.body.format(threads=source.launch.threads)
    text, count = re.subn(r"(?m)^(    using namespace hadagen;)$", lambda found: f"{found[1]}\n    {body}", source.text)
    assert count == 1
    return replace(source, text=text)


def broken_kernel(kernel: Kernel, name: str) -> Kernel:
    """A kernel whose code or launch is changed."""
    cubin, launch = kernel.cubin, kernel.launch
    if name == "no instruction":
        start, size = section(cubin, f".text.{ENTRY}")
        cubin = cubin[:start] + b"\xff" * size + cubin[start + size :]
    elif name == "half of its code":
        cubin = cubin[: len(cubin) // 2].ljust(len(cubin), b"\0")  # the driver reads to where the code would end
    else:
        launch = replace(launch, threads=max(launch.threads, 64))
    return replace(kernel, cubin=cubin, launch=launch, digest=kernel_digest(cubin, launch))


def section(elf: bytes, name: str) -> tuple[int, int]:
    """Where a section of a cubin begins, and its bytes."""
    start, size, count, names = struct.unpack_from("<Q", elf, 40)[0], *struct.unpack_from("<HHH", elf, 58)
    headers = [start + i * size for i in range(count)]

    def place(at: int) -> tuple[int, int]:
        offset, length = struct.unpack_from("<QQ", elf, at + 24)
        return offset, length

    table, _ = place(headers[names])
    for at in headers:
        (word,) = struct.unpack_from("<I", elf, at)
        begin = table + word
        if elf[begin : elf.index(b"\0", begin)].decode() == name:
            return place(at)
    raise ValueError(f"the cubin has no section {name}")
