"""Batch-invariant calls: kernels with the same arithmetic give the same bits, and such calls run no others."""

import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from emulated_device import EmulatedDevice, device, same
from sample_bundle import hide_bundles
from sample_trials import H100, H200, PROBLEM, launch_for, make_kernel, make_trial, times
from test_quantizing_kernels import emulated

from hadagen import Match, Rotation, hadamard_transform, prologues, rotate_quantize, warmup
from hadagen.compiler import recipes
from hadagen.compiler.codegen import render
from hadagen.compiler.emulator import HostModule, compile_host
from hadagen.errors import DeviceError, ToolchainError, UsageError
from hadagen.plan.arch import load_arch
from hadagen.plan.knobs import Knobs
from hadagen.plan.plan import Plan
from hadagen.plan.space import Space, build_plan
from hadagen.problem.bits import encode
from hadagen.problem.launch import PORTABLE_CLUSTER, LaunchSpec, Source
from hadagen.problem.operands import kernel_operands, sizes_for, verification_operands
from hadagen.problem.problem import DType, Numerics, Problem, Rows
from hadagen.problem.prologues import prologue_of, width_of
from hadagen.problem.regimes import Destination, destinations
from hadagen.problem.trial import Trial
from hadagen.runtime import best, quantize
from hadagen.runtime.best import best_config
from hadagen.runtime.call import compute, runs
from hadagen.runtime.choose import bundles, tables
from hadagen.runtime.choose.device import Device
from hadagen.runtime.choose.entries import choose_from_bundles, timed_in_bundles
from hadagen.runtime.choose.reasons import Asked, why_none
from hadagen.runtime.launch import kernels
from hadagen.truth import quantizer
from hadagen.truth.accuracy import TORCH_DTYPE
from hadagen.truth.reference import verification_scale
from hadagen.tuning_db.bundle import Bundle, BundleEntry
from hadagen.tuning_db.bundle_writer import write_bundle
from hadagen.tuning_db.merge import merge_bundles
from hadagen.tuning_db.winners import invariant_arithmetic, portfolio, ranked_by_cell

__all__ = ["device"]  # a fixture
ONE, TWO, OTHER = ("1" * 12, "2" * 12, "3" * 12)
IN_PLACE, OUT_OF_PLACE = Destination
PITCHED = PROBLEM.with_io(rows=Rows.PITCHED)
DEVICE = Device("sm90", H100.gpu)


# ---- what names an arithmetic ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "problem",
    [
        Problem.of(64, DType.FLOAT16),
        Problem.of(512, DType.BFLOAT16),
        Problem.of(1024, DType.FLOAT16, Numerics.FAST),
        Problem.of(1024, DType.FLOAT32),
        Problem.of(2048, DType.BFLOAT16, Numerics.FAST),
        Problem.of(4096, DType.FLOAT16),
    ],
    ids=lambda problem: problem.key,
)
def test_kernels_of_one_arithmetic_give_the_same_bits(problem: Problem) -> None:
    """Also those whose tiles, loads and exchanges differ; and most others do not."""
    of = _plans_by_arithmetic(problem)
    assert len(of) > 1
    rows = np.random.default_rng(1).standard_normal((1 << 14) // problem.n * problem.n).reshape(-1, problem.n)
    x = encode(problem.io.input, rows)
    module = compile_host([render(plan) for plans in of.values() for plan in plans])

    def result(plan: Plan) -> bytes:
        out = np.zeros_like(x)
        module.run(render(plan).entry, plan.launch, x, out, scale=problem.n**-0.5 * 1.1)
        return out.tobytes()

    results = {name: {result(plan) for plan in plans} for name, plans in of.items()}
    assert {len(bits) for bits in results.values()} == {1}
    assert len(set.union(*results.values())) > 1


def _plans_by_arithmetic(problem: Problem) -> dict[str, list[Plan]]:
    """Plans of tiles of at most 16K elements, whose knobs are spread over the space. Some share an arithmetic."""
    arch = load_arch("sm90")
    legal = [k for k in Space(problem, arch).legal if k.chunks * k.warps * k.cluster <= 64 and k.ahead == 0]
    shapes = {(k.chunks, k.warps, k.cluster, k.load, k.far_bits, k.low_bits, k.exchange_carrier): k for k in legal}
    kept = list(shapes.values())
    of: dict[str, list[Plan]] = defaultdict(list)
    for knobs in kept[:: max(1, len(kept) // 10)]:
        plan = build_plan(problem, knobs, arch)
        of[plan.arithmetic].append(plan)
    assert max(map(len, of.values())) > 1
    return of


@pytest.mark.parametrize("key", ["n256-float16-to-int8_row_256-accurate", "n512-bfloat16-to-mxfp4_32-accurate"])
def test_kernels_of_one_arithmetic_give_the_same_codes(key: str) -> None:
    """And the same scales, wherever a row lies among others."""
    problem = Problem.parse(key)
    of = _plans_by_arithmetic(problem)
    module = compile_host([render(plan) for plans in of.values() for plan in plans])
    x = torch.randn(1 << 14, generator=torch.Generator().manual_seed(1)).view(-1, problem.n)
    x = x.to(getattr(torch, problem.io.input.value))

    def results(plan: Plan, place: int) -> tuple[bytes, bytes]:
        """Codes and scales of a row, at a place among others."""
        moved = x.roll(place, 0)
        codes, scales = emulated(problem, render(plan), module, moved, problem.n**-0.5)
        return codes.view(torch.uint8)[place].numpy().tobytes(), scales[place].numpy().tobytes()

    for plans in of.values():
        assert len({results(plan, place) for plan in plans for place in (0, 7, len(x) - 1)}) == 1


def test_a_kernel_is_called_the_same_whatever_its_arithmetic_is() -> None:
    plan = build_plan(Problem.of(512, "float16", "fast"), Knobs(chunks=2), load_arch("sm90"))
    assert plan.launch.arithmetic == plan.arithmetic
    assert plan.launch.digested() == replace(plan.launch, arithmetic="").digested()
    assert LaunchSpec.from_dict(plan.launch.to_dict()) == plan.launch
    with pytest.raises(ValueError, match="'xyz' names no arithmetic"):
        replace(plan.launch, arithmetic="xyz")


# ---- which arithmetic a bundle names ---------------------------------------------------------------------------------
def trial(number: int, arithmetic: str, us: dict[int, float], cluster: int = 1, **fields: Any) -> Trial:
    """Of a kernel as fast in place as out of place."""
    launch = replace(launch_for(fields.get("problem", PROBLEM)), arithmetic=arithmetic, cluster=cluster)
    both = tuple(time for destination in Destination for time in times(us, destination))
    return make_trial(number, kernel=make_kernel(b"%d" % number, launch=launch), timings=both, **fields)


SMALL, LARGE = 1 << 13, 1 << 20
TRIALS = [
    trial(1, ONE, {SMALL: 1.0, LARGE: 20.0}),
    trial(2, TWO, {SMALL: 3.0, LARGE: 10.0}),  # loses a factor of three once; of two the other
    trial(3, OTHER, {SMALL: 9.0, LARGE: 90.0}),  # wins nowhere
]


def test_the_arithmetic_that_loses_least_is_named() -> None:
    assert invariant_arithmetic(portfolio(TRIALS), ranked_by_cell(TRIALS)) == {PROBLEM: ONE}
    assert invariant_arithmetic(portfolio(TRIALS), ranked_by_cell(TRIALS[::-1])) == {PROBLEM: ONE}
    slower = [trial(1, ONE, {SMALL: 1.0, LARGE: 40.0}), *TRIALS[1:]]
    assert invariant_arithmetic(portfolio(slower), ranked_by_cell(slower)) == {PROBLEM: TWO}


def test_all_gpus_count() -> None:
    more = [*TRIALS, *(trial(n, name, {LARGE: us}, environment=H200) for n, name, us in ((1, ONE, 9.0), (2, TWO, 5.0)))]
    assert invariant_arithmetic(portfolio(more), ranked_by_cell(more)) == {PROBLEM: TWO}


def test_large_clusters_one_destination_and_unknown_arithmetic_are_not_named() -> None:
    large = [trial(1, ONE, {SMALL: 1.0}, cluster=16), trial(2, TWO, {SMALL: 3.0})]
    assert invariant_arithmetic(portfolio(large), ranked_by_cell(large)) == {PROBLEM: TWO}
    half = replace(TRIALS[0], timings=times({SMALL: 1.0}))
    assert invariant_arithmetic(portfolio([half]), ranked_by_cell([half])) == {}
    unknown = trial(1, "", {SMALL: 1.0})
    assert invariant_arithmetic(portfolio([unknown]), ranked_by_cell([unknown])) == {}


def write(path: Path, trials: list[Trial], arithmetic: str) -> Path:
    named = {t.kernel.digest: t.kernel for t in trials if t.kernel}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bundle(path, "sm90", portfolio(trials), named.__getitem__, {PROBLEM: arithmetic})
    return path


def test_a_merge_keeps_what_the_first_bundle_names(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{name}.db", TRIALS, name) for name in (ONE, TWO)]
    merge_bundles(paths[::-1], tmp_path / "merged.db")
    assert Bundle.open(tmp_path / "merged.db").arithmetic(PROBLEM) == TWO
    for unusable in ("", OTHER):  # which no winner has
        write(paths[0], TRIALS, unusable)
        merge_bundles(paths, tmp_path / "merged.db")
        assert Bundle.open(tmp_path / "merged.db").arithmetic(PROBLEM) == TWO


# ---- what a call runs ------------------------------------------------------------------------------------------------
@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle with winners of two arithmetics, of which it names the second."""
    hide_bundles(tmp_path, monkeypatch)
    monkeypatch.setenv(bundles.VARIABLE, str(write(tmp_path / "a.db", TRIALS, TWO)))
    return tmp_path / "a.db"


def chosen(elements: int, without: tuple[str, ...] = (), problem: Problem = PROBLEM) -> str | None:
    found = choose_from_bundles(problem, IN_PLACE, elements, DEVICE, without, batch_invariant=True)[1]
    return found and found[0].launch.arithmetic


def test_only_kernels_of_the_named_arithmetic_are_chosen(bundle: Path) -> None:
    assert {chosen(1 << k) for k in range(8, 28)} == {TWO}
    assert timed_in_bundles(PROBLEM, IN_PLACE, DEVICE, batch_invariant=True) == [LARGE]
    assert timed_in_bundles(PROBLEM, IN_PLACE, DEVICE) == [SMALL, LARGE]
    assert best_config(PROBLEM, 1, arch="sm90", batch_invariant=True).launch.arithmetic == TWO
    (digest,) = {entry.kernel for entry in Bundle.open(bundle).all_entries() if entry.launch.arithmetic == TWO}
    assert chosen(LARGE, (digest,)) is None
    with pytest.raises(UsageError, match=r"batch_invariant = 'yes' is not supported; give True or False"):
        best_config(PROBLEM, 1, arch="sm90", batch_invariant="yes")  # type: ignore[arg-type]


def test_a_larger_cluster_of_the_same_arithmetic_is_not_chosen(bundle: Path) -> None:
    write(bundle, [trial(1, TWO, {SMALL: 1.0}, cluster=16), trial(2, TWO, {LARGE: 1.0})], TWO)
    assert timed_in_bundles(PROBLEM, IN_PLACE, DEVICE, batch_invariant=True) == [LARGE]


def test_what_was_tuned_on_a_machine_does_not_change_the_arithmetic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_bundles(tmp_path, monkeypatch)
    mine = write(bundles.user_directory() / "mine.db", TRIALS, ONE)
    assert chosen(SMALL) == ONE
    shipped = {"sm90": write(tmp_path / "sm90.db", [trial(4, TWO, {LARGE: 50.0})], TWO)}
    monkeypatch.setattr(bundles, "shipped", lambda: shipped)
    assert chosen(SMALL) == chosen(LARGE) == TWO
    found = choose_from_bundles(PROBLEM, IN_PLACE, LARGE, DEVICE, batch_invariant=True)[1]
    assert found[1].path == mine  # and what was tuned here is taken where it has that arithmetic
    monkeypatch.setenv(bundles.VARIABLE, str(mine))
    assert chosen(SMALL) == ONE


def test_a_few_kernels_of_the_arithmetic_do_not_hide_many(bundle: Path) -> None:
    few = write(bundle.parent / "0.db", [trial(7, TWO, {LARGE: 99.0})], TWO)
    many = write(bundle, [trial(2, TWO, {SMALL: 3.0, LARGE: 10.0})], TWO)
    for paths in ((few, many), (many, few)):
        os.environ[bundles.VARIABLE] = os.pathsep.join(map(str, paths))
        assert timed_in_bundles(PROBLEM, IN_PLACE, DEVICE, batch_invariant=True) == [SMALL, LARGE]
        assert timed_in_bundles(PROBLEM, IN_PLACE, DEVICE) == ([LARGE] if paths[0] == few else [SMALL, LARGE])


def test_what_names_the_kernel_of_a_call_knows_the_variable(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for flag in (False, True):
        monkeypatch.setattr(best, "BATCH_INVARIANT", flag)
        found.append(best_config(PROBLEM, SMALL // 256, arch="sm90").launch)
    assert [launch and launch.arithmetic for launch in found] == [ONE, TWO]


@pytest.fixture
def machine(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine with an H100. Loading a kernel gives the entry."""
    monkeypatch.setattr(kernels, "cuda_device", lambda index: DEVICE)
    monkeypatch.setattr(kernels, "load", lambda bundle, entry, device, target: entry)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    tables.clear()
    yield
    tables.clear()


INVARIANT = kernels.Kind(0, PROBLEM, True, True)


@pytest.mark.usefixtures("machine")
def test_both_kinds_of_calls_are_remembered_apart() -> None:
    for _ in range(2):
        found = [kernels.find(INVARIANT._replace(batch_invariant=flag), SMALL) for flag in (False, True)]
        assert [entry and entry.launch.arithmetic for entry in found] == [ONE, TWO]  # type: ignore[attr-defined]


@pytest.mark.usefixtures("machine")
def test_a_kernel_that_fails_is_not_replaced_by_one_of_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise DeviceError("it does not load")

    monkeypatch.setattr(kernels, "load", refuse)
    with pytest.raises(DeviceError, match="it does not load"):
        kernels.find(INVARIANT, SMALL)
    assert kernels.find(INVARIANT._replace(batch_invariant=False), SMALL) is None
    assert [*tables.failed.values()] == ["it does not load"]


def test_rows_that_have_gaps_have_the_arithmetic_of_others(bundle: Path, device: EmulatedDevice) -> None:
    """Or else they are copied, so that they have none."""
    device.served = (Rows.CONTIGUOUS,)
    x = torch.randn(5, 300)[:, :256]
    y = hadamard_transform(x, batch_invariant=True)
    assert device.ran() == ["n256-float32-accurate"]
    assert same(y, hadamard_transform(x.double()))
    pitched = [trial(n, name, {1 << 16: 1.0}, problem=PITCHED) for n, name in ((5, ONE), (6, TWO))]
    for number, each in enumerate(pitched):
        write(bundle, [*TRIALS, each], TWO)
        assert timed_in_bundles(PITCHED, IN_PLACE, DEVICE, batch_invariant=True) == [1 << 16] * number
    assert PITCHED not in invariant_arithmetic(portfolio(pitched), ranked_by_cell(pitched))


@pytest.mark.usefixtures("machine")
def test_a_problem_without_such_kernels_is_refused(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(bundle, TRIALS, "")
    monkeypatch.setattr(recipes, "closest_recipe", lambda *_: None)
    with pytest.raises(DeviceError, match="no kernels of n256-float16-accurate give the same bits in every call on"):
        kernels.find(INVARIANT, SMALL)
    # Where no call has a kernel, PyTorch does the work of all.
    assert kernels.find(INVARIANT._replace(problem=Problem.of(512, "float16")), 1 << 13) is None


QUANTIZING = PROBLEM.with_io(output="mxfp8_32")


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.usefixtures("machine")
def test_where_no_kernel_quantizes_so_the_reason_is_said(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = kernels.Kind(0, QUANTIZING, False, True)
    quantizing = [
        trial(n, name, {SMALL: 1.0}, problem=QUANTIZING, errors={"normal": 0.0}) for n, name in ((1, ONE), (2, TWO))
    ]
    named = {t.kernel.digest: t.kernel for t in quantizing if t.kernel}
    write_bundle(bundle, "sm90", portfolio(quantizing), named.__getitem__, {QUANTIZING: TWO})
    assert kernels.find(kind, SMALL).launch.arithmetic == TWO  # type: ignore[attr-defined]
    tables.clear()
    write_bundle(bundle, "sm90", portfolio(quantizing), named.__getitem__, {})
    monkeypatch.setattr(recipes, "closest_recipe", lambda *_: None)
    assert kernels.find(kind, SMALL) is None
    assert kernels.find(kind, 2 * SMALL) is None
    reason = why_none(Asked.of(QUANTIZING, 256, OUT_OF_PLACE, True), DEVICE)
    said = "no kernels of n256-float16-to-mxfp8_32-accurate give the same bits in every call on "
    assert str(reason).startswith(said)
    assert str(reason).endswith("; leave out batch_invariant")


def test_calls_that_quantize_ask_for_such_kernels(device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """New and known ones, with and without out=, by argument and by default; each remembered apart."""
    asked: list[bool] = []
    find = kernels.find

    def note(kind: kernels.Kind, elements: int) -> Any:
        asked.append(kind.batch_invariant)
        return find(kind, elements)

    monkeypatch.setattr(kernels, "find", note)
    x = torch.randn(3, 256)
    for flag in (True, False, True):
        q = rotate_quantize(x, 64, to="mxfp8", batch_invariant=flag)
        rotate_quantize(x, 64, to="mxfp8", batch_invariant=flag, out=q)
        rotate_quantize(x.requires_grad_(), 64, to="mxfp8", batch_invariant=flag, gradient=True)
        x.requires_grad_(False)
    assert (asked[:1], set(asked)) == ([True], {True, False})
    assert len(device.ran()) >= 9
    asked.clear()
    for flag in (True, False):
        monkeypatch.setattr(quantize, "BATCH_INVARIANT", flag)
        rotate_quantize(torch.randn(5, 256), 64, to="mxfp8")
        assert asked == [flag]
        asked.clear()
    with pytest.raises(TypeError, match="batch_invariant is 'yes'; pass True or False"):
        rotate_quantize(x, to="mxfp8", batch_invariant="yes")  # type: ignore[arg-type]


def test_rows_that_kernels_take_in_some_numbers_only_take_none(device: EmulatedDevice) -> None:
    """Two rows of 8 are a unit of 16."""
    for rows in (1, 2):
        rotate_quantize(torch.randn(rows, 8), to="fp8-tensor", tensor_scale=0.1, batch_invariant=True)
        assert device.ran() == []
    rotate_quantize(torch.randn(2, 8), to="fp8-tensor", tensor_scale=0.1)
    assert len(device.ran()) == 1


# ---- recipes ---------------------------------------------------------------------------------------------------------
SIGNED = Problem.parse("n256-signed-float16-accurate")
GUESSED = [  # which no bundle has
    *("n64-signed-after-silu_mul-float16-accurate", "n256-after-mul-float16-to-mxfp8_32-accurate"),
    *("n1024-signed-after-gelu-bfloat16-fast", "n256-signed-after-relu2-float32-to-fp8_row_256-accurate"),
    *("n640-k40-signed-after-silu_mul-bfloat16-fast", "n512-after-gelu_mul-bfloat16-to-nvfp4_16-fast"),
]
OTHERS = [
    *("n4096-signed-bfloat16-fast", "n65536-signed-float16-accurate", "n3584-k28-signed-float16-fast"),
    *("n14336-k28-after-silu_mul-bfloat16-to-fp8_row_14336-accurate", "n96-k96-signed-float16-accurate"),
    *("n448-k28-real-bfloat16-accurate", "n4096-k64-c64-real-float16-fast", "n896-k28-after-gelu-bfloat16-accurate"),
    *("n64-swapped-signed-bfloat16-to-int8_row_4096-accurate", "n1-after-relu2-bfloat16-to-mxfp4_32-accurate"),
    *("n11008-k172-after-silu_mul-bfloat16-accurate", "n2048-bfloat16-fast", "n4096-float32-accurate"),
    *("n112-k28-float16-fast", "n128-after-silu_mul-float16-to-fp8_tensor-accurate"),
]
COUNTS = [1 << 13, 3 << 16, 1 << 20, 5 << 20, 1 << 28]  # of elements


def recipe_for(
    problem: Problem, elements: int, device: Device = DEVICE, at: Destination = OUT_OF_PLACE, invariant: bool = True
) -> BundleEntry | None:
    found = choose_from_bundles(problem, at, elements, device, batch_invariant=invariant)[1]
    return found and found[0]


@pytest.mark.parametrize("arch", ["sm80", "sm90", "sm100"])
def test_all_that_has_kernels_has_kernels_of_one_arithmetic(arch: str) -> None:
    """Whatever the element count, the destination and the GPU are."""
    devices = [Device(arch, gpu) for gpu in (*((H100.gpu, H200.gpu) if arch == "sm90" else ()), "another")]
    several = []
    for problem in map(Problem.parse, (*GUESSED, *OTHERS)):
        calls = [(count, device, at) for count in COUNTS[::2] for device in devices for at in destinations(problem)]
        found = [recipe_for(problem, *call) for call in calls]
        assert (None in found) == (recipe_for(problem, COUNTS[0], devices[0], invariant=False) is None), problem.key
        if all(found):
            assert len({entry.launch.arithmetic for entry in found}) == 1, problem.key
            assert max(entry.launch.cluster for entry in found) <= PORTABLE_CLUSTER, problem.key
            others = [recipe_for(problem, *call, invariant=False) for call in calls[:: len(devices)]]
            several += [problem] * (len({entry.launch.arithmetic for entry in others}) > 1)
    assert several  # calls that need not be batch-invariant do not always have one


@pytest.mark.parametrize("arch", ["sm80", "sm90"])
def test_recipes_for_all_element_counts_give_a_row_the_same_bits(arch: str) -> None:
    """Among any number of rows, which end within tiles too."""
    chosen = {
        problem: {entry.kernel: entry for elements in COUNTS if (entry := recipe_for(problem, elements, Device(arch)))}
        for problem in map(Problem.parse, GUESSED)
    }
    assert max(map(len, chosen.values())) > 1
    sources = {
        digest: render(build_plan(problem, Knobs.from_dict(entry.knobs), load_arch(arch)))
        for problem, of in chosen.items()
        for digest, entry in of.items()
    }
    module = compile_host(list(sources.values()))
    for problem, of in chosen.items():
        units = 4096 // problem.unit + 3
        wide = np.random.default_rng(1).standard_normal((units, width_of(problem) * problem.unit))
        x, wanted = encode(problem.io.input, wide), set()
        for digest in of:
            for first, last in ((0, units), (0, 1), (0, 3), (2, 3), (1, units)):
                found = bits_of_units(problem, sources[digest], module, x[first:last])
                wanted |= {(first + i, bits) for i, bits in enumerate(found)}
        assert len(wanted) == units, problem.key


def bits_of_units(problem: Problem, source: Source, module: HostModule, x: np.ndarray[Any, Any]) -> list[bytes]:
    """What a kernel makes of each row, or of each group that is longer: values, or codes and scales."""
    form, prologue, units = problem.io.form, prologue_of(problem), len(x)
    operands: dict[str, Any] = kernel_operands(problem, verification_operands(problem))
    operands |= prologue.numbers(1) if prologue else {}
    x, outputs = x.reshape(-1).copy(), {}
    out = np.zeros(units * problem.unit, x.dtype)
    made = [out]
    if form:
        codes, scales = quantizer.empty(units, problem.unit, form, TORCH_DTYPE[problem.io.input], torch.device("cpu"))
        made = [quantizer.memory_of(each).numpy() for each in (codes, scales)]
        out, size = made[0], made[1].nbytes
        outputs = {"scales": (made[1], size)}
        operands |= sizes_for(form, units, problem.unit)
    report = module.run(
        source.entry,
        source.launch,
        x,
        out,
        scale=verification_scale(problem),
        elements=units * problem.unit,
        x_elements=x.size,
        operands=operands,
        outputs=outputs,
    )
    assert not report.complaint
    return [
        b"".join(part.tobytes() for part in each) for each in zip(*(m.reshape(units, -1) for m in made), strict=True)
    ]


@pytest.mark.usefixtures("bundle")
def test_the_arithmetic_that_most_recipes_have_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On every GPU, and in each destination, also where no winner has it."""
    few, many = ({"chunks": 1, "low_bits": bits} for bits in ("shuffle", "mma"))
    trials = [
        trial(1, ONE, {1 << k: 1.0 for k in range(13, 18)}, knobs=many),
        trial(2, TWO, {SMALL: 1.0, LARGE: 1.0}, knobs=few, environment=H200),
    ]

    def found(named: str, only: Destination | None = None) -> set[tuple[Any, str]]:
        kept = [
            replace(each, timings=tuple(t for t in each.timings if only in (None, t.destination))) for each in trials
        ]
        write(tmp_path / "a.db", kept, named)
        calls = [
            (elements, Device("sm90", gpu.gpu), at) for elements in COUNTS for gpu in (H100, H200) for at in Destination
        ]
        entries = [recipe_for(SIGNED, *call) for call in calls]
        assert None not in entries
        return {(entry.knobs["low_bits"], entry.launch.arithmetic) for entry in entries}

    ((of_many, name),) = found("")
    assert (of_many, {name}) == ("mma", {entry_name for _, entry_name in found(ONE)})
    ((of_few, other),) = found(TWO)
    assert (of_few, other != name) == ("shuffle", True)
    assert found(TWO, OUT_OF_PLACE) == {(of_few, other)}


def test_registers_do_not_change_the_arithmetic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only how many blocks an SM is to hold."""
    hide_bundles(tmp_path, monkeypatch)
    found = {}
    for registers in (168, 80, 60):  # of a thread; of 256
        winner = trial(1, ONE, {SMALL: 1.0}, knobs={"chunks": 1, "warps": 8, "grid": "tiles"})
        kernel = make_kernel(b"%d" % registers, launch=winner.kernel.launch, registers=registers)
        path = write(tmp_path / f"{registers}.db", [replace(winner, kernel=kernel)], ONE)
        monkeypatch.setenv(bundles.VARIABLE, str(path))
        entry = recipe_for(SIGNED, SMALL)
        found[entry.knobs["min_blocks"]] = entry.launch.arithmetic
    assert (sorted(found), len(set(found.values()))) == ([1, 3, 4], 1)


def test_recipes_keep_to_clusters_that_every_gpu_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the next problem decides."""
    hide_bundles(tmp_path, monkeypatch)
    near, far = (Problem.of(n, "float16", "fast") for n in (1 << 17, 1 << 16))
    signed = Problem.of(1 << 17, "float16", "fast", signed=True)
    knobs = {"chunks": 8, "warps": 4, "cluster": 16}
    large = [trial(1, ONE, {LARGE: 1.0}, problem=near, knobs=knobs, cluster=16)]
    small = trial(2, TWO, {LARGE: 1.0}, problem=far, knobs=knobs | {"warps": 8, "cluster": 8})
    for trials, clusters in ((large, (16, None)), ([*large, small], (16, 8))):
        monkeypatch.setenv(bundles.VARIABLE, str(write(tmp_path / f"{len(trials)}.db", trials, "")))
        entries = [recipe_for(signed, LARGE, invariant=invariant) for invariant in (False, True)]
        assert tuple(entry and entry.launch.cluster for entry in entries) == clusters


def test_what_was_tuned_on_a_machine_does_not_change_the_arithmetic_of_recipes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But kernels of it that were tuned there run."""
    hide_bundles(tmp_path, monkeypatch)
    shipped = {"sm90": write(tmp_path / "sm90.db", [trial(4, TWO, {LARGE: 50.0})], TWO)}
    monkeypatch.setattr(bundles, "shipped", lambda: shipped)
    name = recipe_for(SIGNED, SMALL).launch.arithmetic

    def tune(name: str) -> Path:
        tuned = [trial(5, name, {SMALL: 1.0, LARGE: 2.0}, problem=SIGNED)]
        path = bundles.user_directory() / "mine.db"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bundle(
            path, "sm90", portfolio(tuned), {t.kernel.digest: t.kernel for t in tuned}.__getitem__, {SIGNED: name}
        )
        return path

    for tuned, match in ((ONE, Match.ESTIMATED), (name, Match.SAME_GPU)):
        path = tune(tuned)
        found = choose_from_bundles(SIGNED, IN_PLACE, LARGE, DEVICE, batch_invariant=True)
        assert (found[0], found[1][0].launch.arithmetic) == (match, name)
    tune(ONE)
    monkeypatch.setenv(bundles.VARIABLE, str(path))
    assert recipe_for(SIGNED, LARGE).launch.arithmetic == ONE
    monkeypatch.delenv(bundles.VARIABLE)
    monkeypatch.setattr(bundles, "shipped", dict)  # which then says nothing of it
    assert recipe_for(SIGNED, LARGE).launch.arithmetic == ONE


@pytest.mark.usefixtures("machine")
def test_winners_whose_arithmetic_is_not_named_become_recipes(bundle: Path) -> None:
    write(bundle, TRIALS, "")
    found = [kernels.find(INVARIANT._replace(in_place=at), count) for at in (True, False) for count in (SMALL, LARGE)]
    assert len({entry.launch.arithmetic for entry in found} - {ONE, TWO, OTHER}) == 1  # type: ignore[union-attr]
    assert chosen(SMALL, problem=PITCHED) is None  # so such rows are copied


@pytest.mark.usefixtures("machine")
def test_what_names_and_what_loads_kernels_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """`best_config` and `warmup` of a rotation behind a prologue, and its calls."""
    module = sys.modules["hadagen.runtime.warmup"]
    monkeypatch.setattr(module, "cuda_device", lambda index: DEVICE)
    monkeypatch.setattr(module, "_warmed_device", lambda device: 0)
    monkeypatch.setattr(module, "_row", lambda columns, dtype, device: torch.empty(1, columns, dtype=dtype))
    monkeypatch.setattr(module, "compile_missing", lambda chosen, target: None)
    monkeypatch.setattr(runs, "takes_kernels", lambda x: True)
    problem, before = Problem.parse("n256-after-silu_mul-float16-accurate"), prologues.SiluMul()
    rows = [count // 256 for count in COUNTS]
    assert warmup(Rotation(256), "float16", rows=rows, before=before, batch_invariant=True)
    loaded = {(kind.problem, kind.batch_invariant): entry.kernel for (kind, _), entry in tables.found.items()}
    for count in rows:
        best = best_config(
            256, "float16", rows=count, arch="sm90", device=H100.gpu, before=before, batch_invariant=True
        )
        assert (best.match, best.problem) == (Match.ESTIMATED, problem)
        found = kernels.find(kernels.Kind(0, problem, False, True), count * 256)
        assert loaded == {(problem, True): best.kernel} == {(problem, True): found.kernel}  # type: ignore[union-attr]


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.usefixtures("machine")
def test_where_no_recipe_can_be_made_pytorch_makes_the_bits_of_all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise ToolchainError("no NVRTC")

    kind = kernels.Kind(0, SIGNED, False, True)
    monkeypatch.setattr(kernels, "load", refuse)
    with monkeypatch.context() as capturing:
        capturing.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
        with pytest.raises(DeviceError, match="no NVRTC"):
            kernels.find(kind, SMALL)
    tables.clear()
    assert kernels.find(kind, SMALL) is None
    assert tables.failed[kind] == "no NVRTC"
    with pytest.raises(DeviceError, match="no NVRTC"):  # what a bundle has must not have other bits
        kernels.find(INVARIANT, SMALL)


def test_calls_with_a_prologue_ask_for_such_kernels(device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[bool, str]] = []
    monkeypatch.setattr(kernels, "find", lambda kind, _: asked.append((kind.batch_invariant, kind.problem.prologue)))
    for flag in (True, False):
        Rotation(256)(torch.randn(3, 512), before=prologues.SiluMul(), batch_invariant=flag)
        rotate_quantize(torch.randn(3, 512), 64, to="mxfp8", before=prologues.SiluMul(), batch_invariant=flag)
        assert {each for each in asked if each[1]} == {(flag, "silu_mul")}
        asked.clear()


# ---- the argument ----------------------------------------------------------------------------------------------------
def test_many_rows_give_the_bits_of_few_in_plain_pytorch() -> None:
    x = torch.randn(1 << 12, 2048, generator=torch.Generator().manual_seed(0))
    some = [slice(0, 1), slice(7, 40), slice(1 << 11, 1 << 12)]
    whole = hadamard_transform(x, batch_invariant=True)
    assert all(torch.equal(hadamard_transform(x[rows], batch_invariant=True), whole[rows]) for rows in some)
    assert not torch.equal(hadamard_transform(x), whole)  # the faster way adds in another order


@pytest.mark.parametrize(
    "call",
    [
        lambda x, **options: hadamard_transform(x, 0.5, **options),
        lambda x, **options: hadamard_transform(x.clone(), 0.5, inplace=True, **options),
        lambda x, **options: hadamard_transform(x, 0.5, out=torch.empty_like(x), **options),
        lambda x, **options: torch.vmap(lambda row: hadamard_transform(row, 0.5, **options))(x),
        lambda x, **options: torch.compile(lambda x: hadamard_transform(x, 0.5, **options), backend="eager")(x),
        lambda x, **options: hadamard_transform(x.clone().requires_grad_(), 0.5, **options).sum().backward(),
    ],
    ids=["new", "in place", "out", "vmap", "compile", "gradient"],
)
def test_the_argument_reaches_every_kind_of_call(call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    real = compute.check
    monkeypatch.setattr(compute, "check", lambda call: (seen.append(call.spec.batch_invariant), real(call)))
    for flag in (True, False):
        call(torch.randn(3, 8), batch_invariant=flag)
        assert set(seen) == {flag}
        seen.clear()


def test_a_flag_that_is_none_is_refused() -> None:
    with pytest.raises(TypeError, match="batch_invariant is 'yes'; pass True or False"):
        hadamard_transform(torch.ones(2), batch_invariant="yes")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"batch_invariant = 2 is not supported; give True or False"):
        warmup(8, "float16", batch_invariant=2)  # type: ignore[arg-type]


@pytest.mark.parametrize(("value", "wanted"), [("1", True), ("0", False), ("", False)])
def test_the_variable_is_the_default(value: str, wanted: bool) -> None:
    program = """
import torch, hadagen
from hadagen.runtime.call import compute, runs
seen = []
compute.check = lambda call: seen.append(call.spec.batch_invariant)
hadagen.hadamard_transform(torch.ones(2))
hadagen.hadamard_transform(torch.ones(4), batch_invariant=False)
print(seen)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env={"HADAGEN_BATCH_INVARIANT": value}, capture_output=True, text=True
    )
    assert done.stdout.strip() == f"[{wanted}, False]", done.stderr
