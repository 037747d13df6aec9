"""Other libraries that do the transform, where they are installed, timed as our kernels are: by graphs of launches."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from hadagen.measure.cells import EVICTION, Cell
from hadagen.measure.verify import TORCH_DTYPE
from hadagen.problem import DType, Problem
from hadagen.reference import verification_scale
from hadagen.trial import Destination, timed_rows

_REPLAYS = 7


class Peer(NamedTuple):
    """A library. `transform(x, scale, in_place)` returns the transform of x, which is in x where that was asked for and
    the library can."""

    name: str
    dtypes: frozenset[DType]
    takes_pitched: bool
    works_in_place: bool
    transform: Callable[[torch.Tensor, float, bool], torch.Tensor]

    def serves(self, problem: Problem) -> bool:
        return problem.dtype in self.dtypes and (self.takes_pitched or not problem.pitched)


def _fast_hadamard_transform(module: Any) -> Peer:
    return Peer(
        "fast_hadamard_transform",
        frozenset(DType),
        takes_pitched=True,
        works_in_place=False,
        transform=lambda x, scale, in_place: module.hadamard_transform(x, scale),
    )


def _hadacore(module: Any) -> Peer:
    return Peer(
        "HadaCore",
        frozenset({DType.FLOAT16, DType.BFLOAT16}),
        takes_pitched=False,
        works_in_place=True,
        transform=lambda x, scale, in_place: module.hadamard_transform(x, in_place),  # always orthonormal
    )


_KNOWN = {"fast_hadamard_transform": _fast_hadamard_transform, "faster_hadamard_transform": _hadacore}  # by module


def find_peers() -> list[Peer]:
    """Those that are installed."""
    return [make(import_module(name)) for name, make in _KNOWN.items() if find_spec(name) is not None]


def time_peer(peer: Peer, problem: Problem, cell: Cell, l2_bytes: int, device_index: int) -> float:
    """Microseconds of one call on a CUDA device: the median over the replays.

    The problem is one that the peer serves. A peer that does not work in place allocates its result, whatever the
    cell's destination. `cell.elements` must be a multiple of n.
    Raises PyTorch's `RuntimeError` where memory runs out or the call cannot be captured.
    """
    with torch.no_grad(), torch.cuda.device(device_index):
        traffic = cell.traffic(problem)
        slots, launches = traffic.slots(l2_bytes), traffic.launches(l2_bytes)
        shape = slots, cell.elements // problem.n, timed_rows(problem).columns
        x = torch.randn(shape, dtype=TORCH_DTYPE[problem.dtype], device="cuda")
        flusher = torch.zeros(EVICTION * l2_bytes // 4, dtype=torch.int32, device="cuda")
        options = verification_scale(problem), cell.destination is Destination.IN_PLACE and peer.works_in_place
        results = [peer.transform(x[0], *options)] * slots  # the first call may do what a capture forbids
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for launch in range(launches):
                results[launch % slots] = peer.transform(x[launch % slots], *options)
        graph.replay()
        intervals = []
        for _ in range(_REPLAYS):
            start, end = _event(), _event()
            if traffic.needs_flush(l2_bytes):
                flusher.sum()
            start.record()
            graph.replay()
            end.record()
            intervals.append((start, end))
        torch.cuda.synchronize()
        return float(statistics.median(start.elapsed_time(end) for start, end in intervals)) * 1000.0 / launches


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
