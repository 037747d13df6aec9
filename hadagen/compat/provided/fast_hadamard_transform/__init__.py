"""fast_hadamard_transform, by hadagen; see `hadagen.compat.provide`."""

from hadagen.compat.fast_hadamard_transform import *  # noqa: F403
from hadagen.compat.fast_hadamard_transform import __all__ as __all__

__version__ = "1.1.0"  # of the original whose functions these are
