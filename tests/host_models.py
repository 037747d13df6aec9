"""A model with every kind of buffer that a `Rotation` has, for the tests of libraries that load, cast, move and shard
buffers; and what these libraries do with it on two processes: `python host_models.py RANK PORT` prints a line of JSON
for each operation."""

import copy
import json
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch

from hadagen import Rotation

NAMES = ("signs", "both", "regular", "given", "folded", "named")
CPU = torch.device("cpu")


def signs_of(n: int, seed: int) -> torch.Tensor:
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randint(0, 2, (n,), generator=generator, device="cpu") * 2 - 1


def orthogonal(k: int, seed: int) -> torch.Tensor:
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return torch.linalg.qr(torch.randn(k, k, generator=generator, dtype=torch.float32, device="cpu")).Q


class Model(torch.nn.Module):
    """Rotations with the signs and the matrix of a seed, and a layer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(96, 96)
        self.signs = Rotation(96, signs=signs_of(96, seed).tolist())
        self.both = Rotation(96, signs=signs_of(48, seed), signs_after=signs_of(48, seed + 100), block=48)
        self.regular = Rotation(96, "regular", signs_after=signs_of(16, seed), block=16)
        self.given = Rotation(96, orthogonal(12, seed) * (1 + 2 * seed))
        self.folded = Rotation(96, signs=signs_of(24, seed), block=24)
        self.named = Rotation(96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All rotations, one behind the other; without the layer, whose values no test is about."""
        for name in NAMES:
            x = getattr(self, name)(x)
        return x


X = torch.randn(3, 96, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
EXPECTED = {seed: Model(seed)(X) for seed in (0, 1)}


def is_map_of(model: Callable[[torch.Tensor], torch.Tensor], seed: int) -> bool:
    """Whether the model computes what one of this seed does, to the last bit."""
    return torch.equal(model(X.clone()).float(), EXPECTED[seed])


# ---- on two processes ------------------------------------------------------------------------------------------------
def ddp(rank: int) -> Any:
    return torch.nn.parallel.DistributedDataParallel(Model(rank))


def fsdp1(rank: int) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

    mixed = MixedPrecision(buffer_dtype=torch.bfloat16)
    return FullyShardedDataParallel(Model(0), mixed_precision=mixed, device_id=CPU)


def fsdp1_on_meta(rank: int) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    with torch.device("meta"):
        model = Model(0)
    return FullyShardedDataParallel(model, device_id=CPU)  # which calls reset_parameters


def fsdp1_loaded(rank: int) -> Any:
    model, state = fsdp1(rank), Model(1).state_dict()
    model.load_state_dict(state)
    state = model.state_dict()
    plain = Model(0)
    plain.load_state_dict(state)
    assert is_map_of(model, 1)
    model.load_state_dict(Model(0).state_dict())
    assert is_map_of(plain, 1)
    return model


def mesh() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (2,))


def fsdp2(rank: int) -> Any:
    from torch.distributed.fsdp import fully_shard

    model = Model(0).bfloat16()
    fully_shard(model.layer, mesh=mesh())
    return fully_shard(model, mesh=mesh())


def fsdp2_on_meta(rank: int) -> Any:
    """Made on the meta device, with other signs, and filled from the full state dict of rank 0."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    with torch.device("meta"):
        model = Model(1)
    fully_shard(model, mesh=mesh())
    model.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, Model(0).state_dict() if rank == 0 else {}, options=options)
    return model


def checkpoint(rank: int) -> Any:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    folder = [tempfile.mkdtemp()] if rank == 0 else [None]
    torch.distributed.broadcast_object_list(folder)
    dcp.save(get_model_state_dict(fully_shard(Model(0), mesh=mesh())), checkpoint_id=folder[0])
    other = fully_shard(Model(1), mesh=mesh())
    state = get_model_state_dict(other)
    dcp.load(state, checkpoint_id=folder[0])
    set_model_state_dict(other, state)
    return other


def replicated(rank: int) -> Any:
    from torch.distributed.tensor import distribute_module

    model = Model(0)
    for name in NAMES:
        distribute_module(getattr(model, name), mesh())
    return model


OF_TWO = (ddp, fsdp1, fsdp1_on_meta, fsdp1_loaded, fsdp2, fsdp2_on_meta, checkpoint, replicated)


def main(rank: int, port: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    for operation in OF_TWO:
        try:
            model = operation(rank)
            found = "green" if is_map_of(model, 0) and is_map_of(copy.copy(model), 0) else "another map"
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        print(json.dumps([operation.__name__, found]), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
