"""Calls with a DTensor: each rank computes its own part of x, without communication if rows are not divided, or are
divided between the blocks and groups of a call. Other DTensors are redistributed first. `to_local` and `from_local` of
PyTorch have the derivatives."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import torch

from hadagen.errors import UsageError
from hadagen.problem.prologues import Prologue


def is_sharded(x: Any) -> bool:
    """Whether x is a DTensor. Does not import PyTorch's module of DTensors."""
    return isinstance(x, torch.Tensor) and hasattr(x, "placements")


def local_of(tensor: Any) -> Any:
    """The rank's part of a DTensor; anything else as it is."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def whole_of(tensor: Any) -> Any:
    """The whole of a DTensor, which is gathered; anything else as it is."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def check_new(inplace: bool, out: Any) -> None:
    """Raises `UsageError` for a result that is not a new tensor."""
    if inplace or out is not None:
        asked = "inplace=True" if inplace else "out="
        raise UsageError(f"x is a DTensor, which {asked} does not take; leave it out, or pass x.to_local()")


class Shards(NamedTuple):
    """A DTensor, `whole`, that each rank can compute its part of, and the part of this rank, `local`."""

    whole: Any
    local: torch.Tensor


def is_divided(x: Any) -> bool:
    """Whether ranks have different parts of a DTensor."""
    # A list, because torch.compile of earlier releases of PyTorch takes no generator over placements.
    return len([each for each in x.placements if not each.is_replicate()]) > 0


def joined(shards: Shards, part: torch.Tensor, replicated: bool = False) -> torch.Tensor:
    """The DTensor of results for the parts, which have x's leading dimensions, divided like x. replicated: the results
    are the same on every rank."""
    from torch.distributed.tensor import DTensor, Replicate

    whole, local = shards
    mesh, dims = whole.device_mesh, part.dim()
    if replicated or not is_divided(whole):
        return DTensor.from_local(part, mesh, [Replicate()] * mesh.ndim, run_check=False)
    last = whole.dim() - 1
    times = whole.shape[-1] // local.shape[-1]
    shape = [*whole.shape[:last], *[size * times for size in part.shape[last:]]][:dims]
    strides, step = [1] * dims, 1
    for dim in sorted(range(dims), key=lambda dim: (part.stride(dim), -dim)):
        strides[dim] = step
        step *= max(shape[dim], 1)
    placed = [Replicate() if each.is_shard() and each.dim >= dims else each for each in whole.placements]
    return DTensor.from_local(part, mesh, placed, run_check=False, shape=torch.Size(shape), stride=tuple(strides))


def shards_of(x: Any, unit: int | None, before: Prologue | None = None) -> Shards:
    """x as ranks can compute it.

    unit: so many elements of a row that are rotated belong together; None for all of a row. before: what makes them of
    x.
    """
    from torch.distributed.tensor import Replicate, Shard

    last = x.dim() - 1
    if before is not None:
        unit = None if unit is None or before.is_halved else unit * before.width
    ranks = math.prod([x.device_mesh.size(at) for at, each in enumerate(x.placements) if each.is_shard(last)])
    is_possible = unit is not None and x.shape[-1] % (ranks * unit) == 0
    placements = [
        each if isinstance(each, Shard) and (each.dim != last or (is_possible and type(each) is Shard)) else Replicate()
        for each in x.placements
    ]
    whole = x if placements == list(x.placements) else x.redistribute(placements=placements)
    return Shards(whole, whole.to_local())


def like_heads(given: Any, shards: Shards) -> torch.Tensor:
    """The part of values, one for each head, that belongs to the rank's part of x, which has heads as its leading
    dimensions. given: a DTensor, or the values of all heads on every rank."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = shards.whole.device_mesh
    if not is_sharded(given):
        given = DTensor.from_local(given, mesh, [Replicate()] * mesh.ndim, run_check=False)
    placed = [each if each.is_shard() and each.dim < given.dim() else Replicate() for each in shards.whole.placements]
    return cast(torch.Tensor, given.redistribute(placements=placed).to_local())
