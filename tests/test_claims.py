"""Runs that share a database do nothing twice, and fill the tables of Optuna as Optuna itself would."""

import json
import subprocess
import sys
from io import BytesIO
from pathlib import Path
from typing import Any
from wsgiref.util import setup_testing_defaults

import optuna
import optuna_dashboard
import pytest
from fake_search import TRIALS, FakeRunner, exit_codes, options, problems, search_and_die
from optuna.distributions import CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from hadagen.plan.knobs import KNOB_NAMES
from hadagen.problem.regimes import REGIMES
from hadagen.problem.trial import Trial, knobs_key
from hadagen.tuner import mirror
from hadagen.tuner.events import Event, TrialFinished
from hadagen.tuner.mirror import Mirror
from hadagen.tuner.search import tune
from hadagen.tuning_db import claims
from hadagen.tuning_db.claims import LEASE_SECONDS, Claims
from hadagen.tuning_db.store import Store

(PROBLEM,) = problems(256)
WORK = [(PROBLEM, name) for name in ("a", "b", "c")]
HERE = ("sm90", "Test GPU")


def test_work_is_claimed_once_until_it_is_given_up(any_store: Store) -> None:
    with (
        Claims(any_store, *HERE) as one,
        Claims(any_store, *HERE) as other,
        Claims(any_store, "sm90", "Another GPU") as elsewhere,
    ):
        assert one.take(WORK[:2]) == [True, True]
        assert other.take(WORK) == [False, False, True]
        assert one.take([WORK[0], WORK[2]]) == [False, False]
        assert elsewhere.take(WORK) == [True, True, True]
        assert one.of_others() == {PROBLEM: {"c"}}
        assert other.of_others() == {PROBLEM: {"a", "b"}}
        one.finish(*WORK[0])
        assert one.take([]) == []
        assert other.take(WORK[:2]) == [True, False]
    with Claims(any_store, *HERE) as later:
        assert later.of_others() == {}
        assert later.take(WORK) == [True, True, True]


def test_what_has_a_trial_is_not_claimed(any_store: Store) -> None:
    tune(options(any_store, FakeRunner()))
    done = [(trial.problem, knobs_key(trial.knobs)) for trial in any_store.trials()]
    with Claims(any_store, *HERE) as later:
        assert not any(later.take(done))


def test_a_lease_ends_unless_it_is_renewed(any_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(claims, "_place", lambda: "here")
    one = Claims(any_store, *HERE, clock=lambda _: now[0])
    monkeypatch.setattr(claims, "_place", lambda: "elsewhere")
    other = Claims(any_store, *HERE, clock=lambda _: now[0])
    assert one.take(WORK) == [True, True, True]
    now[0] = LEASE_SECONDS - 1
    one.renew()
    now[0] = 2 * LEASE_SECONDS - 2
    assert other.take(WORK) == [False, False, False]
    now[0] = 2 * LEASE_SECONDS
    assert other.of_others() == {}
    assert other.take(WORK) == [True, True, True]


def test_claims_of_a_process_that_ended_here_are_free_at_once(
    any_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    monkeypatch.setattr("os.getpid", lambda: ended.pid)
    dead = Claims(any_store, *HERE)
    monkeypatch.undo()
    assert dead.take(WORK) == [True, True, True]
    living = Claims(any_store, *HERE)
    assert living.of_others() == {}
    assert living.take(WORK) == [True, True, True]


def test_a_tune_within_a_tune_leaves_it_what_is_under_way_and_both_learn_all(any_store: Store) -> None:
    inner, outer = FakeRunner(), FakeRunner()
    reports = []

    def listen(event: Event) -> None:
        if isinstance(event, TrialFinished) and event.finished == 5:
            reports.append(tune(options(any_store, inner, trials=4 * TRIALS)))

    reports.append(tune(options(any_store, outer, trials=4 * TRIALS), listen))
    of_inner, of_outer = reports
    asked = [(problem, knobs_key(knobs)) for problem, knobs in (*inner.asked, *outer.asked)]
    assert len(asked) == len(set(asked)) == 4 * TRIALS == len(any_store.trials())
    assert sum(of_inner.outcomes.values()) == len(inner.asked) > TRIALS
    assert sum(of_outer.outcomes.values()) == len(outer.asked) > TRIALS
    assert of_inner.finished + of_inner.under_way == 4 * TRIALS
    assert (of_outer.finished, of_outer.under_way) == (4 * TRIALS, 0)
    assert [report.stopped for report in reports] == ["", ""]


def test_a_run_that_begins_meanwhile_leaves_optunas_tables_to_the_run_that_fills_them(
    any_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a run has recorded trials, and before it has added them to Optuna's tables."""
    record, runner = any_store.record, FakeRunner()

    def recording(*trials: Trial) -> list[int]:
        numbers = record(*trials)
        monkeypatch.undo()
        tune(options(any_store, FakeRunner()))
        return numbers

    monkeypatch.setattr(any_store, "record", recording)
    tune(options(any_store, runner))
    (study,) = optuna.get_all_study_names(any_store.url)
    found = [
        tuple(trial.params.values()) for trial in optuna.load_study(study_name=study, storage=any_store.url).trials
    ]
    assert len(found) == len(set(found)) == len(any_store.trials())


def test_processes_that_share_a_database_measure_nothing_twice(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert exit_codes(search_and_die, tmp_path / "trials.db", log, count=2) == [0, 0]
    measured = log.read_text().splitlines()
    assert len(measured) == len(set(measured)) == 2 * TRIALS
    with Store.open(tmp_path / "trials.db") as store:
        assert len(store.trials()) == 2 * TRIALS


# ---- Optuna's tables -------------------------------------------------------------------------------------------------
RANGES = {"warps": CategoricalDistribution((1, 2, 4)), "load": CategoricalDistribution(("plain", "cp_async"))}


def results() -> list[FrozenTrial]:
    known = {"params": {"warps": 4, "load": "plain"}, "distributions": RANGES}
    failed = create_trial(state=TrialState.PRUNED, constraints={"failed": 1.0}, **known)
    return [create_trial(values=(0.5, 0.25, 1.0), **known), failed, create_trial(values=(0.0, 1e-30, 2.0), **known)]


def told(trial: FrozenTrial) -> dict[str, object]:
    names = ("number", "state", "values", "params", "distributions", "system_attrs", "constraints", "datetime_complete")
    return {name: getattr(trial, name) for name in names}


@pytest.mark.parametrize("schema", [mirror._KNOWN_SCHEMA, "of another Optuna"])
def test_trials_are_as_optuna_itself_would_have_added_them(
    any_store: Store, monkeypatch: pytest.MonkeyPatch, schema: str
) -> None:
    monkeypatch.setattr(mirror, "_KNOWN_SCHEMA", schema)
    added = results()
    with Mirror(any_store) as tables:
        assert (tables._tables is None) == (schema == "of another Optuna")
        ours, theirs = tables.study("ours"), tables.study("theirs")
        tables.add([])
        tables.add([(ours, added[0]), (theirs, added[0]), (ours, added[1])])
        tables.add([(ours, added[2])])
        new = create_trial(values=(1.0, 1.0, 1.0), params={"warps": 2, "load": "plain"}, distributions=RANGES)
        tables.add([(ours, added[0]), (ours, new)], missing=True)  # which has the knobs of the first
        for trial in (*added[1:], new):
            theirs.add_trial(trial)
        assert tables.count(ours) == tables.count(theirs) == 4
    read = {name: optuna.load_study(study_name=name, storage=any_store.url) for name in ("ours", "theirs")}
    assert [told(trial) for trial in read["ours"].trials] == [told(trial) for trial in read["theirs"].trials]
    assert [trial.number for trial in read["ours"].trials] == [0, 1, 2, 3]
    assert read["ours"].metric_names == list(mirror.REGIMES)


# ---- Optuna's dashboard ----------------------------------------------------------------------------------------------
def get(app: Any, path: str) -> Any:
    """What the dashboard answers to its page in a browser."""
    environment: dict[str, Any] = {"PATH_INFO": path, "wsgi.input": BytesIO()}
    setup_testing_defaults(environment)
    status: list[str] = []
    body = b"".join(app(environment, lambda line, headers, *_: status.append(line)))
    assert status == ["200 OK"], (status, body)
    return json.loads(body)


def test_the_dashboard_shows_studies_and_trials(any_store: Store) -> None:
    tune(options(any_store, FakeRunner(), problems=problems(64, 256)))
    app = optuna_dashboard.wsgi(any_store.url)
    studies = get(app, "/api/studies")["study_summaries"]
    names = {study["study_name"]: study["study_id"] for study in studies}
    assert sorted(name.partition(",")[0] for name in names) == [
        "n256-float16-fast on sm90",
        "n64-float16-fast on sm90",
    ]
    for name, number in names.items():
        assert ", Test GPU, ranges " in name
        shown = get(app, f"/api/studies/{number}")
        assert (shown["directions"], shown["objective_names"]) == (["maximize"] * 3, list(REGIMES))
        trials = {knobs_key(trial.knobs): trial for trial in any_store.trials() if trial.problem.key == name.split()[0]}
        assert len(shown["trials"]) == len(trials) == TRIALS
        assert {trial["state"] for trial in shown["trials"]} == {"Complete"}
        for trial in shown["trials"]:
            params = {each["name"]: each["param_external_value"] for each in trial["params"]}
            assert set(params) == set(KNOB_NAMES)
            assert all(0 < value < 2 for value in trial["values"])
