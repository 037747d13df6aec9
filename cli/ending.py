"""What `hadagen tune` says at its end: what was tried, what is faster now, where the winners are, and what is next."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from hadagen.cli.listing import winner_values
from hadagen.cli.output import clock_text, counted_text, fraction_text, program, say
from hadagen.plan.arch import Arch
from hadagen.problem.problem import Problem
from hadagen.problem.regimes import LOSS, REGIMES
from hadagen.problem.trial import Environment
from hadagen.runtime.choose import bundles
from hadagen.runtime.choose.bundles import why_unused
from hadagen.runtime.choose.device import Device
from hadagen.runtime.choose.entries import called_by_size
from hadagen.tuner.events import TuneReport
from hadagen.tuner.gains import Called, Gain
from hadagen.tuning_db.bundle import Bundle
from hadagen.tuning_db.winners import WinnerCell

MOST_GAINS = 3  # problems whose gains have a line


@dataclass(frozen=True)
class Ending:
    """The end of a tune for an arch, with or without a GPU. `selection`: the winners in the bundle at `path`.
    `gains`: of the problems that have winners on the GPU. `stopped`: what ended it early, or ""."""

    target: Arch
    gpu: Environment | None
    report: TuneReport
    stopped: str
    path: Path
    selection: Sequence[WinnerCell]
    problems: Sequence[Problem]
    before: dict[Problem, Called]
    gains: Sequence[Gain]

    @property
    def _ours(self) -> list[WinnerCell]:
        gpu = self.report.environment.gpu
        return [cell for cell in self.selection if cell.gpu == gpu and cell.problem in self.before]

    def values(self) -> dict[str, Any]:
        """For programs."""
        report, written = self.report, Bundle.open(self.path)
        entries = [entry for problem in self.problems for entry in written.entries(problem)]
        return {
            "arch": self.target.name,
            "gpu": report.environment.gpu,
            "estimated": report.estimated,
            "bundle": str(self.path),
            "unused": why_unused(self.path),
            "trials": report.finished,
            "trials_before": report.finished_before,
            "trials_of_other_runs": report.elsewhere,
            "under_way_in_other_runs": report.under_way,
            "outcomes": {outcome.value: count for outcome, count in report.outcomes.items()},
            "stopped": self.stopped,
            "between": sum(not (cell.is_bucket or cell.portable) for cell in self._ours),
            "faster": [
                {
                    "problem": gain.problem.key,
                    "sizes": len(gain.ratios),
                    "faster": len(gain.faster),
                    "times_as_fast": gain.mean,
                    "not_compared": gain.unknown,
                }
                for gain in self.gains
            ],
            "winners": [winner_values(entry) for entry in entries if entry.gpu == report.environment.gpu],
        }

    def say(self, seconds: float) -> None:
        """For people, in ten lines at most."""
        for sentence in self._sentences(seconds):
            say(sentence)

    def _sentences(self, seconds: float) -> Iterable[str]:
        report = self.report
        outcomes = ", ".join(f"{count} {outcome.value}" for outcome, count in report.outcomes.items())
        yield (
            f"{counted_text(sum(report.outcomes.values()), 'new trial')} for "
            f"{counted_text(len(report.best), 'problem')} in {clock_text(seconds)}{outcomes and f' ({outcomes})'}"
            f"{f'; {report.elsewhere} more of other runs' if report.elsewhere else ''}"
            f"{self.stopped and f'; {self.stopped}'}"
        )
        if report.under_way:
            yield f"other runs have {report.under_way} trials under way; hadagen bundle make adds their winners"
        if speeds := self._speeds():
            yield f"the winners as a fraction of a copy{' by the cost model' * report.estimated}: {speeds}"
        if report.estimated:
            yield (
                f"there is no {self.target.name} GPU here: kernels ran on the CPU alone, so speeds and winners are "
                "only estimated, and no gain is known"
            )
        else:
            yield from gain_sentences(self.gains, self.before)
        yield f"the winners are in {self.path}{self._use()}"
        yield f"next: {self._next()}"

    def _speeds(self) -> str:
        """The mean over all problems in each regime."""
        columns = zip(REGIMES, zip(*self.report.best.values(), strict=True), strict=True) if self.report.best else ()
        means = {name: [score for score in scores if score] for name, scores in columns}
        return ", ".join(f"{name} {fraction_text(geometric_mean(scores))}" for name, scores in means.items() if scores)

    def _use(self) -> str:
        """Whether calls use the winners, as the end of a sentence."""
        if why := why_unused(self.path):
            return f", and calls do not use it: {why}"
        device = Device(self.target.name, self.report.environment.gpu)
        path = self.path.absolute()
        tuned = dict.fromkeys((cell.problem, cell.destination) for cell in self._ours)
        if not tuned:
            return ""
        called = [bundle.path for each in tuned if (bundle := called_by_size(*each, device)[1])]
        used = called.count(path)
        calls = f"calls on {self.report.environment.gpu or f'{self.target.name} GPUs'}"
        if used == len(tuned):
            return f"; {calls} use them from now on"
        if used:
            return f"; {calls} use {used / len(tuned):.0%} of them from now on, and better ones of other bundles"
        if path not in map(Path.absolute, bundles.files()):
            return f"; calls use them where {bundles.VARIABLE} names this file"
        if self.report.estimated:
            return f"; {calls} go on with measured kernels, which come before estimates"
        return f"; {calls} go on with {called[0]}, which comes first"

    def _next(self) -> str:
        if self.report.estimated:
            return (
                f"measure on a machine with such a GPU, by the same command; or {program()} bundle show "
                f"{shlex.quote(str(self.path))}"
            )
        best = max(self.gains, key=lambda gain: (len(gain.faster), gain.mean), default=None)
        key = best.problem.key if best else self.problems[0].key
        more = "the same command continues the search; " if self.stopped else ""
        return f"{more}{program()} bench --problem {key}"


def gain_sentences(gains: Sequence[Gain], before: dict[Problem, Called]) -> Iterable[str]:
    """What is faster than before: a sentence for a problem, or one for all and the first few."""
    rest = "as shipped" if all(called.shipped for called in before.values()) else "as before"
    faster = sorted((gain for gain in gains if gain.faster), key=lambda gain: -gain.mean * len(gain.faster))
    unknown = sum(gain.unknown for gain in gains)
    others = f"; {counted_text(unknown, 'size')} not compared" if unknown else ""
    if not faster:
        if gains:
            yield f"no winner is more than {_percent(1 + LOSS)} faster than what calls ran before{others}"
        return
    if len(gains) > 1:
        sizes = sum(len(gain.faster) for gain in faster)
        percent = _percent(geometric_mean(ratio for gain in faster for ratio in gain.faster.values()))
        of = sum(len(gain.ratios) for gain in gains)
        yield (
            f"{len(faster)} of {len(gains)} problems are faster than before, by {percent} in the mean at {sizes} of "
            f"{of:,} sizes; the rest {rest}{others}"
        )
    for gain in faster[:MOST_GAINS]:
        end = "" if len(gains) > 1 or len(gain.faster) == len(gain.ratios) else f"; the rest {rest}"
        yield f"{gain.problem.key}: {_gain(gain)}{end}{others if len(gains) == 1 else ''}"


def _gain(gain: Gain) -> str:
    """Such as "3 % faster at 1,024 rows", or "2-9 % faster at 6 of 44 sizes, from 16 to 1,024 rows"."""
    least, most = min(gain.faster.values()), max(gain.faster.values())
    percent = _percent(most) if _percent(least) == _percent(most) else f"{_percent(least)[:-2]}-{_percent(most)}"
    rows = sorted({elements // gain.problem.unit for _, elements in gain.faster})
    if len(gain.faster) == len(gain.ratios):
        return f"{percent} faster at all sizes"
    if len(rows) == 1:
        return f"{percent} faster at {counted_text(rows[0], 'row')}"
    return f"{percent} faster at {len(gain.faster)} of {len(gain.ratios)} sizes, from {rows[0]:,} to {rows[-1]:,} rows"


def _percent(ratio: float) -> str:
    return f"{(ratio - 1) * 100:.0f} %"
