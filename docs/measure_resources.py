"""Measures how busy each resource of a GPU is while the kernels of rotations with a matrix run, with Nsight Compute.

Needs a GPU, and `ncu` on PATH. Writes a row for each problem and number of elements, in percent of the peak. 4 Mi
elements lie in L2 (hot), and 64 Mi elements in device memory (cold).

    python docs/measure_resources.py docs/data/resources_h100.csv
"""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import torch

import hadagen
from hadagen.problem.formats import ROW
from hadagen.problem.problem import Problem
from hadagen.problem.prologues import prologue_of

PROBLEMS = [
    f"{rotation}{codes}-accurate"
    for rotation, n in (("n14336-k28", 14336), ("n11008-k172", 11008))
    for codes in (
        "-bfloat16",
        f"-bfloat16-to-fp8_row_{n}",
        "-bfloat16-to-mxfp4_32",
        f"-after-silu_mul-bfloat16-to-fp8_row_{n}",
        "-after-silu_mul-bfloat16-to-mxfp4_32",
    )
]
# Column → metric of Nsight Compute.
METRICS = {
    "us": "gpu__time_duration.sum",
    "issue_slots": "smsp__issue_active.avg.pct_of_peak_sustained_elapsed",
    "tensor": "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "special": "smsp__inst_executed_pipe_xu.avg.pct_of_peak_sustained_elapsed",
    "shared": "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed",
    "l2": "lts__t_sectors.avg.pct_of_peak_sustained_elapsed",
    "dram": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "warps": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread",
}
ELEMENTS = {"cold": 1 << 26, "hot": 1 << 22}
SKIPPED = 3  # launches before the one that is measured


def main(out: Path) -> None:
    with out.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["problem", "gpu", "cache", "elements", *METRICS])
        for problem in PROBLEMS:
            for cache, elements in ELEMENTS.items():
                found = measured(problem, cache, elements)
                rows.writerow([problem, torch.cuda.get_device_name(), cache, elements, *found])
                file.flush()


def measured(problem: str, cache: str, elements: int) -> list[float]:
    """The value of each metric for one launch of the kernel that a call runs."""
    command = ["ncu", "--csv", "--page", "raw", "--clock-control", "none", "--kernel-name", "regex:hadagen_"]
    command += ["--launch-skip", str(SKIPPED), "--launch-count", "1", "--metrics", ",".join(METRICS.values())]
    command += ["--cache-control", "all" if cache == "cold" else "none"]
    command += [sys.executable, __file__, "call", problem, str(elements)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    table = [line for line in said.splitlines() if line.startswith('"')]
    names, units, values = csv.reader(table)
    found = {
        name: float(value.replace(",", ""))
        for name, value in zip(names, values, strict=True)
        if name in set(METRICS.values())
    }
    unit = dict(zip(names, units, strict=True))[METRICS["us"]]
    found[METRICS["us"]] *= {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3}[unit]
    return [round(found[metric], 2) for metric in METRICS.values()]


def call(key: str, elements: int) -> None:
    """Call the kernel of a problem a few times. elements: of its result."""
    problem = Problem.parse(key)
    prologue, form = prologue_of(problem), problem.io.form
    rotation = hadagen.Rotation(problem.n, k=problem.order).cuda()
    width = prologue.width if prologue else 1
    x = torch.randn(elements // problem.n, width * problem.n, device="cuda").bfloat16()
    before = {"before": hadagen.prologues.SiluMul()} if prologue else {}
    group = {} if form is None or form.groups[0] == ROW else {"group": form.group}
    for _ in range(SKIPPED + 1):
        if form is None:
            rotation(x, **before)
        else:
            hadagen.rotate_quantize(x, rotation, to=form.name, **group, **before)
    torch.cuda.synchronize()


if __name__ == "__main__":
    if sys.argv[1] == "call":
        call(sys.argv[2], int(sys.argv[3]))
    else:
        main(Path(sys.argv[1]))
