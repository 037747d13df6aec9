"""`hadagen.models.stored`: a folder of codes is right, or it is refused."""

import copy
import random
import traceback
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", "5.0")
import stored_folders as folders
import transformers
from tiny_models import logits, model_of

from hadagen.errors import HadagenError
from hadagen.integrations.transformers import HadagenConfig

ROOT = Path(__file__).resolve().parent.parent
SCHEMES: dict[str, dict[str, Any]] = {
    "int8": {},
    "fp8": {
        "weights": "fp8",
        "rotation": "heads",
        "cache": "int8",
        "ignore": ["lm_head", "model.layers.1.mlp.up_proj"],
    },
    "blocks": {"rotation": "blocks", "activations": None},
}


def load(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Name → a folder that hadagen has written, and one of the same model without codes."""

    @cache
    def write(name: str) -> tuple[Path, Path]:
        folder: Path = tmp_path_factory.mktemp(name)
        model_of("qwen3", tie_word_embeddings=name == "fp8").save_pretrained(folder / "plain")
        load(folder / "plain", quantization_config=HadagenConfig(**SCHEMES[name])).save_pretrained(folder / "codes")
        return folder / "plain", folder / "codes"

    return write


def outcome(folder: Path, wanted: list[Any]) -> str:
    """Whether a folder is "refused", by hadagen or another, "right", or "silent": wrong without an error."""
    try:
        found = logits(load(folder))
    except HadagenError as error:
        return "several lines" if "\n" in str(error) else "refused"
    except Exception as error:
        own = [
            each.filename
            for each in traceback.extract_tb(error.__traceback__)
            if str(ROOT / "hadagen") in each.filename
        ]
        last = traceback.extract_tb(error.__traceback__)[-1].filename
        return f"a fault of hadagen: {error!r}" if own and str(ROOT / "hadagen") in last else "refused by transformers"
    for make in wanted:
        try:
            expected = make()
        except Exception:
            continue
        if found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-3, atol=1e-3, equal_nan=True):
            return "right"
    return "silent"


def changed(seed: int, written: Any, folder: Path) -> tuple[str, str]:
    """What was changed in a folder, and its outcome."""
    draw = random.Random(seed)
    name = draw.choice(sorted(SCHEMES))
    plain, codes = written(name)
    config, tensors = folders.read(codes)
    wanted = [lambda: logits(load(codes))]
    if draw.random() < 0.5:
        done = folders.change_config(config, draw)
        other, parameters = folders.read(plain)
        given = copy.deepcopy(config)
        quantization = given.pop("quantization_config", None)
        folders.write(folder / "plain", other | given, parameters)
        said = quantization if isinstance(quantization, dict) else {}
        for scheme in (SCHEMES[name], {key: said[key] for key in folders.SCHEME if key in said}):
            wanted.append(lambda s=scheme: logits(load(folder / "plain", quantization_config=HadagenConfig(**s))))
    else:
        done = folders.change_tensor(tensors, draw)
    folders.write(folder / "codes", config, tensors)
    return f"{name}: {done}", outcome(folder / "codes", wanted)


@pytest.mark.parametrize("chunk", range(125))
def test_a_changed_folder_is_right_or_refused(chunk: int, written: Any, tmp_path: Path) -> None:
    found = {seed: changed(seed, written, tmp_path) for seed in range(8 * chunk, 8 * chunk + 8)}
    print(Counter(end for _, end in found.values()))
    bad = {seed: each for seed, each in found.items() if each[1] not in ("right", "refused", "refused by transformers")}
    assert not bad
