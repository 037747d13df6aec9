"""No variable of a person or a CI changes what tests do."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHOW = "import isolated, json, os, locale; print(json.dumps([dict(os.environ), locale.getencoding()]))"
OF_TESTS = {"HADAGEN_TEST_FOLDER", "HADAGEN_CACHE", "XDG_DATA_HOME"}
SET = {
    "CI": "1",
    "CLICOLOR_FORCE": "1",
    "COLUMNS": "20",
    "FORCE_COLOR": "1",
    "GITHUB_ACTIONS": "true",
    "GIT_DIR": "/nonexistent",
    "HF_HUB_OFFLINE": "1",
    "LANG": "de_DE.ISO-8859-1",
    "LC_ALL": "C",
    "LINES": "3",
    "NO_COLOR": "1",
    "OMP_NUM_THREADS": "2",
    "PGPASSWORD": "another",
    "PYTEST_ADDOPTS": "--verbose",
    "PYTHONWARNINGS": "default",
    "TERM": "dumb",
    "TORCH_LOGS": "+dynamo",
    "XDG_CACHE_HOME": "/nonexistent/cache",
    "XDG_DATA_HOME": "/nonexistent/data",
}


def of_hadagen() -> set[str]:
    """The variables that hadagen reads."""
    sources = [path for room in ("hadagen", "cli", "tuning_db") for path in (ROOT / room).rglob("*.py")]
    found = {name for path in sources for name in re.findall(r'"(HADAGEN_[A-Z_]+)"', path.read_text("utf-8"))}
    assert {"HADAGEN_CACHE", "HADAGEN_BUNDLE", "HADAGEN_INTEGRATIONS", "HADAGEN_BATCH_INVARIANT"} <= found
    return found


def everything(tmp_path: Path) -> dict[str, str]:
    """What is set here, for a session of tests of its own, and each variable with a value that would matter."""
    ours = {name: value for name, value in os.environ.items() if name not in OF_TESTS}
    of_hadagen_too = dict.fromkeys(of_hadagen(), "/nonexistent") | {"_HADAGEN_COMPLETE": "bash_source"}
    return ours | SET | of_hadagen_too | {"HOME": str(tmp_path)}


def test_a_session_of_tests_has_the_same_variables_whatever_is_set(tmp_path: Path) -> None:
    def found(environment: dict[str, str]) -> tuple[dict[str, str], str]:
        command = [sys.executable, "-c", SHOW]
        shown = subprocess.run(command, cwd=ROOT / "tests", env=environment, capture_output=True, text=True, check=True)
        variables, encoding = json.loads(shown.stdout)
        assert not Path(variables["HADAGEN_TEST_FOLDER"]).exists()  # once the session is over
        return {name: value for name, value in variables.items() if name not in OF_TESTS}, encoding

    given = everything(tmp_path)
    without = {name: given[name] for name in given.keys() & os.environ.keys() | {"HOME"}} | {"TERM": "xterm"}
    assert found(given) == found(without)


def test_what_such_variables_decide_is_the_same_in_tests(tmp_path: Path) -> None:
    files = ("cache", "choose", "cli_width", "owners", "recipes")
    command = [sys.executable, "-m", "pytest", "-qx", "-pno:cacheprovider", "-pno:xdist", "-mnot slow"]
    of_files = [f"tests/test_{each}.py" for each in files]
    environment = everything(tmp_path)
    done = subprocess.run([*command, *of_files], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
