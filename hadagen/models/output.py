"""The folder that a model is written to, by one process at a time.

A plan in the folder says how the model is made, and what each finished file holds. So a run that was killed is
continued with the files that are as it wrote them. Links in the folder are replaced, and never followed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hadagen.errors import StorageError, UsageError, shown
from hadagen.files.atomic_file import atomic_file, unwritable
from hadagen.files.lock_file import sole
from hadagen.models.json_file import read_json, write_json
from hadagen.models.stored import UNFINISHED
from hadagen.owners import make_folder

LOCK = "hadagen-quantize.lock"  # of the process that writes, beside the plan
_MADE = "made"  # in the plan: file → its size, its digest, and the types and shapes of its tensors
_TEMPORARY = ".hadagen-*"
_BLOCK = 1 << 20


class Output:
    """A folder that this process has locked. `output` makes one. files: the names of all that will be in it."""

    def __init__(self, folder: Path, plan: Mapping[str, Any], files: Collection[str], made: dict[str, Any]) -> None:
        self.folder, self._plan, self._files, self._made = folder, plan, files, made

    def kept(self, file: str) -> list[str] | None:
        """The tensors of a file that an earlier run finished; None if it is not there, or not as it was written."""
        known = self._made.get(file)
        if known is None or _described(self.folder / file) != known:
            return None
        return [*known["tensors"]]

    def save(self, file: str, tensors: dict[str, torch.Tensor]) -> list[str]:
        """Write a file, and then what it holds to the plan. Returns the names of the tensors."""
        path = self.folder / file
        with atomic_file(path, follow=False) as new:
            mode = new.stat().st_mode
            try:
                save_file(tensors, new, {"format": "pt"})
            except SafetensorError as error:
                raise unwritable(path, error) from error
            new.chmod(mode)  # safetensors makes files that only their owner reads
        found = _described(path)
        if found is None:
            raise StorageError(f"{path} was replaced by another program; name a new folder")
        self._made[file] = found
        self._write()
        return [*found["tensors"]]

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """If the model is refused within the `with`, remove all that was written: the same command would fail again."""
        try:
            yield
        except UsageError:
            for file in (*self._files, UNFINISHED):
                with suppress(OSError):
                    (self.folder / file).unlink()
                if "/" in file:
                    with suppress(OSError):
                        (self.folder / file).parent.rmdir()
            raise

    @contextmanager
    def beside(self, files: Iterable[str]) -> Iterator[Path]:
        """A temporary folder with links to files of this one."""
        with tempfile.TemporaryDirectory(prefix=_TEMPORARY[:-1], dir=self.folder, ignore_cleanup_errors=True) as made:
            for file in files:
                try:
                    os.symlink(os.path.join("..", file), os.path.join(made, file))
                except OSError as error:
                    raise unwritable(self.folder, error) from error
            yield Path(made)

    def copy(self, path: Path, name: str) -> None:
        """Copy a file to a name, which may be in a folder."""
        place = self.folder / name
        if "/" in name and place.parent.is_symlink():
            place.parent.unlink()
        try:
            given = path.open("rb")
        except OSError as error:
            raise StorageError(f"{path} cannot be read ({error.strerror}); get the file again") from error
        with given, atomic_file(place, follow=False) as new, new.open("wb") as written:
            shutil.copyfileobj(given, written)

    def finish(self) -> None:
        """Call this when all is written."""
        (self.folder / UNFINISHED).unlink()

    def begin(self) -> None:
        self._write()
        for left in self.folder.glob(_TEMPORARY):  # of runs that were killed
            shutil.rmtree(left, ignore_errors=True)

    def _write(self) -> None:
        write_json(self.folder / UNFINISHED, {**self._plan, _MADE: self._made})


@contextmanager
def output(folder: Path, plan: Mapping[str, Any], files: Collection[str]) -> Iterator[Output]:
    """Make a folder for a model, or continue one that an earlier run with the same plan left, and lock it within the
    `with`. files: the names of all that will be in the folder.

    Raises `UsageError` for a folder that holds anything else, and `StorageError` if another process writes to it, or
    nothing can be written.
    """
    if os.path.lexists(folder) and not folder.is_dir():
        raise UsageError(f"{folder} is no folder; name a new one")
    _made_by(folder, plan, files)
    is_new = not folder.exists()
    try:
        make_folder(folder)
    except OSError as error:
        raise unwritable(folder, error) from error
    try:
        with sole(folder / LOCK) as is_ours:
            if not is_ours:
                raise StorageError(
                    f"another hadagen quantize writes to {folder}; wait until it ends, or name a new folder"
                )
            made = _made_by(folder, plan, files)  # again, because the process that had the lock may have changed it
            found = Output(folder, plan, files, made)
            found.begin()
            yield found
    finally:
        if is_new:
            with suppress(OSError):  # which has files, unless the model was refused
                folder.rmdir()


def _made_by(folder: Path, plan: Mapping[str, Any], files: Collection[str]) -> dict[str, Any]:
    """The files that an earlier run with a plan left in a folder. Raises `UsageError` if there are others."""
    names = {path.name for path in folder.iterdir()} - {LOCK} if folder.exists() else set()
    if UNFINISHED not in names:
        if names:
            raise UsageError(f"{folder} is not empty; name a new folder")
        return {}
    if not stat.S_ISREG((folder / UNFINISHED).lstat().st_mode):
        raise UsageError(f"{folder / UNFINISHED} is no file of hadagen quantize; name a new folder")
    found = read_json(folder / UNFINISHED)
    made = found.pop(_MADE, {})
    if _text(found) != _text(plan) or not isinstance(made, dict):
        raise UsageError(
            f"{folder} has files of another model or with other options; give the same, or name a new folder"
        )
    for name in sorted(names):
        if name not in {UNFINISHED, *(each.partition("/")[0] for each in files)} and not fnmatch(name, _TEMPORARY):
            raise UsageError(
                f"{folder} has {shown(name)}, which is no part of the model; remove it, or name a new folder"
            )
    return {file: each for file, each in made.items() if file in files}


def _text(plan: Mapping[str, Any]) -> str:
    return json.dumps(plan, sort_keys=True)  # in which NaN equals NaN


def _described(path: Path) -> dict[str, Any] | None:
    """The size, a digest and the tensors of a file; None if it is no file."""
    digest = hashlib.sha256()
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                return None
            while block := file.read(_BLOCK):
                digest.update(block)
        with safe_open(path, "pt") as reader:
            parts = {name: reader.get_slice(name) for name in reader.keys()}  # noqa: SIM118
            tensors = {name: [each.get_dtype(), each.get_shape()] for name, each in parts.items()}
    except (OSError, SafetensorError):
        return None
    return {"size": found.st_size, "sha256": digest.hexdigest(), "tensors": tensors}
