"""The command line: what it prints, what it exits with, and one sentence for everything that can go wrong."""

from __future__ import annotations

import errno
import gzip
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import TINY_TUNE, empty_machine, raising, run, sentence, succeed
from sample_bundle import write_sample
from sample_trials import H100, PROBLEM, make_trial, times

from hadagen import toolchain
from hadagen.cli import bench, between, options
from hadagen.cli.sentences import TUNE_PACKAGES
from hadagen.errors import DeviceError
from hadagen.problem import DType, Problem
from hadagen.runtime.bundles import VARIABLE
from hadagen.trial import BUCKETS_BETWEEN, BUCKETS_OF_LONG_ROWS, ELEMENT_BUCKETS, Outcome
from hadagen.tuning_db import table
from hadagen.tuning_db.bundle import shipped
from hadagen.tuning_db.bundle_writer import write_bundle
from hadagen.tuning_db.store import Store
from hadagen.tuning_db.winners import portfolio

GPU = H100.gpu


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    empty_machine(tmp_path, tmp_path_factory, monkeypatch)


@pytest.fixture
def sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle of one winner, n = 256 on an H100, in use."""
    path = write_sample(tmp_path / "sample.db")
    monkeypatch.setenv(VARIABLE, str(path))
    return path


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """A tuning database of one winner and one failure."""
    path = tmp_path / "trials.db"
    with Store.open(path) as store:
        store.record(make_trial(1, timings=times({1 << 13: 2.0, 1 << 23: 9.0})))
        store.record(make_trial(2, outcome=Outcome.WRONG_ANSWER, timings=()))
    return path


# ---- help ------------------------------------------------------------------------------------------------------------
def test_without_arguments_the_commands_are_listed() -> None:
    assert succeed() == succeed("--help")
    for command in (
        *("tune", "best", "list", "emit", "space", "bench", "between", "calls"),
        *("bundle", "record", "replay", "doctor"),
    ):
        assert f"  {command} " in succeed()
        assert "Usage: " in succeed(command, "--help")


def test_the_version_is_that_of_the_package() -> None:
    assert succeed("--version").split()[1] == "0.1.0"


# ---- wrong usage -----------------------------------------------------------------------------------------------------
BEST = ("best", "--arch", "sm90", "--dtype", "float16", "--rows", "8", "--n")
WRONG = {
    ("nonsense",): "No such command 'nonsense'; see 'hadagen --help'",
    ("--nonsense",): "No such option '--nonsense'; see 'hadagen --help'",
    ("best", "--arch", "sm90", "--n", "256"): "Missing option '--rows'; see 'hadagen best --help'",
    (*BEST, "many"): "Invalid value for '--n': 'many' is not a valid integer; see 'hadagen best --help'",
    (*BEST, "100"): "n = 100 is not supported; n must be a power of two from 2 to 32768",
    (*BEST, "0"): "n = 0 is not supported",
    (*BEST, "-2"): "n = -2 is not supported",
    (*BEST, "1"): "n = 1 is not supported",
    (*BEST, "65536"): "n = 65536 is not supported",
    (*BEST, "256", "--rows", "0"): "rows = 0 is not supported; give a whole number of rows, at least 1",
    (*BEST, "256", "--rows", "-1"): "rows = -1 is not supported",
    (*BEST, "256", "--dtype", "float8"): "dtype 'float8' is not supported; choose one of float16, bfloat16, float32",
    (*BEST, "256", "--numerics", "so-so"): "numerics 'so-so' is not supported; choose one of accurate, fast",
    (*BEST, "256", "--arch", "sm12"): "arch 'sm12' is not known and no bundle serves it; choose one of sm90",
    (*BEST, "256", "--arch", "hopper"): "arch 'hopper' is not one; write sm and the compute capability",
    (*BEST, "256", "--device", "0"): "device '0' is no name of a GPU, which is wanted beside an arch; write such as",
    ("best", "--n", "256", "--rows", "8"): "this machine has no CUDA device to choose for; name an arch",
    ("space", "--n", "100"): "n = 100 is not supported",
    ("space", "--n", "4096", "--arch", "sm1"): "arch 'sm1' is not known; choose one of sm90",
    ("emit", "--n", "4096", "--arch", "sm1"): "arch 'sm1' is not known; choose one of sm90",
    ("emit", "--n", "4096", "--knobs", "speed=11"): "knob 'speed' is not known; choose from chunks, warps,",
    ("emit", "--n", "4096", "--knobs", "warps=3"): "knob warps = 3 is not searched on sm90; choose one of 1, 2,",
    ("emit", "--n", "4096", "--knobs", "warps=x"): "knob warps = 'x' is not searched on sm90; choose one of 1, 2,",
    ("emit", "--n", "4096", "--knobs", "warps"): "--knobs 'warps' is not of the form k=v; write for example",
    ("emit", "--n", "8192", "--knobs", "chunks=1,warps=1"): "a row",
    ("tune", "--n", "3"): "n = 3 is not supported",
    ("tune", "--n", "2-"): "--n '2-' is not a size; write 4096, 128,256 or 2-32768",
    ("tune", "--n", "64-2"): "--n '64-2' is an empty range; write the smaller size first, as in 2-64",
    ("tune", "--dtype", "int8"): "dtype 'int8' is not supported",
    ("tune", "--numerics", "so-so"): "numerics 'so-so' is not supported",
    ("tune", "--arch", "sm1"): "arch 'sm1' is not known; choose one of sm90",
    ("tune", "--db", "mysql://host/db"): "database mysql is not supported; name a file or a postgresql:// URL",
    ("bench", "--n", "12"): "n = 12 is not supported",
    ("bench", "--elements", "1000"): "--elements 1000 is not supported; give powers of two from 8192 to 268435456",
    ("bench", "--elements", "1.5"): "--elements 1.5 is not supported; give powers of two from 8192 to 268435456",
    ("bench", "--elements", "many"): "--elements 'many' is not a size; write for example 65536,1M",
    ("bench", "--elements", "1e6"): "--elements '1e6' is not a size; write for example 65536,1M",
}


@pytest.mark.parametrize("arguments", WRONG, ids=" ".join)
def test_wrong_usage_is_one_sentence_and_exit_code_2(arguments: tuple[str, ...]) -> None:
    assert WRONG[arguments] in sentence(run(*arguments), 2)


@pytest.mark.parametrize(("option", "value"), [("--trials", "0"), ("--time-budget", "-1"), ("--time-budget", "nan")])
def test_a_tune_that_would_try_nothing_is_refused(option: str, value: str) -> None:
    assert "; give " in sentence(run(*TINY_TUNE, option, value), 2)
    assert not options.default_db().exists()


# ---- what fails ------------------------------------------------------------------------------------------------------
def test_without_a_gpu_bench_says_so() -> None:
    assert sentence(run("bench"), 1) == "there is no GPU in this test; add one"


def test_a_device_that_was_asked_for_and_is_not_there_is_not_replaced_by_an_estimate() -> None:
    assert sentence(run(*TINY_TUNE, "--device", "3"), 1) == "there is no GPU in this test; add one"


def test_nothing_to_open(tmp_path: Path) -> None:
    absent = tmp_path / "absent.db"
    for arguments in (("list", "--db"), ("bundle", "make", "--db")):
        assert f"there is no tuning database {absent}; run hadagen tune first" in sentence(run(*arguments, absent), 1)
    assert "No such file" in sentence(run("bundle", "verify", absent), 1)
    assert "there is no bundle; make one with hadagen tune" in sentence(run("bundle", "show"), 1)
    assert not absent.exists()


@pytest.mark.parametrize(
    "command", ["list --db", "tune --n 2 --db", "bundle make --db", "bundle verify", "bundle show"]
)
def test_a_foreign_file_is_refused_and_left_alone(command: str, tmp_path: Path) -> None:
    foreign = tmp_path / "letter.txt"
    foreign.write_text("Dear Sir or Madam,\n" * 100)
    assert f"{foreign} is not a " in sentence(run(*command.split(), foreign), 1)
    assert foreign.read_text() == "Dear Sir or Madam,\n" * 100


def test_a_newer_bundle_is_refused(sample: Path) -> None:
    with closing(sqlite3.connect(sample)) as connection:
        connection.execute("PRAGMA user_version = 99")
    for arguments in (("bundle", "verify"), ("list",), (*BEST, "256")):
        assert "is a bundle of format 99, later than" in sentence(run(*arguments), 1)


def test_a_newer_database_is_refused(database: Path) -> None:
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("UPDATE hadagen_schema_version SET version_num = '9999'")
    for arguments in (("list", "--db"), (*TINY_TUNE, "--db")):
        assert "schema 9999" in sentence(run(*arguments, database), 1)


def test_sound_bundles_are_told_of_beside_damaged_ones(sample: Path) -> None:
    succeed("bundle", "verify", sample)
    bad, other = (options.default_bundle("sm90").with_name(name) for name in ("bad.db", "good.db"))
    bad.parent.mkdir(parents=True)
    for path in (bad, other):
        shutil.copy(sample, path)
    with closing(sqlite3.connect(bad)) as connection, connection:
        connection.execute("UPDATE entries SET hot_us = hot_us + 1")
    for command in (["list"], ["list", "--json"], ["bundle", "verify"]):
        result = run(*command)
        assert result.exit_code == 1
        assert str(other) in result.stdout
        assert "bad.db is damaged" in result.stderr.splitlines()[-1]


def test_a_damaged_bundle_is_refused(sample: Path) -> None:
    with closing(sqlite3.connect(sample)) as connection, connection:
        connection.execute("UPDATE entries SET hot_us = 0.1")
    assert "is damaged" in sentence(run("bundle", "verify", sample), 1)


def test_a_read_only_database_is_refused_before_the_search(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hadagen.tuning_db.database._writable", lambda path: False)
    result = run(*TINY_TUNE, "--db", database)
    assert sentence(result, 1) == f"{database} is read-only; make it writable, or name another database with --db"


def test_a_missing_nvcc_is_named_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "_find", lambda tool: None)
    for arguments in (TINY_TUNE, ("emit", "--n", "2", "--ptx")):
        said = sentence(run(*arguments), 1)
        assert said.startswith("nvcc is not on PATH")
        assert "pip install 'hadagen[nvcc]'" in said


def test_an_nvcc_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "nvcc"
    fake.write_text("#!/bin/sh\necho out of order\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    said = sentence(run("emit", "--n", "2", "--ptx"), 1)
    assert str(fake) in said
    assert "out of order" in said
    checks = {check["name"]: check for check in json.loads(run("doctor", "--json").stdout)["checks"]}
    assert checks["nvcc"]["state"] == "broken"


@pytest.mark.parametrize("buffering", [[], ["-u"]], ids=["buffered", "unbuffered"])
def test_a_full_disk_is_a_sentence(buffering: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    command = [sys.executable, *buffering, "-m", "hadagen.cli", "space", "--n", "2"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("hadagen: No space left on device; make room")
    assert len(done.stderr.splitlines()) == 1


# What a command raises → what is said, and the exit code.
RAISED: list[tuple[Exception, str, int]] = [
    (OSError(errno.ENOSPC, "No space left on device", "/data/x"), "/data/x: No space left on device; make room", 1),
    (OSError(errno.EROFS, "Read-only file system", "/data/x"), "/data/x: Read-only file system; name a place", 1),
    (OSError(errno.EIO, "Input/output error"), "Input/output error; check the path", 1),
    (ModuleNotFoundError(name="optuna"), "optuna is not installed; install it with: pip install 'hadagen[tune]'", 1),
    (ModuleNotFoundError(name="cuda.bindings"), "cuda is not installed; install it with: pip install 'cuda-bind", 1),
    (DeviceError("the GPU fell off the bus; restart it"), "the GPU fell off the bus; restart it", 1),
    (ZeroDivisionError("division by\nzero"), "ZeroDivisionError: division by zero; this is a bug of hadagen", 1),
]


@pytest.mark.parametrize(("raised", "said", "exit_code"), RAISED, ids=lambda value: type(value).__name__)
def test_whatever_is_raised_becomes_a_sentence(
    raised: Exception, said: str, exit_code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "default_db", raising(raised))
    assert said in sentence(run("list"), exit_code)


def test_the_traceback_is_shown_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HADAGEN_DEBUG", "1")
    monkeypatch.setattr(options, "default_db", raising(ZeroDivisionError()))
    assert "Traceback" in run("list").stderr


# ---- best ------------------------------------------------------------------------------------------------------------
def test_best_prints_one_object(sample: Path) -> None:
    found = json.loads(succeed(*BEST, "256", "--rows", "256", "--inplace", "--device", GPU, "--json"))
    assert found["problem"] == {"n": 256, "dtype": "float16", "numerics": "accurate", "pitched": False}
    assert (found["rows"], found["destination"], found["match"]) == (256, "in-place", "same-gpu")
    assert found["kernel"] == make_trial(1).kernel.digest
    assert found["knobs"] == {"chunks": 1, "grid": "tiles"}
    assert found["launch"]["threads"] == 256
    assert (found["us"], found["copy_us"], found["fraction_of_copy"]) == (4.0, 1.9, 1.9 / 4.0)
    assert found["relative_error"] == 2e-4
    assert found["provenance"]["kind"] == "measured"
    assert {"gpu", "driver", "nvcc", "date"} <= found["provenance"].keys()


def test_best_says_how_a_kernel_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HADAGEN_BUNDLE", str(shipped()["sm90"]))
    assert "elements a tile, starts early\n" in succeed(*BEST, "4096", "--rows", "1024")


def test_best_is_readable(sample: Path) -> None:
    text = succeed(*BEST, "256", "--inplace")
    assert "match     same-arch" in text
    assert "chunks=1 grid=tiles" in text
    assert f"measured  {GPU}, driver 580.65, nvcc 13.0.48" in text


def test_best_tells_pitched_rows_from_contiguous_ones(sample: Path) -> None:
    pitched = json.loads(succeed(*BEST, "256", "--inplace", "--pitched", "--json"))
    assert (pitched["problem"]["pitched"], pitched["match"]) == (True, "generic")
    trial = make_trial(problem=replace(PROBLEM, n=4096, dtype=DType.FLOAT32, pitched=True), errors={"normal": 1e-7})
    trial = replace(trial, timings=times({1 << 16: 2.0}))
    write_bundle(sample, "sm90", portfolio([trial]), {trial.kernel.digest: trial.kernel}.__getitem__)
    asked = ("best", "--arch", "sm90", "--n", "4096", "--dtype", "float32", "--rows", "8", "--inplace")
    assert "65536 elements, rows of 3072, 0.95 of a plain copy" in succeed(*asked, "--pitched")
    assert json.loads(succeed(*asked, "--json"))["match"] == "generic"


def test_best_says_that_there_is_no_kernel(sample: Path) -> None:
    assert "no kernel, PyTorch computes it; to make one: hadagen tune --arch sm90" in succeed(*BEST, "512")
    assert json.loads(succeed(*BEST, "512", "--json"))["match"] == "generic"


# ---- space and emit --------------------------------------------------------------------------------------------------
def test_space_accounts_for_every_choice() -> None:
    report = json.loads(succeed("space", "--n", "4096", "--json"))
    assert report["legal"] > 100
    assert report["legal"] + sum(report["reasons"].values()) == report["total"]
    assert f"{report['legal']:,} of {report['total']:,} choices are legal" in succeed("space", "--n", "4096")


def test_emit_prints_source_that_says_its_plan() -> None:
    source = succeed("emit", "--n", "64", "--dtype", "bfloat16")
    assert "over rows of n = 64, bfloat16, accurate" in source
    assert source == succeed("emit", "--n", "64", "--dtype", "bfloat16")


def test_emit_sets_the_knobs_it_is_given_and_completes_the_others() -> None:
    source = succeed(
        "emit", "--n", "4096", "--numerics", "fast", "--knobs", "chunks=8", "--knobs", "cluster=2,stages=1"
    )
    assert "constexpr int chunks = 8, vectors = 8;" in source
    assert "__cluster_dims__(2, 1, 1)" in source


def test_emit_starts_from_the_known_winner(sample: Path) -> None:
    write_sample(sample, chunks=2)
    assert "constexpr int chunks = 2, vectors = 2;" in succeed("emit", "--n", "256")


def test_emit_prints_ptx() -> None:
    assert ".target sm_90" in succeed("emit", "--n", "2", "--numerics", "fast", "--ptx")


def test_emit_prints_machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "disassemble", lambda kernel: f"code of {len(kernel.cubin)} bytes")
    assert succeed("emit", "--n", "2", "--numerics", "fast", "--sass").startswith("code of ")


# ---- bundles and databases -------------------------------------------------------------------------------------------
def test_list_shows_bundles_and_the_database(sample: Path, database: Path) -> None:
    found = json.loads(succeed("list", "--db", database, "--json"))
    (bundle,) = found["bundles"]
    assert (bundle["path"], bundle["arch"], bundle["gpus"], bundle["winners"]) == (str(sample), "sm90", [GPU], 2)
    assert found["databases"] == [
        {
            "path": str(database),
            "read_only": False,
            "runs": [
                {"arch": "sm90", "gpu": GPU, "problems": 1, "trials": 2, "outcomes": {"ok": 1, "wrong_answer": 1}}
            ],
        }
    ]
    text = succeed("list", "--db", database)
    assert str(sample) in text
    assert "1 ok, 1 wrong_answer" in text


def test_list_of_nothing_says_what_to_do() -> None:
    assert succeed("list") == "no bundle; make one with: hadagen tune\n"
    assert json.loads(succeed("list", "--json")) == {"bundles": [], "databases": []}


def test_a_bundle_is_made_found_verified_and_shown(database: Path) -> None:
    assert "2 winners, 1 kernels" in succeed("bundle", "make", "--db", database)
    assert str(options.default_bundle("sm90")) in succeed("bundle", "verify")
    assert json.loads(succeed(*BEST, "256", "--inplace", "--json"))["match"] == "same-arch"
    (shown,) = json.loads(succeed("bundle", "show", "--json"))
    assert [entry["elements"] for entry in shown["entries"]] == [1 << 13, 1 << 23]
    assert shown["entries"][1]["us"] == 9.0
    assert "8388608" in succeed("bundle", "show", "--all")
    _, header, line = succeed("bundle", "show").splitlines()
    assert header.split()[:6] == ["GPU", "dtype", "numerics", "rows", "n", "winners"]
    assert line.removeprefix(GPU).split()[:6] == ["float16", "accurate", "contiguous", "256", "2", "1"]


def test_a_bundle_of_another_database_is_not_replaced(database: Path, tmp_path: Path) -> None:
    succeed("bundle", "make", "--db", database)
    before = options.default_bundle("sm90").read_bytes()
    other = tmp_path / "other.db"
    with Store.open(other) as store:
        store.record(replace(make_trial(), problem=Problem(512, "float16")))
    refused = f"has winners that {other} has no trials of, such as of n256-float16-accurate on {GPU}, and they would be"
    assert refused in sentence(run("bundle", "make", "--db", other), 2)
    tiny = ["tune", "--n", "512", "--dtype", "float16", "--numerics", "accurate", "--contiguous", "--trials", "1"]
    assert refused in sentence(run(*tiny, "--db", other), 2)
    assert options.default_bundle("sm90").read_bytes() == before
    succeed("bundle", "make", "--db", database)  # its own


def test_a_bundle_of_nothing_is_refused(database: Path, tmp_path: Path) -> None:
    said = sentence(run("bundle", "make", "--db", database, "--arch", "sm80", tmp_path / "x.db"), 1)
    assert "there is no winner for sm80" in said
    assert not (tmp_path / "x.db").exists()


def test_the_winners_of_a_bundle_are_exported_and_merged(sample: Path, tmp_path: Path) -> None:
    succeed("bundle", "export", sample, tmp_path / "winners.csv")
    header, *lines = (tmp_path / "winners.csv").read_text().splitlines()
    assert header.startswith("gpu,numerics,dtype,pitched,elements,n,destination,cache,us,")
    assert lines
    assert all(line.startswith(f"{GPU},accurate,float16,0,") for line in lines)
    assert "cannot be written" in sentence(run("bundle", "export", sample, "/proc/winners.csv"), 1)
    assert "has no winner of Abacus" in sentence(run("bundle", "export", "--gpu", "Abacus", sample, tmp_path / "x"), 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("csv.DictWriter.writerows", raising(OSError(errno.ENOSPC, "No space left on device")))
        assert "No space left" in sentence(run("bundle", "export", sample, tmp_path / "winners.csv"), 1)
    assert (tmp_path / "winners.csv").read_text().splitlines() == [header, *lines]
    (tmp_path / "empty.csv").touch()
    succeed("bundle", "export", sample, tmp_path / "empty.csv")
    assert (tmp_path / "empty.csv").read_text().splitlines() == [header, *lines]
    recording = tmp_path / "recording.jsonl.gz"
    recording.write_bytes(gzip.compress(b"what took an hour to measure"))
    (tmp_path / "notes.csv").write_text("n,time\n8,0.5\n")
    for other in (sample, recording, tmp_path / "notes.csv"):
        before = other.read_bytes()
        said = sentence(run("bundle", "export", sample, other), 1)
        assert f"{other} is there already and is not a table of hadagen; name another place" in said
        assert other.read_bytes() == before
    succeed("bundle", "merge", sample, sample, tmp_path / "both.db")
    succeed("bundle", "merge", sample, tmp_path / "both.db", tmp_path / "both.db")
    said = sentence(run("bundle", "merge", sample, tmp_path / "both.db"), 2)
    assert f"{tmp_path / 'both.db'} is there already and would be lost" in said
    succeed("bundle", "export", tmp_path / "both.db", tmp_path / "again.csv")
    assert (tmp_path / "again.csv").read_text() == (tmp_path / "winners.csv").read_text()


@pytest.mark.parametrize("columns", [bench.COLUMNS, between.COLUMNS, table.COLUMNS])
def test_every_table_replaces_its_like(columns: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    table.write_table(path, columns, [dict.fromkeys(columns, 1)])
    table.check_table_place(path)


@pytest.mark.parametrize(
    ("texts", "sizes"),
    [(["4096"], [4096]), (["2-16", "8,64"], [2, 4, 8, 16, 64]), (["2-32768"], [1 << k for k in range(1, 16)])],
)
def test_sizes(texts: list[str], sizes: list[int]) -> None:
    assert options.parse_sizes(texts) == sizes


def test_elements() -> None:
    assert options.parse_elements("8M, 64K,1.5M,65536,0.375M") == [1 << 16, 3 << 17, 3 << 19, 1 << 23]
    counts = [*ELEMENT_BUCKETS, *BUCKETS_BETWEEN, *BUCKETS_OF_LONG_ROWS]
    assert options.parse_elements(",".join(map(options.short_elements, counts))) == sorted(counts)
    assert [options.short_elements(count) for count in (3 << 17, 1 << 20, 5 << 18)] == ["384K", "1M", "1.25M"]


# ---- doctor ----------------------------------------------------------------------------------------------------------
def test_the_doctor_finds_a_machine_without_a_gpu_sound(sample: Path) -> None:
    report = json.loads(succeed("doctor", "--json"))
    states = {check["name"]: check["state"] for check in report["checks"]}
    assert states == {
        "python": "ok",
        "torch": "ok",
        "cuda-bindings": "ok",
        "gpu": "missing",
        "kernels": "missing",
        "tune extra": "ok",
        "nvcc": "ok",
        "emulator": "ok",
        "cache": "ok",
        "bundle": "ok",
    }
    assert report["can"] == {"run_kernels": "no", "tune": "estimated"}
    assert "winners are estimated" in succeed("doctor")


def test_the_doctor_blames_the_cache_where_it_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HADAGEN_CACHE", str(tmp_path / "file" / "cache"))
    result = run("doctor", "--json")
    assert result.exit_code == 1
    checks = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    assert [name for name, check in checks.items() if check["state"] == "broken"] == ["cache"]
    assert "cannot be written (Not a directory)" in checks["cache"]["says"]
    for name in ("nvcc", "emulator"):
        assert (checks[name]["state"], checks[name]["says"]) == (
            "untried",
            "it cannot be tried without the cache, see above",
        )


def test_the_doctor_finds_a_damaged_bundle() -> None:
    path = options.default_bundle("sm90")
    path.parent.mkdir(parents=True)
    path.write_text("no bundle")
    result = run("doctor")
    assert result.exit_code == 1
    assert "bundle         broken" in result.stdout
    assert "is not a hadagen bundle" in result.stdout


# ---- a bare install --------------------------------------------------------------------------------------------------
WITHOUT_EXTRAS = f"""
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {TUNE_PACKAGES}:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Hidden())
from hadagen.cli.main import main
main(prog_name="hadagen")
"""


def test_a_bare_install_chooses_kernels_and_names_the_extra_for_the_rest(sample: Path) -> None:
    def bare(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", WITHOUT_EXTRAS, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert json.loads(bare(*BEST, "256", "--inplace", "--json").stdout)["match"] == "same-arch"
    assert bare("bundle", "verify").returncode == 0
    done = bare("doctor", "--json")
    assert done.returncode == 0
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert "is not installed; install it with: pip install 'hadagen[tune]'" in checks["tune extra"]["says"]
    assert checks["tune extra"]["state"] == "missing"
    assert all(checks[name]["says"].startswith("it cannot be tried without the tune") for name in ("nvcc", "emulator"))
    for arguments in (("tune",), ("emit", "--n", "2"), ("bundle", "make", "--db", str(sample))):
        done = bare(*arguments)
        assert done.returncode == 1
        assert done.stderr.startswith("hadagen: the Python package ")
        assert done.stderr.endswith("is not installed; install it with: pip install 'hadagen[tune]'\n")
