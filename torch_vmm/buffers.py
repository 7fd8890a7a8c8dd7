"""Stream-ordered buffers: MemoryPool, what it gives out, and the driver's own kind of pool, as Python sees them.

The extension owns all memory; this converts, and knows no policy.
"""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import Any, SupportsIndex

import torch

from torch_vmm import _C
from torch_vmm._guarded import Guarded
from torch_vmm.devices import (
    Device,
    DeviceKey,
    OnNumberedDevice,
    Stream,
    is_capturing,
    to_device,
    to_stream,
    to_torch_stream,
)
from torch_vmm.errors import InvalidArgumentError, StillInUseError, VmmError
from torch_vmm.sizes import Size, require_dtype, show, to_bytes, to_flag, to_index, to_optional_bytes
from torch_vmm.stats import NativePoolStats, PoolStats

_MOST_BYTES = 2**63 - 1


class MemoryPool(OnNumberedDevice, Guarded, guarded=True):
    """A pool of typed buffers, allocated and freed in the order of a stream.

    A freed buffer's memory is used again at once by work on its own stream, for
    any size that fits. Work on another stream has it once the GPU is done with
    it, rather than new memory; where there is no new memory, behind all that is
    queued on the device at that moment: the GPU waits, not the caller.

    It is a pool beside the models: the device's limit counts it, no model's
    does, whatever model is open. What it keeps free other pools can have when
    memory is short. :meth:`close`, or the end of a ``with``, gives all back.
    Any thread may use it.

    Args:
        device: where the memory is.
    Raises:
        InvalidArgumentError: no device.
        NotAvailableError: no driver, or no such device.
        OutOfMemoryError: the process has no stretch of addresses left.
    """

    _instead_of_a_copy = (
        "it is memory of this process. Keep another reference to it, or make another one; another process makes its own"
    )
    _handle: _C.MemoryPool

    def __init__(self, device: Device = "cuda") -> None:
        self._device = to_device(device)
        self._handle = _C.MemoryPool(*self._device, PooledBuffer)

    def alloc(self, n: SupportsIndex, dtype: torch.dtype = torch.float32, stream: Stream = None) -> PooledBuffer:
        """A buffer of ``n`` elements, aligned to 512 bytes; what is in it is
        undefined.

        Args:
            n: elements; 0 is an empty buffer, which has no memory and is
                counted nowhere.
            dtype: of an element.
            stream: whose work uses it: a ``torch.cuda.Stream``, an object with
                ``__cuda_stream__``, or a stream's pointer; ``None`` is torch's
                current one. On the CPU, where work is done at once, a whole
                number tells streams apart.
        Raises:
            InvalidArgumentError: ``n`` is no whole number, negative or too
                large; no dtype, or a quantized one; no stream of the device;
                the pool is closed.
            OutOfMemoryError: a limit or the device has no such amount left,
                after all that is idle elsewhere has been taken.
        """
        # As little Python as can be: what cannot be is looked at when it has been refused.
        try:
            count = n if type(n) is int else to_index(n)
            if stream is None:
                return self._handle.allocate(count, dtype)  # type: ignore[arg-type, no-any-return]
            buffer: PooledBuffer = self._handle.allocate(count, dtype, to_stream(stream, self._device))  # type: ignore[arg-type]
        except (TypeError, InvalidArgumentError):
            _require_elements(n, dtype)
            raise
        object.__setattr__(buffer, "_streams", {None: stream})
        return buffer

    def stats(self) -> PoolStats:
        """What is allocated and cached, and how often; of a closed pool too. Exact
        while no other thread uses it.
        """
        return PoolStats(**self._handle.stats())

    def trim(self, min_bytes: Size) -> int:
        """Gives cached memory back to the device, freed first going first, until
        at most ``min_bytes`` are cached.

        It goes in whole chunks; what lies in a chunk with a live buffer stays.
        Waits for the work that still uses what it gives back.

        Returns:
            Bytes given back.
        Raises:
            InvalidArgumentError: no size, or the pool is closed.
        """
        return self._handle.trim(to_bytes(min_bytes, "min_bytes"))

    def set_threshold(self, bytes: Size | None) -> None:  # noqa: A002
        """Keeps at most so many bytes cached beyond what the work at hand needs;
        ``None``, as at first: all.

        Above that, memory goes back when it has not been needed for a second:
        at the first :meth:`alloc`, :meth:`stats` or freed buffer after that, as
        much as has been free all the while, freed first going first (an
        :meth:`alloc` that comes late may be the next step of a program: it
        counts what was needed since the one before it). So a
        threshold of 0 keeps nothing beyond what is in use, and yet what the
        steps of a program take and free over and over stays while they go on.
        Only what queued work uses no more goes, and nobody waits; :meth:`trim`
        does both at once.

        Raises:
            InvalidArgumentError: no size, or the pool is closed.
        """
        self._handle.set_threshold(to_optional_bytes(bytes, "bytes"))

    @property
    def name(self) -> str:
        """As errors and :func:`torch_vmm.report` call it: ``buffers-1``."""
        return self._handle.name

    @property
    def threshold(self) -> int | None:
        """Bytes, as :meth:`set_threshold` has it; ``None``: all that is free is
        kept.
        """
        return self._handle.threshold

    @property
    def raw_handle(self) -> int:
        """A number that no other pool of this process has while this one lives."""
        return self._handle.key

    @property
    def is_closed(self) -> bool:
        """Closed: it makes no more buffers; those that there are live on."""
        return self._handle.is_closed

    def close(self, force: bool = False) -> None:
        """Ends the pool and gives all its memory back; twice is fine.

        Args:
            force: with buffers alive: each keeps its memory until it is freed
                or collected.
        Raises:
            StillInUseError: a buffer is alive, and not ``force``.
        """
        self._handle.close(to_flag(force, "force"))

    def __enter__(self) -> MemoryPool:
        if self.is_closed:
            raise InvalidArgumentError("the MemoryPool is closed")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error its frames may keep buffers alive; the error is what matters.
        self.close(force=error is not None)

    def __repr__(self) -> str:
        try:
            stats = self.stats()
            text = f"{_C.format_bytes(stats.allocated_bytes)} allocated, {_C.format_bytes(stats.cached_bytes)} cached"
            text += ", closed" if self.is_closed else ""
        except VmmError:
            text = "out of reach in a forked process"
        return f"MemoryPool({self.name!r}, {self._device}: {text})"


class PooledBuffer(_C.Buffer, Guarded, guarded=True):
    """Elements of one dtype in a :class:`MemoryPool`, which
    :meth:`MemoryPool.alloc` makes.

    Its memory goes back when it is freed, at the end of a ``with``, or when it
    is collected, on whatever thread: in the order of its own stream. ``len()``
    is the number of elements.

    CuPy, Numba, numpy, torch and others read and write it in place: by DLPack
    (``torch.from_dlpack(buffer)``, ``cupy.from_dlpack``), and by
    ``__cuda_array_interface__`` on a GPU (``cupy.asarray``,
    ``numba.cuda.as_cuda_array``) or ``__array_interface__`` on the CPU
    (``numpy.asarray``). Both tell the reader the buffer's stream, so that it
    begins behind it. Work on other streams than its own has to be told by
    :meth:`record_stream`, or to be waited for before the buffer goes. A CUDA
    graph uses its address at each replay, so it must live as long.
    """

    _streams: dict[tuple[type, int] | None, object] | None = None
    """What was given as a stream, its own under ``None``, where it was; others once for each kind of object and stream,
    as a number and what owns the stream may name the same one. It lives as long as what uses it: the memory goes back
    before the object's attributes do, and a tensor keeps them."""
    _read: torch.Tensor | None = None
    """What an array interface has given, until :meth:`free`: of a cycle that is collected all finalizers run before
    anything is cleared, so a reader's may come after the buffer's."""
    _instead_of_a_copy = "it is memory of one MemoryPool. Keep another reference to it, or copy its tensor()"

    def __new__(cls, *_arguments: object, **_options: object) -> PooledBuffer:
        """Refused: memory that nobody has allocated would be looked at."""
        raise InvalidArgumentError("MemoryPool.alloc() makes buffers, and nothing else")

    # -- What it is ----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._count

    def __bool__(self) -> bool:
        return True  # an empty one is a buffer all the same

    @property
    def is_empty(self) -> bool:
        """Has it no elements?"""
        return self._count == 0

    @property
    def byte_size(self) -> int:
        """Bytes of its elements."""
        return self._bytes

    @property
    def dtype(self) -> torch.dtype:
        """Of each element."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """Where the memory is."""
        return DeviceKey(*self._room).torch_device

    @property
    def stream(self) -> torch.cuda.Stream | int:
        """The stream in whose order it is freed and used again; on the CPU its
        number.

        On a GPU always a ``torch.cuda.Stream``: the very one that was given to
        :meth:`MemoryPool.alloc`, or one for the pointer that was, which is its
        ``cuda_stream``. torch compares streams by names of its own, so compare
        ``cuda_stream`` where a pointer was given.
        """
        device = DeviceKey(*self._room)
        if device.kind == "cpu":
            return self._stream_pointer
        given = None if self._streams is None else self._streams.get(None)
        if isinstance(given, torch.cuda.Stream):
            return given
        if self._stream_id is None:
            return to_torch_stream(self._stream_pointer, device)
        kind = torch.cuda.default_stream(device.ordinal).device_type
        return torch.cuda.Stream(stream_id=self._stream_id, device_index=device.ordinal, device_type=kind)

    @property
    def device_ptr(self) -> int:
        """Address of its first element; 0 where it is empty.

        Raises:
            InvalidArgumentError: it is freed.
        """
        return self._address

    @property
    def is_freed(self) -> bool:
        """Freed: it cannot be used any more. Tensors that show it may live on."""
        return self._freed

    def _kept_streams(self) -> dict[tuple[type, int] | None, object]:
        if self._streams is None:
            object.__setattr__(self, "_streams", {})
        return self._streams  # type: ignore[return-value]

    # -- Its use -------------------------------------------------------------------------------------------------------

    def record_stream(self, stream: Stream) -> None:
        """Another stream uses it too: once freed, its memory is used again when
        the work queued there by then is done.

        Args:
            stream: as :meth:`MemoryPool.alloc` takes it. It must live until the
                buffer is freed.
        Raises:
            InvalidArgumentError: no stream of the device, or the buffer is
                freed.
        """
        pointer = to_stream(stream, DeviceKey(*self._room))
        self._kept_streams().setdefault((type(stream), pointer), stream)  # first: it lives as long as what uses it
        self._use_on(pointer)

    def tensor(self) -> torch.Tensor:
        """A tensor over it, of shape ``(len(buffer),)``; no copy.

        While it or a view of it lives, the memory stays. To autograd two such
        tensors are two: what is written by one it does not see in the other.

        Raises:
            InvalidArgumentError: the buffer is freed.
        """
        with torch.inference_mode(False):  # it outlives one that is on now
            return self._show(self._kept_streams())

    def free(self, force: bool = False) -> None:
        """Gives the memory back, in the order of the buffer's stream; twice is
        fine.

        Args:
            force: what a tensor still shows goes back with the last such
                tensor.
        Raises:
            StillInUseError: a tensor of :meth:`tensor`, or what was made of it
                by DLPack, is alive, and not ``force``. What was made by an
                array interface keeps the buffer from being collected, but not
                this.
        """
        forced = force if force is False else to_flag(force, "force")
        was_read = self._read is not None
        if was_read:
            object.__setattr__(self, "_read", None)
        try:
            self._give_back(forced)
        except StillInUseError:
            if was_read:
                self._shown_to_readers()
            raise

    def __enter__(self) -> PooledBuffer:
        if self.is_freed:
            raise InvalidArgumentError(f"{self!r} cannot be entered again")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.free(force=True)

    # -- In other libraries' words -------------------------------------------------------------------------------------

    def __dlpack__(self, **options: Any) -> Any:
        """A DLPack capsule over it, with torch's options and meanings; the
        consumer's stream comes after the buffer's.

        Where the consumer's stream is being captured and the buffer's is not,
        it does not: what is queued on the buffer's is no part of the graph, and
        a replay has to come after it.

        Raises:
            InvalidArgumentError: the buffer is freed.
        """
        if self._is_taken_in_a_capture(options.get("stream", -1)):
            return self.tensor().__dlpack__(**{**options, "stream": -1})
        with self._on_its_stream():
            shown = self.tensor()
            if not options.get("copy"):
                return shown.__dlpack__(**options)
            capsule = shown.__dlpack__(**{**options, "stream": -1})
            shown.__dlpack__(stream=options.get("stream", -1))  # after the copy, which is made on the buffer's stream
            return capsule

    def __dlpack_device__(self) -> tuple[Any, int]:
        """The device in DLPack's words: ``(2, ordinal)`` for a GPU, ``(1, 0)`` for
        the CPU.
        """
        return self.tensor().__dlpack_device__()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3 of the interface, with the buffer's stream; there is none on
        the CPU.

        Raises:
            TypeError: the interface has no such dtype.
        """
        try:
            interface: dict[str, Any] = self._shown_to_readers().__cuda_array_interface__
        except KeyError:  # float8, for one
            raise self._no_such_dtype("__cuda_array_interface__") from None
        interface |= {"version": 3, "stream": self._stream_pointer or 1}  # 1 is the default stream: 0 is not allowed
        return interface

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """The same for numpy, on the CPU alone, and for dtypes that numpy has."""
        if self.device.type != "cpu":
            raise AttributeError(f"a buffer on {self.device} is no array of the host's")
        try:
            interface: dict[str, Any] = self._shown_to_readers().numpy().__array_interface__
        except TypeError:  # bfloat16, for one
            raise AttributeError(f"numpy has no {self.dtype}") from None
        return interface

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """What numpy asks where there is no interface, or it would make an array
        of one object.

        Raises:
            TypeError: it is the GPU's memory, or numpy has no such dtype.
        """
        if self.device.type != "cpu":
            raise TypeError(f"a buffer on {self.device} is no array of the host's: give buffer.tensor().cpu(), a copy")
        try:
            array = self._shown_to_readers().numpy()
        except TypeError:
            raise self._no_such_dtype("numpy") from None
        if dtype is not None and dtype != array.dtype:
            if copy is False:
                raise ValueError(f"copy=False: as {dtype} it is a copy, as the buffer is of {array.dtype}")
            return array.astype(dtype)
        return array.copy() if copy else array

    def _shown_to_readers(self) -> torch.Tensor:
        shown = self.tensor()
        object.__setattr__(self, "_read", shown)
        return shown

    def _no_such_dtype(self, whose: str) -> TypeError:
        copy = "to(torch.complex64)" if self.dtype.is_complex else "float()"
        return TypeError(
            f"{whose} has no {self.dtype}: give buffer.tensor().{copy}, a copy, or buffer.tensor().view(torch.uint8), "
            f"its bytes"
        )

    def _is_taken_in_a_capture(self, consumer: object) -> bool:
        """Is a consumer's stream being captured, and the buffer's not? To wait would end the capture."""
        device = DeviceKey(*self._room)
        # Below 3 are no wait and the default stream, which is never captured; what is no number torch refuses.
        if device.kind == "cpu" or not isinstance(consumer, int) or consumer < 3 or consumer == self._stream_pointer:
            return False
        return is_capturing(consumer, device) and not is_capturing(self._stream_pointer, device)

    def _on_its_stream(self) -> contextlib.AbstractContextManager[object]:
        stream = self.stream
        return contextlib.nullcontext() if isinstance(stream, int) else torch.cuda.stream(stream)

    def __repr__(self) -> str:
        state = ", freed" if self.is_freed else ""
        return f"PooledBuffer({self._count} of {self.dtype} on {self.device}{state})"


class NativeMemoryPool(OnNumberedDevice, Guarded, guarded=True):
    """A stream-ordered pool of the CUDA driver's own: addresses, allocated and
    freed in the order of streams.

    The memory is the driver's: no limit of torch_vmm counts it, and no
    statistics but :meth:`stats` show it. Its end, by :meth:`destroy` or a
    ``with``, shows the driver's errors. One that is dropped without it frees
    what is left when all queued work is done; what the driver refuses then is
    said on stderr and counted in :meth:`destructor_failures`.

    Args:
        device: a GPU.
        max_size_bytes: bytes that are allocated from it at most; 0: no maximum
            but the device's.
    Raises:
        InvalidArgumentError: a device or size that can't be.
        NotAvailableError: no driver, one that is too old, or a device that has
            no such pools, the CPU among them.
    """

    _instead_of_a_copy = (
        "it is memory of this process. Keep another reference to it, or make another one; another process makes its own"
    )
    _handle: _C.NativeMemoryPool

    def __init__(self, device: Device = "cuda", max_size_bytes: Size = 0) -> None:
        self._device = to_device(device)
        self._handle = _C.NativeMemoryPool(*self._device, to_bytes(max_size_bytes, "max_size_bytes"))

    def alloc_async(self, bytes: Size, stream: Stream = None) -> int:  # noqa: A002
        """Memory for work on a stream.

        Args:
            bytes: above 0.
            stream: as :meth:`MemoryPool.alloc` takes it; ``None`` is torch's
                current one. Not one that is being captured.
        Returns:
            Its address.
        Raises:
            InvalidArgumentError: no size, 0 bytes, no stream of the device; the
                pool is destroyed.
            OutOfMemoryError: over the maximum, or the device has no such amount
                left.
            NotAvailableError: the stream is being captured.
            DriverError: anything else that the driver said.
        """
        if type(bytes) is not int or not 0 <= bytes <= _MOST_BYTES:
            bytes = to_bytes(bytes, "bytes")  # noqa: A001
        return self._handle.allocate(bytes, None if stream is None else to_stream(stream, self._device))

    def free_async(self, address: SupportsIndex, stream: Stream = None) -> None:
        """Gives memory back, behind the work that is queued on a stream.

        Args:
            address: what :meth:`alloc_async` returned.
        Raises:
            InvalidArgumentError: not allocated here, or freed before; the pool
                is destroyed.
            NotAvailableError: the stream is being captured.
            DriverError: anything else that the driver said; the memory is still
                allocated.
        """
        at = address if type(address) is int else to_index(address)
        if at is None or not 0 <= at < 2**64:
            raise InvalidArgumentError(f"address={show(address)} is not an address: give what alloc_async() returned")
        self._handle.free(at, None if stream is None else to_stream(stream, self._device))

    def stats(self) -> NativePoolStats:
        """The driver's own numbers.

        Raises:
            InvalidArgumentError: the pool is destroyed.
        """
        return NativePoolStats(**self._handle.stats())

    def trim(self, min_bytes: Size) -> int:
        """Gives unused memory back to the device until at most about ``min_bytes``
        are reserved.

        Returns:
            Bytes given back.
        Raises:
            InvalidArgumentError: no size, or the pool is destroyed.
        """
        return self._handle.trim(to_bytes(min_bytes, "min_bytes"))

    @property
    def release_threshold(self) -> int:
        """Bytes that it keeps reserved when a stream, an event or the device is
        waited for; 0 at first. Can be set.
        """
        return self._handle.release_threshold()

    @release_threshold.setter
    def release_threshold(self, bytes: Size) -> None:  # noqa: A002
        self._handle.set_release_threshold(to_bytes(bytes, "release_threshold"))

    @property
    def raw(self) -> int:
        """The driver's handle, a ``CUmemoryPool`` (which is the runtime's
        ``cudaMemPool_t``).

        Raises:
            InvalidArgumentError: the pool is destroyed.
        """
        return self._handle.raw

    @property
    def max_size_bytes(self) -> int:
        """Bytes that are allocated from it at most; 0: no maximum."""
        return self._handle.max_bytes

    @property
    def is_destroyed(self) -> bool:
        """Destroyed: it takes no more requests."""
        return self._handle.is_destroyed

    def destroy(self, force: bool = False) -> None:
        """Ends the pool, once all work that is queued on its device is done; twice
        is fine.

        Args:
            force: what is still allocated is freed first.
        Raises:
            StillInUseError: something is allocated, and not ``force``.
            DriverError: what the driver refused; the pool is still there, and
                this can be called again.
        """
        self._handle.destroy(to_flag(force, "force"))

    @staticmethod
    def destructor_failures() -> int:
        """Pools of this process that were dropped and that the driver would not
        let go of.
        """
        return _C.NativeMemoryPool.destructor_failures

    def __enter__(self) -> NativeMemoryPool:
        if self.is_destroyed:
            raise InvalidArgumentError("the NativeMemoryPool is destroyed")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error nobody may be left to free what was allocated; the error is what matters.
        self.destroy(force=error is not None)

    def __repr__(self) -> str:
        most = "" if self.max_size_bytes == 0 else f", at most {_C.format_bytes(self.max_size_bytes)}"
        return f"NativeMemoryPool({self._device}{most}{', destroyed' if self.is_destroyed else ''})"


def _require_elements(n: object, dtype: torch.dtype) -> None:
    """Raises InvalidArgumentError for what is no number of elements, or no dtype."""
    require_dtype(dtype)
    count = to_index(n)
    if count is None or not 0 <= count * dtype.itemsize <= _MOST_BYTES:
        raise InvalidArgumentError(
            f"n={show(n)} is no number of elements: give a whole number from 0 to "
            f"{_MOST_BYTES // dtype.itemsize}, which {dtype} can have"
        ) from None
