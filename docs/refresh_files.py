"""The paths of the measured data, the documents and their pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
OURS = DOCS.parent / "tuning_db" / "bundles" / "sm90.db"
OUR_GPU, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
BENCH = DOCS / "data" / "bench_h100.csv"
EARLIER = DOCS / "data" / "bench_h100_earlier.csv"
# Which kernel of the bundle each kernel became that was timed before it was assembled anew.
ASSEMBLED = DOCS / "data" / "assembled.csv"
BENCH_H200 = DOCS / "data" / "bench_h200.csv"
BENCH_H200_LONG = DOCS / "data" / "bench_h200_long.csv"
BETWEEN = DOCS / "data" / "between_h100.csv"
BETWEEN_H200 = DOCS / "data" / "between_h200.csv"
PRUNED = DOCS / "data" / "pruned_h200.csv"
INVARIANT = DOCS / "data" / "invariant_h200.csv"
# Rotations with a matrix: beside PyTorch, and with parts of their kernels left out.
ROTATIONS = DOCS / "data" / "rotations_h200.csv"
PARTS = DOCS / "data" / "parts_h200.csv"
# The kernels that calls get for x without signs, with signs on both sides, and with signs that are computed, not read.
SIGNS = DOCS / "data" / "signs_h200.csv"
# One kernel that quantizes, beside the transform and a quantizer that torch.compile makes.
PASSES = DOCS / "data" / "passes_h200.csv"
# Winners of accurate and of fast problems, as `hadagen bundle export` writes them, and what `measure_codes.py` counts.
ACCURATE_CODES = DOCS / "data" / "accurate_codes_h100.csv"
CODES = DOCS / "data" / "codes_h100.csv"
QUANTIZED_PARTS = DOCS / "data" / "quantized_parts_h200.csv"
# How busy resources of a GPU are (`measure_resources.py`), and what `layer.py`, `mlp.py` and `decoder.py` of `examples`
# write.
RESOURCES = DOCS / "data" / "resources_h100.csv"
LAYER = DOCS / "data" / "layer_h100.json"
LAYER_PICTURE = DOCS / "assets" / "layer.svg"
MLP = DOCS / "data" / "mlp_h100.json"
FUSING = DOCS / "fusing.md"
DECODER = DOCS / "data" / "decoder_h200.json"
PROLOGUES = DOCS / "prologues.md"
SERVE = DOCS / "serve.md"
# `presets.fa3_fp8` beside torchao's kernels for the same codes and scales.
TORCHAO = DOCS / "data" / "torchao_h200.csv"
HUMMING = DOCS / "data" / "humming_h200.csv"
# What `attention.py`, `cache.py`, `quarot.py` and `checkpoint.py` of `examples` write.
ATTENTION = DOCS / "data" / "attention.json"
CACHE = DOCS / "data" / "cache.json"
QUAROT = DOCS / "data" / "quarot.json"
CHECKPOINT = DOCS / "data" / "checkpoint.json"
# What `measure_weights.py` writes.
WEIGHTS = DOCS / "data" / "weights.json"
DEFAULTS = DOCS.parent / "hadagen" / "models" / "defaults.json"  # which follows from it and from the decoder
CHECKPOINT_PAGE = DOCS / "checkpoint.md"
# What `tests/every_model.py` writes.
TYPES = DOCS / "data" / "models.csv"
ACTIVATIONS_PICTURE = DOCS / "assets" / "activations.svg"
PICTURE = DOCS / "assets" / "speed.svg"
README = DOCS.parent / "README.md"
CALLS = DOCS / "data" / "calls_h100.json"
RECORDINGS = DOCS / "data" / "recordings"
PERFORMANCE = DOCS / "performance.md"
MEASUREMENTS = DOCS / "internals" / "measurements.md"
API = DOCS / "api.md"
SEARCHING = DOCS / "internals" / "searching.md"
EXPERIMENTS = DOCS / "internals" / "experiments.md"
FORMATS = DOCS / "formats.md"
COMPARED = DOCS / "compared.md"

# What tests and `ci/sanitize.py` found, and what two tunes chose (`compare_tunes.py`).
RELIABILITY = DOCS / "reliability.md"
KILLS = DOCS / "data" / "kills.json"
FAULTS = DOCS / "data" / "faults.json"
LAWS = DOCS / "data" / "laws.json"
SANITIZER = DOCS / "data" / "sanitizer.csv"
TUNES = DOCS / "data" / "tunes_h200.csv"
BUNDLE_DAMAGE = DOCS / "data" / "bundle_damage.csv"

# What `simulate_fleet.py` found, trials of one GPU and of several in the same time, and what a test found that breaks
# fleets.
FLEETS = DOCS / "fleets.md"
FLEET = DOCS / "data" / "fleet.json"
FLEET_GPUS = DOCS / "data" / "fleet_h100.json"
FLEET_KILLS = DOCS / "data" / "fleet_kills.json"

SEARCH = DOCS / "data" / "search.json"
SEARCH_PAGE = DOCS / "internals" / "comparing-searches.md"
SEARCH_PICTURE = DOCS / "assets" / "search.svg"

# What a document shows where there is no data yet.
NO_DATA = "*No measured table has been committed yet.*"


def read_json(path: Path) -> Any:
    """The content of a file; None if there is no such file yet."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
