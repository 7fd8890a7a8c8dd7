"""How far a transfer is: told to a function, or drawn as a line of the terminal.

It knows nothing of what moves.
"""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Callable

from torch_vmm import _C
from torch_vmm.contexts import is_function, takes
from torch_vmm.errors import InvalidArgumentError
from torch_vmm.lines import columns, cut, one_line
from torch_vmm.sizes import show

Progress = bool | Callable[[int, int], object] | Callable[[int, int, float, float], object] | None
"""Called with the bytes that have moved and those in all, and where it needs four numbers with the rate so far, in
bytes a second, and the seconds that are left at that rate; ``True`` draws a bar in a terminal.
"""

_BAR = 30  # characters, at the most
_NAME = 32  # columns, at the most, that a name has
_LEAST = 8  # the same, before numbers are left out for it
_EVERY = 0.1  # seconds between two pictures of the bar


def to_look(name: str, progress: Progress) -> Look | None:
    if progress is None or progress is False:
        return None
    if progress is True:
        return Look(_Bar(name)) if sys.stderr.isatty() else None
    takes = _numbers_taken(progress) if is_function(progress) else None
    if takes is None:
        raise InvalidArgumentError(f"progress={show(progress)}: give True, or a function of two numbers, or of four")
    return Look(progress, takes)


def _numbers_taken(function: Callable[..., object]) -> int | None:
    """Two, where it can be called with as many: four only where it needs them."""
    own = _counts(function, follow_wrapped=False)
    if len(own) == 1:
        return own[0]
    if not own:
        return None
    # A decorator that passes on whatever comes: what it wraps tells, unless it adds to that.
    return 4 if _counts(function, follow_wrapped=True) == [4] else 2


def _counts(function: Callable[..., object], *, follow_wrapped: bool) -> list[int]:
    """Of two and four arguments those that it takes; both, where it does not tell."""
    return [count for count in (2, 4) if takes(function, count, follow_wrapped=follow_wrapped)]


class Look:
    """Tells a function how far a transfer is, where that has changed."""

    def __init__(self, tell: Callable[..., object], takes: int = 4) -> None:
        self._tell = tell
        self._takes = takes
        self._began = time.monotonic()
        self._told: tuple[int, int] | None = None

    def look(self, now: tuple[int, int]) -> None:
        if now == self._told:
            return
        self._told = now
        numbers = (*now, *_rate_and_left(*now, time.monotonic() - self._began))
        self._tell(*numbers[: self._takes])

    def end(self) -> None:
        if isinstance(self._tell, _Bar):
            self._tell.end()


def _rate_and_left(moved: int, total: int, seconds: float) -> tuple[float, float]:
    """In bytes a second, and seconds: 0 and infinite as long as nobody knows."""
    rate = moved / seconds if seconds > 0 else 0.0
    left = (total - moved) / rate if rate else math.inf
    return rate, left if moved < total else 0.0


class _Bar:
    """How far a transfer is, in a line of the terminal."""

    def __init__(self, name: str) -> None:
        self._name = one_line(name)
        self._drawn = 0.0

    def __call__(self, moved: int, total: int, rate: float, left: float) -> None:
        now = time.monotonic()
        if (total == 0 and not self._drawn) or (now - self._drawn < _EVERY and moved < total):
            return
        self._drawn = now
        width = shutil.get_terminal_size().columns - 1
        sys.stderr.write("\r" + self._line(moved, total, rate, left, width))
        sys.stderr.flush()

    def _line(self, moved: int, total: int, rate: float, left: float, width: int) -> str:
        """As many columns as ``width``: the name, and of the numbers those that fit whole."""
        share = moved / total if total else 1.0  # of what was discarded after all nothing is left to move
        sizes = f" {_C.format_bytes(moved)} of {_C.format_bytes(total)}"
        texts = [sizes, f" {100 * moved // total if total else 100} %", ""]
        if rate:  # else nobody knows yet
            speed = f"{sizes}, {_C.format_bytes(round(rate))}/s"
            texts[:0] = [f"{speed}, {left:.1f} s left", speed]
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
