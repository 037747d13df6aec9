"""What a measuring process runs instead of a GPU: the times of a kernel follow from its digest."""

import time
from typing import Any

from measure_sample import H100_L2

from hadagen.measure import Cell
from hadagen.measure.messages import Answer, Measure, Race
from hadagen.measure.watch import Watch
from hadagen.problem.regimes import Cache, Destination
from hadagen.problem.trial import Environment, Kernel, Outcome, Timing

GPU = Environment(gpu="Test GPU", compute_capability="9.0", sms=132, l2_bytes=H100_L2)
CELLS = [Cell(elements, Destination.IN_PLACE, Cache.HOT) for elements in (1 << 14, 1 << 20, 1 << 22)]
SECONDS = 0.03  # of a trial, so that a worker mostly has one when it is killed


def us(kernel: Kernel, cell: Cell) -> float:
    return 1 + int(kernel.digest[:6], 16) / (1 << 24) + cell.elements / (1 << 22)


class TimesByDigest:
    """A `Service`."""

    greeting = GPU

    def __init__(self, watch: Watch, *_: object) -> None:
        self._watch = watch

    def handle(self, request: Measure | Race) -> Any:
        if isinstance(request, Race):
            return [(us(request.a, cell), us(request.b, cell)) for cell in request.cells]
        with self._watch.on():
            time.sleep(SECONDS)
        return self.answer(request.kernel)

    def answer(self, kernel: Kernel) -> Answer:
        timings = (Timing(*cell, us(kernel, cell), us(kernel, cell), us(kernel, cell), 1.0) for cell in CELLS)
        return Answer(Outcome.OK, "", {"normal": 2e-4}, tuple(timings), seconds=SECONDS)

    def is_usable(self) -> bool:
        return True
