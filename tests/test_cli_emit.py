"""`hadagen emit`: the source of a kernel, and which choices of knobs are legal."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import run, sentence, succeed
from real_compilers import needs_nvcc
from sample_bundle import write_sample

from hadagen import toolchain
from hadagen.arch import load_arch
from hadagen.cli import emit
from hadagen.launch import LaunchSpec, Source, params_for
from hadagen.problem import DType, Problem
from hadagen.toolchain import Toolchain

pytestmark = pytest.mark.usefixtures("machine")


def test_space_accounts_for_every_choice() -> None:
    report = json.loads(succeed("emit", "--space", "--n", "4096", "--json"))
    assert report["legal"] > 100
    assert report["legal"] + sum(report["reasons"].values()) == report["total"]
    assert f"{report['legal']:,} of {report['total']:,} choices are legal" in succeed("emit", "--space", "--n", "4096")


def test_where_no_choice_is_legal_emit_says_so() -> None:
    problem = ("emit", "--arch", "sm75", "--n", "65536")
    assert "float16-accurate has no kernel on sm75; take a smaller n, or see why with --space" in sentence(
        run(*problem), 2
    )
    assert "0 of " in succeed(*problem, "--space")


def test_the_space_is_that_of_the_knobs_that_are_set() -> None:
    def legal(*knobs: str) -> int:
        return int(json.loads(succeed("emit", "--space", "--n", "64", *knobs, "--json"))["legal"])

    assert legal() > legal("--knobs", "warps=4") + legal("--knobs", "warps=8") > 0
    assert legal("--knobs", "warps=4") > legal("--knobs", "warps=4,chunks=2") > 0


def test_emit_prints_source_that_says_its_plan() -> None:
    source = succeed("emit", "--n", "64", "--dtype", "bfloat16")
    assert "over rows of n = 64, bfloat16, accurate" in source
    assert source == succeed("emit", "--n", "64", "--dtype", "bfloat16")


def test_emit_sets_the_knobs_it_is_given_and_completes_the_others() -> None:
    source = succeed(
        "emit", "--n", "4096", "--numerics", "fast", "--knobs", "chunks=8", "--knobs", "cluster=2,stages=1"
    )
    assert "constexpr int chunks = 8, vectors = 8;" in source
    assert "__cluster_dims__(2, 1, 1)" in source


def test_emit_changes_others_where_what_it_is_given_calls_for_it() -> None:
    given = ("emit", "--n", "8192", "--dtype", "bfloat16", "--knobs")
    assert "constexpr int chunks = 2, vectors = 2;" in succeed(*given, "chunks=2")
    assert "the tile is shorter than a row" in sentence(run(*given, "chunks=1,warps=1,cluster=1"), 2)


def test_emit_starts_from_the_known_winner(sample: Path) -> None:
    write_sample(sample, chunks=2)
    assert "constexpr int chunks = 2, vectors = 2;" in succeed("emit", "--n", "256")


def test_emit_prints_ptx() -> None:
    assert ".target sm_90" in succeed("emit", "--n", "2", "--numerics", "fast", "--ptx")


def test_emit_prints_machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "disassemble", lambda kernel: f"code of {len(kernel.cubin)} bytes")
    assert succeed("emit", "--n", "2", "--numerics", "fast", "--sass").startswith("code of ")


STANDALONE = {
    ("--n", "4096", "--dtype", "bfloat16", "--knobs", "cluster=16"): (
        "Launch 16 * ceil(elements / 4096) blocks of 32 threads, in clusters of 16.",
        "Set CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED first.",
    ),
    ("--n", "256", "--numerics", "fast", "--knobs", "grid=persistent,chunks=2,warps=4"): (
        "Launch min(ceil(elements / 2048), as many as the GPU holds at once) blocks of 128 threads.",
        "scale_word  scale = a * b, the bits of a as a float16 below those of b;",
    ),
    ("--n", "8", "--dtype", "float32", "--pitched"): (
        "x, y        device addresses; in place, y is x",
        "0x3eb504f3 makes the transform orthonormal",
        "columns, x_pitch, y_pitch",
    ),
}


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("order", [1, 28])
def test_the_head_of_a_standalone_kernel_says_what_its_operands_are(order: int, signed: bool) -> None:
    problem = Problem.of(order * 512, DType.FLOAT16, order=order, signed=signed)
    source = Source("kernel", "", LaunchSpec(128, 1, 0, problem.n, False, params=params_for(problem)))
    plan: Any = SimpleNamespace(problem=problem)
    head = emit._how_to_use(plan, source, load_arch("sm90"))
    for param in source.launch.params:
        assert re.search(rf"^//   .*\b{param.name}\b", head, re.MULTILINE)
    assert ("y = A X H, where X [28, 512]" in head) == ("if the matrix is Hadamard's" in head) == (order == 28)
    assert (f"{problem.n // 8} bytes each" in head) == signed
    assert max(map(len, head.splitlines())) <= 120


@pytest.mark.parametrize(("arguments", "said"), STANDALONE.items())
def test_a_standalone_kernel_includes_nothing_of_ours_and_says_how_to_use_it(
    arguments: tuple[str, ...], said: tuple[str, ...]
) -> None:
    text = succeed("emit", *arguments, "--standalone")
    assert not re.search('#include "|#pragma once', text)
    assert all(each in text for each in said)


@needs_nvcc
@pytest.mark.parametrize("arguments", STANDALONE)
def test_a_standalone_kernel_compiles_by_its_own_command_to_the_very_same_code(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    found, arch = Toolchain.find("nvcc"), load_arch("sm90")
    text = succeed("emit", *arguments, "--standalone")
    command = re.search("^//   (nvcc .*)$", text, re.MULTILINE)
    entry = re.search(r"-o (\w+)\.cubin", text)
    assert command
    assert entry
    (tmp_path / f"{entry[1]}.cu").write_text(text)
    subprocess.run([found.compiler.path, *shlex.split(command[1])[1:]], cwd=tmp_path, check=True)
    assert (tmp_path / f"{entry[1]}.cubin").stat().st_size
    launch = LaunchSpec(threads=32, cluster=1, shared_bytes=0, tile_elements=32, persistent=False)
    plain = Source(entry[1], succeed("emit", *arguments), launch)
    alone, built = found.build([replace(plain, text=text), plain], arch)
    assert alone == replace(built, source=alone.source)
