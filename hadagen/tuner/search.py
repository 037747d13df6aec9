"""The search: ask, build, verify and time, record, tell, over many problems at once.

A batch holds knobs of all open problems. Three batches are in progress: one is measured, one is built, one is being
built (`pipeline`). So no device waits for a compiler. The next batch is asked for only when the results of one are
complete. So the same seed and the same answers give the same search, however long each part takes. A trial is in the
database before anything is learned from it or reported. So every reported trial is kept, however the process ends, and
the next run continues from there.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, zip_longest
from math import inf
from threading import Event as Flag

import optuna
from optuna.storages import BaseStorage, InMemoryStorage, RDBStorage

from hadagen.arch import Arch
from hadagen.errors import StorageError, UsageError
from hadagen.knobs import Knobs
from hadagen.measure import Runner
from hadagen.problem import MAX_LOG2_N, DType, Numerics, Problem, check_tunable, difference
from hadagen.runtime.guesses import nearest_problems
from hadagen.space import Space
from hadagen.trial import Outcome, Trial, knobs_key
from hadagen.tuner.estimate import shortlist
from hadagen.tuner.events import (
    Listener,
    PairRaced,
    ProblemFinished,
    ProblemStarted,
    SearchStarted,
    TrialFinished,
    TuneReport,
)
from hadagen.tuner.pipeline import BATCH_SIZE, Build, Pipeline
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
NEAREST = 2  # of the problems with another matrix, beside the neighbors
STORAGE_ATTEMPTS = 20  # more than the tables and indexes that Optuna makes
_RACES = "races"  # claimed while the near-ties of a problem are raced
SEARCH_SHARE = 0.9  # of the time budget; the rest is for races


@dataclass(frozen=True)
class TuneOptions:
    """What to search, with what, and for how long.

    `store`: keeps the trials; None for a search that keeps none. `build`: compiles variants and returns results in
    their order; None for a runner that needs no kernels. `trials`: number of trials for each problem, including those
    of earlier runs; by default `MEASURED_TRIALS`, or `ESTIMATED_TRIALS` without a device. Problems with a parent get a
    quarter of them. With 0 nothing is searched or raced. `time_budget`: seconds, for all problems together. `known`:
    problem → knobs that are tried before any others, such as those of winners. `stopped`: set to stop building.
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
    if store is None:
        return _search(options, listen, InMemoryStorage())
    storage = _optuna_storage(store)
    try:
        with store.lent(), Claims(store, options.arch.name, options.runner.environment.gpu) as claims:
            return _search(options, listen, storage, claims)
    finally:
        storage.engine.dispose()


def _search(options: TuneOptions, listen: Listener, storage: BaseStorage, claims: Claims | None = None) -> TuneReport:
    search = _Search(options, listen, storage, claims)
    search.run()
    search.race()
    return search.report()


def _optuna_storage(store: Store) -> RDBStorage:
    """Optuna's tables, in our database."""
    sqlite = store.url.startswith("sqlite")
    failure, attempts = "", 0
    while True:
        attempts += 1
        try:
            with store.lent():
                return RDBStorage(store.url, engine_kwargs={"connect_args": {"timeout": 60}} if sqlite else None)
        except RuntimeError as error:
            raise StorageError(
                f"{store.place} holds tables of another Optuna than {optuna.__version__}; name another database"
            ) from error
        except StorageError as error:
            # Another process may make these tables at the same time, because Optuna takes no lock. The next attempt
            # finds the tables of that process. So a second failure with the same text has another reason.
            if failure == str(error) or attempts == STORAGE_ATTEMPTS:
                raise
            failure = str(error)


class _Search:
    def __init__(
        self, options: TuneOptions, listen: Listener, storage: BaseStorage, claims: Claims | None = None
    ) -> None:
        self.stopped = ""
        self._options, self._listen, self._storage, self._claims = options, listen, storage, claims
        self._started = time.monotonic()
        self._environment = options.runner.environment
        self._estimated = not self._environment.gpu
        by_default = ESTIMATED_TRIALS if self._estimated else MEASURED_TRIALS
        self._trials = by_default if options.trials is None else options.trials

        problems = dict.fromkeys(options.problems) if self._trials else {}
        self._unopened = deque(sorted(problems, key=lambda problem: problem.parent is not None))
        self._studies: dict[Problem, Study] = {}
        self._seeds: dict[Problem, list[Knobs]] = {}  # by problem without a parent
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
        with Pipeline(options.arch, options.build, options.runner, known, options.stopped) as pipeline:
            if pipeline.run(self._ask, self._finish, self._listen, deadline):
                self.stopped = "interrupted"
        self._meet_others()
        if not self.stopped and (
            self._unopened
            or any(study.finished + study.elsewhere < self._goals[name] for name, study in self._studies.items())
        ):
            self.stopped = "out of time"

    def race(self) -> None:
        """Race the near-ties of all problems with new trials since their last race, of this run or an earlier one.

        Does nothing if the runner cannot race.
        """
        options, store = self._options, self._options.store
        if self.stopped == "interrupted" or store is None or not isinstance(options.runner, Racing):
            return
        deadline = self._started + (options.time_budget or inf)
        try:
            for problem in sorted(self._studies):
                study = self._studies[problem]
                if study.is_raced or not (self._claims and all(self._claims.take([(problem, _RACES)]))):
                    continue
                kept = study.kept
                trials = store.trials(problem, options.arch.name, self._environment.gpu, Outcome.OK, blobs=False)
                here = [trial for trial in trials if replace(trial.environment, nvcc="") == self._environment]
                for margins in race_near_ties(here, store, options.runner):
                    self._raced += len(margins)
                    self._listen(PairRaced(problem, margins))
                    if time.monotonic() > deadline:
                        return
                study.mark_raced(kept)
                self._claims.finish(problem, _RACES)
        except KeyboardInterrupt:
            self.stopped = "interrupted"

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

    def _ask(self) -> list[tuple[Problem, Knobs]]:
        """The next batch: knobs of all open problems, up to `BATCH_SIZE`; empty if no problem may have more now."""
        batch: list[tuple[Problem, Knobs]] = []
        self._meet_others()
        while not batch:
            for _ in range(min(OPENED_AT_ONCE, len(self._unopened))):
                self._open(self._unopened.popleft())
            active = [study for study in self._studies.values() if self._may_ask(study)]
            if not active and not self._unopened:
                break
            for _ in range(min(MOST_OF_ONE_PROBLEM, max(1, BATCH_SIZE // max(1, len(active))))):
                batch += [asked for study in active if (asked := self._ask_study(study))]
            batch = self._claimed(batch)
        return batch

    def _claimed(self, batch: list[tuple[Problem, Knobs]]) -> list[tuple[Problem, Knobs]]:
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
        under_way = claims.of_others()
        for problem, study in self._studies.items():
            study.leave_to_others(under_way.get(problem, ()))

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
        if self._may_ask(study):
            try:
                return study.problem, study.ask(prefer=self._winners_nearby(study))
            except LookupError:  # fewer legal knobs than wanted trials
                self._goals[study.problem] = study.asked
                self._tell_if_finished(study)
        return None

    def _open(self, problem: Problem) -> None:
        options = self._options
        space = Space(problem, options.arch)
        device = self._environment.gpu or "estimated"
        study = Study(space, device, self._stored[problem], self._storage, options.seed)
        self._studies[problem] = study
        self._finished[problem] = study.finished
        self._goals[problem] = max(study.finished, self._share(problem))
        self._listen(ProblemStarted(problem, study.finished))
        if self._tell_if_finished(study):
            return
        # The search starts with its knobs.
        oldest = (problem.parent if _is_like_its_parent(problem) else None) or problem
        if oldest not in self._seeds:
            start = space if oldest is problem else Space(oldest, options.arch)
            self._seeds[oldest] = (
                shortlist(start, self._trials)
                if self._estimated
                else _by_turns([start.seeds()[:SEEDS], shortlist(start, RANKED)])
            )
        for knobs in options.known.get(problem, ()):
            study.suggest(knobs, first=True)
        for knobs in self._seeds[oldest]:
            study.suggest(knobs)

    def _winners_nearby(self, study: Study) -> list[Knobs]:
        """The best knobs of the problems that differ least, of this run or earlier ones.

        Those of the parent come always, those of other neighbors every `NEIGHBORS_TURN` trials.
        """
        problem = study.problem
        nearby = [problem.parent] if problem.parent else []
        if study.asked % NEIGHBORS_TURN == 0 and not self._estimated:
            nearby += _neighbors(problem)
            if problem.order > 1:
                nearby += nearest_matrices(problem, {*self._studies, *self._stored})[:NEAREST]
            elif problem.io.form:
                nearby += nearest_problems(problem, {*self._studies, *self._stored})[:NEAREST]
        return _by_turns(most_often_best(self._best_by_cell(neighbor)) for neighbor in nearby)

    def _best_by_cell(self, problem: Problem) -> BestByCell:
        study = self._studies.get(problem)
        return study.best_by_cell if study else best_of_trials(self._stored[problem].values())

    def _finish(self, trial: Trial) -> None:
        """Record, then learn, then report."""
        if self._options.store is not None:
            self._ours.add(self._options.store.record(trial))
        if self._claims is not None:
            self._claims.finish(trial.problem, knobs_key(trial.knobs))
        problem, study = trial.problem, self._studies[trial.problem]
        study.tell(trial)
        self._outcomes[trial.outcome] += 1
        self._finished[problem] = study.finished
        self._listen(TrialFinished(trial, study.best, sum(self._finished.values()), sum(self._goals.values())))
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
        ),
    ]
    return [neighbor for neighbor in dict.fromkeys(near) if neighbor != problem]


def nearest_matrices(problem: Problem, others: Iterable[Problem]) -> list[Problem]:
    """Those of the other problems that have a matrix too and the same io, the nearest first."""
    alike = {other for other in others if other.order > 1 and other.io == problem.io} - {problem}
    return sorted(alike, key=lambda other: (difference(problem, other), other))


def _is_like_its_parent(problem: Problem) -> bool:
    """Whether the knobs that are good for its parent are good for it, so that it needs few trials of its own. What
    quantizes has other work to do."""
    return problem.parent is not None and problem.io.form is None
