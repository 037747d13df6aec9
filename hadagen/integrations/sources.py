"""Whether installed packages have what hooks need, by their sources: importing some packages takes many seconds."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec, resolve_name
from pathlib import Path

from hadagen.integrations.host import Changed, Host, check_parameters


def installed_version(host: Host) -> str | None:
    """The version of a host, under whatever name its distribution was installed; None if it is not installed."""
    if found := host.version():
        return found
    if find_spec(host.name) is None:
        return None
    return next((version(each) for each in packages_distributions().get(host.name, ())), "of an unknown version")


def missing(host: Host) -> list[str]:
    """What an installed host lacks of what the hooks need, such as "it has no vllm.config.VllmConfig".

    The parameters of functions are compared, and those of classes are not.
    """
    found = []
    for path, parameters in host.needs.items():
        module, _, names = path.partition(":")
        try:
            statement = _definition(module, names)
            if isinstance(statement, ast.FunctionDef):
                check_parameters(path, parameters, _parameters(statement))
        except LookupError:
            found.append(f"it has no {path.replace(':', '.')}")
        except Changed as changed:
            found.append(str(changed))
        except (SyntaxError, ValueError, ImportError, OSError, RecursionError) as error:
            found.append(f"the source of {module} cannot be read: {error}")
    return found


def _definition(module: str, names: str) -> ast.stmt:
    """The statement of a module that defines a name, or `Class.name`. Raises `LookupError` if none does."""
    name, _, attribute = names.partition(".")
    for statement in _statements(_tree(module).body):
        if isinstance(statement, ast.ImportFrom):
            origin = resolve_name("." * statement.level + (statement.module or ""), _package(module))
            for alias in statement.names:
                if alias.name == "*" or (alias.asname or alias.name) == name:
                    try:
                        return _definition(origin, names if alias.name == "*" else f"{alias.name}{names[len(name) :]}")
                    except LookupError:
                        if alias.name != "*" and not attribute:  # a module, or code that is not Python
                            return statement
        elif name in _defined(statement):
            return _attribute(module, statement, attribute) if attribute else statement
    raise LookupError(names)


def _attribute(module: str, statement: ast.stmt, name: str) -> ast.stmt:
    """The statement of a class, or of a base of it, that defines a name."""
    if not isinstance(statement, ast.ClassDef):
        raise LookupError(name)
    for each in _statements(statement.body):
        if name in _defined(each):
            return each
    for base in statement.bases:
        if isinstance(base, ast.Name):
            try:
                return _definition(module, f"{base.id}.{name}")
            except LookupError:
                continue
    raise LookupError(name)


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements, and those within `if`, `try` and `with`."""
    for statement in body:
        yield statement
        if isinstance(statement, (ast.If, ast.Try, ast.With)):
            nested = (getattr(statement, part, []) for part in ("body", "orelse", "finalbody"))
            for each in (*nested, *(handler.body for handler in getattr(statement, "handlers", ()))):
                yield from _statements(each)


def _defined(statement: ast.stmt) -> list[str]:
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return [each.id for each in targets if isinstance(each, ast.Name)]


def _parameters(function: ast.FunctionDef) -> tuple[str, ...]:
    """The names of parameters, in the order of `inspect.signature`."""
    each = function.args
    found = (*each.posonlyargs, *each.args, each.vararg, *each.kwonlyargs, each.kwarg)
    names = [argument.arg for argument in found if argument]
    is_bound = any(isinstance(each, ast.Name) and each.id == "classmethod" for each in function.decorator_list)
    return tuple(names[is_bound:])


@cache
def _tree(module: str) -> ast.Module:
    """The source of a module. Raises `LookupError` if there is none."""
    return ast.parse(_file(module).read_bytes())


def _file(module: str) -> Path:
    top, *rest = module.split(".")
    spec = find_spec(top)  # which imports nothing
    for folder in (spec and spec.submodule_search_locations) or ():
        place = Path(folder, *rest)
        for path in (place / "__init__.py", place.with_name(f"{place.name}.py")):
            if path.is_file():
                return path
    raise LookupError(module)


def _package(module: str) -> str:
    return module if _file(module).name == "__init__.py" else module.rpartition(".")[0]
