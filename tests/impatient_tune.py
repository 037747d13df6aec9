"""`hadagen tune` that gives up a worker sooner when it is silent."""

from __future__ import annotations

from hadagen.cli.main import main
from hadagen.fleet import client

client.SILENT_SECONDS = 5.0

if __name__ == "__main__":
    main()
