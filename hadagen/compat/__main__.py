"""Runs a program, and all processes that it starts, with hadagen in place of fast_hadamard_transform and HadaCore.

    python -m hadagen.compat PROGRAM [ARGUMENTS ...]
    python -m hadagen.compat -m MODULE [ARGUMENTS ...]

PROGRAM is a Python file, or a command on the path. --replace, before it, takes the place of originals that are
installed. A module with the name of an original that lies beside PROGRAM must be renamed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hadagen.compat import environment, found_in, installed


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status of the program, if this system cannot become the program."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    replace = given[:1] == ["--replace"]
    command = given[replace:]
    if not command or command[0] in ("-h", "--help") or command == ["-m"]:
        print((__doc__ or "").strip())
        return 0 if command[:1] in (["-h"], ["--help"]) else 2
    if beside := found_in(_first_folder(command)):
        name, origin = next(iter(beside.items()))
        print(f"{name} lies where the program is, at {origin}, and Python finds it first; rename it", file=sys.stderr)
        return 1
    if (found := installed()) and not replace:
        name, origin = next(iter(found.items()))
        print(f"{name} is installed, at {origin}; --replace takes its place", file=sys.stderr)
        return 1
    if command[0] == "-m" or command[0].endswith(".py"):
        command = [sys.executable, *command]
    elif (program := shutil.which(command[0])) is None:
        print(f"there is no command {command[0]}; give one, a Python file, or -m and a module", file=sys.stderr)
        return 1
    else:
        command = [program, *command[1:]]
    if os.name != "posix":
        return subprocess.run(command, env=environment()).returncode
    if sys.stdout:  # None in a process without standard streams
        sys.stdout.flush()
    os.execve(command[0], command, environment())


def _first_folder(command: Sequence[str]) -> Path:
    """The folder in which a program of Python looks for modules first."""
    if command[0] == "-m":
        return Path.cwd()
    program = command[0] if command[0].endswith(".py") else shutil.which(command[0]) or command[0]
    return Path(os.path.realpath(program)).parent


if __name__ == "__main__":
    sys.exit(main())
