"""The toolchain: with a real nvcc where there is one, and with scripts that play a broken one."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from real_nvcc import needs_nvcc

from hadagen import ptx, toolchain
from hadagen.arch import Arch, load_arch
from hadagen.cache import KernelCache
from hadagen.cubin import is_cubin
from hadagen.errors import StorageError, ToolchainError, UsageError
from hadagen.launch import LaunchSpec, Source
from hadagen.programs import Patience, Stopped
from hadagen.toolchain import BuildFailure, Toolchain, disassemble
from hadagen.trial import Kernel, NotTried, kernel_digest

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


@pytest.fixture
def nvcc(tmp_path: Path) -> Toolchain:
    return replace(Toolchain.find(), cache=KernelCache(tmp_path / "cache"))


@pytest.fixture
def no_tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with no toolkit, and a cache of its own."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("HADAGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(toolchain, "find_spec", lambda name: None)


def script(path: Path, *lines: str, mode: int = 0o755) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(mode)
    return path


def kernels(built: list[Kernel | BuildFailure | NotTried]) -> list[Kernel]:
    assert not [made for made in built if not isinstance(made, Kernel)]
    return [made for made in built if isinstance(made, Kernel)]


# ---- a real nvcc -----------------------------------------------------------------------------------------------------


@needs_nvcc
def test_a_batch_comes_back_in_order_and_only_what_is_wrong_fails(nvcc: Toolchain, arch: Arch) -> None:
    sources = [
        source("copy", COPY),
        source("wrong", WRONG),
        source("shares", SHARED),
        source("too_large", TOO_LARGE),
        replace(source("present", COPY), entry="absent"),
        source("copies", COPY),
    ]
    copy, wrong, shares, too_large, absent, copies = nvcc.build(sources, arch, jobs=2)
    assert isinstance(wrong, BuildFailure)
    assert wrong.entry == "wrong"
    assert 'wrong.cu(4): error: identifier "undeclared"' in wrong.log
    assert isinstance(too_large, BuildFailure)
    assert "too much shared data" in too_large.log
    assert absent == BuildFailure("absent", "the source defines no kernel called absent")

    one, other, third = kernels([copy, copies, shares])
    assert (one.entry, one.arch, one.launch, one.nvcc) == (ptx.ENTRY, "sm90", LAUNCH, nvcc.release)
    assert one.source == sources[0].text
    assert one.digest == kernel_digest(one.cubin, one.launch)
    # the same code under two names is one kernel
    assert (one.cubin, one.ptx) == (other.cubin, other.ptx)
    assert one.digest != third.digest
    assert f".entry {ptx.ENTRY}(".encode() in one.ptx


@needs_nvcc
def test_a_kernel_does_not_depend_on_what_is_built_with_it(nvcc: Toolchain, arch: Arch, tmp_path: Path) -> None:
    together = kernels(nvcc.build([source("a", SHARED), source("b", COPY), source("a2", SPILLING)], arch, jobs=1))
    alone = replace(nvcc, cache=KernelCache(tmp_path / "another"))
    assert kernels(alone.build([source("b", COPY)], arch)) == together[1:2]


@needs_nvcc
def test_sources_of_one_name_do_not_disturb_each_other(nvcc: Toolchain, arch: Arch) -> None:
    one, other, again = kernels(nvcc.build([source("k", COPY), source("k", SHARED), source("k", COPY)], arch, jobs=1))
    assert one.digest == again.digest != other.digest


@needs_nvcc
def test_resources_are_read_from_the_report(nvcc: Toolchain, arch: Arch) -> None:
    small, spilling = kernels(nvcc.build([source("small", COPY), source("spilling", SPILLING, "1024, 1")], arch))
    assert 8 <= small.registers <= 32
    assert (small.spill_bytes, small.static_shared_bytes) == (0, 0)
    assert spilling.registers == 64
    assert spilling.spill_bytes > 0
    assert spilling.static_shared_bytes >= 512


@needs_nvcc
def test_what_is_cached_needs_no_compiler(nvcc: Toolchain, arch: Arch) -> None:
    sources = [source("copy", COPY), source("shares", SHARED)]
    built = nvcc.build(sources, arch)
    without = replace(nvcc, nvcc=Path("/nonexistent/nvcc"))
    assert without.build(sources, arch) == built
    moved = replace(LAUNCH, persistent=True)
    [relaunched] = kernels(without.build([replace(sources[0], launch=moved)], arch))
    assert relaunched.launch == moved


@needs_nvcc
def test_a_damaged_entry_is_built_again(nvcc: Toolchain, arch: Arch) -> None:
    sources = [source("copy", COPY)]
    built = nvcc.build(sources, arch)
    cubin = nvcc.cache.root / "kernels" / nvcc.key(sources[0], arch) / "kernel.cubin"
    cubin.write_bytes(cubin.read_bytes()[:100])
    assert nvcc.build(sources, arch) == built
    assert cubin.read_bytes() == kernels(built)[0].cubin


@needs_nvcc
def test_builders_of_one_kernel_agree(nvcc: Toolchain, arch: Arch) -> None:
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda _: nvcc.build([source("copy", COPY)], arch, jobs=1), range(3)))
    assert results[0] == results[1] == results[2]
    assert len(os.listdir(nvcc.cache.root / "kernels")) == 1
    assert os.listdir(nvcc.cache.root / "work") == []


@needs_nvcc
def test_a_full_disk_is_not_taken_for_a_wrong_source(
    nvcc: Toolchain, arch: Arch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    for body in (COPY, WRONG):
        with pytest.raises(StorageError, match="No space left on device"):
            nvcc.build([source("k", body)], arch)
    assert os.listdir(nvcc.cache.root / "work") == []


# ---- the key ---------------------------------------------------------------------------------------------------------


def perturbed(tools: Toolchain, arch: Arch) -> dict[str, tuple[Toolchain, Source, Any]]:
    code = source("k", COPY)
    headers = dict(tools.headers)
    changed = {
        f"header {name}": replace(tools, headers={**headers, name: text + "\n"}) for name, text in headers.items()
    }
    return {
        "nothing": (tools, code, arch),
        "nvcc": (replace(tools, version=tools.version + " "), code, arch),
        "flags": (replace(tools, flags=(*tools.flags, "-G")), code, arch),
        "order of flags": (replace(tools, flags=tools.flags[::-1]), code, arch),
        "arch": (tools, code, replace(arch, nvcc_arch="sm_90a")),
        "source": (tools, replace(code, text=code.text + "\n"), arch),
        **{name: (other, code, arch) for name, other in changed.items()},
        "another header": (replace(tools, headers={**headers, "another.cuh": ""}), code, arch),
    }


def test_all_that_a_build_depends_on_reaches_the_key(arch: Arch, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = Toolchain(Path("nvcc"), "release 13.0, V13.0.88")
    keys = [tools.key(code, target) for tools, code, target in perturbed(tools, arch).values()]
    for name in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "-use_fast_math")
            keys.append(tools.key(source("k", COPY), arch))
    assert len(set(keys)) == len(keys)


def test_the_headers_are_those_of_the_package() -> None:
    assert toolchain.device_headers().keys() == {"hadagen.cuh", "primitives.cuh", "words.cuh"}
    assert "asm volatile" in toolchain.device_headers()["primitives.cuh"]


# ---- nvcc that is missing, elsewhere or broken -----------------------------------------------------------------------

VERSION = "echo 'Cuda compilation tools, release 13.0, V13.0.88'"


@pytest.mark.usefixtures("no_tools")
def test_no_nvcc_is_one_sentence_with_the_fix() -> None:
    with pytest.raises(ToolchainError, match=r"nvcc is not on PATH.*pip install 'hadagen\[nvcc\]'"):
        Toolchain.find()


@pytest.mark.usefixtures("no_tools")
def test_nvcc_is_looked_for_on_path_then_cuda_home_then_wheels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script(tmp_path / "nvidia" / "cu12" / "bin" / "nvcc", VERSION)
    wheels = script(tmp_path / "nvidia" / "cu13" / "bin" / "nvcc", VERSION)
    home = script(tmp_path / "home" / "bin" / "nvcc", VERSION)
    path = script(tmp_path / "path" / "nvcc", VERSION)
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path / "nvidia")])
    monkeypatch.setattr(toolchain, "find_spec", lambda name: spec)
    assert Toolchain.find().nvcc == wheels
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert Toolchain.find().nvcc == home
    monkeypatch.setenv("PATH", f"{path.parent}:/usr/bin:/bin")
    found = Toolchain.find()
    assert found.nvcc == path
    assert found.version == "Cuda compilation tools, release 13.0, V13.0.88"
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
        Toolchain.find()


@pytest.mark.usefixtures("no_tools")
@pytest.mark.parametrize("front_end_works", [False, True])
def test_an_nvcc_that_compiles_nothing_is_not_taken_for_wrong_sources(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arch: Arch, front_end_works: bool
) -> None:
    module = ".version 8.0\n.visible .entry copy(\n)\n{\n}\n.visible .entry shares(\n)\n{\n}\n"
    script(
        tmp_path / "bin" / "nvcc",
        f'[ "$1" = --version ] && {VERSION} && exit 0',
        # the last argument is the output
        f'case "$*" in *-ptx*) for last; do :; done; echo "{module}" > "$last"; exit 0;; esac' * front_end_works,
        "echo 'nvcc fatal   : it is broken' >&2",
        "exit 1",
    )
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(ToolchainError, match=r"cannot compile an empty kernel for sm_90: nvcc fatal +: it is broken;"):
        Toolchain.find().build([source("copy", COPY), source("shares", SHARED)], arch, jobs=1)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ToolchainError])
def test_what_ends_a_batch_leaves_the_rest_uncompiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arch: Arch, error: type[BaseException]
) -> None:
    started, cancelled = Event(), Event()
    compiled = []

    def back_end(build: Any, key: str, source: Source, module: str) -> BuildFailure:
        compiled.append(source.entry)
        started.set()
        cancelled.wait(10)
        return BuildFailure(source.entry, "")

    def ended(futures: Any) -> Any:
        *_, last = futures
        last.add_done_callback(lambda future: cancelled.set())
        started.wait()
        raise error

    waits = iter([toolchain.as_completed, ended])  # for the front end, then for the back ends
    monkeypatch.setattr(toolchain, "as_completed", lambda futures: next(waits)(futures))
    monkeypatch.setattr(toolchain._Build, "_front_end", lambda build, unit: [(*each, "") for each in unit])
    monkeypatch.setattr(toolchain._Build, "_back_end", back_end)
    tools = Toolchain(Path("nvcc"), "", cache=KernelCache(tmp_path))
    with pytest.raises(error):
        tools.build([source("first", COPY), source("second", SHARED)], arch, jobs=1)
    assert compiled == ["first"]


def test_a_tool_puts_its_own_files_where_it_works(tmp_path: Path) -> None:
    """Where there is room for them, and they are removed with the rest."""
    script(tmp_path / "tool", 'echo "$TMPDIR"')
    assert toolchain._run([tmp_path / "tool"], tmp_path).log.strip() == str(tmp_path)


def test_a_tool_is_out_of_reach_of_ctrl_c(tmp_path: Path) -> None:
    """Else what it had not finished would pass for a source that does not compile."""
    script(tmp_path / "tool", "cut -d' ' -f6 /proc/$$/stat")
    assert int(toolchain._run([tmp_path / "tool"]).log) != os.getsid(0)


def test_jobs_below_one_are_refused(arch: Arch) -> None:
    with pytest.raises(UsageError, match="jobs = 0 is not possible; give at least 1"):
        Toolchain(Path("nvcc"), "").build([], arch, jobs=0)


def test_a_report_of_another_format_is_not_taken_for_zero() -> None:
    with pytest.raises(ToolchainError, match="its format is new"):
        toolchain._reported("ptxas: all is well", r"Used (\d+) registers")


# ---- an nvcc that dies, hangs or lies --------------------------------------------------------------------------------


@pytest.fixture
def played(nvcc: Toolchain, tmp_path: Path) -> Callable[[str], Toolchain]:
    """The real nvcc behind a script that may do something else. There `$out` is the file to be written, and `first`
    succeeds the first time that it is asked."""

    def play(lines: str) -> Toolchain:
        first = f"first() {{ mkdir {tmp_path}/once 2>/dev/null; }}"
        out = "for out; do :; done"
        return replace(nvcc, nvcc=script(tmp_path / "nvcc", first, out, lines, f'exec {nvcc.nvcc} "$@"'))

    return play


SOURCES = [source(name, f"{COPY}\n    // {name}") for name in "abcd"]


@needs_nvcc
@pytest.mark.parametrize("end", ["-ptx", "-cubin"])
@pytest.mark.parametrize(
    ("dies", "says"),
    [
        ("kill -9 $$", "nvcc was killed by signal 9"),
        ("exit 0", "nvcc wrote no sound {} though it ended well"),
        ("echo garbage > $out; exit 0", "nvcc wrote no sound {} though it ended well"),
    ],
)
def test_a_death_of_nvcc_says_nothing_of_a_source(
    played: Callable[[str], Toolchain], arch: Arch, end: str, dies: str, says: str
) -> None:
    tools = played(f'case "$*" in *{end}*) first && {{ {dies}; }};; esac')
    (built,) = tools.build(SOURCES[:1], arch, jobs=1)
    assert built == NotTried(says.format(end[1:]))
    assert not (tools.cache.root / "kernels").exists()
    kernels(tools.build(SOURCES[:1], arch, jobs=1))


@needs_nvcc
def test_where_nvcc_dies_of_many_sources_each_is_tried_alone(played: Callable[[str], Toolchain], arch: Arch) -> None:
    tools = played('case "$*" in *-ptx*) first && kill -9 $$;; esac')
    assert len(kernels(tools.build(SOURCES, arch, jobs=1))) == len(SOURCES)


@needs_nvcc
def test_an_nvcc_that_always_dies_ends_the_run(played: Callable[[str], Toolchain], arch: Arch) -> None:
    tools = played('case "$*" in *-cubin*) kill -9 $$;; esac')
    with pytest.raises(ToolchainError, match="nvcc was killed by signal 9, for 3 kernels in a row"):
        tools.build(SOURCES, arch, jobs=1)
    with pytest.raises(ToolchainError, match="a was not compiled: nvcc was killed by signal 9; run the same command"):
        replace(tools, patience=Patience()).build_all(SOURCES[:1], arch)


@needs_nvcc
def test_a_hung_nvcc_ends_with_the_caller(played: Callable[[str], Toolchain], arch: Arch, tmp_path: Path) -> None:
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


@needs_nvcc
def test_only_a_whole_cubin_is_one(nvcc: Toolchain, arch: Arch) -> None:
    (kernel,) = kernels(nvcc.build(SOURCES[:1], arch))
    cubin = kernel.cubin
    assert is_cubin(cubin)
    assert not any(map(is_cubin, (b"", cubin[:-1], cubin[:64], cubin[:40], b"\x7fELF", bytes(200), cubin[1:])))
    host = Path(os.path.realpath("/proc/self/exe")).read_bytes()
    assert not is_cubin(host)


# ---- the disassembler ------------------------------------------------------------------------------------------------

KERNEL = Kernel("", ptx.ENTRY, "sm90", "", b"a cubin", b"", LAUNCH, 32, 0, "13.0.88")


@pytest.mark.usefixtures("no_tools")
def test_disassembling(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ToolchainError, match="nvdisasm is not on PATH"):
        disassemble(KERNEL)
    script(tmp_path / "bin" / "nvdisasm", 'cat "$2"')
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert disassemble(KERNEL) == "a cubin"
    script(tmp_path / "bin" / "nvdisasm", "echo 'nvdisasm fatal: not supported'", "exit 255")
    with pytest.raises(ToolchainError, match=re.escape("cannot read a cubin of nvcc 13.0.88: nvdisasm fatal")):
        disassemble(KERNEL)
