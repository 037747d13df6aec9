"""The wheel: every file of every room is in it, where the package looks for it, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).resolve().parent.parent
ROOMS = {"hadagen": "hadagen", "templates": "hadagen/templates", "tuning_db": "hadagen/tuning_db", "cli": "hadagen/cli"}


def test_every_file_of_every_room_is_in_the_wheel(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for room in ROOMS:
        shutil.copytree(ROOT / room, source / room, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    expected = {
        str(installed / path.relative_to(source / room))
        for room, installed in ((room, Path(directory)) for room, directory in ROOMS.items())
        for path in (source / room).rglob("*")
        if path.is_file()
    }
    command = "-m pip wheel --quiet --no-deps --no-build-isolation --disable-pip-version-check --wheel-dir"
    subprocess.run([sys.executable, *command.split(), str(tmp_path), str(source)], check=True)
    (wheel,) = tmp_path.glob("hadagen-*.whl")
    with ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == expected
