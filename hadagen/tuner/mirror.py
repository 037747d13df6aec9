"""Optuna's tables in our database, for Optuna's own tools. Our tables are the truth, and these follow them.

Optuna adds a trial with some 40 statements, one for each knob and more. That takes 15 ms, longer than all other work on
a trial. So trials are added many at a time, with one statement for each table.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from itertools import chain
from typing import Any

import optuna
from optuna.distributions import distribution_to_json
from optuna.storages import RDBStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial
from sqlalchemy import MetaData, Table, func, insert, select
from sqlalchemy.engine import Connection

from hadagen.errors import StorageError
from hadagen.regimes import REGIMES
from hadagen.tuning_db.store import Store

ATTEMPTS = 20  # to open; more than the tables and indexes that Optuna makes
_KNOWN_SCHEMA = "v3.2.0.a"  # of Optuna 5; another is written by Optuna itself
_TABLES = ("studies", "trials", "trial_params", "trial_values", "trial_system_attributes")


class Mirror:
    """Optuna's tables in a store. As a context manager it closes its connections at the end.

    Every method raises `StorageError` if the database fails.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._storage = _open(store)
        self._tables: dict[str, Table] | None = None
        if self._storage.get_current_version() == _KNOWN_SCHEMA:
            known = MetaData()
            known.reflect(self._storage.engine, only=_TABLES)
            self._tables = {name: known.tables[name] for name in _TABLES}

    def __enter__(self) -> Mirror:
        return self

    def __exit__(self, *_: object) -> None:
        self._storage.engine.dispose()

    def study(self, name: str) -> optuna.Study:
        """The study of that name, which is made if it is missing."""
        with self._store.lent():
            directions = [StudyDirection.MAXIMIZE] * len(REGIMES)
            return optuna.create_study(
                storage=self._storage, study_name=name, directions=directions, load_if_exists=True
            )

    def add(self, results: Iterable[tuple[optuna.Study, FrozenTrial]]) -> None:
        """Add finished trials to their studies."""
        by_study: dict[int, list[FrozenTrial]] = defaultdict(list)
        for study, trial in results:
            by_study[study._study_id].append(trial)
        if not by_study:
            return
        with self._store.lent():
            if self._tables is None:
                for number, trials in by_study.items():
                    for trial in trials:
                        self._storage.create_new_trial(number, trial)
                return
            with self._storage.engine.begin() as connection:
                for number in sorted(by_study):  # in one order, so that two runs do not wait for each other
                    _add(connection, self._tables, number, by_study[number])


def _add(connection: Connection, tables: dict[str, Table], study: int, trials: Sequence[FrozenTrial]) -> None:
    """Add trials to a study as Optuna does: numbered from 0 within their study, dates in UTC."""
    studies, table = tables["studies"], tables["trials"]
    # Optuna locks the study too while it counts.
    connection.execute(select(studies.c.study_id).where(studies.c.study_id == study).with_for_update())
    count = connection.scalar(select(func.count()).select_from(table).where(table.c.study_id == study)) or 0
    rows = [
        {
            "number": count + i,
            "study_id": study,
            "state": trial.state.name,
            "datetime_start": _utc(trial.datetime_start),
            "datetime_complete": _utc(trial.datetime_complete),
        }
        for i, trial in enumerate(trials)
    ]
    added = insert(table).returning(table.c.trial_id, sort_by_parameter_order=True)
    numbers = connection.scalars(added, rows).all()
    told = list(zip(numbers, trials, strict=True))
    _insert(connection, tables["trial_params"], chain.from_iterable(_params(*each) for each in told))
    _insert(connection, tables["trial_values"], chain.from_iterable(_values(*each) for each in told))
    attributes = ((number, item) for number, trial in told for item in trial.system_attrs.items())
    _insert(
        connection,
        tables["trial_system_attributes"],
        ({"trial_id": number, "key": key, "value_json": json.dumps(value)} for number, (key, value) in attributes),
    )


def _params(number: int, trial: FrozenTrial) -> list[dict[str, Any]]:
    return [
        {
            "trial_id": number,
            "param_name": name,
            "param_value": trial.distributions[name].to_internal_repr(value),
            "distribution_json": distribution_to_json(trial.distributions[name]),
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
            if failure == str(error) or attempts == ATTEMPTS:
                raise
            failure = str(error)
