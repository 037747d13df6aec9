"""The GPU of this machine, for commands that measure on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from hadagen.cli import options
from hadagen.errors import DeviceError

if TYPE_CHECKING:
    from hadagen.measure import Answer, DeviceRunner
    from hadagen.problem import Problem
    from hadagen.trial import Environment


def refusal(problem: Problem, digest: str, answer: Answer) -> str:
    """A sentence on a kernel that verification refused."""
    return f"kernel {digest[:12]} for {problem.name} ended as {answer.outcome.value}: {answer.detail}; tune again"


def report_failures(failures: Sequence[str]) -> None:
    """Says on stderr what could not be timed, and raises `DeviceError` for the last of it, if there is any."""
    for failure in failures[:-1]:
        click.echo(f"hadagen: {failure}", err=True)
    if failures:
        raise DeviceError(failures[-1])


@contextmanager
def measuring(environment: Environment, index: int) -> Iterator[DeviceRunner]:
    """A runner on the CUDA device of that index, which is what `environment` says, with the copy kernels built for it.

    Raises `ToolchainError` where they cannot be, and `UsageError` where its arch is not known.
    """
    from hadagen.arch import load_arch
    from hadagen.measure import DeviceRunner, copy_sources
    from hadagen.toolchain import BuildFailure, Toolchain

    sources = [(source, source.launch) for source in copy_sources()]
    built = Toolchain.find().build(sources, load_arch(options.arch_of(environment)))
    with DeviceRunner(index, [kernel for kernel in built if not isinstance(kernel, BuildFailure)]) as runner:
        yield runner
