"""Becoming torch's allocator, and whose memory a tensor is."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import torch

from torch_vmm import _C, _decorate, shared_pools
from torch_vmm.contexts import Stays
from torch_vmm.devices import Device, to_device
from torch_vmm.errors import InvalidArgumentError
from torch_vmm.pools import VirtualMemoryPool

Function = TypeVar("Function", bound=Callable[..., Any])


def enable(device: Device = "cuda") -> None:
    """Makes torch_vmm torch's allocator for a kind of device; again is fine. It cannot be undone.

    For ``"cuda"`` the same as
    ``torch.cuda.memory.change_current_allocator(torch_vmm.allocator())``, with a
    look at the GPU first. For ``"cpu"`` it routes torch's host tensors.

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


def is_enabled(device: Device) -> bool:
    """Do torch's tensors on this kind of device come from torch_vmm?"""
    return _C.is_enabled(to_device(device).kind)


def allocator() -> _C.CUDAAllocator:
    """What ``torch.cuda.memory.change_current_allocator`` and ``torch.cuda.MemPool`` take.

    One object for the process; needs no driver.
    """
    return _C.allocator()


def library_path() -> str:
    """The shared library for ``torch.cuda.memory.CUDAPluggableAllocator``.

    It has ``torch_vmm_malloc(size, device, stream)`` and
    ``torch_vmm_free(ptr, size, device, stream)``.
    """
    return _C.library_path()


# In lower case, as torch.no_grad is.
class use_model:  # noqa: N801
    """Tensors made inside belong to this model, those of ``backward()`` too.

    A context manager and a decorator. It nests; the inner one wins. A thread
    starts outside every model. Frees find their pool by themselves.

    A decorated generator or coroutine is in the model only while it runs: it is
    left at each ``yield`` and ``await``, and entered again. A ``with`` that is
    held across one of them and closed out of order is a ``VmmError``.

    Args:
        model_id_or_pool: a pool, or the id of a model of any SharedMemoryPool. An
            id is looked up on entering.
        device: on which device, where several have a model of that id.
    Raises:
        ModelNotFoundError: on entering: no such model; the known ones are listed.
        InvalidArgumentError: several such models, a closed pool, or one of
            another device; neither a pool nor an id.
    """

    def __init__(self, model_id_or_pool: str | VirtualMemoryPool, device: Device = None) -> None:
        if not isinstance(model_id_or_pool, str | VirtualMemoryPool):
            raise InvalidArgumentError(
                f"use_model({model_id_or_pool!r}): give a model's id or its pool (a SharedMemoryPool has many)"
            )
        self._model = model_id_or_pool
        self._device = None if device is None else to_device(device)
        self._stays = Stays()
        if isinstance(self._model, VirtualMemoryPool) and self._device not in (None, self._model._device):
            raise InvalidArgumentError(f"{self._model!r} is not on {self._device}")

    def __enter__(self) -> VirtualMemoryPool:
        pool = self._model
        if isinstance(pool, str):
            pool = shared_pools.find_model(pool, self._device)
        self._stays.enter(pool._handle)
        return pool

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stays.leave()

    def __call__(self, function: Function) -> Function:
        return _decorate.inside(lambda: self, function)

    def __repr__(self) -> str:
        return f"use_model({self._model!r}{'' if self._device is None else f', device={str(self._device)!r}'})"


def current_pool(device: Device = "cuda") -> VirtualMemoryPool:
    """The pool that an allocation here and now would come from: the innermost model's, or the default one.

    Raises:
        NotAvailableError: no driver, or no such device.
    """
    return shared_pools.wrap(_C.current_pool(*to_device(device)))


def pool_of(tensor_or_address: torch.Tensor | int) -> VirtualMemoryPool | None:
    """The pool that holds a tensor or an address, or ``None`` when none of ours does.

    Raises:
        InvalidArgumentError: neither, or a tensor that has no storage of its own (a sparse one).
    """
    if isinstance(tensor_or_address, torch.Tensor):
        try:
            address = tensor_or_address.untyped_storage().data_ptr()
        except (NotImplementedError, RuntimeError) as error:
            raise InvalidArgumentError(f"a tensor without a storage is in no one pool: {error}") from error
    elif isinstance(tensor_or_address, int) and not isinstance(tensor_or_address, bool):
        address = tensor_or_address
    else:
        raise InvalidArgumentError(f"pool_of({tensor_or_address!r}): give a tensor or an address")
    if not 0 < address < 2**64:
        return None
    handle = _C.pool_at(address)
    return None if handle is None else shared_pools.wrap(handle)
