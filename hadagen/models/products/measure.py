"""Times the providers of products on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from hadagen.errors import DeviceError
from hadagen.models import int4
from hadagen.models.products import providers
from hadagen.models.products.choice import all_rows
from hadagen.models.products.eligible import can_multiply
from hadagen.models.products.library import with_int8_weight
from hadagen.models.products.operands import Operands
from hadagen.models.products.operator import run

_KEPT = 2  # providers of a product, besides those without a tile
_FROM_MEMORY = 150e6  # bytes of weights that take turns, so that each comes from memory and not from L2
_MOST_WEIGHTS = 12
_CALLS, _REPLAYS = 4, 5  # at least so many calls in a graph
_CHECKED = 64  # rows
_FAR = {torch.int8: 64, torch.float8_e4m3fn: 4}  # tiles in a column of y, beyond which no tile was fast
_ERROR = 3e-3  # of bfloat16 results of FP8 codes, relative to rounded exact sums


def kinds(n: int, out: int) -> list[str]:
    """The kinds of weights [out, n] that some provider multiplies on the current GPU."""
    return [kind for kind in providers.KINDS if can_multiply(_codes(kind, 1, n), _weight(kind, out, n))]


def times(kind: str, n: int, out: int) -> dict[str, list[list[Any]]]:
    """Rows → [provider, microseconds] in the order of times, for codes [rows, n] and a weight [out, n] in memory.

    Each time is the median of a call in replays of a CUDA graph, for bfloat16 results. The fastest few are kept, and
    the one that needs no Triton. Raises `DeviceError` if no provider multiplies such codes, or one gives wrong values.
    """
    first = _weight(kind, out, n)
    count = max(1, min(_MOST_WEIGHTS, int(_FROM_MEMORY // first.nbytes)))
    weights = [first, *(_weight(kind, out, n) for _ in range(count - 1))]
    weight_scale = torch.rand(out, 1, device="cuda") + 0.5
    factors = None
    if kind == "int4":
        factors = torch.randint(1, int4.MOST_FACTOR + 1, (out, n // int4.span_of(n)), dtype=torch.uint8, device="cuda")
    found = {}
    for many in all_rows():
        codes, scales = _codes(kind, many, n), torch.rand(many, 1, device="cuda") + 0.5
        of = Operands(codes, scales, weights[0], weight_scale, factors, None, torch.bfloat16)
        exact = _exact(of._replace(codes=codes[:_CHECKED], scales=scales[:_CHECKED]))
        of_rows: list[tuple[float, str]] = []
        for name in _wanted(of):

            def call(weight: torch.Tensor, name: str = name, of: Operands = of) -> torch.Tensor:
                return run(name, of._replace(weight=weight))

            _check(name, call(weights[0])[:_CHECKED], exact, kind)
            of_rows.append((round(median(_replayed(call, weights)), 2), name))
        if not of_rows:
            raise DeviceError(f"no provider multiplies {kind} codes of [{many}, {n}] and [{out}, {n}] on this GPU")
        always = providers.LIBRARY, providers.UNPACK
        kept = [each for at, each in enumerate(sorted(of_rows)) if at < _KEPT or each[1] in always]
        found[str(many)] = [[name, us] for us, name in kept]
    return found


def _wanted(of: Operands) -> Iterator[str]:
    """The providers worth timing: no tiles with more than twice the rows, or far fewer."""
    for name in providers.NAMES:
        tile = providers.tile_of(name)
        is_far = tile and (tile.rows > max(16, 2 * of.rows) or of.rows > _FAR[of.codes.dtype] * tile.rows)
        if not is_far and providers.supports(name, of):
            yield name


def _codes(kind: str, rows: int, n: int) -> torch.Tensor:
    """Those of activations that go with a kind of weights."""
    if kind == "fp8":
        return torch.randn(rows, n, device="cuda").to(providers.KINDS[kind])
    return torch.randint(-127, 128, (rows, n), dtype=torch.int8, device="cuda")


def _weight(kind: str, out: int, n: int) -> torch.Tensor:
    if kind == "int4":
        return torch.randint(0, 256, (out, n // 2), dtype=torch.uint8, device="cuda")
    return _codes(kind, out, n)


def _exact(of: Operands) -> torch.Tensor:
    """Exact sums, of which INT8 codes give these bits."""
    assert of.scales is not None
    sums = of.codes.double() @ with_int8_weight(of).weight.double().T
    return (sums.float() * of.scales * of.weight_scale.T).bfloat16()


def _check(name: str, found: torch.Tensor, exact: torch.Tensor, kind: str) -> None:
    """Raises `DeviceError` for other bits of INT8 codes than those of the definition, or other values of FP8 codes."""
    error = float((found.double() - exact).norm() / exact.norm())
    if not error <= (_ERROR if kind == "fp8" else 0):
        raise DeviceError(f"the provider {name!r} gives wrong values for {kind} codes; report it (error {error:.1e})")


def _replayed(call: Callable[[Any], Any], weights: Sequence[torch.Tensor]) -> list[float]:
    """Microseconds of a call in each replay of a graph of one call for each weight."""
    graph, taken = torch.cuda.CUDAGraph(), (list(weights) * _CALLS)[: max(_CALLS, len(weights))]
    with torch.cuda.graph(graph):
        for weight in taken:
            call(weight)
    events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(_REPLAYS + 1)]  # type: ignore[no-untyped-call]
    graph.replay()
    for event in events[:-1]:
        event.record()
        graph.replay()
    events[-1].record()
    torch.cuda.synchronize()
    return [1e3 * begin.elapsed_time(end) / len(taken) for begin, end in pairwise(events)]
