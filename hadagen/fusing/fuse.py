"""`hadagen.fuse`: the pass in the configuration of Inductor, and its report."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import ContextVar
from pathlib import Path
from threading import RLock
from typing import Any, cast

import torch
from torch._inductor import config, custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass

from hadagen.errors import UsageError
from hadagen.fusing.joining import Fusion, fuse_all

# Here because the joint graph has the derivatives already, and is not yet divided into what runs forward and backward;
# and after Inductor's own passes on it, because these remove conversions and views that do nothing.
_PLACE = "joint_custom_post_pass"
_found: deque[Fusion] = deque(maxlen=10_000)


class _Pass(CustomGraphPass):
    """The pass, without values of its own, because Inductor stores passes in keys of its cache."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        _found.extend(fuse_all(graph))

    def uuid(self) -> Any:
        """The cache key of the pass; it changes with any file of `fusing`."""
        files = tuple(map(str, sorted(Path(__file__).parent.glob("*.py"))))
        return custom_graph_pass.get_hash_for_files(files)

    def __reduce__(self) -> Any:
        """With the uuid, because PyTorch before 2.9 takes no other part of a pass into keys than its pickle."""
        return _the_pass, (self.uuid(),)


def _the_pass(uuid: Any) -> _Pass:
    return _PASS


class _Both(CustomGraphPass):
    """A pass that was there and then ours, for releases of PyTorch that take one pass."""

    def __init__(self, first: Callable[[torch.fx.Graph], None]) -> None:
        self.passes = first, _PASS

    def __call__(self, graph: torch.fx.Graph) -> None:
        for each in self.passes:
            each(graph)

    def uuid(self) -> Any:
        """The uuids of both passes. None if the first pass has none: Inductor then caches nothing."""
        uuids = tuple(each.uuid() if isinstance(each, CustomGraphPass) else None for each in self.passes)
        return uuids if all(uuids) else None


_PASS = _Pass()


def _with(passes: Any) -> Any:
    """The passes of a setting, and then ours."""
    others = _without(passes)
    if isinstance(others, list):
        return [*others, _PASS]
    if not callable(others):  # None, or what stands for a setting that nobody changed
        return _PASS
    return [others, _PASS] if hasattr(custom_graph_pass, "get_custom_graph_passes") else _Both(others)


def _without(passes: Any) -> Any:
    """The passes of a setting but ours."""
    if isinstance(passes, (list, tuple)):
        return [each for each in passes if each is not _PASS] or None
    return passes.passes[0] if isinstance(passes, _Both) else None if passes is _PASS else passes


class _InAllThreads:
    """In the place of the variable in which PyTorch, from 2.12, keeps the setting of each thread: the same, with our
    pass in every thread."""

    def __init__(self, setting: ContextVar[Any]) -> None:
        self.setting = setting

    def get(self) -> Any:
        return _with(self.setting.get())

    def set(self, passes: Any) -> Any:
        return self.setting.set(_without(passes))

    def reset(self, token: Any) -> None:
        self.setting.reset(token)


def _add() -> None:
    entry = cast(Any, config)._config[_PLACE]
    if isinstance(entry.user_override, ContextVar):
        entry.user_override = _InAllThreads(entry.user_override)
    elif not isinstance(entry.user_override, _InAllThreads):  # one setting for all threads
        setattr(config, _PLACE, _with(getattr(config, _PLACE)))


def _remove() -> None:
    entry = cast(Any, config)._config[_PLACE]
    if isinstance(entry.user_override, _InAllThreads):
        entry.user_override = entry.user_override.setting
    if (passes := getattr(config, _PLACE)) is not None:  # where a copy of the settings may have brought ours back
        setattr(config, _PLACE, _without(passes))


class _Fuse:
    """Let torch.compile make one operator of a rotation, the quantizer after it, and the activation before it.

    fuse(): add a pass to `torch._inductor.config.joint_custom_post_pass`, for all that is compiled afterwards, in all
        threads. Passes of others stay. Returns a context, at the end of which the pass is removed, unless another call
        still needs it: `with hadagen.fuse(): …`.
    fuse.report(): what was fused, and what was not with the reason: a list with attributes what, shape, dtype, nodes,
        where and reason, which is None for what was fused. `print(*hadagen.fuse.report(), sep="\\n")` shows it.
    fuse.undo(): remove the pass, for all calls.

    docs/fusing.md has a table of what is fused, and says what is rounded. Raises `UsageError` if this version of
    PyTorch has no such passes.
    """

    def __init__(self) -> None:
        self._calls: set[ExitStack] = set()
        self._lock = RLock()

    def __call__(self) -> ExitStack:
        """Add the pass. Returns a context, at the end of which it is removed, unless another call still needs it."""
        if not hasattr(config, _PLACE):
            raise UsageError(
                f"PyTorch {torch.__version__} has no torch._inductor.config.{_PLACE}, which hadagen.fuse adds a pass "
                "to; use PyTorch 2.6 or newer, or pass before= to the calls"
            )
        call = ExitStack()
        call.callback(self._end, call)
        with self._lock:
            self._calls.add(call)
            _add()
        return call

    def report(self) -> list[Fusion]:
        """What was found in graphs since the program began: fused, or not fused with the reason. A graph that PyTorch
        takes from its cache is not looked at, so it is missing."""
        return list(_found)

    def undo(self) -> None:
        """Remove the pass, for all that is compiled afterwards in any thread. Passes of others stay."""
        with self._lock:
            self._calls.clear()
            if hasattr(config, _PLACE):
                _remove()

    def _end(self, call: ExitStack) -> None:
        with self._lock:
            self._calls.discard(call)
            if not self._calls:
                self.undo()


fuse = _Fuse()
