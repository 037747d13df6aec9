"""The search: ask, build, verify and time, record, tell, over many problems at once.

A batch holds knobs of all open problems. On one device three batches are in progress: one is measured, one is built,
one is being built (`pipeline`). So no device waits for a compiler. The next batch is asked for only when the results of
one are complete. So the same seed and the same answers give the same search, however long each part takes. On a fleet
results are taken as they come (`fleet`).

A trial is in the database before anything is learned from it or reported. So every reported trial is kept, however the
process ends, and the next run continues from there. Trials that are finished at the same time are recorded together.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain, zip_longest
from math import inf
from threading import Event as Flag
from threading import Lock

import optuna

from hadagen.errors import DisturbedError, UsageError
from hadagen.measure import Runner
from hadagen.plan.arch import Arch
from hadagen.plan.knobs import Knobs
from hadagen.plan.space import Space
from hadagen.problem.problem import MAX_LOG2_N, RIGHT_ORDERS, DType, Numerics, Problem, check_tunable
from hadagen.problem.trial import Outcome, Trial, knobs_key
from hadagen.runtime.choose.guesses import nearest_problems
from hadagen.tuner.estimate import shortlist
from hadagen.tuner.events import (
    Listener,
    PairRaced,
    ProblemFinished,
    ProblemStarted,
    RaceDisturbed,
    SearchStarted,
    TrialFinished,
    TuneReport,
)
from hadagen.tuner.mirror import Mirror
from hadagen.tuner.pipeline import Batch, Build, Pipeline, Work
from hadagen.tuner.races import Racing, race_near_ties
from hadagen.tuner.study import BestByCell, Study, best_of_trials, known_trials, most_often_best
from hadagen.tuning_db.claims import Claims
from hadagen.tuning_db.store import Store

MEASURED_TRIALS = 50
ESTIMATED_TRIALS = 4
MOST_TRIALS = 1_000_000
MOST_SECONDS = 30 * 24 * 3600
MOST_OF_ONE_PROBLEM = 4  # in a batch, because trials of one batch cannot learn from each other
OPENED_AT_ONCE = 8  # problems: ranking the knobs of each takes a moment, and the first batch waits for it
RANKED, SEEDS = 8, 12  # knobs to begin with: the best by the cost model, and the first seeds of the space
# A problem with a parent gets one trial for this many of the parent's, at the same pace, but at least `LEAST_OF_CHILD`.
# It starts with the winners of the parent.
CHILD_SHARE = 4
LEAST_OF_CHILD = 3
NEIGHBORS_TURN = 4  # one of this many trials has the best knobs so far of a neighboring problem
NEAREST = 2  # nearest problems with another matrix, besides the neighbors
_RACES = "races"  # claimed while the near-ties of a problem are raced
SEARCH_SHARE = 0.9  # of the time budget; the rest is for races


@dataclass(frozen=True)
class TuneOptions:
    """The options of `tune`.

    `store`: keeps the trials; None for a search that keeps none. `build`: compiles variants and returns results in
    their order; None for a runner that needs no kernels. `trials`: number of trials for each problem, including those
    of earlier runs; by default `MEASURED_TRIALS`, or `ESTIMATED_TRIALS` without a device. Problems with a parent get a
    quarter of them. With 0 nothing is searched or raced. `time_budget`: seconds, for all problems together. `known`:
    problem → knobs that are tried before any others, such as those of winners. `stopped`: set to stop building.

    `work`: builds and measures what the search asks for, on one device or on a fleet. `guess`: finds the first knobs
    of a problem as `first_guesses` does, perhaps elsewhere; it may return None if it was not told to `wait`.
    """

    arch: Arch
    problems: Sequence[Problem]
    store: Store | None
    runner: Runner
    build: Build | None
    trials: int | None = None
    time_budget: float | None = None
    seed: int = 0
    known: Mapping[Problem, Sequence[Knobs]] = field(default_factory=dict)
    stopped: Flag = field(default_factory=Flag)
    work: Callable[..., Work] = Pipeline
    guess: Callable[[Problem, bool], Sequence[Knobs] | None] | None = None

    def __post_init__(self) -> None:
        """Raises `UsageError` as `check_effort` and `check_tunable` do."""
        check_effort(self.trials, self.time_budget)
        check_tunable(self.problems)


def check_effort(trials: int | None, time_budget: float | None) -> None:
    """Raises `UsageError` if a search cannot have these trials or seconds, or would never end."""
    if trials is not None and not 0 <= trials <= MOST_TRIALS:
        raise UsageError(f"trials = {trials} is not supported; give 0 to {MOST_TRIALS}")
    if time_budget is not None and not 0 < time_budget <= MOST_SECONDS:
        raise UsageError(
            f"a time budget of {time_budget:g} s is not supported; give more than 0, at most {MOST_SECONDS}"
        )


def tune(options: TuneOptions, listen: Listener = lambda event: None) -> TuneReport:
    """Search, keep every trial in the store, and call `listen` with each event.

    Ctrl-C and the end of the time budget end it early, with a report. Raises `ToolchainError`, `DeviceError` or
    `StorageError` if it cannot go on. Trials that were reported until then are kept.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    store = options.store
    with ExitStack() as until_the_end:
        mirror = claims = None
        if store is not None:
            mirror = until_the_end.enter_context(Mirror(store))
            until_the_end.enter_context(store.lent())
            claims = until_the_end.enter_context(Claims(store, options.arch.name, options.runner.environment.gpu))
        search = _Search(options, listen, mirror, claims)
        search.run()
        search.race()
        return search.report()


@lru_cache(maxsize=256)  # several searches of one process ask for the same problem and arch
def first_guesses(problem: Problem, arch: Arch, trials: int, *, estimated: bool = False) -> tuple[Knobs, ...]:
    """The knobs with which the search of a problem begins, before it knows any times: the best by the cost model, and
    the first seeds of the space in turns; for estimates of so many `trials` the best by the cost model alone."""
    space = Space(problem, arch)
    if estimated:
        return tuple(shortlist(space, trials))
    return tuple(_by_turns([space.seeds()[:SEEDS], shortlist(space, RANKED)]))


class _Search:
    def __init__(
        self, options: TuneOptions, listen: Listener, mirror: Mirror | None = None, claims: Claims | None = None
    ) -> None:
        self.stopped = ""
        self._options, self._listen, self._mirror, self._claims = options, listen, mirror, claims
        self._started = time.monotonic()
        self._environment = options.runner.environment
        self._estimated = not self._environment.gpu
        by_default = ESTIMATED_TRIALS if self._estimated else MEASURED_TRIALS
        self._trials = by_default if options.trials is None else options.trials

        problems = dict.fromkeys(options.problems) if self._trials else {}
        self._unopened = deque(sorted(problems, key=lambda problem: problem.parent is not None))
        self._studies: dict[Problem, Study] = {}
        self._seeds: dict[Problem, Sequence[Knobs]] = {}  # by problem without a parent
        self._last: Problem | None = None  # that was asked for knobs
        self._elsewhere: dict[Problem, set[str]] = {}  # what other runs have in progress
        self._ours: set[int] = set()  # row numbers of the trials of this run
        self._newest = max(options.store.rows_after(0), default=0) if options.store else 0  # row that was looked at
        kept = (
            options.store.trials(arch=options.arch.name, gpu=self._environment.gpu, blobs=False)
            if options.store
            else ()
        )
        self._stored = known_trials(kept, options.arch)
        # Problem → number of its trials now, and at the end.
        self._finished = {problem: len(self._stored[problem]) for problem in self._unopened}
        self._goals = {problem: max(self._share(problem), stored) for problem, stored in self._finished.items()}
        self._finished_before = sum(self._finished.values())
        self._outcomes: Counter[Outcome] = Counter()
        self._raced = 0
        self._lock = Lock()  # for what races tell
        self._race_no_more = Flag()
        listen(
            SearchStarted(
                problems=len(self._unopened),
                trials=sum(self._goals.values()),
                finished=self._finished_before,
                environment=self._environment,
                estimated=self._estimated,
            )
        )

    def run(self) -> None:
        """Search to the end, or until time is up or Ctrl-C. All trials measured until then are recorded."""
        options, known = self._options, chain.from_iterable(known.values() for known in self._stored.values())
        deadline = self._started + SEARCH_SHARE * (options.time_budget or inf)
        with options.work(options.arch, options.build, options.runner, known, options.stopped) as work:
            if work.run(self._ask, self._finish, self._listen, deadline):
                self.stopped = "interrupted"
        self._meet_others()
        if not self.stopped and (
            self._unopened
            or any(study.finished + study.elsewhere < self._goals[name] for name, study in self._studies.items())
        ):
            self.stopped = "out of time"

    def race(self) -> None:
        """Race the near-ties of all problems that got trials, in any run, since their last race.

        Does nothing if the runner cannot race.
        """
        runner = self._options.runner
        if self.stopped == "interrupted" or self._options.store is None or not isinstance(runner, Racing):
            return
        with ThreadPoolExecutor(runner.races_at_once, "hadagen-race") as threads:
            races = [threads.submit(self._race_one, problem, runner) for problem in sorted(self._studies)]
            try:
                for race in races:
                    race.result()
            except BaseException as error:
                self._race_no_more.set()
                if not isinstance(error, KeyboardInterrupt):
                    raise
                self.stopped = "interrupted"

    def _race_one(self, problem: Problem, runner: Racing) -> None:
        store, claims, study = self._options.store, self._claims, self._studies[problem]
        assert store
        assert claims
        deadline = self._started + (self._options.time_budget or inf)
        if self._is_over(deadline) or study.is_raced or not all(claims.take([(problem, _RACES)])):
            return
        kept = study.kept
        trials = store.trials(problem, self._options.arch.name, self._environment.gpu, Outcome.OK, blobs=False)
        here = [trial for trial in trials if replace(trial.environment, nvcc="") == self._environment]
        try:
            for margins in race_near_ties(here, store, runner):
                with self._lock:
                    self._raced += len(margins)
                    self._listen(PairRaced(problem, margins))
                if self._is_over(deadline):
                    return
        except DisturbedError as error:  # the next run races what is left
            with self._lock:
                self._listen(RaceDisturbed(problem, str(error)))
            return
        study.mark_raced(kept)
        claims.finish(problem, _RACES)

    def _is_over(self, deadline: float) -> bool:
        return self._race_no_more.is_set() or time.monotonic() > deadline

    def report(self) -> TuneReport:
        return TuneReport(
            environment=self._environment,
            estimated=self._estimated,
            finished=sum(self._finished.values()),
            finished_before=self._finished_before,
            elsewhere=sum(self._finished.values()) - self._finished_before - sum(self._outcomes.values()),
            under_way=sum(study.elsewhere for study in self._studies.values()),
            outcomes=dict(self._outcomes),
            best={problem: study.best for problem, study in self._studies.items()},
            raced=self._raced,
            stopped=self.stopped,
            seconds=time.monotonic() - self._started,
        )

    def _share(self, problem: Problem) -> int:
        """The trials that a problem should get."""
        shared = min(self._trials, max(LEAST_OF_CHILD, self._trials // CHILD_SHARE))
        return shared if _is_like_its_parent(problem) else self._trials

    def _ask(self, size: int) -> Batch:
        """The next batch: knobs of the open problems in turns, at most `size`; empty if none may have more now."""
        batch: Batch = []
        self._meet_others()
        while not batch:
            self._open_some()
            active = deque(study for study in self._in_turns() if self._may_ask(study))
            if not active and not self._unopened:
                break
            rounds: Counter[Problem] = Counter()
            while active and len(batch) < size:
                study = active.popleft()
                if asked := self._ask_study(study):
                    batch.append(asked)
                    rounds[study.problem] += 1
                    if rounds[study.problem] < MOST_OF_ONE_PROBLEM and self._may_ask(study):
                        active.append(study)
                self._last = study.problem
            batch = self._claimed(batch)
        return batch

    def _in_turns(self) -> list[Study]:
        """All studies, those after the last that was asked first."""
        studies = list(self._studies.values())
        first = next((i + 1 for i, study in enumerate(studies) if study.problem == self._last), 0)
        return studies[first:] + studies[:first]

    def _open_some(self) -> None:
        """Open the next problems whose first knobs are known. If no other problem is open, wait for one."""
        for _ in range(min(OPENED_AT_ONCE, len(self._unopened))):
            idle = not any(map(self._may_ask, self._studies.values()))
            if not self._open(self._unopened[0], wait=idle):
                return
            self._unopened.popleft()

    def _claimed(self, batch: Batch) -> Batch:
        """The knobs of a batch that no other run has tried or has in progress. The others are dropped."""
        if self._claims is None:
            return batch
        free = self._claims.take([(problem, knobs_key(knobs.to_dict())) for problem, knobs in batch])
        for (problem, knobs), ours in zip(batch, free, strict=True):
            if not ours:
                self._studies[problem].forget(knobs)
        if not all(free):
            self._meet_others()
        return [asked for asked, ours in zip(batch, free, strict=True) if ours]

    def _meet_others(self) -> None:
        """Learn the trials that other runs have recorded, and note what those runs have in progress."""
        store, claims, arch = self._options.store, self._claims, self._options.arch.name
        if store is None or claims is None:
            return
        new = store.rows_after(self._newest)
        self._newest = max(new, default=self._newest)
        if others := set(new) - self._ours:
            for trial in store.trials(arch=arch, gpu=self._environment.gpu, rows=others, blobs=False):
                study = self._studies.get(trial.problem)
                if study is None:  # not open yet
                    self._stored[trial.problem] |= known_trials([trial], self._options.arch)[trial.problem]
                elif study.learn(trial):
                    self._finished[trial.problem] = study.finished
                    self._tell_if_finished(study)
        self._elsewhere = claims.of_others()
        for problem, study in self._studies.items():
            study.leave_to_others(self._elsewhere.get(problem, ()))

    def _may_ask(self, study: Study) -> bool:
        """Whether a problem may have another trial now.

        It may if it lacks trials. A problem with a parent then waits for that, unless it has known knobs.
        """
        problem = study.problem
        if study.asked >= self._goals[problem]:
            return False
        parent = problem.parent if _is_like_its_parent(problem) else None
        if parent is None or study.has_first or parent not in self._studies:
            return True
        if self._finished[parent] == self._goals[parent]:
            return True
        return CHILD_SHARE * study.asked < self._finished[parent]

    def _ask_study(self, study: Study) -> tuple[Problem, Knobs] | None:
        try:
            return study.problem, study.ask(prefer=self._winners_nearby(study))
        except LookupError:  # fewer legal knobs than wanted trials
            self._goals[study.problem] = study.asked
            self._tell_if_finished(study)
            return None

    def _open(self, problem: Problem, wait: bool) -> bool:
        """Begin the search of a problem. Returns False if its first knobs are not known yet; with `wait` they will
        be."""
        options = self._options
        # The search starts with its knobs.
        oldest = (problem.parent if _is_like_its_parent(problem) else None) or problem
        if oldest not in self._seeds and len(self._stored[problem]) < self._share(problem):
            if options.guess:
                guessed = options.guess(oldest, wait)
            elif options.time_budget and not self._estimated:
                # The cost model takes seconds to rank the knobs of a problem, the time of several trials.
                guessed = tuple(Space(oldest, options.arch).seeds()[:SEEDS])
            else:
                guessed = first_guesses(oldest, options.arch, self._trials, estimated=self._estimated)
            if guessed is None:
                return False
            self._seeds[oldest] = guessed
        device = self._environment.gpu or "estimated"
        study = Study(
            Space(problem, options.arch),
            device,
            self._stored[problem],
            self._mirror,
            options.seed,
            self._elsewhere.get(problem, ()),
        )
        self._studies[problem] = study
        self._finished[problem] = study.finished
        self._goals[problem] = max(study.finished, self._share(problem))
        self._listen(ProblemStarted(problem, study.finished))
        if not self._tell_if_finished(study):
            for knobs in options.known.get(problem, ()):
                study.suggest(knobs, first=True)
            for knobs in self._seeds.get(oldest, ()):
                study.suggest(knobs)
        return True

    def _winners_nearby(self, study: Study) -> list[Knobs]:
        """The best knobs, from this run or earlier runs, of the problems that differ least.

        The knobs of the parent always come, the knobs of other neighbors every `NEIGHBORS_TURN` trials.
        """
        problem = study.problem
        nearby = [problem.parent] if problem.parent else []
        if study.asked % NEIGHBORS_TURN == 0 and not self._estimated:
            nearby += _neighbors(problem)
            if problem.transform.has_matrix or problem.io.form:
                nearby += nearest_problems(problem, {*self._studies, *self._stored})[:NEAREST]
        return _by_turns(most_often_best(self._best_by_cell(neighbor)) for neighbor in nearby)

    def _best_by_cell(self, problem: Problem) -> BestByCell:
        study = self._studies.get(problem)
        return study.best_by_cell if study else best_of_trials(self._stored[problem].values())

    def _finish(self, trials: Sequence[Trial]) -> None:
        """Record, then learn, then report."""
        if self._options.store is not None:
            self._ours.update(self._options.store.record(*trials))
        if self._claims is not None:
            for trial in trials:
                self._claims.finish(trial.problem, knobs_key(trial.knobs))
        mirrored, events = [], []
        for trial in trials:
            problem, study = trial.problem, self._studies[trial.problem]
            result = study.tell(trial)
            if study.mirrored:
                mirrored.append((study.mirrored, result))
            self._outcomes[trial.outcome] += 1
            self._finished[problem] = study.finished
            finished, goal = sum(self._finished.values()), sum(self._goals.values())
            events.append(TrialFinished(trial, study.best, finished, goal))
        if self._mirror is not None:
            self._mirror.add(mirrored)
        for event in events:
            self._listen(event)
        for study in dict.fromkeys(self._studies[trial.problem] for trial in trials):
            self._tell_if_finished(study)

    def _tell_if_finished(self, study: Study) -> bool:
        finished = study.finished == self._goals[study.problem]
        if finished:
            self._listen(ProblemFinished(study.problem, study.finished, study.best))
        return finished


def _by_turns(lists: Iterable[Sequence[Knobs]]) -> list[Knobs]:
    """The first of each list, then the second of each, and so on."""
    return [knobs for rank in zip_longest(*lists) for knobs in rank if knobs]


def _neighbors(problem: Problem) -> list[Problem]:
    """The problems that differ least, the nearest first: the other types, the other numerics, half and twice the n if
    that is not quantized."""
    near = [
        *(problem.with_io(input=dtype, output=problem.io.form or dtype) for dtype in DType),
        *(problem.with_io(numerics=numerics) for numerics in Numerics),
        *(
            replace(problem, transform=replace(problem.transform, n=m))
            for m in (problem.n // 2, problem.n * 2)
            if 2 <= m <= 1 << MAX_LOG2_N and m % problem.order == 0 and problem.io.form is None
            if not problem.transform.paired or m // problem.order in RIGHT_ORDERS
        ),
    ]
    return [neighbor for neighbor in dict.fromkeys(near) if neighbor != problem]


def _is_like_its_parent(problem: Problem) -> bool:
    """Whether the knobs that are good for its parent are good for it, so that it needs few trials of its own. What
    quantizes, or multiplies by two matrices, has other work to do."""
    return problem.parent is not None and problem.io.form is None and not problem.transform.paired
