"""Runs every shipped kernel under NVIDIA's compute-sanitizer: memcheck, racecheck, initcheck and synccheck.

    python ci/sanitize.py run --csv sanitizer.csv                # all kernels of the GPU's bundle, by all tools
    python ci/sanitize.py run --csv sanitizer.csv --part 2/4     # the second quarter of them
    python ci/sanitize.py merge docs/data/sanitizer.csv sanitizer.csv other.csv

Each kernel runs with a single row, around the ends of a tile, with an odd number of rows, and, if it loops, with
several tiles a block. Each array is an allocation of its own that ends with its last element. First come *controls*:
broken kernels, one for each tool, which that tool has to find.

Where blocks store into each other's shared memory, a thread prepares an mbarrier (`mbarrier.init`) and then arrives at
it. ptxas compiles the first to an instruction of the whole warp, and racecheck warns of a race between the two. The
column `own_barrier` counts these warnings, which are no findings: the emulator, to which both are accesses of their
thread, finds no race. The machine code has to have these two instructions where racecheck says; any other warning is a
finding.

racecheck knows what a thread has done before it arrives at an mbarrier, but not that the other lanes of its warp have
met it before that (`warp_sync`), so that it arrives for all of them. So a kernel that racecheck finds something in is
compiled once more, with barriers at which each lane arrives for itself. If racecheck finds nothing in this one, the
column `lanes` has the number that it found in the other, which are no findings. The emulator checks that lanes meet
before one arrives for them. Kernels that cannot be generated have no second look.

A run takes up where the table that `--csv` names ends, and stops after `--seconds`. It exits with 0 if all is done and
nothing was found, with 1 if anything was found or a tool missed its control, and with 3 if kernels are left.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hadagen.compiler.codegen import render
from hadagen.compiler.compilers import find_tool
from hadagen.compiler.recipes import is_recipe_of
from hadagen.compiler.toolchain import Toolchain, disassemble
from hadagen.errors import ToolchainError
from hadagen.gpu import driver
from hadagen.measure import without_texts
from hadagen.plan.arch import load_arch
from hadagen.plan.knobs import Knobs
from hadagen.plan.space import build_plan
from hadagen.problem.formats import TENSOR
from hadagen.problem.launch import ENTRY, LaunchSpec, RowShape, Source
from hadagen.problem.operands import kernel_operands, sizes_for, verification_operands
from hadagen.problem.problem import Problem, Rows
from hadagen.problem.prologues import prologue_of, width_of
from hadagen.problem.regimes import Destination, destinations
from hadagen.problem.trial import Kernel
from hadagen.truth.reference import verification_scale
from hadagen.tuning_db.bundle import Bundle
from hadagen.tuning_db.merge import selection_of
from hadagen.tuning_db.winners import digest_of

ROOT = Path(__file__).resolve().parent.parent
# What each tool gets besides; memory behind an allocation that is none, so that near overruns do not hit another one.
TOOLS = {
    "memcheck": ("--padding", "65536"),
    "racecheck": (),
    "initcheck": (),
    "synccheck": (),
}
COMMON = (
    *("--target-processes", "application-only", "--launch-timeout", "0", "--destroy-on-device-error", "kernel"),
    *("--report-api-errors", "no", "--print-limit", "100000"),
)
OWN_BARRIER = "own_barrier"  # counts racecheck's warnings of a barrier that one thread prepares and arrives at
LANES = "lanes"  # counts what racecheck finds only where one lane arrives for its warp
COLUMNS = ("gpu", "kernel", "problem", "launches", *TOOLS, OWN_BARRIER, LANES)
CONTROL = "control"  # stands for the problem of a broken kernel
NO_KERNEL = "no kernel"
LEFT = 3
STALL_SECONDS = 120.0  # without a kernel that is done; then the one that runs hangs
END_SECONDS = 30.0  # for a tool to end, once its program has
_NO_FINDING = re.compile(
    r"COMPUTE-SANITIZER|ERROR SUMMARY: |RACECHECK SUMMARY: |LEAK SUMMARY: |\(?No |Target application"
)
_WARP_RACE = re.compile(
    r"Warning: Race reported between Write access at (\w+)\+(0x[0-9a-f]+)\n"
    r"=+ +and Read access at \1\+(0x[0-9a-f]+) \[\d+ hazards\]\n=+\s*"
)
_PREPARES, _ARRIVES = re.compile(r"(@\S+ )?SYNCS\.EXCH\b"), re.compile(r"(@\S+ )?SYNCS\.ARRIVE\b")

_ARRIVES_FOR_WARP = re.compile(r"if \(lane == 0(?: && ([^;]*))?\) barrier_arrive\(")
_ARRIVALS = re.compile(r"barrier_init\((.+?), (\d+)\);")
_CONTROL_SPEC = LaunchSpec(threads=64, cluster=1, shared_bytes=0, tile_elements=64, persistent=False)
_CONTROL = """#include "hadagen.cuh"
using namespace hadagen;
extern "C" __global__ void {entry}(const void* x, void* y, i64 elements, u32 scale_word) {{
    __shared__ volatile u32 shared[64];
    const u16* in = static_cast<const u16*>(x);
    volatile u16* out = static_cast<volatile u16*>(y);
    const u32 t = thread_index();
    const i64 i = block_index() * 64ll + t;
    if (i >= elements) return;
    {body}
}}
"""
CONTROLS = {
    "memcheck": "out[i + elements] = in[i];",
    "racecheck": "shared[t] = in[i]; out[i] = shared[63 - t];",
    "initcheck": "out[i] = out[i] + in[i];",
    "synccheck": 'if (t < 48) asm volatile("bar.sync 0;"); out[i] = in[i];',
}


def name_of(digest: str) -> str:
    """That of a kernel under the tools. It is as long as `ENTRY`, so that it can take its place in a cubin."""
    return f"k{digest[: len(ENTRY) - 1]}"


@dataclass(frozen=True)
class Job:
    """A kernel to launch. `problem`: its key, or `CONTROL`. `name`: of its entry, which no other kernel has."""

    kernel: Kernel
    problem: str

    @property
    def digest(self) -> str:
        return self.kernel.digest

    @property
    def name(self) -> str:
        return name_of(self.digest)

    @property
    def image(self) -> bytes:
        """The cubin with this name, so that a finding says which kernel it is of."""
        return self.kernel.cubin.replace(ENTRY.encode(), self.name.encode())

    def instructions(self) -> dict[int, str]:
        """Address → instruction."""
        found = re.findall(r"/\*([0-9a-f]{4,})\*/ +(.*?) *;", disassemble(self.kernel))
        return {int(address, 16): instruction for address, instruction in found}


class Array(NamedTuple):
    """Memory for a launch. size: bytes. pieces: (where, what) of what is in it. offset: where the array begins."""

    size: int
    pieces: tuple[tuple[int, bytes], ...] = ()
    offset: int = 0


@dataclass(frozen=True)
class Case:
    """A launch. `arrays`: by param; `numbers`: other params. `blocks`: the most that are resident, 0 for as many as the
    device holds. Without "y" it is in place."""

    elements: int
    scale: float
    shape: RowShape
    arrays: Mapping[str, Array]
    numbers: Mapping[str, int]
    blocks: int = 0


def cases(problem: Problem, spec: LaunchSpec) -> Iterator[Case]:
    """Launches of few rows, with memory that ends where the rows do."""
    tile = max(1, spec.tile_elements // problem.unit)
    counts = {1, max(1, tile - 1), tile, tile + 1, 2 * tile + 1}
    wanted = [(count, 0) for count in sorted(counts)]
    if spec.persistent:  # each of two clusters takes several tiles
        wanted.append((7 * tile + 1, 2 * spec.cluster))
    for number, (count, blocks) in enumerate(wanted):
        for shape, x_offset, y_offset in _shapes(problem):
            case = _case(problem, count, shape, x_offset, y_offset)
            yield replace(case, blocks=blocks)
            if Destination.IN_PLACE in destinations(problem) and number == len(wanted) - 1:
                in_place = shape._replace(y_pitch=shape.x_pitch)
                whole = _case(problem, count, in_place, x_offset, x_offset)
                yield replace(
                    whole, blocks=blocks, arrays={name: each for name, each in whole.arrays.items() if name != "y"}
                )


def _shapes(problem: Problem) -> list[tuple[RowShape, int, int]]:
    """Layouts of rows, and the elements in front of x and y."""
    n = problem.n
    if problem.io.rows is Rows.CONTIGUOUS:
        return [(RowShape(n, n, n), 0, 0)]
    most, half = max(n - 1, 1), n // 2 + (n > 2)
    return [
        (RowShape(n, n, n), 0, 0),
        (RowShape(most, most + 4, most + 2), 1, 3),
        (RowShape(half, n + 8, half), 0, 1),
    ]


def _case(problem: Problem, units: int, shape: RowShape, x_offset: int, y_offset: int) -> Case:
    """A launch over `units`, which are all of one row before a prologue with rows of its own."""
    form, size = problem.io.form, problem.io.input.bytes
    rows = units * problem.unit // problem.n
    columns, x_pitch, y_pitch = shape
    random = np.random.default_rng(rows)
    # Small bit patterns are finite in every type; none is NaN.
    values = random.integers(0, 0x3C00, (rows, columns * width_of(problem) * size // 2), np.uint16)
    if x_pitch == columns:
        pieces: tuple[tuple[int, bytes], ...] = ((x_offset * size, values.tobytes()),)
    else:
        pieces = tuple(((x_offset + i * x_pitch) * size, row.tobytes()) for i, row in enumerate(values))
    held = (x_offset + (rows - 1) * x_pitch + columns) * width_of(problem)
    arrays = {"x": Array(held * size, pieces, x_offset * size)}
    prologue = prologue_of(problem)
    numbers: dict[str, int] = dict(prologue.numbers(units)) if prologue else {}
    if form is None:
        arrays["y"] = Array((y_offset + (rows - 1) * y_pitch + columns) * size, (), y_offset * size)
    else:
        arrays["y"] = Array(units * problem.unit * form.element.bits // 8)
        groups = form.scales_in_row(problem.unit)
        numbers |= sizes_for(form, units, problem.unit)
        if form.group != TENSOR:
            of_scale = form.scale_bytes(size)
            arrays["scales"] = Array(prod(form.layout.filled_up(units, groups, of_scale)) * of_scale)
    values = verification_operands(problem, rows * problem.n // problem.unit)
    for name, value in kernel_operands(problem, values).items():
        content = np.ascontiguousarray(value).tobytes()
        arrays[name] = Array(len(content), ((0, content),))
    return Case(rows * problem.n, verification_scale(problem), shape, arrays, numbers)


def _control_case() -> Case:
    content = np.arange(96, dtype=np.uint16).tobytes()
    arrays = {"x": Array(192, ((0, content),)), "y": Array(192)}
    return Case(96, 1.0, RowShape(1, 1, 1), arrays, {})


# ── The program that runs under the sanitizer ──


class Memory:
    """Device memory, an allocation for each array: PyTorch would put many into one."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._held: list[ctypes.c_uint64] = []

    def take(self, array: Array) -> int:
        """The address of a new array, behind its offset."""
        at = ctypes.c_uint64()
        self._check(self._library.cuMemAlloc_v2(ctypes.byref(at), ctypes.c_size_t(max(array.size, 1))))
        self._held.append(at)
        for where, content in array.pieces:
            target = ctypes.c_uint64(at.value + where)
            self._check(self._library.cuMemcpyHtoD_v2(target, content, ctypes.c_size_t(len(content))))
        return at.value + array.offset

    def give_back(self) -> None:
        while self._held:
            self._library.cuMemFree_v2(self._held.pop())

    def _check(self, code: int) -> None:
        driver.check((code,), "copying to the device")


def launch_all(jobs: Path, done: Path, until: float) -> None:
    """Launch the kernels of a file, and note in another one what is begun and done. until: by the clock of the system,
    when no other kernel is begun."""
    waiting: list[Job] = pickle.loads(jobs.read_bytes())
    context = driver.primary_context(0)
    driver.check(driver.bindings().cuCtxSetCurrent(context), "making a context")
    memory = Memory()
    with done.open("a", encoding="utf-8") as log:
        print("process", os.getpid(), "-", 0, file=log, flush=True)
        for job in waiting:
            if time.time() >= until:
                return
            _note(log, "begun", job, 0)
            launches = 0
            try:
                kernel = driver.load(job.image, job.name, job.kernel.launch)
            except driver.DoesNotFit:
                _note(log, "done", job, 0)
                continue
            try:
                control = job.problem == CONTROL
                for case in [_control_case()] if control else cases(Problem.parse(job.problem), job.kernel.launch):
                    at = {name: memory.take(array) for name, array in case.arrays.items()}
                    x, y = at.pop("x"), at.pop("y", 0)
                    limited = replace(kernel, resident_blocks=case.blocks or kernel.resident_blocks)
                    limited.launch(0, x, y or x, case.elements, case.scale, case.shape, {**at, **case.numbers})
                    driver.check(driver.bindings().cuCtxSynchronize(), f"running {job.name}")
                    memory.give_back()
                    launches += 1
            except driver.DriverError as error:
                print(error, flush=True)
                _note(log, "failed", job, launches)
                if driver.bindings().cuCtxSynchronize() != (0,):
                    return  # the context is lost
            _note(log, "done", job, launches)
            memory.give_back()
            driver.unload(kernel)


def _note(log: Any, what: str, job: Job, launches: int) -> None:
    print(what, job.digest, job.problem, launches, file=log, flush=True)


# ── What starts it ──


def findings(output: str, jobs: Iterable[Job] = ()) -> tuple[Counter[str], Counter[str]]:
    """Name of a kernel, or `NO_KERNEL` → how many findings the output of a tool has of it, and how many warnings that
    are none (`OWN_BARRIER`), which only kernels of `jobs` can have."""
    found: Counter[str] = Counter()
    own_barrier: Counter[str] = Counter()
    by_name = {job.name: job for job in jobs}
    instructions: dict[str, dict[int, str]] = {}
    for record in re.split(r"(?m)^========= (?=\S)", output)[1:]:
        if _NO_FINDING.match(record):
            continue
        named = re.search(r"\bk[0-9a-f]{13}\b", record)
        name = named[0] if named else NO_KERNEL
        race = _WARP_RACE.fullmatch(record)
        if race and name in by_name:
            if name not in instructions:
                instructions[name] = by_name[name].instructions()
            write, read = (instructions[name].get(int(address, 16), "") for address in race.groups()[1:])
            if _PREPARES.match(write) and _ARRIVES.match(read):
                own_barrier[name] += 1
                continue
        found[name] += 1
    return found, own_barrier


def was_watched(output: str) -> bool:
    """Whether the tool came to its end: without a summary it has seen nothing."""
    return bool(re.search(r"(ERROR|RACECHECK) SUMMARY: ", output))


@dataclass
class Run:
    """One tool over kernels. `launched`: (digest, problem) → launches of those that are done."""

    tool: str
    launched: dict[tuple[str, str], int]
    found: Counter[str]
    own_barrier: Counter[str]
    texts: list[str]
    lanes: Counter[str] = field(default_factory=Counter)

    @property
    def columns(self) -> dict[tuple[str, str], tuple[int, int]]:
        """(digest, problem) → launches, findings."""
        return {key: (launches, self.found[name_of(key[0])]) for key, launches in self.launched.items()}


def sanitize(tool: str, jobs: Sequence[Job], folder: Path, deadline: float, program: Sequence[str]) -> Run:
    """Run a tool over kernels until all are done or the deadline (of `time.monotonic()`).

    A process that ends early is followed by another one, without the kernel that ended it, which counts as found. Where
    a tool gave no summary, some of what it had seen may be lost, so that the kernels of that process run again.
    """
    run, waiting = Run(tool, {}, Counter(), Counter(), []), list(jobs)
    own = folder / tool
    own.mkdir(exist_ok=True)
    while waiting and time.monotonic() < deadline:
        todo, done = own / "jobs", own / "done"
        todo.write_bytes(pickle.dumps(waiting))
        done.write_text("")
        until = time.time() + deadline - time.monotonic()
        command = [*program, "--tool", tool, *TOOLS[tool], *COMMON]
        command += [sys.executable, str(Path(__file__).resolve()), "launch", str(todo), str(done), str(until)]
        with (own / "output").open("w+", encoding="utf-8", errors="replace") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
            _wait(process, done)
            output.seek(0)
            text = output.read()
        noted = [line.split() for line in done.read_text(encoding="utf-8").splitlines()]
        finished = {(digest, problem): int(count) for what, digest, problem, count in noted if what == "done"}
        begun = [(digest, problem) for what, digest, problem, _ in noted if what == "begun"]
        found, own_barrier = findings(text, jobs)
        run.found += found
        run.own_barrier += own_barrier
        run.found += Counter(name_of(digest) for what, digest, *_ in noted if what == "failed")
        run.texts.append(text)
        broken_off = [key for key in begun if key not in finished]
        if not broken_off and not was_watched(text):
            raise SystemExit(f"{tool} said nothing of what it has seen:\n{text[-2000:]}")
        if was_watched(text):
            run.launched |= finished
        for key in broken_off:
            run.launched[key] = 0
            run.found[name_of(key[0])] += 1
        waiting = [job for job in waiting if (job.digest, job.problem) not in run.launched]
    return run


def look_again(
    run: Run, own: Sequence[Job], control: Job, folder: Path, deadline: float, program: Sequence[str]
) -> None:
    """Count apart what racecheck no longer finds.

    run: of racecheck. own: the kernels that it found something in, `with_own_arrivals`. control: a kernel that it has
    to find something in this time too. Kernels that the deadline cuts off count as not done.
    """
    again = sanitize(run.tool, [control, *own], folder, deadline, program)
    run.texts += again.texts
    for job in own:
        if (job.digest, job.problem) not in again.launched:
            run.launched.pop((job.digest, job.problem))
    if not again.found[control.name]:
        return
    silent = {job.name for job in own if again.launched.get((job.digest, job.problem)) and not again.found[job.name]}
    for name in silent:
        run.lanes[name] = run.found.pop(name)


def _wait(process: subprocess.Popen[bytes], done: Path) -> None:
    """Until a tool ends. If no kernel is done for `STALL_SECONDS`, the program under it is killed, so that the tool can
    say what it has seen, and soon the tool too."""
    size, since, killed = 0, time.monotonic(), False
    while process.poll() is None:
        now = time.monotonic()
        if (new := done.stat().st_size) != size:
            size, since = new, now
        if now - since >= STALL_SECONDS:
            found = re.match(r"process (\d+)", done.read_text(encoding="utf-8"))
            if found and not killed:
                killed, since = True, now - STALL_SECONDS + END_SECONDS
                with suppress(ProcessLookupError):
                    os.kill(int(found[1]), signal.SIGKILL)
            else:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        time.sleep(0.05)


def controls(arch: str) -> dict[str, Job]:
    """Tool → a kernel that it has to find."""
    entries = {tool: f"broken_for_{tool}" for tool in CONTROLS}
    sources = [
        Source(entries[tool], _CONTROL.format(entry=entries[tool], body=body), _CONTROL_SPEC)
        for tool, body in CONTROLS.items()
    ]
    kernels = Toolchain.find().build_all(sources, load_arch(arch))
    return {tool: Job(kernel, CONTROL) for tool, kernel in zip(CONTROLS, kernels, strict=True)}


def with_own_arrivals(jobs: Sequence[Job], bundle: Bundle) -> list[Job]:
    """The kernels compiled anew, with barriers at which each lane arrives; without those that cannot be generated. They
    keep their digests, by which findings are counted."""
    trials = {digest_of(trial): trial for trial in selection_of(bundle).values()}
    known = [job for job in jobs if is_recipe_of(trials[job.digest])]
    arch = load_arch(bundle.arch)
    sources = []
    for trial in (trials[job.digest] for job in known):
        source = render(build_plan(trial.problem, Knobs.from_dict(trial.knobs), arch))
        sources.append(replace(source, text=each_lane_arrives(source.text)))
    kernels = Toolchain.find().build_all(sources, arch) if sources else []
    return [Job(replace(kernel, digest=job.digest), job.problem) for job, kernel in zip(known, kernels, strict=True)]


def each_lane_arrives(text: str) -> str:
    """The text of a kernel in which the first lane of a warp arrives at barriers for the warp."""
    text = _ARRIVES_FOR_WARP.sub(lambda found: f"if ({found[1] or 'true'}) barrier_arrive(", text)
    return _ARRIVALS.sub(lambda found: f"barrier_init({found[1]}, {32 * int(found[2])});", text)


def shipped(bundle: Bundle) -> list[Job]:
    """Every kernel of a bundle that it has code of, once for each problem."""
    wanted = {(entry.kernel, entry.problem.key) for entry in bundle.all_entries() if entry.compiled}
    return [Job(without_texts(bundle.kernel(digest)), problem) for digest, problem in sorted(wanted)]


Row = dict[str, str]
Key = tuple[str, str, str]  # gpu, kernel, problem


def read_table(path: Path) -> dict[Key, Row]:
    if not path.exists():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        rows = [dict.fromkeys(COLUMNS, "") | row for row in csv.DictReader(file)]  # an old table has fewer columns
    return {(row["gpu"], row["kernel"], row["problem"]): row for row in rows}


def write_table(path: Path, rows: Mapping[Key, Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[key] for key in sorted(rows))


def merged(tables: Iterable[Mapping[Key, Row]]) -> dict[Key, Row]:
    """All rows. What a later table says of a tool counts."""
    rows: dict[Key, Row] = {}
    for table in tables:
        for key, row in table.items():
            before = rows.get(key, dict.fromkeys(COLUMNS, ""))
            rows[key] = before | {name: value for name, value in row.items() if value != ""}
    return rows


def without_former(rows: Mapping[Key, Row], gpu: str, jobs: Iterable[Job]) -> dict[Key, Row]:
    """The rows but those of kernels that are shipped no more for a GPU."""
    there = {(gpu, job.digest[:12], job.problem) for job in jobs}
    return {key: row for key, row in rows.items() if key in there or key[0] != gpu or key[2] == CONTROL}


def command_run(arguments: argparse.Namespace) -> int:
    from hadagen.runtime.choose.device import cuda_device

    deadline = time.monotonic() + arguments.seconds
    target = cuda_device(0)
    if target is None:
        raise SystemExit("there is no CUDA device here; run this on a machine with one")
    program = shutil.which(arguments.sanitizer)
    if program is None:
        raise SystemExit(f"{arguments.sanitizer} was not found; install CUDA's compute-sanitizer, or name it")
    try:
        find_tool("nvdisasm")  # reads what racecheck warns of
    except ToolchainError as error:
        raise SystemExit(str(error)) from None
    part, parts = map(int, arguments.part.split("/"))
    path = arguments.bundle or ROOT / "tuning_db" / "bundles" / f"{target.arch}.db"
    bundle = Bundle.open(path)
    kernels = shipped(bundle)
    jobs = kernels[part - 1 :: parts][: arguments.most]
    rows = read_table(arguments.csv)
    if arguments.bundle is None:
        rows = without_former(rows, target.gpu, kernels)
    tools = arguments.tools.split(",")
    broken = controls(target.arch)

    def waiting(tool: str) -> list[Job]:
        rest = [job for job in jobs if not rows.get((target.gpu, job.digest[:12], job.problem), {}).get(tool)]
        return [broken[tool], *rest]

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(tools)) as pool:
        started = {
            tool: pool.submit(sanitize, tool, waiting(tool), Path(folder), deadline, [program]) for tool in tools
        }
        runs = [each.result() for each in started.values()]
        for run in runs:
            if run.tool == "racecheck":
                found = [job for job in jobs if run.found[job.name] and run.launched.get((job.digest, job.problem))]
                own = with_own_arrivals(found, bundle)
                look_again(run, own, broken[run.tool], Path(folder), deadline, [program])
    new: dict[Key, Row] = {}
    failed = False
    for run in runs:
        for (digest, problem), (launches, found) in run.columns.items():
            key = target.gpu, digest[:12], problem
            row = new.setdefault(key, dict.fromkeys(COLUMNS, "") | dict(zip(COLUMNS, key, strict=False)))
            row |= {"launches": str(launches), run.tool: str(found)}
            if run.tool == "racecheck":
                name = name_of(digest)
                row |= {OWN_BARRIER: str(run.own_barrier[name]), LANES: str(run.lanes[name])}
            if found and problem != CONTROL:
                failed = True
                print(f"{run.tool}: {found} findings in kernel {digest[:12]} of {problem}")
        control = run.columns.get((broken[run.tool].digest, CONTROL), (0, 0))
        if not control[1]:
            failed = True
            print(f"{run.tool} did not find its control, so it says nothing of the others")
        if run.found[NO_KERNEL]:
            failed = True
            print(f"{run.tool}: {run.found[NO_KERNEL]} findings outside of any kernel")
        if arguments.output:
            arguments.output.mkdir(parents=True, exist_ok=True)
            (arguments.output / f"{run.tool}.txt").write_text("\n".join(run.texts)[-8_000_000:], encoding="utf-8")
    rows = merged([rows, new])
    write_table(arguments.csv, rows)
    left = {tool: len(waiting(tool)) - 1 for tool in tools}
    done = {tool: len(jobs) - count for tool, count in left.items()}
    print(json.dumps({"gpu": target.gpu, "kernels": len(jobs), "done": done, "left": left}))
    if failed:
        return 1
    return LEFT if any(left.values()) else 0


def command_merge(arguments: argparse.Namespace) -> int:
    write_table(arguments.into, merged(map(read_table, [arguments.into, *arguments.tables])))
    return 0


def command_launch(arguments: argparse.Namespace) -> int:
    launch_all(arguments.jobs, arguments.done, arguments.until)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="run kernels under the tools")
    run.add_argument("--csv", type=Path, required=True, help="the table to go on with, and to write")
    run.add_argument("--part", default="1/1", help="which part of the kernels, such as 2/4")
    run.add_argument("--tools", default=",".join(TOOLS), help="which tools, with commas between them")
    run.add_argument("--seconds", type=float, default=3600.0, help="when to stop")
    run.add_argument("--most", type=int, help="how many kernels at most")
    run.add_argument("--bundle", type=Path, help="the bundle; by default that which is shipped for the GPU")
    run.add_argument("--sanitizer", default="compute-sanitizer", help="the program")
    run.add_argument("--output", type=Path, help="a folder for all that the tools say")
    run.set_defaults(run=command_run)
    merge = commands.add_parser("merge", help="add the rows of tables to another one")
    merge.add_argument("into", type=Path)
    merge.add_argument("tables", type=Path, nargs="+")
    merge.set_defaults(run=command_merge)
    launch = commands.add_parser("launch", help="what runs under a tool")
    launch.add_argument("jobs", type=Path)
    launch.add_argument("done", type=Path)
    launch.add_argument("until", type=float)
    launch.set_defaults(run=command_launch)
    parsed = parser.parse_args(arguments)
    result: int = parsed.run(parsed)
    return result


if __name__ == "__main__":
    sys.exit(main())
