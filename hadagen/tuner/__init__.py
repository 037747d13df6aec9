"""Finds the fastest kernels: `tune` searches, times and records. Its events and its report tell the progress."""
