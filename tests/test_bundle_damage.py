"""A few hundred of the cases of `bundle_damage.py`, and what it would count as a failure."""

from pathlib import Path

import pytest
from bundle_damage import KINDS, Case, Judged, Sound, judge


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Sound:
    return Sound(tmp_path_factory.mktemp("bundles"))


@pytest.mark.parametrize("kind", KINDS)
def test_no_damage_gets_past_the_checks(kind: str, sound: Sound) -> None:
    for seed in range(9):
        for remade in (False, True):
            case = Case(kind, remade, 10**6 + seed)
            assert not judge(case, sound).wrong(case), case


def test_what_would_get_past_the_checks_is_a_failure() -> None:
    accident, forged = Case("flips", False, 0), Case("flips", True, 0)
    for outcome in ("refused", "as before", "other", "TypeError: no tuple"):
        for signed in ("refused", "as before", "other", "TypeError: no tuple"):
            judged = Judged(outcome, signed, 0.1)
            is_bad = signed not in ("refused", "as before")
            assert bool(judged.wrong(accident)) == (is_bad or outcome not in ("refused", "as before"))
            assert bool(judged.wrong(forged)) == (is_bad or outcome not in ("refused", "as before", "other"))


def test_a_kind_of_damage_is_harmless_at_times_and_not_always(sound: Sound) -> None:
    """And some pass once their digests are made anew, but for the signature."""
    found = {judge(Case("values", True, seed), sound) for seed in range(12)}
    assert {each.outcome for each in found} == {"refused", "as before", "other"}
    assert {each.signed for each in found if each.outcome == "other"} == {"refused"}


def test_the_sound_bundles_are_read(sound: Sound) -> None:
    assert all(Path(path).exists() and len(content) == 6 for path, content in sound.contents.items())
