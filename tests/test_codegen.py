"""The generator: the same plan gives the same readable text, and templates see no launch argument."""

from __future__ import annotations

import random
import re

import pytest
from spaces import ARCH, space_of

from hadagen.codegen import render
from hadagen.emulator import host_texts
from hadagen.knobs import Knobs
from hadagen.plan import Plan
from hadagen.problem import DType, Numerics, Problem
from hadagen.space import build_plan
from hadagen.toolchain import device_headers


def sample(count: int) -> list[Plan]:
    pick = random.Random(2)
    plans = []
    for log2_n in range(1, 16):
        for numerics in Numerics:
            problem = Problem(1 << log2_n, pick.choice(list(DType)), numerics)
            legal = pick.sample(space_of(problem).legal, count)
            plans += [build_plan(problem, knobs, ARCH) for knobs in legal]
    return plans


PLANS = sample(4)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.digest[:8])
def test_text_is_whole_and_says_its_plan(plan: Plan) -> None:
    source = render(plan)
    assert source == render(plan)
    assert source.text.count("__global__") == 1
    assert source.entry in source.text
    for line in plan.describe():
        assert source.text.count(line) >= 2  # in the summary, and above its block
    assert source.text.count("{") == source.text.count("}")
    assert not re.search(r"\{[{%#]|[%#]\}", source.text.replace("{{", ""))
    assert not re.search(r"if \((true|false|0|1)\)", source.text)


def test_only_primitives_hold_ptx() -> None:
    assert all("asm" not in render(plan).text for plan in PLANS)


def test_two_plans_never_share_a_name() -> None:
    entries = [render(plan).entry for plan in PLANS]
    assert len(set(entries)) == len({plan.digest for plan in PLANS})


def test_both_headers_give_the_same_functions() -> None:
    """What a kernel can call on the device it can call on the host."""

    def names(text: str) -> set[str]:
        functions = set(re.findall(r"HADAGEN_INLINE [\w ]+?(\w+)(?:<\w+>)?\(", text))
        return (functions | set(re.findall(r"HADAGEN_LOAD_IF\((\w+), \"", text))) - {"name", "shared_address"}

    assert names(device_headers()["hadagen.cuh"]) <= names(host_texts()["hadagen.cuh"])


def test_every_call_of_a_kernel_is_a_primitive() -> None:
    known = set(re.findall(r"(\w+)(?:<[\w ]+>)?\(", host_texts()["hadagen.cuh"]))
    local = {
        "start",
        "fetch",
        "static_cast",
        "reinterpret_cast",
        "u32",
        "i64",
        "if",
        "for",
        "byte",
        "auto",
        "__launch_bounds__",
        "__cluster_dims__",
    }
    for plan in PLANS:
        source = render(plan)
        body = "\n".join(line.split("//")[0] for line in source.text.splitlines())
        called = set(re.findall(r"(\w+)(?:<[^<>()]*>)?\(", body)) - local - {source.entry, "HADAGEN_SHARED"}
        assert called <= known, called - known


def test_the_worked_example_has_four_mma_and_no_shuffle() -> None:
    plan = build_plan(Problem(256, DType.FLOAT16, Numerics.FAST), Knobs(), ARCH)
    text = render(plan).text
    assert [line.split(":")[0] for line in plan.describe() if line.startswith("mma")] == ["mma reg0", "mma reg1"]
    assert "shared" not in text
    assert "shuffle" not in text
