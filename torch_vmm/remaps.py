"""Who is told that a pool's memory goes elsewhere, and that it is back: what ``pool.on_remap()`` was given.

It moves nothing: a transfer calls it, before it begins and once it has ended.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from torch_vmm.contexts import is_function, takes
from torch_vmm.errors import InvalidArgumentError, VmmError
from torch_vmm.sizes import show

if TYPE_CHECKING:
    from torch_vmm.pools import VirtualMemoryPool
    from torch_vmm.shared_pools import SharedMemoryPool

# Threads that have a turn of some Remaps, once for each.
_with_turn: list[int] = []


class _Pair(NamedTuple):
    before: Callable[[], object] | None
    after: Callable[[], object] | None


class Remaps:
    """Functions that are called around the time in which a pool's memory is elsewhere.

    Whether they are to be called is decided in turns, which a thread has until the memory has begun to go: else another
    would take away what they have just been told is back, or call all of them once more. A sleep within one of another
    pool does not wait for its turn, nor does anybody while they are called. That the memory is back is told outside of
    it, and a sleep meanwhile is refused: the program's thread may have a lock that such a function waits for.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal's handler, or what a collection ends, may come back to it
        self._functions: list[_Pair] = []
        self._turn = threading.RLock()  # so may it, and a function
        self._caller: int | None = None  # the thread that tells them that it goes
        self._returning: list[int] = []  # threads that tell them that it is back
        # They have been told that it goes, and not yet that it is back. Set once all of them have returned: whoever
        # sees it waits for a turn, and for no function.
        self._are_waiting = False
        self._told: list[_Pair] = []  # which of them; what was added while a part sleeps is told when more goes

    def add(self, before: Callable[[], object] | None, after: Callable[[], object] | None) -> None:
        for name, function in (("before", before), ("after", after)):
            if function is not None and not (is_function(function) and takes(function, 0)):
                raise InvalidArgumentError(f"{name}={show(function)}: give a function without arguments, or None")
        with self._lock:
            dropped = []  # and ended once the lock is given up: that may call whatever it likes
            if before is None and after is None:
                dropped, self._functions = self._functions, dropped
            else:
                self._functions.append(_Pair(before, after))
        del dropped

    def _now(self) -> list[_Pair]:
        with self._lock:
            return list(self._functions)

    @contextlib.contextmanager
    def while_it_begins_to_go(self, pool: VirtualMemoryPool) -> Iterator[None]:
        """What is within begins to take the pool's memory away: they have been told, and no other thread's sleep
        begins meanwhile.

        Raises:
            VmmError: a thread is telling them, that it goes or that it is back, or has the turn while this one has one
                of another pool.
        """
        thread = threading.get_ident()
        if self._caller == thread:
            raise VmmError("a function that on_remap() was given puts its own model to sleep: it is on its way already")
        on_its_way = VmmError(f"model {pool.name!r} is on its way to sleep or back: wait() for that first")
        while not self._turn.acquire(blocking=False):
            # The function that it is in may want what this thread has; where it is in none it only begins.
            if self._caller is not None or thread in _with_turn:
                raise on_its_way
            time.sleep(0.001)
        _with_turn.append(thread)
        are_told = False
        try:
            if any(other != thread for other in self._returning):
                raise on_its_way
            untold = [pair for pair in self._now() if not any(pair is told for told in self._told)]
            # Of one that is elsewhere whole nothing goes. (What sleeps by its name may have left memory: an alias's.)
            if (untold or not self._are_waiting) and not (pool.is_asleep and pool.stats().physical_usage == 0):
                self._caller = thread
                try:
                    self._call_before(untold)
                finally:
                    self._caller = None
            are_told = True
            yield
        finally:
            _with_turn.remove(thread)
            self._turn.release()
            if not are_told:  # it stays, and a wake may have ended meanwhile that left to this what it had to tell
                self.call_after(pool, to_all=False)

    def require_may_come(self, pool: VirtualMemoryPool) -> None:
        """Raises VmmError in a function that is told that the pool's memory goes, where some of it would come."""
        if self._caller == threading.get_ident() and pool.is_asleep:
            raise VmmError(
                f"model {pool.name!r} is on its way to sleep: a function that on_remap() was given must not wake it"
            )

    def _call_before(self, pairs: list[_Pair]) -> None:
        """All of these, in order. Where one raises the memory stays, and those before it are told so."""
        with contextlib.ExitStack() as calls:
            for pair in pairs:
                if pair.before is not None:
                    pair.before()
                if pair.after is not None:
                    calls.callback(pair.after)
            calls.pop_all()
        self._told += pairs
        self._are_waiting = True

    def call_after(self, pool: VirtualMemoryPool, *, to_all: bool = True) -> None:
        """All that there are, or those that have been told that it goes, in order, whatever one raises, where all of
        the pool is back; once, though two parts of it came back together.
        """
        if not self._are_waiting:
            return
        thread = threading.get_ident()
        with contextlib.ExitStack() as calls:
            while not self._turn.acquire(blocking=False):
                # The function that it is in may wait for what has just come: they stay told, as more goes.
                if self._caller is not None:
                    return
                time.sleep(0.001)
            try:
                if self._caller is not None or not self._are_waiting or pool.is_asleep:
                    return
                told, self._told = self._told, []
                self._are_waiting = False
                self._returning.append(thread)
                calls.callback(self._returning.remove, thread)
            finally:
                self._turn.release()
            for pair in reversed(self._now()):
                if pair.after is not None and (to_all or any(pair is each for each in told)):
                    calls.callback(pair.after)


# By key, of default pools that have some; a model's are its SharedMemoryPool's.
_remaps: dict[int, Remaps] = {}


def held(shared: SharedMemoryPool | None) -> dict[int, Remaps]:
    """Those that outlive their pool's object."""
    return _remaps if shared is None else shared._remaps
