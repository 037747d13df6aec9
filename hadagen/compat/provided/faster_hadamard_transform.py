"""HadaCore, by hadagen; see `hadagen.compat.provide`."""

from hadagen.compat.hadacore import hadamard_transform

__all__ = ["hadamard_transform"]
