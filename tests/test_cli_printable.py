"""What files and drivers say reaches no terminal raw: neither from a command nor from the library."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from command_line import run
from sample_bundle import write_sample, write_trials
from sample_trials import H100, PROBLEM, make_kernel, make_trial

import hadagen
from hadagen.errors import HadagenError, StorageError, printable
from hadagen.runtime import bundles
from hadagen.tuning_db import bundle_writer

pytestmark = pytest.mark.usefixtures("machine")

EVIL = "\x1b[2Jwiped\x9b31m\r\nforged\u202eline\x07\x00"
SHOWN = r"\x1b[2Jwiped\x9b31m\r\nforged\u202eline\x07\x00"


@pytest.mark.parametrize(
    "arguments",
    [
        ("best", "--arch", "sm90", "--n", "256", "--rows", "32", "--inplace"),
        ("best", "--arch", "sm90", "--n", "512", "--rows", "32", "--device", EVIL),
        ("bundle", "list"),
        ("bundle", "show"),
        ("bundle", "show", "--all"),
        ("bundle", "verify"),
        ("doctor",),
        ("emit", "--n", EVIL),
    ],
    ids=" ".join,
)
def test_commands_show_control_characters_escaped(arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    environment = replace(H100, gpu=EVIL, driver=EVIL)
    trial = make_trial(environment=environment, knobs={"chunks": EVIL}, kernel=make_kernel(nvcc=EVIL), date=EVIL)
    with monkeypatch.context() as unchecked:
        unchecked.setattr(bundle_writer, "Bundle", MagicMock())
        write_trials(bundles.user_directory() / "evil\x1b[2J.db", [trial])
    (bundles.user_directory() / "worse\x1b[2J.db").write_bytes(b"no bundle")
    result = run(*arguments)
    said = result.stdout + result.stderr
    assert all(line.isprintable() for line in said.split("\n")), said
    assert r"\x1b[2J" in said
    assert "\nforged" not in said


def test_errors_and_warnings_of_the_library_show_them_escaped(tmp_path: Path) -> None:
    assert str(HadagenError(f"from {EVIL}")) == f"from {SHOWN}"
    assert printable("µs × café") == "µs × café"
    assert printable("\udcff") == r"\udcff"
    write_sample(bundles.user_directory() / "good.db")
    (bundles.user_directory() / "bad\x1b[2J.db").write_bytes(b"no bundle")
    with pytest.warns(RuntimeWarning, match=r"bad\\x1b\[2J.db is not a hadagen bundle"):
        hadagen.best_config(PROBLEM, 1, arch="sm90")
    with pytest.raises(StorageError) as caught:
        bundles.Bundle.open(tmp_path / EVIL.replace("\x00", ""))
    assert str(caught.value).isprintable()
