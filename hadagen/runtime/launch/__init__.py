"""Loads kernels and launches them."""
