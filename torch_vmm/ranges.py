"""What tensors whose pages come and go in place have in common: their addresses, and torch's face of them.

It knows no shape beyond the first dimension.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import weakref
from typing import Any

import torch

from torch_vmm import _C
from torch_vmm._lifetimes import hold_while
from torch_vmm.dense import span_bytes
from torch_vmm.devices import Device, DeviceKey, current_stream, to_device
from torch_vmm.errors import InvalidArgumentError
from torch_vmm.pools import VirtualMemoryPool
from torch_vmm.routing import current_pool
from torch_vmm.sizes import show

MOST_BYTES = 1 << 46
"""The addresses that the extension gives one tensor, at most."""


class Backing:
    """The addresses of one tensor in the pool that was open when it was made, and the memory behind them.

    Args:
        what: for messages.
        size: bytes of addresses.
        page_size: bytes of a page, or ``None``: chunks of up to a 16th of what lies below them.
        zeros: what has no memory reads as zero.
    """

    def __init__(self, what: str, size: int, device: Device, page_size: int | None = None, zeros: bool = False) -> None:
        self.device: DeviceKey = to_device(device)
        self.pool: VirtualMemoryPool = current_pool(self.device.torch_device)
        self.held = 0
        """Bytes from the first address on that have memory, where they have it without a gap."""
        self._twins: dict[int, weakref.ref[torch.Tensor]] = {}  # by id
        space = _C.current_space(*self.device, size)  # of the tag that is open, if one is
        self.handle = _C.TensorRange(space, what, max(size, 1), page_size, zeros)

    def add_twin(self, tensor: torch.Tensor) -> None:
        """Takes one more tensor of the same class that stands on it, as ``detach()`` makes them."""
        # It goes by itself, on whatever thread; what it knows for that is not this object, which holds memory.
        self._twins[id(tensor)] = weakref.ref(tensor, functools.partial(_forget, self._twins, id(tensor)))

    def twins(self) -> list[torch.Tensor]:
        """Those that live."""
        found = (each() for each in list(self._twins.values()))
        return [twin for twin in found if twin is not None]

    def commit(self, spans: list[tuple[int, int]]) -> None:
        """Backs the pages under these (offset, size), usable on the current stream."""
        self.handle.commit(spans, current_stream(self.device))

    def require_there(self, size: int) -> bool:
        """Whether it is awake. Raises AsleepError where any of the first ``size`` bytes are elsewhere: while it wakes
        some are there.
        """
        return self.handle.require_there(size)

    def require_awake(self) -> None:
        """Raises AsleepError while it is asleep, or on its way there or back: pages can neither come nor go."""
        self.handle.require_awake()

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor from the first address on. Whoever holds a view of it holds the memory and the pool."""
        with outside_inference():
            tensor = self.handle.tensor(shape, dtype)
        self.dtype = dtype
        hold_while(tensor, self.pool)
        return tensor


def _forget(twins: dict[int, weakref.ref[torch.Tensor]], key: int, gone: weakref.ref[torch.Tensor]) -> None:
    if twins.get(key) is gone:  # or another tensor has its id by now
        del twins[key]


class RangeTensor(torch.Tensor):
    """Base of the tensors over a :class:`Backing`: torch's functions take them, and give plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    _backing: Backing
    _made_by = "a function of torch_vmm"

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        _compile_takes(cls)

    def __new__(cls, *_: object, **__: object) -> Any:
        raise InvalidArgumentError(f"{cls.__name__}(...): {cls._made_by} makes it")

    @classmethod
    def _over(cls, backing: Backing, tensor: torch.Tensor) -> Any:
        with outside_inference():
            made = torch.Tensor._make_subclass(cls, tensor)
        made._backing = backing
        backing.add_twin(made)
        return made

    def _own(self, doing: str) -> Backing:
        """Its backing, for what changes or reads pages by the tensor's rows.

        Raises:
            InvalidArgumentError: the tensor does not stand on it.
        """
        backing: Backing | None = self.__dict__.get("_backing")
        if backing is None:
            raise InvalidArgumentError(
                f"{doing}: this {type(self).__name__} has no memory of its own: {self._made_by} makes those that do"
            )
        # torch swaps a tensor's memory in place, and its address is then that of somebody else's.
        at = self.untyped_storage().data_ptr()
        if (
            backing.handle.has_gone
            or at != backing.handle.base_address
            or self.storage_offset() != 0
            or self.dtype != backing.dtype
        ):
            raise InvalidArgumentError(
                f"{doing}: the tensor no longer stands on memory of its own, which is at "
                f"{backing.handle.base_address:#x} and of {backing.dtype}; it shows {self.dtype} at "
                f"{at + self.storage_offset() * self.dtype.itemsize:#x}, since .data, set_(), share_memory_(), or "
                f"module.to() or .half(). Make another of that dtype by {self._made_by} and copy_() into it"
            )
        return backing

    def _shown_bytes(self) -> int:
        """Bytes from the first address on that this tensor and its twins show."""
        shown = 0
        for twin in self._backing.twins():
            if twin.numel() == 0:
                continue
            if twin.untyped_storage().data_ptr() == self._backing.handle.base_address:
                shown = max(shown, int(twin.storage_offset()) * twin.element_size() + span_bytes(twin))
        return shown

    def _held_bytes(self) -> int:
        """Bytes from its first element on that have memory and are nobody else's; 0 where that is not known."""
        try:
            return self._own("seal()").held
        except InvalidArgumentError:
            return 0

    def detach(self) -> Any:
        """The same memory, of the same class; so it can be a parameter."""
        if "_backing" not in self.__dict__:
            self._own("detach()")
        return self._over(self._backing, torch.Tensor.detach(self))


def _compile_takes(cls: type[RangeTensor]) -> None:
    """Has ``torch.compile`` take a class as what it is: tensors without a ``__torch_dispatch__``.

    Before 2.15 torch leaves an operation of a compiled function's first call to the ``__torch_dispatch__`` of each
    argument that is of no class on a list, and raises where there is none
    (https://github.com/pytorch/pytorch/issues/193932). The second module copies the list when it is first imported.
    """
    if torch.__version__ >= "2.15":
        return
    for name in ("torch.fx.experimental.proxy_tensor", "torch._functorch._aot_autograd.runtime_wrappers"):
        module: Any = sys.modules.get(name)
        if hasattr(module, "HANDLED_TYPES"):
            module.HANDLED_TYPES = (*module.HANDLED_TYPES, cls)


def outside_inference() -> contextlib.AbstractContextManager[object]:
    """For tensors that outlive an inference mode that is on now; costs little where none is."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext()


def row_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of one row: what one step of the first dimension is."""
    return math.prod(shape[1:]) * dtype.itemsize


def require_dimension(shape: tuple[int, ...], name: str) -> None:
    """Raises InvalidArgumentError for a shape without a first dimension."""
    if not shape:
        raise InvalidArgumentError(f"{name}={show(shape)}: give at least one dimension, the first is what changes")


def require_addresses(shape: tuple[int, ...], dtype: torch.dtype, name: str) -> None:
    """Raises InvalidArgumentError for a shape of more bytes than one tensor's addresses can be."""
    require_size(shape, dtype, name)
    size = math.prod(shape) * dtype.itemsize
    if size > MOST_BYTES:
        raise InvalidArgumentError(
            f"{name}={show(shape)} of {dtype}: {_C.format_bytes(size)} are more than there are addresses for one "
            f"tensor, {_C.format_bytes(MOST_BYTES)}"
        )


def require_size(shape: tuple[int, ...], dtype: torch.dtype, name: str) -> None:
    """Raises InvalidArgumentError for a shape whose bytes, or strides, no number of torch's holds."""
    size = math.prod(max(each, 1) for each in shape) * dtype.itemsize
    if size >= 2**63:
        raise InvalidArgumentError(
            f"{name}={show(shape)} of {dtype}: its dimensions are {show(size)} bytes, more than there are addresses"
        )
