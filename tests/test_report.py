"""Reports: their numbers, the page, what a browser makes of it, and what is said where there is none."""

import re
import shutil
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from statistics import geometric_mean
from typing import Any
from urllib.parse import quote

import pytest
from chromium import colored_pixels, open_page
from command_line import run, sentence, succeed
from sample_bundle import change
from sample_store import recorded
from sample_trials import H100, PROBLEM, make_timing, make_trial, times
from sqlalchemy.engine import make_url

from hadagen.problem.problem import Problem
from hadagen.problem.regimes import Cache, element_buckets
from hadagen.problem.trial import Environment, Outcome, Provenance, Trial
from hadagen.report import curves, facts
from hadagen.report.against import comparison
from hadagen.report.drawing.charts import ACCENT, COLORS
from hadagen.report.drawing.page import MOST_ENVIRONMENTS, report_page
from hadagen.report.knob_effects import ALL_PROBLEMS, LEAST_TRIALS, effects_of, knob_effects
from hadagen.report.names import kind_name, short_count, short_text, size_name
from hadagen.report.scores import ALL, searches
from hadagen.report.sources import Source, read_bundle, winners_of
from hadagen.report.speed import Mean, speed_over_sizes, speeds
from hadagen.tuning_db.bundle import Bundle, shipped
from hadagen.tuning_db.store import Store

pytestmark = pytest.mark.usefixtures("machine")


# Wherever it becomes part of a page, or of a script, it leaves a trace in the page that is drawn.
EVIL = (
    "</script><script>document.title='hacked'</script><img src=x onerror=\"document.title='hacked'\">$$\\frac{1}{2}$$"
)
KEYS = ("n256-float16-fast", "n1024-float16-fast", "n4096-bfloat16-accurate", "n512-float32-accurate")
SIZES = (1 << 14, 1 << 22, 1 << 26)  # one of each regime
FAILURES = (Outcome.COMPILE_FAILED, Outcome.WRONG_ANSWER, Outcome.TIMEOUT)


def sample_trials(count: int = 24, text: str = "") -> list[Trial]:
    """So many trials of each of `KEYS`, every sixth of which failed. More warps are faster; `grid` changes nothing.

    text: goes wherever a database keeps any text.
    """
    return [_trial(Problem.parse(key), number, text) for key in KEYS for number in range(count)]


def _trial(problem: Problem, number: int, text: str) -> Trial:
    warps = 1 << number % 4
    knobs = {
        "warps": warps,
        "grid": ("tiles", "persistent")[number // 4 % 2],
        "chunks": number // 8 + 1,
        **_named(text),
    }
    environment = replace(H100, gpu=H100.gpu + text, driver=H100.driver + text)
    fields: dict[str, Any] = {"problem": problem, "knobs": knobs, "environment": environment}
    if number % 6 == 5:
        outcome = FAILURES[number // 6 % len(FAILURES)]
        return make_trial(**fields, outcome=outcome, timings=(), kernel=None, errors={}, detail=f"line {number}{text}")
    timings = tuple(
        make_timing(slower * (1 + 1 / warps + number / 1000), size, cache=cache)
        for size in SIZES
        for cache, slower in ((Cache.HOT, 1.0), (Cache.COLD, 1.5))
    )
    trial = make_trial(number, **fields, errors={"normal": problem.error_bound / 2}, timings=timings)
    return replace(trial, date=f"2025-01-02T03:04:{number:02}+00:00{text}")


def _named(text: str) -> dict[str, str]:
    return {text: text} if text else {}


# ---- numbers ---------------------------------------------------------------------------------------------------------
SMALL, LARGE, HUGE = 1 << 14, 1 << 22, 1 << 26  # one of each regime


def trials_of(us: list[float | None], knobs: list[dict[str, int]] | None = None) -> list[Trial]:
    """A trial for each time, hot at `SMALL`; None for one that failed."""
    return [
        make_trial(
            number,
            knobs=knobs[number] if knobs else {"chunks": number},
            outcome=Outcome.OK if each else Outcome.TIMEOUT,
            timings=(make_timing(each, SMALL),) if each else (),
        )
        for number, each in enumerate(us)
    ]


def test_a_score_is_the_best_time_of_the_problem_divided_by_the_trials_own() -> None:
    fast, slow = (make_trial(number, timings=times({SMALL: us, LARGE: 3.0})) for number, us in ((1, 2.0), (2, 8.0)))
    (search,) = searches([slow, fast, make_trial(3, outcome=Outcome.WRONG_ANSWER, timings=times({SMALL: 0.1}))])
    found = [each.scores for each in search.trials]
    # Cold times count where data is too large for L2, hot times where it is not.
    assert found[0] == pytest.approx({ALL: 0.5, "latency": 0.25, "L2": 1.0})
    assert (found[1], found[2]) == (pytest.approx({ALL: 1.0, "latency": 1.0, "L2": 1.0}), {})


def test_searches_on_several_gpus_are_told_apart() -> None:
    one, two = make_trial(), make_trial(environment=replace(H100, gpu="another"))
    assert [search.gpu for search in searches([one, two])] == [H100.gpu, "another"]


def test_the_knob_that_decides_explains_the_variance_and_comes_first() -> None:
    trials = sample_trials()
    effects = effects_of(searches(trials))
    assert effects.trials == sum(trial.outcome is Outcome.OK for trial in trials)
    assert effects.knobs[0].knob == "warps"
    importance = {effect.knob: effect.importance for effect in effects.knobs}
    assert importance["warps"] > 0.95
    assert importance["grid"] < 0.05
    warps = effects.knobs[0].values
    assert [value.value for value in warps] == ["1", "2", "4", "8"]
    assert [value.median for value in warps] == sorted(value.median for value in warps)
    assert warps[-1].best == 1.0
    assert all(v.low <= v.first <= v.median <= v.third <= v.high <= v.best for v in warps)
    assert sum(value.failed for value in warps) == sum(trial.outcome is not Outcome.OK for trial in trials)


def test_effects_are_within_problems() -> None:
    """A problem that is slow on the whole, and was searched with other values, makes no value look bad."""
    one = trials_of([1.0, 1.0, 1.1, 1.1] * 5, [{"warps": 1 + i % 2, "chunks": i} for i in range(20)])
    other = trials_of([1.0, *[9.0] * 19], [{"warps": 1, "chunks": i} for i in range(20)])
    two = [replace(trial, problem=Problem.of(512, "float16")) for trial in other]
    effects = effects_of(searches([*one, *two]))
    assert all(effect.importance < 0.1 for effect in effects.knobs if effect.knob == "warps")


def test_knobs_of_one_value_and_searches_of_few_trials_have_no_effects() -> None:
    few = trials_of([1.0 + i for i in range(LEAST_TRIALS - 1)], [{"grid": 0, "warps": i} for i in range(LEAST_TRIALS)])
    assert knob_effects(searches(few)) == {}
    assert effects_of(searches(few)).fixed == ("grid",)
    found = knob_effects(searches(sample_trials()))
    assert set(found) >= {(ALL_PROBLEMS, ALL), (ALL_PROBLEMS, "memory"), ("float16 fast", ALL)}


def test_a_curve_has_best_possible_over_best_so_far_after_each_trial() -> None:
    (search,) = searches(trials_of([None, 4.0, 8.0, 2.0, None, 3.0]))
    curve = curves.curve_of(search)
    assert (curve.fractions, curve.trials_to_near) == (pytest.approx((0.25, 0.5, 0.5, 1.0, 1.0, 1.0)), 4)
    assert curve.steps() == ([1, 2, 4, 6], [pytest.approx(0.25), pytest.approx(0.5), pytest.approx(1.0), 1.0])


def test_the_mean_of_curves_is_geometric_and_one_that_ended_counts_as_1() -> None:
    (one,) = searches(trials_of([4.0, 1.0]))
    (two,) = searches(trials_of([2.0, 2.0, 2.0, 1.0]))
    found = [curve for search in (one, two) if (curve := curves.curve_of(search))]
    mean = curves.mean_curve(found)
    assert mean == pytest.approx([geometric_mean([0.25, 0.5]), geometric_mean([1, 0.5]), geometric_mean([1, 0.5]), 1])
    assert (curves.median_trials_to_near(found), curves.curves(searches(trials_of([None, None])))) == (3, [])


def test_the_speed_of_a_problem_is_the_mean_of_each_regime() -> None:
    timings = [make_timing(us, size) for us, size in ((1.9, SMALL), (3.8, 1 << 15), (1.0, LARGE))]
    timings += [make_timing(1.9, HUGE, cache=Cache.COLD), make_timing(0.1, SMALL, cache=Cache.COLD)]
    (found,) = speeds(winners_of((make_trial(timings=tuple(timings)),)))
    assert (found.n, found.size, found.series, found.has_matrix) == (256, "256", "float16 accurate", False)
    assert found.means == {
        "latency": Mean(pytest.approx(geometric_mean([1, 0.5])), 2, 1.9, 3.8),
        "L2": Mean(pytest.approx(1.9), 1, 1.0, 1.0),
        "memory": Mean(pytest.approx(1.0), 1, 1.9, 1.9),
    }


def test_a_size_has_the_time_of_the_winner_that_won_there() -> None:
    timings = make_timing(1.0, LARGE), make_timing(9.0, LARGE, cache=Cache.COLD)
    slow_when_hot = make_timing(2.0, LARGE), make_timing(3.0, LARGE, cache=Cache.COLD)
    hot, cold = (winners_of((make_trial(timings=each),))[0] for each in (timings, slow_when_hot))
    lines = {line.cache: line for line in speed_over_sizes([replace(cold, cache=Cache.COLD), hot])}
    assert (lines["hot"].us, lines["hot"].elements) == ([1.0], [LARGE])


def test_speed_over_sizes_says_which_times_name_winners() -> None:
    (hot, cold) = reversed(speed_over_sizes(winners_of((make_trial(timings=times({SMALL: 1.9, HUGE: 3.8})),))))
    assert (hot.cache, hot.elements, hot.regime) == ("hot", [SMALL, HUGE], ["latency", ""])
    assert (cold.cache, cold.fraction, cold.regime) == (
        "cold",
        [pytest.approx(1.0), pytest.approx(0.5)],
        ["", "memory"],
    )
    # Input and output of two bytes each fill half of L2; in place they are the same bytes.
    assert hot.l2_elements == H100.l2_bytes / 2 / 2


def test_estimates_without_a_size_of_l2_have_the_regime_of_the_time_that_decided() -> None:
    trial = make_trial(
        provenance=Provenance.ESTIMATED, environment=Environment(), errors={}, timings=(make_timing(2.0, SMALL),)
    )
    (line,) = speed_over_sizes(winners_of((trial,)))
    assert (line.shown.device, line.regime, line.l2_elements) == ("estimated for sm90", ["latency"], 0)


def test_winners_are_those_of_a_bundle() -> None:
    winners = winners_of(tuple(sample_trials()))
    assert {entry.problem.key for entry in winners} == set(KEYS)
    assert all(entry.knobs["warps"] == 8 and entry.elements in element_buckets(entry.problem) for entry in winners)
    assert {(row.cache, row.elements) for row in facts.winner_rows(winners)} == {
        ("hot", SMALL),
        ("hot", LARGE),
        ("cold", HUGE),
    }


def test_the_head_counts_all_that_is_there() -> None:
    trials = tuple(sample_trials())
    head = facts.head_of(Source("tuning database", "here", winners_of(trials), trials))
    assert (head.archs, head.gpus, head.problems, head.trials) == (("sm90",), (H100.gpu,), 4, 96)
    assert head.outcomes == {"ok": 80, "compile_failed": 8, "wrong_answer": 4, "timeout": 4}
    assert (head.measured, head.estimated) == (96, 0)


def test_errors_are_those_of_the_least_exact_right_kernel() -> None:
    trials = (
        make_trial(1, errors={"normal": 1e-4, "constant": 2e-4}),
        make_trial(2, errors={"normal": 1.5e-4}),
        make_trial(3, errors={"normal": 0.5}, outcome=Outcome.WRONG_ANSWER),
        make_trial(4, problem=Problem.of(512, "float16"), errors={"normal": 0.0}),
    )
    (point,) = facts.error_points(Source("tuning database", "here", winners_of(trials), trials))
    assert (point.n, point.error, point.bound, point.kernels) == (256, 2e-4, PROBLEM.error_bound, 2)


def test_failures_that_differ_in_numbers_count_together() -> None:
    found, others = facts.failures(sample_trials(), most=2)
    assert [(each.outcome, each.trials, each.problems) for each in found] == [
        (FAILURES[0].value, 8, 4),
        (FAILURES[2].value, 4, 4),
    ]
    assert (found[0].detail, found[0].problem, others) == ("line 5", KEYS[0], 4)


@pytest.mark.parametrize(
    ("key", "kind", "size"),
    [
        ("n256-float16-fast", "contiguous rows", "256"),
        ("n256-float16-fast-pitched", "pitched rows", "256"),
        ("n14336-k28-float16-fast", "rows with a matrix", "14336 = 28 · 512"),
        ("n128-float16-to-int8_row_4096-accurate", "contiguous rows, to int8-row", "128 in rows of 4096"),
        ("n128-float16-to-fp8_group_64-accurate", "contiguous rows, to fp8-group groups of 64", "128"),
        ("n64-float16-to-mxfp4_32_rceil_swizzled-accurate", "contiguous rows, to mxfp4 rceil swizzled", "64"),
    ],
)
def test_problems_are_named_by_kind_and_size(key: str, kind: str, size: str) -> None:
    problem = Problem.parse(key)
    assert (kind_name(problem), size_name(problem)) == (kind, size)


def test_texts_are_short_and_on_one_line() -> None:
    assert short_text("a\nb\x1b") == r"a\nb\x1b"
    assert short_text("x" * 100) == "x" * 47 + "…"
    assert [short_count(each) for each in (1 << 13, 3 << 19, 14336 * 5)] == ["8K", "1.5M", "70K"]


# ---- the page --------------------------------------------------------------------------------------------------------
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
    curve = colored_pixels(opened.picture, ACCENT)
    for points in (fast, accurate, curve):
        assert len(points) > 50
    # Speed stands above curves. There are marks in each of three panels.
    assert min(y for _, y in fast) < min(y for _, y in curve)
    assert {x // 400 for x, _ in fast} == {0, 1, 2}
    assert max(x for points in (fast, accurate, curve) for x, _ in points) < 1200


@pytest.fixture(scope="module")
def full_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with every section, long words among them."""
    folder = tmp_path_factory.mktemp("full")
    ours, theirs = (recorded(folder / f"{name}.db", *sample_trials(text="x" * 99)) for name in ("ours", "theirs"))
    succeed("report", ours, "--against", theirs, "-o", folder / "report.html")
    return folder / "report.html"


# Its title says how many pixels stand out on the right, and which elements do.
PROBE = """<script>addEventListener("load", () => setTimeout(() => {
  const out = [...document.body.querySelectorAll("*")].filter(
    (each) => !each.closest(".wide, script, svg") && each.getBoundingClientRect().right > innerWidth + 1);
  document.title = `${document.documentElement.scrollWidth - innerWidth} ${out.map((each) => each.tagName)}`;
}, 5000));</script>"""


@pytest.mark.chromium
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 768, 1280])
def test_a_page_fits_its_window(full_page: Path, tmp_path: Path, width: int, dark: bool) -> None:
    page = tmp_path / "page.html"
    page.write_text(re.sub("<meta http-equiv[^>]*>", "", full_page.read_text()) + PROBE)
    opened = open_page(page, tmp_path, width=width, height=900, dark=dark)
    assert opened.title == "0 "
    background = "#0d1117" if dark else "#ffffff"
    assert len(colored_pixels(opened.picture, background)) > 0.5 * width * 900


@pytest.mark.chromium
def test_a_page_shows_the_nearest_n(full_page: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    written = full_page.read_text()
    assert written.count('value="4096"') == 1
    page.write_text(written.replace('value="4096"', 'value="1500"'))
    dom = open_page(page, tmp_path).dom
    shown = re.findall(r'<tr data-device="[^"]*"[^>]*data-n="([0-9]+)"([^>]*)>', dom)
    assert {n for n, more in shown if "hidden" not in more} == {"1024"}
    assert len(shown) == len(KEYS)
    assert "n = 1500 is not in this file. The speed of the nearest n, 1024:" in dom
    assert "12 of 12 winners" in dom


def test_text_of_a_database_is_text_in_the_page(hostile: Path) -> None:
    page = hostile.read_text()
    outline = Outline(page)
    assert "img" not in outline.tags
    assert EVIL in "".join(outline.texts["td"])
    assert page.count(EVIL) == 0
    (policy,) = re.findall('Content-Security-Policy" content="([^"]*)"', page)
    assert "unsafe" not in policy.partition("style-src")[0]
    assert policy.startswith("default-src &#39;none&#39;; script-src &#39;sha256-")


def test_a_page_has_the_sections_that_its_source_has_data_for(database: Path, sample: Path, tmp_path: Path) -> None:
    full = sample_trials()
    failed = tuple(trial for trial in full if trial.outcome is not Outcome.OK)
    speed = ["Your n", "Speed over n", "Speed over sizes"]
    everything = [*speed, "Effects of the knobs", "Search", "Errors", "Failures", "Provenance", "Winners"]
    assert headings(report_page(Source("tuning database", "x", winners_of(tuple(full)), tuple(full)))) == everything
    assert headings(report_page(Source("tuning database", "x", (), failed))) == ["Failures", "Provenance"]
    assert headings(report_page(read_bundle(Bundle.open(sample)))) == [*speed, "Errors", "Provenance", "Winners"]


def test_the_largest_shipped_bundle_fits_in_a_page_that_fetches_nothing(tmp_path: Path) -> None:
    out = tmp_path / "sm90.html"
    assert succeed("report", "sm90", "-o", out).startswith(f"{out}: ")
    assert out.stat().st_size < MOST_BYTES
    page = out.read_text()
    assert Bundle.open(shipped()["sm90"]).digest in page
    assert f"<td>{len(list(Bundle.open(shipped()['sm90']).all_entries())):,} measured</td>" in page
    assert {"link", "img", "iframe"}.isdisjoint(Outline(page).tags)


def test_what_has_no_room_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MOST_ENVIRONMENTS > 1
    known = {"TIMES": 9, "KNOBS": 1, "CURVES": 1, "WINNERS": 1, "ENVIRONMENTS": 0}
    for name, most in known.items():
        monkeypatch.setattr(f"hadagen.report.drawing.page.MOST_{name}", most)
    trials = tuple(sample_trials())
    text = report_page(Source("tuning database", "x", winners_of(trials), trials))
    for said in (
        "The charts have no room for 15 more times.",
        "The 1 most important of 3 knobs are shown.",
        "Single lines are those of the 1 longest searches; the mean is over all.",
        "The table has 0 of 1 environments.",
        "The page has the first 1 of 12 winners; hadagen bundle show --json has all.",
    ):
        assert said in text


def estimated(trials: list[Trial]) -> tuple[Trial, ...]:
    return tuple(replace(trial, provenance=Provenance.ESTIMATED, environment=Environment()) for trial in trials)


def test_estimates_are_never_called_timed() -> None:
    page = report_page(Source("tuning database", "x", winners_of(trials := estimated(sample_trials(8))), trials))
    own = page[page.index("<h1>") : page.index('id="data"')]
    assert "timed" not in own
    assert "measured" not in own
    assert "kernels for contiguous rows are estimated to run at" in own
    assert "From 28 estimated trials." in own
    measured = report_page(Source("tuning database", "x", winners_of(both := tuple(sample_trials(8))), both))
    assert "From 28 timed trials." in measured
    assert "kernels for contiguous rows run at" in measured


# ---- two sources -----------------------------------------------------------------------------------------------------
def source_of(name: str, times_of: dict[str, tuple[float, float]]) -> Source:
    """Problem → microseconds at `SMALL` and at `LARGE`."""
    trials = tuple(
        make_trial(number, problem=Problem.parse(key), timings=(make_timing(small, SMALL), make_timing(large, LARGE)))
        for number, (key, (small, large)) in enumerate(times_of.items())
    )
    return Source("tuning database", f"folder/{name}", winners_of(trials), trials)


def test_two_sources_are_compared_problem_by_problem() -> None:
    ours = source_of(
        "a.db", {KEYS[0]: (1.0, 1.0), KEYS[1]: (2.0, 2.0), KEYS[2]: (1.0, 1.0), "n32-float16-fast": (1, 1)}
    )
    theirs = source_of(
        "b.db", {KEYS[0]: (1.0, 4.0), KEYS[1]: (1.0, 1.0), KEYS[2]: (1.01, 1.0), "n64-float16-fast": (1, 1)}
    )
    found = comparison(ours, theirs)
    assert [(each.problem, each.verdict, each.cells) for each in found.problems] == [
        (KEYS[1], "slower", 2),
        (KEYS[2], "alike", 2),
        (KEYS[0], "faster", 2),
        ("n32-float16-fast", "only in the first", 0),
        ("n64-float16-fast", "only in the second", 0),
    ]
    slower, _, faster, *_ = found.problems
    assert (slower.factor, slower.least, slower.largest) == (pytest.approx(0.5), 0.5, 0.5)
    assert (faster.factor, faster.least, faster.largest) == (pytest.approx(2.0), 1.0, 4.0)
    mean = geometric_mean([1, 4, 0.5, 0.5, 1.01, 1])
    assert found.summary == (
        f"a.db is {mean:.3f} times as fast as b.db, in the geometric mean of 6 cells; problems: 1 faster, 1 slower, "
        "1 within 2%, 1 only in the first, 1 only in the second."
    )


def test_a_page_begins_with_the_comparison(tmp_path: Path) -> None:
    trials = sample_trials(8)
    slow = [replace(t, timings=tuple(replace(each, us=2 * each.us) for each in t.timings)) for t in trials]
    ours, theirs = recorded(tmp_path / "a.db", *trials), recorded(tmp_path / "b.db", *slow)
    said = succeed("report", ours, "--against", theirs, "-o", tmp_path / "report.html").splitlines()
    assert said[0].startswith(
        "a.db is 2.000 times as fast as b.db, in the geometric mean of 12 cells; problems: 4 faster, "
    )
    page = (tmp_path / "report.html").read_text()
    assert f"<h1>{said[0]}</h1>" in page
    assert headings(page)[0] == "Comparison"
    assert page.count("<td>faster</td>") == 4


def test_what_cannot_be_compared_is_a_sentence(database: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    said = sentence(run("report", "sm100", "--against", "sm80", "-o", str(out)), 2)
    assert "has estimated for sm100, and " in said
    assert said.endswith("has estimated for sm80; compare winners of the same problems on the same GPU")
    missing = sentence(run("report", str(database), "--against", str(tmp_path / "no.db"), "-o", str(out)), 1)
    assert missing.startswith("there is no tuning database or bundle")
    assert not out.exists()


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
    monkeypatch.setitem(sys.modules, "bokeh.embed", None)
    monkeypatch.setitem(sys.modules, "bokeh.models", None)
    said = sentence(run("report", database, "-o", tmp_path / "out.html"), 1)
    how = "install it with: pip install '.[report]' in a checkout of hadagen"
    assert said == f"the Python package bokeh is not installed; {how}"
