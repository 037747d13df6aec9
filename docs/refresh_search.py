"""Tables of our searches and of Kernel Tuner's."""

from __future__ import annotations

import json
from collections.abc import Iterable
from os.path import relpath
from typing import Any, NamedTuple

import refresh_files as files
from refresh_markdown import grid

# Counts of evaluations in the table.
EVALUATIONS = (1, 5, 10, 20, 30, 40, 60, 80, 100, 150, 200)


class Searches(NamedTuple):
    """The content of search.json. `ours`, `theirs`: name → fraction of the best after 1, 2, … evaluations."""

    data: dict[str, Any]
    ours: dict[str, list[float]]
    theirs: dict[str, list[float]]

    @classmethod
    def read(cls) -> Searches:
        data = json.loads(files.SEARCH.read_text(encoding="utf-8"))
        ours, theirs = (
            {name: search["curve"] for name, search in data[whose].items()} for whose in ("hadagen", "kernel_tuner")
        )
        return cls(data, ours, theirs)

    @property
    def labels(self) -> list[str]:
        return [*self.ours, *(f"Kernel Tuner: {name}" for name in self.theirs)]

    @property
    def curves(self) -> list[list[float]]:
        return [*self.ours.values(), *self.theirs.values()]


def search_numbers() -> str:
    """The picture, the tables and their sources, in Markdown."""
    if not files.SEARCH.exists():
        return files.NO_DATA
    searches = Searches.read()
    data, problems = searches.data, searches.data["problems"]
    environment, versions = data["environment"], data["versions"]
    sides = "r" * len(searches.labels)
    longest = max(problem["budget"] for problem in problems)
    counts = [count for count in EVALUATIONS if count < longest]
    rows = [(count, *_fractions(curve[count - 1] for curve in searches.curves)) for count in counts]
    rows.append(("**budget**", *_fractions(curve[-1] for curve in searches.curves)))
    all_searches = [*data["hadagen"].values(), *data["kernel_tuner"].values()]
    by_problem = [
        (problem["name"], problem["variants"], problem["budget"], *_fractions(s["at_budget"][i] for s in all_searches))
        for i, problem in enumerate(problems)
    ]
    others = ", ".join(f"{name} {value:.3f}" for name, value in data["kernel_tuner_others"].items())
    return "\n".join(
        [
            f"![Fraction of the best over evaluations]({relpath(files.SEARCH_PICTURE, files.SEARCH_PAGE.parent)})",
            "",
            f"Recorded on an {environment['gpu']} (driver {environment['driver']}, compiler {environment['nvcc']}); "
            f"{data['seeds']} seeds; Optuna {versions['optuna']}, Kernel Tuner {versions['kernel_tuner']}.",
            "",
            grid("l" + sides, ["evaluations", *searches.labels], rows),
            "",
            grid("lrr" + sides, ["after its budget", "variants", "budget", *searches.labels], by_problem),
            "",
            f"Kernel Tuner's other strategies, after the budget: {others or 'none'}.",
        ]
    )


def _fractions(values: Iterable[float]) -> list[str]:
    return [f"{value:.3f}" for value in values]
