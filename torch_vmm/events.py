"""What happens to models, told to Python's ``logging`` under ``"torch_vmm"``.

No handler is installed: where the program takes no logs, nothing is written
and nothing is put into words. Nothing here is called by an allocation: what
became of those that hit a limit is told by a thread of its own, from the first
model on that is registered, or limit that is set, while somebody takes it. What
the program's own filters and handlers raise goes to ``sys.unraisablehook``:
what is told has been done.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Literal, ParamSpec

from torch_vmm import _C
from torch_vmm.devices import DeviceKey
from torch_vmm.reclaiming import decision_of

if TYPE_CHECKING:
    from torch_vmm.pools import VirtualMemoryPool
    from torch_vmm.shared_pools import SharedMemoryPool

logger = logging.getLogger("torch_vmm")
_Told = ParamSpec("_Told")


class _Failure:
    """A callback of a weak reference, which Python shows the errors of: only Python itself makes what
    ``sys.unraisablehook`` takes."""

    def __init__(self, errors: list[Exception]) -> None:
        self._errors = errors

    def __call__(self, _: object) -> None:
        # Its traceback has this frame, which must not lead back to it.
        raise self._errors.pop()

    def __repr__(self) -> str:
        return f"logging.getLogger({logger.name!r})"


def _ends_nothing(tell: Callable[_Told, None]) -> Callable[_Told, None]:
    """The same, of which no exception comes out: what is told has been done."""

    @functools.wraps(tell)
    def told(*args: _Told.args, **kwargs: _Told.kwargs) -> None:
        errors: list[Exception] = []
        try:
            tell(*args, **kwargs)
        except Exception as error:
            errors.append(error)
        if errors:
            gone: set[None] = set()
            _watching = weakref.ref(gone, _Failure(errors))
            del gone  # which calls it

    return told


@_ends_nothing
def registered(pool: VirtualMemoryPool) -> None:
    """A model has a pool now."""
    _follower.begin()
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug(
            "%s registered: physical_limit %s, floor %s, priority %d",
            _whose(pool),
            _size(pool.physical_limit),
            _size(pool.floor),
            pool.priority,
        )


@_ends_nothing
def unregistered(model: _C.Pool) -> None:
    """A model's pool has ended, or ends with what lives on in it."""
    if logger.isEnabledFor(logging.DEBUG):
        alive = model.live_bytes
        rest = f", {_size(alive)} live on" if alive else ""
        logger.debug("model %r on %s unregistered%s", model.name, DeviceKey(model.kind, model.ordinal), rest)


@_ends_nothing
def closed(whose: VirtualMemoryPool | SharedMemoryPool, models: Iterable[str] = ()) -> None:
    """A pool was closed, with the models that were in it."""
    if logger.isEnabledFor(logging.DEBUG):
        with_them = ", ".join(map(repr, models))
        logger.debug("%s closed%s", _whose(whose), f", with its models {with_them}" if with_them else "")


@_ends_nothing
def was_set(whose: VirtualMemoryPool | SharedMemoryPool, name: str, value: int | str | None) -> None:
    """A limit, floor, priority or place to spill to is another one.

    Args:
        name: of the property.
        value: its own; of a limit or floor in bytes, ``None`` is none.
    """
    _follower.begin()
    if logger.isEnabledFor(logging.DEBUG):
        words = str(value) if name == "priority" or isinstance(value, str) else _size(value)
        logger.debug("%s: %s set to %s", _whose(whose), name, words)


@_ends_nothing
def went_to_sleep(pool: VirtualMemoryPool, size: int, seconds: float) -> None:
    """A model sleeps, or more of it: ``size`` bytes were copied. Where none was, it is told how many sleep."""
    if logger.isEnabledFor(logging.INFO):
        asleep = 0 if size else pool.stats().asleep_bytes
        _moved(pool, "went to sleep", size, seconds, f"{_size(asleep)}, none of it copied," if asleep else _size(size))


@_ends_nothing
def woke(pool: VirtualMemoryPool, doing: str, size: int, seconds: float) -> None:
    """A model is awake, or some of it.

    Args:
        doing: "woke", "woke in part (...)".
        size: bytes that were copied.
        seconds: how long it took.
    """
    if logger.isEnabledFor(logging.INFO):
        _moved(pool, doing, size, seconds, _size(size))


def _moved(pool: VirtualMemoryPool, doing: str, size: int, seconds: float, what: str) -> None:
    rate = f", {_size(round(size / seconds))}/s" if size and seconds > 0 else ""
    logger.info("%s %s: %s in %.3f s%s", _whose(pool), doing, what, seconds, rate)


class _ReclaimFollower:
    """The thread that tells the log what the reclaim ladder decides: a request waits for no handler."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Where anybody takes such logs, and it runs not yet."""
        if self._thread is not None or not logger.isEnabledFor(logging.INFO):
            return
        # A signal's handler, or a finalizer, may come here while it is being begun.
        if not self._lock.acquire(blocking=False):
            return
        try:
            thread = threading.Thread(target=_tell_reclaims, name="torch_vmm log", daemon=True)
            _C.follow_reclaims()
            thread.start()
            self._thread = thread
        except RuntimeError:
            _C.end_reclaims()  # no thread can be started now: another time
        finally:
            self._lock.release()

    def end(self) -> None:
        """At the interpreter's end: the thread must not come back to one that is gone."""
        if self._thread is not None:
            _C.end_reclaims()
            self._thread.join(timeout=1)

    def forget(self) -> None:
        """In a forked child, which has no such thread."""
        self._lock = threading.Lock()
        self._thread = None


_follower = _ReclaimFollower()
atexit.register(_follower.end)
os.register_at_fork(after_in_child=_follower.forget)


def _tell_reclaims() -> None:
    while (told := _C.next_reclaim()) is not None:
        # What ends a program, a handler's sys.exit() say, is not this thread's to obey.
        with contextlib.suppress(SystemExit, KeyboardInterrupt):
            _reclaimed(*told)


@_ends_nothing
def _reclaimed(kind: Literal["cuda", "cpu"], ordinal: int, decision: _C._ReclaimDecision, lost: int) -> None:
    if not logger.isEnabledFor(logging.INFO):
        return
    if lost:
        logger.info("%d requests that hit a limit are not told: they came faster than the log takes them", lost)
    logger.info("on %s a limit was hit: %s", DeviceKey(kind, ordinal), decision_of(decision))


@_ends_nothing
def stopped(pool: VirtualMemoryPool, doing: str, error: BaseException) -> None:
    """A transfer that nobody waits for was stopped.

    Args:
        doing: "going to sleep", "waking", "making way for 'qwen'".
    """
    logger.error("%s: %s was stopped: %s: %s", _whose(pool), doing, type(error).__name__, error)


@_ends_nothing
def pressure_function_raised(asker: VirtualMemoryPool, requested: int, error: BaseException) -> None:
    """What is called for a request that finds no memory has failed itself.

    ``sys.unraisablehook`` shows it too. So where nobody takes logs this leaves
    it to that, else ``logging`` would write the same a second time.
    """
    if logger.hasHandlers():
        logger.error(
            "on_pressure for %s, which asked for %s, raised %s",
            _whose(asker),
            _size(requested),
            type(error).__name__,
            exc_info=error,
        )


def _whose(whose: VirtualMemoryPool | SharedMemoryPool) -> str:
    if not hasattr(whose, "model_id"):
        return f"{whose.name} on {whose.device}"
    return f"{'pool' if whose.model_id is None else 'model'} {whose.name!r} on {whose.device}"


def _size(size: int | None) -> str:
    return "none" if size is None else _C.format_bytes(size)
