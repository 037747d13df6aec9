"""Record all variants of problems, and compare searches on these recordings.

    python ci/search.py record --n 1024 --like docs/data/recordings/n1024-float16-accurate.jsonl.gz
    python ci/search.py replay recordings/*.jsonl.gz

docs/internals/comparing-searches.md has the results.
"""

from __future__ import annotations

import click
from searches.command_record import record
from searches.command_replay import replay

from hadagen.cli.main import Sentences


@click.group(cls=Sentences, commands=[record, replay], context_settings={"max_content_width": 120})
def main() -> None:
    """Record all variants of problems, and compare searches on these recordings."""


if __name__ == "__main__":
    main()
