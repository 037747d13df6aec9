"""The table of `hadagen.models.defaults`: which weights and which rotation are the default, by what was measured.

The rotation is the one with the least loss. Others within two standard errors of its loss, over the windows of the
text, are as good, and the one with the fewest kernels in each pass is chosen. Codes of 4 bits are rounded by a text.

The weights are those with the least loss among the codes of 8 bits that GPUs of a class multiply, each with its
rotation, if they take at most 5% more time than the fastest. Memory is the same, and 4 bits lose too much to be chosen
by themselves.
"""

from __future__ import annotations

import json
import math
from statistics import mean, stdev
from typing import Any

import refresh_files as files

WEIGHTS = ("int8", "fp8", "int4", "int4-row")
ROTATIONS = (None, "quarot", "blocks")  # the one with the fewest kernels in each pass first
# The least compute capability of a class of GPUs → the codes of 8 bits that vLLM's own kernels multiply there.
GPUS: dict[int, tuple[str, ...]] = {0: (), 75: ("int8",), 89: ("int8", "fp8"), 100: ("fp8",)}
MOST_TIME = 1.05
Losses = list[list[float]]  # of each window, for each seed of random signs


def defaults() -> str | None:
    """The content of defaults.json; None if a measurement is missing."""
    if not (files.WEIGHTS.exists() and files.DECODER.exists()):
        return None
    return json.dumps(table(), indent=1) + "\n"


def table() -> dict[str, Any]:
    """The rotation for each kind of weights, and the weights for each class of GPUs, with their reasons."""
    rows = json.loads(files.WEIGHTS.read_text(encoding="utf-8"))["rows"]
    base, *rows = rows
    losses = {weights: _losses(rows, weights) for weights in WEIGHTS}
    rotations = {}
    for weights, found in losses.items():
        unfolded = {rotation: each for rotation, each in found.items() if rotation != "quarot"}
        rotations[weights] = {"any": _rotation(found, base), "unfolded": _rotation(unfolded, base)}
    gpus = []
    for least, codes in GPUS.items():
        gpus.append({"from": least, "weights": _weights(codes, losses, rotations, base)})
    return {"made_by": "docs/refresh.py", "rotations": rotations, "gpus": gpus}


def _losses(rows: list[dict[str, Any]], weights: str) -> dict[str | None, Losses]:
    """The losses with each rotation, by a text if there are such."""
    found: dict[str | None, Losses] = {}
    for rotation in ROTATIONS:
        of = [row for row in rows if (row["weights"], row["rotation"]) == (weights, rotation)]
        by_text = [row for row in of if row["is_calibrated"]]
        found[rotation] = [row["loss"] for row in by_text or of]
    return found


def _rotation(found: dict[str | None, Losses], base: dict[str, Any]) -> dict[str, str | None]:
    best = min(found, key=lambda rotation: _mean(found[rotation]))

    def is_as_good(rotation: str | None) -> bool:
        """Within two standard errors, of windows and of seeds together."""
        worse = [
            mine - least for mine, least in zip(*(_windows(found[each]) for each in (rotation, best)), strict=True)
        ]
        of_windows = stdev(worse) / math.sqrt(len(worse))
        return mean(worse) <= 2 * math.hypot(of_windows, *(_of_seeds(found[each]) for each in {rotation, best}))

    chosen = next(rotation for rotation in found if is_as_good(rotation))
    each = ", ".join(f"{_lost(of, base)} with {rotation or 'none'}" for rotation, of in found.items())
    why = f"the perplexity of SmolLM2 rises by {each}"
    if chosen != best:
        why += f"; {chosen} is within two standard errors of {best}, and needs fewer kernels"
    return {"value": chosen, "why": why}


def _weights(
    codes: tuple[str, ...], losses: dict[str, Any], rotations: dict[str, Any], base: dict[str, Any]
) -> dict[str, str]:
    of = {weights: rotations[weights]["any"]["value"] for weights in WEIGHTS[:2]}
    lost = {weights: losses[weights][rotation] for weights, rotation in of.items()}
    said = " and ".join(f"{_lost(lost[weights], base)} with {weights}" for weights in of)
    why = f"the perplexity of SmolLM2 rises by {said}"
    if len(codes) == 1:
        return {"value": codes[0], "why": "the only codes of 8 bits that vLLM multiplies on such GPUs"}
    if not codes:
        return {"value": min(of, key=lambda weights: _mean(lost[weights])), "why": why}
    ms = {weights: _time(", ".join(filter(None, (weights, of[weights])))) for weights in codes}
    fast = [weights for weights in codes if ms[weights] <= MOST_TIME * min(ms.values())]
    chosen = min(fast, key=lambda weights: _mean(lost[weights]))
    slower = ms[chosen] / min(ms.values()) - 1
    return {"value": chosen, "why": f"{why}; {chosen} takes {slower:.0%} more time than the fastest on an H200"}


def _time(model: str) -> float:
    """The geometric mean of the times of all passes."""
    rows = json.loads(files.DECODER.read_text(encoding="utf-8"))["rows"]
    return math.exp(mean(math.log(row["ms"]) for row in rows if row["model"] == model))


def _windows(of: Losses) -> list[float]:
    """The mean of all seeds."""
    return [mean(window) for window in zip(*of, strict=True)]


def _mean(of: Losses) -> float:
    return mean(_windows(of))


def _of_seeds(of: Losses) -> float:
    """The standard error of the mean of seeds; 0 of a rotation without signs."""
    means = [mean(each) for each in of]
    return stdev(means) / math.sqrt(len(means)) if len(means) > 1 else 0.0


def _lost(of: Losses, base: dict[str, Any]) -> str:
    return f"{math.expm1(_mean(of) - mean(base['loss'])):.1%}"
