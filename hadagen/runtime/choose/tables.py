"""Tables of remembered calls and kernels. All of the runtime may import this module."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from typing import Any

from hadagen.errors import HadagenError
from hadagen.gpu.driver import LoadedKernel
from hadagen.problem.problem import Problem

calls: dict[tuple[Any, ...], Any] = {}  # key → `Run`, for all calls with it
timed: dict[Any, list[int]] = {}  # `Kind` → the element counts of its kernels, ascending
found: dict[tuple[Any, int], LoadedKernel | None] = {}  # by `Kind` and a timed element count
loaded: dict[tuple[int, str], LoadedKernel] = {}  # by device and digest: buckets share kernels
unfit: dict[int, dict[str, HadagenError]] = defaultdict(dict)  # device → digest → why the kernel does not run there
failed: dict[Any, str] = {}  # `Kind` → why its kernel cannot run here
unmade: dict[Problem, str] = {}  # why no kernel can be generated
lock = threading.Lock()  # for entering into `timed` and `found`


def forget(problem: Problem | None = None) -> None:
    """Forget the kernels of all calls, so that the next ones look for them, and what was found for a problem. Loaded
    kernels stay, because graphs may hold them."""
    calls.clear()
    with lock:
        unmade.pop(problem, None)  # type: ignore[arg-type]
        for kind in [kind for kind in timed if kind.problem == problem]:
            del timed[kind]
        for key in [key for key in found if key[0].problem == problem]:
            del found[key]
        for kind in [kind for kind in failed if kind.problem == problem]:
            del failed[kind]


def clear() -> None:
    """Start anew in a forked child: it has no CUDA, loaded kernels belong to the parent, and a thread of the parent may
    hold the lock."""
    global lock
    lock = threading.Lock()
    for table in (calls, timed, found, loaded, unfit, failed, unmade):
        table.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=clear)
