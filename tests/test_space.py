"""The search space: every legal choice is a plan of its own, every illegal one has a reason."""

import csv
import random
import re
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice, pairwise
from math import inf, prod
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spaces import ARCH, draw, legal_in, seeds_of, space_of

from hadagen.errors import UsageError
from hadagen.plan.arch import Arch, NeverFaster, load_arch
from hadagen.plan.knobs import KNOB_NAMES, Knobs
from hadagen.plan.legality import Context
from hadagen.plan.plan import Plan
from hadagen.plan.space import Space, build_plan, rules_for, shape_of
from hadagen.plan.steps.base import FP16, PACKED
from hadagen.plan.steps.conversions import Narrow, Round
from hadagen.plan.steps.transforms import Mma
from hadagen.problem.problem import DType, Numerics, Problem

PROBLEMS = [Problem.of(n, DType.FLOAT16, numerics) for n in (2, 32, 256, 4096, 32768) for numerics in Numerics]
PROBLEMS += [Problem.of(n, DType.FLOAT32) for n in (128, 256, 4096)]
PROBLEMS += [Problem.of(512, DType.BFLOAT16), *(Problem.of(8192, DType.BFLOAT16, numerics) for numerics in Numerics)]
WITH_MATRIX = [Problem.of(3584, DType.FLOAT16, Numerics.FAST, order=28), Problem.of(80, DType.FLOAT16, order=80)]


def check(problem: Problem, knobs: Knobs, why: str = "", arch: Arch = ARCH) -> None:
    """The knobs are refused for this reason, or legal where there is none."""
    with pytest.raises(UsageError, match=re.escape(why)) if why else nullcontext():
        build_plan(problem, knobs, arch)


ROW_TILES = Path(__file__).parents[1] / "docs" / "data" / "row_tiles_h200.csv"


@pytest.mark.parametrize("rows", [16, 512, 4096])
def test_rows_with_one_scale_have_a_fast_tile_without_a_search(rows: int) -> None:
    """At most a tenth slower than the fastest of all tiles that were timed, where its own was."""
    timed: dict[Problem, dict[tuple[str, ...], float]] = defaultdict(dict)
    names = ("chunks", "warps", "load", "grid", "stages")
    for cell in csv.DictReader(ROW_TILES.read_text(encoding="utf-8").splitlines()):
        shape = (cell["tile"], *(cell[name] for name in names))
        times = timed[Problem.parse(cell["problem"])]
        times[shape] = min(times.get(shape, inf), float(cell[f"us_{rows}_rows"]))
    slower = []
    for problem, times in timed.items():
        wanted = Space(problem, ARCH).for_a_row(Knobs(warps=16, load="bulk", ahead=8), rows)
        found = Space(problem, ARCH).closest(wanted)
        assert found is not None
        shape = str(problem.room), *(str(getattr(found, name)) for name in names)
        assert shape[1:] == tuple(str(getattr(wanted, name)) for name in names)
        if shape in times:
            slower.append(times[shape] / min(times.values()))
    assert len(slower) >= len(timed) - 2
    assert max(slower) <= 1.1
    assert geometric_mean(slower) <= 1.02


@pytest.mark.parametrize(
    "key", ["n128-bfloat16-to-fp8_row_4096-accurate", "n14336-k28-float16-to-int8_row_14336-accurate"]
)
def test_other_rows_keep_the_tile_of_the_nearest_problem(key: str) -> None:
    wanted = Knobs(warps=16, load="bulk")
    assert Space(Problem.parse(key), ARCH).for_a_row(wanted, 4096) == wanted


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.key)
def test_no_two_legal_choices_mean_the_same_plan(problem: Problem) -> None:
    legal = space_of(problem).legal
    legal = random.Random(1).sample(legal, min(200, len(legal)))
    assert len({build_plan(problem, knobs, ARCH).digest for knobs in legal}) == len(legal)


def test_what_was_never_faster_is_left_out_with_the_reason_of_the_arch() -> None:
    problem, knobs = Problem.of(256, DType.FLOAT16, Numerics.FAST), Knobs(warps=8, load="bulk")
    slow = NeverFaster({"load": ("bulk", "cp_async"), "warps": (8,)}, "eight warps wait")
    others = tuple(replace(slow, with_matrix=with_matrix) for with_matrix in (False, True))
    build_plan(problem, knobs, replace(ARCH, never_faster=(others[1],)))
    narrow = replace(ARCH, never_faster=others[:1])
    check(problem, knobs, "eight warps wait", narrow)
    build_plan(problem, replace(knobs, warps=4), narrow)
    all_of, fewer = (Space(problem, arch).report() for arch in (replace(ARCH, never_faster=()), narrow))
    assert fewer.reasons["eight warps wait"] > 0
    assert fewer.legal < all_of.legal


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.key)
def test_every_choice_is_legal_or_has_a_reason(problem: Problem) -> None:
    report = space_of(problem).report()
    assert report.total == prod(len(ARCH.search[name]) for name in KNOB_NAMES)
    assert report.legal + sum(report.reasons.values()) == report.total
    assert report.legal > 100


@given(st.sampled_from(PROBLEMS), st.data())
@settings(max_examples=100)
def test_a_random_choice_builds_exactly_if_it_is_legal(problem: Problem, data: st.DataObject) -> None:
    values = {name: data.draw(st.sampled_from(ARCH.search[name]), label=name) for name in KNOB_NAMES}
    knobs = Knobs.from_dict(values)
    if knobs in legal_in(problem):
        build_plan(problem, knobs, ARCH)
    else:
        with pytest.raises(UsageError, match=problem.key):
            build_plan(problem, knobs, ARCH)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.key)
@given(st.data())
@settings(max_examples=8)
def test_nearest_begins_with_what_is_wanted_if_that_is_legal(problem: Problem, data: st.DataObject) -> None:
    space = space_of(problem)
    wanted = space.legal[data.draw(st.integers(0, len(space.legal) - 1))]
    assert next(space.nearest(wanted.to_dict())) == wanted
    anything = {name: data.draw(st.sampled_from(ARCH.search[name]), label=name) for name in KNOB_NAMES}
    assert legal_in(problem).issuperset(islice(space.nearest(anything), 20))


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.key)
@given(st.data())
@settings(max_examples=4)
def test_neighbors_are_legal_and_none_is_left_out(problem: Problem, data: st.DataObject) -> None:
    legal = space_of(problem).legal
    knobs = legal[data.draw(st.integers(0, len(legal) - 1))]
    near = list(space_of(problem).neighbors(knobs))
    assert knobs not in near
    assert legal_in(problem).issuperset(near)
    values = [getattr(knobs, name) for name in KNOB_NAMES]
    one_changed = (
        each for each in legal if sum(getattr(each, n) != v for n, v in zip(KNOB_NAMES, values, strict=True)) == 1
    )
    assert set(near).issuperset(one_changed)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.key)
def test_seeds_are_legal_and_of_every_shape(problem: Problem) -> None:
    seeds = seeds_of(problem)
    assert legal_in(problem).issuperset(seeds)
    assert len(set(seeds)) == len(seeds)
    assert {*map(shape_of, seeds)} == {*map(shape_of, legal_in(problem))}


@pytest.mark.parametrize(("n", "chunks", "clusters"), [(2, 8, 1), (256, 8, 1), (4096, 16, 5), (32768, 128, 5)])
def test_seeds_begin_with_tiles_of_a_row_in_clusters_of_each_size(n: int, chunks: int, clusters: int) -> None:
    """Or of eight chunks, with about as many of them as warps."""
    seeds = seeds_of(Problem.of(n, DType.FLOAT16, Numerics.FAST))
    shapes = list(dict.fromkeys(map(shape_of, seeds)))[:clusters]
    assert [cluster for _, _, cluster in shapes] == [1 << k for k in range(clusters)]
    assert {prod(shape) for shape in shapes} == {chunks}
    assert all(warps <= chunks <= 2 * warps for chunks, warps, _ in shapes)


def test_seeds_have_the_next_tile_under_way() -> None:
    """In two buffers where there is room, in one where not, and in registers where nothing can be staged."""
    for problem, load, stages in (
        (Problem.of(4096, DType.FLOAT16), "cp_async", 2),
        (Problem.of(32768, DType.FLOAT32), "bulk", 1),
        (Problem.of(4, DType.FLOAT16), "plain", 2),
    ):
        ahead = [knobs for knobs in seeds_of(problem) if knobs.grid == "persistent"]
        assert (ahead[0].load, ahead[0].stages) == (load, stages)
    few = replace(ARCH, search={**ARCH.search, "load": ("plain",)})
    problem = Problem.of(4096, DType.FLOAT16)
    assert len(Space(problem, few).seeds()) > 20


@pytest.mark.parametrize("n", [128, 256, 4096, 32768])
def test_seeds_of_float32_begin_with_mma_and_with_shuffles(n: int) -> None:
    begin = {knobs.low_bits for knobs in seeds_of(Problem.of(n, DType.FLOAT32))[:4]}
    assert begin == ({"mma", "shuffle"} if n >= 256 else {"shuffle"})


@pytest.mark.parametrize(
    ("n", "knobs", "why"),
    [
        (128, Knobs(mma_carrier="split"), "eight bits, more than the row has (low_bits must be shuffle)"),
        (128, Knobs(low_bits="mma_shuffle"), "the transpose after one mma moves only 16-bit values"),
        (256, Knobs(low_bits="mma_shuffle"), "the transpose after one mma moves only 16-bit values"),
        (256, Knobs(), "may not round between two mma (mma_carrier must be split or tf32)"),
        (128, Knobs(mma_carrier="tf32", low_bits="shuffle"), "no value passes from one mma to another"),
        (256, Knobs(mma_carrier="tf32", accumulator="packed"), "no mma leaves packed values"),
        (256, Knobs(mma_carrier="split", accumulator="packed"), "no mma leaves packed values"),
        (256, Knobs(mma_carrier="split", butterfly_carrier="fp32"), "no butterfly has a carrier"),
        (512, Knobs(mma_carrier="split", chunks=2), "may not round between butterflies"),
    ],
)
def test_float32_goes_through_two_mma_or_none(n: int, knobs: Knobs, why: str) -> None:
    check(Problem.of(n, DType.FLOAT32), knobs, why)


WHOLE_ROWS = Knobs(4, 4, 2, block_bits="load", mma_carrier="split", butterfly_carrier="fp32", exchange_carrier="fp32")


@pytest.mark.parametrize(
    ("numerics", "change", "why"),
    [
        (Numerics.ACCURATE, {"cluster": 1, "warps": 8}, "no other blocks whose share to load"),
        (Numerics.ACCURATE, {"chunks": 2, "warps": 1, "cluster": 16}, "more than 8 blocks would each load the whole"),
        (
            Numerics.ACCURATE,
            {"low_bits": "shuffle", "mma_carrier": "packed"},
            "only an mma sums 16-bit values over blocks",
        ),
        (
            Numerics.ACCURATE,
            {"load": "bulk"},
            "whole rows take another way (load must be plain or multicast)",
        ),
        (Numerics.ACCURATE, {"load": "multicast"}, ""),
        (Numerics.ACCURATE, {"load": "multicast", "block_bits": "exchange"}, "no block needs the shares of others"),
        (Numerics.ACCURATE, {"grid": "persistent"}, "clusters take one tile each"),
        (Numerics.ACCURATE, {"stages": 2}, "nothing to have under way"),
        (Numerics.ACCURATE, {"chunks": 16, "warps": 1}, "there is no exchange (exchange_carrier must be packed)"),
        (Numerics.ACCURATE, {"far_bits": "lanes"}, "register bits are enough to exchange with"),
        (Numerics.ACCURATE, {"chunks": 2, "warps": 2, "cluster": 8, "min_blocks": 8}, ""),
        (Numerics.FAST, {"mma_carrier": "packed"}, "sums over blocks may outgrow 16 bits"),
        (
            Numerics.FAST,
            {"low_bits": "mma_shuffle", "mma_carrier": "packed", "accumulator": "packed"},
            "outgrow 16 bits",
        ),
        (Numerics.FAST, {"low_bits": "mma_shuffle", "mma_carrier": "packed"}, ""),
    ],
)
def test_blocks_load_whole_rows_where_they_can_sum_them(numerics: Numerics, change: dict[str, Any], why: str) -> None:
    problem, knobs = Problem.of(8192, DType.FLOAT16, numerics), replace(WHOLE_ROWS, **change)
    if not why:
        assert build_plan(problem, knobs, ARCH).shares_loaded == knobs.cluster
        return
    check(problem, knobs, why)


def test_a_whole_row_and_the_exchange_in_its_place_fit_shared_memory() -> None:
    """A row of 64 KiB, in whose place 64 KiB are exchanged, so that an SM holds two; and one of 128 KiB."""
    halves = replace(WHOLE_ROWS, warps=8, chunks=8, load="multicast", min_blocks=2)
    assert build_plan(Problem.of(32768, DType.FLOAT16), halves, ARCH).footprint.shared_bytes == 128 + 65536
    float32 = replace(WHOLE_ROWS, cluster=8, load="multicast", low_bits="shuffle", mma_carrier="packed")
    assert build_plan(Problem.of(32768, DType.FLOAT32), float32, ARCH).footprint.shared_bytes == 128 + 131072
    check(Problem.of(32768, DType.FLOAT32), replace(float32, min_blocks=2), "bytes of shared memory per SM")


def test_float32_for_an_mma_and_short_rows_are_not_loaded_whole() -> None:
    check(Problem.of(8192, DType.FLOAT32), WHOLE_ROWS, "the mma of fp32 values does not sum over blocks")
    loading = {n: {k.block_bits for k in space_of(Problem.of(n, DType.FLOAT16)).legal} for n in (256, 512)}
    assert loading == {256: {"exchange"}, 512: {"exchange", "load"}}


FAR_MMA = Knobs(
    2,
    16,
    far_bits="lanes",
    far_lanes="mma",
    mma_carrier="tf32",
    butterfly_carrier="fp32",
    exchange_carrier="fp32",
)


@pytest.mark.parametrize(
    ("dtype", "change", "why"),
    [
        (DType.BFLOAT16, {}, ""),
        (DType.BFLOAT16, {"chunks": 4, "warps": 8}, ""),
        (DType.BFLOAT16, {"chunks": 4, "warps": 8, "far_bits": "registers"}, "no bit comes to lanes after an mma"),
        (DType.BFLOAT16, {"low_bits": "shuffle", "mma_carrier": "packed"}, "no bit comes to lanes after an mma"),
        (DType.BFLOAT16, {"chunks": 1}, "a bit in lanes and one in registers"),
        (DType.BFLOAT16, {"chunks": 8, "warps": 4}, "fewer than three bits come to lanes"),
        (DType.BFLOAT16, {"chunks": 4, "warps": 4, "cluster": 2}, "fewer than three bits come to lanes"),
        (DType.BFLOAT16, {"chunks": 4, "warps": 1, "cluster": 4, "far_lanes": "mma_two"}, "a bit in lanes and one"),
        (DType.BFLOAT16, {"chunks": 8, "warps": 2, "far_lanes": "mma_two"}, ""),
        (DType.BFLOAT16, {"chunks": 8, "warps": 4, "far_lanes": "mma_two"}, ""),
        (DType.BFLOAT16, {"chunks": 2, "warps": 8, "far_lanes": "mma_two"}, ""),
        (DType.BFLOAT16, {"chunks": 2, "warps": 16, "far_lanes": "mma_two"}, "more than two lane bits"),
        (DType.BFLOAT16, {"chunks": 1, "far_lanes": "shuffle"}, ""),
        (DType.BFLOAT16, {"chunks": 8, "warps": 8, "far_lanes": "shuffle"}, "register bits are enough"),
        (DType.BFLOAT16, {"exchange_rounds": 2}, "values that are turned on their way cross all at once"),
        (DType.BFLOAT16, {"exchange_rounds": 2, "mma_carrier": "split"}, ""),
        (DType.BFLOAT16, {"exchange_rounds": 2, "far_lanes": "shuffle"}, ""),
        (DType.FLOAT32, {}, "what the scale has made small loses bits"),
        (DType.FLOAT32, {"mma_carrier": "split"}, "what the scale has made small loses bits"),
        (DType.FLOAT32, {"far_lanes": "shuffle"}, ""),
        (DType.FLOAT16, {}, "no more bits than a float16"),
    ],
)
def test_far_bits_go_through_an_mma_where_enough_come_to_lanes(dtype: DType, change: dict[str, Any], why: str) -> None:
    knobs = replace(FAR_MMA, **change)
    problem = Problem.of(256 * knobs.chunks * knobs.warps * knobs.cluster, dtype)
    check(problem, knobs, why)


SINGLE = {"low_bits": "shuffle", "mma_carrier": "packed"}


@pytest.mark.parametrize(
    ("n", "dtype", "change", "why"),
    [
        (4, DType.FLOAT32, SINGLE | {"exchange_carrier": "packed"}, "no bit is transformed by a shuffle"),
        (8, DType.FLOAT32, SINGLE | {"exchange_carrier": "packed"}, ""),
        (4096, DType.FLOAT32, SINGLE | {"chunks": 4, "warps": 4}, ""),
        (4096, DType.FLOAT32, {"chunks": 4, "warps": 4}, "no bit is transformed by a shuffle"),
        (4096, DType.FLOAT32, {"chunks": 2, "warps": 8, "far_bits": "lanes"}, ""),
        (4096, DType.FLOAT16, {"chunks": 2, "warps": 8, "far_bits": "lanes"}, "only float32 has a register bit"),
    ],
)
def test_lane_bits_of_float32_are_swapped_where_there_are_shuffles(
    n: int, dtype: DType, change: dict[str, Any], why: str
) -> None:
    wide = Knobs(shuffles="half", mma_carrier="split", butterfly_carrier="fp32", exchange_carrier="fp32")
    check(Problem.of(n, dtype), replace(wide, **change), why)


@pytest.mark.parametrize(
    ("dtype", "numerics", "carriers", "far_lanes"),
    [
        (DType.FLOAT16, Numerics.FAST, {"packed"}, "mma"),
        (DType.FLOAT16, Numerics.ACCURATE, {"split"}, "shuffle"),
        (DType.BFLOAT16, Numerics.ACCURATE, {"tf32", "fp16"}, "mma"),
        (DType.FLOAT32, Numerics.ACCURATE, {"tf32"}, "shuffle"),
    ],
)
def test_seeds_take_values_into_an_mma_as_proved_good(
    dtype: DType, numerics: Numerics, carriers: set[str], far_lanes: str
) -> None:
    seeds = [knobs for knobs in seeds_of(Problem.of(8192, dtype, numerics)) if knobs.low_bits == "mma"]
    exchanging = [knobs for knobs in seeds if knobs.block_bits == "exchange"]
    assert {knobs.mma_carrier for knobs in exchanging} == carriers
    assert all((knobs.mma_carrier == "fp16") == (knobs.cluster > 1) for knobs in exchanging if "fp16" in carriers)
    assert ("mma" in {knobs.far_lanes for knobs in seeds}) == (far_lanes == "mma")


LEVELS = Knobs(4, 2, 4, far_bits="lanes", mma_carrier="fp16", butterfly_carrier="fp32")


@pytest.mark.parametrize(
    ("dtype", "numerics", "change", "why"),
    [
        (DType.BFLOAT16, Numerics.ACCURATE, {}, ""),
        (DType.BFLOAT16, Numerics.ACCURATE, {"accumulator": "packed"}, ""),
        (DType.BFLOAT16, Numerics.ACCURATE, {"far_lanes": "mma_two"}, ""),
        (DType.BFLOAT16, Numerics.ACCURATE, {"load": "bulk", "trigger": "load"}, ""),
        (DType.FLOAT16, Numerics.ACCURATE, {}, "no more bits than a float16"),
        (DType.FLOAT32, Numerics.ACCURATE, {}, "no more bits than a float32"),
        (DType.BFLOAT16, Numerics.FAST, {}, "fast may carry bfloat16"),
        (DType.BFLOAT16, Numerics.ACCURATE, {"cluster": 1, "warps": 8}, "only between blocks"),
        (DType.BFLOAT16, Numerics.ACCURATE, {"block_bits": "load", "far_bits": "registers"}, "only between blocks"),
        (DType.BFLOAT16, Numerics.ACCURATE, {"exchange_carrier": "fp32"}, "exchange_carrier must be packed"),
        (DType.BFLOAT16, Numerics.ACCURATE, {"far_bits": "registers"}, "levels cross in one exchange"),
        (DType.BFLOAT16, Numerics.ACCURATE, {"low_bits": "shuffle"}, "no value passes from one mma to another"),
        (DType.BFLOAT16, Numerics.ACCURATE, {"butterfly_carrier": "packed"}, "may not round between butterflies"),
    ],
)
def test_accurate_bfloat16_crosses_to_other_blocks_as_float16(
    dtype: DType, numerics: Numerics, change: dict[str, Any], why: str
) -> None:
    problem, knobs = Problem.of(8192, dtype, numerics), replace(LEVELS, **change)
    if why:
        with pytest.raises(UsageError, match=re.escape(why)):
            build_plan(problem, knobs, ARCH)
    else:
        assert build_plan(problem, knobs, ARCH).normalizes


def test_levels_take_room_in_shared_memory() -> None:
    plan = build_plan(Problem.of(8192, DType.BFLOAT16), LEVELS, ARCH)
    (exchange,) = plan.exchanges
    assert plan.footprint.size("levels") == 16 * 2 * 4
    assert plan.footprint.offset("levels") == plan.footprint.offset("crossed") + 4 * 2 * exchange.slot_bytes
    assert plan.footprint.shared_bytes == plan.footprint.offset("levels") + plan.footprint.size("levels")
    assert exchange.crossed_bytes(plan) == 2 * 8192 // 4 + plan.footprint.size("levels")


def test_seeds_of_clusters_load_whole_rows_too() -> None:
    seeds = seeds_of(Problem.of(32768, DType.BFLOAT16))
    assert {k.cluster for k in seeds if k.load == "multicast"} == {2, 4, 8}
    assert "multicast" in {k.load for k in seeds[:8]}
    pitched = [k for k in seeds_of(Problem.of(32768, DType.BFLOAT16, rows="pitched")) if k.block_bits == "load"]
    assert {k.load for k in pitched} == {"plain"}
    assert {k.cluster for k in pitched if k.chunks == 8} == {2, 4}  # where an exchange between blocks is legal, too
    seeds = seeds_of(Problem.of(8192, DType.FLOAT32))
    of_float32 = [k for k in seeds if k.block_bits == "load"]
    assert {(k.low_bits, k.load) for k in of_float32} == {("shuffle", "multicast")}
    assert {k.cluster for k in of_float32} == {2, 4, 8}
    assert all(before.low_bits == "shuffle" for before, k in pairwise(seeds) if k in of_float32)


@pytest.mark.parametrize("arch", [ARCH, load_arch("sm80"), load_arch("sm75")], ids=lambda arch: arch.name)
@pytest.mark.parametrize("problem", [*PROBLEMS, *WITH_MATRIX], ids=lambda problem: problem.key)
def test_no_knob_that_is_chosen_after_a_rule_was_asked_has_a_say(problem: Problem, arch: Arch) -> None:
    """Whatever it becomes, what the rule found legal it finds legal still."""
    context, space = Context(problem, arch), space_of(problem) if arch is ARCH else Space(problem, arch)
    for knobs in random.Random(2).sample(space.legal, min(150 if arch is ARCH else 20, len(space.legal))):
        changed = {name: [replace(knobs, **{name: value}) for value in arch.search[name]] for name in KNOB_NAMES}
        for rule in rules_for(problem, arch):
            for name in KNOB_NAMES[KNOB_NAMES.index(rule.last) + 1 :]:
                assert not any(rule.broken(context, other) for other in changed[name]), (knobs, rule.last, name)


@pytest.mark.parametrize("n", [512, 4096, 16384, 32768])
@pytest.mark.parametrize("dtype", DType)
def test_what_is_legal_fits_the_limits(n: int, dtype: DType) -> None:
    """With exchanges inside blocks and between them, each in shared memory of its own, and with whole rows."""
    problem, limits, choose, both = Problem.of(n, dtype), ARCH.limits, random.Random(n), 0
    for number in range(400):
        knobs = draw(problem, choose, min_blocks=ARCH.search["min_blocks"][-1 - number % 2])
        plan = build_plan(problem, knobs, ARCH)
        assert plan.launch.threads <= limits.threads_per_block
        assert plan.footprint.shared_bytes <= limits.shared_per_block
        of_a_block = plan.footprint.shared_bytes + limits.shared_reserved_per_block
        assert knobs.min_blocks * of_a_block <= limits.shared_per_sm
        # Shares of float32 are summed from shared memory.
        words = 4 * knobs.chunks * (1 if dtype is DType.FLOAT32 else plan.shares_loaded)
        assert words + 24 <= min(
            limits.registers_per_thread, limits.registers_per_sm // (32 * knobs.warps * knobs.min_blocks)
        )
        both += {step.crosses_blocks for step in plan.exchanges} == {False, True}
    assert both or n <= 4096


IN_BLOCKS_AND_BETWEEN = Knobs(4, 4, 4, mma_carrier="split", butterfly_carrier="fp32", exchange_carrier="fp32")


@pytest.mark.parametrize(
    ("problem", "knobs"),
    [
        (Problem.of(16384, DType.FLOAT16), IN_BLOCKS_AND_BETWEEN),
        (Problem.of(4096, DType.FLOAT16), replace(IN_BLOCKS_AND_BETWEEN, cluster=1, load="bulk", min_blocks=2)),
        (Problem.of(8192, DType.FLOAT16), replace(WHOLE_ROWS, load="multicast")),
        (Problem.of(8192, DType.BFLOAT16), LEVELS),
    ],
    ids=["two exchanges", "staged", "multicast", "levels"],
)
def test_what_lacks_one_byte_of_shared_memory_is_refused(problem: Problem, knobs: Knobs) -> None:
    limits, needed = ARCH.limits, build_plan(problem, knobs, ARCH).footprint.shared_bytes
    of_an_sm = knobs.min_blocks * (needed + limits.shared_reserved_per_block)
    for less, why in (
        (replace(limits, shared_per_block=needed - 1), "bytes of shared memory per block"),
        (replace(limits, shared_per_sm=of_an_sm - 1), "bytes of shared memory per SM"),
    ):
        with pytest.raises(UsageError, match=why):
            build_plan(problem, knobs, replace(ARCH, limits=less))


@pytest.mark.parametrize(
    "key",
    [
        "n256-bfloat16-to-fp8_group_128",
        "n512-signed-bfloat16-to-int8_row_4096_convrot",
        "n4096-bfloat16-to-mxfp4_32",
        "n4096-bfloat16-to-int4_row_4096",
        "n1024-float16-to-nvfp4_16",
        "n1792-k28-bfloat16-to-int8_row_1792",
    ],
)
@pytest.mark.parametrize("arch", ["sm75", "sm80", "sm90"])
def test_accurate_codes_are_of_values_with_16_bits(key: str, arch: str) -> None:
    """Whatever the knobs: steps hand on fp32, or two bfloat16 for each value, until the format rounds. Fast codes may
    be of fewer, if an mma or an exchange is between."""
    problem, target = Problem.parse(f"{key}-accurate"), load_arch(arch)
    legal = Space(problem, target).legal
    for knobs in random.Random(1).sample(legal, min(100, len(legal))):
        plan = build_plan(problem, knobs, target)
        rounded = [step for step, form in zip(plan.steps, plan.carriers[1:], strict=True) if form in (PACKED, FP16)]
        assert not any(isinstance(step, Mma) and step.cuts for step in plan.steps), knobs
        assert sum(isinstance(step, Round) for step in rounded) <= problem.io.form.rounds_first, knobs
        assert not any(isinstance(step, Narrow | Mma) for step in rounded), knobs


def test_fast_codes_may_be_of_values_that_were_rounded_once() -> None:
    tf32 = Knobs(
        chunks=4, warps=4, low_bits="mma", mma_carrier="tf32", butterfly_carrier="fp32", exchange_carrier="fp32"
    )
    packed = replace(tf32, mma_carrier="packed")
    for form in ("fp8_row_4096", "int4_row_4096"):
        fast = Problem.parse(f"n4096-bfloat16-to-{form}-fast")
        accurate = fast.with_io(numerics=Numerics.ACCURATE)
        build_plan(fast, tf32, ARCH)
        check(accurate, tf32, "a tf32 has fewer bits than accurate codes need")
        check(accurate, packed, "accurate may not round between two mma")
        check(fast, packed, "fast may not round between two mma" if form == "int4_row_4096" else "")
        check(
            fast, replace(packed, exchange_carrier="packed"), "may not round" if "int4" in form else "rounds more often"
        )
        with pytest.raises(UsageError, match="cuts values off to 11 bits"):
            Plan(accurate, 2, 2, 0, build_plan(fast, tf32, ARCH).steps)


def test_bad_knobs_are_named() -> None:
    problem = Problem.of(4096, DType.FLOAT16, Numerics.FAST)
    with pytest.raises(UsageError, match="knob 'color' is not known"):
        Knobs.from_dict({"color": 3})
    check(problem, Knobs(chunks=3), "knob chunks = 3 is not searched")
    check(problem, Knobs(chunks=1), "shorter than a row")


# ---- one law after another -------------------------------------------------------------------------------------------
def of(n: int, dtype: DType = DType.FLOAT16, numerics: Numerics = Numerics.ACCURATE, **more: Any) -> Problem:
    return Problem.of(n, dtype, numerics, **more)


FAST, BF16, FP32 = Numerics.FAST, DType.BFLOAT16, DType.FLOAT32
TF32 = Knobs(mma_carrier="tf32")
NO_TF32 = "no more bits than a float16 (mma_carrier must be another)"
GATHERED = Knobs(
    1, 4, 2, block_bits="load", far_bits="lanes", low_bits="shuffle", butterfly_carrier="fp32", exchange_carrier="fp32"
)
SOONER = replace(WHOLE_ROWS, trigger="store")
FIVE_FAR = replace(FAR_MMA, warps=32)
PACKED_MMA = replace(FAR_MMA, warps=8, mma_carrier="packed", butterfly_carrier="packed", exchange_carrier="packed")
TWO_ROWS = Knobs(8, 16, far_bits="lanes", far_lanes="mma", butterfly_carrier="fp32", min_blocks=2)
WIDE_ROWS = replace(TWO_ROWS, far_lanes="shuffle", exchange_carrier="fp32", exchange_rounds=2)
SHORT_ROWS = Knobs(16, 16, low_bits="shuffle", butterfly_carrier="fp32")
NO_ROOM = "a thread's values do not fit its registers"
LOOP = Knobs(8, 4, grid="persistent", min_blocks=8)
LARGE = Knobs(4, 1, 16, block_bits="exchange", far_bits="lanes", butterfly_carrier="fp32")
SWIZZLED = Knobs(2, 2, low_bits="shuffle", butterfly_carrier="fp32", exchange_carrier="fp32", shared_layout="swizzled")
IN_FP32 = Knobs(low_bits="mma_shuffle", butterfly_carrier="fp32")
COPIED = Knobs(low_bits="shuffle", butterfly_carrier="fp32")
ONE_FAR = Knobs(4, 2, far_bits="lanes", far_lanes="mma_two", butterfly_carrier="fp32")


def lacks(feature: str) -> Arch:
    return replace(ARCH, features=ARCH.features - {feature})


# Law -> choices with the reason why they are not legal, or legal ones. The arch is an H100 where none is named.
LAWS: dict[str, list[tuple[Any, ...]]] = {
    "tf32 is for types that have fewer bits or more": [
        *((of(256, dtype, numerics), TF32) for dtype in (BF16, FP32) for numerics in Numerics),
        *((of(256, numerics=numerics), TF32, NO_TF32) for numerics in Numerics),
        (of(256), Knobs(), "between two mma (mma_carrier must be split)"),
    ],
    "float32 is summed over blocks from shared memory": [
        (of(2048, FP32), replace(GATHERED, load="multicast")),
        *(
            (of(2048, FP32), replace(GATHERED, load=load), "from shared memory (load must be multicast)")
            for load in ("plain", "bulk")
        ),
        (
            of(2048, FP32, rows="pitched"),
            replace(GATHERED, load="multicast"),
            "pitched rows cannot be copied as they lie",
        ),
    ],
    "the next kernel starts sooner only beside clusters": [
        (of(8192), SOONER),
        (
            of(8192),
            replace(SOONER, cluster=1, warps=8, block_bits="exchange"),
            "only few blocks leave room for the next kernel's",
        ),
        (of(8192), SOONER, "the arch starts no kernel before the last one ends", lacks("dependent_launch")),
    ],
    "five far bits and one chunk bit leave no room for a tf32": [
        (of(16384, BF16), replace(FIVE_FAR, mma_carrier="split")),
        (of(16384, BF16), FIVE_FAR, "leaves room for three bits in lanes"),
        (of(16384, BF16), replace(FAR_MMA, chunks=4)),
    ],
    "a carrier of butterflies is that of the exchange where an mma leaves none": [
        (of(4096, numerics=FAST), PACKED_MMA),
        (of(4096, numerics=FAST), replace(PACKED_MMA, butterfly_carrier="fp32", exchange_carrier="fp32")),
        (
            of(4096, numerics=FAST),
            replace(PACKED_MMA, butterfly_carrier="fp32"),
            "butterfly_carrier must be as exchange_carrier",
        ),
        (of(8192, numerics=FAST), replace(PACKED_MMA, warps=16, butterfly_carrier="fp32")),
    ],
    "whole rows as they are loaded fit the registers": [
        # As many words as blocks times chunks times four.
        (of(32768, BF16), replace(WHOLE_ROWS, chunks=8, warps=2, cluster=8), NO_ROOM),
    ],
    "whole rows are prefetched where blocks take tiles in order": [
        (of(256, numerics=FAST), Knobs(ahead=8)),
        (of(256, numerics=FAST), Knobs(ahead=8, grid="persistent"), "blocks that loop do not take tiles in order"),
        (of(256, numerics=FAST, rows="pitched"), Knobs(ahead=8), "pitched rows lie anywhere"),
        (of(256, numerics=FAST), Knobs(ahead=8), "the arch has no bulk copies to L2", lacks("bulk_copy")),
    ],
    # So an SM may hold two rows of 32768 in 512 threads of 64 registers each, but not of accurate or float32.
    "what is rounded before it crosses is wide a few values at a time": [
        (of(32768, numerics=FAST), TWO_ROWS),
        (of(128, numerics=FAST), SHORT_ROWS),
        (of(32768, numerics=FAST), WIDE_ROWS, NO_ROOM),
        (of(32768), replace(WIDE_ROWS, mma_carrier="split"), NO_ROOM),
        (of(128), SHORT_ROWS, NO_ROOM),
        (of(128, FP32), SHORT_ROWS, NO_ROOM),
    ],
    "an SM is filled with threads and not beyond": [
        (of(256, numerics=FAST), Knobs(warps=8, min_blocks=8)),
        (of(256, numerics=FAST), Knobs(warps=16, min_blocks=8), "more than 2048 threads per SM"),
    ],
    "a second tile under way takes registers or shared memory": [
        (of(256, numerics=FAST), LOOP),
        (of(256, numerics=FAST), replace(LOOP, load="bulk", stages=2, min_blocks=4)),
        (of(256, numerics=FAST), replace(LOOP, load="cp_async", warps=1, stages=2)),
        (of(256, numerics=FAST), replace(LOOP, stages=2), NO_ROOM),
    ],
    "clusters are no larger than the arch has them": [
        (of(16384, numerics=FAST), LARGE),
        (
            of(16384, numerics=FAST),
            LARGE,
            "the arch has no clusters of 16 blocks",
            replace(ARCH, limits=replace(ARCH.limits, cluster_blocks=8)),
        ),
    ],
    "rows of 16 bytes are the least to be copied": [
        case
        for dtype in DType
        for knobs in (replace(COPIED, load="cp_async"), replace(COPIED, load="bulk"))
        for case in (
            (of(16 // dtype.bytes, dtype), knobs),
            (of(8 // dtype.bytes, dtype), knobs, "rows shorter than 16 bytes"),
        )
    ],
    "only what meets bank conflicts is laid out in another way": [
        (of(1024), SWIZZLED),
        (of(1024), replace(SWIZZLED, exchange_rounds=2), "one vector a lane meets no bank conflict"),
    ],
    "accurate sums in fp32": [
        (of(256), IN_FP32),
        (of(256), replace(IN_FP32, accumulator="packed"), "accurate may not round inside an mma"),
    ],
    "an mma of one far bit leaves chunk bits to butterflies": [
        (of(2048, numerics=FAST), ONE_FAR),
        (
            of(2048, numerics=FAST),
            replace(ONE_FAR, chunks=2, warps=4),
            "butterfly_carrier must be as exchange_carrier",
        ),
    ],
}


@pytest.mark.parametrize("law", LAWS)
def test_a_law_says_what_is_legal(law: str) -> None:
    for case in LAWS[law]:
        check(*case)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, ""),
        ({"chunks": 8, "warps": 16}, ""),
        ({"chunks": 4, "warps": 32}, "all chunks meet from the exchange on (order must be another"),
        ({"chunks": 2, "warps": 8}, "all chunks meet from the exchange on (order must be another"),  # in the mma
        ({"chunks": 4, "warps": 8}, ""),
        (
            {"chunks": 4, "warps": 8, "far_bits": "registers", "far_lanes": "shuffle"},
            "from the exchange on (order must",
        ),  # in the first
        ({"chunks": 8, "warps": 8, "cluster": 2}, "there is no exchange within a block"),
        (
            {"exchange_carrier": "fp32", "exchange_rounds": 2},
            "there is no exchange within a block, of all vectors at once",
        ),
    ],
)
def test_groups_of_chunks_go_on_alone_from_an_exchange(change: dict[str, Any], why: str) -> None:
    knobs = Knobs(16, 8, far_bits="lanes", far_lanes="mma", butterfly_carrier="fp32", order="by_group")
    knobs = replace(knobs, **change)
    problem = Problem.of(256 * knobs.chunks * knobs.warps * knobs.cluster, DType.FLOAT16, Numerics.FAST)
    if problem.n == 4096:
        knobs = replace(knobs, butterfly_carrier="packed")  # for want of butterflies
    check(problem, knobs, why)
