"""`Claims`: the work that a run has in progress in a tuning database, so that no other run does the same.

A claim is a lease. It is valid for `LEASE_SECONDS`, by the clocks of the machines that share the database, and its run
renews it. A run that ends gives its claims up. If a run was killed, its claims end at once for runs on the same
machine, and for others when the lease is over.
"""

from __future__ import annotations

import os
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event, Lock, Thread

from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session
from sqlalchemy.sql import Select

from hadagen.errors import StorageError
from hadagen.problem import Problem
from hadagen.tuning_db.schema import ClaimRow, EnvironmentRow, ProblemRow, TrialRow
from hadagen.tuning_db.store import Store, problem_of, row_of

LEASE_SECONDS = 120.0
RENEW_SECONDS = 30.0

Work = tuple[Problem, str]  # a problem, and the `knobs_key` of a trial or the name of other work


class Claims:
    """The claims of one run in a store, for trials of an arch on a GPU ("" for estimates).

    As a context manager it gives all claims up at its end. Every method raises `StorageError` if the database fails.
    """

    def __init__(self, store: Store, arch: str, gpu: str, clock: Callable[[], float] = time.time) -> None:
        self._store, self._clock = store, clock
        self._here = {"arch": arch, "gpu": gpu}
        self._owner = f"{_place()} {os.getpid()} {uuid.uuid4().hex}"
        self._finished: set[Work] = set()
        self._lock = Lock()  # for `_finished`
        self._ended = Event()
        self._renewing = Thread(target=self._renew_now_and_then, name="hadagen-claims", daemon=True)

    def __enter__(self) -> Claims:
        self._renewing.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._renewing.join()
        with suppress(StorageError), self._store.writing() as session:  # if it fails, the lease ends by itself
            session.execute(delete(ClaimRow).where(ClaimRow.owner == self._owner))

    def take(self, wanted: Sequence[Work]) -> list[bool]:
        """Claim work. Returns for each whether it is ours now: not if another run has a claim or a trial of it."""
        with self._store.writing() as session:
            self._drop_what_ended(session)
            numbers = {problem: row_of(session, ProblemRow, {"key": problem.key}).id for problem, _ in wanted}
            taken = self._tried(session, numbers.values())
            claims = select(ClaimRow.problem_id, ClaimRow.work).filter_by(**self._here)
            taken.update((number, work) for number, work in session.execute(claims))
            lease = {"owner": self._owner, "expires": self._clock() + LEASE_SECONDS, **self._here}
            answers = []
            for problem, work in wanted:
                place = numbers[problem], work
                answers.append(place not in taken)
                if place not in taken:
                    taken.add(place)
                    session.add(ClaimRow(problem_id=numbers[problem], work=work, **lease))
            return answers

    def finish(self, problem: Problem, work: str) -> None:
        """Note that claimed work is recorded. The next `take` removes its claim."""
        with self._lock:
            self._finished.add((problem, work))

    def of_others(self) -> dict[Problem, set[str]]:
        """Problem → the work that other runs have in progress."""
        found: dict[Problem, set[str]] = defaultdict(set)
        with self._store.reading() as session:
            for claim, problem in session.execute(self._claims):
                if claim.owner != self._owner and self._counts(claim):
                    found[problem_of(problem)].add(claim.work)
        return dict(found)

    def renew(self) -> None:
        """Renew the leases of this run."""
        with self._store.writing() as session:
            mine = update(ClaimRow).where(ClaimRow.owner == self._owner)
            session.execute(mine.values(expires=self._clock() + LEASE_SECONDS))

    def _renew_now_and_then(self) -> None:
        while not self._ended.wait(RENEW_SECONDS):
            with suppress(StorageError):  # the run itself meets the same failure
                self.renew()

    @property
    def _claims(self) -> Select[ClaimRow, ProblemRow]:
        """Selects all claims here, of any run, with their problems."""
        return select(ClaimRow, ProblemRow).filter_by(**self._here).join(ProblemRow)

    def _tried(self, session: Session, problems: Iterable[int]) -> set[tuple[int, str]]:
        query = (
            select(TrialRow.problem_id, TrialRow.knobs_key)
            .join(EnvironmentRow)
            .where(TrialRow.problem_id.in_(list(problems)), TrialRow.arch == self._here["arch"])
            .where(EnvironmentRow.gpu == self._here["gpu"])
        )
        return {(number, work) for number, work in session.execute(query)}

    def _drop_what_ended(self, session: Session) -> None:
        with self._lock:
            finished, self._finished = self._finished, set()
        for claim, problem in session.execute(self._claims).all():
            mine = claim.owner == self._owner
            done = (problem_of(problem), claim.work) in finished
            if done if mine else not self._counts(claim):
                session.delete(claim)
        session.flush()

    def _counts(self, claim: ClaimRow) -> bool:
        return claim.expires > self._clock() and not _is_dead(claim.owner)


def _place() -> str:
    """The scope of process numbers: this boot of this system, and its process namespace."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return uuid.uuid4().hex  # a scope of its own


def _is_dead(owner: str) -> bool:
    """Whether the process was in the same scope, and has ended."""
    place, _, rest = owner.partition(" ")
    number = rest.partition(" ")[0]
    if place != _place() or not number.isdigit():
        return False
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False
