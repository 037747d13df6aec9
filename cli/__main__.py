"""`python -m hadagen.cli`: the same as `hadagen`."""

from hadagen.cli.main import main

main(prog_name="hadagen")
