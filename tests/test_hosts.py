"""What other libraries do with the buffers of a `Rotation`: it stays the same map, or one sentence says why not."""

import copy
import io
import json
import pickle
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from host_models import CPU, EXPECTED, NAMES, OF_TWO, Model, X, is_map_of, orthogonal, signs_of

from hadagen import Rotation, TensorError, rotate_quantize
from hadagen.runtime.operands import sealed

WARNING = "the values with which the Rotation was made, or that it had last, are taken instead"


@pytest.fixture(autouse=True)
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", f".*{WARNING}")
        yield


def filled(model: torch.nn.Module, seed: int, **options: Any) -> torch.nn.Module:
    model.load_state_dict(Model(seed).state_dict(), **options)
    return model


def on_meta(seed: int) -> Model:
    with torch.device("meta"):
        return Model(seed)


def through_file(save: Callable[[Any, Any], None], load: Callable[[Any], Any], value: Any) -> Any:
    file = io.BytesIO()
    save(value, file)
    file.seek(0)
    return load(file)


def safetensors(seed: int) -> dict[str, torch.Tensor]:
    pytest.importorskip("safetensors")
    from safetensors.torch import load, save

    return load(save(Model(seed).state_dict()))


def weights_only(seed: int) -> Any:
    return through_file(torch.save, lambda file: torch.load(file, weights_only=True), Model(seed).state_dict())


def loaded(state: dict[str, torch.Tensor], **options: Any) -> Model:
    model = Model(1)
    model(X)
    model.load_state_dict(state, **options)
    return model


# ---- PyTorch ---------------------------------------------------------------------------------------------------------
PYTORCH: dict[str, Callable[[], Any]] = {
    "state_dict": lambda: loaded(Model(0).state_dict()),
    "state_dict, assign": lambda: loaded(Model(0).state_dict(), assign=True),
    "safetensors": lambda: loaded(safetensors(0)),
    "safetensors, assign": lambda: loaded(safetensors(0), assign=True),
    "weights_only": lambda: loaded(weights_only(0)),
    "torch.save": lambda: through_file(torch.save, lambda file: torch.load(file, weights_only=False), Model(0)),
    "pickle": lambda: pickle.loads(pickle.dumps(Model(0))),
    "deepcopy": lambda: copy.deepcopy(Model(0)),
    "deepcopy of loaded": lambda: copy.deepcopy(filled(Model(1), 0)),
    "half": lambda: Model(0).half(),
    "bfloat16 and back": lambda: Model(0).bfloat16().double(),
    "type": lambda: Model(0).type(torch.float32),
    "share_memory": lambda: Model(0).share_memory(),
    "to_empty": lambda: Model(0).to_empty(device="cpu"),
    "to_empty of loaded": lambda: filled(Model(1), 0).to("meta").to_empty(device="cpu"),
    "meta, to_empty": lambda: on_meta(0).to_empty(device="cpu"),
    "meta, to_empty, load": lambda: filled(on_meta(1).to_empty(device="cpu"), 0),
    "meta, assign": lambda: filled(on_meta(1), 0, assign=True),
    "reset_parameters": lambda: Model(0).apply(lambda each: getattr(each, "reset_parameters", lambda: None)()),
    "functional_call": lambda: lambda x: torch.func.functional_call(Model(1), Model(0).state_dict(), x),
    "compile": lambda: torch.compile(Model(0), backend="aot_eager", fullgraph=True),
    "ema": lambda: torch.optim.swa_utils.AveragedModel(Model(0), use_buffers=True),
}


@pytest.mark.parametrize("operation", PYTORCH.values(), ids=PYTORCH)
def test_pytorch_keeps_the_map(operation: Callable[[], Any]) -> None:
    torch._dynamo.reset()
    model = operation()
    for _ in range(2):
        assert is_map_of(model, 0)


def test_what_is_loaded_is_all_that_a_rotation_says_and_does() -> None:
    model, wanted = loaded(Model(0).state_dict()), Model(0)
    wide = X.double()
    for name in NAMES:
        r, other = getattr(model, name), getattr(wanted, name)
        assert r.to_dict() == other.to_dict()
        for x in (X, wide):
            assert torch.equal(r(x), other(x))
            assert torch.equal(r.inverse(x), other.inverse(x))
        assert (r.inverse(r(wide)) - wide).norm() < 1e-5 * wide.norm()
        assert torch.equal(rotate_quantize(X, r, to="int8-row").codes, rotate_quantize(X, other, to="int8-row").codes)
        assert Rotation.from_dict(r.to_dict()).state_dict().keys() == r.state_dict().keys()


def test_compiled_and_exported_code_follows_what_is_loaded() -> None:
    torch._dynamo.reset()
    model = Model(0)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    program = torch.export.export(Model(0), (X,), strict=False)
    module = through_file(torch.export.save, torch.export.load, program).module()
    for each, owner in ((compiled, model), (module, module)):
        torch.testing.assert_close(each(X), EXPECTED[0])
        owner.load_state_dict(Model(1).state_dict())
        torch.testing.assert_close(each(X), EXPECTED[1])


# ---- who else writes buffers -----------------------------------------------------------------------------------------
BUFFERS = {
    "signs": lambda seed: Rotation(96, signs=signs_of(96, seed)),
    "signs_after": lambda seed: Rotation(96, "regular", signs_after=signs_of(16, seed), block=16),
    "folded": lambda seed: Rotation(96, signs=signs_of(24, seed), block=24),
    "given": lambda seed: Rotation(96, orthogonal(3, seed)),
    "given ±1": lambda seed: Rotation(48, torch.eye(3)[[seed, 1 - seed, 2]], signs=signs_of(48, seed)),
}


def freed(buffer: torch.Tensor) -> torch.Tensor:
    """Memory that was a buffer's, of which an allocator has changed the first bytes."""
    memory = buffer.clone()
    memory[:16] ^= 0x55
    return memory


WRITES: dict[str, Callable[[Rotation, str], Any]] = {
    "zeros": lambda r, name: r.get_buffer(name).zero_(),
    "other memory": lambda r, name: r._buffers.update({name: torch.full_like(r.get_buffer(name), 7)}),
    "freed memory": lambda r, name: r._buffers.update({name: freed(r.get_buffer(name))}),
    ".data": lambda r, name: setattr(r.get_buffer(name), "data", torch.zeros_like(r.get_buffer(name))),
    "a cast": lambda r, name: setattr(r, name, r.get_buffer(name).half()),
    "meta": lambda r, name: r._buffers.update({name: r.get_buffer(name).to("meta")}),
    "a cut": lambda r, name: setattr(r, name, r.get_buffer(name)[:5]),
}


@pytest.mark.parametrize("kind", BUFFERS)
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("called", [False, True])
def test_what_holds_no_values_is_repaired_with_one_warning(
    kind: str, write: Callable[[Rotation, str], Any], called: bool
) -> None:
    r = BUFFERS[kind](0)
    wanted = BUFFERS[kind](0)(torch.ones(r.n))
    if called:
        r(torch.ones(r.n))
    for name in r.state_dict():
        write(r, name)
    with pytest.warns(RuntimeWarning, match=WARNING) as caught:
        y = r(torch.ones(r.n))
    assert len(caught) == 1
    assert torch.equal(y, wanted)
    assert torch.equal(r(torch.ones(r.n)), wanted)
    assert r.to_dict() == BUFFERS[kind](0).to_dict()


@pytest.mark.parametrize("kind", BUFFERS)
def test_values_that_were_changed_are_refused(kind: str) -> None:
    r = BUFFERS[kind](0)
    name = next(iter(r.state_dict()))
    call = torch.compile(r, backend="eager")
    call(torch.ones(r.n))
    r.get_buffer(name)[0] ^= 1
    for run in (r, r.inverse, call, lambda x: rotate_quantize(x, r, to="int8-row")):
        with pytest.raises(TensorError, match=r"was changed since it was made: its checksum is wrong; load a state"):
            run(torch.ones(r.n))
    with pytest.raises(RuntimeError, match=f"{name} was changed since it was made"):
        BUFFERS[kind](0).load_state_dict(r.state_dict())
    r.reset_parameters()
    assert torch.equal(r(torch.ones(r.n)), BUFFERS[kind](0)(torch.ones(r.n)))


def test_other_memory_at_the_address_of_a_freed_buffer_is_read_again() -> None:
    memory = bytearray(sealed.seal(torch.ones(4, dtype=torch.uint8), "signs").tolist())
    sealed.check(torch.frombuffer(memory, dtype=torch.uint8), least=0)
    memory[0] ^= 1
    with pytest.raises(TensorError, match="was changed since it was made"):
        sealed.check(torch.frombuffer(memory, dtype=torch.uint8), least=0)


@pytest.mark.parametrize("kind", BUFFERS)
def test_compiled_code_checks_its_buffers(kind: str) -> None:
    torch._dynamo.reset()
    r = BUFFERS[kind](0)
    for name in r.state_dict():
        r._buffers[name] = torch.zeros_like(r.get_buffer(name))
    with pytest.raises(TensorError, match=r"a buffer of a Rotation holds no values of a Rotation, .*reset_parameters"):
        torch.compile(r, backend="aot_eager")(torch.ones(r.n))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (Rotation(192, signs=signs_of(96, 0), block=96), r"not signs of Rotation\(n=192, block=96, 'auto', k=\[12\]\)"),
        (Rotation(48, signs=signs_of(48, 0)), r"not signs of Rotation\(n=48, block=48"),
        (
            Rotation(96, "dao", signs=signs_of(96, 0)),
            r"holds signs of Rotation\(n=96, block=96, 'auto', k=\[12\]\), not",
        ),
        (Rotation(96, k=24, signs=signs_of(96, 0)), r"k=\[24\]\); use the rotation that it is of"),
        (Rotation(96), "packed_signs is of a Rotation made with signs=, which this one lacks; make it with signs="),
    ],
)
def test_another_rotation_is_not_loaded(other: Rotation, message: str) -> None:
    state, before = Rotation(96, signs=signs_of(96, 1)).state_dict(), other.to_dict()
    for assign in (False, True):
        with pytest.raises(RuntimeError, match=message) as caught:
            other.load_state_dict(state, strict=False, assign=assign)
        assert str(caught.value).count("\n") == 1
    assert other.to_dict() == before
    if other.state_dict():
        other._buffers["packed_signs"] = state["packed_signs"]
        with pytest.raises(TensorError, match=message):
            other(torch.ones(other.n))


@pytest.mark.parametrize("kind", BUFFERS)
def test_zeros_in_a_state_dict_keep_the_values_and_warn_once(kind: str) -> None:
    r = BUFFERS[kind](0)
    zeros = {name: torch.zeros_like(each) for name, each in r.state_dict().items()}
    with pytest.warns(RuntimeWarning, match=WARNING):
        r.load_state_dict(zeros)
    r.load_state_dict(zeros)  # a second warning would be an error
    assert torch.equal(r(torch.ones(r.n)), BUFFERS[kind](0)(torch.ones(r.n)))


# ---- in several places of a model ------------------------------------------------------------------------------------
PLACED: dict[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
    "once": torch.nn.Sequential,
    "twice": lambda r: torch.nn.Sequential(r, r),
    "nested": lambda r: torch.nn.Sequential(torch.nn.Sequential(r), r, torch.nn.Sequential(torch.nn.Identity(), r)),
    "each layer": lambda r: torch.nn.Sequential(*(torch.nn.Sequential(r) for _ in range(4))),
}


def by_safetensors(model: Any, other: Any, folder: Path) -> Any:
    st = pytest.importorskip("safetensors.torch")
    st.save_model(model, str(folder / "made"))
    return st.load_model(other, str(folder / "made")), len(st.load_file(folder / "made"))


def by_checkpoint(model: Any, other: Any, folder: Path) -> Any:
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    checkpoint.save(get_model_state_dict(model), checkpoint_id=folder / "made")
    state = get_model_state_dict(other)
    checkpoint.load(state, checkpoint_id=folder / "made")
    return set_model_state_dict(other, state)


def one_of(model: torch.nn.Module, index: int) -> dict[str, torch.Tensor]:
    """The state dict with the last of the names of the same tensor, or the first."""
    name = list(model.state_dict())[index]
    return {name: model.state_dict()[name]}


# What loads the values of one model into another, and returns what it reports.
LOADS: dict[str, Callable[[Any, Any, Path], Any]] = {
    "all": lambda model, other, _: other.load_state_dict(model.state_dict()),
    "first": lambda model, other, _: other.load_state_dict(one_of(model, 0), strict=False),
    "last": lambda model, other, _: other.load_state_dict(one_of(model, -1), strict=False),
    "last, assign": lambda model, other, _: other.load_state_dict(one_of(model, -1), strict=False, assign=True),
    "meta": lambda model, other, _: other.to("meta").load_state_dict(one_of(model, 0), strict=False, assign=True),
    "to_empty": lambda model, other, _: other.to_empty(device="cpu").load_state_dict(one_of(model, -1), strict=False),
    "safetensors": by_safetensors,
    "checkpoint": by_checkpoint,
}


@pytest.mark.parametrize("kind", ["signs", "given"])
@pytest.mark.parametrize("places", PLACED)
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_rotation_in_several_places_loads_as_a_layer_does(load: str, places: str, kind: str, tmp_path: Path) -> None:
    def reported(make: Callable[[int], torch.nn.Module], folder: str) -> str:
        model, other = (PLACED[places](make(seed)) for seed in (0, 1))
        (tmp_path / folder).mkdir()
        said = LOADS[load](model, other, tmp_path / folder)
        assert torch.equal(other(X), model(X))
        return str(said).replace(next(iter(model.state_dict())).rpartition(".")[2], "NAME")

    def layer(seed: int) -> torch.nn.Module:
        return torch.nn.Linear(96, 96, bias=False)

    assert reported(BUFFERS[kind], "ours") == reported(layer, "theirs")


@pytest.mark.parametrize("kind", BUFFERS)
def test_a_missing_key_is_reported(kind: str) -> None:
    r = BUFFERS[kind](0)
    names = list(r.state_dict())
    assert r.load_state_dict({}, strict=False).missing_keys == names
    with pytest.raises(RuntimeError, match="Missing key.*" + ", ".join(f'"{name}"' for name in names)):
        r.load_state_dict({})
    assert torch.equal(r(torch.ones(r.n)), BUFFERS[kind](0)(torch.ones(r.n)))


# ---- without values --------------------------------------------------------------------------------------------------
def test_values_made_on_the_meta_device_are_those_of_a_state_dict() -> None:
    with torch.device("meta"):
        made = [Rotation(96, signs=torch.randint(0, 2, (96,)) * 2 - 1), Rotation(96, torch.randn(3, 3))]
    for r, kind in zip(made, ("signs", "given"), strict=True):
        (name,) = r.state_dict()
        assert r(torch.ones(2, 96, device="meta")).is_meta
        emptied = copy.deepcopy(r).to_empty(device="cpu")
        emptied.get_buffer(name).fill_(165)  # the memory may still have the values of another Rotation
        for call in (r, lambda x, r=r: r.to_dict(), emptied):
            with pytest.raises(
                TensorError, match=f"{name} holds no values of a Rotation.*; load a state dict that has"
            ):
                call(torch.ones(96))
        with pytest.raises(RuntimeError, match=f'Missing key.*"{name}"'):
            r.load_state_dict({})
        r.load_state_dict(BUFFERS[kind](0).state_dict(), assign=True)
        assert torch.equal(r(X), BUFFERS[kind](0)(X))


def test_fake_rotations() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        for options in (
            {},
            {"matrix": orthogonal(3, 0)},
            {"matrix": torch.eye(3)},
            {"block": 24},
            {"matrix": "regular"},
        ):
            block = options.setdefault("block", 16 if "regular" in options.values() else 96)
            for signs in (None, [1, -1] * (block // 2), torch.ones(block)):
                assert Rotation(96, **options, signs=signs)(torch.empty(5, 96)).shape == (5, 96)


# ---- transformers ----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def pretrained() -> Any:
    transformers = pytest.importorskip("transformers", "5.0")

    class Config(transformers.PretrainedConfig):
        model_type = "rotations"

        def __init__(self, seed: int = 0, **options: Any) -> None:
            super().__init__(**options)
            self.seed = seed

    class Pretrained(transformers.PreTrainedModel):
        config_class = Config

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = Model(config.seed)
            self.post_init()

        def _init_weights(self, module: torch.nn.Module) -> None:
            pass

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.model(x)

    return Pretrained


@pytest.mark.parametrize("options", [{}, {"dtype": torch.bfloat16}, {"device_map": "cpu"}], ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_transformers_keeps_the_map(pretrained: Any, seed: int, options: dict[str, Any], tmp_path: Path) -> None:
    """Also where the configuration would make other signs."""
    pretrained(pretrained.config_class()).save_pretrained(tmp_path)
    again = pretrained.from_pretrained(tmp_path, config=pretrained.config_class(seed), **options)
    assert is_map_of(again, 0)
    again.save_pretrained(tmp_path / "again")
    assert is_map_of(pretrained.from_pretrained(tmp_path / "again"), 0)


def test_transformers_without_the_keys_takes_the_values_of_the_constructor(pretrained: Any, tmp_path: Path) -> None:
    model = pretrained(pretrained.config_class())
    state = {name: each for name, each in model.state_dict().items() if "packed" not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    torch.use_deterministic_algorithms(True)  # new memory is filled, so that it is no whole buffer of an earlier test
    try:
        with pytest.warns(RuntimeWarning, match=WARNING):
            assert is_map_of(pretrained.from_pretrained(tmp_path), 0)
    finally:
        torch.use_deterministic_algorithms(False)


# ---- accelerate ------------------------------------------------------------------------------------------------------
PLACES = {"layer": "cpu", "signs": "disk", "both": "cpu", "regular": "disk", "given": "disk", "folded": "cpu"}


def offloaded(how: str, folder: Path, **options: Any) -> Any:
    import accelerate

    if how == "cpu_offload":
        return accelerate.cpu_offload(Model(0), CPU, **options)
    if how == "disk_offload":
        return accelerate.disk_offload(Model(0), str(folder), CPU, **options)
    places = PLACES | {"named": "disk"}
    return accelerate.dispatch_model(Model(0), places, main_device="cpu", offload_dir=str(folder), **options)


@pytest.mark.parametrize("offload_buffers", [False, True])
@pytest.mark.parametrize("how", ["cpu_offload", "disk_offload", "dispatch_model"])
def test_accelerate_offloads(how: str, offload_buffers: bool, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model = offloaded(how, tmp_path, offload_buffers=offload_buffers)
    for _ in range(2):
        assert is_map_of(model, 0)
    assert model.given.to_dict() == Model(0).given.to_dict()


@pytest.mark.parametrize("include_buffers", [False, True])
@pytest.mark.parametrize("places", [{"": "cpu"}, PLACES | {"named": "cpu"}], ids=["cpu", "disk"])
def test_accelerate_loads_a_checkpoint(places: dict[str, str], include_buffers: bool, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    from safetensors.torch import save_file

    save_file(Model(0).state_dict(), tmp_path / "model.safetensors", {"format": "pt"})
    with accelerate.init_empty_weights(include_buffers=include_buffers):
        model = Model(1)
    model = accelerate.load_checkpoint_and_dispatch(
        model,
        str(tmp_path / "model.safetensors"),
        places,
        offload_folder=str(tmp_path / "offload"),
        offload_buffers=True,
    )
    for _ in range(2):
        assert is_map_of(model, 0)


# ---- on two processes ------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def of_two() -> list[dict[str, str]]:
    """What each rank found."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    script = Path(__file__).with_name("host_models.py")
    ranks = [
        subprocess.Popen([sys.executable, "-W", "ignore", script, str(rank), port], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    said = [each.communicate(timeout=120)[0].splitlines() for each in ranks]
    # Gloo of some releases of PyTorch writes lines between them.
    return [dict(json.loads(line) for line in lines if not line.startswith("[Gloo]")) for lines in said]


@pytest.mark.parametrize("operation", [each.__name__ for each in OF_TWO])
def test_two_processes_keep_the_map(operation: str, of_two: list[dict[str, str]]) -> None:
    assert [each.get(operation) for each in of_two] == ["green", "green"]
