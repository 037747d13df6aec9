"""The numbers of a report: plain values from trials and winners, without any drawing."""

from __future__ import annotations

from dataclasses import replace
from statistics import geometric_mean

import pytest
from report_sample import FAILURES, KEYS, sample_trials
from sample_trials import H100, PROBLEM, make_timing, make_trial, times

from hadagen.problem import Problem
from hadagen.regimes import Cache, element_buckets
from hadagen.report import curves, facts
from hadagen.report.knob_effects import ALL_PROBLEMS, LEAST_TRIALS, effects_of, knob_effects
from hadagen.report.names import kind_name, short_count, short_text, size_name
from hadagen.report.scores import ALL, searches
from hadagen.report.sources import Source, winners_of
from hadagen.report.speed import speed_over_n, speed_over_sizes
from hadagen.trial import Environment, Outcome, Provenance, Trial

SMALL, LARGE, HUGE = 1 << 14, 1 << 22, 1 << 26  # one of each regime


def trials_of(us: list[float | None], knobs: list[dict[str, int]] | None = None) -> list[Trial]:
    """A trial for each time, hot at `SMALL`; None for one that failed."""
    return [
        make_trial(
            number,
            knobs=knobs[number] if knobs else {"chunks": number},
            outcome=Outcome.OK if each else Outcome.TIMEOUT,
            timings=(make_timing(each, SMALL),) if each else (),
        )
        for number, each in enumerate(us)
    ]


def test_a_score_is_the_best_time_of_the_problem_divided_by_the_trials_own() -> None:
    fast, slow = (make_trial(number, timings=times({SMALL: us, LARGE: 3.0})) for number, us in ((1, 2.0), (2, 8.0)))
    (search,) = searches([slow, fast, make_trial(3, outcome=Outcome.WRONG_ANSWER, timings=times({SMALL: 0.1}))])
    found = [each.scores for each in search.trials]
    # Cold times count where data is too large for L2, hot times where it is not.
    assert found[0] == pytest.approx({ALL: 0.5, "latency": 0.25, "L2": 1.0})
    assert found[1] == pytest.approx({ALL: 1.0, "latency": 1.0, "L2": 1.0})
    assert found[2] == {}


def test_searches_on_several_gpus_are_told_apart() -> None:
    one, two = make_trial(), make_trial(environment=replace(H100, gpu="another"))
    assert [search.gpu for search in searches([one, two])] == [H100.gpu, "another"]


def test_the_knob_that_decides_explains_the_variance_and_comes_first() -> None:
    trials = sample_trials()
    effects = effects_of(searches(trials))
    assert effects.trials == sum(trial.outcome is Outcome.OK for trial in trials)
    assert effects.knobs[0].knob == "warps"
    importance = {effect.knob: effect.importance for effect in effects.knobs}
    assert importance["warps"] > 0.95
    assert importance["grid"] < 0.05
    warps = effects.knobs[0].values
    assert [value.value for value in warps] == ["1", "2", "4", "8"]
    assert [value.median for value in warps] == sorted(value.median for value in warps)
    assert warps[-1].best == 1.0
    assert all(v.low <= v.first <= v.median <= v.third <= v.high <= v.best for v in warps)
    assert sum(value.failed for value in warps) == sum(trial.outcome is not Outcome.OK for trial in trials)


def test_effects_are_within_problems() -> None:
    """A problem that is slow on the whole, and was searched with other values, makes no value look bad."""
    one = trials_of([1.0, 1.0, 1.1, 1.1] * 5, [{"warps": 1 + i % 2, "chunks": i} for i in range(20)])
    other = trials_of([1.0, *[9.0] * 19], [{"warps": 1, "chunks": i} for i in range(20)])
    two = [replace(trial, problem=Problem.of(512, "float16")) for trial in other]
    effects = effects_of(searches([*one, *two]))
    assert all(effect.importance < 0.1 for effect in effects.knobs if effect.knob == "warps")


def test_knobs_of_one_value_and_searches_of_few_trials_have_no_effects() -> None:
    few = trials_of([1.0 + i for i in range(LEAST_TRIALS - 1)], [{"grid": 0, "warps": i} for i in range(LEAST_TRIALS)])
    assert knob_effects(searches(few)) == {}
    assert effects_of(searches(few)).fixed == ("grid",)
    found = knob_effects(searches(sample_trials()))
    assert set(found) >= {(ALL_PROBLEMS, ALL), (ALL_PROBLEMS, "memory"), ("float16 fast", ALL)}


def test_a_curve_has_best_possible_over_best_so_far_after_each_trial() -> None:
    (search,) = searches(trials_of([None, 4.0, 8.0, 2.0, None, 3.0]))
    curve = curves.curve_of(search)
    assert curve
    assert curve.fractions == pytest.approx((0.25, 0.5, 0.5, 1.0, 1.0, 1.0))
    assert curve.trials_to_near == 4
    assert curve.steps() == ([1, 2, 4, 6], [pytest.approx(0.25), pytest.approx(0.5), pytest.approx(1.0), 1.0])


def test_the_mean_of_curves_is_geometric_and_one_that_ended_counts_as_1() -> None:
    (one,) = searches(trials_of([4.0, 1.0]))
    (two,) = searches(trials_of([2.0, 2.0, 2.0, 1.0]))
    found = [curve for search in (one, two) if (curve := curves.curve_of(search))]
    mean = curves.mean_curve(found)
    assert mean == pytest.approx([geometric_mean([0.25, 0.5]), geometric_mean([1, 0.5]), geometric_mean([1, 0.5]), 1])
    assert curves.median_trials_to_near(found) == 3
    assert curves.curves(searches(trials_of([None, None]))) == []


def test_speed_over_n_is_the_mean_of_each_regime() -> None:
    timings = [make_timing(us, size) for us, size in ((1.9, SMALL), (3.8, 1 << 15), (1.0, LARGE))]
    timings += [make_timing(1.9, HUGE, cache=Cache.COLD), make_timing(0.1, SMALL, cache=Cache.COLD)]
    winners = winners_of((make_trial(timings=tuple(timings)),))
    found = {line.regime: (line.n, line.fraction, line.sizes) for line in speed_over_n(winners)}
    assert found == {
        "latency": ([256], [pytest.approx(geometric_mean([1, 0.5]))], [2]),
        "L2": ([256], [pytest.approx(1.9)], [1]),
        "memory": ([256], [pytest.approx(1.0)], [1]),
    }


def test_speed_over_sizes_says_which_times_name_winners() -> None:
    (hot, cold) = reversed(speed_over_sizes(winners_of((make_trial(timings=times({SMALL: 1.9, HUGE: 3.8})),))))
    assert (hot.cache, hot.elements, hot.regime) == ("hot", [SMALL, HUGE], ["latency", ""])
    assert (cold.cache, cold.fraction, cold.regime) == (
        "cold",
        [pytest.approx(1.0), pytest.approx(0.5)],
        ["", "memory"],
    )
    # Input and output of two bytes each fill half of L2; in place they are the same bytes.
    assert hot.l2_elements == H100.l2_bytes / 2 / 2


def test_estimates_without_a_size_of_l2_have_the_regime_of_the_time_that_decided() -> None:
    trial = make_trial(
        provenance=Provenance.ESTIMATED, environment=Environment(), errors={}, timings=(make_timing(2.0, SMALL),)
    )
    (line,) = speed_over_sizes(winners_of((trial,)))
    assert (line.shown.device, line.regime, line.l2_elements) == ("estimated for sm90", ["latency"], 0)


def test_winners_are_those_of_a_bundle() -> None:
    trials = tuple(sample_trials())
    winners = winners_of(trials)
    assert {entry.problem.key for entry in winners} == set(KEYS)
    assert all(entry.knobs["warps"] == 8 and entry.elements in element_buckets(entry.problem) for entry in winners)
    assert {(row.cache, row.elements) for row in facts.winner_rows(winners)} == {
        ("hot", SMALL),
        ("hot", LARGE),
        ("cold", HUGE),
    }


def test_the_head_counts_all_that_is_there() -> None:
    trials = tuple(sample_trials())
    head = facts.head_of(Source("tuning database", "here", winners_of(trials), trials))
    assert (head.archs, head.gpus, head.problems, head.trials) == (("sm90",), (H100.gpu,), 4, 96)
    assert head.outcomes == {"ok": 80, "compile_failed": 8, "wrong_answer": 4, "timeout": 4}
    assert (head.measured, head.estimated) == (96, 0)


def test_errors_are_those_of_the_least_exact_right_kernel() -> None:
    trials = (
        make_trial(1, errors={"normal": 1e-4, "constant": 2e-4}),
        make_trial(2, errors={"normal": 1.5e-4}),
        make_trial(3, errors={"normal": 0.5}, outcome=Outcome.WRONG_ANSWER),
        make_trial(4, problem=Problem.of(512, "float16"), errors={"normal": 0.0}),
    )
    (point,) = facts.error_points(Source("tuning database", "here", winners_of(trials), trials))
    assert (point.n, point.error, point.bound, point.kernels) == (256, 2e-4, PROBLEM.error_bound, 2)


def test_failures_that_differ_in_numbers_count_together() -> None:
    found, others = facts.failures(sample_trials(), most=2)
    assert [(each.outcome, each.trials, each.problems) for each in found] == [
        (FAILURES[0].value, 8, 4),
        (FAILURES[2].value, 4, 4),
    ]
    assert (found[0].detail, found[0].problem, others) == ("line 5", KEYS[0], 4)


@pytest.mark.parametrize(
    ("key", "kind", "size"),
    [
        ("n256-float16-fast", "contiguous rows", "256"),
        ("n256-float16-fast-pitched", "pitched rows", "256"),
        ("n14336-k28-float16-fast", "rows with a matrix", "14336 = 28 · 512"),
        ("n128-float16-to-int8_row_4096-accurate", "contiguous rows, to int8-row", "128 in rows of 4096"),
        ("n128-float16-to-fp8_group_64-accurate", "contiguous rows, to fp8-group groups of 64", "128"),
        ("n64-float16-to-mxfp4_32_rceil_swizzled-accurate", "contiguous rows, to mxfp4 rceil swizzled", "64"),
    ],
)
def test_problems_are_named_by_kind_and_size(key: str, kind: str, size: str) -> None:
    problem = Problem.parse(key)
    assert (kind_name(problem), size_name(problem)) == (kind, size)


def test_texts_are_short_and_on_one_line() -> None:
    assert short_text("a\nb\x1b") == r"a\nb\x1b"
    assert short_text("x" * 100) == "x" * 47 + "…"
    assert [short_count(each) for each in (1 << 13, 3 << 19, 14336 * 5)] == ["8K", "1.5M", "70K"]
