"""`LaunchSpec`: how a compiled kernel is launched, derived from a plan once, then only read. `Source`: what it is
compiled from."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from hadagen.scale import ScaleForm

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


class RowShape(NamedTuple):
    """How the rows of a call lie in memory, for a pitched kernel: the first `columns` ≤ n elements of each are there,
    x's rows `x_pitch` elements apart and y's `y_pitch`. The rest of a row counts as zeros and is not stored."""

    columns: int
    x_pitch: int
    y_pitch: int


@dataclass(frozen=True)
class LaunchSpec:
    """Launch geometry of one kernel.

    Every kernel has the signature `(const void* x, void* y, int64 elements, uint32 scale_word)`, where elements is
    rows · n, the word has the `scale_form`, and x may equal y. A `pitched` one takes `int64 columns, x_pitch, y_pitch`
    after these.
    A *tile* is what one cluster (of `cluster` blocks) transforms at a time: `tile_elements` elements of whole rows.

    Raises `ValueError` for what no GPU can launch.
    """

    threads: int
    cluster: int
    shared_bytes: int  # dynamic shared memory of one block
    tile_elements: int
    persistent: bool  # the grid is as large as the device holds at once, and blocks loop over tiles
    scale_form: ScaleForm = ScaleForm.FP32
    pitched: bool = False
    # Its blocks may start while the kernel before it in the stream ends (programmatic dependent launch, CUDA C++
    # Programming Guide); they wait for that end themselves before they touch global memory.
    starts_early: bool = False

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            kind = ScaleForm if name == "scale_form" else int if name in _LAUNCHABLE else bool
            if type(value) is not kind or value not in _LAUNCHABLE.get(name, (value,)):
                raise ValueError(f"no GPU can launch a kernel with {name} = {value!r:.40}")

    def grid(self, elements: int, resident_blocks: int) -> int:
        """Blocks to launch for `elements` = rows · n.

        `resident_blocks`: blocks of this kernel that the whole device holds at once (occupancy · SMs).
        """
        tiles = -(-elements // self.tile_elements)
        if self.persistent:
            tiles = min(tiles, resident_blocks // self.cluster)
        return tiles * self.cluster

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"scale_form": self.scale_form.value}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LaunchSpec:
        return cls(**values | {"scale_form": ScaleForm(values["scale_form"])})


@dataclass(frozen=True)
class Source:
    """One kernel: its name, the text of a translation unit that includes `hadagen.cuh` and defines it, and how it is
    launched."""

    entry: str
    text: str
    launch: LaunchSpec
