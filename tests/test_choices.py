"""Types of the names that public functions take: the names that they know, and any other text for type checkers."""

import inspect
import re
from collections.abc import Callable
from typing import Any, get_args

import pytest

import hadagen
from hadagen.problem import choices
from hadagen.problem.formats import FORMATS, Layout
from hadagen.problem.problem import Numerics

KNOWN = {
    "to": (choices.FormatName, list(FORMATS)),
    "rule": (choices.RuleName, list(dict.fromkeys(rule for each in FORMATS.values() for rule in each.rules))),
    "layout": (choices.LayoutName, [each.value for each in Layout]),
    "numerics": (choices.NumericsName, [each.value for each in Numerics]),
}
FUNCTIONS = [
    hadagen.rotate_quantize,
    hadagen.best_config,
    hadagen.warmup,
    hadagen.hadamard_transform,
    hadagen.Rotation.forward,
    hadagen.Rotation.inverse,
    *(getattr(hadagen.presets, name) for name in hadagen.presets.__all__),
]


@pytest.mark.parametrize("name", KNOWN)
def test_editors_complete_the_names_there_are(name: str) -> None:
    alias, known = KNOWN[name]
    literal, text = get_args(alias)
    assert text is str  # so that a variable of a caller's passes its type check
    assert list(get_args(literal)) == known


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__qualname__)
def test_public_functions_take_them(function: Callable[..., Any]) -> None:
    names = KNOWN.keys() & inspect.signature(function).parameters
    assert names
    for name in names:
        alias = next(each for each in vars(choices) if getattr(choices, each) is KNOWN[name][0])
        assert alias in re.findall(r"\w+", inspect.signature(function).parameters[name].annotation)
