"""`Recording`: every legal variant of a problem within reduced ranges, measured; and its file.

A file is compressed JSON lines. The first line has what all trials share. Each other line is a trial, in the order of
the space.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from hadagen.errors import StorageError, UsageError
from hadagen.files.atomic_file import atomic_file
from hadagen.files.opening import read_start
from hadagen.measure import Cell
from hadagen.plan.arch import Arch, load_arch
from hadagen.plan.knobs import KNOB_NAMES, KNOB_VALUES, Knobs, KnobValue, are_known
from hadagen.problem.problem import Problem
from hadagen.problem.regimes import Cache, Destination
from hadagen.problem.trial import Environment, Outcome, Provenance, Timing, Trial

SCHEMA = 2
SUFFIX = ".jsonl.gz"
_SCHEMA_KEY = "hadagen recording"
_US_DIGITS, _SECONDS_DIGITS = 4, 4  # after the point: a tenth of a nanosecond, and of a millisecond
_ERROR_DIGITS = 3  # significant ones
_DETAIL_LENGTH = 200
_MOST_BYTES = 1 << 26  # of a file that is read; 20 000 variants take a tenth of it


@dataclass(frozen=True)
class Recording:
    """Trials of one problem on one device, one for each legal choice of knobs within `ranges`.

    `ranges`: knob → the values that were searched. `cells`: where each kernel was timed. `environment` and `date` (UTC,
    ISO 8601, of the beginning) are those of all trials. The trials are as `as_kept` returns them. `former`: trials of
    knobs or values that searches no longer have; no search tries them, but they may be the best.
    """

    problem: Problem
    arch: str
    ranges: Mapping[str, tuple[KnobValue, ...]]
    cells: tuple[Cell, ...]
    environment: Environment
    date: str
    trials: tuple[Trial, ...] = ()
    former: tuple[Trial, ...] = ()

    @property
    def target(self) -> Arch:
        """The arch with these ranges only. A knob newer than the recording has only its default value.

        Raises `UsageError` if a value of the ranges is no longer searched.
        """
        later = {name: (getattr(Knobs, name),) for name in KNOB_NAMES if name not in self.ranges}
        return load_arch(self.arch).narrowed({**self.ranges, **later})

    def same_but_for_trials(self, other: Recording) -> bool:
        """Whether both have the same problem, device, cells and ranges; dates may differ."""
        return replace(self, date="", trials=(), former=()) == replace(other, date="", trials=(), former=())

    def as_kept(self, trial: Trial) -> Trial:
        """The trial as it is kept: the times of `cells`, no more digits than a clock has, and no kernel."""
        timed = {Cell.of(timing): timing for timing in trial.timings}
        timings = (
            Timing(*cell, *(round(us, _US_DIGITS) for us in _us(timed[cell]))) for cell in self.cells if cell in timed
        )
        return replace(
            trial,
            kernel=None,
            detail=trial.detail.strip().partition("\n")[0][:_DETAIL_LENGTH],
            errors={name: float(f"{error:.{_ERROR_DIGITS}g}") for name, error in trial.errors.items()},
            timings=tuple(timings),
            environment=self.environment,
            date=self.date,
            seconds=round(trial.seconds, _SECONDS_DIGITS),
        )

    def header_line(self) -> str:
        """The first line of a file."""
        return _line(
            {
                _SCHEMA_KEY: SCHEMA,
                "problem": self.problem.key,
                "arch": self.arch,
                "ranges": {name: list(values) for name, values in self.ranges.items()},
                "cells": [[cell.elements, cell.destination.value, cell.cache.value] for cell in self.cells],
                "environment": asdict(self.environment),
                "date": self.date,
            }
        )

    def trial_line(self, trial: Trial) -> str:
        """The line of a trial that `as_kept` returned. Its times are in the order of `cells`."""
        times = {Cell.of(timing): _us(timing) for timing in trial.timings}
        return _line(
            {
                "knobs": [trial.knobs[name] for name in self.ranges],
                "outcome": trial.outcome.value,
                "us": [times.get(cell) for cell in self.cells] if times else [],
                "errors": trial.errors,
                "detail": trial.detail,
                "seconds": trial.seconds,
            }
        )


def recording_of(header: str, lines: Iterable[str]) -> Recording:
    """The recording in these lines of a file. Raises `ValueError` if they are no recording."""
    try:
        values = json.loads(header)
        if not isinstance(values, dict) or values.get(_SCHEMA_KEY) != SCHEMA:
            raise ValueError(f"it does not begin with {_SCHEMA_KEY!r}: {SCHEMA}")
        empty = Recording(
            problem=Problem.parse(values["problem"]),
            arch=values["arch"],
            ranges={name: tuple(searched) for name, searched in values["ranges"].items()},
            cells=tuple(Cell(elements, Destination(d), Cache(c)) for elements, d, c in values["cells"]),
            environment=Environment(**values["environment"]),
            date=values["date"],
        )
        trials = [_trial(empty, json.loads(line)) for line in lines]
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    known, former = (tuple(t for t in trials if are_known(t.knobs) is still) for still in (True, False))
    searched = ((name, values) for name, values in empty.ranges.items() if name in KNOB_VALUES)
    ranges = {name: tuple(value for value in values if value in KNOB_VALUES[name]) for name, values in searched}
    return replace(empty, ranges=ranges, trials=known, former=former)


def write_recording(recording: Recording, path: Path) -> None:
    """Write a file. It replaces an old one only when it is complete. Equal recordings make equal files.

    Raises `StorageError` if it cannot be written.
    """
    text = "\n".join([recording.header_line(), *map(recording.trial_line, recording.trials), ""])
    with atomic_file(path) as new:
        new.write_bytes(gzip.compress(text.encode(), mtime=0))


def read_recording(path: str | os.PathLike[str]) -> Recording:
    """Read a file. Raises `StorageError` if it cannot be read or is no recording."""
    try:
        compressed, _ = read_start(path, _MOST_BYTES)
        stream = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)  # of gzip
        text = stream.decompress(compressed, _MOST_BYTES)
        if not stream.eof:
            raise ValueError(f"it is cut off, or of more than {_MOST_BYTES} bytes")
        header, *lines = text.decode().splitlines()
        return recording_of(header, lines)
    except (ValueError, zlib.error) as error:
        reason = " ".join(str(error).split())
        raise StorageError(f"{path} is not a recording ({reason}); make one with python ci/search.py record") from error
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}; name a file of ci/search.py record") from error


def _line(values: Mapping[str, Any]) -> str:
    return json.dumps(values, separators=(",", ":"))


def _trial(recording: Recording, values: Mapping[str, Any]) -> Trial:
    outcome = Outcome(values["outcome"])
    timings = tuple(_timings(recording.cells, values["us"]))
    if outcome is Outcome.OK and not timings:
        raise ValueError(f"a trial is {outcome.value} without a time")
    knobs = dict(zip(recording.ranges, values["knobs"], strict=True))
    with suppress(UsageError):  # the values of a knob that no longer exists
        knobs = Knobs.from_dict(knobs).to_dict()  # knobs newer than the recording have their defaults
    return Trial(
        problem=recording.problem,
        arch=recording.arch,
        knobs=knobs,
        outcome=outcome,
        provenance=Provenance.MEASURED,
        detail=values["detail"],
        errors=values["errors"],
        timings=timings,
        environment=recording.environment,
        date=recording.date,
        seconds=values["seconds"],
    )


def _us(timing: Timing) -> tuple[float, float, float, float]:
    """The times in the order of a file, which is that of `Timing`."""
    return timing.us, timing.us_low, timing.us_high, timing.copy_us


def _timings(cells: Sequence[Cell], times: Sequence[tuple[float, float, float, float] | None]) -> Iterator[Timing]:
    """The timings of a trial; none if it failed. Raises `ValueError` if a time is not above 0 and finite."""
    for cell, us in zip(cells, times, strict=True) if times else ():
        if us is not None:
            if not all(0 < time < inf for time in us):
                raise ValueError(f"{us} are no times; they are above 0 and finite")
            yield Timing(*cell, *us)
