"""The cache of compiled kernels: a directory of entries, each named by a digest of everything it depends on.

An entry is a directory of files, with a `meta.json` that has its key and the SHA-256 of each file. It is written in
another directory of the same file system, and renamed into place. So it is complete or absent. Any number of processes
may share a cache. If two build the same entry, the second uses that of the first. A key depends on contents and
versions alone, never on paths or times. So a cache may be filled on one machine, and only be read on another.

Whoever writes to a cache decides what runs. So a cache that others than the user and root could change is not used.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import json
import os
import platform
import shutil
import stat
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from urllib.parse import quote

from hadagen.errors import StorageError
from hadagen.owners import fault_of, fault_with, make_folder

CACHE_SCHEMA = 2  # of the files of an entry; a new number makes all old entries unknown

FILES = ("source.cu", "kernel.ptx", "kernel.cubin", "log.txt")

_META = "meta.json"
_OLD_SECONDS = 24 * 3600  # far longer than any process works in a folder
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_NO_FOLDER = (errno.ENOTDIR, errno.EEXIST, errno.ELOOP)
_IN_MEMORY = "/dev/shm"  # where containers may write that may write nowhere else
# Seconds before an entry is looked for again that is there and cannot be read. Some network file systems show it late.
_PAUSES = (0.0, *(0.01 * 2**i for i in range(9)))
_ELSEWHERE = "or set HADAGEN_CACHE to another place"

_warned: set[tuple[Path, str]] = set()
_private: list[Path] = []


def cache_root() -> Path:
    """`cache_place`. If others could change what lies there, a folder for this process alone instead, and a warning.

    Raises `StorageError` as `cache_place` and `private_root` do.
    """
    place = cache_place()
    problem = fault_of(place)
    if not problem:
        return place
    if (place, problem) not in _warned:
        _warned.add((place, problem))
        warnings.warn(
            f"the kernel cache {place} is neither read nor written, and compiled kernels are not kept: {problem}, "
            f"{_ELSEWHERE}",
            RuntimeWarning,
            stacklevel=2,
        )
    return private_root()


def private_root() -> Path:
    """An empty folder for this process and those that it forks, removed at its end. Raises `StorageError` if there is
    no place where this process may write and others could not put another in its stead."""
    if not _private:
        folder, owner = _temporary_folder(), os.getpid()

        def remove() -> None:
            if os.getpid() == owner:  # not at the end of a forked child
                shutil.rmtree(folder, ignore_errors=True)

        atexit.register(remove)
        _private.append(Path(folder))
    return _private[0]


def _temporary_folder() -> str:
    """In the directory for temporary files, or else in memory."""
    failure = ""
    for find in (tempfile.gettempdir, lambda: _IN_MEMORY):
        try:
            place = find()
            problem = fault_of(f"{place}/hadagen-")
            if not problem:
                return tempfile.mkdtemp(prefix="hadagen-", dir=place)
        except OSError as error:
            problem = f"{error.strerror}"
        failure = failure or problem
    raise StorageError(f"there is no place for temporary files ({failure}); set TMPDIR to a folder that can be written")


def cache_place() -> Path:
    """$HADAGEN_CACHE, or `hadagen` in the user's cache directory ($XDG_CACHE_HOME or ~/.cache).

    Raises `StorageError` if no home directory is known.
    """
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
    `beside`: roots of other caches, which are only read.

    Both directories are created at the first write. `load` never raises for a bad entry, such as one that others could
    change. `store` and `workspace` raise `StorageError` if the disk is full or read-only, or if
    others could change what lies in the directory.
    """

    def __init__(
        self, root: Path, kind: str = "kernels", names: Sequence[str] = FILES, beside: Sequence[Path] = ()
    ) -> None:
        self.root, self._kind, self._names, self._beside = root, kind, tuple(names), tuple(beside)

    def load(self, key: str) -> dict[str, bytes] | None:
        """Name → content of the files of an entry; None if it is missing, damaged, or of another key."""
        for root in (*self._beside, self.root):
            folder = root / self._kind / key
            with suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
                meta = json.loads(_own_content(folder / _META))
                files = {name: _own_content(folder / name) for name in self._names}
                if (meta["key"], meta["sha256"]) == (key, _digests(files)):
                    return files
        return None

    def store(self, key: str, files: Mapping[str, bytes], meta: Mapping[str, object]) -> dict[str, bytes]:
        """Store the files of an entry and return them. If another process was first, return the files of that one.

        `meta` is written beside them, for people to read.
        """
        place = self.entry(key)
        with self.workspace() as folder:
            entry = folder / "entry"
            entry.mkdir(mode=0o755)
            meta = {**meta, "key": key, "sha256": _digests(files)}
            contents = {name: files[name] for name in self._names} | {_META: json.dumps(meta, indent=1).encode()}
            for name, content in contents.items():
                (entry / name).write_bytes(content)
                (entry / name).chmod(0o644)
            make_folder(place.parent)
            for pause in _PAUSES:
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
                    continue
                time.sleep(pause)
            raise StorageError(
                f"an entry of the kernel cache is there and cannot be read; remove {place}, {_ELSEWHERE}"
            )

    def entry(self, key: str) -> Path:
        """The directory of an entry, which may not exist."""
        return self.root / self._kind / key

    @contextmanager
    def workspace(self) -> Iterator[Path]:
        """A directory in the same file system, removed at the end. An `OSError` inside becomes a `StorageError`."""
        work = self.root / "work"
        try:
            make_folder(self.root, mode=0o700)
            make_folder(work)
            for each in (work, self.root / self._kind):
                if problem := fault_of(each):
                    raise StorageError(f"the kernel cache {self.root} is not written: {problem}, {_ELSEWHERE}")
            _remove_abandoned(work)
            with _folder_of_ours(work) as folder:
                yield folder
        except OSError as error:
            fix = "free some space" if error.errno in _NO_ROOM else "make it writable"
            fix = "make it a folder" if error.errno in _NO_FOLDER else fix
            raise StorageError(
                f"the kernel cache {self.root} cannot be written ({error.strerror}); "
                f"{fix}, or set HADAGEN_CACHE to a directory that can be written"
            ) from error


def open_cache() -> KernelCache:
    """The kernels of `cache_root`. If they cannot be written, new ones are kept for this process, which a warning says.
    Raises `StorageError` as `cache_root` does."""
    root = cache_root()
    if not root.is_dir() or os.access(root, os.W_OK):
        return KernelCache(root)
    warn_not_kept(f"the kernel cache {root} cannot be written")
    return KernelCache(private_root(), beside=[root])


def warn_not_kept(why: object) -> None:
    """Warn that new kernels are kept for this process alone."""
    warnings.warn(
        f"kernels that are compiled here are not kept for later processes: {why}", RuntimeWarning, stacklevel=3
    )


def _own_content(path: Path) -> bytes:
    """The content of a file of an entry. Raises `OSError` if others could change it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # for a pipe, which is refused, would block
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or fault_with(found, path) or fault_with(path.parent.stat(), path.parent):
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        return file.read()


def _of_this_machine() -> str:
    """The text with which the names of this machine's folders begin."""
    return f"{quote(platform.node(), safe='')}-"


@contextmanager
def _folder_of_ours(work: Path) -> Iterator[Path]:
    """A new folder in `work`, locked until it is removed at the end."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_of_this_machine(), dir=work))
        with locked(folder) as ours:
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
                with locked(folder) as abandoned:
                    if abandoned:
                        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def locked(folder: Path) -> Iterator[bool | None]:
    """Lock a folder. Yields whether that succeeded, or None if the file system has no locks.

    The system unlocks the folder when the process ends.
    """
    locked: bool | None
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:  # removed by now
        yield False
        return
    except OSError:  # such as a process that has too many open files
        yield None
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
