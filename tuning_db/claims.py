"""`Claims`: the work that a run has in progress in a tuning database, so that no other run does the same.

A claim is a lease. It is valid for `LEASE_SECONDS`, by the clock of the database server, or for an SQLite file by those
of the machines that share it. Its run renews it. A run that ends gives its claims up. If a run was killed, its claims
end at once for runs on the same machine, and for others when the lease is over.
"""

from __future__ import annotations

import os
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
from hadagen.problem.problem import Problem
from hadagen.tuning_db.schema import ClaimRow, EnvironmentRow, ProblemRow, TrialRow
from hadagen.tuning_db.store import Store, row_of, stored_problem

LEASE_SECONDS = 120.0
RENEW_SECONDS = 30.0

Work = tuple[Problem, str]  # a problem, and the `knobs_key` of a trial or the name of other work


class Claims:
    """The claims of one run in a store, for trials of an arch on a GPU ("" for estimates).

    As a context manager it gives all claims up at its end. Every method raises `StorageError` if the database fails.
    """

    def __init__(self, store: Store, arch: str, gpu: str, clock: Callable[[Session], float] | None = None) -> None:
        self._store, self._clock = store, clock or store.clock
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
        mine = delete(ClaimRow).where(ClaimRow.owner == self._owner)
        with suppress(StorageError):  # if it fails, the lease ends by itself
            self._store.write(lambda session: session.execute(mine), patient=False)

    def take(self, wanted: Sequence[Work]) -> list[bool]:
        """Claim work. Returns for each piece whether it is ours now; not if another run has a claim or trial of it."""
        with self._lock:
            finished = set(self._finished)
        added: set[tuple[int, str]] = set()  # by an attempt, which may be there although it failed

        def attempt(session: Session) -> list[bool]:
            self._drop_what_ended(session, finished)
            numbers = {
                problem: row_of(session, ProblemRow, {"key": problem.key}).id
                for problem in {each for each, _ in wanted}
            }
            taken = self._tried(session, numbers.values())
            claims = select(ClaimRow.problem_id, ClaimRow.work, ClaimRow.owner).filter_by(**self._here)
            there: set[tuple[int, str]] = set()
            for number, work, owner in session.execute(claims):
                ours = owner == self._owner and (number, work) in added
                (there if ours else taken).add((number, work))
            lease = {"owner": self._owner, "expires": self._clock(session) + LEASE_SECONDS, **self._here}
            answers = []
            for problem, work in wanted:
                place = numbers[problem], work
                answers.append(place not in taken)
                if place not in taken and place not in there:
                    added.add(place)
                    session.add(ClaimRow(problem_id=numbers[problem], work=work, **lease))
                taken.add(place)
            return answers

        answers = self._store.write(attempt)
        with self._lock:
            self._finished -= finished
        return answers

    def finish(self, problem: Problem, work: str) -> None:
        """Remember that claimed work is recorded. The next `take` removes its claim."""
        with self._lock:
            self._finished.add((problem, work))

    def of_others(self) -> dict[Problem, set[str]]:
        """Problem → the work that other runs have in progress."""

        def look(session: Session) -> dict[Problem, set[str]]:
            found: dict[Problem, set[str]] = defaultdict(set)
            now = self._clock(session)
            for claim, problem in session.execute(self._claims):
                if claim.owner != self._owner and _counts(claim, now):
                    found[stored_problem(problem)].add(claim.work)
            return dict(found)

        return self._store.read(look)

    def renew(self) -> None:
        """Renew the leases of this run."""
        mine = update(ClaimRow).where(ClaimRow.owner == self._owner)
        self._store.write(
            lambda session: session.execute(mine.values(expires=self._clock(session) + LEASE_SECONDS)), patient=False
        )

    def _renew_now_and_then(self) -> None:
        while not self._ended.wait(RENEW_SECONDS):
            with suppress(StorageError):  # the run itself meets the same failure
                self.renew()

    @property
    def _claims(self) -> Select[ClaimRow, ProblemRow]:
        """Selects the claims of all runs for this arch and GPU, with their problems."""
        return select(ClaimRow, ProblemRow).filter_by(**self._here).join(ProblemRow)

    def _tried(self, session: Session, problems: Iterable[int]) -> set[tuple[int, str]]:
        query = (
            select(TrialRow.problem_id, TrialRow.knobs_key)
            .join(EnvironmentRow)
            .where(TrialRow.problem_id.in_(list(problems)), TrialRow.arch == self._here["arch"])
            .where(EnvironmentRow.gpu == self._here["gpu"])
        )
        return {(number, work) for number, work in session.execute(query)}

    def _drop_what_ended(self, session: Session, finished: set[Work]) -> None:
        now = self._clock(session)
        for claim, problem in session.execute(self._claims).all():
            mine = claim.owner == self._owner
            done = (stored_problem(problem), claim.work) in finished
            if done if mine else not _counts(claim, now):
                session.delete(claim)
        session.flush()


def _counts(claim: ClaimRow, now: float) -> bool:
    return claim.expires > now and not _is_dead(claim.owner)


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
