"""Check that the folder of a model is one that hadagen would read or write.

A folder of codes is right, or it is refused, for instance if its tensors have other names, types or shapes than its
scheme and sizes ask for, or another checksum than its configuration has.
"""

from __future__ import annotations

import ctypes
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hadagen.errors import StorageError, UsageError, shortened, shown
from hadagen.models.folding import EMBEDDING, HEAD, LAST_NORM, Sizes, planned
from hadagen.models.layers import OF_WEIGHT, shapes_of, type_of
from hadagen.models.scheme import AUTO, GROUPS, Scheme

Kind = tuple[str, list[int]]  # the type of a tensor, as safetensors name it, and its shape

CONFIG = "config.json"
UNFINISHED = "hadagen-quantize.json"  # in a folder that is not complete: how it is being made
FLOATS = ("F16", "BF16", "F32")
NAMES = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32"}  # as safetensors name types
NAMES |= {torch.int8: "I8", torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3"}
# Tensors that no rotation changes, by the ends of names.
_UNROTATED = (".self_attn.q_norm.weight", ".self_attn.k_norm.weight")
BUFFERS = ("rotary_emb.inv_freq", "rotary_emb.original_inv_freq")
_AGAIN = "quantize the model again"


# ---- names, types and shapes -----------------------------------------------------------------------------------------
def check_scheme(scheme: Scheme, sizes: Sizes | None) -> None:
    """Raise `UsageError` for the scheme of a folder that hadagen would not have written for a model of these sizes.

    Without sizes, the architecture is not known, and `check_scheme_of` looks at the model itself.
    """
    if scheme.rotation == AUTO:
        raise UsageError(f"quantization_config has rotation {shown(AUTO)}, which hadagen does not write; {_AGAIN}")
    if sizes is None:
        return
    made = planned(scheme, sizes)
    if scheme.layers != made.layers:
        raise UsageError(f"quantization_config has layers = {shown(scheme.layers)}, not {shown(made.layers)}; {_AGAIN}")
    if scheme.online != made.online:
        found, wanted = ({name: (each.n, each.block) for name, each in of.online.items()} for of in (scheme, made))
        raise UsageError(
            f"quantization_config has online = {shown(found)}, but rotation {shown(scheme.rotation)} of this model "
            f"needs {shown(wanted)}; {_AGAIN}"
        )
    # Another cache needs no other weights.
    if scheme.rotation != "blocks" and (scheme.head is None) != (scheme.rotation is None):
        raise UsageError(
            f"quantization_config has rotation {shown(scheme.rotation)} and head {scheme.head}, which do not go "
            f"together; {_AGAIN}"
        )
    if scheme.head not in (None, sizes.head):
        raise UsageError(
            f"quantization_config has heads of {scheme.head}, but {CONFIG} says {sizes.head}; take both from one model"
        )
    if scheme.rotation == "quarot" and sizes.tied:
        raise UsageError(f"{CONFIG} has tie_word_embeddings, but rotation 'quarot' unties them; set it to false")


def _check_pairs(found: Mapping[str, Kind], scheme: Scheme) -> None:
    """Raise `UsageError` for codes without scales, scales without codes, and such that do not fit together."""
    names = {
        name.removesuffix(end) for name in found for end in (".weight_scale", ".weight_factor") if name.endswith(end)
    }
    codes = (name for name, (stored_type, _) in found.items() if stored_type not in FLOATS and name.endswith(".weight"))
    for name in sorted(names.union(each.removesuffix(".weight") for each in codes)):
        parts = {part: found[f"{name}.{part}"] for part in OF_WEIGHT if f"{name}.{part}" in found}
        wanted = _parts_of(name, parts.get("weight", ("", []))[1], scheme.weights)
        if missing := [part for part in wanted if part not in parts]:
            raise UsageError(f"{name}.{missing[0]} is missing; {_AGAIN}")
        if parts != wanted:
            said = ", ".join(f"{part} of {kind} {shape}" for part, (kind, shape) in parts.items())
            raise UsageError(f"{name} has {said}, which are no weight of {scheme.weights}; {_AGAIN}")


def _parts_of(name: str, codes: Sequence[int], weights: str) -> dict[str, Kind]:
    """The tensors of one weight with codes of a shape, or of several one behind the other."""
    if len(codes) < 3:
        return {"weight": ("", [])}
    *count, out, columns, _ = codes
    shapes = shapes_of(name, out, columns * (2 if weights in GROUPS else 1), weights)
    return {part: (NAMES[type_of(part, weights)], [*count, *shape]) for part, shape in shapes.items()}


def check_is_whole(found: Mapping[str, Kind], sizes: Sizes, kind: str, scheme: Scheme | None = None) -> None:
    """Check the tensors of a model.

    sizes: of its configuration. kind: its model_type. scheme: of a model whose layers have codes already.

    Raises `StorageError` if a tensor is missing, and `UsageError` if one has another type or shape than the
    configuration says, or may read or write the residual stream without our knowledge.
    """
    wanted = _wanted(found, sizes, scheme)
    for name, (types, shape) in wanted.items():
        if name not in found:
            raise StorageError(f"the model has no tensor {name}; download the whole model")
        stored_type, stored_shape = found[name]
        if stored_type not in types:
            fix = "name a model that is not quantized, with" if scheme is None else "quantize the model again, for"
            raise UsageError(f"{name} has the type {stored_type}; {fix} {' or '.join(types)}")
        if stored_shape != shape:
            raise UsageError(
                f"{name} has the shape {stored_shape}, but {CONFIG} says {shape}; take both from one model"
            )
    for name in found:
        is_known = name in wanted or (name == HEAD and scheme is None) or name.endswith(BUFFERS)
        if not is_known:
            raise UsageError(
                f"{name} is no part of a {kind} that predicts tokens, so how to rotate it is not known; name a model "
                "without it"
            )


def _wanted(
    found: Mapping[str, Kind], sizes: Sizes, scheme: Scheme | None
) -> dict[str, tuple[tuple[str, ...], list[int]]]:
    """Tensor → its possible types, and its shape. Biases and norms of heads are wanted where they are found."""
    inputs, outputs = sizes.inputs(), sizes.outputs()
    wanted: dict[str, tuple[tuple[str, ...], list[int]]] = {LAST_NORM: (FLOATS, [sizes.width])}
    rows = (found.get(EMBEDDING, ("", []))[1] or [0])[0]
    for name in (EMBEDDING, *([] if sizes.tied else [HEAD])):
        wanted[name] = FLOATS, [rows, sizes.width]
    for at in range(sizes.layers):
        layer = f"model.layers.{at}"
        for norm in sizes.family.norms:
            wanted[f"{layer}.{norm}.weight"] = FLOATS, [sizes.width]
        if f"{layer}.input_layernorm.weight" not in found:  # a model may say that it has any number of layers
            return wanted
        for end in _UNROTATED:
            if f"{layer}{end}" in found:
                wanted[f"{layer}{end}"] = FLOATS, [sizes.head]
    for layer, name in sizes.linears().items():
        shape = [outputs[name], inputs[name]]
        if f"{layer}.bias" in found:
            wanted[f"{layer}.bias"] = FLOATS, shape[:1]
        if scheme is None or not scheme.is_quantized(layer):
            wanted[f"{layer}.weight"] = FLOATS, shape
            continue
        for part, of_part in shapes_of(layer, shape[0], shape[1], scheme.weights).items():
            wanted[f"{layer}.{part}"] = (NAMES[type_of(part, scheme.weights)],), of_part
        if scheme.activations == "fp8-tensor":
            wanted[f"{layer}.input_scale"] = ("F32",), []
    return wanted


def kinds_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Kind]:
    """The kinds of tensors in memory."""
    return {name: (NAMES.get(each.dtype, str(each.dtype)), [*each.shape]) for name, each in tensors.items()}


# ---- files -----------------------------------------------------------------------------------------------------------
def opened(path: Path) -> Any:
    """A reader of safetensors, as a context. Raises `StorageError` for a file that is none."""
    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        raise StorageError(f"{path} cannot be read ({shortened(str(error))}); get the file again") from None


def check_files(files: Iterable[str | Path], sizes: Sizes | None, kind: str, scheme: Scheme) -> set[str]:
    """Check the files of a folder of codes, and return the names of their tensors.

    sizes: None if the architecture is not known; then codes need only fit their scales.

    Raises what `check_is_whole` raises, and `StorageError` for tensors that are not those that hadagen wrote.
    """
    paths = [Path(file) for file in files]
    found: dict[str, Kind] = {}
    for path in paths:
        if (path.parent / UNFINISHED).exists():
            raise UsageError(f"{path.parent} is not complete; run the hadagen quantize that began it again")
        with opened(path) as reader:
            for name in reader.keys():  # noqa: SIM118
                if name in found:
                    raise StorageError(f"{path} has {name}, which another file has too; {_AGAIN}")
                part = reader.get_slice(name)
                found[name] = part.get_dtype(), part.get_shape()
    if sizes is None:
        _check_pairs(found, scheme)
    else:
        check_is_whole(found, sizes, kind, scheme)
    if checksum_of_files(paths) != scheme.checksum:
        raise StorageError(
            f"{paths[0].parent} has other tensors than its checksum in {CONFIG} says; get its files again, or {_AGAIN}"
        )
    return set(found)


def checksum_of_files(paths: Iterable[Path]) -> int:
    """The checksum of all tensors in files."""
    sums: dict[str, int] = {}
    with ThreadPoolExecutor() as threads:  # which zlib lets run at once
        for path in paths:
            with opened(path) as reader:
                names = list(reader.keys())
                found = threads.map(lambda name, reader=reader: _checksum(reader.get_tensor(name)), names)
                sums |= dict(zip(names, found, strict=True))
    return _of_all(sums)


def checksum_of(tensors: Mapping[str, torch.Tensor]) -> int:
    """The same of tensors in memory, on any device."""
    return _of_all({name: _checksum(each) for name, each in tensors.items()})


def _of_all(sums: Mapping[str, int]) -> int:
    return zlib.crc32(json.dumps(sorted(sums.items())).encode())


def _checksum(tensor: torch.Tensor) -> int:
    held = tensor.detach().cpu().contiguous()
    return zlib.crc32((ctypes.c_char * held.nbytes).from_address(held.data_ptr()) if held.nbytes else b"")
