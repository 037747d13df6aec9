"""The operands of a kernel in device memory."""

from __future__ import annotations

from contextlib import suppress

import torch

from hadagen.errors import UsageError
from hadagen.problem.matrices import find_matrix
from hadagen.problem.operands import MATRIX, OperandValues, kernel_operands, operands_of, verification_operands
from hadagen.problem.problem import Problem
from hadagen.truth.reference import hadamard

# Bytes before and behind each array, and what they hold: as an entry of a matrix, nothing that it may have.
_GUARD, _POISON = 4096, 0x7F


class DeviceOperands(dict[str, int]):
    """Name of a param → device address, as `LaunchSpec.arguments` takes them. It owns the memory."""

    def __init__(self, problem: Problem, values: OperandValues, device: torch.device) -> None:
        """Optional operands without values become null pointers. Raises PyTorch's `RuntimeError` where memory runs
        out."""
        super().__init__({each.name: 0 for each in operands_of(problem) if each.is_optional})
        self.device = device
        self._memory: list[tuple[torch.Tensor, torch.Tensor]] = []  # on the device, and what it must hold
        like_x = {each.name for each in operands_of(problem) if each.like_x}  # which differ from launch to launch
        for name, value in kernel_operands(problem, {k: v for k, v in values.items() if k not in like_x}).items():
            data = torch.from_numpy(value).flatten().view(torch.uint8)
            guard = torch.full((_GUARD,), _POISON, dtype=torch.uint8)
            content = torch.cat((guard, data, guard))
            memory = content.to(device, copy=True)
            self[name] = memory.data_ptr() + _GUARD
            self._memory.append((memory, content))

    def are_whole(self) -> bool:
        """Whether nothing was written to the arrays, or around them."""
        return all(torch.equal(memory.cpu(), content) for memory, content in self._memory)


class Orthonormal(DeviceOperands):
    """Operands and a `scale` with which a transform is orthonormal. Values that it is applied to again and again, as
    kernels do when they are timed in place, stay as large as they are.

    Verification uses a matrix whose rows are not orthogonal, and a rounded scale. So neither is used here.
    """

    def __init__(self, problem: Problem, device: torch.device) -> None:
        operands = verification_operands(problem)
        square: float = 1  # of the norm of a row of the matrix
        if MATRIX.is_taken(problem):
            matrix = orthogonal_matrix(problem.order)
            square = int(matrix[0].abs().sum())
            if problem.transform.real:
                matrix, square = matrix.double() * square**-0.5, 1
            operands["matrix"] = matrix.numpy()
        if problem.transform.paired:
            right = orthogonal_matrix(problem.length)
            operands["right_matrix"] = (right.double() * int(right[0].abs().sum()) ** -0.5).numpy()
            square /= problem.length
        super().__init__(problem, operands, device)
        self.scale = float((square * problem.length) ** -0.5)


def orthogonal_matrix(order: int) -> torch.Tensor:
    """A matrix of −1, 0 and 1, int8 [order, order], with orthogonal rows of one norm. It has as few zeros as the known
    Hadamard matrices allow: copies of that of the largest order that divides `order` stand along its diagonal."""
    for size in range(order, 1, -1):
        if order % size == 0 and (block := _hadamard_matrix(size)) is not None:
            return torch.kron(torch.eye(order // size, dtype=torch.int8), block)
    return torch.eye(order, dtype=torch.int8)


def _hadamard_matrix(order: int) -> torch.Tensor | None:
    if order & (order - 1) == 0:
        return torch.from_numpy(hadamard(torch.eye(order, dtype=torch.float64).numpy())).to(torch.int8)
    with suppress(UsageError):
        entries = torch.frombuffer(bytearray(find_matrix("auto", order).entries()), dtype=torch.int8)
        return (2 * entries - 1).view(order, order)
    return None
