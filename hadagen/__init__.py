"""Generated, verified and tuned GPU kernels for rotations of activations and their quantization, called from PyTorch.

    y = hadagen.hadamard_transform(x, x.shape[-1] ** -0.5)
    z = hadagen.Rotation(14336)(x)
    q = hadagen.rotate_quantize(x, 128, to="mxfp4")

hadamard_transform: the Walsh–Hadamard transform of rows of 2^m elements.
Rotation: an orthonormal transform of rows of K · 2^m elements, with random signs if you like; a module.
rotate_quantize: a rotation and a quantizer in one kernel; returns a `Quantized`.
prepare: one of these calls, checked once, for those who make it often.
presets: rotations with a quantizer, by the names of the projects that need them.
prologues: what runs before a rotation in the same kernel, such as SiLU·mul; values of before=.
compat: functions of other projects by their own names.
fuse: let torch.compile make one operator of what runs before a rotation, the rotation, and a quantizer.
decompose: an exported program of PyTorch's own operators, for programs that run without hadagen.
warmup: load the kernels of later calls.
best_config: the kernel that a call runs; returns a `BestConfig`.
autotune: find the fastest kernel for this GPU within seconds.

help(hadagen.Rotation) and so on say more, and docs/api.md has all names. `import hadagen` imports neither PyTorch nor
CUDA; the first use of a function does. Once a program has imported both hadagen and PyTorch, in any order, hadagen's
operators are registered.
"""

from __future__ import annotations

import os.path
from importlib import import_module
from typing import TYPE_CHECKING, Any

from hadagen.errors import DeviceError, HadagenError, SlowPathWarning, StorageError, TensorError, UsageError
from hadagen.problem.problem import DType, Numerics, Problem, Rows
from hadagen.runtime.registration import register_with_torch

# Python in a checkout finds this directory before the installed package. The other rooms are beside it.
_beside = os.path.dirname(__path__[0])
if os.path.exists(os.path.join(_beside, "tuning_db", "bundle.py")):
    __path__.append(_beside)

if TYPE_CHECKING:
    from hadagen.fusing.fuse import fuse
    from hadagen.runtime.best import BestConfig, best_config
    from hadagen.runtime.call.decompositions import decompose
    from hadagen.runtime.choose.entries import Match
    from hadagen.runtime.launch.autotune import autotune
    from hadagen.runtime.prepared import prepare
    from hadagen.runtime.quantize import rotate_quantize
    from hadagen.runtime.quantized import Quantized
    from hadagen.runtime.rotation import Rotation
    from hadagen.runtime.transform import hadamard_transform
    from hadagen.runtime.warmup import warmup

    __version__: str

__all__ = [
    "BestConfig",
    "DType",
    "DeviceError",
    "HadagenError",
    "Match",
    "Numerics",
    "Problem",
    "Quantized",
    "Rotation",
    "Rows",
    "SlowPathWarning",
    "StorageError",
    "TensorError",
    "UsageError",
    "autotune",
    "best_config",
    "decompose",
    "fuse",
    "hadamard_transform",
    "prepare",
    "rotate_quantize",
    "warmup",
]

_LAZY = {
    "BestConfig": "hadagen.runtime.best",
    "Match": "hadagen.runtime.choose.entries",
    "autotune": "hadagen.runtime.launch.autotune",
    "best_config": "hadagen.runtime.best",
    "decompose": "hadagen.runtime.call.decompositions",
    "fuse": "hadagen.fusing.fuse",
    "Quantized": "hadagen.runtime.quantized",
    "Rotation": "hadagen.runtime.rotation",
    "rotate_quantize": "hadagen.runtime.quantize",
    "hadamard_transform": "hadagen.runtime.transform",
    "prepare": "hadagen.runtime.prepared",
    "warmup": "hadagen.runtime.warmup",
}


_MODULES = ("compat", "errors", "presets", "prologues")


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("hadagen")
        except PackageNotFoundError as error:
            raise AttributeError("hadagen is not installed, so it has no __version__") from error
    if name in _MODULES:
        return import_module(f"hadagen.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    """The public names and modules."""
    special = {name for name in globals() if name.startswith("__")}
    return sorted({*special, *__all__, *_MODULES})


register_with_torch()
