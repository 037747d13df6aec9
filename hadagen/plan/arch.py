"""`Arch`: what a target offers, and which knob values the search tries there. Data, read from `arch/<name>.yaml`.

A new target is a new file. A file may say `like: sm90`: then it has that file's values where it gives none of its own.
A file is checked when it is read: every key present, none unknown, each value of its kind.

A program that calls kernels may have no package that reads YAML. So all archs are in `archs.json` too, which `make
archs` writes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from hadagen.errors import UsageError, choice, shown
from hadagen.plan.knobs import KNOB_VALUES, KnobValue
from hadagen.problem.target import ARCH_DIRECTORY, check_arch, known_archs

# What a plan may need and some targets lack: instructions, and from which target on PTX has them. Each is documented in
# the section of the PTX ISA that is named, under "Target ISA Notes". A primitive that has another way where its
# instruction is lacking needs no feature: see `templates/device/primitives.cuh`.
#
#   mma_f16           mma.sync.m16n8k8 of f16, movmatrix    sm_75  "mma", "movmatrix"
#   mma_bf16          mma.sync.m16n8k16 of bf16             sm_80  "mma"
#   mma_tf32          mma.sync.m16n8k8 of tf32              sm_80  "mma"
#   bf16x2_fma        fma.rn.bf16x2                         sm_80  "fma" of half precision
#   xorsign_bf16x2    max.xorsign.abs.bf16x2                sm_86  "max" of half precision
#   cp_async          cp.async.cg, mbarrier.test_wait       sm_80  "cp.async", "mbarrier"
#   bulk_copy         cp.async.bulk, mbarrier.try_wait      sm_90  "cp.async.bulk", "cp.async.bulk.prefetch", "mbarrier"
#   cluster           barrier.cluster, mapa, st.async       sm_90  "barrier.cluster", "mapa", "st.async"
#   dependent_launch  griddepcontrol                        sm_90  "griddepcontrol"
#   wgmma             wgmma.mma_async                       sm_90a "wgmma.mma_async"
#
# One is no instruction: `multicast_in_place`. A multicast copy reads each value once, for all blocks. So when a row has
# landed in one block, results may replace it in memory. PTX does not promise that. A GPU test checks it, target by
# target.
Feature = Literal[
    "mma_f16",
    "mma_bf16",
    "mma_tf32",
    "bf16x2_fma",
    "xorsign_bf16x2",
    "cp_async",
    "bulk_copy",
    "cluster",
    "dependent_launch",
    "multicast_in_place",
    "wgmma",
]


# Features of one architecture, which no later one has: the "a" in the names of PTX targets.
SPECIFIC = frozenset({"wgmma"})

_ARCHS = ARCH_DIRECTORY / "archs.json"


class _Least:
    """Annotates a number with the least value that a file may give. Pydantic asks for it when it reads a file, so that
    this module works without Pydantic."""

    def __init__(self, **bound: int) -> None:
        self._bound = bound

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return {**handler(source), **self._bound}


_Count = Annotated[int, _Least(gt=0)]
_Number = Annotated[float, _Least(gt=0)]
# How Pydantic reads the classes below: numbers are never made of texts, nor whole ones of fractions.
_STRICT = {"extra": "forbid", "strict": True, "allow_inf_nan": False}
_REGISTER_GRANULE = 8  # registers of a thread are a multiple of this
# What it says of a mistake needs other words where the mistake is of a key.
_MISTAKES = {"missing": "is missing; add it", "unexpected_keyword_argument": "is not a known key; remove it"}


@dataclass(frozen=True)
class Limits:
    """The limits of a launch. Shared memory in bytes, registers of 32 bits."""

    __pydantic_config__: ClassVar = _STRICT

    threads_per_block: _Count
    threads_per_sm: _Count
    blocks_per_sm: _Count
    registers_per_thread: _Count
    registers_per_sm: _Count
    shared_per_block: _Count
    shared_per_sm: _Count
    shared_reserved_per_block: Annotated[int, _Least(ge=0)]
    cluster_blocks: _Count

    def resident_blocks(self, threads: int, shared_bytes: int, registers: int) -> int:
        """The number of such blocks that an SM holds at once, at least 1. registers: those of a thread."""
        granted = -(-registers // _REGISTER_GRANULE) * _REGISTER_GRANULE
        return max(
            1,
            min(
                self.blocks_per_sm,
                self.threads_per_sm // threads,
                self.registers_per_sm // (granted * threads),
                self.shared_per_sm // max(1, shared_bytes + self.shared_reserved_per_block),
            ),
        )


@dataclass(frozen=True)
class Model:
    """A typical device of the target, in numbers for the cost model. Times in microseconds, or in cycles of an SM."""

    __pydantic_config__: ClassVar = _STRICT

    sms: _Count
    l2_bytes: _Count
    cycles_per_us: _Number
    dram_bytes_per_us: _Number
    l2_bytes_per_us: _Number
    sm_bytes_per_cycle: _Number
    launch_us: _Number
    early_us: _Number
    prefetch_share: _Number
    dram_latency_us: _Number
    l2_latency_us: _Number
    mma_cycles: _Number
    block_sync_cycles: _Number
    cluster_sync_cycles: _Number
    cluster_bytes_per_cycle: _Number


@dataclass(frozen=True)
class NeverFaster:
    """Choices that are left out of a search, because none was ever the fastest: those that have one of the values of
    each of these knobs. why: in words. with_matrix: whether it is said of kernels with a matrix, or of all others."""

    __pydantic_config__: ClassVar = _STRICT

    knobs: Mapping[str, tuple[KnobValue, ...]] = field(hash=False)
    why: str
    with_matrix: bool = False


@dataclass(frozen=True)
class Arch:
    """A target. `search`: the values to try, by knob, in the order of `KNOB_VALUES`; a file names only the knobs that
    have fewer."""

    __pydantic_config__: ClassVar = _STRICT

    nvcc_arch: str
    limits: Limits
    features: frozenset[Feature]
    search: Mapping[str, tuple[KnobValue, ...]] = field(hash=False)
    never_faster: tuple[NeverFaster, ...]
    model: Model

    @property
    def name(self) -> str:
        """Such as "sm90"."""
        return self.nvcc_arch.replace("_", "").rstrip("af")

    @property
    def compute_capability(self) -> str:
        """Such as "9.0"."""
        return f"{self.name[2:-1]}.{self.name[-1]}"

    @property
    def starts_early(self) -> bool:
        """Whether a kernel may start while the one before it in the stream ends."""
        return "dependent_launch" in self.features

    def narrowed(self, only: Mapping[str, Sequence[KnobValue]]) -> Arch:
        """The same target with fewer values to search: those in `only`, for each knob that it names.

        Values keep their order. Raises `UsageError` where a knob is unknown, or a value not searched, or there is none.
        """
        for knob, values in only.items():
            if knob not in self.search:
                raise UsageError(f"knob {shown(knob)} is not known; {choice(knob, self.search)}")
            searched = ", ".join(map(str, self.search[knob]))
            if not values:
                raise UsageError(f"knob {knob} is left no value to search; give at least one of {searched}")
            for value in values:
                if value not in self.search[knob]:
                    raise UsageError(
                        f"knob {knob} = {shown(value)} is not searched on {self.name}; choose one of {searched}"
                    )
        kept = {knob: tuple(value for value in self.search[knob] if value in values) for knob, values in only.items()}
        return replace(self, search={**self.search, **kept})


@cache
def load_arch(name: str) -> Arch:
    """The target called `name`, such as "sm90". Raises `UsageError` where it is unknown or its file is wrong."""
    if name not in known_archs():
        raise UsageError(f"arch {shown(name)} is not known; choose one of {', '.join(known_archs())}")
    values = json.loads(_ARCHS.read_text(encoding="utf-8")).get(name)
    if values is None:
        raise UsageError(f"arch {name} is not in {_ARCHS.name} yet; run make archs")
    return Arch(
        values["nvcc_arch"],
        Limits(**values["limits"]),
        frozenset(values["features"]),
        KNOB_VALUES | _values(values["search"]),
        tuple(NeverFaster(**each | {"knobs": _values(each["knobs"])}) for each in values["never_faster"]),
        Model(**values["model"]),
    )


def _values(read: Mapping[str, Sequence[KnobValue]]) -> dict[str, tuple[KnobValue, ...]]:
    return {knob: tuple(values) for knob, values in read.items()}


def write_archs() -> None:
    """Write `archs.json` from the files of all archs. Raises as `read_arch` does."""
    archs = {name: read_arch(ARCH_DIRECTORY / f"{name}.yaml") for name in known_archs()}
    said = {
        name: {
            **asdict(arch),
            "features": sorted(arch.features),
            "search": {knob: values for knob, values in arch.search.items() if values != KNOB_VALUES[knob]},
        }
        for name, arch in archs.items()
    }
    _ARCHS.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")


def read_arch(path: Path) -> Arch:
    """Read and check one file. Raises `UsageError` with the file, the key, its value and what was expected, or if
    the file's name is not that of an arch."""
    from pydantic import TypeAdapter, ValidationError  # here, as YAML below: whoever has an arch needs neither

    check_arch(path.stem)
    try:
        arch = TypeAdapter(Arch).validate_json(_as_json(path, _completed(path)))
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        where = ".".join(map(str, wrong["loc"])) or "the file"
        what = _MISTAKES.get(wrong["type"], "is {input}; {msg}").format(**wrong | {"input": shown(wrong["input"])})
        what = what.replace("Input should be", "expected")
        raise UsageError(f"{path.name}: {where} {what}") from None
    if arch.name != path.stem:
        target = path.stem.replace("sm", "sm_")
        raise UsageError(f"{path.name}: nvcc_arch is {arch.nvcc_arch!r}; expected {target!r}, as the file is called")
    try:
        whole = replace(arch, search=KNOB_VALUES)
        for each in arch.never_faster:
            whole.narrowed(each.knobs)  # or it raises
        return whole.narrowed(arch.search)
    except UsageError as error:
        raise UsageError(f"{path.name}: {error}") from None


def _completed(path: Path) -> Any:
    """The values of a file, completed by the file that its `like` names. The other file must be whole in itself."""
    values = _read(path)
    if not isinstance(values, dict) or "like" not in values:
        return values
    name = values.pop("like")
    other = _read(ARCH_DIRECTORY / f"{name}.yaml") if name in known_archs() else {"like": None}
    if "like" in other:
        whole = ", ".join(arch for arch in known_archs() if "like" not in _read(ARCH_DIRECTORY / f"{arch}.yaml"))
        raise UsageError(f"{path.name}: like is {shown(name)}; expected an arch whose file is whole: {whole}")
    for section, inherited in other.items():
        if isinstance(inherited, dict) and isinstance(values.get(section), dict):
            values[section] = {**inherited, **values[section]}
    return {**other, **values}


def _as_json(path: Path, values: Any) -> str:
    try:
        return json.dumps(values)
    except (ValueError, TypeError) as error:  # what JSON does not know is not of an arch either
        raise _not_yaml(path, error) from None


def _read(path: Path) -> Any:
    import yaml

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}; give a readable file") from None
    except RecursionError:
        raise UsageError(f"{path.name} is nested too deeply; write it like those in {ARCH_DIRECTORY}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise _not_yaml(path, error) from None


def _not_yaml(path: Path, error: Exception) -> UsageError:
    return UsageError(f"{path.name} is not YAML; correct it: {' '.join(str(error).split())}")
