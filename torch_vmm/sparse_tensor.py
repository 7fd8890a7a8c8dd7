"""sparse(): a tensor of any size of which only those pages exist that were committed."""

from __future__ import annotations

import math
from typing import Any, NoReturn, SupportsIndex

import torch

from torch_vmm import _C
from torch_vmm.devices import Device, to_device
from torch_vmm.errors import InvalidArgumentError, NotAvailableError, NotCopyableError
from torch_vmm.ranges import Backing, RangeTensor, require_addresses, require_dimension, row_bytes
from torch_vmm.sizes import Shape, Size, require_dtype, show, to_flag, to_index, to_page_size, to_shape

Index = slice | int | tuple[slice | int, ...]
"""A slice, or a tuple of slices over the leading dimensions (``()``: all); a number is one step of its dimension."""


class SparseTensor(RangeTensor):
    """A tensor of which only committed pages have memory; :func:`sparse` makes it.

    It may be larger than the device. What has no memory reads as zero, or
    faults, as chosen when it was made; writing to it faults in either case: on
    the CPU the process ends, on a GPU the CUDA context does. So commit what an
    operation writes, and read no more of it than you mean to: ``tensor.sum()``
    reads all of it.

    Every torch function takes it and gives plain tensors. A view's storage is
    all of it, and torch saves, deep-copies and sends storages whole: do that
    with ``view.clone()``.

    Call :meth:`commit`
    and :meth:`decommit` on one thread at a time; where the rest reads as zero,
    they wait for the work that is queued, and no other thread may queue work
    that reads it meanwhile.
    """

    _made_by = "torch_vmm.sparse()"
    _zeros: bool

    @property
    def page_size(self) -> int:
        """Bytes: the grain in which memory comes and goes."""
        return self._own("page_size").handle.page_size

    @property
    def committed_bytes(self) -> int:
        """Bytes of the pages that have memory."""
        handle = self._own("committed_bytes").handle
        return sum(size for _, size in handle.committed(0, handle.capacity))

    def commit(self, index: Index) -> None:
        """Gives memory to the pages under ``self[index]``, all or none. They begin
        as zero.

        Args:
            index: a slice, or a tuple of slices over the leading dimensions,
                widened to whole pages; ``()`` is all. What has memory keeps it,
                and its content.
        Raises:
            InvalidArgumentError: no such index, or a step that is not 1; the
                pool has been closed; or the tensor shows other memory than it
                was made with (``.data``, ``set_()``, ``module.half()``), or its
                rows do not follow each other any more (``t_()``,
                ``transpose_()``).
            OutOfMemoryError: a limit or the device has no such amount left. The
                tensor is as it was.
            AsleepError: its model is asleep, and some of them have no memory
                yet.
        """
        self._own_rows("commit()").commit(self._spans(index, "commit"))

    def decommit(self, index: Index) -> int:
        """Gives the memory of the pages under ``self[index]`` back; returns their
        bytes.

        Widened to whole pages, so what shares a page with it goes too. Work
        that is queued on the GPU may still use them. To autograd it is a write
        in place: a ``backward()`` that needs what a view of the tensor held is
        an error (rows saved of ``.data`` are yours to keep).

        Raises:
            InvalidArgumentError: as :meth:`commit`; or some of them are sealed.
            StillInUseError: an :func:`torch_vmm.alias` shows some of them.
            AsleepError: its model is asleep, and some of them have memory.
        """
        gone = self._own_rows("decommit()").handle.decommit(self._spans(index, "decommit"))
        if gone:
            torch.autograd.graph.increment_version(self)
        return gone

    def is_committed(self, index: Index) -> bool:
        """Have all pages under ``self[index]`` memory?

        Raises:
            InvalidArgumentError: as :meth:`commit`.
        """
        return self._own_rows("is_committed()").handle.is_committed(self._spans(index, "is_committed"))

    def committed_spans(self) -> list[slice]:
        """The runs of rows (of the first dimension) all of whose memory is there,
        in order.

        ``for span in tensor.committed_spans(): tensor[span]``. A row that has a
        part of its memory only is in none.

        Raises:
            InvalidArgumentError: its rows do not follow each other any more, as
                :meth:`commit`.
        """
        handle = self._own_rows("committed_spans()").handle
        row = row_bytes(tuple(self.shape), self.dtype)
        if row == 0:
            return []
        spans = []
        for offset, size in handle.committed(0, handle.capacity):
            first = -(-offset // row)
            last = min((offset + size) // row, self.shape[0])
            if first < last:
                spans.append(slice(first, last))
        return spans

    def detach(self) -> SparseTensor:
        """The same memory, outside autograd; so it can be a
        ``torch.nn.Parameter``.
        """
        made: SparseTensor = super().detach()
        made._zeros = self._zeros
        return made

    def _own_rows(self, doing: str) -> Backing:
        """Its backing, for what finds pages by the shape: strides have to follow from that, as when it was made.

        Raises:
            InvalidArgumentError: they do not.
        """
        backing = self._own(doing)
        if self.dim() == 0:
            raise InvalidArgumentError(f"{doing}: the tensor has no dimension any more, as squeeze_() leaves it")
        if not self.is_contiguous():
            raise InvalidArgumentError(
                f"{doing}: the tensor has the shape {tuple(self.shape)} and the strides {self.stride()}, so its rows "
                f"do not follow each other: t_(), transpose_(), as_strided_() or the like changed it in place; "
                f"change it back, or take views of it (tensor.t()) instead"
            )
        return backing

    def _spans(self, index: Index, doing: str) -> list[tuple[int, int]]:
        """(offset, size) of ``self[index]`` in bytes, as few as whole pages tell apart."""
        parts = index if isinstance(index, tuple) else (index,)
        if not parts:  # as in self[()], all of it
            parts = (slice(None),)
        if len(parts) > self.dim():
            raise InvalidArgumentError(f"{doing}({show(index)}): the tensor has {self.dim()} dimensions")
        bounds = [_to_bounds(part, size, doing) for part, size in zip(parts, self.shape, strict=False)]
        if any(first >= last for first, last in bounds):
            return []
        steps = [math.prod(self.shape[k + 1 :]) * self.dtype.itemsize for k in range(len(bounds))]
        whole = [(0, size) for size in self.shape]
        offsets = [0]
        for k, ((first, last), step) in enumerate(zip(bounds, steps, strict=True)):
            if bounds[k + 1 :] == whole[k + 1 : len(bounds)]:
                return [(offset + first * step, (last - first) * step) for offset in offsets]
            if step <= self.page_size:
                rest = list(zip(bounds[k + 1 :], steps[k + 1 :], strict=True))
                # Every page from the first element to the last holds some of it.
                begin = first * step + sum(b[0] * inner for b, inner in rest)
                end = (last - 1) * step + sum((b[1] - 1) * inner for b, inner in rest)
                return [(offset + begin, end + steps[-1] - begin) for offset in offsets]
            offsets = [offset + each * step for offset in offsets for each in range(first, last)]
        return []

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        # torch's own reads the tensor.
        grad = ", requires_grad=True" if self.requires_grad else ""
        try:
            rest = "reads as zero" if self._zeros else "faults"
            state = f"{_C.format_bytes(self.committed_bytes)} committed, the rest {rest}"
        except (InvalidArgumentError, AttributeError):
            state = "not on memory of its own"
        except NotAvailableError:
            state = "its memory is the process's that this one was forked from"
        shown = f"shape={tuple(self.shape)}, dtype={self.dtype}, device={str(self.device)!r}{grad}"
        return f"SparseTensor({shown}: {state})"

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise _not_copyable()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise _not_copyable()


def sparse(
    shape: Shape,
    dtype: torch.dtype = torch.float32,
    device: Device = "cuda",
    zeros: bool = True,
    page_size: Size | None = None,
) -> SparseTensor:
    """A tensor of any size, larger than the device too, of which only the pages
    exist that are committed.

    It belongs to the pool that is open (:func:`torch_vmm.current_pool`), which
    pays for the pages that it holds and counts them. At first there are none.

    Args:
        shape: up to 64 TiB of addresses; at least one dimension.
        dtype: of the elements.
        device: where; ``"cuda"`` and ``None`` are the current GPU, as for
            :func:`torch_vmm.aligned`. On ``"cpu"`` it needs no
            :func:`torch_vmm.enable`.
        zeros: what is not committed reads as zero; else reading it faults.
            Zeros cost mappings, one for each 128 MiB and 0.3 s for 1 TiB (on
            the CPU, where a process has 65530 as a rule and seven eighths are
            used at most, some 7 TiB in all), and the device some 150 MiB, once,
            for all that read as zero on it.
        page_size: bytes, the grain in which memory comes and goes: a power of
            two and a multiple of the device's granularity, which ``None`` is (2
            MiB).
    Raises:
        InvalidArgumentError: a shape, dtype or device that can't be.
        InvalidPageSizeError: a page size that can't be.
        OutOfMemoryError: no such stretch of addresses, or on the CPU no such
            number of mappings, is left.
        NotAvailableError: no driver, or no such device.
    """
    sizes = to_shape(shape)
    require_dtype(dtype)
    require_dimension(sizes, "shape")
    require_addresses(sizes, dtype, "shape")
    zeros = to_flag(zeros, "zeros")
    key = to_device(device)
    page = to_page_size(page_size, key)
    if page is None:
        page = _C.device(*key).granularity
    backing = Backing("sparse tensor", math.prod(sizes) * dtype.itemsize, device, page, zeros)
    made: SparseTensor = SparseTensor._over(backing, backing.tensor(sizes, dtype))
    made._zeros = zeros
    return made


def _to_bounds(part: object, size: int, doing: str) -> tuple[int, int]:
    """First and last + 1 of a slice, or a number, of a dimension."""
    if isinstance(part, slice):
        try:
            first, last, step = part.indices(size)
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError(f"{doing}({show(part)}): {error}") from None
        if step != 1:
            raise InvalidArgumentError(f"{doing}({show(part)}): a step of {step}; give slices without one")
        return first, last
    number = to_index(part)
    if number is None:
        raise InvalidArgumentError(f"{doing}({show(part)}): give a slice, or a tuple of slices, one a dimension")
    if not -size <= number < size:
        raise InvalidArgumentError(
            f"{doing}({show(part)}): a number is one step of its dimension, which has {size}; give a slice for "
            f"several: slice(0, n) is the first n, slice(None) all"
        )
    first = number + size if number < 0 else number
    return first, first + 1


def _not_copyable() -> NotCopyableError:
    return NotCopyableError(
        "a SparseTensor cannot be copied or pickled: most of it does not exist. Copy what is committed: "
        "{(span.start, span.stop): tensor[span].clone() for span in tensor.committed_spans()}",
        what="SparseTensor",
    )
