"""Winners for archs without measurements: how they are made, chosen and shown, and those that are shipped."""

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_line import raising, run, sentence, succeed
from real_compilers import needs_nvrtc
from sample_bundle import hide_bundles
from sample_trials import H100, make_timing

from hadagen.cli import doctor
from hadagen.cli.device import runnable
from hadagen.compiler import recipes
from hadagen.compiler.codegen import render
from hadagen.compiler.nvrtc import Nvrtc
from hadagen.errors import DeviceError, NoCompilerError, StorageError
from hadagen.measure import Cell
from hadagen.plan.arch import Arch, load_arch
from hadagen.plan.costmodel import MODEL_ERROR, Estimate
from hadagen.plan.knobs import Knobs, plan_of
from hadagen.plan.plan import Plan
from hadagen.plan.space import Space, build_plan
from hadagen.problem.problem import Problem
from hadagen.problem.regimes import LOSS, Destination, destinations, element_buckets
from hadagen.problem.target import generation, known_archs
from hadagen.problem.trial import Provenance, Trial
from hadagen.runtime.choose import bundles
from hadagen.runtime.choose.device import Device
from hadagen.runtime.choose.entries import Match, choose_from_bundles
from hadagen.tuner import transfer
from hadagen.tuner.estimate import shortlist
from hadagen.tuner.transfer import estimated_winners
from hadagen.tuning_db.bundle import Bundle, BundleEntry, shipped
from hadagen.tuning_db.merge import Selection, selection_of, write_selection
from hadagen.tuning_db.winners import WinnerCell, digest_of, may_win

UNMEASURED = [name for name in known_archs() if name != "sm90"]
KEYS = ("n512-float16-fast", "n4096-bfloat16-accurate-pitched", "n32768-float16-fast", "n65536-float16-accurate")
PROBLEMS = [Problem.parse(key) for key in KEYS]
COMPILED = 3  # recipes of each arch, far apart


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """What was measured of a few problems."""
    path = tmp_path_factory.mktemp("source") / "sm90.db"
    measured = selection_of(Bundle.open(shipped()["sm90"]))
    write_selection(path, "sm90", {cell: trial for cell, trial in measured.items() if cell.problem in PROBLEMS}, {})
    return Bundle.open(path)


@cache
def shipped_recipes(name: str) -> list[BundleEntry]:
    """An entry of each kernel that is shipped for an arch."""
    return list({entry.kernel: entry for entry in Bundle.open(shipped()[name]).all_entries()}.values())


def plans(selection: Selection, arch: Arch) -> Iterator[tuple[Trial, Plan]]:
    """Of each winner; raises where one is not legal."""
    for trial in selection.values():
        yield trial, build_plan(trial.problem, Knobs.from_dict(trial.knobs), arch)


# ---- what is shipped -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", UNMEASURED)
def test_every_shipped_recipe_renders_and_is_marked(name: str) -> None:
    arch = load_arch(name)
    for entry in shipped_recipes(name):
        plan = build_plan(entry.problem, Knobs.from_dict(entry.knobs), arch)
        assert plan.features <= arch.features
        assert render(plan).launch == entry.launch, entry.problem.key
        assert (entry.provenance, entry.gpu, entry.errors, entry.nvcc) == (Provenance.ESTIMATED, "", {}, "")


@needs_nvrtc
@pytest.mark.parametrize("name", UNMEASURED)
def test_shipped_recipes_compile_where_they_are_called(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if generation(name) not in Nvrtc.find().archs:
        pytest.skip(f"NVRTC {Nvrtc.find().release} does not know {name}")
    monkeypatch.setattr(recipes, "_roots", [tmp_path])
    entries = shipped_recipes(name)
    for entry in entries[:: len(entries) // COMPILED][:COMPILED]:
        kernel = runnable(Bundle.open(shipped()[name]), entry)
        assert kernel.cubin.startswith(b"\x7fELF")
        assert (kernel.digest, kernel.launch) == (entry.kernel, entry.launch)


@pytest.mark.parametrize("name", UNMEASURED)
def test_the_shipped_winners_cover_every_bucket_of_what_is_legal(name: str) -> None:
    bundle, measured = Bundle.open(shipped()[name]), Bundle.open(shipped()["sm90"])
    arch = load_arch(name)
    for problem in measured.problems():
        cells = {(entry.destination, entry.elements) for entry in bundle.entries(problem)}
        legal = Space(problem, arch).closest(Knobs()) is not None
        wanted = (
            {(way, count) for way in destinations(problem) for count in element_buckets(problem)} if legal else set()
        )
        assert cells == wanted, problem.key


# ---- how they are made -----------------------------------------------------------------------------------------------
def test_equal_sources_give_equal_bytes(source: Bundle, tmp_path: Path) -> None:
    for name in ("one.db", "two.db"):
        assert " winners, " in succeed("bundle", "estimate", "--arch", "sm80", source.path, tmp_path / name)
    assert (tmp_path / "one.db").read_bytes() == (tmp_path / "two.db").read_bytes()
    assert Bundle.open(tmp_path / "one.db").date == source.date
    # A winner that was measured, and what is estimated already, are no reason to estimate.
    for given, out, why in (
        (source.path, source.path, "has measured winners, and they would be lost"),
        (tmp_path / "one.db", tmp_path / "three.db", "has no measured winners to estimate from"),
    ):
        assert why in sentence(run("bundle", "estimate", "--arch", "sm86", given, out), 2 if given == out else 1)
    assert "has winners of sm90 already" in sentence(
        run("bundle", "estimate", "--arch", "sm90", source.path, tmp_path / "three.db"), 2
    )


def test_what_is_legal_nowhere_has_no_winner(source: Bundle) -> None:
    assert {cell.problem for cell in estimated_winners(source, load_arch("sm89"))[0]} == set(PROBLEMS[:3])
    assert {cell.problem for cell in estimated_winners(source, load_arch("sm120"))[0]} == set(PROBLEMS)


def test_estimates_stand_in_where_nothing_was_measured(source: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """And count for nothing where something was."""
    arch, (guessed, measured) = load_arch("sm100"), PROBLEMS[:2]
    before, _ = estimated_winners(source, arch)
    entries = list(source.all_entries())
    for at, entry in enumerate(entries):
        if entry.problem == guessed:
            entries[at] = replace(entry, provenance=Provenance.ESTIMATED)
    known = {Knobs.like(entry.knobs) for entry in entries}
    other = next(knobs for knobs in shortlist(Space(measured, arch), 8) if knobs not in known)
    guess = {"knobs": other.to_dict(), "provenance": Provenance.ESTIMATED}
    # The first of a cell decides.
    entries = [replace(entry, **guess) for entry in source.entries(measured)] + entries
    monkeypatch.setattr(Bundle, "all_entries", lambda bundle: iter(entries))
    after, _ = estimated_winners(source, arch)
    assert {cell: trial.knobs for cell, trial in after.items()} == {cell: trial.knobs for cell, trial in before.items()}


@pytest.mark.parametrize("lacking", ["cluster", "bulk_copy", "cp_async", "dependent_launch"])
def test_an_arch_without_a_feature_has_other_winners(lacking: str, source: Bundle) -> None:
    arch = load_arch("sm100")
    whole, _ = estimated_winners(source, arch)
    assert any(lacking in plan.features or plan.starts_early for _, plan in plans(whole, arch))
    bare = replace(arch, features=arch.features - {lacking})
    less, _ = estimated_winners(source, bare)
    assert {digest_of(trial) for trial in less.values()} != {digest_of(trial) for trial in whole.values()}
    for trial, plan in plans(less, bare):
        assert lacking not in plan.features
        assert trial.kernel.launch == plan.launch


def test_of_what_the_model_cannot_tell_apart_measured_winners_win(
    source: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an arch that is an H100 by another name."""
    arch = replace(load_arch("sm90"), nvcc_arch="sm_100")
    won: set[tuple[WinnerCell, Knobs]] = set()
    estimates: dict[Problem, dict[Knobs, Estimate]] = {problem: {} for problem in PROBLEMS}
    for entry in source.all_entries():
        knobs = Space(entry.problem, arch).closest(Knobs.like(entry.knobs))
        assert knobs
        won.add((WinnerCell(entry.problem, arch.name, "", entry.destination, entry.elements), knobs))
        estimate = Estimate(plan_of(entry.problem, knobs, starts_early=True), arch)
        estimates[entry.problem].setdefault(knobs, estimate)

    def as_measured() -> int:
        """How many winners won when they were measured."""
        selection, _ = estimated_winners(source, arch)
        for cell, trial in selection.items():
            (timing,) = trial.timings
            best = min(each.us(*Cell.of(timing)) for each in estimates[cell.problem].values())
            assert cell.portable or timing.us <= best * (1 + MODEL_ERROR) * (1 + 2 * LOSS)
        return sum((cell, Knobs.from_dict(trial.knobs)) in won for cell, trial in selection.items())

    found = as_measured()
    monkeypatch.setattr(transfer, "MODEL_ERROR", 0.0)
    assert found > 1.5 * as_measured()


def test_what_won_counts_where_an_sm_has_as_many_elements(source: Bundle) -> None:
    problem, arch = PROBLEMS[0], load_arch("sm80")
    arch = replace(arch, model=replace(arch.model, sms=H100.sms // 4))
    few, many = Space(problem, arch).seeds()[:2]
    entry = replace(source.entries(problem)[0], environment=H100, destination=Destination.IN_PLACE)
    entries = [replace(entry, knobs=k.to_dict(), elements=e) for k, e in ((few, 1 << 16), (many, 1 << 24))]
    found = transfer._recipes(entries, arch)
    counts = element_buckets(problem)
    assert found == {
        (problem, few): {(Destination.IN_PLACE, count): 1 for count in counts if count < 1 << 18},
        (problem, many): {(Destination.IN_PLACE, count): 1 for count in counts if count >= 1 << 18},
    }


@pytest.mark.parametrize(("name", "wins"), [("sm100", 16), ("sm120", 8)])
def test_a_portable_winner_counts_where_the_other_has_too_many_blocks(name: str, wins: int, source: Bundle) -> None:
    problem, arch = PROBLEMS[0], load_arch(name)
    knobs = dict(zip((16, 8), Space(problem, load_arch("sm120")).seeds(), strict=False))
    entry = source.entries(problem)[0]
    entries = [
        replace(entry, knobs=each.to_dict(), launch=replace(entry.launch, cluster=blocks), portable=blocks == 8)
        for blocks, each in knobs.items()
    ]
    found = transfer._recipes(entries, arch)
    assert {blocks for blocks, each in knobs.items() if found[problem, each]} == {wins}


def test_only_an_estimate_may_lack_errors(source: Bundle, tmp_path: Path) -> None:
    cell, estimate = next(iter(estimated_winners(source, load_arch("sm80"))[0].items()))
    measured = replace(estimate, provenance=Provenance.MEASURED)
    assert (may_win(estimate), may_win(measured)) == (True, False)
    with pytest.raises(StorageError, match="are no errors"):
        write_selection(tmp_path / "sm80.db", "sm80", {cell: measured}, {})


# ---- how they are chosen and shown -----------------------------------------------------------------------------------
def test_an_estimate_for_the_arch_comes_before_what_was_measured_on_an_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_bundles(tmp_path, monkeypatch)
    problem = PROBLEMS[0]
    read: list[str] = []
    entries = Bundle.entries

    def noted(bundle: Bundle, problem: Problem) -> list[BundleEntry]:
        read.append(bundle.arch)
        return entries(bundle, problem)

    def choose(arch: str, gpu: str = "") -> tuple[Match, str]:
        match, found = choose_from_bundles(problem, Destination.IN_PLACE, 1 << 20, Device(arch, gpu))
        return match, found[0].arch

    monkeypatch.setattr(bundles, "shipped", shipped)
    monkeypatch.setattr(Bundle, "entries", noted)
    assert [choose(*of) for of in (["sm120"], ["sm130"], ["sm80", "NVIDIA A100-SXM4-80GB"], ["sm90"])] == [
        *((Match.ESTIMATED, arch) for arch in ("sm120", "sm121", "sm80")),
        (Match.SAME_ARCH, "sm90"),
    ]
    assert read == ["sm120", "sm121", "sm80", "sm90"]  # and nothing older
    # What a user has measured comes before both.
    guess = next(t for c, t in selection_of(Bundle.open(shipped()["sm120"])).items() if c.problem == problem)
    mine = replace(
        guess,
        provenance=Provenance.MEASURED,
        environment=replace(H100, gpu="NVIDIA GeForce RTX 5090"),
        errors={"normal": 1e-5},
        timings=(make_timing(1e3, 1 << 20),),
    )
    path = bundles.user_directory() / "sm120.db"
    path.parent.mkdir(parents=True)
    write_selection(path, "sm120", {WinnerCell(problem, "sm120", H100.gpu, Destination.IN_PLACE, 1 << 20): mine}, {})
    assert choose("sm120", "NVIDIA GeForce RTX 5090") == (Match.SAME_GPU, "sm120")
    assert choose("sm120", "NVIDIA GeForce RTX 5080") == (Match.SAME_ARCH, "sm120")


@pytest.mark.usefixtures("machine")
def test_estimated_is_said_wherever_such_winners_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    path = shipped()["sm80"]
    monkeypatch.setenv(bundles.VARIABLE, str(path))
    best = succeed("best", "--arch", "sm80", "--n", "4096", "--dtype", "float16", "--rows", "1000").splitlines()
    assert best[1] == "not measured on any GPU: estimated by a cost model"
    assert {"match      estimated", "time       not measured", "error      not measured"} <= set(best)
    assert best[-1].startswith("estimated  compiled where it is called, 20")
    none = succeed("best", "--arch", "sm80", "--n", "65536", "--rows", "8")
    assert "\nno kernel, PyTorch computes it: a thread's values do not fit its registers; rotate in blocks of " in none
    assert re.search(r"\nsm80[.]db +sm80 +estimated  ", succeed("bundle", "list"))
    for options in ((), ("--all",)):
        shown = succeed("bundle", "show", path, *options)
        assert "\nGPUs       estimated\n" in shown
        assert "\n\nestimated" in shown
        assert "NVIDIA" not in shown
    said = f"{path.name}: sm80, {len(Bundle.open(path).problems())} problems, estimated"
    assert said in " ".join(succeed("doctor").split())


@pytest.mark.usefixtures("machine")
def test_the_doctor_says_what_runs_from_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(bundles.VARIABLE, str(shipped()["sm80"]))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("hadagen.runtime.choose.device.cuda_device", lambda index: Device("sm80", "NVIDIA A100"))

    driver = SimpleNamespace(cuDriverGetVersion=lambda: (0, 12040))
    monkeypatch.setattr("hadagen.gpu.driver.bindings", lambda: driver)

    class Found:
        release, version, archs = "12.9.86", (12, 9), (75, 80)

    monkeypatch.setattr("hadagen.compiler.nvrtc.Nvrtc.find", Found)
    count = len(list(Bundle.open(shipped()["sm80"]).all_entries()))
    assert doctor._kernels() == (
        f"{count} winners match this GPU as estimated; they have no cubins; NVRTC 12.9.86 compiles each from its "
        "recipe when it is first called; none was timed on sm80; to make some: hadagen tune --arch sm80; "
        "or within a program, one problem at a time: hadagen.autotune"
    )
    monkeypatch.setattr(Found, "archs", (75,))
    assert "NVRTC 12.9.86 does not know sm80, so PTX of older archs runs" in doctor._kernels()
    monkeypatch.setattr(Found, "version", (13, 0))
    with pytest.raises(DeviceError, match="makes code for drivers of CUDA 13, and this one is of CUDA 12; update"):
        doctor._kernels()
    monkeypatch.setattr(
        "hadagen.compiler.nvrtc.Nvrtc.find", raising(NoCompilerError("NVRTC was not found; install it"))
    )
    with pytest.raises(NoCompilerError, match="NVRTC was not found; install it"):
        doctor._kernels()
    monkeypatch.setenv(bundles.VARIABLE, str(shipped()["sm90"]))
    monkeypatch.setattr(
        "hadagen.runtime.choose.device.cuda_device", lambda index: Device("sm120", "NVIDIA GeForce RTX 5090")
    )
    assert "; they are for sm90; the driver compiles PTX of older archs instead, because NVRTC was" in doctor._kernels()
