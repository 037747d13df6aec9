"""The cache of compiled kernels: a directory of entries named by a digest of everything that went into them.

An entry is a directory of files and a `meta.json` with its key and their SHA-256. It is written aside, in the same
file system, and renamed into place, so it is there whole or not at all. Any number of processes may share a cache; of
two that build the same entry, the second uses what the first put there.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

from hadagen.errors import StorageError

CACHE_SCHEMA = 2  # of an entry's files; another number makes every old entry unknown

FILES = ("source.cu", "kernel.ptx", "kernel.cubin", "log.txt")

_META = "meta.json"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def cache_root() -> Path:
    """$HADAGEN_CACHE, or `hadagen` in the user's cache directory ($XDG_CACHE_HOME or ~/.cache)."""
    if root := os.environ.get("HADAGEN_CACHE"):
        return Path(root).absolute()
    if root := os.environ.get("XDG_CACHE_HOME"):
        return Path(root).absolute() / "hadagen"
    try:
        return Path.home() / ".cache" / "hadagen"
    except RuntimeError:
        raise StorageError("no home directory is known to keep compiled kernels in; set HADAGEN_CACHE") from None


def cache_key(
    *,
    nvcc: str,
    flags: Sequence[str],
    arch: str,
    source: str,
    headers: Mapping[str, str],
    schema: int = CACHE_SCHEMA,
) -> str:
    """SHA-256 of all that a compiled kernel depends on.

    `nvcc`: its full version. `flags`: in order. `source` and `headers`: texts, the latter by name.
    """
    parts = [schema, nvcc, list(flags), arch, source, sorted(headers.items())]
    return sha256(json.dumps(parts).encode()).hexdigest()


class KernelCache:
    """The entries of one `kind` in `root`/kind, made beside it in `root`/work; each holds the files `names`. Both
    directories are made when first written to.

    `load` never raises for what it finds. `store` and `workspace` raise `StorageError` where the disk is full or may
    not be written.
    """

    def __init__(self, root: Path, kind: str = "kernels", names: Sequence[str] = FILES) -> None:
        self.root, self._kind, self._names = root, kind, tuple(names)

    def load(self, key: str) -> dict[str, bytes] | None:
        """The files of an entry by name, or None where there is none, it is damaged, or of another key."""
        folder = self.entry(key)
        try:
            meta = json.loads((folder / _META).read_bytes())
            files = {name: (folder / name).read_bytes() for name in self._names}
            return files if (meta["key"], meta["sha256"]) == (key, _digests(files)) else None
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return None

    def store(self, key: str, files: Mapping[str, bytes], meta: Mapping[str, object]) -> dict[str, bytes]:
        """Put files in place and return them: those of the process that was first, where there were two.

        `meta` is written beside them, for people to read.
        """
        place = self.entry(key)
        with self.workspace() as folder:
            entry = folder / "entry"
            entry.mkdir()
            for name in self._names:
                (entry / name).write_bytes(files[name])
            meta = {**meta, "key": key, "sha256": _digests(files)}
            (entry / _META).write_text(json.dumps(meta, indent=1), encoding="utf-8")
            place.parent.mkdir(exist_ok=True)
            while True:
                try:
                    entry.rename(place)
                    return dict(files)
                except OSError as error:
                    if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                        raise
                if winner := self.load(key):
                    return winner
                with suppress(FileNotFoundError):  # another process was faster
                    place.rename(Path(tempfile.mkdtemp(dir=folder)) / "damaged")

    def entry(self, key: str) -> Path:
        """The directory of an entry, whether it is there or not."""
        return self.root / self._kind / key

    @contextmanager
    def workspace(self) -> Iterator[Path]:
        """A directory in the same file system, removed at the end. An `OSError` inside becomes a `StorageError`."""
        work = self.root / "work"
        try:
            work.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(work)
            with _folder_of_ours(work) as folder:
                yield folder
        except OSError as error:
            fix = "free some space" if error.errno in _NO_ROOM else "make it writable"
            raise StorageError(
                f"the kernel cache {self.root} cannot be written ({error.strerror}); "
                f"{fix}, or set HADAGEN_CACHE to a directory that can be written"
            ) from error


@contextmanager
def _folder_of_ours(work: Path) -> Iterator[Path]:
    """A new folder in `work`, locked until it is removed at the end."""
    while True:
        folder = Path(tempfile.mkdtemp(dir=work))
        with _locked(folder) as ours:
            if ours is False:
                continue  # taken for abandoned before it was locked
            try:
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            return


def _remove_abandoned(work: Path) -> None:
    """Remove the folders of processes that were killed: nobody locks those any more."""
    for folder in work.iterdir():
        with _locked(folder) as abandoned:
            if abandoned:
                shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[bool | None]:
    """Whether the folder could be locked, which it then is; the system unlocks it when a process ends. None where the
    file system cannot say."""
    locked: bool | None
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # removed by now, or no directory
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked = os.fstat(descriptor).st_nlink > 0  # or it was removed in between
        except BlockingIOError:  # another has it
            locked = False
        except OSError:  # this file system has no such locks: nobody's folder is known to be abandoned
            locked = None
        yield locked
    finally:
        os.close(descriptor)


def _digests(files: Mapping[str, bytes]) -> dict[str, str]:
    return {name: sha256(content).hexdigest() for name, content in files.items()}
