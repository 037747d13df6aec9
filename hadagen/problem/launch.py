"""`LaunchSpec`: how a compiled kernel is launched, derived from a plan once, then only read. `Source`: the text that it
is compiled from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from hadagen.errors import UsageError
from hadagen.problem.scale import ScaleForm, scale_word

# Blocks of a cluster that every GPU with clusters holds, and that a kernel may have without asking for more (CUDA C++
# Programming Guide, "Thread Block Clusters").
PORTABLE_CLUSTER = 8

# What a GPU can launch ("Compute Capabilities" in the same guide): threads of a block, blocks of a cluster, bytes of
# shared memory of a block, and elements of a tile, which registers or shared memory must hold.
_LAUNCHABLE = {
    "threads": range(32, 1024 + 1, 32),
    "cluster": (1, 2, 4, 8, 16),
    "shared_bytes": range((227 << 10) + 1),
    "tile_elements": range(2, (1 << 24) + 1),
}
# Kinds of fields that are neither numbers nor flags.
_KINDS = {"scale_form": ScaleForm, "params": tuple, "arithmetic": str}
ARITHMETIC_DIGITS = 12


class RowShape(NamedTuple):
    """How the rows of a call lie in memory. Each row has its first `columns` ≤ n elements; the other elements count as
    zeros and are not stored. Rows of x lie `x_pitch` elements apart, and rows of y `y_pitch`."""

    columns: int
    x_pitch: int
    y_pitch: int


@dataclass(frozen=True)
class Param:
    """An argument that a kernel takes, `kind` its C type: a pointer to device memory, i64 or u32. The driver is given
    each in eight bytes.

    Raises `ValueError` for another kind, or a name that is none in C.
    """

    kind: str
    name: str

    def __post_init__(self) -> None:
        if self.kind not in ("const void*", "void*", "i64", "u32") or not re.fullmatch("[a-z][a-z0-9_]*", self.name):
            raise ValueError(f"no kernel takes a {self.kind!r:.40} {self.name!r:.40}")

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


# The params of every kernel: input and output, which may be the same; rows · n; and the scale in its `scale_form`.
PARAMS = (Param("const void*", "x"), Param("void*", "y"), Param("i64", "elements"), Param("u32", "scale_word"))
# More params of a kernel whose rows may be shorter than n and have gaps: the fields of a `RowShape`.
ROW_PARAMS = tuple(Param("i64", name) for name in RowShape._fields)
# The two lists of params that kernels had at first. A flag stands for them in digests.
_FIRST_PARAMS = (PARAMS, (*PARAMS, *ROW_PARAMS))


ENTRY = "hadagen_kernel"  # the name of every kernel once compiled, so that equal kernels have equal code
# Positions of the two arguments that differ from launch to launch.
X, Y = 0, 1


@dataclass(frozen=True)
class LaunchSpec:
    """Launch geometry of one kernel.

    A *tile* is what one cluster (of `cluster` blocks) transforms at a time: `tile_elements` elements of whole rows.

    Raises `ValueError` for values that no GPU can launch, and for params that do not begin with `PARAMS`.
    """

    threads: int
    cluster: int
    shared_bytes: int  # dynamic shared memory of one block
    tile_elements: int
    persistent: bool  # the grid is as large as the device holds at once, and blocks loop over tiles
    scale_form: ScaleForm = ScaleForm.FP32
    params: tuple[Param, ...] = PARAMS  # in the order of the signature
    # Its blocks may start while the kernel before it in the stream ends (programmatic dependent launch, CUDA C++
    # Programming Guide); they wait for that end themselves before they touch global memory.
    starts_early: bool = False
    # The name of its arithmetic: kernels of a problem with the same name give the same bits. "" if that is
    # not known, as of kernels that an earlier hadagen made.
    arithmetic: str = ""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            kind = _KINDS.get(name, int if name in _LAUNCHABLE else bool)
            if type(value) is not kind or value not in _LAUNCHABLE.get(name, (value,)):
                raise ValueError(f"no GPU can launch a kernel with {name} = {value!r:.40}")
        names = [param.name for param in self.params]
        if self.params[: len(PARAMS)] != PARAMS or len(set(names)) < len(names):
            raise ValueError(f"no kernel takes {self.signature:.200}")
        if not re.fullmatch(f"([0-9a-f]{{{ARITHMETIC_DIGITS}}})?", self.arithmetic):
            raise ValueError(f"{self.arithmetic!r:.40} names no arithmetic")

    @property
    def signature(self) -> str:
        """Its params as C declares them."""
        return ", ".join(map(str, self.params))

    @property
    def reads_rows(self) -> bool:
        """Whether the kernel takes a `RowShape`. If not, rows have n elements and no gaps."""
        return set(ROW_PARAMS) <= set(self.params)

    def arguments(
        self, elements: int, scale: float, rows: RowShape | None = None, operands: Mapping[str, int] | None = None
    ) -> list[int]:
        """The value of each of `params`; x and y are 0, because they differ from launch to launch.

        elements: rows · n. scale: within `scale_form.range` in magnitude. rows: for kernels that read them. operands:
        name → device address or number, for all other params. Raises `UsageError` if one is missing.
        """
        known = {"x": 0, "y": 0, "elements": elements, "scale_word": scale_word(self.scale_form, scale)}
        known |= rows._asdict() if rows else {}
        known |= operands or {}
        try:
            return [known[param.name] for param in self.params]
        except KeyError as error:
            raise UsageError(f"the kernel takes {self.signature}; give {error.args[0]} too") from None

    def grid(self, elements: int, resident_blocks: int) -> int:
        """Blocks to launch for `elements` = rows · n.

        `resident_blocks`: blocks of this kernel that the whole device holds at once (occupancy · SMs).
        """
        tiles = -(-elements // self.tile_elements)
        if self.persistent:
            tiles = min(tiles, resident_blocks // self.cluster)
        return tiles * self.cluster

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "scale_form": self.scale_form.value, "params": self.signature}

    def digested(self) -> dict[str, Any]:
        """`to_dict`, as the digest of a kernel covers it: without what does not change how it is launched. A flag
        stands for the two lists of params that there were first, so that their kernels keep their names."""
        values = self.to_dict()
        del values["arithmetic"]
        if self.params in _FIRST_PARAMS:
            del values["params"]
            values["pitched"] = self.reads_rows
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LaunchSpec:
        """Raises `ValueError`, `KeyError` or `TypeError` if the values describe no launch."""
        declared = (text.rpartition(" ") for text in str(values["params"]).split(", "))
        params = tuple(Param(kind, name) for kind, _, name in declared)
        return cls(**{**values, "scale_form": ScaleForm(values["scale_form"]), "params": params})


@dataclass(frozen=True)
class Source:
    """One kernel: its name, the text of a translation unit that includes `hadagen.cuh` and defines it, and how it is
    launched. specific: whether it has instructions of one architecture, which compilers know by a name of their own."""

    entry: str
    text: str
    launch: LaunchSpec
    specific: bool = False

    def compiled_for(self, target: str) -> str:
        """What a compiler is told to compile for. target: such as "sm_90"."""
        return target.rstrip("af") + "a" if self.specific else target

    @property
    def text_to_compile(self) -> str:
        """The text with the kernel renamed to `ENTRY`."""
        return re.sub(rf"\b{re.escape(self.entry)}(?=\()", ENTRY, self.text)
