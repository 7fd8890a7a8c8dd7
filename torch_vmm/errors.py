"""The named failures of torch_vmm, each with its values as attributes.

The extension looks these classes up by name when it raises, and makes them as
``Class(message, **attributes)``. They know nothing of what failed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch_vmm.debug import Damage


def _rebuild(cls: type[VmmError], args: tuple[object, ...], values: dict[str, object]) -> VmmError:
    error = cls.__new__(cls, *args)
    error.__dict__.update(values)
    return error


class VmmError(RuntimeError):
    """Anything that torch_vmm reports. Every failure below is one."""

    def __init__(self, message: str = "") -> None:
        super().__init__(message)

    # KeyError would show its argument's repr(): quotes around a sentence.
    __str__ = BaseException.__str__

    # An exception is unpickled as Class(*args), which has no attributes to give.
    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, dict(self.__dict__))


class InvalidArgumentError(VmmError, ValueError):
    """A size, alignment, flag, device or object that cannot be."""


class InvalidPageSizeError(InvalidArgumentError):
    """A page size that is no power of two, or no multiple of the device's
    granularity.

    Attributes:
        page_size: bytes asked for.
        granularity: bytes; the device's smallest page.
    """

    def __init__(self, message: str = "", *, page_size: int, granularity: int) -> None:
        super().__init__(message)
        self.page_size = page_size
        self.granularity = granularity


class InvalidRangeError(InvalidArgumentError):
    """An offset and size that are out of bounds, empty, unaligned, or overflow.

    Attributes:
        offset: bytes from the start of the range.
        size: bytes.
        capacity: bytes of the range.
    """

    def __init__(self, message: str = "", *, offset: int, size: int, capacity: int) -> None:
        super().__init__(message)
        self.offset = offset
        self.size = size
        self.capacity = capacity


class AlreadyMappedError(VmmError):
    """A page is in use where another was to go.

    Attributes:
        offset: bytes from the start of the range, of the first page at fault.
        size: bytes of that page.
    """

    def __init__(self, message: str = "", *, offset: int, size: int) -> None:
        super().__init__(message)
        self.offset = offset
        self.size = size


class NotMappedError(VmmError):
    """A page is not there that was to be used or given back.

    Attributes:
        offset: bytes from the start of the range, of the first page at fault.
        size: bytes of that page.
    """

    def __init__(self, message: str = "", *, offset: int, size: int) -> None:
        super().__init__(message)
        self.offset = offset
        self.size = size


class OutOfMemoryError(VmmError, torch.OutOfMemoryError):
    """A limit, or the device itself, has no such amount left, after all reclaim.

    Attributes:
        requested: bytes asked for.
        available: bytes that could still have been had.
        limit: bytes; the limit that refused.
        pool: name of the pool that asked.
    """

    def __init__(self, message: str = "", *, requested: int, available: int, limit: int, pool: str) -> None:
        super().__init__(message)
        self.requested = requested
        self.available = available
        self.limit = limit
        self.pool = pool


class ModelExistsError(VmmError):
    """A model of this id is registered already.

    Attributes:
        model_id: the id.
    """

    def __init__(self, message: str = "", *, model_id: str) -> None:
        super().__init__(message)
        self.model_id = model_id


class ModelNotFoundError(VmmError, KeyError):
    """No model of this id is registered; also a ``KeyError``, as a mapping raises.

    Attributes:
        model_id: the id.
    """

    def __init__(self, message: str = "", *, model_id: str) -> None:
        super().__init__(message)
        self.model_id = model_id


class StillInUseError(VmmError):
    """What was to be released or unregistered is used.

    Attributes:
        live_bytes: bytes in use.
        live_blocks: blocks, pages or mappings in use.
    """

    def __init__(self, message: str = "", *, live_bytes: int, live_blocks: int) -> None:
        super().__init__(message)
        self.live_bytes = live_bytes
        self.live_blocks = live_blocks


class AsleepError(VmmError):
    """Memory of a sleeping model was asked for.

    Attributes:
        model_id: the model's id.
    """

    def __init__(self, message: str = "", *, model_id: str) -> None:
        super().__init__(message)
        self.model_id = model_id


class DriverError(VmmError):
    """Anything else that the driver said.

    Attributes:
        call: the driver's call that failed.
        code: the driver's number for it.
        name: the driver's name for it.
    """

    def __init__(self, message: str = "", *, call: str, code: int, name: str) -> None:
        super().__init__(message)
        self.call = call
        self.code = code
        self.name = name


class NotAvailableError(VmmError):
    """No driver, no GPU, the wrong torch, or CUDA initialised too early.

    Attributes:
        reason: what is missing, and what to do.
    """

    def __init__(self, message: str = "", *, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason or message


class WrongTorchError(NotAvailableError, ImportError):
    """The extension was not built for the torch there is, or not at all: what
    ``import torch_vmm`` raises, so it is an ``ImportError`` as well.

    Attributes:
        reason: what was found, what is needed, and how to build.
    """

    def __init__(self, message: str = "", *, reason: str = "") -> None:
        super().__init__(message, reason=reason)
        self.msg = message  # an ImportError's


class NotEnabledError(NotAvailableError):
    """A model is entered while torch_vmm is not that device's allocator: call
    :func:`torch_vmm.enable` first.

    Attributes:
        reason: what is missing, and what to do.
    """


class MemoryDamageError(VmmError):
    """Somebody has written outside an allocation (:func:`torch_vmm.debug.check`).

    Attributes:
        damages: what was found, a :class:`torch_vmm.debug.Damage` for each
            block.
    """

    def __init__(self, message: str = "", *, damages: tuple[Damage, ...] = ()) -> None:
        super().__init__(message)
        self.damages = damages


class NotCopyableError(VmmError, TypeError):
    """A pool, a manager or what it gave out was copied or pickled; also a
    ``TypeError``, as pickle raises.

    Attributes:
        what: the class that was to be copied.
    """

    def __init__(self, message: str = "", *, what: str = "") -> None:
        super().__init__(message)
        self.what = what
