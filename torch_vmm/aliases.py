"""The same pages at several addresses: rings, shared weights, pieces stitched together; and tensors that allow it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import SupportsIndex

import torch

from torch_vmm import _C, placed, routing
from torch_vmm._lifetimes import hold_while
from torch_vmm.dense import require_no_grad, require_strided, require_values, span_bytes
from torch_vmm.devices import Device, DeviceKey
from torch_vmm.errors import InvalidArgumentError
from torch_vmm.placed import Placement
from torch_vmm.pools import VirtualMemoryPool
from torch_vmm.ranges import Backing, require_addresses, require_size
from torch_vmm.sizes import Shape, require_dtype, show, to_flag, to_index, to_shape


class _Shown:
    """What an alias's storage keeps: the pool that tells of it. (Its memory keeps what it shows.)"""

    def __init__(self, pool: VirtualMemoryPool) -> None:
        self.pool = pool


_by_address: weakref.WeakValueDictionary[int, _Shown] = weakref.WeakValueDictionary()


def aligned(
    shape: Shape,
    dtype: torch.dtype = torch.float32,
    device: Device = None,
    placement: Placement | None = None,
) -> torch.Tensor:
    """A tensor that begins with a chunk of memory and shares none of its chunks
    with anything.

    What :func:`alias`, :func:`concat_views` and :meth:`VirtualMemoryPool.seal`
    ask for. It takes whole pages of 2 MiB of the pool that is open, and begins
    as zero.

    With ``placement=[("cuda:0", n), ("cuda:1", m)]`` the first ``n`` rows lie
    in the memory of the one GPU and the next ``m`` in the other's, in one range
    of addresses that both reach. Each GPU's share counts in the pool that is
    open on it. The tensor is the first device's; :func:`seen_from` shows it to
    the others. It is made for the devices' current streams, and its memory goes
    behind all that is queued on any of them. Its addresses are no pool's:
    ``pool_of`` tells nothing of them, and it cannot be aliased or sealed.

    Args:
        shape: of the tensor.
        device: where; ``None`` and ``"cuda"`` are the current GPU. Not with a
            placement.
        placement: devices of one kind, and how many rows of the first dimension
            each holds. Where one ends and the next begins has to be the end of
            a page: the error names the next counts that are.
    Raises:
        InvalidArgumentError: a shape, dtype, device or placement that can't be.
        OutOfMemoryError: a limit, a device, or its addresses do not hold it;
            nothing is made then.
        NotAvailableError: no driver, no such device, or GPUs that cannot reach
            each other's memory.
    """
    sizes = to_shape(shape)
    require_dtype(dtype)
    require_addresses(sizes, dtype, "shape")
    if placement is not None:
        if device is not None:
            raise InvalidArgumentError(f"device={show(device)} and a placement: give one of them")
        return placed.make(sizes, dtype, placement)
    size = math.prod(sizes) * dtype.itemsize
    backing = Backing("aligned tensor", size, device)
    tensor = backing.tensor(sizes, dtype)
    backing.commit([(0, size)])
    return tensor


def alias(tensor: torch.Tensor, copies: SupportsIndex = 1, read_only: bool = False) -> torch.Tensor:
    """The pages of ``tensor`` at further addresses, ``copies`` times in a row; no
    copy is made.

    With two copies a ring buffer's end continues at its beginning:
    ``alias(ring, 2)[k : k + n]`` is contiguous wherever it starts. With one,
    made in another model's context, the models share it: its owner pays, and
    ``shared_bytes`` of the pool that is open here tells of it. What is written
    through one address is read through all.

    It keeps the memory, also when ``tensor`` has gone. Its own addresses are no
    pool's: ``pool_of`` tells nothing of them, and it cannot be aliased itself.
    Autograd does not follow it: as with ``numpy()``, give ``tensor.detach()``
    of one that requires grad, or alias it under ``torch.no_grad()``. But it
    notices, as with a view, where one is written to and the other was saved for
    ``backward()``.

    ``torch.compile`` does not know that the addresses show the same memory. A
    compiled function that writes to some of it must not read that by another
    address, through the other tensor or a ring's other turn: it may read what
    was there before, silently. Write to it in a function under
    ``torch.compiler.disable``.

    Args:
        tensor: contiguous, on whole chunks and of whole ones: made by
            :func:`aligned`, of a multiple of the granularity (2 MiB).
        copies: at least 1.
        read_only: a write to these addresses faults, whatever ``tensor``'s
            allow.
    Returns:
        A tensor of ``tensor``'s shape, its first dimension ``copies`` times as
        long.
    Raises:
        InvalidArgumentError: ``tensor`` does not stand on whole chunks, is an
            alias, or requires grad; or so many copies of it are 2**63 bytes or
            more, which no tensor has.
        OutOfMemoryError: no such stretch of addresses is left, or they are more
            than there ever are.
    """
    times = to_index(copies)
    if times is None or times < 1:
        raise InvalidArgumentError(f"copies={show(copies)}: give a whole number of at least 1")
    shape = _require_whole(tensor, "tensor")
    return _alias([tensor], times, to_flag(read_only, "read_only"), (shape[0] * times, *shape[1:]))


def concat_views(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """``torch.cat(tensors)`` without a copy: their pages, one after the other, at
    addresses of their own.

    What is written through it is read through them. It keeps their memory; the
    rest is as with :func:`alias`, but for one thing: autograd does not notice
    where it is written to and one of them was saved for ``backward()``, or the
    other way round. Where that may be, say so by
    ``torch.autograd.graph.increment_version(saved)``.

    Args:
        tensors: of one dtype and device, alike but for the first dimension,
            each made by :func:`aligned`, of a multiple of the granularity (2
            MiB).
    Raises:
        InvalidArgumentError: none, not alike, or one that does not stand on
            whole chunks, is an alias or requires grad.
        OutOfMemoryError: no such stretch of addresses is left.
    """
    if not isinstance(tensors, list | tuple) or not tensors:
        raise InvalidArgumentError(f"tensors={show(tensors)}: give a list of tensors")
    shapes = [_require_whole(tensor, f"tensors[{k}]") for k, tensor in enumerate(tensors)]
    first = tensors[0]
    for k, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True)):
        if shape[1:] != shapes[0][1:] or tensor.dtype != first.dtype or tensor.device != first.device:
            raise InvalidArgumentError(
                f"tensors[{k}]: {shape} of {tensor.dtype} on {tensor.device} does not follow {shapes[0]} of "
                f"{first.dtype} on {first.device}"
            )
    return _alias(list(tensors), 1, False, (sum(shape[0] for shape in shapes), *shapes[0][1:]))


def sealed(tensor: torch.Tensor) -> bool:
    """Are all pages of ``tensor`` read-only, by :meth:`VirtualMemoryPool.seal`?

    Raises:
        InvalidArgumentError: no tensor, or none that is strided: a sparse or
            nested one.
        NotAvailableError: in a forked child.
    """
    pool = routing.pool_of(require_strided(tensor, "sealed()"))
    if pool is None or tensor.numel() == 0:
        return False
    return _C.is_sealed(pool._handle, tensor.data_ptr(), span_bytes(tensor))


def _require_whole(tensor: object, name: str) -> tuple[int, ...]:
    """The shape of what may stand on whole chunks."""
    tensor = require_strided(tensor, name)
    if tensor.dim() == 0:
        raise InvalidArgumentError(f"{name}: a tensor of shape () has no first dimension; give it one: (1,)")
    if tensor.numel() == 0:
        raise InvalidArgumentError(f"{name}: a tensor of shape {tuple(tensor.shape)} has nothing in it")
    if not tensor.is_contiguous():
        raise InvalidArgumentError(
            f"{name}: a tensor of shape {tuple(tensor.shape)} with strides {tensor.stride()} is not contiguous, so it "
            f"does not fill whole chunks; make it with torch_vmm.aligned(shape, dtype, device)"
        )
    if tensor.device.type not in ("cuda", "cpu"):
        raise InvalidArgumentError(f"{name}: it is on {tensor.device}, where there are no pools")
    if tensor.untyped_storage().data_ptr() in _by_address:
        raise InvalidArgumentError(
            f"{name}: it is an alias, whose addresses are no pool's; alias the tensor that it was made of"
        )
    if placed.is_placed(tensor):
        raise InvalidArgumentError(f"{name}: it is in several devices' memory, which has no further addresses")
    if _C.pool_at(tensor.data_ptr()) is None:
        raise InvalidArgumentError(
            f"{name}: its memory is in none of torch_vmm's pools; make it with torch_vmm.aligned(shape, dtype, device)"
        )
    require_no_grad(tensor, name, "an alias")
    require_values(tensor, name)
    return tuple(tensor.shape)


def _alias(tensors: list[torch.Tensor], copies: int, read_only: bool, shape: tuple[int, ...]) -> torch.Tensor:
    require_size(shape, tensors[0].dtype, "shape of the result")
    device = tensors[0].device
    key = DeviceKey(device.type, device.index or 0)  # type: ignore[arg-type]
    pool = routing.current_pool(key.torch_device)
    pieces = [(tensor.data_ptr(), tensor.numel() * tensor.element_size()) for tensor in tensors]
    _C.current_space(*key, sum(size for _, size in pieces))  # strict() may refuse
    with torch.inference_mode(False):  # it outlives one that is on now
        made = _C.alias(pool._handle, tensors, pieces, copies, read_only, shape, tensors[0].dtype)
    if all(tensor.untyped_storage().data_ptr() == tensors[0].untyped_storage().data_ptr() for tensor in tensors):
        _C.share_version(made, tensors[0])
    shown = _Shown(pool)
    _by_address[made.data_ptr()] = shown
    hold_while(made, shown)
    return made
