"""Transforms and rotations in plain PyTorch."""
