"""Optuna's dashboard shows the studies of a tuning database as they are: SQLite or PostgreSQL."""

from __future__ import annotations

import json
from io import BytesIO
from typing import Any
from wsgiref.util import setup_testing_defaults

import optuna_dashboard
from fake_search import TRIALS, FakeRunner, options, problems

from hadagen.knobs import KNOB_NAMES
from hadagen.regimes import REGIMES
from hadagen.trial import knobs_key
from hadagen.tuner.search import tune
from hadagen.tuning_db.store import Store


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
        assert shown["directions"] == ["maximize"] * 3
        assert shown["objective_names"] == list(REGIMES)
        trials = {knobs_key(trial.knobs): trial for trial in any_store.trials() if trial.problem.key == name.split()[0]}
        assert len(shown["trials"]) == len(trials) == TRIALS
        assert {trial["state"] for trial in shown["trials"]} == {"Complete"}
        for trial in shown["trials"]:
            params = {each["name"]: each["param_external_value"] for each in trial["params"]}
            assert set(params) == set(KNOB_NAMES)
            assert all(0 < value < 2 for value in trial["values"])
