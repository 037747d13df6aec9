"""`Arch`: what a target offers, and which knob values the search tries there. Data, read from `arch/<name>.yaml`.

A new target is a new file. A file is checked when it is read: every key present, none unknown, each value of its kind.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from hadagen.errors import UsageError
from hadagen.target import check_arch

KnobValue = int | str

ARCH_DIRECTORY = Path(__file__).with_suffix("")

FEATURES = frozenset({"mma", "cp_async", "bulk_copy", "cluster", "dependent_launch"})

# Every value that a plan can be built with, knob by knob; a file's `search` lists those worth trying on its target.
KNOB_VALUES: dict[str, tuple[KnobValue, ...]] = {
    "chunks": (1, 2, 4, 8, 16),
    "warps": (1, 2, 4, 8, 16, 32),
    "cluster": (1, 2, 4, 8, 16),
    "block_bits": ("exchange", "load"),
    "far_bits": ("registers", "lanes"),
    "far_lanes": ("shuffle", "mma_two", "mma"),
    "low_bits": ("mma", "mma_shuffle", "shuffle"),
    "shuffles": ("whole", "half"),
    "mma_carrier": ("packed", "fp16", "split", "tf32"),
    "accumulator": ("fp32", "packed"),
    "butterfly_carrier": ("packed", "fp32"),
    "exchange_carrier": ("packed", "fp32"),
    "exchange_rounds": (1, 2),
    "shared_layout": ("linear", "padded", "swizzled"),
    "order": ("by_step", "by_chunk", "by_group"),
    "load": ("plain", "no_allocate", "cp_async", "bulk", "multicast"),
    "grid": ("tiles", "persistent"),
    "stages": (1, 2),
    "min_blocks": (1, 2, 3, 4, 5, 6, 7, 8),
    "ahead": (0, 1, 2, 4, 8, 16),
    "store": ("plain", "streaming"),
    "trigger": ("end", "store", "load"),
}


@dataclass(frozen=True)
class Limits:
    """What one launch may use at most. Shared memory in bytes, registers of 32 bits."""

    threads_per_block: int
    threads_per_sm: int
    blocks_per_sm: int
    registers_per_thread: int
    registers_per_sm: int
    shared_per_block: int
    shared_per_sm: int
    shared_reserved_per_block: int
    cluster_blocks: int


@dataclass(frozen=True)
class Model:
    """What the cost model knows of a typical device of the target. Times in microseconds, or in cycles of an SM."""

    sms: int
    l2_bytes: int
    cycles_per_us: float
    dram_bytes_per_us: float
    l2_bytes_per_us: float
    sm_bytes_per_cycle: float
    launch_us: float
    early_us: float
    prefetch_share: float
    dram_latency_us: float
    l2_latency_us: float
    mma_cycles: float
    block_sync_cycles: float
    cluster_sync_cycles: float
    cluster_bytes_per_cycle: float


@dataclass(frozen=True)
class Arch:
    """A target. `search`: the values to try, by knob, in the order of `KNOB_VALUES`."""

    name: str
    compute_capability: tuple[int, int]
    nvcc_arch: str
    limits: Limits
    features: frozenset[str]
    search: Mapping[str, tuple[KnobValue, ...]] = field(hash=False)
    model: Model

    def narrowed(self, only: Mapping[str, Sequence[KnobValue]]) -> Arch:
        """The same target, of which fewer values are searched: those in `only`, for each knob that it names.

        Values keep their order. Raises `UsageError` where a knob is unknown, or a value not searched, or there is none.
        """
        for knob, values in only.items():
            if knob not in self.search:
                raise UsageError(f"knob {knob!r} is not known; choose from {', '.join(self.search)}")
            searched = ", ".join(map(str, self.search[knob]))
            if not values:
                raise UsageError(f"knob {knob} is left no value to search; give at least one of {searched}")
            for value in values:
                if value not in self.search[knob]:
                    raise UsageError(
                        f"knob {knob} = {value!r} is not searched on {self.name}; choose one of {searched}"
                    )
        kept = {knob: tuple(value for value in self.search[knob] if value in values) for knob, values in only.items()}
        return replace(self, search={**self.search, **kept})


def known_archs() -> list[str]:
    """Names of the targets there is a file for, sorted."""
    return sorted(path.stem for path in ARCH_DIRECTORY.glob("*.yaml"))


@cache
def load_arch(name: str) -> Arch:
    """The target called `name`, such as "sm90". Raises `UsageError` where it is unknown or its file is wrong."""
    if name not in known_archs():
        raise UsageError(f"arch {name!r} is not known; choose one of {', '.join(known_archs())}")
    return read_arch(ARCH_DIRECTORY / f"{name}.yaml")


def read_arch(path: Path) -> Arch:
    """Read and check one file. Raises `UsageError` with the file, the key, its value and what was expected, or where
    the file's name is none of an arch."""
    check_arch(path.stem)
    values = _Mapping(path.name, "", _parse(path), {f.name for f in fields(Arch)})
    return Arch(
        name=values.text("name", re.escape(path.stem), f"{path.stem!r}, as the file is called"),
        compute_capability=values.version("compute_capability"),
        nvcc_arch=values.text("nvcc_arch", r"sm_\d+[af]?", "a target of nvcc such as 'sm_90'"),
        limits=values.record("limits", Limits),
        features=frozenset(values.choices("features", sorted(FEATURES))),
        search=values.search("search"),
        model=values.record("model", Model),
    )


def _parse(path: Path) -> Any:
    import yaml  # here, so that `known_archs` works without it

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}; give a readable file") from None
    except RecursionError:
        raise UsageError(f"{path.name} is nested too deeply; write it like those in {ARCH_DIRECTORY}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path.name} is not YAML; correct it: {' '.join(str(error).split())}") from None


_Choice = TypeVar("_Choice", bound=KnobValue)
_Record = TypeVar("_Record", Limits, Model)


class _Mapping:
    """One mapping of a file: exactly the given keys, and a getter for each kind of value that checks it."""

    def __init__(self, file: str, prefix: str, values: Any, keys: set[str]) -> None:
        self._file, self._prefix = file, prefix
        if not isinstance(values, dict):
            raise UsageError(f"{file}: {prefix.rstrip('.') or 'the file'} is {values!r}; expected a mapping")
        for key in values:
            if key not in keys:
                raise UsageError(f"{file}: {prefix}{key} is not a known key; remove it or use one of {_list(keys)}")
        if missing := keys - set(values):
            raise UsageError(f"{file}: {_list({prefix + key for key in missing})} is missing; add it")
        self._values: dict[str, Any] = values

    def text(self, key: str, pattern: str, expectation: str) -> str:
        value = self._values[key]
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            raise self._wrong(key, value, expectation)
        return value

    def version(self, key: str) -> tuple[int, int]:
        value = self._values[key]
        if not (isinstance(value, list) and len(value) == 2 and all(type(part) is int and part >= 0 for part in value)):
            raise self._wrong(key, value, "[major, minor], such as [9, 0]")
        return value[0], value[1]

    def choices(self, key: str, known: Sequence[_Choice]) -> tuple[_Choice, ...]:
        value = self._values[key]
        exact = [(type(choice), choice) for choice in known]  # True and 1.0 both equal 1
        if not isinstance(value, list) or any((type(choice), choice) not in exact for choice in value):
            raise self._wrong(key, value, f"a list of values out of {_list(known)}")
        if len(set(value)) != len(value):
            raise self._wrong(key, value, "no value twice")
        return tuple(value)

    def record(self, key: str, kind: type[_Record]) -> _Record:
        inner = _Mapping(self._file, f"{key}.", self._values[key], {f.name for f in fields(kind)})
        numbers: dict[str, Any] = {f.name: inner._number(f.name, whole=f.type == "int") for f in fields(kind)}
        return kind(**numbers)

    def search(self, key: str) -> dict[str, tuple[KnobValue, ...]]:
        inner = _Mapping(self._file, f"{key}.", self._values[key], set(KNOB_VALUES))
        ranges = {knob: inner.choices(knob, known) for knob, known in KNOB_VALUES.items()}
        for knob, values in ranges.items():
            if not values:
                raise inner._wrong(knob, [], "at least one value to try")
        return ranges

    def _number(self, key: str, *, whole: bool) -> Any:
        value = self._values[key]
        if type(value) not in ((int,) if whole else (int, float)) or not 0 < value < float("inf"):
            raise self._wrong(key, value, f"a {'whole ' if whole else ''}number above 0")
        return value

    def _wrong(self, key: str, value: Any, expectation: str) -> UsageError:
        return UsageError(f"{self._file}: {self._prefix}{key} is {value!r}; expected {expectation}")


def _list(values: Iterable[Any]) -> str:
    return ", ".join(str(value) for value in (sorted(values) if isinstance(values, set) else values))
