"""`Rotation` in plain PyTorch: values, inverses, folding, storing, and its checks. No GPU needed."""

import copy
import gc
import json
import math
import pickle
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_runtime import BOUNDS, error, normal

from hadagen import Rotation, hadamard_transform, rotate_quantize
from hadagen.errors import TensorError, UsageError
from hadagen.problem.matrices import _TABLE, NAMES, find_matrix
from hadagen.runtime.call import named
from hadagen.runtime.call.rules import LINEAR, Linear
from hadagen.runtime.operands.packed import Factors, structure_of
from hadagen.runtime.operands.spec import text_of
from hadagen.runtime.plain import transform as plain_transform
from hadagen.runtime.rotation import factors_of

NAMED = sorted((key for key in _TABLE if key[0] in NAMES), key=lambda key: (key[1], key[0]))


def dense(name: str, orders: tuple[int, ...], n: int, signs: Any = None, signs_after: Any = None) -> torch.Tensor:
    """M in float64 by its definition."""
    product = torch.ones(1, 1, dtype=torch.float64)
    for order in orders:
        entries = torch.frombuffer(bytearray(find_matrix(name, order).entries()), dtype=torch.int8)
        product = torch.kron(product, entries.view(order, order).double() * 2 - 1)
    sylvester = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    while len(product) < n:
        product = torch.kron(product, sylvester)
    before, after = (torch.ones(n) if each is None else each for each in (signs, signs_after))
    return before.double()[:, None] * product.T * after.double() / math.sqrt(n)


def linear_of(of: Factors, transposed: bool = False, numerics: str = "accurate") -> Linear:
    """The arguments of the operator after x."""
    *structure, _ = structure_of(of)
    text = text_of(*structure, transposed, numerics)
    return Linear(of.matrices, of.signs, of.signs_after, of.scale, text)


def some_signs(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 2, (n,), generator=torch.Generator().manual_seed(seed)) * 2 - 1


# ---- values ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "order"), NAMED)
def test_every_named_matrix_against_float64(name: str, order: int) -> None:
    for n in (order, 4 * order if order < 300 else 2 * order):
        r, x = Rotation(n, name, k=order), normal(3, n)
        wanted = x @ dense(name, (order,), n)
        torch.testing.assert_close(r(x), wanted, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(r.inverse(wanted), x, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(("order", "n"), [(12, 768), (12, 1536), (20, 1280)])
def test_where_a_kernel_takes_the_matrix_with_a_part_of_h(order: int, n: int) -> None:
    r, x = Rotation(n, k=order), normal(3, n)
    assert r._orders[0] > order
    torch.testing.assert_close(r(x), x @ dense("auto", (order,), n), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(r.matrix(), dense("auto", (order,), n), rtol=1e-13, atol=1e-13)
    assert r.k == (order,)


@pytest.mark.parametrize("digits", range(1, 5))
def test_regular_is_a_kronecker_power_whose_rows_have_one_sum(digits: int) -> None:
    four = torch.tensor([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], dtype=torch.float64) / 2
    wanted = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(digits):
        wanted = torch.kron(wanted, four)
    n = 4**digits
    torch.testing.assert_close(Rotation(n, "regular").matrix(), wanted)
    torch.testing.assert_close(wanted.sum(1), torch.ones(n, dtype=torch.float64))
    signs, after = some_signs(n), some_signs(n, seed=1)
    r = Rotation(3 * n, "regular", signs=signs, signs_after=after, block=n)
    x = normal(2, 3 * n)
    torch.testing.assert_close(r(x).view(2, 3, n), x.view(2, 3, n) @ (signs[:, None] * wanted * after))
    torch.testing.assert_close(r.inverse(r(x)), x)


def test_a_power_of_two_is_the_transform_itself() -> None:
    x = normal(5, 256, dtype=torch.float32)
    assert torch.equal(Rotation(256)(x), hadamard_transform(x, 1 / 16))
    signs = some_signs(256)
    assert torch.equal(Rotation(256, signs=signs)(x), hadamard_transform(x * signs, 1 / 16))


CASES: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (28, {}),
    (96, {"matrix": "dao"}),
    (2880, {}),
    (1232, {"k": (11 * 4, 28)}),
    (960, {"k": [20, 12]}),
    (256, {"matrix": "regular"}),
    (2048, {"block": 128}),
]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(("n", "options"), CASES, ids=str)
def test_types_inverses_and_norms(n: int, options: dict[str, Any], dtype: torch.dtype) -> None:
    block = options.get("block", n)
    r = Rotation(n, signs=some_signs(block), signs_after=some_signs(block, seed=1), **options)
    x = normal(9, n, dtype=dtype)
    before = x.clone()
    y = r(x)
    assert (y.dtype, y.shape) == (dtype, x.shape)
    assert torch.equal(x, before), "the input was changed"
    bound = max(BOUNDS[dtype], 4e-15)  # which a reference in float64 needs
    assert error(y, x.double() @ r.matrix()) <= bound
    assert error(r.inverse(y), x.double()) <= 2 * bound, "two roundings"
    assert abs(float(y.double().norm() / x.double().norm()) - 1) <= bound


def test_several_matrices_of_signs_and_blocks_against_the_definition() -> None:
    signs, after = some_signs(1344), some_signs(1344, seed=1)
    r = Rotation(2688, "auto", k=(12, 28), signs=signs, signs_after=after.tolist(), block=1344)
    assert r.k == (12, 28)
    m = dense("auto", (12, 28), 1344, signs, after)
    torch.testing.assert_close(r.matrix(), torch.block_diag(m, m))
    x = normal(2, 3, 2688)
    torch.testing.assert_close(r(x), (x.view(2, 3, 2, 1344) @ m).view(x.shape))


@pytest.mark.parametrize(("n", "orders"), [(80, (20,)), (240, (12, 20))])
def test_signs_are_a_part_of_a_matrix_that_has_all_of_h(n: int, orders: tuple[int, ...]) -> None:
    signs, after = some_signs(n), some_signs(n, seed=1)
    for before, behind in ((signs, after), (signs, None), (None, after)):
        r = Rotation(n, "auto", k=orders, signs=before, signs_after=behind)
        of = factors_of(r, normal(1, n))
        assert of.signs is of.signs_after is None
        torch.testing.assert_close(r.matrix(), dense("auto", orders, n, before, behind))
        torch.testing.assert_close(r.inverse(r(normal(3, n))), normal(3, n))


@given(
    k=st.integers(1, 9), m=st.integers(0, 5), rows=st.integers(0, 70), seed=st.integers(0, 99), transposed=st.booleans()
)
@settings(deadline=None, max_examples=40)
def test_any_matrix_of_any_order_in_any_block(k: int, m: int, rows: int, seed: int, transposed: bool) -> None:
    """Orthogonal ones too, in blocks of rows that are smaller than x."""
    a = torch.linalg.qr(normal(k, k, seed=seed)).Q.contiguous()
    n = k << m
    r, x = Rotation(n, a), normal(rows, n, seed=seed)
    wanted = torch.kron(a, hadamard_transform(torch.eye(1 << m, dtype=torch.float64), 2.0 ** (-m / 2))).T
    with pytest.MonkeyPatch().context() as small:
        small.setattr(plain_transform, "_CPU_BLOCK", 64)
        y = r.inverse(x) if transposed else r(x)
    torch.testing.assert_close(y, x @ (wanted.T if transposed else wanted), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("factor", [1e-140, 1e-40, 3.0, 1e45, 1e140])
def test_the_norm_of_a_given_matrix_does_not_matter(factor: float) -> None:
    a, x = torch.linalg.qr(normal(12, 12)).Q * factor, normal(2, 96)
    r, wanted = Rotation(96, a), Rotation(96, a / factor)
    torch.testing.assert_close(r(x), wanted(x))
    torch.testing.assert_close(r(x.float()), wanted(x.float()))
    torch.testing.assert_close(r.inverse(r(x)), x)
    assert r.to_dict()["factors"][0]["entries"] == a.tolist()


def test_how_a_given_matrix_lies_does_not_matter() -> None:
    for k in range(5, 40):
        q = torch.linalg.qr(normal(k, k, seed=k)).Q.float()
        one, other = (Rotation(k, each) for each in (q.contiguous(), q.T.contiguous().T))
        assert factors_of(one, torch.eye(k)).scale == factors_of(other, torch.eye(k)).scale


def test_sixteen_bit_results_of_a_rotation_are_rounded_once() -> None:
    h = factors_of(Rotation(172), normal(1, 172)).matrices
    x = torch.randint(-9, 9, (64, 344), generator=torch.Generator().manual_seed(0))  # so that every sum is exact
    for dtype in (torch.float16, torch.bfloat16):
        y = LINEAR.default(x.to(dtype), h, None, None, 0.25, text_of(344, [172]))
        exact = x.double() @ dense("auto", (172,), 344).sign() * 0.25
        assert torch.equal(y, exact.to(dtype))


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_the_precision_of_matrix_products_does_not_change_a_rotation(precision: str) -> None:
    x, r = normal(64, 1376, dtype=torch.float32), Rotation(1376)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        assert error(r(x), x.double() @ r.matrix()) <= BOUNDS[torch.float32]
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(("n", "options"), [*CASES, (21, {"matrix": normal(21, 21)})], ids=lambda v: str(v)[:20])
def test_a_row_gives_the_same_bits_in_every_batch(n: int, options: dict[str, Any], dtype: torch.dtype) -> None:
    r, x = Rotation(n, **options), normal(300, n, dtype=dtype)
    whole = r(x, batch_invariant=True)
    assert error(whole, x.double() @ r.matrix()) <= max(BOUNDS[dtype], 4e-15)
    for rows in (1, 2, 7, 299):
        assert torch.equal(r(x[:rows], batch_invariant=True), whole[:rows])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_sums_do_not_overflow_unless_the_result_does(dtype: torch.dtype) -> None:
    r = Rotation(28 * 512)
    unit = torch.zeros(1, r.n, dtype=torch.float64)
    unit[0, 5] = 1.0
    x = (r.inverse(unit) * 0.9 * torch.finfo(dtype).max).to(dtype)
    y = r(x)
    assert y.isfinite().all()
    assert error(y, r(x.double())) <= BOUNDS[dtype]


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dense": lambda x: x,
    "transposed": lambda x: x.transpose(0, 1),
    "last dimension first": lambda x: x.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    "pitched": lambda x: torch.cat([x, x], -1)[..., :48],
    "no rows": lambda x: x[:0],
    "one row": lambda x: x[0, 0],
    "expanded": lambda x: x[:, :1].expand(4, 3, 48),
}


@pytest.mark.parametrize("options", [{}, {"block": 16}], ids=str)
@pytest.mark.parametrize("view", VIEWS)
def test_any_strides_in_place_and_into(view: str, options: dict[str, Any]) -> None:
    signs = some_signs(options.get("block", 48))
    r = Rotation(48, signs=signs, signs_after=-signs, **options)
    x = VIEWS[view](normal(4, 3, 48))
    wanted = x @ r.matrix()
    y = r(x)
    assert y.is_contiguous()
    torch.testing.assert_close(y, wanted)
    for out in (
        torch.empty(x.shape, dtype=x.dtype),
        torch.empty(x.shape[::-1], dtype=x.dtype).permute(*range(x.dim())[::-1]),
    ):
        assert r(x, out=out) is out
        torch.testing.assert_close(out, wanted)
    if view == "expanded":
        with pytest.raises(TensorError, match="share memory"):
            r(x, inplace=True)
    else:
        assert r(x, inplace=True) is x
        torch.testing.assert_close(x, wanted)
        assert r.inverse(x, out=x) is x
        torch.testing.assert_close(x, wanted @ r.matrix().T)


@pytest.mark.parametrize("n", [48, 64])
def test_an_out_that_overlaps_x_gets_the_result(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_transform, "_CPU_BLOCK", n)
    r, memory = Rotation(n), normal(5, n)
    wanted = r(memory[:4])
    r(memory[:4], out=memory[1:])
    assert torch.equal(memory[1:], wanted)


# ---- folding ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("options", [{}, {"block": 28}], ids=str)
def test_folding_into_a_layer(options: dict[str, Any]) -> None:
    r = Rotation(112, signs=some_signs(options.get("block", 112)), **options)
    x, bias = normal(5, 112), normal(20, seed=1)
    weight = normal(20, 112, seed=2)
    before = torch.nn.functional.linear(x, weight, bias)
    folded = r.fold_into(weight, "input")
    torch.testing.assert_close(folded, weight @ r.matrix())
    torch.testing.assert_close(torch.nn.functional.linear(r(x), folded, bias), before)

    weight, bias = normal(112, 20, seed=2), normal(112, seed=3)
    x = normal(5, 20)
    folded, folded_bias = r.fold_into(weight, side="output", bias=bias)
    torch.testing.assert_close(folded, r.matrix().T @ weight)
    torch.testing.assert_close(folded_bias, bias @ r.matrix())
    rotated = torch.nn.functional.linear(x, folded, folded_bias)
    torch.testing.assert_close(rotated, r(torch.nn.functional.linear(x, weight, bias)))
    alone = r.fold_into(weight.half(), side="output")
    assert isinstance(alone, torch.Tensor)
    assert (alone.dtype, alone.is_contiguous()) == (torch.float16, True)
    experts = normal(3, 112, 20)
    torch.testing.assert_close(r.fold_into(experts, "output"), r.matrix().T @ experts)


def test_a_shard_rotates_the_part_of_its_rank() -> None:
    signs = some_signs(28)
    for matrix in ("auto", torch.linalg.qr(normal(7, 7)).Q):
        r = Rotation(224, matrix, block=28, signs=signs)
        x = normal(3, 224)
        parts = [r.shard(rank, 4)(part) for rank, part in enumerate(x.chunk(4, -1))]
        torch.testing.assert_close(torch.cat(parts, -1), r(x))


# ---- storing ---------------------------------------------------------------------------------------------------------
ROTATIONS: dict[str, Callable[[], Rotation]] = {
    "power of two": lambda: Rotation(64),
    "auto": lambda: Rotation(29568, signs=some_signs(29568)),
    "dao": lambda: Rotation(160, "dao", k=40, signs_after=some_signs(160)),
    "regular": lambda: Rotation(256, "regular", block=64, signs=some_signs(64)),
    "sylvester of 32": lambda: Rotation(32, "compressed-tensors", k=()),
    "given": lambda: Rotation(56, torch.linalg.qr(normal(7, 7)).Q.float()),
    "given in bfloat16": lambda: Rotation(56, torch.linalg.qr(normal(7, 7)).Q.bfloat16()),
    "two given": lambda: Rotation(384, [torch.linalg.qr(normal(k, k)).Q for k in (6, 64)], signs=some_signs(384)),
    "given ±1": lambda: Rotation(48, [(Rotation(12).matrix() * 12**0.5).round(), Rotation(4).matrix().half() * 2]),
}


@pytest.mark.parametrize("made", ROTATIONS.values(), ids=ROTATIONS)
def test_a_stored_rotation_is_the_same(made: Callable[[], Rotation]) -> None:
    r = made()
    x = normal(2, r.n)
    text = json.dumps(r.to_dict())
    for again in (Rotation.from_dict(json.loads(text)), copy.deepcopy(r), pickle.loads(pickle.dumps(r))):
        assert torch.equal(again(x), r(x))
        assert torch.equal(again.inverse(x), r.inverse(x))
        assert again.to_dict() == r.to_dict()
        assert repr(again) == repr(r)


def test_a_copy_of_a_compiled_module_calls_itself() -> None:
    r = Rotation(48)
    r.compile(backend="eager")  # which keeps a bound method of r
    for again in (copy.deepcopy(r), pickle.loads(pickle.dumps(r))):
        assert again._compiled_call_impl is None


def test_what_is_stored_has_the_signs_and_the_digest() -> None:
    assert Rotation(24, "dao", signs=[1, -1] * 12).to_dict() == {
        "n": 24,
        "block": 24,
        "matrix": "dao",
        "factors": [{"order": 12, "sha256": find_matrix("dao", 12).digest}],
        "signs": [1, -1] * 12,
        "signs_after": None,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"factors": [{"order": 12, "sha256": "c1be30fe"}]},
            "of order 12 of dao has the digest d8f1cd00, but 'c1be30fe'",
        ),
        ({"factors": [{"order": 12}]}, "data has no valid 'sha256'"),
        (
            {"factors": [{"order": 12, "sha256": "d8f1cd00"}, {"order": 1, "sha256": ""}]},
            r"orders \(12, 1\), not \(12,\); pass what to_dict returned",
        ),
        ({"factors": 3}, "data is no rotation"),
        ({"factors": [3]}, "data is no rotation"),
        ({"factors": [np.int64(3)]}, "data is no rotation"),
        ({"factors": np.ones((2, 2))}, "data is no rotation"),
        ({"factors": torch.ones(2, 2)}, "data is no rotation"),
        ({"n": "24"}, "n = '24' is not possible"),
        ({"n": None}, "n = None is not possible"),
        ({"matrix": None}, "data is no rotation"),
        ({"matrix": "given", "factors": [{"order": 2, "dtype": "int9", "entries": [[1]]}]}, "data has no valid 'int9'"),
        ({"matrix": "given", "factors": [{"order": 2, "dtype": "int8", "entries": [[1, 1], [1]]}]}, "no rotation"),
        ({"matrix": "given", "factors": [{"order": 2, "dtype": "int8", "entries": [[1]]}]}, r"k = \(2,\) does not fit"),
        ({"signs": [1, 2] * 12}, r"signs\[1\] is 2"),
        ({"signs": "+-" * 12}, "data is no rotation"),
        ({"signs": [10**400] * 24}, "data is no rotation"),
    ],
    ids=str,
)
def test_what_is_no_stored_rotation_is_one_sentence(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Rotation.from_dict(Rotation(24, "dao").to_dict() | change)


def test_nothing_that_is_stored_may_lack() -> None:
    for key in Rotation(24).to_dict():
        with pytest.raises(UsageError, match=f"data has no valid '{key}'; pass what to_dict returned"):
            Rotation.from_dict({name: value for name, value in Rotation(24).to_dict().items() if name != key})
    for data in (None, [], 3, "n", np.int64(3), np.ones(3), torch.ones(3)):
        with pytest.raises(UsageError, match="pass what to_dict returned"):
            Rotation.from_dict(data)  # type: ignore[arg-type]


@pytest.mark.parametrize(("size", "order"), [(14 * 64, 224), (32, 32), (256, None), (244, 244), (12, 12), (1, None)])
def test_the_matrix_of_a_checkpoint_of_compressed_tensors(size: int, order: int | None) -> None:
    signs = some_signs(size)
    weight = dense("compressed-tensors", () if order is None else (order,), size, signs) * math.sqrt(size)
    for given_weight in (weight.to(torch.int8), weight.bfloat16(), (weight / math.sqrt(size)).half()):
        r = Rotation.from_compressed_tensors(given_weight, n=3 * size)
        assert (r.n, r.block, r.k) == (3 * size, size, () if order is None else (order,))
        torch.testing.assert_close(r.shard(0, 3).matrix(), weight / math.sqrt(size))


@pytest.mark.parametrize("size", [64, 96, 400])
@pytest.mark.parametrize("randomize", [False, True])
@pytest.mark.parametrize("kind", ["hadamard", "random-hadamard"])
def test_what_compressed_tensors_itself_computes(kind: str, randomize: bool, size: int) -> None:
    """Its own layers, with the permutation that they keep beside the weight."""
    transform = pytest.importorskip("compressed_tensors.transform")
    if kind == "hadamard" and size != 64:
        pytest.skip("its deterministic matrix is of a power of two")
    scheme = transform.TransformScheme(type=kind, randomize=randomize, head_dim=size, precision=torch.float64)
    factory = transform.TransformFactory.from_scheme(scheme, name="u", seed=42)
    layer, x = torch.nn.Linear(2 * size, 8), normal(3, 2 * size)
    for inverse in (False, True):
        arguments = transform.TransformArgs(targets=["Linear"], location="input", inverse=inverse)
        theirs = factory.create_transform(layer, arguments)
        state = theirs.state_dict()
        r = Rotation.from_compressed_tensors(state["weight"].data, n=2 * size, perm=state.get("perm"))
        assert r.name == ("given" if randomize else "compressed-tensors")
        torch.testing.assert_close(r.inverse(x) if inverse else r(x), theirs(x), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(r.inverse(r(x)), x)


def test_a_permutation_that_changes_nothing_is_no_given_matrix() -> None:
    weight = dense("compressed-tensors", (12,), 96, some_signs(96))
    r = Rotation.from_compressed_tensors(weight, perm=torch.arange(96))
    assert r.to_dict() == Rotation.from_compressed_tensors(weight).to_dict()


@pytest.mark.parametrize(
    ("size", "perm", "kind", "message"),
    [
        (
            512,
            torch.arange(512).flip(0),
            UsageError,
            "order 512 has no kernel, as its order may be at most 428",
        ),
        (
            12,
            torch.arange(11),
            UsageError,
            r"perm is strided int64 of the shape \(11,\); it must have",
        ),
        (12, torch.zeros(12).long(), UsageError, "it must have each integer from 0 to 11 once"),
        (12, torch.arange(12.0), UsageError, "perm is strided float32"),
        (12, torch.arange(12, device="meta"), UsageError, "it must have each integer from 0 to 11 once"),
        (12, list(range(12)), TypeError, "perm is a list; pass a torch.Tensor"),
    ],
)
def test_what_is_no_permutation_is_one_sentence(size: int, perm: Any, kind: type[Exception], message: str) -> None:
    weight = dense("compressed-tensors", (12,) if size == 12 else (), size, some_signs(size))
    with pytest.raises(kind, match=message):
        Rotation.from_compressed_tensors(weight, perm=perm)


def test_k_of_1_means_no_other_matrix() -> None:
    assert Rotation(64, k=1).to_dict() == Rotation(64).to_dict()
    assert Rotation(48, "quarot", k=(1, 12)).k == (12,)
    with pytest.raises(UsageError, match="n = 96 is not a power of two, so other orders are needed; 12 · 8 gives it"):
        Rotation(96, k=1)


@pytest.mark.parametrize(
    "k", [28, [28], torch.tensor(28), torch.tensor([28]), np.array(28), np.array([28]), iter([28])]
)
def test_k_is_an_integer_of_any_kind_or_several(k: Any) -> None:
    assert Rotation(112, k=k).k == (28,)


def test_its_deterministic_matrix_too() -> None:
    r = Rotation.from_compressed_tensors(dense("auto", (), 32))
    assert r.k == ()
    assert (r.signs == 1).all()


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.ones(3, 4), r"weight has the shape \(3, 4\); it must be square"),
        (torch.eye(4), "weight has magnitudes from 0 to 1"),
        (torch.full((4, 4), math.nan), "weight has magnitudes from nan"),
        (torch.ones(4, 4), "weight is not diag"),
        (dense("compressed-tensors", (20,), 20).T, "not transposed"),
        (dense("quarot", (20,), 40), "weight is not diag"),
        (torch.ones(26, 26), "weight is not diag"),
        (torch.ones(4, 4).cfloat(), "weight is a complex64 tensor"),
        (torch.ones(1, 1).expand(1 << 20, 1 << 20), r"several elements of weight \[1048576, 1048576\] share memory"),
        (torch.ones(32).as_strided((16, 16), (1, 1)), r"several elements of weight \[16, 16\] share memory"),
        (torch.ones(4, 4, device="meta"), "weight is a float32 tensor without values"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_matrix_of_a_checkpoint_is_one_sentence(weight: torch.Tensor, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Rotation.from_compressed_tensors(weight)


def test_a_matrix_for_which_there_is_no_memory_is_one_sentence() -> None:
    with pytest.raises(
        UsageError, match=r"^the matrix of n = 1099511627776 has .* for which cpu has no memory .*rows"
    ) as e:
        Rotation(1 << 40).matrix()
    assert "\n" not in str(e.value)
    assert len(str(e.value)) < 250


# ---- as a module -----------------------------------------------------------------------------------------------------
def test_it_has_no_parameters_and_stores_what_was_given_alone() -> None:
    for made in (Rotation(112), Rotation(64), Rotation(64, "regular"), Rotation(240, k=(12, 20))):
        assert (list(made.parameters()), list(made.buffers()), made.state_dict()) == ([], [], {})
        made.load_state_dict({})
    r = Rotation(112, signs=some_signs(112))
    assert {name: each.dtype for name, each in r.state_dict().items()} == {"packed_signs": torch.uint8}
    assert repr(r) == "Rotation(n=112, block=112 = 28 · 4, matrix='auto', signs)"
    assert repr(Rotation(64)) == "Rotation(n=64, block=64, matrix='auto')"


def test_moves_and_casts_keep_the_operands() -> None:
    a = torch.linalg.qr(normal(7, 7)).Q
    x = normal(2, 28)
    wanted = Rotation(28, a, signs=some_signs(28))(x)
    model = torch.nn.Sequential(torch.nn.Linear(28, 28), Rotation(28, a, signs=some_signs(28)))
    assert torch.equal(model.bfloat16()[1](x), wanted)
    assert torch.equal(model.to("meta").to_empty(device="cpu")[1](x), wanted)
    with torch.device("meta"):
        made = Rotation(28, a, signs=[1] * 28)
        assert made.packed_signs.is_meta
    assert made(x.to("meta")).device.type == "meta"
    assert torch.equal(made.to_empty(device="cpu")(x), Rotation(28, a)(x))
    for move in (lambda r: r.to("meta"), lambda r: r.to_empty(device="meta"), lambda r: r.to("meta").shard(0, 2)):
        for n, block in ((64, 32), (96, 48)):
            assert move(Rotation(n, block=block)).matrix().device.type == "meta"
    a.zero_()
    assert torch.equal(model[1](x), wanted), "the matrix was not copied"


def test_operands_of_rotations_that_are_gone_take_no_memory() -> None:
    for seed in range(5):
        rotation = Rotation(24, torch.randn(3, 3, generator=torch.Generator().manual_seed(seed)))
        rotation(torch.ones(1, 24))
    del rotation
    gc.collect()
    kept = Rotation(24, SINGULAR)
    kept(torch.ones(1, 24))
    assert not [each for each in named._stored.values() if any(memory.expired() for memory in each[0])]


def test_a_real_matrix_without_values_has_the_transform_of_one_with_values() -> None:
    matrix = torch.randn(12, 12)
    assert Rotation(96, matrix.to("meta")).transform == Rotation(96, matrix).transform


# ---- bad input -------------------------------------------------------------------------------------------------------
SINGULAR = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0,), {}, "n = 0 is not possible"),
        ((2.5,), {}, "n = 2.5 is not possible"),
        ((True,), {}, "n = True is not possible"),
        ((1 << 2000,), {}, r"n = an integer of 2001 bits is not possible; it must be an integer from 1 to 2\^63 - 1"),
        (
            ((1 << 62) - 1,),
            {},
            "matrix = 'auto' has no matrices for 4611686018427387903 = .*; pad it to 4611686018427387904",
        ),
        ((12,), {"block": 8}, "block = 8 does not divide n = 12"),
        ((12,), {"block": 0}, "block = 0 is not possible"),
        ((208,), {"k": 13}, r"208 = 13 · 2\^4: there is no Hadamard matrix of order 13; 52 · 4 gives it"),
        ((208,), {"k": 0}, "k = 0 is not possible"),
        ((208,), {"k": "52"}, "k = '5' is not possible"),
        ((208,), {"k": 52.0}, "k = 52.0 is not possible"),
        ((208,), {"k": torch.tensor(52.0)}, r"k = tensor\(52.\) is not possible"),
        ((4**22, "regular"), {}, "a block of regular has 17592186044416 elements; choose blocks of at most 67108864"),
        ((160, "dao"), {}, "is 40 · 4 and 20 · 8 with matrices of dao"),
        ((64, "hadamard"), {}, "matrix 'hadamard' is neither a known name nor a"),
        ((64, "given"), {}, "matrix 'given' is neither a known name nor a"),
        ((12, torch.ones(3, 4)), {}, r"the matrix has the shape \(3, 4\); it must be square"),
        ((12, torch.ones(3)), {}, r"the matrix has the shape \(3,\); it must be square"),
        ((0, torch.ones(0, 0)), {}, "n = 0"),
        ((12, torch.ones(0, 0)), {}, r"the matrix has the shape \(0, 0\)"),
        ((429, torch.ones(429, 429)), {}, "the matrix has the order 429; it may be at most 428"),
        ((3, SINGULAR * math.inf), {}, "the matrix has entries that are not finite"),
        ((3, SINGULAR * 0), {}, "the matrix has the norm 0"),
        ((3, SINGULAR.double() * 1e200), {}, "cannot be made orthonormal"),
        ((3, SINGULAR.cfloat()), {}, "the matrix is a complex64 tensor; pass real numbers"),
        ((9, [SINGULAR, SINGULAR.to("meta")]), {}, "the matrix has no values, unlike another"),
        ((3, SINGULAR.to_sparse()), {}, "the matrix is sparse or nested; pass a dense tensor"),
        ((3, SINGULAR.clone().requires_grad_()), {}, r"pass matrix.detach\(\)"),
        ((10, SINGULAR), {}, "n = 10 is not 3 times a power of two"),
        ((18, SINGULAR), {}, "n = 18 is not 3 times a power of two"),
        ((36, [SINGULAR, SINGULAR]), {"k": 3}, r"k = \(3,\) does not fit matrices of the orders 3 · 3"),
        ((36, []), {}, "matrix is an empty list"),
        ((4,), {"signs": [1, 1, 1]}, r"signs has the shape \(3,\); it must have the 4 elements of a block"),
        ((8,), {"signs": [1] * 8, "block": 4}, r"signs has the shape \(8,\); it must have the 4 elements of a block"),
        ((2,), {"signs_after": [1, 0]}, r"signs_after\[1\] is 0; each must be 1 or -1"),
        ((2,), {"signs": torch.tensor([1.0, math.nan])}, r"signs\[1\] is nan; each must be 1 or -1"),
        ((2,), {"signs": torch.tensor([True, True])}, "signs is a bool tensor"),
        ((2,), {"signs": torch.ones(2).cfloat()}, "signs is a complex64 tensor"),
        ((2,), {"signs": torch.ones(2).to_sparse()}, "signs is a float32 tensor; pass a dense tensor"),
    ],
    ids=str,
)
def test_a_bad_rotation_is_one_sentence(arguments: tuple[Any, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        Rotation(*arguments, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((4, 4), {}, "matrix is a int; pass a name, a K×K tensor or a list of them"),
        ((4, [[1, 1], [1, -1]]), {}, "matrix is a list; pass a name"),
        ((4,), {"signs": "++--"}, "signs is a str; pass a tensor or a list"),
    ],
)
def test_a_wrong_type_is_one_sentence(arguments: tuple[Any, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Rotation(*arguments, **options)


def test_a_result_is_not_written_over_the_buffers_of_the_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    signed, given = Rotation(32, signs=some_signs(32)), Rotation(6, torch.eye(3) + 0.25)
    run = SimpleNamespace(over=lambda x: x.zero_())
    for r, name in ((signed, "packed_signs"), (given, "packed_matrices")):
        buffer = r.get_buffer(name)
        before = buffer.clone()
        values = buffer[: 2 * r.n].view(torch.float16)
        x = torch.ones(r.n, dtype=torch.float16)
        with pytest.raises(TensorError, match=f"out shares memory with {name} of the rotation; pass memory of its own"):
            r(x, out=values)
        with pytest.raises(TensorError, match=f"x shares memory with {name} of the rotation; pass memory of its own"):
            r(values, inplace=True)
        r(x.clone(), inplace=True)
        # A call that comes again, whose kernel is known.
        with monkeypatch.context() as patch:
            patch.setattr("hadagen.runtime.choose.tables.calls", defaultdict(lambda: run))
            assert not r(x.clone(), inplace=True).any()
            for part in (values, buffer[48:][: 2 * r.n].view(torch.float16)):
                with pytest.raises(TensorError, match=f"x shares memory with {name} of the rotation"):
                    r(part, inplace=True)
        assert torch.equal(buffer, before)
        assert torch.equal(r(values), r(values.clone()))  # which only reads
        out = buffer[: r.n].view(torch.int8)[None], torch.ones(1, 1)
        with pytest.raises(TensorError, match=rf"out\.codes shares memory with {name} of the rotation"):
            rotate_quantize(x[None], r, to="int8-row", out=out)
        assert torch.equal(buffer, before)


def test_the_operators_do_not_write_over_signs_either() -> None:
    signs = torch.zeros(160, dtype=torch.uint8)
    options = None, [], signs[:4], None, 32, False, False, 1.0, "accurate"
    for call in (
        lambda: torch.ops.hadagen.rotate_(signs[:64].view(torch.float16), *options),
        lambda: torch.ops.hadagen.rotate_out(torch.ones(32).half(), *options, signs[:64].view(torch.float16)),
    ):
        with pytest.raises(TensorError, match="shares memory with the vector signs of the rotation"):
            call()
    assert not signs.any()


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda r: r(torch.ones(2, 48)), TensorError, "the last dimension of x is 48; this rotation takes 24"),
        (lambda r: r(torch.ones(2, 25)), TensorError, "the last dimension of x is 25; this rotation takes 24"),
        (lambda r: r(torch.tensor(1.0)), TensorError, "x has no dimension"),
        (lambda r: r(torch.ones(2, 24).long()), TensorError, "x has the type int64"),
        (
            lambda r: r(torch.ones(2, 24, device="meta")),
            TensorError,
            "is on cpu but x on meta; a tensor on meta has no values; put",
        ),
        (lambda r: r([1.0]), TypeError, "x is a list; pass a torch.Tensor"),
        (lambda r: r(torch.ones(24), numerics="exact"), UsageError, "numerics 'exact' is not supported"),
        (lambda r: r(torch.ones(24), inplace=2), TypeError, "inplace is 2"),
        (lambda r: r(torch.ones(24), batch_invariant="yes"), TypeError, "batch_invariant is 'yes'; pass True or False"),
        (lambda r: r(torch.ones(24), out=torch.ones(12)), TensorError, "pass an out like x"),
        (lambda r: r(torch.ones(24), inplace=True, out=torch.ones(24)), UsageError, "name two places"),
        (lambda r: r.fold_into(torch.ones(24, 3), "input"), TensorError, "its input must be 24"),
        (lambda r: r.fold_into(torch.ones(3, 24), "output"), TensorError, "its output must be 24"),
        (lambda r: r.fold_into(torch.ones(24), "input"), TensorError, r"weight has the shape \(24,\)"),
        (lambda r: r.fold_into(torch.ones(3, 24), "both"), UsageError, "side 'both' is not known"),
        (lambda r: r.fold_into(torch.ones(3, 24), "input", torch.ones(3)), UsageError, "a bias does not change"),
        (lambda r: r.fold_into(None, "input"), TypeError, "weight is a NoneType"),
        (lambda r: r.fold_into(torch.ones(24, 3), "output", torch.ones(3)), TensorError, r"bias has the shape \(3,\)"),
        (lambda r: r.fold_into(torch.ones(24, 3), "output", torch.ones(())), TensorError, r"bias has the shape \(\)"),
        (
            lambda r: r.fold_into(torch.ones(3, 24).int(), "input"),
            TensorError,
            "weight is a strided int32 tensor; pass",
        ),
        (lambda r: r.fold_into(torch.ones(3, 24).to_sparse(), "input"), TensorError, "weight is a sparse_coo float32"),
        (
            lambda r: r.fold_into(torch.ones(24, 3), "output", torch.ones(24).int()),
            TensorError,
            "bias is a strided int32 tensor",
        ),
        (
            lambda r: r.fold_into(torch.ones(24, 3), "output", torch.ones(24, device="meta")),
            TensorError,
            "bias is on meta but the rotation on cpu; a tensor on meta has no values; put",
        ),
        (lambda r: r.matrix("float32"), UsageError, "dtype 'float32' is not possible; pass one of torch.float16, "),
        (lambda r: r.matrix(torch.int32), UsageError, "dtype 'int32' is not possible; pass one of torch.float16, "),
        (lambda r: r.shard(0, 2), UsageError, "n / world = 24 / 2 is no multiple of block = 24"),
        (lambda r: r.shard(2, 2), UsageError, "rank = 2 is not possible; it must be from 0 to 1"),
        (lambda r: r.shard(0, 0), UsageError, "world = 0 is not possible"),
    ],
)
def test_a_bad_call_is_one_sentence(call: Callable[[Rotation], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call(Rotation(24, signs=[1] * 24))


def test_what_is_not_orthogonal_has_no_inverse() -> None:
    x = normal(2, 6)
    r = Rotation(6, SINGULAR)
    torch.testing.assert_close(r(x), x @ r.matrix())
    torch.testing.assert_close(r.matrix().norm() ** 2, torch.tensor(6.0, dtype=torch.float64))
    message = "the matrix of order 3 has no inverse here: its rows are .* from orthonormal, and at most"
    for call in (r.inverse, lambda x: r.fold_into(x, "input")):
        with pytest.raises(UsageError, match=message):
            call(x)
    # Roundings of the type that was given are no reason to refuse.
    for dtype in BOUNDS:
        r = Rotation(6, torch.linalg.qr(normal(3, 3)).Q.to(dtype))
        assert error(r.inverse(r(x)), x) <= 4 * torch.finfo(dtype).eps
        assert error(r.shard(0, 1).inverse(r(x)), x) <= 4 * torch.finfo(dtype).eps
        assert r.inverse(r.inverse(x)).shape == x.shape
    almost = torch.linalg.qr(normal(3, 3)).Q
    almost[0] *= 1.001
    with pytest.raises(UsageError, match="no inverse"):
        Rotation(6, almost).inverse(x)


# ---- on a GPU --------------------------------------------------------------------------------------------------------
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(("n", "options"), [*CASES, (4096, {}), (14336, {})], ids=str)
def test_rotations_on_a_gpu(
    n: int, options: dict[str, Any], dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(partial(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision()))
    torch.set_float32_matmul_precision("medium")
    block = options.get("block", n)
    r = Rotation(n, signs=some_signs(block), signs_after=some_signs(block, seed=1), **options)
    x = normal(9, n, dtype=dtype)
    wanted = r(x.double())
    r.cuda()
    y = r(x.cuda())
    bound = max(BOUNDS[dtype], 4e-15)
    assert error(y.cpu(), wanted) <= bound
    assert error(r.inverse(y).cpu(), x.double()) <= 2 * bound
    graph, out = torch.cuda.CUDAGraph(), torch.empty_like(y)
    with torch.cuda.graph(graph):
        r(y, out=out)
    y.copy_(x)
    graph.replay()
    assert error(out.cpu(), wanted) <= bound
