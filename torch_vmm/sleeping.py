"""Models that go to sleep and wake: their memory goes elsewhere, their addresses stay.

The extension moves it; this begins that and runs it, here or beside.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

import torch

from torch_vmm import _C, events
from torch_vmm._guarded import Guarded
from torch_vmm.dense import plain_tensors
from torch_vmm.devices import DeviceKey
from torch_vmm.errors import InvalidArgumentError, NotAvailableError, VmmError
from torch_vmm.lines import one_line
from torch_vmm.places import Keep, Parsed, Wishes, to_keep
from torch_vmm.progress import Look, Progress, to_look
from torch_vmm.sizes import show, to_flag, to_name

if TYPE_CHECKING:
    from torch_vmm.pools import VirtualMemoryPool


class _Move(NamedTuple):
    """What a transfer is made of, before it begins."""

    name: str
    pool: VirtualMemoryPool
    doing: str
    """What it does with that pool, for the log."""
    begin: Callable[[], _C.Transfer]
    leaving: VirtualMemoryPool | None = None
    coming: VirtualMemoryPool | None = None


class _Passage:
    """A pool that a transfer moves, and what of it slept before."""

    def __init__(self, pool: VirtualMemoryPool) -> None:
        self.pool = pool
        self._slept = set(_C.asleep(pool._handle))

    def tell(self, moving: _C.Transfer, seconds: float) -> None:
        """Logs what became of it, if anything did. A swap moves another model too."""
        asleep = set(_C.asleep(self.pool._handle))
        if asleep - self._slept:
            events.went_to_sleep(self.pool, moving.gone, seconds)
        elif came := sorted(self._slept - asleep):
            part = ", ".join(repr(tag) if tag else "what has no tag" for tag in came)
            events.woke(self.pool, f"woke in part ({part})" if asleep else "woke", moving.come, seconds)


def _run_due(due: list[Callable[[bool], None]]) -> None:
    with contextlib.suppress(IndexError):
        run = due.pop()
        run(False)


class Transfer(Guarded, guarded=True):
    """A model on its way to sleep or back, as :meth:`VirtualMemoryPool.sleep` and
    :meth:`VirtualMemoryPool.wake` return it.

    Dropping it stops nothing; at the interpreter's end it is waited for. What
    stops one that nobody waits for is logged.
    """

    _instead_of_a_copy = "it is memory on its way; keep another reference to it"
    _moving: _C.Transfer
    _name: str
    _pool: VirtualMemoryPool
    _doing: str
    _passages: list[_Passage]
    _process: int
    _error: BaseException | None
    _traceback: TracebackType | None
    _is_through: bool
    _is_told: bool
    _done: threading.Event
    _look: Look | None
    _runs_on: int | None

    def __init__(self, move: _Move, blocking: bool, progress: Progress) -> None:
        look = to_look(move.name, progress)
        blocking = to_flag(blocking, "blocking")
        self._name = one_line(move.name)
        self._pool, self._doing = move.pool, move.doing
        self._passages = []
        self._process = os.getpid()
        self._error = None
        self._traceback = None
        self._is_through = False
        self._is_told = blocking
        self._done = threading.Event()
        self._look = look
        self._runs_on = None
        if move.coming is not None:
            move.coming._remaps.require_may_come(move.coming)
        due = [self._run]  # once: by the thread, unless it was given up before that had begun
        try:
            with contextlib.nullcontext() if move.leaving is None else move.leaving._while_it_begins_to_go():
                self._passages = [_Passage(pool) for pool in (move.leaving, move.coming) if pool is not None]
                self._moving = move.begin()
            if blocking:
                self._run(sees_signals=True)
            else:
                name = f"torch_vmm {self._name}"
                threading.Thread(target=_run_due, args=(due,), name=name, daemon=False).start()
        except BaseException:
            with contextlib.suppress(IndexError):  # Ctrl-C, while the thread begins: it goes on
                due.pop()
                self._moving = None  # type: ignore[assignment]  # what was begun is undone
                self._settle()
            raise
        if blocking:
            self._end_with_error()

    def _run(self, sees_signals: bool) -> None:
        began = time.monotonic()
        look = self._look
        self._runs_on = threading.get_ident()
        try:
            self._moving.run(None if look is None else lambda: look.look(self.progress), sees_signals)
            self._is_through = True
            for passage in self._passages:
                passage.tell(self._moving, time.monotonic() - began)
            if look is not None:
                look.look(self.progress)
        except BaseException as error:
            self._stopped_by(error)
        try:
            self._settle()
        except BaseException as error:
            self._stopped_by(error)
        try:
            if look is not None:
                look.end()
        except BaseException as error:  # the terminal has gone
            self._stopped_by(error)
        finally:
            self._runs_on = None
            self._done.set()
        if self._error is not None and not self._is_told:
            events.stopped(self._pool, self._doing, self._error)

    def _stopped_by(self, error: BaseException) -> None:
        """The first of several is the one that is told."""
        if self._error is None:
            self._error, self._traceback = error, error.__traceback__

    def _settle(self) -> None:
        """What was told that its memory goes, for this transfer or another, is told that it is back."""
        for passage in self._passages:
            passage.pool._call_after_remap()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error.with_traceback(self._traceback)  # without those that were told before

    def _end_with_error(self) -> None:
        """Raises it for good, where nobody ever has this object: with its error it would be a cycle, in which all that
        the callers have at hand lives on until a collection.
        """
        error, self._error, self._traceback = self._error, None, None
        try:
            if error is not None:
                raise error
        finally:
            del error

    def _require_own_process(self) -> None:
        if os.getpid() != self._process:
            raise NotAvailableError("this is a forked process: its parent moves the model, wait there")

    def _require_another_thread(self) -> None:
        if self._runs_on == threading.get_ident():
            raise VmmError(f"{self._name} waits for itself: it calls this function, which has to return first")

    def wait(self) -> None:
        """Until it has ended.

        Raises:
            VmmError: what stopped it; Ctrl-C here stops nothing but the
                wait. Or it calls this itself: a ``progress``, or what
                ``on_remap()`` was given.
        """
        self._require_own_process()
        self._require_another_thread()
        self._is_told = True
        try:
            self._done.wait()
        except BaseException:
            self._is_told = False
            if self._done.is_set() and self._error is not None:  # before that was said
                events.stopped(self._pool, self._doing, self._error)
            raise
        self._raise()

    def wait_for(self, tensor: torch.Tensor) -> None:
        """Until a tensor of a model that wakes is there, so that the first layers
        can run while the last are still on their way.

        At once for what is there already. If the rest is stopped it goes again,
        behind the work that is queued by then: what is queued later faults. Of
        one that wraps others (a ``DTensor``) all that it wraps is waited for.

        Raises:
            AsleepError: this does not bring it, as it is another model's, or
                under a tag that was not to wake, and it sleeps.
            VmmError: what stopped this; Ctrl-C stops nothing but the wait.
                Or this calls it itself.
        """
        self._require_own_process()
        self._require_another_thread()
        if not isinstance(tensor, torch.Tensor):
            raise InvalidArgumentError(f"tensor={show(tensor)}: give a tensor")
        for each in plain_tensors(tensor, "wait_for()"):
            self._wait_for_storage(each.untyped_storage())

    def _wait_for_storage(self, storage: torch.UntypedStorage) -> None:
        if storage.nbytes() == 0:
            return
        while (there := self._moving.wait_for(storage.data_ptr(), storage.nbytes())) is None:
            pass  # Python looks for signals in between
        if not there:
            self.wait()

    @property
    def done(self) -> bool:
        """It has ended, well or not: :meth:`wait` raises what stopped it."""
        return self._done.is_set()

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes that have moved, and bytes in all; what is discarded is none.

        Where a place had no room and the next one is ``"discard"``, bytes in
        all are fewer once it has ended well: as many as have moved.
        """
        is_through = self._is_through  # first: from then on the other stays as it is
        moved = self._moving.done
        return moved, moved if is_through else self._moving.total

    def __repr__(self) -> str:
        moved, total = self.progress
        state = "stopped" if self._error is not None else "done" if self.done else "on its way"
        return f"Transfer({self._name}: {_C.format_bytes(moved)} of {_C.format_bytes(total)}, {state})"


def _require_tags(pool: VirtualMemoryPool, tags: Iterable[str]) -> None:
    known = pool.tags
    for tag in sorted(set(tags) - set(known) - {""}):
        raise InvalidArgumentError(f"pool {pool.name!r} has no tag {tag!r}; it has {sorted(known) or 'none'}")


def sleep(pool: VirtualMemoryPool, keep: Keep, wishes: Wishes, blocking: bool, progress: Progress) -> Transfer:
    everywhere, by_tag = to_keep(keep, wishes, pool._device)
    release = to_flag(wishes.release, "release")
    _require_tags(pool, by_tag)
    _note_files(pool, everywhere, by_tag)
    leaving = pool if everywhere is not None or by_tag else None  # no place for anything: nothing goes
    begin = functools.partial(_C.sleep, pool._handle, everywhere, by_tag, release)
    move = _Move(f"{pool.name} to sleep", pool, "going to sleep", begin, leaving=leaving)
    return Transfer(move, blocking, progress)


def wake(
    pool: VirtualMemoryPool, tags: str | Iterable[str] | None, blocking: bool, order: str, progress: Progress
) -> Transfer:
    if order != "as allocated":
        raise InvalidArgumentError(f'order={show(order)}: there is "as allocated"')
    chosen = None
    if tags is not None:
        given: object = tags  # which may be bytes, whatever is declared: an iterable of numbers
        if not isinstance(given, Iterable) or isinstance(given, bytes | bytearray):
            raise InvalidArgumentError(f"tags={show(tags)}: give a tag's name, or several")
        chosen = [tags] if isinstance(tags, str) else [tag if tag == "" else to_name(tag, "tags") for tag in tags]
        _require_tags(pool, chosen)
    begin = functools.partial(_C.wake, pool._handle, chosen)
    move = _Move(f"{pool.name} to wake", pool, "waking", begin, coming=pool)
    return Transfer(move, blocking, progress)


def swap(
    out: VirtualMemoryPool,
    into: VirtualMemoryPool,
    *,
    keep: Keep = "host",
    packed: bool = False,
    poison: bool = False,
    blocking: bool = True,
    progress: Progress = None,
) -> Transfer:
    """One model goes to sleep while another wakes: both directions of the bus at
    once, piece by piece, with no more memory than the limit.

    Where ``out`` sleeps already, or ``into`` is awake, that half is nothing.

    With ``blocking=False`` the handle's ``wait_for`` waits for tensors of
    ``into``; of ``out`` nothing may be used from the call on. What stops a swap
    (``progress`` raises, a disk or a driver fails; Ctrl-C where it blocks)
    undoes both halves. A ``wait_for`` of what had not come raises it. What had
    come goes again, behind the work that is queued by then: what is written to
    it is lost, and whatever uses it later faults. So before results of
    ``into`` count, ``wait()``. ``out`` is awake again, unless its room has gone
    meanwhile, to a third model say: what had gone of it sleeps then, nothing is
    lost, and ``out.wake()`` brings it. What of it was to be discarded may be
    gone by then, as ``into`` takes its room.

    Args:
        out: the model that goes to sleep.
        into: the model that wakes, on the same device.
        keep: where ``out`` goes, as :meth:`VirtualMemoryPool.sleep` has it.
        packed: as :meth:`VirtualMemoryPool.sleep`.
        poison: as :meth:`VirtualMemoryPool.sleep`.
        blocking: as :meth:`VirtualMemoryPool.sleep`.
        progress: as :meth:`VirtualMemoryPool.sleep`.
    Returns:
        A handle, as of :meth:`VirtualMemoryPool.wake`.
    Raises:
        OutOfMemoryError: no room for ``into`` even then, or for what ``out``
            holds in the place named. Both are as they were. At the call, also
            with ``blocking=False``, unless others take the room meanwhile.
        InvalidArgumentError: one model, a closed one, or two devices'.
        NotAvailableError: ``packed``, and this GPU or torch cannot.
        VmmError: what stopped it; both are as they were, but for what is said
            above.
    """
    from torch_vmm.pools import VirtualMemoryPool

    for name, pool in (("out", out), ("into", into)):
        if not isinstance(pool, VirtualMemoryPool):
            raise InvalidArgumentError(f"{name}={show(pool)}: give a pool")
        if pool.is_closed:
            raise InvalidArgumentError(f"{name}: pool {pool.name!r} is closed")
    everywhere, by_tag = to_keep(keep, Wishes(packed=packed, poison=poison), out._device)
    _require_tags(out, by_tag)
    _note_files(out, everywhere, by_tag)
    begin = functools.partial(_C.swap, out._handle, everywhere, by_tag, into._handle)
    doing = f"making way for {into.name!r}"
    move = _Move(f"{out.name} for {into.name}", out, doing, begin, leaving=out, coming=into)
    return Transfer(move, blocking, progress)


# -- Files at the program's end ----------------------------------------------------------------------------------------

# Where a model may sleep in a file.
_with_files: set[DeviceKey] = set()


def _note_files(pool: VirtualMemoryPool, everywhere: list[Parsed] | None, by_tag: dict[str, list[Parsed]]) -> None:
    if any(kind == "file" for places in (everywhere or [], *by_tag.values()) for kind, _, _ in places):
        _with_files.add(pool._device)


@atexit.register
def _remove_files() -> None:
    """A pool lives on after the interpreter, and with it the file that it sleeps in, which nobody can wake from.

    The file is open: what wakes after this, in another function at exit, still finds it.
    """
    with contextlib.suppress(VmmError):  # a forked child: its parent's files are not its own
        for device in _with_files:
            for pool in _C.device(*device).pools():
                _C.forget_names_of_backups(pool)
