"""What `layer.py`, `mlp.py` and `decoder.py` share: the time of a call in a CUDA graph, and the file of all times."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch


def milliseconds(call: Callable[[], Any], calls: int, replays: int) -> tuple[float, float, float]:
    """The time of one call: median and quartiles over replays of a graph of so many calls."""
    torch.cuda.synchronize()  # because no other stream waits for what the current one still writes
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                call()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
        graph.replay()
        # All replays are launched while the GPU works, so that no time of a launch is counted.
        for event in events[:-1]:
            event.record()
            graph.replay()
        events[-1].record()
        stream.synchronize()
    times = [begin.elapsed_time(end) / calls for begin, end in pairwise(events)]
    low, _, high = quantiles(times, n=4)
    return median(times), low, high


def write(path: Path, *modules: Any, **found: Any) -> None:
    """Write what was found as JSON, with the versions of modules and the name of the GPU."""
    versions = {each.__name__: each.__version__ for each in modules} | {"device": torch.cuda.get_device_name()}
    path.write_text(json.dumps({"versions": versions, **found}, indent=1) + "\n", encoding="utf-8")
