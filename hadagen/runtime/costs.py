"""What a call costs the CPU, piece by piece: how long it takes to queue a small transform, not to run it."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch

from hadagen import driver
from hadagen.errors import DeviceError
from hadagen.runtime import compute, kernels, operator
from hadagen.runtime.device import cuda_index
from hadagen.runtime.transform import hadamard_transform

ROWS, N = 64, 128
DTYPE = torch.float16
_CALLS = 200  # between two waits for the device, whose queue must not run full
_REPEATS = 50
PEER = "fast_hadamard_transform"


def call_costs(device: int = 0) -> dict[str, float]:
    """Microseconds of CPU time for one call of each rung, on a [64, 128] float16 tensor; the median of many.

    The rungs up to "in place" each contain those before: a launch, its arguments, finding it, checking the tensor. With
    fast_hadamard_transform installed, that is in too. Raises `DeviceError` where no kernel serves such a call.
    """
    if not torch.cuda.is_available() or cuda_index(f"cuda:{device}") is None:
        raise DeviceError(f"CUDA device {device} does not exist; run this on a machine with an NVIDIA GPU")
    with torch.cuda.device(device):
        x = torch.zeros(ROWS, N, dtype=DTYPE, device="cuda")
        problem = kernels.problem_of(N, DTYPE, "accurate", False)
        kernel = None if problem is None else kernels.find(device, problem, True, ROWS * N)
        if kernel is None:
            raise DeviceError(f"no kernel is known for {torch.cuda.get_device_name(device)}; run hadagen tune first")
        return {name: _time(call) for name, call in _rungs(kernel, x).items()}


def _rungs(kernel: driver.LoadedKernel, x: torch.Tensor) -> dict[str, Callable[[], object]]:
    address, stream = x.data_ptr(), kernels._raw_stream(kernel.device)
    launch = kernel.prepared(x.numel(), 0.5)
    block = kernel.block(stream, x.numel(), 0.5)
    block.addresses[0] = block.addresses[1] = address
    config, _, pointers, _ = block
    launch_kernel: Any = driver.bindings().cuLaunchKernelEx
    function = kernel.function
    leaf = x.clone().requires_grad_()
    rungs: dict[str, Callable[[], object]] = {
        "cuLaunchKernelEx": lambda: launch_kernel(config, function, pointers, 0),
        "+ setting the addresses": lambda: launch(stream, address, address),
        "+ finding the launch": lambda: compute.compute(x, 0.5, "accurate", True),
        "in place": lambda: hadamard_transform(x, 0.5, inplace=True),
        "out of place": lambda: hadamard_transform(x, 0.5),
        "with gradients": lambda: hadamard_transform(leaf, 0.5),
        "through the dispatcher": lambda: operator.functional(x, 0.5, "accurate"),
        "through the dispatcher, with gradients": lambda: operator.functional(leaf, 0.5, "accurate"),
        "torch.empty_like(x)": lambda: torch.empty_like(x),
        "x.clone()": lambda: x.clone(),
    }
    if find_spec(PEER) is not None:
        peer = import_module(PEER).hadamard_transform
        rungs[PEER] = lambda: peer(x, 0.5)
        rungs[f"{PEER}, with gradients"] = lambda: peer(leaf, 0.5)
    return rungs


def _time(call: Callable[[], object]) -> float:
    """Microseconds of one call. The device is idle when each batch begins, so that nothing waits for it."""
    times = []
    for _ in range(_REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(_CALLS):
            call()
        times.append((time.perf_counter() - start) / _CALLS)
    return median(times) * 1e6
