"""`LaunchSpec`: how a compiled kernel is launched. Derived from a plan once, then only read."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class LaunchSpec:
    """Launch geometry of one kernel.

    Every kernel has the signature `(const void* x, void* y, int64 elements, float scale)`; x may equal y.
    A *tile* is what one cluster (of `cluster` blocks) transforms at a time: `tile_elements` elements of whole rows.
    """

    threads: int
    cluster: int
    shared_bytes: int  # dynamic shared memory of one block
    tile_elements: int
    persistent: bool  # the grid is as large as the device holds at once, and blocks loop over tiles

    def grid(self, elements: int, resident_blocks: int) -> int:
        """Blocks to launch for `elements` = rows · n.

        `resident_blocks`: blocks of this kernel that the whole device holds at once (occupancy · SMs).
        """
        tiles = -(-elements // self.tile_elements)
        if self.persistent:
            tiles = max(1, min(tiles, resident_blocks // self.cluster))
        return tiles * self.cluster

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LaunchSpec:
        return cls(**values)
