"""What the extension exports: conversion only, no policy. ``torch_vmm`` is the face of it.

Conventions, everywhere:

- Sizes, offsets and addresses are ``int`` bytes; texts like ``"2MiB"`` go through :func:`parse_bytes` first.
- A device is a pair: ``kind`` is ``"cuda"`` or ``"cpu"``, ``ordinal`` its index among the visible ones (0 for the CPU).
- A limit of ``None`` is no limit, in arguments and in results.
- ``stream`` is a stream's pointer as ``int`` (``torch.cuda.current_stream(device).cuda_stream``), 0 the default stream.
- Errors are the classes of ``torch_vmm.errors``; each is made as ``Class(message, **attributes)`` with the attributes
  of the public table (``InvalidRangeError(message, offset=, size=, capacity=)``).
- Whatever may wait, or take a lock for long, releases the GIL.
- In a forked child every call about memory raises ``NotAvailableError``.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, NoReturn, TypeAlias, TypedDict, final

import torch
import torch.cuda.memory

_Kind = Literal["cuda", "cpu"]

# -- Build -------------------------------------------------------------------------------------------------------------

__version__: str
"""Version of the package that the extension was built from."""
built_for_torch: str
"""torch's full version at build time, as ``"2.11.0"``; one minor only fits (torch_vmm._build_check)."""

def library_path() -> str:
    """Path of this shared library, which also holds ``torch_vmm_malloc`` and ``torch_vmm_free``.

    From then on torch may be allocating with them, so models can be entered.
    """

# -- Options -----------------------------------------------------------------------------------------------------------

def parse_bytes(text: str) -> int:
    """``"2MiB"``, ``"1.5 GiB"``, ``"2MB"``, ``"4096"`` in bytes.

    Raises:
        InvalidArgumentError: not a size, with the accepted form; or beyond 2**63 - 1 bytes.
    """

def format_bytes(size: int) -> str:
    """``"19.8 GiB"``: at most one decimal, binary units."""

def option_table() -> list[tuple[str, str, str, str, str]]:
    """Rows of (name, environment variable, default, unit, sentence)."""

# -- Devices -----------------------------------------------------------------------------------------------------------

def device_count(kind: _Kind) -> int:
    """Usable devices of this kind; 0 where there is no driver. Creates no CUDA context."""

def device(kind: _Kind, ordinal: int = 0) -> Device:
    """The memory of one device; the same object each time. Made at the first call.

    Raises:
        NotAvailableError: no driver, no such device, or one that lacks what is needed, named.
    """

class _Holder(TypedDict):
    name: str
    allocated: int
    idle: int
    stranded: int
    quarantined: int
    floor: int
    reserved: int

class _Refusal(TypedDict):
    requested: int
    available: int
    limit: int
    pool: str
    holders: list[_Holder]
    advice: str

def last_refusal(kind: _Kind, ordinal: int = 0) -> _Refusal | None:
    """The last request of a pool that was refused there; ``None`` also for a device that was never used."""

# -- Debug mode --------------------------------------------------------------------------------------------------------

_ReclaimDecision: TypeAlias = tuple[
    int, str, str, bool, tuple[tuple[str, str, int, float, tuple[tuple[str, int], ...]], ...]
]
"""Requested bytes, asker, refused by, met, steps: rung, result, bytes, seconds, yielded."""

class _ReclaimReport(TypedDict):
    requests: int
    refused: int
    rungs: dict[str, tuple[int, int, int, int]]
    """Tried, changed, met, bytes."""
    latest: list[_ReclaimDecision]

class _WatchedBlock(TypedDict):
    number: int
    address: int
    requested: int
    size: int
    pool: str
    stream: int
    stack: str
    is_freed: bool
    is_unmapped: bool
    faults: tuple[int, int]

class _Damage(TypedDict):
    block: _WatchedBlock
    first: int
    bytes: int
    text: str

class _Finding(TypedDict):
    block: _WatchedBlock
    where: Literal["before", "inside", "beyond"]
    distance: int
    is_own: bool
    text: str

class _DebugReport(TypedDict):
    mode: str
    watched: int
    missed: int
    damaged: int
    live: int
    blocks: list[_WatchedBlock]
    freed: list[_WatchedBlock]
    damages: list[_Damage]
    text: str

def debug_mode() -> str:
    """What ``TORCH_VMM_DEBUG`` asks for, ``"off"`` if nothing."""

def debug_explain(address: int) -> list[_Finding]:
    """Watched blocks near an address, of all devices; the nearest in meaning first."""

def debug_report(kind: _Kind, ordinal: int = 0, most: int = 64) -> _DebugReport | None:
    """At most ``most`` blocks of each kind; ``None`` where debug mode is off or the device was never used."""

def debug_check(kind: _Kind, ordinal: int = 0) -> list[_Damage]:
    """Waits for the device and looks at all patterns; everything damaged that is known then."""

@final
class Device:
    """All pools of one device, and what they hold together."""

    def __init__(self, *args: object, **kwargs: object) -> NoReturn: ...
    @property
    def kind(self) -> _Kind: ...
    @property
    def ordinal(self) -> int: ...
    @property
    def name(self) -> str:
        """``"NVIDIA H100 80GB HBM3"``, ``"host"``."""
    @property
    def granularity(self) -> int:
        """Bytes; every page size is a multiple of it."""
    @property
    def total_bytes(self) -> int:
        """Bytes of memory that the device has."""
    @property
    def committed_bytes(self) -> int:
        """Bytes that the driver gave and that are still held: mapped, or kept unmapped by the chunk store."""
    @property
    def limit(self) -> int | None:
        """Bytes: the cap over all pools of the device (torch's per-process memory fraction sets the same one)."""
    def set_limit(self, limit: int | None) -> int:
        """Sets :attr:`limit`; returns the bytes of idle memory given back for it. Memory in use stays."""
    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes, as the driver says."""
    def pools(self) -> list[Pool]:
        """Every pool of the device, closed ones that still drain included, in order of creation.

        What models have in torch's private pools is part of theirs.
        """
    def statistics(self) -> dict[str, int]:
        """``torch.cuda.memory_stats``'s keys for the device: totals over all pools, and the device's own peaks."""
    def reset_peaks(self) -> None: ...
    def reset_accumulated(self) -> None: ...
    def snapshot(self) -> list[dict[str, object]]:
        """All pools' segments by address, in the shape of ``torch.cuda.memory_snapshot()``."""
    def empty_cache(self) -> int:
        """Gives every idle chunk of every pool back to the driver; returns their bytes."""
    def check(self) -> None:
        """For tests: proves that pools and chunk store sum to what the driver gave; aborts with the values otherwise.

        No other thread may use the device meanwhile.
        """
    @property
    def live_chunks(self) -> int:
        """For tests: physical chunks that exist now."""

# -- Pools -------------------------------------------------------------------------------------------------------------

def follow_reclaims() -> None:
    """Decisions of the reclaim ladder are kept from now on, 256 at most, for whoever takes them."""

def end_reclaims() -> None:
    """They are kept no more, and :func:`next_reclaim` returns."""

def next_reclaim() -> tuple[_Kind, int, _ReclaimDecision, int] | None:
    """Waits for the next: on which device it was made, and how many before it nobody took. ``None``: it has ended."""

def default_pool(kind: _Kind, ordinal: int = 0) -> Pool:
    """The pool of what is made outside any model's context. Its name is ``"default"``.

    Raises:
        NotAvailableError: as :func:`device`.
    """

def create_pool(
    kind: _Kind,
    ordinal: int,
    capacity: int | None,
    page_size: int | None = None,
    physical_limit: int | None = None,
    name: str = "pool",
) -> Pool:
    """A pool that stands directly under the device's limit.

    Args:
        capacity: bytes of addresses, rounded up to whole pages; ``None``: four times the
            device's memory, or what TORCH_VMM_DEFAULT_CAPACITY says, where the process has so many.
        page_size: bytes, the grain in which memory is given back; ``None``: chosen by the request.
        physical_limit: bytes.
        name: for messages.
    Raises:
        InvalidArgumentError, InvalidPageSizeError: capacity, page size or limit that can't be.
        OutOfMemoryError: no such stretch of addresses.
        NotAvailableError: as :func:`device`.
    """

@final
class Pool:
    """One model's memory. The same object comes back for the same pool while anyone holds it."""

    def __init__(self, *args: object, **kwargs: object) -> NoReturn: ...
    @property
    def key(self) -> int:
        """Identity: equal for two handles of one pool, unique while a handle lives."""
    @property
    def name(self) -> str: ...
    @property
    def tag(self) -> str:
        """Of a tag's space; empty: it is none."""
    @property
    def model(self) -> Pool:
        """The pool that a tag's space is of, or itself."""
    def tagged(self, tag: str) -> Pool:
        """The space for what is made under ``tag``, made when first asked for; of a model, not of a space.

        Raises:
            InvalidArgumentError: closed, or an empty tag. OutOfMemoryError: no addresses.
        """
    @property
    def tags(self) -> dict[str, int]:
        """Bytes allocated under each tag that there ever was."""
    @property
    def kind(self) -> _Kind: ...
    @property
    def ordinal(self) -> int: ...
    @property
    def capacity(self) -> int: ...
    @property
    def base_address(self) -> int: ...
    @property
    def page_size(self) -> int: ...
    @property
    def priority(self) -> int: ...
    @property
    def floor(self) -> int: ...
    @property
    def physical_bytes(self) -> int:
        """Bytes mapped now."""
    @property
    def live_bytes(self) -> int:
        """Bytes of live tensors and explicit pages, frees that wait for a recorded stream included."""
    @property
    def live_bytes_here(self) -> int:
        """The same without what has spilled."""
    @property
    def live_blocks(self) -> int: ...
    @property
    def limit(self) -> int | None:
        """Bytes: the pool's own physical limit."""
    def set_limit(self, limit: int | None) -> int:
        """Sets :attr:`limit`; returns the bytes of idle memory given back for it. Memory in use stays."""
    def set_floor(self, floor: int) -> int:
        """Returns the bytes of idle memory that others gave back for it.

        Raises:
            InvalidArgumentError: the pool is closed, or the floors are above a limit together.
        """
    def set_priority(self, priority: int) -> None:
        """Raises InvalidArgumentError: the pool is closed."""
    @property
    def spills(self) -> bool:
        """Whether a tensor that finds no memory on the device may stand in the host's."""
    def set_spills(self, spills: bool) -> None:
        """Raises InvalidArgumentError: closed. NotAvailableError: the device cannot use host memory so."""
    @property
    def is_closed(self) -> bool:
        """Closed by :meth:`close` or by its SharedMemoryPool; it may still drain."""

    # Explicit pages. Ranges are widened to whole pages.
    def allocate_pages(self, offset: int, size: int, stream: int = 0) -> int:
        """Backs the pages of [offset, offset + size); returns the address of ``offset``.

        Raises:
            InvalidRangeError, AlreadyMappedError, OutOfMemoryError; InvalidArgumentError when closed, as everything
            here but numbers.
        """
    def deallocate_pages(self, offset: int, size: int) -> None:
        """Gives up the pages of the range; whoever still has work queued on them need not wait.

        Raises:
            InvalidRangeError, NotMappedError; StillInUseError for what a :meth:`tensor` shows.
        """
    def is_mapped(self, offset: int, size: int) -> bool:
        """Is every page of the range in use, by :meth:`allocate_pages` or by a tensor?

        Raises:
            InvalidRangeError.
        """
    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor over explicit pages, no copy; these pages stay while it lives.

        Raises:
            InvalidRangeError: beyond the pool, or empty.
            NotMappedError: some of it is not held by :meth:`allocate_pages`.
            InvalidArgumentError: ``offset`` is not aligned to the dtype, a quantized dtype, a negative size, too many
                bytes.
        """

    def trim(self, keep: int = 0) -> int:
        """Gives idle chunks back until at most ``keep`` idle bytes stay; returns the bytes given back."""
    def empty_cache(self) -> None:
        """``trim(0)`` and all that its group's store keeps; of a pool of no shared one, the pinned memory too
        that such pools have slept in and none uses.
        """
    def reclaim_report(self) -> _ReclaimReport:
        """What became of requests that climbed the reclaim ladder, of the model and its parts."""
    def memory_stats(self) -> dict[str, int | float]:
        """The fields of ``torch_vmm.MemoryStats``. Walks the pool."""
    def statistics(self, walk: bool = False) -> dict[str, int]:
        """``torch.cuda.memory_stats``'s keys for this pool, with every key that the native allocator has.

        Flat (``"allocated_bytes.all.current"``) and not sorted. What is the model's in torch's private pools counts.
        Cheap without ``walk``; with it, ``inactive_split`` and ``inactive_split_bytes`` are up to date.
        """
    def reset_peaks(self) -> None: ...
    def reset_accumulated(self) -> None: ...
    def snapshot(self) -> list[dict[str, object]]:
        """Segments by address, in the shape of ``torch.cuda.memory_snapshot()``. Walks the pool."""
    def close(self, force: bool = False) -> None:
        """Ends the pool; does nothing when it is closed already.

        Args:
            force: explicit pages go at once, but for those that a :meth:`tensor` shows, which go with it; the pool ends
                when its last tensor is freed.
        Raises:
            StillInUseError: something is alive in it, and not ``force``.
            InvalidArgumentError: it is a device's default pool, or it belongs to a SharedMemoryPool.
        """

@final
class SharedMemoryPool:
    """Models by id under one physical limit."""

    def __init__(self, kind: _Kind, ordinal: int, physical_limit: int) -> None:
        """Raises InvalidArgumentError for a limit of 0, NotAvailableError as :func:`device`."""
    @property
    def kind(self) -> _Kind: ...
    @property
    def ordinal(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def physical_limit(self) -> int: ...
    @property
    def is_closed(self) -> bool: ...
    def set_physical_limit(self, physical_limit: int) -> int:
        """Returns the bytes of idle memory given back for it."""
    @property
    def floor(self) -> int: ...
    def set_floor(self, floor: int) -> int:
        """As :meth:`Pool.set_floor`."""
    @property
    def priority(self) -> int: ...
    def set_priority(self, priority: int) -> None:
        """As :meth:`Pool.set_priority`."""
    @property
    def spill_limit(self) -> int | None: ...
    def set_spill_limit(self, limit: int | None) -> int:
        """Bytes of host memory for what models spill; returns those given back now."""
    def set_on_pressure(self, function: Callable[[int, Pool], bool] | None) -> None:
        """Called for a request that finds no memory, on its thread, with no lock held."""
    def register_model(
        self,
        model_id: str,
        virtual_capacity: int | None = None,
        page_size: int | None = None,
        physical_limit: int | None = None,
        floor: int = 0,
        priority: int = 0,
        spills: bool = False,
    ) -> Pool:
        """Raises ModelExistsError; NotAvailableError: it cannot spill; InvalidArgumentError for an empty id, floors
        above the limit and their kind.
        """
    def unregister_model(self, model_id: str, force: bool = False) -> None:
        """Raises ModelNotFoundError; StillInUseError unless ``force``."""
    def model(self, model_id: str) -> Pool:
        """Raises ModelNotFoundError."""
    def has_model(self, model_id: str) -> bool: ...
    def model_ids(self) -> list[str]:
        """In order of registration."""
    def allocate_for_model(self, model_id: str, size: int, stream: int = 0) -> int:
        """Explicit pages at the model's first free span; returns the address."""
    def deallocate_for_model(self, model_id: str, offset: int, size: int) -> None: ...
    def global_stats(self) -> dict[str, int]:
        """The fields of ``torch_vmm.GlobalMemoryStats``."""
    def close(self, force: bool = False) -> None:
        """Unregisters all models. Raises StillInUseError while one is in use, unless ``force``."""

def set_default_model(kind: _Kind, ordinal: int, pool: Pool | None) -> None:
    """Whose tensors are that are made outside any model, while it is open; ``None``: the default pool's.

    Raises:
        InvalidArgumentError: it is closed.
    """

# -- Sleep and wake ----------------------------------------------------------------------------------------------------

_Place = tuple[str, str, int]
"""``("host" | "host, packed" | "discard" | "poison" | "file" | "device", the file's absolute path, the device's
ordinal)``."""

@final
class Transfer:
    """A model on its way to sleep or back: begun, so that nothing that can be refused is left."""

    def __init__(self, *args: object, **kwargs: object) -> NoReturn: ...
    def run(self, tell: Callable[[], object] | None = None, sees_signals: bool = True) -> None:
        """All the way, once. ``tell`` is called where something has moved; what it raises stops it, and so does
        Ctrl-C in a thread that ``sees_signals``."""
    @property
    def done(self) -> int:
        """Bytes that have moved: of these ``gone`` on the way to sleep, ``come`` on the way back."""
    @property
    def gone(self) -> int: ...
    @property
    def come(self) -> int: ...
    @property
    def total(self) -> int: ...
    def wait_for(self, address: int, size: int) -> bool | None:
        """Until what is at [address, address + size) is there; false: it ended before; ``None``: 50 ms went by."""

def sleep(pool: Pool, keep: list[_Place] | None, by_tag: dict[str, list[_Place]], release: bool) -> Transfer:
    """``keep`` is where what ``by_tag`` does not name goes; ``None``: that stays awake.

    Raises:
        OutOfMemoryError, InvalidArgumentError, NotAvailableError, VmmError: it is awake.
    """

def wake(pool: Pool, tags: list[str] | None) -> Transfer:
    """Raises OutOfMemoryError: it sleeps as before."""

def swap(out: Pool, keep: list[_Place] | None, by_tag: dict[str, list[_Place]], into: Pool) -> Transfer:
    """Both at once. Raises InvalidArgumentError for pools of two devices or one model, OutOfMemoryError: as before."""

def asleep(pool: Pool) -> dict[str, str]:
    """Where what sleeps is, by tag, of those that held something; ``"nothing"`` where none of them did."""

def forget_names_of_backups(pool: Pool) -> None:
    """Removes the files that any of it sleeps in from their folders; they can be read as long as the process lives."""

def is_asleep(pool: Pool) -> bool:
    """Some part of it."""

def require_there(address: int, size: int) -> None:
    """Raises AsleepError where some of that has no memory, as its model sleeps; at once where it is in no pool."""

def read_backup(address: int, size: int, to: int) -> bool:
    """Copies what is kept of a sleeping tensor to plain memory at ``to``; false: not all of it is."""

def host_backup_limit(pool: SharedMemoryPool) -> int | None: ...
def set_host_backup_limit(pool: SharedMemoryPool, limit: int | None) -> int:
    """Returns the bytes unpinned for it."""

def host_backup_bytes(pool: SharedMemoryPool) -> int:
    """Pinned bytes, used or not."""

def release_host_backups(pool: SharedMemoryPool) -> int:
    """Returns the bytes unpinned."""

# -- Low level ---------------------------------------------------------------------------------------------------------

@final
class AccessFlags:
    """``str()`` is ``None``, ``Read``, ``ReadWrite``."""

    NONE: ClassVar[AccessFlags]
    READ: ClassVar[AccessFlags]
    READ_WRITE: ClassVar[AccessFlags]
    __members__: ClassVar[dict[str, AccessFlags]]
    def __init__(self, value: object) -> None:
        """Raises InvalidArgumentError for anything but the three and their numbers."""
    def __int__(self) -> int: ...
    def __index__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __eq__(self, other: object) -> bool: ...
    def __ne__(self, other: object) -> bool: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

@final
class VirtualAddressRange:
    """``str()``: ``VA[0x7f00000000..0x7f00400000, 4194304 bytes, align=2097152]``. Made by a manager only."""

    def __init__(self, *args: object, **kwargs: object) -> NoReturn: ...
    @property
    def base(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def alignment(self) -> int: ...
    @property
    def end(self) -> int: ...
    def contains(self, address: object) -> bool:
        """``False`` for any whole number outside; InvalidArgumentError for what is no whole number."""
    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...

@final
class PhysicalAllocation:
    """``str()``: ``PhysAlloc[handle=0x1, 2097152 bytes, dev=0]``. Made by a manager only."""

    def __init__(self, *args: object, **kwargs: object) -> NoReturn: ...
    @property
    def handle(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def device(self) -> int:
        """Ordinal; -1 is host memory (of a GPU's manager)."""
    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...

@final
class MappingRecord:
    """Made by a manager only."""

    def __init__(self, *args: object, **kwargs: object) -> NoReturn: ...
    @property
    def va_offset(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def phys_handle(self) -> int: ...
    @property
    def access(self) -> AccessFlags: ...

@final
class VirtualMemoryManager:
    """Addresses, physical memory and mappings by hand."""

    def __init__(self, kind: _Kind, ordinal: int = 0) -> None:
        """Raises NotAvailableError as :func:`device`."""
    @property
    def kind(self) -> _Kind: ...
    @property
    def ordinal(self) -> int: ...
    @property
    def granularity(self) -> int: ...
    @property
    def host_memory_usage(self) -> int: ...
    @property
    def is_closed(self) -> bool: ...
    def reserve(self, size: int, alignment: int | None = None) -> VirtualAddressRange: ...
    def release(self, range: VirtualAddressRange) -> None: ...
    def alloc_physical(
        self, size: int, device: tuple[_Kind, int] | None = None, exportable: bool = False
    ) -> PhysicalAllocation:
        """``device``: (kind, ordinal); ``None``: the manager's own. ``("cpu", 0)`` is host memory."""
    def free_physical(self, physical: PhysicalAllocation) -> None: ...
    def map(self, range: VirtualAddressRange, physical: PhysicalAllocation, offset: int = 0) -> None: ...
    def unmap(self, range: VirtualAddressRange, offset: int, size: int) -> None: ...
    def set_access(
        self,
        range: VirtualAddressRange,
        flags: AccessFlags,
        devices: Sequence[tuple[_Kind, int]] | None = None,
        offset: int = 0,
        size: int | None = None,
    ) -> None:
        """``devices``: who gets it; ``None``: the manager's own. ``size`` ``None``: up to the end of what is mapped.

        Raises:
            StillInUseError: ``NONE`` for the manager's own device, where a :meth:`tensor` lives.
        """
    def mappings(self, range: VirtualAddressRange) -> list[MappingRecord]:
        """By offset."""
    def tensor(self, range: VirtualAddressRange, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor over mapped, accessible memory, no copy; its stretch cannot be unmapped while it lives.

        Raises:
            InvalidRangeError: beyond the range, or empty.
            NotMappedError: some of it is not mapped.
            InvalidArgumentError: not accessible, a quantized dtype, or not aligned to the dtype.
        """
    def close(self) -> None:
        """Gives back all that it made. Raises StillInUseError while a tensor over it lives; twice is fine."""

# -- Stream-ordered buffers --------------------------------------------------------------------------------------------

class Buffer:
    """Base of what a MemoryPool makes. Its memory goes back when it is freed, or collected, and no tensor shows it."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        """Nobody but a MemoryPool makes one."""
    @property
    def _address(self) -> int:
        """0 where it has no bytes. Raises InvalidArgumentError once it is freed."""
    @property
    def _count(self) -> int:
        """Elements."""
    @property
    def _bytes(self) -> int: ...
    @property
    def _dtype(self) -> torch.dtype: ...
    @property
    def _stream_pointer(self) -> int: ...
    @property
    def _stream_id(self) -> int | None:
        """torch's name of it, where it was the current one."""
    @property
    def _room(self) -> tuple[_Kind, int]: ...
    @property
    def _freed(self) -> bool: ...
    def _use_on(self, stream: int) -> None: ...
    def _give_back(self, force: bool) -> None:
        """Twice is fine. Raises StillInUseError while a tensor shows it, unless ``force``: then it goes with that."""
    def _show(self, streams: object) -> torch.Tensor:
        """A tensor over it, no copy; it keeps the memory, and as long ``streams``."""

@final
class MemoryPool:
    """Buffers in the order of streams."""

    def __init__(self, kind: _Kind, ordinal: int, buffer_class: type[Buffer]) -> None:
        """``buffer_class`` is what Python derives from :class:`Buffer`. Raises NotAvailableError as :func:`device`."""
    @property
    def key(self) -> int:
        """As :attr:`Pool.key` of the pool behind it."""
    @property
    def name(self) -> str: ...
    @property
    def is_closed(self) -> bool: ...
    @property
    def threshold(self) -> int | None: ...
    def allocate(self, count: int, dtype: torch.dtype, stream: int | None = None) -> Any:
        """One of ``buffer_class``. ``stream`` ``None``: torch's current one."""
    @property
    def functions(self) -> tuple[int, int, int]:
        """For loops in C++: addresses of what allocates, ``void*(void* first, size_t bytes, void* stream)``, and what
        frees, ``void(void* first, void* address, void* stream)``, behind that of ``first``.
        """
    def stats(self) -> dict[str, int]:
        """The fields of ``torch_vmm.PoolStats``."""
    def trim(self, keep: int) -> int:
        """Bytes given back."""
    def set_threshold(self, bytes: int | None) -> None: ...
    def close(self, force: bool = False) -> None: ...

@final
class NativeMemoryPool:
    """A pool of the driver's own."""

    destructor_failures: ClassVar[int]
    """Of this process, so far."""

    def __init__(self, kind: _Kind, ordinal: int, max_bytes: int) -> None:
        """``max_bytes`` 0: no maximum. Raises NotAvailableError: the device has no such pools, or as :func:`device`."""
    @property
    def is_destroyed(self) -> bool: ...
    @property
    def max_bytes(self) -> int: ...
    @property
    def raw(self) -> int: ...
    def allocate(self, bytes: int, stream: int | None = None) -> int:
        """``stream`` ``None``: torch's current one."""
    def free(self, address: int, stream: int | None = None) -> None: ...
    @property
    def functions(self) -> tuple[int, int, int]:
        """As MemoryPool's."""
    def destroy(self, force: bool = False) -> None: ...
    def stats(self) -> dict[str, int]:
        """The fields of ``torch_vmm.NativePoolStats``."""
    def trim(self, keep: int) -> int:
        """Bytes given back."""
    def set_release_threshold(self, bytes: int) -> None: ...
    def release_threshold(self) -> int: ...

# -- Tensors whose pages come and go -----------------------------------------------------------------------------------

@final
class PlacedMemory:
    """One range of addresses over memory of several devices, which all of them reach. It ends with its last tensor."""

    def __init__(self, shares: Sequence[tuple[Pool, int, int]]) -> None:
        """``shares``: pool, bytes and the stream that uses it first, in order; all but the last are whole pages.

        Raises:
            InvalidArgumentError: a closed pool, no whole pages, devices of several kinds.
            OutOfMemoryError: of the pool that has no room, and nothing is made.
            DriverError: a device cannot reach another's memory.
        """

    @property
    def base_address(self) -> int: ...
    @property
    def size(self) -> int:
        """Bytes, whole pages."""
    def tensor(self, shape: Sequence[int], dtype: torch.dtype, kind: _Kind, ordinal: int) -> torch.Tensor:
        """A contiguous tensor from the first byte on, of a device that has a share."""

class TensorRange:
    """The memory of one tensor: addresses of its own in ``pool``, backed page by page.

    It ends with its last tensor, whoever has this: all that asks of pages is an InvalidArgumentError then.
    """

    def __init__(self, pool: Pool, what: str, capacity: int, page_size: int | None = None, zeros: bool = False) -> None:
        """``what``: for messages. ``page_size`` ``None``: chunks of up to a 16th of what lies below them.

        ``zeros``: what has no memory reads as zero; with a page size only.

        Raises:
            InvalidArgumentError: a closed pool, a capacity that can't be.
            InvalidPageSizeError: a page size that can't be.
            OutOfMemoryError: no such stretch of addresses.
        """

    @property
    def base_address(self) -> int: ...
    @property
    def capacity(self) -> int:
        """Bytes, rounded up to whole pages."""
    @property
    def page_size(self) -> int: ...
    @property
    def has_gone(self) -> bool:
        """No tensor shows it any more."""
    def commit(self, spans: Sequence[tuple[int, int]], stream: int = 0) -> None:
        """Backs the pages under these (offset, size) that have no memory; all or none. With ``zeros`` it waits.

        Raises:
            InvalidRangeError: beyond the capacity.
            OutOfMemoryError: a limit or the device has no such amount left.
            InvalidArgumentError: the pool is closed.
        """

    def decommit(self, spans: Sequence[tuple[int, int]]) -> int:
        """Gives the memory of these pages back, where they have some; returns the bytes of those.

        Waits for queued work with ``zeros``, and else for nobody.
        """

    def committed(self, offset: int, size: int) -> list[tuple[int, int]]:
        """(offset, size) of the stretches of whole pages there that have memory."""

    def is_committed(self, spans: Sequence[tuple[int, int]]) -> bool: ...
    def require_awake(self) -> None:
        """AsleepError where its model is asleep, or the tag that it was made under, or on its way there or back."""
    def require_there(self, size: int) -> bool:
        """Whether it is awake; while it is not, AsleepError where any of the first ``size`` bytes are elsewhere."""
    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor from the first address on; it keeps the range alive."""

def alias(
    pool: Pool,
    tensors: Sequence[torch.Tensor],
    pieces: Sequence[tuple[int, int]],
    copies: int,
    read_only: bool,
    shape: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """A tensor over the chunks under these (address, bytes), in order, ``copies`` times, at addresses of its own.

    ``pool`` shows as shared what is another model's. The memory of ``tensors`` stays as long as it lives, or as a graph
    that was captured with it.

    Raises:
        InvalidArgumentError: no whole chunks, or a closed pool.
        OutOfMemoryError: no such stretch of addresses.
    """

def share_version(tensor: torch.Tensor, source: torch.Tensor) -> None:
    """What is written in place through one of them counts as such in both, as for a view; autograd notices."""

def seal(pool: Pool, pieces: Sequence[tuple[int, int, bool]]) -> None:
    """Makes the pages under these (address, bytes) of ``pool`` read-only, all or none; waits for queued work.

    Raises:
        InvalidArgumentError: another pool's, or chunks that hold other memory too.
    """

def unseal(pool: Pool, pieces: Sequence[tuple[int, int, bool]]) -> None:
    """Makes them writable again."""

def is_sealed(pool: Pool, address: int, size: int) -> bool:
    """Whether nobody may write to any byte of it."""

def shared_bytes(pool: Pool) -> int:
    """Bytes of other pools' memory that aliases made in this one show."""

def set_storage_bytes(tensor: torch.Tensor, size: int) -> None:
    """The storage of ``tensor``, one over memory of ours, ends after ``size`` bytes, for all its views."""

# -- Becoming torch's allocator ----------------------------------------------------------------------------------------

def enable_cuda() -> None:
    """Makes this torch's CUDA allocator; does nothing when it is already.

    Raises:
        NotAvailableError: no driver or GPU; or CUDA has been initialised with another allocator, named.
    """

def enable_host() -> None:
    """Routes torch's host tensors through ``"cpu"`` pools; does nothing when it does already."""

def is_enabled(kind: _Kind) -> bool: ...

# At run time only the first is its base. ``change_current_allocator`` is typed to take the second, and needs no more of
# it than ``allocator()``.
@final
class CUDAAllocator(torch._C._cuda_CUDAAllocator, torch.cuda.memory._CUDAAllocator):
    """A ``torch._C._cuda_CUDAAllocator``: what ``torch.cuda.MemPool`` takes."""

    def allocator(self) -> CUDAAllocator:
        """Itself: what ``torch.cuda.memory.change_current_allocator`` asks of its argument."""

def allocator() -> CUDAAllocator:
    """The one allocator object of the process. Needs no driver."""

# -- Whose memory ------------------------------------------------------------------------------------------------------

@final
class Stays:
    """The open stays of one context manager, by thread."""

    def __init__(self, carried: bool = False) -> None: ...

def enter_context(self: object) -> object:
    """``__enter__`` of what has ``_stays`` and ``_opens()``: from now on tensors made by this thread, and by the
    backward() that it calls, belong to the pool that it opens. Of carried ones, to exactly these, one a device.

    Raises:
        InvalidArgumentError: the pool is closed.
        NotEnabledError: torch makes no tensors of its device through us.
    """

def leave_context(self: object, *args: object) -> None:
    """``__exit__`` of the same.

    Raises:
        VmmError: it is not the innermost one here (a ``with`` held across a ``yield`` or ``await``, or closed on
            another thread), or was left already. Names both models and the cure. The context is left all the same,
            and all others stay as they were.
    """

def open_models() -> list[Pool]:
    """The pools, or tags' spaces, that are open here, the innermost of each device, innermost first."""

def open_on(kind: _Kind, ordinal: int) -> list[Pool]:
    """All of them that are open here on the device, innermost first."""

def set_strict(kind: _Kind, ordinal: int, action: Literal["raise", "warn", "off"]) -> None:
    """What happens where a tensor is made outside every model of the device. Loads no driver.

    Raises:
        NotEnabledError: torch makes no tensors of this kind of device through us.
        NotAvailableError: no such ordinal can be.
    """

def current_pool(kind: _Kind, ordinal: int = 0) -> Pool:
    """The pool that an allocation on this device, here and now, would come from."""

def current_space(kind: _Kind, ordinal: int, bytes: int) -> Pool:
    """The same for a tensor of so many bytes; where a tag is open, its space.

    Raises:
        RuntimeError: strict() lets none be made here.
    """

def pool_at(address: int) -> Pool | None:
    """The pool whose addresses hold ``address``, of whatever device."""

# -- Traces ------------------------------------------------------------------------------------------------------------

class _Replayed(TypedDict):
    allocated: bytes
    reserved: bytes
    driver_calls: bytes
    calls: dict[str, int]
    allocated_peak: int
    reserved_peak: int
    left: int
    refused_at: int | None

def replay(
    op: object,
    id: object,
    size: object,
    stream: object,
    device_bytes: int,
    model: object | None = None,
    limit: int | None = None,
    behind: int = 0,
    time_us: object | None = None,
) -> _Replayed:
    """Allocates and frees as a recorded program did, on a device of host memory of its own, which is never touched.

    Args:
        op: 0 allocate, 1 free, in program order: one column of bytes, by the buffer protocol.
        id: the block (a column of unsigned 64-bit numbers, as the following).
        size: bytes asked for; read where ``op`` is 0.
        stream: a number for each stream; 0 is the first.
        device_bytes: the device's memory.
        model: which model's pool, a column of bytes; default: all are one model's.
        limit: bytes that all models may hold together; default: none.
        behind: steps for which what a stream was given stays queued, as a GPU is behind the program.
        time_us: when each step was, in microseconds since any moment, a column of unsigned 64-bit numbers that never
            falls; default: no time passes.
    Returns:
        ``allocated``, ``reserved`` (bytes) and ``driver_calls`` (since the start) after each step, as columns of
        unsigned 64-bit numbers: ``array("Q", answer["reserved"])``. ``calls`` by kind (create, release, map,
        unmap, set_access), the peaks of the whole, the
        bytes ``left`` when all was freed (0), and ``refused_at``, the step that found no memory: the columns end
        before it.
    Raises:
        InvalidArgumentError: columns of different lengths or of other numbers, or a time that falls.
    """
