"""`ci/sanitize.py` without a GPU: what it launches, on the emulator, and what it makes of the tools' output."""

import copy
import re
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sanitize
from real_compilers import needs_compiler
from sanitize import CONTROL, NO_KERNEL, Job, findings, merged, name_of

from hadagen.compiler.codegen import render
from hadagen.compiler.emulator import RESIDENT_CLUSTERS, compile_host
from hadagen.plan.arch import load_arch
from hadagen.plan.knobs import Knobs
from hadagen.plan.space import Space, build_plan
from hadagen.problem.formats import TENSOR
from hadagen.problem.launch import ENTRY
from hadagen.problem.problem import Problem
from hadagen.problem.trial import Kernel

KEYS = (
    "n256-float16-fast",
    "n64-float16-fast-pitched",
    "n96-k12-signed-bfloat16-fast",
    "n128-bfloat16-to-fp8_group_128-accurate",
    "n64-float16-to-mxfp4_32_swizzled-accurate",
    "n64-bfloat16-to-fp8_head-accurate",
    "n128-after-silu_mul-bfloat16-to-fp8_group_128-accurate",
    "n256-after-silu_mul-float16-accurate",
)
LOOPING = Knobs(chunks=2, warps=2, grid="persistent", low_bits="mma_shuffle", butterfly_carrier="fp32")
JOBS = [
    Job(
        Kernel(f"{i:064x}"[::-1], ENTRY, "sm90", "", b"", b"", sanitize._CONTROL_SPEC, 32, 0, "13.0.88"),
        "n2-float16-fast",
    )
    for i in range(1, 5)
]


def array_of(array: sanitize.Array, dtype: Any) -> Any:
    """In memory that ends where the array does."""
    memory = np.full(array.size, 0x7F, np.uint8)
    for at, content in array.pieces:
        memory[at : at + len(content)] = np.frombuffer(content, np.uint8)
    return memory[array.offset :].view(dtype)


def test_launches_stay_in_memory_that_ends_where_the_rows_do() -> None:
    arch = load_arch("sm90")
    problems = [Problem.parse(key) for key in KEYS]
    plans = [build_plan(problem, Space(problem, arch).seeds()[0], arch) for problem in problems]
    looping = Problem.of(512, "float16")
    plans.append(build_plan(looping, LOOPING, arch))
    sources = [render(plan) for plan in plans]
    module = compile_host(sources)
    for problem, source in zip([*problems, looping], sources, strict=True):
        launch, form = source.launch, problem.io.form
        bits = f"u{problem.io.input.bytes}"
        some = list(sanitize.cases(problem, launch))
        tile = launch.tile_elements // problem.unit
        assert {case.elements // problem.unit for case in some} >= {1, tile, tile + 1, 2 * tile + 1}
        assert any(case.blocks == RESIDENT_CLUSTERS * launch.cluster for case in some) == launch.persistent
        for case in some:
            arrays = dict(case.arrays)
            x = array_of(arrays.pop("x"), bits)
            y = array_of(arrays.pop("y"), np.uint8 if form else bits) if "y" in arrays else x
            rows, (columns, x_pitch, y_pitch) = case.elements // problem.n, case.shape
            assert len(x) == ((rows - 1) * x_pitch + columns) * (1 + (problem.prologue != ""))
            whole_codes = case.elements * form.element.bits // 8 if form else 0
            assert len(y) == (whole_codes or (rows - 1) * y_pitch + columns)
            outputs = {}
            if "scales" in arrays:
                units = case.elements // problem.unit
                of_one = form.scale_bytes(problem.io.input.bytes) * (form.group != TENSOR)
                whole = array_of(arrays.pop("scales"), np.uint8)
                outputs["scales"] = whole, units * form.scales_in_row(problem.unit) * of_one
            report = module.run(
                source.entry,
                launch,
                x,
                y,
                scale=case.scale,
                elements=case.elements,
                rows=rows if launch.reads_rows else 0,
                shape=case.shape if launch.reads_rows else None,
                x_elements=len(x),
                operands={**{name: array_of(each, np.uint8) for name, each in arrays.items()}, **case.numbers},
                outputs=outputs,
            )
            assert report.complaint == ""


OUTPUTS = {
    "memcheck": """========= Invalid __global__ write of size 2 bytes
=========     at {name}+0x1a0
=========     by thread (31,0,0) in block (0,0,0)
=========     Access at 0x7f0 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7e0 of size 16 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: [0x2d7a45] in libcuda.so.1
=========
""",
    "racecheck": """========= Error: Race reported between Write access at {name}+0x90
=========     and Read access at {name}+0xd0 [256 hazards]
=========
""",
    "initcheck": """========= Uninitialized __global__ memory read of size 2 bytes
=========     at {name}(const void *, void *, long long, unsigned int)+0x80
=========     by thread (0,0,0) in block (0,0,0)
=========
""",
    "synccheck": """========= Barrier error detected. Divergent thread(s) in warp
=========     at {name}+0x60
=========     by thread (48,0,0) in block (0,0,0)
=========
""",
}


@pytest.mark.parametrize("tool", OUTPUTS)
def test_a_finding_is_counted_for_its_kernel(tool: str) -> None:
    a, b = (name_of(job.digest) for job in JOBS[:2])
    some = OUTPUTS[tool].format(name=a) * 2 + OUTPUTS[tool].format(name=b)
    output = f"========= COMPUTE-SANITIZER\n{some}========= ERROR SUMMARY: 3 errors\n"
    assert findings(output) == ({a: 2, b: 1}, {})
    assert findings("========= COMPUTE-SANITIZER\n========= RACECHECK SUMMARY: 0 hazards displayed\n") == ({}, {})
    assert findings("========= COMPUTE-SANITIZER\n========= Internal Sanitizer Error\n") == ({NO_KERNEL: 1}, {})


# What racecheck says of two accesses of a warp, and the machine code of a kernel.
WARNING = """========= Warning: Race reported between Write access at {name}+{write}
=========     and Read access at {name}+{read} [128 hazards]
=========
"""
CODE = """
        /*02a0*/              @!UP0 SYNCS.EXCH.64 URZ, [UR7+0x78], UR4 ;
        /*0330*/               @!P0 SYNCS.ARRIVE.TRANS64 RZ, [UR7+0x78], R8 ;
        /*0340*/                    STS [R5], R4 ;
        /*0350*/                    SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR7+0x78], R3 ;
"""


def test_warnings_of_a_barrier_that_one_thread_prepares_are_counted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitize, "disassemble", lambda kernel: CODE)
    name = JOBS[0].name
    own = WARNING.format(name=name, write="0x2a0", read="0x330")
    others = [
        WARNING.format(name=name, write="0x340", read="0x330"),
        WARNING.format(name=name, write="0x2a0", read="0x350"),
        WARNING.format(name=name, write="0x2a0", read="0x1330"),
        own.replace("Warning", "Error"),
        own.replace("[128", f"[96 hazards]\n=========     and Write access at {name}+0x340 [32"),
    ]
    output = "".join([own, *others, own, "========= RACECHECK SUMMARY: 7 hazards displayed\n"])
    assert findings(output, JOBS) == ({name: len(others)}, {name: 2})
    assert findings(own.replace(name, "another"), JOBS) == ({NO_KERNEL: 1}, {})
    assert findings(own, JOBS[1:]) == ({name: 1}, {})


# In place of a tool and the program that it runs: does what is said of each kernel by the end of its digest.
STAND_IN = """
import atexit, os, pickle, sys, time
from pathlib import Path
sys.path.insert(0, {here!r})
sys.path.insert(0, {ci!r})
from sanitize import name_of
from test_sanitize import OUTPUTS
tool, jobs, done = sys.argv[2], *map(Path, sys.argv[-3:-1])
assert sys.argv[1] == "--tool"
print("========= COMPUTE-SANITIZER")
if {summary}:
    atexit.register(print, "========= ERROR SUMMARY: some errors")
with done.open("a") as log:
    print("process", os.getpid(), "-", 0, file=log, flush=True)
    for job in pickle.loads(jobs.read_bytes()):
        does = {does}.get(job.digest, "")
        print("begun", job.digest, job.problem, 0, file=log, flush=True)
        if does == "dies":
            sys.exit(1)
        if does == "hangs":
            time.sleep(1000)
        if does == "fails":
            print("failed", job.digest, job.problem, 0, file=log)
        if does == "finding":
            print(OUTPUTS[tool].format(name=name_of(job.digest)), end="")
        print("done", job.digest, job.problem, 5, file=log, flush=True)
"""


def stand_in(folder: Path, does: dict[str, str], summary: bool = True) -> list[str]:
    path = folder / "tool.py"
    here, ci = str(Path(__file__).parent), str(Path(sanitize.__file__).parent)
    path.write_text(STAND_IN.format(here=here, ci=ci, does=does, summary=summary))
    return [sys.executable, str(path)]


def run(folder: Path, does: dict[str, str], summary: bool = True, seconds: float = 60.0) -> sanitize.Run:
    program = stand_in(folder, does, summary)
    return sanitize.sanitize("memcheck", JOBS, folder, time.monotonic() + seconds, program)


def test_a_kernel_that_ends_the_process_is_found_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was done before a process was killed runs again, as what the tool had seen of it may be lost."""
    monkeypatch.setattr(sanitize, "STALL_SECONDS", 3.0)
    one, two, three, four = (job.digest for job in JOBS)
    result = run(tmp_path, {one: "dies", two: "fails", three: "hangs", four: "finding"})
    found = result.columns
    expected = {one: (0, 1), two: (5, 2), three: (0, 1), four: (5, 1)}
    assert len(result.texts) == 3
    assert found == {(digest, "n2-float16-fast"): counts for digest, counts in expected.items()}


def test_a_silent_tool_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="said nothing"):
        run(tmp_path, {}, summary=False)


def test_what_the_time_does_not_allow_is_left(tmp_path: Path) -> None:
    assert run(tmp_path, {}, seconds=0.0).columns == {}


def test_tables_are_merged_and_later_ones_count(tmp_path: Path) -> None:
    key = ("NVIDIA H200", "0a1b", "n2-float16-fast")
    row = dict.fromkeys(sanitize.COLUMNS, "") | dict(zip(sanitize.COLUMNS, key, strict=False))
    first, second = {key: row | {"memcheck": "1", "racecheck": "0"}}, {key: row | {"memcheck": "0"}}
    for name, table in (("a.csv", first), ("b.csv", second)):
        sanitize.write_table(tmp_path / name, table)
    assert sanitize.main(["merge", str(tmp_path / "a.csv"), str(tmp_path / "b.csv")]) == 0
    assert sanitize.read_table(tmp_path / "a.csv") == merged([first, second])
    assert merged([first, second])[key] == row | {"memcheck": "0", "racecheck": "0"}


def test_a_table_without_the_newest_column_is_read_and_merged(tmp_path: Path) -> None:
    old, new = tmp_path / "old.csv", tmp_path / "new.csv"
    old.write_text("gpu,kernel,problem,launches,memcheck,racecheck\nNVIDIA H200,0a1b,n2-float16-fast,6,0,2\n")
    key = ("NVIDIA H200", "0a1b", "n2-float16-fast")
    row = sanitize.read_table(old)[key]
    assert (row["racecheck"], row[sanitize.OWN_BARRIER]) == ("2", "")
    sanitize.write_table(new, {key: row | {"racecheck": "0", sanitize.OWN_BARRIER: "2"}})
    assert sanitize.main(["merge", str(old), str(new)]) == 0
    assert sanitize.read_table(old)[key] == row | {"racecheck": "0", sanitize.OWN_BARRIER: "2"}


def test_kernels_that_are_shipped_no_more_leave_the_table() -> None:
    job, gpu = JOBS[0], "NVIDIA H200"
    keys = [
        (gpu, job.digest[:12], job.problem),
        (gpu, job.digest[:12], "n4-float16-fast"),
        (gpu, "0a1b", job.problem),
        (gpu, "0a1b", CONTROL),
        ("NVIDIA H100", "0a1b", job.problem),
    ]
    assert list(sanitize.without_former({key: {} for key in keys}, gpu, [job])) == [keys[0], *keys[3:]]


@needs_compiler
def test_there_is_a_control_for_each_tool_by_its_own_name() -> None:
    controls = sanitize.controls("sm90")
    assert controls.keys() == sanitize.TOOLS.keys()
    assert len({job.name for job in controls.values()}) == len(controls)
    for job in controls.values():
        assert job.problem == CONTROL
        assert job.image.count(job.name.encode()) == job.kernel.cubin.count(b"hadagen_kernel") > 0
        assert len(job.image) == len(job.kernel.cubin)


def test_a_second_look_is_at_barriers_where_each_lane_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, three, control = (job.digest for job in JOBS)
    first = run(tmp_path, {one: "finding", two: "finding", three: "finding"})
    monkeypatch.setattr(sanitize, "STALL_SECONDS", 3.0)
    for says, expected in (("finding", {one: (5, 0), two: (5, 1), three: (5, 1)}), ("", dict.fromkeys(first.columns))):
        second = copy.deepcopy(first)
        program = stand_in(tmp_path, {two: "finding", control: says})
        sanitize.look_again(second, JOBS[:2], JOBS[3], tmp_path, time.monotonic() + 60.0, program)
        for digest, counts in expected.items():
            key = digest if isinstance(digest, tuple) else (digest, "n2-float16-fast")
            assert second.columns[key] == (counts or first.columns[key])
        assert second.lanes == ({name_of(one): 1} if says else {})
    sanitize.look_again(second, JOBS[:2], JOBS[3], tmp_path, time.monotonic(), stand_in(tmp_path, {}))
    assert [digest for digest, _ in second.columns] == [three, control]  # the others are left for the next run


def test_each_lane_arrives() -> None:
    problem = Problem.parse("n11008-k172-bfloat16-to-int8_row_11008-accurate")
    knobs = Knobs(first="matrix", grid="persistent", load="cp_async", low_bits="mma", products="in_turns", stages=2)
    text = sanitize.each_lane_arrives(render(build_plan(problem, knobs, load_arch("sm90"))).text)
    assert "lane == 0" not in "".join(line for line in text.splitlines() if "barrier_arrive" in line)
    counts = re.findall(r"barrier_init\(.+?, (\d+)\);", text)
    assert set(counts) == {"128", "384"}
