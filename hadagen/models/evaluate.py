"""How well a model predicts a text, and how often it agrees with another."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer

from hadagen.errors import UsageError, shortened, shown
from hadagen.models.layers import QuantizedLinear
from hadagen.runtime.quantize import rotate_quantize

WINDOW = 512  # tokens
_MOST = torch.finfo(torch.float8_e4m3fn).max
Progress = Callable[[Sequence[torch.Tensor]], Iterable[torch.Tensor]]  # returns the windows; shows how many are done


def input_scales(model: Any, windows: torch.Tensor, progress: Progress = iter) -> dict[str, torch.Tensor]:
    """The scales of activations "fp8-tensor", by the names of tensors: amax / 448 of the rotated inputs of each layer.

    model: with weights in codes, and activations as they are. windows: tokens of a text that is like later inputs.
    Raises `UsageError` for a layer whose inputs are all 0, or not finite, which has no scale.
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
    for name, found in largest.items():
        if not 0 < float(found / _MOST) < math.inf:
            raise UsageError(
                f"the inputs of {name} reach {float(found):g}, for which there is no scale; calibrate with another text"
            )
    return {f"{name}.input_scale": each / _MOST for name, each in largest.items()}


class Figures(NamedTuple):
    """losses: of each window, the mean negative log-likelihood of a token, in nats. tops: the most likely next tokens,
    int64 [windows, WINDOW]."""

    losses: list[float]
    tops: torch.Tensor

    @property
    def loss(self) -> float:
        """The mean of all losses, of which exp is the perplexity. It may be infinite or NaN."""
        return sum(self.losses) / len(self.losses)

    @property
    def perplexity(self) -> float:
        """exp(loss), or infinity where float64 ends."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf

    def agreement(self, other: Figures) -> float:
        """The share of positions with the same most likely next token."""
        return float((self.tops == other.tops).float().mean())


def read_windows(folder: Path, text: Path, most: int | None = None) -> torch.Tensor:
    """The tokens of a text in windows, each a sequence of its own: int64 [windows, WINDOW]. A shorter text is a window.

    folder: of the model, with tokenizer.json. most: the most windows. Raises `UsageError` for a text or a tokenizer
    that cannot be read, and for a text of fewer than two tokens.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UsageError(f"{path} is not there; copy the tokenizer of the model")
    content = _read_text(text)
    try:
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        numbers = tokenizer.encode(content).ids
    except BaseException as error:  # the package raises Exception itself, and what stands for a panic of Rust
        if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
            raise
        raise UsageError(f"{path} is no tokenizer ({shortened(str(error))}); copy that of the model") from None
    if len(numbers) < 2:
        raise UsageError(f"{text} has {len(numbers)} tokens; name a longer text")
    length = min(WINDOW, len(numbers))
    return torch.tensor(numbers[: len(numbers) // length * length]).view(-1, length)[:most]


def _read_text(path: Path) -> str:
    """The text of a file or a pipe, without a byte order mark."""
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe that nobody writes would block
    with open(number, "rb") as file:
        mode = os.fstat(number).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
            raise UsageError(f"{path} is no file; name a file with plain text")
        os.set_blocking(number, True)
        content = file.read()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(f"{path} is no text in UTF-8; name a file with plain text") from None


def check_vocabulary(windows: torch.Tensor, tokens: Any) -> None:
    """Raises `UsageError` if a text has other tokens than a model of so many."""
    if isinstance(tokens, int) and int(windows.max()) >= tokens:
        raise UsageError(
            f"the text has token {int(windows.max())}, but the model has {shown(tokens)} tokens; name models with the "
            "same tokenizer"
        )


def measured(model: Any, windows: torch.Tensor, progress: Progress = iter) -> Figures:
    """The figures of a causal language model of transformers.

    Raises `UsageError` if the tokens are not of the model's vocabulary.
    """
    check_vocabulary(windows, model.config.get_text_config().vocab_size)
    losses, tops = [], []
    for window in progress(list(windows.to(model.device))):
        with torch.no_grad():
            logits = model(window[None], use_cache=True).logits[0].float()  # whose codes count too
        losses.append(float(torch.nn.functional.cross_entropy(logits[:-1], window[1:])))
        tops.append(logits.argmax(-1).cpu())
    return Figures(losses, torch.stack(tops))
