"""Hooks in vLLM, which vLLM sets in each of its processes by the entry point `vllm.general_plugins`.

Rotations in checkpoints of compressed-tensors are computed by hadagen, in place of a product with their dense matrix.
So is the operator `_C::hadacore_transform`. Checkpoints that hadagen quantized run by the quantization `hadagen`, with
SiLU·mul, the rotation and the quantizer of an MLP in one kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from hadagen.compat.hadacore import hadacore_transform
from hadagen.errors import UsageError
from hadagen.integrations.host import VLLM as HOST
from hadagen.integrations.host import Changed
from hadagen.models.scheme import METHOD
from hadagen.runtime.rotation import Rotation

_TRANSFORM = "vllm.model_executor.layers.quantization.compressed_tensors.transform.module"
_QUANTIZATION = "vllm.model_executor.layers.quantization"
_TYPES = ("hadamard", "random-hadamard")
_found: Any = WeakTensorKeyDictionary()  # the rotation, or None, of each weight; layers share weights
# Whose implementations last as long as these, so importlib.reload keeps them.
_operators: list[torch.library.Library] = globals().get("_operators", [])


def register() -> None:
    """Set all hooks that are not set yet."""
    if not HOST.is_enabled():
        return
    for hook in (_hook_transforms, _hook_hadacore, _add_quantization):
        try:
            hook()
        except Changed as reason:
            HOST.warn(str(reason))
        except Exception as error:  # vLLM would not start
            HOST.warn(f"{type(error).__name__}: {error}")


# ---- transforms of compressed-tensors --------------------------------------------------------------------------------
def _hook_transforms() -> None:
    module = HOST.get(_TRANSFORM)
    host = HOST.get(f"{_TRANSFORM}:HadamardTransform")
    shared = HOST.get(f"{_TRANSFORM}:SharedWeightParameter")
    HOST.get(f"{_TRANSFORM}:SharedWeightParameter.add_partition")
    forward = HOST.get(f"{_TRANSFORM}:HadamardTransform.forward")
    load = HOST.get(f"{_TRANSFORM}:HadamardTransform.process_weights_after_loading")
    make = HOST.get(f"{_TRANSFORM}:HadamardTransform.__init__")
    if forward.__module__ == __name__:
        return
    if forward.__module__ != host.__module__:
        raise Changed(f"{forward.__module__} has replaced HadamardTransform.forward")

    module.SharedWeightParameter = _whole(shared)
    host.__init__, host.process_weights_after_loading = _checking(make, module), _recovering(load)
    host.forward = _rotating(forward)


def _checking(make: Callable[..., None], module: Any) -> Callable[..., None]:
    """`HadamardTransform.__init__`, with tensor parallelism where ranks rotate alone. Raises `UsageError` for
    permutations."""

    def made(
        self: Any, transforms: Mapping[int, Any], layer: Any, weight_loader: Any, inputs: int, outputs: Sequence[int]
    ) -> None:
        for name, scheme, _ in transforms.values():
            if scheme.randomize:
                raise UsageError(
                    f"the transform {name} has randomize=true, whose permutations vLLM does not apply; "
                    "quantize the model again without randomize"
                )
        whole = all(_rotates_alone(part, layer, inputs, outputs[index]) for index, part in transforms.items())
        with _as_one_rank(module) if whole else nullcontext():
            make(self, transforms, layer, weight_loader, inputs, outputs)

    return made


def _recovering(load: Callable[[Any], None]) -> Callable[[Any], None]:
    """`HadamardTransform.process_weights_after_loading`, after which the transform has its rotations."""

    def loaded(self: Any) -> None:
        load(self)
        try:
            self.rotations = torch.nn.ModuleDict(_rotations_of(self))
        except AttributeError as error:  # of a vLLM that has changed, whose own forward runs then
            HOST.warn(str(error))

    return loaded


def _rotating(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`HadamardTransform.forward`, which rotates where the transform has a rotation."""

    def rotated(self: Any, value: torch.Tensor, part_id: int = 0) -> torch.Tensor:
        rotations: Any = getattr(self, "rotations", {})
        if str(part_id) not in rotations:
            return forward(self, value, part_id)
        rotation: Rotation = rotations[str(part_id)]
        apply: Callable[..., torch.Tensor] = rotation.inverse if self.transforms[part_id].args.inverse else rotation
        if value.shape[-1] == rotation.n:
            return apply(value)
        return apply(value.view(*value.shape[:-1], -1, rotation.n)).flatten(-2)

    return rotated


def _rotations_of(module: Any) -> dict[str, Rotation]:
    """The rotations of a `HadamardTransform` with loaded weights, by the index of the part of the layer."""
    rotations = {}
    for index, part in module.weight.partitions.items():
        name, scheme, _ = module.transforms[index]
        if scheme.type not in _TYPES:
            continue
        # Layers share this tensor, and wrap it in parameters of their own. So the rotation is recovered once.
        weight = next((each for each in module.weight.local_tensors if each.data_ptr() == part.data_ptr()), part)
        if weight not in _found or (_found[weight] is not None and not _is_of(_found[weight], weight)):
            _found[weight] = _recovered(name, weight)
        if _found[weight] is not None:
            rotations[str(index)] = _found[weight]
    return rotations


def _recovered(name: str, weight: torch.Tensor) -> Rotation | None:
    try:
        return Rotation.from_compressed_tensors(weight).to(weight.device)
    except UsageError as error:
        HOST.warn(f"in the transform {name}, {error}")
        return None


def _is_of(rotation: Rotation, weight: torch.Tensor) -> bool:
    """Whether the weight still has the values of the rotation: vLLM loads new ones into the same memory, and no version
    counts that. One product says so, because another sign of an entry changes it by 2 of n terms."""
    n = len(weight)
    v = 1 + torch.rand(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu")
    v = (v * (1 - 2 * (torch.arange(n, device="cpu") * 7 % 11 % 2))).to(weight.device)
    product = torch.zeros_like(v)
    for first in range(0, n, 1024):  # all rows in float64 would take much memory
        product += v[first : first + 1024] @ weight[first : first + 1024].to(v.dtype)
    expected = rotation(v)
    product *= expected.norm() / product.norm()
    return bool((product - expected).abs().max() < 0.1 * n**-0.5)


def _rotates_alone(part: Any, layer: Any, inputs: int, outputs: int) -> bool:
    """Whether each rank of tensor parallelism has all elements of each block that a transform rotates."""
    _, scheme, args = part
    if args.location not in ("input", "output"):
        return False
    if scheme.head_dim is not None:
        return bool((inputs if args.location == "input" else outputs) % scheme.head_dim == 0)
    return bool(getattr(layer, "tp_size", 1) == 1 or (args.location == "input" and inputs == layer.input_size))


@contextmanager
def _as_one_rank(module: Any) -> Iterator[None]:
    """Let a module of vLLM make a transform as if there were no tensor parallelism."""
    world = module.get_tensor_model_parallel_world_size
    module.get_tensor_model_parallel_world_size = lambda: 1
    try:
        yield
    finally:
        module.get_tensor_model_parallel_world_size = world


def _whole(shared: Any) -> Any:
    """A class of parameters like vLLM's shared ones, of which each rank loads the whole."""

    class Whole(shared):  # type: ignore[misc]
        tp_size = property(lambda self: 1, lambda self, size: None)
        tp_rank = property(lambda self: 0, lambda self, rank: None)

        def add_partition(self, index: int, *arguments: Any, **options: Any) -> None:
            super().add_partition(index, *arguments, **options)
            self.partitions[index].tp_rank = 0

    return Whole


# ---- HadaCore --------------------------------------------------------------------------------------------------------
def _hook_hadacore() -> None:
    HOST.get("vllm._custom_ops:hadacore_transform")  # imports the operators
    if _operators or not hasattr(torch.ops._C, "hadacore_transform"):
        return  # vLLM builds this op only for some GPUs
    library: Any = torch.library.Library("_C", "IMPL")  # type: ignore[no-untyped-call]
    try:
        for key in ("CUDA", "CPU"):
            library.impl("hadacore_transform", hadacore_transform, key, allow_override=False)
    except RuntimeError as error:
        raise Changed("another plugin has replaced the operator _C::hadacore_transform") from error
    _operators.append(library)


# ---- checkpoints of hadagen ------------------------------------------------------------------------------------------
def _add_quantization() -> None:
    add = HOST.get(f"{_QUANTIZATION}:register_quantization_config")
    methods = HOST.get(f"{_QUANTIZATION}:QUANTIZATION_METHODS")
    try:
        from hadagen.integrations import vllm_quantization
    except (ImportError, AttributeError) as error:
        raise Changed(f"of its quantization, {error}") from error
    if METHOD in methods:
        known = HOST.get(f"{_QUANTIZATION}:get_quantization_config")(METHOD)
        if known is vllm_quantization.Quantization:
            return
        if known.__module__ != vllm_quantization.__name__:  # else it is that of before a reload
            raise Changed(f"another plugin has registered the quantization {METHOD}")
    vllm_quantization.Quantization.host = HOST
    add(METHOD)(vllm_quantization.Quantization)
