"""Brings the numbers in the README, performance.md and search.md, and the pictures, up to date with `docs/data`.

    python docs/refresh.py            # write them
    python docs/refresh.py --check    # change nothing; fail, naming what is out of date

`data/bench_h100.csv` is one run of `hadagen bench --csv` with the libraries we compare with installed; cells that it
lacks may come from an earlier one, in `data/bench_h100_earlier.csv`. `data/bench_h200.csv` is such a run on an H200.
`data/h100.csv` is written by `hadagen bundle export` from the shipped bundle, `data/between_h100.csv` and
`data/between_h200.csv` by `hadagen bench between --csv`, `data/calls_h100.json` by `hadagen bench calls --json`, and
`data/search.json` by `compare_search.py`. Drawing needs matplotlib (pip install 'hadagen[docs]'); checking does not.

The modules beside it, `refresh_*.py`, make what it writes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import refresh_files as files
from refresh_other_tables import between_table, call_table, choices_table, lost_between_on_h200
from refresh_pictures import draw, draw_search, fingerprint, is_drawn_from
from refresh_search import Searches, search_numbers
from refresh_speed_tables import h200_table, numbers, pitched_table
from refresh_times import read_times, sources

BEGIN, END = "<!-- numbers:begin -->", "<!-- numbers:end -->"
CALLS_BEGIN, CALLS_END = "<!-- calls:begin -->", "<!-- calls:end -->"
PITCHED_BEGIN, PITCHED_END = "<!-- pitched:begin -->", "<!-- pitched:end -->"
BETWEEN_BEGIN, BETWEEN_END = "<!-- between:begin -->", "<!-- between:end -->"
H200_BEGIN, H200_END = "<!-- h200:begin -->", "<!-- h200:end -->"
BETWEEN_H200_BEGIN, BETWEEN_H200_END = "<!-- between-h200:begin -->", "<!-- between-h200:end -->"
CHOICES_BEGIN, CHOICES_END = "<!-- choices:begin -->", "<!-- choices:end -->"
SEARCH_BEGIN, SEARCH_END = "<!-- search:begin -->", "<!-- search:end -->"


def with_search(document: str) -> str:
    """search.md with its numbers between their markers."""
    return _between(files.SEARCH_PAGE, document, SEARCH_BEGIN, search_numbers(), SEARCH_END)


def with_numbers(readme: str, text: str) -> str:
    """The README with `text` between its markers."""
    return _between(files.README, readme, BEGIN, text, END)


def with_tables(document: str, of_pitched: str) -> str:
    """performance.md with its tables, each between its markers."""
    document = _between(files.PERFORMANCE, document, CALLS_BEGIN, call_table(), CALLS_END)
    document = _between(files.PERFORMANCE, document, BETWEEN_BEGIN, between_table(), BETWEEN_END)
    document = _between(files.PERFORMANCE, document, H200_BEGIN, h200_table(), H200_END)
    document = _between(files.PERFORMANCE, document, BETWEEN_H200_BEGIN, lost_between_on_h200(), BETWEEN_H200_END)
    document = _between(files.PERFORMANCE, document, CHOICES_BEGIN, choices_table(), CHOICES_END)
    return _between(files.PERFORMANCE, document, PITCHED_BEGIN, of_pitched, PITCHED_END)


def _between(path: Path, document: str, first: str, text: str, last: str) -> str:
    before, begin, rest = document.partition(first)
    _, end, after = rest.partition(last)
    if not (begin and end):
        raise SystemExit(f"{path.name} has no {first} … {last}; put the two markers back")
    return f"{before}{first}\n{text}\n{last}{after}"


def outdated() -> list[str]:
    """Names of the files that do not say what the data says."""
    readme, performance = files.README.read_text(encoding="utf-8"), files.PERFORMANCE.read_text(encoding="utf-8")
    search = files.SEARCH_PAGE.read_text(encoding="utf-8")
    times = read_times() if all(path.exists() for path in sources()) else None
    of_speed, of_pitched = (numbers(times), pitched_table(times)) if times else (files.NO_DATA, files.NO_DATA)
    wanted = {
        files.README.name: with_numbers(readme, of_speed) == readme,
        files.PICTURE.name: not times or is_drawn_from(files.PICTURE, *sources()),
        files.PERFORMANCE.name: with_tables(performance, of_pitched) == performance,
        files.SEARCH_PAGE.name: with_search(search) == search,
        files.SEARCH_PICTURE.name: not files.SEARCH.exists() or is_drawn_from(files.SEARCH_PICTURE, files.SEARCH),
    }
    return [name for name, fresh in wanted.items() if not fresh]


def main(arguments: list[str]) -> None:
    if arguments == ["--check"]:
        if stale := outdated():
            raise SystemExit(f"{', '.join(stale)}: out of date with docs/data; run python docs/refresh.py")
        return
    if arguments:
        raise SystemExit("usage: python docs/refresh.py [--check]")
    for path, command in ((files.OURS, "hadagen bundle export"), (files.BENCH, "hadagen bench --csv")):
        if not path.exists():
            raise SystemExit(f"{path} is missing; make it with {command}")
    times = read_times()
    performance = files.PERFORMANCE.read_text(encoding="utf-8")
    files.PERFORMANCE.write_text(with_tables(performance, pitched_table(times)), encoding="utf-8")
    readme = files.README.read_text(encoding="utf-8")
    files.README.write_text(with_numbers(readme, numbers(times)), encoding="utf-8")
    draw(times, files.PICTURE, fingerprint(*sources()))
    files.SEARCH_PAGE.write_text(with_search(files.SEARCH_PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    if files.SEARCH.exists():
        draw_search(Searches.read(), files.SEARCH_PICTURE, fingerprint(files.SEARCH))


if __name__ == "__main__":
    main(sys.argv[1:])
