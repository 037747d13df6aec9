"""Bundles: what was selected comes out, equal winners give equal files, and no damage goes unnoticed."""

import errno
import json
import math
import os
import random
import shutil
import sqlite3
import stat
import tracemalloc
import zlib
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_bundle import change, remake, write_trials
from sample_trials import (
    H100,
    H200,
    LAUNCH,
    MATRIX_PROBLEM,
    PROBLEM,
    competitors,
    in_clusters,
    launch_for,
    make_kernel,
    make_timing,
    make_trial,
    times,
)

from hadagen.errors import StorageError, UsageError
from hadagen.files.atomic_file import atomic_file, unwritable
from hadagen.files.opening import MOST_BYTES, deflated, inflated
from hadagen.plan.arch import load_arch
from hadagen.plan.knobs import Knobs, are_known
from hadagen.plan.space import build_plan
from hadagen.problem.operands import params_for
from hadagen.problem.problem import DType, Problem, Rows, Transform
from hadagen.problem.regimes import Cache, Destination, element_buckets
from hadagen.problem.scale import ScaleForm
from hadagen.problem.trial import Environment, Kernel, Provenance, Trial
from hadagen.tuning_db.bundle import (
    APPLICATION_ID,
    FORMAT,
    MOST_OF_TEXT,
    OLDEST_FORMAT,
    TABLES,
    Bundle,
    NoKernelError,
    columns_of,
    sha256,
    shipped,
)
from hadagen.tuning_db.bundle_writer import check_bundle_place, write_bundle
from hadagen.tuning_db.make import make_bundle
from hadagen.tuning_db.merge import arithmetic_of, merge_bundles, selection_of, write_selection
from hadagen.tuning_db.store import Store
from hadagen.tuning_db.winners import WinnerCell, cell_value, portfolio

OTHER = replace(PROBLEM, transform=Transform(512))
SIGNED = replace(MATRIX_PROBLEM.transform, signed=True)
PITCHED = Problem.of(512, DType.FLOAT32, rows="pitched")
PERSISTENT = make_kernel(b"cubin 9" * 50, launch=replace(LAUNCH, shared_bytes=1024, persistent=True))
OF_PITCHED = make_kernel(b"cubin 5", launch=replace(launch_for(PITCHED), scale_form=ScaleForm.BFLOAT16_CORRECTED))
TRIALS = [
    make_trial(1, timings=(make_timing(1.5), make_timing(2.5, cache=Cache.COLD))),
    make_trial(2, timings=times({1 << 13: 3.0, 1 << 28: 170.25}, Destination.OUT_OF_PLACE)),
    make_trial(4, environment=H200, date="2025-02-03T00:00:00+00:00", timings=(make_timing(1.25),)),
    make_trial(9, problem=OTHER, kernel=PERSISTENT),
    make_trial(5, problem=PITCHED, errors={"normal": 1e-7}, kernel=OF_PITCHED, timings=times({1 << 16: 2.0})),
    make_trial(
        8, problem=OTHER, environment=Environment(), provenance=Provenance.ESTIMATED, timings=times({1 << 20: 4})
    ),
]


def kernels_of(trials: list[Trial]) -> Callable[[str], Kernel]:
    return {trial.kernel.digest: trial.kernel for trial in trials if trial.kernel}.__getitem__


def write(path: Path, trials: list[Trial] = TRIALS) -> Path:
    return write_trials(path, trials)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "sm90.db")


def refusal(path: Path) -> str:
    with pytest.raises(StorageError) as refused:
        Bundle.open(path).verify()
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def content(path: Path) -> list[object]:
    bundle = Bundle.open(path)
    bundle.verify_digests()
    bundle.verify()
    entries = [entry for problem in bundle.problems() for entry in bundle.entries(problem)]
    return [bundle.digest, bundle.arch, bundle.date, entries, [bundle.kernel(entry.kernel) for entry in entries]]


# ---- what is in it ---------------------------------------------------------------------------------------------------
def test_a_bundle_holds_the_winners(path: Path) -> None:
    bundle = Bundle.open(path)
    assert (bundle.arch, bundle.date) == ("sm90", "2025-02-03T00:00:00+00:00")
    assert (bundle.problems(), bundle.gpus()) == ([PROBLEM, OTHER, PITCHED], ["", H100.gpu, H200.gpu])
    assert bundle.entries(replace(PROBLEM, transform=Transform(2))) == []
    found = {}
    for problem in bundle.problems():
        for entry in bundle.entries(problem):
            found[WinnerCell(problem, entry.arch, entry.gpu, entry.destination, entry.elements)] = entry
    selection = portfolio(TRIALS)
    assert list(found) == sorted(selection)
    for cell, trial in selection.items():
        entry, kernel = found[cell], trial.kernel
        assert (entry.kernel, entry.launch, entry.nvcc) == (kernel.digest, kernel.launch, kernel.nvcc)
        assert (entry.knobs, entry.errors) == (trial.knobs, trial.errors)
        assert entry.relative_error == max(trial.errors.values())
        assert (entry.provenance, entry.date, entry.environment) == (trial.provenance, trial.date, trial.environment)
        timing = cell_value(trial, cell.destination, cell.elements, trial.environment.l2_bytes)
        assert (entry.cache, entry.us, entry.copy_us) == (timing.cache, timing.us, timing.copy_us)
        assert bundle.kernel(entry.kernel) == replace(kernel, source="")


def test_only_what_is_asked_for_is_read_and_checked(path: Path) -> None:
    """Damage to one problem leaves the others as they were, and no kernel of the damaged one is loaded."""
    change(path, "UPDATE trials SET errors = '{}' WHERE knobs LIKE '%:9,%'")
    bundle = Bundle.open(path)
    assert bundle.entries(PROBLEM)
    assert bundle.kernel(OF_PITCHED.digest).launch == OF_PITCHED.launch
    for read in (lambda: bundle.entries(OTHER), lambda: bundle.kernel(PERSISTENT.digest), bundle.verify):
        with pytest.raises(StorageError, match=r"is damaged \(the winners of n512-float16-accurate do not match"):
            read()


def test_a_kernel_may_be_loaded_first(path: Path) -> None:
    for kernel in (PERSISTENT, OF_PITCHED):
        assert Bundle.open(path).kernel(kernel.digest).cubin == kernel.cubin
    with pytest.raises(StorageError, match="holds no kernel abc; ask for one that its entries name"):
        Bundle.open(path).kernel("abc")


@pytest.mark.parametrize("row", ["blobs VALUES (99, x'', x'')", "trials (id, problem) VALUES (99, 99)"])
def test_rows_that_belong_to_nothing_are_noticed(path: Path, row: str) -> None:
    change(path, f"INSERT INTO {row}")
    assert f"{row.split()[0]} has rows that belong to no problem" in refusal(path)
    with pytest.raises(StorageError, match=f"{row.split()[0]} has rows that belong to no problem"):
        Bundle.open(path).verify_digests()


def test_the_second_winner_of_a_cell_is_the_portable_one(tmp_path: Path) -> None:
    """Not the first of another GPU."""
    trials = [in_clusters(16, 1), in_clusters(8, 2, timings=(make_timing(3.0),)), make_trial(3, environment=H200)]
    entries = Bundle.open(write(tmp_path / "sm90.db", trials)).entries(PROBLEM)
    assert [(entry.gpu, entry.portable) for entry in entries] == [
        (H100.gpu, False),
        (H100.gpu, True),
        (H200.gpu, False),
    ]


def test_what_a_caller_does_to_a_list_of_entries_changes_no_bundle(path: Path) -> None:
    bundle = Bundle.open(path)
    bundle.entries(PROBLEM).clear()
    assert bundle.entries(PROBLEM) == Bundle.open(path).entries(PROBLEM) != []


def test_both_regimes_are_kept_where_measured(path: Path) -> None:
    both, hot = (
        next(e for e in Bundle.open(path).entries(PROBLEM) if (e.gpu, e.elements) == (gpu, 1 << 13))
        for gpu in (H100.gpu, H200.gpu)
    )
    assert (both.hot_us, both.cold_us, both.hot_copy_us, both.cold_copy_us) == (1.5, 2.5, 1.9, 1.9)
    assert (hot.hot_us, hot.cold_us) == (1.25, None)
    assert both.fraction_of_copy == 1.9 / 1.5


def test_an_entry_has_the_times_of_its_own_destination(tmp_path: Path) -> None:
    """Where one kernel wins in place and out of place."""
    trial = make_trial(timings=(make_timing(2.0), make_timing(5.0, destination=Destination.OUT_OF_PLACE)))
    entries = Bundle.open(write(tmp_path / "sm90.db", [trial])).entries(PROBLEM)
    assert {entry.destination: entry.us for entry in entries} == {
        Destination.IN_PLACE: 2.0,
        Destination.OUT_OF_PLACE: 5.0,
    }


def test_a_store_fills_a_bundle_without_reading_all_blobs(tmp_path: Path, path: Path) -> None:
    with Store.open(tmp_path / "trials.db") as store:
        store.record(*TRIALS)
        other = tmp_path / "other.db"
        write_bundle(other, "sm90", portfolio(store.trials(blobs=False)), store.kernel, {})
    assert other.read_bytes() == path.read_bytes()


@settings(max_examples=30)
@given(st.data())
def test_equal_winners_give_equal_files(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    trials = data.draw(competitors().filter(portfolio))
    shuffled = data.draw(st.permutations(trials))
    directory = tmp_path_factory.getbasetemp()
    first, second = write(directory / "first.db", trials), directory / "second.db"
    write_bundle(second, "sm90", dict(reversed(portfolio(shuffled).items())), kernels_of(trials), {})
    assert first.read_bytes() == second.read_bytes()
    assert content(first) == content(second)
    selection = portfolio(trials)
    cell = data.draw(st.sampled_from(list(selection)))
    for other in (selection | {cell: replace(selection[cell], date="2026")}, dict(list(selection.items())[1:])):
        if other:
            assert write_bundle(second, "sm90", other, kernels_of(trials), {}) != Bundle.open(first).digest


def test_a_bundle_is_only_read(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        assert content(path)
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("arch", sorted(shipped(), key=lambda name: name != "sm90"))
def test_the_shipped_bundles_are_sound(arch: str) -> None:
    path = shipped()[arch]
    bundle = Bundle.open(path)
    bundle.verify()
    assert bundle.arch == arch
    assert path.stat().st_size <= len(bundle.gpus()) * (16 << 20)


@pytest.mark.parametrize("name", sorted(shipped(), key=lambda name: name != "sm90"))
def test_the_shipped_winners_keep_their_bounds_and_are_legal(name: str) -> None:
    """By today's rules, which may be stricter than those that they were tuned under. Some have values that are gone."""
    bundle, arch = Bundle.open(shipped()[name]), load_arch(name)
    entries = list(bundle.all_entries())
    assert len(bundle.problems()) > 100
    for entry in entries:
        if entry.provenance is Provenance.MEASURED:
            assert entry.relative_error is not None
            assert entry.relative_error <= entry.problem.error_bound, entry.problem.key
    legal = {choice for choice in {(e.problem, Knobs.like(e.knobs)) for e in entries} if are_known(choice[1].to_dict())}
    assert len(legal) > 100
    for problem, knobs in legal:
        build_plan(problem, knobs, arch)  # raises where they are not legal


# ---- writing ---------------------------------------------------------------------------------------------------------
def test_a_bundle_is_replaced_only_by_a_complete_one(path: Path) -> None:
    before = path.read_bytes()

    def fails(digest: str) -> Kernel:
        raise StorageError(f"no kernel {digest}")

    with pytest.raises(StorageError):
        write_bundle(path, "sm90", portfolio(TRIALS), fails, {})
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_a_bundle_that_cannot_be_written_is_reported(tmp_path: Path, path: Path) -> None:
    for place in (path / "sm90.db", tmp_path):
        with pytest.raises(StorageError, match="cannot be written"):
            write(place)
    assert os.listdir(tmp_path) == [path.name]


def test_what_is_no_bundle_is_not_replaced_by_one(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("what took a day to measure")
    with pytest.raises(StorageError, match="is there already and is not a hadagen bundle"):
        write(tmp_path / "notes")
    assert (tmp_path / "notes").read_text() == "what took a day to measure"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "(No space left on device); make room, or name another place",
        ),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "(Disk quota exceeded); make room, or name another place"),
        (OSError(errno.EACCES, "Permission denied"), "(Permission denied); make it writable, or name another place"),
        (OSError(None, "Not a regular file"), "(Not a regular file); name another place"),
        (sqlite3.OperationalError("database or disk is full"), "is full); make room, or name another place"),
    ],
    ids=str,
)
def test_room_is_only_asked_for_where_it_lacks(error: Exception, said: str) -> None:
    assert str(unwritable("winners.db", error)).endswith(said)


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    def fails() -> None:
        with atomic_file(tmp_path / "sm90.db") as new:
            new.with_name(f"{new.name}-journal").write_bytes(b"of SQLite, which could not remove it")
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(StorageError, match="No space left"):
        fails()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_and_what_it_points_to_is_written(tmp_path: Path, there: bool) -> None:
    shared, link = tmp_path / "shared" / "sm90.db", tmp_path / "mine" / "sm90.db"
    link.parent.mkdir()
    link.symlink_to(Path("..", "shared", "sm90.db"))
    if there:
        write(shared, TRIALS[:1])
    write(link, TRIALS)
    assert link.is_symlink()
    assert Bundle.open(shared).digest == Bundle.open(link).digest
    assert [os.listdir(path.parent) for path in (link, shared)] == [["sm90.db"]] * 2


def test_the_permissions_of_a_file_that_is_replaced_stay(tmp_path: Path) -> None:
    new = write(tmp_path / "new.db")
    usual = stat.S_IMODE(new.stat().st_mode)
    for mode in (0o664, 0o600, 0o444):
        new.chmod(mode)
        write(new)
        assert stat.S_IMODE(new.stat().st_mode) == mode
    with atomic_file(tmp_path / "other"):
        pass
    assert stat.S_IMODE((tmp_path / "other").stat().st_mode) == usual


def test_a_bundle_needs_winners_of_its_arch_with_cubins(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"no winner for sm90 .* give hadagen tune --arch sm90 more time"):
        write(tmp_path / "x.db", [])
    with pytest.raises(UsageError, match="the winners are for sm80 and the bundle for sm90"):
        write(tmp_path / "x.db", [make_trial(arch="sm80")])
    without = make_trial(2, kernel=make_kernel(b""), timings=times({1 << 20: 2.0}))
    for trials in ([without], [make_trial(), without]):
        with pytest.raises(UsageError, match="has no cubin"):
            write(tmp_path / "x.db", trials)


@pytest.mark.parametrize(
    "problem", [MATRIX_PROBLEM, Problem.of(24, DType.BFLOAT16, order=24), replace(MATRIX_PROBLEM, transform=SIGNED)]
)
def test_winners_with_a_matrix_and_signs_are_kept_from_trial_to_merged_bundle(problem: Problem, tmp_path: Path) -> None:
    counts = element_buckets(problem)
    taken = {count: 2.0 + place for place, count in enumerate(counts)}
    found = [
        make_trial(1, problem=problem, timings=(*times(taken), *times(taken, Destination.OUT_OF_PLACE))),
        make_trial(2, problem=problem, timings=times({counts[3]: 1.0})),
    ]
    with Store.open(tmp_path / "trials.db") as store:
        store.record(*found)
        assert store.trials(problem) == found
        make_bundle(store, "sm90", tmp_path / "made.db")
    merge_bundles([tmp_path / "made.db"], tmp_path / "merged.db")
    for name in ("made.db", "merged.db"):
        bundle = Bundle.open(tmp_path / name)
        bundle.verify()
        assert bundle.problems() == [problem]
        entries = bundle.entries(problem)
        assert {entry.elements for entry in entries} == set(counts)
        assert {entry.launch.params for entry in entries} == {params_for(problem)}
        in_place = {each.elements: each for each in entries if each.destination is Destination.IN_PLACE}
        assert [count for count, each in in_place.items() if each.knobs["chunks"] == 2] == [counts[3]]


# ---- damage ----------------------------------------------------------------------------------------------------------
COLUMNS = [(table, column) for table in TABLES for column in columns_of(table)]


@pytest.mark.parametrize(("table", "column"), [*COLUMNS, ("blobs", "cubin"), ("blobs", "ptx")])
def test_a_change_of_any_value_is_noticed(path: Path, table: str, column: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute(f"SELECT rowid, {column} FROM {table}").fetchall()
    assert rows
    for row, value in rows:
        for new in (9, 1.5, "9", b"9", f"{value} ", None):
            damaged = Path(shutil.copy(path, path.with_name("damaged.db")))
            with closing(sqlite3.connect(damaged)) as connection:
                with suppress(sqlite3.IntegrityError), connection:  # where SQLite itself does not allow it
                    connection.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (new, row))
                after = connection.execute(f"SELECT rowid, {column} FROM {table}").fetchall()
            if after != rows:
                assert "is damaged" in refusal(damaged)
                with pytest.raises(StorageError, match="is damaged"):
                    Bundle.open(damaged).verify_digests()


@pytest.mark.parametrize("table", [*TABLES, "blobs"])
def test_a_row_or_table_that_is_gone_is_noticed(path: Path, table: str) -> None:
    change(path, f"DELETE FROM {table} WHERE rowid = (SELECT max(rowid) FROM {table})")
    assert "is damaged" in refusal(path)
    change(path, f"DROP TABLE {table}")
    assert "is damaged" in refusal(path)


def test_a_truncated_file_is_noticed(path: Path) -> None:
    whole = path.read_bytes()
    for size in (0, 10, 71, 100, 4095, 4096, 4097, len(whole) // 2, len(whole) - 4096, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert "is not a hadagen bundle" in refusal(path) or "is damaged" in refusal(path)


def test_damage_is_noticed_when_a_kernel_is_loaded(path: Path) -> None:
    """Though all was sound, and read, before."""
    bundle = Bundle.open(path)
    bundle.verify()
    assert bundle.kernel(PERSISTENT.digest).cubin == PERSISTENT.cubin
    change(path, "UPDATE blobs SET cubin = (SELECT ptx FROM blobs)")
    for read in (lambda: bundle.kernel(PERSISTENT.digest), bundle.verify):
        with pytest.raises(StorageError, match=r"is damaged .* make it again with `hadagen bundle make`, .* or reinst"):
            read()


# ---- files that somebody made ----------------------------------------------------------------------------------------
# Column -> what no search writes there.
FORGED: dict[str, list[object]] = {
    "meta.value": [None, "a\x1b[31m", "x" * (MOST_OF_TEXT + 1)],
    "environments.gpu": [None, "\n", "\x1b]0;"],
    "environments.sms": [-1, 1.5, "many", None],
    "problems.key": ["x", "n256-float16-accurate-pitched", "n3-float16-fast", "n0256-float16-fast", None],
    "kernels.digest": ["x"],
    "kernels.entry": ["", "a b", "a;", None],
    "kernels.registers": [-1, "x"],
    "kernels.launch": [
        *(
            json.dumps(LAUNCH.to_dict() | {name: value})
            for name, values in {
                "threads": [33, 0, 2048, "64", 64.0, True],
                "cluster": [3, 0, 32],
                "shared_bytes": [-1, 1 << 20],
                "tile_elements": [0, 1, 1 << 40],
                "persistent": [1, "no"],
                "scale_form": ["fp64"],
                "params": [
                    launch_for(PITCHED).signature,
                    f"{LAUNCH.signature}, const void* bias",
                    "i64 x",
                    "",
                    "void* y, const void* x",
                    1,
                ],
                "starts_early": [1],
                "more": [1],
            }.items()
            for value in values
        ),
        "{}",
        "[" * MOST_OF_TEXT,
    ],
    "trials.kernel": [99, None],
    "trials.environment": [99],
    "trials.knobs": [
        '{"a": [1]}',
        '{"a": 1.5}',
        '{"a": true}',
        '{"a": null}',
        '{"a": "\\u001b[31m"}',
        "[1]",
        "[" * 9000,
        "x",
    ],
    "trials.errors": ["{}", "[]", *(f'{{"normal": {e}}}' for e in ("NaN", "Infinity", "-1", "true", '"x"', "9" * 400))],
    "trials.provenance": ["guessed"],
    "trials.date": [None, "\t"],
    "entries.trial": [99],
    "entries.destination": ["elsewhere"],
    "entries.elements": [0, -8192, 1.5, 8193, None],
    "entries.cache": ["warm", "cold"],
    "entries.hot_us": [None, 0, -1.0, "x", math.inf, 1e-300],
    "entries.hot_copy_us": [None, math.inf],
}


@pytest.mark.parametrize("column", FORGED)
def test_no_digest_makes_sound_what_no_search_finds(tmp_path: Path, column: str) -> None:
    sound = write(tmp_path / "sound.db", [make_trial(timings=(make_timing(),))])
    table, name = column.split(".")
    for value in FORGED[column]:
        path = Path(shutil.copy(sound, tmp_path / "forged.db"))
        where = "key = 'arch'" if table == "meta" else "true"
        change(path, f"UPDATE {table} SET {name} = ? WHERE {where}", given=(value,))
        with suppress(TypeError, ValueError, RecursionError):  # a name that suits the launch, if it is one
            launch = json.dumps(json.loads(value), sort_keys=True) if name == "launch" else ""
            digest = sha256(b"cubin 1" + launch.encode())
            change(path, "UPDATE kernels SET digest = ? WHERE ? <> ''", given=(digest, launch))
        remake(path)
        assert "is damaged (" in refusal(path), value


MANY = "WITH RECURSIVE r(i) AS (SELECT 9 UNION ALL SELECT i + 1 FROM r WHERE i < 30000)"


@pytest.mark.parametrize(
    ("statement", "why"),
    [
        (
            f"INSERT INTO entries SELECT 9, {', '.join(columns_of('entries')[1:])} FROM entries",
            "two winners in one place",
        ),
        ("INSERT INTO problems SELECT 9, key, arithmetic, winners FROM problems", "is there twice"),
        ("INSERT INTO meta VALUES ('more', '')", "its head has other rows"),
        (f"{MANY} INSERT INTO entries (id, trial) SELECT i, 1 FROM r", "more than any search finds"),
        (f"{MANY} INSERT INTO environments (id) SELECT i FROM r", "more than any search finds"),
        # A kernel with a matrix serves its own rows and operands.
        ("UPDATE entries SET elements = 16384", "16384 is no number of elements"),
        ("UPDATE kernels SET launch = replace(launch, '14336', '16384')", "a kernel for other rows or params"),
        ("UPDATE kernels SET launch = replace(launch, ', const void* matrix', '')", "for other rows or params"),
        ("UPDATE problems SET key = 'n14336-k28-signed-float16-accurate'", "a kernel for other rows or params"),
        ("UPDATE problems SET key = 'n14336-float16-accurate'", "n = 14336 is not supported"),
    ],
)
def test_no_digest_makes_sound_what_is_there_too_often_or_does_not_fit(
    tmp_path: Path, statement: str, why: str
) -> None:
    path = write(tmp_path / "forged.db", [make_trial(problem=MATRIX_PROBLEM, timings=(make_timing(2.0, 5 * 14336),))])
    change(path, statement)
    with suppress(ValueError):  # where there are more rows than are read
        remake(path)
    assert why in refusal(path)


ENDLESS = "WITH RECURSIVE r(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM r) SELECT"


@pytest.mark.parametrize(
    "statements",
    [
        "DROP TABLE meta; CREATE VIEW meta AS " + ENDLESS + " i AS key, i AS value FROM r",
        "DROP TABLE blobs; CREATE VIEW blobs AS " + ENDLESS + " i AS kernel, x'' AS cubin, x'' AS ptx FROM r",
        "DROP TABLE meta; CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT AS (hex(zeroblob(400000000))))",
        "CREATE TRIGGER x AFTER INSERT ON meta BEGIN DELETE FROM entries; END",
        "CREATE INDEX x ON meta (length(key))",
        "CREATE TABLE x (y)",
    ],
)
def test_a_bundle_has_its_tables_and_nothing_that_computes(path: Path, statements: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(statements)
    assert "is damaged (it has other tables)" in refusal(path)


@pytest.mark.parametrize("column", ["cubin", "ptx"])
def test_no_more_is_inflated_than_a_kernel_has(path: Path, column: str) -> None:
    change(path, f"UPDATE blobs SET {column} = ?", given=(zlib.compress(bytes(4 * MOST_BYTES)),))
    tracemalloc.start()
    try:
        assert f"a compressed value has more than {MOST_BYTES} bytes" in refusal(path)
        assert tracemalloc.get_traced_memory()[1] < 3 * MOST_BYTES
    finally:
        tracemalloc.stop()


def test_many_kernels_share_dictionaries(tmp_path: Path) -> None:
    """Then each takes less, and damage to what they share is found, too."""
    common = random.Random(1).randbytes(2000)
    kernels = [make_kernel(common + b"%d" % k, ptx=common[::-1] + b"%d" % k) for k in range(100)]
    trials = [make_trial(k, kernel=each, environment=replace(H100, gpu=f"GPU {k}")) for k, each in enumerate(kernels)]
    few, path = write(tmp_path / "few.db", trials[:10]), write(tmp_path / "sm90.db", trials)
    assert path.stat().st_size < 3 * few.stat().st_size
    Bundle.open(path).verify()
    for kernel in kernels[::9]:
        assert Bundle.open(path).kernel(kernel.digest) == replace(kernel, source="")
    other = f"x'{deflated(common).hex()}'"
    for damage in (f"UPDATE blobs SET cubin = {other}", f"UPDATE blobs SET ptx = {other}", "DELETE FROM blobs"):
        changed = Path(shutil.copy(path, tmp_path / "changed.db"))
        change(changed, f"{damage} WHERE kernel = 0")
        assert "is damaged" in refusal(changed)
    change(few, f"INSERT INTO blobs VALUES (0, x'{deflated(b'').hex()}', x'{deflated(b'').hex()}')")
    assert "blobs has rows that belong to no problem" in refusal(few)


def test_a_compressed_value_ends_where_its_bytes_do() -> None:
    data = zlib.compress(b"x" * 100)
    assert inflated(data) == b"x" * 100
    for damaged in (data[:-1], data + b"x", b"", b"x"):
        with pytest.raises(ValueError, match=r"was cut|incorrect"):
            inflated(damaged)


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.db"
    os.mkfifo(pipe)
    held = os.open(pipe, os.O_RDWR)  # without which whoever waits at it would wait for good
    os.write(held, bytes(100))
    (tmp_path / "link.db").symlink_to(pipe)
    (tmp_path / "loop.db").symlink_to(tmp_path / "loop.db")
    for place, why in (
        (pipe, "Not a regular file"),
        (tmp_path / "link.db", "Not a regular file"),
        (Path("/dev/zero"), "Not"),
    ):
        assert f"cannot be read ({why}" in refusal(place)
        with pytest.raises(StorageError, match=r"cannot be written \(Not a regular file\)"):
            check_bundle_place(place)
    assert "cannot be read (" in refusal(tmp_path / "loop.db")
    os.close(held)


@pytest.mark.parametrize("name", ["50%20? #1/sm90.db", os.fsdecode(b"caf\xe9.db"), f"{'x' * 252}.db"])
def test_a_path_may_have_any_characters(tmp_path: Path, name: str) -> None:
    """Be no UTF-8, or as long as any, and begin with two slashes."""
    for trials in (TRIALS, TRIALS[:1]):
        path = write(tmp_path / name, trials)
        Bundle.open(path).verify()
        Bundle.open(f"/{path}").verify()


def test_nothing_is_written_that_calls_would_refuse(path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(
        StorageError, match=r"sm90\.db was not written, because calls would refuse it \(.*is no line of text\)"
    ):
        write(path, [make_trial(environment=replace(H100, gpu="H100\x1b[31m"))])
    assert path.read_bytes() == before


# ---- files that are replaced -----------------------------------------------------------------------------------------
def test_a_bundle_that_is_replaced_is_read_as_it_is_now(path: Path) -> None:
    bundle, old = Bundle.open(path), Bundle.open(path).entries(PROBLEM)
    write(path, TRIALS[1:])
    assert bundle.entries(PROBLEM) == Bundle.open(path).entries(PROBLEM) != old
    assert bundle.digest == Bundle.open(path).digest
    gone = old[0].kernel
    with pytest.raises(NoKernelError, match="holds no kernel"):
        bundle.kernel(gone)


def test_two_writers_of_one_process_do_not_meet(tmp_path: Path) -> None:
    """Nor do those of two containers, which have one number as well."""
    path = tmp_path / "sm90.db"
    with atomic_file(path) as one, atomic_file(path) as other:
        one.write_bytes(b"one")
        other.write_bytes(b"other")
        assert one.read_bytes() == b"one"
    assert path.read_bytes() == b"one"
    assert os.listdir(tmp_path) == ["sm90.db"]


def test_a_link_that_was_planted_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"what is kept")
    (tmp_path / f".sm90.db.{os.getpid()}").symlink_to(precious)
    path = write(tmp_path / "sm90.db")
    assert precious.read_bytes() == b"what is kept"
    Bundle.open(path).verify()
    with atomic_file(path) as new:
        assert stat.S_IMODE(new.parent.stat().st_mode) == 0o700


# ---- files that are not ours -----------------------------------------------------------------------------------------
def test_foreign_files_are_refused(tmp_path: Path) -> None:
    Store.open(tmp_path / "trials.db").close()
    (tmp_path / "text").write_text("a text\n" * 100)
    (tmp_path / "empty").touch()
    for name in ("trials.db", "text", "empty"):
        assert "is not a hadagen bundle; name one, or make one with `hadagen bundle make`" in refusal(tmp_path / name)
    missing = refusal(tmp_path / "missing.db")
    assert "(No such file or directory); name another bundle, or make one with `hadagen bundle make`" in missing
    assert "reinstall" not in missing
    assert "Is a directory" in refusal(tmp_path)


@pytest.mark.parametrize("version", range(OLDEST_FORMAT, FORMAT))
def test_a_bundle_of_a_former_format_is_read(version: int) -> None:
    """One of a problem of contiguous and one of pitched rows, as it was written then."""
    bundle = Bundle.open(Path(__file__).parent / "formats" / f"bundle_{version}.db")
    bundle.verify()
    plain = [problem for problem in bundle.problems() if not problem.io.form]
    assert [problem.key for problem in plain] == ["n256-float16-accurate", "n256-float16-accurate-pitched"]
    for problem in plain:
        (entry, *_) = bundle.entries(problem)
        assert entry.launch.reads_rows == (problem.io.rows is Rows.PITCHED)
        assert bundle.arithmetic(problem) == entry.launch.arithmetic == ""
        assert bundle.kernel(entry.kernel).launch == entry.launch == launch_for(problem)


@pytest.mark.parametrize("arch", ["", "sm80"])
def test_codes_of_a_former_format_are_fast_if_they_may_be_rounded(arch: str, tmp_path: Path) -> None:
    """Of measured kernels, and of estimates, which are named by their problem. Written anew, they are the same."""
    formats = Path(__file__).parent / "formats"
    old = Bundle.open(formats / (f"bundle_7_{arch}.db" if arch else "bundle_7.db"))
    old.verify()
    codes = [problem.key for problem in old.problems() if problem.io.form]
    assert codes == [
        "n128-bfloat16-to-fp8_group_128-accurate",
        "n256-bfloat16-to-int8_row_4096-fast",
        "n256-float16-to-int8_row_4096-accurate",
        "n14336-k28-bfloat16-to-int4_row_14336-accurate",
    ]
    write_selection(tmp_path / "new.db", old.arch, selection_of(old), arithmetic_of(old))
    new = Bundle.open(tmp_path / "new.db")
    assert list(new.all_entries()) == list(old.all_entries())
    for entry in new.all_entries():
        assert new.kernel(entry.kernel) == old.kernel(entry.kernel)


def test_trials_of_a_former_format_may_share_an_estimated_kernel(tmp_path: Path) -> None:
    path = Path(shutil.copy(Path(__file__).parent / "formats" / "bundle_7_sm80.db", tmp_path))
    change(
        path,
        "INSERT INTO trials SELECT id + 100, problem, environment, kernel, knobs, errors, provenance, date FROM trials",
        "INSERT INTO entries SELECT id + 100, trial + 100, destination, 2 * elements, cache, hot_us, hot_copy_us, "
        "cold_us, cold_copy_us FROM entries",
    )
    remake(path)
    bundle = Bundle.open(path)
    bundle.verify()
    problem = Problem.parse("n256-bfloat16-to-int8_row_4096-fast")
    assert len({entry.kernel for entry in bundle.entries(problem)}) == 1 < len(bundle.entries(problem))


def test_other_formats_are_refused(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
    change(path, f"PRAGMA user_version = {FORMAT + 1}")
    assert f"of format {FORMAT + 1}, later than {FORMAT}; upgrade hadagen" in refusal(path)
    change(path, "PRAGMA user_version = 0")
    assert f"of format 0, earlier than {FORMAT}; make it again" in refusal(path)
