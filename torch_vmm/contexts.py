"""What opens a model while something runs, and which stays in it are open on which thread.

An object like a pool can be entered again while it is entered, on several
threads at once: each thread leaves what it entered last. It knows nothing of
how memory is routed; the extension does.
"""

from __future__ import annotations

import threading
from types import TracebackType

from torch_vmm import _C, _decorate
from torch_vmm._decorate import Function
from torch_vmm.errors import VmmError


class Stays:
    """The open stays of one context manager, by thread, the innermost last."""

    def __init__(self) -> None:
        # A thread touches only its own list, so that no lock is needed.
        self._open: dict[int, list[_C.ModelContext]] = {}

    def enter(self, pool: _C.Pool) -> None:
        """Opens one on this thread.

        Raises:
            InvalidArgumentError: the pool is closed.
            NotEnabledError: torch_vmm is not its device's allocator.
        """
        context = _C.enter(pool)
        self._open.setdefault(threading.get_ident(), []).append(context)

    def leave(self) -> None:
        """Closes the one that this thread opened last.

        Raises:
            VmmError: it is not the innermost of its thread, or another thread's.
        """
        thread = threading.get_ident()
        stack = self._open.get(thread) or self._open.get(thread := self._another_thread())
        if not stack:
            raise VmmError("a model's context was left more often than it was entered")
        context = stack.pop()
        if not stack:
            self._open.pop(thread, None)
        _C.leave(context)

    def _another_thread(self) -> int:
        # A generator that was begun on one thread and is closed on another:
        # the extension reports it. A thread that has ended leaves nothing itself.
        alive = {thread.ident for thread in threading.enumerate()}
        return min(list(self._open), key=lambda thread: thread in alive, default=0)


class Context:
    """Base of a context manager whose ``__enter__`` opens one of :class:`Stays`."""

    _stays: Stays

    def __enter__(self) -> object:
        raise NotImplementedError

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stays.leave()


class ContextDecorator(Context):
    """The same, which is a decorator too."""

    def __call__(self, function: Function) -> Function:
        return _decorate.inside(lambda: self, function)


class Carried:
    """One stay of a carried function: exactly these pools are open inside, whatever is open outside."""

    def __init__(self, pools: list[_C.Pool]) -> None:
        self._pools = pools

    def __enter__(self) -> None:
        self._context = _C.enter_carried(self._pools)

    def __exit__(self, *_: object) -> None:
        _C.leave(self._context)
