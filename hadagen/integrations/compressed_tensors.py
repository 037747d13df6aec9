"""compressed-tensors: transforms of models rotate with hadagen instead of a product with a dense matrix.

    from hadagen.integrations import compressed_tensors

    compressed_tensors.enable()

Transforms of the types `hadamard` and `random-hadamard` then rotate with hadagen. compressed-tensors still makes and
stores their weights, so state dicts stay the same.
"""

from __future__ import annotations

import ctypes
import json
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from hadagen.errors import UsageError, shown
from hadagen.integrations.host import COMPRESSED_TENSORS as HOST
from hadagen.integrations.host import Changed
from hadagen.runtime.call import slow
from hadagen.runtime.checks import DTYPES, plain
from hadagen.runtime.operands.sealed import StorageWeakRef, version_of
from hadagen.runtime.rotation import Rotation

_MODULE = "compressed_tensors.transform"
_HELD = "_hadagen_rotation"
_theirs: Any = globals().get("_theirs")  # the forward of the host, once it is replaced; importlib.reload keeps it


def enable() -> bool:
    """Let transforms of compressed-tensors rotate with hadagen, in all models of this process.

    Call it before models are loaded: a transform that compressed-tensors has offloaded keeps the forward that it had.
    Call it again after a write to a weight through `.data`, which no version counts.

    Returns whether they do. They do not if HADAGEN_INTEGRATIONS excludes `compressed_tensors`; and, after a warning, if
    this version of compressed-tensors computes transforms in another way.
    """
    global _theirs
    if not HOST.is_enabled():
        return False
    try:
        forward = HOST.get(f"{_MODULE}:HadamardTransform.forward")
        if forward.__module__ == __name__:
            _recovered.clear()
        else:
            with torch.inference_mode(False):
                _check(forward)
            _theirs = forward
    except Changed as changed:
        HOST.warn(str(changed))
        return False
    HOST.get(f"{_MODULE}:HadamardTransform").forward = _forward
    return True


def load_transforms(model: torch.nn.Module, checkpoint: str | Path) -> None:
    """Attach the online transforms of a checkpoint to the model that transformers loaded from it.

    transformers loads the rotated weights of such a checkpoint, but not the transforms of activations that belong to
    them. If the model has transforms already, only their weights are read from the checkpoint.

    model: what `from_pretrained` returned.
    checkpoint: the folder of the checkpoint, with config.json and *.safetensors.

    Raises `UsageError` if the folder holds no transforms, or lacks the weight of a transform.
    """
    folder = Path(checkpoint)
    config = _read_config(folder)
    if not _weights_of(model):
        online = config.model_copy(deep=True)
        for scheme in online.config_groups.values():
            scheme.apply = [each for each in scheme.apply if each.is_online()]
        online.config_groups = {name: scheme for name, scheme in online.config_groups.items() if scheme.apply}
        HOST.get(f"{_MODULE}:apply_transform_config")(model, online)
        setattr(model, HOST.get("compressed_tensors:TRANSFORM_CONFIG_NAME"), config)
    weights = _weights_of(model)
    stored = _read_tensors(folder, {name for names in weights.values() for name in names})
    for weight, names in weights.items():
        found = next((stored[name] for name in names if name in stored), None)
        if found is None:
            raise UsageError(
                f"the checkpoint {shown(str(folder))} has no tensor {names[0]} of a transform; pass the folder of the "
                "model"
            )
        with torch.no_grad():
            weight.copy_(found)


# ---- the transform ---------------------------------------------------------------------------------------------------
def _forward(self: Any, value: torch.Tensor) -> torch.Tensor:
    """What HadamardTransform.forward(value) returns."""
    rotation = _find(self, type(value), value.dtype, value.device)
    if rotation is None or value.shape[_axis(self)] % rotation.n:
        return _theirs(self, value)  # type: ignore[no-any-return]
    return _transform(self, rotation, value)


def _transform(self: Any, rotation: Rotation, value: torch.Tensor) -> torch.Tensor:
    """The value times the weight of the transform or its transpose, along the axis that the location means."""
    axis = _axis(self)
    # Weights are rotated once, and then stored: in float64, as the host does, so that stored weights are the same.
    rows = value if self.args.is_online() else value.to(torch.float64).movedim(axis, -1)
    blocks = rows.reshape(*rows.shape[:-1], rows.shape[-1] // rotation.n, rotation.n)
    if self.perm is not None:
        order = self.perm.to(value.device)
        blocks = torch.empty_like(blocks).index_copy(-1, order, blocks)
    is_inverse = self.args.inverse != (self.args.location == "weight_input")
    with nullcontext() if self.args.is_online() else slow.quiet():
        blocks = rotation.inverse(blocks) if is_inverse else rotation(blocks)
    if self.perm is not None:
        blocks = blocks.index_select(-1, order)
    return blocks.view(rows.shape).movedim(-1, axis).contiguous().to(value.dtype)


def _axis(self: Any) -> int:
    """The axis of values that is transformed: weights of linear layers are [out, in], those of embeddings [in, out]."""
    if self.args.is_online():
        return -1
    is_linear = issubclass(self.module_type, torch.nn.Linear)
    return -1 if is_linear == (self.args.location == "weight_input") else -2


class _Recovered(NamedTuple):
    """The rotation that was recovered from a weight, or None; and the version, memory and address of the weight
    then."""

    version: int
    memory: StorageWeakRef
    address: int
    rotation: Rotation | None
    on_device: dict[torch.device, Rotation]


_recovered: Any = WeakIdKeyDictionary()  # of stored weights, which modules share


def _find(self: Any, kind: type, dtype: torch.dtype, device: torch.device) -> Rotation | None:
    """The rotation by the transform's weight, on a device; None where the host transforms."""
    if not torch.compiler.is_compiling():
        return _rotation_of(self, kind, dtype, device)
    # Before PyTorch 2.13, functions with a constant result take no module.
    return self.__dict__[_HELD] if _hold(id(self), kind, dtype, device) else None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _hold(transform: int, *value: Any) -> bool:
    """Make the rotation an attribute of the transform with this id, where compiled code finds it; return whether there
    is one."""
    self: Any = ctypes.cast(transform, ctypes.py_object).value
    self.__dict__[_HELD] = _rotation_of(self, *value)
    return self.__dict__[_HELD] is not None


def _rotation_of(self: Any, kind: type, dtype: torch.dtype, device: torch.device) -> Rotation | None:
    """What `_find` returns, after a warning where it is None."""
    if kind not in (torch.Tensor, torch.nn.Parameter) or dtype not in DTYPES:
        HOST.warn(f"a transform is applied to a {kind.__name__} of {plain(dtype)}")
        return None
    # An offloaded weight is a new tensor at every access.
    parameters = self._parameters
    stored = getattr(parameters, "offloaded_values", parameters)["weight"]
    if stored.requires_grad:
        HOST.warn("the weight of a transform is trained")
        return None
    if stored.is_inference() or (stored.is_meta and not self.weight.is_meta):
        HOST.warn("the weight of a transform is an inference tensor or on a disk, so nothing says when it changes")
        return None
    version, address = version_of(stored), stored.data_ptr()
    found: _Recovered | None = _recovered.get(stored)
    if found is None or (found.version, found.address) != (version, address) or found.memory.expired():
        memory = StorageWeakRef(stored.untyped_storage())
        found = _recovered[stored] = _Recovered(version, memory, address, _recover(self.weight.detach()), {})
    if found.rotation is not None and device not in found.on_device:
        found.on_device[device] = deepcopy(found.rotation).to(device)
    return found.on_device.get(device)


def _recover(weight: torch.Tensor) -> Rotation | None:
    if weight.is_meta:  # nothing is computed yet
        return None
    try:
        rotation = Rotation.from_compressed_tensors(weight)
        if bool((weight.abs() == 1).all()):
            return rotation
        reason = "the weight of a transform has other entries than 1 and −1"
    except UsageError as error:
        reason = f"the matrix of a transform was not recovered ({error})"
    HOST.warn(reason)
    return None


def _check(forward: Any) -> None:
    """Raises `Changed` if the host computes a small transform in another way than hadagen."""
    scheme = HOST.get(f"{_MODULE}:TransformScheme")(type="random-hadamard", randomize=True, precision=torch.float64)
    arguments = HOST.get(f"{_MODULE}:TransformArgs")
    factory = HOST.get(f"{_MODULE}:RandomHadamardFactory")("check", scheme)
    layer = torch.nn.Linear(24, 24, device="cpu", dtype=torch.float64)
    for location in ("input", "weight_input", "weight_output"):
        transform = factory.create_transform(layer, arguments(targets=[], location=location, inverse=True))
        x = torch.arange(24.0 * 24, device="cpu", dtype=torch.float64).reshape(24, 24)
        rotation = _find(transform, type(x), x.dtype, x.device)
        if rotation is None or not torch.allclose(_transform(transform, rotation, x), forward(transform, x)):
            raise Changed(f"its transform of the location {location} has other results")


# ---- checkpoints -----------------------------------------------------------------------------------------------------
def _read_config(folder: Path) -> Any:
    try:
        data = json.loads((folder / "config.json").read_text(encoding="utf-8"))["quantization_config"][
            "transform_config"
        ]
    except (OSError, ValueError, LookupError, TypeError):
        data = None
    if not data:
        raise UsageError(
            f"config.json of {shown(str(folder))} has no transform_config; pass the folder of a checkpoint with "
            "transforms, as llm-compressor writes it"
        )
    return HOST.get(f"{_MODULE}:TransformConfig").model_validate(data)


def _weights_of(model: torch.nn.Module) -> dict[torch.nn.Parameter, list[str]]:
    """The weights and permutations of all transforms, which may share them, with their names in state dicts."""
    found: dict[torch.nn.Parameter, list[str]] = {}
    base = HOST.get(f"{_MODULE}:TransformBase")
    for name, module in model.named_modules():
        if isinstance(module, base):
            for key, parameter in module.named_parameters():
                found.setdefault(parameter, []).append(f"{name}.{key}")
    return found


def _read_tensors(folder: Path, names: set[str]) -> dict[str, torch.Tensor]:
    """The tensors of these names that the checkpoint has."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with HOST.get("safetensors:safe_open")(path, "pt") as file:
            found.update({name: file.get_tensor(name) for name in names & set(file.keys())})
    return found
