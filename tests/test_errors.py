"""Errors cross processes, as where a pool of workers says what failed."""

import importlib.metadata
import inspect
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import hadagen.compiler.emulator
import hadagen.gpu.driver
import hadagen.tuner  # noqa: F401  so that all classes of errors are there
from hadagen.errors import HadagenError, choice, install, printable, shortened, shown
from hadagen.problem.formats import FORMATS


def kinds(base: type[HadagenError] = HadagenError) -> Iterator[type[HadagenError]]:
    yield base
    for kind in base.__subclasses__():
        yield from kinds(kind)


@pytest.mark.parametrize("kind", dict.fromkeys(kinds()))
def test_an_error_survives_a_process_boundary(kind: type[HadagenError]) -> None:
    named = [name for name in inspect.signature(kind.__init__).parameters if name not in ("self", "args", "kwargs")]
    error = kind(*(f"a {name}" for name in named or ["sentence"]))
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert (str(copy), vars(copy)) == (str(error), vars(error))


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("fp8", "'fp8'"),
        (True, "True"),
        (-(2**63), "-9223372036854775808"),
        (10**400, "an integer of 1329 bits"),
        (-(10**5000), "an integer of 16610 bits"),
        ([10**5000], "a list"),
        (Unprintable(), "a Unprintable"),
        ("a\x1b[2J\n", r"'a\x1b[2J\n'"),
        (float("nan"), "nan"),
    ],
    ids=lambda value: value if type(value) is str and value.isprintable() else type(value).__name__,
)
def test_a_value_is_shown_on_one_short_line(value: object, said: str) -> None:
    assert shown(value) == said


@pytest.mark.parametrize(
    "value", ["x" * 10**6, b"\0" * 10**6, list(range(10**5)), {"x" * 10**5: "\n" * 10**5}], ids=type
)
def test_a_long_value_is_cut_off(value: object) -> None:
    said = shown(value)
    assert len(said) <= 81
    assert said.endswith("…")
    assert "\n" not in said


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("MXFP4", "mxfp4"),
        ("int8_row", "int8-row"),
        ("int8_row_4096", "int8-row"),
        ("fp8", "fp8-group, fp8-row, fp8-tensor or fp8-head"),
        ("fp4", "mxfp4 or nvfp4"),
        ("nvfp4 ", "nvfp4"),
        ("fp8-gruop", "fp8-group"),
        ("int8-rwo", "int8-row"),
        ("lagest", "largest"),
        ("x" * 10**5, ""),
        ("", ""),
        (8, ""),
        (None, ""),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_name_that_is_nearly_right_is_answered_with_what_may_be_meant(given: object, meant: str) -> None:
    assert choice(given, FORMATS) == (f"did you mean {meant}?" if meant else f"choose one of {', '.join(FORMATS)}")


@pytest.mark.parametrize(
    ("origin", "said"),
    [
        ('{"archive_info": {}, "url": "file:///x/hadagen-1-py3-none-any.whl"}', "'hadagen[tune] @ file:///x/hadagen-1"),
        ('{"dir_info": {"editable": true}, "url": "file:///x"}', "'.[tune]' in a checkout of hadagen"),
        (None, "'.[tune]' in a checkout of hadagen"),
    ],
)
def test_an_extra_comes_from_where_hadagen_came_from(
    origin: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = SimpleNamespace(read_text={"direct_url.json": origin}.get)
    monkeypatch.setattr(importlib.metadata, "distribution", {"hadagen": found}.get)
    assert install("tune").startswith(f"pip install {said}")


SECRET = "s3c/r@t:x"
# Values with a password, and what is shown in its place.
WITH_PASSWORD = {
    "postgresql://me:{}@host:5432/x": "postgresql://me:***@host:5432/x",
    "tls://me:{}@host:8786": "tls://me:***@host:8786",
    "https://:{}@host": "https://:***@host",
    "postgresql://host/x?sslpassword={}&a=1": "postgresql://host/x?sslpassword=***&a=1",
    "host=here password={} dbname=x": "host=here password=*** dbname=x",
    "host=here PASSWORD = '{} {}' dbname=x": "host=here PASSWORD = *** dbname=x",
    'host=here password="{} {}" dbname=x': "host=here password=*** dbname=x",
}


@pytest.mark.parametrize("text", WITH_PASSWORD)
@pytest.mark.parametrize("behind", ["", "x" * 200])
def test_no_sentence_shows_a_password(text: str, behind: str) -> None:
    given, said = text.replace("{}", SECRET) + behind, WITH_PASSWORD[text] + behind
    for sentence in (str(HadagenError(f"{given} is bad")), printable(f"{given} is bad")):
        assert sentence == f"{said} is bad"
    values = given, given.encode(), [given], Path(given), {"url": given}, {given: 1}, SimpleNamespace(url=given)
    for value in values:
        assert "***" in shown(value)
        for sentence in (shown(value), shown(value, 12), str(HadagenError(f"{value} is bad"))):
            assert "s3c" not in sentence
    assert "s3c" not in shortened(given, 24)


@pytest.mark.parametrize("text", ["me:s3cret@host/x", "//me:s3c ret@host", "postgresql:me:s3cret@host"])
def test_a_value_that_may_be_a_url_shows_no_password(text: str) -> None:
    assert "s3c" not in shown(text)
    assert shown(text).endswith("***@host" + "/x" * text.endswith("x") + "'")


@pytest.mark.parametrize(
    "text",
    [
        "tls://host:8786",
        "postgresql://me@host:5432/x",
        "https://a.org/b@c:d",
        "me@host",
        "a:b",
        "no password: x",
        "C:/a/b:c@d",
    ],
)
def test_values_without_a_password_are_shown_as_they_are(text: str) -> None:
    assert shown(text) == repr(text)
    assert printable(text) == text
