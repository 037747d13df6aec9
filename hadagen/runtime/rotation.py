"""`Rotation`: an orthonormal transform of rows of n = K·2^m elements, as a module."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import _disable_current_modes

from hadagen.errors import HadagenError, TensorError, UsageError, choice, shortened, shown
from hadagen.problem.choices import NumericsName
from hadagen.problem.matrices import find_matrix, find_orders
from hadagen.problem.problem import Transform, transform_for
from hadagen.problem.prologues import Prologue
from hadagen.runtime.arguments import as_int, explained, is_one_of
from hadagen.runtime.call import slow
from hadagen.runtime.call.calls import (
    ALIGNMENT,
    Range,
    again,
    check_apart,
    dispatch_modes,
    has_only_memory,
    in_functorch,
    is_dynamo_compiling,
    is_plain,
    number_of,
    result_like,
)
from hadagen.runtime.call.named import (
    REGULAR,
    folds,
    matrix_of,
    named_matrix,
    named_on,
    regular_diagonal,
    scale_of,
    stored_matrix,
    stored_on,
)
from hadagen.runtime.call.prologue_operator import rotated_after, text_of, traced_after
from hadagen.runtime.call.rotate_operator import ROTATE
from hadagen.runtime.call.sharded import check_new, is_sharded, joined, local_of, shards_of
from hadagen.runtime.checks import (
    DTYPES,
    check_destination,
    check_dtype,
    check_is_flag,
    check_is_tensor,
    check_like,
    check_same_device,
    check_tensor,
    has_values,
    kind_of,
    plain,
    stands_for_a_tensor,
)
from hadagen.runtime.choose.entries import BATCH_INVARIANT
from hadagen.runtime.compressed_tensors import rotation_of
from hadagen.runtime.operands import sealed
from hadagen.runtime.operands.given import (
    as_count,
    as_matrices,
    as_orders,
    as_signs,
    as_unknown,
    check_orders,
    is_unknown,
    listed,
    mean_square_of_rows,
    pack_given,
    size_of_given,
    unpack_given,
    why_not_orthogonal,
)
from hadagen.runtime.operands.rotate_arguments import (
    TRAILER,
    RotateArguments,
    check,
    combined,
    pack_signs,
    unpack_signs,
)
from hadagen.runtime.operands.sealed_module import SealedModule, Watched

_GIVEN, _MOVE = "given", "move one of them with .to"
# The largest block with the regular matrix, whose diagonal is stored.
_MAX_REGULAR = 1 << 26
# The sealed buffers, and what they hold: the arguments of the same names.
_MATRICES, _SIGNS, _AFTER = "packed_matrices", "packed_signs", "packed_signs_after"


class Rotation(SealedModule):
    """r(x) = x · M with M = D_in · (A1 ⊗ A2 ⊗ … ⊗ H)ᵀ · D_out / c, over each block of the last dimension of x.

    r(x): x · M. `forward` has the arguments.
    r.inverse(x): x · Mᵀ, which undoes the rotation.
    r.fold_into(weight, "input"), r.fold_into(weight, "output", bias): the weight of a linear layer that is rotated.
    r.matrix(): M.
    r.shard(rank, world): the rotation of a rank's part of the last dimension.
    r.to_dict(), Rotation.from_dict(data): the rotation as data for JSON, and back.
    Rotation.from_compressed_tensors(weight): the rotation of a matrix in a checkpoint.

    n: the last dimension of x, at least 1.
    matrix: the name of a set of Hadamard matrices (docs/rotations.md has the names and their rules), a K×K tensor of
        real numbers with K up to 428, or a list of such tensors. A1 belongs to the slowest index. Tensors are copied.
    k: the order K of the named matrix, or several orders. None applies the rule of the name.
    signs, signs_after: the diagonals of D_in and D_out: a tensor or sequence of ±1, as many as a block has elements.
        None means 1 everywhere.
    block: the block size, which divides n. Each block is rotated separately, with the same signs. None is n.

    H is Sylvester's matrix of the order block / (K1 · K2 · …), a power of two. c makes M orthonormal: it is √block for
    Hadamard matrices, times ‖A‖ / √K for each other A, with the Frobenius norm. If a given matrix is not orthogonal, M
    is not orthogonal, and there is no inverse.

    Attributes: n, block, name (of the matrices; "given" for tensors), k (the orders), signs, signs_after (int8 on the
    CPU, or None).

    The module has no parameters. Signs and given matrices are persistent buffers, `packed_signs`, `packed_signs_after`
    and `packed_matrices`, of uint8, so that a change of type, such as `.half()`, does not change them. Each buffer has
    a checksum and the n, block, name and orders of its rotation. A rotation without signs and given matrices adds
    nothing to a state_dict. `to_dict` and `from_dict` store a rotation without the module. `.to` moves the module to
    the device of x.

    Signs and matrices may be tensors without values, such as on the meta device, if a state_dict is loaded later.

    Raises `UsageError` for impossible values, and TypeError for an argument of a wrong type.
    """

    _BUFFERS: ClassVar[dict[str, str]] = {_MATRICES: "matrix", _SIGNS: "signs", _AFTER: "signs_after"}
    _NOT_STORED: ClassVar[tuple[str, ...]] = ("_made", "_held")
    _made: _Made | None  # the operands that the last call had
    _held: torch.Tensor | None  # that of the name, on the module's device
    packed_matrices: torch.Tensor | None
    packed_signs: torch.Tensor | None
    packed_signs_after: torch.Tensor | None

    @explained(TypeError)
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
        """Makes the buffers on PyTorch's default device."""
        super().__init__()
        self.n = as_count(n, "n")
        self.block = self.n if block is None else as_count(block, "block")
        if self.n % self.block:
            raise UsageError(f"block = {self.block} does not divide n = {self.n}; choose one that does")
        orders = None if k is None else as_orders(k)
        with _disable_current_modes(), torch.inference_mode(False):  # whose tensors other modes do not take
            self._make(matrix, orders, signs, signs_after)
        self._register()

    def _make(self, matrix: Any, orders: tuple[int, ...] | None, signs: Any, signs_after: Any) -> None:
        """Set all attributes that follow from the arguments, on the CPU."""
        self._given: list[torch.Tensor] = []  # the matrices, on the CPU, of the types in which they were given
        self._no_inverse: str | None = None  # why there is none
        if isinstance(matrix, str):
            if orders is not None:
                orders = tuple(order for order in orders if order != 1)
            self.name, self.k = matrix, find_orders(matrix, self.block, orders)
            self._set_matrices([matrix_of(matrix, order) for order in self.k], [float(order) for order in self.k])
        else:
            given = listed(matrix)
            unknown = all(map(is_unknown, given))
            copies = as_unknown(given) if unknown else as_matrices(given)[1]
            self.name, self.k = _GIVEN, tuple(len(each) for each in copies)
            check_orders(self.k, orders, self.block)
            self._sizes[_MATRICES] = size_of_given(copies) + TRAILER
            self._set_given(copies)
            if not unknown:
                self._values[_MATRICES] = sealed.seal(pack_given(copies), self._describe(_MATRICES))
        self._swapped = self.name == REGULAR
        if self._swapped and self.block > _MAX_REGULAR:
            raise UsageError(f"a block of regular has {self.block} elements; choose blocks of at most {_MAX_REGULAR}")
        for name, argument, values in ((_SIGNS, "signs", signs), (_AFTER, "signs_after", signs_after)):
            if values is None:
                continue
            self._sizes[name] = -(-self.block // 8) + TRAILER
            numbers = as_signs(values, argument, self.block)
            if numbers is not None:
                if self._swapped:  # kernels take the product with the diagonal of the matrix
                    numbers = numbers * regular_diagonal(self.block)
                self._values[name] = sealed.seal(pack_signs(numbers), self._describe(name))
        self._signed = self._sizes[_SIGNS] is not None or self._sizes[_AFTER] is not None

    def _set_given(self, given: list[torch.Tensor]) -> None:
        """Take given matrices, as `as_matrices` copies them; without values, their orders alone."""
        if given[0].is_meta:
            self._set_matrices(given, [float(len(each)) for each in given])
            return
        matrices, self._given = as_matrices(given)
        self._no_inverse = next(filter(None, map(why_not_orthogonal, matrices, self._given)), None)
        self._set_matrices(matrices, list(map(mean_square_of_rows, matrices)))

    def _set_matrices(self, matrices: list[torch.Tensor], squares: list[float]) -> None:
        self._scale = scale_of(squares, self.k, self.block)
        self._real = any(each.dtype != torch.int8 for each in matrices)
        matrices = combined(matrices, self.block)
        self._orders = tuple(len(each) for each in matrices) or (1,)
        self._all_of_h = folds(matrices, self.block)  # whether signs are a part of the matrix

    def forward(
        self,
        x: torch.Tensor,
        *,
        inplace: bool = False,
        out: torch.Tensor | None = None,
        numerics: NumericsName = "accurate",
        batch_invariant: bool | None = None,
        before: Prologue | None = None,
    ) -> torch.Tensor:
        """x · M over the last dimension, which is n.

        x: [..., n] of type float16, bfloat16, float32 or float64, with any strides, on the device of the module. The
            number of rows may be 0. With a product in before=, [..., 2·n]. The result of a DTensor is a DTensor, as
            docs/rotations.md says.
        inplace: overwrite x and return it.
        out: the tensor to write and return, of the result's shape, dtype and device.
        numerics, batch_invariant: as for `hadagen.hadamard_transform`.
        before: a value of `hadagen.prologues`, such as SiluMul(), which runs before the rotation in the same kernel.

        Returns [..., n] of x's dtype and device, also under autocast. It is contiguous, unless it is x or out. It is
        differentiable in x, any number of times.

        Raises TypeError if x or out is no tensor, or before no prologue; `UsageError` for bad numerics, and for
        inplace=True where x is wider than the result; `TensorError` for a tensor that cannot be rotated or written.
        """
        if before is None:
            return self._run(x, inplace, out, numerics, batch_invariant, False)
        return self._run_after(x, before, inplace, out, numerics, batch_invariant)

    def inverse(
        self,
        x: torch.Tensor,
        *,
        inplace: bool = False,
        out: torch.Tensor | None = None,
        numerics: NumericsName = "accurate",
        batch_invariant: bool | None = None,
    ) -> torch.Tensor:
        """x · Mᵀ, which undoes the rotation. Arguments, result and errors are as for `forward`.

        Raises `UsageError` if a given matrix is not orthogonal.
        """
        self._check_inverse()
        return self._run(x, inplace, out, numerics, batch_invariant, True)

    def matrix(self, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """M, with r(x) = x · M: [n, n], on the module's device.

        dtype: float16, bfloat16, float32 or float64. Raises `UsageError` for another.
        """
        check_dtype(dtype)
        try:
            # Of the type that is asked for, there may be no kernel, and a matrix is made once.
            with contextlib.nullcontext() if is_dynamo_compiling() else slow.quiet():
                return self(torch.eye(self.n, dtype=dtype, device=self._device))  # type: ignore[no-any-return]
        except RuntimeError as error:
            if isinstance(error, HadagenError):
                raise
            raise UsageError(
                f"the matrix of n = {self.n} has {self.n}² numbers of {plain(dtype)}, for which {self._device} has no "
                f"memory ({shortened(str(error))}); rotate rows instead"
            ) from None

    def fold_into(
        self, weight: torch.Tensor, side: str, bias: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The weight of a linear layer, y = x · weightᵀ + bias, whose input or output is rotated.

        side: "input": returns weight · M for a weight [..., out, n]. The new layer maps r(x) to y.
            "output": returns Mᵀ · weight for a weight [..., n, in], and bias · M for a bias [..., n]. The new layer
            maps x to r(y).
        bias: only with "output", because a rotation of the input does not change the bias.

        Returns new tensors of the same types: the weight, or the weight and the bias if there is one.

        Raises TypeError if weight or bias is no tensor; `UsageError` for another side, and for "input" if a given
        matrix is not orthogonal; `TensorError` for a weight or bias that does not fit.
        """
        self._check_part(weight, "weight")
        if not is_one_of(side, ("input", "output")):
            raise UsageError(f"side {shown(side)} is not known; {choice(side, ('input', 'output'))}")
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
            check_same_device("bias", bias.device, "weight", weight.device, _MOVE)
            if not bias.dim() or bias.shape[-1] != self.n:
                raise TensorError(f"bias has the shape {tuple(bias.shape)}; its last dimension must be {self.n}")
        folded = self(weight.mT).mT.contiguous()
        return folded if bias is None else (folded, self(bias))

    def shard(self, rank: int, world: int) -> Rotation:
        """The rotation of the part of rank `rank` of `world`, if the last dimension is split evenly over the ranks.

        Raises `UsageError` unless the block divides n / world.
        """
        world, rank = as_count(world, "world"), as_int(rank)
        if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < world:
            raise UsageError(f"rank = {shown(rank)} is not possible; it must be from 0 to {world - 1}")
        mine, left = divmod(self.n, world)
        if left or mine % self.block:
            raise UsageError(
                f"n / world = {self.n} / {world} is no multiple of block = {self.block}, so a rank lacks elements that "
                f"it needs; make the rotation with a block that divides {self.n} / {world}"
            )
        if self.name == _GIVEN:
            self._known(_MATRICES)
        matrix, signs = self._given or self.name, {"signs": self.signs, "signs_after": self.signs_after}
        return Rotation(mine, matrix, k=self.k, block=self.block, **signs).to(self._device)

    # ---- storing -----------------------------------------------------------------------------------------------------
    def to_dict(self) -> dict[str, Any]:
        """The rotation as numbers, strings, lists and dictionaries, which JSON can hold.

        Keys: n, block, matrix (the name), signs and signs_after (lists of ±1, or None), and factors. factors has a
        dictionary for each matrix except Sylvester's: order, and for a named matrix sha256 (the digest of
        `hadagen.problem.matrices.Matrix`), else dtype and entries.
        """
        if self.name == _GIVEN:
            self._known(_MATRICES)
            factors: list[dict[str, Any]] = [
                {"order": len(each), "dtype": plain(each.dtype), "entries": each.tolist()} for each in self._given
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
        """The rotation that `to_dict` stored. Raises `UsageError` for other data, and if this version has another
        matrix."""
        if not isinstance(data, Mapping):
            raise UsageError(f"data is a {type(data).__name__}; pass what to_dict returned")
        try:
            name, factors = data["matrix"], [dict(each) for each in data["factors"]]
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
            raise UsageError(f"data has no valid {shortened(str(error))}; pass what to_dict returned") from None
        except (TypeError, ValueError, OverflowError, RuntimeError, IndexError, AttributeError) as error:
            raise UsageError(f"data is no rotation ({shortened(str(error))}); pass what to_dict returned") from None
        if made.k != orders:
            raise UsageError(
                f"data has factors of the orders {shown(orders)}, not {made.k}; pass what to_dict returned"
            )
        for order, digest in zip(made.k, stored, strict=True):
            known = find_matrix(name, order).digest
            if digest != known:
                raise UsageError(
                    f"the matrix of order {order} of {name} has the digest {known[:8]}, but {shown(digest, 10)} was "
                    "stored; use the version of hadagen that stored it"
                )
        return made

    @classmethod
    def from_compressed_tensors(
        cls, weight: torch.Tensor, n: int | None = None, *, perm: torch.Tensor | None = None
    ) -> Rotation:
        """The rotation of a dense matrix from a checkpoint of compressed-tensors: `random-hadamard` or `hadamard`.

        weight: [size, size], diag(signs) · (A ⊗ H)ᵀ times any positive number; float16, bfloat16, float32, float64 or
            int8.
        n: the n of the rotation, whose blocks have `size` elements. None is size.
        perm: the permutation in a checkpoint of a transform with `randomize`: [size] integers. The rotation then has
            the given matrix weight[perm][:, perm], because a permuted matrix has no structure; size is at most 428.

        Raises TypeError if weight or perm is no tensor, and `UsageError` if weight is no such matrix or perm no
        permutation.
        """
        return cast(Rotation, rotation_of(cls, weight, n, perm))

    @property
    def transform(self) -> Transform | None:
        """The transform that a kernel computes for each block; None if PyTorch computes the rotation."""
        try:
            return self._transform()
        except UsageError:  # too long, or of too large a matrix
            return None

    def _transform(self) -> Transform:
        """The same. Raises `UsageError`, with the reason, if PyTorch computes the rotation."""
        signed = self._signed and not self._all_of_h
        return transform_for(self.block, self._orders, signed=signed, swapped=self._swapped, real=self._real)

    @property
    def signs(self) -> torch.Tensor | None:
        """The diagonal of D_in: int8 [block] on the CPU, or None. Raises `TensorError` if it is not known."""
        return self._signs_in(_SIGNS)

    @property
    def signs_after(self) -> torch.Tensor | None:
        """The diagonal of D_out: int8 [block] on the CPU, or None. Raises `TensorError` if it is not known."""
        return self._signs_in(_AFTER)

    def extra_repr(self) -> str:
        """The arguments that `repr` shows."""
        rest = self.block // math.prod(self.k)
        factors = f" = {' · '.join(map(str, (*self.k, rest)))}" if self.k else ""
        signs = [self._BUFFERS[name] for name in (_SIGNS, _AFTER) if self._sizes[name] is not None]
        return ", ".join([f"n={self.n}", f"block={self.block}{factors}", f"matrix={self.name!r}", *signs])

    # ---- inside ------------------------------------------------------------------------------------------------------
    def _signs_in(self, name: str) -> torch.Tensor | None:
        if self._sizes[name] is None:
            return None
        signs = unpack_signs(self._known(name), self.block)
        return signs * regular_diagonal(self.block) if self._swapped else signs

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
        # As in `hadamard_transform`: a repeated call goes straight to its kernel if the dispatcher has nothing to do.
        if is_plain(x) and (number := number_for(self, x)) is not None:
            kept = memory_of(self) if inplace is not False or out is not None else ()
            y = again(x, (number, transposed, numerics, batch_invariant), inplace, out, kept)
            if y is not None:
                return cast(torch.Tensor, y)
        check_is_flag(batch_invariant, "batch_invariant")
        is_tensor = not stands_for_a_tensor(x)
        checks = is_tensor and not is_dynamo_compiling()  # where the operator's own checks do more for the message
        if is_tensor:
            check_is_tensor(x, "x")
            check_destination(x, inplace, out)
            if checks:
                check_tensor(x)
            if x.dim() and x.shape[-1] != self.n:
                raise TensorError(f"the last dimension of x is {x.shape[-1]}; this rotation takes {self.n}")
            if is_sharded(x):
                check_new(inplace, out)
                shards = shards_of(x, self.block)
                options = self._options(shards.local, transposed, 1.0, numerics, bool(batch_invariant))
                return joined(shards, ROTATE.dispatch(shards.local, options, False, None))
        options = self._options(x, transposed, 1.0, numerics, bool(batch_invariant))
        if checks:
            check(x, options)
            if out is not None:
                check_like(x, out)
            if inplace or out is not None:
                self._check_apart(x, out)
        return cast(torch.Tensor, ROTATE.dispatch(x, options, inplace, out))

    def _run_after(
        self,
        x: Any,
        before: Prologue,
        inplace: bool,
        out: torch.Tensor | None,
        numerics: str,
        batch_invariant: bool | None,
    ) -> torch.Tensor:
        text = text_of(before)
        if batch_invariant is None:
            batch_invariant = BATCH_INVARIANT
        what = None
        if is_plain(x) and (number := number_for(self, x)) is not None:
            what = number, text, numerics, batch_invariant
            y = again(x, what, inplace, out, memory_of(self) if out is not None else ())
            if y is not None:
                return cast(torch.Tensor, y)
        check_is_flag(batch_invariant, "batch_invariant")
        if stands_for_a_tensor(x) and not inplace and out is None:
            return cast(
                torch.Tensor, traced_after(x, before, self._options(x, False, 1.0, numerics, bool(batch_invariant)))
            )
        check_is_tensor(x, "x")
        check_destination(x, inplace, out)
        if not is_dynamo_compiling():
            check_tensor(x)
        asked = 1.0, numerics, bool(batch_invariant), before
        if is_sharded(x):
            check_new(inplace, out)
            shards = shards_of(x, self.block, before)
            options = operands_of(self, result_like(shards.local, before.width), *asked, x.shape[-1] / before.width)
            return joined(shards, rotated_after(shards.local, before, options))
        options = operands_of(self, result_like(x, before.width), *asked)
        kept = buffers_of(self) if (inplace or out is not None) and not is_dynamo_compiling() else ()
        return rotated_after(x, before, options, inplace, out, what, kept)

    def _check_apart(self, x: torch.Tensor, out: torch.Tensor | None) -> None:
        """Raises `TensorError` if the result would be written over the module's own buffers."""
        name, target = ("x", x) if out is None else ("out", out)
        if has_only_memory(target):
            check_apart(target, name, buffers_of(self))

    # ---- operands ----------------------------------------------------------------------------------------------------
    def _options(
        self, x: torch.Tensor, transposed: bool, scale: float, numerics: str, batch_invariant: bool
    ) -> RotateArguments:
        """The arguments of operators. Raises `TensorError` if the buffers do not hold the values of such a rotation."""
        if is_dynamo_compiling() or not self._may_look(x):
            tensors = self._unchecked(x)
        else:
            device = self._device if stands_for_a_tensor(x) else x.device
            made = self._made
            if made is None or not made.is_current(self._buffers, _index(device)):
                made = self._look(device)
            tensors = made.tensors
        return self._operands(tensors, transposed, scale, numerics, batch_invariant)

    def _operands(
        self, tensors: tuple[Any, Any, Any], transposed: bool, scale: float, numerics: str, batch_invariant: bool
    ) -> RotateArguments:
        matrices, signs_in, signs_out = tensors
        asked = transposed, float(self._scale) * scale, numerics, batch_invariant
        return RotateArguments(matrices, self._orders, signs_in, signs_out, self.block, self._swapped, *asked)

    def _may_look(self, x: Any) -> bool:
        """Whether buffers can be read and operands made: not in traces, for fake tensors, or while a graph is
        captured."""
        if stands_for_a_tensor(x):  # whose trace sees what is done with x alone
            return not dispatch_modes() and self._device.type != "meta"
        is_real = isinstance(x, torch.Tensor) and has_values(x)
        if not is_real or dispatch_modes() or in_functorch() or torch._C._is_tracing():
            return False
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            made = self._made
            return made is not None and made.is_current(self._buffers, x.get_device())
        return True

    def _unchecked(self, x: Any) -> tuple[Any, Any, Any]:
        """The operands where buffers cannot be read: the buffers themselves, which operators check when they run."""
        buffers = local_of(self.packed_matrices), local_of(self.packed_signs), local_of(self.packed_signs_after)
        return self._joined(buffers, stored_matrix, lambda: self._named(x))

    def _joined(
        self, buffers: tuple[Any, Any, Any], stored: Callable[..., Any], named: Callable[[], Any]
    ) -> tuple[Any, Any, Any]:
        """The matrices and signs as operators take them, made from the buffers.

        stored: `stored_on` or its operator. named: returns the operand of the name.
        """
        matrices, *signs = buffers
        if matrices is not None or (self._all_of_h and self._signed):
            folded, left = (signs, (None, None)) if self._all_of_h else ((None, None), signs)
            return stored(matrices, *folded, self.name, list(self.k), self.block, self._scale), *left
        signs_in, signs_out = signs
        if self.k:
            return named(), signs_in, signs_out
        if self._swapped and (signs_in is None or signs_out is None):
            diagonal = named()
            signs_in, signs_out = (diagonal if each is None else each for each in signs)
        return None, signs_in, signs_out

    def _named(self, x: Any) -> torch.Tensor:
        """The operand of the name: on the module's device the operand that the module holds, else the result of an
        operator."""
        held = self._held
        if (
            held is not None
            and held.device == x.device
            and not isinstance(x, FunctionalTensor)  # which AOTAutograd traces
            and (is_dynamo_compiling() or not isinstance(x, FakeTensor) or x.fake_mode.allow_non_fake_inputs)
        ):
            return held
        return named_matrix(self.name, list(self.k) or [1], self.block, str(x.device))

    def _look(self, device: torch.device) -> _Made:
        """The operands for tensors on a device, after a look at the buffers, which are repaired where they are empty.

        Raises `TensorError` for other buffers, and where values are not known.
        """
        read = self._checked(_MATRICES, device), self._checked(_SIGNS, device), self._checked(_AFTER, device)
        watched = [(name, each, sealed.version_of(each), each.data_ptr()) for name, each in self._present]
        named = functools.partial(named_on, self.name, self.k or (1,), self.block, str(device))
        matrices, *signs = self._joined(read, stored_on, named)
        if device.type == "cuda":  # kernels need it
            signs = [each.clone() if each is not None and each.data_ptr() % ALIGNMENT else each for each in signs]
        tensors = matrices, *signs
        of = self._operands(tensors, False, 1.0, "accurate", False)
        self._made = _Made(_index(device), watched, tensors, number_of(of, self.n))
        return self._made

    def _take(self, name: str, values: torch.Tensor) -> None:
        if name == _MATRICES:
            self._set_given(unpack_given(values, self.k))

    def _describe(self, name: str) -> str:
        return f"{self._BUFFERS[name]} of Rotation(n={self.n}, block={self.block}, {self.name!r}, k={list(self.k)})"

    def _fill(self) -> None:
        """Make operands for the module's device, so that the next call, captured or compiled, has them."""
        self._made = self._held = None
        if is_dynamo_compiling() or dispatch_modes() or self._device.type == "meta":
            return
        named = self.k if self.name != _GIVEN else ()
        if named or self._swapped:
            self._held = named_on(self.name, self.k or (1,), self.block, str(self._device))
        with contextlib.suppress(TensorError):  # which the next call raises
            self._look(self._device)

    def _check_part(self, part: Any, name: str) -> None:
        """Raises TypeError and `TensorError`, with the name, for a tensor of a layer that cannot be rotated."""
        check_is_tensor(part, name)
        if part.is_nested or part.layout is not torch.strided or part.dtype not in DTYPES:
            raise TensorError(
                f"{name} is a {kind_of(part)} tensor; pass a dense tensor of {', '.join(map(str, DTYPES))}"
            )
        if any(not each.is_meta for _, each in self._present):
            check_same_device(name, part.device, "the rotation", self._device, _MOVE)

    def _check_inverse(self) -> None:
        if self.name == _GIVEN and not is_dynamo_compiling():
            self._refresh(_MATRICES)
        if self._no_inverse is not None:
            raise UsageError(self._no_inverse)


# ---- for the functions that take a Rotation --------------------------------------------------------------------------
def operands_of(
    rotation: Rotation,
    x: torch.Tensor,
    scale: float,
    numerics: NumericsName = "accurate",
    batch_invariant: bool = BATCH_INVARIANT,
    before: Prologue | None = None,
    columns: float | None = None,
) -> RotateArguments:
    """The arguments of an operator that rotates x and multiplies by a scale. Raises what a call with x raises.

    x: a tensor like the rows to rotate, or like parts of the rows, which have so many columns. before: the prologue
    that makes the rows."""
    columns = x.shape[-1] if columns is None else columns
    if columns != rotation.n:
        width = before.width if before is not None else 1
        takes = f"{width} · {rotation.n} with before= of two parts" if width > 1 else f"{rotation.n}"
        raise TensorError(f"the last dimension of x is {int(width * columns)}; this rotation takes {takes}")
    options = rotation._options(x, False, scale, numerics, batch_invariant)
    if not is_dynamo_compiling():  # where the operator's own checks do more for the message
        check(x, options)
    return options


def number_for(rotation: Rotation, x: torch.Tensor) -> int | None:
    """The number that stands for the operands of calls with tensors like a plain x (`calls.number_of`); None if x does
    not fit, or the buffers have to be read first."""
    made = rotation._made
    if made is None or made.index != x.get_device() or (made.watched and not made.is_whole(rotation._buffers)):
        return None
    return made.number


def memory_of(rotation: Rotation) -> Sequence[Range]:
    """The memory of the buffers, which calls must not write."""
    return () if rotation._made is None else rotation._made.places


def buffers_of(rotation: Rotation) -> list[tuple[str, torch.Tensor]]:
    """The buffers that can be read, with their names in messages."""
    return [(f"{name} of the rotation", each) for name, each in rotation._present if sealed.is_readable(each)]


def _index(device: torch.device) -> int:
    """As `Tensor.get_device` gives it."""
    return -1 if device.index is None else device.index


class _Made(Watched):
    """The operands of a rotation for one device, and the buffers from which they were made."""

    def __init__(
        self,
        index: int,
        watched: list[tuple[str, torch.Tensor, int, int]],
        tensors: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
        number: int,
    ) -> None:
        self.index, self.watched, self.tensors, self.number = index, watched, tensors, number
        self.places = [(address, address + tensor.nbytes) for _, tensor, _, address in watched]

    def is_current(self, buffers: Mapping[str, torch.Tensor | None], index: int) -> bool:
        """Whether the buffers are the same, and x is on the device of this index."""
        return index == self.index and self.is_whole(buffers)


_STORED = {plain(dtype): dtype for dtype in (torch.int8, *DTYPES)}
