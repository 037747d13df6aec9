"""`hadagen bench calls`: what a call costs the CPU."""

from __future__ import annotations

import platform

import click

from hadagen import measure
from hadagen.cli import options
from hadagen.cli.output import print_json, print_table, say


@click.command()
@options.device
@options.as_json
def calls(device: int, as_json: bool) -> None:
    """Time what a call costs the CPU, piece by piece.

    The first table has the microseconds until a call on a small tensor returns, with the kernel queued; hadagen bench
    times the kernels themselves. If fast_hadamard_transform is installed, it is timed too. The second table has the
    milliseconds that each process pays once.
    """
    from hadagen.runtime.costs import DTYPE, ROWS, N, call_costs, start_costs

    environment = measure.device_environment(device)
    costs, start = call_costs(device), start_costs(f"cuda:{device}")
    tensor = f"[{ROWS}, {N}] {str(DTYPE).removeprefix('torch.')}"
    if as_json:
        import torch

        versions = {"python": platform.python_version(), "torch": torch.__version__, "driver": environment.driver}
        print_json({"gpu": environment.gpu, **versions, "tensor": tensor, "us": costs, "ms": start})
        return
    say(f"{environment.gpu}, {tensor}: CPU time of one call")
    print_table(("call", "µs"), ((name, round(us, 2)) for name, us in costs.items()))
    click.echo()
    print_table(("once in a process", "ms"), ((name, round(ms, 1)) for name, ms in start.items()))
