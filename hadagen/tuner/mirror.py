"""Optuna's tables in our database, for Optuna's own tools. Our tables are the truth, and these follow them.

Optuna adds a trial with some 40 statements, one for each knob and more. That takes 15 ms, longer than all other work on
a trial. So trials are added many at a time, with one statement for each table.
"""

from __future__ import annotations

import json
from collections import defaultdict
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
        if self._tables is None:
            return self._store.patiently(lambda: len(study.get_trials(deepcopy=False)))
        table = self._tables["trials"]
        query = select(func.count()).select_from(table).where(table.c.study_id == study._study_id)

        def counted() -> int:
            with self._storage.engine.connect() as connection:
                return connection.scalar(query) or 0

        return self._store.patiently(counted)

    def noted(self, study: optuna.Study) -> dict[str, Any]:
        """The values that were noted about a study, by name."""
        return self._store.patiently(lambda: study.user_attrs)

    def note(self, study: optuna.Study, name: str, value: Any) -> None:
        """Note a value about a study."""
        self._store.patiently(lambda: study.set_user_attr(name, value))

    def add(self, results: Iterable[tuple[optuna.Study, FrozenTrial]], *, missing: bool = False) -> None:
        """Add finished trials to their studies; with `missing`, leave out those whose knobs their study has already."""
        by_study: dict[int, list[FrozenTrial]] = defaultdict(list)
        for study, trial in results:
            by_study[study._study_id].append(trial)
        if not by_study:
            return
        attempts = count(1)

        def attempt() -> None:
            # If the attempt before lost the connection, what it added may be there.
            only_missing = missing or next(attempts) > 1
            if self._tables is None:
                for number, trials in by_study.items():
                    there = self._storage.get_all_trials(number, deepcopy=False) if only_missing else []
                    known = [trial.params for trial in there]
                    for trial in trials:
                        if trial.params not in known:
                            self._storage.create_new_trial(number, trial)
                return
            with self._storage.engine.begin() as connection:
                for number in sorted(by_study):  # in one order, so that two runs do not wait for each other
                    _add(connection, self._tables, number, by_study[number], only_missing)

        self._store.patiently(attempt)

    def _known_tables(self) -> dict[str, Table] | None:
        if self._storage.get_current_version() != _KNOWN_SCHEMA:
            return None
        known = MetaData()
        known.reflect(self._storage.engine, only=_TABLES)
        return {name: known.tables[name] for name in _TABLES}


def _add(
    connection: Connection, tables: dict[str, Table], study: int, trials: Sequence[FrozenTrial], missing: bool
) -> None:
    """Add trials to a study as Optuna does: numbered from 0 within their study, dates in UTC."""
    studies, table = tables["studies"], tables["trials"]
    # Locks the study, as Optuna does while it counts. In SQLite only a write begins a transaction.
    connection.execute(update(studies).where(studies.c.study_id == study).values(study_name=studies.c.study_name))
    # All trials of a study have the same ranges.
    ranges = {name: distribution_to_json(each) for name, each in trials[0].distributions.items()}
    if missing:
        there = _knobs(connection, tables, study)
        trials = [
            trial
            for trial in trials
            if {each["param_name"]: each["param_value"] for each in _params(0, trial, ranges)} not in there
        ]
        if not trials:
            return
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


def _knobs(connection: Connection, tables: dict[str, Table], study: int) -> list[dict[str, float]]:
    """The parameters of each trial of a study, as Optuna stores them."""
    params, trials = tables["trial_params"], tables["trials"]
    found: dict[int, dict[str, float]] = defaultdict(dict)
    query = select(params.c.trial_id, params.c.param_name, params.c.param_value).join(trials)
    for number, name, value in connection.execute(query.where(trials.c.study_id == study)):
        found[number][name] = value
    return list(found.values())


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
