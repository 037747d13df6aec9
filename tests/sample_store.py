"""Tuning databases to test with: one without trials, open or not, and what is said of a file that is refused.

`place` and `any_store` are of both kinds of database: a test that uses them runs on SQLite and on PostgreSQL.
"""

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest
from postgres import PostgresServer

from hadagen.errors import StorageError
from hadagen.problem.trial import Trial, knobs_key
from hadagen.tuning_db.store import Store


@pytest.fixture(scope="session")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database without trials; copying it is faster than making one."""
    path = tmp_path_factory.mktemp("store") / "empty.db"
    Store.open(path).close()
    return path


@pytest.fixture
def path(tmp_path: Path, empty: Path) -> Path:
    return Path(shutil.copy(empty, tmp_path / "trials.db"))


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with Store.open(path) as store:
        yield store


@pytest.fixture(scope="session")
def empty_on_server(postgres_server: PostgresServer) -> str:
    """The name of a PostgreSQL database without trials, which others are made of."""
    url = postgres_server.new_database()
    Store.open(url).close()
    return url.rpartition("/")[2]


@pytest.fixture(params=["SQLite", "PostgreSQL"])
def place(request: pytest.FixtureRequest) -> Path | str:
    """A database without trials of each kind: a path, or a URL."""
    if request.param == "SQLite":
        return Path(request.getfixturevalue("path"))
    server: PostgresServer = request.getfixturevalue("postgres_server")
    return server.new_database(request.getfixturevalue("empty_on_server"))


@pytest.fixture
def any_store(place: Path | str) -> Iterator[Store]:
    with Store.open(place) as store:
        yield store


def recorded(path: Path, *trials: Trial) -> Path:
    """Records trials in a database, which it makes if there is none; returns its path."""
    with Store.open(path) as store:
        store.record(*trials)
    return path


def refusal(path: Path) -> str:
    """The sentence with which a file is refused, and left as it was."""
    before = path.read_bytes() if path.is_file() else b""
    with pytest.raises(StorageError) as refused:
        Store.open(path)
    assert not path.is_file() or path.read_bytes() == before
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def assert_each_once(store: Store) -> None:
    ours = Counter((trial.problem.key, trial.environment.gpu, knobs_key(trial.knobs)) for trial in store.checked())
    theirs = Counter(
        (*problem_and_gpu(study.study_name), knobs_key(trial.params))
        for study in optuna.study.get_all_study_summaries(store.url)
        for trial in optuna.load_study(study_name=study.study_name, storage=store.url).trials
    )
    assert theirs == ours
    assert set(ours.values()) == {1}


def problem_and_gpu(study: str) -> tuple[str, str]:
    """Of the name that `Study` gives it."""
    problem, _, rest = study.partition(" on ")
    return problem, rest.split(", ")[1]
