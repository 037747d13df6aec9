"""Times what a call costs the CPU, part by part: how long it takes to queue a small transform, not to run it. Also
times the first call of a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from ctypes import c_void_p
from importlib import import_module
from statistics import median
from typing import Any

import torch

from hadagen.errors import DeviceError
from hadagen.gpu import driver
from hadagen.problem.launch import X, Y
from hadagen.problem.problem import Rows
from hadagen.runtime.call.rules import LINEAR
from hadagen.runtime.call.runs import known
from hadagen.runtime.choose.device import cuda_index
from hadagen.runtime.launch import kernels, streams
from hadagen.runtime.operands.call import Call
from hadagen.runtime.operands.spec import Spec
from hadagen.runtime.transform import hadamard_transform

ROWS, N = 64, 128
DTYPE = torch.float16
_CALLS = 200  # between two waits for the device, so that its queue is never full
_REPEATS = 50
PEER = "fast_hadamard_transform"
_STARTS = 3  # processes whose first call is timed
# CUDA has loaded a module and run a kernel before the call that is timed; `item` waits for the device.
_START = """
import sys
sys.path[:] = filter(None, sys.path)  # not the folder in which the user is
import json, time
import torch
times = [time.perf_counter()]
import hadagen
times.append(time.perf_counter())
x = torch.ones({rows}, {n}, dtype={dtype}, device="{device}")
(x + 1)[0, 0].item()
times.append(time.perf_counter())
hadagen.hadamard_transform(x, 0.5)[0, 0].item()
times.append(time.perf_counter())
imported, _, called = (1e3 * (end - start) for start, end in zip(times, times[1:]))
print(json.dumps({{"import hadagen, after torch": imported, "the first call, after PyTorch's own": called}}))
"""


def call_costs(device: int = 0) -> dict[str, float]:
    """Name of a kind of call → microseconds of CPU time, on a [64, 128] float16 tensor; the median of many calls.

    Up to "in place", each kind adds one thing to the kind before it: the bare launch, then setting the addresses,
    finding the launch, and checking the arguments. If fast_hadamard_transform is installed, it is timed too. Raises
    `DeviceError` if no kernel serves such a call.
    """
    if cuda_index(f"cuda:{device}") is None:
        raise DeviceError(f"CUDA device {device} does not exist; run this on a machine with an NVIDIA GPU")
    with torch.cuda.device(device):
        x = torch.zeros(ROWS, N, dtype=DTYPE, device="cuda")
        problem = kernels.problem_of(N, DTYPE, "accurate", Rows.CONTIGUOUS)
        kernel = None if problem is None else kernels.find(kernels.Kind(device, problem, True), ROWS * N)
        if kernel is None:
            raise DeviceError(f"no kernel is known for {torch.cuda.get_device_name(device)}; run hadagen tune first")
        return _times(_rungs(kernel, x))


def start_costs(device: str = "cuda") -> dict[str, float]:
    """Milliseconds that a process pays once: for its import, and for its first call, on a [64, 128] float16 tensor.

    device: one of PyTorch's. The median of a few processes, whose files are in the system's cache. Raises `DeviceError`
    if one fails.
    """
    program = _START.format(rows=ROWS, n=N, dtype=DTYPE, device=device)
    found: dict[str, list[float]] = defaultdict(list)
    keeps_bytecode = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    for _ in range(_STARTS + 1):
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=keeps_bytecode, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
            raise DeviceError(f"a new process could not transform anything ({reason}); see `hadagen doctor`")
        for name, ms in json.loads(done.stdout).items():
            found[name].append(ms)
    return {name: median(times[1:]) for name, times in found.items()}  # the first one reads files, and compiles them


def _rungs(kernel: driver.LoadedKernel, x: torch.Tensor) -> dict[str, Callable[[], object]]:
    address, stream = x.data_ptr(), streams.raw_stream(kernel.device)
    launch = kernel.prepared(x.numel(), 0.5)
    config, values, places = kernel.block(stream, x.numel(), kernel.spec.arguments(x.numel(), 0.5))
    values[X] = values[Y] = address
    launch_kernel: Any = driver.bindings().cuLaunchKernelEx
    function = c_void_p(kernel.function)

    def launch_alone(read: object = values) -> object:  # which must stay: `places` leads there
        return launch_kernel(config, function, places, None)

    leaf, key = x.clone().requires_grad_(), Call(Spec.parse("inplace"), 0.5, x).key
    hadamard_transform(x, 0.5, inplace=True)
    rungs: dict[str, Callable[[], object]] = {
        "cuLaunchKernelEx": launch_alone,
        "+ setting the addresses": lambda: launch(stream, address, address),
        "+ finding the launch": lambda: known(x, key).over(x),  # type: ignore[union-attr]
        "in place": lambda: hadamard_transform(x, 0.5, inplace=True),
        "out of place": lambda: hadamard_transform(x, 0.5),
        "with gradients": lambda: hadamard_transform(leaf, 0.5),
        "through the dispatcher": lambda: LINEAR.default(x, None, None, None, 0.5, ""),
        "through the dispatcher, with gradients": lambda: LINEAR.default(leaf, None, None, None, 0.5, ""),
        "torch.empty_like(x)": lambda: torch.empty_like(x),
        "x.clone()": lambda: x.clone(),
    }
    with suppress(ImportError):  # it is not installed, or not for this PyTorch
        peer = import_module(PEER).hadamard_transform
        rungs[PEER] = lambda: peer(x, 0.5)
        rungs[f"{PEER}, with gradients"] = lambda: peer(leaf, 0.5)
    return rungs


def _times(calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Name → microseconds of each call: the median of batches in turns, so that a slow processor slows all calls.

    The device is idle when a batch begins, so that no call waits for it.
    """
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(_REPEATS):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(_CALLS):
                call()
            times[name].append((time.perf_counter() - start) / _CALLS)
    return {name: median(some) * 1e6 for name, some in times.items()}
