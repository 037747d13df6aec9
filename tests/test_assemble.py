"""Cubins and PTX: the releases and drivers that take them, and how bundle assemble makes those that are shipped."""

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import run, sentence, succeed
from real_compilers import needs_nvcc
from running import script
from sample_bundle import write_trials
from sample_trials import H200, PROBLEM, make_kernel, make_trial

from hadagen.compiler import compilers
from hadagen.compiler.codegen import render
from hadagen.compiler.compilers import Nvcc, Ptxas, find_tool
from hadagen.compiler.cubin import cuda_release, is_cubin
from hadagen.compiler.ptx_version import lowered
from hadagen.compiler.toolchain import Toolchain, assembled
from hadagen.errors import NoCompilerError, ToolchainError
from hadagen.plan.arch import load_arch
from hadagen.plan.knobs import Knobs, are_known
from hadagen.plan.space import build_plan
from hadagen.problem.launch import ENTRY
from hadagen.problem.problem import Problem
from hadagen.problem.trial import Kernel, kernel_digest, recipe_digest
from hadagen.tuning_db.bundle import Bundle, BundleEntry, shipped

pytestmark = pytest.mark.usefixtures("machine")


VERSION = 'if [ "$1" = --version ]; then echo "Cuda compilation tools, release 12.9, V12.9.86"; exit; fi'
PTX = ".version 9.0\n.target sm_90\n.visible .entry k() { %s ret; }\n"
SHIPPED = shipped()["sm90"]


def cubin(said: bytes) -> bytes:
    """What a cubin of CUDA 12.9 begins like, with one section."""
    head = bytearray(b"\x7fELF\x02\x01\x01\x33".ljust(128, b"\0"))
    for at, size, value in ((18, 2, 190), (20, 4, 129), (40, 8, 64), (58, 2, 64), (60, 2, 1)):
        head[at : at + size] = value.to_bytes(size, "little")
    return bytes(head) + said


@pytest.fixture
def ptxas(tmp_path: Path) -> Path:
    """An assembler of one cubin for all PTX of a version that it reads, but for what it refuses."""
    made = tmp_path / "made.cubin"
    made.write_bytes(cubin(b"made"))
    lines = (
        VERSION,
        'test "$*" = "-O3 -v -arch=sm_90 kernel.ptx -o kernel.cubin" || exit 9',
        "if grep -q 'version 9' kernel.ptx; then echo 'ptxas fatal: Unsupported .version 9.0'; exit 255; fi",
        "if grep -q trap kernel.ptx; then echo 'ptxas kernel.ptx, line 3; error: no traps'; exit 255; fi",
        "if grep -q exit kernel.ptx; then touch kernel.cubin; exit; fi",
        "echo 'ptxas info : Used 17 registers'",
        "echo '0 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads'",
        f"cp {made} kernel.cubin",
    )
    return script(tmp_path / "ptxas", *lines)


def of_ptx(chunks: int, instruction: str = "") -> Kernel:
    return make_kernel(b"cubin %d" % chunks, ptx=(PTX % instruction).encode())


RECIPE = make_trial(3, problem=Problem.of(512, "float16"))
_digest = recipe_digest(RECIPE.problem, RECIPE.knobs, RECIPE.kernel.launch)
RECIPE = replace(RECIPE, kernel=replace(RECIPE.kernel, digest=_digest, cubin=b"", ptx=b"", nvcc=""))


def test_cubins_are_made_anew_and_nothing_else_is(tmp_path: Path, ptxas: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = [make_trial(1, kernel=of_ptx(1)), make_trial(2, kernel=of_ptx(2, "mov.u32 %r1, 1;"), environment=H200)]
    with monkeypatch.context() as patch:  # as bundles were written before
        patch.setattr("hadagen.tuning_db.bundle_writer.lowered", str)
        path = write_trials(tmp_path / "old.db", [*trials, RECIPE])
    before = path.read_bytes()
    said = succeed("bundle", "assemble", path, tmp_path / "new.db", "--ptxas", ptxas, "--csv", tmp_path / "x.csv")
    assert said.startswith(f"{tmp_path / 'new.db'}: 3 winners, 2 kernels, 0.")
    assert said.endswith(" MB, by ptxas 12.9.86; its cubins load from driver 525 on\n")
    assert path.read_bytes() == before
    old, new = Bundle.open(path), Bundle.open(tmp_path / "new.db")
    new.verify()
    digest = kernel_digest(cubin(b"made"), of_ptx(1).launch)  # two kernels are one now
    wanted = [
        entry if entry.problem == RECIPE.problem else replace(entry, kernel=digest, nvcc="ptxas 12.9.86")
        for entry in old.all_entries()
    ]
    assert list(new.all_entries()) == wanted
    became = (f"{entry.kernel[:12]},{now.kernel[:12]}" for entry, now in zip(old.all_entries(), wanted, strict=True))
    assert (tmp_path / "x.csv").read_text().splitlines() == ["kernel,assembled", *sorted(became)]
    kernel = new.kernel(digest)
    assert (kernel.cubin, kernel.registers, kernel.spill_bytes) == (cubin(b"made"), 17, 4)
    assert kernel.ptx in [lowered(each.ptx.decode()).encode() for each in (of_ptx(1), of_ptx(2, "mov.u32 %r1, 1;"))]
    succeed("bundle", "assemble", tmp_path / "new.db", tmp_path / "new.db", "--ptxas", ptxas)
    assert Bundle.open(tmp_path / "new.db").digest == new.digest
    said = sentence(run("bundle", "assemble", path, tmp_path / "new.db", "--ptxas", ptxas), 2)
    assert said.endswith(f"is there already and would be lost; name a new file last, or {path} to replace it")


def test_ptx_is_left_out_where_the_recipe_gives_it_again(
    tmp_path: Path, ptxas: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    knobs = Knobs(mma_carrier="split")
    launch = build_plan(PROBLEM, knobs, load_arch("sm90")).launch
    again = make_trial(knobs=knobs.to_dict(), kernel=replace(of_ptx(1), launch=launch))
    gone = make_trial(knobs=knobs.to_dict() | {"ahead": 2}, kernel=of_ptx(2), environment=H200)
    kernels = [replace(each, digest=kernel_digest(each.cubin, each.launch)) for each in (again.kernel, gone.kernel)]
    trials = [replace(trial, kernel=kernel) for trial, kernel in zip((again, gone), kernels, strict=True)]
    path = write_trials(tmp_path / "old.db", trials)
    monkeypatch.chdir(tmp_path)
    succeed("bundle", "assemble", "--drop-ptx", path, "new.db", "--ptxas", f"./{ptxas.name}")
    new = Bundle.open("new.db")
    new.verify()
    have_ptx = {entry.gpu: bool(new.kernel(entry.kernel).ptx) for entry in new.all_entries()}
    assert have_ptx == {again.environment.gpu: False, H200.gpu: True}
    assert {new.kernel(entry.kernel).cubin for entry in new.all_entries()} == {cubin(b"made")}


@pytest.mark.parametrize(
    ("instruction", "why"),
    [
        ("trap;", "refuses it: ptxas kernel.ptx, line 3; error: no traps"),
        ("exit;", "wrote no sound cubin"),
        ("frobnicate;", "refuses it: ptxas fatal: Unsupported .version 9.0"),
    ],
)
def test_nothing_is_written_where_one_kernel_does_not_assemble(
    tmp_path: Path, ptxas: Path, instruction: str, why: str
) -> None:
    bad = of_ptx(1, instruction)
    path = write_trials(tmp_path / "old.db", [make_trial(1, kernel=bad), make_trial(2, kernel=of_ptx(2))])
    before = path.read_bytes()
    said = sentence(run("bundle", "assemble", path, path, "--ptxas", ptxas), 1)
    assert said == f"kernel {bad.digest[:12]} was not assembled: {ptxas} {why}; use another ptxas"
    assert path.read_bytes() == before


def test_a_bundle_of_recipes_alone_is_refused(tmp_path: Path, ptxas: Path) -> None:
    said = sentence(run("bundle", "assemble", shipped()["sm80"], tmp_path / "out.db", "--ptxas", str(ptxas)), 2)
    assert said.endswith("has PTX to assemble; name a bundle of measured winners")
    assert not (tmp_path / "out.db").exists()


def test_a_ptxas_is_found_like_nvcc_or_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ptxas: Path) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(compilers, "find_spec", lambda name: None)
    with pytest.raises(NoCompilerError, match=r"ptxas is not on PATH.*name one with --ptxas, or: pip install"):
        Ptxas.find()
    with pytest.raises(ToolchainError, match=r"none cannot be run \(No such file or directory\); name one with"):
        Ptxas.find(str(tmp_path / "none"))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert Ptxas.find() == Ptxas.find(str(ptxas)) == Ptxas.find("ptxas")
    assert Ptxas.find().release == "ptxas 12.9.86"


# ---- what is shipped -------------------------------------------------------------------------------------------------
def some_shipped(count: int) -> list[BundleEntry]:
    """Winners with different kernels that can be generated today, spread over the problems."""
    entries = {entry.kernel: entry for entry in Bundle.open(SHIPPED).all_entries()}
    todays = [
        entry
        for entry in entries.values()
        if entry.knobs.get("store", "plain") == "plain"
        and are_known(Knobs.like(entry.knobs).to_dict())
        and entry.problem.order == 1
        and entry.problem.io.form is None
    ]
    return todays[:: len(todays) // count]


def release_of(tool: type[Nvcc] | type[Ptxas]) -> str:
    try:
        return tool.find().release
    except ToolchainError:
        return "none"


@needs_nvcc
@pytest.mark.skipif(
    not release_of(Nvcc).startswith("13.0.") or release_of(Ptxas) != "ptxas 12.9.86",
    reason="the shipped cubins are of the PTX of nvcc 13.0, and of ptxas 12.9.86, not of these",
)
def test_todays_generator_nvcc_and_ptxas_make_the_cubins_that_are_shipped() -> None:
    bundle, arch, entries = Bundle.open(SHIPPED), load_arch("sm90"), some_shipped(6)
    sources = [render(build_plan(entry.problem, Knobs.from_dict(entry.knobs), arch)) for entry in entries]
    for entry, source, made in zip(entries, sources, Toolchain.find("nvcc").build_all(sources, arch), strict=True):
        assert source.launch == entry.launch
        kernel = bundle.kernel(entry.kernel)
        assert kernel.entry == ENTRY
        assert is_cubin(kernel.cubin)
        (found,) = assembled([replace(kernel, ptx=made.ptx)], arch, Ptxas.find()).values()
        assert found.cubin == kernel.cubin


# ---- the CUDA release of a cubin -------------------------------------------------------------------------------------
def head_of_cubin(abi: int, version: int, said: bytes = b"") -> bytes:
    head = b"\x7fELF\x02\x01\x01" + bytes([abi]) + bytes(12) + version.to_bytes(4, "little")
    return head.ljust(64, b"\0") + said


@pytest.mark.parametrize(
    ("image", "release"),
    [  # the heads of cubins by NVRTC 12.4, NVRTC 12.9 for sm_90 and sm_100, and nvcc 13.0
        (head_of_cubin(0x33, 0x7C), 12),
        (head_of_cubin(0x33, 0x81), 12),
        (head_of_cubin(0x41, 1, b"Cuda compilation tools, release 12.9, V12.9.86"), 12),
        (head_of_cubin(0x41, 1, b"Cuda compilation tools, release 13.0, V13.0.88"), 13),
        (head_of_cubin(0x41, 1), None),
        (head_of_cubin(0x33, 0x81)[:40], None),
        (b"cubin", None),
    ],
)
def test_a_cubin_says_its_release(image: bytes, release: int | None) -> None:
    assert cuda_release(image) == release


def test_those_that_are_shipped_load_in_every_driver_of_cuda_12() -> None:
    for path in shipped().values():
        bundle = Bundle.open(path)
        images = (bundle.kernel(digest).cubin for digest in {entry.kernel for entry in bundle.all_entries()})
        assert {cuda_release(image) for image in images if image} <= {12}


# ---- the version in the head of PTX ----------------------------------------------------------------------------------
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
