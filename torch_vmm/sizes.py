"""Sizes, ranges, shapes, names and paths as users write them, to whole bytes, numbers and text."""

from __future__ import annotations

import enum
import math
import numbers
import operator
import os
import types
from collections.abc import Iterable, Mapping
from typing import Literal, SupportsIndex

import torch

from torch_vmm import _C
from torch_vmm.errors import InvalidArgumentError, InvalidPageSizeError, InvalidRangeError

Size = SupportsIndex | str
"""Bytes, or text: ``"2MiB"``, ``"1.5 GiB"`` (binary), ``"2MB"`` (decimal)."""

Shape = SupportsIndex | Iterable[SupportsIndex]
"""A tensor's sizes, as torch takes them."""

_LARGEST = 2**63 - 1
_LONGEST = 60  # characters of a value in a message


def show(value: object) -> str:
    """``repr(value)``, of a length that fits a message.

    Never what a tensor holds: its memory may be asleep, and reading it would fault.
    """
    if isinstance(value, torch.Tensor):
        return f"a tensor of {tuple(value.shape)}, {value.dtype} on {value.device}"
    if _may_show(value):
        try:
            text = repr(value)
        except ValueError:  # Python writes no whole number of more than 4300 digits
            text = f"a number of {value.bit_length()} bits" if isinstance(value, int) else _of_kind(value)
        return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
    return f"{_of_kind(value)} with tensors" if _has_tensors(value) else _of_kind(value)


def _of_kind(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


_PLAIN = (
    *(type(None), type(...), numbers.Number, str, bytes, bytearray, range, os.PathLike, enum.Enum),
    *(torch.device, torch.dtype, torch.layout, torch.memory_format, torch.Generator),
    *(type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType),
)


_DEEPEST = 8  # of what holds others
_Around = tuple[object, ...]


def _may_show(value: object, around: _Around = ()) -> bool:
    """Whether its ``repr`` reads no tensor, nor anything that shares a tensor's memory."""
    if isinstance(value, torch.Tensor):
        return False
    kind = type(value)
    if isinstance(value, _PLAIN) or kind.__repr__ is object.__repr__ or kind.__module__.split(".")[0] == "torch_vmm":
        return True
    if any((base.__module__, base.__name__) == ("numpy", "generic") for base in kind.__mro__):
        return True
    if any(value is each for each in around):
        return True  # it holds itself, and is not shown twice
    inside = _inside(value)
    return inside is not None and len(around) < _DEEPEST and all(_may_show(each, (*around, value)) for each in inside)


def _has_tensors(value: object, depth: int = _DEEPEST) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    return depth != 0 and any(_has_tensors(each, depth - 1) for each in _inside(value) or ())


def _inside(value: object) -> list[object] | None:
    """What one of Python's own containers holds."""
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, slice):
        return [value.start, value.stop, value.step]
    return [*value] if isinstance(value, list | tuple | set | frozenset) else None


def to_index(value: object) -> int | None:
    """A whole number as Python takes it for an index; ``None`` for anything else, a ``bool`` included."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return None
    try:
        return operator.index(value)
    except TypeError:  # an array or a tensor that is no whole number
        return None


def _whole(value: Size, name: str) -> int:
    if isinstance(value, str) and value.isascii() and "\0" not in value:
        try:
            return _C.parse_bytes(value)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{name}={error}") from None
    size = to_index(value)
    if size is None:
        raise InvalidArgumentError(
            f"{name}={show(value)} is not a size: give whole bytes (4096) or text with a unit "
            f'("2MiB", "1.5 GiB", "2MB")'
        )
    return size


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
    if size < 0:
        raise InvalidArgumentError(f"{name}={show(size)} is not a size: it must not be negative")
    if size > _LARGEST:
        raise InvalidArgumentError(f"{name}={show(size)} is too large a size: 2**63 - 1 bytes at most")
    return size


def to_optional_bytes(value: Size | None, name: str) -> int | None:
    """The same, where ``None`` may stand for no limit or the default."""
    return None if value is None else to_bytes(value, name)


def to_page_size(value: Size | None, device: tuple[Literal["cuda", "cpu"], int]) -> int | None:
    """Bytes of a page that the extension's own types can hold; it checks the rest.

    Args:
        value: bytes, or text with a unit; ``None`` is the default.
        device: its kind and ordinal.
    Raises:
        InvalidPageSizeError: negative, or beyond 2**63 - 1.
        InvalidArgumentError: no size at all.
    """
    if value is None:
        return None
    size = _whole(value, "page_size")
    if not 0 <= size <= _LARGEST:
        granularity = _C.device(*device).granularity
        raise InvalidPageSizeError(
            f"page_size={show(size)} must be a power of two and a multiple of the granularity, {granularity}, and "
            f"2**62 at most",
            page_size=size,
            granularity=granularity,
        )
    return size


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
                f"offset {show(offset)}, size {show(size)}, capacity {capacity}: the {name} must be from 0 to "
                f"2**64 - 1 bytes",
                offset=offset,
                size=size,
                capacity=capacity,
            )
    return offset, size


def require_dtype(dtype: object) -> None:
    """Raises InvalidArgumentError for what is no dtype."""
    if not isinstance(dtype, torch.dtype):
        raise InvalidArgumentError(f"dtype={show(dtype)} is not a torch.dtype, such as torch.float32") from None


def to_shape(shape: Shape, name: str = "shape") -> tuple[int, ...]:
    """A tensor's sizes; one number is one dimension.

    Args:
        name: the argument's name, for messages.
    Raises:
        InvalidArgumentError: not whole numbers, or one below 0 or beyond 2**63 - 1.
    """
    single = to_index(shape)
    if single is None and (isinstance(shape, (str, bytes, bytearray, Mapping)) or not isinstance(shape, Iterable)):
        raise InvalidArgumentError(f"{name}={show(shape)} is not a shape: give whole numbers from 0")
    sizes = [single] if single is not None else [to_index(size) for size in shape]  # type: ignore[union-attr]
    if any(size is None or not 0 <= size <= _LARGEST for size in sizes):
        raise InvalidArgumentError(f"{name}={show(shape)} is not a shape: give whole numbers from 0")
    return tuple(size for size in sizes if size is not None)


def to_tensor_range(offset: Size, shape: Shape, dtype: torch.dtype, capacity: int) -> tuple[int, tuple[int, ...]]:
    """The offset in bytes and the sizes of a tensor over ``capacity`` bytes.

    Raises:
        InvalidRangeError: an offset or a number of bytes that no address space holds.
        InvalidArgumentError: no size, no shape, or no dtype.
    """
    require_dtype(dtype)
    sizes = to_shape(shape)
    at, _ = to_range(offset, math.prod(sizes) * dtype.itemsize, capacity)
    return at, sizes


def to_number(value: SupportsIndex, name: str) -> int:
    """A whole number that fits 32 bits with its sign.

    Raises:
        InvalidArgumentError: anything else, a ``bool`` included.
    """
    number = to_index(value)
    if number is None or not -(2**31) <= number < 2**31:
        raise InvalidArgumentError(f"{name}={show(value)}: give a whole number from -2**31 to 2**31 - 1")
    return number


def to_spill(value: object) -> bool:
    """Whether a model spills: ``"host"`` or ``None``."""
    if value is None or value == "host":
        return value is not None
    raise InvalidArgumentError(f"spill={show(value)}: give 'host', or None to fail instead")


def to_flag(value: object, name: str) -> bool:
    """``True`` or ``False``, numpy's too.

    Raises:
        InvalidArgumentError: anything else, however true it may be: ``"no"`` would be.
    """
    if type(value).__name__ not in ("bool", "bool_"):
        raise InvalidArgumentError(f"{name}={show(value)}: give True or False")
    return bool(value)


def to_name(value: str, name: str) -> str:
    """Text that can be a name.

    Raises:
        InvalidArgumentError: no text, empty, or with what UTF-8 cannot write or a NUL.
    """
    if not isinstance(value, str):
        raise InvalidArgumentError(f"{name}={show(value)} is not text")
    if not is_name(value):
        raise InvalidArgumentError(f"{name}={show(value)}: give a name, not empty and without NUL or lone surrogates")
    return value


def is_name(value: str) -> bool:
    """Can this text be a name?"""
    try:
        return value.encode() != b"" and "\0" not in value
    except UnicodeEncodeError:
        return False


def to_path(value: object, name: str) -> str:
    """Text of a path.

    Raises:
        InvalidArgumentError: neither text nor a ``pathlib.Path``, empty, or with what no file's name can have.
    """
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(path, str) or not path:
        raise InvalidArgumentError(f"{name}={show(value)} is not a path: give text or a pathlib.Path")
    if "\0" in path:
        raise InvalidArgumentError(f"{name}={show(path)}: a path has no zero byte")
    try:
        os.fsencode(path)
    except UnicodeError as error:
        raise InvalidArgumentError(f"{name}={show(path)}: give a path that is text") from error
    return path
