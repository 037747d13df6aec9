"""Fewer products and kernels for a model with codes: layers of one input become one product, and what stands between
two products runs in the kernel that quantizes.

`JoinedLinear` is right for any layers, so names that a model uses otherwise cost time alone. A `QuantizedMLP` replaces
only modules whose own code computes the same, as `gates` finds.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence

import torch

from hadagen.models import gates
from hadagen.models.experts import QuantizedExperts
from hadagen.models.layers import QuantizedLinear
from hadagen.models.merged import QuantizedMLP, join

_QKV = ("q_proj", "k_proj", "v_proj")
# Layers of a module that models call with one input, the longest of lists that begin alike first.
SIBLINGS: tuple[tuple[str, ...], ...] = (
    *((*_QKV, "gate_proj"), (*_QKV, "g_proj"), (*_QKV, "r_proj"), _QKV),
    *(("query", "key", "value"), ("query_proj", "key_proj", "value_proj"), ("project_q", "project_k", "project_v")),
    *(("Wq", "Wk", "Wv"), ("q_lin", "k_lin", "v_lin"), ("q", "k", "v")),
    *(("q_a_proj", "kv_a_proj_with_mqa", "g_proj"), ("q_a_proj", "kv_a_proj_with_mqa"), ("q_a_proj", "kv_proj")),
    *(("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), ("in_proj_qkvz", "in_proj_ba")),
    *(("gate_proj", "up_proj"), ("w1", "w3"), ("w_0", "w_1"), ("proj_up_gate", "proj_up"), ("linear_y", "linear_x")),
)
# The layers of MLPs: one or two that take the input, and the last one.
MLPS: tuple[tuple[str, ...], ...] = (
    *(("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), ("proj_up_gate", "proj_up", "proj_down")),
    *(("gate_up_proj", "down_proj"), ("up_proj", "down_proj"), ("fc1", "fc2"), ("c_fc", "c_proj")),
    ("dense_h_to_4h", "dense_4h_to_h"),
)
_CROSS = re.compile(r"cross|encoder_attn|enc_?dec", re.IGNORECASE)  # attention, whose queries have another input
_SHARED = "is_kv_shared_layer"  # an attribute of attention that computes queries alone


def merge(model: torch.nn.Module) -> None:
    """Put a `QuantizedMLP` in place of each MLP whose prologue is known, and `JoinedLinear`s in place of other layers
    of one input, and let experts run their prologue in the kernel that quantizes."""
    for name, module in list(model.named_modules()):
        if isinstance(module, QuantizedExperts):
            module.fuse()
        elif name and (made := _mlp(module)):
            model.set_submodule(name, made)
        elif not getattr(module, _SHARED, False):
            for names in SIBLINGS:
                join(module, _called(module, names[1:] if _CROSS.search(name) else names))


def _mlp(module: torch.nn.Module) -> QuantizedMLP | None:
    for names in MLPS:
        layers = {name: each for name in names if isinstance(each := getattr(module, name, None), QuantizedLinear)}
        if len(layers) < len(names) or not all(each.activations for each in layers.values()):
            continue
        *firsts, last = layers.values()
        devices = {each.weight.device for each in layers.values()}
        outputs = sum(each.out_features for each in firsts)
        width = outputs // last.in_features
        if len(devices) > 1 or outputs != width * last.in_features or not len(firsts) <= width <= 2:
            continue
        if all(firsts[0].is_like(each, with_scales=False) for each in firsts):
            before = gates.of_mlp(module, names, width)
            return QuantizedMLP(layers, before) if before else None
    return None


def _called(module: torch.nn.Module, names: Sequence[str]) -> tuple[str, ...]:
    """Names of layers in the order in which the code of a module has them, because the first one called computes the
    products of all."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    order = {name: at for at, name in enumerate(code.co_names)} if code else {}
    return tuple(sorted(names, key=lambda name: order.get(name, len(order))))
