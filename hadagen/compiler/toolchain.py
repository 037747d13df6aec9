"""Compiles sources to kernels: in parallel, each in a process of its own, and from the cache."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import TypeVar

from hadagen.compiler.cache import KernelCache, cache_key, open_cache
from hadagen.compiler.compilers import COMPILERS, DEFAULT, NVCC_HINT, Compiler, Nvcc, Ptxas, find_tool, run
from hadagen.compiler.cubin import is_cubin
from hadagen.compiler.programs import Finished, Patience, one_line
from hadagen.compiler.ptx_version import lowered
from hadagen.errors import ToolchainError, UsageError, choice, shown
from hadagen.plan.arch import Arch
from hadagen.problem.launch import ENTRY, Source
from hadagen.problem.trial import Kernel, NotTried, kernel_digest
from hadagen.templates import read_texts


@dataclass(frozen=True)
class BuildFailure:
    """A source that does not compile, and the log of the compiler."""

    entry: str
    log: str

    @property
    def summary(self) -> str:
        """The first errors of the log as one line; the beginning of the log if it names none."""
        return one_line("\n".join(line for line in self.log.splitlines() if "error" in line) or self.log)


Result = TypeVar("Result")
_Built = dict[str, bytes] | BuildFailure | NotTried  # the files of a cache entry, or why there are none


def device_headers() -> dict[str, str]:
    """Name in `#include` → text of each device header."""
    return {name: text for name, text in read_texts("common", "device").items() if name.endswith(".cuh")}


@dataclass(frozen=True)
class Toolchain:
    """A compiler and a cache. `note`: why it is not the compiler that was asked for; "" if it is."""

    compiler: Compiler
    note: str = ""
    headers: Mapping[str, str] = field(default_factory=device_headers)
    cache: KernelCache = field(default_factory=open_cache)
    patience: Patience = field(default_factory=Patience, compare=False)

    @classmethod
    def find(cls, kind: str = DEFAULT) -> Toolchain:
        """The toolchain with a compiler of that kind. nvcc replaces NVRTC if only nvcc is installed.

        Raises `ToolchainError` if there is none, or none works.
        """
        if kind not in COMPILERS:
            raise UsageError(f"there is no compiler {shown(kind)}; {choice(kind, COMPILERS)}")
        try:
            return cls(COMPILERS[kind].find())
        except ToolchainError as error:
            if kind != DEFAULT:
                raise
            try:
                nvcc = Nvcc.find()
            except ToolchainError:
                raise error from None
            return cls(nvcc, f"nvcc {nvcc.release} compiles, because {error}")

    def key(self, source: Source, arch: Arch) -> str:
        """The name of a source's cache entry."""
        return cache_key(
            compiler=self.compiler.version,
            flags=self.compiler.flags,
            arch=source.compiled_for(arch.nvcc_arch),
            source=source.text_to_compile,
            headers=self.headers,
        )

    def build(
        self, sources: Sequence[Source], arch: Arch, *, jobs: int | None = None, stopped: Event | None = None
    ) -> list[Kernel | BuildFailure | NotTried]:
        """Compile sources, `jobs` at a time (default: one for each CPU), and return the results in the same order.

        Every kernel has the name `ENTRY`. So sources that differ only in their name have one cubin and one digest. A
        result is `NotTried` if the compiler died, for example if it was killed; building the source again may work.
        Setting `stopped` kills all compilers, which raises `Stopped`. Raises `ToolchainError` if the compiler cannot
        compile anything, and `StorageError` if the cache cannot be written.
        """
        jobs = (os.cpu_count() or 1) if jobs is None else jobs
        if jobs < 1:
            raise UsageError(f"jobs = {jobs} is not possible; give at least 1")
        keyed = [(self.key(source, arch), source) for source in sources]
        built: dict[str, _Built] = {key: files for key, _ in keyed if (files := self.cache.load(key))}
        # Equal sources have one key, and are built once.
        if missing := {key: source for key, source in keyed if key not in built}:
            with self.cache.workspace() as folder:
                stopped = stopped or Event()
                built |= _each(lambda key: self._one(key, missing[key], arch, folder, stopped), missing, jobs, stopped)
        return [self._kernel_or_failure(built[key], source, arch) for key, source in keyed]

    def build_all(self, sources: Sequence[Source], arch: Arch, *, stopped: Event | None = None) -> list[Kernel]:
        """`build` for sources that must compile. Raises `ToolchainError` if one does not."""
        kernels = []
        for source, built in zip(sources, self.build(sources, arch, stopped=stopped), strict=True):
            if isinstance(built, NotTried):
                raise ToolchainError(f"{source.entry} was not compiled: {built.reason}; run the same command again")
            if isinstance(built, BuildFailure):
                raise ToolchainError(
                    f"{self.compiler.path} refuses {source.entry} for {arch.nvcc_arch}: {built.summary}; install "
                    "another version of it"
                )
            kernels.append(built)
        return kernels

    def _one(self, key: str, source: Source, arch: Arch, folder: Path, stopped: Event) -> _Built:
        """Compile one source and store the kernel in the cache."""
        text = source.text_to_compile
        target = source.compiled_for(arch.nvcc_arch)
        answer, files = self._compile(source.entry, text, target, folder, stopped)
        if not answer.ok:
            if reason := answer.passing or self._passing_with_any_source(arch, folder, stopped):
                self.patience.lose(key, self.compiler.path, reason)
                return NotTried(f"{self.compiler.kind} {reason}")
            self.patience.worked()
            return BuildFailure(source.entry, answer.log)
        self.patience.worked()
        if f".entry {ENTRY}(".encode() not in files["kernel.ptx"]:
            return BuildFailure(source.entry, f"the source defines no kernel called {source.entry}")
        meta = {"compiler": self.compiler.version, "flags": self.compiler.flags, "arch": target}
        return self.cache.store(key, {"source.cu": text.encode(), "log.txt": answer.log.encode(), **files}, meta)

    def _compile(
        self, stem: str, text: str, target: str, folder: Path, stopped: Event
    ) -> tuple[Finished, dict[str, bytes]]:
        """How the compiler ended, and its files if it succeeded. A success without sound files counts as a failure that
        may pass."""
        with TemporaryDirectory(dir=folder) as name:
            own = Path(name)
            for file, written in {**self.headers, f"{stem}.cu": text}.items():
                (own / file).write_bytes(written.encode())
            answer = self.compiler.compile(stem, target, own, stopped)
            files = {}
            for kind, is_whole in _IS_WHOLE.items() if answer.ok else ():
                path = own / f"{stem}.{kind}"
                content = path.read_bytes() if path.exists() else b""
                if not is_whole(content):
                    return replace(answer, broken=f"wrote no sound {kind} though it ended well"), {}
                files[f"kernel.{kind}"] = content
            return answer, files

    def _passing_with_any_source(self, arch: Arch, folder: Path, stopped: Event) -> str:
        """Why an empty kernel does not compile either, for a reason that may pass; "" if it compiles.

        Raises `ToolchainError` if it will never compile, because then the source is not to blame.
        """
        (folder / "room").write_bytes(bytes(16 << 20))  # so that a full disk is reported as such
        answer, _ = self._compile("empty", 'extern "C" __global__ void empty() {}\n', arch.nvcc_arch, folder, stopped)
        if not answer.ok and not answer.passing:
            raise ToolchainError(
                f"{self.compiler.path} cannot compile an empty kernel for {arch.nvcc_arch}: {answer.first_lines}; "
                f"{self.compiler.hint}"
            )
        return answer.passing

    def _kernel_or_failure(self, built: _Built, source: Source, arch: Arch) -> Kernel | BuildFailure | NotTried:
        if isinstance(built, BuildFailure):
            return replace(built, entry=source.entry)
        if isinstance(built, NotTried):
            return built
        report = built["log.txt"].decode()
        return Kernel(
            digest=kernel_digest(built["kernel.cubin"], source.launch),
            entry=ENTRY,
            arch=arch.name,
            source=built["source.cu"].decode(),
            cubin=built["kernel.cubin"],
            ptx=built["kernel.ptx"],
            launch=source.launch,
            registers=_reported(report, _REGISTERS),
            spill_bytes=_reported(report, _SPILLED),
            static_shared_bytes=_reported(report, r"(\d+) bytes smem", absent=0),
            nvcc=self.compiler.release,
        )


# In the report of the back end: the registers of a thread, and the bytes that it spills.
_REGISTERS, _SPILLED = r"Used (\d+) registers", r"(\d+) bytes spill stores"
# The output files of a compiler, and whether one is complete.
_IS_WHOLE = {"ptx": lambda content: b"\n.version" in b"\n" + content, "cubin": is_cubin}


def assembled(kernels: Sequence[Kernel], arch: Arch, ptxas: Ptxas, *, jobs: int | None = None) -> dict[str, Kernel]:
    """Kernels as `ptxas` assembles them from their PTX, `jobs` at a time (default: one for each CPU). Returns the
    digest that each had → the kernel; two may be equal then. A kernel without PTX stays as it is.

    Raises `ToolchainError` if ptxas does not assemble one.
    """
    stopped = Event()
    by_digest = {kernel.digest: kernel for kernel in kernels}
    with open_cache().workspace() as folder:
        return _each(
            lambda digest: _assembled(by_digest[digest], arch, ptxas, folder, stopped),
            by_digest,
            jobs or os.cpu_count() or 1,
            stopped,
        )


def _assembled(kernel: Kernel, arch: Arch, ptxas: Ptxas, folder: Path, stopped: Event) -> Kernel:
    if not kernel.ptx:
        return kernel
    text = lowered(kernel.ptx.decode("latin-1"))  # older assemblers refuse newer versions
    ptx = text.encode("latin-1")
    named = re.search(r"^\.target (\w+)", text, re.MULTILINE)
    with TemporaryDirectory(dir=folder) as name:
        own = Path(name)
        (own / "kernel.ptx").write_bytes(ptx)
        answer = ptxas.assemble("kernel", named[1] if named else arch.nvcc_arch, own, stopped)
        path = own / "kernel.cubin"
        cubin = path.read_bytes() if answer.ok and path.exists() else b""
    if not is_cubin(cubin):
        reason = answer.passing or ("wrote no sound cubin" if answer.ok else f"refuses it: {answer.first_lines}")
        raise ToolchainError(f"kernel {kernel.digest[:12]} was not assembled: {ptxas.path} {reason}; use another ptxas")
    return replace(
        kernel,
        digest=kernel_digest(cubin, kernel.launch),
        cubin=cubin,
        ptx=ptx,
        registers=_reported(answer.log, _REGISTERS),
        spill_bytes=_reported(answer.log, _SPILLED),
        nvcc=ptxas.release,
    )


def disassemble(kernel: Kernel) -> str:
    """The machine code of a kernel as text. Raises `ToolchainError` if nvdisasm is missing or fails."""
    nvdisasm = find_tool("nvdisasm")
    with open_cache().workspace() as folder:
        (folder / "kernel.cubin").write_bytes(kernel.cubin)
        answer = run([nvdisasm, "--print-code", "kernel.cubin"], NVCC_HINT, folder)
    if not answer.ok:
        raise ToolchainError(
            f"{nvdisasm} cannot read a cubin of compiler {kernel.nvcc}: {answer.first_lines}; {NVCC_HINT}"
        )
    return answer.log


def _each(work: Callable[[str], Result], keys: Iterable[str], jobs: int, stopped: Event) -> dict[str, Result]:
    """Key → what `work` returns for it, `jobs` at a time. At the first error, `stopped` ends the others."""
    with ThreadPoolExecutor(jobs) as pool:
        try:
            tasks = {pool.submit(work, key): key for key in keys}
            return {tasks[task]: task.result() for task in as_completed(tasks)}
        except BaseException:
            stopped.set()
            pool.shutdown(cancel_futures=True)
            raise


def _reported(report: str, pattern: str, absent: int | None = None) -> int:
    """The largest number that `pattern` finds in the report of the back end; `absent` if there is none."""
    numbers = [int(number) for number in re.findall(pattern, report)]
    if absent is None and not numbers:
        raise ToolchainError(
            f"the compiler's resource report has no {pattern!r}, so its format is new; use CUDA 12 or 13"
        )
    return max(numbers, default=absent or 0)
