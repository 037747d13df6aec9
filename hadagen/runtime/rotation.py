"""`Rotation`: an orthonormal transform of rows of n = K·2^m elements, as a module."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch

from hadagen.errors import TensorError, UsageError
from hadagen.matrices import find_matrix, find_orders
from hadagen.runtime.arguments import as_int
from hadagen.runtime.checks import (
    DTYPES,
    check_destination,
    check_is_flag,
    check_is_tensor,
    check_like,
    check_tensor,
    has_values,
    kind_of,
    stands_for_a_tensor,
)
from hadagen.runtime.choose import BATCH_INVARIANT
from hadagen.runtime.given import (
    as_count,
    as_matrices,
    as_orders,
    as_signs,
    check_orders,
    mean_square_of_rows,
    why_not_orthogonal,
)
from hadagen.runtime.linear import has_only_memory, needs_derivative
from hadagen.runtime.named import matrix_of
from hadagen.runtime.operands import Operands, check, combined, pack_matrices, pack_signs, unpack_matrices
from hadagen.runtime.rotate import ROTATE, known

_GIVEN = "given"
_ROWS_AT_A_TIME = 1024
# The largest block with the regular matrix, whose diagonal is stored.
_MAX_REGULAR = 1 << 26


class Rotation(torch.nn.Module):
    """r(x) = x · M with M = D_in · (A1 ⊗ A2 ⊗ … ⊗ H)ᵀ · D_out / c, over each block of the last dimension of x.

    n: the last dimension of x, at least 1.
    matrix: the name of a set of Hadamard matrices (`hadagen.matrices` has them and their rules); or a K×K tensor of
        real numbers, with K up to 428; or several. A1 belongs to the slowest index. Tensors are copied.
    k: the order K of the named matrix, or several orders. None takes the rule of the name.
    signs, signs_after: the diagonals of D_in and D_out: a tensor or sequence of as many ±1 as a block has elements.
        None is 1 everywhere.
    block: divides n. Each block of so many elements is rotated by itself, with the same signs. None is n.

    H is Sylvester's matrix, of the order that is left of a block: a power of two. c makes M orthonormal: it is √block
    for Hadamard matrices, and has a factor ‖A‖ / √K, with the Frobenius norm, for each other A. If a given matrix is
    not orthogonal, M is not either, and there is no inverse.

    Attributes: n, block, name (of the matrices; "given" if they have none), k (the orders), signs, signs_after (int8 on
    the CPU, or None).

    The module has no parameters, and nothing in its state_dict; `to_dict` and `from_dict` store a rotation. It takes x
    on its own device, to which `.to` moves it. A change of type, such as `.half()`, does not change it.

    Raises `UsageError` for values that are not possible, and TypeError for an argument of a wrong type.
    """

    _place: torch.Tensor  # empty, so that a rotation without operands has a device too
    _matrices: torch.Tensor | None
    _before: torch.Tensor | None
    _after: torch.Tensor | None

    def __init__(
        self,
        n: int,
        matrix: str | torch.Tensor | Sequence[torch.Tensor] = "auto",
        *,
        k: int | Sequence[int] | None = None,
        signs: torch.Tensor | Sequence[int] | None = None,
        signs_after: torch.Tensor | Sequence[int] | None = None,
        block: int | None = None,
    ) -> None:
        super().__init__()
        self.n = as_count(n, "n")
        self.block = self.n if block is None else as_count(block, "block")
        if self.n % self.block:
            raise UsageError(f"block = {self.block} does not divide n = {self.n}; choose one that does")
        orders = None if k is None else as_orders(k)
        self._given: list[torch.Tensor] = []  # the matrices, on the CPU, of the types in which they were given
        self._no_inverse: str | None = None  # why there is none
        if isinstance(matrix, str):
            if orders is not None:
                orders = tuple(order for order in orders if order != 1)
            self.name, self.k = matrix, find_orders(matrix, self.block, orders)
            matrices, squares = [matrix_of(matrix, order) for order in self.k], [float(order) for order in self.k]
        else:
            matrices, self._given = as_matrices(matrix)
            self.name, self.k = _GIVEN, tuple(len(each) for each in matrices)
            check_orders(self.k, orders, self.block)
            self._no_inverse = next(filter(None, map(why_not_orthogonal, matrices, self._given)), None)
            squares = [mean_square_of_rows(each) for each in matrices]
        self.signs, self.signs_after = (
            None if values is None else as_signs(values, name, self.block)
            for name, values in (("signs", signs), ("signs_after", signs_after))
        )
        rest = self.block // math.prod(self.k)
        # As text: torch.compile takes a float for a variable, and compiles twice.
        self._scale = repr((rest * math.prod(squares)) ** -0.5)
        self._swapped = self.name == "regular"
        before, after = self.signs, self.signs_after
        if self._swapped and self.block > _MAX_REGULAR:
            raise UsageError(f"a block of regular has {self.block} elements; choose blocks of at most {_MAX_REGULAR}")
        if self._swapped:  # the regular matrix is D · H · P · D, where P exchanges bits
            diagonal = _regular_diagonal(self.block)
            before, after = (diagonal if each is None else each * diagonal for each in (before, after))
        # The operands. Buffers are copies of them on the module's device.
        matrices = combined(matrices, self.block)
        if len(matrices) == 1 and matrices[0].dtype == torch.int8 and len(matrices[0]) == self.block:
            matrices, before, after = [_signed(matrices[0], before, after)], None, None
        self._orders = tuple(len(each) for each in matrices)
        self._operands = {
            "_place": torch.empty(0, dtype=torch.int8, device="cpu"),
            "_matrices": pack_matrices(matrices),
            "_before": None if before is None else pack_signs(before),
            "_after": None if after is None else pack_signs(after),
        }
        for name, operand in self._operands.items():
            self.register_buffer(name, operand, persistent=False)
        self._to_device(torch.empty(0).device)  # get_default_device ignores `with torch.device` in PyTorch 2.6

    def forward(
        self,
        x: torch.Tensor,
        *,
        inplace: bool = False,
        out: torch.Tensor | None = None,
        numerics: str = "accurate",
        batch_invariant: bool | None = None,
    ) -> torch.Tensor:
        """x · M over the last dimension, which is n.

        x: [..., n] of type float16, bfloat16, float32 or float64, with any strides, on the device of the module. The
            number of rows may be 0.
        inplace: overwrite x and return it.
        out: the tensor to write and return, of x's shape, dtype and device.
        numerics, batch_invariant: as for `hadagen.hadamard_transform`.

        Returns a tensor of x's shape, dtype and device, also under autocast. It is contiguous, unless it is x or out.
        It is differentiable in x, any number of times.

        Raises TypeError if x or out is no tensor; `UsageError` for bad numerics; `TensorError` for a tensor that cannot
        be rotated or written.
        """
        return self._run(x, inplace, out, numerics, batch_invariant, False)

    def inverse(
        self,
        x: torch.Tensor,
        *,
        inplace: bool = False,
        out: torch.Tensor | None = None,
        numerics: str = "accurate",
        batch_invariant: bool | None = None,
    ) -> torch.Tensor:
        """x · Mᵀ, which undoes the rotation; arguments, result and errors as those of `forward`.

        Raises `UsageError` if a given matrix is not orthogonal.
        """
        self._check_inverse()
        return self._run(x, inplace, out, numerics, batch_invariant, True)

    def matrix(self, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """M, with r(x) = x · M: [n, n], on the module's device.

        dtype: float16, bfloat16, float32 or float64. Raises `UsageError` for another.
        """
        if dtype not in DTYPES:
            plain = str(dtype).removeprefix("torch.")
            raise UsageError(f"dtype {plain!r:.80} is not possible; pass one of {', '.join(map(str, DTYPES))}")
        return self(torch.eye(self.n, dtype=dtype, device=self._device))  # type: ignore[no-any-return]

    def fold_into(
        self, weight: torch.Tensor, side: str, bias: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The weight of a linear layer, y = x · weightᵀ + bias, whose input or output is rotated.

        side: "input": weight · M for a weight [..., out, n]. With it, r(x) gives the y that x gave.
            "output": Mᵀ · weight for a weight [..., n, in], and bias · M for a bias [..., n]. x then gives r(y).
        bias: only with "output"; a bias does not change if the input is rotated.

        Returns new tensors of the same types: the weight, or the weight and the bias if there is one.

        Raises TypeError if weight or bias is no tensor; `UsageError` for another side, and for "input" if a given
        matrix is not orthogonal; `TensorError` for a weight or bias that does not fit.
        """
        self._check_part(weight, "weight")
        if side not in ("input", "output"):
            raise UsageError(f"side {side!r:.80} is not known; choose input or output")
        axis = -1 if side == "input" else -2
        if weight.dim() < 2 or weight.shape[axis] != self.n:
            place = f"[..., out, {self.n}]" if side == "input" else f"[..., {self.n}, in]"
            raise TensorError(f"weight has the shape {tuple(weight.shape)}; its {side} must be {self.n}, as in {place}")
        if side == "input":
            self._check_inverse()
            if bias is not None:
                raise UsageError("a bias does not change if the input is rotated; leave it out")
            return self(weight)  # type: ignore[no-any-return]
        if bias is not None:
            self._check_part(bias, "bias")
            if not bias.dim() or bias.shape[-1] != self.n:
                raise TensorError(f"bias has the shape {tuple(bias.shape)}; its last dimension must be {self.n}")
        folded = self(weight.mT).mT.contiguous()
        return folded if bias is None else (folded, self(bias))

    def shard(self, rank: int, world: int) -> Rotation:
        """The rotation of what rank `rank` of `world` holds if the last dimension is split evenly over the ranks.

        Raises `UsageError` unless the block divides n / world.
        """
        world, rank = as_count(world, "world"), as_int(rank)
        if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < world:
            raise UsageError(f"rank = {rank!r:.80} is not possible; it must be from 0 to {world - 1}")
        mine, left = divmod(self.n, world)
        if left or mine % self.block:
            raise UsageError(
                f"n / world = {self.n} / {world} is no multiple of block = {self.block}, so a rank lacks elements that "
                f"it needs; make the rotation with a block that divides {self.n} / {world}"
            )
        signs: dict[str, Any] = {"signs": self.signs, "signs_after": self.signs_after}
        if self.name == _GIVEN:
            part = Rotation(mine, self._given, block=self.block, **signs)
        else:
            part = Rotation(mine, self.name, k=self.k, block=self.block, **signs)
        part._to_device(self._device)
        return part

    # ---- storing -----------------------------------------------------------------------------------------------------
    def to_dict(self) -> dict[str, Any]:
        """All of the rotation in numbers, strings, lists and dictionaries, which JSON can hold.

        n, block, matrix (the name), signs and signs_after (lists of ±1, or None), and factors, a list with a dictionary
        for each matrix but Sylvester's: its order, and sha256 (the digest of `hadagen.matrices.Matrix`) if it has a
        name, else dtype and entries.
        """
        if self.name == _GIVEN:
            factors: list[dict[str, Any]] = [
                {"order": len(each), "dtype": str(each.dtype).removeprefix("torch."), "entries": each.tolist()}
                for each in self._given
            ]
        else:
            factors = [{"order": order, "sha256": find_matrix(self.name, order).digest} for order in self.k]
        return {
            "n": self.n,
            "block": self.block,
            "matrix": self.name,
            "factors": factors,
            "signs": None if self.signs is None else self.signs.tolist(),
            "signs_after": None if self.signs_after is None else self.signs_after.tolist(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Rotation:
        """The rotation of `to_dict`. Raises `UsageError` for anything else, and if this version has another matrix."""
        try:
            name, factors = data["matrix"], list(data["factors"])
            options = {key: data[key] for key in ("n", "block", "signs", "signs_after")}
            orders = tuple(each["order"] for each in factors)
            if name == _GIVEN:
                matrices = [torch.tensor(each["entries"], dtype=_STORED[each["dtype"]]) for each in factors]
                return cls(matrix=matrices, k=orders, **options)
            stored = [each["sha256"] for each in factors]
            made = cls(matrix=name, k=orders, **options)
        except UsageError:
            raise
        except KeyError as error:
            raise UsageError(f"data has no valid {error}; pass what to_dict returned") from None
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise UsageError(f"data is no rotation ({error}); pass what to_dict returned") from None
        if made.k != orders:
            raise UsageError(f"data has factors of the orders {orders}, not {made.k}; pass what to_dict returned")
        for order, digest in zip(made.k, stored, strict=True):
            known = find_matrix(name, order).digest
            if digest != known:
                raise UsageError(
                    f"the matrix of order {order} of {name} has the digest {known[:8]}, but {digest!r:.10} was stored; "
                    "use the version of hadagen that stored it"
                )
        return made

    @classmethod
    def from_compressed_tensors(cls, weight: torch.Tensor, n: int | None = None) -> Rotation:
        """The rotation whose dense matrix a checkpoint of compressed-tensors carries: `random-hadamard` or `hadamard`.

        weight: [size, size], diag(signs) · (A ⊗ H)ᵀ times any positive number; float16, bfloat16, float32, float64 or
            int8.
        n: what the rotation takes, in blocks of `size`. None is size.

        Raises TypeError if weight is no tensor, and `UsageError` if it is no such matrix.
        """
        check_is_tensor(weight, "weight")
        strange = weight.is_nested or weight.layout is not torch.strided or not has_values(weight)
        if strange or weight.dtype not in (*DTYPES, torch.int8):
            plain = str(weight.dtype).removeprefix("torch.")
            raise UsageError(f"weight is a {plain} tensor without values of ±c; pass the tensor of the checkpoint")
        if weight.dim() != 2 or weight.shape[0] != weight.shape[1] or not len(weight):
            raise UsageError(f"weight has the shape {tuple(weight.shape)}; it must be square")
        size = len(weight)
        weight = weight.detach().cpu()
        magnitudes = weight.abs()
        least, most = float(magnitudes.min()), float(magnitudes.max())
        if not 0.99 * most <= least <= most < math.inf or not least:
            raise UsageError(
                f"weight has magnitudes from {least:.3g} to {most:.3g}; those of a Hadamard matrix are all the same"
            )
        for k in _orders_of_compressed_tensors(size):
            base = cls(size, "compressed-tensors", k=k).to("cpu")
            # Row 0 of A ⊗ H is that of A, each entry repeated: H begins with ones.
            matrices = unpack_matrices(base._matrices, base._orders)
            first = matrices[0][0] if matrices else torch.ones(1, dtype=torch.int8, device="cpu")
            signs = weight[:, 0].sign().to(torch.int8) * first.repeat_interleave(size // len(first))
            if all(_agrees(base, signs, weight, row) for row in range(0, size, _ROWS_AT_A_TIME)):
                return cls(size if n is None else n, "compressed-tensors", k=k, signs=signs, block=size)
        raise UsageError(
            f"weight is not diag(signs) times a Hadamard matrix of compressed-tensors of order {size}; pass the tensor "
            "of a transform of type random-hadamard or hadamard, not transposed"
        )

    # ---- inside ------------------------------------------------------------------------------------------------------
    def extra_repr(self) -> str:
        rest = self.block // math.prod(self.k)
        factors = f" = {' · '.join(map(str, (*self.k, rest)))}" if self.k else ""
        signs = [name for name in ("signs", "signs_after") if getattr(self, name) is not None]
        return ", ".join([f"n={self.n}", f"block={self.block}{factors}", f"matrix={self.name!r}", *signs])

    def _run(
        self,
        x: Any,
        inplace: bool,
        out: torch.Tensor | None,
        numerics: str,
        batch_invariant: bool | None,
        transposed: bool,
    ) -> torch.Tensor:
        if batch_invariant is None:
            batch_invariant = BATCH_INVARIANT
        check_is_flag(batch_invariant, "batch_invariant")
        asked = transposed, float(self._scale), numerics, bool(batch_invariant)
        if out is None and has_only_memory(x) and not needs_derivative(x) and x.shape[-1:] == (self.n,):
            buffers = self._buffers  # as attributes they take PyTorch several times as long
            operands = self._options(buffers["_matrices"], buffers["_before"], buffers["_after"], *asked)
            y = known(x, operands, inplace)
            if y is not None:
                return y
        options = self._options(self._matrices, self._before, self._after, *asked)
        if not stands_for_a_tensor(x):
            check_is_tensor(x, "x")
            check_destination(x, inplace, out)
            compiling = torch.compiler.is_dynamo_compiling()  # where the operator's own checks do more for the message
            if not compiling:
                check_tensor(x)
            if x.dim() and x.shape[-1] != self.n:
                raise TensorError(f"the last dimension of x is {x.shape[-1]}; this rotation takes {self.n}")
            if not compiling:
                check(x, options)
                if out is not None:
                    check_like(x, out)
        return cast(torch.Tensor, ROTATE.dispatch(x, options, inplace, out))

    def _options(
        self,
        matrices: torch.Tensor | None,
        before: torch.Tensor | None,
        after: torch.Tensor | None,
        *asked: Any,
    ) -> Operands:
        return Operands(matrices, self._orders, before, after, self.block, self._swapped, *asked)

    @property
    def identity(self) -> tuple[Any, ...]:
        """The same for rotations that multiply by the same operands in memory."""
        tensors = (self._buffers[name] for name in ("_matrices", "_before", "_after"))
        addresses = (None if each is None else (each.data_ptr(), each.dtype, each.device) for each in tensors)
        return self.n, self.block, self._swapped, float(self._scale), *self._orders, *addresses

    def operands_for(self, x: torch.Tensor, scale: float) -> Operands:
        """What an operator takes to rotate x and multiply by a scale. Raises what a call with x raises."""
        asked = False, float(self._scale) * scale, "accurate", BATCH_INVARIANT
        options = self._options(self._matrices, self._before, self._after, *asked)
        if x.shape[-1] != self.n:
            raise TensorError(f"the last dimension of x is {x.shape[-1]}; this rotation takes {self.n}")
        if not torch.compiler.is_dynamo_compiling():  # where the operator's own checks do more for the message
            check(x, options)
        return options

    def _check_part(self, part: Any, name: str) -> None:
        """Raises TypeError and `TensorError`, with the name, for a tensor of a layer that cannot be rotated."""
        check_is_tensor(part, name)
        if part.is_nested or part.layout is not torch.strided or part.dtype not in DTYPES:
            raise TensorError(f"{name} is a {kind_of(part)} tensor; pass a dense one of {', '.join(map(str, DTYPES))}")
        needed = any(each is not None for each in (self._matrices, self._before, self._after))
        if needed and part.device != self._device:
            raise TensorError(
                f"{name} is on {part.device} but the rotation on {self._device}; move one of them with .to"
            )

    def _check_inverse(self) -> None:
        if self._no_inverse is not None:
            raise UsageError(self._no_inverse)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Rotation:
        # What moves or casts the buffers only says where they go: casts would round matrices, and `to_empty` would
        # leave any values.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._to_device(self._device)
        return self

    @property
    def _device(self) -> torch.device:
        return self._place.device

    def _to_device(self, device: torch.device) -> None:
        for name, operand in self._operands.items():
            if operand is not None:
                wide = operand.dtype == torch.float64 and device.type == "mps"  # which has no float64
                self._buffers[name] = (operand.float() if wide else operand).to(device)


_STORED = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.int8, *DTYPES)}


def _signed(matrix: torch.Tensor, before: torch.Tensor | None, after: torch.Tensor | None) -> torch.Tensor:
    """The matrix A with D_out · A · D_in, where signs are given. If there is no H, signs then cost nothing."""
    matrix = matrix if after is None else after[:, None] * matrix
    return matrix if before is None else matrix * before


def _regular_diagonal(n: int) -> torch.Tensor:
    """⊗ diag(1, 1, 1, −1) for n = 4^k."""
    diagonal = torch.ones(1, dtype=torch.int8, device="cpu")
    digit = torch.tensor([1, 1, 1, -1], dtype=torch.int8, device="cpu")
    while len(diagonal) < n:
        diagonal = torch.kron(diagonal, digit)
    return diagonal


def _orders_of_compressed_tensors(size: int) -> list[tuple[int, ...]]:
    """The orders that its matrices of this size may have, those of its rule first."""
    found: list[tuple[int, ...]] = []
    for k in (None, (), *((order,) for order in range(256, 0, -4))):
        try:
            orders = find_orders("compressed-tensors", size, k)
        except UsageError:
            continue
        if orders not in found:
            found.append(orders)
    return found


def _agrees(base: Rotation, signs: torch.Tensor, weight: torch.Tensor, first: int) -> bool:
    """Whether some rows of the weight, from `first` on, have the signs of diag(signs) · base."""
    rows = slice(first, first + _ROWS_AT_A_TIME)
    identity = torch.zeros(len(signs[rows]), base.n, device="cpu")
    identity[:, first:].fill_diagonal_(1.0)
    return torch.equal((base(identity) * signs[rows, None]) > 0, weight[rows] > 0)
