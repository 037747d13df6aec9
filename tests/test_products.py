"""Products of codes: which provider multiplies, and what happens where one fails."""

import json
import warnings
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import run, sentence, succeed
from torch._subclasses.fake_tensor import FakeTensorMode

from hadagen import rotate_quantize
from hadagen.errors import DeviceError, SlowPathWarning, StorageError, TensorError
from hadagen.models.layers import codes_of
from hadagen.models.products import choice, operator, providers
from hadagen.models.products.choice import choose, keep
from hadagen.models.products.library import with_int8_weight
from hadagen.models.products.operands import Operands
from hadagen.models.products.operator import multiply_codes
from hadagen.models.scheme import WEIGHTS

H200 = "NVIDIA H200"
HALVES = torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty data directory, and nothing that earlier calls have found."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    choice._measured.cache_clear()
    choice._choose.cache_clear()
    operator._failed.clear()
    choice.chosen.clear()
    operator._told.clear()


def times(first: str) -> dict[str, Any]:
    return {str(rows): [[first, 1.0], ["tile 64x64x128, 4, 5", 2.0]] for rows in choice.all_rows()}


# ---- the choice ------------------------------------------------------------------------------------------------------
def test_times_of_the_nearest_sizes_count() -> None:
    exact = choose(H200, 90, "int8", 14336, 4096, 64)
    assert exact.us
    assert (exact.n, exact.out, exact.rows) == (14336, 4096, 64)
    near = choose(H200, 90, "int8", 14000, 4208, 50)
    assert near == exact
    assert not any(name.startswith("boxes") for name in choose(H200, 90, "int8", 14001, 4200, 4096).providers)
    assert choose(H200, 90, "int8", 14336, 4096, 100_000).rows == choice.MOST_ROWS
    assert list(exact.us) == sorted(exact.us)


def test_another_gpu_of_the_same_capability_lends_its_times() -> None:
    assert choose("NVIDIA H100 80GB HBM3", 90, "fp8", 4096, 4096, 16).gpu == H200
    by_rule = choose("NVIDIA L40S", 89, "fp8", 4096, 4096, 16)
    assert by_rule.providers
    assert not by_rule.us


@pytest.mark.parametrize("kind", providers.KINDS)
@pytest.mark.parametrize("rows", [1, 16, 17, 64, 5000])
def test_every_choice_ends_with_providers_that_run_elsewhere(kind: str, rows: int) -> None:
    """So a call goes on where the fastest one fails, for instance without Triton."""
    for gpu, capability in ((H200, 90), ("NVIDIA A100", 80)):
        found = choose(gpu, capability, kind, 4096, 4096, rows).providers
        assert (providers.UNPACK if kind == "int4" else providers.LIBRARY) in found
        assert len(set(found)) == len(found)


def test_times_of_this_machine_count_before_shipped_ones(home: Path) -> None:
    keep(H200, 90, "int8", {"14336,4096": times("tile 16x16x64, 1, 1")}, choice.place())
    assert choose(H200, 90, "int8", 14336, 4096, 64).providers[0] == "tile 16x16x64, 1, 1"
    other = choose(H200, 90, "int8", 2048, 2048, 64)
    assert (other.n, other.out) == (2048, 2048), "other shipped times are still there"
    assert other.us
    keep("NVIDIA L40S", 89, "fp8", {"64,64": times("library")}, choice.place())
    assert choose("NVIDIA L40S", 89, "fp8", 4096, 4096, 16).us == (1.0, 2.0)
    assert len(choice.place().read_text().splitlines()) < 9


DAMAGED = [
    json.dumps({"gpus": {H200: {"capability": 90, "int8": {}}}}),
    json.dumps({"gpus": {H200: {"capability": 90, "int8": {f"{10**400},4": times("library")}}}}),
    json.dumps({"gpus": {H200: {"capability": 90, "int8": {"4,4": times("tile 0x0x0, 0, 0")}}}}),
    json.dumps({"gpus": {H200: {"capability": 90, "int8": {"4,4": times("library") | {"1": [["library", 1e999]]}}}}}),
    '{"gpus": {"NVIDIA H200": {"capability": Infinity}}}',
    "",
    "[]",
    "{}",
    '{"gpus": {"a": {}}}',
    json.dumps({"gpus": {H200: {"capability": 90, "int8": {"14336": times("library")}}}}),
    json.dumps({"gpus": {H200: {"capability": 90, "int8": {"0,4": times("library")}}}}),
    json.dumps({"gpus": {H200: {"capability": 90, "int8": {"4,4": {"1": [["library", 1]]}}}}}),
    json.dumps({"gpus": {H200: {"capability": 90, "int8": {"4,4": times("tile 1x1; os.remove")}}}}),
]


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_file_is_left_out_with_one_warning(content: str) -> None:
    choice.place().parent.mkdir(parents=True)
    choice.place().write_text(content)
    with pytest.warns(UserWarning, match=r"without times of this machine: .*products\.json") as seen:
        found = [choose(H200, 90, "int8", 14336, 4096, rows) for rows in (64, 65)]
    assert found[0].us
    assert len(seen) == 1
    with pytest.raises(StorageError, match=r"products\.json"):
        keep(H200, 90, "int8", {"4,4": times("library")}, choice.place())
    assert choice.place().read_text() == content


def test_shipped_times_are_of_known_providers() -> None:
    for of in choice._parsed(json.loads(choice.SHIPPED.read_text()), choice.SHIPPED).values():
        names = {
            name
            for kind in providers.KINDS
            for shape in of.get(kind, {}).values()
            for each in shape.values()
            for name, _ in each
        }
        assert names <= set(providers.NAMES)


# ---- the operator ----------------------------------------------------------------------------------------------------
def operands(kind: str = "int8", rows: int = 6, n: int = 96, out: int = 32, device: str = "cpu") -> Operands:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, n, device=device), torch.randn(out, n, device=device)
    q = rotate_quantize(x, to=WEIGHTS[kind])
    codes, scales, *factors = codes_of("a layer", weight, kind).values()
    last = factors[0] if factors else None
    return Operands(q.codes, q.scales.view(-1, 1), codes.squeeze(-1), scales, last, None, torch.float32)


def without_rows(of: Operands) -> Operands:
    assert of.scales is not None
    return of._replace(codes=of.codes[:0], scales=of.scales[:0])


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """CPU tensors that count as a GPU's. Returns the providers that were asked."""
    asked: list[str] = []

    def run_one(name: str, *arguments: Any) -> torch.Tensor:
        asked.append(name)
        if name != providers.LIBRARY:
            raise RuntimeError("out of resource: shared memory")
        return _library(name, *arguments)

    _library = providers.run
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: H200)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(operator, "capability", lambda device: 90)
    monkeypatch.setattr(providers, "supports", lambda name, of: True)
    monkeypatch.setattr(providers, "run", run_one)
    return asked


def test_a_provider_that_fails_is_followed_by_the_next_with_one_warning(gpu: list[str]) -> None:
    given = operands()._replace(bias=torch.randn(32))
    with pytest.warns(UserWarning, match="go on without the provider 'tile .*: out of resource") as seen:
        found = torch.ops.hadagen.multiply_codes(*given)
    assert len(seen) == len(gpu) - 1
    assert gpu[-1] == providers.LIBRARY
    assert torch.equal(found, multiply_codes(*given))
    gpu.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.ops.hadagen.multiply_codes(*given)
    assert gpu == [providers.LIBRARY]


def test_without_any_provider_values_are_multiplied(gpu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "supports", lambda name, of: False)
    given = operands()
    with pytest.warns(SlowPathWarning, match=r"no provider multiplies int8 codes of \[6, 96\] and \[32, 96\]"):
        found = torch.ops.hadagen.multiply_codes(*given)
    torch.testing.assert_close(found, multiply_codes(*given))
    monkeypatch.setattr(operator, "BATCH_INVARIANT", True)
    with pytest.raises(DeviceError, match="unset HADAGEN_BATCH_INVARIANT"):
        torch.ops.hadagen.multiply_codes(*given)


def test_an_error_of_the_gpu_removes_no_provider(gpu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> torch.Tensor:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    monkeypatch.setattr(providers, "run", fail)
    with pytest.raises(RuntimeError, match="capturing"):
        torch.ops.hadagen.multiply_codes(*operands())
    assert not operator._failed


def test_no_rows_and_fake_tensors() -> None:
    given = operands()._replace(dtype=torch.float16)
    empty = torch.ops.hadagen.multiply_codes(*without_rows(given))
    assert empty.shape == (0, 32)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(each) if isinstance(each, torch.Tensor) else each for each in given]
        made = torch.ops.hadagen.multiply_codes(*fake)
    assert (made.shape, made.dtype) == ((6, 32), torch.float16)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_rows_of_another_length_are_refused(kind: str) -> None:
    given = operands(kind, n=128)
    longer = given._replace(codes=torch.zeros(6, 256, dtype=torch.int8))
    for call in (multiply_codes, torch.ops.hadagen.multiply_codes):
        with pytest.raises(TensorError, match=r"rows have the shape \[6, 256\]; the weight takes \[rows, 128\]"):
            call(*longer)


def test_weights_of_4_bits_that_are_not_aligned_are_copied(gpu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels take several codes of a row at once."""
    given = operands("int4", n=256)
    assert given.factors is not None
    memory = torch.empty(given.weight.numel() + 1, dtype=torch.uint8)[1:].view_as(given.weight).copy_(given.weight)
    seen = []
    monkeypatch.setattr(operator, "run", lambda name, of: seen.append(of.weight.data_ptr()) or torch.zeros(()))
    torch.ops.hadagen.multiply_codes(*given._replace(weight=memory))
    assert memory.data_ptr() % 16
    assert not seen[0] % 16
    assert not providers.fits(providers.UNPACK, torch.uint8, 4097, 64)


def test_the_operator_is_one_of_pytorch() -> None:
    torch.library.opcheck(torch.ops.hadagen.multiply_codes.default, without_rows(operands("int4", n=128)))


# ---- commands --------------------------------------------------------------------------------------------------------
def test_best_names_the_provider_and_why() -> None:
    out = succeed("best", "--product", "14336,4096", "--rows", "64", "--device", H200)
    assert "as timed on NVIDIA H200 with 64 rows of 14336 and 4096 outputs" in out
    assert "by a rule" in succeed("best", "--product", "64,64", "--rows", "1", "--device", "A100")
    found = json.loads(succeed("best", "--product", "64,64", "--rows", "1", "--device", H200, "--json"))
    assert found["providers"][0] == choose(H200, 0, "int8", 64, 64, 1).providers[0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("best", "--product", "64", "--rows", "1", "--device", H200), "--product '64' names no product"),
        (("best", "--product", "64,0", "--rows", "1", "--device", H200), "names no product"),
        (("best", "--product", "64,64", "--rows", "0", "--device", H200), "--rows 0"),
        (("tune", "--times", "x.json"), "name products with --product"),
    ],
)
def test_bad_products_are_one_sentence(arguments: tuple[str, ...], said: str) -> None:
    assert said in sentence(run(*arguments), 2)


# ---- on a GPU --------------------------------------------------------------------------------------------------------
@pytest.mark.gpu
@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize(("rows", "n", "out"), [(1, 512, 64), (17, 1000, 40), (64, 256, 272), (130, 4096, 1024)])
def test_all_providers_give_the_same_values(kind: str, rows: int, n: int, out: int) -> None:
    """Those of the exact sums, rounded once. With weights of 4 bits, rows may be in other codes, or values."""
    given = operands(kind, rows, n, out, "cuda")
    bias = torch.randn(out, device="cuda")
    fp8 = rotate_quantize(torch.randn(rows, n, device="cuda"), to="fp8-row")
    inputs = [given]
    if given.weight.dtype == torch.uint8:
        inputs.append(given._replace(codes=fp8.codes, scales=fp8.scales.view(-1, 1)))
        inputs += [given._replace(codes=torch.randn(rows, n, device="cuda").to(each), scales=None) for each in HALVES]
    tried = 0
    for of, dtype, added in product(inputs, (*HALVES, torch.float32), (None, bias)):
        asked = of._replace(dtype=dtype, bias=None if added is None else added.to(dtype))
        sums = of.codes.double() @ with_int8_weight(of).weight.double().T  # exact for INT8
        scaled = sums.float() * (1 if of.scales is None else of.scales) * of.weight_scale.T
        rounded = scaled.to(dtype) if asked.bias is None else scaled.to(dtype) + asked.bias
        for name in providers.NAMES:
            if not providers.supports(name, asked):
                continue
            found = operator.run(name, asked)
            if of.codes.dtype == torch.int8:
                assert torch.equal(found, rounded), (name, dtype)
            else:
                assert (found - rounded).norm() <= (5e-4 + torch.finfo(dtype).eps) * rounded.norm(), (name, dtype)
            tried += 1
    assert tried > 20 or (n == 1000 and given.weight.dtype == torch.uint8)
