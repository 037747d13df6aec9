"""Kernels on the CPU: the emitted source, built for the host and run with the threads of a cluster as fibers.

The same text that nvcc compiles is compiled by a C++ compiler against `templates/host/primitives.cuh`, whose primitives
have the meaning of the device's. Threads meet at every collective, in an order that `order_seed` varies. The machine
below (`templates/host/`) is hostile: shared memory begins as NaNs, a copy lands when it is waited for and
not sooner, and every access is checked for bounds, alignment and races. While it runs it counts what would be slow on
a device: bank conflicts and uncoalesced accesses.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

import numpy as np

from hadagen.bits import Bits, decode, encode
from hadagen.cache import cache_root
from hadagen.errors import HadagenError, StorageError, ToolchainError, UsageError
from hadagen.launch import LaunchSpec, RowShape, Source
from hadagen.problem import DType, Problem
from hadagen.reference import (
    INPUT_CLASSES,
    NORMAL_ELEMENTS,
    hadamard,
    input_classes,
    relative_error,
    verification_scale,
)
from hadagen.scale import scale_word
from hadagen.templates import read_texts

# What the machine is built from, of the sources in `templates`.
MACHINE = ("machine.cpp", "access.cpp")
MACHINE_HEADERS = ("machine.hpp", "state.hpp", "fiber.hpp", "memory.hpp", "words.cuh")

# Kernels are run for milliseconds, so most of the time is the compiler's: -O1 for them, -O2 for the machine.
# Some distributions turn _FORTIFY_SOURCE on, and its longjmp refuses to leave the stack it is on.
FLAGS = (
    "-std=c++17",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-w",
    "-U_FORTIFY_SOURCE",
)
KERNEL_FLAGS = (*FLAGS, "-O1")
MACHINE_FLAGS = (*FLAGS, "-O2")
KERNELS_PER_UNIT = 8

RESIDENT_CLUSTERS = 2  # of the imagined device: few, so that a persistent grid loops
PERSISTENT_TILES = 11  # in a verification: each cluster comes round often enough to use every stage twice
STEPS_PER_ELEMENT = 30  # far more primitives than any kernel calls; beyond that it is taken to loop forever
VECTOR_BYTES = 16


class EmulationError(HadagenError):
    """A kernel did what a kernel must not: diverged, hung, raced, went out of bounds, or left elements unwritten."""


class HostCompileError(ToolchainError):
    """The host compiler refused a source. `log` is what it said."""

    def __init__(self, message: str, log: str) -> None:
        super().__init__(message)
        self.log = log


@dataclass(frozen=True)
class EmulationReport:
    """What a launch did besides its result.

    `races`: accesses with no barrier between them and another thread's access to the same 16 bytes of shared memory, or
    in-place loads of what has been overwritten. `uninitialized_reads`: loads of shared memory nobody wrote.
    `unwritten`, `rewritten`: elements of the output written never, or more than once. `wavefronts`: of shared-memory
    accesses, of which `bank_conflicts` would not have been needed. `sectors`: of 32 bytes of global memory, of which
    `excess_sectors` would not have been touched by coalesced accesses. `prefetched_bytes`: that L2 was asked for.
    """

    races: int
    first_race: str
    uninitialized_reads: int
    unwritten: int
    rewritten: int
    wavefronts: int
    bank_conflicts: int
    sectors: int
    excess_sectors: int
    prefetched_bytes: int

    @property
    def complaint(self) -> str:
        """What is wrong with the kernel, in a sentence; empty where nothing is."""
        if self.races:
            return f"{self.races} races; the first: {self.first_race}"
        if self.unwritten or self.rewritten:
            return f"{self.unwritten} elements of the output are never written and {self.rewritten} more than once"
        return ""


class _Launch(ctypes.Structure):
    _fields_ = (
        ("blocks", ctypes.c_int64),
        ("elements", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("x_pitch", ctypes.c_int64),
        ("y_pitch", ctypes.c_int64),
        ("steps", ctypes.c_int64),
        ("seed", ctypes.c_uint64),
        ("threads", ctypes.c_uint32),
        ("cluster", ctypes.c_uint32),
        ("shared_bytes", ctypes.c_uint32),
        ("scale_word", ctypes.c_uint32),
        ("element_bytes", ctypes.c_uint32),
        ("pitched", ctypes.c_uint32),
        ("starts_early", ctypes.c_uint32),
    )


_COUNTS = (
    "races",
    "uninitialized_reads",
    "unwritten",
    "rewritten",
    "wavefronts",
    "bank_conflicts",
    "sectors",
    "excess_sectors",
    "prefetched_bytes",
)


class _Report(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in _COUNTS),
        ("first_race", ctypes.c_char * 256),
        ("error", ctypes.c_char * 768),
    )


# A machine keeps its threads in one place, and one library file is loaded once however many modules name it.
_ONE_AT_A_TIME = threading.Lock()


class HostModule:
    """Kernels built for the host. `compile_host` makes it."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.hadagen_run.argtypes = (ctypes.c_void_p,) * 5
        self._library.hadagen_run.restype = None

    def run(
        self,
        entry: str,
        launch: LaunchSpec,
        x: Bits,
        out: Bits,
        *,
        scale: float,
        elements: int | None = None,
        rows: int = 0,
        shape: RowShape | None = None,
        order_seed: int = 0,
    ) -> EmulationReport:
        """Transform the first `elements` (default: all) of x, the raw bits of elements, into `out`, which may be x.

        `rows`, `shape`: for a pitched kernel, how many rows there are and how they lie; then `elements` is rows · n.
        As many blocks are launched as a device with room for `RESIDENT_CLUSTERS` clusters would get.
        `order_seed`: 0 runs the threads in order, each as far as it comes; 1 in reverse; any other in a random order.
        Raises `EmulationError` where the kernel diverges, hangs, loops forever, or touches what it must not, and
        `UsageError` where x or out is not contiguous, too small, or not aligned to 16 bytes (a pitched kernel's: to an
        element), or where they are one array of two pitches.
        """
        elements = x.size if elements is None else elements
        if shape is None:
            rows, shape = elements, RowShape(1, 1, 1)  # as any array without gaps
        columns, x_pitch, y_pitch = shape
        alignment = x.itemsize if launch.pitched else VECTOR_BYTES
        for name, array, pitch in (("x", x, x_pitch), ("out", out, y_pitch)):
            if array.dtype not in (np.uint16, np.uint32) or array.dtype != x.dtype or not array.flags.c_contiguous:
                raise UsageError(f"{name} is not a contiguous uint16 or uint32 array, of the type of x; copy it first")
            if array.ctypes.data % alignment:
                raise UsageError(f"{name} is not aligned to {alignment} bytes; copy it first")
            if array.size < (least := (rows - 1) * pitch + columns):
                raise UsageError(f"{name} has {array.size} elements, fewer than the {least} to transform")
        if x.ctypes.data == out.ctypes.data and x_pitch != y_pitch:
            raise UsageError(f"in place, rows cannot lie both {x_pitch} and {y_pitch} elements apart; give one pitch")
        tiles = -(-elements // launch.tile_elements)
        settings = _Launch(
            blocks=launch.grid(elements, RESIDENT_CLUSTERS * launch.cluster),
            elements=elements,
            rows=rows,
            columns=columns,
            x_pitch=x_pitch,
            y_pitch=y_pitch,
            steps=STEPS_PER_ELEMENT * max(tiles * launch.tile_elements, 8 * launch.threads * launch.cluster),
            seed=order_seed,
            threads=launch.threads,
            cluster=launch.cluster,
            shared_bytes=launch.shared_bytes,
            scale_word=scale_word(launch.scale_form, scale),
            element_bytes=x.itemsize,
            pitched=launch.pitched,
            starts_early=launch.starts_early,
        )
        report = _Report()
        with _ONE_AT_A_TIME:
            self._library.hadagen_run(
                ctypes.cast(getattr(self._library, entry), ctypes.c_void_p),
                ctypes.byref(settings),
                x.ctypes.data,
                out.ctypes.data,
                ctypes.byref(report),
            )
        if report.error:
            raise EmulationError(f"{entry}: {report.error.decode(errors='replace')}")
        counts = {name: getattr(report, name) for name in _COUNTS}
        return EmulationReport(first_race=report.first_race.decode(errors="replace"), **counts)


def compile_host(
    sources: Sequence[Source],
    *,
    texts: Mapping[str, str] | None = None,
    cache_directory: Path | None = None,
) -> HostModule:
    """Build kernels for the host, or find what an earlier call built of the same texts with the same compiler.

    As many compilers run at a time as there are CPUs. `texts`: the machine's sources by name, `host_texts()` by
    default. Raises `HostCompileError` where the compiler refuses a source, `ToolchainError` where there is none or it
    compiles nothing at all, and `StorageError` where the cache cannot be written.
    """
    texts = host_texts() if texts is None else texts
    root = cache_root() / "host" if cache_directory is None else cache_directory
    unique = list(dict.fromkeys(source.text for source in sources))
    units = ["\n".join(unique[at : at + KERNELS_PER_UNIT]) for at in range(0, len(unique), KERNELS_PER_UNIT)]
    compiler = _compiler(os.environ.get("CXX"))
    library = root / f"{_key(compiler.version, KERNEL_FLAGS, MACHINE_FLAGS, sorted(texts.items()), units)}.so"
    shared = [texts[name] for name in MACHINE_HEADERS]
    machine = {name: root / f"{_key(compiler.version, MACHINE_FLAGS, shared, texts[name])}.o" for name in MACHINE}
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root) as folder:
            if not library.exists():
                try:
                    _build(compiler, units, texts, machine, library, Path(folder))
                except HostCompileError:
                    _check_compiler_works(compiler, Path(folder))
                    raise
    except OSError as error:
        raise StorageError(
            f"kernels for the emulator cannot be written to {root} ({error.strerror}); "
            "free some space or set HADAGEN_CACHE to a directory that can be written"
        ) from error
    return HostModule(library)


def host_texts() -> dict[str, str]:
    """The sources of the machine, and of the primitives that only kernels include, by file name."""
    return read_texts("common", "host")


def host_compiler() -> str:
    """The C++ compiler and what it calls itself. Raises `ToolchainError` where there is none."""
    return ": ".join(_compiler(os.environ.get("CXX")).version.splitlines()[:2])


def verification_rows(problem: Problem, launch: LaunchSpec, least: int = NORMAL_ELEMENTS) -> int:
    """Rows of each class of input for `verify`: few, but enough for full tiles, a ragged one and a persistent loop, and
    for the error of each class to be measured on `least` elements."""
    tiles = PERSISTENT_TILES if launch.persistent else 2
    elements = max(tiles * launch.tile_elements, len(INPUT_CLASSES) * least)
    rows, tile_rows = max(2, -(-elements // (len(INPUT_CLASSES) * problem.n))), launch.tile_elements // problem.n
    whole = tile_rows > 1 and (len(INPUT_CLASSES) * rows - 1) % tile_rows == 0
    return rows + whole


def verify(
    problem: Problem,
    source: Source,
    rows: int | None = None,
    *,
    module: HostModule | None = None,
    shape: RowShape | None = None,
    in_place: bool = False,
    order_seed: int = 0,
) -> dict[str, float]:
    """Relative error of a kernel against float64 for each class of input, all classes in one launch.

    `rows` (2 or more, default `verification_rows`): of each class, but one fewer of the last, so that the last tile is
    ragged wherever a tile holds several rows. `module` already holds the kernel where many were built at once. `shape`:
    of a pitched problem, by default three quarters of each row; an array whose pitch is odd begins one element after a
    multiple of 16 bytes. The scale is n**-0.5; the output begins as NaNs, and so do the gaps of x. Raises
    `EmulationError` where the kernel does not run to its end or `EmulationReport.complaint` says something.
    """
    rows = verification_rows(problem, source.launch) if rows is None else rows
    module = compile_host([source]) if module is None else module
    classes = input_classes(problem, rows)
    classes[INPUT_CLASSES[-1]] = classes[INPUT_CLASSES[-1]][:-1]
    if problem.pitched and shape is None:
        shape = RowShape(problem.n - problem.n // 4, problem.n, problem.n)
    columns, x_pitch, y_pitch = (problem.n,) * 3 if shape is None else shape
    if columns < problem.n:
        del classes["constant"]  # cut short it gives few values over and over, whose rounding does not average out
    values = np.concatenate(list(classes.values()))
    values[:, columns:] = 0.0
    scale = verification_scale(problem)
    x = _poisoned(problem.dtype, len(values), x_pitch)
    x[:, :columns] = encode(problem.dtype, values[:, :columns])
    out = x if in_place else _poisoned(problem.dtype, len(values), y_pitch)
    report = module.run(
        source.entry,
        source.launch,
        x.reshape(-1),
        out.reshape(-1),
        scale=scale,
        elements=values.size,
        rows=len(values),
        shape=shape,
        order_seed=order_seed,
    )
    if report.complaint:
        raise EmulationError(f"{source.entry}: {report.complaint}")
    results = decode(problem.dtype, out[:, :columns])
    ends = np.cumsum([len(some) for some in classes.values()])[:-1]
    return {
        name: relative_error(result, reference)
        for name, result, reference in zip(
            classes, np.split(results, ends), np.split(hadamard(values, scale)[:, :columns], ends), strict=True
        )
    }


def _poisoned(dtype: DType, rows: int, pitch: int) -> Bits:
    """[rows, pitch] NaNs, one element after a multiple of 16 bytes where the pitch is odd."""
    bits = encode(dtype, np.full(rows * pitch + 1, np.nan))
    return bits[pitch % 2 :][: rows * pitch].reshape(rows, pitch)


@dataclass(frozen=True)
class _Compiler:
    command: tuple[str, ...]
    version: str

    def __call__(self, output: Path, *arguments: str | Path) -> None:
        done = subprocess.run(
            [*self.command, *map(str, arguments), "-o", str(output)],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            start_new_session=True,  # or Ctrl-C would end it too, and pass for a source that does not compile
        )
        log = ""
        if done.returncode:
            log = done.stderr.strip() or f"exit status {done.returncode}"
        elif not output.exists():
            log = f"{output.name} was not written"
        if log:
            first = next((line for line in log.splitlines() if "error" in line), log.splitlines()[0])
            raise HostCompileError(f"{self.command[0]} refuses a kernel for the emulator: {first}", log)


@cache
def _compiler(cxx: str | None) -> _Compiler:
    """$CXX, or the first of c++, g++ and clang++ that is there."""
    for name in [cxx] if cxx else ["c++", "g++", "clang++"]:
        try:
            command = shlex.split(name)
        except ValueError:  # a quotation that does not end
            command = []
        if not command:
            raise ToolchainError(f"CXX = {name!r} is no command; set it to a C++ compiler, such as c++")
        if shutil.which(command[0]) is None:
            continue
        try:
            said = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False).stdout
        except OSError as error:
            raise ToolchainError(f"{name} cannot be run ({error.strerror}); set CXX to a C++ compiler") from error
        return _Compiler(tuple(command), f"{name}\n{said}")
    raise ToolchainError(
        f"no C++ compiler was found as {cxx or 'c++, g++ or clang++'}; install one or set CXX to its name"
    )


def _build(
    compiler: _Compiler,
    units: Sequence[str],
    texts: Mapping[str, str],
    machine: Mapping[str, Path],
    library: Path,
    folder: Path,
) -> None:
    """Compile in `folder`, then put the finished files in their places: the machine's objects, and the library."""
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    todo: list[tuple[Path, tuple[str | Path, ...]]] = []
    new = {name: (folder / name).with_suffix(".o") for name, place in machine.items() if not place.exists()}
    todo += [(built, (*MACHINE_FLAGS, "-c", folder / name)) for name, built in new.items()]
    kernels = []
    for number, unit in enumerate(units):
        path = folder / f"unit{number}.cpp"
        path.write_text(unit, encoding="utf-8")
        kernels.append(path.with_suffix(".o"))
        todo.append((kernels[-1], (*KERNEL_FLAGS, "-I", folder, "-c", path)))
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(lambda each: compiler(each[0], *each[1]), todo))
    for name, built in new.items():
        built.replace(machine[name])
    compiler(folder / "kernels.so", "-shared", *machine.values(), *kernels)
    (folder / "kernels.so").replace(library)


def _check_compiler_works(compiler: _Compiler, folder: Path) -> None:
    """Raise unless there is room in `folder` and an empty library can be built there: what failed was then not the
    source's fault."""
    (folder / "room").write_bytes(bytes(16 << 20))
    empty = folder / "empty.cpp"
    empty.touch()
    try:
        compiler(folder / "empty.so", *FLAGS, "-shared", empty)
    except HostCompileError as error:
        raise ToolchainError(
            f"{compiler.command[0]} cannot build an empty library: {error.log.splitlines()[0]}; set CXX to another "
            "C++ compiler"
        ) from error


def _key(*parts: object) -> str:
    return sha256(repr(parts).encode()).hexdigest()
