"""`hadagen report`: one page about a tuning database or a bundle."""

from __future__ import annotations

from pathlib import Path

import click

from hadagen.cli import options
from hadagen.cli.output import say
from hadagen.errors import StorageError
from hadagen.files.atomic_file import HEADER_BYTES, atomic_file, check_place
from hadagen.files.opening import read_start
from hadagen.report.against import comparison
from hadagen.report.sources import Source, read_bundle, read_store
from hadagen.tuning_db.bundle import Bundle, is_bundle

DEFAULT_PAGE = "report.html"


@click.command()
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    default=DEFAULT_PAGE,
    show_default=True,
    help="File of the page; an existing page is replaced.",
)
@click.option(
    "--against", metavar="DB|BUNDLE|ARCH", help="Another source; the page compares the times of winners with it."
)
@click.argument("source", metavar="[DB|BUNDLE|ARCH]", required=False)
def report(source: str | None, against: str | None, out: Path) -> None:
    """Write a page about a tuning database or a bundle, for a browser.

    The page shows the speed of any n beside a copy, the effect of each knob, how soon the search found the best
    variant, errors, failures, and the hardware and software behind the numbers. For a bundle, it shows only the
    winners. The source is a file, an SQLite or PostgreSQL URL, or an arch such as sm90, for the bundle that hadagen
    ships. The default is the tuning database of the user. The page is one file, and needs no network.
    """
    from hadagen.report.drawing.page import BEGINNING, report_page

    check_place(out, "a report of hadagen", lambda header: header.startswith(BEGINNING))
    read = _read(source)
    compared = comparison(read, _read(against)) if against else None
    page = report_page(read, compared)
    with atomic_file(out) as new:
        new.write_text(page, encoding="utf-8")
    if compared:
        say(compared.summary)
    what = f"{len(read.trials)} trials, {len(read.winners)} winners" if read.trials else f"{len(read.winners)} winners"
    say(f"{out}: {what}, {out.stat().st_size / 1e6:.1f} MB")


def _read(source: str | None) -> Source:
    """The database or bundle that a user named; for None, the tuning database of the user. Raises `StorageError` if it
    is missing, damaged, empty, or of a later version."""
    place = str(options.default_db()) if source is None else source
    if "://" not in place and not Path(place).exists():
        place = str(options.shipped_for(place) or place)
    path = _file(place)
    if path is not None and is_bundle(_header(path, place)):
        return read_bundle(Bundle.open(path))

    from hadagen.tuning_db.store import Store

    with Store.open(place) as store:
        found = read_store(store)
    if not found.trials:
        raise StorageError(f"{found.place} has no trials yet; run hadagen tune first, or name another")
    return found


def _file(place: str) -> Path | None:
    """The file of a path or a URL; None for a database without one."""
    if "://" not in place:
        return Path(place)
    from hadagen.tuning_db.database import file_of

    return file_of(place)


def _header(path: Path, place: str) -> bytes:
    """The first bytes of a file. Raises `StorageError` if the file is missing or cannot be read."""
    if not path.exists():
        raise StorageError(
            f"there is no tuning database or bundle {place}; run hadagen tune first, or name a file, a URL, or an arch "
            "such as sm90"
        )
    try:
        return read_start(path, HEADER_BYTES)[0]
    except OSError as error:
        raise StorageError(f"{path} cannot be read ({error.strerror}); name another file") from error
