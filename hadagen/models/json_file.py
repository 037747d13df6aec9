"""Files with one JSON object, as folders of models have them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hadagen.errors import StorageError, UsageError
from hadagen.files.atomic_file import atomic_file
from hadagen.files.opening import read_start

_MOST_BYTES, _MOST_DEEP = 1 << 28, 100


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises `UsageError` if the file is missing, and `StorageError` if it holds none."""
    try:
        content = read_start(path, min(path.stat().st_size, _MOST_BYTES) + 1)[0]
    except FileNotFoundError:
        raise UsageError(f"{path} is not there; name a folder with a whole model") from None
    except OSError as error:
        raise StorageError(f"{path} cannot be read ({error.strerror}); get the file again") from None
    if len(content) > _MOST_BYTES:
        raise StorageError(f"{path} has more than {_MOST_BYTES >> 20} MiB; get the file again")
    try:
        found = json.loads(content.decode())
    except ValueError as error:
        raise StorageError(f"{path} holds no JSON ({error}); get the file again") from None
    except RecursionError:
        found = None
    if found is None or _is_deep(found):
        raise StorageError(f"{path} holds JSON of more than {_MOST_DEEP} levels; get the file again")
    if not isinstance(found, dict):
        raise StorageError(f"{path} holds no JSON object; get the file again")
    return found


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object to a file, which is complete or not there. A link is replaced, and its target is not."""
    with atomic_file(path, follow=False) as new:
        new.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _is_deep(value: Any) -> bool:
    """Whether a value has more levels than other programs read."""
    level = [value]
    for _ in range(_MOST_DEEP):
        lists = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level = [each for some in lists for each in some]
    return bool(level)
