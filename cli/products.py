"""`hadagen best --product` and `hadagen tune --product`: products of codes, in place of problems."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from hadagen.cli import options
from hadagen.cli.output import print_fields, print_json, say
from hadagen.errors import DeviceError, UsageError, shown

_METAVAR = "N,OUT"
_WEIGHTS = click.Choice(["int8", "fp8", "int4"])


class _Product(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """The length of rows, and the outputs of a weight."""

    name = "product"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        sizes = re.fullmatch(r"([1-9]\d{0,8}),([1-9]\d{0,8})", value)
        if sizes is None:
            raise UsageError(
                f"--product {shown(value)} names no product; give the length of rows and the outputs of a weight, such "
                "as 14336,4096"
            )
        return int(sizes[1]), int(sizes[2])


def or_product(command: Callable[..., None]) -> Callable[..., None]:
    """`--product` and `--weights`, in place of a problem, for `hadagen best`."""
    of_problem = options.problem(command)

    @click.option("--product", type=_Product(), metavar=_METAVAR, help="A product: rows of N by a weight [OUT, N].")
    @click.option(
        "--weights", type=_WEIGHTS, default="int8", show_default=True, help="Codes of the weight of --product."
    )
    @functools.wraps(of_problem)
    def either(*, product: tuple[int, int] | None, weights: str, **others: Any) -> None:
        if product is None:
            of_problem(**others)
        else:
            _best(product, weights, others["rows"], others["device"], others["as_json"])

    return either


def or_products(command: Callable[..., None]) -> Callable[..., None]:
    """`--product` and `--times`, in place of problems, for `hadagen tune`."""

    @click.option(
        "--product",
        "products",
        type=_Product(),
        multiple=True,
        metavar=_METAVAR,
        help="Time the providers of a product instead: rows of N codes by a weight [OUT, N]; repeatable.",
    )
    @click.option(
        "--times",
        type=click.Path(path_type=Path),
        help="File for the times of --product.  [default: where layers find them]",
    )
    @functools.wraps(command)
    def either(*, products: tuple[tuple[int, int], ...], times: Path | None, **others: Any) -> None:
        if products:
            _tune(products, times, others["device"] or 0)
        elif times:
            raise UsageError("--times is the file for the times of products; name products with --product")
        else:
            command(**others)

    return either


def _best(product: tuple[int, int], weights: str, rows: int, device: str | None, as_json: bool) -> None:
    from hadagen.models.products.choice import choose  # which needs PyTorch

    if not 1 <= rows < 1 << 31:
        raise UsageError(f"--rows {rows} are no rows of a product; give at least one")
    n, out = product
    gpu, capability = (device, 0) if device else _gpu(0, "name one with --device, such as 'NVIDIA H200'")
    found = choose(gpu, capability, weights, n, out, rows)
    if as_json:
        print_json({"device": gpu, "weights": weights, "product": product, **found._asdict()})
        return
    say(f"rows [{rows}, {n}] in codes by an {weights} weight [{out}, {n}] on {gpu}: {found.providers[0]}")
    if not found.us:
        say("by a rule, because no products were timed on such a GPU; hadagen tune --product times them")
        return
    say(f"as timed on {found.gpu} with {found.rows} rows of {found.n} and {found.out} outputs:")
    print_fields([(name, f"{us:.1f} µs") for name, us in zip(found.providers, found.us, strict=False)])


def _tune(products: tuple[tuple[int, int], ...], path: Path | None, index: int) -> None:
    import torch

    from hadagen.models.products import choice, measure

    gpu, capability = _gpu(index, "products are timed where they run")
    path = path or choice.place()
    with torch.cuda.device(index):
        for n, out in products:
            if not (kinds := measure.kinds(n, out)):
                raise DeviceError(
                    f"nothing multiplies codes [rows, {n}] and [{out}, {n}] on {gpu}; it needs a capability of 7.5 or "
                    "more, and Triton, or sizes that 8 divides"
                )
            for kind in kinds:
                times = measure.times(kind, n, out)
                choice.keep(gpu, capability, kind, {f"{n},{out}": times}, path)
                first, last = times["1"][0], times[str(choice.MOST_ROWS)][0]
                say(
                    f"{kind} {n},{out}: {first[0]} for 1 row ({first[1]:.1f} µs), {last[0]} for {choice.MOST_ROWS} "
                    f"({last[1]:.1f} µs)"
                )
    say(f"the times are in {path}")


def _gpu(index: int, fix: str) -> tuple[str, int]:
    import torch

    if not torch.cuda.is_available():
        raise DeviceError(f"this machine has no GPU for PyTorch; {fix}")
    if not 0 <= index < torch.cuda.device_count():
        raise DeviceError(f"there is no GPU {index}; this machine has {torch.cuda.device_count()}")
    major, minor = torch.cuda.get_device_capability(index)
    return torch.cuda.get_device_name(index), 10 * major + minor
