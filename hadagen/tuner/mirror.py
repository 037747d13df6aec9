"""Optuna's tables in our database, for Optuna's own tools. Our tables are the truth, and these follow them.

All but adding trials goes through Optuna's public API. `Study.add_trials` executes some 70 statements for each trial,
which take 23 ms, so a fleet that finishes 60 trials a second would wait for it. If the schema is the known one,
`Mirror.add` executes one statement for each table and batch instead, and takes a hundredth of the time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime, timezone
from itertools import chain, count
from typing import Any
from warnings import catch_warnings, simplefilter

import optuna
from optuna.distributions import distribution_to_json
from optuna.exceptions import ExperimentalWarning
from optuna.storages import RDBStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial
from sqlalchemy import MetaData, Table, func, insert, select, update
from sqlalchemy.engine import Connection

from hadagen.errors import StorageError
from hadagen.problem.regimes import REGIMES
from hadagen.tuning_db.store import Store

ATTEMPTS = 20  # to open; more than the tables and indexes that Optuna makes
_KNOWN_SCHEMA = "v3.2.0.a"  # of Optuna 5; another is written by Optuna itself
_TABLES = ("studies", "trials", "trial_params", "trial_values", "trial_system_attributes")


class Mirror(AbstractContextManager["Mirror"]):
    """Optuna's tables in a store. As a context manager it closes its connections at the end.

    Every method raises `StorageError` if the database fails. If the connection to its server is lost, a method tries
    repeats its work, see `hadagen.tuning_db.database`.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._storage = _open(store)
        self._tables = store.patiently(self._known_tables)

    def __exit__(self, *_: object) -> None:
        self._storage.engine.dispose()

    def study(self, name: str) -> optuna.Study:
        """The study of that name, which is made if it is missing."""

        def opened() -> optuna.Study:
            study = optuna.create_study(
                storage=self._storage,
                study_name=name,
                directions=[StudyDirection.MAXIMIZE] * len(REGIMES),
                load_if_exists=True,
            )
            if study.metric_names is None:  # for Optuna's dashboard
                with catch_warnings():
                    simplefilter("ignore", ExperimentalWarning)
                    study.set_metric_names(list(REGIMES))
            return study

        return self._store.patiently(opened)

    def count(self, study: optuna.Study) -> int:
        """The number of trials of a study, over all its runs."""
        return self._store.patiently(lambda: len(study.get_trials(deepcopy=False)))

    def noted(self, study: optuna.Study) -> dict[str, Any]:
        """The values that were noted about a study, by name."""
        return self._store.patiently(lambda: study.user_attrs)

    def note(self, study: optuna.Study, name: str, value: Any) -> None:
        """Note a value about a study."""
        self._store.patiently(lambda: study.set_user_attr(name, value))

    def add(self, results: Iterable[tuple[optuna.Study, FrozenTrial]], *, missing: bool = False) -> None:
        """Add finished trials to their studies; with `missing`, leave out those whose knobs their study has already."""
        by_study: dict[str, tuple[optuna.Study, list[FrozenTrial]]] = {}
        for study, trial in results:
            by_study.setdefault(study.study_name, (study, []))[1].append(trial)
        if not by_study:
            return
        attempts = count(1)

        def attempt() -> None:
            # If the attempt before lost the connection, what it added may be there.
            only_missing = missing or next(attempts) > 1
            if self._tables is None:
                for study, trials in by_study.values():
                    study.add_trials(_missing(study, trials) if only_missing else trials)
                return
            with self._storage.engine.begin() as connection:
                for name in sorted(by_study):  # in one order, so that two runs do not wait for each other
                    number = self._storage.get_study_id_from_name(name)
                    _lock(connection, self._tables, number)
                    study, trials = by_study[name]
                    _add(connection, self._tables, number, _missing(study, trials) if only_missing else trials)

        self._store.patiently(attempt)

    def _known_tables(self) -> dict[str, Table] | None:
        if self._storage.get_current_version() != _KNOWN_SCHEMA:
            return None
        known = MetaData()
        known.reflect(self._storage.engine, only=_TABLES)
        return {name: known.tables[name] for name in _TABLES}


def _missing(study: optuna.Study, trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """The trials whose knobs a study does not have."""
    there = {frozenset(trial.params.items()) for trial in study.get_trials(deepcopy=False)}
    return [trial for trial in trials if frozenset(trial.params.items()) not in there]


def _lock(connection: Connection, tables: dict[str, Table], study: int) -> None:
    """Lock a study, as Optuna does while it counts trials. In SQLite only a write begins a transaction."""
    studies = tables["studies"]
    connection.execute(update(studies).where(studies.c.study_id == study).values(study_name=studies.c.study_name))


def _add(connection: Connection, tables: dict[str, Table], study: int, trials: Sequence[FrozenTrial]) -> None:
    """Add trials to a locked study as Optuna does: numbered from 0 within their study, dates in UTC."""
    if not trials:
        return
    table = tables["trials"]
    # All trials of a study have the same ranges.
    ranges = {name: distribution_to_json(each) for name, each in trials[0].distributions.items()}
    before = connection.scalar(select(func.count()).select_from(table).where(table.c.study_id == study)) or 0
    rows = [
        {
            "number": before + i,
            "study_id": study,
            "state": trial.state.name,
            "datetime_start": _utc(trial.datetime_start),
            "datetime_complete": _utc(trial.datetime_complete),
        }
        for i, trial in enumerate(trials)
    ]
    added = insert(table).returning(table.c.trial_id, sort_by_parameter_order=True)
    told = list(zip(connection.scalars(added, rows).all(), trials, strict=True))
    _insert(connection, tables["trial_params"], chain.from_iterable(_params(*each, ranges) for each in told))
    _insert(connection, tables["trial_values"], chain.from_iterable(_values(*each) for each in told))
    attributes = ((number, item) for number, trial in told for item in trial.system_attrs.items())
    _insert(
        connection,
        tables["trial_system_attributes"],
        ({"trial_id": number, "key": key, "value_json": json.dumps(value)} for number, (key, value) in attributes),
    )


def _params(number: int, trial: FrozenTrial, ranges: Mapping[str, str]) -> list[dict[str, Any]]:
    return [
        {
            "trial_id": number,
            "param_name": name,
            "param_value": trial.distributions[name].to_internal_repr(value),
            "distribution_json": ranges[name],
        }
        for name, value in trial.params.items()
    ]


def _values(number: int, trial: FrozenTrial) -> list[dict[str, Any]]:
    return [
        {"trial_id": number, "objective": i, "value": value, "value_type": "FINITE"}
        for i, value in enumerate(trial.values or ())
    ]


def _insert(connection: Connection, table: Table, rows: Iterable[dict[str, Any]]) -> None:
    if found := list(rows):
        connection.execute(insert(table), found)


def _utc(date: datetime | None) -> datetime | None:
    return date and date.astimezone(timezone.utc).replace(tzinfo=None)


def _open(store: Store) -> RDBStorage:
    # Optuna takes braces in a URL for places to fill in.
    url = store.url.replace("{", "{{").replace("}", "}}")
    failure, attempts = "", 0
    while True:
        attempts += 1
        try:
            return store.alone(lambda: RDBStorage(url, engine_kwargs=dict(store.engine_options)))
        except RuntimeError as error:
            raise StorageError(
                f"{store.place} holds tables of another Optuna than {optuna.__version__}; name another database"
            ) from error
        except StorageError as error:
            # In an SQLite file another process may make these tables at the same time, because Optuna takes no lock.
            # The next attempt finds the tables of that process. So a second failure with the same text has another
            # reason.
            if failure == str(error) or attempts == ATTEMPTS:
                raise
            failure = str(error)
