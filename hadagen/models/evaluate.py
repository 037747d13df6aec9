"""How well a model predicts a text, and how often it agrees with another."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer

from hadagen.errors import UsageError, shortened
from hadagen.models.layers import QuantizedLinear
from hadagen.runtime.quantize import rotate_quantize

WINDOW = 512  # tokens
_MOST = torch.finfo(torch.float8_e4m3fn).max
Progress = Callable[[Sequence[torch.Tensor]], Iterable[torch.Tensor]]  # returns the windows; shows how many are done


def input_scales(model: Any, windows: torch.Tensor, progress: Progress = iter) -> dict[str, torch.Tensor]:
    """The scales of activations "fp8-tensor", by the names of tensors: amax / 448 of the rotated inputs of each layer.

    model: with weights in codes, and activations as they are. windows: tokens of a text that is like later inputs.
    """
    largest: dict[str, torch.Tensor] = {}

    def see(layer: QuantizedLinear, arguments: tuple[torch.Tensor], name: str) -> None:
        found = rotate_quantize(arguments[0], layer.rotation, to="largest").scales.amax().cpu()
        largest[name] = torch.maximum(largest.get(name, found), found)

    layers = {name: each for name, each in model.named_modules() if isinstance(each, QuantizedLinear)}
    hooks = [each.register_forward_pre_hook(partial(see, name=name)) for name, each in layers.items()]
    measured(model, windows, progress)
    for hook in hooks:
        hook.remove()
    return {f"{name}.input_scale": each / _MOST for name, each in largest.items()}


class Figures(NamedTuple):
    """losses: of each window, the mean negative log-likelihood of a token, in nats. tops: the most likely next tokens,
    int64 [windows, WINDOW]."""

    losses: list[float]
    tops: torch.Tensor

    @property
    def perplexity(self) -> float:
        return math.exp(sum(self.losses) / len(self.losses))

    def agreement(self, other: Figures) -> float:
        """The share of positions with the same most likely next token."""
        return float((self.tops == other.tops).float().mean())


def read_windows(folder: Path, text: Path, most: int | None = None) -> torch.Tensor:
    """The tokens of a text in windows, each a sequence of its own: int64 [windows, WINDOW]. A shorter text is a window.

    folder: of the model, with tokenizer.json. most: the most windows. Raises `UsageError` for a text or a tokenizer
    that cannot be read, and for a text of fewer than two tokens.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        raise UsageError(f"{path} is not there; copy the tokenizer of the model")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises Exception itself
        raise UsageError(f"{path} is no tokenizer ({shortened(str(error))}); copy that of the model") from None
    try:
        numbers = tokenizer.encode(text.read_text(encoding="utf-8")).ids
    except UnicodeDecodeError:
        raise UsageError(f"{text} is no text in UTF-8; name a file with plain text") from None
    if len(numbers) < 2:
        raise UsageError(f"{text} has {len(numbers)} tokens; name a longer text")
    length = min(WINDOW, len(numbers))
    return torch.tensor(numbers[: len(numbers) // length * length]).view(-1, length)[:most]


def measured(model: Any, windows: torch.Tensor, progress: Progress = iter) -> Figures:
    """The figures of a causal language model of transformers.

    Raises `UsageError` if the tokens are not of the model's vocabulary.
    """
    if int(windows.max()) >= model.config.vocab_size:
        raise UsageError(
            f"the text has token {int(windows.max())}, but the model has {model.config.vocab_size} tokens; name models "
            "with the same tokenizer"
        )
    losses, tops = [], []
    for window in progress(list(windows.to(model.device))):
        with torch.no_grad():
            logits = model(window[None], use_cache=True).logits[0].float()  # whose codes count too
        losses.append(float(torch.nn.functional.cross_entropy(logits[:-1], window[1:])))
        tops.append(logits.argmax(-1).cpu())
    return Figures(losses, torch.stack(tops))
