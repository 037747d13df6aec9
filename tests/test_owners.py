"""Folders of bundles and of compiled kernels: used only if only the user and root could change what lies there."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from sample_bundle import hide_bundles, write_sample
from sample_trials import PROBLEM

import hadagen
from hadagen import owners
from hadagen.compiler.cache import FILES, KernelCache, cache_root, private_root
from hadagen.errors import StorageError
from hadagen.files.atomic_file import atomic_file
from hadagen.owners import fault_beside, fault_of, make_folder
from hadagen.runtime.choose import bundles
from hadagen.runtime.choose.entries import Match
from hadagen.runtime.launch import autotune

CONTENT = {name: f"content of {name}".encode() for name in FILES}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two folders deep, of the user alone."""
    monkeypatch.setattr(owners, "_is_own_group", lambda *_: False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    make_folder(tmp_path / "outer" / "inner")
    return tmp_path / "outer" / "inner"


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a file or folder one of another user, as root; otherwise make all files those of another."""
    if os.geteuid() == 0:
        os.chown(path, 4711, -1, follow_symlinks=False)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4711)


# ---- the rules -------------------------------------------------------------------------------------------------------
def test_what_is_the_users_alone_is_fine(folder: Path) -> None:
    assert fault_of(folder) == ""
    for mode in (0o700, 0o755, 0o555):
        folder.chmod(mode)
        assert fault_of(folder) == ""
    assert fault_of(folder / "missing" / "more") == ""
    assert fault_of("/usr") == ""


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777, 0o1777])
def test_what_others_may_write_is_not(folder: Path, mode: int) -> None:
    """The folder itself, or one above it; but there the sticky bit is enough."""
    folder.chmod(mode)
    assert fault_of(folder) == f"others can write to {folder}; run: chmod go-w {folder}"
    folder.chmod(0o700)
    folder.parent.chmod(mode)
    for path in (folder, folder / "missing"):
        said = "" if mode & 0o1000 else f"others can write to {folder.parent}; run: chmod go-w {folder.parent}"
        assert fault_of(path) == said


@pytest.mark.parametrize("which", [lambda folder: folder, lambda folder: folder.parent], ids=["folder", "parent"])
def test_what_is_of_another_user_is_not(
    folder: Path, which: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    give_away(which(folder), monkeypatch)
    assert " belongs to " in fault_of(folder)
    assert "; as root run: chown " in fault_of(folder)


def test_a_link_counts_as_what_it_points_to_if_others_cannot_change_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_folder = folder.parent / "open"
    open_folder.mkdir()
    (open_folder / "link").symlink_to(folder)
    (folder.parent / "link").symlink_to(Path("open", "..", "open", "link"))
    (folder.parent / "loop").symlink_to(folder.parent / "loop")
    assert fault_of(folder.parent / "link") == ""
    assert "cannot be looked at" in fault_of(folder.parent / "loop")
    open_folder.chmod(0o777)
    assert fault_of(folder.parent / "link") == f"others can write to {open_folder}; run: chmod go-w {open_folder}"
    open_folder.chmod(0o1777)
    assert fault_of(folder.parent / "link") == ""
    give_away(open_folder / "link", monkeypatch)
    assert " belongs to " in fault_of(folder.parent / "link")


def test_within_the_home_directory_what_lies_above_it_does_not_count(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.parent.chmod(0o777)
    assert fault_of(folder)
    monkeypatch.setenv("HOME", str(folder))
    assert fault_of(folder) == fault_of(folder / "cache") == ""
    (folder / "cache").symlink_to(folder.parent)
    assert fault_of(folder / "cache")


def test_the_file_that_was_opened_counts(folder: Path) -> None:
    """Not another of its name."""
    (folder / "one").touch(0o644)
    (folder / "other").touch()
    (folder / "other").chmod(0o666)
    assert fault_of(folder / "one", (folder / "one").stat()) == ""
    assert fault_of(folder / "one", (folder / "other").stat()).startswith(f"others can write to {folder / 'one'}; run")


@pytest.mark.parametrize(
    ("user", "group", "members", "is_fine"),
    [
        (None, ("root", 0), ["image"], True),
        (("ada", 1000), ("ada", 1000), ["image"], False),
        (("ada", 1000), ("ada", 1000), [], True),
        (("ada", 1000), ("ada", 1000), ["ada"], True),
        (("ada", 1000), ("ada", 1000), ["ada", "bob"], False),
        (("ada", 100), ("users", 100), [], False),
        (("ada", 1000), ("ada", 1001), [], False),
        (("ada", 1000), ("root", 0), [], True),
        (("ada", 1000), ("root", 0), ["bob"], False),
        (None, ("root", 0), [], True),
        (None, None, [], False),
    ],
)
def test_the_group_of_a_user_alone_may_write(
    user: tuple[str, int] | None,
    group: tuple[str, int] | None,
    members: list[str],
    is_fine: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a container, the user may have no name, and root's group the user of the image as a member."""
    import grp
    import pwd

    def find_user(number: int) -> pwd.struct_passwd:
        if number == 1001:
            return pwd.struct_passwd(("image", "x", 1001, 0, "", "/", "/bin/sh"))
        if user is None:
            raise KeyError(number)
        return pwd.struct_passwd((user[0], "x", 4711, user[1], "", "/", "/bin/sh"))

    def find_group(number: int) -> grp.struct_group:
        if group is None:
            raise KeyError(number)
        return grp.struct_group((group[0], "x", group[1], members))

    monkeypatch.setattr(pwd, "getpwuid", find_user)
    monkeypatch.setattr(grp, "getgrgid", find_group)
    of_image = frozenset({1001}) if "image" in members else frozenset()
    assert owners._is_own_group.__wrapped__(4711, group[1] if group else 4711, of_image) is is_fine


@pytest.fixture
def image(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home directory of a container that OpenShift starts, of the image's user and root's group. The process has
    that group, and a number that the image does not know. The user that runs the tests plays that of the image."""
    group = folder.stat().st_gid
    monkeypatch.setattr(owners, "_ROOT", 4711 if os.geteuid() == 0 else 0)
    monkeypatch.setattr(owners, "_ROOT_GROUP", group)
    monkeypatch.setattr(owners, "_is_own_group", lambda _, its, of_image: its == group and len(of_image) == 1)
    monkeypatch.setattr(os, "getegid", lambda: group)
    monkeypatch.setattr(os, "geteuid", lambda: 1000660000)
    monkeypatch.setenv("HOME", str(folder))
    for name in (".", ".cache", ".cache/hadagen"):
        (folder / name).mkdir(exist_ok=True)
        (folder / name).chmod(0o775)
    return folder


def test_the_user_of_an_image_may_own_what_a_container_uses(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HADAGEN_CACHE")  # which tests have
    for place in (image, image / ".cache" / "hadagen", image / "missing"):
        assert fault_of(place) == ""
    assert cache_root() == image / ".cache" / "hadagen"
    cache = KernelCache(cache_root())
    assert cache.store("key", CONTENT, {}) == cache.load("key") == CONTENT
    cache.root.chmod(0o777)
    assert fault_of(cache.root) == f"others can write to {cache.root}; as root run: chmod go-w {cache.root}"


@pytest.mark.parametrize("change", ["root", "group", "home of the user alone", "home of another group", "no home"])
def test_elsewhere_the_owner_of_the_home_directory_is_a_user_like_others(
    image: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process of root does not use files of others, nor one of an ordinary group, whatever HOME names."""
    owner, place = image.stat().st_uid, image / ".cache" / "hadagen"
    if change == "root":
        monkeypatch.setattr(os, "geteuid", lambda: owners._ROOT)
    elif change == "group":
        monkeypatch.setattr(os, "getegid", lambda: 100)
    elif change == "home of the user alone":
        image.chmod(0o755)
    elif change == "home of another group":
        monkeypatch.setattr(owners, "_ROOT_GROUP", 100)
        monkeypatch.setattr(os, "getegid", lambda: 100)
    else:
        monkeypatch.setenv("HOME", str(image / "missing"))
    place.chmod(0o755)
    assert owner not in owners._owners()
    assert " belongs to " in fault_of(place)
    assert " belongs to " in owners.fault_with(place.stat(), place)


def test_where_files_have_no_owners_nothing_is_checked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.chmod(0o777)
    status = folder.stat()
    monkeypatch.delattr(os, "geteuid")
    assert fault_of(folder) == fault_beside(folder, status, folder.parent) == owners.fault_with(status, folder) == ""


def test_what_is_shipped_may_be_as_open_as_the_code_and_no_more(folder: Path) -> None:
    file = folder / "sm90.db"
    file.touch(0o644)
    package = folder.parent
    assert fault_beside(file, file.stat(), package) == ""
    for path in (file, folder):
        before = path.stat().st_mode
        path.chmod(0o775)
        assert fault_beside(file, file.stat(), package) == f"others can write to {path}; run: chmod go-w {path}"
        package.chmod(0o775)
        assert fault_beside(file, file.stat(), package) == ""
        package.chmod(0o755)
        path.chmod(before)


def test_folders_are_made_for_the_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_folder(tmp_path / "a" / "b")
        make_folder(tmp_path / "a" / "c", mode=0o700)
        with atomic_file(tmp_path / "d" / "file"):
            pass
        path = write_sample(tmp_path / "e" / "sm90.db")
        KernelCache(tmp_path / "f" / "g").store("key", CONTENT, {})
    finally:
        os.umask(before)
    modes = {str(each.relative_to(tmp_path)): each.stat().st_mode & 0o777 for each in tmp_path.rglob("*")}
    assert (modes["a/b"], modes["a/c"], modes["d"], modes["e"], modes["f/g"]) == (0o755, 0o700, 0o755, 0o755, 0o700)
    assert path.stat().st_mode & 0o022 == 0
    assert not any(mode & 0o022 for name, mode in modes.items() if name.startswith("f"))
    with pytest.raises(NotADirectoryError):
        make_folder(path)


# ---- bundles ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle where calls look for it."""
    hide_bundles(folder, monkeypatch)
    monkeypatch.setattr(bundles, "_warned", set())
    return write_sample(bundles.user_directory() / "sm90.db")


def matches(times: int = 1) -> tuple[list[Match], list[str]]:
    """What calls find, and the warnings."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = [hadagen.best_config(PROBLEM, 1, arch="sm90", inplace=True).match for _ in range(times)]
    return found, [str(each.message) for each in said]


@pytest.mark.parametrize("place", [1, 2, 3])
def test_bundles_in_a_folder_that_others_could_change_are_left_out(found: Path, place: int) -> None:
    assert matches() == ([Match.SAME_ARCH], [])
    opened = found.parents[place - 1]
    opened.chmod(0o777)
    (found.parent / "more.db").write_bytes(found.read_bytes())
    best, (said,) = matches(2)
    assert best == [Match.GENERIC] * 2
    assert said == (
        f"hadagen goes on without the bundles in {found.parent}: others can write to {opened}; run: chmod go-w "
        f"{opened}, or name them in HADAGEN_BUNDLE"
    )
    with pytest.raises(StorageError, match=f"calls would not use .*: others can write to {opened}"):
        autotune._check_use(found)
    opened.chmod(0o755)
    assert matches() == ([Match.SAME_ARCH], [])


def test_a_bundle_that_others_could_change_is_left_out(found: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that a link points to, too. The user may still name it."""
    found.chmod(0o666)
    best, (said,) = matches(2)
    assert best == [Match.GENERIC] * 2
    assert f"without a bundle: {found} could be changed by others: others can write to {found}; run: chmod go-w" in said
    monkeypatch.setenv(bundles.VARIABLE, str(found))
    assert matches() == ([Match.SAME_ARCH], [])
    monkeypatch.delenv(bundles.VARIABLE)
    assert matches() == ([Match.GENERIC], [])
    found.chmod(0o644)
    assert matches() == ([Match.SAME_ARCH], [])
    shared = found.parents[3] / "shared"
    shared.mkdir()
    found.replace(shared / "sm90.db")
    found.symlink_to(shared / "sm90.db")
    assert matches() == ([Match.SAME_ARCH], [])
    (shared / "sm90.db").touch()  # a new state
    shared.chmod(0o777)
    best, (said,) = matches()
    assert f"others can write to {shared}; run" in said


# ---- the cache -------------------------------------------------------------------------------------------------------
@pytest.fixture
def cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> KernelCache:
    monkeypatch.setenv("HADAGEN_CACHE", str(folder / "cache"))
    cache = KernelCache(cache_root())
    cache.store("key", CONTENT, {})
    return cache


def test_a_cache_that_others_could_change_is_neither_read_nor_written(
    cache: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cache_root() == cache.root
    cache.root.parent.chmod(0o777)
    with pytest.warns() as said:
        roots = {cache_root() for _ in range(3)}
    assert roots == {private_root()}
    assert [str(each.message) for each in said] == [
        f"the kernel cache {cache.root} is neither read nor written, and compiled kernels are not kept: others can "
        f"write to {cache.root.parent}; run: chmod go-w {cache.root.parent}, or set HADAGEN_CACHE to another place"
    ]
    assert private_root().stat().st_mode & 0o777 == 0o700
    instead = KernelCache(private_root(), "tests")
    assert instead.store("key", CONTENT, {}) == instead.load("key") == CONTENT
    with pytest.raises(StorageError, match=r"is not written: others can write to .*, or set HADAGEN_CACHE to another"):
        cache.store("other", CONTENT, {})


def test_temporary_files_lie_where_others_cannot_replace_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in a /tmp without the sticky bit, as volumes of Kubernetes are."""
    memory = folder.parent / "memory"
    memory.mkdir()
    monkeypatch.setattr("hadagen.compiler.cache._private", [])
    monkeypatch.setattr("hadagen.compiler.cache._IN_MEMORY", str(memory))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(folder))
    folder.chmod(0o777)
    memory.chmod(0o777)
    with pytest.raises(StorageError, match=f"no place for temporary files .others can write to {folder}; run"):
        private_root()
    memory.chmod(0o1777)
    assert private_root().parent == memory
    monkeypatch.setattr("hadagen.compiler.cache._private", [])
    folder.chmod(0o1777)
    assert private_root().parent == folder


@pytest.mark.parametrize("name", ["", "kernel.cubin", "meta.json"])
@pytest.mark.parametrize("how", ["mode", "owner", "pipe"])
def test_an_entry_that_others_could_have_changed_is_made_again(
    cache: KernelCache, name: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = cache.entry("key") / name
    with monkeypatch.context() as patch:
        if how == "mode":
            path.chmod(0o777)
        elif how == "owner":
            give_away(path, patch)
        elif name:
            path.unlink()
            os.mkfifo(path)
        else:
            return
        assert cache.load("key") is None
    if os.geteuid() == 0 or how != "owner":
        assert cache.store("key", CONTENT, {}) == cache.load("key") == CONTENT


def test_a_folder_that_was_there_before_the_cache_is_not_trusted(folder: Path) -> None:
    """As one that another user made in /tmp just before."""
    folder.chmod(0o1777)
    (folder / "cache" / "work").mkdir(parents=True)
    (folder / "cache" / "work").chmod(0o777)
    with pytest.raises(StorageError, match=r"is not written: others can write to .*work; run: chmod go-w"):
        KernelCache(folder / "cache").store("key", CONTENT, {})
