"""Who else may change a file or a folder. What a process loads as code should be the user's, or of root.

The rules are those of StrictModes in OpenSSH. A file or folder, and all folders above it, must belong to the user or to
root, and nobody else may write there. Within the home directory, only the folders from there on count. Three cases that
are usual are fine too:

- a folder above, like /tmp, where all may write but only remove what is theirs (the sticky bit);
- writing by the group of the user's own name, or of root, if it has no other members;
- in a container whose users are mapped, a folder above that belongs to a user who is not.

A container that runs under a number that its image does not know, as in OpenShift, has another user: that of the image,
to whom the home directory belongs there. `_user_of_image` says when.

What keeps these rules only the user and root can change. So it cannot be replaced between the check and the use. Where
files have no owners (no `os.geteuid`), nothing is checked.
"""

from __future__ import annotations

import errno
import functools
import os
import shlex
import stat
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

_ROOT = _ROOT_GROUP = 0
_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_MOST_LINKS = 40  # as in Linux
_ALL_USERS = 0xFFFFFFFF  # in the map of a process that is in no such container


def fault_of(path: str | os.PathLike[str], opened: os.stat_result | None = None) -> str:
    """Why others could change what is at a path, and what to do, as a clause; "" if they cannot.

    opened: of the file that was opened by this path. If nothing is there, the folders above it are checked.
    """
    if not hasattr(os, "geteuid"):
        return ""
    absolute = Path(os.path.abspath(path))
    real, home = Path(os.path.realpath(absolute)), Path(os.path.realpath(os.path.expanduser("~")))
    beyond = set(home.parents) if real.is_relative_to(home) else set()
    found: list[tuple[Path, os.stat_result]] = []
    complete = False
    try:
        for each in _on_the_way(absolute):
            found.append(each)
        complete = True
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        return f"{path} cannot be looked at ({error.strerror}); make it readable"
    for place, status in found[: len(found) - complete]:
        if place in beyond:
            continue
        owners = _owners() | _unmapped()
        may_write = _OTHERS if status.st_mode & stat.S_ISVTX or stat.S_ISLNK(status.st_mode) else 0
        if problem := fault_with(status, place, owners, may_write):
            return problem
    place, status = found[-1]
    return fault_with(opened or status, place, _owners()) if complete else ""


def fault_beside(path: Path, opened: os.stat_result, folder: Path) -> str:
    """Why users who cannot change what lies in `folder` could change a file; "" if they could not.

    For what belongs to the code in the folder, which runs anyway, whoever owns it.
    """
    if not hasattr(os, "geteuid"):
        return ""
    known = folder.stat()
    owners, may_write = _owners() | {known.st_uid}, known.st_mode & _OTHERS
    return fault_with(path.parent.stat(), path.parent, owners, may_write) or fault_with(opened, path, owners, may_write)


def fault_with(found: os.stat_result, path: Path, owners: Collection[int] | None = None, may_write: int = 0) -> str:
    """Why others could change a file or folder, without those above it. owners: who may, the user and root if it is not
    given. may_write: the bits of the mode for others that are fine."""
    if not hasattr(os, "geteuid"):
        return ""
    owners = _owners() if owners is None else owners
    name = shlex.quote(str(path))
    if found.st_uid not in owners:
        return f"{path} belongs to {_user(found.st_uid)}; as root run: chown {os.geteuid()} {name}"
    others = found.st_mode & _OTHERS & ~may_write
    if others & stat.S_IWGRP and _is_own_group(os.geteuid(), found.st_gid, _user_of_image()):
        others &= ~stat.S_IWGRP
    run = "run" if os.geteuid() in (_ROOT, found.st_uid) else "as root run"
    return f"others can write to {path}; {run}: chmod go-w {name}" if others else ""


def make_folder(path: Path, mode: int = 0o755) -> None:
    """Make a folder and those above it where they are missing, also where a link points. By default, only the user may
    write there. Raises `OSError`."""
    missing, path = [], Path(os.path.realpath(path))
    while not os.path.lexists(path):
        missing.append(path)
        path = path.parent
    for each in reversed(missing):
        each.mkdir(mode, exist_ok=True)
    if not missing and not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))


def _on_the_way(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """All folders and links that opening a path goes through, and at last what is there. Raises `OSError`."""
    place, names, links = Path(path.anchor), list(reversed(path.parts[1:])), 0
    yield place, place.lstat()
    while names:
        name = names.pop()
        here = place.parent if name == ".." else place / name
        found = here.lstat()
        yield here, found
        if not stat.S_ISLNK(found.st_mode):
            place = here
            continue
        if (links := links + 1) > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        target = here.readlink()
        if target.is_absolute():
            place = Path(target.anchor)
        names += reversed(target.parts[1:] if target.is_absolute() else target.parts)


def _owners() -> set[int]:
    return {_ROOT, os.geteuid()} | _user_of_image()


def _user_of_image() -> frozenset[int]:
    """The owner of the home directory, if root's group may write there, and this process has that group but not root's
    user.

    So OpenShift starts a container: the image gives its files to a user of its own and to root's group, and the process
    has that group and a number that nobody knew before. Whoever made the image decides what runs anyway. Where people
    share a machine no process is of this kind, and nobody can give a folder to a group without being in it.
    """
    if os.geteuid() != _ROOT and os.getegid() == _ROOT_GROUP:
        with suppress(OSError):
            home = os.stat(os.path.expanduser("~"))
            if home.st_gid == _ROOT_GROUP and home.st_mode & stat.S_IWGRP:
                return frozenset({home.st_uid})
    return frozenset()


@functools.cache
def _is_own_group(user: int, group: int, of_image: frozenset[int] = frozenset()) -> bool:
    """Whether the members of a group are the user, or root, or the user of the image, alone."""
    import grp
    import pwd

    members: set[str] = set()
    with suppress(KeyError):
        members = set(grp.getgrgid(group).gr_mem)
    names = {"root"}
    for each in (*of_image, user):
        with suppress(KeyError):
            entry = pwd.getpwuid(each)
            names.add(entry.pw_name)
            if (each, entry.pw_gid, grp.getgrgid(group).gr_name) == (user, group, entry.pw_name):
                return members <= {entry.pw_name}
    return group == _ROOT_GROUP and members <= names


@functools.cache
def _unmapped() -> frozenset[int]:
    """The user that stands for all who are not mapped into the container of this process; none outside of one."""
    with suppress(OSError, ValueError):
        counts = [int(line.split()[2]) for line in Path("/proc/self/uid_map").read_text().splitlines()]
        if sum(counts) < _ALL_USERS:
            return frozenset({int(Path("/proc/sys/kernel/overflowuid").read_text())})
    return frozenset()


def _user(number: int) -> str:
    import pwd

    with suppress(KeyError):
        return f"{pwd.getpwuid(number).pw_name} (uid {number})"
    return f"uid {number}"
