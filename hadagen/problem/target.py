"""Names of targets: an arch such as "sm90", which is sm and the compute capability, and the GPUs that have one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from hadagen.errors import UsageError, shown

ARCH_DIRECTORY = Path(__file__).parent.parent / "arch"

# Arch → words in the names of its GPUs. From NVIDIA's page "CUDA GPU Compute Capability". H20, H800 and A800 are an
# H200, an H100 and an A100 for other markets. A word that GPUs of several archs share, such as 6000, is left out.
_MODELS = {
    "sm70": "V100",
    "sm75": "T4 2060 2070 2080",
    "sm80": "A100 A800 A30",
    "sm86": "A40 A10 A10G A16 A2 A4000 A4500 A5000 A6000 3060 3070 3080 3090",
    "sm87": "ORIN",
    "sm89": "ADA L4 L40 L40S 4050 4060 4070 4080 4090",
    "sm90": "H100 H200 GH200 H20 H800",
    "sm100": "B100 B200 GB200",
    "sm103": "B300 GB300",
    "sm110": "THOR",
    "sm120": "5050 5060 5070 5080 5090",
    "sm121": "GB10",
}
_BRANDS = ("NVIDIA", "GEFORCE", "RTX", "TI", "SUPER")
_ARCH = re.compile("sm[1-9][0-9]{1,2}")
_ARCH_OF = {model: arch for arch, models in _MODELS.items() for model in models.split()}


def check_arch(name: object) -> None:
    """The one rule for names of archs: sm and the compute capability, in two or three digits. Raises `UsageError`."""
    if not isinstance(name, str) or not _ARCH.fullmatch(name):
        raise UsageError(f"arch {shown(name)} is no valid name; write sm and the compute capability, for instance sm90")


def known_archs() -> list[str]:
    """Names of the targets that kernels are made for, oldest first. `ARCH_DIRECTORY` has a file for each."""
    return sorted((path.stem for path in ARCH_DIRECTORY.glob("*.yaml")), key=generation)


def generation(arch: str) -> int:
    """Ten times the compute capability of an arch: 90 of sm90. A GPU runs the PTX of every generation up to its own."""
    return int(arch[2:])


def nearest_arch(arch: str, archs: Iterable[str] | None = None) -> str | None:
    """The newest of `archs` (default: all known) whose PTX runs on a GPU of this arch: itself, or the nearest older
    one; None if all are newer.

    Targets for one family of GPUs, such as sm_90a, are no archs. Their code runs nowhere else.
    """
    some = known_archs() if archs is None else archs
    return max((each for each in some if generation(each) <= generation(arch)), key=generation, default=None)


def model_of(gpu: str) -> str:
    """The name of a GPU as the driver gives it, of the name of its class: "NVIDIA H200" of "NVIDIA H200, 450 W"."""
    return gpu.partition(", ")[0]


def arch_of_gpu(gpu: str) -> str | None:
    """The arch of a GPU with this name, such as "NVIDIA A100-SXM4-80GB"; None if the name does not tell."""
    archs = {_ARCH_OF[word] for word in _words(model_of(gpu)) if word in _ARCH_OF}
    return archs.pop() if len(archs) == 1 else None


def arch_named(name: object) -> str:
    """The arch that a caller names: by its own name, or by that of a GPU, such as "h100" or "RTX 4090". Raises
    `UsageError` for any other name."""
    if isinstance(name, str):
        if _ARCH.fullmatch(name):
            return name
        if arch := arch_of_gpu(name):
            return arch
    raise UsageError(
        f"arch {shown(name)} is not known; choose one of {', '.join(known_archs())}, or name a GPU, such as H100 or "
        "RTX 4090"
    )


def is_model(name: str) -> bool:
    """Whether a name is that of a GPU and has no other words, as the name of a file may have."""
    return arch_of_gpu(name) is not None and all(word in _ARCH_OF for word in _words(name) if word not in _BRANDS)


def _words(gpu: str) -> list[str]:
    """The words of the name of a GPU; "4090" of each of "rtx-4090", "RTX4090" and "4090Ti"."""
    words = re.findall("[A-Z0-9]+", gpu.upper())
    return [re.sub("^RTX(?=[0-9])|(?<=[0-9]{4})(TI|SUPER|D)$", "", word) for word in words]
