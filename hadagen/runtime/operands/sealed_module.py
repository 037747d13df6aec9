"""`SealedModule`: a module whose sealed buffers other libraries may load, cast, move, shard, broadcast or leave out.

This file decides when a buffer is read, repaired or refused. `hadagen.runtime.operands.sealed` defines the bytes of a
buffer. `hadagen.runtime.rotation.Rotation`, the subclass, gives the values their meaning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import torch

from hadagen.errors import TensorError, UsageError
from hadagen.runtime.operands import sealed
from hadagen.runtime.operands.packed import TRAILER

Self = TypeVar("Self", bound="SealedModule")


class Watched:
    """Buffers as they were when their values were read."""

    watched: list[tuple[str, torch.Tensor, int, int]]  # name, buffer, `sealed.version_of`, address

    def is_whole(self, buffers: Mapping[str, torch.Tensor | None]) -> bool:
        """Whether the buffers are the same, and nobody wrote to them."""
        for name, tensor, version, address in self.watched:
            if buffers[name] is not tensor or tensor.data_ptr() != address:
                return False
            if version >= 0 and tensor._version != version:
                return False
        return True


class SealedModule(torch.nn.Module):
    """A module with persistent sealed buffers, and a copy of each buffer on the CPU.

    The constructor of a subclass fills `_values` and `_sizes`, and calls `_register`. A subclass overrides `_describe`,
    `_take` and `_fill`.
    """

    _BUFFERS: ClassVar[dict[str, str]]  # buffer → argument of the constructor
    _NOT_STORED: ClassVar[tuple[str, ...]] = ("_made",)  # attributes that a copy or a file has as None
    _made: Watched | None  # the buffers that calls were prepared for

    def __init__(self) -> None:
        super().__init__()
        # Each buffer as it was made or last loaded, on the CPU; None while its values are not known.
        self._values: dict[str, torch.Tensor | None] = dict.fromkeys(self._BUFFERS)
        self._sizes: dict[str, int | None] = dict.fromkeys(self._BUFFERS)  # None for an argument that is None
        self._has_warned = False

    def _describe(self, name: str) -> str:
        """Return the text for the seal of a buffer: its argument, and the module with all that defines it."""
        raise NotImplementedError

    def _take(self, name: str, values: torch.Tensor) -> None:
        """Update the module after new values were found in a buffer. values: without the seal."""

    def _fill(self) -> None:
        """Prepare the next call, if that is possible now. Called after buffers were made or written."""
        raise NotImplementedError

    def _register(self) -> None:
        """Register the buffers on the default device."""
        device = torch.empty(0).device  # get_default_device ignores `with torch.device` in PyTorch 2.6
        self._place = torch.empty(0, dtype=torch.int8, device=device)
        # Buffers that are None come last, because torch.export counts buffers that are not None by their places.
        for name, size in sorted(self._sizes.items(), key=lambda item: item[1] is None):
            self.register_buffer(name, None if size is None else _placed(self._values[name], size, device))
        self._fill()

    # ---- reading -----------------------------------------------------------------------------------------------------
    @property
    def _present(self) -> list[tuple[str, torch.Tensor]]:
        """The sealed buffers that are there, with their names."""
        buffers = [(name, self._buffers[name]) for name in self._BUFFERS]
        return [(name, each) for name, each in buffers if each is not None]

    @property
    def _device(self) -> torch.device:
        return self._present[0][1].device if self._present else self._place.device

    def _read(self, name: str, tensor: torch.Tensor) -> tuple[sealed.State, torch.Tensor]:
        """Return the state and the bytes of a tensor. If it is whole, the module takes its values."""
        found = sealed.on_cpu(tensor) if tensor.dtype == torch.uint8 else torch.empty(0, device="cpu")
        state, known = sealed.state_of(found, self._describe(name)), self._values[name]
        if state is sealed.State.WHOLE and (known is None or not torch.equal(known, found)):
            self._values[name], self._sizes[name] = found, len(found)
            self._take(name, found[:-TRAILER])
        return state, found

    def _checked(self, name: str, device: torch.device) -> torch.Tensor | None:
        """Read a buffer and return it, or a new buffer in its place if it is empty; None if there is none.

        device: that of the new buffer if the old one cannot be read. Raises `TensorError` if the buffer was changed or
        belongs to another module, or if it is empty and its values are not known.
        """
        if self._sizes[name] is None:
            return None
        buffer, values, state, found = self._buffers[name], self._values[name], sealed.State.EMPTY, None
        if buffer is not None and hasattr(buffer, "to_local"):  # a DTensor, which is a replica on each rank
            buffer = buffer.to_local()
        if buffer is not None and sealed.is_readable(buffer):
            state, found = self._read(name, buffer)
            if state is sealed.State.WHOLE:
                return buffer.detach()
            device = buffer.device
        # A damaged buffer that is new is taken for uninitialized memory: a freed buffer, whose first bytes the
        # allocator changed, looks like that.
        is_new = self._made is None or all(each is not buffer for _, each, *_ in self._made.watched)
        if values is None or not (state is sealed.State.EMPTY or (state is sealed.State.DAMAGED and is_new)):
            raise TensorError(self._fault(name, name, state, found))
        self._warn(f"{name} {sealed.FAULTS[state]}")
        self._buffers[name] = buffer = _placed(values, len(values), device)
        return buffer

    def _refresh(self, name: str) -> torch.Tensor | None:
        """Return the values of a buffer, after reading it if that is possible now; None if it is not whole."""
        buffer, made = self._buffers[name], self._made
        if buffer is None or not sealed.is_readable(buffer) or (made is not None and made.is_whole(self._buffers)):
            return self._values[name]
        return self._values[name] if self._read(name, buffer)[0] is sealed.State.WHOLE else None

    def _known(self, name: str) -> torch.Tensor:
        """Return the values of a buffer, after reading it if possible. Raises `TensorError` if none are known."""
        self._refresh(name)
        values = self._values[name]
        if values is None:
            raise TensorError(self._fault(name, name, sealed.State.EMPTY))
        return values

    def _fault(self, name: str, said: str, state: sealed.State, found: torch.Tensor | None = None) -> str:
        if state is sealed.State.OTHER and found is not None:
            return f"{said} holds {sealed.text_of(found)}, not {self._describe(name)}; use the rotation that it is of"
        return f"{said} {sealed.FAULTS[state]}; load a state dict that has it whole"

    def _warn(self, what: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{what}; the values with which the Rotation was made, or that it had last, are taken instead",
                RuntimeWarning,
                stacklevel=2,
            )

    # ---- writing -----------------------------------------------------------------------------------------------------
    def reset_parameters(self) -> None:
        """Write the signs and given matrices, as they were made or last loaded, into the module's buffers again.

        If the rotation was made on the meta device, its values are not known before a state dict is loaded. A call
        before then raises `TensorError`.
        """
        self._write(self._values)

    def _write(self, known: Mapping[str, torch.Tensor | None]) -> None:
        """Write these values, or zeros for None, to the buffers that differ. A buffer of another size or type is
        replaced."""
        for name, values in known.items():
            buffer = self._buffers[name]
            if buffer is None or not sealed.is_readable(buffer):
                continue
            wanted = torch.zeros(buffer.shape, dtype=torch.uint8, device="cpu") if values is None else values
            if buffer.dtype != torch.uint8 or buffer.shape != wanted.shape:
                self._buffers[name] = _placed(wanted, len(wanted), buffer.device)
            elif not torch.equal(sealed.on_cpu(buffer), wanted):
                with torch.no_grad():
                    buffer.copy_(wanted)
        self._fill()

    def _apply(self: Self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        # fn may spoil a buffer: `to_empty` leaves uninitialized memory, and `.type` casts integers.
        known = {name: self._refresh(name) for name in self._BUFFERS}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        try:
            self._place = fn(self._place)
        except NotImplementedError:  # from the meta device, on which others put all other tensors of a model
            self._place = fn(torch.empty(0, dtype=torch.int8, device="cpu"))
        self._write({name: values for name, values in known.items() if values is not None})
        return self

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        state_dict, refused = dict(state_dict), []
        for name, size in self._sizes.items():
            key = prefix + name
            given, values, buffer = state_dict.get(key), self._values[name], self._buffers[name]
            if size is None:
                if state_dict.pop(key, None) is not None:
                    said = f"{self._BUFFERS[name]}="
                    error_msgs.append(
                        f"{key} is of a Rotation made with {said}, which this one lacks; make it with {said}"
                    )
            elif isinstance(given, torch.Tensor) and sealed.is_readable(given):
                state, found = self._read(name, given)
                if state is sealed.State.WHOLE:
                    if buffer is not None and buffer.shape != given.shape:
                        self._buffers[name] = torch.empty_like(given, device=buffer.device)
                elif state is sealed.State.EMPTY and values is not None:
                    # As if it were missing, on the device where it should be.
                    self._warn(f"{key} in a state dict {sealed.FAULTS[state]}")
                    state_dict[key] = _placed(values, size, given.device)
                else:
                    error_msgs.append(self._fault(name, key, state, found))
                    state_dict.pop(key)
                    refused.append(key)
        missing: list[str] = []
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected_keys, error_msgs)
        missing_keys += [key for key in missing if key not in refused]

    def __prepare_scriptable__(self) -> Any:
        """Refuse `torch.jit.script`, which asks this of each module."""
        raise UsageError(
            f"torch.jit.script cannot compile a {type(self).__name__}; use torch.export.export, or torch.jit.trace"
        )

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()  # type: ignore[no-untyped-call]  # without what `compile` made
        return {**state, **dict.fromkeys(self._NOT_STORED)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._fill()


def _placed(values: torch.Tensor | None, size: int, device: torch.device) -> torch.Tensor:
    """A new buffer on a device with these values, or zeros for None."""
    if device.type == "meta":
        return torch.empty(size, dtype=torch.uint8, device=device)
    if values is None:
        return torch.zeros(size, dtype=torch.uint8, device=device)
    if torch._C._len_torch_dispatch_stack():  # such as that of fake tensors
        return torch.tensor(values.tolist(), dtype=torch.uint8, device=device)
    with torch.inference_mode(False):
        return values.to(device, copy=True)
