"""`hadagen`: the command line. Every expected failure becomes one sentence on stderr and an exit code.

Exit codes: 0 done, 1 failed, 2 wrong usage. `HADAGEN_DEBUG=1` shows the traceback before the sentence.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import traceback
import warnings
from contextlib import suppress
from threading import current_thread, main_thread
from typing import Any, NoReturn

import click

from hadagen.cli.bench import bench
from hadagen.cli.best import best
from hadagen.cli.bundle import bundle
from hadagen.cli.compile import compile_
from hadagen.cli.doctor import doctor
from hadagen.cli.emit import emit
from hadagen.cli.groups import Group
from hadagen.cli.models import evaluate, quantize
from hadagen.cli.output import say
from hadagen.cli.report import report
from hadagen.cli.sentences import explain
from hadagen.cli.tune import tune
from hadagen.errors import UsageError

# Commands of earlier versions, and what does the same now.
MOVED = {
    "refine": "hadagen tune --trials 0",
    "list": "hadagen bundle list",
    "space": "hadagen emit --space",
    "between": "hadagen bench between",
    "calls": "hadagen bench calls",
    "dev": "python ci/search.py in a checkout",
    "record": "python ci/search.py record in a checkout",
    "replay": "python ci/search.py replay in a checkout",
}


class Sentences(Group):
    """Commands that never show a traceback."""

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        kwargs["standalone_mode"] = False
        _open_missing_streams()
        if current_thread() is main_thread():
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # or compilers would be left behind
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")  # not every encoding has all that is written
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _show_warning
                warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # PyTorch, where NumPy is not needed
                status = super().main(*args, **kwargs)
        except (Exception, KeyboardInterrupt) as error:
            if isinstance(error, (click.Abort, KeyboardInterrupt)):
                # One more would end the wait for threads with a traceback, and they end soon.
                for number in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(number, signal.SIG_IGN)
            sentence, status = explain(error)
            with suppress(OSError):  # of a full device, which may be stderr itself
                if os.environ.get("HADAGEN_DEBUG"):
                    traceback.print_exc()
                say(f"hadagen: {sentence}", err=True)
        _flush()
        sys.exit(status)


class Commands(Sentences):
    """All commands of hadagen. A command that was moved says its new name."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] in MOVED and not ctx.resilient_parsing:  # as shells do, to complete a command
            raise UsageError(f"hadagen {args[0]} has moved; use {MOVED[args[0]]}")
        return super().resolve_command(ctx, args)


def _open_missing_streams() -> None:
    """Let closed standard streams lead nowhere. Else the next file that is opened would become one of them, and
    processes that this one starts would write to it."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w" if number else "r"))  # noqa: SIM115


def _flush() -> None:
    """Python flushes once more when it ends, and would print a traceback or change the exit code if this fails."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    say(f"hadagen: warning: {' '.join(str(message).split())}", err=True)


@click.group(
    cls=Commands,
    commands=[tune, best, bench, bundle, compile_, report, emit, quantize, evaluate, doctor],
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
@click.version_option(package_name="hadagen", message="%(prog)s %(version)s")
def main() -> None:
    """Generate, verify, time, store and ship GPU kernels for rotations and quantizers.

    hadagen doctor says what works on this machine. hadagen tune searches the fastest kernels for its GPU, and calls use
    them from then on.
    """
