"""The store: what goes in comes out, whoever else has the file open, and from whatever URL."""

from __future__ import annotations

import math
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from sample_trials import H100, H200, LAUNCH, PROBLEM, make_kernel, make_timing, make_trial, times, trial_lists

from hadagen.errors import StorageError, UsageError
from hadagen.problem import DType, Numerics, Rows
from hadagen.trial import Outcome, Trial
from hadagen.tuning_db.store import Store


# ---- what is stored --------------------------------------------------------------------------------------------------
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trials=trial_lists())
def test_trials_come_back_as_they_were_recorded(empty: Path, trials: list[Trial]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = shutil.copy(empty, directory)
        with Store.open(path) as store:
            numbers = [store.record(trial) for trial in trials]
            assert store.trials() == trials
        with Store.open(path) as store:
            assert store.trials() == trials
            assert [store.record(trial) for trial in reversed(trials)] == numbers[::-1]
            assert store.trials() == trials


def test_a_name_that_is_no_utf_8_is_kept_as_escapes(any_store: Store) -> None:
    any_store.record(make_trial(detail="/tmp/\udcff.cu: no such file"))
    assert any_store.trials()[0].detail == "/tmp/\\udcff.cu: no such file"
    with pytest.raises(StorageError, match=r"cannot store 'sm90.udcff', which has a lone surrogate"):
        any_store.record(make_trial(arch="sm90\udcff"))
    assert len(any_store.trials()) == 1


def test_what_is_no_number_comes_back_too(any_store: Store) -> None:
    any_store.record(make_trial(outcome=Outcome.WRONG_ANSWER, errors={"normal": math.nan, "large": math.inf}))
    errors = any_store.trials()[0].errors
    assert math.isnan(errors["normal"])
    assert errors["large"] == math.inf


def test_trials_are_found_by_problem_arch_gpu_and_outcome(any_store: Store) -> None:
    trial = make_trial()
    others = [
        replace(trial, problem=PROBLEM.with_io(numerics=Numerics.FAST)),
        replace(trial, arch="sm80"),
        replace(trial, environment=H200),
        replace(trial, knobs={}, outcome=Outcome.TIMEOUT),
        replace(trial, problem=PROBLEM.with_io(rows=Rows.PITCHED)),
    ]
    for each in (trial, *others):
        any_store.record(each)
    assert any_store.trials() == [trial, *others]
    assert any_store.trials(problem=others[0].problem) == [others[0]]
    assert any_store.trials(problem=others[4].problem) == [others[4]]
    assert any_store.trials(arch="sm80") == [others[1]]
    assert any_store.trials(gpu=H200.gpu) == [others[2]]
    assert any_store.trials(outcome=Outcome.TIMEOUT) == [others[3]]
    assert any_store.trials(PROBLEM, "sm90", H100.gpu, Outcome.OK) == [trial]
    assert any_store.trials(problem=PROBLEM.with_io(input=DType.BFLOAT16, output=DType.BFLOAT16)) == []


def test_trials_can_be_read_without_blobs(any_store: Store) -> None:
    trial = make_trial()
    any_store.record(trial)
    kernel = trial.kernel
    assert kernel is not None
    assert any_store.trials(blobs=False) == [replace(trial, kernel=replace(kernel, source="", ptx=b"", cubin=b""))]
    assert any_store.kernel(kernel.digest) == kernel
    with pytest.raises(StorageError, match="no kernel abc"):
        any_store.kernel("abc")


def test_no_trials_are_recorded_as_none(any_store: Store) -> None:
    assert any_store.record() == []
    assert any_store.trials() == []


def test_recording_again_replaces(any_store: Store) -> None:
    number = any_store.record(make_trial(knobs={"a": 1, "b": 2}))
    again = make_trial(
        knobs={"b": 2, "a": 1},
        kernel=make_kernel(b"other"),
        timings=(make_timing(7.0),),
        errors={"one-hot": 0.5},
        outcome=Outcome.WRONG_ANSWER,
    )
    assert any_store.record(again) == number
    assert any_store.trials() == [again]
    assert any_store.record(replace(again, kernel=None, errors={}, timings=())) == number
    assert any_store.trials()[0].kernel is None


def test_a_kernel_learns_its_arithmetic_unless_it_is_damaged(store: Store, path: Path) -> None:
    """A new seal must not make sound what was changed."""
    older, newer = (replace(LAUNCH, arithmetic=name) for name in ("", "a" * 12))
    first, second = (make_trial(n, kernel=make_kernel(launch=launch)) for n, launch in ((1, older), (2, newer)))
    for damaged in (False, True):
        store.record(first)
        if damaged:
            with closing(sqlite3.connect(path)) as connection, connection:
                connection.execute("UPDATE hadagen_kernels SET registers = 99, arithmetic = ''")
            with pytest.raises(StorageError, match="is damaged"):
                store.record(second)
        else:
            store.record(second)
            assert {trial.kernel and trial.kernel.launch for trial in store.checked()} == {newer}


def test_timings_are_added_to_those_of_the_same_kernel(any_store: Store) -> None:
    old = make_trial(timings=times({1 << 13: 2.0, 1 << 20: 9.0}), detail="raced", seconds=2.0)
    any_store.record(old)
    new = make_trial(timings=times({1 << 20: 8.0, 3 << 20: 9.0}), seconds=1.0, date="2026")
    any_store.add_timings(new)
    (found,) = any_store.trials()
    every = times({1 << 13: 2.0, 1 << 20: 8.0, 3 << 20: 9.0})
    assert found == replace(new, timings=every, detail="raced", seconds=3.0)
    rebuilt = replace(new, kernel=make_kernel(b"rebuilt"))
    any_store.add_timings(rebuilt)
    assert any_store.trials() == [found]
    elsewhere = replace(new, environment=H200)
    any_store.add_timings(elsewhere)
    assert any_store.trials() == [found, elsewhere]


# ---- several processes, and the end of one ---------------------------------------------------------------------------
RECORD = """
import sys
from sample_trials import make_trial
from hadagen.tuning_db.store import Store
store = Store.open(sys.argv[1])
for chunks in range(int(sys.argv[2]), int(sys.argv[3])):
    store.record(make_trial(chunks))
    print(chunks, flush=True)
"""


def recorder(path: Path, start: int, end: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", RECORD, str(path), str(start), str(end)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent)


def test_a_trial_that_was_read_without_blobs_may_be_recorded(any_store: Store) -> None:
    trial = make_trial()
    any_store.record(trial)
    (bare,) = any_store.trials(blobs=False)
    any_store.record(replace(bare, outcome=Outcome.UNSTABLE))
    assert any_store.trials() == [replace(trial, outcome=Outcome.UNSTABLE)]


def test_a_killed_process_loses_nothing_that_it_reported(path: Path) -> None:
    with recorder(path, 0, 10**6) as process:
        assert process.stdout is not None
        for _ in range(20):
            reported = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().split()
    reported = max([reported, *map(int, rest)])
    with Store.open(path) as store:
        trials = store.trials()
        # One more may have been stored and not reported yet; none is stored by halves.
        assert trials in ([make_trial(i) for i in range(end)] for end in (reported + 1, reported + 2))


def test_two_processes_may_create_and_fill_one_database(tmp_path: Path) -> None:
    path = tmp_path / "new" / "trials.db"
    processes = [recorder(path, 0, 25), recorder(path, 25, 50)]
    for process in processes:
        process.communicate()
        assert process.returncode == 0
    with Store.open(path) as store:
        assert sorted(trial.knobs["chunks"] for trial in store.trials()) == list(range(50))


def test_optuna_keeps_its_tables_in_the_same_file(tmp_path: Path) -> None:
    import optuna

    def search(url: str) -> int:
        storage = optuna.storages.RDBStorage(url)
        study = optuna.create_study(storage=storage, study_name="s", load_if_exists=True)
        study.tell(study.ask(), 1.0)
        storage.engine.dispose()
        return len(study.trials)

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    ours_first, optunas_first = tmp_path / "a.db", tmp_path / "b.db"
    assert search(f"sqlite:///{optunas_first}") == 1
    for file, count in ((ours_first, 1), (optunas_first, 2)):
        with Store.open(file) as store:
            store.record(make_trial())
            assert search(store.url) == count
            store.record(make_trial(2))
        with Store.open(file) as store:
            assert store.trials() == [make_trial(), make_trial(2)]
        assert search(f"sqlite:///{file}") == count + 1


# ---- URLs ------------------------------------------------------------------------------------------------------------
def test_a_url_opens_the_same_database(path: Path) -> None:
    with Store.open(f"sqlite:///{path}") as store:
        store.record(make_trial())
        assert store.place == str(path)
    with Store.open(path) as store:
        assert store.trials() == [make_trial()]
        assert store.url == f"sqlite:///{path}"


@pytest.mark.parametrize(
    "url", ["mysql://somewhere/trials", "what://is/this", "://", "postgresql://host:port/x", "postgresql+foo://host/x"]
)
def test_a_url_that_cannot_be_is_wrong_usage(url: str) -> None:
    with pytest.raises(UsageError, match="name a file"):
        Store.open(url)


def test_no_message_has_a_password() -> None:
    with pytest.raises(StorageError) as refused:
        Store.open("postgresql://me:secret@localhost:1/trials")
    assert "postgresql+psycopg://me:***@localhost:1/trials" in str(refused.value)
    assert "secret" not in str(refused.value)


def test_what_sqlalchemy_logs_is_not_printed() -> None:
    """Such as a traceback where Ctrl-C ends a query."""
    program = "import logging, hadagen.tuning_db.store; logging.getLogger('sqlalchemy.pool').error('a traceback')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == ""
