"""Recordings in the cache format of Kernel Tuner, so that its simulation mode can search them.

Kernel Tuner minimizes one number. Here its `time` is the geometric mean over the cells of time / copy, without unit.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from hadagen.files.atomic_file import atomic_file, check_place
from hadagen.problem.trial import Outcome, Trial
from searches.recording import Recording

OBJECTIVE = "geometric mean over the cells of time / copy"
# Outcome → the text in place of a time.
_FAILURES = {Outcome.ILLEGAL: "InvalidConfig", Outcome.COMPILE_FAILED: "CompilationFailedConfig"}
_OTHER_FAILURE = "RuntimeFailedConfig"
_BEGINNING = b'{"device_name": '  # of every cache that is written here


def objective(trial: Trial) -> float:
    """The number to minimize, for a trial that is right. Below 1 is faster than a copy."""
    return geometric_mean(timing.us / timing.copy_us for timing in trial.timings)


def kernel_tuner_cache(recording: Recording) -> dict[str, Any]:
    """The recording as Kernel Tuner keeps one, with the names of its documentation. Times of a cache are in ms.

    Besides `time`, each entry has `times`, time / copy of every cell, and `us`, microseconds of every cell, both in the
    order of the recording's cells.
    """
    return {
        "device_name": recording.environment.gpu,
        "kernel_name": recording.problem.key,
        "problem_size": [recording.problem.n, 1, 1],
        "tune_params_keys": list(recording.ranges),
        "tune_params": {name: list(values) for name, values in recording.ranges.items()},
        "objective": ["time"],
        "cache": {cache_key(recording, trial): _entry(recording, trial) for trial in recording.trials},
    }


def cache_key(recording: Recording, trial: Trial) -> str:
    """The name of a trial in a cache: the values of its knobs."""
    return ",".join(str(trial.knobs[name]) for name in recording.ranges)


def write_kernel_tuner_cache(recording: Recording, folder: Path) -> Path:
    """Write a cache named as the problem, and return its path. An earlier export there is replaced.

    Raises `StorageError` if it cannot be written, or if another file is there.
    """
    path = folder / f"{recording.problem.key}.json"
    check_place(path, "an export of hadagen", lambda header: header.startswith(_BEGINNING))
    with atomic_file(path) as new:
        new.write_text(json.dumps(kernel_tuner_cache(recording)), encoding="utf-8")
    return path


def _entry(recording: Recording, trial: Trial) -> dict[str, Any]:
    ok = trial.outcome is Outcome.OK
    measuring_ms = trial.seconds * 1000
    return {
        **{name: trial.knobs[name] for name in recording.ranges},
        "time": objective(trial) if ok else _FAILURES.get(trial.outcome, _OTHER_FAILURE),
        "times": [timing.us / timing.copy_us for timing in trial.timings] if ok else [],
        "us": [timing.us for timing in trial.timings] if ok else [],
        "compile_time": 0.0,
        "verification_time": 0.0,
        "benchmark_time": measuring_ms,
        "strategy_time": 0.0,
        "framework_time": 0.0,
        "timestamp": trial.date,
    }
