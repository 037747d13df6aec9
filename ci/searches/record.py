"""Measures every legal variant of problems within reduced ranges, so that searches can be compared on the data.

As they finish, trials go to a file of plain lines beside the future recording. So an interrupted run continues where
it was. A complete recording becomes one compressed file.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from threading import Event as Flag

from hadagen.errors import StorageError
from hadagen.files.atomic_file import unwritable
from hadagen.measure import Cell, Runner
from hadagen.plan.arch import Arch
from hadagen.plan.knobs import Knobs
from hadagen.plan.space import Space
from hadagen.problem.problem import Problem
from hadagen.problem.regimes import deciding_cache, destinations, timed_elements
from hadagen.problem.trial import Environment, Outcome, Trial, utc_now
from hadagen.tuner.events import Listener, ProblemFinished, ProblemStarted, SearchStarted, TrialFinished
from hadagen.tuner.pipeline import Build, Pipeline
from hadagen.tuner.study import BestByCell, best_of_trials, best_scores, note_best
from searches.recording import SUFFIX, Recording, read_recording, recording_of, write_recording

PART_SUFFIX = ".part"


@dataclass(frozen=True)
class RecordOptions:
    """The options of `record`.

    `arch`: has the reduced ranges. `cells`: problem → cells that `runner` times. `environment`: that of the device,
    with `nvcc`. `folder`: gets a file for each problem, with its name. `stopped`: set to stop building.
    """

    arch: Arch
    cells: Mapping[Problem, Sequence[Cell]]
    runner: Runner
    build: Build | None
    environment: Environment
    folder: Path
    stopped: Flag = field(default_factory=Flag)


@dataclass(frozen=True)
class RecordReport:
    """How a recording ended.

    `outcomes`: problem → outcome → number of trials so far, over all runs. `files`: problem → its file, for complete
    problems. `finished`: number of trials of this run. `interrupted`: whether variants are left to measure.
    """

    outcomes: Mapping[Problem, Mapping[Outcome, int]]
    files: Mapping[Problem, Path]
    finished: int
    interrupted: bool
    seconds: float


def deciding_cells(problem: Problem, elements: Sequence[int], l2_bytes: int) -> tuple[Cell, ...]:
    """The cell whose time decides, at the whole rows nearest to each element count, if there are any. It is in place if
    the result may replace the input."""
    destination = destinations(problem)[0]
    return tuple(
        Cell(count, destination, deciding_cache(problem, count, destination, l2_bytes))
        for count in sorted({timed_elements(problem, nominal) for nominal in elements} - {0})
    )


def record(options: RecordOptions, listen: Listener = lambda event: None) -> RecordReport:
    """Measure every legal variant that no earlier run has measured, and write the file of each complete problem.

    Ctrl-C ends it early, with a report. Raises `StorageError` if a file is in the way or cannot be written, and
    `ToolchainError` or `DeviceError` if it cannot go on. Trials that were reported until then are kept.
    """
    started, date = time.monotonic(), utc_now()
    drafts: dict[Problem, _Draft] = {}
    for problem, cells in options.cells.items():
        ranges = dict(options.arch.search)
        empty = Recording(problem, options.arch.name, ranges, tuple(cells), options.environment, date)
        try:
            drafts[problem] = _Draft(empty, options.arch, options.folder)
        except OSError as error:
            raise unwritable(options.folder, error) from error
    trials = sum(len(draft.missing) + len(draft.trials) for draft in drafts.values())
    before = finished = sum(len(draft.trials) for draft in drafts.values())

    def missing() -> Iterator[tuple[Problem, Knobs]]:
        for problem, draft in drafts.items():
            listen(ProblemStarted(problem, len(draft.trials)))
            for knobs in draft.missing:
                yield problem, knobs

    def finish(some: Sequence[Trial]) -> None:
        nonlocal finished
        for trial in some:
            draft = drafts[trial.problem]
            try:
                kept = draft.keep(trial)
            except OSError as error:
                raise unwritable(draft.path, error) from error
            finished += 1
            best = best_scores(draft.best_by_cell)
            listen(TrialFinished(kept, best, finished, trials))
            if draft.is_complete:
                listen(ProblemFinished(trial.problem, len(draft.trials), best))

    listen(SearchStarted(len(drafts), trials, finished, options.environment, estimated=False))
    left = missing()
    with Pipeline(options.arch, options.build, options.runner, (), options.stopped) as pipeline:
        interrupted = pipeline.run(lambda size: list(islice(left, size)), finish, listen)
    return RecordReport(
        outcomes={problem: draft.outcomes for problem, draft in drafts.items()},
        files={problem: draft.path for problem, draft in drafts.items() if draft.is_complete},
        finished=finished - before,
        interrupted=interrupted,
        seconds=time.monotonic() - started,
    )


class _Draft:
    """An incomplete recording: its file of lines, the variants that are missing, and the best trials so far."""

    def __init__(self, empty: Recording, arch: Arch, folder: Path) -> None:
        self.path = folder / f"{empty.problem.key}{SUFFIX}"
        self._part = self.path.with_suffix(PART_SUFFIX)
        self._legal = Space(empty.problem, arch).legal
        self.recording = self._kept_before(empty)
        self.trials = {Knobs.from_dict(trial.knobs): trial for trial in self.recording.trials}
        if not self.trials.keys() <= set(self._legal):
            raise self._in_the_way()
        self.missing = [knobs for knobs in self._legal if knobs not in self.trials]
        # A device that drifts during the recording must not look like the effect of a knob.
        random.Random(empty.problem.key).shuffle(self.missing)
        self.best_by_cell: BestByCell = best_of_trials(self.recording.trials)
        if self.is_complete and not self.path.exists():  # an earlier run ended just before
            self._write_whole()

    def keep(self, trial: Trial) -> Trial:
        """Write a trial, and after the last one the whole file. Returns the trial as it is kept."""
        kept = self.recording.as_kept(trial)
        with self._part.open("a", encoding="utf-8") as part:
            part.write(f"{self.recording.trial_line(kept)}\n")
        self.trials[Knobs.from_dict(kept.knobs)] = kept
        note_best(self.best_by_cell, kept)
        if self.is_complete:
            self._write_whole()
        return kept

    def _write_whole(self) -> None:
        write_recording(replace(self.recording, trials=tuple(self.trials[knobs] for knobs in self._legal)), self.path)
        self._part.unlink()

    @property
    def is_complete(self) -> bool:
        return len(self.trials) == len(self._legal)

    @property
    def outcomes(self) -> Counter[Outcome]:
        return Counter(trial.outcome for trial in self.trials.values())

    def _kept_before(self, empty: Recording) -> Recording:
        """The recording of earlier runs, or an empty one with a new file of lines."""
        if self.path.exists():
            found = read_recording(self.path)
            if not found.same_but_for_trials(empty) or len(found.trials) != len(self._legal):
                raise self._in_the_way()
            self._part.unlink(missing_ok=True)  # an earlier run ended just after it wrote the whole file
            return found
        self._part.parent.mkdir(parents=True, exist_ok=True)
        try:
            text = self._part.read_text(encoding="utf-8") if self._part.exists() else ""
            whole = text[: text.rfind("\n") + 1]  # the last line may have been cut off
            if not whole:
                self._part.write_text(f"{empty.header_line()}\n", encoding="utf-8")
                return empty
            header, *lines = whole.splitlines()
            found = recording_of(header, lines)
        except ValueError:
            raise self._in_the_way() from None
        if not found.same_but_for_trials(empty):
            raise self._in_the_way()
        if whole != text:
            self._part.write_text(whole, encoding="utf-8")
        return found

    def _in_the_way(self) -> StorageError:
        path = self.path if self.path.exists() else self._part
        return StorageError(
            f"{path} is there already and of other ranges, cells or another device; "
            "name another folder, or remove it first"
        )
