"""`Store`: keeps all finished trials in a database."""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from math import inf, nan
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import JSON, delete, insert, select, update
from sqlalchemy.orm import Session, defer, joinedload, selectinload
from sqlalchemy.sql import Select

from hadagen.errors import StorageError, shown
from hadagen.problem.launch import LaunchSpec
from hadagen.problem.problem import Problem
from hadagen.problem.regimes import Cache, Destination
from hadagen.problem.trial import (
    Environment,
    Kernel,
    Outcome,
    Provenance,
    Timing,
    Trial,
    check_knobs,
    kernel_digest,
    knobs_key,
)
from hadagen.tuning_db.database import Database
from hadagen.tuning_db.schema import (
    Base,
    Compressed,
    EnvironmentRow,
    ErrorRow,
    KernelRow,
    ProblemRow,
    TimingRow,
    TrialRow,
)

Row = TypeVar("Row", bound=Base)

# Fields that a seal names only if they are not 0, because seals are older than they are.
_LATER = ("memory_bytes", "power_limit_watts")
_NO_BLOBS: dict[str, Any] = {"source": "", "ptx": b"", "cubin": b""}
# Table → type of each column, without columns that may be NULL, and `Compressed` columns, which check themselves.
_KINDS: dict[type[Base], list[tuple[str, type[Any]]]] = {
    model: [
        (column.key, dict if isinstance(column.type, JSON) else column.type.python_type)
        for column in model.__table__.columns
        if not (column.nullable or isinstance(column.type, Compressed))
    ]
    for model in (ProblemRow, EnvironmentRow, KernelRow, TrialRow)
}


class Store(Database, AbstractContextManager["Store"]):
    """A tuning database. Several threads and processes may use it at once.

    Every method raises `StorageError` if the database fails. If the connection to its server is lost, a method tries
    repeats its work, see `hadagen.tuning_db.database`.
    """

    @classmethod
    def open(cls, where: str | os.PathLike[str]) -> Store:
        """Open a path, or a SQLite or PostgreSQL URL. A new file is created, an old schema upgraded with a log line.

        A file without write permission is opened for reading.
        """
        return cls(where, _seal_rows)

    def __exit__(self, *_: object) -> None:
        self.close()

    def record(self, *trials: Trial) -> list[int]:
        """Store trials in one transaction, which is durable when this returns. Returns their row numbers.

        Each replaces an earlier trial with the same problem, arch, knobs, environment and provenance.
        """
        return self.write(lambda session: _record(session, trials))

    def add_timings(self, trial: Trial) -> None:
        """Store a trial as `record` does, but keep the stored timings of its kernel in other cells.

        If the stored trial of these knobs has another kernel, nothing is stored.
        """
        stored: set[str] = set()  # seals of what an attempt wrote, which may be there although it failed

        def add(session: Session) -> None:
            (place,) = _places(session, [trial])
            row = session.scalar(select(TrialRow).filter_by(**place._asdict()))
            whole = trial
            if row:
                same = row.kernel and trial.kernel and row.kernel.digest == trial.kernel.digest
                if not same or row.seal in stored:
                    return
                wanted = select(TrialRow.id).where(TrialRow.id == row.id)
                new = {_where(timing) for timing in trial.timings}
                kept = [timing for timing in _timings(session, wanted)[row.id] if _where(timing) not in new]
                whole = replace(
                    trial,
                    timings=(*kept, *trial.timings),
                    detail="; ".join(filter(None, (row.detail, trial.detail))),
                    seconds=row.seconds + trial.seconds,
                )
            stored.update(session.scalars(select(TrialRow.seal).where(TrialRow.id.in_(_record(session, [whole])))))

        self.write(add)

    def trials(
        self,
        problem: Problem | None = None,
        arch: str | None = None,
        gpu: str | None = None,
        outcome: Outcome | None = None,
        *,
        blobs: bool = True,
        rows: Collection[int] | None = None,
    ) -> list[Trial]:
        """The trials that match, in the order they were first recorded; with `rows` only those of these row numbers.

        `blobs=False` leaves source, PTX and cubin of the kernels empty, which is much faster; see `kernel`.
        """
        wanted = _wanted(problem, arch, gpu, outcome)
        if rows is not None:
            wanted = wanted.where(TrialRow.id.in_(list(rows)))
        kernels = selectinload(TrialRow.kernel)
        if not blobs:
            kernels = kernels.options(*(defer(getattr(KernelRow, name), raiseload=True) for name in _NO_BLOBS))
        query = (
            select(TrialRow)
            .where(TrialRow.id.in_(wanted))
            .order_by(TrialRow.id)
            .options(joinedload(TrialRow.problem), joinedload(TrialRow.environment), kernels)
        )

        def found(session: Session) -> list[Trial]:
            errors = _errors(session, wanted)
            timings = _timings(session, wanted)
            return [_trial(row, errors[row.id], timings[row.id], blobs) for row in session.scalars(query)]

        return self.read(found)

    def rows_after(self, row: int) -> list[int]:
        """The row numbers of the trials that were recorded after trial `row`, ascending; with 0 those of all trials."""
        query = select(TrialRow.id).where(TrialRow.id > row).order_by(TrialRow.id)
        return self.read(lambda session: list(session.scalars(query)))

    def checked(self) -> list[Trial]:
        """All `trials`, without blobs, after a check that no row of the database is changed or missing.

        Other queries may miss a trial whose row is damaged in the columns they ask for.
        """
        self.check()
        return self.trials(blobs=False)

    def kernel(self, digest: str) -> Kernel:
        """The kernel of that digest, with source, PTX and cubin."""

        def found(session: Session) -> Kernel:
            row = session.scalar(select(KernelRow).where(KernelRow.digest == digest))
            if row is None:
                raise StorageError(f"{self.place} holds no kernel {digest}; tune its problem again")
            return _kernel(row, blobs=True)

        return self.read(found)


def _where(timing: Timing) -> tuple[int, Destination, Cache]:
    return timing.elements, timing.destination, timing.cache


class _Place(NamedTuple):
    """The columns that identify a trial."""

    problem_id: int
    arch: str
    knobs_key: str
    environment_id: int
    provenance: str


def _places(session: Session, trials: Sequence[Trial]) -> list[_Place]:
    problems = {
        problem: row_of(session, ProblemRow, {"key": problem.key}).id
        for problem in dict.fromkeys(trial.problem for trial in trials)
    }
    environments = {
        environment: row_of(session, EnvironmentRow, dict(vars(environment))).id
        for environment in dict.fromkeys(trial.environment for trial in trials)
    }
    return [
        _Place(
            problems[trial.problem],
            trial.arch,
            knobs_key(trial.knobs),
            environments[trial.environment],
            trial.provenance.value,
        )
        for trial in trials
    ]


def _record(session: Session, trials: Sequence[Trial]) -> list[int]:
    """Write trials, and return their row numbers. A statement writes many rows: with one for each row, a trial took
    7 ms of the search."""
    places = _places(session, trials)
    kernels = _kernels(session, [trial.kernel for trial in trials if trial.kernel])
    last = dict(zip(places, trials, strict=True))
    ids = _ids(session, last)
    if ids:
        session.execute(update(TrialRow), [{"id": ids[place], **_trial_columns(last[place], kernels)} for place in ids])
        session.execute(delete(ErrorRow).where(ErrorRow.trial_id.in_(ids.values())))
        session.execute(delete(TimingRow).where(TimingRow.trial_id.in_(ids.values())))
    if new := [place._asdict() | _trial_columns(last[place], kernels) for place in last if place not in ids]:
        session.execute(insert(TrialRow), new)
        ids = _ids(session, last)
    errors = [
        {"trial_id": ids[place], "input_class": kind, "relative_error": error}
        for place, trial in last.items()
        for kind, error in trial.errors.items()
    ]
    timings = [
        _timing_columns(ids[place], *timing) for place, trial in last.items() for timing in enumerate(trial.timings)
    ]
    for model, rows in ((ErrorRow, errors), (TimingRow, timings)):
        if rows:
            session.execute(insert(model), rows)
    return [ids[place] for place in places]


def _ids(session: Session, places: Collection[_Place]) -> dict[_Place, int]:
    """The row numbers of those places that have a trial."""
    columns = [getattr(TrialRow, name) for name in _Place._fields]
    named = (column.in_({place[i] for place in places}) for i, column in enumerate(columns))
    query = select(TrialRow.id, *columns).where(*named)
    found = {_Place(*place): number for number, *place in session.execute(query)}
    return {place: found[place] for place in places if place in found}


def _trial_columns(trial: Trial, kernels: Mapping[str, tuple[int, Kernel]]) -> dict[str, object]:
    """The columns of a trial that do not identify it. kernels: digest → row number, and the kernel as it is stored."""
    kernel_id, kernel = kernels[trial.kernel.digest] if trial.kernel else (None, None)
    return {
        "knobs": trial.knobs,
        "outcome": trial.outcome.value,
        "detail": trial.detail,
        "date": trial.date,
        "seconds": trial.seconds,
        "kernel_id": kernel_id,
        "seal": _seal_of_trial(replace(trial, kernel=kernel)),
    }


def row_of(session: Session, model: type[Row], columns: dict[str, object]) -> Row:
    """The row with these columns, which is added if it is missing."""
    row = session.scalar(select(model).filter_by(**columns))
    if row is None:
        row = model(**columns)
        session.add(row)
        session.flush()
    return row


def _kernels(session: Session, kernels: Iterable[Kernel]) -> dict[str, tuple[int, Kernel]]:
    """Digest → row number, and the kernel as it is stored, without its blobs. Missing kernels are added. A kernel that
    an earlier hadagen wrote gets its arithmetic."""
    wanted = {kernel.digest: kernel for kernel in kernels}
    found = {}
    for row in session.scalars(
        select(KernelRow)
        .where(KernelRow.digest.in_(wanted))
        .options(*(defer(getattr(KernelRow, name)) for name in _NO_BLOBS))
    ):
        arithmetic = wanted[row.digest].launch.arithmetic
        if arithmetic and not row.arithmetic:
            stored = _kernel(row, blobs=True)  # which is sound, so that a new seal hides no damage
            row.arithmetic = arithmetic
            row.seal = _seal_of_kernel(replace(stored, launch=replace(stored.launch, arithmetic=arithmetic)))
        found[row.digest] = row.id, _kernel(row, blobs=False)
    if new := [kernel for digest, kernel in wanted.items() if digest not in found]:
        session.execute(insert(KernelRow), [_kernel_columns(kernel) for kernel in new])
        numbers = session.execute(select(KernelRow.digest, KernelRow.id).where(KernelRow.digest.in_(wanted)))
        found |= {digest: (number, wanted[digest]) for digest, number in numbers if digest not in found}
    return found


def _kernel_columns(kernel: Kernel) -> dict[str, object]:
    columns = {**vars(kernel), **kernel.launch.to_dict(), "seal": _seal_of_kernel(kernel)}
    del columns["launch"]
    return columns


def _timing_columns(trial_id: int, position: int, timing: Timing) -> dict[str, object]:
    where = {"destination": timing.destination.value, "cache": timing.cache.value}
    return {**vars(timing), **where, "trial_id": trial_id, "position": position}


def _wanted(
    problem: Problem | None = None, arch: str | None = None, gpu: str | None = None, outcome: Outcome | None = None
) -> Select[Any]:
    """Selects the row numbers of the trials that match."""
    query = select(TrialRow.id)
    if problem is not None:
        query = query.join(TrialRow.problem).where(ProblemRow.key == problem.key)
    if arch is not None:
        query = query.where(TrialRow.arch == arch)
    if gpu is not None:
        query = query.join(TrialRow.environment).where(EnvironmentRow.gpu == gpu)
    if outcome is not None:
        query = query.where(TrialRow.outcome == outcome.value)
    return query


def _errors(session: Session, wanted: Select[Any]) -> dict[int, dict[str, float]]:
    query = select(ErrorRow.trial_id, ErrorRow.input_class, ErrorRow.relative_error)
    errors: dict[int, dict[str, float]] = defaultdict(dict)
    for trial_id, input_class, error in session.execute(query.where(ErrorRow.trial_id.in_(wanted))):
        if error is not None and (not isinstance(error, float) or error < 0):
            raise _damaged(ErrorRow, "relative_error", error)
        errors[trial_id][input_class] = nan if error is None else error
    return errors


def _timings(session: Session, wanted: Select[Any]) -> dict[int, list[Timing]]:
    query = (
        select(TimingRow.trial_id, *(getattr(TimingRow, field.name) for field in fields(Timing)))
        .where(TimingRow.trial_id.in_(wanted))
        .order_by(TimingRow.trial_id, TimingRow.position)
    )
    timings: dict[int, list[Timing]] = defaultdict(list)
    for trial_id, elements, destination, cache, us, low, high, copy in session.execute(query):
        known = type(elements) is int and type(us) is type(low) is type(high) is type(copy) is float
        # Written out for speed, because there are very many timings.
        if not (known and elements > 0 and 0 < us < inf and 0 < low < inf and 0 < high < inf and 0 < copy < inf):
            raise _damaged(TimingRow, "elements … copy_us", (elements, us, low, high, copy))
        timings[trial_id].append(Timing(elements, Destination(destination), Cache(cache), us, low, high, copy))
    return timings


def _trial(row: TrialRow, errors: dict[str, float], timings: list[Timing], blobs: bool) -> Trial:
    if row.kernel is None and row.kernel_id is not None:
        raise _damaged(TrialRow, "kernel_id", row.kernel_id)
    kernel = None if row.kernel is None else _kernel(row.kernel, blobs)
    trial = _unchecked_trial(row, errors, timings, kernel)
    if row.knobs_key != knobs_key(trial.knobs) or row.seal != _seal_of_trial(trial):
        raise _damaged(TrialRow, "seal", row.seal)
    return trial


def _unchecked_trial(row: TrialRow, errors: dict[str, float], timings: list[Timing], kernel: Kernel | None) -> Trial:
    _check(row)
    check_knobs(row.knobs)
    return Trial(
        problem=stored_problem(row.problem),
        arch=row.arch,
        knobs=row.knobs,
        outcome=Outcome(row.outcome),
        provenance=Provenance(row.provenance),
        kernel=kernel,
        detail=row.detail,
        errors=errors,
        timings=tuple(timings),
        environment=Environment(**_values(Environment, row.environment)),
        date=row.date,
        seconds=row.seconds,
    )


def _kernel(row: KernelRow, blobs: bool) -> Kernel:
    kernel = _unchecked(row, blobs)
    if blobs:
        kernel.check()
        if row.seal != _seal_of_kernel(kernel):
            raise _damaged(KernelRow, "seal", row.seal)
    return kernel


def _unchecked(row: KernelRow, blobs: bool) -> Kernel:
    launch = LaunchSpec.from_dict(_values(LaunchSpec, row))
    stored = {field.name for field in fields(Kernel)} - {"launch", *(() if blobs else _NO_BLOBS)}
    return Kernel(**_NO_BLOBS | {name: getattr(row, name) for name in stored}, launch=launch)


def stored_problem(row: ProblemRow) -> Problem:
    """The problem of a row. Raises `ValueError` where it is damaged."""
    _check(row)
    return Problem.parse(row.key)


def _seal_rows(session: Session) -> None:
    """Seals the rows that have no seal, after an upgrade from a schema that had none."""
    for number in session.scalars(select(KernelRow.id).where(KernelRow.seal == "")).all():
        row = session.get_one(KernelRow, number)
        kernel = _unchecked(row, blobs=True)
        digest = kernel_digest(kernel.cubin, kernel.launch)
        if kernel.digest in _former_digests(kernel):
            same = session.scalar(select(KernelRow.id).where(KernelRow.digest == digest))
            if same is not None:
                session.execute(update(TrialRow).where(TrialRow.kernel_id == number).values(kernel_id=same))
                session.delete(row)
                continue
            kernel = replace(kernel, digest=digest)
            row.digest = digest
        row.seal = _seal_of_kernel(kernel)
        session.flush()
        session.expunge(row)  # for its blobs
    wanted = select(TrialRow.id).where(TrialRow.seal == "")
    errors, timings = _errors(session, wanted), _timings(session, wanted)
    for trial in session.scalars(select(TrialRow).where(TrialRow.seal == "")).all():
        used = None if trial.kernel is None else _unchecked(trial.kernel, blobs=False)
        trial.seal = _seal_of_trial(_unchecked_trial(trial, errors[trial.id], timings[trial.id], used))


def _former_digests(kernel: Kernel) -> set[str]:
    """The digests that earlier versions gave the kernel: of its cubin without the launch, or without `starts_early`."""
    launch = kernel.launch.digested()
    early = launch.pop("starts_early")
    said = [b""] if early else [b"", json.dumps(launch, sort_keys=True).encode()]
    return {hashlib.sha256(kernel.cubin + each).hexdigest() for each in said}


def _seal_of_kernel(kernel: Kernel) -> str:
    blobs = (kernel.cubin, kernel.ptx, kernel.source.encode())
    return _sha256([_plain(kernel), kernel.launch.arithmetic, [hashlib.sha256(blob).hexdigest() for blob in blobs]])


def _seal_of_trial(trial: Trial) -> str:
    """The seal of a trial: all its fields in order, without the blobs of its kernel. A database gives times and errors
    back as floats."""
    plain = {
        "problem": trial.problem.key,
        "kernel": trial.kernel and _plain(trial.kernel),
        "errors": {kind: float(error) for kind, error in trial.errors.items()},
        "timings": [(*_where(t), *map(float, (t.us, t.us_low, t.us_high, t.copy_us))) for t in trial.timings],
        "environment": {name: value for name, value in vars(trial.environment).items() if value or name not in _LATER},
        "seconds": float(trial.seconds),
    }
    return _sha256(list((vars(trial) | plain).values()))


def _plain(kernel: Kernel) -> dict[str, Any]:
    """The fields of a kernel, without its blobs and its arithmetic, which may be added later."""
    launch = kernel.launch.to_dict()
    del launch["arithmetic"]
    return vars(kernel) | {"launch": launch, "cubin": 0, "ptx": 0, "source": 0}


def _sha256(values: list[Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _values(kind: type, row: Base | None) -> dict[str, Any]:
    """The values that a row has for the fields of a dataclass."""
    _check(row)
    return {field.name: getattr(row, field.name) for field in fields(kind)}


def _check(row: Base | None) -> None:
    """Raises `ValueError` where a row is missing, or holds what its columns cannot: SQLite keeps whatever it is given.

    Columns that were not loaded are left alone.
    """
    if row is None:
        raise ValueError("a row is missing")
    loaded = row.__dict__
    for name, kind in _KINDS[type(row)]:
        if name in loaded:
            value = loaded[name]
            if not isinstance(value, kind) or (kind in (int, float) and not 0 <= value < inf):
                raise _damaged(type(row), name, value)


def _damaged(model: type[Base], column: str, value: object) -> ValueError:
    """The error for a value that does not fit its column; `Database` makes a sentence of it."""
    return ValueError(f"{model.__tablename__}.{column} is {shown(value)}")
