"""Measuring on a GPU: the environment, the yardstick, a right kernel, wrong kernels and broken ones."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import stand_in_peers
from real_compilers import needs_compiler

from hadagen.compiler.codegen import render
from hadagen.compiler.toolchain import Toolchain
from hadagen.measure import Cell, Choice, DeviceRunner, Variant, all_cells, copy_sources, device_environment
from hadagen.plan.arch import load_arch
from hadagen.plan.knobs import Knobs
from hadagen.plan.space import Space, build_plan
from hadagen.problem.launch import LaunchSpec, Source
from hadagen.problem.problem import DType, Problem, Rows
from hadagen.problem.regimes import Cache, Destination, buffer_bytes
from hadagen.problem.target import model_of
from hadagen.problem.trial import Kernel, Outcome, Trial
from hadagen.truth.reference import INPUT_CLASSES

pytestmark = [pytest.mark.gpu, needs_compiler]

ARCH = load_arch("sm90")
PROBLEM = Problem.of(256, DType.FLOAT16)
LARGE = Cell(1 << 28, Destination.OUT_OF_PLACE, Cache.COLD)
SMALL = Cell(1 << 16, Destination.IN_PLACE, Cache.HOT)

# One element a thread. Each kernel below is this one with another body.
SPEC = LaunchSpec(threads=256, cluster=1, shared_bytes=0, tile_elements=256, persistent=False)
KERNEL = """#include "hadagen.cuh"
namespace hadagen {{
extern "C" __global__ void {entry}(const void* x, void* y, i64 elements, u32 scale_word) {{
    const u16* in = static_cast<const u16*>(x);
    u16* out = static_cast<u16*>(y);
    const i64 i = block_index() * 256 + thread_index();
    if (i >= elements) return;
    {body}
}}
}}
"""
BODIES = {
    "identity": "out[i] = in[i];",
    "beyond_the_end": "out[i] = in[i]; if (i == elements - 1) out[elements] = 0;",
    "illegal_address": "*reinterpret_cast<u16*>(2 * i) = in[i];",
    # Ten seconds: far more than a variant gets in these tests, and yet an end.
    "hang": "u64 now, end; asm volatile(\"mov.u64 %0, %%globaltimer;\" : \"=l\"(end)); end += 10000000000ull;"
    "do asm volatile(\"mov.u64 %0, %%globaltimer;\" : \"=l\"(now)); while (now < end); out[i] = in[i];",
}  # fmt: skip


def build(*sources: Source) -> list[Kernel]:
    built = list(Toolchain.find().build(sources, ARCH))
    for kernel in built:
        assert isinstance(kernel, Kernel), kernel
    return [kernel for kernel in built if isinstance(kernel, Kernel)]


@dataclass(frozen=True)
class Bench:
    runner: DeviceRunner
    copies: list[Kernel]
    right: Variant

    def trial(self, variant: Variant) -> Trial:
        ((_, trial),) = self.runner.run([variant])
        return trial


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    knobs = Space(PROBLEM, ARCH).seeds()[0]
    plan = build_plan(PROBLEM, knobs, ARCH)
    copies = build(*copy_sources())
    (kernel,) = build(render(plan))
    with DeviceRunner(0, copies, timeout_s=5.0) as runner:
        yield Bench(runner, copies, Variant(PROBLEM, knobs.to_dict(), kernel))


@pytest.fixture
def broken() -> Callable[[str], Variant]:
    def variant(name: str) -> Variant:
        (kernel,) = build(Source(name, KERNEL.format(entry=name, body=BODIES[name]), SPEC))
        return Variant(PROBLEM, {"name": name}, kernel)

    return variant


def test_the_environment_is_that_of_pytorch() -> None:
    import torch

    environment = device_environment(0)
    properties = torch.cuda.get_device_properties(0)
    assert model_of(environment.gpu) == properties.name
    assert environment.compute_capability == f"{properties.major}.{properties.minor}"
    assert environment.sms == properties.multi_processor_count
    assert environment.l2_bytes == properties.L2_cache_size
    assert environment.sm_clock_mhz > 0
    assert environment.cuda


@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("rows", Rows)
def test_kernels_of_every_type_are_timed_beside_a_copy_of_the_same_bytes(
    bench: Bench, dtype: DType, rows: Rows
) -> None:
    problem = Problem.of(1024, dtype, rows=rows)
    knobs = Space(problem, ARCH).seeds()[0]
    (kernel,) = build(render(build_plan(problem, knobs, ARCH)))
    trial = bench.trial(Variant(problem, knobs.to_dict(), kernel))
    assert (trial.outcome, trial.detail, set(trial.errors)) == (Outcome.OK, "", set(INPUT_CLASSES))
    assert [Cell.of(t) for t in trial.timings] == list(all_cells(problem, trial.environment.l2_bytes))
    for timing in trial.timings:
        assert 0 < timing.us_low <= timing.us <= timing.us_high
        assert 0.02 < timing.fraction_of_copy < 2.0
    largest = max(trial.timings, key=lambda timing: timing.copy_us)
    assert 2e3 < buffer_bytes(problem, largest.elements) * 2 / largest.copy_us / 1e3 < 1e4  # GB/s, read and written


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16])
@pytest.mark.parametrize("rows", Rows)
def test_blocks_that_load_whole_rows_are_right_and_wait_for_each_other(bench: Bench, dtype: DType, rows: Rows) -> None:
    """In place too, launch after launch: clusters of each size, with an exchange inside of blocks and without."""
    problem = Problem.of(8192, dtype, rows=rows)
    fp32 = Knobs(block_bits="load", mma_carrier="split", butterfly_carrier="fp32")
    shapes = ((8, 2, 2), (4, 2, 4), (2, 2, 8), (4, 1, 8))
    some = [
        replace(fp32, chunks=chunks, warps=warps, cluster=cluster, exchange_carrier="fp32" if warps > 1 else "packed")
        for chunks, warps, cluster in shapes
    ]
    kernels = build(*map(render, [build_plan(problem, knobs, ARCH) for knobs in some]))
    for knobs, kernel in zip(some, kernels, strict=True):
        trial = bench.trial(Variant(problem, knobs.to_dict(), kernel))  # which may be given up as too slow
        assert trial.outcome is Outcome.OK, (knobs, trial.detail)


def test_cold_is_no_faster_than_hot(bench: Bench) -> None:
    timings = bench.trial(bench.right).timings
    copy_us = {Cell.of(t): t.copy_us for t in timings}
    for hot in [Cell(1 << 22, destination, Cache.HOT) for destination in Destination]:
        assert copy_us[hot] < copy_us[hot._replace(cache=Cache.COLD)]


def test_the_yardstick_keeps_up_with_torch(bench: Bench) -> None:
    import torch

    copy_us = {Cell.of(t): t.copy_us for t in bench.trial(bench.right).timings}
    x = torch.randn(LARGE.elements, device="cuda", dtype=torch.float16)
    y = torch.empty_like(x)
    times = []
    for _ in range(6):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        y.copy_(x)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000.0)
    assert copy_us[LARGE] < min(times[1:]) / 0.8


@pytest.mark.parametrize(
    ("name", "outcome", "says"),
    [
        ("identity", Outcome.WRONG_ANSWER, "relative error"),
        ("beyond_the_end", Outcome.WRONG_ANSWER, "outside"),
        ("illegal_address", Outcome.LAUNCH_FAILED, "illegal memory access"),
        ("hang", Outcome.TIMEOUT, "the device finished nothing"),
    ],
)
def test_a_broken_kernel_ends_nothing(
    bench: Bench, broken: Callable[[str], Variant], name: str, outcome: Outcome, says: str
) -> None:
    answers = [trial for _, trial in bench.runner.run([broken(name), bench.right])]
    assert [trial.outcome for trial in answers] == [outcome, Outcome.OK]
    assert says in answers[0].detail
    assert answers[0].timings == ()


def test_a_hopeless_kernel_is_given_up(bench: Bench) -> None:
    with DeviceRunner(0, bench.copies, give_up=0.1) as impatient:  # even the best is ten times too slow
        first, second = [trial for _, trial in impatient.run([bench.right, bench.right])]
    assert len(first.timings) > len(second.timings) == 3
    assert second.outcome is Outcome.OK
    assert second.detail


def test_a_race_against_itself_is_a_draw(bench: Bench) -> None:
    for us_a, us_b in bench.runner.race(bench.right, bench.right, [SMALL, LARGE]):
        assert us_a == pytest.approx(us_b, rel=0.1)


def test_kernels_and_other_libraries_side_by_side(
    bench: Bench, broken: Callable[[str], Variant], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in_peers.install(tmp_path, monkeypatch)
    cells = [
        SMALL,
        Cell(1 << 20, Destination.OUT_OF_PLACE, Cache.COLD),
        Cell(1 << 16, Destination.IN_PLACE, Cache.COLD),
    ]
    # A worker of its own: that of the other tests has looked for libraries already.
    with DeviceRunner(0, bench.copies) as runner:
        right, wrong = bench.right, broken("identity")
        comparison = runner.compare([right, wrong], [(cell, (0, 1)) for cell in cells])
        again = runner.compare([right], [(cell, (0,)) for cell in cells])  # in memory that the first has used
    assert [answer.outcome for answer in comparison.answers] == [Outcome.OK, Outcome.WRONG_ANSWER]
    names = {"fast_hadamard_transform", "HadaCore"}
    assert comparison.peer_errors.keys() == names
    for name in names:
        assert 0 < comparison.peer_errors[name]["normal"] <= PROBLEM.error_bound
    timings = {Cell.of(t): t for t in bench.trial(right).timings}
    for cell, times, later in zip(cells, comparison.times, again.times, strict=True):
        assert times.kernels.keys() == {0}
        assert times.peers.keys() == later.peers.keys() == names
        # No closer, for others may use the GPU too.
        assert 0.1 < times.kernels[0] / timings[cell].us < 10
        assert 0.1 < times.copy / timings[cell].copy_us < 10
        assert all(0.1 < later.peers[name] / times.peers[name] < 10 for name in names)


def test_a_kernel_loses_nothing_to_itself(bench: Bench, broken: Callable[[str], Variant]) -> None:
    shares = (
        (Cell(3 * 256 << 8, Destination.IN_PLACE, cache), share) for cache, share in zip(Cache, (0.9, 0.1), strict=True)
    )
    ranking = bench.runner.rank([bench.right, bench.right, broken("identity")], [Choice(0, tuple(shares))])
    assert [answer.outcome for answer in ranking.answers] == [Outcome.OK, Outcome.OK, Outcome.WRONG_ANSWER]
    (result,) = ranking.results
    assert result.best in (0, 1)
    assert result.loss < 0.05
    assert result.chosen_us == pytest.approx(result.best_us, rel=0.1)
