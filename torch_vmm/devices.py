"""What torch accepts as a device, to a kind and an ordinal."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol, SupportsIndex

import torch

from torch_vmm import _C
from torch_vmm.errors import InvalidArgumentError
from torch_vmm.sizes import show, to_index

Device = torch.device | str | int | None
"""``"cuda"``, ``"cuda:1"``, ``"cpu"``, a ``torch.device``, a CUDA device's index; ``None`` is ``"cuda"``."""


class CudaStream(Protocol):
    """A stream of another library's: CuPy's, for one."""

    def __cuda_stream__(self) -> tuple[int, int]:
        """The protocol's version, and the stream's pointer."""


Stream = torch.Stream | CudaStream | SupportsIndex | None
"""A ``torch.cuda.Stream``, an object with ``__cuda_stream__``, or a stream's pointer; ``None`` is the current one."""

_ACCEPTED = '"cuda", "cuda:1", "cpu", a torch.device, or the index of a CUDA device'


class DeviceKey(NamedTuple):
    """A device, named exactly."""

    kind: Literal["cuda", "cpu"]
    ordinal: int
    """Which of its kind, among the visible ones."""

    @property
    def torch_device(self) -> torch.device:
        """The same, as torch names it: ``cuda:0``, ``cpu``."""
        return torch.device("cpu") if self.kind == "cpu" else torch.device("cuda", self.ordinal)

    def __str__(self) -> str:
        return str(self.torch_device)


class OnDevice:
    """What is on one device."""

    _device: DeviceKey

    @property
    def device(self) -> torch.device:
        """Where its memory is."""
        return self._device.torch_device


class OnNumberedDevice(OnDevice):
    """The same, which tells the device's number too."""

    @property
    def device_ordinal(self) -> int:
        """The device's index among the visible ones of its kind."""
        return self._device.ordinal


def to_device(device: Device) -> DeviceKey:
    """The kind and ordinal of a device.

    ``"cuda"`` and ``None`` are the current CUDA device. Asking for that does not
    initialise CUDA: until it is, torch's current device is 0.

    Raises:
        InvalidArgumentError: nothing that torch takes for a device, or one that
            is neither CUDA's nor the CPU.
        NotAvailableError: a CPU beyond the one that there is.
    """
    refusal = InvalidArgumentError(f"device={show(device)} is not a device: give {_ACCEPTED}")
    named = "cuda" if device is None else device
    if not isinstance(named, torch.device | str):
        # torch.device(index) is of the accelerator at hand, and fails where there is none.
        index = to_index(named)
        if index is None or not 0 <= index < 128:
            raise refusal
        named = f"cuda:{index}"
    try:
        parsed = torch.device(named)
    except (RuntimeError, TypeError, ValueError) as error:
        raise refusal from error
    # torch keeps an index in 8 bits: "cuda:128" is its cuda:-128, "cuda:256" its cuda:0.
    if isinstance(named, str) and ":" in named and str(parsed) != named:
        raise refusal
    if parsed.type == "cpu":
        if parsed.index:
            _C.device("cpu", parsed.index)  # says that there is none
        return DeviceKey("cpu", parsed.index or 0)
    if parsed.type != "cuda":
        raise InvalidArgumentError(f"device={str(parsed)!r} has no pools: give {_ACCEPTED}")
    ordinal: int | None = parsed.index
    if ordinal is None:
        ordinal = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    return DeviceKey("cuda", ordinal)


def current_stream(device: DeviceKey) -> int:
    """Pointer of torch's current stream there; 0, the default stream, where torch has none yet."""
    if device.kind == "cpu" or not torch.cuda.is_initialized():
        return 0
    # What torch's own compiled code asks. In code that torch.compile has split, a torch.cuda.Stream has no pointer.
    return int(torch._C._cuda_getCurrentRawStream(device.ordinal))


def to_stream(stream: Stream, device: DeviceKey) -> int:
    """Pointer of a stream of the device; on the CPU, where work is done at once, a number is its name.

    Raises:
        InvalidArgumentError: no stream, or one of another device.
    """
    if stream is None:
        return current_stream(device)
    if device.kind == "cuda" and isinstance(stream, torch.Stream):
        if stream.device != device.torch_device:
            raise InvalidArgumentError(f"stream={show(stream)} is of {stream.device}, and the memory of {device}")
        return int(
            torch.cuda.Stream(
                stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
            ).cuda_stream
        )
    named: object = stream
    if device.kind == "cuda" and hasattr(stream, "__cuda_stream__"):
        told = stream.__cuda_stream__()  # version, pointer
        named = told[1] if isinstance(told, tuple | list) and len(told) == 2 else None
    pointer = to_index(named)
    if pointer is None or not 0 <= pointer < 2**64:
        accepted = "a torch.cuda.Stream, an object with __cuda_stream__, a stream's pointer"
        if device.kind == "cpu":
            accepted = "a number, its name"
        raise InvalidArgumentError(f"stream={show(stream)} is no stream of {device}: give {accepted}, or None")
    # cudaStreamLegacy, as DLPack and __cuda_array_interface__ name the default stream, which is 0 to torch.
    return 0 if device.kind == "cuda" and pointer == 1 else pointer


def is_capturing(pointer: int, device: DeviceKey) -> bool:
    """Is work that is queued on this stream of a GPU being captured?"""
    if pointer < 3:  # the default streams: never, and to ask is an error while some other is
        return False
    with torch.cuda.stream(to_torch_stream(pointer, device)):
        return torch.cuda.is_current_stream_capturing()


def to_torch_stream(pointer: int, device: DeviceKey) -> torch.cuda.Stream:
    """torch's object for a stream of a GPU."""
    if pointer == 0:
        return torch.cuda.default_stream(device.ordinal)
    return torch.cuda.ExternalStream(pointer, device=device.torch_device)
