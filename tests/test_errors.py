"""Errors cross processes, as where a pool of workers says what failed."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Iterator

import pytest

import hadagen.driver
import hadagen.emulator
import hadagen.tuner  # noqa: F401  so that all classes of errors are there
from hadagen.errors import HadagenError


def kinds(base: type[HadagenError] = HadagenError) -> Iterator[type[HadagenError]]:
    yield base
    for kind in base.__subclasses__():
        yield from kinds(kind)


@pytest.mark.parametrize("kind", dict.fromkeys(kinds()))
def test_an_error_survives_a_process_boundary(kind: type[HadagenError]) -> None:
    named = [name for name in inspect.signature(kind.__init__).parameters if name not in ("self", "args", "kwargs")]
    error = kind(*(f"a {name}" for name in named or ["sentence"]))
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert (str(copy), vars(copy)) == (str(error), vars(error))
