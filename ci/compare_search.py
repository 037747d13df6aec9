"""Compares hadagen's search with those of Kernel Tuner on recordings, and writes `docs/data/search.json`.

    python ci/compare_search.py                   # docs/data/recordings, all strategies, 20 seeds
    python ci/compare_search.py --seeds 3 --strategies bayes_opt,pso --out /tmp/search.json /tmp/recordings

Needs Kernel Tuner (pip install kernel-tuner) besides hadagen with its extra `tune`, and no GPU. A strategy runs in
Kernel Tuner's simulation mode, on a recording as `ci/search.py replay --export` writes it. It searches the same
variants, is told beforehand which are legal, makes as many distinct evaluations with the same seeds, and has its own
defaults for all else. It minimizes one number, the geometric mean over the cells of time / copy. Its evaluations are
scored like ours. The same seeds give the same numbers, except for diff_evo and bayes_opt, whose first sample no seed
controls.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import logging
import multiprocessing
import os
import random
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from searches.export import OBJECTIVE, cache_key, write_kernel_tuner_cache
from searches.recording import SUFFIX, read_recording
from searches.replay import Curve, Field, curve, run_searches

from hadagen.errors import HadagenError
from hadagen.problem.trial import Outcome

DATA = Path(__file__).resolve().parent.parent / "docs" / "data"
# All strategies of Kernel Tuner, except brute force, those that need further packages, and greedy_ils, which never ends
# if it finds nothing new.
STRATEGIES = (
    "adaptive_tabu_greywolf",
    "basinhopping",
    "bayes_opt",
    "diff_evo",
    "dual_annealing",
    "firefly_algorithm",
    "genetic_algorithm",
    "greedy_mls",
    "hybrid_vndx",
    "minimize",
    "mls",
    "nsga2",
    "ordered_greedy_mls",
    "pso",
    "random_sample",
    "simulated_annealing",
)
SHOWN = 3  # the best strategies, in the tables


class Run(NamedTuple):
    recording: Path
    cache: Path
    strategy: str
    seed: int


def evaluated(run: Run) -> list[str]:
    """The keys of the variants that a strategy evaluates on a recording, in order, each once."""
    import numpy
    from kernel_tuner import tune_kernel

    field = _field(run.recording)
    recording = field.recording
    random.seed(run.seed)
    numpy.random.seed(run.seed)
    logging.disable(logging.WARNING)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        results, _ = tune_kernel(
            recording.problem.key,
            "",
            [recording.problem.n, 1, 1],
            [],
            {name: list(values) for name, values in recording.ranges.items()},
            restrictions=[_only_recorded(field)],
            strategy=run.strategy,
            strategy_options={"max_fevals": field.budget},
            simulation_mode=True,
            cache=str(run.cache),
            lang="CUDA",
            quiet=True,
            seed=run.seed,
        )
    return list(dict.fromkeys(",".join(str(result[name]) for name in recording.ranges) for result in results))


@cache
def _field(path: Path) -> Field:
    return Field.of(read_recording(path))


def _only_recorded(field: Field) -> Any:
    """A constraint that is broken as soon as no recorded variant has the values chosen so far."""
    from constraint import Constraint  # Kernel Tuner's solver

    names = tuple(field.recording.ranges)
    variants = [tuple(trial.knobs[name] for name in names) for trial in field.trials]

    @cache
    def having(*chosen: bool) -> set[tuple[Any, ...]]:
        return {tuple(value for value, is_one in zip(variant, chosen, strict=True) if is_one) for variant in variants}

    class OnlyRecorded(Constraint):
        def __call__(self, variables: Any, domains: Any, assignments: Mapping[str, Any], *_: Any) -> bool:
            chosen = [name in assignments for name in names]
            return tuple(assignments[name] for name in names if name in assignments) in having(*chosen)

        def __deepcopy__(self, _: Any) -> OnlyRecorded:
            return self

    return OnlyRecorded()


def compare(paths: Sequence[Path], strategies: Sequence[str], seeds: int, jobs: int) -> dict[str, Any]:
    """The content of `search.json`: the curves of our searches and of the best strategies, and how the others end."""
    fields = [_field(path) for path in paths]
    ours = run_searches(fields, range(seeds))
    theirs = dict(_curves(paths, strategies, seeds, jobs))
    ranked = sorted(theirs, key=lambda name: theirs[name].final, reverse=True)
    return {
        "environment": asdict(fields[0].recording.environment),
        "versions": {name: version(name) for name in ("hadagen", "optuna", "kernel_tuner")},
        "seeds": seeds,
        "objective": OBJECTIVE,
        "problems": [_about(field) for field in fields],
        "hadagen": {name: _values(each) for name, each in ours.items()},
        "kernel_tuner": {name: _values(theirs[name]) for name in ranked[:SHOWN]},
        "kernel_tuner_others": {name: round(theirs[name].final, 5) for name in ranked[SHOWN:]},
    }


def _curves(paths: Sequence[Path], strategies: Sequence[str], seeds: int, jobs: int) -> Iterator[tuple[str, Curve]]:
    fields = [_field(path) for path in paths]
    by_key = [{cache_key(field.recording, trial): trial for trial in field.trials} for field in fields]
    os.environ["PYTHONHASHSEED"] = "0"  # of the processes to come: some strategies go through sets
    spawning = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(jobs, mp_context=spawning) as pool:
        caches = [write_kernel_tuner_cache(field.recording, Path(folder)) for field in fields]
        for strategy in strategies:
            runs = [Run(*place, strategy, seed) for place in zip(paths, caches, strict=True) for seed in range(seeds)]
            found = pool.map(evaluated, runs)
            orders = [[[trials[key] for key in next(found)] for _ in range(seeds)] for trials in by_key]
            result = curve(fields, orders)
            print(f"{strategy}: {result.final:.4f}", flush=True)
            yield strategy, result


def _about(field: Field) -> dict[str, Any]:
    recording = field.recording
    return {
        "name": recording.problem.key,
        "variants": len(field.trials),
        "ok": sum(trial.outcome is Outcome.OK for trial in field.trials),
        "budget": field.budget,
        "cells": [[cell.elements, cell.destination.value, cell.cache.value] for cell in field.best],
        "ranges": {name: list(values) for name, values in recording.ranges.items()},
    }


def _values(result: Curve) -> dict[str, list[float]]:
    return {
        "curve": [round(value, 5) for value in result.values],
        "at_budget": [round(value, 5) for value in result.at_budget],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=DATA / "recordings")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=DATA / "search.json")
    arguments = parser.parse_args()
    paths = sorted(arguments.folder.glob(f"*{SUFFIX}"))
    if not paths:
        raise SystemExit(f"{arguments.folder} holds no recordings (*{SUFFIX}); make them with ci/search.py record")
    if importlib.util.find_spec("kernel_tuner") is None:
        raise SystemExit("Kernel Tuner is not installed; install it with: pip install kernel-tuner")
    try:
        result = compare(paths, arguments.strategies.split(","), arguments.seeds, arguments.jobs)
    except HadagenError as error:
        raise SystemExit(str(error)) from None
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
