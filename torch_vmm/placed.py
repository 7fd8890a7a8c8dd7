"""One tensor over several devices' memory, in one range of addresses that all of them reach."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Sequence
from typing import SupportsIndex, TypeAlias

import torch

from torch_vmm import _C
from torch_vmm._lifetimes import hold_while
from torch_vmm.dense import require_no_grad, require_strided, require_values
from torch_vmm.devices import Device, DeviceKey, current_stream, to_device
from torch_vmm.errors import InvalidArgumentError, NotAvailableError
from torch_vmm.pools import VirtualMemoryPool
from torch_vmm.ranges import outside_inference, row_bytes
from torch_vmm.routing import current_pool
from torch_vmm.sizes import show, to_index

Placement: TypeAlias = Sequence[tuple[Device, SupportsIndex]]
"""Devices, and how many rows of the first dimension the memory of each holds, in order."""

_by_address: weakref.WeakValueDictionary[int, _Placed] = weakref.WeakValueDictionary()


class _Placed:
    """What a placed tensor's storage keeps: its memory, and the pools that pay for it."""

    def __init__(self, memory: _C.PlacedMemory, devices: list[DeviceKey], pools: list[VirtualMemoryPool]) -> None:
        self.memory = memory
        self.devices = devices
        self.pools = pools

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, device: DeviceKey) -> torch.Tensor:
        with outside_inference():
            made = self.memory.tensor(shape, dtype, *device)
        hold_while(made, self)
        return made


def make(shape: tuple[int, ...], dtype: torch.dtype, placement: Placement) -> torch.Tensor:
    """A tensor of ``shape`` on the first device of ``placement``; see
    :func:`torch_vmm.aligned`.
    """
    shares = _to_shares(placement)
    devices = list(dict.fromkeys(device for device, _ in shares))
    rows = [count for _, count in shares]
    if not shape or sum(rows) != shape[0]:
        raise InvalidArgumentError(
            f"placement={show(placement)}: it places {show(sum(rows))} rows, and shape={show(shape)} has "
            f"{shape[0] if shape else 'none'}"
        )
    if math.prod(shape) == 0:
        raise InvalidArgumentError(f"shape={show(shape)}: there is nothing to place")
    row = row_bytes(shape, dtype)
    page = max(_C.device(*device).granularity for device in devices)  # before torch is asked: says what is missing
    _require_peers(devices)
    _require_whole_pages(rows, row, page)
    made = []
    for device, count in shares:
        made.append((_C.current_space(*device, count * row), count * row, current_stream(device)))
    pools = [current_pool(device.torch_device) for device in devices]
    placed = _Placed(_C.PlacedMemory(made), devices, pools)
    tensor = placed.tensor(shape, dtype, shares[0][0])
    _by_address[placed.memory.base_address] = placed
    return tensor


def seen_from(tensor: torch.Tensor, device: Device) -> torch.Tensor:
    """The memory of a placed tensor, or of a view of it, as a tensor of another
    device that holds a share of it.

    torch's functions then run on that device; no copy is made. Autograd
    notices, as with a view, where one is written to and the other was saved.
    Work of one device is not ordered after another's by that: wait for an event
    of the one on the other, or synchronize.

    Args:
        tensor: made by ``aligned(..., placement=...)``, or a view of such.
        device: one of the placement's.
    Raises:
        InvalidArgumentError: no such tensor, one that requires grad, which does
            not follow, or a device that holds nothing of it.
    """
    require_strided(tensor, "seen_from()")
    key = to_device(device)
    placed = _by_address.get(tensor.untyped_storage().data_ptr())
    if placed is None:
        raise InvalidArgumentError(
            "seen_from(): the tensor is in one device's memory; torch_vmm.aligned(shape, dtype, placement=[(device, "
            "rows), ...]) makes one over several"
        )
    if key not in placed.devices:
        raise InvalidArgumentError(
            f"seen_from({str(key)!r}): {key} holds nothing of the tensor, which is over "
            f"{', '.join(map(str, placed.devices))}"
        )
    require_no_grad(tensor, "tensor", "seen_from()")
    require_values(tensor, "tensor")
    whole = placed.tensor((placed.memory.size // tensor.element_size(),), tensor.dtype, key)
    _C.share_version(whole, tensor)
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def is_placed(tensor: torch.Tensor) -> bool:
    """Is it over several devices' memory, or a view of such?"""
    return tensor.untyped_storage().data_ptr() in _by_address


def _to_shares(placement: Placement) -> list[tuple[DeviceKey, int]]:
    """The devices and rows of a placement, as numbers.

    Raises:
        InvalidArgumentError: none, no pairs, no whole numbers above 0, or devices of different kinds.
    """
    wanted = "give [(device, rows), ...], rows of the first dimension, at least 1 each"
    if not isinstance(placement, list | tuple) or not placement:
        raise InvalidArgumentError(f"placement={show(placement)}: {wanted}")
    shares = []
    for each in placement:
        count = to_index(each[1]) if isinstance(each, list | tuple) and len(each) == 2 else None
        if count is None or count < 1:
            raise InvalidArgumentError(f"placement={show(placement)}: {show(each)} is no device with rows; {wanted}")
        shares.append((to_device(each[0]), count))
    if len({device.kind for device, _ in shares}) > 1:
        raise InvalidArgumentError(
            f"placement={show(placement)}: devices of different kinds have no addresses that all of them reach"
        )
    return shares


def _require_peers(devices: list[DeviceKey]) -> None:
    """Raises NotAvailableError where a GPU cannot reach another's memory."""
    for one, other in itertools.permutations(devices, 2):
        if not torch.cuda.can_device_access_peer(one.ordinal, other.ordinal):
            raise NotAvailableError(
                f"{one} cannot reach the memory of {other}, so no range of addresses has memory of both: place the "
                f"tensor on GPUs that are peers (nvidia-smi topo -p2p r shows them)",
                reason="no peer access",
            )


def _require_whole_pages(rows: list[int], row: int, page: int) -> None:
    """Raises InvalidArgumentError where a device's share ends within a page."""
    step = page // math.gcd(page, row)
    for k, count in enumerate(rows[:-1]):
        if count * row % page == 0:
            continue
        if step >= sum(rows):
            raise InvalidArgumentError(
                f"placement: {sum(rows)} rows of {row} bytes cannot be parted, as each device's memory is whole pages "
                f"of {page} bytes, {step} rows; place it on one device, or make rows longer (a multiple of 4096 bytes)"
            )
        below, above = count // step * step, -(-count // step) * step
        right = f"{above}" if below == 0 else f"{below} or {above}"
        raise InvalidArgumentError(
            f"placement: {count} rows of {row} bytes of share {k} end within a page, and each device's memory is whole "
            f"pages of {page} bytes; give a multiple of {step} rows: {right}"
        )
