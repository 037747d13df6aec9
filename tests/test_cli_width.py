"""Output that fits a terminal of 80 columns."""

import os
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import Result
from command_line import BEST, SMALL, TINY_TUNE, run, succeed
from sample_bundle import write_trials
from sample_trials import make_trial
from signing_keys import make_key

from hadagen.cli.main import main
from hadagen.cli.output import folded, print_fields, print_table, say
from hadagen.problem.trial import Environment, Provenance
from hadagen.runtime.choose.bundles import VARIABLE
from hadagen.tuning_db.bundle import shipped

pytestmark = pytest.mark.usefixtures("machine")

MOST = 80


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 80 columns, after the fixture `machine`."""
    monkeypatch.setenv("COLUMNS", str(MOST))


def too_long(text: str) -> list[str]:
    """The lines of more than 80 columns. A path, a URL or a key may be longer, alone on its line."""
    return [line for line in text.splitlines() if len(line) > MOST and len(line.split()) > 1]


def commands(group: click.Group = main, *names: str) -> Iterator[tuple[str, ...]]:
    yield names
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, *names, name)
        else:
            yield *names, name


@pytest.mark.parametrize("command", list(commands()), ids=" ".join)
def test_every_help_fits(command: tuple[str, ...], terminal: None) -> None:
    assert too_long(succeed(*command, "--help")) == []


# What needs neither a GPU nor arguments that a test has to make. Errors fit too.
PLAIN = (
    (),
    ("--version",),
    ("bench",),
    ("bench", "between"),
    ("bench", "calls"),
    ("best",),
    ("best", "--n", "4096", "--rows", "8"),
    (*BEST, "4096"),
    (*BEST, "4096", "--knobs"),
    (*BEST, "98"),
    (*BEST, "128", "--to", "mxfp4", "--columns", "4096", "--knobs", "--device", "NVIDIA H200, 450 W"),
    ("best", "--arch", "sm100", "--n", "28672", "--rows", "8", "--knobs"),
    ("best", "--arch", "sm90", "--problem", "n4096-float16-nonsense", "--rows", "8"),
    ("best", "--arch", "sm70", "--n", "256", "--rows", "4"),
    ("bundle", "export", "sm75", "/nowhere/winners.csv"),
    ("bundle", "list"),
    ("bundle", "list", "--all"),
    ("bundle", "list", "--db", "postgresql://me:s3cret@host.example/a_database_with_a_long_name"),
    ("bundle", "show", "sm100", "sm75"),
    ("bundle", "show", "nothing"),
    ("bundle", "verify", "sm75"),
    ("compile", "--arch", "sm90", "--n", "4096"),
    ("doctor",),
    ("emit", "--arch", "sm90", "--n", "4096", "--space"),
    ("emit", "--arch", "sm75", "--n", "65536", "--space"),
    ("emit", "--arch", "sm90", "--n", "4096", "--knobs", "warps=3"),
    ("nonsense",),
    ("refine",),
    ("report", "nothing"),
    ("tune", "--device", "3"),
    ("tune", "--trials", "-1"),
)


@pytest.mark.parametrize("arguments", PLAIN, ids=" ".join)
def test_every_line_fits(arguments: tuple[str, ...], terminal: None, monkeypatch: pytest.MonkeyPatch) -> None:
    # The large bundle only where its winners are shown; `test_bundles_fit_a_pipe_too` lists it.
    archs = ("sm90", "sm100") if arguments[:1] in (("best",), ("compile",)) else ("sm75", "sm100")
    monkeypatch.setenv(VARIABLE, os.pathsep.join(str(shipped()[arch]) for arch in archs))
    fits(run(*arguments))


def fits(result: Result) -> None:
    assert result.stdout + result.stderr
    assert "bug of hadagen" not in result.stderr
    assert too_long(result.stdout) == too_long(result.stderr) == []


def test_every_line_about_files_fits(
    sample: Path, database: Path, terminal: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their paths here are longer than most."""
    monkeypatch.chdir(tmp_path)
    private, public = make_key(tmp_path)
    estimate = make_trial(environment=Environment(), provenance=Provenance.ESTIMATED)
    other = write_trials(tmp_path / "sm90-with-a-name-that-is-long-for-a-bundle-of-one-winner.db", [estimate])
    for arguments in (
        ("bundle", "make", "--db", database),
        ("bundle", "estimate", "--arch", "sm80", sample, tmp_path / "sm80.db"),
        ("bundle", "sign", sample, other, "--key", private),
        ("bundle", "list"),
        ("bundle", "list", "--all", "--db", database),
        ("bundle", "show", sample, other),
        ("bundle", "show", "--all", sample, other),
        ("bundle", "verify"),
        ("bundle", "verify", "--all", "--key", public),
        ("bundle", "merge", sample, other, tmp_path / "both.db"),
        ("bundle", "merge", sample, other, other, sample, tmp_path / "both.db"),
        ("bundle", "export", sample, tmp_path / "winners.csv"),
        ("bundle", "export", sample, "--gpu", "NVIDIA H200", tmp_path / "winners.csv"),
        ("bundle", "assemble", sample, tmp_path / "assembled.db"),
        ("report", database, "-o", tmp_path / "page.html"),
        ("report", other, "-o", tmp_path / "page.html"),
        ("doctor",),
    ):
        fits(run(*arguments))


def test_a_tune_fits(terminal: None, tmp_path: Path) -> None:
    result = run(*TINY_TUNE, "--db", tmp_path / "trials.db")
    assert result.exit_code == 0
    fits(result)


def test_what_a_gpu_measures_fits(fake_gpu: None, terminal: None, tmp_path: Path) -> None:
    kinds = "--n", "2,4", "--numerics", "fast", "--inplace", "--out-of-place"
    for arguments in (
        ("tune", *SMALL, "--contiguous", "--trials", "3"),
        ("bench", *kinds),
        ("bench", *kinds, "--hot", "--cold"),
        ("bench", "between", *kinds, "--counts", "5"),
    ):
        fits(run(*arguments))


@pytest.mark.parametrize("arguments", [("list",), ("show", "sm90"), ("verify", "sm75")], ids=" ".join)
def test_bundles_fit_a_pipe_too(arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(shipped()["sm90"]))
    fits(run("bundle", *arguments))


# ---- text ------------------------------------------------------------------------------------------------------------
LONG = "every trial is kept in /var/lib/hadagen/tuning.db, and the same command continues where it was interrupted"


def test_a_sentence_is_folded_on_a_terminal_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    say(LONG)
    say(LONG, err=True)
    assert capsys.readouterr() == (f"{LONG}\n", f"{LONG}\n")
    monkeypatch.setenv("COLUMNS", "60")
    say(LONG)
    assert capsys.readouterr().out.splitlines() == folded(LONG, 60)
    monkeypatch.setenv("COLUMNS", "200")
    say(LONG)
    assert capsys.readouterr().out == f"{LONG}\n"


def test_a_path_that_does_not_fit_stands_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    print_fields([("cache", f"/{'a' * 36}, 2 MB"), ("", "used"), ("nvrtc", f"/{'b' * 50}")])
    lines = ["cache", f"  /{'a' * 36},", "       2 MB", "       used", "nvrtc", f"/{'b' * 50}"]
    assert capsys.readouterr().out.splitlines() == lines


def test_a_table_wraps_its_longest_texts_and_then_its_rows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    print_table(["n", "why"], [(8, "more shared memory than the GPU has for a block"), (16, "no")])
    assert capsys.readouterr().out.splitlines() == [
        " n  why",
        " 8  more shared memory than the GPU has",
        "    for a block",
        "16  no",
    ]
    print_table(["n", "digest", "kernels"], [(8, "d" * 30, 2), (16, "e" * 30, 12)])
    assert capsys.readouterr().out.splitlines() == [
        " n  digest",
        "    kernels",
        f" 8  {'d' * 30}",
        "          2",
        f"16  {'e' * 30}",
        "         12",
    ]
