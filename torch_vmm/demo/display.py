"""Shows the demo at work: a live table in a terminal that rich can draw on, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .monitor import Sample, Usage
from .workload import Workload

if TYPE_CHECKING:
    from rich.console import RenderableType

_PLAIN_PERIOD_S = 5.0
_HEADS = ("alloc", "idle", "strand", "wait", "mapped")  # the first four add up to the last
_GOES = 21  # columns
_BESIDE_THE_BAR = (8 + 1) + (_GOES + 1) + 5 * (6 + 1)


def size_text(size: int) -> str:
    """Bytes as text, three or four digits: ``382 MiB``, ``12.4 GiB``."""
    return f"{size / 2**20:.0f} MiB" if size < 10 * 2**30 else f"{size / 2**30:.1f} GiB"


@dataclass
class Progress:
    """Where the demo stands; ``run`` writes it, a display reads it."""

    workloads: list[Workload]
    sample: Callable[[], Sample]  # the latest
    now: str = ""  # what happens, such as "round 2 of 5"
    active: str = ""  # name of the model at work
    done_s: float = 0.0
    total_s: float = 1.0  # seconds of work in all


class Display(AbstractContextManager["Display"], ABC):
    """Shows ``progress`` while it is open."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    @abstractmethod
    def tick(self) -> None:
        """Called after each piece of work."""

    @abstractmethod
    def end_turn(self) -> None:
        """Called when a model has had its turn."""


class PlainDisplay(Display):
    """A line after each turn, and every few seconds within one; no wider than 80 columns."""

    def __init__(self, progress: Progress) -> None:
        super().__init__(progress)
        self._said = time.monotonic()

    def __enter__(self) -> PlainDisplay:
        heads = "".join(f"{head:>7}" for head in (*_HEADS, "all"))
        print(f"{'done  model    goes; its memory, MiB:':38}{heads}", flush=True)
        return self

    def __exit__(self, *_: object) -> None:
        return

    def tick(self) -> None:
        if time.monotonic() - self._said >= _PLAIN_PERIOD_S:
            self.end_turn()

    def end_turn(self) -> None:
        progress, sample = self.progress, self.progress.sample()
        headline = next(work.headline() for work in progress.workloads if work.name == progress.active)
        share = min(1.0, progress.done_s / progress.total_s)
        numbers = "".join(
            f"{number:7}" for number in (*sample.models[progress.active].in_mib(), *sample.total.in_mib()[4:])
        )
        print(f"{share:4.0%}  {progress.active:8} {headline:23.23}{numbers}", flush=True)
        self._said = time.monotonic()


class LiveDisplay(Display):
    """A table with bars, drawn in place by rich."""

    def __enter__(self) -> LiveDisplay:
        from rich import get_console
        from rich.live import Live

        console = get_console()
        self._live = Live(get_renderable=lambda: self.draw(console.width), console=console, refresh_per_second=10)
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def tick(self) -> None:
        return  # rich draws on a thread of its own

    def end_turn(self) -> None:
        return

    def draw(self, columns: int) -> RenderableType:
        """The table as it stands, for a terminal of so many columns."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        progress, sample = self.progress, self.progress.sample()
        title = f"three models under {size_text(sample.limit)}: {progress.now}; memory in MiB"
        table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)
        table.add_column("model", width=8, no_wrap=True)
        table.add_column("goes", width=_GOES, no_wrap=True)
        for head in _HEADS:
            table.add_column(head, justify="right", width=6, no_wrap=True)
        bar = max(6, min(48, columns - _BESIDE_THE_BAR))
        table.add_column("mapped, of the limit" if bar >= 20 else "of the limit", width=bar, no_wrap=True)

        def add(name: str, goes: str, usage: Usage, style: str | None) -> None:
            numbers = (str(number) for number in usage.in_mib())
            table.add_row(
                name, goes, *numbers, ProgressBar(total=sample.limit, completed=usage.mapped, width=bar), style=style
            )

        for work in progress.workloads:
            active = work.name == progress.active
            add(work.name, work.headline(), sample.models[work.name], "bold" if active else "dim")
        add("all", f"of {_mib(sample.limit)}", sample.total, None)
        done = ProgressBar(total=progress.total_s, completed=progress.done_s, width=min(columns, _BESIDE_THE_BAR + bar))
        return Group(table, done)


def choose(progress: Progress, plain: bool) -> Display:
    """The live display where there is a terminal and rich, else the plain one."""
    if plain or not sys.stdout.isatty():
        return PlainDisplay(progress)
    try:
        import rich.live  # noqa: F401
    except ImportError:
        print("(pip install rich for a live table)")
        return PlainDisplay(progress)
    return LiveDisplay(progress)


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f}"
