"""What opens a model while something runs, and which stays in it are open on which thread.

An object like a pool can be entered again while it is entered, on several
threads at once: each thread leaves what it entered last. It knows nothing of
how memory is routed; the extension does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from torch_vmm import _C, _decorate
from torch_vmm._decorate import Function


class Context:
    """Base of a context manager that opens a model on the thread that enters it."""

    _stays: _C.Stays

    def _opens(self) -> tuple[list[_C.Pool], object]:
        """What ``with`` opens, and what its ``as`` names."""
        raise NotImplementedError

    if TYPE_CHECKING:

        def __enter__(self) -> object: ...

        def __exit__(
            self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
        ) -> None: ...

    else:
        # The extension's: Ctrl-C in functions of Python's left the thread in the model for good.
        __enter__ = _C.enter_context
        __exit__ = _C.leave_context


class ContextDecorator(Context):
    """The same, which is a decorator too."""

    def __call__(self, function: Function) -> Function:
        return _decorate.inside(lambda: self, function)


def is_function(value: object) -> bool:
    """Can it be called, and not only to decorate?"""
    return callable(value) and not isinstance(value, Context)


def takes(function: Callable[..., object], count: int, *, follow_wrapped: bool = False) -> bool:
    """Can it be called with so many arguments? Yes, where it does not tell."""
    try:
        signature = inspect.signature(function, follow_wrapped=follow_wrapped)
    except Exception:  # or its own code says so
        return True
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


class Carried(Context):
    """One stay of a carried function: exactly these pools are open inside, whatever is open outside."""

    def __init__(self, pools: list[_C.Pool]) -> None:
        self._pools = pools
        self._stays = _C.Stays(carried=True)

    def _opens(self) -> tuple[list[_C.Pool], object]:
        return self._pools, None
