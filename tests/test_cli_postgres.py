"""`hadagen` with a PostgreSQL server: a tune, a bundle, and what is said if the server cannot be used."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
from command_line import TINY_TUNE, run, sentence, succeed
from postgres import PASSWORD, PostgresServer

from hadagen.tuning_db.bundle import Bundle

pytestmark = pytest.mark.usefixtures("machine")


def test_a_tune_and_its_bundle(postgres: str, postgres_server: PostgresServer, tmp_path: Path) -> None:
    made = tmp_path / "sm90.db"
    name = postgres.rpartition("/")[2]
    place = f"postgresql+psycopg://hadagen:***@127.0.0.1:{postgres_server.port}/{name}"
    tuned = run(*TINY_TUNE, "--json", "--db", postgres.replace("+psycopg", ""))
    assert tuned.exit_code == 0, tuned.output
    assert f"every trial is kept in {place}" in tuned.stderr
    assert json.loads(tuned.stdout)["database"] == place
    again = run(*TINY_TUNE, "--json", "--db", postgres)
    assert json.loads(again.stdout)["trials_before"] == 1
    bundled = run("bundle", "make", "--arch", "sm90", "--db", postgres, made)
    listed = run("bundle", "list", "--json", "--db", postgres)
    assert (bundled.exit_code, listed.exit_code) == (0, 0), bundled.output + listed.output
    assert len(Bundle.open(made).problems()) == 1
    assert place in listed.stdout
    said = "".join(done.stdout + done.stderr for done in (tuned, again, bundled, listed))
    assert PASSWORD not in said
    assert postgres.split(":")[2].partition("@")[0] not in said  # as it is written in the URL


@pytest.mark.parametrize("command", [TINY_TUNE, ("bundle", "make", "--arch", "sm90"), ("bundle", "list")])
def test_a_server_that_is_not_there_is_one_sentence(command: tuple[str, ...]) -> None:
    said = sentence(run(*command, "--db", "postgresql://me:s3cret@127.0.0.1:1/trials"), 1)
    assert said.startswith("no server answers at postgresql+psycopg://me:***@127.0.0.1:1/trials (Connection refused); ")


def test_a_user_who_may_only_read_cannot_tune(postgres_server: PostgresServer, postgres: str) -> None:
    succeed(*TINY_TUNE, "--db", postgres)
    name = postgres.rpartition("/")[2]
    postgres_server.execute("CREATE ROLE reader LOGIN PASSWORD 's3cret'")
    postgres_server.execute("GRANT SELECT ON ALL TABLES IN SCHEMA public TO reader", database=name)
    reader = postgres_server.url(name, "reader", "s3cret")
    said = sentence(run(*TINY_TUNE, "--db", reader), 1)
    assert "is read-only for its user; have INSERT, UPDATE and DELETE on its tables granted, or name another" in said
    assert "s3cret" not in said


MISTYPED = (
    "postgresql:/me:s3cret@host/x",
    "postgresql:me:s3cret@host/x",
    "postgresql//me:s3cret@host/x",
    "postgresql;//me:s3cret@host/x",
    "Postgres+psycopg:/me:s3cret@host/x",
    " postgresql:/me:s3cret@host/x",
    "me:s3cret@host/x",
    "me:s3c/ret@host/x",
    "//me:s3cret@host/x",
    "host=here password=s3cret dbname=x",
)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("postgresql://me:s3cret@host:port/x", "the URL of the database cannot be read; write such as postgresql://"),
        ("postgresql://me:s3cret", "the URL of the database cannot be read; write such as postgresql://"),
        ("://me:s3cret@host/x", "the URL of the database cannot be read; write such as postgresql://"),
        *((url, "the database is neither a file nor a URL; write such as postgresql://") for url in MISTYPED),
        ("postgresql://me:s3cr@et@host/x", "the URL of the database has two @; write %40"),
        ("postgresql://me:s3c@ret/y@host/x", "the URL of the database has two @; write %40"),
        ("postgresql+psycopg2://me:s3cret@host/x", "psycopg2://me:***@host/x names another driver than psycopg; "),
        ("postgresql+foo://me:s3cret@host/x", "names another driver than psycopg; name a file or a postgresql:// URL"),
        ("mysql://me:s3cret@host/x", "database mysql is not supported; name a file or a postgresql:// URL"),
    ],
)
def test_a_url_that_cannot_be_shows_no_password(
    url: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for command in (("bundle", "list"), TINY_TUNE):
        found = sentence(run(*command, "--db", url), 2)
        assert said in found
        assert not any(secret in found for secret in ("s3c", "et@", "ret"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["./me:s3cret@host.db", "sub/a:b@c.db", "a:b.db", "postgres/tune.db", "mysql.db"])
def test_a_file_may_have_almost_any_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert f"there is no tuning database {name}; " in sentence(run("bundle", "list", "--db", name), 1)


def test_messages_show_only_those_options_of_a_url_that_say_where_the_server_is() -> None:
    for option in ("password", "passwd", "pwd", "sslpassword"):
        url = f"postgresql://me@127.0.0.1:1/x?{option}=s3cret&host=127.0.0.1&connect_timeout=1"
        assert "s3cret" not in sentence(run("bundle", "list", "--db", url), 1)


def test_a_missing_driver_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_psycopg(name: str, *arguments: Any, **known: Any) -> Any:
        if name == "psycopg":
            raise ModuleNotFoundError("No module named 'psycopg'", name=name)
        return real(name, *arguments, **known)

    monkeypatch.setattr(builtins, "__import__", without_psycopg)
    said = sentence(run("bundle", "list", "--db", "postgresql://me:s3cret@host/x"), 1)
    assert said == (
        "postgresql+psycopg://me:***@host/x needs the Python package psycopg, which is missing; "
        "pip install 'hadagen[fleet]'"
    )
