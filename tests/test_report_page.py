"""`hadagen report`: the page that it writes, what a browser makes of it, and what it says where there is none."""

from __future__ import annotations

import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote

import pytest
from chromium import colored_pixels, open_page
from command_line import run, sentence, succeed
from report_sample import EVIL, sample_trials
from sample_bundle import change
from sample_store import recorded
from sqlalchemy.engine import make_url

from hadagen.report.drawing.page import MOST_ENVIRONMENTS, report_page
from hadagen.report.drawing.style import ACCENT, COLORS, OUTCOME_COLORS
from hadagen.report.sources import Source, read_bundle, winners_of
from hadagen.trial import Outcome
from hadagen.tuning_db.bundle import Bundle, shipped
from hadagen.tuning_db.store import Store

pytestmark = pytest.mark.usefixtures("machine")

MOST_BYTES = 5_000_000


class Outline(HTMLParser):
    """The texts of a page by tag, and the tags that something foreign would add."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: dict[str, list[str]] = {}
        self.tags: list[str] = []
        self._open = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)
        self._open = tag

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self._open, []).append(data)


def headings(page: str) -> list[str]:
    return [text for text in Outline(page).texts["h2"] if text.strip()]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a database whose every text tries to run a script."""
    folder = tmp_path_factory.mktemp("hostile")
    succeed("report", recorded(folder / "trials.db", *sample_trials(text=EVIL)), "-o", folder / "report.html")
    return folder / "report.html"


@pytest.mark.chromium
def test_a_browser_draws_every_chart_and_runs_nothing_of_a_hostile_database(hostile: Path, tmp_path: Path) -> None:
    opened = open_page(hostile, tmp_path)
    assert "hacked" not in opened.title.replace("document.title='hacked'", "")
    assert opened.title.startswith("hadagen: tuning database of NVIDIA H100 80GB HBM3&lt;/script&gt;")
    # The browser would say here what it refused to run or to fetch, and what failed.
    assert [line for line in opened.said if not re.search("setting log level|document idle", line)] == []
    fast, accurate = (colored_pixels(opened.picture, COLORS[name]) for name in ("float16 fast", "bfloat16 accurate"))
    failed = colored_pixels(opened.picture, OUTCOME_COLORS[Outcome.COMPILE_FAILED])
    curve = colored_pixels(opened.picture, ACCENT)
    for points in (fast, accurate, failed, curve):
        assert len(points) > 50
    # Speed stands above knobs and curves, and these above errors and failures. There are marks in each of three panels.
    assert min(y for _, y in fast) < min(y for _, y in curve) < max(y for _, y in failed)
    assert {x // 400 for x, _ in fast} == {0, 1, 2}
    assert max(x for points in (fast, accurate, failed, curve) for x, _ in points) < 1200


def test_text_of_a_database_is_text_in_the_page(hostile: Path) -> None:
    page = hostile.read_text()
    outline = Outline(page)
    assert "img" not in outline.tags
    assert EVIL in "".join(outline.texts["td"])
    assert page.count(EVIL) == 0
    (policy,) = re.findall('Content-Security-Policy" content="([^"]*)"', page)
    assert "unsafe-inline" not in policy.partition("style-src")[0]
    assert policy.startswith("default-src &#39;none&#39;; script-src &#39;sha256-")


def test_a_page_has_the_sections_that_its_source_has_data_for(database: Path, sample: Path, tmp_path: Path) -> None:
    full = sample_trials()
    failed = tuple(trial for trial in full if trial.outcome is not Outcome.OK)
    everything = ["Speed", "Effects of the knobs", "Search", "Errors", "Failures", "Provenance", "Winners"]
    assert headings(report_page(Source("tuning database", "x", winners_of(tuple(full)), tuple(full)))) == everything
    assert headings(report_page(Source("tuning database", "x", (), failed))) == ["Failures", "Provenance"]
    assert headings(report_page(read_bundle(Bundle.open(sample)))) == ["Speed", "Errors", "Provenance", "Winners"]


def test_the_largest_shipped_bundle_fits_in_a_page_that_fetches_nothing(tmp_path: Path) -> None:
    out = tmp_path / "sm90.html"
    assert succeed("report", "sm90", "-o", out).startswith(f"{out}: ")
    assert out.stat().st_size < MOST_BYTES
    page = out.read_text()
    assert Bundle.open(shipped()["sm90"]).digest in page
    assert "<dd>measured</dd>" in page
    assert {"link", "img", "iframe"}.isdisjoint(Outline(page).tags)


def test_what_has_no_room_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    page = "hadagen.report.drawing"
    monkeypatch.setattr(f"{page}.speed_charts.MOST_TIMES", 9)
    for name in ("MOST_KNOBS", "MOST_CURVES", "MOST_ROWS", "MOST_ENVIRONMENTS"):
        monkeypatch.setattr(f"{page}.page.{name}", 1 if name != "MOST_ENVIRONMENTS" else 0)
    assert MOST_ENVIRONMENTS > 1
    trials = tuple(sample_trials())
    text = report_page(Source("tuning database", "x", winners_of(trials), trials))
    for said in (
        "The lower chart has no room for 15 more times.",
        "The 1 most important of 3 knobs are shown.",
        "Single lines are those of the 1 longest searches; the mean is over all.",
        "The table has 0 of 1 environments.",
        "The table has the first 1 of 12 winners; hadagen bundle show --json has all.",
    ):
        assert said in text


def test_a_page_is_replaced_and_another_file_is_not(database: Path, tmp_path: Path) -> None:
    out = tmp_path / "folder" / "report.html"
    assert succeed("report", database, "-o", out) == succeed("report", f"sqlite:///{database}", "-o", out)
    notes = tmp_path / "notes.html"
    notes.write_text("<!DOCTYPE html>\nmine")
    said = sentence(run("report", database, "-o", notes), 1)
    assert said == f"{notes} is there already and is not a report of hadagen; name another place, or remove it first"
    assert notes.read_text() == "<!DOCTYPE html>\nmine"
    assert "is not a report of hadagen" in sentence(run("report", database, "-o", database), 1)


def test_a_page_of_a_server_names_it_without_its_password(postgres: str, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    with Store.open(postgres) as store:
        store.record(*sample_trials(2))
    assert "8 trials" in succeed("report", postgres, "-o", out)
    password = make_url(postgres).password
    assert password
    page = out.read_text()
    assert "postgresql+psycopg://hadagen:***@" in page
    assert password not in page
    assert quote(password) not in page


def test_what_is_no_source_is_named_in_a_sentence(database: Path, tmp_path: Path) -> None:
    def refused(source: object) -> str:
        out = tmp_path / "out.html"
        said = sentence(run("report", str(source), "-o", out), 1)
        assert not out.exists()
        return said

    missing = f"there is no tuning database or bundle {tmp_path / 'no.db'}; run hadagen tune first, or name a file,"
    assert refused(tmp_path / "no.db").startswith(missing)
    Store.open(tmp_path / "empty.db").close()
    nothing = "has no trials yet; run hadagen tune first, or name another"
    assert refused(tmp_path / "empty.db") == f"{tmp_path / 'empty.db'} {nothing}"
    (tmp_path / "notes.txt").write_text("notes")
    assert "is not a tuning database" in refused(tmp_path / "notes.txt")
    assert "cannot be read (Is a directory)" in refused(tmp_path)
    shutil.copy(database, tmp_path / "newer.db")
    change(tmp_path / "newer.db", "UPDATE hadagen_schema_version SET version_num = '9999'")
    assert "has schema 9999 and this hadagen knows no later one" in refused(tmp_path / "newer.db")
    (tmp_path / "cut.db").write_bytes(shipped()["sm75"].read_bytes()[:20_000])
    assert "is damaged" in refused(tmp_path / "cut.db")
    assert refused(f"sqlite:///{tmp_path / 'no.db'}").startswith("there is no tuning database")
    assert "; run hadagen tune first" in sentence(run("report", "-o", tmp_path / "out.html"), 1)


def test_without_bokeh_the_extra_is_named(database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("hadagen.report.drawing")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "bokeh.document", None)
    monkeypatch.setitem(sys.modules, "bokeh.layouts", None)
    said = sentence(run("report", database, "-o", tmp_path / "out.html"), 1)
    assert said == "the Python package bokeh is not installed; install it with: pip install 'hadagen[report]'"
