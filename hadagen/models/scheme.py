"""How a model is rotated and quantized: the `quantization_config` of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hadagen.errors import UsageError, choice, shown
from hadagen.models.defaults import rotation_for

if TYPE_CHECKING:
    from hadagen.runtime.rotation import Rotation

METHOD, VERSION = "hadagen", 3  # in the `quantization_config` of a checkpoint
_SAME_OF_8_BITS = 2  # an earlier version, in which only codes of 4 bits lie otherwise
# The codes of weights → the format of activations that goes with them. With 8 bits, weights have the same format.
WEIGHTS = {"int8": "int8-row", "fp8": "fp8-row", "int4": "int8-row", "int4-row": "int8-row"}
GROUPS = {"int4": True, "int4-row": False}  # weights of 4 bits → whether each group of a row has a factor
ACTIVATIONS = ("int8-row", "fp8-row", "fp8-tensor", None)
ROTATIONS = ("quarot", "blocks", "heads", None)
AUTO = "auto"  # weights that are chosen for a GPU, or a rotation that is chosen when the model is known
# The same for keys and values in a cache, where each head of a token is a row.
CACHES = {"int8": "int8-row", "fp8": "fp8-row", "int4": "int4-row"}
# The linear layers of Llama-like models that are quantized, by the last component of their names.
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Online:
    """A rotation of the input of a layer, which runs in each pass: `hadagen.Rotation(n, block=block)`."""

    n: int
    block: int | None = None

    def rotation(self) -> Rotation:
        """The module. Raises `UsageError` for an n or a block that has no rotation."""
        from hadagen.runtime.rotation import Rotation  # which needs PyTorch

        return Rotation(self.n, block=self.block)


@dataclass(frozen=True)
class Scheme:
    """How a model is rotated and quantized.

    weights: "int8" or "fp8" (float8_e4m3fn), with a float32 scale for each row of a weight [out, in]; "int4-row",
        the same in 4 bits; or "int4", with a factor too for each group of 128 elements of a row, or of the largest
        power of two that divides the row.
    activations: "fp8-row" or "int8-row", with a scale for each row; "fp8-tensor", with one scale for each layer, which
        the checkpoint stores; None: activations are not quantized. "auto" becomes the format with a scale for each row
        and the codes of the weights, because GPUs multiply codes of the same type; for 4 bits, "int8-row".
    rotation: "quarot": the residual stream, the heads of values, and the inputs of down_proj are rotated in whole rows.
        "blocks": the inputs of each layer are rotated in blocks. "heads": the heads of values alone. None: nothing is
        rotated. "auto" becomes one of these in `resolved`.
    seed: of the random signs of the rotation of the residual stream.
    ignore: layers that are not quantized, by their names, or by the last components of their names.
    online: the layers whose inputs are rotated in each pass, by their names or the last components of their names.
    layers: the linear layers that have codes, by the last components of their names.
    head: the length of the heads of values, if a rotation of them is folded into the weights of a checkpoint.
    checksum: of the tensors of a checkpoint, by which changes are noticed.
    cache: the codes of keys and values in a cache, with a scale for each head of a token: "int8", "fp8" or "int4"; None
        keeps their type. Unless rotation is None, the heads of values are rotated too, and in each pass those of
        queries and keys, behind their rotary embedding.

    Raises `UsageError` for impossible values.
    """

    weights: str = "int8"
    activations: str | None = "auto"
    rotation: str | None = "auto"
    seed: int = 0
    ignore: tuple[str, ...] = ("lm_head",)
    online: Mapping[str, Online] = field(default_factory=dict)
    cache: str | None = None
    head: int | None = None
    checksum: int | None = None
    layers: tuple[str, ...] = LAYERS

    def __post_init__(self) -> None:
        _check_choice("weights", self.weights, WEIGHTS)
        _check_choice("cache", self.cache, (*CACHES, None))
        if self.activations == "auto":
            object.__setattr__(self, "activations", WEIGHTS[self.weights])
        _check_choice("activations", self.activations, ACTIVATIONS)
        if self.rotation != AUTO:
            _check_choice("rotation", self.rotation, ROTATIONS)
        if type(self.seed) is not int or not 0 <= self.seed < 1 << 63:
            raise UsageError(f"seed = {shown(self.seed)} is not possible; pass an integer from 0 to 2^63 - 1")
        if self.head is not None and (type(self.head) is not int or self.head < 1):
            raise UsageError(f"head = {shown(self.head)} is no length of heads; take the one that hadagen wrote")
        for name in ("ignore", "layers"):
            given: Any = getattr(self, name)
            if isinstance(given, str) or not isinstance(given, Iterable) or not all(isinstance(e, str) for e in given):
                raise UsageError(f'{name} = {shown(given)} is no list of names of layers; pass one such as ["lm_head"]')
            object.__setattr__(self, name, tuple(given))

    @classmethod
    def from_dict(cls, data: Any) -> Scheme:
        """The scheme of a `quantization_config`. Raises `UsageError` for one of another method or a newer version."""
        if not isinstance(data, Mapping) or data.get("quant_method") != METHOD:
            raise UsageError(
                f"quantization_config = {shown(data)} is not of hadagen; its quant_method must be {METHOD}"
            )
        is_same = data.get("version") == _SAME_OF_8_BITS and data.get("weights") not in GROUPS
        if data.get("version") != VERSION and not is_same:
            raise UsageError(
                f"quantization_config has version {shown(data.get('version'))}; this hadagen reads version {VERSION}, "
                "so update hadagen or quantize the model again"
            )
        known = {name: value for name, value in data.items() if name not in ("quant_method", "version")}
        unknown = sorted(known.keys() - cls.__dataclass_fields__.keys())
        if unknown:
            raise UsageError(f"quantization_config has {unknown[0]}, which is not known; remove it, or update hadagen")
        if "online" in known:
            known["online"] = _online(known["online"])
        made = cls(**known)
        for name in made.online:
            if name.rpartition(".")[2] not in made.layers:
                others = choice(name, made.layers)
                raise UsageError(f"online names the layer {shown(name)}, which is not known; {others}")
        return made

    def to_dict(self) -> dict[str, Any]:
        """The `quantization_config` of a checkpoint, as data for JSON."""
        online = {name: {"n": each.n, "block": each.block} for name, each in self.online.items()}
        layers = {} if self.layers == LAYERS else {"layers": list(self.layers)}
        return layers | {
            "quant_method": METHOD,
            "version": VERSION,
            "weights": self.weights,
            "activations": self.activations,
            "rotation": self.rotation,
            "cache": self.cache,
            "seed": self.seed,
            "ignore": list(self.ignore),
            "online": online,
            "head": self.head,
            "checksum": self.checksum,
        }

    def resolved(self, is_foldable: bool) -> Scheme:
        """The scheme with a rotation in place of "auto". is_foldable: whether "quarot" is possible."""
        if self.rotation != AUTO:
            return self
        return replace(self, rotation=rotation_for(self.weights, is_foldable, self.cache is not None).value)

    @property
    def rotates_keys(self) -> bool:
        """Whether queries and keys are rotated in each pass that has a cache."""
        return self.cache is not None and self.rotation is not None

    @property
    def rotates_values(self) -> bool:
        """Whether a rotation of the heads of values is folded into the weights."""
        return self.rotates_keys or self.rotation in ("quarot", "heads")

    def is_quantized(self, name: str) -> bool:
        """Whether the layer of this name, such as `model.layers.0.mlp.down_proj`, has codes."""
        short = name.rpartition(".")[2]
        return short in self.layers and name not in self.ignore and short not in self.ignore

    def online_of(self, name: str) -> Online | None:
        """The rotation of the input of a layer that runs in each pass. Layers that are not quantized have none."""
        return self.online.get(name, self.online.get(name.rpartition(".")[2])) if self.is_quantized(name) else None


def _check_choice(name: str, value: Any, known: Iterable[str | None]) -> None:
    possible = list(known)
    if not isinstance(value, str | None) or value not in possible:
        names = [each or "None" for each in possible]
        raise UsageError(f"{name} = {shown(value)} is not known; {choice(value, names)}")


def _online(data: Any) -> dict[str, Online]:
    try:
        made = {str(name): Online(each["n"], each["block"]) for name, each in data.items()}
    except (AttributeError, KeyError, TypeError):
        raise UsageError(
            f'online = {shown(data)} has no rotations; write them as {{"down_proj": {{"n": 14336, "block": null}}}}'
        ) from None
    for each in made.values():
        each.rotation()
    return made
