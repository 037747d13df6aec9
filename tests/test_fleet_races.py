"""Races on a fleet, whose one worker is a thread of this process."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from distributed import Client, LocalCluster
from measure_sample import CELL
from test_runners import GPU, variants

from hadagen.errors import DeviceError, DisturbedError
from hadagen.fleet import work
from hadagen.fleet.client import Fleet
from hadagen.fleet.station import COMPILERS, Gpu, Station, gpu_resource
from hadagen.tuner.fleet import FleetGpus

BUSY = "a race has no times (process 12 (python3) uses the GPU, 97 % of the time); stop it, or choose another GPU"


class Racer:
    """A GPU that is busy in a race whose first kernel is named so, and breaks in another one, or in all."""

    def __init__(self, works: bool = True) -> None:
        self._works = works

    def run(self, wanted: object) -> Any:
        raise NotImplementedError

    def race(self, a: Any, b: Any, cells: Sequence[object]) -> Any:
        if a.kernel.entry == "busy":
            raise DisturbedError(BUSY)
        if a.kernel.entry == "breaks" or not self._works:
            raise DeviceError("the measuring process ended with signal 9")
        return [(1.0, 2.0) for _ in cells]

    def close(self) -> None:
        pass


class Here(Station):
    def _toolchain(self, kind: str) -> Any:
        return kind


@contextmanager
def fleet(*gpus: Racer) -> Iterator[Fleet]:
    """A fleet of one worker with these GPUs."""
    station = Here([Gpu(GPU, "sm90", lambda toolchain, gpu=gpu: gpu) for gpu in gpus], 1)
    options = {"processes": False, "n_workers": 1, "threads_per_worker": 1, "dashboard_address": None}
    with (
        LocalCluster(**options) as cluster,  # type: ignore[no-untyped-call]
        Client(cluster, set_as_default=False) as client,  # type: ignore[no-untyped-call]
    ):
        (worker,) = cluster.workers.values()
        client.sync(partial(work.offer, worker, station))
        with Fleet(cluster.scheduler_address, "nvrtc") as made:
            yield made
        client.sync(partial(work.withdraw, worker))


def test_a_race_on_a_busy_gpu_is_left_for_later_and_its_worker_stays() -> None:
    busy, breaks, other = variants("busy", "breaks", "other")
    with fleet(Racer()) as there:
        gpus = FleetGpus(there, there.classes[0])
        with pytest.raises(DisturbedError) as caught:
            gpus.race(busy, other, [CELL])
        assert str(caught.value) == BUSY
        assert gpus.count == 1
        assert gpus.race(other, busy, [CELL]) == [(1.0, 2.0)]
        with pytest.raises(DeviceError) as caught:
            gpus.race(breaks, other, [CELL])
        assert not isinstance(caught.value, DisturbedError)
        assert gpus.count == 0


def test_a_gpu_that_fails_leaves_its_worker_the_others() -> None:
    a, b = variants("a", "b")
    said: list[str] = []
    with fleet(Racer(works=False), Racer()) as there:
        there.say = said.append
        gpus = FleetGpus(there, there.classes[0])
        assert gpus.count == 2
        assert gpus.race(a, b, [CELL]) == gpus.race(b, a, [CELL]) == [(1.0, 2.0)]
        assert gpus.count == 1
        (worker,) = there.wait(there._client.scheduler.identity())["workers"].values()
        assert worker["resources"] == {gpu_resource(GPU.gpu): 1, COMPILERS: 1}
    (sentence,) = said
    assert re.fullmatch(f"a {GPU.gpu} of the worker at .* gets no more work: .* ended with signal 9", sentence)
