"""The Makefile: each target installs the extras that it needs, once, and no others."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from slow import SAMPLED, slow_cases

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def commands(target: str, venv: Path, *variables: str) -> str:
    """What make would run."""
    command = ["make", "-n", target, f"VENV={venv}", *variables]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("target", "extras"),
    [
        ("tune", {"tune", "nvrtc"}),
        ("test", {"tune", "nvrtc", "fleet", "report", "sign", "test"}),
        ("torch-test", {"tune", "nvrtc", "fleet", "report", "sign", "test"}),
        ("lint", {"tune", "fleet", "report", "sign", "test", "lint"}),
        ("docs", {"docs"}),
        ("release", {"sign"}),
        ("setup", {"tune", "nvrtc", "fleet", "report", "sign", "test", "lint", "docs"}),
    ],
)
def test_a_target_installs_what_it_needs(target: str, extras: set[str], tmp_path: Path) -> None:
    (found,) = re.findall(r"--constraint ci/constraints\.txt .*'\.\[(.*)\]'", commands(target, tmp_path))
    assert set(found.split(",")) - {"nvcc"} == extras
    assert " install " not in commands(target, tmp_path, "PY=python3")


def test_a_release_needs_a_key() -> None:
    command = ["make", "release", "PY=python3", "RELEASE=/nonexistent"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode
    assert "a release needs the private key that signs its bundles: make release KEY=key.pem" in done.stderr


def test_what_is_installed_is_not_installed_again_but_in_another_checkout(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(shutil.which("true") or "")
    (tmp_path / "made").write_text(f"{ROOT}\n")
    (tmp_path / "has-docs").touch()
    assert " install " not in commands("docs", tmp_path)
    assert " install " in commands("test", tmp_path)
    assert "venv" not in commands("test", tmp_path).replace(str(tmp_path), "")
    (tmp_path / "made").write_text("/elsewhere\n")
    assert "-m venv --clear" in commands("docs", tmp_path)


@pytest.mark.parametrize("name", SAMPLED)
def test_every_slow_test_exists(name: str) -> None:
    file, function = name.split("::")
    assert re.search(rf"(?m)^def {function}\(", (ROOT / "tests" / file).read_text())


def test_one_of_so_many_cases_is_no_slow_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SAMPLED, "a::b", 2)
    monkeypatch.setitem(SAMPLED, "a::c", 0)
    assert slow_cases(["a::b[/]", "x/a::b[1]", "a::d", "a::b[2]", "a::c"]) == {1, 4}


def test_every_slow_test_runs_in_one_of_the_checks_of_a_change(tmp_path: Path) -> None:
    """`nvrtc-test` runs its files as a whole, and `long-test` the slow tests of all others."""
    test, long_test, nvrtc_test = (
        commands(target, tmp_path, "PY=python3") for target in ("test", "long-test", "nvrtc-test")
    )
    assert "-m 'not slow'" in test
    assert "-m slow" in long_test
    assert "slow" not in nvrtc_test
    assert set(re.findall(r"--ignore=(\S+)", long_test)) == set(re.findall(r"tests/test_\w+\.py", nvrtc_test))
    of_a_change = (ROOT / ".ci" / "run").read_text()
    assert all(f"make {target}" in of_a_change for target in ("test", "long-test", "nvrtc-test"))
