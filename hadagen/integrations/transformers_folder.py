"""A folder of a model of any architecture becomes one of a quantized model, with the layers that transformers finds.

The whole model is in memory, because transformers may make a layer of several stored tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hadagen.errors import HadagenError, UsageError, shortened
from hadagen.integrations.host import TRANSFORMERS as HOST
from hadagen.integrations.transformers import HadagenConfig
from hadagen.models.checkpoint import Calibrate, Checkpoint, check_places, finish, writing
from hadagen.models.experts import StackedLinear, check_activations
from hadagen.models.layers import OF_WEIGHT
from hadagen.models.scheme import GROUPS, Scheme


def convert_any(
    source: Path,
    folder: Path,
    scheme: Scheme,
    *,
    device: torch.device | str = "cpu",
    calibrate: Calibrate | None = None,
) -> Iterator[tuple[str, bool]]:
    """Write the quantized model of `source` to a folder. Yields each finished file, and whether it was kept.

    Tensors have the names and the files that they have in `source`. The arguments are those of `checkpoint.convert`,
    and so are the errors.
    """
    stored = Checkpoint(source)
    check_places(stored, folder, scheme, calibrate is not None)
    if calibrate and scheme.weights in GROUPS:
        raise UsageError("a text rounds weights of 4 bits of Llama-like models alone; leave --calibrate out")
    with writing(stored, folder, scheme, calibrate is not None) as out:
        with out.refusing():
            model = _loaded(source, replace(scheme, activations=None) if calibrate else scheme, device)
            for name, each in model.named_modules():
                if isinstance(each, StackedLinear):
                    check_activations(name, scheme)
        made = replace(model.config.quantization_config.scheme, activations=scheme.activations)
        config = stored.config
        if made.rotation == "quarot":
            config = {**config, "tie_word_embeddings": False}
        if not config.get("dtype") and not config.get("torch_dtype"):  # else it would be taken from codes
            config = {**config, "dtype": str(model.dtype).removeprefix("torch.")}
        tensors = _tensors(model)
        del model
        files: dict[str, str] = {}
        for file, target in stored.targets(scheme).items():
            names = [name for name in tensors if _file_of(name, stored) == file]
            if names:
                files |= dict.fromkeys(out.save(target, {name: tensors.pop(name) for name in names}), target)
                yield target, False
        yield from finish(out, stored, config, made, files, calibrate, _unknown)


def _unknown(name: str) -> torch.Tensor:
    raise AssertionError(f"scales of activations need no weight {name}")


def _loaded(source: Path, scheme: Scheme, device: torch.device | str) -> Any:
    given = {name: getattr(scheme, name) for name in ("weights", "activations", "rotation", "seed", "ignore", "cache")}
    host = HOST.get("transformers")
    host.utils.logging.disable_progress_bar()
    try:
        model, found = host.AutoModelForCausalLM.from_pretrained(
            source,
            output_loading_info=True,
            dtype="auto",
            device_map=None if str(device) == "cpu" else str(device),  # else accelerate must be there
            trust_remote_code=False,
            local_files_only=True,
            quantization_config=HadagenConfig(**given),
        )
    except (HadagenError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise UsageError(
            f"transformers cannot load {source} ({shortened(reason, 200)}); name a folder that it loads"
        ) from error
    if missing := sorted(found["missing_keys"]):  # which transformers fills with random numbers
        raise UsageError(f"{source} has no tensor {missing[0]}; download the whole model")
    return model


def _tensors(model: Any) -> dict[str, torch.Tensor]:
    """The tensors of a model, as its files have them."""
    state, _ = model.hf_quantizer.get_state_dict_and_metadata(model)
    if getattr(model, "_weight_conversions", None):
        state = HOST.get("transformers.core_model_loading:revert_weight_conversion")(model, state)
    # Of tensors that share memory, each is written.
    return {name: each.detach().cpu().clone(memory_format=torch.contiguous_format) for name, each in state.items()}


def _file_of(name: str, stored: Checkpoint) -> str:
    """The file of the tensor from which this one was made."""
    for end in (*(part.removeprefix("weight") for part in OF_WEIGHT), *(f".{part}" for part in OF_WEIGHT)):
        if name.endswith(end) and (found := stored.files.get(name.removesuffix(end))):
            return found
    return next(iter(stored.shards()))
