"""Choosing: each class of match, the order among entries, and where bundles come from."""

import json
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sample_bundle import hide_bundles, write_sample, write_trials, write_winners
from sample_trials import H100, LAUNCH, PROBLEM, make_trial

import hadagen
from hadagen import Rotation
from hadagen.errors import StorageError, UsageError
from hadagen.problem.problem import DType, Numerics, Problem, Rows, Transform
from hadagen.problem.regimes import Cache, Destination, nearest
from hadagen.problem.trial import Environment, Provenance
from hadagen.runtime.choose import bundles
from hadagen.runtime.choose.device import Device, cuda_index
from hadagen.runtime.choose.entries import Match, choose_from_bundles, entries_by_size, timed_in_bundles
from hadagen.tuning_db.bundle import Bundle, BundleEntry

HERE = Device("sm90", "NVIDIA H100 80GB HBM3")

# What was timed where: a name for the entry, its arch, its GPU ("" for an estimate), log2 of its elements.
FIXTURE = """
    older-20   sm80   NVIDIA A100-SXM4-80GB   20
    guess-20   sm90                           20
    other-14   sm90   NVIDIA H200             14
    other-20   sm90   NVIDIA H200             20
    same-13    sm90   NVIDIA H100 80GB HBM3   13
    same-16    sm90   NVIDIA H100 80GB HBM3   16
    newer-20   sm120  NVIDIA RTX 5090         20
"""


def make_entry(kernel: str, arch: str, gpu: str, elements: int) -> BundleEntry:
    return BundleEntry(
        problem=PROBLEM,
        arch=arch,
        environment=replace(H100, gpu=gpu) if gpu else Environment(),
        destination=Destination.IN_PLACE,
        elements=elements,
        kernel=kernel,
        launch=LAUNCH,
        knobs={},
        errors={"normal": 2e-4},
        provenance=Provenance.MEASURED if gpu else Provenance.ESTIMATED,
        date="2025-01-02T03:04:05+00:00",
        nvcc="13.0.48",
        cache=Cache.HOT,
        hot_us=2.0,
        hot_copy_us=1.9,
        cold_us=None,
        cold_copy_us=None,
    )


def read_fixture() -> list[BundleEntry]:
    lines = (line.split() for line in FIXTURE.strip().splitlines())
    return [make_entry(name, arch, " ".join(gpu), 1 << int(log2)) for name, arch, *gpu, log2 in lines]


ENTRIES = read_fixture()


def chosen(
    device: Device, elements: int, entries: list[BundleEntry] = ENTRIES, problem: Problem = PROBLEM
) -> tuple[Match, str]:
    match, found = entries_by_size(entries, problem, Destination.IN_PLACE, device)
    return match, found[nearest(list(found), elements)].kernel if found else ""


@pytest.mark.parametrize(
    ("device", "log2_elements", "match", "kernel"),
    [
        (HERE, 13, Match.SAME_GPU, "same-13"),
        (HERE, 20, Match.SAME_GPU, "same-16"),  # a nearer element count does not outweigh the GPU
        (Device("sm90", "h100 80gb HBM3"), 13, Match.SAME_GPU, "same-13"),  # a name may be spelled without its maker
        (Device("sm90", "NVIDIA H100 PCIe"), 20, Match.SAME_ARCH, "other-20"),
        (
            Device("sm90"),
            15,
            Match.SAME_ARCH,
            "other-14",
        ),  # same-16 is as near and larger, but of a GPU that comes later
        (Device("sm86", "NVIDIA A10"), 20, Match.ESTIMATED, "older-20"),
        (Device("sm100", "NVIDIA B200"), 20, Match.ESTIMATED, "other-20"),  # of the older arches the newest
        (Device("sm75", "Tesla T4"), 20, Match.GENERIC, ""),
    ],
)
def test_each_class_of_match(device: Device, log2_elements: int, match: Match, kernel: str) -> None:
    assert chosen(device, 1 << log2_elements) == (match, kernel)


def test_an_estimate_serves_only_where_nothing_of_the_arch_was_measured() -> None:
    unmeasured = [entry for entry in ENTRIES if entry.arch != "sm90" or entry.provenance is Provenance.ESTIMATED]
    assert chosen(HERE, 1 << 13, unmeasured) == (Match.ESTIMATED, "guess-20")
    far = make_entry("far", "sm90", "NVIDIA H20", 1 << 28)
    assert chosen(HERE, 1 << 13, [*unmeasured, far]) == (Match.SAME_ARCH, "far")


@pytest.mark.parametrize(
    "problem",
    [
        replace(PROBLEM, transform=Transform(512)),
        PROBLEM.with_io(input=DType.BFLOAT16, output=DType.BFLOAT16),
        PROBLEM.with_io(input=DType.FLOAT32, output=DType.FLOAT32),
        PROBLEM.with_io(numerics=Numerics.FAST),
        PROBLEM.with_io(rows=Rows.PITCHED),
    ],
)
def test_another_problem_is_no_match(problem: Problem) -> None:
    assert chosen(HERE, 1 << 13, problem=problem) == (Match.GENERIC, "")


def test_another_destination_is_no_match() -> None:
    assert entries_by_size(ENTRIES, PROBLEM, Destination.OUT_OF_PLACE, HERE) == (Match.GENERIC, {})


def test_the_first_of_equals_wins() -> None:
    mine, shipped = (make_entry(name, "sm90", HERE.gpu, 1 << 13) for name in ("mine", "shipped"))
    assert chosen(HERE, 1 << 13, [mine, shipped]) == (Match.SAME_GPU, "mine")


# Powers of two, three times such, and anything: so many are evenly spaced, unevenly, or next to each other.
counts = st.integers(0, 40).map(lambda k: 1 << k) | st.integers(0, 38).map(lambda k: 3 << k) | st.integers(1, 1 << 40)
timed_counts = st.lists(counts, min_size=1, max_size=25, unique=True)


def nearest_by_ratio(timed: list[int], elements: int) -> int:
    """That with the least |log(timed / elements)|: the least ratio of the larger to the smaller."""
    return min(timed, key=lambda count: (max(Fraction(count, elements), Fraction(elements, count)), -count))


@given(timed_counts, counts, st.randoms())
def test_the_nearest_element_count_wins_in_any_order(timed: list[int], elements: int, random: st.DataObject) -> None:
    entries = [make_entry(str(count), "sm90", HERE.gpu, count) for count in timed]
    random.shuffle(entries)
    assert chosen(HERE, elements, entries) == (Match.SAME_GPU, str(nearest_by_ratio(timed, elements)))


@given(timed_counts, st.data())
def test_at_the_very_middle_the_larger_wins(timed: list[int], data: st.DataObject) -> None:
    """There, and one element beside it, logarithms in floating point would decide by chance."""
    a, b = data.draw(st.integers(2, 1 << 20)), data.draw(st.integers(2, 1 << 20))
    middle = a * b
    for low, high in ((a * a, b * b), (a, a * b * b), (1, middle * middle)):
        if low < high:
            assert [nearest([low, high], middle + by) for by in (-1, 0, 1)] == [low, high, high]
            others = [count for count in timed if not low < count < high]
            assert nearest(sorted({*others, low, high}), middle) == high


# ---- bundles ---------------------------------------------------------------------------------------------------------
@pytest.fixture(autouse=True)
def no_bundles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hide_bundles(tmp_path, monkeypatch)


def test_best_config_tells_what_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(bundles.VARIABLE, str(write_sample(tmp_path / "a.db")))
    best = hadagen.best_config(PROBLEM, 300, HERE.gpu, arch="sm90", inplace=True)
    trial = make_trial(1)
    assert json.loads(json.dumps(best.to_dict())) == {
        "problem": "n256-float16-accurate",
        "rows": 300,
        "destination": "in-place",
        "arch": "sm90",
        "gpu": "NVIDIA H100 80GB HBM3",
        "match": "same-gpu",
        "kernel": trial.kernel.digest,
        "knobs": trial.knobs,
        "launch": LAUNCH.to_dict(),
        "us": 4.0,
        "copy_us": 1.9,
        "fraction_of_copy": 1.9 / 4.0,
        "relative_error": 2e-4,
        "provenance": {
            "kind": "measured",
            "arch": "sm90",
            "gpu": "NVIDIA H100 80GB HBM3",
            "driver": "580.65",
            "nvcc": "13.0.48",
            "date": "2025-01-02T03:04:05+00:00",
            "elements": 1 << 16,
            "us": 4.0,
            "copy_us": 1.9,
        },
        "reason": None,
    }


@pytest.mark.parametrize(
    ("arch", "gpu", "match"),
    [
        ("sm90", None, Match.SAME_ARCH),
        ("sm90", "NVIDIA H20", Match.SAME_ARCH),  # not in the bundle, but known to be of sm90
        ("sm90", "h100 80gb hbm3", Match.SAME_GPU),
        ("sm90", "RTX", Match.ESTIMATED),  # nobody knows of which arch
        ("sm100", "NVIDIA B200", Match.ESTIMATED),
        ("sm100", None, Match.ESTIMATED),
    ],
)
def test_a_time_is_told_only_of_the_gpu_it_was_measured_on(
    arch: str, gpu: str | None, match: Match, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(bundles.VARIABLE, str(write_sample(tmp_path / "a.db")))
    best = hadagen.best_config(PROBLEM, 32, gpu, arch=arch, inplace=True)
    assert best.match is match
    measured = (2.0, 1.9, 1.9 / 2.0)
    assert (best.us, best.copy_us, best.fraction_of_copy) == (measured if match is Match.SAME_GPU else (None,) * 3)
    assert (best.provenance["gpu"], best.provenance["us"], best.provenance["copy_us"]) == (H100.gpu, 2.0, 1.9)
    assert best.relative_error == 2e-4


@pytest.mark.parametrize(
    ("rows", "us"), [(15, None), (16, 2.0), (64, 2.0), (128, 4.0), (512, 4.0), (513, None), (1 << 40, None)]
)
def test_a_time_is_told_only_near_the_size_it_was_measured_at(
    rows: int, us: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """32 and 256 rows of 256 were timed: up to twice as many, and down to half."""
    monkeypatch.setenv(bundles.VARIABLE, str(write_sample(tmp_path / "a.db")))
    best = hadagen.best_config(PROBLEM, rows, H100.gpu, arch="sm90", inplace=True)
    assert (best.match, best.us) == (Match.SAME_GPU, us)
    assert best.provenance["us"] == (2.0 if rows < 91 else 4.0)


def test_what_the_cost_model_says_is_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guess = make_trial(environment=Environment(), provenance=Provenance.ESTIMATED)
    monkeypatch.setenv(bundles.VARIABLE, str(write_trials(tmp_path / "a.db", [guess])))
    best = hadagen.best_config(PROBLEM, 32, arch="sm90", inplace=True)
    assert (best.match, best.us, best.copy_us) == (Match.ESTIMATED, None, None)
    assert (best.provenance["kind"], best.provenance["us"], best.provenance["copy_us"]) == ("estimated", None, None)


def test_best_config_without_a_kernel(tmp_path: Path) -> None:
    best = hadagen.best_config({"n": 256, "dtype": "float16", "rows": "pitched"}, 1, arch="sm90")
    assert (best.match, best.problem.io.rows is Rows.PITCHED) == (Match.GENERIC, True)
    assert best.fraction_of_copy is None
    assert best.to_dict()["kernel"] is None
    assert best.reason == best.to_dict()["reason"]
    assert str(best.reason).startswith("no bundle has kernels for sm90; to make some: hadagen tune ")


def test_bundles_are_looked_for_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = [write_sample(tmp_path / name) for name in ("z.db", "b.db")]
    own = write_sample(bundles.user_directory() / "mine.db")
    shipped = write_sample(tmp_path / "sm90.db")
    monkeypatch.setenv(bundles.VARIABLE, os.pathsep.join(map(str, named)))
    monkeypatch.setattr(bundles, "shipped", lambda: {"sm90": shipped})
    assert [bundle.path for bundle in bundles.known()] == [*named, own, shipped]


def test_a_bundle_answers_alone_where_it_suits_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counts of one are no business of another's: its winners were compared at its own."""
    mine, other = write_winners(tmp_path / "mine.db", {1 << 14: 1, 1 << 18: 2}), tmp_path / "other.db"
    write_winners(other, {1 << 16: 4})
    for first, second, kernels, counts in ((mine, other, {1, 2}, [1 << 14, 1 << 18]), (other, mine, {4}, [1 << 16])):
        monkeypatch.setattr(bundles, "known", lambda both=(first, second): [Bundle.open(path) for path in both])
        found = [choose_from_bundles(PROBLEM, Destination.IN_PLACE, 1 << k, HERE)[1] for k in range(12, 20)]
        assert {(entry.knobs["chunks"], bundle.path) for entry, bundle in filter(None, found)} == {
            (chunks, first) for chunks in kernels
        }
        assert timed_in_bundles(PROBLEM, Destination.IN_PLACE, HERE) == counts
        assert choose_from_bundles(PROBLEM, Destination.OUT_OF_PLACE, 1 << 14, HERE) == (Match.GENERIC, None)


def test_a_bundle_behind_another_answers_where_it_suits_better(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = write_trials(tmp_path / "h20.db", [make_trial(environment=replace(H100, gpu="NVIDIA H20"))])
    mine = write_sample(tmp_path / "mine.db", chunks=2)
    monkeypatch.setattr(bundles, "known", lambda: [Bundle.open(foreign), Bundle.open(mine)])
    match, found = choose_from_bundles(PROBLEM, Destination.IN_PLACE, 1 << 13, HERE)
    assert match is Match.SAME_GPU
    assert found[1].path == mine


def test_a_pinned_bundle_answers_wherever_it_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = write_trials(tmp_path / "h20.db", [make_trial(environment=replace(H100, gpu="NVIDIA H20"))])
    mine = write_sample(tmp_path / "mine.db", chunks=2)
    monkeypatch.setattr(bundles, "shipped", lambda: {"sm90": mine})
    for pinned, path, match in (("", mine, Match.SAME_GPU), (str(foreign), foreign, Match.SAME_ARCH)):
        monkeypatch.setenv(bundles.VARIABLE, pinned)
        found, chosen = choose_from_bundles(PROBLEM, Destination.IN_PLACE, 1 << 13, HERE)
        assert (found, chosen[1].path) == (match, path)
    other = replace(PROBLEM, transform=Transform(2 * PROBLEM.n))
    assert choose_from_bundles(other, Destination.IN_PLACE, 1 << 13, HERE) == (Match.GENERIC, None)
    write_trials(mine, [make_trial(problem=other)])
    _, chosen = choose_from_bundles(other, Destination.IN_PLACE, 1 << 13, HERE)
    assert chosen[1].path == mine  # the pinned one has no kernel for it


def test_a_bundle_is_opened_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_sample(tmp_path / "a.db")
    monkeypatch.setenv(bundles.VARIABLE, str(path))
    (first,), (second,) = bundles.known(), bundles.known()
    assert first is second
    write_sample(path, chunks=2)
    os.utime(path, ns=(0, 0))
    assert bundles.known()[0].digest != first.digest


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_pinned_bundle_may_be_replaced_while_calls_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also just when its entries are about to be read; nothing fails, what is there now is used, and no more than one
    opened bundle is kept."""
    path, others = tmp_path / "a.db", [write_sample(tmp_path / f"{chunks}.db", chunks) for chunks in range(1, 5)]
    monkeypatch.setattr(bundles, "_seen", {})
    monkeypatch.setenv(bundles.VARIABLE, str(path))
    in_turn, step = bundles.in_turn, 0

    def replaced() -> Iterator[list[Bundle]]:
        for asked in in_turn():
            put(others[(step + 1) % 4])
            yield asked

    def put(other: Path) -> None:
        os.replace(shutil.copy(other, tmp_path / "copy.db"), path)

    for step in range(8):
        put(others[step % 4])
        monkeypatch.setattr(bundles, "in_turn", replaced if step % 2 else in_turn)
        best = hadagen.best_config(PROBLEM, 1, arch="sm90", inplace=True)
        assert best.knobs["chunks"] == (step + step % 2) % 4 + 1
    assert list(bundles._seen) == [path]


def damage(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(statement)


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_damage_that_is_found_late_causes_a_warning_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_sample(bundles.user_directory() / "good.db", chunks=2)
    damage(write_sample(bundles.user_directory() / "bad.db"), "UPDATE entries SET hot_us = hot_us + 1")
    assert len(bundles.known()) == 2
    with pytest.warns(RuntimeWarning, match=r"goes on without a bundle: .*bad\.db is damaged"):
        best = hadagen.best_config(PROBLEM, 1, arch="sm90", inplace=True)
    assert best.knobs["chunks"] == 2
    assert hadagen.best_config(PROBLEM, 1, arch="sm90", inplace=True) == best
    monkeypatch.setenv(bundles.VARIABLE, str(bundles.user_directory() / "bad.db"))
    with pytest.raises(StorageError, match="is damaged"):
        hadagen.best_config(PROBLEM, 1, arch="sm90", inplace=True)


def test_a_bad_bundle_that_was_only_found_causes_a_warning() -> None:
    write_sample(bundles.user_directory() / "good.db")
    (bundles.user_directory() / "bad.db").write_bytes(b"what is this")
    os.mkfifo(bundles.user_directory() / "pipe.db")
    held = os.open(bundles.user_directory() / "pipe.db", os.O_RDWR)  # whoever waits at it would wait for good without
    os.write(held, bytes(100))
    with pytest.warns() as said:
        _, best = (hadagen.best_config(PROBLEM, 1, arch="sm90", inplace=True) for _ in range(2))
    os.close(held)
    bad, pipe = sorted(str(each.message) for each in said)
    assert "bad.db is not a hadagen bundle" in bad
    assert "pipe.db cannot be read (Not a regular file)" in pipe
    assert best.match is Match.SAME_ARCH


def test_a_directory_of_bundles_that_cannot_be_read_causes_a_warning(tmp_path: Path) -> None:
    (tmp_path / "data" / "hadagen").mkdir(parents=True)
    bundles.user_directory().write_text("no directory")
    with pytest.warns(RuntimeWarning, match=r"bundles cannot be read \(Not a directory\); make it readable"):
        assert hadagen.best_config(PROBLEM, 1, arch="sm90").match is Match.GENERIC


@pytest.mark.parametrize("value", ["~/data", "data"])
def test_a_data_directory_in_the_home_or_the_working_directory_is_absolute(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", value)
    assert bundles.user_directory() == tmp_path / "data" / "hadagen" / "bundles"


def test_without_a_home_directory_there_are_the_bundles_that_come_with_hadagen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = write_sample(tmp_path / "shipped.db")
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.setattr(bundles, "shipped", lambda: {"sm90": shipped})
    assert [bundle.path for bundle in bundles.known()] == [shipped]
    with pytest.raises(StorageError, match="no home directory is known to keep trials and bundles in; set XDG_DATA"):
        bundles.user_directory()


# ---- bad input -------------------------------------------------------------------------------------------------------
NO_PROBLEMS = ("n128", "n128-float16", "n0128-float16-fast", "n128-float16-fast-contiguous", "n128-float32-fast")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(({"rows": rows}, f"rows = {rows!r} is not supported") for rows in (0, -1, 2.0, True, "8")),
        *(
            ({"inplace": inplace}, r"inplace = .* is not supported; give True or False")
            for inplace in ("no", np.array([True, False]), torch.ones(2))
        ),
        ({"problem": {"n": 100, "dtype": "float16"}}, "n = 100 is not supported"),
        ({"problem": {"n": 128}}, r"problem = .* lacks 'dtype'; give a dict like "),
        ({"problem": {"dtype": "float16"}}, r"problem = .* lacks 'n'; give a dict like "),
        (
            {"problem": {"n": 128, "dtype": "float16", "m": 1}},
            r"problem = .* names no problem; give a Problem, its key, or a dict like",
        ),
        *(({"problem": key}, f"'{key}' names no problem; write one such as n4096-float16-fast") for key in NO_PROBLEMS),
        (
            {"problem": {"n": 128, "dtype": torch.int8}},
            "dtype 'int8' is not supported; choose one of float16",
        ),
        (
            {"problem": {"n": 128, "dtype": "float16", "rows": "no"}},
            "rows 'no' is not supported; choose one of contiguous, pitched",
        ),
    ],
    ids=str,
)
def test_bad_arguments_of_best_config_are_a_sentence(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        hadagen.best_config(**{"problem": PROBLEM, "rows": 1, "arch": "sm90"} | changes)


def test_a_problem_may_be_a_key_or_a_mapping() -> None:
    with pytest.raises(UsageError, match=r"Problem\(128, 'float16'\) is not supported; .* call such as Problem\.of\("):
        Problem(128, "float16")  # type: ignore[arg-type]
    assert hadagen.best_config("n128-float16-fast-pitched", 1, arch="sm90").problem.key == "n128-float16-fast-pitched"
    wanted = hadagen.best_config({"n": 128, "dtype": "bfloat16"}, 1, arch="sm90")
    assert hadagen.best_config({"n": 128, "dtype": torch.bfloat16}, 1, arch="sm90") == wanted


def test_whole_numbers_of_any_kind_are_numbers() -> None:
    rows: Any = np.int32(4)
    found = hadagen.best_config({"n": np.int64(PROBLEM.n), "dtype": PROBLEM.io.input}, rows, arch="sm90")
    wanted = hadagen.best_config(PROBLEM, 4, arch="sm90")
    assert json.dumps(found.to_dict()) == json.dumps(wanted.to_dict())


@pytest.mark.parametrize("device", [0, "0", "cuda", "cuda:0", torch.device("cuda:1")], ids=repr)
def test_beside_an_arch_a_number_is_no_name_of_a_gpu(device: int | str | torch.device) -> None:
    with pytest.raises(UsageError, match=r"is no name of a GPU, which is wanted .* like 'NVIDIA H100 80GB HBM3'"):
        hadagen.best_config(PROBLEM, 1, device, arch="sm90")
    assert hadagen.best_config(PROBLEM, 1, "Abacus 3000", arch="sm90").device.gpu == "Abacus 3000"


def test_a_gpu_of_another_arch_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^device 'NVIDIA B200' is a GPU of sm100, not of sm90; give that arch, or"):
        hadagen.best_config(PROBLEM, 1, "NVIDIA B200", arch="sm90")


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((4096, "float16"), {}, "best_config: missing a required argument: 'rows'; call"),
        ((PROBLEM,), {}, "best_config: missing a required argument: 'rows'; call"),
        ((), {}, "best_config: missing a required argument: 'n'; call"),
        ((), {"dtype": "float16", "rows": 8}, "best_config: missing a required argument: 'n'; call"),
        ((4096,), {"rows": 8}, "best_config: missing a required argument: 'dtype'; call"),
        (
            (4096, "float16"),
            {"row": 8},
            "best_config: got an unexpected keyword argument 'row' (did you mean rows?); call",
        ),
        ((4096, "float16"), {"rows": 8, "x": 1}, "best_config: got an unexpected keyword argument 'x'; call"),
        ((PROBLEM, 8, None, "sm90"), {}, "best_config: too many positional arguments; call"),
        (
            (4096.0, "float16"),
            {"rows": 8},
            "n = 4096.0 is not supported; give a whole number, at least 1, a Rotation or",
        ),
        ((PROBLEM, 8), {"numerics": "fast"}, "a problem has its dtype, numerics and format; leave out"),
        ((PROBLEM, "float16"), {"rows": 8}, "a problem has its dtype, numerics and format; leave out"),
        ((Rotation(8), "float16"), {"rows": 8, "signed": True}, "a Rotation says itself whether"),
        ((Rotation(6, torch.rand(3, 3) + torch.eye(3)), "float16"), {"rows": 8}, "no kernel computes this Rotation"),
        ((Rotation(1 << 20), "float16"), {"rows": 8}, "no kernel computes this Rotation"),
        ((128, "float16"), {"rows": 8, "rule": "exact"}, "columns, group, rule, layout and round_first are those of"),
        ((128, "float16"), {"rows": 8, "to": "MXFP4"}, "to = 'MXFP4' is no format; did you mean mxfp4?"),
        ((128, "float16"), {"rows": 8, "to": "int8-row", "columns": 100}, "columns = 100 is not supported; rows are a"),
    ],
    ids=str,
)
def test_miscalls_are_answered_with_what_is_wrong(arguments: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        hadagen.best_config(*arguments, **options)
    said = str(caught.value)
    assert said.startswith(message)
    assert message.endswith("; call") == said.endswith('; call it such as best_config(4096, "float16", rows=8)')


@pytest.mark.parametrize(
    ("arguments", "options", "key", "rows"),
    [
        ((256, torch.float16), {}, "n256-float16-accurate", 12),
        ((256, "bfloat16"), {"numerics": "fast"}, "n256-bfloat16-fast", 12),
        ((3000, "float16"), {}, "n4096-float16-accurate-pitched", 12),
        ((14336, "float16"), {"order": 28, "signed": True}, "n14336-k28-signed-float16-accurate", 12),
        ((Rotation(14336), "float16"), {}, "n14336-k28-float16-accurate", 12),
        ((Rotation(4096, signs=[1] * 128, block=128), "float16"), {}, "n128-signed-float16-accurate", 384),
        ((Rotation(4096, torch.randn(64, 64)), "float16"), {}, "n4096-k64-real-float16-accurate", 12),
        (
            (Rotation(8192, [torch.randn(64, 64), torch.randn(64, 64)], block=4096), "bfloat16"),
            {"to": "int8-row"},
            "n4096-k64-c64-real-bfloat16-to-int8_row_8192-accurate",
            24,
        ),
        ((128, "bfloat16"), {"to": "int8-row"}, "n128-bfloat16-to-int8_row_128-accurate", 12),
        ((128, "bfloat16"), {"to": "int8-row", "columns": 4096}, "n128-bfloat16-to-int8_row_4096-accurate", 384),
        ((Rotation(4096, block=64), "bfloat16"), {"to": "fp8-row"}, "n64-bfloat16-to-fp8_row_4096-accurate", 768),
        (
            (Rotation(256, "regular"), "float16"),
            {"to": "int4-row"},
            "n256-swapped-float16-to-int4_row_256-accurate",
            12,
        ),
        (
            (1, "float16"),
            {"to": "mxfp4", "columns": 64, "rule": "qutlass", "layout": "swizzled", "round_first": True},
            "n1-float16-to-mxfp4_32_qutlass_swizzled_rounded-accurate",
            768,
        ),
    ],
    ids=str,
)
def test_arguments_are_those_of_warmup(arguments: Any, options: dict[str, Any], key: str, rows: int) -> None:
    found = hadagen.best_config(*arguments, rows=12, arch="sm90", **options)
    assert (found.problem.key, found.rows) == (key, rows)
    assert hadagen.best_config(problem=key, rows=rows, arch="sm90") == found


@pytest.mark.parametrize("device", ["cpu", "NVIDIA H100 80GB HBM3", "cuda:1", 1, 7, 1.5])
def test_a_device_that_is_not_here(device: float | str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert cuda_index(device) is None
    with pytest.raises(UsageError, match="is not a CUDA device of this machine"):
        hadagen.best_config(PROBLEM, 1, device)
