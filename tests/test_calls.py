"""`hadagen bench calls`, and the ladder it climbs."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from command_line import run, sentence, succeed

from hadagen.errors import DeviceError
from hadagen.runtime import costs


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_it_says_so() -> None:
    assert "NVIDIA" in sentence(run("bench", "calls"), 1)


def test_the_ladder_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = SimpleNamespace(gpu="NVIDIA H100", driver="580.1")
    monkeypatch.setattr("hadagen.measure.device_environment", lambda device: environment)
    monkeypatch.setattr(costs, "call_costs", lambda device: {"in place": 4.5678, "out of place": 6.0})
    monkeypatch.setattr(costs, "start_costs", lambda device: {"the first call": 31.44})
    text = succeed("bench", "calls")
    assert "NVIDIA H100, [64, 128] float16: CPU time of one call" in text
    assert "in place      4.57" in text
    assert "the first call     31.4" in text
    value = json.loads(succeed("bench", "calls", "--json"))
    assert (value["us"], value["tensor"]) == ({"in place": 4.5678, "out of place": 6.0}, "[64, 128] float16")
    assert value["ms"] == {"the first call": 31.44}
    assert set(value) == {"gpu", "python", "torch", "driver", "tensor", "us", "ms"}


def test_what_a_process_pays_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(costs, "_STARTS", 1)
    for name in ("json", "torch"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('a module of the folder in which the user is')")
    monkeypatch.chdir(tmp_path)
    found = costs.start_costs("cpu")
    assert list(found) == ["import hadagen, after torch", "the first call, after PyTorch's own"]
    assert all(0 < ms < 1e5 for ms in found.values())
    with pytest.raises(DeviceError, match=r"could not transform anything \(.*\); see `hadagen doctor`"):
        costs.start_costs("cuda:99")
