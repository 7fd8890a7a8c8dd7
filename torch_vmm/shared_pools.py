"""SharedMemoryPool: models by id under one physical limit, as Python sees them."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Literal, TypeVar, overload

from torch_vmm import _C, _decorate, events, pools, tables
from torch_vmm._guarded import Guarded
from torch_vmm.contexts import is_function, takes
from torch_vmm.devices import Device, DeviceKey, OnDevice, current_stream, to_device
from torch_vmm.errors import InvalidArgumentError, ModelNotFoundError, NotAvailableError, VmmError
from torch_vmm.lines import one_line
from torch_vmm.pools import VirtualMemoryPool
from torch_vmm.remaps import Remaps
from torch_vmm.sizes import (
    Size,
    is_name,
    show,
    to_bytes,
    to_flag,
    to_name,
    to_number,
    to_optional_bytes,
    to_page_size,
    to_range,
    to_spill,
)
from torch_vmm.stats import GlobalMemoryStats, MemoryStats
from torch_vmm.timelines import Timeline, to_interval
from torch_vmm.workspaces import end_with_workspaces_freed

# function(requested, pool) -> whether to try again
OnPressure = Callable[[int, VirtualMemoryPool], bool]
_Decorated = TypeVar("_Decorated", bound=OnPressure)


class SharedMemoryPool(OnDevice, Guarded, guarded=True):
    """Models that share one physical limit: what one leaves idle, another can
    have.

    Memory that goes from one model to another is zeroed first. ``with`` closes
    it at the end. One that is dropped, and all its models' pools with it,
    closes as by ``close(force=True)``: tensors live on. ``len()`` is the number
    of its models; it is always true, also without any. ``str()`` is a table of
    its models, as :func:`torch_vmm.report` has it for a device.

    Args:
        physical_limit: bytes of memory that all models together hold at most,
            above 0.
        device: where the memory is.
    Raises:
        InvalidArgumentError: a limit or device that can't be.
        NotAvailableError: no driver, or no such device.
    """

    _instead_of_a_copy = (
        "it is memory of this process. Keep another reference to it, or make another one; to another process send "
        "tensors (torch.multiprocessing), and make its pools there"
    )
    _meant = {"limit": "physical_limit"}  # noqa: RUF012 - of several limits
    _elsewhere = {"spill": 'each model has its own, shared["llama"].spill = "host"'}  # noqa: RUF012
    _handle: _C.SharedMemoryPool
    _models: ModelsView
    _on_pressure: OnPressure | None
    _leaving: dict[int, _C.Pool]
    _remaps: dict[int, Remaps]

    def __init__(self, physical_limit: Size, device: Device = "cuda") -> None:
        self._device = to_device(device)
        self._handle = _C.SharedMemoryPool(
            self._device.kind, self._device.ordinal, to_bytes(physical_limit, "physical_limit")
        )
        self._models = ModelsView(self._handle, weakref.ref(self))
        self._on_pressure = None
        # Models that were unregistered by force, by key, while something lives on in them.
        self._leaving = {}
        self._remaps = {}  # of models that have some, by key
        with _lock:
            _alive[self] = None
        weakref.finalize(self, _close_dropped, self._handle).atexit = False

    def register_model(
        self,
        model_id: str,
        virtual_capacity: Size | None = None,
        *,
        physical_limit: Size | None = None,
        floor: Size = 0,
        priority: int = 0,
        page_size: Size | None = None,
        spill: Literal["host"] | None = None,
    ) -> VirtualMemoryPool:
        """A pool for a new model.

        Args:
            model_id: not empty, and not registered here yet.
            virtual_capacity: bytes of addresses, as ``capacity`` of
                :class:`VirtualMemoryPool`: it bounds no memory, nor what has
                addresses of its own. ``None`` is four times the device's
                memory, or less where the process is short of addresses.
            physical_limit: bytes of memory that this model holds at most.
            floor: bytes of memory that are this model's, held or not
                (:attr:`VirtualMemoryPool.floor`).
            priority: when memory is short, a higher one gives later; from
                -2**31 to 2**31 - 1.
            page_size: bytes, as :class:`VirtualMemoryPool` takes it.
            spill: ``"host"``: tensors that find no memory stand in host memory
                (:attr:`VirtualMemoryPool.spill`).
        Raises:
            ModelExistsError: the id is taken.
            InvalidArgumentError: an empty id, floors that are above the limit
                together, sizes that can't be.
            OutOfMemoryError: there is no such stretch of addresses.
            NotAvailableError: ``spill`` on a device that cannot use host memory
                so.
        """
        handle = self._handle.register_model(
            to_name(model_id, "model_id"),
            to_optional_bytes(virtual_capacity, "virtual_capacity"),
            to_page_size(page_size, self._device),
            to_optional_bytes(physical_limit, "physical_limit"),
            to_bytes(floor, "floor"),
            to_number(priority, "priority"),
            to_spill(spill),
        )
        pool = pools.wrap(handle, self, model_id)
        events.registered(pool)
        return pool

    def unregister_model(self, model_id: str, force: bool = False) -> None:
        """Ends a model's pool; what it held, the others can have.

        Args:
            force: with pages and tensors alive: as
                :meth:`VirtualMemoryPool.close` has it.
        Raises:
            ModelNotFoundError: no such model.
            StillInUseError: something is alive in it, and not ``force``.
        """
        model_id, force = to_name(model_id, "model_id"), to_flag(force, "force")
        model = self._handle.model(model_id)
        with self._seen_leaving([model] if force else []):
            end_with_workspaces_freed(self._handle.kind, lambda: self._handle.unregister_model(model_id, force))
        self._forget_remaps([model])
        events.unregistered(model)

    def allocate_for_model(self, model_id: str, size: Size) -> int:
        """Backs the first free span of ``size`` bytes in a model's pool.

        Returns:
            Its address. Its offset is that less the pool's ``base_address``.
        Raises:
            ModelNotFoundError: no such model.
            InvalidRangeError: ``size`` is 0, or more than the pool's capacity.
            OutOfMemoryError: a limit, the device, or the pool's addresses have
                no such amount left.
        """
        pool = self[model_id]
        _, size = to_range(0, size, pool.capacity)
        return self._handle.allocate_for_model(model_id, size, current_stream(self._device))

    def deallocate_for_model(self, model_id: str, offset: Size, size: Size) -> None:
        """Gives back the pages of a model that cover [offset, offset + size).

        Raises:
            ModelNotFoundError: no such model.
            InvalidRangeError: empty, overflowing, or beyond the capacity.
            NotMappedError: a page of it is not held.
            StillInUseError: a tensor of :meth:`VirtualMemoryPool.tensor` shows
                some of it.
        """
        pool = self[model_id]
        offset, size = to_range(offset, size, pool.capacity)
        self._handle.deallocate_for_model(model_id, offset, size)

    def get_model_stats(self, model_id: str) -> MemoryStats:
        """What a model's memory is at this moment.

        Raises:
            ModelNotFoundError: no such model.
        """
        return self[model_id].stats()

    def global_stats(self) -> GlobalMemoryStats:
        """What the memory of all models is at this moment."""
        return GlobalMemoryStats(**self._handle.global_stats())

    @property
    def host_backup_limit(self) -> int | None:
        """Bytes of pinned host memory that models of this pool may have when they
        sleep there, and that is kept for the next one; ``None`` is no limit but
        the machine's. In pieces of 32 MiB. Can be set at any time: what is kept
        unused above it goes at once.
        """
        return _C.host_backup_limit(self._handle)

    @host_backup_limit.setter
    def host_backup_limit(self, limit: Size | None) -> None:
        self._require_open()
        _C.set_host_backup_limit(self._handle, to_optional_bytes(limit, "host_backup_limit"))
        events.was_set(self, "host_backup_limit", self.host_backup_limit)

    @property
    def host_backup_bytes(self) -> int:
        """Bytes of pinned host memory now, with what is kept for the next sleep."""
        return _C.host_backup_bytes(self._handle)

    @property
    def spill_limit(self) -> int | None:
        """Bytes of host memory, at most, for tensors that models spill
        (:attr:`VirtualMemoryPool.spill`); ``None`` is no limit but what the
        machine has left. Can be set at any time: idle memory above it goes at
        once, and what is in use stays.
        """
        return self._handle.spill_limit

    @spill_limit.setter
    def spill_limit(self, limit: Size | None) -> None:
        self._handle.set_spill_limit(to_optional_bytes(limit, "spill_limit"))
        events.was_set(self, "spill_limit", self._handle.spill_limit)

    def release_host_backups(self) -> int:
        """Gives pinned host memory back that no sleeping model uses, copies of
        sealed tensors included; returns the bytes. Pinning it again is the slow
        part of the next sleep.
        """
        return _C.release_host_backups(self._handle)

    @overload
    def on_pressure(self, function: _Decorated) -> _Decorated: ...
    @overload
    def on_pressure(self, function: None) -> None: ...
    def on_pressure(self, function: OnPressure | None) -> OnPressure | None:
        """Has a function called when a model's request finds no memory, before it
        fails.

        ``function(requested, pool)`` is told the bytes asked for and the model
        that asks, to wake for one. It frees, trims, evicts, puts other models
        to sleep or changes limits as it likes, and returns whether to try
        again: while it says so, and the memory does not do, queued work is
        waited for and it is called again, up to 64 times. It runs on the thread
        that asks (which may be one of autograd's), by several threads at once
        if several ask, and not for what it allocates or wakes itself, nor while
        the thread captures a CUDA graph. Autograd is on in it, whatever the
        operator that asks has switched off. What it raises goes to
        ``sys.unraisablehook``, and to the logger ``"torch_vmm"`` where logs are
        taken, and the request goes on without it. A ``KeyboardInterrupt``
        (Ctrl-C) is shown there as well, and raised again in the main thread:
        behind the request, where that thread asks. The function is held until
        another is given or the pool is closed, with all that it knows.

        Args:
            function: in place of the one before; ``None``: none is called.
        Returns:
            The function, so that this can decorate it.
        Raises:
            InvalidArgumentError: it can't be called with two arguments, is a
                coroutine or generator function, or the pool is closed.
        """
        if function is None:
            self._handle.set_on_pressure(None)
        else:
            if not is_function(function):
                raise InvalidArgumentError(f"on_pressure: {show(function)} can't be called; give a function or None")
            if not takes(function, 2):
                raise InvalidArgumentError(
                    f"on_pressure: {show(function)} can't be called with two arguments; give a function of the bytes "
                    f"requested and the pool that asks"
                )
            if _decorate.only_makes_steps(function):
                raise InvalidArgumentError(
                    f"on_pressure: a call of {show(function)} only makes a coroutine or generator, which nobody would "
                    f"run; give a plain function"
                )
            # Held here and not by the handle: the function may well know this object.
            shared = weakref.ref(self)

            def relieve(requested: int, handle: _C.Pool) -> bool:
                alive = shared()
                called = None if alive is None else alive._on_pressure
                if called is None:
                    return False
                asker = pools.wrap(handle, alive, handle.name)
                try:
                    return bool(called(requested, asker))
                except KeyboardInterrupt:  # it is the user's, and no failure
                    raise
                except BaseException as error:
                    events.pressure_function_raised(asker, requested, error)
                    raise

            self._handle.set_on_pressure(relieve)
        self._on_pressure = function
        return function

    @property
    def models(self) -> Mapping[str, VirtualMemoryPool]:
        """The models' pools by id, in order of registration: a view that cannot be
        changed.
        """
        return self._models

    def __getitem__(self, model_id: str) -> VirtualMemoryPool:
        return self._models[model_id]

    def __contains__(self, model_id: object) -> bool:
        return model_id in self._models

    def __iter__(self) -> Iterator[str]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    def __bool__(self) -> bool:
        return True  # an empty one is a pool all the same: `shared or SharedMemoryPool(...)`

    @property
    def name(self) -> str:
        """As errors, tables and the log call it: ``SharedMemoryPool 1``."""
        return self._handle.name

    @property
    def physical_limit(self) -> int:
        """Bytes of memory that all models together hold at most. Can be set at any
        time.

        Below what is held, idle memory is given back at once; what is in use
        stays, and requests fail until it fits.
        """
        return self._handle.physical_limit

    @physical_limit.setter
    def physical_limit(self, limit: Size) -> None:
        self.set_physical_limit(limit)

    def set_physical_limit(self, limit: Size) -> int:
        """Sets :attr:`physical_limit`, and returns the bytes of idle memory that
        were given back for it at once.
        """
        given_back = self._handle.set_physical_limit(to_bytes(limit, "physical_limit"))
        events.was_set(self, "physical_limit", self._handle.physical_limit)
        return given_back

    @property
    def floor(self) -> int:
        """Bytes of the device's memory that are its models', held or not, beside
        pools that stand outside; each model may have one of its own within. It
        counts where the device has a limit
        (``torch.cuda.set_per_process_memory_fraction``) and where pools outside
        need what is idle here. Can be set at any time, as a model's can.
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
        """Added to its models' own where memory is short on the device and pools
        outside could give as well. Can be set at any time.
        """
        return self._handle.priority

    @priority.setter
    def priority(self, priority: int) -> None:
        self._handle.set_priority(to_number(priority, "priority"))
        events.was_set(self, "priority", self._handle.priority)

    @property
    def is_closed(self) -> bool:
        """Closed: it takes no more requests."""
        return self._handle.is_closed

    def close(self, force: bool = False) -> None:
        """Unregisters all models and gives all memory back; twice is fine.

        Args:
            force: as in :meth:`unregister_model`.
        Raises:
            StillInUseError: something is alive in a model, and not ``force``.
        """
        force = to_flag(force, "force")
        was_closed, models = self.is_closed, self._open_handles()
        with self._seen_leaving(models if force else []):
            end_with_workspaces_freed(self._handle.kind, lambda: self._handle.close(force))
        self._forget_remaps(models)
        self._on_pressure = None
        if not was_closed:
            events.closed(self, [model.name for model in models])

    # -- Its memory, seen ----------------------------------------------------------------------------------------------

    def record_timeline(self, interval: float = 0.01) -> Timeline:
        """Begins to note what each model holds, on a thread of its own.

        ``with shared.record_timeline() as timeline:`` ends it after the block,
        as ``timeline.stop()`` does. It also ends when the pool closes, or when
        nobody holds the timeline. It keeps neither the pool nor a model alive.

        It asks for counters and walks no pool that is awake: a look takes 2 us
        a model, however much that holds. At 0.01 s a loop that does nothing but
        allocate takes 1 to 2 % longer, at 0.001 s 11 %. A look at 8 models is
        kept in 1.1 KiB of the process's memory: an hour at 0.01 s is 400 MB.

        Args:
            interval: seconds between two looks, above 0.
        Raises:
            InvalidArgumentError: an interval that can't be, or the pool is
                closed.
        """
        return Timeline(self, to_interval(interval))

    def _open_handles(self) -> list[_C.Pool]:
        found = []
        for model_id in self._handle.model_ids():
            with contextlib.suppress(ModelNotFoundError, InvalidArgumentError):  # it, or all, ended meanwhile
                found.append(self._handle.model(model_id))
        return found

    def _handles(self) -> list[_C.Pool]:
        """The models, in order of registration, then those that were unregistered and still hold memory."""
        found = self._open_handles()
        self._forget_ended()
        leaving = list(self._leaving.items())
        return found + [model for key, model in leaving if all(each.key != key for each in found)]

    def _forget_ended(self) -> None:
        for key, model in list(self._leaving.items()):
            # Of one that sleeps what lives holds no memory here.
            if model.is_closed and model.physical_bytes == model.live_bytes == 0:
                self._leaving.pop(key, None)
                self._remaps.pop(key, None)

    def _forget_remaps(self, models: list[_C.Pool]) -> None:
        """One that was unregistered asleep may be woken yet."""
        for model in models:
            if model.key not in self._leaving:
                self._remaps.pop(model.key, None)

    @contextlib.contextmanager
    def _seen_leaving(self, models: list[_C.Pool]) -> Iterator[None]:
        """For while these are unregistered by force: they are never out of sight of :meth:`_handles`."""
        self._leaving.update((model.key, model) for model in models)
        try:
            yield
        finally:
            for model in models:
                if not model.is_closed:
                    self._leaving.pop(model.key, None)
            self._forget_ended()

    def _require_open(self) -> None:
        if self.is_closed:
            raise InvalidArgumentError("the SharedMemoryPool is closed")

    def __enter__(self) -> SharedMemoryPool:
        self._require_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error its frames may keep tensors alive; the error is what matters.
        self.close(force=error is not None)

    def __repr__(self) -> str:
        try:
            stats = self.global_stats()
            text = f"{_C.format_bytes(stats.physical_usage)} of {_C.format_bytes(stats.physical_limit)}"
            text += f", asleep {_C.format_bytes(stats.asleep_bytes)}" if stats.asleep_bytes else ""
            text += f", models: {', '.join(map(one_line, self._models)) or 'none'}"
            text += ", closed" if self.is_closed else ""
        except VmmError:
            text = "out of reach in a forked process"
        return f"SharedMemoryPool({self.name!r}, {self.device}: {text})"

    def __str__(self) -> str:
        try:
            models = [pools.wrap(model, self, model.name) for model in self._handles()]
            return tables.of_shared_pool(self, models)
        except VmmError:
            return repr(self)


class ModelsView(Guarded, Mapping[str, VirtualMemoryPool], guarded=True):
    """The models of one SharedMemoryPool. They keep it, so this must not."""

    _instead_of_a_copy = (
        "it shows the models that there are at this moment; dict(shared.models) keeps them in another one"
    )
    _handle: _C.SharedMemoryPool
    _owner: weakref.ref[SharedMemoryPool]

    def __init__(self, handle: _C.SharedMemoryPool, owner: weakref.ref[SharedMemoryPool]) -> None:
        self._handle = handle
        self._owner = owner

    def __getitem__(self, model_id: str) -> VirtualMemoryPool:
        return pools.wrap(self._handle.model(to_name(model_id, "model_id")), self._owner(), model_id)

    def get(self, model_id: Any, default: Any = None) -> Any:
        """The model of this id, or ``default``: whatever the id is, and whoever unregisters it meanwhile."""
        if model_id in self:
            with contextlib.suppress(ModelNotFoundError):
                return self[model_id]
        return default

    def __contains__(self, model_id: object) -> bool:
        return isinstance(model_id, str) and is_name(model_id) and self._handle.has_model(model_id)

    def __iter__(self) -> Iterator[str]:
        return iter(self._handle.model_ids())

    def __len__(self) -> int:
        return len(self._handle.model_ids())

    def __repr__(self) -> str:
        try:
            return repr({model_id: pool for model_id in self if (pool := self.get(model_id)) is not None})
        except NotAvailableError:
            return "<models out of reach in a forked process>"


# -- All of them -------------------------------------------------------------------------------------------------------

# Re-entrant, because a collection inside the lock may run someone's __del__.
_lock = threading.RLock()
# In order of creation.
_alive: weakref.WeakKeyDictionary[SharedMemoryPool, None] = weakref.WeakKeyDictionary()


def wrap(handle: _C.Pool) -> VirtualMemoryPool:
    """The one object of this pool, whosever it is."""
    pool = pools.known(handle)
    if pool is not None:
        return pool
    for shared in open_pools():
        # It may be unregistered, or all be closed, meanwhile.
        with contextlib.suppress(ModelNotFoundError, InvalidArgumentError):
            if shared._handle.model(handle.name).key == handle.key:
                return pools.wrap(handle, shared, handle.name)
        if handle.key in shared._leaving:
            return pools.wrap(handle, shared, handle.name)
    return pools.wrap(handle)


def find_model(model_id: str, device: DeviceKey | None) -> VirtualMemoryPool:
    """The pool of a model, among all SharedMemoryPools (on ``device``, where
    given).

    Raises:
        ModelNotFoundError: no such model; the known ones are listed.
        InvalidArgumentError: several; their devices are listed.
    """
    candidates = [shared for shared in open_pools() if device is None or shared._device == device]
    found = [shared for shared in candidates if model_id in shared]
    if len(found) == 1:
        return found[0][model_id]
    where = "" if device is None else f" on {device}"
    if not found:
        known = ", ".join(sorted({one_line(name) for shared in candidates for name in shared})) or "none"
        raise ModelNotFoundError(f"no model {model_id!r}{where}; registered: {known}", model_id=model_id)
    devices = sorted({str(shared.device) for shared in found})
    cure = f"name one: device={devices[0]!r}" if len(devices) > 1 else "give the pool itself instead of its id"
    raise InvalidArgumentError(
        f"{len(found)} SharedMemoryPools have a model {model_id!r}, on {', '.join(devices)}; {cure}"
    )


def open_pools() -> list[SharedMemoryPool]:
    """All that there are, but for those that were closed."""
    with _lock:
        alive = list(_alive)
    return [shared for shared in alive if not shared.is_closed]


def _close_dropped(handle: _C.SharedMemoryPool) -> None:
    # Nobody can close it any more. In a forked child there is nothing to close.
    with contextlib.suppress(VmmError):
        handle.close(True)
