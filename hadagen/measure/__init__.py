"""Verifies kernels against float64, and times them beside a copy, in a process of its own.

Importing this imports neither PyTorch nor CUDA; the worker process does.
"""

from hadagen.measure.cells import Cell, all_cells, cells_at, is_timed, rows_between
from hadagen.measure.copy import copy_sources
from hadagen.measure.environment import device_environment
from hadagen.measure.messages import Answer, Choice, ChoiceResult, Comparison, Ranking, Times
from hadagen.measure.runner import BestTimes, DeviceRunner, Runner, Variant, without_texts

__all__ = [
    "Answer",
    "BestTimes",
    "Cell",
    "Choice",
    "ChoiceResult",
    "Comparison",
    "DeviceRunner",
    "Ranking",
    "Runner",
    "Times",
    "Variant",
    "all_cells",
    "cells_at",
    "copy_sources",
    "device_environment",
    "is_timed",
    "rows_between",
    "without_texts",
]
