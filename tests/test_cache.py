"""The cache: every input reaches the key, an entry is whole or absent, and any number of processes may share it."""

import errno
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hadagen.compiler import cache as cache_module
from hadagen.compiler.cache import FILES, KernelCache, cache_key, cache_root, open_cache, private_root
from hadagen.errors import StorageError

CONTENT = {name: f"content of {name}".encode() for name in FILES}
TEXTS = st.text(max_size=3)
ARGUMENTS = st.fixed_dictionaries(
    {
        "compiler": TEXTS,
        "flags": st.lists(TEXTS, max_size=3).map(tuple),
        "arch": TEXTS,
        "source": TEXTS,
        "headers": st.dictionaries(TEXTS, TEXTS, max_size=2),
        "schema": st.integers(0, 2),
    }
)


@pytest.fixture
def cache(tmp_path: Path) -> KernelCache:
    return KernelCache(tmp_path / "cache")


def entries(cache: KernelCache) -> list[str]:
    return sorted(path.name for path in (cache.root / "kernels").glob("*"))


@given(ARGUMENTS, ARGUMENTS, st.sampled_from(("compiler", "flags", "arch", "source", "headers", "schema")))
def test_keys_are_equal_exactly_where_the_inputs_are(one: dict[str, Any], other: dict[str, Any], name: str) -> None:
    """All that differ, and those that differ in one alone."""
    for changed in (other, one | {name: other[name]}):
        assert (cache_key(**one) == cache_key(**changed)) == (one == changed)


@pytest.mark.parametrize("name", [*FILES, "meta.json"])
@pytest.mark.parametrize("damage", ["missing", "short", "changed"])
def test_a_damaged_entry_counts_as_absent_and_is_replaced(cache: KernelCache, name: str, damage: str) -> None:
    cache.store("key", CONTENT, {})
    path = cache.root / "kernels" / "key" / name
    if damage == "missing":
        path.unlink()
    elif damage == "short":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.write_bytes(path.read_bytes().replace(b"e", b"x"))
    assert cache.load("key") is None
    assert cache.store("key", CONTENT, {}) == CONTENT
    assert cache.load("key") == CONTENT
    assert entries(cache) == ["key"]


@pytest.mark.parametrize(
    "meta", ["", "[]", "{}", '{"sha256": {}}', '{"key": "key", "sha256": 3}', "\xff", "[" * 100_000]
)
def test_foreign_metadata_counts_as_damage(cache: KernelCache, meta: str) -> None:
    cache.store("key", CONTENT, {})
    (cache.root / "kernels" / "key" / "meta.json").write_text(meta, encoding="latin-1")
    assert cache.load("key") is None


def test_a_file_in_the_place_of_an_entry_is_replaced(cache: KernelCache) -> None:
    (cache.root / "kernels").mkdir(parents=True)
    (cache.root / "kernels" / "key").write_text("not an entry")
    assert cache.store("key", CONTENT, {}) == CONTENT
    assert cache.load("key") == CONTENT


def test_all_of_many_writers_get_the_same(cache: KernelCache) -> None:
    candidates = [{**CONTENT, "log.txt": f"by writer {i}".encode()} for i in range(16)]
    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(lambda files: cache.store("key", files, {}), candidates))
    assert results[0] in candidates
    assert all(result == results[0] for result in results)
    assert cache.load("key") == results[0]


@pytest.mark.parametrize("failing", [*FILES, "meta.json"])
def test_a_full_disk_is_one_sentence_and_leaves_nothing_half_written(
    cache: KernelCache, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    opened = Path.open

    def full(path: Path, mode: str = "r", *arguments: Any, **keywords: Any) -> Any:
        if path.name == failing and "w" in mode:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return opened(path, mode, *arguments, **keywords)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(StorageError, match=r"No space left on device.*free some space, or set HADAGEN_CACHE"):
        cache.store("key", CONTENT, {})
    assert cache.load("key") is None
    assert entries(cache) == []
    assert os.listdir(cache.root / "work") == []


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="make it a folder, or set HADAGEN_CACHE to a directory that can be written"):
        KernelCache(tmp_path / "file" / "cache").store("key", CONTENT, {})


def test_what_a_killed_process_left_is_removed_by_the_next(cache: KernelCache) -> None:
    with cache.workspace() as ours:
        (ours / "inner").mkdir()
        killed = (
            "import os, sys, pathlib, hadagen.compiler.cache as c\n"
            "with c.KernelCache(pathlib.Path(sys.argv[1])).workspace() as folder:\n"
            "    (folder / 'inner').mkdir()\n"
            "    os.kill(os.getpid(), 9)"
        )
        subprocess.run([sys.executable, "-c", killed, str(cache.root)], check=False)
        assert len(os.listdir(cache.root / "work")) == 2
        cache.store("key", CONTENT, {})
        assert os.listdir(cache.root / "work") == [ours.name]
        assert (ours / "inner").is_dir()


def test_what_another_machine_left_is_removed_when_it_is_old(cache: KernelCache) -> None:
    """Its locks may not be seen here."""
    cache.store("key", CONTENT, {})
    theirs = cache.root / "work" / "elsewhere-1"
    theirs.mkdir()
    cache.store("other", CONTENT, {})
    assert theirs.is_dir()
    os.utime(theirs, (0, 0))
    cache.store("last", CONTENT, {})
    assert not theirs.exists()


def test_a_folder_that_is_taken_for_abandoned_before_it_is_locked_is_replaced(
    cache: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked, cleaned = cache_module.locked, []

    def clean_first(folder: Path) -> Any:
        if not cleaned:
            cleaned.append(folder)
            folder.rmdir()
        return locked(folder)

    monkeypatch.setattr(cache_module, "locked", clean_first)
    with cache.workspace() as folder:
        assert folder.is_dir()
        assert [folder] != cleaned


def test_an_entry_in_the_place_of_another_is_none(cache: KernelCache) -> None:
    cache.store("key", CONTENT, {})
    cache.entry("key").rename(cache.entry("other"))
    assert cache.load("other") is None
    assert cache.store("other", CONTENT, {}) == CONTENT
    assert cache.load("other") == CONTENT


def test_an_entry_that_appears_late_is_waited_for(cache: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on network file systems, where a name may be taken before it is seen."""
    rename, pauses = Path.rename, []

    def taken(path: Path, target: Path) -> Path:
        if path.name == "entry":
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
        return rename(path, target)

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == appears_after:
            monkeypatch.setattr(Path, "rename", rename)
            KernelCache(cache.root).store("key", {**CONTENT, "log.txt": b"late"}, {})
            monkeypatch.setattr(Path, "rename", taken)

    monkeypatch.setattr(cache_module.time, "sleep", sleep)
    monkeypatch.setattr(Path, "rename", taken)
    appears_after = 0  # never
    with pytest.raises(StorageError, match=r"is there and cannot be read; remove .*key, or set HADAGEN_CACHE"):
        cache.store("key", CONTENT, {})
    assert len(pauses) <= 20
    assert 3 < sum(pauses) < 30
    pauses.clear()
    appears_after = 4
    assert cache.store("key", CONTENT, {})["log.txt"] == b"late"
    assert len(pauses) == 4


def test_what_lies_beside_is_read_and_not_written(cache: KernelCache, tmp_path: Path) -> None:
    cache.store("key", CONTENT, {})
    other = KernelCache(tmp_path / "other", beside=[cache.root])
    assert other.load("key") == CONTENT
    assert not other.root.exists()
    other.store("new", CONTENT, {})
    assert other.load("new") == CONTENT
    assert cache.load("new") is None


def test_a_cache_that_is_only_read_has_another_beside_it(cache: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HADAGEN_CACHE", str(cache.root))
    cache.store("key", CONTENT, {})
    assert open_cache().root == cache.root
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != cache.root and access(path, mode))
    with pytest.warns(RuntimeWarning, match="are not kept for later processes: .* cannot be written"):
        beside = open_cache()
    beside.store("new", CONTENT, {})
    assert (beside.root, beside.load("key"), beside.load("new")) == (private_root(), CONTENT, CONTENT)
    assert cache.load("new") is None


@pytest.mark.parametrize("link", ["root", "work", "kernels"])
def test_a_link_that_leads_nowhere_leads_to_a_new_folder(cache: KernelCache, tmp_path: Path, link: str) -> None:
    """As after the disk that it leads to was emptied."""
    place = cache.root if link == "root" else cache.root / link
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(tmp_path / "gone" / "cache")
    if link == "work":  # from where entries are renamed
        (cache.root / "kernels").symlink_to(tmp_path / "gone" / "kernels")
    assert cache.store("key", CONTENT, {}) == cache.load("key") == CONTENT
    assert (tmp_path / "gone" / "cache").is_dir()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EMFILE])
def test_without_locks_a_cache_works(cache: KernelCache, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The folders of killed processes then stay."""

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    cache.store("first", CONTENT, {})
    (cache.root / "work" / f"{cache_module._of_this_machine()}left").mkdir()
    monkeypatch.setattr("fcntl.flock", refuse)
    if number == errno.EMFILE:
        opened = os.open

        def open_file(path: Any, flags: int, *rest: Any, **options: Any) -> int:
            return refuse() or 0 if flags & os.O_DIRECTORY else opened(path, flags, *rest, **options)

        monkeypatch.setattr(cache_module.os, "open", open_file)
    assert cache.store("key", CONTENT, {}) == cache.load("key") == CONTENT
    assert len(os.listdir(cache.root / "work")) == 1


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HADAGEN_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root() == tmp_path / ".cache" / "hadagen"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "hadagen"
    monkeypatch.setenv("HADAGEN_CACHE", str(tmp_path / "here"))
    assert cache_root() == tmp_path / "here"
