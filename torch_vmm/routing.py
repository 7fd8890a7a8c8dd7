"""Becoming torch's allocator, and whose memory a tensor is."""

from __future__ import annotations

from typing import TYPE_CHECKING, SupportsIndex

import torch

from torch_vmm import _C, _decorate, shared_pools, strictness
from torch_vmm._decorate import Function
from torch_vmm._guarded import Guarded
from torch_vmm.contexts import Carried, ContextDecorator
from torch_vmm.dense import require_strided
from torch_vmm.devices import Device, DeviceKey, to_device
from torch_vmm.errors import InvalidArgumentError
from torch_vmm.pools import VirtualMemoryPool
from torch_vmm.sizes import show, to_index, to_name


def enable(device: Device = "cuda") -> None:
    """Makes torch_vmm torch's allocator for a kind of device; again is fine. It
    cannot be undone.

    For ``"cuda"`` the same as
    ``torch.cuda.memory.change_current_allocator(torch_vmm.allocator())``, with
    a look at the GPU first. For ``"cpu"`` it routes torch's host tensors.

    Args:
        device: ``"cuda"`` (all its devices) or ``"cpu"``.
    Raises:
        NotAvailableError: no driver or GPU, or CUDA was initialised before with
            another allocator; says what to do.
        InvalidArgumentError: another kind of device.
    """
    if to_device(device).kind == "cuda":
        _C.enable_cuda()
    else:
        _C.enable_host()


def is_enabled(device: Device = "cuda") -> bool:
    """Is torch_vmm torch's allocator on this kind of device?

    ``False`` also where it serves a ``torch.cuda.MemPool`` only, or as the
    functions of a ``CUDAPluggableAllocator``.
    """
    return _C.is_enabled(to_device(device).kind)


def allocator() -> _C.CUDAAllocator:
    """What ``torch.cuda.memory.change_current_allocator`` and
    ``torch.cuda.MemPool`` take.

    One object for the process; needs no driver. While torch or anyone else
    holds it, models can be entered: ``torch.cuda.MemPool`` may be making
    tensors with it.
    """
    return _C.allocator()


def library_path() -> str:
    """The shared library for ``torch.cuda.memory.CUDAPluggableAllocator``.

    It has ``torch_vmm_malloc(size, device, stream)`` and
    ``torch_vmm_free(ptr, size, device, stream)``.
    """
    return _C.library_path()


# In lower case, as torch.no_grad is.
class use_model(ContextDecorator, Guarded, guarded=True):  # noqa: N801
    """Tensors made inside belong to this model, those of ``backward()`` too.

    A context manager and a decorator. It nests; the inner one wins. A thread
    starts outside every model. Frees find their pool by themselves.

    A decorated generator or coroutine is in the model only while it runs: it is
    left at each ``yield`` and ``await``, and entered again. A ``with`` that is
    held across one of them and closed out of order is a ``VmmError``.

    Args:
        model_id_or_pool: a pool, or the id of a model of any SharedMemoryPool.
            An id is looked up on entering.
        device: on which device, where several have a model of that id.
    Raises:
        ModelNotFoundError: on entering: no such model; the known ones are
            listed.
        NotEnabledError: on entering: torch_vmm is not the allocator of that
            device.
        InvalidArgumentError: several such models, a closed pool, or one of
            another device; neither a pool nor an id.
    """

    _instead_of_a_copy = "it is open on threads of this process; make another one, use_model(...) costs nothing"
    _model: str | VirtualMemoryPool
    _device: DeviceKey | None

    def __init__(self, model_id_or_pool: str | VirtualMemoryPool, device: Device = None) -> None:
        if not isinstance(model_id_or_pool, str | VirtualMemoryPool):
            raise InvalidArgumentError(
                f"use_model({show(model_id_or_pool)}): give a model's id or its pool (a SharedMemoryPool has many)"
            )
        if isinstance(model_id_or_pool, str):
            to_name(model_id_or_pool, "model_id")
        self._model = model_id_or_pool
        self._device = None if device is None else to_device(device)
        self._stays = _C.Stays()
        if isinstance(self._model, VirtualMemoryPool) and self._device not in (None, self._model._device):
            raise InvalidArgumentError(f"{self._model!r} is not on {self._device}")

    if TYPE_CHECKING:

        def __enter__(self) -> VirtualMemoryPool: ...

    def _opens(self) -> tuple[list[_C.Pool], VirtualMemoryPool]:
        pool = self._model
        if isinstance(pool, str):
            pool = shared_pools.find_model(pool, self._device)
        return [pool._handle], pool

    def __repr__(self) -> str:
        return f"use_model({self._model!r}{'' if self._device is None else f', device={str(self._device)!r}'})"


def set_default_model(pool: VirtualMemoryPool) -> None:
    """Tensors made outside every model belong to this one from now on, on its
    device and on all threads, for as long as it is open. It is held until
    another takes its place, or :func:`reset_default_model`.

    :func:`torch_vmm.strict` goes before it: while that is on, what is made
    outside every model raises or warns as ever, and is this one's again after.

    Raises:
        InvalidArgumentError: no pool, or a closed one.
        NotEnabledError: torch_vmm is not the allocator of its device.
    """
    if not isinstance(pool, VirtualMemoryPool):
        raise InvalidArgumentError(f"set_default_model({show(pool)}): give a pool")
    with pool:  # whatever forbids to enter it forbids this
        pass
    strictness.set_default_model(pool._device, pool)


def reset_default_model(device: Device = "cuda") -> None:
    """Tensors made outside every model are the device's own default pool's
    again.

    Raises:
        NotAvailableError: no driver, or no such device.
    """
    strictness.set_default_model(to_device(device), None)


def carry(function: Function) -> Function:
    """``function``, run in the model that is open here and now, whatever thread or
    task calls it.

    A thread starts outside every model, and so do the workers of an executor
    and ``asyncio.to_thread``: give them ``torch_vmm.carry(function)``. A tag
    that is open (:meth:`VirtualMemoryPool.tag`) goes along. What is open where
    it is called is closed while it runs. Where no model is open now, it runs
    outside every model. It keeps the pools.

    Args:
        function: anything that can be called; a generator or coroutine function
            is in the model only while it runs, as with :class:`use_model`.
    Raises:
        InvalidArgumentError: nothing that can be called; in the call: a pool
            that has been closed since.
    """
    spaces = _C.open_models()
    pools = [shared_pools.wrap(space.model) for space in spaces]

    def opened() -> Carried:
        # A tag's space of now: what it had may have been sealed since.
        return Carried([p._handle.tagged(s.tag) if s.tag else p._handle for p, s in zip(pools, spaces, strict=True)])

    return _decorate.inside(opened, function, classes=True)


def current_pool(device: Device = "cuda") -> VirtualMemoryPool:
    """The pool that an allocation here and now would come from: the innermost
    model's, or the default one.

    Raises:
        NotAvailableError: no driver, or no such device.
    """
    return shared_pools.wrap(_C.current_pool(*to_device(device)))


def pool_of(tensor_or_address: torch.Tensor | SupportsIndex) -> VirtualMemoryPool | None:
    """The pool that holds a tensor or an address, or ``None`` when none of ours
    does.

    Raises:
        InvalidArgumentError: neither, or a tensor without a storage of its own,
            a sparse one for example: ask for its parts.
        NotAvailableError: in a forked child, where no pool can be reached.
    """
    if isinstance(tensor_or_address, torch.Tensor):
        try:
            address = tensor_or_address.untyped_storage().data_ptr()
        except (NotImplementedError, RuntimeError) as error:
            require_strided(tensor_or_address, "pool_of()")  # says what it is made of, if of other tensors
            raise InvalidArgumentError(f"pool_of(): a tensor without a storage is in no one pool: {error}") from error
    else:
        number = to_index(tensor_or_address)
        if number is None:
            raise InvalidArgumentError(f"pool_of({show(tensor_or_address)}): give a tensor or an address")
        address = number
    if not 0 < address < 2**64:
        return None
    handle = _C.pool_at(address)
    return None if handle is None else shared_pools.wrap(handle)
