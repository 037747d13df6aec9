"""Queries, keys and values as one product: the same values as layers of their own, in any order."""

import copy
import pickle
import threading
from itertools import permutations
from typing import Any

import pytest
import torch

from hadagen.errors import UsageError
from hadagen.models.layers import QuantizedLinear
from hadagen.models.merged import JoinedLinear, join, unmerged
from hadagen.models.scheme import Online, Scheme

NAMES, SIZES = ("q_proj", "k_proj", "v_proj"), (64, 16, 16)
SCHEMES = {
    "int8": Scheme("int8", rotation=None),
    "rotated": Scheme("int8", online=dict.fromkeys(NAMES, Online(48, 16)), rotation="blocks"),
    "fp8-tensor": Scheme("fp8", "fp8-tensor", rotation=None),
    "int4": Scheme("int4", rotation=None),
}


def attention(scheme: Scheme, *, bias: bool = False) -> torch.nn.Module:
    torch.manual_seed(0)
    parent = torch.nn.Module()
    for name, out in zip(NAMES, SIZES, strict=True):
        layer = QuantizedLinear.of(name, scheme, torch.randn(out, 48), torch.randn(out) if bias else None)
        setattr(parent, name, layer)
    return parent


def joined(parent: torch.nn.Module) -> torch.nn.Module:
    made = copy.deepcopy(parent)
    join(made, NAMES)
    assert isinstance(made.q_proj, JoinedLinear)
    return made


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_joined_layers_give_the_same_in_any_order(scheme: str, bias: bool) -> None:
    apart = attention(SCHEMES[scheme], bias=bias)
    for order in permutations(NAMES):
        together, x = joined(apart), torch.randn(3, 5, 48)
        for name in (*order, order[0]):
            assert torch.equal(getattr(together, name)(x), getattr(apart, name)(x)), (order, name)


def test_a_changed_input_is_multiplied_again() -> None:
    apart = attention(SCHEMES["int8"])
    together, x = joined(apart), torch.randn(4, 48)
    together.q_proj(x)
    x.mul_(2)
    assert torch.equal(together.k_proj(x), apart.k_proj(x))
    together = joined(apart)
    together.q_proj(x)
    first, second = together.v_proj(x), together.v_proj(x)
    first.zero_()
    assert torch.equal(second, apart.v_proj(x))
    together = joined(apart)
    together.q_proj(x)
    assert torch.equal(together.half().k_proj(x), apart.k_proj(x))
    assert together.q_proj._of_all is None, "outputs of before a move are not kept"


def test_layers_whose_outputs_are_not_all_taken_are_joined_no_more() -> None:
    apart = attention(SCHEMES["int8"])
    together, x = joined(apart), torch.randn(4, 48)
    for _ in range(2):  # of which the second call finds what the first one left
        assert torch.equal(together.q_proj(x), apart.q_proj(x))
    assert together.q_proj._of_all is None, "nothing is kept"
    assert torch.equal(together.v_proj(x), apart.v_proj(x))


def test_threads_share_layers() -> None:
    apart = attention(SCHEMES["int8"])
    together, wrong = joined(apart), list[str]()

    def call(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(40):
            x = torch.randn(2, 48, generator=generator)
            for name in NAMES:
                if not torch.equal(getattr(together, name)(x), getattr(apart, name)(x)):
                    wrong.append(name)

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong


def test_joined_layers_are_copied_stored_and_compiled() -> None:
    apart = attention(SCHEMES["rotated"], bias=True)
    together, x = joined(apart), torch.randn(4, 48)
    for made in (copy.deepcopy(together), pickle.loads(pickle.dumps(together))):
        for name in NAMES:
            assert torch.equal(getattr(made, name)(x), getattr(apart, name)(x))
    assert {name: each.shape for name, each in unmerged(together).items()} == {
        name: each.shape for name, each in apart.state_dict().items()
    }
    for name, tensor in unmerged(together).items():
        assert torch.equal(tensor, apart.state_dict()[name]), name

    def run(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(getattr(together, name)(x) for name in NAMES)

    compiled: Any = torch.compile(run, backend="aot_eager", fullgraph=True)
    for found, wanted in zip(compiled(x), run(x), strict=True):
        assert torch.equal(found, wanted)


def test_layers_that_differ_stay_apart() -> None:
    parent = attention(SCHEMES["int8"])
    parent.v_proj = torch.nn.Linear(48, 16)
    join(parent, NAMES)
    assert isinstance(parent.q_proj, QuantizedLinear)
    parent = attention(SCHEMES["fp8-tensor"])
    parent.k_proj.input_scale.fill_(2)
    join(parent, NAMES)
    assert isinstance(parent.q_proj, QuantizedLinear)


def test_tensors_of_one_layer_are_refused() -> None:
    apart = attention(SCHEMES["int8"])
    together = joined(apart)
    with pytest.raises(UsageError, match=r"q_proj\.weight is the part of q_proj, k_proj, v_proj; load a folder"):
        together.load_state_dict(apart.state_dict(), strict=False)
    with pytest.raises(UsageError, match="DataParallel"):
        together.k_proj._replicate_for_data_parallel()
