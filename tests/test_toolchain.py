"""The toolchain: with real compilers where they are, and with scripts that play broken ones."""

import errno
import os
import re
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from real_compilers import needs_nvcc, needs_nvrtc
from running import script

from hadagen.compiler import compilers, toolchain
from hadagen.compiler.cache import KernelCache
from hadagen.compiler.compilers import COMPILERS, Nvcc
from hadagen.compiler.cubin import is_cubin
from hadagen.compiler.programs import Finished, Patience, Stopped
from hadagen.compiler.toolchain import BuildFailure, Toolchain, disassemble
from hadagen.errors import NoCompilerError, StorageError, ToolchainError, UsageError
from hadagen.plan.arch import Arch, load_arch
from hadagen.problem.launch import ENTRY, LaunchSpec, Source
from hadagen.problem.trial import Kernel, NotTried, kernel_digest

LAUNCH = LaunchSpec(threads=64, cluster=1, shared_bytes=1024, tile_elements=512, persistent=False)


def source(entry: str, body: str, bounds: str = "64") -> Source:
    signature = f"__launch_bounds__({bounds}) {entry}(const void* x, void* y, i64 elements, u32 scale_word)"
    text = f'#include "hadagen.cuh"\nusing namespace hadagen;\nextern "C" __global__ void {signature} {{\n{body}\n}}\n'
    return Source(entry, text, LAUNCH)


COPY = """    const i64 at = 16 * i64(thread_index());
    if (at < elements) store16(static_cast<byte*>(y) + at, load16(static_cast<const byte*>(x) + at));"""
SHARED = """    HADAGEN_SHARED(shared);
    shared_store16(shared + 16 * thread_index(), load16(static_cast<const byte*>(x) + 16 * thread_index()));
    block_sync();
    store16(static_cast<byte*>(y) + 16 * thread_index(), shared_load16(shared + 1008 - 16 * thread_index()));"""
# More values alive at once than 64 registers hold.
SPILLING = """    __shared__ u64 barriers[64];
    barriers[thread_index() % 64] = u64(elements);
    Vec16 v[64];
    #pragma unroll
    for (int i = 0; i < 64; ++i) v[i] = load16(static_cast<const byte*>(x) + 16 * (64 * thread_index() + i));
    block_sync();
    #pragma unroll
    for (int i = 0; i < 64; ++i) store16(static_cast<byte*>(y) + barriers[63 - i] + 16 * i, v[63 - i]);"""
WRONG = "    undeclared(x);"
# Passes the front end and not the back end: more static shared memory than a kernel may have.
TOO_LARGE = """    __shared__ byte large[65536];
    large[thread_index()] = byte(elements);
    block_sync();
    static_cast<byte*>(y)[thread_index()] = large[elements & 65535];"""


@pytest.fixture(scope="session")
def arch() -> Arch:
    return load_arch("sm90")


def real(kind: str, tmp_path: Path) -> Toolchain:
    return Toolchain(COMPILERS[kind].find(), cache=KernelCache(tmp_path / "cache"))


@pytest.fixture
def nvcc(tmp_path: Path) -> Toolchain:
    return real("nvcc", tmp_path)


@pytest.fixture(params=[pytest.param("nvrtc", marks=needs_nvrtc), pytest.param("nvcc", marks=needs_nvcc)])
def tools(request: pytest.FixtureRequest, tmp_path: Path) -> Toolchain:
    return real(request.param, tmp_path)


@pytest.fixture
def no_tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with no toolkit, and a cache of its own."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("HADAGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("HADAGEN_NVRTC", str(tmp_path / "none.so"))
    monkeypatch.setattr(compilers, "find_spec", lambda name: None)


@dataclass(frozen=True)
class Told:
    """What `Toolchain` asks of a compiler, and one that cannot compile."""

    version: str = "release 13.0, V13.0.88"
    flags: tuple[str, ...] = ("-std=c++17", "-O3")
    release: str = "13.0.88"
    kind: str = "told"
    path: str = "/told"
    hint: str = "give it up"

    def compile(self, stem: str, arch: str, folder: Path, stopped: Event) -> Finished:
        raise AssertionError(f"{stem} should not be compiled")


def kernels(built: list[Kernel | BuildFailure | NotTried]) -> list[Kernel]:
    assert not [made for made in built if not isinstance(made, Kernel)]
    return [made for made in built if isinstance(made, Kernel)]


# ---- real compilers --------------------------------------------------------------------------------------------------


def test_a_batch_comes_back_in_order_and_only_what_is_wrong_fails(tools: Toolchain, arch: Arch) -> None:
    sources = [
        source("copy", COPY),
        source("wrong", WRONG),
        source("wrong_again", WRONG),
        source("shares", SHARED),
        source("too_large", TOO_LARGE),
        replace(source("present", COPY), entry="absent"),
        source("copies", COPY),
    ]
    copy, wrong, again, shares, too_large, absent, copies = tools.build(sources, arch, jobs=2)
    assert isinstance(wrong, BuildFailure)
    assert wrong.entry == "wrong"
    assert '.cu(4): error: identifier "undeclared"' in wrong.log
    assert again == replace(wrong, entry="wrong_again")  # compiled once
    assert isinstance(too_large, BuildFailure)
    assert "too much shared data" in too_large.summary
    assert absent == BuildFailure("absent", "the source defines no kernel called absent")

    one, other, third = kernels([copy, copies, shares])
    assert (one.entry, one.arch, one.launch, one.nvcc) == (ENTRY, "sm90", LAUNCH, tools.compiler.release)
    assert one.source == sources[0].text.replace("copy(", f"{ENTRY}(")
    assert one.digest == kernel_digest(one.cubin, one.launch)
    # the same code under two names is one kernel
    assert (one.cubin, one.ptx) == (other.cubin, other.ptx)
    assert one.digest != third.digest
    assert f".entry {ENTRY}(".encode() in one.ptx
    assert b"\n.global" not in one.ptx  # no variables of the headers


def test_sources_of_one_name_do_not_disturb_each_other(tools: Toolchain, arch: Arch) -> None:
    one, other, again = kernels(tools.build([source("k", COPY), source("k", SHARED), source("k", COPY)], arch, jobs=2))
    assert one.digest == again.digest != other.digest


def test_resources_are_read_from_the_report(tools: Toolchain, arch: Arch) -> None:
    small, spilling = kernels(tools.build([source("small", COPY), source("spilling", SPILLING, "1024, 1")], arch))
    assert 8 <= small.registers <= 32
    assert (small.spill_bytes, small.static_shared_bytes) == (0, 0)
    assert spilling.registers == 64
    assert spilling.spill_bytes > 0
    assert spilling.static_shared_bytes >= 512


def test_what_is_cached_needs_no_compiler(tools: Toolchain, arch: Arch) -> None:
    sources = [source("copy", COPY), source("shares", SHARED)]
    built = tools.build(sources, arch)
    without = replace(tools, compiler=Told(tools.compiler.version, tools.compiler.flags, tools.compiler.release))
    assert without.build(sources, arch) == built
    moved = replace(LAUNCH, persistent=True)
    [relaunched] = kernels(without.build([replace(sources[0], launch=moved)], arch))
    assert relaunched.launch == moved


def test_builders_of_one_kernel_agree(tools: Toolchain, arch: Arch) -> None:
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda _: tools.build([source("copy", COPY)], arch, jobs=1), range(3)))
    assert results[0] == results[1] == results[2]
    assert (len(os.listdir(tools.cache.root / "kernels")), os.listdir(tools.cache.root / "work")) == (1, [])


def test_a_full_disk_is_not_taken_for_a_source_that_is_wrong(
    tools: Toolchain, arch: Arch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    for body in (COPY, WRONG):
        with pytest.raises(StorageError, match="No space left on device"):
            tools.build([source("k", body)], arch)
    assert os.listdir(tools.cache.root / "work") == []


# ---- the key ---------------------------------------------------------------------------------------------------------


def perturbed(tools: Toolchain, arch: Arch) -> dict[str, tuple[Toolchain, Source, Any]]:
    code = source("k", COPY)
    headers = dict(tools.headers)
    changed = {
        f"header {name}": replace(tools, headers={**headers, name: text + "\n"}) for name, text in headers.items()
    }
    return {
        "nothing": (tools, code, arch),
        "compiler": (replace(tools, compiler=Told(version="V13.0.89")), code, arch),
        "flags": (replace(tools, compiler=Told(flags=("-std=c++17",))), code, arch),
        "order of flags": (replace(tools, compiler=Told(flags=("-O3", "-std=c++17"))), code, arch),
        "arch": (tools, code, replace(arch, nvcc_arch="sm_90a")),
        "source": (tools, replace(code, text=code.text + "\n"), arch),
        **{name: (other, code, arch) for name, other in changed.items()},
        "another header": (replace(tools, headers={**headers, "another.cuh": ""}), code, arch),
    }


def test_all_that_a_build_depends_on_reaches_the_key(arch: Arch) -> None:
    keys = [tools.key(code, target) for tools, code, target in perturbed(Toolchain(Told()), arch).values()]
    assert len(set(keys)) == len(keys)
    renamed = source("renamed", COPY)
    assert Toolchain(Told()).key(renamed, arch) == keys[0]


def test_what_nvcc_adds_to_its_flags_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Nvcc("nvcc", "").flags
    for name in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "-use_fast_math")
            assert Nvcc("nvcc", "").flags != plain


def test_the_headers_are_those_of_the_package() -> None:
    assert toolchain.device_headers().keys() == {
        "activations.cuh",
        "codes.cuh",
        "hadagen.cuh",
        "primitives.cuh",
        "right.cuh",
        "words.cuh",
    }
    assert "asm volatile" in toolchain.device_headers()["primitives.cuh"]


# ---- compilers that are missing, elsewhere or broken -----------------------------------------------------------------

VERSION = "echo 'Cuda compilation tools, release 13.0, V13.0.88'"


@pytest.mark.usefixtures("no_tools")
@pytest.mark.parametrize(
    ("kind", "error", "said"),
    [
        (["nvcc"], NoCompilerError, r"nvcc is not on PATH.*pip install '\.\[nvcc\]' in a checkout of hadagen"),
        ([], ToolchainError, r"NVRTC cannot be loaded from .*none\.so"),
        (["gcc"], UsageError, "there is no compiler 'gcc'; choose one of nvrtc, nvcc"),
    ],
)
def test_no_compiler_is_one_sentence_with_the_fix(kind: list[str], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        Toolchain.find(*kind)


@pytest.mark.usefixtures("no_tools")
def test_nvcc_is_looked_for_on_path_then_cuda_home_then_wheels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script(tmp_path / "nvidia" / "cu12" / "bin" / "nvcc", VERSION)
    wheels = script(tmp_path / "nvidia" / "cu13" / "bin" / "nvcc", VERSION)
    home = script(tmp_path / "home" / "bin" / "nvcc", VERSION)
    path = script(tmp_path / "path" / "nvcc", VERSION)
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path / "nvidia")])
    monkeypatch.setattr(compilers, "find_spec", lambda name: spec)
    assert Nvcc.find().path == str(wheels)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert Nvcc.find().path == str(home)
    monkeypatch.setenv("PATH", f"{path.parent}:/usr/bin:/bin")
    found = Nvcc.find()
    assert (found.path, found.version) == (str(path), "Cuda compilation tools, release 13.0, V13.0.88")
    assert found.release == "13.0.88"


@pytest.mark.usefixtures("no_tools")
@pytest.mark.parametrize(
    ("lines", "mode", "message"),
    [
        (["echo 'nvcc: cannot find cicc'", "exit 1"], 0o755, "broken: nvcc: cannot find cicc;"),
        (["exit 3"], 0o755, "broken: exit code 3;"),
        (["exit 0"], 0o644, r"cannot be run \(Permission denied\);"),
    ],
)
def test_an_nvcc_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lines: list[str], mode: int, message: str
) -> None:
    script(tmp_path / "bin" / "nvcc", *lines, mode=mode)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(ToolchainError, match=message):
        Nvcc.find()


def test_a_compiler_that_compiles_nothing_is_not_taken_for_wrong_sources(tmp_path: Path, arch: Arch) -> None:
    class Broken(Told):
        def compile(self, stem: str, arch: str, folder: Path, stopped: Event) -> Finished:
            return Finished(1, "fatal   : it is broken")

    tools = Toolchain(Broken(), cache=KernelCache(tmp_path))
    with pytest.raises(
        ToolchainError, match="/told cannot compile an empty kernel for sm_90: fatal   : it is broken; give it up"
    ):
        tools.build([source("copy", COPY), source("shares", SHARED)], arch, jobs=1)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ToolchainError])
def test_what_ends_a_batch_leaves_the_rest_uncompiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arch: Arch, error: type[BaseException]
) -> None:
    started, cancelled = Event(), Event()
    compiled = []

    class Slow(Told):
        def compile(self, stem: str, arch: str, folder: Path, stopped: Event) -> Finished:
            started.set()
            cancelled.wait(10)
            compiled.append((stem, stopped.wait(10)))
            raise Stopped

    def ended(futures: Any) -> Any:
        *_, last = futures
        last.add_done_callback(lambda future: cancelled.set())
        started.wait()
        raise error

    monkeypatch.setattr(toolchain, "as_completed", ended)
    with pytest.raises(error):
        Toolchain(Slow(), cache=KernelCache(tmp_path)).build(
            [source("first", COPY), source("second", SHARED)], arch, jobs=1
        )
    assert compiled == [("first", True)]


def test_a_tool_puts_its_own_files_where_it_works(tmp_path: Path) -> None:
    """Where there is room for them, and they are removed with the rest."""
    script(tmp_path / "tool", 'echo "$TMPDIR"')
    assert compilers.run([str(tmp_path / "tool")], "", tmp_path).log.strip() == str(tmp_path)


def test_a_tool_is_out_of_reach_of_ctrl_c(tmp_path: Path) -> None:
    """Else what it had not finished would pass for a source that does not compile."""
    script(tmp_path / "tool", "cut -d' ' -f6 /proc/$$/stat")
    assert int(compilers.run([str(tmp_path / "tool")], "").log) != os.getsid(0)


def test_jobs_below_one_are_refused(arch: Arch) -> None:
    with pytest.raises(UsageError, match="jobs = 0 is not possible; give at least 1"):
        Toolchain(Told()).build([], arch, jobs=0)


def test_a_report_of_another_format_is_not_taken_for_zero() -> None:
    with pytest.raises(ToolchainError, match="its format is new"):
        toolchain._reported("ptxas: all is well", r"Used (\d+) registers")


# ---- compilers that die, hang or lie ---------------------------------------------------------------------------------


@pytest.fixture
def played(tools: Toolchain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Toolchain]:
    """The real compiler behind a script that may do something else. There `first` succeeds the first time that it is
    asked, and `compile` does what the compiler would do."""

    def play(lines: str) -> Toolchain:
        compiler = tools.compiler
        real = compiler.path if isinstance(compiler, Nvcc) else sys.executable
        first = f"first() {{ mkdir {tmp_path}/once 2>/dev/null; }}"
        fake = str(script(tmp_path / "fake", first, f'compile() {{ {real} "$@"; }}', lines, 'compile "$@"'))
        if isinstance(compiler, Nvcc):
            return replace(tools, compiler=replace(compiler, path=fake))
        monkeypatch.setattr(sys, "executable", fake)
        return tools

    return play


SOURCES = [source(name, f"{COPY}\n    // {name}") for name in "abcd"]


@pytest.mark.parametrize(
    ("dies", "says"),
    [
        ("kill -9 $$", "was killed by signal 9"),
        ("exit 0", "wrote no sound ptx though it ended well"),
        ('compile "$@"; head -c 999 a.cubin > b; mv b a.cubin; exit 0', "wrote no sound cubin though it ended well"),
        ('compile "$@"; echo garbage > a.ptx; exit 0', "wrote no sound ptx though it ended well"),
        ("echo NVRTC_ERROR_OUT_OF_MEMORY; exit 1", "failed (NVRTC_ERROR_OUT_OF_MEMORY)"),
        ("echo 'OSError: No space left on device'; exit 1", "failed (OSError: No space left on device)"),
    ],
)
def test_the_death_of_a_gpu_compiler_says_nothing_of_a_source(
    played: Callable[[str], Toolchain], arch: Arch, dies: str, says: str
) -> None:
    tools = played(f"first && {{ {dies}; }}")
    (built,) = tools.build(SOURCES[:1], arch, jobs=1)
    assert built == NotTried(f"{tools.compiler.kind} {says}")
    assert not (tools.cache.root / "kernels").exists()
    kernels(tools.build(SOURCES[:1], arch, jobs=1))


def test_a_compiler_that_always_dies_ends_the_run(played: Callable[[str], Toolchain], arch: Arch) -> None:
    tools = played("kill -9 $$")
    with pytest.raises(ToolchainError, match="was killed by signal 9, for 3 kernels in a row"):
        tools.build(SOURCES, arch, jobs=1)
    with pytest.raises(ToolchainError, match=r"a was not compiled: nv\w+ was killed by signal 9; run the same command"):
        replace(tools, patience=Patience()).build_all(SOURCES[:1], arch)


def test_a_hung_compiler_ends_with_the_caller(played: Callable[[str], Toolchain], arch: Arch, tmp_path: Path) -> None:
    stopped = Event()
    tools = played(f"touch {tmp_path}/hangs; sleep 1000")
    with ThreadPoolExecutor(1) as pool:
        building = pool.submit(tools.build, SOURCES, arch, stopped=stopped)
        while not (tmp_path / "hangs").exists():
            time.sleep(0.01)
        stopped.set()
        with pytest.raises(Stopped):
            building.result()
    assert os.listdir(tools.cache.root / "work") == []


@needs_nvcc
@pytest.mark.parametrize("name", ["$(touch planted)", "`touch planted`"])
def test_a_path_that_a_shell_would_run_is_refused(nvcc: Toolchain, arch: Arch, tmp_path: Path, name: str) -> None:
    tools = replace(nvcc, cache=KernelCache(tmp_path / name))
    with pytest.raises(StorageError, match=r"has a [$`] in its path.*; set HADAGEN_CACHE to another directory"):
        tools.build(SOURCES[:1], arch)
    assert not list(tmp_path.rglob("planted"))


def test_only_a_whole_cubin_is_one(tools: Toolchain, arch: Arch) -> None:
    (kernel,) = kernels(tools.build(SOURCES[:1], arch))
    cubin = kernel.cubin
    assert is_cubin(cubin)
    assert not any(map(is_cubin, (b"", cubin[:-1], cubin[:64], cubin[:40], b"\x7fELF", bytes(200), cubin[1:])))
    assert not is_cubin(Path(os.path.realpath("/proc/self/exe")).read_bytes())


# ---- the disassembler ------------------------------------------------------------------------------------------------

KERNEL = Kernel("", ENTRY, "sm90", "", b"a cubin", b"", LAUNCH, 32, 0, "13.0.88")


@pytest.mark.usefixtures("no_tools")
def test_kernels_are_disassembled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ToolchainError, match="nvdisasm is not on PATH"):
        disassemble(KERNEL)
    script(tmp_path / "bin" / "nvdisasm", 'cat "$2"')
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert disassemble(KERNEL) == "a cubin"
    script(tmp_path / "bin" / "nvdisasm", "echo 'nvdisasm fatal: not supported'", "exit 255")
    with pytest.raises(ToolchainError, match=re.escape("cannot read a cubin of compiler 13.0.88: nvdisasm fatal")):
        disassemble(KERNEL)
