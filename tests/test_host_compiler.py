"""What the emulator is built from: both headers offer the same, and whatever is wrong with a compiler is a sentence."""

import errno
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from machine_case import COPY, Case
from running import script

from hadagen.compiler import emulator, programs
from hadagen.compiler.cache import KernelCache
from hadagen.compiler.emulator import LIBRARY, HostCompileError, HostCompilerDied, compile_host, host_texts
from hadagen.errors import StorageError, ToolchainError

TEMPLATES = Path(__file__).parent.parent / "templates"


def signatures(text: str, inline: str) -> set[str]:
    """The primitives a header offers: return type, name and parameters, templates and specializations alike."""
    found = re.findall(inline + r" (?:constexpr )?(\w+) (\w+)(?:<\w+>)?(\([^)]*\)) ?[{;]", text)
    return {re.sub(r"\s+", " ", " ".join(parts)) for parts in found}


def test_both_headers_offer_the_same_primitives() -> None:
    # Some of the device's are made by macros, so a preprocessor reads it first.
    options = ["-E", "-P", "-x", "c++", "-D__CUDACC__", "-I", str(TEMPLATES / "common")]
    command = [*shlex.split(os.environ.get("CXX", "c++")), *options, str(TEMPLATES / "device" / "primitives.cuh")]
    expanded = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    device = signatures(expanded, "__device__ __forceinline__") - {"Vec16 zero16 ()"}  # of both
    host = signatures(host_texts()["primitives.cuh"], "HADAGEN_INLINE")
    assert len(device) > 30
    assert host - device == {"u32 encode_pair (double low, double high)"}
    assert device - host == {
        "u32 shared_address (const void* shared)",
        "u32 remote_address (const void* shared, u32 rank)",
        "u32 hadamard_signs ()",
        "Zeros hidden_zeros ()",
        "Boxes boxes_of (const byte* boxes, u32 rows)",
        "u32 round_to_bfloat16 (u32 single)",
    }


def test_a_refused_source_raises_with_the_compilers_log() -> None:
    with pytest.raises(HostCompileError, match=r"refuses a kernel.*\berror\b") as caught:
        compile_host([Case("broken", "no_such_primitive();").source])
    assert "no_such_primitive" in caught.value.log


@pytest.mark.parametrize(
    ("cxx", "says"),
    [
        ("no-such-compiler", "no-such-compiler; install one or set CXX"),
        ("{0}/no program", r"cannot be run .*; set CXX to a C"),
        ("{0}/broken", "cannot build an empty library: broken; set CXX"),
        ("{0}/writes nothing", "cannot build an empty library: empty.so was not written; set CXX"),
        *((cxx, re.escape(f"CXX = {cxx!r} is no command; set it to a C++ compiler")) for cxx in (" ", '"', "g++ 'a")),
    ],
)
def test_a_compiler_that_compiles_nothing_is_not_the_sources_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cxx: str, says: str
) -> None:
    script(tmp_path / "broken", "[ $1 = --version ] || { echo broken >&2; exit 1; }")
    script(tmp_path / "writes nothing", "echo done >&2")
    script(tmp_path / "no program").write_text("no program")
    monkeypatch.setenv("CXX", cxx if "{0}" not in cxx else shlex.quote(cxx.format(tmp_path)))
    with pytest.raises(ToolchainError, match=says) as caught:
        compile_host([Case("any", COPY).source], cache_directory=tmp_path)
    assert not isinstance(caught.value, HostCompileError)


def test_what_was_built_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Case("once", COPY).source
    compile_host([source], cache_directory=tmp_path)
    monkeypatch.setattr(programs, "run", None)
    compile_host([source], cache_directory=tmp_path)
    compile_host([source, source], cache_directory=tmp_path)  # once


def test_only_what_the_same_compiler_built_of_the_same_sources_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once, other = (Case(name, COPY).source for name in ("once", "other"))
    compile_host([once], cache_directory=tmp_path)
    compile_host([other], cache_directory=tmp_path)
    assert len(list((tmp_path / "host").iterdir())) == 2
    monkeypatch.setenv("CXX", str(script(tmp_path / "c++", "[ $1 = --version ]")))
    with pytest.raises(ToolchainError, match="cannot build an empty library"):
        compile_host([once], cache_directory=tmp_path)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("kill -9 $$", "was killed by signal 9"),
        ("echo 'c++: fatal error: Killed signal terminated program cc1plus' >&2; exit 1", "Killed signal terminated"),
        ("echo 'as: $TMPDIR/x.s: No space left on device' >&2; exit 1", "No space left on device"),
    ],
)
def test_the_death_of_a_compiler_says_nothing_of_a_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, says: str
) -> None:
    monkeypatch.setenv("CXX", str(script(tmp_path / "c++", f"[ $1 = --version ] || {{ {line}; }}")))
    with pytest.raises(HostCompilerDied, match=f"{says}.*; run the same command again"):
        compile_host([Case("any", COPY).source], cache_directory=tmp_path)
    assert os.listdir(tmp_path / "work") == []


def test_a_compiler_that_was_moved_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other options, another version or another CPU make another."""

    def identity(folder: str, options: str, version: str, machine: str) -> object:
        program = script(tmp_path / folder / "c++", f"echo {version}; echo InstalledDir: {tmp_path / folder}")
        monkeypatch.setattr("platform.machine", lambda: machine)
        emulator._compiler.cache_clear()
        return emulator._compiler(f"{program} {options}").identity

    one = identity("a", "-O1", "12.2", "x86_64")
    assert identity("b", "-O1", "12.2", "x86_64") == one
    for change in (("a", "-O2", "12.2", "x86_64"), ("a", "-O1", "12.3", "x86_64"), ("a", "-O1", "12.2", "aarch64")):
        assert identity(*change) != one


@pytest.mark.parametrize("damage", ["cut off", "flipped", "of another"])
def test_a_damaged_library_is_built_again(tmp_path: Path, damage: str) -> None:
    source = Case("any", COPY).source
    compile_host([source], cache_directory=tmp_path)
    (entry,) = (tmp_path / "host").iterdir()
    library = entry / LIBRARY
    sound = library.read_bytes()
    if damage == "of another":
        compile_host([Case("other", COPY).source], cache_directory=tmp_path)
        (other,) = set((tmp_path / "host").iterdir()) - {entry}
        shutil.rmtree(entry)
        other.rename(entry)
    else:
        library.unlink()  # this process has it in memory
        library.write_bytes(sound[: len(sound) // 2] if damage == "cut off" else sound[:-99] + b"\xff" * 99)
    compile_host([source], cache_directory=tmp_path)
    assert KernelCache(tmp_path, "host", [LIBRARY]).load(entry.name)


def test_a_full_disk_is_not_taken_for_a_wrong_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(StorageError, match="No space left on device"):
        compile_host([Case("broken", "no_such_primitive();").source], cache_directory=tmp_path)
