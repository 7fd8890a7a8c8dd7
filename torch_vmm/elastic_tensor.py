"""elastic(): a tensor whose first dimension grows and shrinks in place."""

from __future__ import annotations

import copy
from typing import Any, SupportsIndex

import torch

from torch_vmm import _C
from torch_vmm.devices import Device
from torch_vmm.errors import AsleepError, InvalidArgumentError, NotAvailableError, StillInUseError
from torch_vmm.ranges import Backing, RangeTensor, require_addresses, require_dimension, row_bytes
from torch_vmm.sizes import Shape, require_dtype, show, to_index, to_shape


class ElasticTensor(RangeTensor):
    """A tensor whose first dimension grows and shrinks in place; :func:`elastic`
    makes it.

    Its address never changes and nothing is copied, so that views, and CUDA
    graphs captured over it, stay valid while it grows, and kernels may read it
    meanwhile. Every torch function takes it and gives plain tensors.

    Autograd takes another length for a change of what it saved, views too:
    ``backward()`` comes first, or what it may save is ``tensor.data[:n]``,
    which counts for itself what is written to it.

    Memory is held for at least the rows that it has. It comes in whole pages at
    the end, and :meth:`shrink_to_fit` gives it back. Change it on one thread at
    a time, as with any in-place operation.
    """

    _made_by = "torch_vmm.elastic()"
    _max_shape: tuple[int, ...]
    _strides: tuple[int, ...]

    @property
    def max_shape(self) -> torch.Size:
        """The shape up to which it grows."""
        self._own("max_shape")
        return torch.Size(self._max_shape)

    @property
    def reserved_rows(self) -> int:
        """Rows that fit into the memory that it holds."""
        backing = self._own("reserved_rows")
        size = row_bytes(self._max_shape, self.dtype)
        return self._max_shape[0] if size == 0 else min(backing.held // size, self._max_shape[0])

    # torch's own takes more dimensions and never fails for a limit.
    def resize_(self, n: SupportsIndex) -> ElasticTensor:  # type: ignore[override]
        """Makes the first dimension ``n`` long, in place; returns the tensor.

        Rows that were there before keep their content. New ones are zero where
        they stand on new pages, and hold what they held where its memory was
        kept. What it holds beyond ``n`` it keeps, until :meth:`shrink_to_fit`.

        Args:
            n: rows, from 0 to ``max_shape[0]``.
        Raises:
            InvalidArgumentError: no such number; the pool has been closed;
                autograd has recorded what was written to it, whose gradient has
                its shape; or the tensor shows other memory than it was made
                with (``.data``, ``set_()``, ``share_memory_()``,
                ``module.half()``).
            OutOfMemoryError: a limit or the device has no such amount left. The
                tensor is as it was.
            NotAvailableError: the stream is being captured, and pages that the
                tensor gave back are still mapped: they have to be zeroed, so
                grow or :meth:`reserve` before the capture.
        """
        backing = self._own("resize_()")
        rows = self._to_rows(n, "resize_")
        if self.grad_fn is not None:
            raise InvalidArgumentError(
                f"resize_({rows}): autograd has recorded what was written to this tensor ({self.grad_fn.name()}), and "
                f"its gradient has {self.shape[0]} rows: call backward() and then detach_() first, or write to it "
                f"under torch.no_grad()"
            )
        self._hold(backing, rows)
        with torch.no_grad():
            self.set_(self.untyped_storage(), 0, (rows, *self._max_shape[1:]), self._strides)
        return self

    # torch's own has changed the shape by the time that it finds no room.
    def resize_as_(self, other: torch.Tensor, *, memory_format: torch.memory_format | None = None) -> ElasticTensor:
        """As many rows as ``other`` has, by :meth:`resize_`, where its rows are of
        the same shape.

        Raises:
            InvalidArgumentError: its rows are of another shape; else as
                :meth:`resize_`.
        """
        if not isinstance(other, torch.Tensor) or other.dim() == 0 or other.shape[1:] != self.max_shape[1:]:
            shape = tuple(other.shape) if isinstance(other, torch.Tensor) else show(other)
            raise InvalidArgumentError(f"resize_as_({shape}): give a tensor of rows of {tuple(self.max_shape[1:])}")
        if memory_format not in (None, torch.contiguous_format, torch.preserve_format):
            raise InvalidArgumentError(f"resize_as_(memory_format={memory_format}): rows are contiguous")
        return self.resize_(other.shape[0])

    def reserve(self, n: SupportsIndex) -> None:
        """Takes memory for ``n`` rows, so that growing up to there cannot fail;
        the shape stays.

        Raises:
            InvalidArgumentError: no number from 0 to ``max_shape[0]``; else as
                :meth:`resize_`.
            OutOfMemoryError, NotAvailableError: as :meth:`resize_`.
        """
        self._hold(self._own("reserve()"), self._to_rows(n, "reserve"))

    def shrink_to_fit(self) -> int:
        """Gives back the pages beyond the last row, its own and those of tensors
        that :meth:`detach` made of it; returns their bytes.

        Work that is queued on the GPU may still use them, and nobody waits for
        it. A view of rows that are gone must not be used any more: that faults.
        Memory comes in chunks of up to a 16th of what lies below them, and one
        that has a row left stays mapped.

        Raises:
            StillInUseError: an :func:`torch_vmm.alias` shows some of them.
            AsleepError: its model is asleep.
            InvalidArgumentError: it, or what it would give back, is sealed; its
                rows, or a twin's, were changed by another function than
                :meth:`resize_`; or it shows other memory, as :meth:`resize_`.
        """
        backing = self._own("shrink_to_fit()")
        if _C.is_sealed(backing.pool._handle, backing.handle.base_address, 1):
            raise InvalidArgumentError("shrink_to_fit(): the tensor is sealed; unseal() it first")
        used = self._shown_bytes()
        # What is refused as it cannot grow the storage (`out=`, resize_as_()) leaves its shape behind all the same.
        if self.shape[1:] != self._max_shape[1:] or self.stride() != self._strides or used > backing.held:
            raise InvalidArgumentError(
                f"shrink_to_fit(): the tensor has the shape {tuple(self.shape)} and the strides {self.stride()}, not "
                f"rows of {self._max_shape[1:]} that it has memory for; resize_(rows) makes them again"
            )
        page = backing.handle.page_size
        return self._keep(-(-used // page) * page, used)

    def _keep(self, keep: int, used: int) -> int:
        """Gives back all beyond the first ``keep`` bytes, whole pages; the storage has ``used`` of those. Returns how
        many went.
        """
        backing = self._backing
        held, stored = backing.held, self.untyped_storage().nbytes()
        # Before they go: whoever copies or saves the whole storage meets no page that is gone.
        backing.held = keep
        _C.set_storage_bytes(self, used)
        try:
            return backing.handle.decommit([(keep, backing.handle.capacity - keep)])
        except (AsleepError, InvalidArgumentError, NotAvailableError, StillInUseError):  # nothing went
            backing.held = held
            _C.set_storage_bytes(self, stored)
            raise

    def detach(self) -> ElasticTensor:
        """The same memory and rows, outside autograd. It does not follow what
        :meth:`resize_` does to this one.
        """
        made: ElasticTensor = super().detach()
        made._max_shape, made._strides = self._max_shape, self._strides
        return made

    def _to_rows(self, n: SupportsIndex, doing: str) -> int:
        rows = to_index(n)
        if rows is None or not 0 <= rows <= self._max_shape[0]:
            raise InvalidArgumentError(f"{doing}({show(n)}): give a number of rows from 0 to {self._max_shape[0]}")
        return rows

    def _hold(self, backing: Backing, rows: int) -> None:
        size = rows * row_bytes(self._max_shape, self.dtype)
        page = backing.handle.page_size
        while size > (held := backing.held):
            backing.commit([(held, size - held)])
            # A function of on_pressure() may have shrunk this very tensor meanwhile: then more is missing.
            if backing.held >= held:
                backing.held = max(backing.held, -(-size // page) * page)
        if size > self.untyped_storage().nbytes():
            _C.set_storage_bytes(self, size)

    def _plain(self) -> torch.Tensor:
        """The same memory and gradient, as a tensor like any other."""
        plain = torch.Tensor.detach(self)
        if isinstance(self, torch.nn.Parameter):
            plain = torch.nn.Parameter(plain, self.requires_grad)
        else:
            plain.requires_grad_(self.requires_grad)
        if self.is_leaf and self.grad is not None and self.grad.shape == self.shape:
            plain.grad = self.grad
        return plain

    def _users_attributes(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _OWN_ATTRIBUTES}

    # A copy is a tensor, or a parameter, like any other.
    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if not self.is_leaf:
            raise RuntimeError(
                "copy.deepcopy() takes tensors that autograd has not made, and what was written to this one it has "
                "recorded; copy its .detach()"
            )
        made = copy.deepcopy(self._plain(), memo)
        memo[id(self)] = made  # first: an attribute may lead back here
        if isinstance(self, torch.nn.Parameter):
            return made  # torch copies no attributes of parameters
        made.__dict__.update(copy.deepcopy(self._users_attributes(), memo))
        return made

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        plain = self._plain()
        plain.__dict__.update(self._users_attributes())
        return plain.__reduce_ex__(protocol)


_OWN_ATTRIBUTES = ("_backing", "_max_shape", "_strides")


def elastic(
    shape: Shape, dtype: torch.dtype = torch.float32, device: Device = "cuda", max_shape: Shape | None = None
) -> ElasticTensor:
    """A tensor whose first dimension grows and shrinks in place, up to
    ``max_shape``, at one address.

    It belongs to the pool that is open (:func:`torch_vmm.current_pool`), which
    pays for the pages that it holds and counts them. The addresses up to
    ``max_shape`` cost nothing.

    Args:
        shape: as it begins; at least one dimension. Its content is
            uninitialised.
        dtype: of the elements.
        device: where; ``"cuda"`` and ``None`` are the current GPU, as for
            :func:`torch_vmm.aligned`. On ``"cpu"`` it needs no
            :func:`torch_vmm.enable`.
        max_shape: the same but for the first dimension, which is at least as
            large. ``None`` is ``shape``: it can only shrink.
    Raises:
        InvalidArgumentError: a shape, dtype or device that can't be.
        OutOfMemoryError: a limit, the device, or its addresses do not hold it.
        NotAvailableError: no driver, or no such device.
    """
    sizes = to_shape(shape)
    most = sizes if max_shape is None else to_shape(max_shape, "max_shape")
    require_dtype(dtype)
    require_dimension(sizes, "shape")
    if len(most) != len(sizes) or most[1:] != sizes[1:] or most[0] < sizes[0]:
        raise InvalidArgumentError(
            f"max_shape={show(max_shape)}: give {sizes}, which is the shape, or the same with a larger first dimension"
        )
    require_addresses(most, dtype, "shape" if max_shape is None else "max_shape")
    backing = Backing("elastic tensor", most[0] * row_bytes(most, dtype), device)
    whole = backing.tensor(most, dtype)
    _C.set_storage_bytes(whole, 0)
    made: ElasticTensor = ElasticTensor._over(backing, whole)
    made._max_shape, made._strides = most, whole.stride()
    return made.resize_(sizes[0])
