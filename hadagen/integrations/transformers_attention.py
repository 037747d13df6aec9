"""What the code of an attention of transformers does with its cache, read from its source.

A cache in codes returns rotated keys. So it suits an attention that hands what `cache.update` returns to an attention
function, and reads neither it nor the cache for anything else.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import cache
from typing import Any

CACHE = "cache"  # the argument of attention
_METHODS = ("update", "get_seq_length")  # of a cache


@cache
def updates(function: Callable[..., Any]) -> bool:
    """Whether a function puts keys and values of a layer into a cache."""
    return any(_is_update(node) for node in _nodes(function))


@cache
def takes_codes(function: Callable[..., Any], functions: str) -> bool:
    """Whether a function hands the keys and values of its cache to an attention function, and reads them for nothing
    else. functions: the name where it finds attention functions."""
    nodes = _nodes(function)
    updates = [node for node in nodes if isinstance(node, ast.Assign) and _is_update(node.value)]
    called = _found_in(nodes, functions)
    attention = [node for node in nodes if isinstance(node, ast.Call) and _name(node.func) in called]
    if len(updates) != 1 or len(attention) != 1 or len(updates[0].targets) != 1:
        return False
    update: Any = updates[0]
    if not all(_is_with_cache(node, update) for node in nodes if isinstance(node, _BRANCHES) and update in _all(node)):
        return False
    names = [_name(each) for each in getattr(update.targets[0], "elts", ())]
    given = [_name(each) for each in attention[0].args[:4]]  # self, queries, keys, values
    if len(names) != 2 or given[:1] + given[2:] != ["self", *names]:
        return False
    reads = [node for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    after = [node for node in reads if node.id in names and node.lineno > update.end_lineno]
    known = [each for node in nodes if isinstance(node, ast.Compare) for each in (node.left, *node.comparators)]
    known += [node.value for node in nodes if isinstance(node, ast.Attribute) and node.attr in _METHODS]
    others = [node for node in reads if node.id == CACHE and node not in known]
    return _name(update.value.func.value) == CACHE and not others and len(after) == 2


_BRANCHES = ast.If, ast.IfExp, ast.For, ast.While, ast.Try, ast.Match


def _is_with_cache(branch: Any, update: ast.AST) -> bool:
    """Whether a branch runs an update whenever there is a cache, because queries are rotated whenever there is one."""
    is_if = isinstance(branch, ast.If) and ast.unparse(branch.test) == f"{CACHE} is not None"
    return is_if and any(update in _all(each) for each in branch.body)


def _all(node: ast.AST) -> list[ast.AST]:
    return list(ast.walk(node))


def _found_in(nodes: list[ast.AST], functions: str) -> set[str]:
    """The variables with an attention function."""
    found = set()
    for node in nodes:
        call = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "get_interface":
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]  # type: ignore[attr-defined]
            found |= {_name(each) for each in targets} if _name(call.func.value) == functions else set()
    return found


@cache
def _nodes(function: Callable[..., Any]) -> list[ast.AST]:
    try:
        return list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))))
    except (OSError, TypeError, SyntaxError):  # no source, or that of a line with other code
        return []


def _is_update(node: Any) -> bool:
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return is_call and node.func.attr == "update" and len(node.args) >= 3


def _name(node: Any) -> str:
    """The name of a variable; "" for any other expression."""
    return node.id if isinstance(node, ast.Name) else ""
