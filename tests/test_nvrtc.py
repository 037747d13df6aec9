"""NVRTC through ctypes: the library that is found, what it refuses, and the version that it really is."""

import os
import pickle
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import fake_nvrtc
import pytest
from real_compilers import needs_nvrtc, nvrtc_libraries

from hadagen.compiler import nvrtc
from hadagen.compiler.cubin import is_cubin
from hadagen.compiler.nvrtc import FLAGS, CompileError, Nvrtc
from hadagen.errors import NoCompilerError, ToolchainError

KERNEL = 'extern "C" __global__ void kernel(int* x) { *x = %s; }\n'
SONAMES = ("libnvrtc-fake.so.13", "libnvrtc-fake.so.12")  # which no system has
IN_WHEELS = (f"nvidia/cu13/lib/{SONAMES[0]}", f"nvidia/cuda_nvrtc/lib/{SONAMES[1]}")


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is found but what a test names or puts into `tmp_path`."""
    monkeypatch.delenv("HADAGEN_NVRTC", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(nvrtc, "_MAPS", tmp_path / "maps")
    monkeypatch.setattr(nvrtc, "_SONAMES", SONAMES)


each_nvrtc = pytest.mark.parametrize("found", [pytest.param(each, id=name) for name, each in nvrtc_libraries().items()])


@each_nvrtc
def test_a_source_becomes_ptx_and_a_cubin(found: Nvrtc) -> None:
    headers = {"value.h": "#define VALUE 7"}
    made = found.compile('#include "value.h"\n' + KERNEL % "VALUE", "k.cu", "sm_90", FLAGS, headers)
    assert b".target sm_90" in made.ptx
    assert b", 7;" in made.ptx
    assert is_cubin(made.cubin)
    virtual = found.compile(KERNEL % "7", "k.cu", "compute_90", (), {})
    assert b".target sm_90" in virtual.ptx
    assert virtual.cubin == b""


@each_nvrtc
def test_the_log_says_what_a_kernel_uses(found: Nvrtc) -> None:
    shared = "__shared__ int s[128]; s[threadIdx.x] = *x; __syncthreads(); *x = s[127 - threadIdx.x];"
    log = found.compile(f'extern "C" __global__ void kernel(int* x) {{ {shared} }}', "k.cu", "sm_90", FLAGS, {}).log
    assert re.search(r"Used \d+ registers", log)
    assert " 0 bytes spill stores" in log
    assert "512 bytes smem" in log


@each_nvrtc
def test_it_says_which_version_it_is_and_what_it_compiles_for(found: Nvrtc) -> None:
    assert found.release.startswith(".".join(map(str, found.version)) + ".")
    assert f"V{found.release}" in found.banner
    assert 90 in found.archs
    assert list(found.archs) == sorted(found.archs)


@needs_nvrtc
def test_a_refused_source_is_one_sentence_with_the_whole_log_beside_it() -> None:
    found = Nvrtc.find()
    with pytest.raises(CompileError) as caught:
        found.compile("\n" + KERNEL % "one + other", "k.cu", "sm_90", FLAGS, {})
    version = ".".join(map(str, found.version))
    assert (
        str(caught.value)
        == f'NVRTC {version} cannot compile k.cu for sm_90: k.cu(2): error: identifier "one" is undefined'
    )
    assert '"other" is undefined' in caught.value.log
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.log) == (str(caught.value), caught.value.log)
    with pytest.raises(CompileError, match=r"cannot compile k\.cu for sm_1: .*invalid value for --gpu-architecture"):
        found.compile("", "k.cu", "sm_1", (), {})
    with pytest.raises(CompileError, match="unrecognized option --no-such-flag"):
        found.compile("", "k.cu", "sm_90", ("--no-such-flag",), {})


@pytest.mark.usefixtures("nowhere")
def test_where_it_is_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def put(path: Path) -> str:
        path.parent.mkdir(parents=True, exist_ok=True)
        return str(shutil.copy(library, path))

    library = fake_nvrtc.build(tmp_path / "fake.so")
    home = put(tmp_path / "home" / "lib64" / SONAMES[0])
    assert Nvrtc.find().path == home
    older = put(tmp_path / IN_WHEELS[1])
    assert Nvrtc.find().path == older
    newer = put(tmp_path / IN_WHEELS[0])
    assert Nvrtc.find().path == newer
    loaded = put(tmp_path / "torch" / "libnvrtc.so.12")
    (tmp_path / "maps").write_text(f"7f00-7f01 r-xp 00000000 fe:01 42    {loaded}\n")
    assert Nvrtc.find().path == loaded
    monkeypatch.setenv("HADAGEN_NVRTC", str(library))
    assert Nvrtc.find() == Nvrtc.at(str(library)) == Nvrtc(str(library), (13, 0))
    assert Nvrtc.find().release == "13.0.1"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HADAGEN_NVRTC", "./fake.so")
    assert Nvrtc.find().path == str(library)


@pytest.mark.parametrize(("version", "said"), [((12, 8), ""), ((12, 9), "--no-cache"), ((13, 0), "--no-cache")])
def test_a_source_that_nvrtc_knows_is_compiled_again(version: tuple[int, int], said: str, tmp_path: Path) -> None:
    """Because NVRTC's log has no report on what it kept."""
    last = f'if (FILE* f = fopen("{tmp_path / "last"}", "w")) fputs(options[count - 1], f), fclose(f)'
    library = Nvrtc.at(str(fake_nvrtc.build(tmp_path / "fake.so", last, version)))
    with pytest.raises(CompileError):
        library.compile("text", "text.cu", "sm_90", ["-flag"], {})
    assert (tmp_path / "last").read_text() == (said or "-flag")


@pytest.mark.usefixtures("nowhere")
def test_where_there_is_none_the_fix_is_named() -> None:
    with pytest.raises(NoCompilerError, match=r"NVRTC was not found .*; install PyTorch with CUDA, or: pip install"):
        Nvrtc.find()


@pytest.mark.usefixtures("nowhere")
@pytest.mark.parametrize("damage", ["empty", "cut off", "of another", "too old"])
def test_a_library_that_cannot_be_used_is_named_or_passed_over(tmp_path: Path, damage: str) -> None:
    """One that was cut off would kill the process that loads it."""
    sound = fake_nvrtc.build(tmp_path / "sound.so")
    first, second = (tmp_path / each for each in IN_WHEELS)
    first.parent.mkdir(parents=True)
    if damage == "too old":
        fake_nvrtc.build(first, version=(11, 8))
        says = rf"NVRTC 11\.8 at {first} is too old; install 12\.1 or newer"
    else:
        whole = sound.read_bytes()
        wrong = {
            "empty": b"",
            "cut off": whole[: len(whole) // 2],
            "of another": whole.replace(b"nvrtcGetE", b"nvrtcGotE"),
        }
        first.write_bytes(wrong[damage])
        says = rf"NVRTC cannot be loaded from {first} \(it is (no whole|another) library\); install PyTorch"
    with pytest.raises(ToolchainError, match=says):
        Nvrtc.find()
    second.parent.mkdir(parents=True)
    shutil.copy(sound, second)
    assert Nvrtc.find().path == str(second)


def test_what_lies_in_the_working_folder_is_not_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_nvrtc.build(tmp_path / "libnvrtc-builtins.so.13")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ToolchainError, match="cannot be loaded"):
        Nvrtc.at(SONAMES[0])
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


@needs_nvrtc
def test_a_library_without_its_other_half_is_named(tmp_path: Path) -> None:
    """In a process where that is not loaded yet."""
    alone = tmp_path / "libnvrtc.so"
    alone.symlink_to(Path(Nvrtc.find().path).resolve())
    program = (
        "import sys\nfrom hadagen.compiler.compilers import NvrtcProgram\n"
        "try:\n    NvrtcProgram.find()\nexcept Exception as error:\n    print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "HADAGEN_NVRTC": str(alone)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(f"NVRTC at {alone} compiles nothing (")
    assert "failed to open libnvrtc-builtins.so" in done.stdout


def elf(build_id: bytes, content: bytes = b"") -> bytes:
    """A library with a note of another kind and a build ID, which a program header names."""
    notes = struct.pack("<III4s", 4, 2, 5, b"GNU\0") + b"\1\2\0\0"
    notes += struct.pack("<III4s", 4, len(build_id), 3, b"GNU\0") + build_id
    header = struct.pack("<6s26xQ14xHH", b"\x7fELF\2\1", 64, 56, 2).ljust(64, b"\0")
    programs = struct.pack("<II48x", 1, 5) + struct.pack("<IIQQQQ16x", 4, 4, 176, 0, 0, len(notes))
    return header + programs + notes + content


def test_a_library_is_known_by_its_build_wherever_and_whenever_it_was_put(tmp_path: Path) -> None:
    seen: dict[str, str] = {}
    for name, content in {
        "a": elf(b"\xaa" * 20, bytes(5 << 20)),
        "b": elf(b"\xbb" * 20, bytes(5 << 20)),
        "c": elf(b"\xaa" * 20, bytes(6 << 20)),
        "d": bytes(5 << 20),  # no ELF
        "e": bytes(5 << 20)[:-1] + b"e",
        "f": b"short",
        "g": elf(b"\xaa" * 20)[:170],
    }.items():
        (tmp_path / name).write_bytes(content)
        seen[name] = nvrtc._identity(str(tmp_path / name))
        os.utime(tmp_path / name, (1, 1))
        (tmp_path / "moved").mkdir(exist_ok=True)
        (tmp_path / name).rename(tmp_path / "moved" / name)
        assert nvrtc._identity(str(tmp_path / "moved" / name)) == seen[name]
    assert len(set(seen.values())) == len(seen)
    assert seen["a"] == f"{len(elf(bytes(20))) + (5 << 20)} {'aa' * 20}"


def test_the_stamp_is_of_the_library_that_would_be_loaded(
    nowhere: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stamp() -> str:
        return nvrtc.stamp.__wrapped__()

    assert stamp() == ""
    for folder in ("nvidia/cu13/lib", "mapped"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / SONAMES[0]).write_text(folder)
    assert stamp() == nvrtc._identity(str(tmp_path / IN_WHEELS[0]))
    # One that only the system's loader finds has a path once it is loaded.
    monkeypatch.setenv("HADAGEN_NVRTC", "libnvrtc.so.13")
    (tmp_path / "mapped" / "libnvrtc.so.13.0.88").write_text("of the system")

    def load(path: str) -> None:
        (tmp_path / "maps").write_text(f"7f00-7f01 r--p 00000000 00:00 1    {tmp_path}/mapped/libnvrtc.so.13.0.88\n")

    monkeypatch.setattr(nvrtc, "_load", load)
    assert stamp() == nvrtc._identity(str(tmp_path / "mapped" / "libnvrtc.so.13.0.88"))
