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
from hadagen.problem.formats import Format
from hadagen.problem.matrices import find_matrix, find_orders
from hadagen.problem.problem import Transform, transform_for
from hadagen.problem.prologues import Prologue, text_of_value
from hadagen.runtime.arguments import as_int, explained, is_flag, is_one_of
from hadagen.runtime.call import slow
from hadagen.runtime.call.entry import rotate
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
from hadagen.runtime.call.rules import Linear
from hadagen.runtime.call.runs import (
    ALIGNMENT,
    again,
    check_apart,
    dispatch_modes,
    has_only_memory,
    in_functorch,
    is_dynamo_compiling,
    is_plain,
    remember_asked,
)
from hadagen.runtime.call.sharded import local_of
from hadagen.runtime.checks import (
    DTYPES,
    check_alike,
    check_dtype,
    check_is_flag,
    check_is_tensor,
    check_numerics,
    check_same_device,
    has_values,
    kind_of,
    plain,
    stands_for_a_tensor,
)
from hadagen.runtime.choose.entries import BATCH_INVARIANT
from hadagen.runtime.compressed_tensors import rotation_of
from hadagen.runtime.operands import sealed
from hadagen.runtime.operands.call import key_of
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
from hadagen.runtime.operands.packed import TRAILER, Factors, combined, pack_signs, unpack_signs
from hadagen.runtime.operands.sealed_module import SealedModule, Watched
from hadagen.runtime.operands.spec import text_of

Operands = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]  # matrices, signs, signs_after
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
        self._orders = tuple(len(each) for each in matrices)
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
        return self._run(x, inplace, out, numerics, batch_invariant, False, before)

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
        before: Prologue | None = None,
        factor: float | None = None,
    ) -> torch.Tensor:
        if batch_invariant is None:
            batch_invariant = BATCH_INVARIANT
        prologue = "" if before is None else text_of_value(before)
        asked = transposed, numerics, batch_invariant, inplace, prologue, factor
        # As in `hadamard_transform`: a repeated call goes straight to its kernel if the dispatcher has nothing to do.
        made = self._made
        if made is not None and is_plain(x) and (not made.watched or made.is_whole(self._buffers)):
            columns = self.n if before is None else self.n * before.width
            kept = made.places if inplace is not False or out is not None else ()
            y = again(x, made.known, asked, columns, inplace, out, kept)
            if y is not None:
                return cast(torch.Tensor, y)
        check_is_flag(batch_invariant, "batch_invariant")
        if not is_dynamo_compiling():  # where the operator's own checks do more for the message
            check_numerics(numerics)
        words = transposed, numerics, bool(batch_invariant), prologue
        target, name = (x, "x") if out is None else (out, "out")
        if (out is not None or (is_flag(inplace) and inplace)) and has_only_memory(target) and not target.is_nested:
            check_apart(target, name, buffers_of(self))
        parts: dict[str, Any] = {"takes": self.n, "unit": self.block, "before": before}
        y = rotate(x, lambda x: self._linear(x, factor, *words), inplace=inplace, out=out, **parts)
        if has_only_memory(x) and self._made is not None and not (inplace and prologue):
            of = self._linear(x, factor, *words)
            text = f"{of.text} inplace" if inplace else of.text
            remember_asked(self._made.known, asked, key_of(text, of.scale, *self._made.tensors))
        return y

    # ---- operands ----------------------------------------------------------------------------------------------------
    def _linear(self, x: Any, factor: float | None, *words: Any) -> Linear:
        """What a call with a tensor like x asks for. words: as for `_text`."""
        matrices, signs, signs_after = self._operands(x)  # which may change what follows
        scale = float(self._scale) if factor is None else float(self._scale) * factor
        return Linear(matrices, signs, signs_after, scale, self._text(*words))

    def _text(self, transposed: bool, numerics: str, batch_invariant: bool, before: str = "") -> str:
        """The text of the spec of a call without a quantizer."""
        matrices, signs, signs_after = self._has
        orders = self._orders if matrices else ()
        asked = self._swapped, transposed, numerics, batch_invariant, False, before
        return text_of(self.block, orders, signs, signs_after, *asked)

    @property
    def _has(self) -> tuple[bool, bool, bool]:
        """Whether operators get matrices, signs and signs_after."""
        signs, after = self._sizes[_SIGNS] is not None, self._sizes[_AFTER] is not None
        if self._all_of_h and (signs or after):
            return True, False, False
        return bool(self.k), signs or self._swapped, after or self._swapped

    def _operands(self, x: torch.Tensor) -> Operands:
        """What operators take besides a tensor like x. Raises `TensorError` if the buffers do not hold the values of
        such a rotation."""
        if is_dynamo_compiling() or not self._may_look(x):
            tensors = self._unchecked(x)
            for each in tensors:
                if each is not None and isinstance(x, torch.Tensor):
                    check_alike(x, each, "an operand of the rotation")
            return tensors
        device = self._device if stands_for_a_tensor(x) else x.device
        made = self._made
        if made is None or not made.is_current(self._buffers, _index(device)):
            made = self._look(device)
        return made.tensors

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

    def _unchecked(self, x: Any) -> Operands:
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
        self._made = _Made(_index(device), watched, tensors)
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
def factors_of(rotation: Rotation, x: torch.Tensor) -> Factors:
    """What a rotation is made of, for rows like x. Raises `TensorError` for buffers that do not hold its values."""
    matrices, signs, signs_after = rotation._operands(x)
    orders = rotation._orders if matrices is not None else ()
    return Factors(rotation.block, orders, rotation._swapped, float(rotation._scale), matrices, signs, signs_after)


def made_for(rotation: Rotation, x: torch.Tensor, width: int = 1) -> _Made | None:
    """The operands that calls with tensors like a plain x have; None if x does not fit, or the buffers have to be read
    first. width: as for `Prologue`."""
    made = rotation._made
    try:
        if made is None or x.shape[-1] != width * rotation.n:
            return None
    except (IndexError, RuntimeError):  # it has no dimension, or no shape
        return None
    return None if made.watched and not made.is_whole(rotation._buffers) else made


def buffers_of(rotation: Rotation) -> list[tuple[str, torch.Tensor]]:
    """The buffers that can be read, with their names in messages."""
    return [(f"{name} of the rotation", each) for name, each in rotation._present if sealed.is_readable(each)]


def _index(device: torch.device) -> int:
    """As `Tensor.get_device` gives it."""
    return -1 if device.index is None else device.index


class _Made(Watched):
    """The operands of a rotation for one device, and the buffers from which they were made.

    known, quantized: what calls with these operands found, by their other arguments: keys of calls, and those with
        formats.
    """

    def __init__(
        self,
        index: int,
        watched: list[tuple[str, torch.Tensor, int, int]],
        tensors: Operands,
    ) -> None:
        self.index, self.watched, self.tensors = index, watched, tensors
        self.known: dict[Any, int] = {}
        self.quantized: dict[Any, tuple[int, Format]] = {}
        self.places = [(address, address + tensor.nbytes) for _, tensor, _, address in watched]

    def is_current(self, buffers: Mapping[str, torch.Tensor | None], index: int) -> bool:
        """Whether the buffers are the same, and x is on the device of this index."""
        return index == self.index and self.is_whole(buffers)


_STORED = {plain(dtype): dtype for dtype in (torch.int8, *DTYPES)}
