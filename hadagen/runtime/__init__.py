"""Choosing, loading and launching kernels: all that a call of `hadagen.hadamard_transform` needs."""
