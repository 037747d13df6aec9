"""Named matrices, and the orders that a name has for n."""

from pathlib import Path

import pytest
import torch

from hadagen.errors import StorageError, UsageError
from hadagen.problem import matrices
from hadagen.problem.matrices import NAMES, Matrix, auto_orders, find_matrix, find_orders

# The first digits of the digests, as computed from each project's own source.
DIGESTS = {
    "quarot": """
        12 c1be30fe 20 cff143e8 28 90e9b61e 36 147097e4 40 09c4022b 44 d7e97098 52 9aa6bec9 60 e0d3fe92 108 f2515b85
        116 54ed8604 124 d8b24cc1 140 2b20c54c 156 1f9950c8 172 ac825f9b""",
    "dao": "12 d8f1cd00 20 c3a3d992 28 12c1ba89 40 09c4022b",
    "compressed-tensors": """
        12 c1be30fe 20 3f22cce6 24 392c15ef 28 90e9b61e 32 f2ee9613 36 147097e4 40 09c4022b 44 d7e97098 48 2d1780a1
        52 9aa6bec9 56 48fb4806 60 e0d3fe92 68 f5508830 72 cff55c23 76 be472e0e 80 a0f601f7 84 b2674337 88 1a4204f3
        92 a80ff1f4 96 e027e8a2 100 f1483621 104 aa3f401b 108 f2515b85 112 399a1368 116 54ed8604 120 bc95a008
        124 3599311d 132 7df19ae5 136 7927d7ed 140 2b20c54c 144 67d87292 148 31f89b25 152 94d02919 156 1f9950c8
        160 0c915b14 164 93c264d7 168 fc572c66 172 ac825f9b 176 08bce09f 180 6333a278 184 98f495bb 188 d4b9d135
        192 fa3f6bdc 196 f5fa70a1 200 ff25de3c 204 9c656a3b 208 938e687b 212 aa577a49 216 8c282b2d 220 d77c5949
        224 b6cc2852 228 608887e1 232 e59442dd 236 c1d5142d 240 10003ff2 244 805f4daa 248 ca18069b 252 88467306""",
    "auto": "428 e909bce2 684 d18332df 924 e5b7ae63",
}


def expected_digests() -> dict[tuple[str, int], str]:
    pairs = {name: digests.split() for name, digests in DIGESTS.items()}
    return {(name, int(k)): d for name, words in pairs.items() for k, d in zip(words[::2], words[1::2], strict=True)}


def values(matrix: Matrix) -> torch.Tensor:
    entries = torch.frombuffer(bytearray(matrix.entries()), dtype=torch.int8)
    return entries.view(matrix.order, matrix.order).double() * 2 - 1


@pytest.mark.parametrize("name", DIGESTS)
def test_every_matrix_is_the_one_of_its_project(name: str) -> None:
    known = {order: digest for (of, order), digest in expected_digests().items() if of == name}
    for order, digest in known.items():
        matrix = find_matrix(name, order)
        assert matrix.digest.startswith(digest)
        h = values(matrix)  # which compares the entries with the digest
        assert torch.equal(h @ h.T, order * torch.eye(order, dtype=torch.double))
    orders = {order for of, order in matrices._TABLE if of == name}
    assert orders == set(known) if name != "auto" else orders > set(known)


def test_auto_takes_the_matrix_of_quarot_then_that_of_compressed_tensors() -> None:
    for order in range(12, 257, 4):
        owners = [name for name in ("quarot", "compressed-tensors") if (name, order) in expected_digests()]
        if owners:
            assert find_matrix("auto", order) == find_matrix(owners[0], order)


def test_a_damaged_or_missing_file_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = find_matrix("dao", 12)
    damaged = tmp_path / "matrices.bin"
    damaged.write_bytes(matrices._FILE.read_bytes()[: matrix._origin + 3])
    for path, message in ((damaged, "the matrix of order 12 is damaged; install"), (tmp_path / "no", "cannot be read")):
        monkeypatch.setattr(matrices, "_FILE", path)
        matrices._entries.cache_clear()
        with pytest.raises(StorageError, match=message):
            matrix.entries()
    matrices._entries.cache_clear()


# ---- which orders for which n ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("n", "orders"),
    {
        1: (), 2: (), 4096: (), 131072: (), 80: (20,), 96: (12,), 112: (28,), 192: (12,), 5120: (20,), 14336: (28,),
        11008: (172,), 13824: (108,), 18944: (148,), 25600: (100,), 2880: (180,), 13696: (428,), 10944: (36, 76),
        29568: (44, 84), 252: (252,), 6656: (52,), 53248: (52,),
    }.items(),
)  # fmt: skip
def test_the_orders_of_auto_never_change(n: int, orders: tuple[int, ...]) -> None:
    assert find_orders("auto", n) == auto_orders(n) == orders


def test_the_rule_of_auto() -> None:
    """Among one order or two, both 4 times an odd number that is known, whatever gives n."""
    for n in range(1, 3000):
        q = n // (n & -n)
        one = [(4 * q,)] * ((4 * q <= 256 or 4 * q == 428) and n % (4 * q) == 0)
        two = [(4 * a, 4 * b) for a in range(3, 65) for b in range(a, 65) if a * b == q and n % (16 * q) == 0]
        assert auto_orders(n) == (() if q == 1 else next(iter(one or sorted(two, key=sum)), None))
        for order in auto_orders(n) or ():
            find_matrix("auto", order)


def test_the_rule_of_quarot() -> None:
    for n in range(1, 3000):
        known = (172, 156, 140, 124, 116, 108, 60, 52, 36, 28, 44, 40, 20, 12)
        k = next((k for k in known if n % k == 0), 1)
        if (n // k) & (n // k - 1):
            with pytest.raises(UsageError, match=f"matrix = 'quarot' has no matrices for {n} = "):
                find_orders("quarot", n)
        else:
            assert find_orders("quarot", n) == ((k,) if k > 1 else ())


@pytest.mark.parametrize(
    ("name", "n", "orders"),
    [
        ("compressed-tensors", 14336, (224,)),
        ("compressed-tensors", 32, (32,)),
        ("compressed-tensors", 64, ()),
        ("compressed-tensors", 16, ()),
        ("compressed-tensors", 12288, (192,)),
        ("compressed-tensors", 244, (244,)),
        ("dao", 12, (12,)),
        ("dao", 20, (20,)),
        ("dao", 7168, (28,)),
        ("dao", 1024, ()),
        ("regular", 1024, ()),
    ],
)
def test_the_rules_of_other_names(name: str, n: int, orders: tuple[int, ...]) -> None:
    assert find_orders(name, n) == orders


@pytest.mark.parametrize(
    ("name", "n", "k", "message"),
    [
        ("auto", 208, (13,), r"208 = 13 · 2\^4: there is no Hadamard matrix of order 13; 52 · 4 gives it"),
        ("auto", 26, None, r"matrix = 'auto' has no matrices for 26 = 13 · 2\^1 elements; pad it to 28, or use blocks"),
        ("auto", 3001, None, r"matrix = 'auto' has no matrices for 3001 = 3001 · 2\^0 elements; pad it to 3008,"),
        ("auto", 100001, None, "pad it to 100064,"),
        ("auto", 3, None, r"matrix = 'auto' has no matrices for 3 = 3 · 2\^0 elements; pad it to 4,"),
        ("auto", 24, (5,), "n = 24 is not k = 5 times a power of two; 12 · 2 gives it"),
        ("auto", 29568, (44, 85), "n = 29568 is not k = 44 · 85 times a power of two; 44 · 84 · 8 gives it"),
        (
            "quarot",
            18944,
            None,
            r"matrix = 'quarot' has no matrices for 18944 = 37 · 2\^9 elements; auto gives it as 148 · 128",
        ),
        ("quarot", 92, (92,), r"92 = 92 · 2\^0: matrix = 'quarot' has none of order 92; auto gives it as 92"),
        ("auto", 684, None, r"matrix = 'auto' has no matrices for 684 = 171 · 2\^2 elements; give k=684$"),
        ("auto", 1368, None, r"matrix = 'auto' has no matrices for 1368 = 171 · 2\^3 elements; give k=684$"),
        ("auto", 1848, (12,), r"n = 1848 is not k = 12 times a power of two; give k=924$"),
        ("compressed-tensors", 1848, None, "has no matrices for 1848 = .* elements; auto with k=924 gives it$"),
        ("auto", 96, (), "n = 96 is not a power of two, so other orders are needed; 12 · 8 gives it"),
        (
            "compressed-tensors",
            13696,
            None,
            r"matrix = 'compressed-tensors' has no matrices for 13696 = .*; auto gives it as 428",
        ),
        ("dao", 160, None, "n = 160 is 40 · 4 and 20 · 8 with matrices of dao; name one, such as k=40"),
        ("regular", 2048, None, "n = 2048 is no power of 4, which regular needs; use blocks of 1024 or auto"),
        ("regular", 14336, None, "n = 14336 is no power of 4, which regular needs; use blocks of 1024 or auto"),
        ("Dao", 64, None, r"matrix 'Dao' is neither a known name nor a K×K tensor; did you mean dao\?$"),
        ("regular", 64, (4,), "k = 4 has no meaning for regular"),
        ("quip", 64, None, f"'quip' is neither a known name nor a K×K tensor; choose one of {', '.join(NAMES)}$"),
    ],
)
def test_what_no_rule_gives_is_one_sentence(name: str, n: int, k: tuple[int, ...] | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        find_orders(name, n, k)


def test_a_name_says_which_orders_it_has() -> None:
    with pytest.raises(UsageError, match="matrix = 'dao' has none of order 16; it has 12, 20, 28, 40"):
        find_matrix("dao", 16)
