"""Two-layer models of transformers with random weights, made within a test."""

from pathlib import Path
from typing import Any

import torch
import transformers

KINDS = ("llama", "mistral", "ministral", "qwen2", "qwen3", "smollm3")
SIZES = {
    "vocab_size": 89,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOKENS = torch.arange(3, 43).reshape(2, 20)


def config_of(kind: str, **options: Any) -> Any:
    return transformers.AutoConfig.for_model(kind, **SIZES | options)


def model_of(kind: str, seed: int = 0, **options: Any) -> Any:
    """A model whose parameters are all random, factors of norms and biases too."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config_of(kind, **options)).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 2 * parameter.shape[1] ** -0.5)
        elif name.endswith("bias"):
            parameter.normal_(0, 0.5)
        else:
            parameter.uniform_(0.5, 1.5)
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS.to(model.device)).logits.float()


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The root of the mean square of the difference, relative to what is expected."""
    return float((found - expected).norm() / expected.norm())


def write_tokenizer(folder: Path) -> None:
    """A tokenizer whose tokens are numbers."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: at for at, word in enumerate(["?", *map(str, range(1, SIZES["vocab_size"]))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
