"""What the plugin for vLLM does without a vLLM that fits. tests/test_engine_vllm.py has vLLM."""

import sys
from types import SimpleNamespace

import pytest
import torch

from hadagen import Rotation
from hadagen.integrations import host, vllm


def test_a_hook_that_fails_does_not_keep_vllm_from_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hadagen.integrations.host._warned", set())
    monkeypatch.setitem(sys.modules, "vllm", None)  # as if it were not installed
    monkeypatch.setattr(vllm, "_hook_hadacore", lambda: 1 // 0)
    with pytest.warns(UserWarning, match="does not use hadagen here") as caught:
        vllm.register()
    said = [str(each.message) for each in caught]
    assert len(said) == 3
    assert "it has no vllm.model_executor" in said[0]
    assert "ZeroDivisionError: integer division or modulo by zero" in said[1]


@pytest.mark.parametrize("n", [2, 64, 1536])
def test_a_weight_that_was_loaded_into_the_same_memory_counts(n: int) -> None:
    def weight_of(seed: int) -> torch.Tensor:
        signs = torch.randint(2, (n,), generator=torch.Generator().manual_seed(seed)) * 2 - 1
        return Rotation(n, "compressed-tensors", signs=signs)(torch.eye(n, dtype=torch.float64)).bfloat16()

    weight = weight_of(0)
    shared = SimpleNamespace(partitions={0: weight.view(n, n)}, local_tensors={weight})
    scheme = SimpleNamespace(type="random-hadamard")
    layer = SimpleNamespace(weight=shared, transforms={0: ("R4", scheme, None)})
    before = vllm._rotations_of(layer)["0"]
    weight.data.div_(3)  # as vLLM scales it
    assert vllm._rotations_of(layer)["0"] is before
    weight.data.copy_(weight_of(1))
    after, x = vllm._rotations_of(layer)["0"], torch.eye(n)
    assert torch.equal(after(x).bfloat16(), weight_of(1))
    assert not vllm._is_of(after, torch.zeros_like(weight))
    for row, column in ((0, 0), (n // 2, n - 1), (n // 2, slice(None))):
        other = weight.clone()
        other[row, column] *= -1
        assert not vllm._is_of(after, other)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("switch", ["none", "transformers"])
def test_the_switch_leaves_vllm_alone(monkeypatch: pytest.MonkeyPatch, switch: str) -> None:
    monkeypatch.setenv("HADAGEN_INTEGRATIONS", switch)
    vllm.register()


def test_a_switch_with_an_unknown_name_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_warned", set())
    monkeypatch.setenv(host.SWITCH, "vlm, transformers")
    with pytest.warns(
        UserWarning, match="HADAGEN_INTEGRATIONS has 'vlm', which is not known; did you mean vllm"
    ) as caught:
        found = [vllm.HOST.is_enabled() for _ in range(2)]
    assert found == [False, False]
    assert len(caught) == 1
