"""PTX as text: a module with many kernels becomes one module per kernel, the same whatever else was compiled with it.

nvcc compiles many kernels in one call, because each call costs half a second. This module removes the traces of the
other kernels from the PTX of one: declarations that it does not use, numbers that count the functions of the unit, its
own name, comments. Then two kernels that compute the same have the same text, and so the same cubin.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

ENTRY = "hadagen_kernel"  # the name of every kernel after `split`

_DIRECTIVES = (".version", ".target", ".address_size")
_NAME = re.compile(r"(?:\.entry|\.func(?:\s*\([^)]*\))?|\.[a-z]\d+)\s+([\w$]+)")


def split(module: str) -> dict[str, str]:
    """Name → a module of its own, for each kernel of a PTX module. In it the kernel has the name `ENTRY`."""
    directives: list[str] = []
    declarations: list[tuple[str, str]] = []
    kernels: dict[str, str] = {}
    for statement in _statements(module):
        if statement.startswith(_DIRECTIVES):
            directives.append(statement)
            continue
        match = _NAME.search(statement)
        name = match[1] if match else ""
        if ".entry" in statement.split("(", 1)[0]:
            kernels[name] = statement
        else:
            declarations.append((name, statement))
    return {
        name: "\n".join([*directives, *_used(declarations, _canonical(name, kernel)), ""])
        for name, kernel in kernels.items()
    }


def _statements(module: str) -> Iterator[str]:
    """The directives, declarations and functions of a module, without comments."""
    lines: list[str] = []
    depth = 0
    for line in module.splitlines():
        line = line.split("//")[0].rstrip()
        if not line:
            continue
        lines.append(line)
        depth += line.count("{") - line.count("}")
        if depth == 0 and (line.endswith((";", "}")) or line.startswith(_DIRECTIVES)):
            yield "\n".join(lines)
            lines = []


def _used(declarations: list[tuple[str, str]], kernel: str) -> list[str]:
    """The declarations that a kernel needs, directly or indirectly, and then the kernel."""
    statements = [kernel]
    # PTX declares before use, so one pass from the end finds them all.
    for name, declaration in reversed(declarations):
        if any(re.search(rf"(?<![\w$]){re.escape(name)}(?![\w$])", statement) for statement in statements):
            statements.insert(0, declaration)
    return statements


def _canonical(name: str, kernel: str) -> str:
    exact = re.escape(name)
    kernel = re.sub(rf"(?<=\.entry ){exact}(?=\()|(?<![\w$]){exact}(?=_param_\d)", ENTRY, kernel)
    kernel = kernel.replace(f"_ZZ{len(name)}{name}E", f"_ZZ{len(ENTRY)}{ENTRY}E")  # its static shared variables
    return re.sub(r"(\$L__BB|__local_depot)\d+", r"\g<1>0", kernel)
