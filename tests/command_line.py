"""Running `hadagen` in the process of a test, as on a machine that has neither a GPU nor anything of the user's."""

import inspect
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from sample_bundle import hide_bundles, write_sample
from sample_store import recorded
from sample_trials import make_trial, times

from hadagen import measure
from hadagen.cli.main import main
from hadagen.errors import DeviceError
from hadagen.problem.trial import Environment, Outcome
from hadagen.runtime.choose.bundles import VARIABLE

TINY = ("--n", "2", "--dtype", "float16", "--numerics", "accurate", "--contiguous", "--trials", "1")
TINY_TUNE = ("tune", "--arch", "sm90", *TINY)
SMALL = ("--n", "4", "--dtype", "float16", "--numerics", "fast")
SMALL_TUNE = ("tune", *SMALL, "--contiguous", "--trials", "3", "--json")
# click before 8.2 mixes stderr into stdout unless told not to.
_APART: dict[str, Any] = {"mix_stderr": False} if "mix_stderr" in inspect.signature(CliRunner).parameters else {}
BEST = ("best", "--arch", "sm90", "--dtype", "float16", "--rows", "8", "--n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides GPUs and bundles."""

    def no_device(index: int = 0) -> Environment:
        raise DeviceError("there is no GPU in this test; add one")

    hide_bundles(tmp_path, monkeypatch)
    monkeypatch.setattr(measure, "device_environment", no_device)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.fixture
def sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle of one winner, n = 256 on an H100, in use."""
    path = write_sample(tmp_path / "sample.db")
    monkeypatch.setenv(VARIABLE, str(path))
    return path


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """A tuning database of one winner and one failure."""
    won = make_trial(1, timings=times({1 << 13: 2.0, 1 << 23: 9.0}))
    return recorded(tmp_path / "trials.db", won, make_trial(2, outcome=Outcome.WRONG_ANSWER, timings=()))


def run(*arguments: str | Path, program: click.Command = main) -> Result:
    interrupts = signal.getsignal(signal.SIGINT)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("default", module="hadagen")  # commands print them
            return CliRunner(**_APART).invoke(program, [str(argument) for argument in arguments], prog_name="hadagen")
    finally:
        signal.signal(signal.SIGINT, interrupts)  # which are ignored at the end of a command that was interrupted


def succeed(*arguments: str | Path, program: click.Command = main) -> str:
    result = run(*arguments, program=program)
    assert result.exit_code == 0, result.output
    return result.stdout


def unfolded(text: str) -> str:
    """What was printed, as one line of words."""
    return " ".join(text.split())


def sentence(result: Result, exit_code: int) -> str:
    """What was said on stderr; nothing else may have been."""
    assert result.exit_code == exit_code, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("hadagen: ")
    return line.removeprefix("hadagen: ")


def raising(error: BaseException) -> Callable[..., Any]:
    def function(*arguments: object) -> Any:
        raise error

    return function
