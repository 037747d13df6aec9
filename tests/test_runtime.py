"""`hadamard_transform` in plain PyTorch, and its checks. No GPU needed."""

import pydoc
import warnings
from collections.abc import Callable
from itertools import product, takewhile
from operator import mul
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import hadagen
from hadagen import hadamard_transform
from hadagen.errors import TensorError, UsageError
from hadagen.runtime import transform
from hadagen.truth.reference import hadamard

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Largest relative error of normal inputs; rounding a 16-bit result once costs four fifths of it.
BOUNDS = {torch.float16: 2.2e-4, torch.bfloat16: 1.8e-3, torch.float32: 3e-7, torch.float64: 1e-15}


def normal(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def expected(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """The transform in float64."""
    return torch.from_numpy(hadamard(x.detach().double().numpy(), scale))


def error(y: torch.Tensor, reference: torch.Tensor) -> float:
    return float((y.double() - reference).norm() / reference.norm())


# ---- values ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("n", [1, 2, 8, 64])
def test_against_the_explicit_matrix(n: int) -> None:
    matrix = [[(-1.0) ** (i & j).bit_count() for j in range(n)] for i in range(n)]
    assert torch.equal(hadamard_transform(torch.eye(n, dtype=torch.float64)), torch.tensor(matrix).double())


def test_float64_takes_a_scale_beyond_float32() -> None:
    x = normal(3, 6)
    torch.testing.assert_close(hadamard_transform(x, 1e200), hadamard_transform(x) * 1e200, rtol=1e-15, atol=0)


def padded(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """In float64: the transform of rows continued by zeros to the next power of two, cut to what they were."""
    m = x.shape[-1]
    more = torch.nn.functional.pad(x.detach().double(), (0, (1 << (m - 1).bit_length()) - m))
    return expected(more, scale)[..., :m]


@pytest.mark.parametrize("length", [96, 128])
def test_a_scale_that_looks_orthonormal_warns_once_where_rows_are_padded(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transform, "_has_warned", False)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        hadamard_transform(torch.ones(2, 128), 128**-0.5)
        hadamard_transform(torch.ones(2, 96), 1.0)
        hadamard_transform(torch.ones(2, 100), 0.5)
        assert found == []
        for _ in range(2):
            hadamard_transform(torch.ones(2, 96), length**-0.5)
        hadamard_transform(torch.ones(2, 100), 0.1)
    (warning,) = found
    assert warning.filename == __file__
    assert "rows of 96 elements are padded to 128, and 32 results are cut off" in str(warning.message)
    assert "use hadagen.Rotation(96), which is" in str(warning.message)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", [1, 3, 5, 6, 7, 96, 129, 1000])
def test_rows_are_padded_with_zeros(m: int, dtype: torch.dtype) -> None:
    x = normal(2, 5, m, dtype=dtype)
    wanted = padded(x, 0.3)
    for y in (hadamard_transform(x, 0.3), hadamard_transform(x, 0.3, out=torch.empty_like(x))):
        assert y.shape == x.shape
        assert error(y, wanted) <= 3 * BOUNDS[dtype]
    assert error(hadamard_transform(x, 0.3, inplace=True), wanted) <= 3 * BOUNDS[dtype]
    assert error(x, wanted) <= 3 * BOUNDS[dtype]


# ---- shapes and memory -----------------------------------------------------------------------------------------------
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "one row": lambda x: x[0, 0],
    "strided rows": lambda x: x[:, ::2, :32],
    "strided elements": lambda x: x[..., ::2],
    "transposed": lambda x: x.transpose(0, 2)[..., :4],
    "misaligned": lambda x: x.view(-1)[1:-63].view(-1, 64),
    "flipped": lambda x: x.flip(1),
    "no rows": lambda x: x[:0],
    "no rows inside": lambda x: x[:, :0],
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_pytorch_transforms_views(view: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> None:
    whole = normal(6, 4, 64, dtype=dtype)
    x = view(whole)
    wanted = expected(x, 0.5).to(dtype)

    y = hadamard_transform(x, 0.5)
    assert y.is_contiguous()
    assert y.dtype == dtype
    assert torch.equal(y, wanted)
    assert torch.equal(whole, normal(6, 4, 64, dtype=dtype)), "the input was changed"

    target = view(torch.full_like(whole, 7.0))
    assert hadamard_transform(x, 0.5, out=target) is target
    assert torch.equal(target, wanted)

    assert hadamard_transform(x, 0.5, inplace=True) is x
    assert torch.equal(x, wanted)


def test_writing_a_view_leaves_its_surroundings_alone() -> None:
    whole = normal(8, 64)
    before = whole.clone()
    hadamard_transform(whole[2:5, 16:32], inplace=True)
    whole[2:5, 16:32] = before[2:5, 16:32]
    assert torch.equal(whole, before)


def test_expanded_input() -> None:
    x = normal(64).expand(5, 64)
    assert torch.equal(hadamard_transform(x), expected(x))


def test_out_may_be_x_or_interleave_with_it() -> None:
    x = normal(4, 64)
    wanted = hadamard_transform(x)
    whole = torch.cat((x, x), dim=1)
    hadamard_transform(whole[:, :64], out=whole[:, 64:])
    assert torch.equal(whole, torch.cat((x, wanted), dim=1))
    assert hadamard_transform(x, out=x, inplace=True) is x
    alias = x.view(4, 64)
    assert hadamard_transform(x, out=alias) is alias
    assert torch.equal(x, hadamard_transform(wanted))


@pytest.mark.parametrize("first", [0, 1])
def test_out_may_begin_where_x_ends_and_end_where_it_begins(first: int) -> None:
    both = torch.randn(2, 3, 64)
    x, y = both[first], both[1 - first]
    wanted = hadamard_transform(x)
    assert torch.equal(hadamard_transform(x, out=y), wanted)


def test_out_that_overlaps_a_strided_x_is_still_right() -> None:
    whole = normal(9, 64)
    x, y = whole[::2], whole[1:6]
    wanted = hadamard_transform(x)
    assert torch.equal(hadamard_transform(x, out=y), wanted)


# ---- bad input -------------------------------------------------------------------------------------------------------
X = torch.ones(2, 8)
SPARSE = torch.eye(8).to_sparse()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # they are in a prototype stage, PyTorch says
    NESTED = torch.nested.nested_tensor([torch.ones(1, 8), torch.ones(2, 8)])


@pytest.mark.parametrize(
    ("x", "options", "kind", "message"),
    [
        ([1.0, 2.0], {}, TypeError, "x is a list; pass a torch.Tensor"),
        (X.long(), {}, RuntimeError, "x has the type int64; convert it to float16, bfloat16"),
        (X.cfloat(), {}, RuntimeError, "x has the type complex64"),
        (SPARSE, {}, RuntimeError, "x has the layout sparse_coo"),
        (torch.tensor(1.0), {}, RuntimeError, "x has no dimension"),
        (X[:, :0], {}, RuntimeError, "the last dimension of x is 0; it must be at least 1"),
        (NESTED, {}, RuntimeError, "x is a nested tensor"),
        (SPARSE, {"inplace": True}, RuntimeError, "x has the layout sparse_coo"),
        (X, {"scale": float("nan")}, ValueError, "scale = nan is not finite"),
        (X, {"scale": float("inf")}, ValueError, "scale = inf is not finite"),
        (X, {"scale": -1e39}, ValueError, r"scale = -1e\+39 is not finite in float32; pass a number up to 3.4e\+38"),
        (X, {"scale": 10**5000}, ValueError, "scale = inf is not finite in float32"),
        (
            X.double(),
            {"scale": 10**309},
            ValueError,
            r"scale = inf is not finite in float64; pass a number up to 1.8e\+308",
        ),
        (X, {"scale": "1"}, TypeError, "scale is a str"),
        (X, {"scale": torch.ones(())}, TypeError, "scale is a Tensor"),
        (X, {"scale": 1j}, TypeError, "scale is a complex"),
        (X, {"numerics": "exact"}, ValueError, "numerics 'exact' is not supported; choose one of accurate, fast"),
        (X, {"numerics": ["fast"]}, ValueError, "is not supported"),
        (X, {"inplace": "no"}, TypeError, "inplace is 'no'; pass True or False"),
        (X, {"inplace": np.array([True, False])}, TypeError, r"inplace is array\(.*\); pass True or False"),
        (X, {"inplace": torch.ones(2)}, TypeError, r"inplace is tensor\(.*\); pass True or False"),
        (X, {"out": [1.0]}, TypeError, "out is a list"),
        (X, {"out": torch.ones(8, 2)}, RuntimeError, r"out has the shape \(8, 2\) but x has \(2, 8\)"),
        (X, {"out": X.double()}, RuntimeError, "out has the dtype float64 but x has float32"),
        (X, {"out": X.to("meta")}, RuntimeError, "out has the device meta but x has cpu"),
        (X, {"out": torch.ones(2, 8), "inplace": True}, ValueError, "two places"),
        (X[0].expand(2, 8), {"inplace": True}, RuntimeError, "share memory"),
        (X, {"out": X[0].expand(2, 8)}, RuntimeError, "share memory"),
        (X.view(-1).unfold(0, 8, 4), {"inplace": True}, RuntimeError, "share memory"),
        (X, {"out": torch.ones(12).unfold(0, 8, 4)}, RuntimeError, "share memory"),
        (X.view(-1)[:8], {"out": X.view(-1)[4:12]}, RuntimeError, "out overlaps x"),
        (X.clone().requires_grad_(), {"inplace": True}, RuntimeError, "is a leaf"),
        (X.clone().requires_grad_()[1:], {"inplace": True}, RuntimeError, "is a leaf"),
        (X.clone().requires_grad_(), {"out": X.clone()}, RuntimeError, "no_grad"),
        (X, {"out": X.clone().requires_grad_()}, RuntimeError, "no_grad"),
    ],
)
def test_bad_input_of_a_transform_is_a_sentence(
    x: Any, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message) as caught:
        hadamard_transform(x, **options)
    assert isinstance(caught.value, (TypeError, UsageError))
    assert torch.equal(X, torch.ones(2, 8)), "something was written"


@pytest.mark.parametrize("destination", ["inplace", "out"])
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 12)), min_size=1, max_size=3))
@example([(1, 0), (8, 2)])
@example([(2, 5), (2, 3), (2, 2)])
def test_what_holds_an_element_twice_is_not_written(destination: str, dimensions: list[tuple[int, int]]) -> None:
    """Rows that overlap partly too, such as windows, and what only three dimensions together show."""
    sizes, strides = zip(*dimensions, strict=True)
    places = [sum(map(mul, index, strides)) for index in product(*map(range, sizes))]
    y = normal(max(places) + 1).as_strided(sizes, strides)
    before, wanted = y.clone(), padded(y)
    try:
        hadamard_transform(y, inplace=True) if destination == "inplace" else hadamard_transform(before, out=y)
    except TensorError:
        assert len(set(places)) < len(places)
        assert torch.equal(y, before)
    else:
        assert len(set(places)) == len(places)
        assert torch.allclose(y, wanted)


def test_no_elements_share_no_memory() -> None:
    for x in (torch.ones(0, 1).expand(0, 8), torch.ones(8).expand(0, 3, 8)):
        assert hadamard_transform(x, inplace=True) is x


def test_a_leaf_may_be_written_without_gradients() -> None:
    x = normal(2, 8).requires_grad_()
    wanted = expected(x)
    with torch.no_grad():
        hadamard_transform(x, inplace=True)
        assert torch.equal(hadamard_transform(x, 1 / 8, out=torch.empty_like(x)), expected(wanted, 1 / 8))
    assert torch.equal(x, wanted)


def test_inference_tensors() -> None:
    with torch.inference_mode():
        x = normal(2, 8)
        hadamard_transform(x, inplace=True)
    with pytest.raises(RuntimeError, match="inference"):
        hadamard_transform(x, inplace=True)
    assert torch.equal(x, expected(normal(2, 8)))


# ---- the package -----------------------------------------------------------------------------------------------------
def test_the_package_offers_what_it_says() -> None:
    modules = {"compat", "errors", "presets", "prologues"}
    assert {name for name in dir(hadagen) if name[0] != "_"} == {*hadagen.__all__, *modules}
    for module in (hadagen.presets, hadagen.prologues):
        assert {name for name in dir(module) if name[0] != "_"} == set(module.__all__)
    for name in (*hadagen.__all__, "__version__"):
        assert getattr(hadagen, name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        hadagen.nothing  # noqa: B018


# ---- help() ----------------------------------------------------------------------------------------------------------
SCREEN = 24  # lines of a terminal


def helped(found: Any) -> list[str]:
    return pydoc.plaintext.document(found).splitlines()


def test_the_first_screen_of_help_names_what_there_is() -> None:
    functions = {name for name in hadagen.__all__ if name[0].islower()}
    first = "\n".join(helped(hadagen)[:SCREEN])
    assert all(f"    {name}: " in first for name in functions | {"Rotation", "compat", "presets", "prologues"})
    methods = {name for name in vars(hadagen.Rotation) if name[0] != "_" and callable(getattr(hadagen.Rotation, name))}
    first = "\n".join(helped(hadagen.Rotation)[:SCREEN])
    assert "r(x)" in first
    assert all(f".{name}(" in first for name in methods - {"forward", "extra_repr"})
    folder = Path(hadagen.compat.__path__[0])
    assert all(f"\n    {path.stem}: " in "\n".join(helped(hadagen.compat)) for path in folder.glob("[a-z]*.py"))


@pytest.mark.parametrize(
    ("found", "methods"),
    [
        (hadagen.Quantized, "as_torch_types dequantize to"),
        (
            hadagen.Rotation,
            "extra_repr fold_into forward from_compressed_tensors from_dict inverse matrix shard signs signs_after "
            "to_dict transform",
        ),
    ],
)
def test_help_lists_the_methods_of_users_alone_and_says_something_of_each(found: type, methods: str) -> None:
    own = {name for name in vars(found) if name[0] != "_"}
    assert own - {"codes", "format", "scales", "tensor_scale"} == set(methods.split())
    lines = takewhile(lambda line: " inherited from " not in line, helped(found))
    assert not [line for line in lines if line.startswith(" |      # ")]  # a comment, where there is no docstring
