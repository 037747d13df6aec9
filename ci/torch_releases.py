"""Run the tests of the runtime with several releases of PyTorch, as `make torch-test` does.

`torch_releases.yaml` lists the releases, the files of tests, and tests that fail with a release. Each release is
installed in an environment of its own. Packages that it does not bring come from the environment of this program. The
next release is downloaded while the tests of one run, so at most two are on the disk.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import site
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import yaml

ROOT = Path(__file__).resolve().parent.parent
LIST = Path(__file__).with_suffix(".yaml")


@dataclass(frozen=True)
class Failing:
    """Tests that fail with some releases. tests: their ids, in which * stands for any text."""

    tests: str
    releases: tuple[str, ...]
    why: str

    def covers(self, test: str) -> bool:
        return re.fullmatch(re.escape(self.tests).replace(r"\*", ".*"), test) is not None


@dataclass(frozen=True)
class Listed:
    releases: tuple[str, ...]
    files: tuple[str, ...]
    failing: tuple[Failing, ...]

    def faults(self, tests: Iterable[str]) -> Iterator[str]:
        """What is wrong with the list of failing tests. tests: all ids."""
        known = list(tests)
        for each in self.failing:
            if unknown := set(each.releases) - set(self.releases):
                yield f"{each.tests} is said to fail with {min(unknown)}, which is none of the listed releases"
            if not any(map(each.covers, known)):
                yield f"{each.tests} is listed as failing, and there is no such test"


@cache
def listed() -> Listed:
    said: dict[str, Any] = yaml.safe_load(LIST.read_text(encoding="utf-8"))
    failing = (Failing(each["tests"], tuple(each["releases"]), each["why"]) for each in said["failing"])
    return Listed(tuple(said["releases"]), tuple(said["files"]), tuple(failing))


def failing_here() -> list[Failing]:
    """The entries for the PyTorch of this environment."""
    release = version("torch").split("+")[0]
    return [each for each in listed().failing if release in each.releases]


def main() -> int:
    """0 if all tests pass with all releases, else 1."""
    parser = argparse.ArgumentParser(description="Run the tests of the runtime with several releases of PyTorch.")
    parser.add_argument("releases", nargs="*", metavar="RELEASE", help="releases, such as 2.6.0 (default: all listed)")
    parser.add_argument("--jobs", type=int, default=2, help="processes that run tests (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "torch", help="where to install releases")
    parser.add_argument("--keep", action="store_true", help="keep the environments, and use those that were kept")
    options = parser.parse_args()
    folder: Path = options.folder.resolve()
    tests = _collected()
    if faults := list(listed().faults(tests)):
        raise SystemExit(f"{LIST}: {'; '.join(faults)}")
    releases = options.releases or listed().releases
    said, failures = [], 0
    with ThreadPoolExecutor(1) as downloads:
        waiting = iter(releases)
        under_way: Future[str] = downloads.submit(_install, folder / releases[0], next(waiting))
        for release in releases:
            fault = under_way.result()
            if following := next(waiting, ""):
                under_way = downloads.submit(_install, folder / following, following)
            began = time.monotonic()
            fault = fault or _test(folder / release, tests, options.jobs)
            said.append(f"PyTorch {release}: {fault or 'all tests pass'} ({time.monotonic() - began:.0f} s)")
            failures += bool(fault)
            if not options.keep:
                shutil.rmtree(folder / release, ignore_errors=True)
    print("\n".join(("", *said)))
    return int(failures > 0)


def _files() -> list[str]:
    return [f"tests/{file}" for file in listed().files]


def _collected() -> set[str]:
    """The ids of all tests, as this environment has them."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *_files()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the tests cannot be collected:\n{done.stdout}{done.stderr}")
    return {line for line in done.stdout.splitlines() if line.startswith("tests/")}


def _install(environment: Path, release: str) -> str:
    """Make an environment with a release of PyTorch. Returns what went wrong, "" if nothing did."""
    python = environment / "bin" / "python"
    if (environment / "made").exists():
        return ""
    environment.parent.mkdir(parents=True, exist_ok=True)
    # Instead of constraints for the whole machine, which may exclude the release.
    constraints = environment.parent / f"{release}.txt"
    constraints.write_text(f"torch=={release}\n", encoding="utf-8")
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
    for command in (
        [sys.executable, "-m", "venv", "--clear", environment],
        [*install, f"torch=={release}"],
    ):
        done = subprocess.run(
            command,
            env=os.environ | {"PIP_CONSTRAINT": str(constraints)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            return f"it cannot be installed:\n{done.stdout.strip()}\n"
    constraints.unlink()
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip())
    # Behind the packages of the release, with which it finds its own versions first.
    shared = "".join(f"import site; site.addsitedir({each!r})\n" for each in site.getsitepackages())
    (packages / "zz-shared.pth").write_text(shared, encoding="utf-8")
    (environment / "made").touch()
    return ""


def _test(environment: Path, tests: set[str], jobs: int) -> str:
    """Run the tests in an environment. Returns what went wrong, "" if nothing did."""
    results = environment / "results.xml"
    results.unlink(missing_ok=True)
    command = [environment / "bin" / "python", "-m", "pytest", "-q", "-n", str(jobs), "--dist", "loadfile"]
    command += ["-Wdefault", "-p", "no:cacheprovider", f"--junitxml={results}", *_files()]
    ended = subprocess.run(command, cwd=ROOT).returncode
    if not results.exists():
        return f"pytest ends with {ended} and reports no results"
    cases = list(ElementTree.parse(results).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    missing = {_reported(test) for test in tests} - {f"{case.get('classname')}::{case.get('name')}" for case in cases}
    if failed:
        return f"{len(failed)} of {len(cases)} tests fail"
    if missing:
        return f"{len(missing)} tests do not run, such as {min(missing)}"
    return f"pytest ends with {ended}" if ended else ""


def _reported(test: str) -> str:
    """The class and name that results have of a test id."""
    where, bracket, parameters = test.partition("[")
    *place, name = where.removesuffix(".py").replace(".py::", "::").split("::")
    return f"{'.'.join(place).replace('/', '.')}::{name}{bracket}{parameters}"


if __name__ == "__main__":
    sys.exit(main())
