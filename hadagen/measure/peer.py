"""fast_hadamard_transform, where it is installed, timed as our kernels are: a CUDA graph of launches, replayed."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

import torch

from hadagen.measure.cells import EVICTION, Cell
from hadagen.measure.verify import TORCH_DTYPE
from hadagen.problem import Problem
from hadagen.trial import timed_rows

Transform = Callable[[torch.Tensor, float], torch.Tensor]

_REPLAYS = 7


def find_peer() -> Transform | None:
    """`fast_hadamard_transform.hadamard_transform(x, scale)`, or None where it is not installed."""
    name = "fast_hadamard_transform"
    return None if find_spec(name) is None else import_module(name).hadamard_transform


def time_peer(transform: Transform, problem: Problem, cell: Cell, l2_bytes: int, device_index: int) -> float:
    """Microseconds of one call on a CUDA device: the median over the replays.

    It allocates its result, so its destination is always out-of-place, and pads rows that are shorter than n by
    itself. `cell.elements` must be a multiple of n.
    Raises PyTorch's `RuntimeError` where memory runs out or the call cannot be captured.
    """
    with torch.no_grad(), torch.cuda.device(device_index):
        traffic = cell.traffic(problem)
        slots, launches = traffic.slots(l2_bytes), traffic.launches(l2_bytes)
        shape = slots, cell.elements // problem.n, timed_rows(problem).columns
        x = torch.randn(shape, dtype=TORCH_DTYPE[problem.dtype], device="cuda")
        flusher = torch.zeros(EVICTION * l2_bytes // 4, dtype=torch.int32, device="cuda")
        results = [transform(x[0], 1.0)] * slots  # the first call may do what a capture forbids
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for launch in range(launches):
                results[launch % slots] = transform(x[launch % slots], 1.0)
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
