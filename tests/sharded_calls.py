"""What calls with DTensors give on several processes: `python sharded_calls.py RANK WORLD PORT` prints a line of JSON
for each check: its name, and "" or what went wrong."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hadagen import Quantized, Rotation, hadamard_transform, presets, rotate_quantize
from hadagen.compat import fast_hadamard_transform, quarot
from hadagen.prologues import Gelu, SiluMul

N = 64
SIGNED = Rotation(N, block=16, signs=[1, -1] * 8, signs_after=[-1, 1] * 8)
ROWS = Rotation(N, "regular", signs=[1, -1] * 32)
OF_12 = Rotation(192, block=48, signs=[1, -1] * 24)  # 12 · 4
GIVEN = Rotation(N, torch.tensor([[1.0, 2.0], [2.0, -1.0]]), block=16)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32)


def mesh() -> Any:
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),))


def same(found: Any, wanted: torch.Tensor, placed: Any = None) -> None:
    """The DTensor has these values, and is divided so."""
    assert isinstance(found, DTensor), type(found)
    assert placed is None or found.placements == (placed,), found.placements
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), (found.shape, wanted.shape)
    lies = {"shape": found.shape, "stride": found.stride()}
    part = found.to_local()
    if part.dtype == torch.float8_e4m3fn:  # which gloo does not gather
        part, wanted = part.view(torch.uint8), wanted.view(torch.uint8)
    whole = DTensor.from_local(part, found.device_mesh, found.placements, run_check=False, **lies).full_tensor()
    assert torch.equal(whole, wanted), (whole, wanted)


Call = Callable[[Any], Any]
# Name → call, columns of x, and how many of them belong together; 0 for all.
CALLS: dict[str, tuple[Call, int, int]] = {
    "hadamard_transform": (lambda x: hadamard_transform(x, 0.125), N, 0),
    "padded": (lambda x: hadamard_transform(x, 0.125), 48, 0),
    "blocks": (SIGNED, N, 16),
    "inverse": (SIGNED.inverse, N, 16),
    "rows": (ROWS, N, 0),
    "with a matrix": (OF_12, 192, 48),
    "of a given matrix": (lambda x: GIVEN(x), N, 16),
    "after gelu": (lambda x: SIGNED(x, before=Gelu()), N, 16),
    "after pairs": (lambda x: SIGNED(x, before=SiluMul(layout="interleaved")), 2 * N, 32),
    "after halves": (lambda x: SIGNED(x, before=SiluMul()), 2 * N, 0),
    "transform after halves": (lambda x: hadamard_transform(x, before=SiluMul()), 2 * N, 0),
}


def placements(world: int) -> Sequence[Any]:
    return (Shard(0), Shard(1), Shard(2), Replicate())


def check_call(name: str) -> None:
    """Rows anywhere, and columns between blocks; other columns are gathered."""
    call, columns, unit = CALLS[name]
    world, x = torch.distributed.get_world_size(), normal(4, 3, columns)
    wanted = call(x)
    for placed in placements(world):
        stays = placed != Shard(2) or (unit and columns % (world * unit) == 0)
        same(call(distribute_tensor(x, mesh(), [placed])), wanted, placed if stays else Replicate())


def partial_sums() -> None:
    x = normal(4, N)
    part = DTensor.from_local(x / torch.distributed.get_world_size(), mesh(), [Partial()], run_check=False)
    same(SIGNED(part), SIGNED(x), Replicate())


def gradients() -> None:
    for name in ("hadamard_transform", "blocks", "after gelu", "after halves"):
        call, columns, _ = CALLS[name]
        x, gradient = normal(4, 3, columns).requires_grad_(), normal(4, 3, N)
        (wanted,) = torch.autograd.grad(call(x), x, gradient)
        for placed in placements(2):
            mine = distribute_tensor(x.detach(), mesh(), [placed]).requires_grad_()
            y = call(mine)
            (found,) = torch.autograd.grad(y, mine, distribute_tensor(gradient, mesh(), y.placements))
            assert found.placements == mine.placements, (name, found.placements)
            torch.testing.assert_close(found.full_tensor(), wanted)


FORMATS: list[dict[str, Any]] = [
    {"to": "int8-row"},
    {"to": "int4-row"},
    {"to": "fp8-group", "group": 16},
    {"to": "mxfp4"},
    {"to": "fp8-tensor", "tensor_scale": 0.05},
    {"to": "nvfp4", "tensor_scale": 0.01},
    {"to": "largest", "group": 32},
    {"to": "fp8-head", "tensor_scale": torch.arange(1, 13).view(4, 3) / 50},
    {"to": "fp8-head", "tensor_scale": torch.arange(1, 5) / 50},
]


def codes() -> None:
    x = normal(4, 3, N)
    for options in FORMATS:
        for rotation in (SIGNED, ROWS, 16, None):
            wanted = rotate_quantize(x, rotation, **options)
            for placed in placements(2):
                sharded = distribute_tensor(x, mesh(), [placed])
                q = rotate_quantize(sharded, rotation, **options)
                assert isinstance(q, Quantized)
                assert q.codes.shape == wanted.codes.shape
                same(q.scales, wanted.scales)
                if placed != Shard(2):
                    assert q.codes.placements == (placed,)
                if options["to"] != "largest":  # whose codes have no elements, which PyTorch 2.6 cannot gather
                    same(q.codes, wanted.codes)
                    same(q.dequantize(), wanted.dequantize())
    q = rotate_quantize(distribute_tensor(x, mesh(), [Shard(2)]), SIGNED, to="fp8-group", group=16)
    assert q.codes.placements == q.scales.placements == (Shard(2),)
    part = torch.tensor(0.0625) / torch.distributed.get_world_size()
    scale = DTensor.from_local(part, mesh(), [Partial()], run_check=False)
    q = rotate_quantize(distribute_tensor(x, mesh(), [Shard(0)]), SIGNED, to="nvfp4", tensor_scale=scale)
    same(q.scales, rotate_quantize(x, SIGNED, to="nvfp4", tensor_scale=0.0625).scales, Shard(0))
    wide = normal(4, 3, 2 * N)
    q = rotate_quantize(distribute_tensor(wide, mesh(), [Shard(1)]), SIGNED, to="int8-row", before=SiluMul())
    same(q.codes, rotate_quantize(wide, SIGNED, to="int8-row", before=SiluMul()).codes, Shard(1))


def of_projects() -> None:
    """Functions by the names of other projects."""
    x = normal(4, 3, 256)
    has_amax = tuple(map(int, torch.__version__.split(".")[:2])) > (2, 6)  # of DTensors
    for call in (
        presets.deepseek_v32_indexer,
        presets.deepseek_v4_fp4,
        presets.convrot_int8,
        presets.quarot_int4,
        presets.qutlass_mxfp4,
        *[lambda x: presets.transformer_engine_nvfp4(x.reshape(12, 256))] * has_amax,
        fast_hadamard_transform.hadamard_transform,
        quarot.matmul_hadU,
    ):
        wanted: Any = call(x)
        for placed in (Shard(0), Replicate()):
            found: Any = call(distribute_tensor(x, mesh(), [placed]))
            pairs = zip(found, wanted, strict=True) if isinstance(wanted, Quantized) else [(found, wanted)]
            for mine, theirs in pairs:
                same(mine, theirs)


def gradients_of_codes() -> None:
    x = normal(4, N).requires_grad_()
    wanted = rotate_quantize(x, SIGNED, to="mxfp8", gradient=True).dequantize()
    (gradient,) = torch.autograd.grad(wanted.square().sum(), x)
    mine = distribute_tensor(x.detach(), mesh(), [Shard(0)]).requires_grad_()
    found = rotate_quantize(mine, SIGNED, to="mxfp8", gradient=True).dequantize()
    same(found.detach(), wanted.detach(), Shard(0))
    (mine_too,) = torch.autograd.grad(found.square().sum(), mine)
    torch.testing.assert_close(mine_too.full_tensor(), gradient)


def sentences() -> None:
    x = distribute_tensor(normal(4, N), mesh(), [Shard(0)])
    for call, words in (
        (lambda: SIGNED(x, inplace=True), "x is a DTensor, which inplace=True does not take"),
        (lambda: hadamard_transform(x, out=x), "x is a DTensor, which out= does not take"),
        (lambda: rotate_quantize(x, to="int8-row", out=(x, x)), "x is a DTensor, which out= does not take"),
        (
            lambda: rotate_quantize(x, to="mxfp8", layout="swizzled"),
            "layout = swizzled lays out the scales of all rows",
        ),
        (lambda: SIGNED(x[:, :32]), "the last dimension of x is 32; this rotation takes 64"),
        (lambda: rotate_quantize(x[:, :32], SIGNED, to="mxfp8"), "the last dimension of x is 32; this rotation"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    whole = distribute_tensor(normal(4, N), mesh(), [Replicate()])
    same(
        rotate_quantize(whole, to="mxfp8", layout="swizzled").scales,
        rotate_quantize(normal(4, N), to="mxfp8", layout="swizzled").scales,
    )


class Mlp(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = torch.nn.Linear(8, N), torch.nn.Linear(N, 8)
        self.rotation = Rotation(N, block=16, signs=[1, -1] * 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.rotation(torch.relu(self.up(x))))


def modules(compiled: bool = False) -> None:
    """A rotation between two layers, of which each rank has a part."""
    plan = {
        "up": ColwiseParallel(use_local_output=False),
        "down": RowwiseParallel(input_layouts=Shard(-1)),
    }
    x = normal(4, 8)
    model: Any = parallelize_module(Mlp(), mesh(), plan)
    seen: list[Any] = []
    model.rotation.register_forward_hook(lambda *arguments: seen.append(arguments[-1].placements))
    call = torch.compile(model, backend="aot_eager") if compiled else model
    found, wanted = call(x), Mlp()(x)
    torch.testing.assert_close(found, wanted)
    assert compiled or seen == [(Shard(1),)], seen
    found.sum().backward()
    wanted = Mlp()
    wanted(x).sum().backward()
    torch.testing.assert_close(model.up.weight.grad.full_tensor(), wanted.up.weight.grad)


def compiled() -> None:
    if torch.distributed.get_world_size() > 2:  # as it takes long
        modules(compiled=True)
        torch._dynamo.reset()
    x = normal(4, N)

    def model(x: Any) -> Any:
        q = rotate_quantize(SIGNED(x), None, to="int8-row")
        return q.codes, q.scales  # which torch.compile of earlier releases cannot unpack

    call = torch.compile(model, fullgraph=True, backend="aot_eager")
    for found, wanted in zip(call(distribute_tensor(x, mesh(), [Shard(0)])), call(x), strict=True):
        same(found, wanted, Shard(0))


def replicated_buffers() -> None:
    from torch.distributed.tensor import distribute_module

    rotation = distribute_module(Rotation(N, block=16, signs=[1, -1] * 8), mesh())
    x = normal(4, N)
    same(rotation(distribute_tensor(x, mesh(), [Shard(1)])), Rotation(N, block=16, signs=[1, -1] * 8)(x))


def two_dimensions() -> None:
    """Of the mesh."""
    world = torch.distributed.get_world_size()
    both = init_device_mesh("cpu", (world // 2, 2))
    x = normal(4, 6, N)
    for placed in (
        (Shard(0), Shard(1)),
        (Shard(1), Shard(1)),
        (Shard(0), Shard(2)),
        (Shard(2), Shard(2)),
        (Replicate(), Shard(2)),
    ):
        sharded = distribute_tensor(x, both, list(placed))
        y = SIGNED(sharded)
        assert y.placements == placed
        assert torch.equal(y.full_tensor(), SIGNED(x))
        q = rotate_quantize(sharded, SIGNED, to="int8-row")
        assert torch.equal(q.codes.full_tensor(), rotate_quantize(x, SIGNED, to="int8-row").codes)


def uneven() -> None:
    for rows in (5, 1):
        x = normal(rows, N)
        same(SIGNED(distribute_tensor(x, mesh(), [Shard(0)])), SIGNED(x), Shard(0))
        q = rotate_quantize(distribute_tensor(x, mesh(), [Shard(0)]), SIGNED, to="int8-row")
        same(q.codes, rotate_quantize(x, SIGNED, to="int8-row").codes, Shard(0))


CHECKS = {
    **{name: (lambda name=name: check_call(name)) for name in CALLS},
    **{
        each.__name__: each
        for each in (
            partial_sums,
            gradients,
            codes,
            gradients_of_codes,
            of_projects,
            sentences,
            modules,
            compiled,
            replicated_buffers,
            two_dimensions,
            uneven,
        )
    },
}


def main(rank: int, world: int, port: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    torch.set_num_threads(1)
    # Short, for ranks that wait for one with an error.
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(seconds=30))
    for name, check in CHECKS.items():
        try:
            check()
            found = ""
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        print(json.dumps([name, found]), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
