"""The weights and the rotation that hadagen chooses where a program names none, and why: a table of measurements.

`docs/refresh.py` writes the table, defaults.json, from the perplexities of a small model and the times of a
decoder. The rotation depends on the weights alone, so a model that one machine quantizes suits any other.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from hadagen.models.json_file import read_json

TABLE = Path(__file__).with_name("defaults.json")


class Default(NamedTuple):
    """A value of a scheme, and the measurements that speak for it."""

    value: str | None
    why: str


def weights_for(capability: int) -> Default:
    """The weights for a GPU of a compute capability, such as 90 for sm90; 0 for a CPU and any other device."""
    *_, row = (row for row in _table()["gpus"] if row["from"] <= capability)  # in order
    return Default(**row["weights"])


def weights_here() -> Default:
    """The weights for the GPU that PyTorch uses in this machine, or for a CPU if there is none."""
    import torch  # which a program that reads a scheme need not have

    is_nvidia = torch.cuda.is_available() and torch.version.hip is None
    major, minor = torch.cuda.get_device_capability() if is_nvidia else (0, 0)
    return weights_for(10 * major + minor)


def rotation_for(weights: str, is_foldable: bool, has_cache: bool) -> Default:
    """The rotation for weights in codes. is_foldable: whether "quarot" is possible. has_cache: whether keys and values
    have codes too, which want a rotation of heads."""
    found = Default(**_table()["rotations"][weights]["any" if is_foldable else "unfolded"])
    if found.value or not has_cache:
        return found
    return Default("heads", f"{found.why}, and keys and values in codes want rotated heads")


@cache
def _table() -> dict[str, Any]:
    return read_json(TABLE)
