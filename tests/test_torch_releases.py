"""`ci/torch_releases.py` without a download: what it runs, what it counts as a failure, and what it leaves behind."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import conftest
import pytest
import torch_releases
from torch_releases import ROOT, Failing, Listed, listed

TESTS = """
import pytest

def test_right():
    pass

@pytest.mark.parametrize("text", ["a::b", "[c]"])
def test_text(text):
    assert "{}" not in text
"""
IDS = {"tests/test_x.py::test_right", "tests/test_x.py::test_text[a::b]", "tests/test_x.py::test_text[[c]]"}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with one file of tests, and two releases that are "installed" without a download."""

    def install(environment: Path, release: str) -> str:
        python = environment / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n', encoding="utf-8")
        python.chmod(0o755)
        return "it cannot be installed" if release == "0.9" else ""

    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_x.py").write_text(TESTS.replace("{}", "z"), encoding="utf-8")
    monkeypatch.setattr(torch_releases, "ROOT", tmp_path)
    monkeypatch.setattr(torch_releases, "listed", lambda: Listed(("1.0", "2.0"), ("test_x.py",), ()))
    monkeypatch.setattr(torch_releases, "_install", install)
    monkeypatch.setattr(sys, "argv", ["torch_releases.py", "--jobs=0", f"--folder={tmp_path / 'torch'}"])
    return tmp_path


def test_all_releases_run_all_tests_and_leave_nothing(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert torch_releases.main() == 0
    said = capfd.readouterr().out
    assert all(f"PyTorch {release}: all tests pass" in said for release in ("1.0", "2.0"))
    assert list((project / "torch").iterdir()) == []


def test_a_release_that_cannot_be_installed_is_a_failure(
    project: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch_releases, "listed", lambda: Listed(("0.9",), ("test_x.py",), ()))
    assert torch_releases.main() == 1
    assert "PyTorch 0.9: it cannot be installed" in capfd.readouterr().out


def test_tests_that_fail_or_do_not_run_are_failures(project: Path) -> None:
    environment = project / "torch" / "1.0"
    torch_releases._install(environment, "1.0")
    assert torch_releases._collected() == IDS
    assert torch_releases._test(environment, IDS, 0) == ""
    more = {*IDS, "tests/test_x.py::Group::test_more[1]"}
    assert torch_releases._test(environment, more, 0) == "1 tests do not run, such as tests.test_x.Group::test_more[1]"
    (project / "tests" / "test_x.py").write_text(TESTS.replace("{}", "c"), encoding="utf-8")
    assert torch_releases._test(environment, IDS, 0) == "1 of 3 tests fail"


def test_entries_of_the_list_name_tests_and_releases() -> None:
    entries = [
        Failing("tests/test_x.py::test_text[*]", ("1.0",), ""),
        Failing("tests/test_x.py::test_right*", ("1.1",), ""),
        Failing("tests/test_x.py::test_text[?]", ("1.0",), ""),
    ]
    assert [[each.covers(test) for test in sorted(IDS)] for each in entries[::2]] == [[False, True, True], [False] * 3]
    assert list(Listed(("1.0",), (), tuple(entries)).faults(IDS)) == [
        "tests/test_x.py::test_right* is said to fail with 1.1, which is none of the listed releases",
        "tests/test_x.py::test_text[?] is listed as failing, and there is no such test",
    ]
    assert all((torch_releases.ROOT / "tests" / file).exists() for file in listed().files)


def test_a_listed_test_that_passes_is_an_error(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    marks: list[Any] = []
    item: Any = SimpleNamespace(nodeid="tests/x.py::t", add_marker=marks.append, get_closest_marker=lambda name: None)
    monkeypatch.setattr(conftest, "failing_here", lambda: [Failing("tests/x.py::*", ("1.0",), "a reason")])
    conftest.pytest_collection_modifyitems(request.config, [item])
    ((mark,),) = [marks]
    assert (mark.name, mark.kwargs) == ("xfail", {"reason": "a reason", "strict": True})


def test_documents_name_the_tested_releases() -> None:
    pinned = re.findall(r"^torch==(.*)$", (ROOT / "ci" / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    minors = sorted((release.rsplit(".", 1)[0] for release in (*listed().releases, *pinned)), key=minor)
    tested = f"with PyTorch {', '.join(minors[:-1])} and {minors[-1]}."
    assert tested in " ".join((ROOT / "docs" / "compat.md").read_text(encoding="utf-8").split())


def minor(release: str) -> int:
    return int(release.split(".")[1])
