"""The time of a call in a CUDA graph, which `layer.py` and `decoder.py` share."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median, quantiles
from typing import Any

import torch


def milliseconds(call: Callable[[], Any], calls: int, replays: int) -> tuple[float, float, float]:
    """The time of one call: median and quartiles over replays of a graph of so many calls."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                call()
        graph.replay()
        times = []
        for _ in range(replays):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / calls)
    low, _, high = quantiles(times, n=4)
    return median(times), low, high
