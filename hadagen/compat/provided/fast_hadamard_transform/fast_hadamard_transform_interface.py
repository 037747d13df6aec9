"""The module of the original that has its functions."""

from hadagen.compat.fast_hadamard_transform import *  # noqa: F403
from hadagen.compat.fast_hadamard_transform import __all__ as __all__
