"""The cache of compiled kernels: a directory of entries named by a digest of everything that went into them.

An entry is a directory of `FILES` and a `meta.json` with their SHA-256. It is written aside, in the same file system,
and renamed into place, so it is there whole or not at all. Any number of processes may share a cache; of two that build
the same entry, the second uses what the first put there.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

from hadagen.errors import StorageError

CACHE_SCHEMA = 1  # of an entry's files; another number makes every old entry unknown

FILES = ("source.cu", "kernel.ptx", "kernel.cubin", "log.txt")

_META = "meta.json"
_STALE_SECONDS = 24 * 3600


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
    """The entries in `root`/kernels, made beside it in `root`/work. Both directories are made when first written to.

    `load` never raises for what it finds. `store` and `workspace` raise `StorageError` where the disk is full or may
    not be written.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def load(self, key: str) -> dict[str, bytes] | None:
        """The `FILES` of an entry, or None where there is none or it is damaged."""
        folder = self._entry(key)
        try:
            digests = json.loads((folder / _META).read_bytes())["sha256"]
            files = {name: (folder / name).read_bytes() for name in FILES}
        except (OSError, ValueError, LookupError, TypeError):
            return None
        return files if digests == _digests(files) else None

    def store(self, key: str, files: Mapping[str, bytes], meta: Mapping[str, object]) -> dict[str, bytes]:
        """Put `FILES` in place and return them: those of the process that was first, where there were two.

        `meta` is written beside them, for people to read.
        """
        place = self._entry(key)
        with self.workspace() as folder:
            entry = folder / "entry"
            entry.mkdir()
            for name in FILES:
                (entry / name).write_bytes(files[name])
            (entry / _META).write_text(json.dumps({**meta, "sha256": _digests(files)}, indent=1), encoding="utf-8")
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

    @contextmanager
    def workspace(self) -> Iterator[Path]:
        """A directory in the same file system, removed at the end. An `OSError` inside becomes a `StorageError`."""
        work = self.root / "work"
        try:
            work.mkdir(parents=True, exist_ok=True)
            _remove_stale(work)
            with tempfile.TemporaryDirectory(dir=work) as folder:
                yield Path(folder)
        except OSError as error:
            raise StorageError(
                f"the kernel cache {self.root} cannot be written ({error.strerror}); "
                "free some space or set HADAGEN_CACHE to a directory that can be written"
            ) from error

    def _entry(self, key: str) -> Path:
        return self.root / "kernels" / key


def _remove_stale(work: Path) -> None:
    """Remove what processes that were killed have left behind."""
    for folder in work.iterdir():
        with suppress(FileNotFoundError):  # finished while we looked
            if time.time() - folder.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


def _digests(files: Mapping[str, bytes]) -> dict[str, str]:
    return {name: sha256(content).hexdigest() for name, content in files.items()}
