"""VirtualMemoryPool: one model's memory, as Python sees it.

A huge range of addresses, backed with physical memory where it is needed. The
extension owns everything; this is its face, and knows no policy.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import torch

from torch_vmm import _C, events, remaps, tables
from torch_vmm._guarded import Guarded
from torch_vmm._lifetimes import hold_while
from torch_vmm.contexts import ContextDecorator
from torch_vmm.dense import covered_pieces
from torch_vmm.devices import Device, DeviceKey, OnDevice, current_stream, to_device
from torch_vmm.errors import InvalidArgumentError, VmmError
from torch_vmm.places import Keep, Wishes
from torch_vmm.progress import Progress
from torch_vmm.reclaiming import ReclaimReport, report_of
from torch_vmm.remaps import Remaps
from torch_vmm.sizes import (
    Shape,
    Size,
    to_bytes,
    to_flag,
    to_name,
    to_number,
    to_optional_bytes,
    to_page_size,
    to_range,
    to_spill,
    to_tensor_range,
)
from torch_vmm.sleeping import Transfer
from torch_vmm.sleeping import sleep as _sleep
from torch_vmm.sleeping import wake as _wake
from torch_vmm.stats import MemoryStats, memory_summary
from torch_vmm.tags import Tag
from torch_vmm.workspaces import end_with_workspaces_freed

if TYPE_CHECKING:
    from torch_vmm.shared_pools import SharedMemoryPool

_numbers = itertools.count(1)


class VirtualMemoryPool(ContextDecorator, OnDevice, Guarded, guarded=True):
    """An elastic pool: a range of addresses whose pages get memory, and give it
    back.

    ``with pool:`` makes tensors in it, as :func:`torch_vmm.use_model` does:
    again while inside, nested, on several threads. Addresses stay for the
    pool's life.

    A pool that is dropped without :meth:`close` ends with its last tensor; its
    explicit pages go at once, but a tensor of :meth:`tensor` keeps the pool.
    For one pool there is one object, so ``is`` compares pools. It is not copied
    or pickled. Once it is closed, every request is an ``InvalidArgumentError``
    that says so; its numbers can still be read.

    Args:
        capacity: bytes of addresses, rounded up to whole pages; they cost
            nothing. It bounds torch's tensors and :meth:`allocate`. Each tag,
            and each tensor of :func:`torch_vmm.aligned`,
            :func:`torch_vmm.elastic` and :func:`torch_vmm.sparse`, has
            addresses of its own beside these: their memory is bounded by
            ``physical_limit`` alone.
        page_size: bytes, the grain in which memory is given back: a power of
            two and a multiple of the device's granularity (2 MiB). ``None``
            lets the pool choose chunks by the request, so that large ones cost
            few calls.
        device: where the memory is.
        physical_limit: bytes of memory, at most; ``None`` is no limit but the
            device's.
        name: for messages.
    Raises:
        InvalidArgumentError: a capacity, limit or device that can't be.
        InvalidPageSizeError: a page size that can't be.
        OutOfMemoryError: no such stretch of addresses is left.
        NotAvailableError: no driver, or no such device.
    """

    _instead_of_a_copy = (
        "it is memory of this process. Keep another reference to it, or make a pool of its own; to another process "
        "send tensors (torch.multiprocessing), and make its pools there"
    )
    _elsewhere = {"on_pressure": "its SharedMemoryPool takes the function, shared.on_pressure(function)"}  # noqa: RUF012
    _handle: _C.Pool
    _model_id: str | None
    _shared: SharedMemoryPool | None
    _remaps: Remaps
    _sleeps: int

    def __init__(
        self,
        capacity: Size,
        page_size: Size | None = None,
        device: Device = "cuda",
        physical_limit: Size | None = None,
        *,
        name: str | None = None,
    ) -> None:
        key = to_device(device)
        handle = _C.create_pool(
            key.kind,
            key.ordinal,
            to_bytes(capacity, "capacity"),
            to_page_size(page_size, key),
            to_optional_bytes(physical_limit, "physical_limit"),
            f"pool-{next(_numbers)}" if name is None else to_name(name, "name"),
        )
        self._take(handle, None, None)
        with _lock:
            _by_key[handle.key] = self
        weakref.finalize(self, _close_dropped, handle).atexit = False

    def _take(self, handle: _C.Pool, shared: SharedMemoryPool | None, model_id: str | None) -> None:
        self._handle = handle
        self._device = DeviceKey(handle.kind, handle.ordinal)
        self._shared = shared
        self._model_id = model_id
        self._stays = _C.Stays()
        self._remaps = remaps.held(shared).get(handle.key) or Remaps()
        self._sleeps = 0  # that have begun, of all or a part: who asks often looks again only once it has changed

    # -- Explicit pages ------------------------------------------------------------------------------------------------

    def allocate(self, offset: Size, size: Size) -> int:
        """Backs the pages that cover [offset, offset + size) with memory.

        They read as zero, or as what this pool held in them before: memory of
        other models is zeroed first, on the current stream.

        Args:
            offset: bytes from :attr:`base_address`; need not be aligned.
            size: bytes, above 0.
        Returns:
            The address of ``offset``.
        Raises:
            InvalidRangeError: empty, overflowing, or beyond the capacity.
            AlreadyMappedError: a page of it is in use, by ``allocate`` or a
                tensor.
            OutOfMemoryError: a limit or the device has no such amount left,
                after all that is idle elsewhere has been taken.
        """
        offset, size = to_range(offset, size, self.capacity)
        return self._handle.allocate_pages(offset, size, current_stream(self._device))

    def deallocate(self, offset: Size, size: Size) -> None:
        """Gives back the pages that cover [offset, offset + size).

        Work that is queued on the GPU may still use them; nobody waits for it.

        Raises:
            InvalidRangeError: empty, overflowing, or beyond the capacity.
            NotMappedError: a page of it is not held by :meth:`allocate`.
            StillInUseError: a tensor of :meth:`tensor` shows some of it.
        """
        offset, size = to_range(offset, size, self.capacity)
        self._handle.deallocate_pages(offset, size)

    def is_mapped(self, offset: Size, size: Size) -> bool:
        """Is every page of [offset, offset + size) in use, by :meth:`allocate` or
        by a tensor?

        Raises:
            InvalidRangeError: empty, overflowing, or beyond the capacity.
        """
        offset, size = to_range(offset, size, self.capacity)
        return self._handle.is_mapped(offset, size)

    def tensor(self, offset: Size, shape: Shape, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """A contiguous tensor over pages that :meth:`allocate` holds; no copy.

        While it or a view of it lives, these pages stay: :meth:`deallocate` of
        them is a ``StillInUseError``, and ``close(force=True)`` leaves them to
        it. Dropping it gives nothing back; that is for :meth:`deallocate`.

        Args:
            offset: bytes from :attr:`base_address`, a multiple of the dtype's
                size.
            shape: of the tensor.
        Raises:
            InvalidRangeError: empty, or beyond the capacity.
            NotMappedError: some of it is not held by :meth:`allocate`.
            InvalidArgumentError: not aligned to the dtype, a quantized dtype,
                or no shape at all.
        """
        at, sizes = to_tensor_range(offset, shape, dtype, self.capacity)
        tensor = self._handle.tensor(at, sizes, dtype)
        hold_while(tensor, self)
        return tensor

    # -- Giving back ---------------------------------------------------------------------------------------------------

    def compact(self) -> int:
        """Gives the memory of all holes back that are whole chunks; returns the
        bytes given back.

        With a ``page_size`` each page is a chunk: only pages in use stay
        mapped. Without one a chunk that is partly in use stays whole
        (``stranded_bytes`` of :meth:`stats`).
        """
        return self._handle.trim(0)

    def trim(self, keep_bytes: Size = 0) -> int:
        """Gives idle memory back until at most ``keep_bytes`` of it stay; returns
        the bytes given back.
        """
        return self._handle.trim(to_bytes(keep_bytes, "keep_bytes"))

    def empty_cache(self) -> None:
        """Gives all idle memory back, as ``torch.cuda.empty_cache`` does for the
        device, and all that the store of its :class:`SharedMemoryPool` keeps,
        of models that went to sleep for one; and the pinned memory in which
        pools of no shared one have slept, all of it that no one uses.
        """
        self._handle.empty_cache()

    def close(self, force: bool = False) -> None:
        """Ends the pool and gives all its memory back; twice is fine. A model's
        pool is unregistered.

        Args:
            force: with pages and tensors alive: the pages go at once, those
                that a tensor of :meth:`tensor` shows with that tensor, and the
                pool ends when its last tensor is freed.
        Raises:
            StillInUseError: something is alive in it, and not ``force``.
            InvalidArgumentError: a device's default pool, which never ends.
        """
        force = to_flag(force, "force")
        was_closed = self._handle.is_closed
        if self._shared is not None and self._model_id is not None and not was_closed:
            self._shared.unregister_model(self._model_id, force)
            return
        end_with_workspaces_freed(self._handle.kind, lambda: self._handle.close(force))
        if not was_closed:
            events.closed(self)

    # -- Read-only pages -----------------------------------------------------------------------------------------------

    def seal(self, tensors: torch.Tensor | Iterable[torch.Tensor]) -> None:
        """Makes the pages of tensors read-only: a write to them faults, by the
        device's own protection.

        Waits for the work that is queued, which may be writing. Their views are
        sealed with them (:func:`torch_vmm.alias` is another address with rights
        of its own). It ends with :meth:`unseal`, or with the tensor.

        Pages are sealed by whole chunks of 2 MiB or more, and nothing that was
        not given: all that lives in the chunks concerned has to be among
        ``tensors``, the rest of a tensor too of which a slice is given. So give
        whole tensors made by :func:`torch_vmm.aligned`,
        :func:`torch_vmm.elastic` or :func:`torch_vmm.sparse` (all of it
        committed), or all that was made under a :meth:`tag` and lives: what is
        made under it afterwards stands on further chunks. A slice on the
        borders of chunks can be given by itself.

        Args:
            tensors: one or several of this pool; of one that wraps others (a
                ``DTensor``) all that it wraps.
        Raises:
            InvalidArgumentError: another pool's; chunks hold what is not given
                (the message says what); or one with gaps or overlaps: its
                dimensions may be in any order (``channels_last``). None is
                sealed then.
        """
        _C.seal(self._handle, covered_pieces(tensors))

    def unseal(self, tensors: torch.Tensor | Iterable[torch.Tensor]) -> None:
        """Makes the pages of tensors writable again.

        Raises:
            InvalidArgumentError: as :meth:`seal`.
        """
        _C.unseal(self._handle, covered_pieces(tensors))

    # -- Sleep and wake ------------------------------------------------------------------------------------------------

    def sleep(
        self,
        keep: Keep = "host",
        release: bool = False,
        *,
        packed: bool = False,
        poison: bool = False,
        blocking: bool = True,
        progress: Progress = None,
    ) -> Transfer:
        """Gives the model's memory to the others, and keeps its contents
        elsewhere.

        Addresses stay: tensors, optimisers, CUDA graphs and compiled functions
        are as before once it is awake again. Until then nothing may use its
        memory: a kernel that does faults, a tensor's allocation is a
        ``RuntimeError``. Freeing tensors is fine, and what they held does not
        come back. Queued work is waited for first; other models go on.

        What another process or an alias has mapped as well stays as it is. A
        model that sleeps already stays so. Its ``floor`` stays reserved: it is
        the room to wake in.

        Args:
            keep: ``"host"`` (pinned memory, bounded by
                :attr:`SharedMemoryPool.host_backup_limit`), ``"discard"`` (the
                contents are gone, and what wakes is zero), ``"device:1"``,
                ``"cuda:1"`` or a ``torch.device`` (another GPU's memory, for a
                model on a GPU; it stays reserved there for the next sleep,
                until that GPU's models need it, or
                ``torch.cuda.empty_cache()``), the path of a file or folder
                (with checksums; the file goes when it is awake; what goes to it
                while some of the model is there already has ``path.2`` beside
                it), or several of them: the first with room is taken. For some
                :attr:`tags` alone: a mapping from tag to place, where ``""`` is
                what has none; the others stay awake.
            release: gives the memory back to the driver at once, not only to
                the other models.
            packed: what goes to ``"host"`` is stored there by a lossless code
                that the GPU does and undoes: bf16 weights repeat exponents, so
                they take some 70 % of host memory, and of the bus when they
                wake. What gets no smaller is stored as it is. Contents are
                looked at first, which takes a pass over the GPU's memory; the
                first time in a process kernels are compiled.
            poison: what is discarded comes back as bytes 0xFF and not as
                zero, to find who reads it: NaN in every floating point type,
                -1 in signed integers, the largest number in unsigned ones.
            blocking: returns when it sleeps; else at once, and a thread does
                it.
            progress: ``True`` draws a bar in a terminal; a function is called
                with the bytes that have moved and those in all and, where it
                needs four numbers, with bytes a second so far and the seconds
                left at that rate (infinite before any have moved). What it
                raises stops it.
        Returns:
            A handle: ``wait()``, ``done``, ``progress``.
        Raises:
            OutOfMemoryError: no room in the place named.
            InvalidArgumentError: no such place, device or tag; a file that
                exists, or one in a folder that does not, also where it is one
                of several places; ``packed`` and nothing goes to ``"host"``,
                or ``poison`` and nothing is discarded.
            NotAvailableError: in debug mode; or ``packed``, and this GPU or
                torch cannot (NVRTC is missing, say).
            VmmError: it, or the tag that is to sleep, is entered (``with``,
                :func:`use_model`) on another thread, which may be at work. A
                disk that is full or fails, a driver that does, or the model is
                on its way already; it is awake again, and whole. So
                it is after Ctrl-C, unless it was done by then. Where a limit
                that was lowered, or another's floor, leaves it no room any
                more, what had gone sleeps, nothing is lost, and :meth:`wake`
                brings it. What is to be discarded goes when all else has gone.
        """
        return _sleep(self, keep, Wishes(release, packed, poison), blocking, progress)

    def wake(
        self,
        tags: str | Iterable[str] | None = None,
        *,
        blocking: bool = True,
        order: str = "as allocated",
        progress: Progress = None,
    ) -> Transfer:
        """Brings the model's memory back, to the same addresses.

        One that is awake stays so. Tensors can be made in it once all is there.
        Where it is stopped before, by Ctrl-C for example, it is asleep as
        before.

        Args:
            tags: of what is under these alone; ``""`` is what has no tag. Those
                that held nothing wake once the last that did is there.
            blocking: returns when all is there; else when there is memory for
                it, and a thread fills it: ``handle.wait_for(tensor)``. What is
                written by then to what has come is lost if it is stopped.
            order: what comes first; there is ``"as allocated"``: large tensors
                by address, and small ones ahead of them or among them (of what
                was discarded behind them).
            progress: as of :meth:`sleep`.
        Returns:
            A handle: ``wait()``, ``wait_for(tensor)``, ``done``, ``progress``.
        Raises:
            OutOfMemoryError: no room; it sleeps as before.
            VmmError: a file that cannot be read or was changed, or a driver
                that fails: what has not come is still asleep.
        """
        return _wake(self, tags, blocking, order, progress)

    @property
    def is_asleep(self) -> bool:
        """Some of it sleeps, or is on its way."""
        return _C.is_asleep(self._handle)

    @property
    def asleep(self) -> dict[str, str]:
        """Where what sleeps is, by tag (``""``: none): ``"host"``,
        ``"host, packed"``, ``"discarded"``, a device or a file's path; with
        ``" and "`` between them where it went at several times. Tags that held
        nothing are not among them, but where all that sleep did: ``"nothing"``.
        """
        return dict(sorted(_C.asleep(self._handle).items()))

    def on_remap(self, before: Callable[[], object] | None = None, after: Callable[[], object] | None = None) -> None:
        """Has functions called around the time in which the memory is
        elsewhere.

        For what knows the physical memory and not only its addresses: RDMA
        registrations, for one. They add up; called with neither, it takes off
        all that were given.

        Args:
            before: called before it goes, by the thread that calls
                :meth:`sleep`; another thread's is refused meanwhile. What it
                raises keeps the model awake: later ones are not called, and
                those before it get their ``after``.
            after: called when all of it is back, also where it was stopped
                before it slept.
        Raises:
            InvalidArgumentError: one that can't be called, or a closed pool.
        """
        if self.is_closed:
            raise InvalidArgumentError(f"pool {self.name!r} is closed")
        self._remaps.add(before, after)
        if self._shared is not None or self._is_default():
            # It lives on when nobody holds this object; a lone pool is closed then.
            self._remaps = remaps.held(self._shared).setdefault(self._handle.key, self._remaps)

    @contextlib.contextmanager
    def _while_it_begins_to_go(self) -> Iterator[None]:
        with self._remaps.while_it_begins_to_go(self):
            try:
                yield
            finally:
                self._sleeps += 1  # once it has begun: whoever looked before that would not look again

    def _call_after_remap(self) -> None:
        self._remaps.call_after(self)

    # -- What it is ----------------------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Bytes of addresses."""
        return self._handle.capacity

    @property
    def base_address(self) -> int:
        """The address of offset 0."""
        return self._handle.base_address

    @property
    def page_size(self) -> int:
        """Bytes of a page. Memory is given back by pages where the pool was made
        with a page size, else by the chunks that it chose.
        """
        return self._handle.page_size

    @property
    def model_id(self) -> str | None:
        """The id under which a SharedMemoryPool registered it, or ``None``."""
        return self._model_id

    @property
    def name(self) -> str:
        """What messages call it: the model's id, ``"default"``, or its own name."""
        return self._handle.name

    @property
    def is_closed(self) -> bool:
        """Closed, by itself or with its SharedMemoryPool; tensors in it may live
        on.
        """
        return self._handle.is_closed

    @property
    def physical_limit(self) -> int | None:
        """Bytes of memory, at most; ``None`` is no limit of its own. Can be set at
        any time, also of one that was closed while it slept.

        Below what is mapped, idle memory is given back at once; what is in use
        stays, and requests fail until it fits.
        """
        return self._handle.limit

    @physical_limit.setter
    def physical_limit(self, limit: Size | None) -> None:
        self.set_physical_limit(limit)

    def set_physical_limit(self, limit: Size | None) -> int:
        """Sets :attr:`physical_limit`, and returns the bytes of idle memory that
        were given back for it at once.
        """
        given_back = self._handle.set_limit(to_optional_bytes(limit, "physical_limit"))
        events.was_set(self, "physical_limit", self._handle.limit)
        return given_back

    @property
    def floor(self) -> int:
        """Bytes of memory that are this model's, held or not: others neither take
        them from it nor grow into what is left of them. Can be set at any time.
        It binds those that take from the same limit: the shared pool's, or the
        device's where it has one (:attr:`SharedMemoryPool.floor`).

        Set, it takes effect at once as far as others have memory idle, and for
        the rest as they free it.

        Raises:
            InvalidArgumentError: on assignment, above the limit, with the other
                models' floors.
        """
        return self._handle.floor

    @floor.setter
    def floor(self, floor: Size) -> None:
        self.set_floor(floor)

    def set_floor(self, floor: Size) -> int:
        """Sets :attr:`floor`, and returns the bytes that others gave back at once."""
        given_back = self._handle.set_floor(to_bytes(floor, "floor"))
        events.was_set(self, "floor", self._handle.floor)
        return given_back

    @property
    def priority(self) -> int:
        """When memory is short, a model with a higher one gives later; from -2**31
        to 2**31 - 1. Can be set at any time.
        """
        return self._handle.priority

    @priority.setter
    def priority(self, priority: int) -> None:
        self._handle.set_priority(to_number(priority, "priority"))
        events.was_set(self, "priority", self._handle.priority)

    @property
    def spill(self) -> Literal["host"] | None:
        """``"host"``: a tensor that finds no memory on the device, after all that
        others could give, stands in host memory, which kernels reach over the
        bus: a fiftieth of the speed of the device's own, and no error.
        Can be set at any time; ``None`` at first.

        It counts apart (``stats().spilled_bytes``), under
        :attr:`SharedMemoryPool.spill_limit`, and in torch's numbers like any
        tensor. It stays there until it is freed: what is made next stands on
        the device again, where there is room. Never for a CUDA graph's memory
        or while one is captured, nor for explicit pages and tensors with
        addresses of their own. While the model sleeps it stays as it is.

        Raises:
            NotAvailableError: on assignment: the device cannot use host memory
                so.
        """
        return "host" if self._handle.spills else None

    @spill.setter
    def spill(self, spill: Literal["host"] | None) -> None:
        self._handle.set_spills(to_spill(spill))
        events.was_set(self, "spill", self.spill)

    @property
    def physical_memory_usage(self) -> int:
        """Bytes of memory mapped now."""
        return self._handle.physical_bytes

    @property
    def shared_bytes(self) -> int:
        """Bytes of other pools' memory that aliases made in this pool show; their
        owners pay for it.
        """
        return _C.shared_bytes(self._handle)

    # -- Tags ----------------------------------------------------------------------------------------------------------

    def tag(self, name: str) -> Tag:
        """``with pool.tag("weights"):`` names what is made inside, and opens the
        pool.

        What is made under a tag stands on chunks of its own: no other tag's
        memory, nor any without a tag, shares one with it. So :meth:`seal` can
        seal all of it. Where tags nest the inner one wins, and a ``with pool:``
        inside is without a tag. It goes wherever the pool goes: ``backward()``,
        ``carry``, decorators.

        The first time it takes addresses of its own, and each tag holds at
        least one chunk of 2 MiB once something was made under it: use a few,
        not one a tensor. A tag lasts as long as the pool.

        Args:
            name: any text that is not empty.
        Returns:
            A context manager and decorator; it can be kept and entered again.
        Raises:
            InvalidArgumentError: no name; on entering: the pool is closed.
            NotEnabledError: on entering: torch_vmm is not the allocator of the
                device.
            OutOfMemoryError: on entering for the first time: no addresses are
                left for it.
        """
        return Tag(self, name)

    @property
    def tags(self) -> dict[str, int]:
        """Bytes allocated under each tag that was ever opened in the pool, by
        name; the rest has none.
        """
        return dict(sorted(self._handle.tags.items()))

    # -- Numbers -------------------------------------------------------------------------------------------------------

    def stats(self) -> MemoryStats:
        """What its memory is at this moment. Walks the pool."""
        return MemoryStats(**self._handle.memory_stats())  # type: ignore[arg-type]

    def reclaim_report(self) -> ReclaimReport:
        """What was done for requests that the pool could not meet by itself.

        How often each rung of the reclaim ladder was tried and helped, and
        the latest decisions: who yielded how much, and how long it took.
        """
        return report_of(self._handle)

    def memory_stats(self) -> dict[str, int]:
        """``torch.cuda.memory_stats`` of this pool alone: the same keys, meanings
        and order. Walks the pool.

        Sums over all pools are the device's; peaks don't sum, since pools peak
        at different times.
        """
        return dict(sorted(self._handle.statistics(walk=True).items()))

    def memory_stats_as_nested_dict(self) -> dict[str, Any]:
        """The same as ``torch.cuda.memory_stats_as_nested_dict`` has it:
        ``stats["active"]["all"]["peak"]``.
        """
        nested: dict[str, Any] = {}
        for name, value in self._handle.statistics(walk=True).items():
            *families, key = name.split(".")
            inner = nested
            for family in families:
                inner = inner.setdefault(family, {})
            inner[key] = value
        return nested

    def memory_allocated(self) -> int:
        """Bytes of live tensors and explicit pages, each rounded up to 512."""
        return self._handle.statistics()["allocated_bytes.all.current"]

    def max_memory_allocated(self) -> int:
        """The most that :meth:`memory_allocated` has been since the last reset of
        the peaks.
        """
        return self._handle.statistics()["allocated_bytes.all.peak"]

    def memory_reserved(self) -> int:
        """Bytes mapped, in use or not."""
        return self._handle.statistics()["reserved_bytes.all.current"]

    def max_memory_reserved(self) -> int:
        """The most that :meth:`memory_reserved` has been since the last reset of
        the peaks.
        """
        return self._handle.statistics()["reserved_bytes.all.peak"]

    def reset_peak_memory_stats(self) -> None:
        """Sets every ``peak`` to the ``current``."""
        self._handle.reset_peaks()

    def reset_accumulated_memory_stats(self) -> None:
        """Sets every ``allocated`` and ``freed``, and the counts of events, to 0."""
        self._handle.reset_accumulated()

    def memory_summary(self, abbreviated: bool = False) -> str:
        """The table of ``torch.cuda.memory_summary`` for this pool.

        Of one that sleeps a line more says how much, and where; it is in the
        allocated and active bytes too.

        Args:
            abbreviated: without the rows of the large and the small pool.
        """
        abbreviated = to_flag(abbreviated, "abbreviated")
        title = f"torch_vmm memory summary, pool {self.name!r} on {self.device}"
        return memory_summary(self._handle.statistics(walk=True), title, abbreviated, self._asleep_in_words())

    def memory_snapshot(self) -> list[dict[str, Any]]:
        """The pool's segments by address, in the shape of
        ``torch.cuda.memory_snapshot()``. Walks the pool.

        Those under a :meth:`tag` have a key more, ``"tag"``.
        """
        return self._handle.snapshot()

    def memory_history(self) -> list[dict[str, Any]]:
        """What has happened in this pool, oldest first, as
        ``torch.cuda.memory._snapshot()["device_traces"]`` has it.

        Recorded between ``torch.cuda.memory._record_memory_history()`` and its
        end; empty otherwise, and for a pool that is not on a GPU. The history
        knows models by their names: another of the device's that has, or had,
        the same one shows here too. Takes a snapshot of the device.
        """
        if self._device.kind != "cuda" or not _C.is_enabled("cuda"):
            return []
        trace = torch.cuda.memory._snapshot()["device_traces"][self._device.ordinal]
        return [entry for entry in trace if entry["action"] != "snapshot" and self._is_told_by(entry)]

    def _is_told_by(self, entry: dict[str, Any]) -> bool:
        """Whether an entry of the history names this pool's model; the default pool's name none."""
        metadata = str(entry.get("user_metadata", ""))
        if self._is_default():
            return not metadata.startswith("model: ") and "; model: " not in metadata
        return metadata == f"model: {self.name}" or metadata.endswith(f"; model: {self.name}")

    def _is_default(self) -> bool:
        """Whether it is its device's default pool."""
        return self._handle.key == _C.default_pool(*self._device).key

    # -- Tensors in it -------------------------------------------------------------------------------------------------

    if TYPE_CHECKING:

        def __enter__(self) -> VirtualMemoryPool: ...

    def _opens(self) -> tuple[list[_C.Pool], VirtualMemoryPool]:
        return [self._handle], self

    def _asleep_in_words(self) -> str:
        """``asleep 100 MiB (host)``, or nothing."""
        if not self.is_asleep:
            return ""
        return f"asleep {tables.asleep_in_words(self.stats().asleep_bytes, tables.where_asleep(self))}"

    def __repr__(self) -> str:
        try:
            limit = self.physical_limit
            # Not "of": tags, and tensors like elastic ones, have addresses of their own beyond the capacity.
            asleep = self._asleep_in_words()
            text = f"{_C.format_bytes(self.physical_memory_usage)} mapped, {asleep}{', ' if asleep else ''}"
            spilled = self.stats().spilled_bytes if self._handle.spills else 0
            text += f"{_C.format_bytes(spilled)} in host memory, " if spilled else ""
            text += f"capacity {_C.format_bytes(self.capacity)}"
            text += "" if limit is None else f", limit {_C.format_bytes(limit)}"
            text += ", closed" if self.is_closed else ""
        except VmmError:
            text = "out of reach in a forked process"
        return f"VirtualMemoryPool({self.name!r}, {self.device}: {text})"


# -- One object for one pool -------------------------------------------------------------------------------------------

# Re-entrant, because a collection inside the lock may run someone's __del__.
_lock = threading.RLock()
_by_key: weakref.WeakValueDictionary[int, VirtualMemoryPool] = weakref.WeakValueDictionary()


def known(handle: _C.Pool) -> VirtualMemoryPool | None:
    """The object of this pool, where there is one."""
    return _by_key.get(handle.key)


def wrap(handle: _C.Pool, shared: SharedMemoryPool | None = None, model_id: str | None = None) -> VirtualMemoryPool:
    """The one object of this pool; made now where there is none."""
    with _lock:
        pool = _by_key.get(handle.key)
        if pool is not None:
            return pool
        pool = VirtualMemoryPool.__new__(VirtualMemoryPool)
        pool._take(handle, shared, model_id)
        return _by_key.setdefault(handle.key, pool)


def _close_dropped(handle: _C.Pool) -> None:
    # Nobody can close it any more. In a forked child there is nothing to close.
    with contextlib.suppress(VmmError):
        handle.close(True)
