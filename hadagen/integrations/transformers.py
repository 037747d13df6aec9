"""transformers loads, quantizes and stores models with hadagen's codes, once this module is imported.

    from hadagen.integrations.transformers import HadagenConfig

    model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-8B", quantization_config=HadagenConfig())
    model.save_pretrained("qwen3-8b-hadagen")

A program that loads such a folder imports this module first, because transformers cannot find it by itself.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from hadagen.errors import UsageError, shown
from hadagen.integrations.host import SWITCH, Changed
from hadagen.integrations.host import TRANSFORMERS as HOST
from hadagen.integrations.transformers_cache import quantize_cache
from hadagen.models.defaults import weights_here
from hadagen.models.folding import Sizes, planned
from hadagen.models.layers import HELD, OF_WEIGHT, TYPES, QuantizedLinear, check_values
from hadagen.models.linears import check_scheme_of, known_sizes, planned_of
from hadagen.models.merged import unmerged
from hadagen.models.merging import merge
from hadagen.models.modules import check, guard, insert, place_rotations, quantize
from hadagen.models.scheme import AUTO, METHOD, VERSION, Scheme
from hadagen.models.stored import NAMES, check_files, check_scheme, checksum_of
from hadagen.runtime.checks import QUANTIZED, plain

_CODES = {*TYPES.values()}


def _host_of() -> tuple[Any, Any, str]:
    """The base classes of a configuration and of a quantizer, and why there are none."""
    if not HOST.is_enabled():
        return object, object, f"{SWITCH}={os.environ[SWITCH]} switches it off"
    try:
        config = HOST.get("transformers.utils.quantization_config:QuantizationConfigMixin")
        quantizer = HOST.get("transformers.quantizers.base:HfQuantizer")
        for name in ("_process_model_before_weight_loading", "_process_model_after_weight_loading"):
            HOST.get(f"transformers.quantizers.base:HfQuantizer.{name}")
        HOST.get("transformers.quantizers.auto:register_quantization_config")
        HOST.get("transformers.quantizers.auto:register_quantizer")
    except Changed as reason:
        HOST.warn(str(reason))
        return object, object, str(reason)
    return config, quantizer, ""


_Config, _Quantizer, _missing = _host_of()


class HadagenConfig(_Config):  # type: ignore[misc, valid-type]
    """How transformers rotates and quantizes a model with hadagen: the argument `quantization_config`.

    weights: "int8", "fp8", "int4" with a scale for each group of up to 128 elements of a row, or "int4-row" with one
        for each row. Codes are the nearest; `hadagen quantize --calibrate` finds better ones of 4 bits. "auto" for the
        codes of 8 bits that suit the GPU of this machine, as `hadagen.models.defaults` says.
    activations: "int8-row" or "fp8-row"; "auto" for that with the codes of the weights, which GPUs multiply fast, and
        for 4 bits "int8-row"; None for activations as they are.
    rotation: "quarot" for whole rows, "blocks", "heads" for those of the cache alone, or None. "auto" is "quarot" for
        weights in integers, or "blocks" where that is not possible; for FP8 weights "heads" with a cache in codes, else
        None. The model's configuration has the one that was chosen.
    seed: of random signs.
    ignore: layers that are not quantized, by their names or the last components of their names.
    cache: the codes of keys and values in any cache: "int8", "fp8" or "int4"; None keeps their type.

    Raises `UsageError` for impossible values, and if transformers has no quantizer of hadagen.
    """

    def __init__(
        self,
        weights: str = "int8",
        activations: str | None = "auto",
        rotation: str | None = "auto",
        seed: int = 0,
        ignore: Iterable[str] = ("lm_head",),
        cache: str | None = None,
        **stored: Any,
    ) -> None:
        if _missing:
            raise UsageError(f"transformers has no quantizer of hadagen: {_missing}; load the model without it")
        given = {"weights": weights, "activations": activations, "rotation": rotation, "seed": seed, "ignore": ignore}
        given |= {"cache": cache, "weights": weights_here().value if weights == AUTO else weights}
        self._take(Scheme.from_dict({"quant_method": METHOD, "version": VERSION} | given | stored))

    @property
    def scheme(self) -> Scheme:
        return Scheme.from_dict(vars(self))

    def _take(self, scheme: Scheme) -> None:
        self.__dict__.update(scheme.to_dict())


class HadagenQuantizer(_Quantizer):  # type: ignore[misc, valid-type]
    """What `from_pretrained` calls before and after it loads the weights of a model."""

    requires_calibration = False
    is_trainable = False
    is_compileable = True

    def __init__(self, quantization_config: Any, **options: Any) -> None:
        super().__init__(copy.copy(quantization_config), **options)  # which may serve other models too

    def is_serializable(self) -> bool:
        return True

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        places = device_map.values() if isinstance(device_map, dict) else [device_map]
        if any(str(place) in ("disk", "meta") for place in places):
            raise _not_in_memory(f"device_map {shown(device_map)} leaves weights out of memory")

    def update_dtype(self, dtype: Any) -> Any:
        if dtype not in QUANTIZED:
            raise UsageError(f"dtype {dtype} cannot be quantized; pass float32, float16 or bfloat16")
        return dtype

    def get_new_dtype(self, converter: Any, param: Any, dtype: Any) -> Any:
        """The type of a tensor of a folder with codes. Raises `UsageError` for one that would be cast to codes."""
        stored = param.get_dtype() if hasattr(param, "get_dtype") else param.dtype
        if dtype in _CODES and stored not in (dtype, NAMES[dtype]):
            raise UsageError(
                f"a weight has the type {plain(stored)}, but the quantization_config says codes of {plain(dtype)}; "
                "take both from one model"
            )
        return super().get_new_dtype(converter, param, dtype)

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """The tensors that `save_pretrained` writes. Their checksum goes into the configuration."""
        state = {name: each for name, each in unmerged(model).items() if name not in model.all_tied_weights_keys}
        written = state
        if getattr(model, "_weight_conversions", None):  # transformers gives files other tensors than models
            written = HOST.get("transformers.core_model_loading:revert_weight_conversion")(model, dict(state))
        scheme = replace(self.quantization_config.scheme, checksum=checksum_of(written))
        self.quantization_config._take(scheme)
        return state, {}

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> Any:
        known = {name: each for name, each in model.config.to_dict().items() if name != "quantization_config"}
        scheme, kind = self.quantization_config.scheme, known["model_type"]
        if not self.pre_quantized and scheme.activations == "fp8-tensor":
            raise UsageError("fp8-tensor takes its scales from a text; use hadagen quantize with --calibrate")
        self._llama = llama = Sizes.of(known)
        self._sizes = llama or known_sizes(model, scheme)
        if self.pre_quantized:
            check_scheme(scheme, llama)
            if llama is None:
                check_scheme_of(model, scheme, self._sizes)
            insert(model, scheme)
            self._stored = check_files(checkpoint_files, llama, kind, scheme) if checkpoint_files else set()
            if llama:
                _check_all_are_used(model, self._stored)
        elif llama:
            check(model, llama, kind)
            self.quantization_config._take(planned(scheme, llama))
        else:
            self.quantization_config._take(planned_of(model, scheme, self._sizes))
        # Now, because accelerate keeps the forward methods of layers when it spreads them over devices.
        quantize_cache(model, self.quantization_config.scheme, llama)
        return model

    def update_weight_conversions(self, weight_conversions: Any, model: Any) -> Any:
        """How transformers brings the tensors of a folder to those of the model: codes and scales as weights."""
        return of_codes(weight_conversions, model) if self.pre_quantized else weight_conversions

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if model._tp_size:
            raise UsageError("tp_plan splits layers with codes, which is not possible; leave it out, or use vLLM")
        for name, each in model.named_parameters():
            if each.is_meta:
                raise _not_in_memory(f"{name} is not in memory")
        if self.pre_quantized:
            _check_all_are_loaded(model)
            if not self._llama and not getattr(model, "_weight_conversions", None):
                _check_all_are_used(model, self._stored)
        elif quantize(model, self.quantization_config.scheme, self._sizes):
            model.config.tie_word_embeddings = False
            model.all_tied_weights_keys = {}
        if not self.pre_quantized:
            model._weight_conversions = of_codes(getattr(model, "_weight_conversions", None) or [], model)
        if self._sizes:
            guard(model, self.quantization_config.scheme, self._sizes.family)
        merge(model)
        place_rotations(model)
        return model.requires_grad_(False)


_PER_ROW = ("MergeModulelist", "SplitModulelist", "Concatenate", "Chunk", "Split")  # which move whole rows of weights
_END = re.compile(r"(\\?\.(weight)?|_bias)$")  # of a pattern, behind the name of a layer


def of_codes(conversions: Iterable[Any], model: Any) -> list[Any]:
    """The conversions of transformers between the tensors of folders and of a model, for a model with codes.

    Those that rename weights or move rows are made for scales too. Others of weights with codes are left out: such
    weights are stored as they are in memory.
    """
    found = {name: each for name, each in model.named_modules() if isinstance(each, QuantizedLinear)}
    layers = "\n".join(found)
    of_weight = [part for part in OF_WEIGHT if any(getattr(each, part) is not None for each in found.values())]
    made: list[Any] = []
    for each in conversions:
        sources, targets = ([*getattr(each, f"_original_{of}_patterns")] for of in ("source", "target"))
        if not hasattr(each, "operations"):
            made.append(each)
            if all(name.endswith(".weight") for name in (*sources, *targets)):
                ends = [part.removeprefix("weight") for part in of_weight if part != "weight"]
                made += [each.copy(_ending(sources, end), _ending(targets, end)) for end in ends]
        elif not any(re.search(f"{_END.sub('', name)}$", layers, re.MULTILINE) for name in targets):
            made.append(each)
        elif all(type(step).__name__ in _PER_ROW for step in each.operations):
            of_layers = [_END.sub("", name) for name in targets]
            parts = (".bias",) if targets[0].endswith("_bias") else (f".{part}" for part in of_weight)
            for part in parts:
                end = part.removeprefix(".bias").removeprefix(".weight")
                made.append(each.copy(_ending(sources, end), _ending(of_layers, part), operations=each.operations))
    return made


def _ending(patterns: list[str], end: str) -> list[str]:
    return [f"{each}{end}" for each in patterns]


def _check_all_are_used(model: Any, names: set[str]) -> None:
    """Raise `UsageError` for stored tensors that transformers would leave out of the model.

    A model without a last layer may be loaded from the folder of one that has it.
    """
    base = f"{model.base_model_prefix}."
    known = {name.removeprefix(base) for name in model.state_dict()} | {"lm_head.weight"}
    unused = sorted(name for name in names if name.removeprefix(base) not in known and "rotary_emb." not in name)
    if unused:
        raise UsageError(f"{unused[0]} is stored, but config.json has no layer for it; take both from one model")


def _check_all_are_loaded(model: Any) -> None:
    """Raise `UsageError` for tensors that transformers has made up, and for impossible codes and scales.

    A layer behind the model, such as a classifier's, may be new.
    """
    prefix = model.base_model_prefix if hasattr(model, model.base_model_prefix) else ""
    base = model.get_submodule(prefix)
    head = getattr(model, "lm_head", None)
    last = [] if head is None else [(f"lm_head.{name}", each) for name, each in head.named_parameters()]
    for name, each in [*base.named_parameters(prefix), *last]:
        if not getattr(each, "_is_hf_initialized", False):
            raise UsageError(f"{name} is not among the stored tensors, or has another shape there; take a whole folder")
    for name, layer in model.named_modules():
        if isinstance(layer, QuantizedLinear):
            check_values(f"{name}.", {held: getattr(layer, held) for held in HELD})


def _not_in_memory(why: str) -> UsageError:
    return UsageError(f'{why}; load the model without offloading, such as with device_map="cuda"')


if not _missing:
    for _name in ("AUTO_QUANTIZATION_CONFIG_MAPPING", "AUTO_QUANTIZER_MAPPING"):
        _known = getattr(HOST.get("transformers.quantizers.auto"), _name, {})
        if getattr(_known.get(METHOD), "__module__", "") == __name__:  # of before a reload
            del _known[METHOD]
    HOST.get("transformers.quantizers.auto:register_quantization_config")(METHOD)(HadagenConfig)
    HOST.get("transformers.quantizers.auto:register_quantizer")(METHOD)(HadagenQuantizer)
