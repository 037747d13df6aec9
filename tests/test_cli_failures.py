"""Whatever fails on the command line is one sentence and an exit code, and nothing is lost by it."""

import builtins
import errno
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from command_line import TINY_TUNE, raising, run, sentence, succeed
from fake_device import FakeDevice
from postgres import PASSWORD, PostgresServer
from real_compilers import needs_nvcc
from running import script
from sample_bundle import change, write_sample, write_trials
from sample_trials import H100, PROBLEM, make_kernel, make_trial

import hadagen
from hadagen import measure
from hadagen.cli import options
from hadagen.cli.output import report_failures
from hadagen.compiler import compilers, nvrtc
from hadagen.errors import DeviceError, HadagenError, NoCompilerError, StorageError, printable
from hadagen.runtime.choose import bundles
from hadagen.runtime.choose.bundles import VARIABLE
from hadagen.tuning_db import bundle_writer
from hadagen.tuning_db.bundle import Bundle

pytestmark = pytest.mark.usefixtures("machine")


def test_without_a_gpu_bench_says_so() -> None:
    assert sentence(run("bench"), 1) == "there is no GPU in this test; add one"


def test_of_several_failures_every_one_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DeviceError, match=r"^third$"):
        report_failures(["first", "second", "third"], DeviceError)
    assert capsys.readouterr().err == "hadagen: first\nhadagen: second\n"


BOTH = pytest.mark.parametrize("command", [("bench",), ("bench", "between")], ids=" ".join)


@BOTH
def test_kernels_of_an_older_arch_are_not_timed(
    command: tuple[str, ...], fake_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though calls may run their PTX."""
    newer = replace(FakeDevice.environment, compute_capability="10.0")
    monkeypatch.setattr(measure, "device_environment", lambda index=0: newer)
    monkeypatch.setenv(VARIABLE, str(write_sample(tmp_path / "older.db")))
    said = sentence(run(*command, "--n", "256", "--inplace"), 1)
    assert said == "no bundle has kernels for Test GPU (sm100); to make some: hadagen tune --arch sm100"


@BOTH
def test_a_table_in_the_way_is_noticed_before_anything_is_timed(
    command: tuple[str, ...], fake_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(write_sample(tmp_path / "sample.db")))
    (tmp_path / "notes.csv").write_text("n,time\n8,0.5\n")
    said = sentence(run(*command, "--n", "256", "--inplace", "--csv", tmp_path / "notes.csv"), 1)
    assert "notes.csv is there already and is not a table of hadagen" in said
    assert (FakeDevice.compared, FakeDevice.ranked) == ([], [])
    assert (tmp_path / "notes.csv").read_text() == "n,time\n8,0.5\n"


INTERRUPTED = """
import os, signal, threading, time
from hadagen.cli.main import main
from hadagen.runtime.choose import bundles

def more():
    threading.main_thread().join()  # which waits for this thread then
    for _ in range(5):
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

def interrupted():
    threading.Thread(target=more).start()
    raise KeyboardInterrupt

bundles.known = interrupted
main(["bundle", "list"], prog_name="hadagen")
"""


def test_interrupts_while_threads_end_show_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "\nhadagen: interrupted; start the same command again\n")


def test_without_a_home_directory_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    before = sorted(tmp_path.rglob("*"))
    assert "no home directory is known" in sentence(run(*TINY_TUNE), 1)
    assert succeed("bundle", "list") == "no bundle; make one with: hadagen tune\n"
    assert sorted(tmp_path.rglob("*")) == before


def test_a_device_that_was_asked_for_and_is_not_there_is_not_replaced_by_an_estimate() -> None:
    assert sentence(run(*TINY_TUNE, "--device", "3"), 1) == "there is no GPU in this test; add one"


def test_nothing_to_open(tmp_path: Path) -> None:
    absent = tmp_path / "absent.db"
    for arguments in (("bundle", "list", "--db"), ("bundle", "make", "--db")):
        for place in (str(absent), f"sqlite:///{absent}"):
            assert f"there is no tuning database {place}; run hadagen tune first" in sentence(run(*arguments, place), 1)
    assert "No such file" in sentence(run("bundle", "verify", absent), 1)
    assert "there is no bundle; make one with hadagen tune" in sentence(run("bundle", "show"), 1)
    assert not absent.exists()


@pytest.mark.parametrize(
    "command", ["bundle list --db", "tune --n 2 --db", "bundle make --db", "bundle verify", "bundle show"]
)
def test_a_foreign_file_is_refused_and_left_alone(command: str, tmp_path: Path) -> None:
    foreign = tmp_path / "letter.txt"
    foreign.write_text("Dear Sir or Madam,\n" * 100)
    assert f"{foreign} is not a " in sentence(run(*command.split(), foreign), 1)
    assert foreign.read_text() == "Dear Sir or Madam,\n" * 100


def test_sound_bundles_are_told_of_beside_damaged_ones(sample: Path) -> None:
    succeed("bundle", "verify", sample)
    bad, other = (options.default_bundle("sm90").with_name(name) for name in ("bad.db", "good.db"))
    bad.parent.mkdir(parents=True)
    for path in (bad, other):
        shutil.copy(sample, path)
    change(bad, "UPDATE entries SET hot_us = hot_us + 1")
    for command in (["bundle", "list"], ["bundle", "list", "--json"], ["bundle", "verify"]):
        result = run(*command)
        assert result.exit_code == 1
        assert other.name in result.stdout
        assert "bad.db is damaged" in result.stderr.splitlines()[-1]


def test_a_read_only_database_is_refused_before_the_search(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hadagen.tuning_db.database._writable", lambda path: False)
    result = run(*TINY_TUNE, "--db", database)
    assert (
        sentence(result, 1) == f"{database} is read-only; make it and its directory writable, or name another database"
    )


def test_missing_compilers_are_named_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HADAGEN_NVRTC", raising=False)
    monkeypatch.setattr(nvrtc, "_candidates", lambda: iter(()))
    monkeypatch.setattr(compilers, "find_tool", raising(NoCompilerError("nvcc is not here; install it")))
    for arguments in (TINY_TUNE, ("emit", "--n", "2", "--ptx")):
        said = sentence(run(*arguments), 1)
        assert said.startswith("NVRTC was not found")
        assert said.endswith("pip install nvidia-cuda-nvrtc")
        assert sentence(run(*arguments, "--compiler", "nvcc"), 1) == "nvcc is not here; install it"
    checks = {check["name"]: check["state"] for check in json.loads(run("doctor", "--json").stdout)["checks"]}
    assert (checks["nvrtc"], checks["nvcc"]) == ("missing", "missing")


@needs_nvcc
def test_nvcc_stands_in_for_nvrtc_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HADAGEN_NVRTC", raising=False)
    monkeypatch.setattr(nvrtc, "_candidates", lambda: iter(()))
    result = run("emit", "--n", "2", "--ptx")
    assert ".target sm_90" in result.stdout
    assert re.match(r"nvcc [\d.]+ compiles, because NVRTC was not found", result.stderr)


def test_an_nvcc_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = script(tmp_path / "nvcc", "echo out of order", "exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    said = sentence(run("emit", "--n", "2", "--ptx", "--compiler", "nvcc"), 1)
    assert str(fake) in said
    assert "out of order" in said
    checks = {check["name"]: check for check in json.loads(run("doctor", "--json").stdout)["checks"]}
    assert checks["nvcc"]["state"] == "broken"


@pytest.mark.parametrize("buffering", [[], ["-u"]], ids=["buffered", "unbuffered"])
def test_a_full_disk_is_a_sentence(buffering: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    command = [sys.executable, *buffering, "-m", "hadagen.cli", "emit", "--space", "--n", "2"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("hadagen: No space left on device; make room")
    assert len(done.stderr.splitlines()) == 1


# A command that opens a file, prints, and starts a process that prints.
STREAMS = """
import subprocess, sys
import click
from hadagen.cli.main import main
from hadagen.cli.output import say

@main.command()
@click.argument("path")
def prints(path):
    with open(path, "w") as file:
        say("said")
        say("said", err=True)
        subprocess.run([sys.executable, "-c", "print(1); import sys; print(1, file=sys.stderr); sys.stdin.read()"])
        file.write("written")

main(["prints", sys.argv[1]], prog_name="hadagen")
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_commands_run_without_standard_streams(closed: str, tmp_path: Path) -> None:
    """As services are started. Files that a command opens do not become its streams."""
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", STREAMS, tmp_path / "file"]
    done = subprocess.run(shell, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    out, err = ("said\n1\n" * (stream not in closed.split()) for stream in (">&-", "2>&-"))
    assert (done.returncode, done.stdout, done.stderr) == (0, out, err)
    assert (tmp_path / "file").read_text() == "written"


@pytest.mark.parametrize("debug", ["", "1"])
def test_a_failure_without_room_for_its_sentence_is_an_exit_code(debug: str) -> None:
    command = [sys.executable, "-m", "hadagen.cli", "best", "--n", "3"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, env=os.environ | {"HADAGEN_DEBUG": debug}, stderr=full, check=False)
    assert done.returncode == 2


# What a command raises → what is said, and the exit code.
RAISED: list[tuple[Exception, str, int]] = [
    (OSError(errno.ENOSPC, "No space left on device", "/data/x"), "/data/x: No space left on device; make room", 1),
    (OSError(errno.EDQUOT, "Disk quota exceeded", "/data/x"), "/data/x: Disk quota exceeded; make room", 1),
    (OSError(errno.EROFS, "Read-only file system", "/data/x"), "/data/x: Read-only file system; name a place", 1),
    (OSError(errno.EIO, "Input/output error"), "Input/output error; check the path", 1),
    (
        ModuleNotFoundError(name="optuna"),
        "optuna is not installed; install it with: pip install '.[tune]' in a checkout of hadagen",
        1,
    ),
    (ModuleNotFoundError(name="torch.cuda"), "torch is not installed; install it with: pip install torch", 1),
    (DeviceError("the GPU fell off the bus; restart it"), "the GPU fell off the bus; restart it", 1),
    (ZeroDivisionError("division by\nzero"), "ZeroDivisionError: division by zero; this is a bug of hadagen", 1),
]


@pytest.mark.parametrize(("raised", "said", "exit_code"), RAISED, ids=lambda value: type(value).__name__)
def test_whatever_is_raised_becomes_a_sentence(
    raised: Exception, said: str, exit_code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "default_db", raising(raised))
    assert said in sentence(run("bundle", "list"), exit_code)


def test_the_traceback_is_shown_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HADAGEN_DEBUG", "1")
    monkeypatch.setattr(options, "default_db", raising(ZeroDivisionError()))
    assert "Traceback" in run("bundle", "list").stderr


@pytest.mark.parametrize("encoding", ["latin-1", "koi8-r"])
def test_what_an_encoding_lacks_is_replaced(encoding: str) -> None:
    """Such as ‖ in a help text."""
    command = [sys.executable, "-m", "hadagen.cli", "bench", "kernels", "--help"]
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
    done = subprocess.run(command, capture_output=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"ref? / ?ref? against float64" in done.stdout


# ---- a PostgreSQL server ---------------------------------------------------------------------------------------------
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
        (
            "postgresql://me:s3cret@host:port/x",
            "the URL of the database cannot be read; write a URL like postgresql://",
        ),
        ("postgresql://me:s3cret", "the URL of the database cannot be read; write a URL like postgresql://"),
        ("://me:s3cret@host/x", "the URL of the database cannot be read; write a URL like postgresql://"),
        *((url, "the database is neither a file nor a URL; write a URL like postgresql://") for url in MISTYPED),
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
        "pip install '.[fleet]' in a checkout of hadagen"
    )


# ---- names that a terminal would obey --------------------------------------------------------------------------------
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
