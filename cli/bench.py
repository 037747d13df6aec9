"""`hadagen bench`: the kernels that calls run, timed on this machine's GPU."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from hadagen.cli import options
from hadagen.cli.output import print_json, print_table
from hadagen.errors import DeviceError, UsageError

if TYPE_CHECKING:
    from hadagen.measure import Cell
    from hadagen.problem import Problem
    from hadagen.runtime.device import Device
    from hadagen.trial import Destination
    from hadagen.tuning_db.bundle import Bundle, BundleEntry

MIN_ELEMENTS, MAX_ELEMENTS = 1 << 13, 1 << 28
DEFAULT_ELEMENTS = "65536,1048576,8388608,67108864,268435456"


@click.command()
@options.sizes
@click.option("--elements", default=DEFAULT_ELEMENTS, show_default=True, help="Sizes of the input, rows times n.")
@options.dtype
@options.numerics
@options.pitched
@click.option("--inplace", is_flag=True, help="The result overwrites the input.")
@click.option("--device", type=int, default=0, show_default=True, metavar="INDEX", help="CUDA device to run on.")
@options.as_json
def bench(
    sizes: tuple[str, ...],
    elements: str,
    dtype: str,
    numerics: str,
    pitched: bool,
    inplace: bool,
    device: int,
    as_json: bool,
) -> None:
    """Time the known winners on a GPU of this machine, beside a plain copy of the same bytes.

    The data lies in L2 where it fits in half of it, and in device memory otherwise. Pitched rows have three quarters of
    n elements. Needs nvcc, for the copy kernel. Other libraries are timed too where they are installed:
    fast_hadamard_transform, and HadaCore as faster_hadamard_transform.
    """
    from hadagen.measure import device_environment
    from hadagen.runtime.device import Device
    from hadagen.trial import Destination

    problems = [options.make_problem(n, dtype, numerics, pitched) for n in options.parse_sizes(sizes)]
    counts = _parse_elements(elements)
    environment = device_environment(device)
    target = Device(options.arch_of(environment), environment.gpu)
    destination = Destination.IN_PLACE if inplace else Destination.OUT_OF_PLACE
    choices = _choose(problems, counts, destination, target, environment.l2_bytes)
    if not choices:
        raise DeviceError(f"no bundle has kernels for {target.gpu} ({target.arch}); run hadagen tune on this machine")
    results = _time(choices, target.arch, device, environment.l2_bytes)
    if as_json:
        print_json({"gpu": environment.gpu, "driver": environment.driver, "results": results})
        return
    peers = dict.fromkeys(name for result in results for name in result["times_as_fast_as"])
    one, *_ = problems
    asked = (one.dtype.value, one.numerics.value, *(["pitched"] if pitched else []), destination.value)
    click.echo(f"{environment.gpu}, {', '.join(asked)}: speed as a fraction of a plain copy")
    if peers:
        click.echo(f"×: as many times as fast as {', '.join(peers)}")
    by_cell = {(result["n"], result["elements"]): result for result in results}
    print_table(
        ["n", *(_short(count) for count in counts)],
        [[p.n, *(_cell(by_cell.get((p.n, count))) for count in counts)] for p in problems],
    )


class Choice(NamedTuple):
    """The winner of a cell of a problem, and the bundle that holds it."""

    problem: Problem
    cell: Cell
    entry: BundleEntry
    bundle: Bundle


def _choose(
    problems: Sequence[Problem], counts: Sequence[int], destination: Destination, target: Device, l2_bytes: int
) -> list[Choice]:
    from hadagen.measure import Cell
    from hadagen.runtime.choose import choose_from_bundles
    from hadagen.trial import deciding_cache

    choices = []
    for problem, count in product(problems, counts):
        _, found = choose_from_bundles(problem, destination, count, target)
        if found and found[0].arch == target.arch and count >= problem.n:
            cell = Cell(count, destination, deciding_cache(problem, count, destination, l2_bytes))
            choices.append(Choice(problem, cell, *found))
    return choices


def _time(choices: Sequence[Choice], arch: str, index: int, l2_bytes: int) -> list[dict[str, Any]]:
    """Verify and time each choice on a device; one object for each."""
    from hadagen.arch import load_arch
    from hadagen.measure import Candidate, DeviceRunner, copy_sources, peer
    from hadagen.toolchain import BuildFailure, Toolchain
    from hadagen.trial import Outcome
    from hadagen.tuning_db.merge import kernel_of

    built = Toolchain.find().build([(source, source.launch) for source in copy_sources()], load_arch(arch))
    copies = [kernel for kernel in built if not isinstance(kernel, BuildFailure)]
    candidates = {
        (choice.problem, choice.entry.kernel): Candidate(
            choice.problem, dict(choice.entry.knobs), kernel_of(choice.bundle, choice.entry.kernel)
        )
        for choice in choices
    }
    cells = sorted({choice.cell for choice in choices})
    with DeviceRunner(index, copies, cells=cells, give_up=float("inf")) as runner:
        trials = dict(zip(candidates, (trial for _, trial in runner.run(candidates.values())), strict=True))
    peers = peer.find_peers()
    results = []
    for problem, cell, entry, _ in choices:
        trial = trials[problem, entry.kernel]
        if trial.outcome is not Outcome.OK:
            why = f"{trial.outcome.value}: {trial.detail}"
            raise DeviceError(f"kernel {entry.kernel[:12]} for {problem.name} ended as {why}; tune again")
        timing = next(t for t in trial.timings if (t.elements, t.destination, t.cache) == cell)
        others = {
            each.name: peer.time_peer(each, problem, cell, l2_bytes, index) for each in peers if each.serves(problem)
        }
        results.append(
            {
                "n": problem.n,
                "elements": cell.elements,
                "cache": cell.cache.value,
                "kernel": entry.kernel,
                "us": timing.us,
                "copy_us": timing.copy_us,
                "fraction_of_copy": timing.fraction_of_copy,
                "times_as_fast_as": {name: us / timing.us for name, us in others.items()},
            }
        )
    return results


def _parse_elements(text: str) -> list[int]:
    try:
        counts = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise UsageError(f"--elements {text!r} is not a list of numbers; write for example 65536,8388608") from None
    for count in counts:
        if not MIN_ELEMENTS <= count <= MAX_ELEMENTS or count & (count - 1):
            raise UsageError(
                f"--elements {count} is not supported; give powers of two from {MIN_ELEMENTS} to {MAX_ELEMENTS}"
            )
    return counts


def _short(elements: int) -> str:
    return f"{elements >> 20}M" if elements >= 1 << 20 else f"{elements >> 10}K"


def _cell(result: dict[str, Any] | None) -> str:
    if result is None:
        return "-"
    faster = (f" ×{ratio:.2f}" for ratio in result["times_as_fast_as"].values())
    return f"{result['fraction_of_copy']:.2f}{''.join(faster)}"
