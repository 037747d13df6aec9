"""What a database holds after a search: each trial once, and the same in Optuna's tables."""

from __future__ import annotations

from collections import Counter

import optuna

from hadagen.trial import knobs_key
from hadagen.tuning_db.store import Store


def assert_each_once(store: Store) -> None:
    ours = Counter((trial.problem.key, trial.environment.gpu, knobs_key(trial.knobs)) for trial in store.checked())
    theirs = Counter(
        (*problem_and_gpu(study.study_name), knobs_key(trial.params))
        for study in optuna.study.get_all_study_summaries(store.url)
        for trial in optuna.load_study(study_name=study.study_name, storage=store.url).trials
    )
    assert theirs == ours
    assert set(ours.values()) == {1}


def problem_and_gpu(study: str) -> tuple[str, str]:
    """Of the name that `Study` gives it."""
    problem, _, rest = study.partition(" on ")
    return problem, rest.split(", ")[1]
