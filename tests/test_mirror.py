"""Optuna's tables, as `Mirror` writes them and as Optuna reads them."""

from __future__ import annotations

import optuna
import pytest
from optuna.distributions import CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from hadagen.tuner import mirror
from hadagen.tuner.mirror import Mirror
from hadagen.tuning_db.store import Store

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
        for trial in added[1:]:
            theirs.add_trial(trial)
    read = {name: optuna.load_study(study_name=name, storage=any_store.url) for name in ("ours", "theirs")}
    assert [told(trial) for trial in read["ours"].trials] == [told(trial) for trial in read["theirs"].trials]
    assert [trial.number for trial in read["ours"].trials] == [0, 1, 2]
    assert read["ours"].metric_names == list(mirror.REGIMES)
