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
    """A line after each turn, and every few seconds within one."""

    def __init__(self, progress: Progress) -> None:
        super().__init__(progress)
        self._said = time.monotonic()

    def __enter__(self) -> PlainDisplay:
        columns = [*(work.name for work in self.progress.workloads), "all"]
        print(f"{'MiB':38}" + "".join(f"{name:>19}" for name in columns))
        print(f"{'':38}{'alloc mapped  idle ' * len(columns)}", flush=True)
        return self

    def __exit__(self, *_: object) -> None:
        return

    def tick(self) -> None:
        if time.monotonic() - self._said >= _PLAIN_PERIOD_S:
            self.end_turn()

    def end_turn(self) -> None:
        progress, sample = self.progress, self.progress.sample()
        headline = next(work.headline() for work in progress.workloads if work.name == progress.active)
        usages = [sample.models[work.name] for work in progress.workloads] + [sample.total]
        columns = "".join(f"{_mib(u.allocated):>6}{_mib(u.mapped):>7}{_mib(u.idle):>6}" for u in usages)
        share = min(1.0, progress.done_s / progress.total_s)
        print(f"{share:4.0%} {progress.active:8} {headline:24.24}{columns} of {_mib(sample.limit)}", flush=True)
        self._said = time.monotonic()


class LiveDisplay(Display):
    """A table with bars, drawn in place by rich."""

    def __enter__(self) -> LiveDisplay:
        from rich.live import Live

        self._live = Live(get_renderable=self._draw, refresh_per_second=10)
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def tick(self) -> None:
        return  # rich draws on a thread of its own

    def end_turn(self) -> None:
        return

    def _draw(self) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        progress, sample = self.progress, self.progress.sample()
        table = Table(title=f"three models under {size_text(sample.limit)}: {progress.now}", title_justify="left")
        table.add_column("model")
        table.add_column("goes", min_width=22)
        for column in ("allocated", "mapped", "idle"):
            table.add_column(column, justify="right", min_width=9)
        table.add_column("mapped, of the limit", width=32)

        def add(name: str, goes: str, usage: Usage, style: str | None) -> None:
            bar = ProgressBar(total=sample.limit, completed=usage.mapped, width=32)
            sizes = (size_text(usage.allocated), size_text(usage.mapped), size_text(usage.idle))
            table.add_row(name, goes, *sizes, bar, style=style)

        for work in progress.workloads:
            active = work.name == progress.active
            add(work.name, work.headline(), sample.models[work.name], "bold" if active else "dim")
        table.add_section()
        add("all", f"limit {size_text(sample.limit)}", sample.total, None)
        return Group(table, ProgressBar(total=progress.total_s, completed=progress.done_s, width=100))


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
