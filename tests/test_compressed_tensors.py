"""Transforms of compressed-tensors that rotate with hadagen: the same values, and the same weights and state dicts."""

import copy
import json
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hadagen import UsageError
from hadagen.integrations import compressed_tensors as ours
from hadagen.integrations import host

transform = pytest.importorskip("compressed_tensors.transform")
hadamard = pytest.importorskip("compressed_tensors.transform.factory.hadamard")

WEIGHTS = ("weight_input", "weight_output")
PLACES = [(torch.nn.Linear, each) for each in ("input", "output", *WEIGHTS)] + [
    (torch.nn.Embedding, each) for each in WEIGHTS
]


@pytest.fixture(autouse=True)
def enabled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Hooks for one test; yields the forward of the host."""
    theirs = ours._theirs or hadamard.HadamardTransform.forward  # another test may have enabled hooks
    monkeypatch.setattr(hadamard.HadamardTransform, "forward", theirs)
    monkeypatch.setattr(host, "_warned", set())
    assert ours.enable()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield theirs


@pytest.fixture
def no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    def product(*_: Any) -> None:
        raise AssertionError("the host multiplied by a dense matrix")

    monkeypatch.setattr(hadamard, "apply_transform_weight", product)


def made(kind: str = "random-hadamard", n: int = 96, location: str = "input", **options: Any) -> Any:
    """A transform of a linear layer n → n, or of an embedding."""
    inverse, layer = options.pop("inverse", False), options.pop("layer", torch.nn.Linear)
    scheme = transform.TransformScheme(type=kind, **options)
    arguments = transform.TransformArgs(targets=[], location=location, inverse=inverse)
    return transform.TransformFactory.from_scheme(scheme, name="t", seed=5).create_transform(layer(n, n), arguments)


def values(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("randomize", [False, True])
@pytest.mark.parametrize("head_dim", [None, 32, 12])
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize(("layer", "location"), PLACES)
def test_values_are_those_of_the_host(
    enabled: Any, layer: Any, location: str, inverse: bool, head_dim: int | None, randomize: bool
) -> None:
    options = {"inverse": inverse, "head_dim": head_dim, "randomize": randomize, "layer": layer}
    one = made(location=location, precision=torch.float64, **options)
    x = values(96, 96)
    torch.testing.assert_close(one(x), enabled(one, x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(one.right_inverse(one(x)), x)


@pytest.mark.parametrize("kind", ["hadamard", "random-hadamard"])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_activations_are_as_near_to_float64_as_the_type_allows(
    enabled: Any, no_product: None, kind: str, precision: torch.dtype, dtype: torch.dtype
) -> None:
    one, x = made(kind, 256, precision=precision), values(2, 5, 256, dtype=dtype)
    exact = x.double() @ (one.weight.double() / 16)
    found = one(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, rtol=torch.finfo(dtype).eps / 2, atol=2e-6)


@pytest.mark.parametrize("shape", [(96,), (0, 96), (2, 0, 96), (2, 3, 5, 192)])
def test_values_of_any_shape(enabled: Any, no_product: None, shape: tuple[int, ...]) -> None:
    one, x = made(precision=torch.float64, randomize=True), values(*shape)
    found = one(x)
    assert found.shape == x.shape
    torch.testing.assert_close(one.right_inverse(found), x)


def test_stored_weights_are_those_of_the_host(enabled: Any) -> None:
    """Rounded to bfloat16 from float64, as the host does."""
    one = made(n=384, location="weight_input", inverse=True)
    weight = values(64, 384, dtype=torch.bfloat16)
    assert torch.equal(one(weight), enabled(one, weight))


@pytest.mark.parametrize("location", ["q_attn", "k_cache"])
def test_heads_of_queries_and_keys(enabled: Any, location: str) -> None:
    one, x = made(location=location, head_dim=32, precision=torch.float64), values(2, 3, 4, 32)
    torch.testing.assert_close(one(x), enabled(one, x))


def test_no_name_and_no_weight_changes() -> None:
    one, x = made(randomize=True), values(4, 96)
    before = {name: each.clone() for name, each in one.state_dict().items()}
    one(x)
    assert list(before) == list(one.state_dict()) == ["weight", "perm"]
    assert all(torch.equal(each, before[name]) for name, each in one.state_dict().items())
    assert not list(one.buffers())
    assert [name for name, _ in one.named_modules()] == [""]
    for other in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert torch.equal(other(x), one(x))


def test_a_weight_that_was_loaded_counts() -> None:
    one, x = made(), values(4, 96)
    before = one(x)
    with torch.no_grad():
        one.weight.mul_(-1)
    assert torch.equal(one(x), -before)
    one.load_state_dict({"weight": -one.weight})
    assert torch.equal(one(x), before)
    one.weight.data = -one.weight.data
    assert torch.equal(one(x), -before)
    one.weight.data.neg_()  # which no version counts
    ours.enable()
    assert torch.equal(one(x), before)


def test_another_weight_in_the_same_memory_counts() -> None:
    one, x = made(precision=torch.float64), values(4, 96)
    memory = bytearray(one.weight.numpy().tobytes())
    one.weight.data = torch.frombuffer(memory, dtype=torch.float64).view(96, 96)
    before, address, version = one(x), one.weight.data_ptr(), one.weight._version
    one.weight.data = torch.empty(96, 96, dtype=torch.float64)
    torch.frombuffer(memory, dtype=torch.float64).neg_()
    one.weight.data = torch.frombuffer(memory, dtype=torch.float64).view(96, 96)
    assert (one.weight.data_ptr(), one.weight._version) == (address, version)
    assert torch.equal(one(x), -before)


@pytest.mark.parametrize("where", ["inference tensor", "disk"])
def test_a_weight_whose_changes_cannot_be_seen_is_multiplied(
    enabled: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    with torch.inference_mode(where == "inference tensor"):
        one, x = made(precision=torch.float64), values(4, 96)
        if where == "disk":  # as the parameters of an offloaded module
            offloaded = {"weight": torch.nn.Parameter(one.weight.to("meta"), requires_grad=False)}
            kept = type("Cache", (dict,), {"offloaded_values": offloaded})(one._parameters)
            monkeypatch.setitem(one.__dict__, "_parameters", kept)
        with pytest.warns(UserWarning, match="is an inference tensor or on a disk, so nothing says when it changes"):
            before = one(x)
        one.weight.neg_()
        assert torch.equal(one(x), -before)
        assert torch.equal(one(x), enabled(one, x))


def test_a_weight_is_recovered_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    scheme = transform.TransformScheme(type="random-hadamard", head_dim=12)
    factory = transform.TransformFactory.from_scheme(scheme, name="t")
    arguments = transform.TransformArgs(targets=[], location="input")
    layers = [factory.create_transform(torch.nn.Linear(n, 8), arguments) for n in (24, 36)]
    seen = []
    recover = ours._recover
    monkeypatch.setattr(ours, "_recover", lambda weight: seen.append(1) or recover(weight))
    for one, n in zip(layers, (24, 36), strict=True):
        one(values(2, n))
        one(values(2, n))
    assert len(seen) == 1


def test_values_have_gradients(enabled: Any) -> None:
    one, x = made(inverse=True, precision=torch.float64, randomize=True), values(4, 96).requires_grad_()
    (found,) = torch.autograd.grad(one(x).square().sum() + one(x)[0, 0], x)
    (expected,) = torch.autograd.grad(enabled(one, x).square().sum() + enabled(one, x)[0, 0], x)
    torch.testing.assert_close(found, expected)


def test_compiled_code_rotates_too(no_product: None) -> None:
    torch._dynamo.reset()
    layer = torch.nn.Linear(96, 8)
    scheme = transform.TransformScheme(type="random-hadamard", apply=[{"targets": ["Linear"], "location": "input"}])
    model = torch.nn.Sequential(layer)
    transform.apply_transform_config(model, transform.TransformConfig(config_groups={"t": scheme}))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = values(4, 96, dtype=torch.float32)
    found = compiled(x)
    torch.testing.assert_close(found, model(x))
    assert list(model.state_dict()) == ["0.weight", "0.bias", "0.t_input.weight"]


@pytest.mark.parametrize(
    ("change", "options", "reason"),
    [
        (lambda one: one.weight.data[0, 0].neg_(), {}, "the matrix of a transform was not recovered"),
        (lambda one: one.weight.data.mul_(2), {}, "has other entries than 1 and −1"),
        (lambda one: None, {"requires_grad": True}, "the weight of a transform is trained"),
        (lambda one: None, {"dtype": torch.float8_e5m2}, "is applied to a Tensor of float8_e5m2"),
    ],
)
def test_what_is_not_recovered_is_computed_by_the_host_after_one_warning(
    enabled: Any, change: Any, options: dict[str, Any], reason: str
) -> None:
    dtype = options.pop("dtype", torch.float64)
    one, x = made(precision=torch.float64, **options), values(4, 96, dtype=dtype)
    change(one)
    with pytest.warns(UserWarning, match=f"compressed_tensors .* does not use hadagen here: .*{reason}") as caught:
        found = [one(x), one(x)]
    assert len(caught) == 1
    assert all(torch.equal(each.double(), enabled(one, x).double()) for each in found)


def test_the_switch(monkeypatch: pytest.MonkeyPatch, enabled: Any) -> None:
    monkeypatch.setattr(hadamard.HadamardTransform, "forward", enabled)
    for value, expected in (("none", False), ("vllm", False), ("vllm, compressed_tensors", True)):
        monkeypatch.setenv(host.SWITCH, value)
        assert ours.enable() is expected
        assert (hadamard.HadamardTransform.forward is not enabled) is expected


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (lambda self, value: value, "its transform of the location input has other results"),
        (lambda self, x: x, "HadamardTransform.forward takes self, x, not self, value"),
    ],
)
def test_a_host_that_has_changed_keeps_its_own(monkeypatch: pytest.MonkeyPatch, forward: Any, reason: str) -> None:
    monkeypatch.setattr(hadamard.HadamardTransform, "forward", forward)
    with pytest.warns(UserWarning, match=reason):
        assert not ours.enable()
    assert hadamard.HadamardTransform.forward is forward


# ---- checkpoints -----------------------------------------------------------------------------------------------------
class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(24, 24), torch.nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))  # type: ignore[no-any-return]


def config() -> Any:
    apply = [
        {"targets": ["Linear"], "location": "input"},
        {"targets": ["Linear"], "location": "weight_input", "inverse": True},
    ]
    scheme = transform.TransformScheme(type="random-hadamard", head_dim=12, apply=apply)
    return transform.TransformConfig(config_groups={"v": scheme})


def stored(folder: Path, *, without: str = "nothing") -> Model:
    """A model with transforms, and its checkpoint, in which shared weights are stored once."""
    from safetensors.torch import save_file

    model = Model()
    transform.apply_transform_config(model, config())
    with torch.no_grad():  # other signs than the host makes without a seed
        model.first.v_input.weight.copy_(made(n=12).weight)
    state = model.state_dict()
    del state["second.v_input.weight"]
    save_file({name: each for name, each in state.items() if without not in name}, folder / "model.safetensors")
    settings = {"quantization_config": {"transform_config": config().model_dump(mode="json")}}
    (folder / "config.json").write_text(json.dumps(settings, default=str))
    return model


def loaded(model: Model) -> Model:
    """As transformers loads it, without transforms."""
    other = Model()
    other.load_state_dict({name: each for name, each in model.state_dict().items() if "v_input" not in name})
    return other


def test_transforms_of_a_checkpoint_are_attached(tmp_path: Path) -> None:
    model = stored(tmp_path)
    other, x = loaded(model), values(4, 24, dtype=torch.float32)
    ours.load_transforms(other, tmp_path)
    assert torch.equal(other(x), model(x))
    assert list(other.state_dict()) == list(model.state_dict())
    assert other.transform_config == model.transform_config
    with torch.no_grad():
        other.first.v_input.weight.mul_(-1)
    ours.load_transforms(other, tmp_path)  # which has them already
    assert torch.equal(other(x), model(x))


def test_a_folder_without_transforms_is_one_sentence(tmp_path: Path) -> None:
    model = loaded(stored(tmp_path, without="v_input"))
    with pytest.raises(UsageError, match=r"has no tensor first.v_input.weight of a transform; pass the folder"):
        ours.load_transforms(model, tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"has no transform_config; pass the folder of a checkpoint"):
        ours.load_transforms(Model(), tmp_path)
    with pytest.raises(UsageError, match=r"has no transform_config; pass the folder of a checkpoint"):
        ours.load_transforms(Model(), tmp_path / "nowhere")
