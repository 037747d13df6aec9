"""The kernel of a call: chosen and loaded once per device, problem, destination and bucket, then a dictionary hit."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import torch

from hadagen import driver
from hadagen.driver import LoadedKernel
from hadagen.errors import DeviceError, UsageError
from hadagen.problem import DType, Numerics, Problem
from hadagen.runtime.choose import bucket, choose_from_bundles
from hadagen.runtime.device import cuda_device
from hadagen.trial import Destination
from hadagen.tuning_db.bundle import Bundle

_DTYPES = {torch.float16: DType.FLOAT16, torch.bfloat16: DType.BFLOAT16}

Key = tuple[int, int, torch.dtype, str, bool, int]  # the arguments of `find`, with the bucket of the elements

_found: dict[Key, LoadedKernel | None] = {}
_loaded: dict[tuple[int, str], LoadedKernel] = {}  # by device and digest: buckets share kernels
_lock = threading.Lock()  # taken by those who find nothing in `_found`

# torch.cuda.current_stream builds an object, which takes longer than the launch.
_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (
    lambda device: torch.cuda.current_stream(device).cuda_stream
)


def find(device: int, n: int, dtype: torch.dtype, numerics: str, in_place: bool, elements: int) -> LoadedKernel | None:
    """The kernel for `elements` = rows · n on a CUDA device, ready to launch; None where PyTorch must do it."""
    key = (device, n, dtype, numerics, in_place, bucket(elements))
    if key not in _found:
        with _lock:
            if key not in _found:
                _found[key] = _find(*key[:5], elements)
    return _found[key]


def launch(kernel: LoadedKernel, x: int, y: int, elements: int, scale: float) -> None:
    """Queues the kernel on the current stream of its device. x, y: addresses on it. Raises `DriverError`."""
    stream = _raw_stream(kernel.device)
    if torch.cuda.current_device() == kernel.device:
        kernel.launch(stream, x, y, elements, scale)
    else:
        with driver.active(kernel.device):
            kernel.launch(stream, x, y, elements, scale)


def _find(device: int, n: int, dtype: torch.dtype, numerics: str, in_place: bool, elements: int) -> LoadedKernel | None:
    try:
        problem = Problem(n, _DTYPES[dtype], Numerics(numerics))
    except (KeyError, UsageError):  # kernels are made for none such
        return None
    target = cuda_device(device)
    if target is None:
        return None
    destination = Destination.IN_PLACE if in_place else Destination.OUT_OF_PLACE
    _, chosen = choose_from_bundles(problem, destination, elements, target)
    if chosen is None:
        return None
    entry, bundle = chosen
    try:
        return _load(bundle, entry.kernel, device, compiled=entry.arch == target.arch)
    except DeviceError as error:
        if torch.cuda.is_current_stream_capturing():
            raise  # plain PyTorch would stay in the graph for good
        warnings.warn(f"plain PyTorch transforms {problem.name} here: {error}", RuntimeWarning, stacklevel=2)
        return None


def _load(bundle: Bundle, digest: str, device: int, *, compiled: bool) -> LoadedKernel:
    """The kernel on the device: the cubin where that was `compiled` for it, else PTX that the driver compiles."""
    place = (device, digest)
    if place not in _loaded:
        kernel = bundle.kernel(digest)
        _loaded[place] = driver.load(kernel.cubin if compiled else kernel.ptx, kernel.entry, kernel.launch, device)
    return _loaded[place]
