"""The last out-of-memory refusal of a device, as a value."""

from __future__ import annotations

from dataclasses import dataclass

from torch_vmm import _C
from torch_vmm.devices import Device, to_device


@dataclass(frozen=True)
class Holder:
    """A model that held memory under the limit that refused, in bytes."""

    name: str
    """The model; ``"VirtualMemoryManager"`` is memory that was made by hand."""
    allocated: int
    """In use."""
    idle: int
    """Mapped, unused, in whole chunks."""
    stranded: int
    """Mapped, unused, in chunks that are partly used."""
    quarantined: int
    """Freed, but queued work may still use it."""
    floor: int
    """Where it is why memory was not to be had; else 0."""
    reserved: int = 0
    """What is left of the floor: not held, and nobody else's."""


@dataclass(frozen=True)
class Refusal:
    """A request that found no memory, in bytes."""

    requested: int
    """Asked for."""
    available: int
    """What could still have been had."""
    limit: int
    """The limit that refused, or what the device has."""
    pool: str
    """Name of the pool that asked."""
    holders: tuple[Holder, ...]
    """Who held what under that limit, whoever held most first."""
    advice: str
    """What would help."""


def last_out_of_memory(device: Device = "cuda") -> Refusal | None:
    """The last request for memory that a device refused, or ``None``.

    A tensor's allocation raises torch's own ``torch.OutOfMemoryError``, which
    has a text only; this has the values. Of what is no pool's request (memory
    by hand, what is to sleep) it names no holders and gives no advice: the
    error's text says what there is to say.

    Raises:
        InvalidArgumentError: no device.
    """
    told = _C.last_refusal(*to_device(device))
    if told is None:
        return None
    return Refusal(
        requested=told["requested"],
        available=told["available"],
        limit=told["limit"],
        pool=told["pool"],
        holders=tuple(Holder(**each) for each in told["holders"]),
        advice=told["advice"],
    )
