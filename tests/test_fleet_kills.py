"""Fleets whose parts are killed, hang, or answer garbage at random moments: no finished trial is lost or there twice.
Each run ends by itself or with one sentence, and the same command goes on.

    python -m pytest tests/test_fleet_kills.py --schedules 50 --figures docs/data
"""

import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from fleet_cluster import Cluster, end
from postgres import PostgresServer
from sample_store import assert_each_once

from hadagen.problem.trial import knobs_key
from hadagen.tuning_db.store import Store

# A tune that gives up a worker sooner when it is silent.
TUNE = "from hadagen.fleet import client; client.SILENT_SECONDS = 5.0; from hadagen.cli.main import main; main()"
PROBLEM = "n64-float16-fast"
TRIALS = 8  # of each class
SECONDS = 0.25  # that a measurement takes
GPUS = {"first": "Emulated A", "second": "Emulated A", "third": "Emulated B"}
FAULTS = 3  # in a schedule
LONGEST = 3.0  # until a fault, from the moment that the search begins, or that of the fault before
MOST_RUNS = 10
Key = tuple[str, str]  # a GPU, and knobs


class Breakable:
    """A cluster with a worker for each of `GPUS`, and a tune on it. Each fault is a method, by its name."""

    def __init__(self, cluster: Cluster, server: PostgresServer, choose: random.Random) -> None:
        self._cluster, self._server, self._choose = cluster, server, choose
        self._workers: dict[str, subprocess.Popen[bytes]] = {}
        self._strange: list[subprocess.Popen[bytes]] = []  # workers of the present run alone
        self.tune: subprocess.Popen[bytes] | None = None

    def repair(self) -> None:
        """Start what is not there, and end what does not belong there."""
        for process in self._strange:
            end(process)
        self._strange.clear()
        if self._cluster.scheduler.poll() is not None:
            for process in self._workers.values():
                end(process)
            self._workers.clear()
            self._cluster.start_scheduler()
        for name in GPUS.keys() - self._workers.keys():
            self._workers[name] = self._add(GPUS[name])
        self._cluster.wait_for(len(GPUS))

    def run(self, database: str, folder: Path, faults: list[str]) -> tuple[int, str, list[str]]:
        """Start a tune, and let some of these faults happen. Returns its exit code, what it said, and which did."""
        said = folder / "said"
        command = [sys.executable, "-c", TUNE, "tune", "--fleet", self._cluster.address, "--db", database]
        command += ["--problem", PROBLEM, "--no-refine", "--from-scratch", "--trials", str(TRIALS), "--json"]
        with said.open("wb") as errors:
            self.tune = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
        while b"every trial is kept in" not in said.read_bytes() and self.tune.poll() is None:
            time.sleep(0.05)
        happened = []
        for fault in faults:
            with suppress(subprocess.TimeoutExpired):
                self.tune.wait(self._choose.uniform(0, LONGEST))
            if self.tune.poll() is not None:
                break
            getattr(self, fault)()
            happened.append(fault)
        return self.tune.wait(), said.read_text(), happened

    def _add(self, gpu: str, **environment: str) -> subprocess.Popen[bytes]:
        return self._cluster.add(gpu, EMULATED_SECONDS=str(SECONDS), **environment)

    def _any(self) -> str:
        return self._choose.choice(sorted(self._workers))

    def a_worker_is_killed(self) -> None:
        name = self._any()
        end(self._workers[name])
        self._workers[name] = self._add(GPUS[name])

    def a_worker_hangs(self) -> None:
        name = self._any()
        self._strange.append(self._workers.pop(name))
        self._strange[-1].send_signal(signal.SIGSTOP)
        self._workers[name] = self._add(GPUS[name])

    def a_worker_comes_back_with_another_driver(self) -> None:
        name = self._any()
        end(self._workers.pop(name))
        self._strange.append(self._add(GPUS[name], EMULATED_DRIVER="591.3"))

    def a_worker_answers_garbage(self) -> None:
        self._strange.append(self._add(GPUS[self._any()], EMULATED_FAULT="garbage"))

    def a_gpu_breaks(self) -> None:
        self._strange.append(self._add(GPUS[self._any()], EMULATED_FAULT="breaks"))

    def the_tune_is_killed(self) -> None:
        assert self.tune
        end(self.tune)

    def the_scheduler_is_killed(self) -> None:
        end(self._cluster.scheduler)

    def the_database_restarts(self) -> None:
        self._server.kill()
        self._server.start()


KINDS = sorted(name for name in vars(Breakable) if name.startswith(("a_", "the_")))


def kept(database: str) -> set[Key]:
    """The trials of a database, each once."""
    with Store.open(database) as store:
        found = Counter((trial.environment.gpu, knobs_key(trial.knobs)) for trial in store.checked())
    assert set(found.values()) <= {1}
    return set(found)


def test_a_fleet_loses_nothing_whatever_breaks(
    cluster: Cluster,
    postgres_server: PostgresServer,
    tmp_path: Path,
    schedules: int,
    figure: Callable[[str, Any], None],
) -> None:
    choose = random.Random(3)
    breakable = Breakable(cluster, postgres_server, choose)
    happened: Counter[str] = Counter()
    runs = trials = equal = 0
    for _ in range(schedules):
        database, before = postgres_server.new_database(), set[Key]()
        faults = [choose.choice(KINDS) for _ in range(FAULTS)]
        for run in range(1, MOST_RUNS + 1):
            breakable.repair()
            code, said, done = breakable.run(database, tmp_path, faults)
            happened.update(done)
            faults, runs = faults[len(done) :], runs + 1
            assert "Traceback" not in said, said
            assert code == 0 or code == -signal.SIGKILL or said.splitlines()[-1].startswith("hadagen: "), said
            now = kept(database)
            assert before <= now
            before = now
            if code == 0:
                break
            assert run < MOST_RUNS, said
        assert Counter(gpu for gpu, _ in before) == dict.fromkeys(GPUS.values(), TRIALS), said
        with Store.open(database) as store:
            assert_each_once(store)
        trials, equal = trials + len(before), equal + 1
    figure(
        "fleet_kills",
        {
            "schedules": schedules,
            "faults": {kind.replace("_", " "): happened[kind] for kind in KINDS},
            "runs": runs,
            "trials": trials,
            "equal": equal,
        },
    )
