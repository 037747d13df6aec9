"""`hadamard_transform` on a GPU within PyTorch: gradients, torch.compile, vmap and autocast."""

import pytest
import torch
from gpu_tensors import assert_good, kernels_for_this_gpu, normal

from hadagen import hadamard_transform
from hadagen.runtime.call.rules import INTO, LINEAR

__all__ = ["kernels_for_this_gpu"]  # a fixture
pytestmark = pytest.mark.gpu


def test_gradients_on_a_gpu() -> None:
    x = normal(64, 256).requires_grad_()
    g = normal(64, 256, seed=1)
    hadamard_transform(x, 1 / 16).backward(g)
    assert_good(x.grad, g, 1 / 16)


def test_compiled_calls_on_a_gpu() -> None:
    torch.compiler.reset()

    def model(x: torch.Tensor) -> torch.Tensor:
        return hadamard_transform(x * 2, 1 / 16) + 1

    call = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (2, 50, 999):
        x = normal(rows, 256)
        assert torch.equal(call(x), model(x))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_the_operator_keeps_the_rules_of_pytorch(requires_grad: bool) -> None:
    x = normal(16, 256, dtype=torch.float32).requires_grad_(requires_grad)
    torch.library.opcheck(LINEAR.default, (x, None, None, None, 1 / 16, ""))
    torch.library.opcheck(INTO.default, ([x.clone()], [x.new_empty(0)], 1 / 16, "inplace"))
    if not requires_grad:
        torch.library.opcheck(INTO.default, ([x.clone()], [x], 1 / 16, ""))


def test_compile_with_inductor() -> None:
    torch.compiler.reset()

    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hadamard_transform(x, 1 / 16, inplace=True)
        return hadamard_transform(x + 1, 1 / 16, out=y) * 2

    with torch._dynamo.config.patch(error_on_recompile=True):
        call = torch.compile(model, fullgraph=True, dynamic=True)
        for rows in (2, 50, 999):
            ours, theirs = normal(rows, 256), normal(rows, 256)
            torch.testing.assert_close(call(ours, torch.empty_like(ours)), model(theirs, torch.empty_like(theirs)))
            assert torch.equal(ours, theirs)


def test_batches_and_autocast() -> None:
    x = normal(8, 64, 256, dtype=torch.float32)
    for dim in (0, 1):
        y = torch.vmap(lambda x: hadamard_transform(x, 1 / 16), dim, dim)(x)
        assert torch.equal(y, hadamard_transform(x, 1 / 16))
    with torch.autocast("cuda"):
        assert hadamard_transform(x).dtype == torch.float32
