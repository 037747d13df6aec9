"""Near-ties are raced, and a race decides which kernel wins and by how much."""

import zlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
from fake_search import CELLS, TRIALS, FakeRunner, arch, make_kernel, options, problems
from sample_trials import make_timing, make_trial
from sample_trials import times as times_at

from hadagen.compiler.codegen import render
from hadagen.errors import DeviceError
from hadagen.measure import Cell, Variant
from hadagen.plan.space import Space, build_plan
from hadagen.problem.regimes import Cache
from hadagen.problem.trial import Trial, knobs_key
from hadagen.tuner import pipeline, search
from hadagen.tuner.events import Event, PairRaced, ProblemFinished, TrialFinished
from hadagen.tuner.races import race_near_ties
from hadagen.tuner.search import tune
from hadagen.tuning_db.store import Store
from hadagen.tuning_db.winners import best_by_cell


class RacingRunner(FakeRunner):
    """All kernels look alike, but in a race, on a device that is slower by then, the one that seemed slower wins."""

    def __init__(self) -> None:
        super().__init__()
        self.races: list[tuple[Variant, Variant, list[Cell]]] = []

    def trial(self, variant: Variant) -> Trial:
        trial = super().trial(variant)
        us = 2 + self.handicap(variant)
        timings = (replace(timing, us=us, us_low=us, us_high=us) for timing in trial.timings)
        return replace(trial, timings=tuple(timings))

    races_at_once = 1

    def race(self, a: Variant, b: Variant, cells: list[Cell]) -> list[tuple[float, float]]:
        self.races.append((a, b, cells))
        return [(3 - self.handicap(a), 3 - self.handicap(b)) for _ in cells]

    @staticmethod
    def handicap(variant: Variant) -> float:
        return 1e-6 * (zlib.crc32(variant.kernel.digest.encode()) % 10_000)


def test_near_ties_are_raced_and_the_race_decides(store: Store) -> None:
    events: list[Event] = []
    runner = RacingRunner()
    report = tune(options(store, runner), events.append)
    raced = [event for event in events if isinstance(event, PairRaced)]
    assert report.raced == sum(len(event.margins) for event in raced) > 0
    for a, b, cells in runner.races:
        assert a.kernel.cubin
        assert a.problem == b.problem
        assert {(cell.elements, cell.cache) for cell in cells} <= set(CELLS)
    pairs = [{variant.kernel.digest: runner.handicap(variant) for variant in pair[:2]} for pair in runner.races]
    for trial, timing in best_by_cell(store.trials()).values():
        met = [pair for pair in pairs if trial.kernel.digest in pair]
        assert met
        assert all(pair[trial.kernel.digest] == max(pair.values()) for pair in met)
        assert timing.us == pytest.approx(2, rel=0.01)
        assert timing.us_low <= timing.us <= timing.us_high
        assert trial.seconds <= 0.01  # without the race
        assert "raced with kernel" in trial.detail
        assert trial.kernel.cubin
    assert len(store.trials()) == TRIALS


def times(trial: Trial) -> list[float]:
    return [timing.us for timing in trial.timings]


def test_a_race_settles_how_far_apart_two_kernels_are(store: Store) -> None:
    """And the winner keeps its time."""
    runner = RacingRunner()
    (problem,) = problems(256)
    variants = []
    for knobs in Space(problem, arch()).legal[:2]:
        plan = build_plan(problem, knobs, arch())
        variants.append(Variant(problem, knobs.to_dict(), make_kernel(render(plan))))
        store.record(runner.trial(variants[-1]))
    before = store.trials()
    assert list(race_near_ties(before, store, runner))
    first, second = (3 - runner.handicap(variant) for variant in variants)
    for old, new in zip(
        zip(*map(times, before), strict=True), zip(*map(times, store.trials()), strict=True), strict=True
    ):
        assert new[0] / new[1] == pytest.approx(first / second)
        assert min(new) in old


def test_those_are_raced_that_come_first_by_the_score_that_names_winners(store: Store) -> None:
    """At 16M elements in place, where hot times count as much as cold ones, which decide elsewhere."""
    (problem,) = problems(256)
    us = {1: (10.0, 9.0), 2: (10.02, 9.2), 4: (10.3, 5.0), 8: (10.31, 5.001)}  # cold and hot, by chunks
    for chunks, (cold, hot) in us.items():
        there = [make_timing(each, 1 << 24, cache=cache) for each, cache in ((cold, Cache.COLD), (hot, Cache.HOT))]
        store.record(make_trial(chunks, problem=problem, timings=tuple(there)))
    runner = RacingRunner()
    assert list(race_near_ties(store.trials(blobs=False), store, runner))
    assert [{a.knobs["chunks"], b.knobs["chunks"]} for a, b, _ in runner.races] == [{4, 8}]
    assert [sorted(cell.cache for cell in cells) for *_, cells in runner.races] == [[Cache.COLD, Cache.HOT]]


def test_a_race_is_about_the_times_that_came_first(store: Store) -> None:
    """Of a kernel that has a slower trial of other knobs, and is confirmed."""
    (problem,) = problems(256)
    twin = make_trial(1, problem=problem, timings=times_at({1 << 20: 10.0}))
    candidates = [
        make_trial(chunks, problem=problem, timings=times_at({1 << 20: us})) for chunks, us in ((4, 10.05), (8, 10.3))
    ]
    other = replace(twin, knobs=twin.knobs | {"warps": 16}, timings=times_at({1 << 20: 12.0}))
    store.record(twin, other, *candidates)

    class Confirming(RacingRunner):
        def race(self, a: Variant, b: Variant, cells: list[Cell]) -> list[tuple[float, float]]:
            return [(1.0, 1.001) if a.kernel == twin.kernel else (1.001, 1.0) for _ in cells]

    assert list(race_near_ties(store.trials(blobs=False), store, Confirming()))
    ((winner, timing),) = best_by_cell(store.trials()).values()
    assert (winner.kernel, timing.us) == (twin.kernel, 10.0)


def test_trials_of_another_process_that_came_before_a_race_are_raced(store: Store) -> None:
    """And those that came after it, though there are as many."""
    first = []

    def other_process(event: Event) -> None:
        if isinstance(event, TrialFinished) and not first:
            first.append(event)
            assert tune(options(store, RacingRunner(), trials=2 * TRIALS)).raced

    assert tune(options(store, RacingRunner()), other_process).raced > 0


def test_trials_that_come_during_a_race_are_raced_by_the_next_run(store: Store) -> None:
    class Meanwhile(RacingRunner):
        def race(self, a: Variant, b: Variant, cells: list[Cell]) -> list[tuple[float, float]]:
            if not self.races:
                assert tune(options(store, FakeRunner(), trials=TRIALS + 2)).finished == TRIALS + 2
            return super().race(a, b, cells)

    assert tune(options(store, Meanwhile())).raced > 0
    assert tune(options(store, RacingRunner(), trials=TRIALS + 2)).raced > 0


def test_what_an_interrupted_run_has_not_raced_is_raced_by_the_next(store: Store) -> None:
    """And no later one does it again."""

    def interrupt(event: Event) -> None:
        if isinstance(event, ProblemFinished):
            raise KeyboardInterrupt

    assert tune(options(store, RacingRunner()), interrupt).stopped == "interrupted"
    runs = [RacingRunner() for _ in range(2)]
    reports = [tune(options(store, runner)) for runner in runs]
    assert [report.raced > 0 for report in reports] == [bool(runner.races) for runner in runs] == [True, False]


def test_a_race_leaves_alone_what_others_have_timed_meanwhile(store: Store) -> None:
    class Interrupted(RacingRunner):
        def race(self, a: Variant, b: Variant, cells: list[Cell]) -> list[tuple[float, float]]:
            for trial in store.trials() if not self.races else ():
                timing = replace(trial.timings[0], elements=3160320)
                store.add_timings(replace(trial, timings=(timing,), detail="", seconds=0.0))
            return super().race(a, b, cells)

    tune(options(store, Interrupted()))
    for trial in store.trials(blobs=False):
        assert 3160320 in {timing.elements for timing in trial.timings}


def test_after_ctrl_c_nothing_is_raced(store: Store) -> None:
    def listen(event: Event) -> None:
        if isinstance(event, TrialFinished) and event.finished == TRIALS - 1:
            raise KeyboardInterrupt

    runner = RacingRunner()
    assert tune(options(store, runner), listen).stopped == "interrupted"
    assert len(store.trials(blobs=False)) >= TRIALS - 1
    assert runner.races == []


def test_races_end_with_the_time_budget(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=lambda: 0.0)

    class Slow(RacingRunner):
        def race(self, a: Variant, b: Variant, cells: list[Cell]) -> list[tuple[float, float]]:
            clock.monotonic = lambda: 61.0
            return super().race(a, b, cells)

    for module in (search, pipeline):
        monkeypatch.setattr(module, "time", clock)
    runner = Slow()
    report = tune(options(store, runner, problems=problems(64, 256), time_budget=60.0))
    assert (report.finished, len(runner.races)) == (2 * TRIALS, 1)


def test_only_trials_of_this_environment_are_raced(store: Store) -> None:
    """The same kernels as fast under another driver stay as they are."""
    tune(options(store, RacingRunner(), trials=TRIALS // 2))
    older = [replace(each, environment=replace(each.environment, driver="1.0"), detail="") for each in store.trials()]
    store.record(*older)
    runner = RacingRunner()
    tune(options(store, runner))
    assert runner.races
    kept = [trial for trial in store.trials(blobs=False) if trial.environment.driver == "1.0"]
    assert [trial.timings for trial in kept] == [trial.timings for trial in older]
    assert not any("raced" in trial.detail for trial in kept)


def test_only_what_may_win_is_raced(store: Store) -> None:
    """Kernels whose error is above a bound that came later race no more."""
    tune(options(store, RacingRunner(), trials=TRIALS // 2))
    beyond = {"normal": 2 * problems(256)[0].error_bound}
    store.record(*(replace(trial, errors=beyond, detail="") for trial in store.trials()))
    runner = RacingRunner()
    tune(options(store, runner))
    refused = {knobs_key(trial.knobs) for trial in store.trials(blobs=False) if trial.errors == beyond}
    assert refused
    assert runner.races
    assert not refused & {knobs_key(variant.knobs) for a, b, _ in runner.races for variant in (a, b)}


def test_a_race_that_fails_changes_nothing(store: Store) -> None:
    class Failing(RacingRunner):
        def race(self, a: Variant, b: Variant, cells: list[Cell]) -> list[tuple[float, float]]:
            raise DeviceError("a race failed")

    report = tune(options(store, Failing()))
    assert (report.raced, report.stopped, report.finished) == (0, "", TRIALS)
    assert all("raced" not in trial.detail for trial in store.trials(blobs=False))
