"""Brings the numbers in the documents, the pictures and the defaults of models up to date with `docs/data`.

    python docs/refresh.py            # write them
    python docs/refresh.py --check    # change nothing; fail, naming what is out of date

`data/bench_h100.csv` is one run of `hadagen bench --csv` with the libraries we compare with installed; cells that it
lacks may come from an earlier one, in `data/bench_h100_earlier.csv`. `data/bench_h200.csv` is such a run on an H200,
and `data/bench_h200_long.csv` another one, of rows that other libraries have not.
`data/between_h100.csv` and `data/between_h200.csv` are written by `hadagen bench between --csv`.
`data/invariant_h200.csv` has the times of all shipped kernels on an H200, summed up by problem:
`mean` and `worst` say how much longer than the winner the kernel takes that a batch-invariant call runs.
`data/kills.json`, `data/faults.json` and `data/laws.json` are written by tests (`--figures docs/data`),
`data/sanitizer.csv` by `ci/sanitize.py`, `data/fleet.json` by `ci/simulate_fleet.py`, and `data/tunes_h200.csv` by
`compare_tunes.py`. `data/fleet_h100.json` has the trials of one GPU and of two in the same time, by the command that it
names. `data/calls_h100.json` is written by `hadagen bench calls --json`, and `data/search.json` by
`ci/compare_search.py`. `data/resources_h100.csv` is written by `measure_resources.py`, `data/layer_h100.json` by
`examples/layer.py`, `data/mlp_h100.json` by `examples/mlp.py`, `data/decoder_h200.json` by `examples/decoder.py`, and
`data/humming_h200.csv` by `ci/race.py`. `data/row_tiles_h200.csv` has the times of rows with one scale in tiles of many
shapes: medians of five replays of a CUDA graph, whose inputs come from memory for 512 rows and more, and the time in
which PyTorch copies as many bytes. Our times of pitched rows come from the shipped bundle. Drawing needs matplotlib
(pip install '.[docs]'); checking does not. `data/models.csv` is written by `tests/every_model.py`.

A document shows each generated part between two markers, such as `<!-- calls:begin -->` and `<!-- calls:end -->`. The
modules `refresh_*.py` make the parts.
"""

from __future__ import annotations

import sys
from pathlib import Path

import refresh_files as files
from refresh_api import api
from refresh_compared import compared_table
from refresh_defaults import defaults
from refresh_fleet import fleet_numbers
from refresh_formats import (
    accurate_codes_table,
    formats_table,
    passes_table,
    quantized_parts_table,
    quantizing_headline,
    rotations_on_h100_table,
    torchao_numbers,
)
from refresh_markdown import wrapped
from refresh_models import (
    attention_table,
    cache_table,
    checkpoint_table,
    models_table,
    read,
    types_numbers,
    weights_table,
)
from refresh_other_tables import (
    between_table,
    call_table,
    choices_table,
    invariant_table,
    knobs_table,
    lost_between,
    pruned_table,
)
from refresh_pictures import draw, draw_activations, draw_layer, draw_search, fingerprint, is_drawn_from
from refresh_prologues import decoder_table, layer_table, layer_times, mlp_table, prologues_table, resources_table
from refresh_reliability import PROMISES, promises_table
from refresh_rotations import parts_table, products_table, rotation_headline, rotations_table, signs_table
from refresh_search import Searches, search_numbers
from refresh_speed_tables import h200_table, numbers, picture, pitched_table, transform_headline
from refresh_times import Times, read_times, sources


def generated() -> dict[Path, dict[str, str]]:
    """Document → name of each generated part → its text."""
    times = read_times() if all(path.exists() for path in sources()) else None
    return {
        files.README: {"speed": speed(times) if times else files.NO_DATA},
        files.FORMATS: {"attention": attention_table(), "cache": cache_table(), "models": models_table()},
        files.PROLOGUES: {"prologues": prologues_table(), "layer": layer_table()},
        files.FUSING: {"mlp": mlp_table()},
        files.SERVE: {"decoder": decoder_table(), "types": types_numbers()},
        files.CHECKPOINT_PAGE: {"checkpoint": checkpoint_table(), "weights": weights_table()},
        files.PERFORMANCE: {
            "libraries": numbers(times) if times else files.NO_DATA,
            "h200": h200_table(),
            "products": products_table(),
            "rotations-h100": rotations_on_h100_table(),
            "passes": passes_table(),
            "torchao": torchao_numbers(),
            "formats": formats_table(),
            "codes": accurate_codes_table(),
            "pitched": pitched_table(times) if times else files.NO_DATA,
            "lost": lost_between(),
            "invariant": invariant_table(),
            "calls": call_table(),
        },
        files.MEASUREMENTS: {
            "rotations": rotations_table(),
            "parts": parts_table(),
            "quantized_parts": quantized_parts_table(),
            "signs": signs_table(),
            "resources": resources_table(),
            "between": between_table(),
        },
        files.COMPARED: {"compared": compared_table(times)},
        files.API: {"api": api()},
        files.EXPERIMENTS: {"choices": choices_table(), "pruned": pruned_table()},
        files.SEARCH_PAGE: {"search": search_numbers()},
        files.SEARCHING: {"knobs": knobs_table()},
        files.FLEETS: {"fleet": fleet_numbers()},
        files.RELIABILITY: {area: promises_table(area) for area in PROMISES},
    }


def speed(times: Times) -> str:
    """The picture of the README, and a number for each operator."""
    numbers_of = {
        "The transform": transform_headline(times),
        "A rotation with a matrix": rotation_headline() if files.ROTATIONS.exists() else "not measured yet",
        "Rotating and quantizing": quantizing_headline() if files.PASSES.exists() else "not measured yet",
    }
    lines = [wrapped(f"- **{what}** is {said}.", "  ") for what, said in numbers_of.items()]
    return "\n".join([picture(), "", *lines])


def markers(part: str) -> tuple[str, str]:
    """The markers before and after a generated part in its document."""
    return f"<!-- {part}:begin -->", f"<!-- {part}:end -->"


def refreshed(page: Path, parts: dict[str, str]) -> str:
    """The document with the parts between their markers; SystemExit where a marker is missing."""
    document = page.read_text(encoding="utf-8")
    for name, text in parts.items():
        first, last = markers(name)
        before, begin, rest = document.partition(first)
        _, end, after = rest.partition(last)
        if not (begin and end):
            raise SystemExit(f"{page.name} has no {first} … {last}; put the two markers back")
        document = f"{before}{first}\n{text}\n{last}{after}"
    return document


def outdated() -> list[str]:
    """Names of the files that do not say what the data says."""
    pages = [page for page, parts in generated().items() if refreshed(page, parts) != page.read_text(encoding="utf-8")]
    pictures = {
        files.PICTURE: sources(),
        files.SEARCH_PICTURE: (files.SEARCH,),
        files.ACTIVATIONS_PICTURE: (files.QUAROT,),
        files.LAYER_PICTURE: (files.LAYER,),
    }
    stale = [
        picture
        for picture, tables in pictures.items()
        if all(table.exists() for table in tables) and not is_drawn_from(picture, *tables)
    ]
    text = defaults()
    is_old = text is not None and text != files.DEFAULTS.read_text(encoding="utf-8")
    return [path.name for path in (*pages, *stale, *([files.DEFAULTS] if is_old else []))]


def main(arguments: list[str]) -> None:
    if arguments == ["--check"]:
        if stale := outdated():
            raise SystemExit(f"{', '.join(stale)}: out of date with docs/data; run python docs/refresh.py")
        return
    if arguments:
        raise SystemExit("usage: python docs/refresh.py [--check]")
    if not files.BENCH.exists():
        raise SystemExit(f"{files.BENCH} is missing; make it with hadagen bench --csv")
    for page, parts in generated().items():
        page.write_text(refreshed(page, parts), encoding="utf-8")
    if text := defaults():
        files.DEFAULTS.write_text(text, encoding="utf-8")
    draw(read_times(), files.PICTURE, fingerprint(*sources()))
    if files.SEARCH.exists():
        draw_search(Searches.read(), files.SEARCH_PICTURE, fingerprint(files.SEARCH))
    if files.QUAROT.exists():
        draw_activations(read(files.QUAROT), files.ACTIVATIONS_PICTURE, fingerprint(files.QUAROT))
    if layer := files.read_json(files.LAYER):
        draw_layer(layer_times(layer), files.LAYER_PICTURE, fingerprint(files.LAYER))


if __name__ == "__main__":
    main(sys.argv[1:])
