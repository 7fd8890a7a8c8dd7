"""Runs functions of every kind inside a context, and only while they run.

A generator or coroutine gives control away at each ``yield`` and ``await``. The
context is left there and entered again at the next step, as ``torch.no_grad``
does for generators; else whoever runs meanwhile would be inside it. What is
sent, thrown, returned and raised passes through. It knows nothing of pools.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Protocol, TypeVar, cast

from torch_vmm.errors import InvalidArgumentError

Context = Callable[[], AbstractContextManager[object]]
Function = TypeVar("Function", bound=Callable[..., Any])


class _Steps(Protocol):
    """What runs in steps: a generator, a coroutine, a step of an async generator."""

    def send(self, value: Any, /) -> Any: ...

    def throw(self, error: BaseException, /) -> Any: ...

    def close(self) -> Any: ...


class _Model:
    """What the steps of one call are in, each in a fresh ``context()``."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.is_ending = False  # closed, or without its model: what it still does is done, in it or not

    def __call__(self) -> AbstractContextManager[object]:
        return self.if_enterable() if self.is_ending else self._context()

    def if_enterable(self) -> AbstractContextManager[object]:
        """``context()``, or nothing to enter where that can't be any more.

        Its model may have ended, and what a task does when it is cancelled has to be done all the same.
        """
        try:
            with self._context():
                return self._context()
        except Exception:
            return nullcontext()


def _drive(
    model: _Model, steps: _Steps, first: AbstractContextManager[object] | None = None
) -> Generator[Any, Any, Any]:
    """Yields what ``steps`` yields, each step inside its model; the first in ``first``, where that is given."""
    is_cancelled = is_of_task = False
    try:
        with model() if first is None else first:
            given = steps.send(None)
        while True:
            try:
                sent = yield given
            except BaseException as error:  # noqa: PERF203
                # GeneratorExit too: close() is a throw() of it, and the inner
                # one may answer as it likes.
                is_cancelled = is_cancelled or not isinstance(error, Exception)
                is_of_task = is_of_task or _cancellations() != 0
                with model.if_enterable():
                    given = steps.throw(error)
            else:
                with ExitStack() as step:
                    try:
                        # By a timeout of its own, say, after which it goes on.
                        is_cancelled = is_cancelled and not (is_of_task and _cancellations() == 0)
                        step.enter_context(model.if_enterable() if is_cancelled else model())
                    except Exception as error:  # its model has ended: it is told, and what it does then is done
                        model.is_ending = True
                        given = steps.throw(error)
                    else:
                        given = steps.send(sent)
    except StopIteration as stop:
        return stop.value


def _cancellations() -> int:
    """How many of the task that runs have been asked for and not been taken back."""
    asyncio = sys.modules.get("asyncio")
    try:
        return 0 if asyncio is None else int(asyncio.current_task().cancelling())
    except (AttributeError, RuntimeError):  # Python 3.10; no task, no loop
        return 0


class _Driven(Awaitable[Any]):
    def __init__(self, model: _Model, steps: _Steps, first: AbstractContextManager[object] | None = None) -> None:
        self._model = model
        self._steps = steps
        self._first = first

    def __await__(self) -> Generator[Any, Any, Any]:
        try:
            return (yield from _drive(self._model, self._steps, self._first))
        finally:
            self._steps.close()  # where the context cannot be entered, it was never begun


def _generator(context: Context, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inside(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        return (yield from _drive(_Model(context), function(*args, **kwargs)))

    code = getattr(function, "__code__", None)
    is_awaitable = code is not None and code.co_flags & inspect.CO_ITERABLE_COROUTINE
    return types.coroutine(inside) if is_awaitable else inside


def _coroutine(context: Context, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def inside(*args: Any, **kwargs: Any) -> Any:
        return await _Driven(_Model(context), function(*args, **kwargs))

    return inside


def _async_generator(context: Context, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def inside(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        steps, model = function(*args, **kwargs), _Model(context)
        try:
            given = await _Driven(model, steps.__anext__())
            while True:
                try:
                    sent = yield given
                except BaseException as error:  # noqa: PERF203
                    model.is_ending = model.is_ending or not isinstance(error, Exception)
                    given = await _Driven(model, steps.athrow(error), model.if_enterable())
                else:
                    first = ExitStack()
                    try:
                        first.enter_context(model())
                    except Exception as error:  # its model has ended: it is told, as a generator is
                        model.is_ending = True
                        step = steps.athrow(error)
                    else:
                        step = steps.asend(sent)
                    given = await _Driven(model, step, first)
        except StopAsyncIteration:
            return

    return inside


def _plain(context: Context, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inside(*args: Any, **kwargs: Any) -> Any:
        with context():
            return function(*args, **kwargs)

    return inside


def _wrap_for(function: Callable[..., Any]) -> Callable[[Context, Callable[..., Any]], Callable[..., Any]]:
    """By what a call of it makes; of an object that can be called, by its ``__call__``."""
    kinds = {
        inspect.iscoroutinefunction: _coroutine,
        inspect.isasyncgenfunction: _async_generator,
        inspect.isgeneratorfunction: _generator,
    }
    called = type(function).__call__
    return next((wrap for is_one, wrap in kinds.items() if is_one(function) or is_one(called)), _plain)


def only_makes_steps(function: Callable[..., Any]) -> bool:
    """Does a call of it run none of it yet, as of a coroutine, generator or async generator function?"""
    return _wrap_for(function) is not _plain


def inside(context: Context, function: Function, *, classes: bool = False) -> Function:
    """``function``, run inside ``context()``: plain, generator, coroutine or async generator function.

    Args:
        context: makes a context manager; called for each call and each resume.
        function: what is decorated; a static or class method too.
        classes: a class is called, as a function is, rather than refused.
    Raises:
        InvalidArgumentError: a class, or nothing that can be called.
    """
    if inspect.isclass(function) and not classes:
        raise InvalidArgumentError(
            f"class {function.__qualname__}: it is not clear which of its methods are meant; decorate those"
        )
    if isinstance(function, (staticmethod, classmethod)):
        return cast(Function, type(function)(inside(context, function.__func__)))
    if not callable(function):
        raise InvalidArgumentError(f"a function can be decorated, not {function!r}")
    return cast(Function, _wrap_for(function)(context, function))
