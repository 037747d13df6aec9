"""The numbers of fleets, in a simulation and on the GPUs of one machine."""

from __future__ import annotations

from typing import Any

import refresh_files as files
from refresh_markdown import wrapped


def fleet_numbers() -> str:
    """The paragraphs of the page about fleets, in Markdown."""
    simulated, gpus = files.read_json(files.FLEET), files.read_json(files.FLEET_GPUS)
    paragraphs = []
    if simulated:
        search = simulated["search"]
        paragraphs += [
            f"In a simulation on [recorded timings](internals/comparing-searches.md), {simulated['workers']} workers "
            f"with one GPU each, of {len(simulated['classes'])} classes, finished "
            f"{simulated['trials_per_second']:.0f} trials a second in one run. From a tenth to eight tenths of the "
            f"trials, the GPUs of each class measured at least "
            f"{_least_busy(simulated)}% of the time. Each trial took "
            f"{simulated['coordinator_ms_per_trial']:.1f} ms of the CPU time of `hadagen tune`.",
            f"A search with many variants in progress knows fewer results when it chooses. With one in progress, a "
            f"search reaches {search['one_by_one']:.3f} of the best speed within its budget. With {search['workers']} "
            f"in progress, it reaches {search['in_parallel']:.3f} after {search['more']:g} times as many evaluations "
            f"({search['problems']} problems, {search['seeds']} seeds). A search on one GPU has some batches in "
            "progress, as in the [tables](internals/comparing-searches.md).",
        ]
    if gpus:
        one, many = gpus["runs"][0], gpus["runs"][-1]
        paragraphs.append(
            f"On one machine with {many['gpus']} {gpus['gpu']} and {gpus['cpus']} CPUs, {many['gpus']} GPUs finished "
            f"{many['new_trials']} trials, and {one['gpus']} finished {one['new_trials']} in the same time, so the "
            f"fleet was {_gain(gpus):.2f} times as fast: `{gpus['command']}`"
        )
    return "\n\n".join(map(wrapped, paragraphs)) or files.NO_DATA


def speed() -> str:
    """How busy the GPUs of a fleet are, and what more GPUs bring; "" without data."""
    simulated, gpus = files.read_json(files.FLEET), files.read_json(files.FLEET_GPUS)
    found = []
    if simulated:
        found.append(
            f"{simulated['workers']} simulated GPUs of {len(simulated['classes'])} classes: "
            f"{simulated['trials_per_second']:.0f} trials a second, at least {_least_busy(simulated)}% busy"
        )
    if gpus:
        one, many = gpus["runs"][0], gpus["runs"][-1]
        found.append(f"{many['gpus']} {gpus['gpu']}: {_gain(gpus):.2f} times the trials of {one['gpus']}")
    return "; ".join(found)


def search_in_parallel() -> str:
    """The speed that a search with many variants in progress reaches; "" without data."""
    simulated = files.read_json(files.FLEET)
    if not simulated:
        return ""
    search = simulated["search"]
    return (
        f"{search['workers']} in progress: {search['in_parallel']:.3f} of the best speed; one: "
        f"{search['one_by_one']:.3f}; {search['problems']} problems, {search['seeds']} seeds"
    )


def kills() -> str:
    """The databases of fleets that were broken at random moments; "" without data."""
    found = files.read_json(files.FLEET_KILLS)
    if not found:
        return ""
    happened = {kind: count for kind, count in found["faults"].items() if count}
    return (
        f"{sum(happened.values())} faults of {len(happened)} kinds in {found['runs']} runs: {found['equal']} of "
        f"{found['schedules']} databases have every trial once, {found['trials']} in all"
    )


def _gain(gpus: Any) -> float:
    """The trials of the most GPUs, as a multiple of those of the fewest in the same time."""
    return float(gpus["runs"][-1]["new_trials"] / gpus["runs"][0]["new_trials"])


def _least_busy(simulated: Any) -> int:
    """Percent, rounded down."""
    return int(100 * min(simulated["busy"].values()))
