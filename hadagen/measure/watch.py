"""`Watch`: the worker process says that it moves on, so that a kernel that hangs is noticed early.

A timeout for a whole request has to allow for the slowest correct kernel. So the worker tells the asking side while
a kernel may be on the device (`Watch.on`), and then whenever the device has finished something, or the host has queued
more (`Watch.beat`). What the device finishes between two beats takes milliseconds: a few launches, or one replay of a
graph. A kernel would have to be thousands of times slower than a copy to be silent for seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SILENCE_S = 3.0  # of a watched worker, after which its kernel counts as hung
_PAUSE_S = 0.2  # between beats that are told


class Watch:
    """`tell`: gets True for each beat, and False where the watch ends. Without it, nothing is told."""

    def __init__(self, tell: Callable[[bool], None] = lambda watched: None) -> None:
        self._tell = tell
        self._on = False
        self._told = 0.0

    @contextmanager
    def on(self) -> Iterator[None]:
        """From here to the end of the context, silence means that the kernel hangs."""
        self._on, self._told = True, time.monotonic()
        self._tell(True)
        try:
            yield
        finally:
            self._on = False
            self._tell(False)

    def beat(self) -> None:
        """Say that work goes on. Outside of `on` it does nothing."""
        if self._on and (now := time.monotonic()) - self._told >= _PAUSE_S:
            self._told = now
            self._tell(True)
