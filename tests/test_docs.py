"""The documents: their numbers and figures are those of the committed data, and what they name is there."""

import csv
import gzip
import json
import math
import re
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import bundle_damage
import click
import compare_search
import compare_tunes
import pytest
import refresh
import refresh_files as files
import refresh_models
import refresh_reliability
import refresh_speed_tables
import refresh_times
import sanitize
import torch
from refresh_compared import compared_table
from refresh_fleet import fleet_numbers
from refresh_formats import accurate_codes_table
from refresh_other_tables import invariant_table, knobs_table
from refresh_pictures import draw_layer, fingerprint
from refresh_prologues import layer_table, layer_times, mlp_table
from refresh_reliability import PROMISES, promises_table
from refresh_rotations import parts_table, products_table, rotations_table
from refresh_speed_tables import REGIMES, numbers
from refresh_times import read_rows, read_times
from sample_bundle import write_trials
from sample_trials import H100, H200, make_timing, make_trial

from hadagen.cli.main import main
from hadagen.cli.tune import ESTIMATE_SECONDS
from hadagen.cli.wanted import FEW, KINDS
from hadagen.integrations.host import SGLANG, SWITCH, VLLM
from hadagen.measure import Cell, Variant
from hadagen.measure.watch import SILENCE_S
from hadagen.problem.matrices import auto_orders
from hadagen.problem.problem import Problem
from hadagen.problem.regimes import Destination, timed_elements
from hadagen.problem.trial import Trial
from hadagen.runtime.choose import bundles
from hadagen.tuning_db.bundle import Bundle

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A README and measured tables in which hadagen, fast, is everywhere twice as fast as its peers."""
    for name, path in list(vars(files).items()):
        if isinstance(path, Path) and path != files.DOCS:
            monkeypatch.setattr(files, name, tmp_path / path.name)
    for page, parts in PARTS.items():
        text = "\n".join("\n".join((begin, files.NO_DATA, end)) for begin, end in map(refresh.markers, parts))
        (tmp_path / page).write_text(f"before\n{text}\nafter\n")
    for page, known in (  # which is no measured data
        (files.RELIABILITY, {area: promises_table(area) for area in PROMISES}),
        (files.SEARCHING, {"knobs": knobs_table()}),
    ):
        page.write_text(refresh.refreshed(page, known))
    write_table(tmp_path / OURS, ours())
    for module in (refresh_times, refresh_speed_tables):
        monkeypatch.setattr(module, "our_rows", lambda: read_rows(tmp_path / OURS))
    bench = [{"library": "hadagen", **row, "error": 2e-4} for row in ours() if "pitched" not in str(row["problem"])]
    for name, error in {"HadaCore": 4.3e-4, "fast_hadamard_transform": 2.1e-4}.items():
        bench += [{"library": name, **row, "error": error} for row in slow()]
    write_table(files.BENCH, bench)
    return tmp_path


@pytest.fixture
def drawn(documents: Path) -> Path:
    """The same, with all that is made of them."""
    pytest.importorskip("matplotlib", reason="drawing needs the docs extra")
    refresh.main([])
    assert refresh.outdated() == []
    return documents


OURS = "ours.csv"  # in place of what the shipped bundle has
PARTS = {
    "README.md": ("speed",),
    "api.md": ("api",),
    "formats.md": ("attention", "cache", "models"),
    "checkpoint.md": ("checkpoint", "weights"),
    "prologues.md": ("prologues", "layer"),
    "fusing.md": ("mlp",),
    "serve.md": ("decoder", "types"),
    "performance.md": (
        "calls",
        "libraries",
        "h200",
        "products",
        "rotations-h100",
        "formats",
        "codes",
        "passes",
        "torchao",
        "lost",
        "invariant",
        "pitched",
    ),
    "measurements.md": ("rotations", "parts", "quantized_parts", "signs", "resources", "between"),
    "compared.md": ("compared",),
    "experiments.md": ("choices", "pruned"),
    "comparing-searches.md": ("search",),
    "searching.md": ("knobs",),
    "fleets.md": ("fleet",),
    "reliability.md": tuple(PROMISES),
}


def ours() -> list[dict[str, object]]:
    speeds = {"fast": 1.0, "accurate": 0.5, "fast-pitched": 0.1}
    return [
        {"copy_us": 1.0, "us": 1 / speed, **place, "kernel": "0a1b"}
        for kind, speed in speeds.items()
        for place in places(kind)
    ]


def slow() -> list[dict[str, object]]:
    return [{"copy_us": 1.0, "us": 2.0, **place} for place in places("accurate")]


def places(kind: str) -> list[dict[str, object]]:
    problems = (f"n{n}-float16-{kind}" for n in (128, 32768))
    regimes = [{"elements": elements, "cache": cache} for _, elements, cache in REGIMES]
    return [{"problem": problem, "destination": "in-place", **regime} for problem, regime in product(problems, regimes)]


def write_table(path: Path, rows: list[dict[str, object]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def test_accurate_codes_stand_beside_fast_ones(documents: Path) -> None:
    key = "n256-bfloat16-to-int8_row_4096-{}".format
    place = {"elements": 1 << 20, "cache": "hot", "destination": "out-of-place", "copy_us": 1.0}
    assert accurate_codes_table() == files.NO_DATA
    write_table(
        files.ACCURATE_CODES,
        [{"problem": key(kind), "us": us, **place} for kind, us in {"accurate": 3.0, "fast": 2.0}.items()],
    )
    counts = {"accurate": 5, "fast": 9000}
    write_table(files.CODES, [{"problem": key(kind), "codes": 500000, "differing": of} for kind, of in counts.items()])
    cells = [cell.strip() for cell in accurate_codes_table().splitlines()[-1].split("|")[1:-1]]
    assert cells == ["int8-row, 4096; n = 256", "–", "1.50", "–", "–", "10", "18,000"]


def test_rotations_stand_beside_the_next_power_of_two(documents: Path) -> None:
    def trial(key: str, us: float) -> Trial:
        problem = Problem.parse(key)
        timing = make_timing(us, timed_elements(problem, 1 << 22))
        return make_trial(problem=problem, environment=H200, timings=(timing,))

    speeds = {"n3584-k28-float16-fast": 3.8, "n4096-float16-fast": 2.85, "n11008-k172-float16-accurate": 7.6}
    write_trials(files.OURS, [trial(key, us) for key, us in speeds.items()])
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in rotations_table().splitlines() if line]
    assert [row[0] for row in rows if "·" in row[0] and row[0][0].isdigit()] == [
        "3584 = 28 · 128",
        "11008 = 172 · 64",
    ] * 2
    assert rows[2] == ["3584 = 28 · 128", "– (–)", "0.50 (0.75)", "– (–)", "– (–)"]
    assert rows[-1] == ["11008 = 172 · 64", "– (–)", "0.25 (–)", "– (–)", "– (–)"]


def test_the_readme_and_the_picture_are_up_to_date() -> None:
    assert refresh.outdated() == [], "run: make docs"


def test_refresh_writes_numbers_and_picture_once(documents: Path) -> None:
    pytest.importorskip("matplotlib", reason="drawing needs the docs extra")
    assert refresh.outdated() == ["README.md", "performance.md", "compared.md", "api.md", "speed.svg"]
    with pytest.raises(SystemExit, match=r"README.md, performance.md, compared.md, api.md, speed.svg: out of date"):
        refresh.main(["--check"])
    refresh.main([])
    assert refresh.outdated() == []
    refresh.main(["--check"])
    readme = (documents / "README.md").read_text()
    performance = (documents / "performance.md").read_text()
    begin, end = refresh.markers("speed")
    assert readme.startswith(f"before\n{begin}\n![")
    said = "1.00 times as fast as HadaCore (6 cells) and 1.00 times as fast as fast-hadamard-transform (6 cells)"
    assert f"- **The transform** is {said} on an H100, from n = 128 on." in text_of(readme)
    assert f"\n{end}\n" in readme
    assert readme.endswith("\nafter\n")
    worst = "float16, n = 128, 64 K elements, in-place, hot"
    assert f"| `accurate` / HadaCore | 1.00 | 1.00 | 1.00 | 0 of 6 cells | 1.00: {worst} |" in performance
    assert f"| `fast` / fast-hadamard-transform | 2.00 | 2.00 | 2.00 | 0 of 6 cells | 2.00: {worst} |" in performance
    assert "| float16: hadagen, fast | – | 2.00 | – | – | – | – | – | 2.00 |" in performance
    assert "| float16: HadaCore | – | 4.30 | – | – | – | – | – | 4.30 |" in performance
    # Of 2 bytes, read and written in 1 µs.
    rates = "262 GB/s at 64 K elements, in L2; 33554 GB/s at 8 M elements, in L2; 1073742 GB/s at 256 M elements"
    assert f"1.00 is a copy that reads and writes {rates}, in memory. " in text_of(performance)
    assert max(map(len, re.findall("^[^|!].*", readme, re.MULTILINE))) <= 120
    assert "| 64 K elements, in L2: fast | – | 0.10 | – | – | – | – | – | 0.10 |" in performance
    assert "| 64 K elements, in L2: hadagen, fast | – | 1.00 | – | – | – | – | – | 1.00 |" in performance
    compared = (documents / "compared.md").read_text()
    assert "| HadaCore | the transform, `accurate` | H100 | 1.00 | 1.00 | 1.00 | 6 |" in compared
    picture = (documents / "speed.svg").read_bytes()
    ElementTree.fromstring(picture)
    refresh.main([])
    assert (documents / "speed.svg").read_bytes() == picture


def test_one_odd_time_of_a_copy_changes_nothing(documents: Path) -> None:
    times, table = read_times(), (documents / OURS).read_text()
    (documents / OURS).write_text(table.replace("\n1.0,", "\n1.4,", 1))
    assert (documents / OURS).read_text() != table
    assert read_times() == times


def test_times_of_the_bench_are_those_of_rows_that_are_not_pitched(drawn: Path) -> None:
    (drawn / OURS).write_text(
        (drawn / OURS).read_text().replace("1.0,1.0,n128-float16-fast,", "9.0,1.0,n128-float16-fast,")
    )
    assert refresh.outdated() == []
    files.BENCH.write_text(files.BENCH.read_text().replace("0.00043", "0.00044", 1))
    assert refresh.outdated() == ["performance.md", "speed.svg"]


def test_the_worst_cell_is_named(documents: Path) -> None:
    rows = files.BENCH.read_text().splitlines()
    slow = next(
        i
        for i, row in enumerate(rows)
        if row.startswith("hadagen,") and "n32768-float16-fast,in-place,268435456" in row
    )
    values = rows[slow].split(",")
    values[rows[0].split(",").index("us")] = "3.0"
    files.BENCH.write_text("\n".join([*rows[:slow], ",".join(values), *rows[slow + 1 :]]) + "\n")
    (line,) = (row for row in numbers(read_times()).splitlines() if row.startswith("| `fast` / HadaCore"))
    worst = "float16, n = 32768, 262144 K elements, in-place, cold"
    # That cell is neither hot nor as small as a layer's.
    mean = 2 ** (5 / 6) * (2 / 3) ** (1 / 6)
    assert line == f"| `fast` / HadaCore | {mean:.2f} | 2.00 | {mean:.2f} | 1 of 6 cells | 0.67: {worst} |"


def test_row_lengths_whose_kernels_were_named_after_the_run_are_named(documents: Path) -> None:
    since = "the bundle names other kernels by now"
    assert since not in numbers(read_times())
    table = (documents / OURS).read_text()
    (documents / OURS).write_text(re.sub("(n32768-float16-fast,.*),0a1b", r"\1,2c3d", table))
    assert f"n = 32768 {since}" in text_of(numbers(read_times()))
    (documents / OURS).write_text(re.sub("(fast-pitched,.*),0a1b", r"\1,2c3d", table))  # pitched, which the run has not
    assert since not in numbers(read_times())
    (documents / OURS).write_text(table.replace(",0a1b", ",2c3d"))
    assert since in numbers(read_times())
    files.ASSEMBLED.write_text("kernel,assembled\n0a1b,2c3d\n")  # the same kernels, assembled anew
    assert since not in numbers(read_times())


def test_cells_that_the_run_lacks_are_of_an_earlier_one(documents: Path) -> None:
    head, *rows = [row.split(",") for row in files.BENCH.read_text().splitlines()]
    us, elements, problem = map(head.index, ("us", "elements", "problem"))
    earlier = [[*row[:us], "0.125", *row[us + 1 :]] for row in rows]

    def written(path: Path, rows: list[list[str]]) -> None:
        path.write_text("\n".join(map(",".join, [head, *rows])) + "\n")

    one = read_times()
    assert "by the same method, and all cells are of one run. " in text_of(numbers(one))
    written(files.EARLIER, earlier)
    assert read_times() == one  # it has no cell that the run lacks
    written(files.BENCH, [row for row in rows if row[elements] not in ("65536", "8388608")])
    written(
        files.EARLIER,
        [*earlier, *([cell.replace("float16-accurate", "float32-accurate") for cell in row] for row in earlier)],
    )
    times = read_times()
    assert {(cell.dtype, cell.elements) for cell, time in times["hadagen, accurate"].items() if time.us == 0.125} == {
        ("float16", 65536),
        ("float16", 8388608),
        *(("float32", size) for size in (65536, 8388608, 268435456)),
    }
    since = "; cells of 64 K elements and of 8 M elements and of float32 are of an earlier run than the others. "
    assert since in text_of(numbers(times))
    written(files.BENCH, [row for row in rows if not row[problem].startswith("n128-")])
    written(files.EARLIER, earlier)
    since = "; cells of float16 at n = 128 are of an earlier run than the others. "
    assert since in text_of(numbers(read_times()))
    written(files.BENCH, [row for row in rows if (row[problem][:5], row[elements]) != ("n128-", "65536")])
    with pytest.raises(SystemExit, match=r"cells of a type, a size and an n that bench_h100\.csv has too"):
        numbers(read_times())


def text_of(markdown: str) -> str:
    return " ".join(markdown.split())


def test_what_rotation_does_to_a_model(documents: Path) -> None:
    def row(name: str, rotation: str, seed: int, *perplexity: float) -> dict[str, Any]:
        figures = {"loss": [math.log(each) for each in perplexity], "same_top": [0.5, 0.6], "error": 0.1 + seed / 10}
        return {"format": name, "rotation": rotation, "seed": seed, **figures}

    ways = {"none": (40.0, 40.0), "heads": (30.0, 30.0), "rows": (50.0, 50.0), "blocks": (36.0, 40.0)}
    rows = [row("none", "none", 0, 20.04, 20.04)]
    rows += [row("W8, X", way, seed, *each) for way, each in ways.items() if way != "heads" for seed in (0, 1)]
    rows += [row("W8A4", way, 0, 4865.8, 4865.8) for way in ("none", "rows")]
    rows += [
        row("INT4", way, seed, *(each + 2 * seed for each in ways[way])) for way in ("none", "heads") for seed in (0, 1)
    ]
    versions = {"hadagen": "1", "torch": "2", "python": "3", "device": "a GPU"}
    found = {"window": 9, "windows": 2, "versions": versions, "rows": rows}
    layer = {"layer": "ffn", "inputs": {"none": [1.0, 300.0], "rows": [9.0, 8.0]}, "rms": {"none": 3.0, "rows": 3.0}}
    for path in (files.ATTENTION, files.CACHE):
        path.write_text(json.dumps(found))
    files.QUAROT.write_text(json.dumps(found | layer))
    converted = [row("", "", 0, 20.0, 20.0) | {"model": name, "bytes": 5e6} for name in ("a", "b")]
    files.CHECKPOINT.write_text(json.dumps(found | {"rows": converted}))
    of_weights = [row("", "", 0, 20.0, 20.0) | {"weights": "none", "bytes": 9e6}]
    of_weights += [
        row("", "quarot", seed, 20.0 + 2 * seed, 20.0)
        | {"weights": "int4", "is_calibrated": is_calibrated, "bytes": 5e6}
        for is_calibrated in (False, True)
        for seed in ((0, 1) if is_calibrated else (0,))
    ]
    files.WEIGHTS.write_text(json.dumps(found | {"rows": of_weights}))
    attention, models = refresh_models.attention_table(), refresh_models.models_table()
    assert "| none | 20.0 ± 0.0 | – |  |  |" in attention
    assert "| INT4 | 41.0 ± 1.0 | 31.0 ± 1.0 | 0.15 | 0.15 |" in attention
    assert refresh_models.cache_table() == attention.replace("q and k in", "k and v in")
    assert "| W8A4 | 4866 ± 0 | 4866 ± 0 | – | 55% | 55% | – |" in models
    changes = (
        "W8, X: the perplexity changes by +25.0 ± 0.0% if whole rows are rotated, and by −5.1 ± 5.0% if blocks are."
    )
    assert changes in text_of(models)
    assert "2 windows of 9 tokens, 2 seeds; hadagen 1, PyTorch 2, Python 3, a GPU." in models
    assert "| `b` | 20.00 | +0.0 ± 0.0% | 5 |" in refresh_models.checkpoint_table()
    changed = "| quarot | int4 | 20.0 | +0.0 ± 0.0% | 20.5 ± 0.5 | +2.4 ± 2.4% | 5 |"
    assert changed in refresh_models.weights_table()
    pytest.importorskip("matplotlib", reason="drawing needs the docs extra")
    refresh.main([])
    assert models in (documents / "formats.md").read_text()
    picture = "".join(ElementTree.fromstring(files.ACTIVATIONS_PICTURE.read_bytes()).itertext())
    for said in (
        "as they are: at most 100",
        "rotated: at most 3",
        "largest magnitude / RMS",
        "channel of the inputs of ffn",
    ):
        assert said in picture
    assert refresh.outdated() == []
    files.QUAROT.write_text(json.dumps(found | layer | {"layer": "other"}))
    assert refresh.outdated() == ["activations.svg"]


def test_what_one_kernel_saves(documents: Path) -> None:
    """Rows that were not measured are left out."""
    us = {"fp8, rotated": 60.0, "fp8, fused": 50.0, "mxfp4, fused": 8.0}
    rows = [
        {"model": "Llama-3-8B", "tokens": tokens, "layer": layer, "us": tokens * time, "pieces": {part: {}}}
        for tokens in (16, 4096)
        for layer, time in us.items()
        for part in ("codes" if "mxfp4" in layer else "product",)
    ]
    data = {"versions": {"device": "a GPU", "torch": "2"}, "rows": rows}
    files.LAYER.write_text(json.dumps(data))
    table = layer_table()
    assert "| Llama-3-8B | FP8, rotated and fused | – | 800.0 | – | – | – | 204800.0 |" in table
    assert "| FP8 | 1.20 (1.20 to 1.20) | 1.20 (1.20 to 1.20) |\n| MXFP4 codes | – | – |" in table
    assert "torch.compile" not in table
    assert "layer.svg" in refresh.outdated()
    chain = {"model": "Llama-3-8B", "to": "nvfp4", "block": 16}
    times = {("compiled", 16): 4.0, ("compiled", 64): 9.0, ("fused", 16): 1.0, ("fused", 64): 1.0}
    chains = [chain | {"way": way, "tokens": tokens, "us": time} for (way, tokens), time in times.items()]
    files.LAYER.write_text(json.dumps(data | {"chains": chains}))
    table = layer_table()
    assert "| nvfp4 | 16 | torch.compile | 4.0 | 9.0 |\n| nvfp4 | 16 | one kernel | 1.0 | 1.0 |" in table
    assert "| nvfp4 | 16 | 6.00 (4.00 to 9.00) | – | – | – |" in table
    files.LAYER.write_text(json.dumps(data))
    pytest.importorskip("matplotlib", reason="drawing needs the docs extra")
    draw_layer(layer_times(data), files.LAYER_PICTURE, fingerprint(files.LAYER))
    picture = "".join(ElementTree.fromstring(files.LAYER_PICTURE.read_bytes()).itertext())
    assert "FP8, rotated and fused" in picture
    assert "MXFP4" not in picture
    assert "layer.svg" not in refresh.outdated()


def test_what_fusing_saves(documents: Path) -> None:
    rows = [
        {"tokens": tokens, "fused": fused, "us": us}
        for tokens, both in ((16, (9.0, 6.0)), (64, (8.0, 8.0)))
        for fused, us in zip((False, True), both, strict=True)
    ]
    files.MLP.write_text(json.dumps({"versions": {"device": "a GPU", "torch": "2"}, "rows": rows}))
    assert (
        "| without, µs | 9.0 | 8.0 |\n| with fuse(), µs | 6.0 | 8.0 |\n| without / with | 1.50 | 1.00 |" in mlp_table()
    )


def test_what_limits_rotations(documents: Path) -> None:
    where = {"problem": "n3584-k28-float16-fast", "elements": 1 << 26, "destination": "in-place", "cache": "cold"}
    us = {"whole": 20.0, "without A": 16.0, "without H": 12.5, "without both": 10.0}
    parts = [
        {**where, "elements": elements, "kernel": part, "us": each, "copy_us": 10.0}
        for elements in (1 << 22, 1 << 24, 1 << 26)
        for part, each in us.items()
    ]
    write_table(files.PARTS, [*parts, *({**row, "problem": "n3584-k28-float16-accurate"} for row in parts)])
    accurate = {**where, "problem": "n3584-k28-float16-accurate"}
    peers = {"hadagen": 10.0, "PyTorch": 25.0, "PyTorch, one product": 80.0}
    write_table(files.ROTATIONS, [{"library": name, **accurate, "us": each} for name, each in peers.items()])
    assert "| 3584 = 28 · 128 | 0.50 / 0.62 / 0.80 / 1.00 |" in parts_table()
    assert "| 3584 = 28 · 128 | – | 2.50 | – | 8.00 |" in products_table()
    assert "`accurate` is 2.5 times as fast as two products, and 8.0 times as one" in products_table()
    beside = "| PyTorch, two products | a rotation with a matrix, `accurate` | H200 | 2.50 | 2.50 | 2.50 | 1 |"
    assert beside in compared_table(None)


def test_what_lies_between(drawn: Path) -> None:
    head = {"gpu": "NVIDIA H100", "destination": "in-place", "variants": 9}
    losses = {(64, 3): 0.0, (64, 5): 0.21, (128, 7): 0.0, (128, 9): 0.0}
    write_table(
        files.BETWEEN,
        [{**head, "problem": f"n{n}-float16-fast", "rows": rows, "loss": loss} for (n, rows), loss in losses.items()],
    )
    assert refresh.outdated() == ["performance.md", "measurements.md"]
    refresh.main([])
    words = text_of((drawn / "performance.md").read_text())
    assert "On an NVIDIA H100, over 2 problems with 2 row counts each, a call loses 4.9% (geometric mean)" in words
    assert "known, and 21.0% where it loses most." in words
    text = (drawn / "measurements.md").read_text()
    assert "| 64 | float16 | fast | 9 | 10.0% | 21.0% | 5, in-place |\n| 128 | float16 | fast | 9 | 0.0% |" in text
    rows = [{**head, "gpu": "NVIDIA H200", "problem": "n64-float16-fast", "rows": 3, "loss": 0.03}]
    write_table(files.BETWEEN_H200, rows)
    assert refresh.outdated() == ["performance.md"]
    refresh.main([])
    words = text_of((drawn / "performance.md").read_text())
    assert "On an NVIDIA H200, over 1 problems with 1 row counts each, a call loses 3.0% (geometric mean)" in words


def test_what_the_ideas_are_worth(drawn: Path) -> None:
    """The best kernel with an idea against the best without, size by size; of recordings that know its knob."""
    files.RECORDINGS.mkdir()
    cells = [[1 << 16, "in-place", "hot"], [1 << 20, "in-place", "hot"]]
    trials = [("plain", [4.0, 8.0]), ("plain", [5.0, 6.0]), ("cp_async", [2.0, 9.0]), ("cp_async", [3.0, 8.0])]
    failed = {"knobs": [1, "cp_async"], "us": []}
    for n, knob in ((4096, "load"), (128, "load"), (64, "another")):
        head = {"problem": f"n{n}-float16-fast", "ranges": {"warps": [1], knob: []}, "cells": cells[: 2 - (n == 128)]}
        lines = [{"knobs": [1, load], "us": [[us] * 4 for us in times[: len(head["cells"])]]} for load, times in trials]
        with gzip.open(files.RECORDINGS / f"n{n}.jsonl.gz", "wt") as file:
            file.write("\n".join(json.dumps(line) for line in (head, *lines, failed)))
    assert refresh.outdated() == ["experiments.md"]
    refresh.main([])
    assert refresh.outdated() == []
    first = "| `load`: plain → cp_async | 128, float16, fast | 2.00 | – |"
    table = (
        f"| idea | n | 64 K | 1 M |\n| --- | --- | ---: | ---: |\n{first}\n|  | 4096, float16, fast | 2.00 | 0.75 |\n"
    )
    begin, end = refresh.markers("choices")
    assert f"{begin}\n{table}{end}" in (drawn / "experiments.md").read_text()


def test_what_the_same_bits_cost(documents: Path) -> None:
    rows = [
        ("n2-float16-fast", 3, 1.0, 1.0),
        ("n128-float16-fast", 1, 1.21, 1.5),
        ("n256-float32-accurate", 2, 2.0, 4.0),
    ]
    columns = ("problem", "cells", "mean", "worst")
    write_table(files.INVARIANT, [dict(zip(columns, row, strict=True)) for row in rows])
    head, _, first, second, *_ = invariant_table().splitlines()
    assert head == "| n | float16, fast | float32, accurate |"
    assert first == "| 2 to 128 | 4.9% (50%) | – |"  # the mean of four cells
    assert second == "| 256 to 1024 | – | 100.0% (300%) |"


def test_the_cost_of_calls(drawn: Path) -> None:
    data = {"gpu": "NVIDIA H100", "python": "3.12.1", "torch": "2.11.0", "tensor": "[64, 128] float16"}
    files.CALLS.write_text(json.dumps({**data, "us": {"in place": 4.56, "out of place": 7}, "ms": {"first": 31.4}}))
    assert refresh.outdated() == ["performance.md"]
    refresh.main([])
    assert refresh.outdated() == []
    text = (drawn / "performance.md").read_text()
    head = "On an NVIDIA H100, with Python 3.12.1 and PyTorch 2.11.0, for a [64, 128]"
    assert text.startswith(f"before\n{refresh.markers('calls')[0]}\n{head}")
    assert "| in place | 4.6 |\n| out of place | 7.0 |\n" in text
    assert "| once in a process | ms |\n| --- | ---: |\n| first | 31 |\n" in text


def test_the_curves_of_searches(drawn: Path) -> None:
    assert not files.SEARCH_PICTURE.exists()
    curves = {"hadagen": [0.5] * 59 + [0.99], "random": [0.4] * 59 + [0.9]}
    theirs = {"pso": [0.45] * 59 + [0.95]}
    data = {
        "environment": {"gpu": "NVIDIA H100", "driver": "580", "nvcc": "13.0"},
        "versions": {"optuna": "5.0", "kernel_tuner": "1.5"},
        "seeds": 20,
        "problems": [{"name": "n8-float16-fast", "variants": 300, "budget": 60}],
        "hadagen": {name: {"curve": curve, "at_budget": [curve[-1]]} for name, curve in curves.items()},
        "kernel_tuner": {name: {"curve": curve, "at_budget": [curve[-1]]} for name, curve in theirs.items()},
        "kernel_tuner_others": {"mls": 0.9312},
    }
    files.SEARCH.write_text(json.dumps(data))
    assert refresh.outdated() == ["comparing-searches.md", "search.svg"]
    refresh.main([])
    assert refresh.outdated() == []
    text = files.SEARCH_PAGE.read_text()
    assert "| evaluations | hadagen | random | Kernel Tuner: pso |" in text
    assert "| 40 | 0.500 | 0.400 | 0.450 |\n| **budget** | 0.990 | 0.900 | 0.950 |" in text
    assert "| n8-float16-fast | 300 | 60 | 0.990 | 0.900 | 0.950 |" in text
    assert "after the budget: mls 0.931." in text
    ElementTree.fromstring(files.SEARCH_PICTURE.read_bytes())
    files.SEARCH.write_text(json.dumps({**data, "seeds": 10}))
    assert refresh.outdated() == ["comparing-searches.md", "search.svg"]


def test_a_comparison_without_recordings_or_kernel_tuner_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["compare_search.py", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"holds no recordings .* make them with ci/search.py record"):
        compare_search.main()
    (tmp_path / "a.jsonl.gz").touch()
    monkeypatch.setattr(compare_search.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="Kernel Tuner is not installed; install it with: pip install kernel-tuner"):
        compare_search.main()


def test_without_a_table_there_is_nothing_to_refresh(documents: Path) -> None:
    files.BENCH.unlink()
    with pytest.raises(SystemExit, match="is missing; make it with hadagen bench --csv"):
        refresh.main([])
    (documents / "README.md").write_text("no markers")
    with pytest.raises(SystemExit, match=r"README.md has no .* put the two markers back"):
        refresh.outdated()


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md"))),
    ],
)
def test_what_a_document_names_is_there(name: str) -> None:
    text = (ROOT / name).read_text()
    for link, heading in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", text):
        page = (ROOT / name).parent / link if link else ROOT / name
        assert page.exists(), link
        if heading:
            titles = re.findall("^#+ (.*)", page.read_text(), re.MULTILINE)
            assert heading in [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles]
    for target in re.findall(r"^make ([a-z-]+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target
    code = "\n".join(re.findall(r"```.*?```|`[^`]+`", text, re.DOTALL))
    for name, of_group in set(re.findall(r"(?:^|[`/])hadagen ([a-z]+)\b(?: ([a-z]+)\b)?(?! =)", code, re.MULTILINE)):
        command = main.commands[name]
        assert not (of_group and isinstance(command, click.Group)) or of_group in command.commands
    written = re.sub(r"<!-- (\S+):begin -->.*?<!-- \1:end -->", "", text, flags=re.DOTALL).splitlines()
    assert not [line for line in written if len(line) > 120 and not line.startswith("|")]


def test_the_architecture_names_every_module() -> None:
    text = (ROOT / "docs" / "internals" / "architecture.md").read_text()
    modules = [path.stem for path in (ROOT / "hadagen").glob("*.py") if path.stem != "__init__"]
    rooms = [path.parent.name for path in (ROOT / "hadagen").glob("*/__init__.py")]
    missing = [name for name in [*modules, *rooms, "cli", "templates", "tuning_db"] if f"`{name}`" not in text]
    assert not missing


def test_the_readme_multiplies_codes_of_rotated_rows() -> None:
    """With the errors that it says."""
    readme = (ROOT / "README.md").read_text()
    assert len(readme.split()) <= 1200
    (code,) = (each for each in re.findall("```python\n(.*?)```", readme, re.DOTALL) if "_int_mm" in each)
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(code, names)
    with_rotation, without = map(float, re.findall(r"# (0\.\d+); with None for the rotation (0\.\d+)", readme)[0])
    assert float(names["error"].detach()) == pytest.approx(with_rotation, rel=0.1)
    exec(code.replace("hadagen.Rotation(4096)", "None"), names)
    assert float(names["error"].detach()) == pytest.approx(without, rel=0.1)


def test_the_page_of_rotations_says_what_auto_does() -> None:
    text = (ROOT / "docs" / "rotations.md").read_text()
    table = re.findall(r"[|] (\d+(?:, \d+)*) [|] ([^|]*?)(?= [|])", text)
    said = [(int(n), factors.split(" · ")) for numbers, factors in table for n in numbers.split(", ")]
    assert len(said) == 29
    for n, factors in said:
        orders = auto_orders(n) or ()
        assert factors == [*map(str, orders), factors[-1]]
        assert factors[-1] in (f"{n // math.prod(orders)}", "2^m")


PAGES = [path for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")] if "```python" in path.read_text()]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_the_code_of_every_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the page, but for blocks that say that they need a GPU."""
    monkeypatch.chdir(tmp_path)
    # Inductor would compile C++ for half a minute.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    for needs, code in re.findall("(<!-- needs a GPU -->\n)?```python\n(.*?)```", page.read_text(), re.DOTALL):
        if not needs or torch.cuda.is_available():
            exec(code, names)
    if page.name == "rotations.md":
        torch.testing.assert_close(names["same"], names["y"])
        torch.testing.assert_close(names["hidden"], names["r"](names["up"](names["x"])))


def test_a_page_names_every_environment_variable() -> None:
    code = "".join(path.read_text() for room in ("hadagen", "cli", "tuning_db") for path in (ROOT / room).rglob("*.py"))
    used = set(re.findall(r'environ(?:\.get\(|\[)"(\w+)"', code)) | {bundles.VARIABLE, SWITCH}
    assert {"HADAGEN_CACHE", "CXX"} <= used
    named = re.findall("^[|] (`.*?) [|]", (ROOT / "docs" / "commands.md").read_text(), re.MULTILINE)
    assert used <= set(re.findall(r"`(\w+)`", "".join(named))) | {"XDG_CACHE_HOME"}


def test_the_page_of_faults_says_when_a_kernel_counts_as_hung() -> None:
    said = " ".join((ROOT / "docs" / "internals" / "faults.md").read_text().split())
    assert f"A kernel counts as hung after {SILENCE_S:g} s of silence." in said


def test_one_range_of_python_stands_everywhere() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    versions = re.findall(r"Python :: (3\.\d+)", project)
    assert f'requires-python = ">={versions[0]}"' in project
    for name in ("README.md", "CONTRIBUTING.md"):
        assert f"Python {versions[0]} or newer (tested to {versions[-1]})" in (ROOT / name).read_text()


# ---- docs/reliability.md ---------------------------------------------------------------------------------------------
TESTS = Path(__file__).resolve().parent


@pytest.mark.parametrize("area", PROMISES)
def test_every_test_that_is_named_exists(area: str) -> None:
    for promise in PROMISES[area]:
        assert promise.tests, promise.text
        for test in promise.tests:
            file, _, name = test.partition("::")
            assert re.search(rf"(?m)^def {name}\(", next(TESTS.parent.glob(f"*/{file}")).read_text()), test


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No figures yet."""
    for name in (
        "KILLS",
        "FAULTS",
        "LAWS",
        "SANITIZER",
        "TUNES",
        "BUNDLE_DAMAGE",
        "FLEET",
        "FLEET_GPUS",
        "FLEET_KILLS",
    ):
        monkeypatch.setattr(files, name, tmp_path / getattr(files, name).name)
    return tmp_path


def figures() -> set[str]:
    return {promise.figure() for promises in PROMISES.values() for promise in promises}


def test_figures_are_those_of_the_data(data: Path) -> None:
    assert figures() == {""}
    files.KILLS.write_text(json.dumps({"tune": 5, "worker": 3, "compiler": 2, "databases": 4, "trials": 96}))
    fault = {"fault": "deadlock", "outcome": "timeout", "lost_s": 7.25}
    trap = {"fault": "trap", "outcome": "launch_failed", "lost_s": 3.0}
    found: dict[str, Any] = {"gpu": "NVIDIA H200", "cells": 9, "same_winners": 8, "faults": [fault, fault, trap]}
    files.FAULTS.write_text(json.dumps(found))
    files.LAWS.write_text(json.dumps({"gpu": "NVIDIA H200", "kernels": 7, "problems": 3, "broken": {"a": ["norm"]}}))
    row = dict.fromkeys(sanitize.COLUMNS, "") | {"gpu": "NVIDIA H200", "launches": "6"}
    a = row | {"kernel": "a", "problem": "n2-float16-fast", "memcheck": "0", "racecheck": "2", "own_barrier": "3"}
    a["lanes"] = "4"
    control = row | {"kernel": "c", "problem": sanitize.CONTROL, "memcheck": "1"}
    sanitize.write_table(files.SANITIZER, {("", str(i), ""): each for i, each in enumerate((a, control))})
    timed = [("NVIDIA H200", "n2-float16-fast", 8, "", "", us, 1, "", "") for us in (1, 1.02, 1.03, 0.9)]
    with files.TUNES.open("w", newline="") as file:
        csv.writer(file).writerows([compare_tunes.COLUMNS, *timed])
    with files.BUNDLE_DAMAGE.open("w", newline="") as file:
        csv.writer(file).writerows([bundle_damage.COLUMNS, ("flips", "made anew", 9, 4, 3, 2, 6, 3, 40, 1)])
    search = {"workers": 16, "more": 1.3, "seeds": 20, "problems": 6, "one_by_one": 0.99594, "in_parallel": 0.99695}
    simulated = {"search": search, "workers": 9, "classes": {"A": 5, "B": 4}, "busy": {"A": 0.984, "B": 0.966}}
    simulated |= {"trials_per_second": 8.61, "coordinator_ms_per_trial": 12.11}
    files.FLEET.write_text(json.dumps(simulated))
    counted = [{"gpus": gpus, "new_trials": trials} for gpus, trials in ((1, 100), (2, 195))]
    of_gpus = {"gpu": "NVIDIA H100", "cpus": 32, "command": "hadagen tune", "runs": counted}
    files.FLEET_GPUS.write_text(json.dumps(of_gpus))
    faults = {"a worker hangs": 7, "the tune is killed": 5, "a gpu breaks": 0}
    killed = {"schedules": 4, "faults": faults, "runs": 9, "trials": 64, "equal": 3}
    files.FLEET_KILLS.write_text(json.dumps(killed))
    assert figures() == {
        "",
        "12 faults of 2 kinds in 9 runs: 3 of 4 databases have every trial once, 64 in all",
        "9 simulated GPUs of 2 classes: 9 trials a second, at least 96% busy; 2 NVIDIA H100: 1.95 times the trials "
        "of 1",
        "16 in progress: 0.997 of the best speed; one: 0.996; 6 problems, 20 seeds",
        "9 cases: 4 refused, 3 as before, 2 hold something else with digests made anew; where a signature is asked "
        "for, 6 and 3, and no other; at most 40 ms and 1 MB",
        "10 kills (5 of the tune, 3 of its measuring process, 2 of compilers): 4 of 4 databases equal, of 96 trials "
        "each",
        "NVIDIA H200: 3 broken kernels of 2 kinds; 8 of 9 winners the same",
        "NVIDIA H200: 7.2 s at most, of 2",
        "NVIDIA H200: 7 kernels of 3 problems; 1 break a law",
        "NVIDIA H200: 1 kernels of 1 problems; findings: memcheck 0 (1 kernels), racecheck 2 (1 kernels), initcheck 0 "
        "(0 kernels), synccheck 0 (0 kernels); 1 kernels with warnings of a barrier that one thread prepares; 1 "
        "kernels with findings of racecheck only where one lane arrives for its warp",
        "NVIDIA H200: 50.0% of 4 cells, of 1 problems",
    }


def test_the_page_about_fleets_has_what_they_do(data: Path) -> None:
    assert fleet_numbers() == files.NO_DATA
    runs = [{"gpus": gpus, "new_trials": trials} for gpus, trials in ((1, 100), (2, 195))]
    files.FLEET_GPUS.write_text(json.dumps({"gpu": "H100", "cpus": 8, "command": "hadagen tune", "runs": runs}))
    assert "2 GPUs finished 195 trials, and 1 finished 100 in the same time" in " ".join(fleet_numbers().split())


class Racer:
    """Of two kernels, the second always takes twice as long, but for one race."""

    def __init__(self) -> None:
        self.raced: list[tuple[Any, ...]] = []

    def race(self, a: Variant, b: Variant, cells: list[Cell]) -> list[tuple[float, float]]:
        self.raced.append((a.kernel.digest, b.kernel.digest, tuple(cells)))
        return [(1.0, 9.0 if len(self.raced) == 1 else 2.0) for _ in cells]


def test_two_tunes_are_compared_cell_by_cell(tmp_path: Path) -> None:
    small, large, only_a = 1 << 13, 1 << 16, 1 << 20
    a = make_trial(1, timings=tuple(make_timing(2.0, elements) for elements in (small, large, only_a)))
    b = [make_trial(1, timings=(make_timing(2.0, small),)), make_trial(2, timings=(make_timing(2.0, large),))]
    of_a, of_b = (Bundle.open(write_trials(tmp_path / name, some)) for name, some in (("a.db", [a]), ("b.db", b)))
    racer = Racer()
    rows = compare_tunes.compared(racer, of_a, of_b, H100.gpu)  # type: ignore[arg-type]
    assert [(row["elements"], row["us_a"], row["us_b"]) for row in rows] == [(small, 2.0, 2.0), (large, 1.0, 2.0)]
    assert [row["kernel_a"] == row["kernel_b"] for row in rows] == [True, False]
    assert len(racer.raced) == compare_tunes.RACES
    assert {cells for *_, cells in racer.raced} == {(Cell(large, Destination.IN_PLACE, rows[1]["cache"]),)}
    assert compare_tunes.compared(racer, of_a, of_b, "Another GPU") == []  # type: ignore[arg-type]


def test_a_promise_is_a_row_with_its_tests(data: Path) -> None:
    table = refresh_reliability.promises_table("kernels").splitlines()
    assert len(table) == 2 + len(PROMISES["kernels"])
    assert "[test_gpu_laws.py](../tests/test_gpu_laws.py) every shipped kernel keeps the laws" in table[2]
    assert table[2].endswith("| – |")


def test_the_readme_says_how_long_a_tune_takes_and_with_which_engines_hooks_were_tested() -> None:
    readme, tuning = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/tuning.md"))
    (minutes,) = re.findall(r"takes (\d+) minutes at most", tuning)
    without = FEW * len(KINDS) * ESTIMATE_SECONDS / 60
    assert f"`make tune` then takes at most {minutes} minutes, or at most {without:g} minutes without a GPU." in readme
    for host in (VLLM, SGLANG):
        assert f"{host.tested}" in readme[readme.index("The plugins were tested") :][:200]
    assert "(serve.md)" in (ROOT / "docs/quickstart.md").read_text(encoding="utf-8").partition("## Where next")[2]
