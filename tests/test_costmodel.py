"""The cost model against times measured on an H100, and the laws that any of its times must keep."""

import math
import re
import statistics
from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from spaces import ARCH as SM90
from spaces import seeds_of

from hadagen.compiler import emulator
from hadagen.compiler.emulator import verification_rows
from hadagen.measure import Cell, Variant, all_cells
from hadagen.plan.arch import load_arch
from hadagen.plan.costmodel import MODEL_ERROR, Estimate, copy_us, costs_of
from hadagen.plan.knobs import Knobs, are_known, plan_of
from hadagen.plan.layout import CHUNK_BITS
from hadagen.plan.plan import Plan
from hadagen.plan.space import Space, build_plan
from hadagen.plan.steps.base import Cost
from hadagen.plan.steps.exchanges import Exchange
from hadagen.problem.launch import LaunchSpec, RowShape, Source
from hadagen.problem.operands import verification_operands
from hadagen.problem.problem import ROUNDING_ERROR, DType, Numerics, Problem, Rows
from hadagen.problem.regimes import ELEMENT_BUCKETS, REGIMES, Cache, Destination, element_buckets
from hadagen.problem.trial import Kernel, Outcome, Provenance, Trial
from hadagen.truth.reference import INPUT_CLASSES, input_classes
from hadagen.tuner import estimate
from hadagen.tuner.estimate import EstimateRunner, shortlist
from hadagen.tuner.study import scores
from hadagen.tuning_db.bundle import Bundle, shipped

# Hand-picked float16 kernels on an H100 80GB HBM3, of which none starts early: chunks, warps, blocks per cluster, and
# the time of a launch, as a program took it in which an empty one was 1.02 µs.
MEASURED = """
    numerics      n   elements destination  cache  c  w  b       us
    fast        128      65536 in-place      hot    2  4  1    1.368
    fast        128    8388608 out-of-place  hot    8  2  1    6.103
    fast        128  268435456 out-of-place  cold   1  4  1  357.536
    fast        256       8192 in-place      hot    1  8  1    1.337
    fast        256    8388608 in-place      hot   16  1  1    6.354
    fast        256  268435456 in-place      cold   1  8  1  358.208
    fast       1024       8192 in-place      hot    4  2  1    1.389
    fast       1024    1048576 in-place      hot    4  1  1    1.976
    fast       1024   33554432 in-place      cold   2  2  1   46.640
    fast       4096      65536 in-place      hot    4  4  1    1.607
    fast       4096    8388608 in-place      hot    8  2  1    6.885
    fast       4096  268435456 in-place      cold   4  4  1  360.432
    fast       8192     262144 in-place      hot    8  4  1    2.051
    fast       8192   16777216 in-place      hot    8  4  1   14.484
    fast       8192   33554432 in-place      cold  16  2  1   47.190
    fast      32768     262144 in-place      hot   16  1  8    3.408
    fast      32768    1048576 in-place      hot   16  8  1    4.350
    fast      32768   33554432 in-place      cold  16  8  1   49.147
    accurate    128      65536 in-place      hot    2  4  1    1.527
    accurate    128    8388608 in-place      hot    4  4  1    7.491
    accurate    128  268435456 out-of-place  cold   1 16  1  354.560
    accurate    256      65536 in-place      hot    2  4  1    1.494
    accurate    256    8388608 in-place      hot    4  2  1    7.270
    accurate    256  268435456 in-place      cold   1 16  1  356.688
    accurate   1024      65536 in-place      hot    2  2  1    1.607
    accurate   1024    1048576 in-place      hot    4  1  1    2.276
    accurate   1024  268435456 out-of-place  cold   2  2  1  357.296
    accurate   4096      65536 in-place      hot    4  4  1    1.867
    accurate   4096    1048576 in-place      hot    4  4  1    2.593
    accurate   4096  268435456 in-place      cold   4  4  1  359.424
    accurate   8192      65536 in-place      hot    8  4  1    2.408
    accurate   8192    1048576 in-place      hot    8  4  1    2.795
    accurate   8192  268435456 in-place      cold   8  4  1  360.976
    accurate  32768      65536 in-place      hot   16  8  1    5.112
    accurate  32768    1048576 in-place      hot   16  8  1    5.566
    accurate  32768  268435456 out-of-place  cold  16  8  1  484.688
"""


def estimates_and_times() -> list[tuple[int, float, float]]:
    """n, estimated µs and measured µs of each row."""
    rows = []
    for line in MEASURED.strip().splitlines()[1:]:
        numerics, n, elements, destination, cache, chunks, warps, blocks, us = line.split()
        problem = Problem.of(int(n), DType.FLOAT16, Numerics(numerics))
        wide = problem.io.numerics is Numerics.ACCURATE
        far = wide and problem.n > int(chunks) << CHUNK_BITS
        knobs = Knobs(
            int(chunks),
            int(warps),
            int(blocks),
            low_bits="mma" if problem.bits >= CHUNK_BITS else "mma_shuffle",
            mma_carrier="split" if wide and problem.bits >= CHUNK_BITS else "packed",
            butterfly_carrier="fp32" if wide and problem.bits != CHUNK_BITS else "packed",
            exchange_carrier="fp32" if far else "packed",
            shared_layout="swizzled" if far else "linear",
        )
        # Not by `build_plan`, for some of the fast ones round more often than fast may.
        estimate = Estimate(plan_of(problem, knobs), replace(SM90, model=replace(SM90.model, launch_us=1.02)))
        rows.append((int(n), estimate.us(int(elements), Destination(destination), Cache(cache)), float(us)))
    return rows


def test_estimates_are_near_what_was_measured() -> None:
    errors = [abs(math.log(estimate / us)) for _, estimate, us in estimates_and_times()]
    assert math.exp(statistics.median(errors)) < 1 + MODEL_ERROR
    assert math.exp(max(errors)) < 1.5


def test_estimates_are_near_the_times_of_the_shipped_winners() -> None:
    """Of every fifth of contiguous problems on the GPU that the model is of: in clusters and not, and behind prologues,
    which read twice as much as they write."""
    errors: dict[str, list[float]] = defaultdict(list)
    bundle = Bundle.open(shipped()["sm90"])
    for problem in bundle.problems():
        entries = [
            entry for entry in bundle.entries(problem) if "H100" in entry.gpu and problem.io.rows is Rows.CONTIGUOUS
        ]
        for entry in entries[::5]:
            if not are_known((knobs := Knobs.like(entry.knobs)).to_dict()):
                continue
            estimate = Estimate(build_plan(problem, knobs, SM90), SM90)
            for cache, us in ((Cache.HOT, entry.hot_us), (Cache.COLD, entry.cold_us)):
                if us is not None:
                    error = abs(math.log(estimate.us(entry.elements, entry.destination, cache) / us))
                    kind = "prologue" if problem.prologue else "cluster" if entry.launch.cluster > 1 else "block"
                    errors[kind].append(error)
    for kind, limit, most in (("block", 1.06, 1.4), ("cluster", 1.12, 1.4), ("prologue", 1.25, 1.7)):
        assert len(errors[kind]) > 50
        assert math.exp(statistics.median(errors[kind])) < limit, kind
        assert math.exp(sorted(errors[kind])[len(errors[kind]) * 9 // 10]) < most, kind


@pytest.mark.parametrize("n", [128, 256, 1024, 4096, 8192, 32768])
def test_estimates_order_the_times_of_each_n(n: int) -> None:
    rows = np.array([(estimate, us) for m, estimate, us in estimates_and_times() if m == n])
    ranks = rows.argsort(axis=0).argsort(axis=0)
    assert np.corrcoef(ranks.T)[0, 1] > 0.8


# Of kernels whose blocks load whole rows, accurate, in place, hot: n, type, elements, and the best time on the H100.
WHOLE_ROWS = [
    (16384, DType.BFLOAT16, 1 << 18, 1.97),
    (16384, DType.BFLOAT16, 1 << 20, 2.58),
    (32768, DType.BFLOAT16, 1 << 18, 2.17),
    (32768, DType.BFLOAT16, 1 << 19, 2.44),
    (32768, DType.BFLOAT16, 1 << 20, 3.28),
    (32768, DType.FLOAT16, 1 << 20, 3.62),
]


@pytest.mark.parametrize(("n", "dtype", "elements", "us"), WHOLE_ROWS)
def test_estimates_of_whole_rows_are_near_what_was_measured(n: int, dtype: DType, elements: int, us: float) -> None:
    seeds = [knobs for knobs in seeds_of(Problem.of(n, dtype)) if knobs.block_bits == "load"]
    some = [Estimate(build_plan(Problem.of(n, dtype), knobs, SM90), SM90) for knobs in seeds]
    assert min(each.us(elements, Destination.IN_PLACE, Cache.HOT) for each in some) == pytest.approx(us, rel=0.25)


def test_blocks_that_load_whole_rows_need_registers_and_l2_for_them() -> None:
    knobs = Knobs(chunks=8, warps=4, cluster=4, mma_carrier="split", butterfly_carrier="fp32", exchange_carrier="fp32")
    problem = Problem.of(32768, DType.BFLOAT16)
    exchange, load = (build_plan(problem, replace(knobs, block_bits=how), SM90) for how in ("exchange", "load"))
    assert tuple(plan.footprint.registers(wide=plan.wide) for plan in (exchange, load)) == (24 + 8 * 8, 24 + 4 * 8 * 4)
    large = Cell(1 << 22, Destination.IN_PLACE, Cache.HOT)
    # Four shares come from L2, and one goes there.
    assert Estimate(load, SM90).us(*large) > 5 * large.elements * problem.io.input.bytes / SM90.model.l2_bytes_per_us


def test_l2_reads_a_row_once_for_a_multicast() -> None:
    """Which takes it in faster, too."""
    knobs = Knobs(4, 4, 8, block_bits="load", mma_carrier="split", butterfly_carrier="fp32", exchange_carrier="fp32")
    problem, cell = Problem.of(32768, DType.BFLOAT16), Cell(1 << 20, Destination.IN_PLACE, Cache.HOT)
    each, once = (build_plan(problem, replace(knobs, load=load), SM90) for load in ("plain", "multicast"))
    assert Estimate(each, SM90).us(*cell) > 1.2 * Estimate(once, SM90).us(*cell)
    # A copy in bulk is waited for once, however many shares come.
    assert sum(cost.waits.get("bulk", 0) for cost in costs_of(once)) == 1


def test_float32_is_gathered_vector_by_vector() -> None:
    knobs = Knobs(
        1,
        4,
        4,
        block_bits="load",
        far_bits="lanes",
        low_bits="shuffle",
        butterfly_carrier="fp32",
        exchange_carrier="fp32",
    )
    plan = build_plan(Problem.of(4096, DType.FLOAT32), replace(knobs, load="multicast"), SM90)
    assert plan.footprint.registers(wide=plan.wide) == 24 + 8
    load, gather, *_ = costs_of(plan)
    assert load.shared_bytes == 4 * 2 * 1024  # in and out again
    assert gather.instructions == 4 * 8


def test_what_crosses_blocks_takes_time_for_its_bytes() -> None:
    def chain(chunks: int, warps: int, carrier: str, rounds: int = 1) -> float:
        knobs = Knobs(chunks, warps, 8, mma_carrier="split", butterfly_carrier="fp32", exchange_carrier=carrier)
        knobs = replace(knobs, exchange_rounds=rounds)
        problem = Problem.of(chunks * warps * 2048, DType.FLOAT16, Numerics.FAST)
        (step,) = plan_of(problem, knobs).exchanges[-1:]
        assert step.crosses_blocks
        return Estimate(plan_of(problem, knobs), SM90).us(problem.n, Destination.IN_PLACE, Cache.HOT)

    model = SM90.model
    for chunks, warps in ((4, 2), (4, 4), (8, 2)):
        packed = chunks * warps * 512 / model.cluster_bytes_per_cycle / model.cycles_per_us
        assert chain(chunks, warps, "fp32") - chain(chunks, warps, "packed") > packed / 2
        assert chain(chunks, warps, "fp32", rounds=2) > chain(chunks, warps, "fp32")  # no fewer bytes in all


@pytest.mark.parametrize("n", [2, 256, 32768])
def test_a_plan_is_estimated_at_powers_of_two(n: int) -> None:
    """So that all sizes weigh alike."""
    cells = estimate._cells_by_regime(Problem.of(n, DType.FLOAT16), SM90)
    assert set(cells) == set(REGIMES)
    assert {cell.elements for some in cells.values() for cell in some} == {e for e in ELEMENT_BUCKETS if e >= n}


@st.composite
def plans(draw: st.DrawFn) -> tuple[Problem, Knobs]:
    problem = Problem.of(1 << draw(st.integers(1, 15)), draw(st.sampled_from(DType)), draw(st.sampled_from(Numerics)))
    wanted = {name: draw(st.sampled_from(values)) for name, values in SM90.search.items()}
    return problem, next(Space(problem, SM90).nearest(wanted))


@given(plans(), st.sampled_from(Destination), st.sampled_from(Cache))
def test_more_elements_never_take_less(choice: tuple[Problem, Knobs], destination: Destination, cache: Cache) -> None:
    problem, knobs = choice
    estimate = Estimate(build_plan(problem, knobs, SM90), SM90)
    times = [estimate.us(elements, destination, cache) for elements in ELEMENT_BUCKETS]
    assert all(SM90.model.launch_us - SM90.model.early_us < time < math.inf for time in times)
    assert times == sorted(times)


@given(plans(), st.sampled_from(ELEMENT_BUCKETS), st.sampled_from(Destination))
def test_cold_is_never_faster_than_hot(choice: tuple[Problem, Knobs], elements: int, destination: Destination) -> None:
    problem, knobs = choice
    estimate = Estimate(build_plan(problem, knobs, SM90), SM90)
    assert estimate.us(elements, destination, Cache.HOT) <= estimate.us(elements, destination, Cache.COLD)


@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("rows", Rows)
def test_where_memory_is_the_limit_bytes_make_the_time(dtype: DType, rows: Rows) -> None:
    problem = Problem.of(1024, dtype, rows=rows)
    estimate = Estimate(build_plan(problem, seeds_of(problem)[0], SM90), SM90)
    for cell in all_cells(problem, SM90.model.l2_bytes):
        assert estimate.us(*cell) + SM90.model.early_us >= copy_us(
            SM90, *[cell.traffic(problem).buffer_bytes] * 2, *cell[1:]
        )
    large = Cell(1 << 27, Destination.OUT_OF_PLACE, Cache.COLD)
    nbytes = (1 << 27) * dtype.bytes * (3 / 4 if rows is Rows.PITCHED else 1)
    assert large.traffic(problem).buffer_bytes == nbytes
    assert estimate.us(*large) == pytest.approx(2 * nbytes / SM90.model.dram_bytes_per_us, rel=0.2)


@given(plans(), st.sampled_from(ELEMENT_BUCKETS), st.sampled_from(Destination), st.sampled_from(Cache))
def test_nothing_beats_a_copy_but_by_starting_early(
    choice: tuple[Problem, Knobs], elements: int, destination: Destination, cache: Cache
) -> None:
    problem, knobs = choice
    estimate = Estimate(build_plan(problem, knobs, SM90), SM90)
    late = Estimate(replace(build_plan(problem, knobs, SM90), starts_early=False), SM90)
    us = late.us(elements, destination, cache)
    assert us >= copy_us(SM90, 2 * elements, 2 * elements, destination, cache)
    assert us - estimate.us(elements, destination, cache) == pytest.approx(SM90.model.early_us)


def test_prefetches_pay_where_input_comes_from_memory_in_waves() -> None:
    problem = Problem.of(1 << 15, DType.FLOAT16)
    plain = Knobs(16, 8, mma_carrier="split", butterfly_carrier="fp32", exchange_carrier="fp32")
    us = {
        (ahead, cache): Estimate(build_plan(problem, replace(plain, ahead=ahead), SM90), SM90).us(
            1 << 23, Destination.IN_PLACE, cache
        )
        for ahead in (0, 8)
        for cache in Cache
    }
    assert us[8, Cache.COLD] < us[0, Cache.COLD]
    assert us[8, Cache.HOT] > us[0, Cache.HOT]


def test_a_second_tile_under_way_pays_where_each_is_waited_for() -> None:
    """Out of memory, wave by wave, though fewer blocks fit."""
    problem, cell = Problem.of(4096, DType.FLOAT16), Cell(1 << 24, Destination.IN_PLACE, Cache.COLD)
    knobs = Knobs(4, 4, mma_carrier="split", butterfly_carrier="fp32", exchange_carrier="fp32", grid="persistent")
    one, two = (build_plan(problem, replace(knobs, load="cp_async", stages=stages), SM90) for stages in (1, 2))
    assert Estimate(two, SM90).us(*cell) < Estimate(one, SM90).us(*cell)


def test_bank_conflicts_cost_a_wide_exchange_its_time_in_shared_memory_again() -> None:
    def shared_bytes(layout: str, rounds: int = 1) -> float:
        knobs = Knobs(4, 4, mma_carrier="split", butterfly_carrier="fp32", exchange_carrier="fp32")
        knobs = replace(knobs, shared_layout=layout, exchange_rounds=rounds)
        plan = build_plan(Problem.of(4096, DType.FLOAT16), knobs, SM90)
        return sum(cost.shared_bytes for cost in costs_of(plan))

    assert shared_bytes("linear") == 2 * shared_bytes("swizzled") == 2 * shared_bytes("padded")
    assert shared_bytes("linear", rounds=2) == shared_bytes("swizzled")  # where none are met


def test_occupancy_is_the_calculation_of_the_programming_guide() -> None:
    blocks = {
        (128, 0, 32): 16,  # threads: 2048 / 128
        (128, 0, 57): 8,  # registers: 65536 / (64 · 128)
        (128, 0, 49): 9,  # in eights: 65536 / (56 · 128)
        (128, 65536, 32): 3,  # shared memory: 233472 / (65536 + 1024)
        (128, 32896, 32): 6,  # 7, were nothing reserved: 233472 / (32896 + 1024)
        (32, 0, 32): 32,  # for want of blocks, not of threads: 2048 / 32
    }
    assert {asked: SM90.limits.resident_blocks(*asked) for asked in blocks} == blocks
    assert load_arch("sm75").limits.resident_blocks(32, 0, 32) == 16  # which reserves no shared memory


@pytest.mark.parametrize(("dtype", "more_mma"), [(DType.BFLOAT16, 0), (DType.FLOAT32, 2 * 4 * (4 - 3))])
def test_tf32_saves_the_instructions_that_take_values_apart(dtype: DType, more_mma: int) -> None:
    """Each costs as much of the tensor core as two bfloat16: of bfloat16 one for two, of float32 four for three, in
    both mma. So where instructions are the limit it is faster."""
    knobs = Knobs(chunks=4, warps=4)
    plans = [build_plan(Problem.of(256, dtype), replace(knobs, mma_carrier=c), SM90) for c in ("split", "tf32")]
    split, tf32 = (costs_of(plan) for plan in plans)
    assert sum(cost.mma for cost in tf32) - sum(cost.mma for cost in split) == 2 * more_mma
    assert sum(cost.instructions for cost in tf32) < sum(cost.instructions for cost in split)
    times = [Estimate(plan, SM90).us(1 << 22, Destination.IN_PLACE, Cache.HOT) for plan in plans]
    assert times[1] < times[0]


def test_an_mma_of_far_bits_saves_instructions_and_one_tf32_the_most() -> None:
    """Against shuffles. A turned exchange moves no more than another."""
    knobs = Knobs(2, 16, far_bits="lanes", butterfly_carrier="fp32", exchange_carrier="fp32", shared_layout="swizzled")

    def costs(far_lanes: str, carrier: str) -> tuple[Cost, list[Cost]]:
        """Of the exchange, and of the steps after it."""
        chosen = replace(knobs, far_lanes=far_lanes, mma_carrier=carrier)
        plan = build_plan(Problem.of(8192, DType.BFLOAT16), chosen, SM90)
        at = next(i for i, step in enumerate(plan.steps) if isinstance(step, Exchange))
        found = costs_of(plan)
        return found[at], found[at + 1 :]

    shuffles, (shuffled, *_) = costs("shuffle", "tf32"), costs("shuffle", "split")
    (halves_crossed, halves), (turned, one_tf32) = costs("mma", "split"), costs("mma", "tf32")
    assert turned == halves_crossed == shuffled
    few, more, most = (sum(cost.instructions for cost in after) for after in (one_tf32, halves, shuffles[1]))
    assert few < more < most
    assert one_tf32[0].mma == halves[0].mma > 0
    assert one_tf32[0].waits["mma"] < halves[0].waits["mma"]  # by what transposes them


def test_a_swap_moves_half_of_what_a_shuffle_does() -> None:
    knobs = Knobs(low_bits="shuffle", butterfly_carrier="fp32")
    plans = [build_plan(Problem.of(256, DType.FLOAT32), replace(knobs, shuffles=s), SM90) for s in ("whole", "half")]
    whole, half = (sum(cost.shared_bytes for cost in costs_of(plan)) for plan in plans)
    assert whole == 2 * half == 5 * 8 * 32 * 4  # five bits, eight values of each of 32 threads


@pytest.mark.parametrize("ahead", [0, 8])
def test_shares_of_other_blocks_are_loaded_and_summed_too(ahead: int) -> None:
    """By two blocks; a prefetch between load and mma costs nothing."""
    knobs = Knobs(
        8, 8, 2, block_bits="load", mma_carrier="split", butterfly_carrier="fp32", exchange_carrier="fp32", ahead=ahead
    )
    plan = build_plan(Problem.of(1 << 15, DType.FLOAT16), knobs, SM90)
    load, *others = costs_of(plan)
    assert len(others) == len(plan.steps) - 1
    alone = replace(knobs, cluster=1, block_bits="exchange", ahead=0)
    loaded, summed, *_ = costs_of(build_plan(Problem.of(1 << 14, DType.FLOAT16), alone, SM90))
    assert load.instructions == 2 * loaded.instructions > 0
    first = next(cost for cost in others if cost.mma)
    assert (first.mma, first.instructions) == (2 * summed.mma, 2 * summed.instructions)


def test_fewer_registers_let_more_blocks_wait_for_memory_together() -> None:
    knobs = Knobs(chunks=4, warps=4, mma_carrier="split", butterfly_carrier="fp32")
    plan = build_plan(Problem.of(4096, DType.FLOAT16, Numerics.FAST), knobs, SM90)
    times = [Estimate(plan, SM90, registers).us(1 << 24, Destination.IN_PLACE, Cache.HOT) for registers in (32, 255)]
    assert times[0] < times[1]


# ---- ranking and running without a device --------------------------------------------------------------------------


def test_what_the_cost_model_is_blind_to_keeps_its_first_value() -> None:
    knobs = Knobs(4, 4, 4, mma_carrier="split", butterfly_carrier="fp32", exchange_carrier="fp32")
    problem, cell = Problem.of(16384, DType.FLOAT16), (1 << 20, Destination.IN_PLACE, Cache.HOT)
    seen = estimate._seen(Space(problem, SM90)).arch.search
    for name, value in (("trigger", "store"), ("min_blocks", 2)):
        plans = [build_plan(problem, each, SM90) for each in (knobs, replace(knobs, **{name: value}))]
        assert len({Estimate(plan, SM90).us(*cell) for plan in plans}) == 1
        assert value not in seen[name]


def test_how_far_ahead_a_prefetch_is_makes_no_difference_to_the_cost_model() -> None:
    problem, cell = Problem.of(16384, DType.FLOAT16), (1 << 26, Destination.IN_PLACE, Cache.COLD)
    knobs = Knobs(8, 8, mma_carrier="split", butterfly_carrier="fp32", exchange_carrier="fp32")
    none, *some = (Estimate(build_plan(problem, replace(knobs, ahead=mib), SM90), SM90) for mib in (0, 8, 16))
    assert len({estimate.us(*cell) for estimate in some} - {none.us(*cell)}) == 1
    assert estimate._seen(Space(problem, SM90)).arch.search["ahead"] == (0, 8)


def test_the_shortlist_begins_with_the_best_of_each_regime() -> None:
    problem = Problem.of(2048, DType.BFLOAT16, Numerics.ACCURATE)
    listed = shortlist(Space(problem, SM90), 6)
    assert len(set(listed)) == 6
    few = Space(problem, replace(SM90, search={**SM90.search, "cluster": (1,), "load": ("plain",), "stages": (1,)}))
    for cells in estimate._cells_by_regime(problem, SM90).values():

        def total(knobs: Knobs, cells: list[estimate.Cell] = cells) -> float:
            times = Estimate(build_plan(problem, knobs, SM90), SM90)
            return math.fsum(math.log(times.us(*cell)) for cell in cells)

        assert min(map(total, listed[:3])) <= min(map(total, few.legal[::29])) + 1e-9


def _kernel(registers: int) -> Kernel:
    launch = LaunchSpec(32, 1, 0, 256, False)
    return Kernel("digest", "kernel", "sm90", "", b"cubin", b"", launch, registers, 0, "13.0")


def _run(problem: Problem, *knobs: Knobs, registers: int = 40) -> list[Trial]:
    variants = [Variant(problem, k.to_dict(), _kernel(registers)) for k in knobs]
    return [trial for _, trial in EstimateRunner(SM90).run(variants)]


@pytest.mark.parametrize(
    "problem", [Problem.of(512, DType.FLOAT16), Problem.of(1792, DType.BFLOAT16, Numerics.FAST, order=28)]
)
def test_an_estimate_is_verified_and_says_that_it_is_one(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    matrices: list[Any] = []

    def verify(*arguments: Any, operands: Any = None, **others: Any) -> dict[str, float]:
        matrices.append(operands and operands.get("matrix"))
        return emulator.verify(*arguments, operands=operands, **others)

    monkeypatch.setattr(estimate, "verify", verify)
    knobs = shortlist(Space(problem, SM90), 2)
    for trial, chosen in zip(_run(problem, *knobs), knobs, strict=True):
        assert (trial.outcome, trial.provenance) == (Outcome.OK, Provenance.ESTIMATED)
        assert (trial.environment.gpu, trial.knobs) == ("", chosen.to_dict())
        assert set(trial.errors) == set(input_classes(problem, 1))
        assert 0 < max(trial.errors.values()) <= problem.error_bound
        assert {timing.elements for timing in trial.timings} == set(element_buckets(problem))
        times = Estimate(build_plan(problem, chosen, SM90), SM90, registers=40)
        assert all(t.us == times.us(t.elements, t.destination, t.cache) for t in trial.timings)
        assert all(0 < score < 2 for score in scores(trial))
    plain = verification_operands(problem).get("matrix")
    turned = [each for each in matrices if each is not None and plain is not None and (each == plain.T).all()]
    assert bool(turned) == (problem.order > 1)


def test_a_kernel_is_verified_with_what_its_problem_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the second launch, which is in place only where the result may replace x."""
    keys = {
        "n128-bfloat16-accurate-pitched": True,
        "n128-after-silu_mul-bfloat16-accurate": False,
        "n128-after-silu_mul_interleaved-bfloat16-to-mxfp4_32-accurate": False,
        "n96-k12-bfloat16-to-fp8_head-accurate": False,
    }
    launches: list[bool] = []

    def verify(*arguments: Any, in_place: bool = False, **others: Any) -> dict[str, float]:
        launches.append(in_place)
        return emulator.verify(*arguments, in_place=in_place, **others)

    monkeypatch.setattr(estimate, "verify", verify)
    monkeypatch.setattr(estimate, "ELEMENTS", 1 << 12)
    variants = [
        Variant(problem, Space(problem, SM90).seeds()[0].to_dict(), _kernel(40)) for problem in map(Problem.parse, keys)
    ]
    found = {variant.problem.key: trial for variant, trial in EstimateRunner(SM90).run(variants)}
    assert {key: (trial.outcome, trial.detail) for key, trial in found.items()} == dict.fromkeys(keys, (Outcome.OK, ""))
    assert launches[::2] == [False] * len(keys)
    assert dict(zip(keys, launches[1::2], strict=True)) == keys


@pytest.mark.parametrize(
    ("problem", "knobs"),
    [
        (Problem.of(256, DType.BFLOAT16, Numerics.FAST), Knobs()),
        (
            Problem.of(1024, DType.FLOAT16, Numerics.FAST),
            Knobs(chunks=4, warps=2, accumulator="packed", butterfly_carrier="fp32"),
        ),
        (
            Problem.of(8, DType.BFLOAT16, Numerics.FAST, rows="pitched"),
            Knobs(low_bits="shuffle", butterfly_carrier="fp32"),
        ),
        (
            Problem.of(2048, DType.BFLOAT16, Numerics.FAST, rows="pitched"),
            Knobs(chunks=2, warps=4, far_bits="lanes", far_lanes="mma_two"),
        ),
    ],
    ids=str,
)
def test_what_rounds_as_often_as_it_may_is_right(problem: Problem, knobs: Knobs) -> None:
    (trial,) = _run(problem, knobs)
    assert trial.outcome is Outcome.OK, trial.detail
    assert max(trial.errors.values()) > 0.95 * problem.error_bound


def test_an_estimate_counts_the_registers_of_the_kernel() -> None:
    """Which the compiler knows, and a plan does not."""
    problem = Problem.of(512, DType.FLOAT16, Numerics.ACCURATE)
    (knobs,) = shortlist(Space(problem, SM90), 1)
    (few,), (many,) = (_run(problem, knobs, registers=registers) for registers in (40, 240))
    assert many.timings != few.timings


@pytest.mark.parametrize("rows", Rows)
def test_what_an_estimate_verifies(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many rows as verification asks for, so that the last tile is ragged; pitched ones at odd addresses too."""
    asked: list[tuple[int, RowShape | None]] = []

    def verify(problem: Problem, source: Source, rows: int, **how: Any) -> dict[str, float]:
        asked.append((rows, how.get("shape")))
        return dict.fromkeys(INPUT_CLASSES, 0.0)

    monkeypatch.setattr(estimate, "verify", verify)
    problem = Problem.of(2048, DType.FLOAT16, rows=rows)
    knobs = [seed for seed in seeds_of(problem) if seed.grid == "persistent"][:4]
    _run(problem, *knobs)
    plans = [build_plan(problem, seed, SM90) for seed in knobs]
    wanted = [verification_rows(problem, plan.launch, estimate.ELEMENTS) for plan in plans]
    assert [rows for rows, _ in asked] == [rows for rows in wanted for _ in range(2)]
    odd = [shape.x_pitch % 2 for _, shape in asked if shape]
    assert odd == ([1] * len(plans) if problem.parent else [])


def test_the_longest_rows_are_verified_with_every_class_of_input() -> None:
    problem = Problem.of(32768, DType.FLOAT16, Numerics.ACCURATE)
    (trial,) = _run(problem, shortlist(Space(problem, SM90), 1)[0])
    assert trial.errors["large"] > 0.9 * ROUNDING_ERROR[DType.FLOAT16]


def test_a_wrong_kernel_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    render = estimate.render

    def with_another_scale(plan: Plan) -> Source:
        source = render(plan)
        assert "*= scale" in source.text
        return replace(source, text=source.text.replace("*= scale", "*= 1.5f * scale"))

    monkeypatch.setattr(estimate, "render", with_another_scale)
    knobs = Knobs(low_bits="shuffle", butterfly_carrier="fp32")
    (trial,) = _run(Problem.of(64, DType.FLOAT16, Numerics.FAST), knobs)
    assert trial.outcome is Outcome.WRONG_ANSWER
    assert trial.timings == ()
    assert "relative error" in trial.detail


def test_an_estimate_just_above_the_bound_reads_so(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem.of(64, DType.FLOAT16, Numerics.FAST)
    monkeypatch.setattr(estimate, "_verify", lambda *_: {"uneven": problem.error_bound * (1 + 1e-6)})
    (trial,) = _run(problem, Knobs(low_bits="shuffle", butterfly_carrier="fp32"))
    found, bound = re.findall(r"[0-9.]+e-[0-9]+", trial.detail)
    assert float(found) > float(bound)
    assert len(found) == len(bound)


def test_a_source_that_the_host_compiler_refuses_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    render = estimate.render

    def broken_with_trigger(plan: Plan) -> Source:
        source = render(plan)
        return replace(source, text=source.text.replace("trigger_dependents", "tigger_dependents"))

    monkeypatch.setattr(estimate, "render", broken_with_trigger)
    problem = Problem.of(64, DType.FLOAT16, Numerics.FAST)
    good_knobs = Knobs(low_bits="mma_shuffle", butterfly_carrier="fp32")
    good, bad = _run(problem, good_knobs, replace(good_knobs, trigger="store"))
    assert good.outcome is Outcome.OK
    assert bad.outcome is Outcome.COMPILE_FAILED
    assert "tigger" in bad.detail
