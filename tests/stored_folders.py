"""Folders of quantized models with one change: another configuration, or another tensor."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

SCHEME = ("weights", "activations", "rotation", "seed", "ignore", "cache")  # what a program says of a scheme
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    3,
    8,
    96,
    1.5,
    float("nan"),
    "",
    "fp8",
    "heads",
    [],
    ["q_proj"],
    {},
)


def paths(config: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all values in data of JSON."""
    for name in config if isinstance(config, dict) else range(len(config)) if isinstance(config, list) else ():
        yield (*at, name)
        yield from paths(config[name], (*at, name))


def change_config(config: dict[str, Any], draw: random.Random) -> str:
    """Change, remove or add one value in place. Returns what was done."""
    path = draw.choice([*paths(config)])
    held = config
    for name in path[:-1]:
        held = held[name]
    old = held[path[-1]]
    near = (
        [old + 1, old - 1, 2 * old, old // 2] if type(old) is int else [f"{old}x", old[:-1]] if type(old) is str else []
    )
    if draw.random() < 0.2:
        del held[path[-1]]
        return f"without {path}"
    new = draw.choice([*VALUES, *near, *near])
    held[path[-1]] = new
    return f"{path} = {new!r} for {old!r}"


def _set(of: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., None]:
    def change(tensors: dict[str, torch.Tensor], name: str, draw: random.Random) -> None:
        tensors[name] = of(tensors[name])

    return change


def _poke(value: float) -> Callable[..., None]:
    """One element becomes a value; of integers, another bit."""

    def change(tensors: dict[str, torch.Tensor], name: str, draw: random.Random) -> None:
        new = tensors[name].clone()
        flat = (
            new.view(-1) if new.dtype.is_floating_point and new.dtype.itemsize > 1 else new.view(-1).view(torch.uint8)
        )
        at = draw.randrange(len(flat))
        flat[at] = value if flat.dtype != torch.uint8 else int(flat[at]) ^ draw.choice((1, 64, 128, 127))
        tensors[name] = new

    return change


def _swap(tensors: dict[str, torch.Tensor], name: str, draw: random.Random) -> None:
    alike = [e for e in tensors if e != name and tensors[e].shape == tensors[name].shape]
    other = draw.choice(alike or [e for e in tensors if e != name])
    tensors[name], tensors[other] = tensors[other], tensors[name]


def _rename(tensors: dict[str, torch.Tensor], name: str, draw: random.Random) -> None:
    tensors[draw.choice((f"{name}x", name.removeprefix("model."), f"x.{name}"))] = tensors.pop(name)


def _add(tensors: dict[str, torch.Tensor], name: str, draw: random.Random) -> None:
    tensors[f"{name.rpartition('.')[0]}.{draw.choice(('bias', 'input_scale', 'weight_scale', 'extra'))}"] = torch.rand(
        48
    )


def _typed(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    other = torch.float32 if tensor.dtype == dtype else dtype
    return tensor.to(torch.float32).to(other)


TENSORS: dict[str, Callable[..., None]] = {
    "a type of 16 bits": _set(lambda t: _typed(t, torch.bfloat16)),
    "int8": _set(lambda t: _typed(t, torch.int8)),
    "float8": _set(lambda t: _typed(t, torch.float8_e4m3fn)),
    "other dimensions": _set(lambda t: t.squeeze(-1) if t.dim() > 1 and t.shape[-1] == 1 else t[..., None]),
    "transposed": _set(lambda t: t.transpose(0, -1).contiguous() if t.dim() else t[None]),
    "one row less": _set(lambda t: t[:-1].clone() if t.dim() else t[None]),
    "no element": _set(lambda t: t[:0].clone() if t.dim() else t.new_empty(0)),
    "zeros": _set(torch.zeros_like),
    "negative": _set(lambda t: (-t.float()).to(t.dtype)),
    "twice as large": _set(lambda t: (2 * t.float()).to(t.dtype)),
    "reversed": _set(lambda t: t.float().flatten().flip(0).view(t.shape).to(t.dtype)),
    "a NaN": _poke(float("nan")),
    "an infinity": _poke(float("inf")),
    "a zero": _poke(0.0),
    "a negative element": _poke(-1.0),
    "missing": lambda tensors, name, draw: tensors.pop(name),
    "swapped": _swap,
    "renamed": _rename,
    "extra": _add,
}


def change_tensor(tensors: dict[str, torch.Tensor], draw: random.Random) -> str:
    """Change, remove or add one tensor in place. Returns what was done."""
    name, kind = draw.choice(sorted(tensors)), draw.choice(sorted(TENSORS))
    TENSORS[kind](tensors, name, draw)
    return f"{name}: {kind}"


def write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def read(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
