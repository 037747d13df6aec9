"""Tuning databases to test with: one without trials, open or not, and what is said of a file that is refused."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from hadagen.errors import StorageError
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


def refusal(path: Path) -> str:
    """The sentence with which a file is refused, and left as it was."""
    before = path.read_bytes() if path.is_file() else b""
    with pytest.raises(StorageError) as refused:
        Store.open(path)
    assert not path.is_file() or path.read_bytes() == before
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)
    return str(refused.value)
