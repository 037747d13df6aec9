"""The two compilers: NVRTC, which is the default, and nvcc, which is the reference.

When tuning, both run as programs, because a compiler may crash or hang, and only a program can be killed. The kernel of
a call is compiled in this process (`NvrtcHere`), which is faster.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from threading import Event

from hadagen.compiler import nvrtc, nvrtc_calls, programs
from hadagen.compiler.programs import Finished, one_line
from hadagen.errors import NoCompilerError, StorageError, ToolchainError, install, printable

_OF_A_SHELL = {"$", "`"}  # a shell replaces these even within the quotation marks of nvcc around a path
NVCC_HINT = f"install the CUDA toolkit 12.1 or newer, or: {install('nvcc')}"
# The last ptxas whose cubins for sm_90 load in drivers before 580.
PTXAS_HINT = "name one with --ptxas, or: pip install nvidia-cuda-nvcc-cu12==12.9.86"


@dataclass(frozen=True)
class NvrtcProgram:
    """NVRTC, in a process for each source.

    Like `Nvcc`, it compiles one source at a time, in a program of its own, and has these attributes:

    version: all that the compiler says of its version. release: the version as kernels record it, such as
    "nvrtc 13.0.88", or "13.0.88" for nvcc. flags: everything besides source, headers and arch that its
    code depends on. hint: what to do if it compiles nothing.
    """

    library: nvrtc.Nvrtc
    flags: tuple[str, ...] = nvrtc.FLAGS
    kind = "nvrtc"
    hint = nvrtc.HINT

    @classmethod
    def find(cls) -> NvrtcProgram:
        """`Nvrtc.find`, and its errors. Raises `ToolchainError` too if the library compiles nothing."""
        library = nvrtc.Nvrtc.find()
        assert library.banner
        return cls(library)

    @property
    def path(self) -> str:
        return self.library.path

    @property
    def version(self) -> str:
        return self.library.banner

    @property
    def release(self) -> str:
        return f"{self.kind} {self.library.release}"

    def compile(self, stem: str, arch: str, folder: Path, stopped: Event) -> Finished:
        """Compile `stem`.cu in `folder`, where its headers are, to `stem`.ptx and `stem`.cubin. `arch`: such as
        "sm_90". The log has the report of the back end on the kernel's resource usage.

        Raises `Stopped` when `stopped` is set, and `ToolchainError` if the compiler cannot be started.
        """
        program = [sys.executable, "-I", "-S", nvrtc_calls.__file__, self.path, stem]
        return run([*program, f"-arch={arch}", *self.flags], self.hint, folder, stopped)


class NvrtcHere(NvrtcProgram):
    """NVRTC in this process, which is faster for a single source."""

    def compile(self, stem: str, arch: str, folder: Path, stopped: Event) -> Finished:
        headers = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.cuh")}
        text = (folder / f"{stem}.cu").read_text(encoding="utf-8")
        try:
            made = self.library.compile(text, f"{stem}.cu", arch, self.flags, headers)
        except nvrtc.CompileError as error:
            return Finished(1, error.log)
        (folder / f"{stem}.ptx").write_bytes(made.ptx)
        (folder / f"{stem}.cubin").write_bytes(made.cubin)
        return Finished(0, made.log)


@dataclass(frozen=True)
class Nvcc:
    """An nvcc that runs. `version`: the output of `nvcc --version`."""

    path: str
    version: str
    options: tuple[str, ...] = ("-std=c++17", "-O3", "-Xptxas=-v")
    kind = "nvcc"
    hint = f"check that a C++ compiler is installed, or {NVCC_HINT}"

    @classmethod
    def find(cls) -> Nvcc:
        """The nvcc that `find_tool` finds, and its error. Raises `ToolchainError` if it cannot be run."""
        path = find_tool("nvcc")
        return cls(path, _version_of(path, cls.kind, NVCC_HINT))

    @property
    def release(self) -> str:
        """The version number, such as "13.0.88"; the first lines of the output if it has no number."""
        return _release_in(self.version)

    @property
    def flags(self) -> tuple[str, ...]:
        before, after = (os.environ.get(f"NVCC_{end}_FLAGS", "") for end in ("PREPEND", "APPEND"))
        return before, *self.options, after

    def compile(self, stem: str, arch: str, folder: Path, stopped: Event) -> Finished:
        if found := _OF_A_SHELL & set(str(folder)):
            raise StorageError(
                f"the kernel cache has a {found.pop()} in its path, {folder}, which the shell that nvcc uses would "
                "take for a command; set HADAGEN_CACHE to another directory"
            )
        environment = {}
        if not shutil.which("gcc") and (host := shutil.which("c++")) and "NVCC_CCBIN" not in os.environ:
            environment["NVCC_CCBIN"] = host  # nvcc itself looks only for gcc
        # `-keep` leaves the PTX in the folder.
        command = [self.path, *self.options, f"-arch={arch}", "-keep", "-cubin", f"{stem}.cu", "-o", f"{stem}.cubin"]
        return run(command, NVCC_HINT, folder, stopped, environment)


@dataclass(frozen=True)
class Ptxas:
    """A ptxas that runs: the assembler of the CUDA toolkit. `version`: the output of `ptxas --version`."""

    path: str
    version: str
    kind = "ptxas"

    @classmethod
    def find(cls, path: str | None = None) -> Ptxas:
        """The ptxas at `path`, a file or a name on PATH, or the one that `find_tool` finds, and its error. Raises
        `ToolchainError` if it cannot be run."""
        path = os.path.abspath(shutil.which(path) or path) if path else find_tool(cls.kind, PTXAS_HINT)
        return cls(path, _version_of(path, cls.kind, PTXAS_HINT))

    @property
    def release(self) -> str:
        """The version as kernels record it, such as "ptxas 12.9.86"."""
        return f"{self.kind} {_release_in(self.version)}"

    def assemble(self, stem: str, arch: str, folder: Path, stopped: Event) -> Finished:
        """Assemble `stem`.ptx in `folder` to `stem`.cubin. `arch`: such as "sm_90". The log has the report on the
        kernel's resource usage. Raises as `NvrtcProgram.compile` does."""
        command = [self.path, "-O3", "-v", f"-arch={arch}", f"{stem}.ptx", "-o", f"{stem}.cubin"]
        return run(command, PTXAS_HINT, folder, stopped)


Compiler = NvrtcProgram | Nvcc
COMPILERS: dict[str, type[Compiler]] = {each.kind: each for each in (NvrtcProgram, Nvcc)}
DEFAULT = NvrtcProgram.kind


def find_tool(tool: str, hint: str = NVCC_HINT) -> str:
    """The path of a program of the CUDA toolkit: on PATH, else in $CUDA_HOME, else in the installed wheels.

    Raises `NoCompilerError`, with the hint, if there is none.
    """
    if path := shutil.which(tool):
        return path
    folders = [Path(home) / "bin"] if (home := os.environ.get("CUDA_HOME")) else []
    wheels = find_spec("nvidia")
    for packages in (wheels and wheels.submodule_search_locations) or ():
        folders += sorted(Path(packages).glob("cu*/bin"), reverse=True)  # cu13 and so on: the newest first
    for folder in folders:
        if (folder / tool).is_file():
            return str(folder / tool)
    raise NoCompilerError(f"{tool} is not on PATH, in $CUDA_HOME/bin or among the Python packages; {hint}")


def _version_of(path: str, kind: str, hint: str) -> str:
    """The output of a tool for `--version`. Raises `ToolchainError`, with the hint, if it cannot be run."""
    answer = run([path, "--version"], hint)
    if not answer.ok:
        reason = answer.passing or f"fails, so this {kind} is broken: {answer.first_lines}"
        raise ToolchainError(f"{path} --version {reason}; {hint}")
    return answer.log.strip()


def _release_in(version: str) -> str:
    match = re.search(r"\bV(\d+(?:\.\d+)+)", version)
    return match[1] if match else printable(one_line(version))


def run(
    command: Sequence[str],
    hint: str,
    folder: Path | None = None,
    stopped: Event | None = None,
    environment: dict[str, str] | None = None,
) -> Finished:
    """`programs.run`. Raises `ToolchainError`, with the hint, if the command cannot be started."""
    try:
        return programs.run(command, folder=folder, environment=environment, stopped=stopped or Event())
    except OSError as error:
        raise ToolchainError(f"{command[0]} cannot be run ({error.strerror}); {hint}") from error
