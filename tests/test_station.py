"""What one worker of a fleet has: the GPUs that it measures on, and races on them."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as Waits
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, LocalCluster
from measure_sample import CELL
from test_runners import GPU, variants

from hadagen.errors import DeviceError, DisturbedError
from hadagen.fleet import station as station_module
from hadagen.fleet import work
from hadagen.fleet.client import Fleet
from hadagen.fleet.station import COMPILERS, Gpu, GpuError, Station, gpu_resource
from hadagen.measure import Cell, Variant
from hadagen.tuner.fleet_search import FleetGpus


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HADAGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(station_module, "TAKEN_SECONDS", 0.0)
    monkeypatch.setattr(station_module, "_LOOK_SECONDS", 0.01)


@dataclass(frozen=True)
class Racer:
    """A GPU that only races."""

    race: Callable[[Any, Any, Sequence[Cell]], Any]

    def run(self, wanted: object) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        pass


class Here(Station):
    def _toolchain(self, kind: str) -> Any:
        return kind


def says_where(uuid: str) -> Racer:
    """A GPU that says in races which one it is."""
    return Racer(lambda a, b, cells: [(uuid, cell) for cell in cells])


class Worker(Here):
    """A station whose GPUs have these UUIDs."""

    def __init__(self, *uuids: str) -> None:
        super().__init__([Gpu(GPU, "sm90", lambda _, uuid=uuid: says_where(uuid), uuid) for uuid in uuids], 0)

    def used(self) -> Any:
        """The UUID of the GPU on which it measures."""
        a, b = variants("ok", "ok")
        return self.race(a, b, [CELL], GPU.gpu, "nvrtc")[0][0]


def test_workers_that_see_the_same_gpus_use_different_ones() -> None:
    first, second, third = (Worker("0a", "0b") for _ in range(3))
    assert [first.used(), second.used(), first.used(), second.used()] == ["0a", "0b", "0a", "0b"]
    with pytest.raises(DeviceError) as caught:
        third.used()
    assert str(caught.value) == (
        "other processes measure on Stand-in (GPU-0a and GPU-0b), and have done so for 0 s; start each worker of a "
        "machine with GPUs of its own in CUDA_VISIBLE_DEVICES, or one worker for all"
    )
    first.rest(idle=3600.0)
    with pytest.raises(DeviceError):
        third.used()
    first.rest()
    assert third.used() == "0a"


def test_a_gpu_on_which_measuring_fails_is_used_no_more_and_others_are() -> None:
    worker, after = Worker("0a", "0b"), Worker("0a")

    def fails() -> None:
        with worker._seat(GPU.gpu, "nvrtc"):
            raise DeviceError("it is lost")

    assert worker.used() == "0a"
    with pytest.raises(GpuError, match="it is lost") as caught:
        fails()
    assert caught.value.gpu == GPU.gpu
    assert after.used() == "0a"  # it is free for others
    assert [worker.used(), worker.used()] == ["0b", "0b"]
    assert worker.resources[gpu_resource(GPU.gpu)] == len(worker.greeting("nvrtc").gpus) == 1
    with pytest.raises(GpuError):
        fails()
    with pytest.raises(GpuError, match="it has no Stand-in any more that works") as caught:
        worker.used()
    assert caught.value.gpu == GPU.gpu
    assert worker.resources[gpu_resource(GPU.gpu)] == 0


def test_a_worker_waits_for_its_own_gpu_if_another_process_has_the_rest() -> None:
    first, second = Worker("0a"), Worker("0a", "0b")
    assert [first.used(), second.used()] == ["0a", "0b"]
    with ThreadPoolExecutor(1) as threads, ExitStack() as seat:
        seat.enter_context(second._seat(GPU.gpu, "nvrtc"))
        waits = threads.submit(second.used)
        with pytest.raises(Waits):
            waits.result(timeout=0.1)
        seat.close()
        assert waits.result(timeout=10) == "0b"


def test_a_worker_that_is_told_to_stop_leaves_a_gpu_when_it_has_measured() -> None:
    first, second = Worker("0a"), Worker("0a")
    with first._seat(GPU.gpu, "nvrtc"):
        first.end()
    assert second.used() == "0a"


def test_a_gpu_is_free_again_when_measuring_does_not_start_or_its_process_is_killed() -> None:
    broken = Worker("0a")
    broken._toolchain = lambda kind: 1 / 0  # type: ignore[assignment]
    with pytest.raises(ZeroDivisionError):
        broken.used()
    worker = Worker("0a")
    assert worker.used() == "0a"
    worker.rest()
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); from test_station import Worker\n"
    code += "worker = Worker('0a'); worker.used(); print('measures', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"measures\n"
        with pytest.raises(DeviceError, match="GPU-0a"):
            worker.used()
        other.kill()
    assert worker.used() == "0a"


def test_without_a_place_for_locks_a_worker_measures(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert [Worker("0a").used(), Worker("0a").used()] == ["0a", "0a"]


# ---- races on a fleet of one worker ----------------------------------------------------------------------------------
BUSY = "a race has no times (process 12 (python3) uses the GPU, 97 % of the time); stop it, or choose another GPU"


def race(a: Variant, b: Variant, cells: Sequence[Cell]) -> list[tuple[float, float]]:
    """On a GPU that is busy in a race whose first kernel is named so, and breaks in another one."""
    if a.kernel.entry == "busy":
        raise DisturbedError(BUSY)
    if a.kernel.entry == "breaks":
        raise DeviceError("the measuring process ended with signal 9")
    return [(1.0, 2.0) for _ in cells]


@contextmanager
def fleet(*races: Callable[..., Any]) -> Iterator[Fleet]:
    """A fleet of one worker, whose GPUs race so."""
    station = Here([Gpu(GPU, "sm90", lambda toolchain, race=race: Racer(race)) for race in races], 1)
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
    with fleet(race) as there:
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
    def breaks(*_: object) -> None:
        raise DeviceError("the measuring process ended with signal 9")

    a, b = variants("a", "b")
    said: list[str] = []
    with fleet(breaks, race) as there:
        there.say = said.append
        gpus = FleetGpus(there, there.classes[0])
        assert gpus.count == 2
        assert gpus.race(a, b, [CELL]) == gpus.race(b, a, [CELL]) == [(1.0, 2.0)]
        assert gpus.count == 1
        (worker,) = there.wait(there._client.scheduler.identity())["workers"].values()
        assert worker["resources"] == {gpu_resource(GPU.gpu): 1, COMPILERS: 1}
    (sentence,) = said
    assert re.fullmatch(f"a {GPU.gpu} of the worker at .* gets no more work: .* ended with signal 9", sentence)
