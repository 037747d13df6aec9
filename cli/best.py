"""`hadagen best`: which kernel runs for a problem, and how well that is known."""

from __future__ import annotations

import click

from hadagen.cli import options
from hadagen.cli.device import how_to_get_kernels
from hadagen.cli.output import print_json, short_knobs
from hadagen.errors import UsageError
from hadagen.problem import Problem


@click.command()
@click.option("--arch", help="Target architecture, such as sm90.  [default: that of this machine's GPU]")
@options.problem
@click.option("--rows", type=int, required=True, help="Rows of the input.")
@options.inplace
@click.option("--device", metavar="NAME", help="GPU to choose for, such as 'NVIDIA H100 80GB HBM3'.")
@options.as_json
def best(arch: str | None, problem: Problem, rows: int, inplace: bool, device: str | None, as_json: bool) -> None:
    """Name the kernel that a call runs, with its time, its error and where they are from.

    Needs no GPU where --arch is given. A kernel that turns out not to fit on
    a GPU gives its place to the next nearest there.
    """
    from hadagen.arch import known_archs
    from hadagen.runtime.choose import Match, best_config
    from hadagen.trial import timed_rows

    config = best_config(problem, rows, device, arch=arch, inplace=inplace)
    if arch and config.match is Match.GENERIC and arch not in known_archs():
        known = ", ".join(known_archs())
        raise UsageError(f"arch {arch!r} is not known and no bundle serves it; choose one of {known}")
    values = config.to_dict()
    if as_json:
        print_json(values)
        return
    click.echo(f"{problem.name}, {rows} rows, {config.destination.value} on {config.device.gpu or config.device.arch}")
    if config.launch is None or config.knobs is None or config.provenance is None:
        click.echo(f"no kernel, PyTorch computes it; {how_to_get_kernels(config.device.arch)}")
        return
    launch, source = config.launch, config.provenance
    click.echo(f"match     {config.match.value}")
    click.echo(f"kernel    {values['kernel']}")
    click.echo(f"knobs     {short_knobs(values['knobs'])}")
    click.echo(
        f"launch    {launch.threads} threads, {launch.shared_bytes} bytes of shared memory, "
        f"{launch.tile_elements} elements a tile"
        + (f", clusters of {launch.cluster}" if launch.cluster > 1 else "")
        + (", persistent" if launch.persistent else "")
        + (", starts early" if launch.starts_early else "")
    )
    rows_timed = f", rows of {timed_rows(problem).columns}" if problem.pitched else ""
    click.echo(
        f"time      {config.us:.2f} µs for {source['elements']} elements{rows_timed}, "
        f"{config.fraction_of_copy:.2f} of a plain copy ({config.copy_us:.2f} µs)"
    )
    click.echo(f"error     {config.relative_error:.2g}, against float64")
    where = ", ".join(
        filter(None, (source["gpu"], source["driver"] and f"driver {source['driver']}", f"nvcc {source['nvcc']}"))
    )
    click.echo(f"{source['kind']:<9} {where}, {source['date']}")
