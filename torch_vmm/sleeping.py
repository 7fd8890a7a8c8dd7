"""Models that go to sleep and wake: their memory goes elsewhere, their addresses stay.

The extension moves it; this says where to, runs it here or beside, and shows
how far it is.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Union

import torch

from torch_vmm import _C, events
from torch_vmm._guarded import Guarded
from torch_vmm.errors import InvalidArgumentError, VmmError
from torch_vmm.sizes import show, to_flag, to_name

if TYPE_CHECKING:
    from torch_vmm.pools import VirtualMemoryPool

Place = Union[str, "os.PathLike[str]"]
"""``"host"``, ``"discard"``, ``"device:1"``, or the path of a file or folder."""

Places = Place | Sequence[Place]
"""One place, or several: the first that has room is taken."""

Keep = Places | Mapping[str, Places]
"""Where all of a model goes, or what is under each tag; ``""`` is what has no tag."""

Progress = bool | Callable[[int, int], object] | None
"""Called with the bytes that have moved and those in all; ``True`` draws a bar in a terminal."""

_Parsed = tuple[str, str, int]
_ACCEPTED = '"host", "discard", "device:1", or a path ("./llama.sleep", a pathlib.Path)'
_DEVICE = re.compile(r"(?:device|cuda):(\d+)")
_BAR = 30
_EVERY = 0.1  # seconds between two pictures of the bar


def _to_place(place: object) -> _Parsed:
    if isinstance(place, os.PathLike):
        place = os.fspath(place)
        if isinstance(place, str) and place:
            return ("file", os.path.abspath(place), 0)
    if place in ("host", "discard"):
        return (str(place), "", 0)
    if isinstance(place, str):
        if number := _DEVICE.fullmatch(place):
            return ("device", "", int(number[1]))
        if os.sep in place:
            return ("file", os.path.abspath(place), 0)
    raise InvalidArgumentError(f"keep={show(place)}: give {_ACCEPTED}")


def _to_places(places: object) -> list[_Parsed]:
    if isinstance(places, str | os.PathLike) or not isinstance(places, Iterable):
        return [_to_place(places)]
    found = [_to_place(place) for place in places]
    if not found:
        raise InvalidArgumentError(f"keep={show(places)}: no place; give {_ACCEPTED}")
    return found


def _to_keep(keep: Keep) -> tuple[list[_Parsed] | None, dict[str, list[_Parsed]]]:
    """Where all goes, and where each tag does."""
    if not isinstance(keep, Mapping):
        return _to_places(keep), {}
    by_tag = {}
    for tag, places in keep.items():
        if not isinstance(tag, str):
            raise InvalidArgumentError(f'keep={{{show(tag)}: ...}}: a tag is text, "" for what has none')
        by_tag[tag] = _to_places(places)
    return None, by_tag


class Transfer(Guarded, guarded=True):
    """A model on its way to sleep or back, as :meth:`VirtualMemoryPool.sleep` and
    :meth:`VirtualMemoryPool.wake` return it.

    Dropping it stops nothing; at the interpreter's end it is waited for.
    """

    _instead_of_a_copy = "it is memory on its way; keep another reference to it"
    _moving: _C.Transfer
    _events: list[tuple[VirtualMemoryPool, str]]
    _name: str
    _ended: Callable[[], object]
    _error: BaseException | None
    _done: threading.Event
    _thread: threading.Thread | None
    _look: Callable[[], object] | None

    def __init__(
        self,
        moving: _C.Transfer,
        name: str,
        blocking: bool,
        progress: Progress,
        ended: Callable[[], object],
        told: list[tuple[VirtualMemoryPool, str]],
    ) -> None:
        self._events = told
        self._moving = moving
        self._name = name
        self._ended = ended
        self._error = None
        self._done = threading.Event()
        self._thread = None
        self._look = self._looker(progress)
        if blocking:
            self._run()
            self._raise()
        else:
            self._thread = threading.Thread(target=self._run, name=f"torch_vmm {name}", daemon=False)
            self._thread.start()

    def _run(self) -> None:
        began = time.monotonic()
        try:
            self._moving.run(self._look)
            self._ended()
            for pool, doing in self._events:
                events.moved(pool, doing, self._moving.done, time.monotonic() - began)
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Until it has ended.

        Raises:
            VmmError: what stopped it; Ctrl-C here stops nothing but the wait.
        """
        self._done.wait()
        self._raise()

    def wait_for(self, tensor: torch.Tensor) -> None:
        """Until a tensor of a model that wakes is there, so that the first layers
        can run while the last are still on their way.

        Raises:
            VmmError: what stopped it before that.
        """
        if not isinstance(tensor, torch.Tensor):
            raise InvalidArgumentError(f"tensor={show(tensor)}: give a tensor")
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0 or self._moving.wait_for(storage.data_ptr(), storage.nbytes()):
            return
        self._done.wait()
        self._raise()

    @property
    def done(self) -> bool:
        """It has ended, well or not: :meth:`wait` raises what stopped it."""
        return self._done.is_set()

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes that have moved, and bytes in all; what is discarded is none."""
        return self._moving.done, self._moving.total

    def _looker(self, progress: Progress) -> Callable[[], object] | None:
        if progress is None or progress is False:
            return None
        if progress is True:
            return _Bar(self._name, self._moving).draw if sys.stderr.isatty() else None
        if not callable(progress):
            raise InvalidArgumentError(f"progress={show(progress)}: give True, or a function of two numbers")
        return lambda: progress(self._moving.done, self._moving.total)

    def __repr__(self) -> str:
        moved, total = self.progress
        state = "stopped" if self._error is not None else "done" if self.done else "on its way"
        return f"Transfer({self._name}: {_C.format_bytes(moved)} of {_C.format_bytes(total)}, {state})"


class _Bar:
    """How far a transfer is, in a line of the terminal."""

    def __init__(self, name: str, moving: _C.Transfer) -> None:
        self._name = name
        self._moving = moving
        self._began = time.monotonic()
        self._drawn = 0.0

    def draw(self) -> None:
        now = time.monotonic()
        moved, total = self._moving.done, self._moving.total
        is_last = moved >= total
        if total == 0 or (now - self._drawn < _EVERY and not is_last):
            return
        self._drawn = now
        share = moved / total
        rate = moved / max(now - self._began, 1e-6)
        left = (total - moved) / rate if rate > 0 else 0.0
        bar = "#" * round(share * _BAR)
        line = f"\r{self._name} [{bar:<{_BAR}}] {_C.format_bytes(moved)} of {_C.format_bytes(total)}, "
        line += f"{_C.format_bytes(round(rate))}/s, {left:.1f} s left"
        sys.stderr.write(line.ljust(100) + ("\n" if is_last else ""))
        sys.stderr.flush()


def sleep(pool: VirtualMemoryPool, keep: Keep, release: bool, blocking: bool, progress: Progress) -> Transfer:
    everywhere, by_tag = _to_keep(keep)
    release, blocking = to_flag(release, "release"), to_flag(blocking, "blocking")
    if unknown := set(by_tag) - set(pool.tags) - {""}:
        raise InvalidArgumentError(
            f"pool {pool.name!r} has no tag {sorted(unknown)[0]!r}; it has {sorted(pool.tags) or 'none'}"
        )
    was_awake = not pool.is_asleep
    moving = _C.sleep(pool._handle, everywhere, by_tag, release)
    if was_awake:
        pool._call_before_remap()
    told = [(pool, "went to sleep")] if was_awake else []
    return Transfer(moving, f"{pool.name} to sleep", blocking, progress, lambda: None, told)


def wake(
    pool: VirtualMemoryPool, tags: str | Iterable[str] | None, blocking: bool, order: str, progress: Progress
) -> Transfer:
    if order != "as allocated":
        raise InvalidArgumentError(f'order={show(order)}: there is "as allocated"')
    blocking = to_flag(blocking, "blocking")
    chosen = None
    if tags is not None:
        chosen = [tags] if isinstance(tags, str) else [tag if tag == "" else to_name(tag, "tags") for tag in tags]
        if unknown := set(chosen) - set(pool.tags) - {""}:
            raise InvalidArgumentError(
                f"pool {pool.name!r} has no tag {sorted(unknown)[0]!r}; it has {sorted(pool.tags) or 'none'}"
            )
    was_asleep = pool.is_asleep
    moving = _C.wake(pool._handle, chosen, is_mapped_first=not blocking)

    def ended() -> None:
        if was_asleep and not pool.is_asleep:
            pool._call_after_remap()

    told = [(pool, "woke")] if was_asleep else []
    return Transfer(moving, f"{pool.name} to wake", blocking, progress, ended, told)


def swap(
    out: VirtualMemoryPool,
    into: VirtualMemoryPool,
    *,
    keep: Keep = "host",
    blocking: bool = True,
    progress: Progress = None,
) -> Transfer:
    """One model goes to sleep while another wakes: both directions of the bus at
    once, piece by piece, with no more memory than the limit.

    Args:
        out: the model that goes to sleep.
        into: the model that wakes, on the same device.
        keep: where ``out`` goes, as :meth:`VirtualMemoryPool.sleep` has it.
        blocking: as :meth:`VirtualMemoryPool.sleep`.
        progress: as :meth:`VirtualMemoryPool.sleep`.
    Returns:
        A handle, as of :meth:`VirtualMemoryPool.wake`.
    Raises:
        OutOfMemoryError: no room for ``into`` even then, or for what ``out``
            holds in the place named. Both are as they were.
        InvalidArgumentError: one model, or two devices'.
        VmmError: what stopped it; both are as they were.
    """
    from torch_vmm.pools import VirtualMemoryPool

    for name, pool in (("out", out), ("into", into)):
        if not isinstance(pool, VirtualMemoryPool):
            raise InvalidArgumentError(f"{name}={show(pool)}: give a pool")
    everywhere, by_tag = _to_keep(keep)
    was_awake, was_asleep = not out.is_asleep, into.is_asleep
    moving = _C.swap(out._handle, everywhere, by_tag, into._handle)
    if was_awake:
        out._call_before_remap()

    def ended() -> None:
        if was_asleep:
            into._call_after_remap()

    told = [(out, "went to sleep"), (into, "woke")]
    return Transfer(moving, f"{out.name} for {into.name}", to_flag(blocking, "blocking"), progress, ended, told)


class Remaps:
    """Functions that are called around the time in which a pool's memory is elsewhere."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._functions: list[tuple[Callable[[], object] | None, Callable[[], object] | None]] = []

    def add(self, before: Callable[[], object] | None, after: Callable[[], object] | None) -> None:
        for name, function in (("before", before), ("after", after)):
            if function is not None and not callable(function):
                raise InvalidArgumentError(f"{name}={show(function)}: give a function without arguments, or None")
        with self._lock:
            self._functions.append((before, after))

    def call(self, index: int) -> None:
        with self._lock:
            functions = [pair[index] for pair in self._functions]
        for function in functions:
            if function is not None:
                function()


__all__ = ["Keep", "Place", "Places", "Progress", "Remaps", "Transfer", "VmmError", "sleep", "swap", "wake"]
