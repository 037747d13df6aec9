"""Times `rotate_quantize` beside `process_input` of humming, a kernel that vLLM uses, on a GPU.

    python ci/race.py --csv build/humming.csv                  # all cells
    python ci/race.py --columns 11008 --rows 16 --rows 4096    # some of them

humming must be installed (`pip install humming-kernels`); it is imported, and is no part of hadagen. Both rotate blocks
of bfloat16 rows and quantize with a scale for each row, plain or behind SiLU·mul. Each cell is one row of the CSV:
microseconds of a call of each, medians over replays of a CUDA graph, in turns, with their quartiles. The inputs of a
graph lie in memory, not in L2, if there are more than a few rows. `differing` is the share of codes that differ.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from itertools import pairwise, product
from pathlib import Path
from statistics import geometric_mean, median, quantiles
from typing import Any

import click
import torch

import hadagen
from hadagen import Problem, prologues

# The lengths of rows in models of 2023 to 2026: hidden, intermediate and experts' sizes.
COLUMNS = (768, 896, 1024, 1408, 1536, 2048, 2560, 2816, 2880, 3072, 3584, 4096, 4864, 5120, 5632, 6144, 6912, 7168)
COLUMNS += (8192, 8960, 9216, 9728, 10240, 11008, 12288, 13696, 13824, 14336, 16384, 17408, 17920, 18432, 18944, 20480)
COLUMNS += (22016, 24576, 25600, 27648, 28672, 29568, 32768, 36864, 53248)
BLOCKS = (32, 64, 128, 512)
FORMATS = {"fp8-row": "float8e4m3", "int8-row": "int8"}  # the names of both projects
# As a user of humming writes it, in C++.
SILU_MUL = "a / (1.0f + __expf(-a)) * b"
_BYTES = 400e6  # of the inputs of a graph, several times those of the L2 of any GPU so far
_MOST_CALLS, _ROUNDS, _REPLAYS = 48, 5, 8
_HEAD = ("problem", "rows", "hadagen_us", "hadagen_low", "hadagen_high")
_HEAD += ("humming_us", "humming_low", "humming_high", "times_as_fast", "differing", "gpu", "humming")


def graph_of(call: Callable[[torch.Tensor], Any], inputs: Sequence[torch.Tensor]) -> torch.cuda.CUDAGraph:
    """A graph of one call for each input. The results are kept, so that each has memory of its own."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(inputs[0])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            kept = [call(each) for each in inputs]
    del kept
    return graph


def in_turns(graphs: Sequence[torch.cuda.CUDAGraph], calls: int) -> list[list[float]]:
    """Microseconds of a call in each replay of each graph, which take turns."""
    found: list[list[float]] = [[] for _ in graphs]
    for _ in range(_ROUNDS):
        for graph, times in zip(graphs, found, strict=True):
            events = [torch.cuda.Event(enable_timing=True) for _ in range(_REPLAYS + 1)]
            graph.replay()
            for event in events[:-1]:
                event.record()
                graph.replay()
            events[-1].record()
            torch.cuda.synchronize()
            times += [1e3 * begin.elapsed_time(end) / calls for begin, end in pairwise(events)]
    return found


def cell(to: str, before: str, columns: int, block: int, rows: int) -> list[Any]:
    """One row of the CSV, without what is the same in all."""
    from humming.ops import process_input

    width = 2 if before else 1
    count = max(2, min(_MOST_CALLS, int(_BYTES // (2 * width * rows * columns))))
    inputs = [torch.randn(rows, columns * width, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    prologue = prologues.SiluMul() if before else None
    options: dict[str, Any] = {"quant_mode": "dynamic_token", "quant_dtype": FORMATS[to], "hadamard_block_size": block}
    if before:
        options |= {"activation_type": "binary_split", "activation_impl": SILU_MUL}

    def ours(x: torch.Tensor) -> Any:
        return hadagen.rotate_quantize(x, block, to=to, before=prologue)

    def theirs(x: torch.Tensor) -> Any:
        return process_input(x, **options)

    codes, other = ours(inputs[0]).codes, theirs(inputs[0])[0]
    differing = float(
        (codes.view(torch.uint8) != other.view(torch.uint8).view_as(codes.view(torch.uint8))).float().mean()
    )
    mine, peer = in_turns([graph_of(ours, inputs), graph_of(theirs, inputs)], count)
    figures = [f"{each:.3f}" for times in (mine, peer) for each in (median(times), *quantiles(times, n=4)[::2])]
    problem = Problem.of(block, "bfloat16", to=to, columns=columns, prologue=before)
    return [problem.key, rows, *figures, f"{median(peer) / median(mine):.3f}", f"{differing:.2e}"]


@click.command(help=(__doc__ or "").partition("\n")[0])
@click.option("--columns", type=int, multiple=True, default=COLUMNS, help="Elements of a row.  [default: 43 lengths]")
@click.option("--block", type=int, multiple=True, default=BLOCKS, show_default=True, help="Blocks that are rotated.")
@click.option("--rows", type=int, multiple=True, default=(16, 4096), show_default=True)
@click.option("--to", type=click.Choice([*FORMATS]), multiple=True, default=[*FORMATS], show_default=True)
@click.option("--before", type=click.Choice(["", "silu_mul"]), multiple=True, default=["", "silu_mul"])
@click.option("--csv", "path", type=click.Path(path_type=Path), help="File for the cells; the default prints them.")
def main(columns: Any, block: Any, rows: Any, to: Any, before: Any, path: Path | None) -> None:
    if not torch.cuda.is_available():
        raise click.ClickException("torch.cuda.is_available() is False; run this on a machine with a GPU")
    try:
        same = [torch.cuda.get_device_name(), version("humming-kernels")]
    except ImportError:
        raise click.ClickException("humming is not installed; pip install humming-kernels") from None
    ratios, alone = [], 0
    with path.open("w", newline="", encoding="utf-8") if path else sys.stdout as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(_HEAD)
        for wanted in product(to, before, columns, block, rows):
            if wanted[2] % wanted[3] == 0:
                try:
                    found = cell(*wanted)
                except AssertionError:  # of humming, which has no kernel for some long rows
                    alone += 1
                    continue
                ratios.append(float(found[-2]))
                writer.writerow([*found, *same])
                file.flush()
    if not ratios:
        raise click.ClickException("no block divides these columns; name others")
    click.echo(f"{len(ratios)} cells; {geometric_mean(ratios):.2f} times as fast, from {min(ratios):.2f}", err=True)


if __name__ == "__main__":
    main()
