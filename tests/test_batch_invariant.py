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
from sample_trials import H100, H200, LAUNCH, PROBLEM, make_kernel, make_trial, times
from test_quantizing_kernels import emulated

from hadagen import hadamard_transform, rotate_quantize, warmup
from hadagen.compiler.codegen import render
from hadagen.compiler.emulator import compile_host
from hadagen.errors import DeviceError, UsageError
from hadagen.plan.arch import load_arch
from hadagen.plan.knobs import Knobs
from hadagen.plan.plan import Plan
from hadagen.plan.space import Space, build_plan
from hadagen.problem.bits import encode
from hadagen.problem.launch import LaunchSpec
from hadagen.problem.operands import params_for
from hadagen.problem.problem import DType, Numerics, Problem, Rows
from hadagen.problem.regimes import Destination
from hadagen.problem.trial import Trial
from hadagen.runtime import best, bundles, kernels, quantize, tables, transform_operator
from hadagen.runtime.best import best_config
from hadagen.runtime.choose import choose_from_bundles, timed_in_bundles
from hadagen.runtime.device import Device
from hadagen.runtime.reasons import Asked, why_none
from hadagen.tuning_db.bundle import Bundle
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
    launch = replace(LAUNCH, arithmetic=arithmetic, cluster=cluster)
    both = tuple(time for destination in Destination for time in times(us, destination))
    launch = replace(launch, params=params_for(fields.get("problem", PROBLEM)))
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
def test_a_problem_without_such_kernels_is_refused(bundle: Path) -> None:
    write(bundle, TRIALS, "")
    with pytest.raises(DeviceError, match="no kernels of n256-float16-accurate give the same bits in every call on"):
        kernels.find(INVARIANT, SMALL)
    # Where no call has a kernel, PyTorch does the work of all.
    assert kernels.find(INVARIANT._replace(problem=Problem.of(512, "float16")), 1 << 13) is None


QUANTIZING = PROBLEM.with_io(output="mxfp8_32")


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.usefixtures("machine")
def test_where_no_kernel_quantizes_so_the_reason_is_said(bundle: Path) -> None:
    kind = kernels.Kind(0, QUANTIZING, False, True)
    quantizing = [
        trial(n, name, {SMALL: 1.0}, problem=QUANTIZING, errors={"normal": 0.0}) for n, name in ((1, ONE), (2, TWO))
    ]
    named = {t.kernel.digest: t.kernel for t in quantizing if t.kernel}
    write_bundle(bundle, "sm90", portfolio(quantizing), named.__getitem__, {QUANTIZING: TWO})
    assert kernels.find(kind, SMALL).launch.arithmetic == TWO  # type: ignore[attr-defined]
    tables.clear()
    write_bundle(bundle, "sm90", portfolio(quantizing), named.__getitem__, {})
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

    def noting(function: Callable[..., Any], at: int) -> Callable[..., Any]:
        return lambda *arguments: (seen.append(arguments[at].batch_invariant), function(*arguments))[1]

    monkeypatch.setattr(transform_operator, "compute", noting(transform_operator.compute, 1))
    monkeypatch.setattr(transform_operator, "compute_into", noting(transform_operator.compute_into, 2))
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
from hadagen.runtime import transform_operator
seen = []
transform_operator.compute = lambda x, options, inplace: (seen.append(options.batch_invariant), x)[1]
hadagen.hadamard_transform(torch.ones(2))
hadagen.hadamard_transform(torch.ones(4), batch_invariant=False)
print(seen)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env={"HADAGEN_BATCH_INVARIANT": value}, capture_output=True, text=True
    )
    assert done.stdout.strip() == f"[{wanted}, False]", done.stderr
