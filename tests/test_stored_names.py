"""Names that stored recipes rest on: of kernels, and of their arithmetic."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import pytest

from hadagen.compiler.codegen import render
from hadagen.plan.arch import load_arch
from hadagen.plan.knobs import Knobs
from hadagen.plan.layout import Place
from hadagen.plan.space import build_plan
from hadagen.plan.steps.base import Step
from hadagen.problem.formats import Element, Format, Layout
from hadagen.problem.problem import DType, Io, Numerics, Problem, Rows, Transform


class Stored(NamedTuple):
    """A shipped kernel: its recipe, the digits of its plan in its name, and the name of its arithmetic."""

    arch: str
    problem: str
    knobs: dict[str, object]
    digits: str
    arithmetic: str


# Together they have every step, and every value of its fields that is shipped.
STORED = [Stored(*json.loads(line)) for line in Path(__file__).with_name("stored_names.jsonl").read_text().splitlines()]


def kinds_of(base: type) -> Iterator[type]:
    for kind in base.__subclasses__():
        yield kind
        yield from kinds_of(kind)


STEPS = [kind for kind in kinds_of(Step) if kind.__module__.startswith("hadagen.")]
OTHERS = [Place, Problem, Transform, Io, Format, DType, Numerics, Rows, Element, Layout]


def test_no_two_steps_have_one_name() -> None:
    named = [kind.name for kind in STEPS if "name" in vars(kind)]
    assert len(set(named)) == len(named)


@contextmanager
def everything_renamed() -> Iterator[None]:
    renamed: list[tuple[object, str, str]] = []
    with pytest.MonkeyPatch.context() as patch:
        for kind in (*STEPS, *OTHERS):
            for name in ("__name__", "__qualname__"):
                renamed.append((kind, name, getattr(kind, name)))
                setattr(kind, name, "Renamed")
            for each in fields(kind) if is_dataclass(kind) else ():
                if not each.name.startswith("new_"):  # as that of a base class was
                    patch.setattr(kind, f"new_{each.name}", property(attrgetter(each.name)), raising=False)
                    patch.setattr(each, "name", f"new_{each.name}")
        try:
            yield
        finally:
            for kind, name, value in renamed:
                setattr(kind, name, value)


def test_stored_names_depend_on_no_name_of_a_class_or_field() -> None:
    plans = [
        build_plan(Problem.parse(problem), Knobs.from_dict({**Knobs().to_dict(), **knobs}), load_arch(arch))
        for arch, problem, knobs, *_ in STORED
    ]
    with everything_renamed():
        found = [(render(plan).entry.rpartition("_")[2], plan.arithmetic) for plan in plans]
    assert found == [(stored.digits, stored.arithmetic) for stored in STORED]
