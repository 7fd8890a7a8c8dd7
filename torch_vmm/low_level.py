"""VirtualMemoryManager: addresses, physical memory and mappings by hand.

For sparse arrays, resizable buffers, several devices' memory in one range, and
aliases. The records that it gives out are the extension's own classes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from types import TracebackType

import torch

from torch_vmm import _C
from torch_vmm._C import AccessFlags, MappingRecord, PhysicalAllocation, VirtualAddressRange
from torch_vmm._guarded import Guarded, refuse_copies
from torch_vmm.devices import Device, OnDevice, to_device
from torch_vmm.errors import InvalidArgumentError, VmmError
from torch_vmm.sizes import Shape, Size, show, to_bytes, to_flag, to_optional_bytes, to_range, to_tensor_range

for _record in (VirtualAddressRange, PhysicalAllocation, MappingRecord):
    refuse_copies(
        _record,
        "it names something of one VirtualMemoryManager in this process, and never changes. Keep another reference "
        "to it; another process makes its own",
    )


class VirtualMemoryManager(OnDevice, Guarded, guarded=True):
    """Reserves addresses, creates physical memory, and maps the one to the other.

    Everything that it gives out belongs to it: another manager refuses it. It
    takes part in the device's limit, and in no pool. :meth:`close`, or the end
    of a ``with``, gives back all that it made.

    Args:
        device: whose memory; other devices' too by :meth:`alloc_physical`.
    Raises:
        InvalidArgumentError: no device.
        NotAvailableError: no driver, or no such device.
    """

    _instead_of_a_copy = (
        "it is memory of this process. Keep another reference to it, or make another one; another process makes its own"
    )
    _handle: _C.VirtualMemoryManager

    def __init__(self, device: Device = "cuda") -> None:
        self._device = to_device(device)
        self._handle = _C.VirtualMemoryManager(*self._device)

    @property
    def granularity(self) -> int:
        """Bytes; every size and offset is a multiple of it."""
        return self._handle.granularity

    @property
    def host_memory_usage(self) -> int:
        """Bytes of host memory (``alloc_physical(.., device="cpu")``) that all
        managers of this GPU hold.

        They count here alone: the GPU's limit has nothing to do with them.
        """
        return self._handle.host_memory_usage

    @property
    def is_closed(self) -> bool:
        """Closed: it takes no more requests."""
        return self._handle.is_closed

    # -- Addresses -----------------------------------------------------------------------------------------------------

    def reserve(self, size: Size, alignment: Size | None = None) -> VirtualAddressRange:
        """A range of addresses with nothing behind it; reading it faults.

        Args:
            size: bytes, above 0: a multiple of the granularity and of
                ``alignment``.
            alignment: bytes, a power of two; ``None`` is the granularity. The
                base is a multiple of it.
        Raises:
            InvalidArgumentError: a size or alignment that can't be.
            OutOfMemoryError: there is no such stretch of addresses.
        """
        return self._handle.reserve(to_bytes(size, "size"), to_optional_bytes(alignment, "alignment"))

    def release(self, range: VirtualAddressRange) -> None:  # noqa: A002
        """Gives the addresses back.

        Raises:
            StillInUseError: something is mapped in it.
            InvalidArgumentError: another manager's, or released already.
        """
        self._handle.release(_to_range_object(range))

    # -- Physical memory -----------------------------------------------------------------------------------------------

    def alloc_physical(self, size: Size, device: Device = None, exportable: bool = False) -> PhysicalAllocation:
        """Physical memory without an address; it reads as zero once mapped.

        Args:
            size: bytes, above 0, a multiple of the granularity.
            device: where; ``None`` is the manager's own. Another GPU, or
                ``"cpu"``.
            exportable: another process can be given it.
        Raises:
            InvalidArgumentError: a size that can't be.
            OutOfMemoryError: the device has no such amount left.
            NotAvailableError: no such device, or one that cannot do this.
            InvalidArgumentError: a GPU, of a manager of host memory.

        What it holds counts under the limit of the manager's own device,
        whichever holds it; host memory of a GPU's manager under none.
        """
        where = None if device is None else to_device(device)
        return self._handle.alloc_physical(to_bytes(size, "size"), where, to_flag(exportable, "exportable"))

    def free_physical(self, phys: PhysicalAllocation) -> None:
        """Gives physical memory back.

        Raises:
            StillInUseError: it is mapped somewhere.
            InvalidArgumentError: another manager's, or freed already.
        """
        self._handle.free_physical(_to_physical(phys))

    # -- Mappings ------------------------------------------------------------------------------------------------------

    def map(self, range: VirtualAddressRange, phys: PhysicalAllocation, offset: Size = 0) -> None:  # noqa: A002
        """Puts physical memory, all of it, behind [offset, offset + phys.size) of
        a range.

        It may stand at several addresses: what is written through one is read
        through all. It cannot be accessed until :meth:`set_access`.

        Args:
            offset: bytes from the range's base, a multiple of the granularity.
        Raises:
            AlreadyMappedError: something is mapped there.
            InvalidRangeError: unaligned, overflowing, or beyond the range.
            InvalidArgumentError: another manager's objects, or ones given back.
        """
        at, _ = to_range(offset, _to_physical(phys).size, _to_range_object(range).size)
        self._handle.map(range, phys, at)

    def unmap(self, range: VirtualAddressRange, offset: Size, size: Size) -> None:  # noqa: A002
        """Takes whole mappings out of [offset, offset + size) of a range.

        No work that is queued on a GPU may still use them.

        Raises:
            NotMappedError: some of it is not mapped.
            InvalidRangeError: a part of a mapping, unaligned, or beyond the
                range.
            StillInUseError: a tensor of :meth:`tensor` lives there.
        """
        offset, size = to_range(offset, size, _to_range_object(range).size)
        self._handle.unmap(range, offset, size)

    def set_access(
        self,
        range: VirtualAddressRange,  # noqa: A002
        flags: AccessFlags,
        device: Device | Iterable[Device] = None,
        offset: Size = 0,
        size: Size | None = None,
    ) -> None:
        """Says what devices may do with the mappings in [offset, offset + size) of
        a range.

        Args:
            flags: ``READ_WRITE``, ``READ``, or ``NONE``: any access faults.
            device: one or several; ``None`` is the manager's own.
            size: bytes of whole mappings; ``None`` is up to the end of what is
                mapped.
        Raises:
            NotMappedError: some of it is not mapped.
            InvalidRangeError: a part of a mapping, unaligned, or beyond the
                range.
            StillInUseError: ``NONE`` for the manager's own device, where a
                tensor of :meth:`tensor` lives.
            NotAvailableError: no such device, or one that cannot reach this
                memory.
        """
        if not isinstance(flags, AccessFlags):
            raise InvalidArgumentError(f"flags={show(flags)}: give one of AccessFlags")
        whose = None
        if isinstance(device, Iterable) and not isinstance(device, str):
            whose = [to_device(one) for one in device]
            if not whose:
                raise InvalidArgumentError("device=[]: name at least one, or None for the manager's own")
        elif device is not None:
            whose = [to_device(device)]
        if size is None:
            offset, _ = to_range(offset, 0, _to_range_object(range).size)
            self._handle.set_access(range, flags, whose, offset, None)
        else:
            offset, size = to_range(offset, size, _to_range_object(range).size)
            self._handle.set_access(range, flags, whose, offset, size)

    def mappings(self, range: VirtualAddressRange) -> list[MappingRecord]:  # noqa: A002
        """What is mapped in a range, by offset.

        Raises:
            InvalidArgumentError: another manager's, or released.
        """
        return self._handle.mappings(_to_range_object(range))

    def tensor(
        self,
        range: VirtualAddressRange,  # noqa: A002
        offset: Size,
        shape: Shape,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """A contiguous tensor over mapped, accessible memory; no copy.

        While it or a view of it lives, what it shows can be neither unmapped
        nor made inaccessible, and its range not released.

        Args:
            offset: bytes from the range's base, a multiple of the dtype's size.
            shape: of the tensor.
        Raises:
            NotMappedError: some of it is not mapped.
            InvalidRangeError: empty, or beyond the range.
            InvalidArgumentError: not accessible, not aligned to the dtype, a
                quantized dtype, or no shape at all.
        """
        at, sizes = to_tensor_range(offset, shape, dtype, _to_range_object(range).size)
        return self._handle.tensor(range, at, sizes, dtype)

    # -- The end -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Gives back all that it made; twice is fine.

        Raises:
            StillInUseError: a tensor of :meth:`tensor` lives.
        """
        self._handle.close()

    def __enter__(self) -> VirtualMemoryManager:
        if self.is_closed:
            raise InvalidArgumentError("the VirtualMemoryManager is closed")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error its frames may keep a tensor alive; the error is what
        # matters, and the manager ends when it is collected.
        with contextlib.suppress(VmmError) if error is not None else contextlib.nullcontext():
            self.close()

    def __repr__(self) -> str:
        state = ", closed" if self.is_closed else ""
        return f"VirtualMemoryManager({self._device}, granularity {_C.format_bytes(self.granularity)}{state})"


def _to_range_object(value: VirtualAddressRange) -> VirtualAddressRange:
    if not isinstance(value, VirtualAddressRange):
        raise InvalidArgumentError(f"range={show(value)}: give what reserve() returned")
    return value


def _to_physical(value: PhysicalAllocation) -> PhysicalAllocation:
    if not isinstance(value, PhysicalAllocation):
        raise InvalidArgumentError(f"phys={show(value)}: give what alloc_physical() returned")
    return value
