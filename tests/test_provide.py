"""hadagen in place of fast_hadamard_transform and HadaCore, in programs that nobody changes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = """
import importlib.metadata, importlib.util, json, pickle, sys
spec = importlib.util.find_spec("fast_hadamard_transform")
import fast_hadamard_transform, faster_hadamard_transform, torch
from fast_hadamard_transform.fast_hadamard_transform_interface import hadamard_transform
x = torch.ones(2, 4)
print(json.dumps({
    "version": [fast_hadamard_transform.__version__, importlib.metadata.version("fast_hadamard_transform")],
    "name": [spec.name, fast_hadamard_transform.__spec__.name],
    "sum": [hadamard_transform(x)[0, 0].item(), faster_hadamard_transform.hadamard_transform(x)[0, 0].item()],
    "same": pickle.loads(pickle.dumps(hadamard_transform)) is fast_hadamard_transform.hadamard_transform,
    "arguments": sys.argv[1:],
}))
"""
IS_PROVIDED = {
    "version": ["1.1.0", "1.1.0"],
    "name": ["fast_hadamard_transform", "fast_hadamard_transform"],
    "sum": [4.0, 2.0],
    "same": True,
    "arguments": [],
}
ORIGINAL = "def hadamard_transform(x, scale=1.0):\n    return 'original'\n"


def run(*command: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, **options)


def provided(text: str, *options: str) -> subprocess.CompletedProcess[str]:
    return run("-c", f"import hadagen.compat; print(hadagen.compat.provide({', '.join(options)}))\n{text}")


@pytest.fixture
def original(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An original that is installed."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "fast_hadamard_transform.py").write_text(ORIGINAL, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    return tmp_path / "site" / "fast_hadamard_transform.py"


def test_a_process_that_provides_them_imports_them() -> None:
    done = provided(PROGRAM)
    assert done.returncode == 0, done.stderr
    names, found = done.stdout.splitlines()
    assert names == "('fast_hadamard_transform', 'faster_hadamard_transform')"
    assert json.loads(found) == {**IS_PROVIDED, "arguments": []}


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (("parent.py",), []),
        (("program.py", "a", "--b"), ["a", "--b"]),
        (("-m", "program"), []),
    ],
)
def test_a_program_and_its_processes_import_them(
    command: tuple[str, ...], arguments: list[str], tmp_path: Path
) -> None:
    program, parent = tmp_path / "program.py", tmp_path / "parent.py"
    program.write_text(PROGRAM, encoding="utf-8")
    parent.write_text(
        f"import subprocess, sys\nsys.exit(subprocess.run([sys.executable, {str(program)!r}]).returncode)", "utf-8"
    )
    done = run("-m", "hadagen.compat", *command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {**IS_PROVIDED, "arguments": arguments}


def test_a_function_that_they_lack_is_an_attribute_error() -> None:
    done = run("-m", "hadagen.compat", sys.executable, "-c", "import fast_hadamard_transform as f; f.x")
    assert "has no attribute 'x'" in done.stderr


SHOW = "import fast_hadamard_transform as f; print(f.__file__)"


def test_an_installed_original_stays(original: Path) -> None:
    assert provided(SHOW).stdout.splitlines() == ["('faster_hadamard_transform',)", str(original)]


def test_an_installed_original_is_replaced_if_asked(original: Path, tmp_path: Path) -> None:
    assert "provided" in provided(SHOW, "replace=True").stdout.splitlines()[1]
    late = run("-c", "import fast_hadamard_transform, hadagen.compat; hadagen.compat.provide(replace=True)")
    assert f"UsageError: fast_hadamard_transform is imported already, from {original}; call" in late.stderr
    refused = run("-m", "hadagen.compat", "-m", "json.tool")
    assert (refused.returncode, refused.stderr) == (
        1,
        f"fast_hadamard_transform is installed, at {original}; --replace takes its place\n",
    )
    (tmp_path / "show.py").write_text(SHOW, encoding="utf-8")
    assert "provided" in run("-m", "hadagen.compat", "--replace", tmp_path / "show.py").stdout


@pytest.mark.parametrize(
    ("file", "command"),
    [
        ("fast_hadamard_transform.py", ["program.py"]),
        ("fast_hadamard_transform/__init__.py", ["elsewhere/link.py"]),
        ("faster_hadamard_transform.py", ["-m", "program"]),
    ],
)
def test_a_module_beside_the_program_is_named(file: str, command: list[str], tmp_path: Path) -> None:
    """Python looks there first, so nothing can take its place. A program elsewhere does not find it."""
    module, other = tmp_path / file, tmp_path / "elsewhere" / "other.py"
    for path in (module, tmp_path / "program.py", other):
        path.parent.mkdir(exist_ok=True)
        path.write_text("import importlib.util as u; print(u.find_spec('fast_hadamard_transform').origin)", "utf-8")
    (other.parent / "link.py").symlink_to(tmp_path / "program.py")
    done = run("-m", "hadagen.compat", "--replace", *command, cwd=tmp_path)
    said = f"{file.partition('/')[0].removesuffix('.py')} lies where the program is, at {module}, and Python finds it"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"{said} first; rename it\n")
    assert "provided" in run("-m", "hadagen.compat", "--replace", other, cwd=tmp_path).stdout


@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        ([], 2, "python -m hadagen.compat PROGRAM"),
        (["--help"], 0, "python -m hadagen.compat PROGRAM"),
        (["-m"], 2, "python -m hadagen.compat PROGRAM"),
        (["no-such-command"], 1, "there is no command no-such-command; give one, a Python file, or -m and a module"),
    ],
)
def test_what_cannot_be_run_is_said(command: list[str], status: int, said: str) -> None:
    done = run("-m", "hadagen.compat", *command)
    assert done.returncode == status
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_transformers_finds_them() -> None:
    pytest.importorskip("transformers", "5.0")
    done = provided(
        "from transformers.utils import is_hadamard_available\n"
        "from transformers.integrations import higgs\n"
        "import hadagen.compat.fast_hadamard_transform as ours\n"
        "print(is_hadamard_available(), higgs.hadamard_transform is ours.hadamard_transform)"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1] == "True True"
