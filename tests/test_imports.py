"""The import table: which room may know which. Checked over every file, so that the shape of the house cannot drift."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

from hadagen.compiler.recipes import GENERATOR

# A row is a module, or a package with all its modules. It may import itself, the rooms named, which all stand above it
# (`*`: every room above), the packages named last, and the standard library. `__init__` is `hadagen` itself.
TABLE = """
    room                 | may import                                                | and of other packages
    ---------------------+-----------------------------------------------------------+--------------------------
    errors               |                                                           |
    owners               |                                                           |
    files                | owners errors                                             |
    problem              | errors                                                    | numpy torch
    truth                | problem                                                   | numpy torch
    plan                 | problem errors                                            | numpy pydantic yaml
    templates            |                                                           |
    compiler             | templates plan truth problem owners errors                | jinja2 numpy torch
    gpu                  | problem errors                                            | pynvml
    tuning_db.signatures | errors                                                    | cryptography
    tuning_db.bundle     | tuning_db.signatures problem files errors                 |
    tuning_db            | tuning_db.bundle tuning_db.signatures compiler problem files errors | sqlalchemy alembic
    measure              | gpu templates truth problem errors                        | torch
    measure.autotuner    | measure tuning_db tuning_db.bundle compiler plan problem files errors |
    runtime.registration |                                                           |
    runtime.arguments    | errors                                                    |
    runtime.overlap      |                                                           |
    runtime.checks       | runtime.overlap runtime.arguments problem errors          | torch
    runtime.operands     | runtime.checks runtime.arguments problem errors           | torch
    runtime.plain        | runtime.operands problem                                  | torch
    runtime.choose       | runtime.arguments tuning_db.bundle tuning_db.signatures gpu compiler problem files owners errors | torch
    runtime.launch       | runtime.choose runtime.plain runtime.operands runtime.arguments measure.autotuner tuning_db.bundle gpu compiler truth problem owners errors | torch
    runtime.call         | runtime.launch runtime.choose runtime.plain runtime.operands runtime.checks gpu truth problem errors | torch
    runtime              | runtime.call runtime.launch runtime.choose runtime.operands runtime.checks runtime.overlap runtime.arguments gpu truth problem errors | torch
    compat               | runtime runtime.call runtime.operands runtime.checks runtime.arguments problem errors | torch
    presets              | runtime runtime.operands runtime.checks truth problem errors | torch
    prologues            | runtime.checks problem errors                             | torch
    fusing               | prologues runtime.call runtime.operands runtime.checks problem errors | torch
    models.json_file     | files errors                                              |
    models.defaults      | models.json_file                                          | torch
    models.scheme        | models.defaults runtime errors                            |
    models.int4          | models.scheme errors                                      | torch
    models.products      | models.int4 models.json_file runtime.call runtime.choose files owners errors | torch triton
    models               | models.products models.int4 models.scheme models.json_file prologues runtime runtime.checks problem files owners errors | safetensors tokenizers torch
    integrations         | models models.products models.int4 models.scheme models.defaults prologues compat runtime runtime.call runtime.operands runtime.checks problem errors | torch vllm
    __init__             | fusing runtime runtime.call runtime.launch runtime.choose runtime.registration problem errors |
    report               | tuning_db tuning_db.bundle plan problem errors            |
    report.drawing       | report problem errors                                     | bokeh jinja2
    fleet                | measure gpu compiler plan problem owners errors           | dask distributed tornado
    tuner                | *                                                         | optuna sqlalchemy
    cli                  | *                                                         | click rich torch transformers
"""  # noqa: E501
# What a program that only calls kernels never imports.
HEAVY = (
    "optuna",
    "jinja2",
    "click",
    "sqlalchemy",
    "alembic",
    "pydantic",
    "yaml",
    "cuda",
    "bokeh",
    "distributed",
    "cryptography",
)

ROOT = Path(__file__).resolve().parent.parent
# Where the modules of a package lie, and the name they are imported by.
DIRECTORIES = {"hadagen": "", "templates": "templates", "tuning_db": "tuning_db", "cli": "cli"}


class Room(NamedTuple):
    rooms: frozenset[str]
    packages: frozenset[str]


def read_table() -> dict[str, Room]:
    table: dict[str, Room] = {}
    for line in TABLE.strip().splitlines()[2:]:
        name, rooms, packages = (column.split() for column in line.split("|"))
        above = frozenset(table)
        named = above if rooms == ["*"] else frozenset(rooms)
        assert named <= above, f"{name} names rooms that do not stand above it: {sorted(named - above)}"
        table[name[0]] = Room(named, frozenset(packages))
    return table


def find_modules() -> dict[str, Path]:
    modules: dict[str, Path] = {}
    for directory, package in DIRECTORIES.items():
        for path in sorted((ROOT / directory).rglob("*.py")):
            parts = [package, *path.relative_to(ROOT / directory).with_suffix("").parts]
            modules[".".join(filter(None, parts)).removesuffix(".__init__")] = path
    return modules


# Both without the `hadagen.` that every name begins with.
ROOMS = read_table()
MODULES = find_modules()


def room_of(module: str) -> str | None:
    """The row of a module: the longest that is the module itself or a package it is in."""
    return max((room for room in ROOMS if f"{module}.".startswith(f"{room}.")), key=len, default=None)


def imports_of(module: str) -> Iterator[tuple[int, str]]:
    """Line and full name of every import of a file, those inside functions too."""
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{MODULES[module]}:{node.lineno}: write imports in full, from hadagen"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def file_of(target: str) -> str:
    """The module that holds a name, which begins with `hadagen.`; of what `hadagen` itself defines, `__init__`."""
    name = target.partition(".")[2]
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name or "__init__"


def may_import(room: str, target: str) -> bool:
    package, _, rest = target.partition(".")
    if package != "hadagen":
        return package in ROOMS[room].packages | sys.stdlib_module_names
    # A name that no row holds is one that `hadagen` itself defines.
    return (room_of(rest) or "__init__") in ROOMS[room].rooms | {room}


def test_every_row_of_the_table_is_a_room() -> None:
    assert set(ROOMS) == {room_of(module) for module in MODULES}


@pytest.mark.parametrize("room", ROOMS)
def test_a_row_grants_nothing_that_nobody_uses(room: str) -> None:
    targets = {target for module in MODULES if room_of(module) == room for _, target in imports_of(module)}
    used = {room_of(target.partition(".")[2]) or "__init__" for target in targets if target.startswith("hadagen")}
    above = list(ROOMS)[: list(ROOMS).index(room)]
    assert ROOMS[room].rooms <= used or ROOMS[room].rooms == frozenset(above)  # `*`
    assert ROOMS[room].packages <= {target.partition(".")[0] for target in targets}


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_what_its_room_may(module: str) -> None:
    room = room_of(module)
    assert room, f"{module} has no row in the import table of {Path(__file__).name}; add one"
    path = MODULES[module].relative_to(ROOT)
    wrong = [f"{path}:{line} imports {target}" for line, target in imports_of(module) if not may_import(room, target)]
    assert not wrong, f"{room} may import {sorted(ROOMS[room].rooms)} and {sorted(ROOMS[room].packages)}; but {wrong}"


def test_no_module_imports_itself_through_others() -> None:
    """Not within functions or for types either."""
    after = {
        module: {file_of(target) for _, target in imports_of(module) if target.startswith("hadagen.")} - {module}
        for module in MODULES
    }
    try:
        TopologicalSorter(after).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_the_cache_of_recipes_knows_all_that_the_text_of_a_kernel_follows_from() -> None:
    """`hadagen.errors` is not of it: sentences change no kernel."""
    found, queue = set[str](), ["compiler.codegen", "plan.space"]
    while queue:
        if (module := queue.pop()) not in found:
            found.add(module)
            queue += [file_of(target) for _, target in imports_of(module) if target.startswith("hadagen.")]
    assert {module.partition(".")[0] for module in found} <= {"errors", *GENERATOR}


def test_few_modules_stand_outside_of_rooms() -> None:
    assert len(list((ROOT / "hadagen").glob("*.py"))) <= 5


def test_no_file_is_ignored_by_git() -> None:
    """Else it would be in no commit, whatever it holds."""
    files = [str(path) for path in MODULES.values()]
    ignored = subprocess.run(["git", "check-ignore", "--no-index", *files], cwd=ROOT, capture_output=True, check=False)
    assert (ignored.stdout, ignored.returncode) in ((b"", 1), (b"", 128))  # 128: not a checkout


@pytest.mark.parametrize(("module", "first"), [("hadagen", "sys"), ("hadagen.runtime", "torch")])
def test_calling_a_kernel_needs_only_the_base_package(module: str, first: str) -> None:
    """No package of the tuner is imported and no CUDA library loaded, but for what PyTorch brings to the runtime."""
    program = f"""
import re, sys
from pathlib import Path
def loaded():
    maps = Path("/proc/self/maps")
    libraries = re.findall(r"/(lib(?:cu|nv)[^/]*[.]so[^/]*)$", maps.read_text(), re.M) if maps.exists() else []
    return {{*libraries, *sys.modules}}
import {first}
before = loaded()
import {module}
print(sorted(name for name in loaded() - before if ".so" in name or name.split(".")[0] in {HEAVY}))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stdout + done.stderr
