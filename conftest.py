"""What every test shares: reproducible hypothesis runs; tests that need a GPU or a browser say why they do not run."""

import isolated  # isort: skip  # before all that reads variables when it is imported

import gc
import json
import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from chromium import find_chromium
from command_line import database, machine, sample
from fake_device import fake_gpu
from fleet_cluster import cluster
from hypothesis import HealthCheck, settings
from postgres import postgres, postgres_server
from sample_store import any_store, empty, empty_on_server, path, place, store
from slow import slow_cases, turn
from sums import NEEDS_GPU_PROPERTY, SumUp
from torch_releases import failing_here

# Fixtures of every test. A session has one server, and one empty database, only if no other module imports them.
__all__ = [
    "any_store",
    "cluster",
    "database",
    "empty",
    "empty_on_server",
    "fake_gpu",
    "isolated",
    "machine",
    "path",
    "place",
    "postgres",
    "postgres_server",
    "sample",
    "store",
]

# The same examples in every run, and no verdict that depends on how busy the machine is.
settings.register_profile("hadagen", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("hadagen")

# Files that others could change are not used, and tests make many.
os.umask(0o022)

NEEDS_GPU = "needs a GPU: torch.cuda.is_available() is False"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-gpu", action="store_true", help="fail where GPU tests would be skipped")
    parser.addoption("--kills", type=int, help="how often test_kills.py kills a tune or a helper of one")
    parser.addoption("--schedules", type=int, default=1, help="how many fleets test_fleet_kills.py breaks")
    parser.addoption("--figures", type=Path, help="a folder where tests write the numbers that documents show of them")
    parser.addoption("--require-chromium", action="store_true", help="fail where tests in a browser would be skipped")
    parser.addoption("--next", help="sum up at the end what ran, and say that this comes next")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--next"):
        config.pluginmanager.register(SumUp(config))


@pytest.fixture
def schedules(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("--schedules")


@pytest.fixture
def kills(request: pytest.FixtureRequest) -> int | None:
    return request.config.getoption("--kills")


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[[str, Any], None]:
    """Writes what a test found to NAME.json in the folder of `--figures`, if there is one."""
    folder: Path | None = request.config.getoption("--figures")

    def write(name: str, found: Any) -> None:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    return write


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses by the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for at in slow_cases([item.nodeid for item in items]):
        items[at].add_marker(pytest.mark.slow)
    for failing in failing_here():
        for item in items:
            if failing.covers(item.nodeid):
                item.add_marker(pytest.mark.xfail(reason=failing.why, strict=True))
    if hasattr(config, "workerinput"):  # of xdist
        items.sort(key=lambda item: turn(item.nodeid.partition("::")[0].rpartition("/")[2]))
    _skip_without_chromium(config, [item for item in items if item.get_closest_marker("chromium")])
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    for item in gpu_items:
        item.user_properties.append((NEEDS_GPU_PROPERTY, True))
        # They compare with what PyTorch computes, such as float64.
        item.add_marker(pytest.mark.filterwarnings("ignore::hadagen.SlowPathWarning"))
    if not gpu_items or _has_gpu():
        return
    if config.getoption("--require-gpu"):
        raise pytest.UsageError("--require-gpu was given, but torch.cuda.is_available() is False on this machine")
    for item in gpu_items:
        item.add_marker(pytest.mark.skip(reason=NEEDS_GPU))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    report = yield
    # Tests that fail as expected are skipped too, and their longrepr is no tuple.
    if report.skipped and isinstance(report.longrepr, tuple) and report.longrepr[-1] == f"Skipped: {NEEDS_GPU}":
        report.longrepr = "tests", None, NEEDS_GPU  # one line for all in the summary
    return report


def pytest_collection_finish() -> None:
    # What was imported and collected stays to the end, and looking for garbage in it again and again takes time; so
    # does looking in what tests make, which is little.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def _skip_without_chromium(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not items or find_chromium():
        return
    if config.getoption("--require-chromium"):
        raise pytest.UsageError("--require-chromium was given, but there is no Chromium on PATH on this machine")
    for item in items:
        item.add_marker(pytest.mark.skip(reason="needs a browser: there is no Chromium on PATH"))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
