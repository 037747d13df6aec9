"""Other libraries with the transform, if they are installed. They are timed like our kernels, by graphs of launches.

None has a transform with a matrix of any order. There the peers are products by PyTorch, of dense matrices or behind
another library's H.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from hadagen.problem.operands import verification_operands
from hadagen.problem.problem import DType, Problem, Rows
from hadagen.truth.accuracy import TORCH_DTYPE
from hadagen.truth.reference import hadamard, verification_scale

# The longest rows that one product is timed for: its matrix takes 512 MiB, in float32 twice as much.
MOST_DENSE = 1 << 14

Call = Callable[[], torch.Tensor]
Transform = Callable[[torch.Tensor, float, bool], torch.Tensor]


class Peer(NamedTuple):
    """A library. `transform(x, scale, in_place)` returns the transform of x, in x itself if `in_place` and the library
    can. It is told the scale if it `takes_scale`, and else orthonormal."""

    name: str
    dtypes: frozenset[DType]
    rows: frozenset[Rows]  # that it takes
    works_in_place: bool
    transform: Transform
    takes_scale: bool = True

    def serves(self, problem: Problem) -> bool:
        return problem.io.input in self.dtypes and problem.io.rows in self.rows


def _fast_hadamard_transform(module: Any) -> Peer:
    return Peer(
        "fast_hadamard_transform",
        frozenset(DType),
        rows=frozenset(Rows),
        works_in_place=False,
        transform=lambda x, scale, in_place: module.hadamard_transform(x, scale),
    )


def _hadacore(module: Any) -> Peer:
    return Peer(
        "HadaCore",
        frozenset({DType.FLOAT16, DType.BFLOAT16}),
        rows=frozenset({Rows.CONTIGUOUS}),
        works_in_place=True,
        transform=lambda x, scale, in_place: module.hadamard_transform(x, in_place),
        takes_scale=False,
    )


_KNOWN = {"fast_hadamard_transform": _fast_hadamard_transform, "faster_hadamard_transform": _hadacore}  # by module


def find_peers() -> list[Peer]:
    """The installed libraries. One that cannot be imported, such as for another PyTorch, is left out with a warning."""
    found = []
    for name, make in _KNOWN.items():
        if find_spec(name) is not None:
            try:
                found.append(make(import_module(name)))
            except ImportError as error:
                warnings.warn(f"{name} is left out, because it cannot be imported: {error}", stacklevel=2)
    return found


def products(problem: Problem, others: Iterable[Peer], device: torch.device) -> list[Peer]:
    """Ways to compute a transform with the matrix of its verification: H, by a product or by another library, or the
    product with a second matrix, and then the product with the matrix; and one product for all of it. All operands have
    the type of x."""
    scale, length = verification_scale(problem), problem.length

    def on_device(values: Any) -> torch.Tensor:
        return torch.from_numpy(values).to(device, TORCH_DTYPE[problem.io.input])

    def right() -> Any:
        if problem.transform.paired:
            return verification_operands(problem)["right_matrix"].T.copy()
        return hadamard(torch.eye(length, dtype=torch.float64).numpy())

    # Made at the first call, which may fail for lack of memory.
    matrix = functools.cache(lambda: on_device(verification_operands(problem)["matrix"]))
    scaled = functools.cache(lambda: on_device(right() * scale))
    whole = functools.cache(lambda: torch.kron(matrix().T.contiguous(), scaled()))

    def behind(h: Callable[[torch.Tensor], torch.Tensor]) -> Transform:
        return lambda x, *_: (matrix() @ h(x.view(-1, length)).view(-1, problem.order, length)).view(x.shape)

    ways = {"PyTorch": behind(lambda x: x @ scaled())}
    ways |= {
        f"{peer.name}, PyTorch": behind(functools.partial(_out_of_place, peer, scale))
        for peer in others
        if peer.takes_scale and peer.serves(problem) and not problem.transform.paired
    }
    if problem.n <= MOST_DENSE:
        ways["PyTorch, one product"] = lambda x, *_: x @ whole()
    dtypes, rows = frozenset({problem.io.input}), frozenset({Rows.CONTIGUOUS})
    return [Peer(name, dtypes, rows, works_in_place=False, transform=way) for name, way in ways.items()]


def _out_of_place(peer: Peer, scale: float, x: torch.Tensor) -> torch.Tensor:
    return peer.transform(x, scale, False)


class PeerGraph:
    """A graph of calls (a `timing.Graph`), one after another. The launches rotate among `calls`. The graph owns one
    result of each."""

    def __init__(self, pool: Any, calls: Sequence[Call], launches: int) -> None:
        """Raises PyTorch's `RuntimeError` if memory runs out or a call cannot be captured."""
        self._graph = torch.cuda.CUDAGraph()
        results: list[torch.Tensor | None] = [None] * len(calls)
        self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            for launch in range(launches):
                slot = launch % len(calls)
                results[slot] = None  # its memory is the next one's
                results[slot] = calls[slot]()
        finally:
            self._graph.capture_end()

    def replay(self) -> None:
        self._graph.replay()

    def close(self) -> None:
        self._graph.reset()


class Peers:
    """The installed libraries and the `products`, ready to be captured on PyTorch's current stream, which must not be
    the default one.

    Results come from one pool of PyTorch's allocator, which lives as long as this object. So a graph reuses the memory
    of earlier ones.
    """

    def __init__(self) -> None:
        self.all = find_peers()
        self._pool = torch.cuda.graph_pool_handle()
        # A pool ends with its last graph, so one graph stays.
        least = functools.partial(torch.zeros, 1, device="cuda")
        least()  # the driver may load code with its first launch, which must not happen inside a capture
        self._keeper = PeerGraph(self._pool, [least], 1)

    def serving(self, problem: Problem, device: torch.device) -> list[Peer]:
        """The peers that transform rows of a problem. No peer takes signs, has a prologue, or quantizes."""
        if problem.transform.signed or problem.prologue or problem.io.form:
            return []
        peers = products(problem, self.all, device) if problem.transform.has_matrix else self.all
        return [peer for peer in peers if peer.serves(problem)]

    def graph(self, calls: Sequence[Call], launches: int) -> PeerGraph:
        return PeerGraph(self._pool, calls, launches)


def calls_of(peer: Peer, problem: Problem, inputs: Iterable[torch.Tensor], in_place: bool) -> list[Call]:
    """One call for each input, with the scale that makes the transform orthonormal. A library that does not work in
    place allocates its result in any case."""
    options = verification_scale(problem), in_place and peer.works_in_place
    return [functools.partial(peer.transform, x, *options) for x in inputs]
