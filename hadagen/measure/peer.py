"""Other libraries with the transform, if they are installed. They are timed like our kernels, by graphs of launches."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from hadagen.problem import DType, Problem, Rows
from hadagen.reference import verification_scale

Call = Callable[[], torch.Tensor]


class Peer(NamedTuple):
    """A library. `transform(x, scale, in_place)` returns the transform of x, in x itself if `in_place` and the library
    can."""

    name: str
    dtypes: frozenset[DType]
    rows: frozenset[Rows]  # that it takes
    works_in_place: bool
    transform: Callable[[torch.Tensor, float, bool], torch.Tensor]

    def serves(self, problem: Problem) -> bool:
        plain = problem.order == 1 and not problem.transform.signed
        return plain and problem.io.input in self.dtypes and problem.io.rows in self.rows


def _fast_hadamard_transform(module: Any) -> Peer:
    return Peer(
        "fast_hadamard_transform",
        frozenset(DType),
        rows=frozenset(Rows),
        works_in_place=False,
        transform=lambda x, scale, in_place: module.hadamard_transform(x, scale),
    )


def _hadacore(module: Any) -> Peer:
    return Peer(
        "HadaCore",
        frozenset({DType.FLOAT16, DType.BFLOAT16}),
        rows=frozenset({Rows.CONTIGUOUS}),
        works_in_place=True,
        transform=lambda x, scale, in_place: module.hadamard_transform(x, in_place),  # always orthonormal
    )


_KNOWN = {"fast_hadamard_transform": _fast_hadamard_transform, "faster_hadamard_transform": _hadacore}  # by module


def find_peers() -> list[Peer]:
    """The installed libraries. One that cannot be imported, such as for another PyTorch, is left out with a warning."""
    found = []
    for name, make in _KNOWN.items():
        if find_spec(name) is not None:
            try:
                found.append(make(import_module(name)))
            except ImportError as error:
                warnings.warn(f"{name} is left out, because it cannot be imported: {error}", stacklevel=2)
    return found


class PeerGraph:
    """A graph of calls (a `timing.Graph`), one after another. The launches rotate among `calls`. The graph owns one
    result of each."""

    def __init__(self, pool: Any, calls: Sequence[Call], launches: int) -> None:
        """Raises PyTorch's `RuntimeError` if memory runs out or a call cannot be captured."""
        self._graph = torch.cuda.CUDAGraph()
        results: list[torch.Tensor | None] = [None] * len(calls)
        self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            for launch in range(launches):
                slot = launch % len(calls)
                results[slot] = None  # its memory is the next one's
                results[slot] = calls[slot]()
        finally:
            self._graph.capture_end()

    def replay(self) -> None:
        self._graph.replay()

    def close(self) -> None:
        self._graph.reset()


class Peers:
    """The installed libraries, ready to be captured on PyTorch's current stream, which must not be the default one.

    Results come from one pool of PyTorch's allocator, which lives as long as this object. So a graph reuses the memory
    of earlier ones.
    """

    def __init__(self) -> None:
        self.all = find_peers()
        self._pool = torch.cuda.graph_pool_handle()
        # A pool ends with its last graph, so one graph stays.
        least = functools.partial(torch.zeros, 1, device="cuda")
        least()  # the driver may load code with its first launch, which must not happen inside a capture
        self._keeper = PeerGraph(self._pool, [least], 1)

    def graph(self, calls: Sequence[Call], launches: int) -> PeerGraph:
        return PeerGraph(self._pool, calls, launches)


def calls_of(peer: Peer, problem: Problem, inputs: Iterable[torch.Tensor], in_place: bool) -> list[Call]:
    """One call for each input, with the scale that makes the transform orthonormal. A library that does not work in
    place allocates its result in any case."""
    options = verification_scale(problem), in_place and peer.works_in_place
    return [functools.partial(peer.transform, x, *options) for x in inputs]
