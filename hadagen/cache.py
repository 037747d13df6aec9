"""The cache of compiled kernels: a directory of entries, each named by a digest of everything it depends on.

An entry is a directory of files, with a `meta.json` that has its key and the SHA-256 of each file. It is written in
another directory of the same file system, and renamed into place. So it is complete or absent. Any number of processes
may share a cache. If two build the same entry, the second uses that of the first.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from urllib.parse import quote

from hadagen.errors import StorageError

CACHE_SCHEMA = 2  # of the files of an entry; a new number makes all old entries unknown

FILES = ("source.cu", "kernel.ptx", "kernel.cubin", "log.txt")

_META = "meta.json"
_OLD_SECONDS = 24 * 3600  # far longer than any process works in a folder
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
    compiler: str,
    flags: Sequence[str],
    arch: str,
    source: str,
    headers: Mapping[str, str],
    schema: int = CACHE_SCHEMA,
) -> str:
    """SHA-256 of everything that a compiled kernel depends on.

    `compiler`: its full version. `flags`: in order. `source`: its text. `headers`: name → text.
    """
    parts = [schema, compiler, list(flags), arch, source, sorted(headers.items())]
    return sha256(json.dumps(parts).encode()).hexdigest()


class KernelCache:
    """The entries of one `kind`: directories in `root`/kind that hold the files `names`. They are made in `root`/work.

    Both directories are created at the first write. `load` never raises for a bad entry. `store` and `workspace` raise
    `StorageError` if the disk is full or read-only.
    """

    def __init__(self, root: Path, kind: str = "kernels", names: Sequence[str] = FILES) -> None:
        self.root, self._kind, self._names = root, kind, tuple(names)

    def load(self, key: str) -> dict[str, bytes] | None:
        """Name → content of the files of an entry; None if it is missing, damaged, or of another key."""
        folder = self.entry(key)
        try:
            meta = json.loads((folder / _META).read_bytes())
            files = {name: (folder / name).read_bytes() for name in self._names}
            return files if (meta["key"], meta["sha256"]) == (key, _digests(files)) else None
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return None

    def store(self, key: str, files: Mapping[str, bytes], meta: Mapping[str, object]) -> dict[str, bytes]:
        """Store the files of an entry and return them. If another process was first, return the files of that one.

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
        """The directory of an entry, which may not exist."""
        return self.root / self._kind / key

    @contextmanager
    def workspace(self) -> Iterator[Path]:
        """A directory in the same file system, removed at the end. An `OSError` inside becomes a `StorageError`."""
        work = self.root / "work"
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)  # whoever writes here decides what runs
            work.mkdir(exist_ok=True)
            _remove_abandoned(work)
            with _folder_of_ours(work) as folder:
                yield folder
        except OSError as error:
            fix = "free some space" if error.errno in _NO_ROOM else "make it writable"
            raise StorageError(
                f"the kernel cache {self.root} cannot be written ({error.strerror}); "
                f"{fix}, or set HADAGEN_CACHE to a directory that can be written"
            ) from error


def _of_this_machine() -> str:
    """How the names of its folders begin."""
    return f"{quote(platform.node(), safe='')}-"


@contextmanager
def _folder_of_ours(work: Path) -> Iterator[Path]:
    """A new folder in `work`, locked until it is removed at the end."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_of_this_machine(), dir=work))
        with _locked(folder) as ours:
            if ours is False:
                continue  # another process removed it as abandoned before it was locked
            try:
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            return


def _remove_abandoned(work: Path) -> None:
    """Remove the folders of killed processes, which no process locks any more.

    Some network file systems hide the locks of other machines. So a folder of another machine must also be old.
    """
    for folder in work.iterdir():
        with suppress(FileNotFoundError):  # another process may be faster
            age = time.time() - folder.stat().st_mtime
            if folder.name.startswith(_of_this_machine()) or age > _OLD_SECONDS:
                with _locked(folder) as abandoned:
                    if abandoned:
                        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[bool | None]:
    """Lock a folder. Yields whether that succeeded, or None if the file system has no locks.

    The system unlocks the folder when the process ends.
    """
    locked: bool | None
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # removed by now, or no directory
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked = os.fstat(descriptor).st_nlink > 0  # 0 if it was removed in between
        except BlockingIOError:  # another process has the lock
            locked = False
        except OSError:  # without locks, no folder is known to be abandoned
            locked = None
        yield locked
    finally:
        os.close(descriptor)


def _digests(files: Mapping[str, bytes]) -> dict[str, str]:
    return {name: sha256(content).hexdigest() for name, content in files.items()}
