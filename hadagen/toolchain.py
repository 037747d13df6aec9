"""Compiles sources to kernels with nvcc: in batches, in parallel, and from the cache.

A source that is not in the cache goes through nvcc twice. A call of the front end costs a good part of a second,
whatever it compiles. So the sources of a batch share as many calls as there are jobs, and their PTX is split again,
kernel by kernel. The back end assembles each kernel on its own. A source that does not compile fails alone.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from threading import Event

from hadagen import programs, ptx
from hadagen.arch import Arch
from hadagen.cache import KernelCache, cache_key, cache_root
from hadagen.cubin import is_cubin
from hadagen.errors import StorageError, ToolchainError, UsageError, printable
from hadagen.launch import LaunchSpec, Source
from hadagen.programs import Finished, Patience, one_line
from hadagen.templates import read_texts
from hadagen.trial import Kernel, NotTried, kernel_digest

# For both ends of nvcc. `-v` makes the back end report what a kernel uses.
FLAGS = ("-std=c++17", "-O3", "-Xptxas=-v")

_OF_A_SHELL = {"$", "`"}  # a shell replaces these even within the quotation marks of nvcc around a path
_HINT = "install the CUDA toolkit 12.1 or newer, or: pip install 'hadagen[nvcc]'"


@dataclass(frozen=True)
class BuildFailure:
    """A source that does not compile, and the log of nvcc."""

    entry: str
    log: str

    @property
    def summary(self) -> str:
        """The beginning of the log as one line."""
        return one_line(self.log)


_Built = dict[str, bytes] | BuildFailure | NotTried  # the files of a cache entry, or why there are none


def device_headers() -> dict[str, str]:
    """Name in `#include` → text of each device header."""
    return {name: text for name, text in read_texts("common", "device").items() if name.endswith(".cuh")}


@dataclass(frozen=True)
class Toolchain:
    """An nvcc that runs. `version`: the output of `nvcc --version`."""

    nvcc: Path
    version: str
    flags: tuple[str, ...] = FLAGS
    headers: Mapping[str, str] = field(default_factory=device_headers)
    cache: KernelCache = field(default_factory=lambda: KernelCache(cache_root()))
    patience: Patience = field(default_factory=Patience, compare=False)

    @classmethod
    def find(cls) -> Toolchain:
        """The nvcc on PATH, else in $CUDA_HOME, else of the installed wheels.

        Raises `ToolchainError` if there is none, or if it cannot be run.
        """
        nvcc = _find("nvcc")
        if nvcc is None:
            raise ToolchainError(f"nvcc is not on PATH, in $CUDA_HOME/bin or among the Python packages; {_HINT}")
        answer = _run([nvcc, "--version"])
        if not answer.ok:
            reason = answer.passing or f"fails, so this nvcc is broken: {answer.first_lines}"
            raise ToolchainError(f"{nvcc} --version {reason}; {_HINT}")
        return cls(nvcc, answer.log.strip())

    @property
    def release(self) -> str:
        """The version number, such as "13.0.88"; the first lines of the output if it has no number."""
        match = re.search(r"\bV(\d+(?:\.\d+)+)", self.version)
        return match[1] if match else printable(one_line(self.version))

    def key(self, source: Source, arch: Arch) -> str:
        """The name of a source's cache entry."""
        before, after = (os.environ.get(f"NVCC_{end}_FLAGS", "") for end in ("PREPEND", "APPEND"))
        return cache_key(
            nvcc=self.version,
            flags=(before, *self.flags, after),
            arch=arch.nvcc_arch,
            source=source.text,
            headers=self.headers,
        )

    def build(
        self, sources: Sequence[Source], arch: Arch, *, jobs: int | None = None, stopped: Event | None = None
    ) -> list[Kernel | BuildFailure | NotTried]:
        """Compile sources, `jobs` at a time (default: one for each CPU), and return the results in the same order.

        Every kernel has the name `ptx.ENTRY`. So sources that differ only in their name have one cubin and one digest.
        A result is `NotTried` if nvcc died, for example if it was killed; building the source again may work. Setting
        `stopped` kills all calls of nvcc, which raises `Stopped`. Raises `ToolchainError` if nvcc cannot compile
        anything, and `StorageError` if the cache cannot be written.
        """
        jobs = (os.cpu_count() or 1) if jobs is None else jobs
        if jobs < 1:
            raise UsageError(f"jobs = {jobs} is not possible; give at least 1")
        keyed = [(self.key(source, arch), source) for source in sources]
        built: dict[str, _Built] = {key: files for key, _ in keyed if (files := self.cache.load(key))}
        # Equal sources have one key, and are built once.
        missing = {key: source for key, source in keyed if key not in built}
        if missing:
            with self.cache.workspace() as folder:
                built |= _Build(self, arch, folder, stopped or Event()).run(list(missing.items()), jobs)
        return [self._result(built[key], source.launch, arch) for key, source in keyed]

    def build_all(self, sources: Sequence[Source], arch: Arch) -> list[Kernel]:
        """`build` for sources that must compile. Raises `ToolchainError` if one does not."""
        kernels = []
        for source, built in zip(sources, self.build(sources, arch), strict=True):
            if isinstance(built, NotTried):
                raise ToolchainError(f"{source.entry} was not compiled: {built.reason}; run the same command again")
            if isinstance(built, BuildFailure):
                raise ToolchainError(f"{self.nvcc} refuses {source.entry}: {built.summary}; install another nvcc")
            kernels.append(built)
        return kernels

    def _result(self, built: _Built, launch: LaunchSpec, arch: Arch) -> Kernel | BuildFailure | NotTried:
        if isinstance(built, BuildFailure | NotTried):
            return built
        report = built["log.txt"].decode()
        return Kernel(
            digest=kernel_digest(built["kernel.cubin"], launch),
            entry=ptx.ENTRY,
            arch=arch.name,
            source=built["source.cu"].decode(),
            cubin=built["kernel.cubin"],
            ptx=built["kernel.ptx"],
            launch=launch,
            registers=_reported(report, r"Used (\d+) registers"),
            spill_bytes=_reported(report, r"(\d+) bytes spill stores"),
            static_shared_bytes=_reported(report, r"(\d+) bytes smem", absent=0),
            nvcc=self.release,
        )


class _Build:
    """The calls of nvcc for the sources of one batch, in `folder`."""

    def __init__(self, toolchain: Toolchain, arch: Arch, folder: Path, stopped: Event) -> None:
        if found := _OF_A_SHELL & set(str(folder)):
            raise StorageError(
                f"the kernel cache {toolchain.cache.root} has a {found.pop()} in its path, which the shell that nvcc "
                "uses would take for a command; set HADAGEN_CACHE to another directory"
            )
        self._toolchain, self._arch, self._folder, self._stopped = toolchain, arch, folder, stopped
        for name, text in toolchain.headers.items():
            (folder / name).write_text(text, encoding="utf-8")

    def run(self, sources: list[tuple[str, Source]], jobs: int) -> dict[str, _Built]:
        """Compile sources that are given with their keys. Returns key → result."""
        built: dict[str, _Built] = {}
        back_ends: dict[Future[_Built], str] = {}
        with ThreadPoolExecutor(jobs) as pool:
            try:
                units = [sources[first::jobs] for first in range(min(jobs, len(sources)))]
                for front_end in as_completed([pool.submit(self._front_end, unit) for unit in units]):
                    for key, source, module in front_end.result():
                        if isinstance(module, str):
                            back_ends[pool.submit(self._back_end, key, source, module)] = key
                        else:
                            built[key] = module
                for back_end in as_completed(back_ends):
                    built[back_ends[back_end]] = back_end.result()
            except BaseException:
                self._stopped.set()
                pool.shutdown(cancel_futures=True)
                raise
        return built

    def _front_end(self, unit: list[tuple[str, Source]]) -> list[tuple[str, Source, str | BuildFailure | NotTried]]:
        """The PTX of each source. If one does not compile, each half of the unit is tried alone; if nvcc dies, each
        source."""
        name = f"unit-{unit[0][0]}"
        text = "\n".join(f'#line 1 "{source.entry}.cu"\n{source.text}' for _, source in unit)
        (self._folder / f"{name}.cu").write_text(text, encoding="utf-8")
        answer = self._nvcc("-ptx", f"{name}.cu", "-o", f"{name}.ptx")
        if answer.ok:
            modules = ptx.split((self._folder / f"{name}.ptx").read_text(encoding="utf-8"))
            return [(key, source, modules.get(source.entry) or _without_kernel(source)) for key, source in unit]
        if len(unit) == 1:
            [(key, source)] = unit
            return [(key, source, self._failed(key, source, answer))]
        parts = [[each] for each in unit] if answer.passing else [unit[::2], unit[1::2]]
        return [each for part in parts for each in self._front_end(part)]

    def _back_end(self, key: str, source: Source, module: str) -> _Built:
        """Assemble one kernel and store it in the cache."""
        (self._folder / f"{key}.ptx").write_text(module, encoding="utf-8")
        answer = self._nvcc("-cubin", f"{key}.ptx", "-o", f"{key}.cubin")
        if not answer.ok:
            return self._failed(key, source, answer)
        self._toolchain.patience.worked()
        files = {
            "source.cu": source.text.encode(),
            "kernel.ptx": module.encode(),
            "kernel.cubin": (self._folder / f"{key}.cubin").read_bytes(),
            "log.txt": answer.log.encode(),
        }
        meta = {"nvcc": self._toolchain.version, "flags": self._toolchain.flags, "arch": self._arch.nvcc_arch}
        return self._toolchain.cache.store(key, files, meta)

    def _failed(self, key: str, source: Source, answer: Finished) -> BuildFailure | NotTried:
        """The result for a source with which nvcc failed. Raises `ToolchainError` if nvcc fails with every source."""
        if reason := answer.passing or self._passing_with_any_source():
            self._toolchain.patience.lose(key, str(self._toolchain.nvcc), reason)
            return NotTried(f"nvcc {reason}")
        self._toolchain.patience.worked()
        return BuildFailure(source.entry, answer.log)

    def _nvcc(self, *arguments: str) -> Finished:
        """Run nvcc. The last argument names its output file. Success without this file is a failure that may pass."""
        options = (*self._toolchain.flags, f"-arch={self._arch.nvcc_arch}", *arguments)
        answer = _run([self._toolchain.nvcc, *options], self._folder, self._stopped)
        output = self._folder / arguments[-1]
        if answer.ok and not _is_whole(output):
            return replace(answer, broken=f"wrote no sound {output.suffix[1:]} though it ended well")
        return answer

    def _passing_with_any_source(self) -> str:
        """Why an empty kernel does not compile either, for a reason that may pass; "" if it compiles.

        Raises `ToolchainError` if it will never compile, because then the source is not to blame.
        """
        (self._folder / "room").write_bytes(bytes(16 << 20))  # so that a full disk is reported as such
        (self._folder / "empty.cu").write_text('extern "C" __global__ void empty() {}\n', encoding="utf-8")
        answer = self._nvcc("-cubin", "empty.cu", "-o", "empty.cubin")
        if not answer.ok and not answer.passing:
            raise ToolchainError(
                f"{self._toolchain.nvcc} cannot compile an empty kernel for {self._arch.nvcc_arch}: "
                f"{answer.first_lines}; check that a C++ compiler is installed, or {_HINT}"
            )
        return answer.passing


def _is_whole(output: Path) -> bool:
    """Whether an output file of nvcc exists and is complete."""
    try:
        content = output.read_bytes()
    except FileNotFoundError:
        return False
    return is_cubin(content) if output.suffix == ".cubin" else b"\n.version" in b"\n" + content


def _without_kernel(source: Source) -> BuildFailure:
    return BuildFailure(source.entry, f"the source defines no kernel called {source.entry}")


def disassemble(kernel: Kernel) -> str:
    """The machine code of a kernel as text. Raises `ToolchainError` if nvdisasm is missing or fails."""
    nvdisasm = _find("nvdisasm")
    if nvdisasm is None:
        raise ToolchainError(f"nvdisasm is not on PATH, in $CUDA_HOME/bin or among the Python packages; {_HINT}")
    with KernelCache(cache_root()).workspace() as folder:
        (folder / "kernel.cubin").write_bytes(kernel.cubin)
        answer = _run([nvdisasm, "--print-code", "kernel.cubin"], folder)
    if not answer.ok:
        said = answer.first_lines
        raise ToolchainError(f"{nvdisasm} cannot read a cubin of nvcc {kernel.nvcc}: {said}; {_HINT}")
    return answer.log


def _find(tool: str) -> Path | None:
    if path := shutil.which(tool):
        return Path(path)
    folders = [Path(home) / "bin"] if (home := os.environ.get("CUDA_HOME")) else []
    wheels = find_spec("nvidia")
    for packages in (wheels and wheels.submodule_search_locations) or ():
        folders += sorted(Path(packages).glob("cu*/bin"), reverse=True)  # cu13 and so on: the newest first
    return next((folder / tool for folder in folders if (folder / tool).is_file()), None)


def _run(command: Sequence[str | Path], folder: Path | None = None, stopped: Event | None = None) -> Finished:
    """`programs.run`, with the host compiler for nvcc. Raises `ToolchainError` if the command cannot be started."""
    environment = {}
    if not shutil.which("gcc") and (compiler := shutil.which("c++")) and "NVCC_CCBIN" not in os.environ:
        environment["NVCC_CCBIN"] = compiler  # nvcc itself looks only for gcc
    try:
        return programs.run(command, folder=folder, environment=environment, stopped=stopped or Event())
    except OSError as error:
        raise ToolchainError(f"{command[0]} cannot be run ({error.strerror}); {_HINT}") from error


def _reported(report: str, pattern: str, absent: int | None = None) -> int:
    """The largest number that `pattern` finds in the report of the back end; `absent` if there is none."""
    numbers = [int(number) for number in re.findall(pattern, report)]
    if absent is None and not numbers:
        raise ToolchainError(f"nvcc's resource report has no {pattern!r}, so its format is new; use nvcc 12 or 13")
    return max(numbers, default=absent or 0)
