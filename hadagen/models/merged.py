"""Several layers of one input as one product, whose input is quantized once: gate and up of an MLP, and queries, keys
and values of attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise, product
from typing import Any, NamedTuple

import torch

from hadagen.errors import UsageError
from hadagen.models.layers import LOAD_AGAIN, OF_WEIGHT, QuantizedLinear, check_is_alike, frozen
from hadagen.problem.prologues import Prologue


class _Outputs(NamedTuple):
    """What the first of joined layers has computed.

    x, version: the input, and how often it had been written to. y: the outputs of all layers. taken: by which layers.
    """

    x: torch.Tensor
    version: int
    y: torch.Tensor
    taken: list[bool]


def _version(x: torch.Tensor) -> int:
    return 0 if torch.compiler.is_compiling() or x.is_inference() else x._version


class JoinedLinear(torch.nn.Module):
    """One of several layers of the same input, whose product is that of all of them.

    The first layer computes the outputs of all, and holds their codes as `joined`. Each of the others takes its part of
    them once, if its input is the same tensor and was not written to, and else multiplies it by its own rows. In
    inference mode and in compiled code, PyTorch does not know whether a tensor was written to. Other threads have
    inputs of their own. If some parts were not taken, layers are not joined from the next call on. Outputs are parts of
    longer rows, with gaps between them.

    forward takes and returns what a `QuantizedLinear` does. weight and bias: the part of the layer.
    """

    _is_split = False

    def __init__(self, layers: Mapping[str, QuantizedLinear]) -> None:
        super().__init__()
        ends = [0]
        for each in layers.values():
            ends.append(ends[-1] + each.out_features)
        self.names, self.ends = tuple(layers), tuple(ends)
        self.joined = merged(*layers.values())
        self._first: tuple[JoinedLinear, ...] = ()  # in a tuple, so that it is no part of this module
        self._of_all: _Outputs | None = None
        self._at = 0

    def others(self) -> Iterator[tuple[str, JoinedLinear]]:
        """The other layers, by their names."""
        for at, name in enumerate(self.names[1:], 1):
            made = JoinedLinear.__new__(JoinedLinear)
            torch.nn.Module.__init__(made)
            made.names, made.ends, made._first, made._of_all, made._at = self.names, self.ends, (self,), None, at
            yield name, made

    @property
    def is_first(self) -> bool:
        return self._at == 0

    @property
    def _rows(self) -> slice:
        return slice(self.ends[self._at], self.ends[self._at + 1])

    @property
    def _layer(self) -> QuantizedLinear:
        return self.joined if self.is_first else self._first[0].joined

    @property
    def in_features(self) -> int:
        return self._layer.in_features

    @property
    def out_features(self) -> int:
        return self.ends[self._at + 1] - self.ends[self._at]

    @property
    def weight(self) -> torch.Tensor:
        return self._layer.weight[self._rows]

    @property
    def bias(self) -> torch.Tensor | None:
        bias = self._layer.bias
        return None if bias is None else bias[self._rows]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_first:
            self._is_split = self._is_split or self._of_all is not None
            self._of_all = None
            if self._is_split:
                return self.joined.of_rows(x, self._rows)
            y = self.joined(x)
            self._of_all = _Outputs(x, _version(x), y, [True] + [False] * (len(self.names) - 1))
            return y[..., self._rows]  # type: ignore[no-any-return]
        (first,) = self._first
        found = first._of_all  # once, as another thread may change it
        if found is None or found.x is not x or found.version != _version(x) or found.taken[self._at]:
            return first.joined.of_rows(x, self._rows)
        found.taken[self._at] = True
        if all(found.taken):
            first._of_all = None
        return found.y[..., self._rows]

    def _apply(self, *arguments: Any, **options: Any) -> JoinedLinear:
        self._of_all = None
        return super()._apply(*arguments, **options)  # type: ignore[no-untyped-call, no-any-return]

    def _replicate_for_data_parallel(self) -> JoinedLinear:
        raise UsageError("DataParallel copies no layers with codes; give each process a model of its own")

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        """Raises `UsageError` for tensors of the layer on its own, which PyTorch might leave out."""
        for name in ("weight", "bias"):
            if (tensor := state_dict.get(f"{prefix}{name}")) is not None:
                check_is_alike(f"{prefix}{name}", tensor, self._layer.weight[self._rows])
                raise UsageError(f"{prefix}{name} is the part of {', '.join(self.names)}; {LOAD_AGAIN}")
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_of_all": None}

    def extra_repr(self) -> str:
        return f"{self.names[self._at]} of {', '.join(self.names)}"


def join(parent: torch.nn.Module, names: tuple[str, ...]) -> None:
    """Put `JoinedLinear`s in place of layers of one input, if all of them quantize it in the same way."""
    layers: dict[str, Any] = {name: getattr(parent, name, None) for name in names}
    if not all(isinstance(each, QuantizedLinear) and each.activations for each in layers.values()):
        return
    if any(not first.is_like(second) for first, second in pairwise(layers.values())):
        return
    first = JoinedLinear(layers)
    setattr(parent, names[0], first)
    for name, each in first.others():
        setattr(parent, name, each)


def parted(name: str, layer: JoinedLinear, state: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of each layer in a state dict with those of the joined one. name: of the first layer."""
    parent = name.removesuffix(layer.names[0])
    for key, tensor in state.items():
        for at, each in enumerate(layer.names):
            rows = tensor[layer.ends[at] : layer.ends[at + 1]] if tensor.dim() else tensor.clone()
            yield f"{parent}{each}.{key.removeprefix(f'{name}.joined.')}", rows


# ---- the MLP ---------------------------------------------------------------------------------------------------------
_MERGED = (*OF_WEIGHT, "bias")


class QuantizedMLP(torch.nn.Module):
    """down(act(gate(x)) · up(x)), or down(act(up(x))): one product for the layers that take x, and one kernel that
    activates, multiplies, rotates and quantizes.

    layers: those that take x, and the last one, by their names. before: what comes before the last one.

    Two layers that take x become one, gate_up_proj; others keep their names. Codes are [1, out, in]. So no program
    loads some of the tensors of a folder, where each layer has tensors of its own.
    """

    def __init__(self, layers: Mapping[str, QuantizedLinear], before: Prologue) -> None:
        super().__init__()
        *firsts, last = layers
        self.parts = {firsts[0] if len(firsts) == 1 else "gate_up_proj": tuple(firsts), last: (last,)}
        self.sizes = {name: [layers[each].out_features for each in parts] for name, parts in self.parts.items()}
        layers[last].before = before
        for name, layer in zip(self.parts, (merged(*(layers[name] for name in firsts)), layers[last]), strict=True):
            layer.weight = frozen(layer.weight.data.movedim(-1, 0))
            setattr(self, name, layer)

    def forward(self, *given: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        """The output [..., out] of an input [..., in], under whatever name the model passes it."""
        (x,) = (*given, *named.values())
        for layer in self.children():
            x = layer(x)
        return x


# ---- tensors ---------------------------------------------------------------------------------------------------------
def merged(*layers: QuantizedLinear) -> QuantizedLinear:
    """One layer with the outputs of several, which take the same input. It takes the place of the first."""
    given = [each.input_scale for each in layers if each.input_scale is not None]
    if len(scales := {each.item() for each in given if not each.is_meta}) > 1:
        raise UsageError(
            f"layers have one input, but its input_scale is {min(scales)} and {max(scales)}; quantize the model again"
        )
    first = layers[0]
    for name in _MERGED:
        parts = [getattr(each, name) for each in layers]
        setattr(first, name, None if parts[0] is None else frozen(_cat([each.data for each in parts])))
    first.out_features = sum(each.out_features for each in layers)
    return first


def unmerged(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of a model as folders have them, with those of each layer in place of those of several."""
    state = model.state_dict()
    for name, layer in model.named_modules():
        if isinstance(layer, JoinedLinear) and layer.is_first:
            prefix = f"{name}.joined."
            found = {key: state.pop(key) for key in [*state] if key.startswith(prefix)}
            state |= parted(name, layer, found)
    for name, mlp in [each for each in model.named_modules() if isinstance(each[1], QuantizedMLP)]:
        prefix = f"{name}." if name else ""
        for (layer, parts), part in product(mlp.parts.items(), (*_MERGED, "input_scale")):
            tensor = state.pop(f"{prefix}{layer}.{part}", None)
            if tensor is None:
                continue
            tensor = tensor.movedim(0, -1) if part == "weight" else tensor
            tensors = tensor.split(mlp.sizes[layer]) if tensor.dim() else [tensor.clone() for _ in parts]
            state |= {f"{prefix}{each}.{part}": of for each, of in zip(parts, tensors, strict=True)}
    return state


def _cat(tensors: list[torch.Tensor]) -> torch.Tensor:
    """All rows. Codes are joined as bytes, because autocast does not know FP8."""
    dtype = tensors[0].dtype
    if dtype.itemsize > 1:
        return torch.cat(tensors)
    return torch.cat([each.view(torch.uint8) for each in tensors]).view(dtype)
