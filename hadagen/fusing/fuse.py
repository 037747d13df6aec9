"""`hadagen.fuse`: the pass in the configuration of Inductor, and its report."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

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
        """Another one for other sources of this room."""
        files = tuple(map(str, sorted(Path(__file__).parent.glob("*.py"))))
        return custom_graph_pass.get_hash_for_files(files)


class _Both(CustomGraphPass):
    """A pass that was there and then ours, for releases of PyTorch that take one pass."""

    def __init__(self, first: Callable[[torch.fx.Graph], None]) -> None:
        self.first = first

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.first(graph)
        _PASS(graph)

    def uuid(self) -> Any:
        """Like that of the first, where it has one; Inductor caches nothing without."""
        first = self.first.uuid() if isinstance(self.first, CustomGraphPass) else None
        return first and (first, _PASS.uuid())


_PASS = _Pass()


class _Fuse:
    """Let torch.compile make one operator of a rotation, the quantizer after it, and the activation before it.

    fuse(): add a pass to `torch._inductor.config.joint_custom_post_pass`, once, for all that is compiled afterwards.
        Passes of others stay. Returns a context, at the end of which the pass is removed: `with hadagen.fuse(): …`.
    fuse.report(): what was fused, and what was not with the reason: a list with attributes what, shape, dtype, nodes,
        where and reason, which is None for what was fused. `print(*hadagen.fuse.report(), sep="\\n")` shows it.
    fuse.undo(): remove the pass.

    docs/fusing.md has a table of what is fused, and says what is rounded. Raises `UsageError` if this version of
    PyTorch has no such passes.
    """

    def __call__(self) -> ExitStack:
        """Add the pass. Returns a context, at the end of which it is removed."""
        if not hasattr(config, _PLACE):
            raise UsageError(
                f"PyTorch {torch.__version__} has no torch._inductor.config.{_PLACE}, which hadagen.fuse adds a pass "
                "to; use PyTorch 2.6 or newer, or pass before= to the calls"
            )
        self.undo()
        others = getattr(config, _PLACE)
        if isinstance(others, (list, tuple)):
            both: Any = [*others, _PASS]
        elif others is None:
            both = _PASS
        else:
            takes_lists = hasattr(custom_graph_pass, "get_custom_graph_passes")
            both = [others, _PASS] if takes_lists else _Both(others)
        setattr(config, _PLACE, both)
        stack = ExitStack()
        stack.callback(self.undo)
        return stack

    def report(self) -> list[Fusion]:
        """What was found in graphs since the program began: fused, or not fused with the reason. A graph that PyTorch
        takes from its cache is not looked at, so it is missing."""
        return list(_found)

    def undo(self) -> None:
        """Remove the pass, for all that is compiled afterwards. Passes of others stay."""
        others = getattr(config, _PLACE, None)
        if isinstance(others, (list, tuple)):
            setattr(config, _PLACE, [each for each in others if each is not _PASS] or None)
        elif others is _PASS:
            setattr(config, _PLACE, None)
        elif isinstance(others, _Both):
            setattr(config, _PLACE, others.first)


fuse = _Fuse()
