"""`hadagen best`: which kernel runs for a problem, and how well that is known."""

from __future__ import annotations

import click

from hadagen.cli import options
from hadagen.cli.output import fraction_text, print_fields, print_json, say, short_knobs
from hadagen.cli.products import or_product
from hadagen.errors import UsageError, shown
from hadagen.problem.problem import Problem
from hadagen.problem.regimes import timed_rows
from hadagen.problem.target import known_archs
from hadagen.runtime.best import BestConfig, best_config, is_near
from hadagen.runtime.choose.entries import Match


@click.command()
@options.arch_of_target(says="  [default: arch of this machine's GPU]")
@or_product
@click.option("--rows", type=int, required=True, help="Number of rows of the input.")
@options.inplace
@click.option("--batch-invariant", is_flag=True, help="For a call with batch_invariant=True.")
@click.option("--device", metavar="NAME", help="GPU to choose for, such as 'NVIDIA H100 80GB HBM3'.")
@click.option("--knobs", "with_knobs", is_flag=True, help="Print the knobs of the kernel too.")
@options.as_json
def best(
    arch: str | None,
    problem: Problem,
    rows: int,
    inplace: bool,
    batch_invariant: bool,
    device: str | None,
    with_knobs: bool,
    as_json: bool,
) -> None:
    """Name the kernel that a call runs, and how well that is known.

    With --product, name the provider that multiplies the codes of a quantized
    layer, by times on such a GPU for the nearest sizes, or by a rule.

    If the kernel was not measured on this GPU near this size, the second line
    says so. With --arch, no GPU is needed. A call on a GPU on which the kernel
    does not fit runs the next nearest kernel.
    """
    columns = click.get_current_context().params["columns"]
    asked = (problem, rows * (columns or problem.n) // problem.n, device)
    config = best_config(*asked, arch=arch, inplace=inplace, batch_invariant=batch_invariant or None)
    if arch and config.match is Match.GENERIC and arch not in known_archs():
        known = ", ".join(known_archs())
        raise UsageError(f"arch {shown(arch)} is not known and no bundle serves it; choose one of {known}")
    if not config.launch and best_config(*asked, arch=arch, inplace=inplace, batch_invariant=False).launch:
        raise UsageError(
            f"{problem.key} has no kernels that give the same bits in every call; leave out --batch-invariant, or "
            "HADAGEN_BATCH_INVARIANT"
        )
    if as_json:
        print_json(config.to_dict())
        return
    say(f"{problem.key}, {config.rows} rows, {config.destination.value} on {config.device.gpu or config.device.arch}")
    if config.launch is None or config.knobs is None or config.provenance is None:
        say(f"no kernel, PyTorch computes it: {config.reason}")
        return
    if config.us is None:
        say(_why_not_measured(config))
    launch, source = config.launch, config.provenance
    unknown = config.relative_error is None
    driver = source["driver"] and f"driver {source['driver']}"
    compiler = f"compiler {source['nvcc']}" if source["nvcc"] else "compiled where it is called"
    fields = [
        ("kernel", config.kernel),
        ("time", _time(config)),
        ("error", "not measured" if unknown else f"{config.relative_error:.2g}, against float64"),
        ("match", config.match.value),
        (
            "launch",
            f"{launch.threads} threads, {launch.shared_bytes} bytes of shared memory, "
            f"{launch.tile_elements} elements a tile"
            + (f", clusters of {launch.cluster}" if launch.cluster > 1 else "")
            + (", persistent" if launch.persistent else "")
            + (", starts early" if launch.starts_early else ""),
        ),
        (source["kind"], ", ".join(filter(None, (source["gpu"], driver, compiler, source["date"])))),
    ]
    print_fields(fields + [("knobs", short_knobs(config.knobs))] * with_knobs)


def _why_not_measured(config: BestConfig) -> str:
    """A sentence on a kernel that was not measured for this call: where it was measured, if anywhere."""
    source, elements = config.provenance or {}, config.rows * config.problem.n
    if source["us"] is None:
        return "not measured on any GPU: estimated by a cost model"
    gpu, near = _with_article(source["gpu"].removeprefix("NVIDIA ")), is_near(source["elements"], elements)
    if near:
        return f"not measured on this GPU: estimated from {gpu}"
    if config.match is Match.SAME_GPU:
        return f"not measured at {elements} elements: estimated from {source['elements']} elements"
    return f"not measured on this GPU at {elements} elements: estimated from {gpu} at {source['elements']}"


def _with_article(name: str) -> str:
    """Such as "an H100 80GB HBM3", "a B200" and "a GeForce GT 1030": a short name is spelled letter by letter."""
    word = name.partition(" ")[0]
    vowels = "AEFHILMNORSX" if word.isupper() else "AEIOU"
    return f"an {name}" if word[:1] in tuple(vowels) else f"a {name}"


def _time(config: BestConfig) -> str:
    """The measured time, and the GPU if it is another than the caller named."""
    source, problem = config.provenance or {}, config.problem
    us, copy_us = source["us"], source["copy_us"]
    if us is None:
        return "not measured"
    rows = f", rows of {timed_rows(problem).columns}" if timed_rows(problem).columns < problem.n else ""
    where = "" if config.match is Match.SAME_GPU else f" on {source['gpu']}"
    return (
        f"{us:.2f} µs for {source['elements']} elements{rows}{where}, "
        f"{fraction_text(copy_us / us)} of a plain copy ({copy_us:.2f} µs)"
    )
