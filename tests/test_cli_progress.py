"""What is shown while a search runs: how far it is and what time is left, as lines and on a terminal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fake_search import FakeRunner
from sample_trials import make_trial

from hadagen.cli import progress
from hadagen.cli.output import clock_text
from hadagen.cli.progress import State, best_so_far, in_parts, shown
from hadagen.trial import Outcome
from hadagen.tuner.estimate import BUILT_AT_ONCE
from hadagen.tuner.events import (
    BatchBuilt,
    Event,
    PairRaced,
    ProblemFinished,
    ProblemStarted,
    RaceDisturbed,
    SearchStarted,
    TrialFinished,
)
from hadagen.tuner.fleet import Summed

SCORES = (0.5, 0.75, 1.0)


def test_progress_says_how_far_the_search_is_and_what_time_is_left() -> None:
    now = [0.0]
    state = State(time_budget=1000.0, clock=lambda: now[0])
    state.listen(SearchStarted(problems=1, trials=103, finished=2, environment=FakeRunner.environment, estimated=False))
    assert (state.counts, state.seconds_left) == ("2 of 103 trials", 1000.0)
    for finished in range(3, 23):
        now[0] += 2.0
        state.listen(TrialFinished(make_trial(), SCORES, finished, trials=103))
    assert (state.counts, state.seconds_left) == ("22 of 103 trials (20 ok)", 2.0 * 81)
    state.listen(TrialFinished(make_trial(outcome=Outcome.TIMEOUT), SCORES, 23, trials=103))
    assert state.counts == "23 of 103 trials (20 ok, 1 timeout)"
    assert state.now == "n256-float16-accurate: best so far, as fraction of copy: latency 0.50, L2 0.75, memory 1.00"
    assert best_so_far((0.0, 0.0421, 1.0)).endswith(": latency -, L2 0.042, memory 1.00")  # the first is not timed
    state.listen(PairRaced(make_trial().problem, (0.01,)))
    assert state.counts == "23 of 103 trials (20 ok, 1 timeout, 1 pairs raced)"
    now[0] = 999.0
    assert state.seconds_left == 1.0
    now[0] = 1001.0
    assert state.seconds_left == 0.0


def test_progress_is_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with shown(None) as listen:
        listen(TrialFinished(make_trial(), SCORES, 1, trials=2))
        listen(ProblemFinished(make_trial().problem, 2, SCORES))
        listen(ProblemFinished(make_trial().problem, 0, SCORES))
    finished, without = capsys.readouterr().err.splitlines()[-2:]
    assert finished.startswith("n256-float16-accurate: 2 trials, best so far")
    assert without.startswith("n256-float16-accurate: no choice of knobs is legal on this arch")


@pytest.mark.parametrize(
    ("names", "of_problem", "of_note"), [(("A",), "", ""), (("A", "B"), " on B", "B: ")], ids=["one", "two"]
)
def test_lines_name_the_class_where_a_fleet_has_several(
    names: tuple[str, ...], of_problem: str, of_note: str, capsys: pytest.CaptureFixture[str]
) -> None:
    problem, state = make_trial().problem, State(None)
    with shown(None) as listen:

        def both(event: Event) -> None:
            listen(event)
            state.listen(event)

        summed = Summed(both, len(names))
        for i, name in enumerate(names):
            environment = replace(FakeRunner.environment, gpu=name)
            summed.of(i)(SearchStarted(1, 2, 0, environment, estimated=False))
        tell = summed.of(len(names) - 1)
        tell(ProblemFinished(problem, 0, SCORES))
        tell(RaceDisturbed(problem, "it is busy"))
        tell(TrialFinished(make_trial(), SCORES, 1, trials=2))
        assert state.now.startswith(f"{problem.key}{of_problem}: best so far")
        tell(PairRaced(problem, (0.01,)))
        assert state.now == f"{problem.key}{of_problem}: racing near-ties"
    finished, note = capsys.readouterr().err.splitlines()[1:]
    assert finished.startswith(f"{problem.key}{of_problem}: no choice of knobs")
    assert note == f"{of_note}it is busy"


@pytest.mark.parametrize(
    ("estimated", "trying"), [(True, "verifying kernels on the CPU"), (False, "measuring kernels")]
)
def test_until_the_first_trial_lines_say_at_once_what_is_done(
    estimated: bool, trying: str, capsys: pytest.CaptureFixture[str]
) -> None:
    count = 2 * BUILT_AT_ONCE + 1
    with shown(None) as listen:
        listen(SearchStarted(problems=1, trials=2, finished=0, environment=FakeRunner.environment, estimated=estimated))
        listen(ProblemStarted(make_trial().problem, 0))
        build: Any = in_parts(lambda sources: sources, listen)
        assert build([*range(count)]) == [*range(count)]
        assert build([1, 2]) == [1, 2]
        listen(BatchBuilt(fresh=count, known=0, failed=0, seconds=1.0))
        build([1, 2])  # the next batch
        listen(TrialFinished(make_trial(), SCORES, 1, trials=2))
        build([1, 2])
    done = ["choosing kernels", "choosing kernels: problem 1 of 1"]
    done += [f"building kernels: {i} of {count}" for i in (0, BUILT_AT_ONCE, 2 * BUILT_AT_ONCE, count)]
    done += [f"building kernels: {i} of {count + 2}" for i in (count, count + 2)]
    assert capsys.readouterr().err.splitlines() == [*done, trying]


def test_a_line_comes_now_and_then(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with shown(None) as listen:
        for finished in range(1, 13):
            now[0] += 4.0
            listen(TrialFinished(make_trial(), SCORES, finished, trials=12))
    counts = [line.split(" of ")[0] for line in capsys.readouterr().err.splitlines()[1:]]
    assert counts == ["3", "6", "9", "12"]


def test_a_time_is_shown_as_on_a_clock() -> None:
    assert [clock_text(seconds) for seconds in (0.0, 187.9, 4000.0, None)] == ["0:00", "3:07", "66:40", "?:??"]


def test_progress_is_drawn_on_a_terminal() -> None:
    from rich.console import Console

    state = State(time_budget=None)
    state.listen(TrialFinished(make_trial(), SCORES, 1, trials=2))
    console = Console(width=100)
    with console.capture() as captured:
        console.print(state)
    bar, counts, now = captured.get().splitlines()
    assert bar.startswith("━")
    assert counts.strip() == "1 of 2 trials (1 ok), ?:?? left"
    assert now.startswith("n256-float16-accurate: best so far")
