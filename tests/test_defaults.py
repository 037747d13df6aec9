"""The table of default weights and rotations: it follows from the data, and folders have what was chosen."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import refresh_defaults
import refresh_files

pytest.importorskip("transformers", "5.0")
from command_line import run
from every_model import made

from hadagen.integrations.transformers import HadagenConfig
from hadagen.models import defaults
from hadagen.models.defaults import rotation_for, weights_for, weights_here
from hadagen.models.scheme import WEIGHTS, Scheme


def test_the_table_follows_from_the_data() -> None:
    assert defaults.TABLE.read_text(encoding="utf-8") == refresh_defaults.defaults(), "run: make docs"
    assert defaults.TABLE == refresh_files.DEFAULTS


@pytest.mark.parametrize(
    ("capability", "weights", "why"),
    [
        (0, "int8", r"rises by 0\.7% with int8 and 3\.3% with fp8"),
        (70, "int8", r"rises by 0\.7%"),
        (75, "int8", "the only codes of 8 bits"),
        (87, "int8", "the only codes of 8 bits"),
        (89, "int8", r"int8 takes \d% more time than the fastest"),
        (90, "int8", r"int8 takes \d% more time"),
        (100, "fp8", "the only codes of 8 bits"),
        (121, "fp8", "the only codes of 8 bits"),
    ],
)
def test_weights_of_each_class_of_gpus(capability: int, weights: str, why: str) -> None:
    found = weights_for(capability)
    assert found.value == weights
    assert re.search(why, found.why)


def test_the_default_without_a_gpu_is_that_of_a_scheme() -> None:
    assert weights_for(0).value == Scheme.weights


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_scheme_has_the_rotation_of_the_table(weights: str) -> None:
    for is_foldable in (True, False):
        for cache in (None, "int8"):
            found = rotation_for(weights, is_foldable, cache is not None)
            assert Scheme(weights, cache=cache).resolved(is_foldable).rotation == found.value
            assert "%" in found.why


def test_a_much_better_rotation_is_chosen() -> None:
    """And a loss within two standard errors is not."""
    base: dict[str, Any] = {"loss": [1.0] * 6}

    def chosen(*losses: list[float], seeds: tuple[float, ...] = (0.0,)) -> Any:
        of_seeds = [[[each + by for each in of] for by in seeds] for of in losses]
        return refresh_defaults._rotation(dict(zip(refresh_defaults.ROTATIONS, of_seeds, strict=True)), base)["value"]

    spread = [0.0, 0.2, -0.1, 0.1, -0.2, 0.1]
    noisy = [1 + each for each in spread]
    assert chosen([1.0] * 6, [0.9] * 6, [0.9] * 6) == "quarot"
    assert chosen([1.0] * 6, [0.9] * 6, [0.8] * 6) == "blocks"
    assert chosen([1.0] * 6, [0.9] * 6, [0.8] * 6, seeds=(-0.05, 0.05)) == "quarot"
    assert chosen(noisy, [0.99] * 6, [1.01] * 6) is None


def test_configurations_have_the_weights_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.version.hip", None)
    for capability, weights in (((8, 0), "int8"), ((12, 0), "fp8")):
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda of=capability: of)
        assert HadagenConfig("auto").to_dict()["weights"] == weights


def test_quantize_says_what_was_chosen(tmp_path: Path) -> None:
    """And the folder has it."""
    for kind, rotation, why in (
        ("llama", "quarot", "quarot is within two standard errors of blocks"),
        ("gemma2", "blocks", "rises by 2.8% with none, 0.3% with blocks"),
    ):
        made(kind).save_pretrained(tmp_path / kind)
        said = run("quantize", tmp_path / kind, tmp_path / f"{kind}-codes", "--weights", "auto").stderr
        weights = weights_here()
        assert f"weights {weights.value}: {weights.why}" in said
        if weights.value == "int8":
            assert f"rotation {rotation}: the perplexity of SmolLM2 " in said
            assert why in said
        stored = json.loads((tmp_path / f"{kind}-codes" / "config.json").read_text())["quantization_config"]
        assert stored["weights"] == weights.value
    said = run("quantize", tmp_path / "llama", tmp_path / "named", "--weights", "fp8", "--rotation", "none").stderr
    assert "perplexity" not in said
