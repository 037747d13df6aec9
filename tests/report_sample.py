"""A tuning database for the tests of reports: failures, several problems, and as much hostile text as one can hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sample_trials import H100, make_timing, make_trial

from hadagen.problem import Problem
from hadagen.regimes import Cache
from hadagen.trial import Outcome, Trial

# Wherever it becomes part of a page, or of a script, it leaves a trace in the page that is drawn.
EVIL = (
    "</script><script>document.title='hacked'</script><img src=x onerror=\"document.title='hacked'\">$$\\frac{1}{2}$$"
)
KEYS = ("n256-float16-fast", "n1024-float16-fast", "n4096-bfloat16-accurate", "n512-float32-accurate")
SIZES = (1 << 14, 1 << 22, 1 << 26)  # one of each regime
FAILURES = (Outcome.COMPILE_FAILED, Outcome.WRONG_ANSWER, Outcome.TIMEOUT)


def sample_trials(count: int = 24, text: str = "") -> list[Trial]:
    """So many trials of each of `KEYS`, every sixth of which failed. More warps are faster; `grid` changes nothing.

    text: goes wherever a database keeps any text.
    """
    return [_trial(Problem.parse(key), number, text) for key in KEYS for number in range(count)]


def _trial(problem: Problem, number: int, text: str) -> Trial:
    warps = 1 << number % 4
    knobs = {
        "warps": warps,
        "grid": ("tiles", "persistent")[number // 4 % 2],
        "chunks": number // 8 + 1,
        **_named(text),
    }
    environment = replace(H100, gpu=H100.gpu + text, driver=H100.driver + text)
    fields: dict[str, Any] = {"problem": problem, "knobs": knobs, "environment": environment}
    if number % 6 == 5:
        outcome = FAILURES[number // 6 % len(FAILURES)]
        return make_trial(**fields, outcome=outcome, timings=(), kernel=None, errors={}, detail=f"line {number}{text}")
    timings = tuple(
        make_timing(slower * (1 + 1 / warps + number / 1000), size, cache=cache)
        for size in SIZES
        for cache, slower in ((Cache.HOT, 1.0), (Cache.COLD, 1.5))
    )
    trial = make_trial(number, **fields, errors={"normal": problem.error_bound / 2}, timings=timings)
    return replace(trial, date=f"2025-01-02T03:04:{number:02}+00:00{text}")


def _named(text: str) -> dict[str, str]:
    return {text: text} if text else {}
