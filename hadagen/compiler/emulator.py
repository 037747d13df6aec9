"""Kernels on the CPU: the emitted source, built for the host and run with the threads of a cluster as fibers.

A C++ compiler compiles the same text as NVRTC, against `templates/host/primitives.cuh`, whose primitives have the
meaning of those of the device. Threads meet at every collective, in an order that `order_seed` varies. The emulated
machine (`templates/host/`) is strict: shared memory begins as NaNs, a copy lands only when it is waited for, and every
access is checked for bounds, alignment and races. It also counts what would be slow on a device: bank conflicts and
uncoalesced accesses.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shlex
import shutil
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from hadagen.compiler import programs
from hadagen.compiler.cache import KernelCache, cache_root
from hadagen.errors import HadagenError, ToolchainError, UsageError, shown
from hadagen.problem.bits import Bits, decode, encode
from hadagen.problem.launch import LaunchSpec, RowShape, Source, X, Y
from hadagen.problem.operands import OperandValues, kernel_operands, sizes_for, verification_operands
from hadagen.problem.problem import DType, Problem
from hadagen.problem.prologues import prologue_of, width_of
from hadagen.templates import read_texts
from hadagen.truth.reference import (
    INPUT_CLASSES,
    NORMAL_ELEMENTS,
    exact_results,
    input_classes,
    input_parts,
    relative_error,
    verification_scale,
)

# The sources in `templates` that the machine is built from.
MACHINE = ("machine.cpp", "access.cpp")
MACHINE_HEADERS = ("machine.hpp", "state.hpp", "fiber.hpp", "memory.hpp", "words.cuh")

# Kernels are run for milliseconds, so most of the time is the compiler's: -Og for them, -O2 for the machine.
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
KERNEL_FLAGS = (*FLAGS, "-Og")
MACHINE_FLAGS = (*FLAGS, "-O2")
KERNELS_PER_UNIT = 16
_STEP = re.compile(r"^ *// (\d+\. .+)$", re.MULTILINE)  # the comment of a step in the body of a kernel
LIBRARY, OBJECT = "kernels.so", "machine.o"  # the names of the built files in the cache

RESIDENT_CLUSTERS = 2  # of the imagined device: few, so that a persistent grid loops
PERSISTENT_TILES = 11  # in a verification: each cluster comes round often enough to use every stage twice
STEPS_PER_ELEMENT = 120  # far more primitives than any kernel calls; beyond that it is taken to loop forever
VECTOR_BYTES = 16


class EmulationError(HadagenError):
    """A kernel diverged, hung, had a race, went out of bounds, or left elements unwritten."""


class HostCompileError(ToolchainError):
    """The host compiler refused a source. `log`: its output."""

    def __init__(self, message: str, log: str) -> None:
        super().__init__(message)
        self.log = log

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.log)


class HostCompilerDied(ToolchainError):
    """The host compiler was killed, hung or found no room. That may pass. It says nothing about the source."""


@dataclass(frozen=True)
class EmulationReport:
    """The faults and costs of a launch. The counts are in the order of `Report` in `templates/host`.

    `races`: accesses without a barrier between them and an access of another thread to the same 16 bytes of shared
    memory, or in-place loads of overwritten values. `uninitialized_reads`: loads of shared memory that was never
    written in its block. `unwritten`, `rewritten`: elements of the output that were written never, or more than once.
    `wavefronts`: those of shared-memory accesses. `bank_conflicts`: wavefronts that were not necessary. `sectors`:
    accessed 32-byte sectors of global memory. `excess_sectors`: sectors that coalesced accesses would not have touched.
    `prefetched_bytes`: bytes that L2 was asked for.
    """

    races: int
    first_race: str
    uninitialized_reads: int
    first_uninitialized_read: str
    unwritten: int
    rewritten: int
    wavefronts: int
    bank_conflicts: int
    sectors: int
    excess_sectors: int
    prefetched_bytes: int

    @property
    def complaint(self) -> str:
        """A fault of the kernel, as a sentence; "" if it has none."""
        if self.races:
            return f"{self.races} races; the first: {self.first_race}"
        if self.uninitialized_reads:
            return f"{self.uninitialized_reads} uninitialized reads; the first: {self.first_uninitialized_read}"
        if self.unwritten or self.rewritten:
            return f"{self.unwritten} elements of the output are never written and {self.rewritten} more than once"
        return ""


class _Operand(ctypes.Structure):
    _fields_ = (("at", ctypes.c_void_p), ("bytes", ctypes.c_int64))


class _Output(ctypes.Structure):
    _fields_ = (("at", ctypes.c_void_p), ("bytes", ctypes.c_int64), ("least", ctypes.c_int64))


class _Launch(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("blocks", "elements", "rows", *RowShape._fields, "x_elements", "steps")),
        ("seed", ctypes.c_uint64),
        ("arguments", ctypes.POINTER(ctypes.c_uint64)),
        ("operands", ctypes.POINTER(_Operand)),
        ("operand_count", ctypes.c_uint64),
        ("outputs", ctypes.POINTER(_Output)),
        ("output_count", ctypes.c_uint64),
        *((name, ctypes.c_uint32) for name in ("threads", "cluster", "shared_bytes", "element_bytes", "starts_early")),
    )


_COUNTS = [each.name for each in fields(EmulationReport) if not each.name.startswith("first_")]
_FIRST = ("first_race", "first_uninitialized_read")


class _Report(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in _COUNTS),
        *((name, ctypes.c_char * 256) for name in _FIRST),
        ("error", ctypes.c_char * 768),
    )


# The state of the emulator is global, and a library file is loaded once, so one launch runs at a time.
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
        x_elements: int | None = None,
        operands: Mapping[str, np.ndarray[Any, Any] | int] | None = None,
        outputs: Mapping[str, tuple[np.ndarray[Any, Any], int]] | None = None,
        order_seed: int = 0,
    ) -> EmulationReport:
        """Transform the first `elements` (default: all) of x, the raw bits of elements, into `out`, which may be x.

        A kernel that quantizes writes codes to `out`, uint8 of exactly their size. `outputs`: what it writes besides,
        by name: an array, and how many bytes of it must be written.

        `rows`, `shape`: for a kernel that reads a `RowShape`, the number of rows and their layout; then `elements` is
        rows · n. `x_elements`: how many elements of x a kernel may read, if that does not follow from these; behind a
        prologue, x may have more elements than the result.
        `operands`: contiguous arrays and numbers for all other params, by name. The launch has as
        many blocks as on a device with room for `RESIDENT_CLUSTERS` clusters. `order_seed`: 0 runs the threads in
        order, each up to its next collective; 1 in reverse; any other in a random order.

        Raises `EmulationError` if the kernel diverges, hangs, loops forever, or has a bad access. Raises `UsageError`
        if x or out is not contiguous, too small, or not aligned to 16 bytes (with a `shape`: to an element), if they
        are one array of two pitches, or if an operand is missing.
        """
        elements = x.size if elements is None else elements
        given = operands or {}
        others = [value for value in given.values() if isinstance(value, np.ndarray)]
        values = {name: value.ctypes.data if isinstance(value, np.ndarray) else value for name, value in given.items()}
        has_codes = out.dtype == np.uint8
        written = [_Output(out.ctypes.data, out.nbytes, out.nbytes)] * has_codes
        for name, (array, least) in (outputs or {}).items():
            values[name] = array.ctypes.data
            written.append(_Output(array.ctypes.data, array.nbytes, least))
        arguments = launch.arguments(elements, scale, shape, values)
        arguments[X], arguments[Y] = x.ctypes.data, out.ctypes.data
        if shape is None:
            rows, shape = elements, RowShape(1, 1, 1)  # as any array without gaps
        columns, x_pitch, y_pitch = shape
        alignment = x.itemsize if launch.reads_rows else VECTOR_BYTES
        of_x, of_y = ((rows - 1) * pitch + columns if rows else 0 for pitch in (x_pitch, y_pitch))
        of_x = of_x if x_elements is None else x_elements
        for name, array, least in (("x", x, of_x), ("out", out, of_y))[: 1 if has_codes else 2]:
            if array.dtype not in (np.uint16, np.uint32) or array.dtype != x.dtype or not array.flags.c_contiguous:
                raise UsageError(f"{name} is not a contiguous uint16 or uint32 array, of the type of x; copy it first")
            if array.ctypes.data % alignment:
                raise UsageError(f"{name} is not aligned to {alignment} bytes; copy it first")
            if array.size < least:
                raise UsageError(f"{name} has {array.size} elements, fewer than the {least} to transform")
        if x.ctypes.data == out.ctypes.data and x_pitch != y_pitch:
            raise UsageError(f"in place, rows cannot lie both {x_pitch} and {y_pitch} elements apart; give one pitch")
        tiles = -(-elements // launch.tile_elements)
        settings = _Launch(
            blocks=launch.grid(elements, RESIDENT_CLUSTERS * launch.cluster),
            elements=elements,
            rows=rows,
            **shape._asdict(),
            x_elements=of_x,
            steps=STEPS_PER_ELEMENT * max(tiles * launch.tile_elements, 8 * launch.threads * launch.cluster),
            seed=order_seed,
            arguments=(ctypes.c_uint64 * len(arguments))(*arguments),
            operands=(_Operand * len(others))(*(_Operand(each.ctypes.data, each.nbytes) for each in others)),
            operand_count=len(others),
            outputs=(_Output * len(written))(*written),
            output_count=len(written),
            threads=launch.threads,
            cluster=launch.cluster,
            shared_bytes=launch.shared_bytes,
            element_bytes=x.itemsize,
            starts_early=launch.starts_early,
        )
        report = _Report()
        with _ONE_AT_A_TIME:
            self._library.hadagen_run(
                ctypes.cast(getattr(self._library, _caller(entry)), ctypes.c_void_p),
                ctypes.byref(settings),
                x.ctypes.data,
                None if has_codes else out.ctypes.data,
                ctypes.byref(report),
            )
        if report.error:
            raise EmulationError(f"{entry}: {report.error.decode(errors='replace')}")
        counts = {name: getattr(report, name) for name in _COUNTS}
        first = {name: getattr(report, name).decode(errors="replace") for name in _FIRST}
        return EmulationReport(**first, **counts)


def compile_host(
    sources: Sequence[Source],
    *,
    texts: Mapping[str, str] | None = None,
    cache_directory: Path | None = None,
    stopped: threading.Event | None = None,
) -> HostModule:
    """Build kernels for the host, or load the build of an earlier call with the same texts and compiler.

    One compiler runs for each CPU. `texts`: file name → source of the machine, `host_texts()` by default. Setting
    `stopped` kills the compilers, which raises `Stopped`. Raises `HostCompileError` if the compiler refuses a source,
    `HostCompilerDied` if it dies, `ToolchainError` if there is none or it compiles nothing at all, and `StorageError`
    if the cache cannot be written.
    """
    texts = host_texts() if texts is None else texts
    root = cache_root() if cache_directory is None else cache_directory
    unique = list(dict.fromkeys(_noting_steps(source.text) + _call(source) for source in sources))
    units = ["\n".join(unique[at : at + KERNELS_PER_UNIT]) for at in range(0, len(unique), KERNELS_PER_UNIT)]
    compiler = _compiler(os.environ.get("CXX"))
    key = _key(compiler.identity, KERNEL_FLAGS, MACHINE_FLAGS, sorted(texts.items()), units)
    library = KernelCache(root, "host", [LIBRARY])
    if not library.load(key):
        with library.workspace() as folder:
            build = _HostBuild(compiler, texts, root, folder, stopped or threading.Event())
            try:
                library.store(key, {LIBRARY: build.library(units)}, {"compiler": compiler.version})
            except HostCompileError:
                build.check_compiler_works()
                raise
    return HostModule(library.entry(key) / LIBRARY)


def _caller(entry: str) -> str:
    return f"call_{entry}"


def _noting_steps(text: str) -> str:
    """The text of a kernel that tells the machine at which step each thread is: at the comment before each block."""
    return _STEP.sub(r'hadagen::machine::begin_step(R"(\1)");', text)


def _call(source: Source) -> str:
    """A function that calls a kernel with its arguments, given in eight bytes each."""
    arguments = ", ".join(f"({param.kind})arguments[{i}]" for i, param in enumerate(source.launch.params))
    return f"""
extern "C" __attribute__((visibility("default"))) void {_caller(source.entry)}(const hadagen::u64* arguments) {{
    using namespace hadagen;
    {source.entry}({arguments});
}}
"""


def host_texts() -> dict[str, str]:
    """File name → source, for the emulated machine and for the primitives that only kernels include."""
    return read_texts("common", "host")


def host_compiler() -> str:
    """The C++ compiler and its version. Raises `ToolchainError` if there is none."""
    compiler = _compiler(os.environ.get("CXX"))
    return ": ".join([shlex.join(compiler.command), *compiler.version.splitlines()[:1]])


def verification_rows(problem: Problem, launch: LaunchSpec, least: int = NORMAL_ELEMENTS) -> int:
    """Rows of each class of input for `verify`: few, but enough for full tiles, a ragged tile and a persistent loop.
    Each class has at least `least` elements to measure its error on."""
    tiles = PERSISTENT_TILES if launch.persistent else 2
    elements = max(tiles * launch.tile_elements, len(INPUT_CLASSES) * least)
    tile_rows = launch.tile_elements // problem.n
    rows = max(1 + (tile_rows > 1), -(-elements // (len(INPUT_CLASSES) * problem.n)))
    whole = tile_rows > 1 and (len(INPUT_CLASSES) * rows - 1) % tile_rows == 0
    return rows + whole


def verify(
    problem: Problem,
    source: Source,
    rows: int | None = None,
    *,
    module: HostModule | None = None,
    shape: RowShape | None = None,
    operands: OperandValues | None = None,
    in_place: bool = False,
    units_in_row: int = 1,
    order_seed: int = 0,
) -> dict[str, float]:
    """Relative error of a kernel against float64 for each class of input, all classes in one launch.

    `rows` (default `verification_rows`): rows of each class; if more than one, the last class has one row less, so
    that the last tile is ragged if a tile holds several rows. `module`: has the kernel already, if many were built at
    once. `shape`: for a kernel that reads one, by default three quarters of each row; an array with an odd pitch begins
    one element after a multiple of 16 bytes. `units_in_row`: how many `Problem.unit`s a row of results has, where x
    holds two halves of it. `operands`: values that differ from `verification_operands`. The scale is
    `verification_scale`. The output and the gaps of x begin as NaNs. Raises `EmulationError` if the kernel does not run
    to its end, or if `EmulationReport.complaint` is not "".
    """
    import torch  # here, because most that import this module run nothing

    from hadagen.truth import quantizer
    from hadagen.truth.accuracy import TORCH_DTYPE, error_of, scales_in_rows

    rows = verification_rows(problem, source.launch) if rows is None else rows
    module = compile_host([source]) if module is None else module
    form, together = problem.io.form, problem.unit // problem.n  # rows of x
    classes = input_classes(problem, -(-rows // together) * together)
    last = INPUT_CLASSES[-1]
    classes[last] = classes[last][: max(1, len(classes[last]) // together - 1) * together]
    if source.launch.reads_rows and shape is None:
        shape = RowShape(problem.n - problem.n // 4, problem.n, problem.n)
    columns, x_pitch, y_pitch = (problem.n,) * 3 if shape is None else shape
    if columns < problem.n:
        classes.pop("constant", None)  # cut short it gives few values over and over; their rounding is no average
    by_parts = input_parts(problem, classes)
    classes = {name: classes[name] for name in by_parts}
    values = np.concatenate(list(classes.values()))
    values[:, columns:] = 0.0
    scale = verification_scale(problem)
    units = values.size // problem.unit
    parts = values if width_of(problem) == 1 else np.concatenate(list(by_parts.values()), axis=1)
    operands = {**verification_operands(problem, units), **(operands or {})}
    transformed, second = exact_results(problem, parts, scale, operands)
    exact = torch.from_numpy(transformed[:, :columns])
    odd = int(source.launch.reads_rows)  # arrays with an odd pitch begin between vectors
    prologue = prologue_of(problem)
    if width_of(problem) > 1:
        assert prologue is not None
        flat = torch.from_numpy(parts.reshape(len(parts), -1))
        in_memory = prologue.in_rows(flat, units_in_row * problem.unit, np.nan)
        x = encode(problem.io.input, in_memory.numpy())
    else:
        x = _poisoned(problem.io.input, len(values), x_pitch, x_pitch % 2 * odd)
        x[:, :columns] = encode(problem.io.input, values[:, :columns])
    taken: dict[str, Any] = kernel_operands(problem, operands)
    taken |= prologue.numbers(units_in_row) if prologue else {}
    outputs: dict[str, tuple[Any, int]] = {}
    for name in second:
        like_x = _poisoned(problem.io.input, 1, values.size).reshape(-1)
        outputs[name] = like_x, like_x.nbytes
    given = torch.from_numpy(operands["tensor_scale"]) if "tensor_scale" in operands else None
    if form is None:
        out = x if in_place else _poisoned(problem.io.input, len(values), y_pitch, y_pitch % 2 * odd)
    else:
        dtype, cpu = TORCH_DTYPE[problem.io.input], torch.device("cpu")
        codes, laid_out = quantizer.empty(units, problem.unit, form, dtype, cpu)
        out, memory = (quantizer.memory_of(each).numpy() for each in (codes, laid_out))
        out[:] = 0x7F
        if form.group > 0:
            outputs["scales"] = memory, units * form.scales_in_row(problem.unit) * laid_out.element_size()
        taken |= sizes_for(form, units, problem.unit)
    report = module.run(
        source.entry,
        source.launch,
        x.reshape(-1),
        out.reshape(-1),
        scale=scale,
        elements=values.size,
        rows=len(values),
        shape=shape,
        x_elements=x.size if width_of(problem) > 1 else None,
        operands=taken,
        outputs=outputs,
        order_seed=order_seed,
    )
    if report.complaint:
        raise EmulationError(f"{source.entry}: {report.complaint}")
    if form is None:
        results = [torch.from_numpy(decode(problem.io.input, out[:, :columns]))]
    else:
        results = [codes, scales_in_rows(problem, laid_out, units)] if "scales" in outputs else [codes]
    errors, begin = {}, 0
    for name, some in classes.items():
        rows_here, begin = slice(begin, begin + len(some)), begin + len(some)
        here = slice(rows_here.start // together, rows_here.stop // together)
        of_heads = given if given is None else given[here] if len(given) > 1 else given[0]
        errors[name] = float(error_of(problem, [each[here] for each in results], exact[rows_here], of_heads))
        for other, wanted in second.items():
            found = decode(problem.io.input, outputs[other][0]).reshape(wanted.shape)
            errors[name] = max(errors[name], relative_error(found[rows_here], wanted[rows_here]))
    return errors


def _poisoned(dtype: DType, rows: int, pitch: int, first: int = 0) -> Bits:
    """[rows, pitch] NaNs that begin so many elements after a multiple of 16 bytes."""
    bits = encode(dtype, np.full(rows * pitch + 1, np.nan))
    return bits[first:][: rows * pitch].reshape(rows, pitch)


@dataclass(frozen=True)
class _Compiler:
    command: tuple[str, ...]
    version: str

    @property
    def identity(self) -> tuple[object, ...]:
        """The values that the compiler's objects depend on: options, version and kind of CPU, not its place."""
        said = [line for line in self.version.splitlines() if not line.startswith("InstalledDir:")]  # as clang says
        return self.command[1:], said, platform.machine()


@cache
def _compiler(cxx: str | None) -> _Compiler:
    """$CXX, or the first of c++, g++ and clang++ that exists."""
    for name in [cxx] if cxx else ["c++", "g++", "clang++"]:
        try:
            command = shlex.split(name)
        except ValueError:  # a quotation that does not end
            command = []
        if not command:
            raise ToolchainError(f"CXX = {shown(name)} is no command; set it to a C++ compiler, such as c++")
        if shutil.which(command[0]) is None:
            continue
        try:
            said = programs.run([*command, "--version"]).log
        except OSError as error:
            raise ToolchainError(f"{name} cannot be run ({error.strerror}); set CXX to a C++ compiler") from error
        return _Compiler(tuple(command), said)
    raise ToolchainError(
        f"no C++ compiler was found as {cxx or 'c++, g++ or clang++'}; install one or set CXX to its name"
    )


class _HostBuild:
    """Calls of the host compiler for one library, in `folder`. `root`: the root of the cache."""

    def __init__(
        self, compiler: _Compiler, texts: Mapping[str, str], root: Path, folder: Path, stopped: threading.Event
    ) -> None:
        self._compiler, self._texts, self._root, self._folder, self._stopped = compiler, texts, root, folder, stopped
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")

    def library(self, units: Sequence[str]) -> bytes:
        """Build all units, together with the machine. Raises as `compile_host` does."""
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            try:
                machine = [pool.submit(self._machine, name) for name in MACHINE]
                kernels = [pool.submit(self._kernels, f"unit{i}.cpp", text) for i, text in enumerate(units)]
                objects = [job.result() for job in (*machine, *kernels)]
            except BaseException as error:
                if not isinstance(error, HadagenError):  # a `HadagenError` may be the fault of one source alone
                    self._stopped.set()
                pool.shutdown(cancel_futures=True)
                raise
        return self._compile(self._folder / LIBRARY, "-shared", *objects).read_bytes()

    def check_compiler_works(self) -> None:
        """Raise if there is no room here, or not even an empty library can be built: then no source is to blame."""
        (self._folder / "room").write_bytes(bytes(16 << 20))
        empty = self._folder / "empty.cpp"
        empty.touch()
        try:
            self._compile(self._folder / "empty.so", *FLAGS, "-shared", empty)
        except HostCompileError as error:
            raise ToolchainError(
                f"{self._compiler.command[0]} cannot build an empty library: {error.log.splitlines()[0]}; set CXX to "
                "another C++ compiler"
            ) from error

    def _machine(self, name: str) -> Path:
        """One of `MACHINE`, from the cache or newly built."""
        shared = [self._texts[header] for header in MACHINE_HEADERS]
        key = _key(self._compiler.identity, MACHINE_FLAGS, shared, self._texts[name])
        objects = KernelCache(self._root, "machine", [OBJECT])
        built = (self._folder / name).with_suffix(".o")
        if found := objects.load(key):
            built.write_bytes(found[OBJECT])
        else:
            self._compile(built, *MACHINE_FLAGS, "-c", self._folder / name)
            objects.store(key, {OBJECT: built.read_bytes()}, {"compiler": self._compiler.version})
        return built

    def _kernels(self, name: str, text: str) -> Path:
        path = self._folder / name
        path.write_text(text, encoding="utf-8")
        return self._compile(path.with_suffix(".o"), *KERNEL_FLAGS, "-I", self._folder, "-c", path)

    def _compile(self, output: Path, *arguments: str | Path) -> Path:
        """Call the compiler to write `output`, and return `output`."""
        command = [*self._compiler.command, *arguments, "-o", output]
        answer = programs.run(command, folder=self._folder, stopped=self._stopped)
        if reason := answer.passing:
            raise HostCompilerDied(f"{self._compiler.command[0]} {reason}; run the same command again")
        log = answer.log.strip() or f"exit status {answer.status}"
        if answer.ok and not output.exists():
            log = f"{output.name} was not written"
        elif answer.ok:
            return output
        first = next((line for line in log.splitlines() if "error" in line), log.splitlines()[0])
        raise HostCompileError(f"{self._compiler.command[0]} refuses a kernel for the emulator: {first}", log)


def _key(*parts: object) -> str:
    return sha256(repr(parts).encode()).hexdigest()
