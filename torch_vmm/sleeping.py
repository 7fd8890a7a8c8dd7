"""Models that go to sleep and wake: their memory goes elsewhere, their addresses stay.

The extension moves it; this says where to, runs it here or beside, and shows
how far it is.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Union

import torch

from torch_vmm import _C, events
from torch_vmm._guarded import Guarded
from torch_vmm.contexts import is_function
from torch_vmm.dense import plain_tensors
from torch_vmm.devices import DeviceKey
from torch_vmm.errors import InvalidArgumentError, NotAvailableError, VmmError
from torch_vmm.lines import columns, cut, one_line
from torch_vmm.sizes import show, to_flag, to_name, to_path

if TYPE_CHECKING:
    from torch_vmm.pools import VirtualMemoryPool

Place = Union[str, "os.PathLike[str]", torch.device]
"""``"host"``, ``"discard"``, another GPU (``"device:1"``, ``"cuda:1"``, a ``torch.device``), or the path of a file or
folder.
"""

Places = Place | Sequence[Place]
"""One place, or several: the first that has room is taken."""

Keep = Places | Mapping[str, Places]
"""Where all of a model goes, or what is under each tag; ``""`` is what has no tag."""

Progress = bool | Callable[[int, int], object] | None
"""Called with the bytes that have moved and those in all; ``True`` draws a bar in a terminal."""

_Parsed = tuple[str, str, int]
_HOST: _Parsed = ("host", "", 0)
_PACKED: _Parsed = ("host, packed", "", 0)
_DISCARDED: _Parsed = ("discard", "", 0)
_POISONED: _Parsed = ("poison", "", 0)
_ON_HOST = '"host", "discard", or a path ("./llama.sleep", a pathlib.Path)'
_ACCEPTED = '"host", "discard", "device:1", or a path ("./llama.sleep", a pathlib.Path)'
_DEVICE = re.compile(r"(?:device|cuda):(\d{1,3})")
_BAR = 30  # characters, at the most
_NAME = 32  # columns, at the most, that a name has
_LEAST = 8  # the same, before numbers are left out for it
_EVERY = 0.1  # seconds between two pictures of the bar


def _to_file(path: str) -> _Parsed:
    path = to_path(path, "keep")
    # abspath drops the separator at the end, which says that it is to be a folder.
    if path.endswith(os.sep) and not os.path.isdir(path):
        raise InvalidArgumentError(f"keep={show(path)}: there is no such folder")
    try:
        return ("file", os.path.abspath(path).encode(sys.getfilesystemencoding()).decode(), 0)
    except UnicodeError as error:
        raise InvalidArgumentError(f"keep={show(path)}: give a path that is text") from error


def _to_device(place: object, named: int, device: DeviceKey) -> _Parsed:
    if device.kind != "cuda":
        raise InvalidArgumentError(f"keep={show(place)}: a model in host memory does not go to a GPU; give {_ON_HOST}")
    if named == device.ordinal:
        raise InvalidArgumentError(f"keep={show(place)} is the model's own device; name another one")
    count = _C.device_count("cuda")
    if named >= count:
        raise InvalidArgumentError(f"keep={show(place)}: there is no such device; {count} are visible")
    return ("device", "", named)


def _to_place(place: object, device: DeviceKey) -> _Parsed:
    if isinstance(place, torch.device) and place.type == "cuda" and place.index is not None:
        return _to_device(place, place.index, device)
    if isinstance(place, os.PathLike):
        path = os.fspath(place)
        if isinstance(path, str) and path:
            return _to_file(path)
    if isinstance(place, str):
        if place in ("host", "discard"):
            return (place, "", 0)
        if number := _DEVICE.fullmatch(place):
            return _to_device(place, int(number[1]), device)
        if os.sep in place:
            return _to_file(place)
    raise InvalidArgumentError(f"keep={show(place)}: give {_accepted(device)}")


def _accepted(device: DeviceKey) -> str:
    return _ON_HOST if device.kind == "cpu" else _ACCEPTED


def _to_places(places: object, device: DeviceKey) -> list[_Parsed]:
    if isinstance(places, str | bytes | os.PathLike) or not isinstance(places, Iterable):
        return [_to_place(places, device)]
    found = [_to_place(place, device) for place in places]
    if not found:
        raise InvalidArgumentError(f"keep={show(places)}: no place; give {_accepted(device)}")
    return found


class Wishes(NamedTuple):
    """What a sleep does beside keeping contents."""

    release: bool = False
    packed: bool = False
    poison: bool = False


def _to_keep(keep: Keep, wishes: Wishes, device: DeviceKey) -> tuple[list[_Parsed] | None, dict[str, list[_Parsed]]]:
    """Where all goes, and where each tag does."""
    everywhere = None
    by_tag = {}
    if isinstance(keep, Mapping):
        for tag, places in keep.items():
            if not isinstance(tag, str):
                raise InvalidArgumentError(f'keep={{{show(tag)}: ...}}: a tag is text, "" for what has none')
            by_tag[tag] = _to_places(places, device)
    else:
        everywhere = _to_places(keep, device)
    named = [everywhere or [], *by_tag.values()]
    if to_flag(wishes.packed, "packed") and not _replace(_HOST, _PACKED, named):
        raise InvalidArgumentError(f'packed=True is for what goes to "host", and keep={show(keep)} sends nothing there')
    if to_flag(wishes.poison, "poison") and not _replace(_DISCARDED, _POISONED, named):
        raise InvalidArgumentError(f"poison=True is for what is discarded, and keep={show(keep)} discards nothing")
    return everywhere, by_tag


def _replace(place: _Parsed, by: _Parsed, named: list[list[_Parsed]]) -> bool:
    """Whether there was any."""
    found = any(place in places for places in named)
    for places in named:
        places[:] = [by if each == place else each for each in places]
    return found


class _Move(NamedTuple):
    """What a transfer is made of, before it begins."""

    name: str
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
            events.moved(self.pool, "went to sleep", moving.gone, seconds)
        elif came := sorted(self._slept - asleep):
            part = ", ".join(repr(tag) if tag else "what has no tag" for tag in came)
            events.moved(self.pool, f"woke in part ({part})" if asleep else "woke", moving.come, seconds)


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
    _passages: list[_Passage]
    _process: int
    _error: BaseException | None
    _traceback: TracebackType | None
    _is_through: bool
    _is_told: bool
    _done: threading.Event
    _look: _Look | None
    _runs_on: int | None

    def __init__(self, move: _Move, blocking: bool, progress: Progress) -> None:
        look = _to_look(move.name, progress)
        blocking = to_flag(blocking, "blocking")
        self._name = one_line(move.name)
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
            events.stopped(self._name, self._error)

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
                events.stopped(self._name, self._error)
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


def _to_look(name: str, progress: Progress) -> _Look | None:
    if progress is None or progress is False:
        return None
    if progress is True:
        return _Look(_Bar(name)) if sys.stderr.isatty() else None
    if not is_function(progress):
        raise InvalidArgumentError(f"progress={show(progress)}: give True, or a function of two numbers")
    return _Look(progress)


class _Look:
    """Tells a function how far a transfer is, where that has changed."""

    def __init__(self, tell: Callable[[int, int], object]) -> None:
        self._tell = tell
        self._told: tuple[int, int] | None = None

    def look(self, now: tuple[int, int]) -> None:
        if now != self._told:
            self._told = now
            self._tell(*now)

    def end(self) -> None:
        if isinstance(self._tell, _Bar):
            self._tell.end()


class _Bar:
    """How far a transfer is, in a line of the terminal."""

    def __init__(self, name: str) -> None:
        self._name = one_line(name)
        self._began = time.monotonic()
        self._drawn = 0.0

    def __call__(self, moved: int, total: int) -> None:
        now = time.monotonic()
        if (total == 0 and not self._drawn) or (now - self._drawn < _EVERY and moved < total):
            return
        self._drawn = now
        width = shutil.get_terminal_size().columns - 1
        sys.stderr.write("\r" + self._line(moved, total, now - self._began, width))
        sys.stderr.flush()

    def _line(self, moved: int, total: int, seconds: float, width: int) -> str:
        """As many columns as ``width``: the name, and of the numbers those that fit whole."""
        share = moved / total if total else 1.0  # of what was discarded after all nothing is left to move
        sizes = f" {_C.format_bytes(moved)} of {_C.format_bytes(total)}"
        texts = [sizes, f" {100 * moved // total if total else 100} %", ""]
        if moved and seconds > 0:  # else nobody knows yet
            rate = moved / seconds
            speed = f"{sizes}, {_C.format_bytes(round(rate))}/s"
            texts[:0] = [f"{speed}, {(total - moved) / rate:.1f} s left", speed]
        name = cut(self._name, _NAME)
        least = min(columns(name), _LEAST)
        text = next((each for each in texts if least + len(each) <= width), "")
        name = cut(name, width - len(text))
        room = min(_BAR, width - columns(name) - len(text) - 3)
        bar = f" [{'#' * round(share * room):<{room}}]" if room > 3 else ""
        line = name + bar + text
        return line + " " * (width - columns(line))

    def end(self) -> None:
        if self._drawn:
            sys.stderr.write("\n")


def _require_tags(pool: VirtualMemoryPool, tags: Iterable[str]) -> None:
    known = pool.tags
    for tag in sorted(set(tags) - set(known) - {""}):
        raise InvalidArgumentError(f"pool {pool.name!r} has no tag {tag!r}; it has {sorted(known) or 'none'}")


def sleep(pool: VirtualMemoryPool, keep: Keep, wishes: Wishes, blocking: bool, progress: Progress) -> Transfer:
    everywhere, by_tag = _to_keep(keep, wishes, pool._device)
    release = to_flag(wishes.release, "release")
    _require_tags(pool, by_tag)
    _note_files(pool, everywhere, by_tag)
    leaving = pool if everywhere is not None or by_tag else None  # no place for anything: nothing goes
    move = _Move(f"{pool.name} to sleep", lambda: _C.sleep(pool._handle, everywhere, by_tag, release), leaving=leaving)
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
    move = _Move(f"{pool.name} to wake", lambda: _C.wake(pool._handle, chosen), coming=pool)
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
    everywhere, by_tag = _to_keep(keep, Wishes(packed=packed, poison=poison), out._device)
    _require_tags(out, by_tag)
    _note_files(out, everywhere, by_tag)
    begin = functools.partial(_C.swap, out._handle, everywhere, by_tag, into._handle)
    return Transfer(_Move(f"{out.name} for {into.name}", begin, leaving=out, coming=into), blocking, progress)


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
            if function is not None and not is_function(function):
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


# -- Files at the program's end ----------------------------------------------------------------------------------------

# Where a model may sleep in a file.
_with_files: set[DeviceKey] = set()


def _note_files(pool: VirtualMemoryPool, everywhere: list[_Parsed] | None, by_tag: dict[str, list[_Parsed]]) -> None:
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
