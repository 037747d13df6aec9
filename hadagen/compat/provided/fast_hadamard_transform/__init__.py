"""fast_hadamard_transform, by hadagen; see `hadagen.compat.provide`."""

from hadagen.compat.fast_hadamard_transform import (
    hadamard_transform,
    hadamard_transform_12N,
    hadamard_transform_20N,
    hadamard_transform_28N,
    hadamard_transform_40N,
    hadamard_transform_ref,
)

__version__ = "1.1.0"  # of the original whose functions these are
__all__ = [
    "hadamard_transform",
    "hadamard_transform_12N",
    "hadamard_transform_20N",
    "hadamard_transform_28N",
    "hadamard_transform_40N",
    "hadamard_transform_ref",
]
