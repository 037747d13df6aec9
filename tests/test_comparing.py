"""Kernels against each other and against other libraries: who is timed, what counts, and what noise cannot do."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from measure_sample import ALL_PROBLEMS
from test_runners import FakeService

from hadagen.errors import DeviceError, UsageError
from hadagen.gpu.driver import DoesNotFit
from hadagen.measure import Cell, Choice, DeviceRunner, Variant, comparing, peer, rows_between
from hadagen.measure.cells import Traffic
from hadagen.measure.device_operands import Orthonormal
from hadagen.measure.messages import Answer, ChoiceResult, Compare, Comparison, Rank, Ranking, Times
from hadagen.measure.timing import Sample, Stopwatch, Turns, Work, transform_work
from hadagen.measure.verify import Verifier
from hadagen.problem.launch import LaunchSpec
from hadagen.problem.problem import DType, Numerics, Problem, Rows
from hadagen.problem.regimes import Cache, Destination, element_buckets, timed_rows
from hadagen.problem.trial import Kernel, Outcome
from hadagen.runtime.plain import transform as plain_transform

L2 = 50 << 20
PROBLEM = Problem.of(256, DType.FLOAT16)
FAST = PROBLEM.with_io(numerics=Numerics.FAST)
HOT, COLD = (Cell(3 << 13, Destination.IN_PLACE, cache) for cache in Cache)
BOTH = ((HOT, 0.9), (COLD, 0.1))


def kernel(entry: str) -> Kernel:
    launch = LaunchSpec(threads=128, cluster=1, shared_bytes=0, tile_elements=4096, persistent=False)
    return Kernel(entry, entry, "sm90", "source", b"cubin", b"ptx", launch, 32, 0, "13.0")


class FakeStopwatch:
    """Kernels are their names. `us` gives the time of one in the so-manieth graph of it."""

    def __init__(self, us: Callable[[str, Cache, int], float]) -> None:
        self._us = us
        self._graphs: Counter[tuple[str, Cache]] = Counter()
        self.timed: list[tuple[int, list[list[str]]]] = []  # rounds, and the names of each `Turns`
        self.replays: dict[str, int] = {}
        self.call_us = 1.0

    def operands(self, problem: Problem) -> Orthonormal:
        return Orthonormal(problem, torch.device("cpu"))

    def fill(self, dtype: DType, traffics: Sequence[Traffic]) -> None:
        self.filled = traffics

    def inputs(self, dtype: DType, work: Work, rows: int) -> list[torch.Tensor]:
        return [torch.zeros(rows, work.rows.columns, dtype=torch.float16)] * 2

    def once(self, call: Any) -> float:
        calls = call.func.calls
        call()
        return self.call_us if calls >= 2 else 1e9  # the first one after that for the errors loads code

    def graph(self, name: str, work: Work) -> Any:
        return name

    def turns(self, names: Sequence[str], work: Work, replays: int) -> Turns:
        return Turns([partial(self.graph, name, work) for name in names], work.traffic, replays)

    def time(self, several: Iterable[Turns], rounds: int = 1) -> list[list[Sample]]:
        ordered = list(several)
        names = [[str(make()) for make in turns.graphs] for turns in ordered]
        self.timed.append((rounds, names))
        self.replays |= {name: turns.replays for turns, some in zip(ordered, names, strict=True) for name in some}
        return [
            [min(self._sample(name, turns.traffic.cache) for _ in range(rounds)) for name in some]
            for turns, some in zip(ordered, names, strict=True)
        ]

    def _sample(self, name: str, cache: Cache) -> Sample:
        us = self._us(name, cache, self._graphs[name, cache])
        self._graphs[name, cache] += 1
        return Sample(us, us, us)


class FakeYardstick:
    def __init__(self) -> None:
        self.us: dict[Traffic, float] = {}

    def refresh(self, traffics: Sequence[Traffic]) -> None:
        self.us |= dict.fromkeys(traffics, 0.5)


class FakeVerifier:
    def check(self, name: str, problem: Problem) -> Any:
        outcome = Outcome.WRONG_ANSWER if "wrong" in name else Outcome.OK
        return Answer(outcome, "", {"normal": 2e-4})

    def errors_of(self, transform: Callable[[torch.Tensor], torch.Tensor], problem: Problem) -> dict[str, float]:
        transform(torch.zeros(4, problem.n))
        return {"normal": 3e-4}


def make_comparer(stopwatch: FakeStopwatch, monkeypatch: pytest.MonkeyPatch, *peers: peer.Peer) -> comparing.Comparer:
    @contextmanager
    def load(kernel: Kernel) -> Iterator[str]:
        if kernel.entry == "too_large":
            raise DoesNotFit("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "it does not fit")
        yield kernel.entry

    graphs = SimpleNamespace(
        serving=lambda problem, device: [peer for peer in peers if peer.serves(problem)],
        graph=lambda calls, launches: f"graph of {len(calls)} of {calls[0].func.name}",
    )
    monkeypatch.setattr(comparing, "Peers", lambda: graphs)
    parts: tuple[Any, ...] = (stopwatch, FakeVerifier(), FakeYardstick(), L2, load)
    return comparing.Comparer(*parts)


class Transform:
    """Of a peer: refuses rows by their number, and remembers what it was told."""

    def __init__(self, name: str, *refused: int) -> None:
        self.name, self.refused, self.calls = name, refused, 0
        self.asked: list[tuple[float, bool]] = []

    def __call__(self, x: torch.Tensor, scale: float, in_place: bool) -> torch.Tensor:
        if len(x) in self.refused:
            raise RuntimeError("no kernel for this")
        self.asked.append((scale, in_place))
        self.calls += 1
        return x


def make_peer(transform: Transform, *, works_in_place: bool = True, dtypes: frozenset[DType] = frozenset(DType)) -> Any:
    return peer.Peer(transform.name, dtypes, frozenset(Rows), works_in_place, transform)


# ---- side by side ----------------------------------------------------------------------------------------------------
def test_all_that_transforms_the_same_rows_is_timed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    us = {"accurate": 2.0, "fast": 1.0, "graph of 2 of here": 3.0, "graph of 2 of elsewhere": 4.0}
    # The second graph of ours and the first of others is slow.
    stopwatch = FakeStopwatch(
        lambda name, _, number: us[name] * (1.3 if number == (name in ("accurate", "fast")) else 1)
    )
    here, elsewhere = Transform("here"), Transform("elsewhere")
    other = make_peer(Transform("other types"), dtypes=frozenset({DType.FLOAT32}))
    made = make_comparer(stopwatch, monkeypatch, make_peer(here), make_peer(elsewhere, works_in_place=False), other)
    kernels = (PROBLEM, kernel("accurate")), (FAST, kernel("fast")), (FAST, kernel("wrong"))
    comparison = made.compare(Compare(kernels, ((HOT, (0, 1)), (COLD, (1, 2)))))
    assert [answer.outcome.value for answer in comparison.answers] == ["ok", "ok", "wrong_answer"]
    assert comparison.peer_errors == {"here": {"normal": 3e-4}, "elsewhere": {"normal": 3e-4}}
    peers = {"here": 3.0, "elsewhere": 4.0}
    assert comparison.times == (Times(0.5, {0: 2.0, 1: 1.0}, peers), Times(0.5, {1: 1.0}, peers))
    names = ["accurate", "fast", "graph of 2 of here", "graph of 2 of elsewhere"]
    assert stopwatch.timed == [(2, [[name] for name in some]) for some in (names, names[1:])]
    # On the inputs of the errors first, out of place; then in place where the peer can.
    assert set(here.asked) == {(1 / 16, False), (1 / 16, True)}
    assert set(elsewhere.asked) == {(1 / 16, False)}
    assert set(stopwatch.filled) == {cell.traffic(PROBLEM) for cell in (HOT, COLD)}


def test_a_peer_that_cannot_is_left_out_where_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    stopwatch = FakeStopwatch(lambda *_: 1.0)
    never, large = Transform("never", 4), Transform("not so many", 1 << 12)
    made = make_comparer(stopwatch, monkeypatch, make_peer(never), make_peer(large))
    cells = (HOT, (0,)), (Cell(1 << 20, Destination.OUT_OF_PLACE, Cache.COLD), (0,))
    comparison = made.compare(Compare(((PROBLEM, kernel("ours")),), cells))
    assert comparison.peer_errors.keys() == {"not so many"}
    assert [times.peers for times in comparison.times] == [{"not so many": 1.0}, {}]


def test_what_takes_long_is_replayed_less(monkeypatch: pytest.MonkeyPatch) -> None:
    stopwatch = FakeStopwatch(lambda *_: 1.0)
    made = make_comparer(stopwatch, monkeypatch, make_peer(Transform("slow")))
    request = Compare(((PROBLEM, kernel("ours")),), ((HOT, (0,)),))
    made.compare(request)
    assert stopwatch.replays["graph of 2 of slow"] == stopwatch.replays["ours"]
    for stopwatch.call_us in (1e3, 1e6):  # of which there are many in a graph
        made.compare(request)
        assert 2 <= stopwatch.replays["graph of 2 of slow"] < stopwatch.replays["ours"]


def test_a_graph_of_calls_keeps_a_result_for_each_input(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    graph = SimpleNamespace(
        capture_begin=lambda **_: events.append("begin"),
        capture_end=lambda: events.append("end"),
        replay=lambda: events.append("replay"),
        reset=lambda: events.append("reset"),
    )
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)

    class Result:
        def __init__(self, name: str) -> None:
            self.name = name
            events.append(f"new {name}")

        def __del__(self) -> None:
            events.append(f"free {self.name}")

    calls: Any = [lambda: Result("a"), lambda: Result("b")]
    captured = peer.PeerGraph("pool", calls, launches=3)
    # The one before it in its slot is gone before a result is made, so that it takes its place.
    assert events[:6] == ["begin", "new a", "new b", "free a", "new a", "end"]
    assert sorted(events[6:]) == ["free a", "free b"]
    captured.replay()
    captured.close()
    assert events[-2:] == ["replay", "reset"]

    def fails() -> torch.Tensor:
        raise RuntimeError("this cannot be captured")

    events.clear()
    with pytest.raises(RuntimeError, match="cannot be captured"):
        peer.PeerGraph("pool", [fails], launches=3)
    assert events == ["begin", "end"]


@pytest.mark.parametrize(
    "problem", [PROBLEM, Problem.of(4, DType.BFLOAT16), Problem.of(64, DType.FLOAT32, rows="pitched")]
)
def test_others_read_what_our_launches_read(problem: Problem) -> None:
    l2_bytes = 1 << 16
    stopwatch = Stopwatch(SimpleNamespace(device=torch.device("cpu")), l2_bytes)  # type: ignore[arg-type]
    for destination in Destination:
        cell = Cell(1 << 12, destination, Cache.COLD)
        work = transform_work(problem, cell, stopwatch.operands(problem))
        stopwatch.fill(problem.io.input, [work.traffic])
        inputs = stopwatch.inputs(problem.io.input, work, cell.elements // problem.n)
        assert len(inputs) == work.traffic.slots(l2_bytes) > 1
        base = stopwatch._arena.data_ptr()
        starts = [x.data_ptr() - base for x in inputs]
        assert starts == [slot * work.traffic.footprint for slot in range(len(inputs))]
        columns = timed_rows(problem).columns
        assert {(tuple(x.shape), x.is_contiguous()) for x in inputs} == {((cell.elements // problem.n, columns), True)}


@pytest.mark.parametrize("rows", Rows)
@pytest.mark.parametrize("dtype", DType)
def test_errors_of_a_library_are_against_float64_on_our_inputs(dtype: DType, rows: Rows) -> None:
    verifier, problem = Verifier(torch.device("cpu"), stream=0), Problem.of(64, dtype, rows=rows)
    shapes = set()

    def transform(x: torch.Tensor, scale: float = 1 / 8) -> torch.Tensor:
        shapes.add(tuple(x.shape))
        y = torch.empty_like(x)
        plain_transform.transform(x, y, scale)
        return y

    errors = verifier.errors_of(transform, problem)
    assert 0 < errors["normal"] <= problem.error_bound
    assert max(errors.values()) <= problem.error_bound
    assert shapes == {(2048, timed_rows(problem).columns)}  # a power of two, though ours are verified with ragged ones
    assert verifier.errors_of(lambda x: transform(x, 1 / 16), problem)["normal"] == pytest.approx(0.5, rel=1e-2)
    assert verifier.errors_of(lambda x: x.fill_(float("nan")), problem)["normal"] == float("inf")
    assert verifier.errors_of(transform, problem.with_io(numerics=Numerics.FAST)) == errors


@pytest.mark.parametrize("n", [24, 28 * 32, 28 * 64])
@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16])
def test_products_compute_what_our_kernels_do(n: int, dtype: DType) -> None:
    problem = Problem.of(n, dtype, order=n if n == 24 else 28, real=n == 28 * 64, paired=n == 28 * 64)

    def h(x: torch.Tensor, scale: float, in_place: bool) -> torch.Tensor:
        y = torch.empty_like(x)
        plain_transform.transform(x, y, scale)
        return y

    rows = frozenset(Rows)
    library = peer.Peer("library", frozenset(DType), rows, False, h)
    orthonormal = peer.Peer("orthonormal", frozenset(DType), rows, False, h, takes_scale=False)
    other_types = peer.Peer("other types", frozenset({DType.FLOAT32}), rows, False, h)
    peers = peer.Peers.__new__(peer.Peers)  # without the device
    peers.all = [library, orthonormal, other_types]
    found = peers.serving(problem, torch.device("cpu"))
    with_library = [] if problem.transform.paired else ["library, PyTorch"]
    assert [each.name for each in found] == ["PyTorch", *with_library, "PyTorch, one product"]
    verifier = Verifier(torch.device("cpu"), stream=0)
    for each in found:
        errors = verifier.errors_of(partial(comparing._transform, each, problem), problem)
        of_matrices = 1.5 if problem.transform.real else 1  # whose entries they round
        assert 0 < max(errors.values()) <= of_matrices * problem.with_io(numerics=Numerics.FAST).error_bound
    for more in ({"signed": True}, {"prologue": "silu_mul"}, {"prologue": "gelu"}):
        assert peers.serving(Problem.of(n, dtype, order=problem.order, **more), torch.device("cpu")) == []
    assert peers.serving(Problem.of(256, dtype), torch.device("cpu")) == [library, orthonormal]


# ---- between ---------------------------------------------------------------------------------------------------------
@given(
    st.sampled_from(ALL_PROBLEMS),
    st.integers(2, 60),
)
def test_rows_lie_between_the_element_counts_that_are_timed(problem: Problem, counts: int) -> None:
    rows, n = rows_between(problem, counts), problem.n
    buckets = element_buckets(problem)
    assert (len(rows), rows) == (counts, sorted(set(rows)))
    assert all(count % 2 for count in rows)
    assert buckets[0] < rows[0] * n
    assert rows[-1] * n < buckets[-1]
    assert not set(buckets) & {count * n for count in rows}
    for count in rows:
        for destination in Destination:
            traffic = Cell(count * n, destination, Cache.COLD).traffic(problem)
            assert traffic.buffer_bytes % 16 == 0
            assert 0 <= traffic.buffer_bytes - count * timed_rows(problem).columns * problem.io.input.bytes < 16


def rank(us: Callable[[str, Cache, int], float], names: str, monkeypatch: pytest.MonkeyPatch, chosen: int = 0) -> Any:
    stopwatch = FakeStopwatch(us)
    request = Rank(PROBLEM, tuple(kernel(name) for name in names.split()), (Choice(chosen, BOTH),))
    ranking = make_comparer(stopwatch, monkeypatch).rank(request)
    (result,) = ranking.results
    return ranking, result, stopwatch


def test_the_loss_is_by_the_times_that_name_winners(monkeypatch: pytest.MonkeyPatch) -> None:
    us = {"chosen": (2.0, 3.0), "best": (1.9, 3.6), "cold": (4.0, 1.0)}
    _, result, _ = rank(lambda name, cache, _: us[name][cache is Cache.COLD], "chosen best cold", monkeypatch)
    loss = (2.0 / 1.9) ** 0.9 * (3.0 / 3.6) ** 0.1 - 1
    assert result == ChoiceResult(1, 2.0, 1.9, pytest.approx(loss))


def test_the_chosen_kernel_loses_nothing_where_it_is_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    us = {"slow": 9.0, "chosen": 1.0, "other": 1.04}
    _, result, stopwatch = rank(lambda name, *_: us[name], "slow chosen other", monkeypatch, chosen=1)
    assert result == ChoiceResult(1, 1.0, 1.0, 0.0)
    raced = [names for rounds, several in stopwatch.timed for names in several if rounds == 2]
    assert raced == [["chosen", "other"]] * 2  # what is near races, hot and cold


def test_a_lead_that_is_noise_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel as fast as the chosen one that was lucky in its first three graphs, the screening and the race."""

    def us(name: str, cache: Cache, number: int) -> float:
        return 0.8 if name == "lucky" and number < 3 else 1.0

    _, result, _ = rank(us, "chosen lucky", monkeypatch)
    assert result == ChoiceResult(0, 1.0, 1.0, 0.0)
    _, result, _ = rank(lambda name, *_: 0.8 if name == "lucky" else 1.0, "chosen lucky", monkeypatch)
    assert result == ChoiceResult(1, 1.0, 0.8, pytest.approx(0.25))


def test_a_refused_kernel_is_no_candidate_and_has_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def us(name: str, *_: object) -> float:
        return 0.1 if "wrong" in name else 1.0

    ranking, result, _ = rank(us, "chosen wrong", monkeypatch)
    assert [answer.outcome for answer in ranking.answers] == [Outcome.OK, Outcome.WRONG_ANSWER]
    assert result == ChoiceResult(0, 1.0, 1.0, 0.0)
    _, result, _ = rank(us, "chosen wrong", monkeypatch, chosen=1)
    assert result is None


def test_so_is_one_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    ranking, result, _ = rank(lambda *_: 1.0, "too_large chosen", monkeypatch, chosen=1)
    outcomes = [(answer.outcome, answer.detail) for answer in ranking.answers]
    assert outcomes == [(Outcome.LAUNCH_FAILED, "it does not fit"), (Outcome.OK, "")]
    assert result == ChoiceResult(1, 1.0, 1.0, 0.0)


def test_few_finalists_race(monkeypatch: pytest.MonkeyPatch) -> None:
    names = " ".join(f"k{i}" for i in range(20))
    _, result, stopwatch = rank(lambda name, *_: 1.0 + int(name[1:]) / 1000, names, monkeypatch, chosen=19)
    assert result == ChoiceResult(0, 1.019, 1.0, pytest.approx(0.019))
    assert max(len(names) for _, several in stopwatch.timed for names in several) == 7


# ---- through the worker ----------------------------------------------------------------------------------------------
class ComparingService(FakeService):
    def handle(self, request: Compare | Rank) -> Any:
        if isinstance(request, Compare):
            assert all(kernel.source == "" for _, kernel in request.kernels)
            if request.kernels[0][0].n == 2:
                raise RuntimeError("out of memory")
            times = tuple(Times(1.0, dict.fromkeys(wanted, 2.0), {}) for _, wanted in request.cells)
            return Comparison(tuple(Answer(Outcome.OK, "") for _ in request.kernels), {}, times)
        return Ranking((), tuple(ChoiceResult(choice.chosen, 1.0, 1.0, 0.0) for choice in request.choices))


def test_a_runner_compares_and_ranks() -> None:
    ours, fast, other = (
        Variant(problem, {}, kernel("k")) for problem in (PROBLEM, FAST, Problem.of(2, DType.FLOAT16, Numerics.FAST))
    )
    with DeviceRunner(0, [kernel("copy")], make_service=ComparingService) as runner:
        comparison = runner.compare([ours, fast], [(HOT, [0, 1]), (COLD, [1])])
        assert [times.kernels for times in comparison.times] == [{0: 2.0, 1: 2.0}, {1: 2.0}]
        assert runner.rank([ours, ours], [Choice(1, BOTH)]).results == (ChoiceResult(1, 1.0, 1.0, 0.0),)
        with pytest.raises(UsageError, match="cannot be compared; give variants of one n and dtype"):
            runner.compare([ours, other], [(HOT, [0])])
        with pytest.raises(UsageError, match="give those of one problem"):
            runner.rank([ours, fast], [])
        with pytest.raises(DeviceError, match=r"comparing kernels for n2-float16-fast failed \(out of memory\); run"):
            runner.compare([other], [(HOT, [0])])
