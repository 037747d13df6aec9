"""`Yardstick`: the time of a plain copy of the same bytes, which is kept with every time."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence

from hadagen.gpu.driver import LoadedKernel
from hadagen.measure.cells import Traffic
from hadagen.measure.copy import copy_params
from hadagen.measure.timing import GRAPHS, Stopwatch, copy_work

# Copy times are no older than this when they are written beside a kernel's.
_YARDSTICK_LIFE_S = 20.0


class Yardstick:
    """The time of the copy for every traffic: the copy shape that was the fastest at first is timed again now and
    then."""

    def __init__(self, stopwatch: Stopwatch, copies: Sequence[LoadedKernel], replays: int) -> None:
        self._stopwatch = stopwatch
        self._copies = copies
        self._replays = replays
        self._fastest: dict[Traffic, LoadedKernel] = {}
        self._taken: dict[Traffic, float] = {}
        self.us: dict[Traffic, float] = {}

    def forget(self) -> None:
        """Time all copies again, and choose among them again, because the last times may be wrong."""
        self._fastest.clear()
        self._taken.clear()

    def refresh(self, traffics: Iterable[Traffic]) -> None:
        """Time the copies for `traffics` that were never timed, or too long ago."""
        now = time.monotonic()
        wanted = [t for t in dict.fromkeys(traffics) if now - self._taken.get(t, -math.inf) >= _YARDSTICK_LIFE_S]
        new = [traffic for traffic in wanted if traffic not in self._fastest]
        for params in dict.fromkeys(map(copy_params, new)):
            of_kind = [traffic for traffic in new if copy_params(traffic) == params]
            copies = [copy for copy in self._copies if copy.spec.params == params]
            rounds = [self._time(copy, of_kind) for copy in copies]
            for traffic in of_kind:
                times = [samples[traffic] for samples in rounds]
                self.us[traffic] = min(times)
                self._fastest[traffic] = copies[times.index(self.us[traffic])]
        for copy in self._copies:
            self.us |= self._time(copy, [t for t in wanted if t not in new and self._fastest[t] is copy])
        self._taken |= dict.fromkeys(wanted, now)

    def _time(self, copy: LoadedKernel, traffics: Sequence[Traffic]) -> dict[Traffic, float]:
        turns = [self._stopwatch.turns([copy], copy_work(traffic), self._replays) for traffic in traffics]
        samples = self._stopwatch.time(turns, GRAPHS)
        return {traffic: sample.us for traffic, (sample,) in zip(traffics, samples, strict=True)}
