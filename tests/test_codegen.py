"""The generator: the same plan gives the same readable text, and templates see no launch argument."""

import os
import random
import re
import shlex
import subprocess
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from spaces import ARCH, draw

from hadagen.compiler.codegen import render
from hadagen.compiler.emulator import host_texts
from hadagen.plan.knobs import Knobs
from hadagen.plan.plan import Plan
from hadagen.plan.space import build_plan
from hadagen.plan.steps.base import PACKED
from hadagen.plan.steps.conversions import Correct, Scale
from hadagen.plan.steps.transforms import NORMALIZER, Gather, Mma
from hadagen.problem.problem import DType, Numerics, Problem, Rows
from hadagen.problem.scale import ScaleForm


def sample() -> list[Plan]:
    choose = random.Random(3)
    kinds = list(product((1 << k for k in range(1, 16)), DType, Numerics, Rows))
    problems = dict.fromkeys(Problem.of(*kind) for kind in kinds)
    return [build_plan(problem, draw(problem, choose), ARCH) for problem in problems]


PLANS = sample()


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.digest[:8])
def test_text_is_whole_and_says_its_plan(plan: Plan) -> None:
    source = render(plan)
    assert (source, source.text.count("__global__")) == (render(plan), 1)
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


def test_nothing_is_declared_that_is_not_used(tmp_path: Path) -> None:
    """Values, lambdas and arrays: a compiler knows."""
    for name, text in host_texts().items():
        (tmp_path / name).write_text(text)
    kernels = tmp_path / "kernels.cpp"
    kernels.write_text("\n".join({source.entry: source.text for source in map(render, PLANS)}.values()))
    command = [*shlex.split(os.environ.get("CXX", "c++")), "-std=c++17", "-fsyntax-only"]
    warnings = ["-Wunused-variable", "-Wunused-but-set-variable", "-Werror", "-Wno-unknown-pragmas"]
    done = subprocess.run([*command, *warnings, str(kernels)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.digest[:8])
def test_empty_lines_stand_only_between_blocks(plan: Plan) -> None:
    lines = render(plan).text.splitlines()
    depth = 0
    for before, line, after in zip(lines, lines[1:], lines[2:], strict=False):
        depth += before.count("{") - before.count("}")
        if line == "":
            assert depth <= 1 + plan.persistent
            assert before
            assert after
            assert not before.endswith("{")
            assert not after.lstrip().startswith("}")
        assert line == line.rstrip()


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.digest[:8])
def test_a_scale_is_read_in_one_form(plan: Plan) -> None:
    text = render(plan).text
    kinds = {type(step) for step in plan.steps}
    factors = {step.factor for step in plan.steps if isinstance(step, Mma)} - {0, NORMALIZER}
    whole = Scale in kinds or Gather in kinds
    assert bool(re.search(r"float scale = as_float\(scale_word\);", text)) == whole
    assert bool(re.search(r"\] \*= scale\b", text)) == (Scale in kinds and not plan.normalizes)
    assert ("undo_level(scale, level)" in text) == ("hadamard16(normalizer_of(level))" in text) == plan.normalizes
    assert ("as_word(scale) ^ parity" in text) == (Gather in kinds)
    assert ("correction = high_half(scale_word)" in text) == (Correct in kinds)
    for number, half in ((1, "low_half"), (2, "high_half")):
        assert (f"hadamard16({half}(scale_word))" in text) == (number in factors and not whole)
        assert (f"power{number} = take_power(scale, " in text) == (number in factors and whole)
        assert bool(re.search(rf"hadamard16(_tf32)?\(power{number}\b", text)) == (number in factors and whole)
    assert text.count("scale_word") == 1 + (1 if whole else len(factors) + (Correct in kinds))
    assert whole or factors
    if plan.problem.io.numerics is Numerics.ACCURATE:
        assert whole
        powers = Mma in kinds and plan.problem.io.input is not DType.FLOAT16
        assert bool(factors) == (powers and not plan.normalizes)


def test_fast_scales_in_mma_wherever_values_between_two_are_packed() -> None:
    fast = [plan for plan in PLANS if plan.problem.io.numerics is Numerics.FAST]
    scaled = [plan for plan in fast if Scale not in {type(step) for step in plan.steps}]
    # In bfloat16, where no mma leaves packed values, one of them and a correction would round too often.
    assert {plan.scale_form for plan in scaled} == set(ScaleForm) - {ScaleForm.FP32, ScaleForm.BFLOAT16_CORRECTED}
    second = [(plan, step) for plan in fast for step in plan.steps if isinstance(step, Mma) and step.reg == 1]
    with_mma = [plan for plan, step in second if step.operand == PACKED]
    assert with_mma
    assert all(plan in scaled for plan in with_mma)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.digest[:8])
def test_only_pitched_kernels_know_columns_and_pitches(plan: Plan) -> None:
    body = render(plan).text.partition("__global__")[2]
    for name in ("columns", "x_pitch", "y_pitch"):
        # In the signature, and where it is used.
        assert (
            (len(re.findall(rf"\b{name}\b", body)) >= 2) if plan.problem.io.rows is Rows.PITCHED else (name not in body)
        )


@pytest.mark.parametrize(
    "plan", [plan for plan in PLANS if plan.problem.io.rows is Rows.PITCHED], ids=lambda plan: plan.digest[:8]
)
def test_a_pitched_kernel_takes_vectors_where_it_may(plan: Plan) -> None:
    text = render(plan).text
    whole = plan.problem.n >= plan.vector_elements
    size, width = plan.problem.io.input.bytes, plan.vector_elements
    assert (f"x_in_vectors = in_vectors(x, {size} * x_pitch)" in text) == whole
    assert (f"x_in_vectors && left >= {width} ? load16" in text) == whole
    assert (f"if (y_in_vectors && left >= {width}) store16" in text) == whole
    assert ("load_element<T>" in text, "store_element<T>" in text) == (not whole, not whole)
    assert "staged" not in text
    assert "_if(" not in text


@pytest.mark.parametrize(
    "plan", [plan for plan in PLANS if plan.problem.io.input is DType.FLOAT32], ids=lambda plan: plan.digest[:8]
)
def test_float32_has_no_packed_values(plan: Plan) -> None:
    text = render(plan).text
    assert not re.search(r"\bpc?\b|pack<|<T>\(d|\bfloat16", text)
    assert "float f[8 * chunks];" in text


def test_float32_goes_through_mma_in_three_parts() -> None:
    """Eight bits each, the smallest summed first, of what is cut off and never rounded."""
    plan = build_plan(Problem.of(256, DType.FLOAT32), Knobs(mma_carrier="split"), ARCH)
    text = render(plan).text
    assert [line for line in plan.describe() if "mma" in line] == [
        "mma reg0: bits 0 2 3 1 as 3 bfloat16, times the first factor of the scale",
        "mma reg1: bits 4 5 6 7 as 3 bfloat16, times the second factor of the scale",
    ]
    assert re.findall(r"mma<\w+>\(.*\)", text) == [f"mma<bfloat16>(d, h, a{part}, b{part})" for part in "lmh"] * 2
    assert not re.search(r"pack<|shuffle|shared", text)


def test_float32_goes_through_mma_as_two_tf32() -> None:
    """What is cut off of them first, and then they themselves, of which an mma takes no more than a tf32."""
    text = render(build_plan(Problem.of(256, DType.FLOAT32), Knobs(mma_carrier="tf32"), ARCH)).text
    values = ["f[2 * a]", "f[2 * a + 1]", "f[2 * b]", "f[2 * b + 1]"]
    below = [f"below_tf32({value})" for value in values]
    assert re.findall(r"mma\(d, h, (.*)\);", text) == [", ".join(below), ", ".join(values)] * 2
    assert not re.search(r"pack<|mma<|shuffle|shared|high_halves", text)


def places(text: str, *parts: str) -> list[int]:
    return [text.index(part) for part in parts]


def test_a_multicast_starts_when_all_blocks_run_and_nobody_waits_to_store() -> None:
    knobs = Knobs(4, 4, 4, block_bits="load", mma_carrier="split", butterfly_carrier="fp32", exchange_carrier="fp32")
    knobs = replace(knobs, load="multicast", trigger="store")
    text = render(build_plan(Problem.of(16384, DType.BFLOAT16), knobs, ARCH)).text
    at = places(
        text,
        "barrier_expect(landed, 32768u);",
        "cluster_arrive_relaxed();",
        "cluster_wait();",
        "grid_dependency_sync();",
        "    start(tile, 0);",
        "barrier_wait(&landed[0], 0);",
        "mma<T>(d",
        "block_sync();",
        "shared_store16(",
        "trigger_dependents();",
        " store16(",
    )
    assert at == sorted(at)
    assert "cluster_arrive();" not in text
    assert text.count("cluster_wait();") == 1
    # Each block sends its quarter to all four.
    assert "const u32 part = rank * 4096;" in text
    assert "+ 2 * (tile * 16384 + part), 8192u, &landed[stage], 4);" in text


def test_kernels_let_the_next_one_start_once_they_have_loaded() -> None:
    knobs = Knobs(4, 2, 2, mma_carrier="split", butterfly_carrier="fp32", exchange_carrier="fp32", trigger="load")
    text = render(build_plan(Problem.of(4096, DType.FLOAT16), knobs, ARCH)).text
    at = places(text, "load16(from", "trigger_dependents();", "mma<T>(d")
    assert at == sorted(at)
    assert text.count("trigger_dependents") == 1


def test_every_call_of_a_kernel_is_a_primitive() -> None:
    headers = [text for name, text in host_texts().items() if name.endswith(".cuh")]
    known = set(re.findall(r"(\w+)(?:<[\w ]+>)?\(", "\n".join(headers)))
    local = {
        "start",
        "fetch",
        "vector_of_row",
        "vector_of_rows",
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
    plan = build_plan(Problem.of(256, DType.FLOAT16, Numerics.FAST), Knobs(), ARCH)
    text = render(plan).text
    assert [line.split(":")[0] for line in plan.describe() if line.startswith("mma")] == ["mma reg0", "mma reg1"]
    assert "shared" not in text
    assert "shuffle" not in text
