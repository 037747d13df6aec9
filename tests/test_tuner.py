"""The search: what it tries, what it keeps, and in which order things happen."""

import math
import random
import re
import threading
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import optuna
import pytest
from fake_search import GPU, TRIALS, FakeRunner, arch, build, make_trial, options, problems
from sample_store import empty, path, store

from hadagen.compiler.codegen import render
from hadagen.compiler.toolchain import BuildFailure
from hadagen.errors import DeviceError, StorageError, ToolchainError, UsageError
from hadagen.measure import Cell, Variant
from hadagen.plan.knobs import Knobs
from hadagen.plan.space import Space, build_plan
from hadagen.problem.problem import DType, Numerics, Problem, Rows
from hadagen.problem.regimes import Cache, Destination, regime, timed_elements
from hadagen.problem.trial import Environment, Kernel, Outcome, Provenance, Trial, knobs_key
from hadagen.runtime.choose.guesses import nearest_problems
from hadagen.tuner import mirror, search
from hadagen.tuner.estimate import shortlist
from hadagen.tuner.events import BatchBuilt, Event, ProblemFinished, ProblemStarted, SearchStarted, TrialFinished
from hadagen.tuner.pipeline import Pipeline
from hadagen.tuner.search import TuneOptions, tune
from hadagen.tuner.study import Study, best_of_trials, known_trials, most_often_best, scores, step_from
from hadagen.tuning_db.store import Store

__all__ = ["empty", "path", "store"]  # fixtures


def knobs_of(trials: list[Trial]) -> list[tuple[Problem, str]]:
    return [(trial.problem, knobs_key(trial.knobs)) for trial in trials]


# ---- what is tried -------------------------------------------------------------------------------------------------


def test_every_problem_gets_its_trials_all_legal_and_none_twice(store: Store) -> None:
    wanted = problems(2, 256, 4096)
    report = tune(options(store, FakeRunner(), problems=wanted))
    trials = store.trials()
    assert Counter(trial.problem for trial in trials) == dict.fromkeys(wanted, TRIALS)
    assert len(set(knobs_of(trials))) == len(trials) == report.finished
    for trial in trials:
        build_plan(trial.problem, Knobs.from_dict(trial.knobs), arch())  # or raises
    assert (report.outcomes, report.stopped) == ({Outcome.OK: len(trials)}, "")


def test_same_seed_and_same_answers_give_the_same_search(tmp_path: Path) -> None:
    class UnsteadyRunner(FakeRunner):
        """Now and then lets the other threads go first."""

        def trial(self, variant: Variant) -> Trial:
            for _ in range(len(self.asked) % 7):
                threading.Event().wait(0.001)
            return super().trial(variant)

    asked = []
    for name, runner, seed in (("a", FakeRunner(), 3), ("b", UnsteadyRunner(), 3), ("c", FakeRunner(), 4)):
        with Store.open(tmp_path / name) as store:
            tune(options(store, runner, problems=problems(256, 512), trials=30, seed=seed))
            asked.append(runner.asked)
    assert asked[0] == asked[1]
    assert asked[0] != asked[2]


def test_the_search_finds_what_is_fast(store: Store) -> None:
    (problem,) = problems(1024)
    report = tune(options(store, FakeRunner(), problems=[problem], trials=60))
    everything = [scores(make_trial(problem, knobs.to_dict()))[0] for knobs in Space(problem, arch()).legal[::7]]
    assert report.best[problem][0] > 0.9 * max(everything)


def test_each_cell_has_its_best(store: Store) -> None:
    """A kernel that is the best in one cell only is kept in mind, and passed on to problems nearby."""
    (problem,) = problems(256)
    good, odd = (make_trial(problem, Knobs(chunks=chunks).to_dict()) for chunks in (8, 2))
    (first, *others) = odd.timings
    odd = replace(odd, timings=(replace(first, us=0.5), *others))
    wrong = replace(odd, timings=(replace(first, us=0.25),), knobs=Knobs(chunks=1).to_dict())
    best = best_of_trials([good, odd, replace(wrong, outcome=Outcome.WRONG_ANSWER)])
    cell = first.elements, first.destination, first.cache
    assert {at: each.knobs.chunks for at, each in best.items() if each.knobs.chunks != 8} == {cell: 2}
    assert best[Cell(*cell)].fraction == first.copy_us / 0.5
    assert [knobs.chunks for knobs in most_often_best(best)] == [8, 2]


@pytest.mark.parametrize("rows", Rows)
def test_known_knobs_are_tried_first(store: Store, rows: Rows) -> None:
    """Before what a neighboring problem has, or the contiguous twin of pitched rows."""
    neighbor, twin = problems(256, 512)
    problem = twin.with_io(rows=rows)
    known = [Knobs(chunks=2, warps=2), Knobs(chunks=4, warps=8, grid="persistent")]
    others = {neighbor, twin} - {problem}
    for other in others:
        store.record(make_trial(other, Knobs(chunks=2, warps=8).to_dict()))
    runner = FakeRunner()
    tune(options(store, runner, problems=[problem, *others], trials=24, known={problem: known}))
    asked = [Knobs.from_dict(knobs) for which, knobs in runner.asked if which == problem]
    assert asked[:2] == [Space(problem, arch()).closest(knobs) for knobs in known]
    first = [which for which, _ in runner.asked[: len(known) * (1 + len(others))]]
    assert first.count(problem) == len(known), "they wait for no answer of others"


@pytest.mark.parametrize("rows", Rows)
def test_each_type_starts_from_choices_of_its_own(rows: Rows) -> None:
    """Another type may carry values in other ways, and is opened before or after."""
    wanted = Problem.of(512, DType.BFLOAT16, Numerics.ACCURATE, rows)
    asked = []
    for found in ([wanted], [wanted.with_io(input=DType.FLOAT16, output=DType.FLOAT16), wanted]):
        runner = FakeRunner()
        tune(TuneOptions(arch(), found, None, runner, build, trials=4))
        asked.append([knobs for problem, knobs in runner.asked if problem == wanted])
    assert asked[0] == asked[1]


def test_a_problem_without_legal_knobs_ends_without_a_trial(store: Store) -> None:
    (possible,) = problems(256)
    impossible = Problem.of(128, DType.FLOAT32)  # would have to carry fp32 through butterflies
    packed = arch(butterfly_carrier=("packed",))
    report = tune(options(store, FakeRunner(), arch=packed, problems=[impossible, possible]))
    assert Counter(trial.problem for trial in store.trials()) == {possible: TRIALS}
    assert (report.best[impossible], report.stopped) == ((0.0, 0.0, 0.0), "")


def test_a_small_space_is_tried_whole_and_then_it_ends(store: Store) -> None:
    (problem,) = problems(4)
    small = arch(chunks=(1, 2), warps=(1, 2), load=("plain",), min_blocks=(1,), order=("by_step",))
    legal = Space(problem, small).legal
    events: list[Event] = []
    report = tune(options(store, FakeRunner(), arch=small, problems=[problem], trials=500), events.append)
    assert 10 < report.finished == len(legal) < 500
    assert {Knobs.from_dict(trial.knobs) for trial in store.trials()} == set(legal)
    assert sum(isinstance(event, ProblemFinished) for event in events) == 1


def asked_where(won: dict[Problem, Knobs], wanted: Problem, store: Store, trials: int) -> list[Knobs]:
    """What a search asks, in order, where these have won by far."""
    for problem, knobs in won.items():
        trial = make_trial(problem, knobs.to_dict())
        timings = (replace(each, us=0.5, elements=timed_elements(problem, each.elements)) for each in trial.timings)
        store.record(replace(trial, timings=tuple(timings)))
    runner = FakeRunner()
    tune(options(store, runner, problems=[wanted], trials=trials))
    return [Knobs.from_dict(knobs) for _, knobs in runner.asked]


NEVER_BEGUN_WITH = Knobs(chunks=2, warps=8, load="plain", grid="persistent", stages=2, min_blocks=2)


def test_what_wins_next_door_is_tried_early(store: Store) -> None:
    """The winner of n = 256 is nothing that a search would begin with, and yet among the first for n = 512."""
    small, large = problems(256, 512)
    assert NEVER_BEGUN_WITH in asked_where({small: NEVER_BEGUN_WITH}, large, store, trials=4)


def test_pitched_rows_alone_start_from_the_winners_that_are_stored(store: Store) -> None:
    (problem,) = problems(256)
    asked = asked_where({problem: NEVER_BEGUN_WITH}, problem.with_io(rows=Rows.PITCHED), store, trials=12)
    assert (asked[0], len(asked)) == (NEVER_BEGUN_WITH, search.LEAST_OF_CHILD)


def test_a_new_matrix_is_begun_with_the_winners_of_the_most_similar_one(store: Store) -> None:
    new, like, far = (Problem.of(order << 6, DType.FLOAT16, Numerics.FAST, order=order) for order in (28, 20, 12))
    won = {problem: Space(problem, arch()).seeds()[-1 - place] for place, problem in enumerate((like, far))}
    assert won[like] != won[far]
    assert asked_where(won, new, store, trials=2)[0] == Space(new, arch()).closest(won[like])


def test_without_a_device_nothing_is_tried_but_the_best_by_the_cost_model(store: Store) -> None:
    """What wins next door by an estimate has been estimated here too."""
    nowhere = Environment()

    class Estimating(FakeRunner):
        environment = nowhere

        def trial(self, variant: Variant) -> Trial:
            return replace(super().trial(variant), environment=nowhere)

    small, large = problems(256, 512)
    store.record(make_trial(small, Knobs(chunks=2, warps=8, min_blocks=2).to_dict(), environment=nowhere))
    runner = Estimating()
    tune(options(store, runner, problems=[large], trials=4))
    assert [Knobs.from_dict(knobs) for _, knobs in runner.asked] == shortlist(Space(large, arch()), 4)


def test_pitched_problems_follow_their_twins_with_a_quarter_of_the_trials(store: Store) -> None:
    contiguous = [*problems(128, 256), Problem.of(256, DType.FLOAT32)]
    pitched = [problem.with_io(rows=Rows.PITCHED) for problem in contiguous]
    runner = FakeRunner()
    events: list[Event] = []
    wanted = [*pitched, *contiguous, *pitched]
    report = tune(options(store, runner, problems=wanted, trials=24), events.append)
    counts = dict.fromkeys(contiguous, 24) | dict.fromkeys(pitched, 24 // search.CHILD_SHARE)
    assert Counter(trial.problem for trial in store.trials()) == counts
    assert events[0] == SearchStarted(6, sum(counts.values()), 0, GPU, estimated=False)
    opened = [event.problem for event in events if isinstance(event, ProblemStarted)]
    assert opened == [*contiguous, *pitched]
    assert (report.finished, report.stopped) == (sum(counts.values()), "")
    asked: Counter[Problem] = Counter()
    for problem, knobs in runner.asked:
        if problem.io.rows is Rows.PITCHED:
            twin = problem.with_io(rows=Rows.CONTIGUOUS)
            assert search.CHILD_SHARE * asked[problem] < asked[twin]
            if not asked[problem]:
                of_twin = [Knobs.from_dict(each) for which, each in runner.asked if which == twin]
                nearest = [Space(problem, arch()).closest(each) for each in of_twin]
                assert Knobs.from_dict(knobs) in nearest, "it begins with what its twin had by then"
        asked[problem] += 1


@pytest.mark.parametrize("beside_their_twin", [False, True])
@pytest.mark.parametrize("trials", [2, 5])
def test_a_few_trials_of_pitched_rows_are_the_least(store: Store, trials: int, beside_their_twin: bool) -> None:
    """But no more than contiguous rows get."""
    (problem,) = problems(64)
    pitched, twins = problem.with_io(rows=Rows.PITCHED), [problem] * beside_their_twin
    report = tune(options(store, FakeRunner(), problems=[pitched, *twins], trials=trials))
    wanted = {pitched: min(trials, search.LEAST_OF_CHILD)} | dict.fromkeys(twins, trials)
    assert Counter(trial.problem for trial in store.trials()) == wanted
    assert report.stopped == ""


@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("n", [2, 4, 65536, 131072])
def test_no_problem_is_its_own_neighbor(n: int, dtype: DType) -> None:
    problem = Problem.of(n, dtype, rows="pitched")
    neighbors = search._neighbors(problem)
    assert problem not in neighbors
    assert len(set(neighbors)) == len(neighbors) == (1 if n in (2, 131072) else 2) + 2 + (dtype is not DType.FLOAT32)
    assert all(neighbor.parent for neighbor in neighbors)


def test_the_neighbors_of_a_problem_with_a_matrix_have_matrices_too() -> None:
    problem = Problem.of(14336, DType.FLOAT16, order=28)
    sizes = {(each.order, each.length) for each in search._neighbors(problem)}
    assert sizes == {(28, 256), (28, 512), (28, 1024)}
    assert {each.n for each in search._neighbors(Problem.of(24, DType.FLOAT16, order=24))} == {24, 48}
    two = search._neighbors(Problem.parse("n16384-k64-c256-real-float16-fast"))
    assert {(each.transform.paired, each.order, each.length) for each in two} == {(True, 64, 128), (True, 64, 256)}
    others = [(28, 64), (20, 512), (172, 512), (28, 512), (1, 16384)]
    known = [Problem.of(order * length, DType.FLOAT16, order=order) for order, length in others]
    known.append(Problem.of(13312, DType.BFLOAT16, order=26))
    nearest = nearest_problems(problem, known)
    assert [(each.order, each.length) for each in nearest] == [(20, 512), (172, 512), (28, 64)]


def test_problems_with_signs_are_not_tuned() -> None:
    signed = Problem.of(256, DType.FLOAT16, rows="pitched", signed=True)
    with pytest.raises(UsageError, match=r"^n256-signed-.*-pitched is not tuned, .*; tune n256-float16-accurate-pitch"):
        TuneOptions(arch(), [*problems(256), signed], None, FakeRunner(), build)


def test_knobs_with_a_known_kernel_share_its_trial(store: Store) -> None:
    runner = FakeRunner()

    def whatever_the_store(sources: Any) -> Any:
        """A compiler that leaves no registers for other blocks."""
        bounds = r"(__launch_bounds__\(\d+), \d+"
        return build([replace(source, text=re.sub(bounds, r"\1", source.text)) for source in sources])

    tune(options(store, runner, problems=problems(4), build=whatever_the_store, trials=40))
    trials = store.trials()
    kernels = {trial.kernel.digest for trial in trials if trial.kernel}
    assert len(runner.asked) == len(kernels) < len(trials)
    for trial in trials:
        assert trial.timings
        assert trial.errors
        measured = (trial.problem, trial.knobs) in runner.asked
        assert trial.detail.startswith("same kernel as") != measured
        assert bool(trial.seconds) == measured


def test_a_kernel_of_an_earlier_run_is_not_measured_again() -> None:
    (problem,) = problems(256)
    knobs = Space(problem, arch()).seeds()[0]
    (kernel,) = build([render(build_plan(problem, knobs, arch()))])
    assert isinstance(kernel, Kernel)
    known = make_trial(problem, knobs.to_dict(), kernel)
    runner, batches = FakeRunner(), [[(problem, knobs)]]
    kept: list[Trial] = []
    with Pipeline(arch(), build, runner, [known]) as pipeline:
        pipeline.run(lambda size: batches.pop() if batches else [], kept.extend, lambda event: None)
    assert runner.asked == []
    assert [(trial.timings, trial.detail) for trial in kept] == [(known.timings, f"same kernel as {knobs}")]


def test_a_step_changes_one_or_two_knobs_that_have_another_value() -> None:
    choose, start = random.Random(0), Knobs(warps=4)
    narrow = arch().narrowed({name: values[:1] for name, values in arch().search.items() if name != "warps"})
    for target, knobs, most in ((arch(), start, 2), (narrow, start, 1), (narrow.narrowed({"warps": (4,)}), start, 0)):
        steps = [step_from(knobs, target, choose) for _ in range(200)]
        changed = [{name for name, value in knobs.to_dict().items() if step[name] != value} for step in steps]
        assert {len(names) for names in changed} == set(range(min(most, 1), most + 1))
        assert all(
            step[name] in target.search[name] for step, names in zip(steps, changed, strict=True) for name in names
        )


# ---- what is kept and told -----------------------------------------------------------------------------------------


def test_a_trial_is_recorded_before_it_is_reported(store: Store) -> None:
    seen = 0

    def listen(event: Event) -> None:
        nonlocal seen
        if isinstance(event, TrialFinished):
            seen += 1
            assert event.finished == seen
            assert len(store.trials(blobs=False)) >= seen

    tune(options(store, FakeRunner()), listen)
    assert seen == TRIALS


def test_events_tell_the_whole_search(store: Store) -> None:
    events: list[Event] = []
    wanted = problems(64, 256)
    report = tune(options(store, FakeRunner(), problems=wanted), events.append)
    kinds = Counter(type(event) for event in events)
    assert events[0] == SearchStarted(2, 2 * TRIALS, 0, GPU, estimated=False)
    assert kinds[ProblemStarted] == kinds[ProblemFinished] == 2
    assert kinds[TrialFinished] == 2 * TRIALS
    built = [event for event in events if isinstance(event, BatchBuilt)]
    assert sum(event.fresh + event.known + event.failed for event in built) == 2 * TRIALS
    for problem in wanted:
        best = [event.best for event in events if isinstance(event, TrialFinished) and event.trial.problem == problem]
        assert all(all(a <= b for a, b in zip(*pair, strict=True)) for pair in pairwise(best))
        assert report.best[problem] == best[-1]


def test_failures_are_kept_and_optuna_learns_from_them(store: Store) -> None:
    class Wrong(FakeRunner):
        def trial(self, variant: Variant) -> Trial:
            trial = super().trial(variant)
            if variant.knobs["min_blocks"] == 2:
                return replace(trial, outcome=Outcome.WRONG_ANSWER, timings=(), detail="nonsense")
            return trial

    def refuse_persistent(sources: Any) -> Any:
        return [
            BuildFailure(source.entry, "no") if source.launch.persistent else kernel
            for source, kernel in zip(sources, build(sources), strict=True)
        ]

    report = tune(options(store, Wrong(), build=refuse_persistent, trials=40))
    outcomes = Counter(trial.outcome for trial in store.trials())
    assert report.outcomes == outcomes
    assert min(outcomes[kind] for kind in (Outcome.OK, Outcome.WRONG_ANSWER, Outcome.COMPILE_FAILED)) > 0
    assert all(trial.detail == "no" for trial in store.trials(outcome=Outcome.COMPILE_FAILED))
    (name,) = optuna.get_all_study_names(store.url)
    kept = optuna.load_study(study_name=name, storage=store.url).trials
    assert len(kept) == 40
    pruned = [trial for trial in kept if trial.state is optuna.trial.TrialState.PRUNED]
    assert len(pruned) == 40 - outcomes[Outcome.OK]
    assert all(max(trial.constraints.values()) > 0 for trial in pruned)
    tune(options(store, Wrong(), build=refuse_persistent, trials=40))
    assert len(optuna.load_study(study_name=name, storage=store.url).trials) == 40, "none is kept twice"


def test_optuna_takes_the_fastest_for_the_best(store: Store) -> None:
    tune(options(store, FakeRunner()))
    (name,) = optuna.get_all_study_names(store.url)
    best = optuna.load_study(study_name=name, storage=store.url).best_trials
    assert {tuple(trial.values) for trial in best} == {max(map(scores, store.trials()))}


def test_the_sampler_hears_of_what_failed() -> None:
    (problem,) = problems(256)
    study = Study(Space(problem, arch()), "Test GPU", {}, None, seed=0)
    study.tell(make_trial(problem, study.ask().to_dict(), outcome=Outcome.TIMEOUT))
    assert any(value > 0 for value in study._study.trials[-1].constraints.values())


def test_the_sampler_waits_for_no_answer_that_never_comes() -> None:
    """Where what it named is not legal, and other knobs are tried."""
    (problem,) = problems(256)
    study = Study(Space(problem, arch()), "Test GPU", {}, None, seed=0)
    for _ in range(8):
        study.tell(make_trial(problem, study.ask().to_dict()))
    states = Counter(trial.state for trial in study._study.trials)
    assert set(states) == {optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.FAIL}
    assert states[optuna.trial.TrialState.COMPLETE] == 8


@pytest.mark.parametrize(("gpu", "provenance"), [("", Provenance.ESTIMATED), (GPU.gpu, Provenance.MEASURED)])
def test_what_does_not_compile_without_a_device_is_an_estimate(gpu: str, provenance: Provenance) -> None:
    class Elsewhere(FakeRunner):
        environment = replace(GPU, gpu=gpu)

    def refuse(sources: Any) -> Any:
        return [BuildFailure(source.entry, "no") for source in sources]

    (problem,) = problems(256)
    batches = [[(problem, Space(problem, arch()).seeds()[0])]]
    kept: list[Trial] = []
    with Pipeline(arch(), refuse, Elsewhere()) as pipeline:
        pipeline.run(lambda size: batches.pop() if batches else [], kept.extend, lambda event: None)
    assert [(trial.outcome, trial.provenance) for trial in kept] == [(Outcome.COMPILE_FAILED, provenance)]


def test_regimes_count_the_timings_that_decide() -> None:
    trial = make_trial(problems(256)[0], Knobs().to_dict())
    latency, l2, memory = scores(trial)
    assert latency > l2 > memory > 0
    other = [replace(timing, cache=Cache.COLD, us=9.0) for timing in trial.timings if timing.cache is Cache.HOT]
    assert scores(replace(trial, timings=trial.timings + tuple(other))) == (latency, l2, memory)
    assert scores(replace(trial, timings=())) == (0.0, 0.0, 0.0)
    between = [replace(timing, elements=timing.elements + 256, us=0.1) for timing in trial.timings]
    assert scores(replace(trial, timings=trial.timings + tuple(between))) == (latency, l2, memory)


@pytest.mark.parametrize(
    ("elements", "cache", "where"),
    [
        (1 << 18, Cache.HOT, "latency"),
        (3 << 17, Cache.HOT, "L2"),
        (1 << 23, Cache.HOT, "L2"),
        (1 << 23, Cache.COLD, None),
        (1 << 24, Cache.HOT, "L2"),  # as it may well be, of 50 MiB
        (1 << 24, Cache.COLD, "memory"),
        (1 << 25, Cache.HOT, None),
        (1 << 25, Cache.COLD, "memory"),
    ],
)
def test_a_time_in_place_is_of_one_regime_or_of_none(elements: int, cache: Cache, where: str | None) -> None:
    assert regime(problems(256)[0], elements, Destination.IN_PLACE, cache, GPU.l2_bytes) == where


def test_a_trial_of_knobs_that_are_not_legal_by_now_is_not_known() -> None:
    (problem,) = problems(256)
    good = make_trial(problem, Knobs().to_dict())
    odd = [{"stages": 2}, {"chunks": 3}, {"colors": 7}]  # of one tile, not searched, no knob
    trials = [good, *(replace(good, knobs=good.knobs | each) for each in odd)]
    assert known_trials(trials, arch()) == {problem: {Knobs(): good}}


def test_every_other_question_is_a_step_from_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    (problem,) = problems(256)
    study = Study(Space(problem, arch()), "Test GPU", {}, None, seed=0)
    steps: list[int] = []

    def step(knobs: Knobs, *others: Any) -> dict[str, Any]:
        if knobs in [each.knobs for each in study.best_by_cell.values()]:
            steps.append(study.asked)
        return step_from(knobs, *others)

    monkeypatch.setattr("hadagen.tuner.study.step_from", step)
    for _ in range(12):
        study.tell(make_trial(problem, study.ask().to_dict()))
    assert set(steps) >= set(range(1, 12, 2))


def test_of_equal_knobs_the_trial_with_most_timings_is_learned_from(store: Store) -> None:
    tune(options(store, FakeRunner(), trials=1))
    (trial,) = store.trials()
    between = tuple(replace(trial.timings[0], elements=trial.timings[0].elements + 256 * i) for i in range(1, 9))
    newer = replace(trial, environment=replace(trial.environment, driver="600"), timings=between)
    space = Space(trial.problem, arch())
    for kept in ([trial, newer], [newer, trial]):
        (known,) = known_trials(kept, arch()).values()
        study = Study(space, "Test GPU", known, None, seed=0)
        assert (study.finished, study.best) == (1, scores(trial))


# ---- how it runs ---------------------------------------------------------------------------------------------------


def test_a_batch_is_built_while_another_is_measured(store: Store) -> None:
    builds = 0
    built_again = threading.Event()

    def counted(sources: Any) -> Any:
        nonlocal builds
        builds += 1
        if builds == 2:
            built_again.set()
        return build(sources)

    class Waiting(FakeRunner):
        def trial(self, variant: Variant) -> Trial:
            assert built_again.wait(60), "the second batch waits for the first to be measured"
            return super().trial(variant)

    tune(options(store, Waiting(), build=counted, trials=20))


def test_the_time_budget_ends_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10**9))
    monkeypatch.setattr(search.time, "monotonic", lambda: float(next(clock)))
    report = tune(options(store, FakeRunner(), trials=400, time_budget=60.0))
    assert report.stopped == "out of time"
    assert 0 < report.finished < 400
    assert report.finished == len(store.trials(blobs=False))
    assert search.SEARCH_SHARE * 60 <= report.seconds < 60, "some is left for races"


@pytest.mark.parametrize("error", [ToolchainError("no nvcc"), DeviceError("the GPU is gone")])
def test_what_ends_the_search_is_raised_and_the_trials_are_kept(store: Store, error: Exception) -> None:
    class Breaking(FakeRunner):
        def trial(self, variant: Variant) -> Trial:
            if isinstance(error, DeviceError) and len(self.asked) > 3:
                raise error
            return super().trial(variant)

    calls = 0

    def breaking(sources: Any) -> Any:
        nonlocal calls
        calls += 1
        if isinstance(error, ToolchainError) and calls == 2:
            raise error
        return build(sources)

    with pytest.raises(type(error), match=str(error)):
        tune(options(store, Breaking(), build=breaking, trials=40))
    kept = len(store.trials(blobs=False))
    assert kept == (3 if isinstance(error, DeviceError) else search.MOST_OF_ONE_PROBLEM)
    assert tune(options(store, FakeRunner(), trials=40)).finished == 40


def test_nothing_is_measured_after_an_error(store: Store) -> None:
    again = threading.Event()

    class Broken(FakeRunner):
        def trial(self, variant: Variant) -> Trial:
            if len(self.asked) > 1:
                again.set()
            raise DeviceError("the GPU is gone")

    runner = Broken()
    with pytest.raises(DeviceError, match="gone"):  # which the main thread is late to hear of
        tune(options(store, runner, trials=40), lambda event: isinstance(event, BatchBuilt) and again.wait(0.5))
    assert len(runner.asked) == 1


def test_a_database_that_fails_ends_it_with_its_sentence(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise StorageError("the disk is full")

    monkeypatch.setattr(store, "record", full)
    with pytest.raises(StorageError, match="the disk is full"):
        tune(options(store, FakeRunner()))
    (name,) = optuna.get_all_study_names(store.url)
    assert optuna.load_study(study_name=name, storage=store.url).trials == [], "what was not recorded was not learned"


def test_a_database_that_fails_in_ever_new_ways_is_given_up(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a disk that others fill while Optuna makes its tables."""
    failures = (StorageError(f"the disk is full ({free} bytes free)") for free in range(mirror.ATTEMPTS))

    def fails(*_: object, **__: object) -> None:
        raise next(failures)

    monkeypatch.setattr(mirror, "RDBStorage", fails)
    with pytest.raises(StorageError, match="the disk is full"):
        tune(options(store, FakeRunner()))


def test_no_trials_search_nothing_and_count_what_there_is(store: Store) -> None:
    found = tune(options(store, FakeRunner(), trials=2))
    runner = FakeRunner()
    report = tune(options(store, runner, trials=0))
    assert found.finished == 2
    assert (runner.asked, report.outcomes, report.best, report.raced, report.stopped) == ([], {}, {}, 0, "")


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"trials": -1}, "trials = -1 is not supported; give 0 to"),
        ({"trials": 10**20}, "trials = 100000000000000000000 is not supported"),
        ({"time_budget": 0.0}, "a time budget of 0 s is not supported; give more than 0"),
        ({"time_budget": math.inf}, "a time budget of inf s is not supported"),
        ({"time_budget": math.nan}, "a time budget of nan s is not supported"),
    ],
)
def test_options_that_make_no_sense_are_refused(store: Store, fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        options(store, FakeRunner(), **fields)
