"""Plans of clusters in which each block loads the whole row."""

from __future__ import annotations

import dataclasses

import pytest
from plan_sample import changed, gathered, whole_rows
from spaces import ARCH

from hadagen.errors import UsageError
from hadagen.knobs import Knobs
from hadagen.layout import cta, reg
from hadagen.problem import DType, Numerics, Problem
from hadagen.space import build_plan
from hadagen.steps.base import PACKED
from hadagen.steps.conversions import Scale
from hadagen.steps.exchanges import Exchange
from hadagen.steps.memory import Load
from hadagen.steps.transforms import Butterfly, Gather, Mma


def test_the_bits_of_blocks_are_summed_over_once() -> None:
    plan = whole_rows()
    over = plan.steps[1]
    assert over == Mma(0, factor=1, over_blocks=True)
    with pytest.raises(UsageError, match=r"index bits \[12\] are never transformed"):
        changed(plan, 1, Mma(0, factor=1))
    butterfly = next(i for i, step in enumerate(plan.steps) if isinstance(step, Butterfly))
    with pytest.raises(UsageError, match="only what each block has loaded"):
        changed(plan, butterfly, dataclasses.replace(over, reg=2))
    with pytest.raises(UsageError, match="are not exchanged between them"):
        changed(plan, len(plan.steps) - 1, Exchange(((reg(2), cta(0)),), PACKED), plan.steps[-1])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"operand": "bfloat16", "parts": 2}, "only packed values are summed over blocks"),
        ({"accumulator": PACKED}, "only packed values are summed over blocks"),
        ({"turned": True}, "only packed values are summed over blocks"),
        ({"factor": 0}, "by the scale once"),
    ],
)
def test_only_packed_values_as_they_lie_are_summed_over_blocks(change: dict[str, object], why: str) -> None:
    plan = whole_rows()
    with pytest.raises(UsageError, match=why):
        changed(plan, 1, dataclasses.replace(plan.steps[1], **change))


@pytest.mark.parametrize("load", [Load("bulk"), Load("cp_async")])
def test_only_what_each_block_has_loaded_is_summed_over_blocks(load: Load) -> None:
    with pytest.raises(UsageError, match="only what each block has loaded, straight to registers or by multicast"):
        changed(whole_rows(), 0, load)


def test_a_multicast_brings_what_is_summed_over_blocks() -> None:
    plan = changed(whole_rows(), 0, Load("multicast"))
    assert plan.shares_loaded == 2
    assert plan.stage_bytes == 2 * 8192  # the whole row
    (exchange,) = plan.exchanges
    assert (
        plan.footprint.offset("slots") == plan.footprint.offset("stages") == 128
    )  # its slots take the place of the row
    assert plan.footprint.shared_bytes == 128 + plan.stage_bytes + 16 * (exchange.slot_bytes - 1024)
    of_four = Knobs(4, 2, 4, block_bits="load", mma_carrier="split", butterfly_carrier="fp32", exchange_carrier="fp32")
    longer = build_plan(plan.problem, dataclasses.replace(of_four, load="multicast"), ARCH)
    assert longer.footprint.shared_bytes == 128 + longer.stage_bytes > 128 + 8 * longer.exchanges[0].slot_bytes
    with pytest.raises(UsageError, match="no step needs the shares of other blocks"):
        changed(build_plan(Problem.of(256, DType.BFLOAT16), Knobs(mma_carrier="split"), ARCH), 0, Load("multicast"))
    float32_rows = gathered()
    with pytest.raises(UsageError, match="it finds what a multicast has brought"):
        changed(float32_rows, 0, dataclasses.replace(float32_rows.load, path="plain"))


def test_shares_of_float32_are_gathered_once_and_scaled_then() -> None:
    plan = gathered()
    assert [type(step) for step in plan.steps[:3]] == [Load, Gather, Butterfly]
    assert Scale not in {type(step) for step in plan.steps}
    assert plan.describe()[1] == "sum over blocks, times the scale: bits 10"
    with pytest.raises(UsageError, match="no step needs the shares of other blocks"):
        changed(plan, 1, Scale())
    with pytest.raises(UsageError, match="by the scale once"):
        changed(plan, len(plan.steps) - 1, Scale(), plan.steps[-1])
    with pytest.raises(UsageError, match="only what each block has loaded"):
        changed(plan, 1, plan.steps[2], plan.steps[1])


def test_one_block_has_no_others_to_sum_over() -> None:
    plan = build_plan(Problem.of(256, DType.BFLOAT16), Knobs(mma_carrier="split"), ARCH)
    with pytest.raises(UsageError, match="there is one block"):
        changed(plan, 1, dataclasses.replace(plan.steps[1], over_blocks=True))


def test_sums_over_blocks_are_not_scaled_by_factors_of_16_bits() -> None:
    """Which are made for sums of 16. What is taken of a whole scale may be as much smaller as there are blocks."""
    fast = build_plan(Problem.of(512, DType.FLOAT16, Numerics.FAST), Knobs(cluster=2, far_bits="lanes"), ARCH)
    with pytest.raises(UsageError, match="outgrow what a factor in 16 bits"):
        changed(fast, 1, dataclasses.replace(fast.steps[1], over_blocks=True))
    plan = whole_rows()
    assert [step.least_power(plan) for step in plan.steps if isinstance(step, Mma)] == [-5, -4]
