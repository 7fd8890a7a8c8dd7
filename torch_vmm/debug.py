"""Finding memory errors: what is watched, and what is known of an address.

``TORCH_VMM_DEBUG=guard`` gives each allocation pages of its own, at whose
end it stands, with a page without memory behind them; what is freed is
unmapped as soon as queued work is done with it. So an access beyond a
tensor's end, or to a tensor that is no more, faults in whatever kernel
makes it. ``canary`` writes patterns before and behind each block instead,
and looks at them when it is freed. ``sample=1/100`` behind either watches
one of a hundred allocations.

``refuse_asleep()`` needs none of that: within it, who uses memory of a
sleeping model gets an exception instead of a fault.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from torch_vmm import _C
from torch_vmm.asleep_use import refuse_asleep
from torch_vmm.dense import require_strided
from torch_vmm.devices import Device, DeviceKey, to_device
from torch_vmm.errors import InvalidArgumentError, MemoryDamageError, NotAvailableError
from torch_vmm.sizes import show, to_index

__all__ = ["Damage", "Finding", "Report", "WatchedBlock", "check", "explain", "mode", "refuse_asleep", "report"]


def __dir__() -> list[str]:
    """What a prompt completes: the public names, and not what they are made of."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


@dataclass(frozen=True)
class WatchedBlock:
    """An allocation that is watched, or was."""

    number: int
    """Of the device's watched allocations, from 1."""
    address: int
    requested: int
    """Bytes asked for."""
    size: int
    """Bytes that it counts as: rounded to 512."""
    pool: str
    """Name of the pool that it came from: the model."""
    stream: int
    """Pointer of the stream that it was made for."""
    stack: tuple[str, ...]
    """Where it was made in Python, ``"file:line in function"``, the innermost first; empty where no Python ran."""
    is_freed: bool
    is_unmapped: bool
    """Freed, and its memory is no longer at these addresses."""
    faults: tuple[int, int]
    """The addresses, first and last + 1, where an access that was meant for it faults; equal where none does."""


@dataclass(frozen=True)
class Damage:
    """Bytes outside an allocation that somebody has written."""

    block: WatchedBlock
    first: int
    """Offset in bytes of the first of them from the block's address: negative, or ``requested`` and more."""
    bytes: int
    """How many they are, within 512 bytes before the block and behind it."""
    text: str
    """The same in words."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Finding:
    """A block that an access may have been meant for."""

    block: WatchedBlock
    where: Literal["before", "inside", "beyond"]
    """Where the address is, seen from the bytes that were asked for."""
    distance: int
    """Bytes: from the block's address, from the first byte beyond its end, or up to its address."""
    is_own: bool
    """The address is, or was, the block's or kept free beside it; else it is only the nearest."""
    text: str
    """The same in words."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Report:
    """What a device's debug mode knows; ``str()`` is a text for people."""

    mode: str
    """``"guard"``, ``"canary,sample=1/100"``."""
    watched: int
    """Allocations watched so far."""
    missed: int
    """Allocations that could not be: a CUDA graph's, or no addresses were left for them."""
    damaged: int
    """Blocks whose patterns were found overwritten."""
    live: int
    """Blocks watched now."""
    blocks: tuple[WatchedBlock, ...]
    """The newest of these, at most 64."""
    freed: tuple[WatchedBlock, ...]
    """Those freed last, the newest first, at most 64."""
    damages: tuple[Damage, ...]
    text: str

    def __str__(self) -> str:
        return self.text


def _block(told: _C._WatchedBlock) -> WatchedBlock:
    values: dict[str, Any] = {**told, "stack": tuple(told["stack"].split("\n")) if told["stack"] else ()}
    return WatchedBlock(**values)


def _damages(told: list[_C._Damage]) -> tuple[Damage, ...]:
    return tuple(Damage(_block(each["block"]), each["first"], each["bytes"], each["text"]) for each in told)


def mode() -> str | None:
    """What ``TORCH_VMM_DEBUG`` asks for, or ``None``.

    Raises:
        InvalidArgumentError: it asks for something that does not exist.
    """
    told = _C.debug_mode()
    return None if told == "off" else told


def explain(tensor_or_address: torch.Tensor | int) -> list[Finding]:
    """Which watched blocks an address belongs to, or is near.

    The address comes from ``compute-sanitizer``, the kernel's log (Xid 31), a
    core dump or a pointer at hand. First come the blocks whose own addresses it
    is, live ones before freed ones; then the nearest live ones below and above.

    Returns:
        The findings; none where nothing is watched.

    Raises:
        InvalidArgumentError: neither a strided tensor nor an address.
    """
    if isinstance(tensor_or_address, torch.Tensor):
        address: int | None = require_strided(tensor_or_address, "explain()").data_ptr()
    else:
        address = to_index(tensor_or_address)
    if address is None or not 0 <= address < 2**64:
        raise InvalidArgumentError(f"{show(tensor_or_address)} is neither a tensor nor an address")
    return [
        Finding(_block(each["block"]), each["where"], each["distance"], each["is_own"], each["text"])
        for each in _C.debug_explain(address)
    ]


def report(device: Device = "cuda") -> Report | None:
    """What is watched on a device, what was lately, what is damaged, and which
    accesses fault.

    After CUDA's error 700 the driver does not say which address it was; the
    report's newest blocks, and those freed last, are what it can have been. The
    GPU need not work any more. Of what was freed, the patterns are looked at
    where the GPU is done with it; :func:`check` waits for the rest.

    Returns:
        ``None`` where debug mode is off or the device was never used.

    Raises:
        NotAvailableError: of a GPU, where there is none and debug mode is on.
        InvalidArgumentError: no device.
    """
    key = to_device(device)
    told = _C.debug_report(*key)
    if told is None:
        # torch is asked of a GPU only where nothing is known of one: of one that has failed the report is wanted.
        if mode() is not None:
            _require_gpu(key, "report", device)
        return None
    return Report(
        mode=told["mode"],
        watched=told["watched"],
        missed=told["missed"],
        damaged=told["damaged"],
        live=told["live"],
        blocks=tuple(_block(each) for each in told["blocks"]),
        freed=tuple(_block(each) for each in told["freed"]),
        damages=_damages(told["damages"]),
        text=told["text"],
    )


def check(device: Device = "cuda") -> None:
    """Waits for the device and looks at the patterns of all blocks that are
    watched now, and of those freed until now.

    Raises:
        MemoryDamageError: somebody has written outside an allocation, now or
            before; the text names each of these.
        NotAvailableError: a GPU's, where there is none.
        InvalidArgumentError: no device.
        DriverError: the device has failed.
    """
    key = to_device(device)
    _require_gpu(key, "check", device)
    damages = _damages(_C.debug_check(*key))
    if damages:
        raise MemoryDamageError("\n".join(str(damage) for damage in damages), damages=damages)


def _require_gpu(key: DeviceKey, asked: str, device: Device) -> None:
    if key.kind == "cuda" and not torch.cuda.is_available():
        raise NotAvailableError(
            f'{asked}({show(device)}): there is no GPU, so nothing was looked at; say {asked}("cpu")'
        )
