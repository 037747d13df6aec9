"""Named Hadamard matrices, and the rules that choose the matrices for a row of n elements.

A row of n = K1 · K2 · … · 2^m elements is rotated by the Kronecker product of matrices of the orders K1, K2, … (the
first belongs to the slowest index) and Sylvester's matrix of order 2^m. A *name* stands for a set of matrices and for
the rule that gives the orders for n:

    quarot               those of QuaRot, SpinQuant, QuIP# and Quark
    dao                  those of fast_hadamard_transform, SGLang and MLX
    compressed-tensors   those of compressed-tensors and vLLM
    regular              n = 4^k: the Kronecker power of the matrix of order 4 whose rows have the same sum (ConvRot)
    auto                 one matrix of each order; `auto_orders` states the rule, which depends on n alone

Folded weights outlive this library. So no rule and no matrix ever changes, and each matrix is checked against its
SHA-256. Several matrices of the same order are equivalent but not equal, so it matters which one folded a weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from math import prod
from pathlib import Path

from hadagen.errors import StorageError, UsageError, choice, shown

NAMES = ("auto", "quarot", "dao", "compressed-tensors", "regular")
# The largest order of a matrix that a caller gives.
MAX_GIVEN_ORDER = 428

_FILE = Path(__file__).with_name("matrices.bin")
# Order, digest (see `Matrix`) and owners of each matrix in the file, in the order of the file. A matrix is order²
# bits, row by row, first bit highest, 1 for +1, and begins at a byte. `auto` takes the first of an order that is not
# of `dao`.
_STORED = """
 12 c1be30fecbc13e7e475b0deabb92352b7210407fe494be276878be3e43ba69bb quarot compressed-tensors
 12 d8f1cd00d0ed555080c3012d6c799e4da9660cecd9c6a4bb943fcbdb0282734f dao
 20 cff143e84622972bf8fffa0759340640c046ec5879deeb8d95d038282ef1cdda quarot
 20 c3a3d9922a9b49c7d9a4d8d1ee51bd250b4de622805b5646d1d2a45fd7332afc dao
 20 3f22cce6d79ad18ff0e06ea475ea995b5ecd01c9f33c6425e5fcc0f5e137391a compressed-tensors
 24 392c15efeec0ffb0293bc6d1489834c5b23bbbacad4ed7fd6cbe684ae18d132d compressed-tensors
 28 90e9b61e93164eb5aede6c0a5f5539ba418b69484589748c7c3119b351cd0d85 quarot compressed-tensors
 28 12c1ba894761bf1de28a115feae64279c5b96d3bf045f302f0122da855a52c4e dao
 32 f2ee9613e9d8fa71878df6beea1f78aba2de9bc58ac53abbcd63a5bebd9d5fc9 compressed-tensors
 36 147097e41d5a37076143c1be0f028b10754a72ad3f1f7f72c81b5f8aa76342f7 quarot compressed-tensors
 40 09c4022b9b0bdfd17e93a7e7ec69229985b4e95a9a7100efc987754ee9761bcd quarot dao compressed-tensors
 44 d7e970988e4b364192ae7739ece6a1f921d7da1d1f81c3846ceca178bcd2be99 quarot compressed-tensors
 48 2d1780a1cc30b4f088553eef05416bf708aa97647b69cc89cbcf61aed7b4ea70 compressed-tensors
 52 9aa6bec96394cfca64f56aaacdc9378beb57da5512e3a80713465e68b63ad5ce quarot compressed-tensors
 56 48fb4806fc674b626d20985dba2e36320ee4a057bec8b398291442cbbbcb52e6 compressed-tensors
 60 e0d3fe922af47d1e588204a355745f282f46828441471a07ec961431c76d2403 quarot compressed-tensors
 68 f5508830d0eb58fd302b9aa39790942121c6f94527295f52cf34a942f20f9c08 compressed-tensors
 72 cff55c230a3f60ad431b828b282f56a0cda528e60d7752f63ed4dfb8788255e3 compressed-tensors
 76 be472e0e3e1f1131a5d8c28ba6e9c22a90d39856be7ba806c14c351e3d5f67c8 compressed-tensors
 80 a0f601f791b95543cd0cd475c3a9b308c563d971125fd2815192d17db17ac717 compressed-tensors
 84 b2674337a1e11c5be62f6809fc7251e168e006fb8dbd54676797de706e36f823 compressed-tensors
 88 1a4204f3fe51d1a1d1fee9de9f0e88b7315c591d77908692b8a6b9cf8cb89b8f compressed-tensors
 92 a80ff1f4266672be8b430f9685a30b6f63d73ec29e01a56f9f20f7ce01d2cd0e compressed-tensors
 96 e027e8a26d806d2ed400d45b0b800347afed80bb0fbce686c4c267ec7bd5e659 compressed-tensors
100 f1483621f6cabed752d4af8cb9cbe112eb9617fa84f8cb42b250a9c4eaefd9e0 compressed-tensors
104 aa3f401b8c8f1ef67fbfedb6f8efe28f6ca129bbcd5c20f7daf1732cd1abe9e1 compressed-tensors
108 f2515b85a3163765111b92720629458e3f38e241dd83224b10852eed89535b1f quarot compressed-tensors
112 399a1368e6bf438bb4ac66938197381b2710e22503ebe5597d52c654e72aafd7 compressed-tensors
116 54ed86047196455deda5bd65f93394d3060263e5f659c3e4c8d8d3ce68770e9a quarot compressed-tensors
120 bc95a0084253b85898d832b907079f35a5e629ee7add26e5314790ef2d780ec5 compressed-tensors
124 d8b24cc196d0c5a6469ad9a2728aa88f921fe16bd464c3d345285dae817e12fb quarot
124 3599311d97a33c204caeb9acceddf824800a51a43391b4f8801086e3d961134b compressed-tensors
132 7df19ae582378957f5c510e8d01ef2cbc584cb986f327ed5ed22f29cf7585813 compressed-tensors
136 7927d7edb0a46d2665b6f9a3d2d4de90be23997dabcb8078702bef7315f3f36d compressed-tensors
140 2b20c54cd8c49cdc0a36c9d323380c5c9c95c16538d7c9eeb7e69b23f1ab944d quarot compressed-tensors
144 67d8729274cfdd923e95bf9e5f52003ced247ba953fae168372492b54c5b496c compressed-tensors
148 31f89b2526c3a527f210a6aeb67ae79e186bb5846b13a9944718f1633bf01c7c compressed-tensors
152 94d02919c45416ee9b890c4b99b69d2548ace194128eebe5b4d160a09ea6d885 compressed-tensors
156 1f9950c8e2e00ddc521f8b7ac6d6e559bf3da8036b7fdaefba3d4a22b6a6acf6 quarot compressed-tensors
160 0c915b14c5583fbe8b352229d1106eff97990058ba1a60fd27dc9b1edd8e796b compressed-tensors
164 93c264d78d1faae7b036e86d19f8c37101ac952be5bc7c3eea661ec1a6c7ac6e compressed-tensors
168 fc572c66d37fb98b1b6d68c1ef85c58c091f43dd32fc0d01524f11901e41aba1 compressed-tensors
172 ac825f9b6bbb0ae4f90e3b3578efc414c6ade55231ec45839f25e124446dd6ac quarot compressed-tensors
176 08bce09f1cac5a7ff9bb43aebde9ad996e44e55d1edcde2617daf18c1899e48d compressed-tensors
180 6333a278eeb0a4bb7b8fc8fd70ec9ffc958cf3c1670408f5f3107b876067ffb1 compressed-tensors
184 98f495bbb0a62122b3d55630ab4ba4c4d7721d76d4b07d29e58e44233b3a1555 compressed-tensors
188 d4b9d135220728c4a376c78ba1ee5b19cbdf79dbfe279f18d39dfd47df111592 compressed-tensors
192 fa3f6bdc6bba875e401a6a005f99cb538081f9e5ac39609416aa7a18ed17c9bf compressed-tensors
196 f5fa70a12c53a4ac607d425943447b34f37edefe6cbe33ecd0f41adeb758cc91 compressed-tensors
200 ff25de3c959726fb2786028468fcd2e82c386ffb7922665f8c1d6ab3cccaccbd compressed-tensors
204 9c656a3b9c98f76d30c93dee123cc0315090a0470b3f49ff509d16ef3dc52633 compressed-tensors
208 938e687b438c94d7fc0248bfa49b8b363d1256385e53f55d5a4753b89ae9bd6b compressed-tensors
212 aa577a493399c9116eb3358af3f3a04e5ea0edb8809dc713ffce19e914cd4525 compressed-tensors
216 8c282b2d34c5303142a49bf91069c62871465d2e7baa4797acd80aafadf5a44a compressed-tensors
220 d77c5949b57c07a0a6b7f0c0d57e09588595647e99172bf5612709720da6a347 compressed-tensors
224 b6cc2852643d8035a01f4a13ad247c12db7262a187f3b88775e221fae54f3f65 compressed-tensors
228 608887e189b51f5b5e7d0c8f6c9c04a323a793f82976bf1deb2216d1973a2e8a compressed-tensors
232 e59442dd3f57ff4ae2565235087891003783c7547ec20063145cf29e527243a2 compressed-tensors
236 c1d5142d5ac2276675567eef933cd208369d42f92d406d84d3b4fdab27bbe1fe compressed-tensors
240 10003ff264d38e9ad29d0bba08b67652413b16c8820ddbbc2e98f74aeb3b20da compressed-tensors
244 805f4daa09dce893a154e92bbafc01e14361042a60b63497ac7d29ad881f5cfc compressed-tensors
248 ca18069b4c6d34f076cd4c70b8a90c7a30a576c682fef4bbbbc6126363bd6111 compressed-tensors
252 8846730676cc3abce6e9e9df496ffcb2d5f35f1327fcc6131a6a91980728a4c3 compressed-tensors
428 e909bce2bd7acaa74c60b8c654b297572dde655c99ddc8ce0240ef9731664b60 exllamav3
"""
# Matrices that are constructed: order, the prime, digest. They belong to `auto`.
_CONSTRUCTED = {
    684: (683, "d18332dfe66be1dcd0d5b6e5b6260fb676f916dd3b77d15f9d41120f01bfc6a7"),
    924: (461, "e5b7ae63b2d332ea11731476ed26ff3e0c78c65d21019a66ead26c30d728ae2d"),
}
# The order in which QuaRot tries; SpinQuant's 44 and QuIP#'s 124 and 116 stand where these try them.
_QUAROT_ORDERS = (172, 156, 140, 124, 116, 108, 60, 52, 36, 28, 44, 40, 20, 12)
# In the rule of `auto`: the orders that a single matrix may have, and that each of two matrices may have.
_LARGEST = 256
_LARGER = 428


@dataclass(frozen=True)
class Matrix:
    """A matrix of ±1 with H·Hᵀ = order · I.

    digest: SHA-256, in hexadecimal digits, over order² bytes: the entries row by row, 1 for +1 and 0 for −1.
    """

    order: int
    digest: str
    # Where its bits begin in the file, or the prime that it is constructed from.
    _origin: int

    def entries(self) -> bytes:
        """The bytes that `digest` is of. Raises `StorageError` if the file of the matrices is missing or damaged."""
        return _entries(self)


@lru_cache(maxsize=32)
def _entries(matrix: Matrix) -> bytes:
    order = matrix.order
    entries = _paley(order, matrix._origin) if order in _CONSTRUCTED else _unpacked(order, matrix._origin)
    if sha256(entries).hexdigest() != matrix.digest:
        raise StorageError(f"{_FILE}: the matrix of order {order} is damaged; install hadagen again")
    return entries


def _unpacked(order: int, offset: int) -> bytes:
    size = -(-order * order // 8)
    try:
        with _FILE.open("rb") as file:
            file.seek(offset)
            packed = file.read(size)
    except OSError as error:
        raise StorageError(f"{_FILE} cannot be read: {error.strerror}; install hadagen again") from None
    bits = f"{int.from_bytes(packed, 'big'):0{8 * size}b}"[: order * order]
    return bits.encode().translate(bytes.maketrans(b"01", b"\0\1"))


def _paley(order: int, q: int) -> bytes:
    """Paley's construction I (order q + 1, q ≡ 3 mod 4) or II (order 2q + 2, q ≡ 1 mod 4) for a prime q."""
    squares = {i * i % q for i in range(1, q)}
    # Row i of the Jacobsthal matrix is χ(i − j) for j = 0 … q − 1: one list, read from another position.
    signs = ["0" if i == 0 else "+" if i in squares else "-" for i in range(q)][::-1] * 2
    rows = ["".join(signs[q - 1 - i : 2 * q - 1 - i]) for i in range(q)]
    if order == q + 1:  # I + C
        first, halves = "-", [{"0": b"\1", "+": b"\1", "-": b"\0"}]
    else:  # C ⊗ [1 1; 1 −1] + I ⊗ [1 −1; −1 −1]
        first, halves = "+", [{"0": b"\1\0", "+": b"\1\1", "-": b"\0\0"}, {"0": b"\0\0", "+": b"\1\0", "-": b"\0\1"}]
    conference = ["0" + "+" * q, *(first + row for row in rows)]
    return b"".join(b"".join(half[sign] for sign in row) for row in conference for half in halves)


def _read_table() -> dict[tuple[str, int], Matrix]:
    table: dict[tuple[str, int], Matrix] = {}
    offset = 0
    for line in _STORED.split("\n")[1:-1]:
        order, digest, *names = line.split()
        matrix = Matrix(int(order), digest, offset)
        offset += -(-(matrix.order**2) // 8)
        for name in names:
            table[name, matrix.order] = matrix
        if names != ["dao"]:
            table.setdefault(("auto", matrix.order), matrix)
    for number, (q, digest) in _CONSTRUCTED.items():
        table["auto", number] = Matrix(number, digest, q)
    return table


_TABLE = _read_table()


def find_matrix(name: str, order: int) -> Matrix:
    """The matrix of `order` that has this name. Raises `UsageError` if there is none."""
    check_name(name)
    try:
        return _TABLE[name, order]
    except KeyError:
        raise UsageError(f"matrix = {name!r} has none of order {shown(order)}; {_offer(name)}") from None


def check_name(name: str) -> None:
    """Raises `UsageError` unless the name is one of `NAMES`."""
    if not isinstance(name, str) or name not in NAMES:
        raise UsageError(f"matrix {shown(name)} is neither a known name nor a K×K tensor; {choice(name, NAMES)}")


def find_orders(name: str, n: int, k: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """The orders K1, K2, … for rows of n ≥ 1 elements; n / (K1 · K2 · …) is a power of two. () is Sylvester's alone.

    k: the orders, if the caller chooses them, () for none; None is the rule of the name:
        quarot              the first of 172 156 140 124 116 108 60 52 36 28 44 40 20 12 that divides n. It follows
                            QuaRot, SpinQuant and QuIP#, whose lists differ (QuIP# has no 40: there, give k=20)
        dao                 12, 20, 28 or 40, if only one of them is possible
        compressed-tensors  the largest order up to 256 for which n / K is a power of two
        regular             none; n is a power of 4
        auto                `auto_orders`

    Raises `UsageError` if the name has no matrices for n, or several choices.
    """
    check_name(name)
    if not isinstance(n, int) or not 1 <= n < 1 << 63:
        raise UsageError(f"n = {shown(n)} is not possible; it must be an integer from 1 to 2^63 - 1")
    if k is not None and not (isinstance(k, tuple) and all(isinstance(order, int) and order > 0 for order in k)):
        raise UsageError(f"k = {shown(k)} is not possible; it must be a tuple of integers of at least 1")
    if k is not None and not (name == "regular" and not k):
        return _given_orders(name, n, k)
    if name == "regular":
        if not _is_power_of_two(n) or n.bit_length() % 2 == 0:
            raise UsageError(f"n = {n} is no power of 4, which regular needs; use blocks of {_power_of_4(n)} or auto")
        return ()
    if name == "auto":
        found = auto_orders(n)
    elif name == "quarot":
        # torch.compile of PyTorch 2.6 cannot take the next of a generator.
        found = tuple([order for order in _QUAROT_ORDERS if n % order == 0][:1])
    else:
        known = sorted((order for of, order in _TABLE if of == name), reverse=True)
        possible = [order for order in known if n % order == 0 and _is_power_of_two(n // order)]
        if name == "dao" and len(possible) > 1:
            choices = " and ".join(f"{order} · {n // order}" for order in possible)
            raise UsageError(f"n = {n} is {choices} with matrices of dao; name one, such as k={possible[0]}")
        found = tuple(possible[:1])
        # Of 64, 128, 256 compressed-tensors stores Sylvester's, and 32 only serves n = 32.
        if name == "compressed-tensors" and _is_power_of_two(n) and n != 32:
            found = ()
    if found is None or n % prod(found) or not _is_power_of_two(n // prod(found)):
        raise UsageError(f"matrix = {name!r} has no matrices for {n} = {_as_product(n)} elements; {_advice(name, n)}")
    return found


def auto_orders(n: int) -> tuple[int, ...] | None:
    """The orders that `auto` takes for n; None if it has none.

    With n = q · 2^e and q odd:
        q = 1: none, Sylvester's alone.
        One order K = 4q, if K ≤ 256 or K = 428, and K divides n.
        Else two orders 4a ≤ 4b with a · b = q, a > 1, both ≤ 256, of the least sum, if 16q divides n.
    The matrix of an order is that of quarot if it has one, else that of compressed-tensors, else that of ExLlamaV3.
    """
    q = _odd_part(n)
    if q == 1:
        return ()
    if (4 * q <= _LARGEST or 4 * q == _LARGER) and n % (4 * q) == 0:
        return (4 * q,)
    halves = range(3, _LARGEST // 4 + 1)
    pairs = [(4 * a, 4 * (q // a)) for a in halves if q % a == 0 and a <= q // a in halves]
    return min(pairs, key=sum) if pairs and n % (16 * q) == 0 else None


def _given_orders(name: str, n: int, k: tuple[int, ...]) -> tuple[int, ...]:
    if name == "regular":
        raise UsageError(f"k = {_plain(k)} has no meaning for regular, whose order is n; leave k out")
    size = prod(k)
    if n % size or not _is_power_of_two(n // size):
        asked = f"k = {_plain(k)} times a power of two" if k else "a power of two, so other orders are needed"
        raise UsageError(f"n = {n} is not {asked}; {_advice(name, n)}")
    for order in k:
        if (name, order) not in _TABLE:
            whose = f"matrix = {name!r} has none" if ("auto", order) in _TABLE else "there is no Hadamard matrix"
            power = (n // size).bit_length() - 1
            raise UsageError(f"{n} = {_plain(k)} · 2^{power}: {whose} of order {order}; {_advice(name, n)}")
    return k


def _advice(name: str, n: int) -> str:
    """Advice for an n without matrices: a name and orders that give n, or the next n that `auto` gives."""
    orders = auto_orders(n)
    if orders is not None:
        rest = n // prod(orders)
        gives = " · ".join(map(str, (*orders, rest) if rest > 1 or not orders else orders))
        return f"{gives} gives it" if name == "auto" else f"auto gives it as {gives}"
    for order in _CONSTRUCTED:  # which the rule of auto does not take
        if n % order == 0 and _is_power_of_two(n // order):
            return f"give k={order}" if name == "auto" else f"auto with k={order} gives it"
    # An n that auto gives has an odd part below 2^12.
    step = 1 << max(n.bit_length() - 12, 0)
    following = n - n % step + step
    while auto_orders(following) is None:
        following += step
    return f"pad it to {following}, or use blocks of a size that auto gives"


def _offer(name: str) -> str:
    if name == "regular":
        return "its matrix is that of order 4^k as a whole"
    return f"it has {', '.join(str(order) for order in sorted(order for of, order in _TABLE if of == name))}"


def _as_product(n: int) -> str:
    q = _odd_part(n)
    return f"{q} · 2^{(n // q).bit_length() - 1}"


def _plain(k: tuple[int, ...]) -> str:
    return " · ".join(map(str, k))


def _odd_part(n: int) -> int:
    return n // (n & -n)


def _is_power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


def _power_of_4(n: int) -> int:
    """The largest power of 4 that divides n; 4 if that is 1."""
    power = (n & -n).bit_length() - 1
    return max(4, 1 << (power - power % 2))
