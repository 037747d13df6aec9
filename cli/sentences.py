"""Errors as people read them: one sentence and an exit code."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import click

from hadagen.errors import HadagenError, install, shortened, value_without_passwords
from hadagen.files.atomic_file import FORBIDDEN, FULL

# What commands import beyond a bare install; the extra `tune` brings all of it.
TUNE_PACKAGES = ("alembic", "jinja2", "numpy", "optuna", "pydantic", "rich", "sqlalchemy", "yaml")
# The extras that bring the packages of single commands.
EXTRA_OF = {"bokeh": "report", "distributed": "fleet", "psycopg": "fleet"}


def explain(error: Exception | KeyboardInterrupt) -> tuple[str, int]:
    """The sentence and the exit code of an error."""
    if isinstance(error, HadagenError):
        return str(error), error.exit_code
    if isinstance(error, click.UsageError):
        command = error.ctx.command_path if error.ctx else "hadagen"
        return f"{_short(error.format_message()).rstrip('.')}; see '{command} --help'", 2
    if isinstance(error, click.ClickException):
        return _short(error.format_message()), error.exit_code
    if isinstance(error, (click.Abort, KeyboardInterrupt)):
        return f"interrupted; {str(error) or 'start the same command again'}", 1
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        extra = "tune" if package in TUNE_PACKAGES else EXTRA_OF.get(package)
        how = install(extra) if extra else f"pip install {package}"
        return f"the Python package {package} is not installed; install it with: {how}", 1
    if isinstance(error, OSError):
        return _of_system(error), 1
    bug = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return f"{bug}; this is a bug of hadagen, please report it with what HADAGEN_DEBUG=1 shows", 1


def _short(said: str) -> str:
    """The message of click, with long quoted values cut off."""
    said = re.sub("'([^']*)'", lambda found: f"'{value_without_passwords(found[1])}'", said)
    return shortened(re.sub(r"\S{100,}", lambda found: shortened(found[0]), said), 400)


@contextmanager
def keeping(said: str = "finished results are kept, and the same command continues") -> Iterator[None]:
    """Use around code that stores each result at once: says so at Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # one more would take the place of what is said
        raise click.Abort(said) from None


def _of_system(error: OSError) -> str:
    what = error.strerror or str(error)
    where = f"{error.filename}: " if error.filename else ""
    if error.errno in FULL:
        return f"{where}{what}; make room and run the same command again, nothing that was stored is lost"
    if error.errno in FORBIDDEN:
        return f"{where}{what}; name a place that you may write to"
    return f"{where}{what}; check the path and run the same command again"
