"""The last lines of a run of all tests: what ran, what did not for lack of a GPU, and what comes next."""

from collections.abc import Iterator
from typing import Any

import pytest

from hadagen.compiler.emulator import HostModule

NEEDS_GPU_PROPERTY = "needs a GPU"  # of tests: a report's keywords have names and parameters of tests too


class SumUp:
    """A plugin, also of each of xdist's workers, which count for the process that prints."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.emulated: set[str] = set()  # the entries of kernels
        run = HostModule.run

        def noted(module: HostModule, entry: str, *arguments: Any, **options: Any) -> Any:
            self.emulated.add(entry)
            return run(module, entry, *arguments, **options)

        HostModule.run = noted  # type: ignore[method-assign]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.emulated.update(getattr(node, "workeroutput", {}).get("emulated", ()))

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # so that it prints after all others
    def pytest_sessionfinish(self, exitstatus: int) -> Iterator[None]:
        is_worker = hasattr(self.config, "workeroutput")
        if is_worker:
            self.config.workeroutput["emulated"] = sorted(self.emulated)
        yield
        if is_worker:
            return
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        for line in lines(reporter.stats, exitstatus, len(self.emulated), self.config.getoption("--next")):
            reporter.write_line(line)


def lines(stats: dict[str, list[Any]], exitstatus: int, emulated: int, following: str) -> Iterator[str]:
    """stats: the reports of tests by outcome."""
    if emulated:
        yield f"Kernels that ran on the CPU, in the emulator: {emulated}."
    passed, skipped = (
        sum((NEEDS_GPU_PROPERTY, True) in _properties(report) for report in stats.get(outcome, ()))
        for outcome in ("passed", "skipped")
    )
    if passed:
        yield f"Tests that need a GPU: {passed} passed."
    if skipped:
        yield f"Tests that need a GPU: {skipped} skipped. On a machine with a GPU, run: make gpu-test"
    if exitstatus == pytest.ExitCode.TESTS_FAILED:
        yield "To run only the tests that failed, add: PYTEST=--last-failed"
    if exitstatus == pytest.ExitCode.OK:
        yield f"Next: {following}."


def _properties(report: Any) -> list[tuple[str, object]]:
    """Those of a test; files have none, and xdist makes lists of them."""
    return [tuple(each) for each in getattr(report, "user_properties", ())]
