"""Timing without a GPU: the cells that are timed, the copies they are compared with, and launches that take turns."""

import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.machinery import ModuleSpec
from itertools import pairwise, product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from measure_sample import ALL_PROBLEMS, CELL, H100_L2, MATRIX_PROBLEMS, PLAIN_PROBLEMS, PROBLEM, array_at
from real_compilers import needs_compiler

from hadagen.compiler.cache import KernelCache
from hadagen.compiler.emulator import HostModule, compile_host
from hadagen.compiler.toolchain import Toolchain
from hadagen.measure import Cell, all_cells, copy_sources, peer, timing, yardstick
from hadagen.measure.cells import EVICTION, Traffic, probe_cells
from hadagen.measure.copy import copy_params
from hadagen.measure.service import DeviceService, repeated_launches
from hadagen.measure.timing import Stopwatch, transform_work
from hadagen.plan.arch import load_arch
from hadagen.problem.launch import PARAMS, Source
from hadagen.problem.problem import DType, Problem, Rows
from hadagen.problem.regimes import (
    BUCKETS_BETWEEN,
    BUCKETS_OF_LONG_ROWS,
    ELEMENT_BUCKETS,
    PITCHED_ELEMENT_BUCKETS,
    Cache,
    Destination,
    deciding_cache,
    element_buckets,
    main_buckets,
    may_be_hot,
    timed_elements,
    timed_rows,
)
from hadagen.problem.trial import Kernel


# ---- cells -----------------------------------------------------------------------------------------------------------
def test_cells_of_an_h100() -> None:
    cells = all_cells(PROBLEM, H100_L2)
    assert len(set(cells)) == len(cells) == 64
    assert {cell.elements for cell in cells} == {*ELEMENT_BUCKETS, *BUCKETS_BETWEEN}
    cold = {cell.elements for cell in cells if cell.cache is Cache.COLD}
    assert cold == {12 << 20, *(e for e in ELEMENT_BUCKETS if e >= 1 << 16)}
    hot = [cell for cell in cells if cell.cache is Cache.HOT]
    assert max(cell.elements for cell in hot if cell.destination is Destination.IN_PLACE) == 1 << 25
    assert max(cell.elements for cell in hot if cell.destination is Destination.OUT_OF_PLACE) == 1 << 24
    wide = all_cells(Problem.of(256, DType.FLOAT32), H100_L2)
    assert max(cell.elements for cell in wide if cell.cache is Cache.HOT) == 1 << 24


@given(st.sampled_from(ALL_PROBLEMS), st.integers(10, 28).map(lambda k: 1 << k) | st.just(H100_L2))
def test_every_element_count_is_timed_where_it_decides(problem: Problem, l2_bytes: int) -> None:
    """Main buckets also in the other regime, where kernels are timed in it; what lies between only if both count."""
    cells = all_cells(problem, l2_bytes)
    buckets = element_buckets(problem)
    assert list(buckets) == sorted(set(buckets))
    assert not any(elements % problem.n for elements in buckets)
    for elements, destination in product(buckets, Destination):
        decides = deciding_cache(problem, elements, destination, l2_bytes)
        caches = {cell.cache for cell in cells if cell[:2] == (elements, destination)}
        assert decides in caches or elements < 1 << 16
        if elements not in main_buckets(problem):
            assert caches == (set(Cache) if may_be_hot(problem, elements, destination, l2_bytes) else {decides})


@pytest.mark.parametrize("problem", PLAIN_PROBLEMS, ids=lambda problem: problem.key)
def test_buckets_of_powers_of_two_are_the_nominal_counts(problem: Problem) -> None:
    """Databases and bundles have their times there."""
    nominal = PITCHED_ELEMENT_BUCKETS
    if problem.io.rows is Rows.CONTIGUOUS:
        nominal = *ELEMENT_BUCKETS, *BUCKETS_BETWEEN, *(BUCKETS_OF_LONG_ROWS if problem.n >= 1 << 13 else ())
    assert element_buckets(problem) == tuple(sorted(count for count in nominal if count >= problem.n))
    assert main_buckets(problem) == tuple(count for count in ELEMENT_BUCKETS if count >= problem.n)


@pytest.mark.parametrize("problem", MATRIX_PROBLEMS, ids=lambda problem: problem.key)
def test_buckets_with_a_matrix_are_whole_rows_near_the_nominal_counts(problem: Problem) -> None:
    buckets, n = element_buckets(problem), problem.n
    assert set(main_buckets(problem)) <= set(buckets)
    assert n in buckets or n < ELEMENT_BUCKETS[0] // 2
    for nominal in (*ELEMENT_BUCKETS, *BUCKETS_BETWEEN):
        assert abs(timed_elements(problem, nominal) - nominal) <= n // 2
    assert all(high <= 3 * low for low, high in pairwise(buckets))  # no call is far from all


@pytest.mark.parametrize("problem", ALL_PROBLEMS, ids=lambda problem: problem.key)
def test_the_rows_that_are_timed(problem: Problem) -> None:
    columns, x_pitch, y_pitch = timed_rows(problem)
    assert columns == x_pitch == y_pitch <= problem.n
    assert columns == problem.n or problem.io.rows is Rows.PITCHED
    assert columns > problem.n // 2 or problem.n == 2
    assert problem.io.rows is Rows.CONTIGUOUS or columns == problem.n * 3 // 4 or problem.n < 32
    for cell in all_cells(problem, H100_L2):  # the copy kernel moves vectors of 16 bytes
        assert cell.traffic(problem).buffer_bytes % 16 == 0


@given(st.sampled_from(ALL_PROBLEMS), st.data(), st.integers(20, 28).map(lambda k: 1 << k))
def test_launches_of_a_cell(problem: Problem, data: st.DataObject, l2_bytes: int) -> None:
    cell = data.draw(st.sampled_from(all_cells(problem, H100_L2)))
    traffic = cell.traffic(problem)
    assert traffic.buffer_bytes == cell.elements // problem.n * timed_rows(problem).columns * problem.io.input.bytes
    assert traffic.footprint == traffic.buffer_bytes * (1 if cell.destination is Destination.IN_PLACE else 2)
    assert 1 <= traffic.launches(l2_bytes) <= 96
    rotation = traffic.slots(l2_bytes) * traffic.footprint
    if cell.cache is Cache.HOT:
        assert rotation == traffic.footprint
        assert not traffic.needs_flush(l2_bytes)
    else:  # by the other slots or by a flush, a slot is always evicted before it is touched again
        assert traffic.slots(l2_bytes) == traffic.launches(l2_bytes)
        assert traffic.needs_flush(l2_bytes) == (rotation < EVICTION * l2_bytes)


def test_probe_cells() -> None:
    def probes(problem: Problem) -> tuple[Cell, ...]:
        return probe_cells(problem, all_cells(problem, H100_L2), H100_L2)

    assert probes(PROBLEM) == (
        Cell(1 << 13, Destination.IN_PLACE, Cache.HOT),
        Cell(12 << 20, Destination.IN_PLACE, Cache.HOT),
        Cell(1 << 28, Destination.IN_PLACE, Cache.COLD),
    )
    assert probes(Problem.of(256, DType.FLOAT32))[1].elements == 6 << 20
    assert [cell.elements for cell in probes(PROBLEM.with_io(rows=Rows.PITCHED))] == [1 << 16, 1 << 24, 1 << 27]
    assert probe_cells(PROBLEM, [CELL], H100_L2) == (CELL,)
    assert probe_cells(PROBLEM, [], H100_L2) == ()


# ---- copies and launches ---------------------------------------------------------------------------------------------
def test_copies_of_several_buffers_are_only_for_prologues() -> None:
    plain = {source.launch.params for source in copy_sources(for_prologues=False)}
    several = {source.launch.params for source in copy_sources()} - plain
    assert several == {copy_params(Traffic(16, Destination.OUT_OF_PLACE, Cache.HOT, inputs=1))}
    assert plain == {copy_params(Traffic(16, Destination.OUT_OF_PLACE, Cache.HOT, codes)) for codes in (0, 16)}


def test_copy_sources_are_complete() -> None:
    sources = copy_sources()
    assert len({source.entry for source in sources}) == len(sources) >= 3
    for source in sources:
        assert "$" not in source.text
        assert source.launch.tile_elements % (8 * source.launch.threads) == 0


@needs_compiler
def test_copy_sources_compile(tmp_path: Path) -> None:
    toolchain = replace(Toolchain.find(), cache=KernelCache(tmp_path))  # where nothing was built before
    for kernel in toolchain.build(copy_sources(), load_arch("sm90")):
        assert isinstance(kernel, Kernel), kernel
        assert kernel.spill_bytes == 0


def copies_as_many_bytes(module: HostModule, source: Source) -> None:
    """As codes and scales have, and as many buffers as a prologue reads and writes."""
    several = "inputs" in source.launch.signature
    for codes_of_vector, vectors_of_scales, inputs, buffers in ((8, 16, 1, 1), (4, 8, 0, 2), (2, 0, 2, 0)):
        vectors = -(-2 * source.launch.tile_elements // 128) * 16 + 16
        codes, scales = np.zeros(codes_of_vector * vectors, np.uint8), np.zeros(vectors, np.uint8)
        words = vectors // vectors_of_scales if vectors_of_scales else 0
        outputs = {"scales": (scales[: 4 * words], 4 * words)}
        if several:
            outputs["more_y"] = np.zeros(16 * vectors * buffers, np.uint8), 16 * vectors * buffers
        report = module.run(
            source.entry,
            source.launch,
            np.arange(8 * vectors).astype(np.uint16),
            codes,
            scale=1.0,
            elements=8 * vectors,
            operands={
                **({"more_x": np.zeros(16 * vectors * inputs, np.uint8)} if several else {}),
                "codes_of_vector": codes_of_vector,
                "vectors_of_scales": vectors_of_scales,
                "inputs": inputs,
                "outputs": buffers,
            },
            outputs=outputs,
        )
        assert report.complaint == ""


def test_copy_sources_copy() -> None:
    sources = copy_sources()
    module = compile_host(sources)
    for source in sources:
        if source.launch.params != PARAMS:
            copies_as_many_bytes(module, source)
            continue
        elements = 2 * source.launch.tile_elements + 8
        x = np.arange(elements).astype(np.uint16)
        out = np.full_like(x, 0x7FFF)
        module.run(source.entry, source.launch, x, out, scale=1.0, elements=elements)
        assert (out == x).all(), source.entry


def test_the_yardstick_is_the_fastest_copy_of_each_traffic(monkeypatch: pytest.MonkeyPatch) -> None:

    def named(name: str) -> Any:
        return SimpleNamespace(name=name, spec=SimpleNamespace(params=PARAMS))

    now = [100.0]
    monkeypatch.setattr(yardstick.time, "monotonic", lambda: now[0])
    asked: list[tuple[str, list[int]]] = []

    class FakeStopwatch:
        def turns(self, copies: list[Any], work: timing.Work, replays: int) -> timing.Turns:
            (self.copy,) = (copy.name for copy in copies)
            assert 2 * work.elements == work.traffic.buffer_bytes
            return timing.Turns([], work.traffic, replays)

        def time(self, several: list[timing.Turns], rounds: int) -> list[list[timing.Sample]]:
            assert rounds == 2
            sizes = [turns.traffic.buffer_bytes for turns in several]
            if sizes:
                asked.append((self.copy, sizes))
            # The large copy starts slowly and is twice as fast.
            least, a_us = {"small": (1.0, 2), "large": (5.0, 4)}[self.copy]
            return [[timing.Sample(least + size / a_us + now[0], 0, 0)] for size in sizes]

    small, large = (Traffic(size, Destination.IN_PLACE, Cache.HOT) for size in (16, 64))
    copies = yardstick.Yardstick(FakeStopwatch(), [named("small"), named("large")], 3)  # type: ignore[arg-type, list-item]
    copies.refresh([small])
    copies.refresh([small, large, large])
    assert asked == [(copy, [size]) for size in (16, 64) for copy in ("small", "large")]
    assert copies.us == {small: 1 + 8 + 100, large: 5 + 16 + 100}
    now[0] = 130.0
    copies.refresh([small, large])
    assert asked[4:] == [("small", [16]), ("large", [64])]
    assert copies.us == {small: 1 + 8 + 130, large: 5 + 16 + 130}
    copies.refresh([small, large])
    assert len(asked) == 6


def test_replays_alternate_and_of_several_rounds_the_fastest_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs that take turns are all made and warmed up first; a flush comes before what is timed, never within."""

    done: list[str] = []
    waited: list[tuple[int, float]] = []  # after how much was done, and for what
    beats: list[int] = []
    now = [0.0]  # ms

    class Event:
        def record(self, stream: object) -> None:
            self.ms = now[0]

        def elapsed_time(self, end: "Event") -> float:
            return end.ms - self.ms

        def synchronize(self) -> None:
            waited.append((len(done), self.ms))

    class Graph:
        def __init__(self, name: str, us: float) -> None:
            self.name, self.ms = name, us / 1000
            done.append(f"make {name}")

        def replay(self) -> None:
            done.append(self.name)
            now[0] += self.ms

        def close(self) -> None:
            done.append(f"close {self.name}")

    monkeypatch.setattr(timing, "_event", Event)
    stream = SimpleNamespace(device="cpu", synchronize=lambda: done.append("synchronize"))
    watch = SimpleNamespace(beat=lambda: beats.append(len(waited)))
    stopwatch = timing.Stopwatch(stream, 1 << 16, watch)  # type: ignore[arg-type]
    monkeypatch.setattr(stopwatch, "_flush", lambda: done.append("flush"))
    hot, cold = (Traffic(1 << 10, Destination.IN_PLACE, cache) for cache in Cache)
    launches = hot.launches(1 << 16)
    assert (cold.launches(1 << 16), cold.needs_flush(1 << 16)) == (launches, True)
    times = {"a": [1.0, 2.0], "b": [3.0, 2.0], "c": [5.0, 4.0]}  # µs of a launch, graph by graph
    makers = [lambda name=name: Graph(name, launches * times[name].pop(0)) for name in "abc"]
    several = timing.Turns(makers[:2], hot, 3), timing.Turns(makers[2:], cold, 2)
    assert [[sample.us for sample in some] for some in stopwatch.time(several, rounds=2)] == [
        [pytest.approx(1), pytest.approx(2)],
        [pytest.approx(4)],
    ]
    first = ["make a", "make b", "a", "b", "a", "b", "b", "a", "a", "b"]
    last = ["make c", "c", "flush", "c", "flush", "c"]
    one_round = len(done) // 2
    assert done[: one_round - 3] == [*first, *last, "synchronize"]
    assert sorted(done[one_round - 3 : one_round]) == ["close a", "close b", "close c"]
    assert done[one_round : 2 * one_round - 3] == [*last, *first, "synchronize"]
    # The device is waited for when all is queued, replay by replay, and each that it finished is told.
    replays = 2 * 3 + 2
    assert {after for after, _ in waited[:replays]} == {len([*first, *last])}
    assert len({ms for _, ms in waited}) == len(waited) == 2 * replays
    assert beats == [0, 0, *range(1, replays + 1), replays, replays, *range(replays + 1, 2 * replays + 1)]


def test_cells_are_of_every_problem_or_by_problem() -> None:

    small, large = (Cell(elements, Destination.IN_PLACE, Cache.HOT) for elements in (1 << 13, 1 << 20))
    long = Problem.of(1 << 14, DType.FLOAT16)
    service = DeviceService.__new__(DeviceService)  # without the device
    service._l2_bytes = 50 << 20
    for cells, of_problem, of_long in (
        (None, list(all_cells(PROBLEM, 50 << 20)), list(all_cells(long, 50 << 20))),
        ([small, large], [small, large], [large]),
        ({PROBLEM: [small], long: [small, large]}, [small], [large]),
    ):
        service._cells = cells
        assert (service._cells_of(PROBLEM, None), service._cells_of(long, None)) == (of_problem, of_long)


def test_cells_hold_whole_rows() -> None:

    small, large = (Cell(elements, Destination.IN_PLACE, Cache.HOT) for elements in (1 << 13, 1 << 20))
    problem = Problem.of(14336, DType.FLOAT16, order=28)
    service = DeviceService.__new__(DeviceService)  # without the device
    service._cells = [small, small._replace(elements=1 << 14), large, small._replace(elements=7000)]
    assert [cell.elements for cell in service._cells_of(problem, None)] == [14336, 73 * 14336]


@pytest.mark.parametrize("tile_elements", [1 << k for k in range(8, 19)])
def test_results_are_compared_over_as_many_tiles_as_are_promised(tile_elements: int) -> None:

    launches, tiles = repeated_launches(tile_elements), (1 << 24) // tile_elements
    assert launches * tiles >= 100_000
    assert launches == 48 or (launches - 1) * tiles < 100_000


def test_the_arena_fits_whatever_is_timed() -> None:

    l2_bytes = 1 << 16
    stopwatch = Stopwatch(SimpleNamespace(device=torch.device("cpu")), l2_bytes)  # type: ignore[arg-type]
    for problem in (PROBLEM, Problem.of(256, DType.FLOAT32), Problem.of(256, DType.BFLOAT16, rows="pitched")):
        cells = [cell for cell in all_cells(problem, l2_bytes) if cell.elements <= 1 << 16]
        works = [transform_work(problem, cell, stopwatch.operands(problem)) for cell in cells]
        assert [(work.elements, work.rows) for work in works] == [(c.elements, timed_rows(problem)) for c in cells]
        stopwatch.fill(problem.io.input, [work.traffic for work in works])
        assert all(work.traffic.slots(l2_bytes) * work.traffic.footprint <= stopwatch._arena.nbytes for work in works)
        assert stopwatch.is_finite(problem.io.input)
        stopwatch._arena[-1] = 0x7F807F80  # infinities in bfloat16 and float32, NaN in float16
        assert not stopwatch.is_finite(problem.io.input)


def test_a_result_that_differs_once_is_seen() -> None:

    stream = SimpleNamespace(device=torch.device("cpu"), cuda_stream=0, synchronize=lambda: None)
    stopwatch = Stopwatch(stream, 1 << 16)  # type: ignore[arg-type]
    cell = Cell(1 << 10, Destination.OUT_OF_PLACE, Cache.COLD)
    work = transform_work(PROBLEM, cell, stopwatch.operands(PROBLEM))
    stopwatch.fill(PROBLEM.io.input, [], least_bytes=3 * work.traffic.buffer_bytes)

    class Negates:
        def __init__(self, wrong: int) -> None:
            self.launches, self.wrong = 0, wrong

        def prepared(self, elements: int, *_: object) -> Callable[[int, int, int], None]:
            def launch(stream: int, x: int, y: int) -> None:
                array_at(y, elements, PROBLEM.io.input)[:] = array_at(x, elements, PROBLEM.io.input) ^ 0x8000
                if self.launches == self.wrong:
                    array_at(y, elements, PROBLEM.io.input)[-1] ^= 1
                self.launches += 1

            return launch

    assert [stopwatch.repeats(Negates(wrong), work, 5) for wrong in (0, 1, 5, 6)] == [False, False, False, True]  # type: ignore[arg-type]


def test_peers_are_called_by_their_own_arguments(monkeypatch: pytest.MonkeyPatch) -> None:

    for name in ("fast_hadamard_transform", "faster_hadamard_transform"):
        module: Any = ModuleType(name)
        module.__spec__, module.hadamard_transform = ModuleSpec(name, None), lambda *arguments: arguments
        monkeypatch.setitem(sys.modules, name, module)
    fast, hadacore = peer.find_peers()
    x: Any = object()
    assert (fast.name, fast.transform(x, 0.5, True)) == ("fast_hadamard_transform", (x, 0.5))
    assert (hadacore.name, hadacore.transform(x, 0.5, True)) == ("HadaCore", (x, True))
    problems = PROBLEM, PROBLEM.with_io(input=DType.FLOAT32, output=DType.FLOAT32), PROBLEM.with_io(rows=Rows.PITCHED)
    assert [(fast.serves(problem), hadacore.serves(problem)) for problem in problems] == [
        (True, True),
        (True, False),
        (True, False),
    ]


def test_a_peer_that_cannot_be_imported_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:

    def broken(name: str) -> None:
        raise ImportError(f"{name}.so: undefined symbol")

    monkeypatch.setattr(peer, "find_spec", lambda name: ModuleSpec(name, None))
    monkeypatch.setattr(peer, "import_module", broken)
    with pytest.warns(UserWarning, match="hadamard_transform is left out, because it cannot be imported: .*undefined"):
        assert peer.find_peers() == []


@pytest.mark.parametrize("destination", Destination)
@pytest.mark.parametrize("cache", Cache)
def test_a_graph_launches_in_every_slot_by_turns(
    destination: Destination, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code is loaded by a launch before the capture. Where data is hot there is one slot."""

    events: list[Any] = []
    launch = SimpleNamespace(
        prepared=lambda *told: lambda stream, x, y: events.append((x - base, y - base, told)),
    )
    monkeypatch.setattr(timing, "LaunchGraph", lambda stream, kernel, addresses, work: events.extend(addresses))
    l2_bytes = 1 << 16
    stopwatch = timing.Stopwatch(SimpleNamespace(device=torch.device("cpu"), cuda_stream=0), l2_bytes)  # type: ignore[arg-type]
    signed = Problem.of(256, DType.FLOAT16, signed=True)
    work = timing.transform_work(signed, Cell(1 << 14, destination, cache), stopwatch.operands(signed))
    stopwatch.fill(PROBLEM.io.input, [work.traffic])
    base = stopwatch._arena.data_ptr()
    stopwatch.graph(launch, work)  # type: ignore[arg-type]
    first, *captured = events
    assert first == (0, 0, (work.elements, work.scale, work.rows, work.operands))
    assert (work.scale, work.operands.keys()) == (256**-0.5, {"signs_before", "signs_after"})
    launches, slots, size = work.traffic.launches(l2_bytes), work.traffic.slots(l2_bytes), work.traffic.footprint
    assert (slots == 1) == (cache is Cache.HOT)
    behind = 0 if destination is Destination.IN_PLACE else size // 2
    starts = [launch % slots * size for launch in range(launches)]
    assert [(x - base, y - base) for x, y in captured] == [(start, start + behind) for start in starts]
