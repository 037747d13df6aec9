"""`hadagen tune --fleet` on a real Dask cluster: scheduler and workers are processes, their GPUs are the emulator's."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from fleet_cluster import Cluster, end

from hadagen.cli.main import main
from hadagen.tuning_db.store import Store

TUNE = ("--problem", "n64-float16-fast", "--no-refine", "--from-scratch", "--json")


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    made = Cluster(tmp_path)
    yield made
    made.close()


def test_a_fleet_of_two_classes_finds_winners_for_each_whatever_a_worker_does(cluster: Cluster, tmp_path: Path) -> None:
    cluster.add("Emulated A")
    cluster.add("Emulated B", EMULATED_DRIVER="590.2")
    cluster.add("Emulated B", EMULATED_FAULT="garbage")
    cluster.add("Emulated A", EMULATED_CODE="of another version")
    cluster.wait_for(4)
    database = tmp_path / "trials.db"
    result = CliRunner().invoke(
        main, ["tune", "--fleet", cluster.address, "--db", str(database), "--trials", "4", *TUNE]
    )
    assert result.exit_code == 0, result.output
    classes = json.loads(result.stdout)["classes"]
    assert [(each["gpu"], each["trials"]) for each in classes] == [("Emulated A", 4), ("Emulated B", 4)]
    assert all(each["winners"] for each in classes)
    assert "it has another hadagen; install the same version there" in result.stderr
    finished = [line.split(", best")[0] for line in result.stderr.splitlines() if line.startswith("n64-float16-fast")]
    assert sorted(finished) == [f"n64-float16-fast on Emulated {letter}: 4 trials" for letter in "AB"]
    with Store.open(database) as store:
        tried = Counter((trial.environment.gpu, str(trial.knobs)) for trial in store.trials(blobs=False))
    assert len(tried) == 8
    assert set(tried.values()) == {1}


def test_without_a_scheduler_or_a_gpu_there_is_a_sentence(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.add("")
    cluster.wait_for(1)
    database = str(tmp_path / "trials.db")
    run = CliRunner().invoke(main, ["tune", "--fleet", cluster.address, "--db", database, *TUNE])
    assert run.exit_code == 1
    assert f"no worker of the fleet at {cluster.address} has a GPU; start `dask worker" in run.stderr
    end(cluster.scheduler)
    monkeypatch.setattr("hadagen.fleet.client.CONNECT_SECONDS", 0.5)
    run = CliRunner().invoke(main, ["tune", "--fleet", cluster.address, "--db", database, *TUNE])
    assert run.exit_code == 1
    assert f"there is no Dask scheduler at {cluster.address}" in run.stderr
    assert "start one with `dask scheduler`" in run.stderr
    run = CliRunner().invoke(main, ["tune", "--fleet", "local", "--device", "0", "--db", database, *TUNE])
    assert "--device names a GPU of this machine, and --fleet others; leave one out" in run.stderr
