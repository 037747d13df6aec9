"""`autotune`: measures one problem within a program, so that its calls run the fastest kernel for this GPU.

The modules that measure are imported only here, when they are used: a call needs neither the generator nor a compiler.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hadagen.errors import DeviceError, HadagenError, StorageError, ToolchainError, UsageError, printable, shown
from hadagen.owners import fault_of
from hadagen.problem.problem import Problem
from hadagen.problem.regimes import Destination
from hadagen.problem.target import known_archs
from hadagen.runtime.arguments import explained
from hadagen.runtime.choose import bundles, tables, trust
from hadagen.runtime.choose.device import Device, cuda_device, cuda_index
from hadagen.runtime.choose.entries import as_problem, is_settled, where_measured
from hadagen.runtime.choose.guesses import nearest_problems
from hadagen.runtime.launch.loading import cpus

if TYPE_CHECKING:
    import torch

SECONDS = 15.0
_MOST_SECONDS = 3600

_tried: set[tuple[Device, Problem]] = set()  # what a call asked for in this process


@explained(TypeError)
def autotune(
    problem: Problem | str | Mapping[str, Any],
    device: int | str | torch.device | None = None,
    *,
    seconds: float = SECONDS,
) -> Path:
    """Measure the kernels of one problem on a GPU, and keep the winners for later calls.

    The winners serve this process and others on this machine. Nothing else should use the GPU meanwhile.

    Known recipes are compiled, verified against float64 and timed at all element counts, and then their nearest
    neighbours. The winners go to a bundle in the user's data directory. If any bundle has winners of the problem that
    were measured on such a GPU, this function returns at once; shipped bundles have winners of some problems, and
    `hadagen tune` searches further. If several processes call it, one process measures, and the others wait for its
    result.

    problem: a `Problem`, its key, such as "n4096-float16-fast", or the arguments of `Problem.of`:
        {"n": 4096, "dtype": torch.float16, "numerics": "fast"}.
    device: a CUDA device of this machine, the current one if none is given.
    seconds: how long it may take, without the time that other processes measure; more than 0, at most 3600.

    Returns the path of the bundle. A bundle that HADAGEN_BUNDLE names is still used before it.

    Raises `UsageError` for a bad argument; `DeviceError` if there is no GPU that hadagen makes kernels for, or nothing
    could be measured in that time; `ToolchainError` if there is no NVRTC, or numpy or Jinja2 is missing; `StorageError`
    if the bundle cannot be written, is damaged or of another format, another process blocks it, or calls would not
    use it, because others could change it or HADAGEN_TRUSTED_KEYS is set.
    """
    wanted = as_problem(problem)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= _MOST_SECONDS:
        raise UsageError(f"seconds = {shown(seconds)} is not supported; give more than 0, at most {_MOST_SECONDS}")
    index, target = _measured_device(device)
    path = bundle_path(target.arch)
    if (known := where_measured(wanted, target)) not in (None, path):
        return known
    _check_use(path)
    if find_spec("numpy") is None:
        raise ToolchainError("numpy is missing, with which kernels are verified; pip install numpy")
    try:
        from hadagen.measure.autotuner import add_winners
    except ImportError as error:  # such as Jinja2, which PyTorch brings along
        raise ToolchainError(f"kernels cannot be generated ({error}); pip install jinja2") from None
    add_winners(path, wanted, index, target.arch, _known_knobs(wanted), seconds, cpus())
    tables.forget(wanted)
    return path


def autotune_once(problem: Problem, destination: Destination, index: int, device: Device) -> None:
    """`autotune` for a call, if its kernels were not measured on such a GPU, and none are pinned. Once in a process for
    each problem and kind of device; a failure is a warning."""
    if (device, problem) in _tried or is_settled(problem, destination, device):
        return
    _tried.add((device, problem))
    try:
        autotune(problem, index)
    except HadagenError as error:
        warnings.warn(f"{problem.key} is not autotuned: {error}", RuntimeWarning, stacklevel=2)


def bundle_path(arch: str) -> Path:
    """The bundle of an arch that `autotune` writes. By its name it comes after that of `hadagen tune`, so its winners
    do not hide those of a longer search.

    Raises `StorageError` if no home directory is known.
    """
    return bundles.user_directory() / f"{arch}_autotuned.db"


def _check_use(path: Path) -> None:
    """Raises `StorageError` if calls would not use what is written to a bundle at `path`."""
    if trust.trusted_keys() is not None:
        raise StorageError(
            f"{trust.VARIABLE} is set, and nobody signs what autotune writes to {path}; tune with hadagen tune, and "
            "sign its bundle"
        )
    if problem := fault_of(path):
        raise StorageError(
            f"calls would not use {path}, because it could be changed by others: {problem}, or set XDG_DATA_HOME to "
            "another place"
        )


def _measured_device(device: Any) -> tuple[int, Device]:
    """The CUDA index of a device, and its arch and class. Raises `UsageError` or `DeviceError`."""
    import torch

    if not torch.cuda.is_available():
        raise DeviceError(
            "this machine has no CUDA device to measure on; call autotune where PyTorch sees an NVIDIA GPU"
        )
    index = cuda_index(device)
    if index is None:
        raise UsageError(f"device {shown(device)} is not a CUDA device of this machine; name a device of this machine")
    target = cuda_device(index)
    if target is None:
        raise DeviceError("PyTorch is built for GPUs of another maker; call autotune where it sees an NVIDIA GPU")
    if target.arch not in known_archs():
        raise DeviceError(
            f"{printable(target.gpu)} ({target.arch}) cannot be tuned for; hadagen makes kernels for "
            f"{', '.join(known_archs())} only"
        )
    return index, target


def _known_knobs(problem: Problem) -> list[Mapping[str, Any]]:
    """The knobs of all entries of a problem in all bundles; if there are none, those of its parent (or the parent's
    parent, ...), else of the nearest problem."""
    parents = [problem]
    while parents[-1].parent:
        parents.append(parents[-1].parent)
    tuned = {each for bundle in bundles.known() for each in bundle.problems()}
    for near in (*parents, *nearest_problems(parents[-1], tuned)):
        if found := [entry.knobs for bundle in bundles.known() for entry in bundles.entries_of(bundle, near)]:
            return found
    return []
