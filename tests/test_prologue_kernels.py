"""Kernels with a prologue: SiLU·mul and its family, before every kind of plan, on the emulator."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from spaces import ARCH
from test_laws import EmulatedLaunch

from hadagen.compiler import codegen
from hadagen.compiler.emulator import compile_host, verification_rows, verify
from hadagen.errors import UsageError
from hadagen.measure import Cell
from hadagen.measure.verify import Verifier
from hadagen.plan.knobs import Knobs
from hadagen.plan.space import Space, build_plan
from hadagen.problem.operands import verification_operands
from hadagen.problem.problem import Problem
from hadagen.problem.prologues import ACTIVATIONS, ARITHMETIC, LAYOUTS, Activated, named, reciprocal
from hadagen.problem.regimes import Cache, Destination
from hadagen.problem.trial import Outcome
from hadagen.truth.reference import exact_results, input_classes, input_parts, verification_scale

# Problem → choices of knobs, each the nearest legal one: ways to load, and forms of the values behind the prologue.
PLAIN: dict[str, Any] = {}
STAGED = {"load": "cp_async", "grid": "persistent", "stages": 2}
FETCHED = {"grid": "persistent", "stages": 2}
BULK = {"load": "bulk", "grid": "persistent"}
AHEAD = {"ahead": 8}
FIRST = {"first": "matrix", "warps": 1, "load": "cp_async", "grid": "persistent", "stages": 3}
FAMILIES = {
    "n128-after-silu_mul-bfloat16-to-fp8_group_128-accurate": (
        {"low_bits": "shuffle"},
        {"low_bits": "mma_shuffle", **STAGED},
        {"low_bits": "shuffle", **FETCHED},
        {"low_bits": "mma_shuffle", **AHEAD},
    ),
    "n128-after-silu_mul_interleaved-bfloat16-to-mxfp8_32-accurate": (PLAIN, STAGED, FETCHED, BULK),
    "n1-after-silu_mul-float16-to-nvfp4_16-accurate": (PLAIN, FETCHED),
    "n4096-after-silu_mul-bfloat16-to-int8_row_4096-accurate": (PLAIN, BULK, {**BULK, "stages": 2}, AHEAD),
    "n512-signed-after-silu_mul_clamped-float16-accurate": (PLAIN, {"low_bits": "shuffle"}, STAGED),
    "n512-signed-after-gelu-bfloat16-accurate": (PLAIN, BULK),
    "n2048-after-silu_mul-bfloat16-accurate": ({"chunks": 2, "warps": 2, "cluster": 2}, {"mma_carrier": "tf32"}),
    "n1024-after-gelu_tanh_mul_rounded-bfloat16-fast": (PLAIN, STAGED),
    "n256-after-mul_interleaved-float32-accurate": (PLAIN, STAGED, FETCHED, BULK),
    "n256-signed-after-relu2_mul-float32-accurate": (PLAIN,),
    "n896-k28-after-silu_mul-bfloat16-to-fp8_row_896-accurate": (PLAIN, {"warps": 1, "load": "bulk"}),
    "n896-k28-signed-after-gelu_quick_mul-float16-accurate": (PLAIN, {"warps": 1, "load": "bulk", **AHEAD}),
    "n160-k20-signed-after-silu_mul_interleaved_rounded-bfloat16-accurate": (PLAIN,),
    "n1536-k12-signed-after-silu_mul-bfloat16-to-fp8_row_1536-accurate": (
        {**FIRST, "fold": 1},
        {**FIRST, "fold": 1, "products": "alone"},
    ),
    "n4096-k64-after-gelu_tanh_mul-bfloat16-to-mxfp4_32-accurate": (
        FIRST,
        {**FIRST, "products": "ahead"},
        {**FIRST, "products": "alone", "stages": 1},
    ),
    "n1536-k12-after-silu_mul_interleaved_rounded-float16-fast": ({**FIRST, "fold": 1, "products": "alone"},),
    "n96-k12-after-silu_mul_clamped-bfloat16-accurate": ({**FIRST, "rows": 8},),
    "n48-k3-real-after-silu_mul-bfloat16-to-fp8_row_48-accurate": (
        {**FIRST, "rows": 4, "stages": 4, "products": "ahead"},
    ),
    "n384-k12-after-relu2-bfloat16-to-mxfp4_32-accurate": (PLAIN, {"warps": 1, "load": "bulk"}),
}


def knobs_for(problem: Problem, wanted: dict[str, Any]) -> Knobs:
    found = Space(problem, ARCH).closest(Knobs(**{"warps": 4, **wanted}))
    assert found is not None
    assert {name: getattr(found, name) for name in wanted} == wanted
    return found


def test_every_way_to_load_and_every_form_of_values() -> None:
    """For rows of one unit and of three, which end within tiles."""
    cases = [
        (problem, codegen.render(build_plan(problem, knobs_for(problem, wanted), ARCH)))
        for problem, choices in ((Problem.parse(key), choices) for key, choices in FAMILIES.items())
        for wanted in choices
    ]
    module = compile_host([source for _, source in cases])
    for problem, source in cases:
        whole = not any(param.name == "units_in_row" for param in source.launch.params)
        for units in (1,) if whole else (1, 3):
            rows = verification_rows(problem, source.launch, 1 << 12)
            errors = verify(problem, source, rows, module=module, units_in_row=units)
            assert max(errors.values()) <= problem.error_bound, (source.entry, units, errors)


def test_the_worker_verifies_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hadagen.measure.verify._LEAST_ELEMENTS", 1 << 13)
    keys = [
        "n256-after-silu_mul-bfloat16-to-mxfp8_32-accurate",
        "n96-k12-signed-after-silu_mul_clamped-float16-accurate",
        "n256-after-gelu-float32-accurate",
    ]
    sources = [
        codegen.render(build_plan(problem, knobs_for(problem, PLAIN), ARCH)) for problem in map(Problem.parse, keys)
    ]
    wrong = replace(
        sources[0], entry=f"{sources[0].entry}_wrong", text=sources[0].text.replace("product(value, u)", "u")
    )
    wrong = replace(wrong, text=wrong.text.replace(sources[0].entry, wrong.entry))
    module = compile_host([*sources, wrong])
    verifier = Verifier(torch.device("cpu"), 0)
    for key, source in zip(keys, sources, strict=True):
        answer = verifier.check(EmulatedLaunch(Problem.parse(key), source, module), Problem.parse(key))
        assert (answer.outcome, answer.detail) == (Outcome.OK, ""), key
    problem = Problem.parse(keys[0])
    assert verifier.check(EmulatedLaunch(problem, wrong, module), problem).outcome is Outcome.WRONG_ANSWER


@pytest.mark.parametrize("arithmetic", sorted(ARITHMETIC))
def test_every_activation_in_every_arithmetic(arithmetic: str) -> None:
    """Without a rotation, against the formula in float64, which rounds where the arithmetic says."""
    kinds = [
        Activated(activation, multiplies, layout, clamped, ARITHMETIC[arithmetic])
        for activation, multiplies, layout, clamped in product(ACTIVATIONS, (True, False), LAYOUTS, (False, True))
        if (activation or multiplies) and (multiplies or layout == "halves")
        if not clamped or (activation == "silu" and multiplies)
    ]
    problems = [Problem.parse(f"n256-after-{kind.name}-bfloat16-accurate") for kind in kinds]
    sources = [codegen.render(build_plan(problem, knobs_for(problem, PLAIN), ARCH)) for problem in problems]
    module = compile_host(sources)
    for problem, source in zip(problems, sources, strict=True):
        errors = verify(
            problem, source, verification_rows(problem, source.launch, 1 << 12), module=module, units_in_row=2
        )
        assert max(errors.values()) <= problem.error_bound, (problem.key, errors)


def test_names_say_what_kernels_are() -> None:
    assert named("silu_mul_interleaved_clamped_rounded").name == "silu_mul_interleaved_clamped_rounded"
    assert len({Activated("relu2", arithmetic=each).name for each in ARITHMETIC.values()}) == 3  # no function matters
    with pytest.raises(UsageError, match="prologue 'silu_mull' is not known; did you mean silu or silu_mul"):
        named("silu_mull")


def test_rows_are_divided_by_a_product() -> None:
    largest = (1 << 31) - 1
    for divisor in (*range(1, 70), 4095, 4096, 4097, 1 << 30, largest):
        multiplier, shift = reciprocal(divisor)
        assert 0 < multiplier < 1 << 32
        for a in {0, 1, divisor - 1, divisor, 3 * divisor - 1, largest - largest % divisor, largest}:
            if a <= largest:
                assert (2 * a * multiplier >> 32) >> shift == a // divisor


def test_bytes_are_those_of_both_halves() -> None:
    problem = Problem.parse("n128-after-silu_mul-bfloat16-to-fp8_group_128-accurate")
    traffic = Cell(1 << 20, Destination.OUT_OF_PLACE, Cache.COLD).traffic(problem)
    assert traffic.footprint == (4 << 20) + (1 << 20) + (1 << 20) // 128 * 4


@pytest.mark.parametrize("activation", [each for each in ACTIVATIONS if each])
def test_right_results_of_verifications_are_in_range(activation: str) -> None:
    """The results of an activation alone have a mean other than 0, of which a transform makes one large value."""
    for multiplies, dtype in product((True, False), ("float16", "bfloat16")):
        problem = Problem.parse(f"n8192-after-{Activated(activation, multiplies).name}-{dtype}-accurate")
        for name, parts in input_parts(problem, input_classes(problem, 3)).items():
            exact, _ = exact_results(problem, parts, verification_scale(problem), verification_operands(problem))
            assert abs(exact).max() < torch.finfo(getattr(torch, dtype)).max, name
