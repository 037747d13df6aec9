"""Every arch: its kernels compile for it and are right in the emulator, and it has exactly the features that its file
says."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from arch_spread import plans_on
from real_compilers import nvrtc_libraries

from hadagen.compiler.codegen import render
from hadagen.compiler.emulator import compile_host, verify
from hadagen.compiler.nvrtc import CompileError, Nvrtc
from hadagen.compiler.toolchain import device_headers
from hadagen.plan.arch import SPECIFIC, Arch, load_arch
from hadagen.problem.launch import LaunchSpec, Source
from hadagen.problem.target import generation, known_archs

HOPPER = load_arch("sm90")  # which has all features

# Feature → statements that need it; `used` keeps what they compute, or the compiler would leave them out.
NEEDING = {
    "mma_f16": "float d[4] = {}; mma<float16>(d, hadamard16(1u), t, t); used += as_word(d[0]) + transpose(t);",
    "mma_bf16": "float d[4] = {}; mma<bfloat16>(d, hadamard16(1u), t, t); used += as_word(d[0]);",
    "mma_tf32": "float d[4] = {}, f = as_float(t); mma(d, hadamard16_tf32(1u), f, f, f, f); used += as_word(d[0]);",
    "bf16x2_fma": "used += add<bfloat16>(t, used) ^ sub<bfloat16>(t, used) ^ fma<bfloat16>(t, used, t);",
    "xorsign_bf16x2": "used += larger_of_bfloat16(t, used);",
    "cp_async": "cp_async16(shared, x); cp_async_commit(); cp_async_wait<0>(); "
    "barrier_init(barrier, 1); barrier_arrive(barrier); barrier_wait(barrier, 0);",
    "bulk_copy": "bulk_copy(shared, x, 16u, barrier); barrier_wait(barrier, 0); bulk_prefetch(x, 16u);",
    "cluster": "cluster_arrive(); cluster_wait(); remote_shared_store16(shared, cluster_rank(), zero16(), barrier);",
    "wgmma": "float d[32] = {}; Operand a[1] = {hadamard16(1u)}; multiply_boxes<float16>(d, a, boxes_in(shared)); "
    "wait_for_product(d); used += as_word(d[0]);",
    "dependent_launch": "grid_dependency_sync(); trigger_dependents();",
    # Replaced where the instruction is lacking.
    "": "used += largest_in_warp(t) ^ pack<float16>(as_float(t), 1.0f) ^ pack<bfloat16>(as_float(t), 1.0f);",
}
NO_INSTRUCTION = {"multicast_in_place"}


def kernel_with(*features: str) -> Source:
    """A kernel that needs these features."""
    body = "".join(f"{{ {NEEDING[feature]} }}" for feature in features)
    text = f"""#include "hadagen.cuh"
using namespace hadagen;
extern "C" __global__ void kernel(const void* x, u32* y) {{
    HADAGEN_SHARED(shared);
    u64* const barrier = reinterpret_cast<u64*>(shared + 128);
    const u32 t = thread_index();
    u32 used = t;
    {body}
    *y = used;
}}"""
    return Source(
        "kernel", text, LaunchSpec(32, 1, 0, 256, persistent=False), specific=not SPECIFIC.isdisjoint(features)
    )


def compiles(library: Nvrtc, arch: Arch, *sources: Source) -> None:
    """Raises `CompileError` if they do not."""
    target = next((each for each in sources if each.specific), sources[0]).compiled_for(arch.nvcc_arch)
    text = "\n".join(each.text for each in sources)
    library.compile(text, "kernel.cu", target, ["-std=c++17"], device_headers())


def each_target() -> Iterator[Any]:
    """Each arch with each library that compiles for it."""
    if not nvrtc_libraries():
        yield pytest.param(None, "", marks=pytest.mark.skip("no NVRTC is installed; pip install nvidia-cuda-nvrtc"))
    for name in known_archs():
        for release, library in nvrtc_libraries().items():
            if generation(name) in library.archs:
                yield pytest.param(library, name, id=f"{name}-{release}")


targets = pytest.mark.parametrize(("library", "name"), list(each_target()))


@targets
@pytest.mark.parametrize("part", range(4))
def test_every_structure_of_a_kernel_compiles(library: Nvrtc, name: str, part: int) -> None:
    plans = plans_on(arch := load_arch(name))
    compiles(library, arch, *map(render, plans[part::4]))


@targets
def test_an_arch_has_the_features_whose_primitives_compile(library: Nvrtc, name: str) -> None:
    arch = load_arch(name)
    has = arch.features - NO_INSTRUCTION
    compiles(library, arch, kernel_with("", *sorted(has)))
    for lacking in NEEDING.keys() - has - {""}:
        with pytest.raises(CompileError, match=r"requires|not supported on"):
            compiles(library, arch, replace(kernel_with(lacking), specific=False))


@pytest.mark.parametrize(
    ("name", "too_much"),
    [
        ("sm75", "cp_async"),
        ("sm75", "mma_bf16"),
        ("sm80", "bulk_copy"),
        ("sm89", "dependent_launch"),
        ("sm100", "wgmma"),
    ],
)
def test_a_plan_for_a_feature_too_many_does_not_compile(name: str, too_much: str) -> None:
    arch = load_arch(name)
    wrong = replace(arch, features=arch.features | {too_much})
    plan = next(plan for plan in plans_on(wrong) if too_much in plan.features)
    for library in nvrtc_libraries().values():
        with pytest.raises(CompileError):
            compiles(library, arch, render(plan))


def test_the_spread_needs_every_feature_and_calls_every_primitive() -> None:
    plans = plans_on(HOPPER)
    assert frozenset().union(*(plan.features for plan in plans)) == HOPPER.features
    definition = re.compile(r"(HADAGEN_INLINE [\w ]+? |HADAGEN_(?:LOAD|BARRIER_WAIT)\()(\w+)")
    headers = device_headers()
    primitives = headers["primitives.cuh"]
    calls = [
        definition.sub(r"\1", primitives),
        headers["hadagen.cuh"],
        headers["activations.cuh"],
        headers["codes.cuh"],
        *(render(plan).text for plan in plans),
    ]
    defined = {name for _, name in definition.findall(primitives)}
    assert len(defined) > 50
    assert not defined - set(re.findall(r"\w+", "\n".join(calls)))


@pytest.mark.parametrize("lacking", [*sorted(HOPPER.features), "all"])
def test_an_arch_without_a_feature_has_no_plan_that_needs_it(lacking: str) -> None:
    bare = replace(HOPPER, features=frozenset() if lacking == "all" else HOPPER.features - {lacking})
    for plan in plans_on(bare):
        assert plan.features <= bare.features
        assert plan.starts_early == ("dependent_launch" in bare.features)


@pytest.mark.parametrize("name", known_archs())
def test_every_structure_of_a_kernel_is_right(name: str) -> None:
    sources = {plan: render(plan) for plan in plans_on(load_arch(name))}
    module = compile_host(list(sources.values()))
    for plan, source in sources.items():
        errors = verify(plan.problem, source, module=module)
        assert max(errors.values()) <= plan.problem.error_bound, (plan.problem.key, plan.describe())
