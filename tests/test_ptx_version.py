"""The version in the head of a kernel's PTX: the lowest that an assembler takes, and none that hides an instruction."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from real_compilers import needs_nvcc
from sample_bundle import write_trials
from sample_trials import make_kernel, make_trial

from hadagen.compilers import find_tool
from hadagen.ptx_version import lowered
from hadagen.tuning_db.bundle import Bundle, shipped

SOME = 80  # kernels, among them one of nearly every instruction that is shipped

HEAD = ".version 9.0\n.target sm_90\n.address_size 64\n"
KERNEL = """.visible .entry hadagen_kernel(
	.param .u64 hadagen_kernel_param_0
)
.maxntid 256, 1, 1
{
	.reg .pred %p<2>;
	mov.u32 %r1, %tid.x;
	@%p1 bra $L__BB0_2; // newer: tcgen05.alloc in a comment
	{.reg .pred p; setp.ne.s32 p, %r1, 0; INSTRUCTION %r1, %r2;}
$L__BB0_2:
	ret;
}
"""


def version(module: str) -> str:
    (found,) = re.findall(r"^\.version (\S+)$", module, re.M)
    return str(found)


def module(instruction: str, head: str = HEAD) -> str:
    return head + KERNEL.replace("INSTRUCTION", instruction)


@pytest.mark.parametrize(
    ("instruction", "lowest"),
    [
        ("add.rn.bf16x2", "8.0"),
        ("ld.global.L1::no_allocate.v4.b32", "8.0"),
        ("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32", "8.1"),
        # All of these came later than what looks like them.
        ("add.rn.f32x2", "9.0"),
        ("ld.global.v8.b32", "9.0"),
        ("mov.b128", "9.0"),
        ("cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes", "9.0"),
        ("frobnicate", "9.0"),
    ],
)
def test_the_newest_instruction_decides(instruction: str, lowest: str) -> None:
    found = lowered(module(instruction))
    assert version(found) == lowest
    assert found == module(instruction).replace("9.0", lowest)


@pytest.mark.parametrize("before", ["@p ", "@!%p1 ", "again: ", "again:\n\t", "{.reg .b32 x; ", "// {\n"])
def test_an_instruction_is_seen_wherever_it_stands(before: str) -> None:
    assert version(lowered(module(before + "add.rn.f32x2"))) == "9.0"


@pytest.mark.parametrize(("said", "left"), [((".version 7.8", "sm_80"), "7.8"), ((".version 9.0", "sm_100"), "9.0")])
def test_an_older_version_and_a_newer_target_stay(said: tuple[str, str], left: str) -> None:
    head = HEAD.replace(".version 9.0", said[0]).replace("sm_90", said[1])
    assert version(lowered(module("add.f32", head))) == left


def test_what_is_no_ptx_stays() -> None:
    assert lowered("ptx") == "ptx"


def test_a_bundle_has_it(tmp_path: Path) -> None:
    kernel = make_kernel(ptx=module("add.f32").encode())
    bundle = Bundle.open(write_trials(tmp_path / "bundle.db", [make_trial(kernel=kernel)]))
    assert bundle.kernel(kernel.digest).ptx == lowered(module("add.f32")).encode() != kernel.ptx


@needs_nvcc
def test_shipped_kernels_assemble_at_that_version_and_not_below(tmp_path: Path) -> None:
    """Below is 8.0 for those of 8.1; nothing is won below 8.0 itself."""

    def assembles(text: str) -> bool:
        (tmp_path / "kernel.ptx").write_text(text)
        command = [find_tool("nvcc"), "-cubin", "-arch=sm_90", "-Xptxas=-O0", "kernel.ptx"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode == 0

    bundle = Bundle.open(shipped()["sm90"])
    digests = sorted({entry.kernel for entry in bundle.all_entries()})[:SOME]
    modules = [bundle.kernel(digest).ptx.decode() for digest in digests]
    seen: set[str] = set()
    for text in modules:
        words = set(re.findall(r"[a-z][\w.:]*\.[\w.:]+", text))
        if words <= seen:
            continue
        seen |= words
        found = lowered(text)
        assert version(found) in ("8.0", "8.1")
        assert assembles(found)
        assert version(found) == "8.0" or not assembles(found.replace(".version 8.1", ".version 8.0"))
    assert any("st.async" in word for word in seen)
