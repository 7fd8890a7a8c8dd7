"""Sizes, ranges and shapes as users write them, to whole bytes and numbers."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import SupportsIndex

import torch

from torch_vmm import _C
from torch_vmm.errors import InvalidArgumentError, InvalidRangeError

Size = SupportsIndex | str
"""Bytes, or text: ``"2MiB"``, ``"1.5 GiB"`` (binary), ``"2MB"`` (decimal)."""

Shape = SupportsIndex | Iterable[SupportsIndex]
"""A tensor's sizes, as torch takes them."""

_LARGEST = 2**63 - 1


def _whole(value: Size, name: str) -> int:
    if isinstance(value, str):
        return _C.parse_bytes(value)
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise InvalidArgumentError(
            f'{name}={value!r} is not a size: give whole bytes (4096) or text with a unit ("2MiB", "1.5 GiB", "2MB")'
        )
    return operator.index(value)


def to_bytes(value: Size, name: str) -> int:
    """Bytes of a size.

    Args:
        value: bytes >= 0, or text with a unit, case and space free.
        name: the argument's name, for messages.
    Raises:
        InvalidArgumentError: negative, a fraction, a ``bool``, beyond 2**63 - 1,
            or text that is no size (the message shows the accepted form).
    """
    size = _whole(value, name)
    if not 0 <= size <= _LARGEST:
        raise InvalidArgumentError(f"{name}={size} is not a size: it must be from 0 to 2**63 - 1 bytes")
    return size


def to_optional_bytes(value: Size | None, name: str) -> int | None:
    """The same, where ``None`` may stand for no limit or the default."""
    return None if value is None else to_bytes(value, name)


def to_range(offset: Size, size: Size, capacity: int) -> tuple[int, int]:
    """Bytes of an offset and a size that the extension's own types can hold.

    It checks the rest: empty, overflowing, beyond ``capacity``.

    Raises:
        InvalidRangeError: negative, or beyond 2**64 - 1.
        InvalidArgumentError: no sizes at all.
    """
    offset, size = _whole(offset, "offset"), _whole(size, "size")
    for name, value in (("offset", offset), ("size", size)):
        if not 0 <= value < 2**64:
            raise InvalidRangeError(
                f"offset {offset}, size {size}, capacity {capacity}: the {name} must be from 0 to 2**64 - 1 bytes",
                offset=offset,
                size=size,
                capacity=capacity,
            )
    return offset, size


def to_shape(shape: Shape) -> tuple[int, ...]:
    """A tensor's sizes; one number is one dimension.

    Raises:
        InvalidArgumentError: not whole numbers, or one below 0.
    """
    sizes = tuple(shape) if isinstance(shape, Iterable) else (shape,)
    if any(isinstance(size, bool) or not hasattr(size, "__index__") or operator.index(size) < 0 for size in sizes):
        raise InvalidArgumentError(f"shape={shape!r} is not a shape: give whole numbers from 0")
    return tuple(operator.index(size) for size in sizes)


def to_tensor_range(offset: Size, shape: Shape, dtype: torch.dtype, capacity: int) -> tuple[int, tuple[int, ...]]:
    """The offset in bytes and the sizes of a tensor over ``capacity`` bytes.

    Raises:
        InvalidRangeError: an offset or a number of bytes that no address space holds.
        InvalidArgumentError: no size, no shape, or no dtype.
    """
    if not isinstance(dtype, torch.dtype):
        raise InvalidArgumentError(f"dtype={dtype!r} is not a torch.dtype")
    sizes = to_shape(shape)
    at, _ = to_range(offset, math.prod(sizes) * dtype.itemsize, capacity)
    return at, sizes
