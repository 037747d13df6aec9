"""Choosing, loading and launching kernels: all that a program needs that calls `hadagen.hadamard_transform`."""
