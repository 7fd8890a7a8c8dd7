"""Models' memory as a text for people: a row a model, then their totals, limit and floors.

It fits a terminal of 80 columns, but for a name that is longer by itself: below
the rows, where limits and sleepers stand, it is whole. Of a long path the
middle is left out. It reads pools
and changes nothing. Rows are read one after the other, so that
they need not add up with the limit's line while others allocate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_vmm import _C
from torch_vmm.lines import columns as columns_of
from torch_vmm.lines import one_line, padded, without_middle, wrapped
from torch_vmm.stats import MemoryStats

if TYPE_CHECKING:
    from torch_vmm.pools import VirtualMemoryPool
    from torch_vmm.shared_pools import SharedMemoryPool

_HEADS = (
    "model",
    "state",
    "allocated",
    "idle",
    "stranded",
    "quarantined",
    "physical",
    "limit",
    "floor",
    "priority",
)
_TEXTS = 2  # the first columns, which begin at their left
_WIDTH = 80  # columns of a line, unless a word alone is longer: a name
_PLACE = 72  # columns of where something sleeps, so that it stands in a line with brackets
_GAP = "  "  # between two columns
_LIMITS = ("limit", "floor", "priority")
_EMPTY = {"quarantined": "0 B", "stranded": "0 B", "priority": "0", "floor": "0 B", "limit": "none"}
"""Columns that are left out where nothing else stands in them and the table is too wide, the first of these first."""


@dataclass(frozen=True)
class Row:
    """A model at one moment, sizes in bytes."""

    name: str
    state: str
    asleep: str
    """Where what sleeps is; empty where nothing does."""
    stats: MemoryStats
    limit: int | None
    floor: int
    priority: int

    @property
    def left_of_floor(self) -> int:
        """Not held, and nobody else's. More than its limit it could not use."""
        floor = self.floor if self.limit is None else min(self.floor, self.limit)
        return max(0, floor - self.stats.physical_usage)


@dataclass(frozen=True)
class Part:
    """Models under one limit."""

    name: str
    rows: list[Row]
    limit: int
    """In bytes, as all here."""
    used: int
    """Held by them and by the store."""
    store: int
    floor: int
    """Of all together, beside what stands outside."""

    @property
    def reserved_within(self) -> int:
        """Left of the models' floors."""
        return sum(row.left_of_floor for row in self.rows)

    @property
    def reserved(self) -> int:
        """Left of the models' floors and of the one for all of them, on the device."""
        held = sum(row.stats.physical_usage for row in self.rows)
        return max(self.reserved_within, min(self.floor, self.limit) - held)

    def line(self) -> str:
        """Their limit, and what is held under it."""
        text = f"limit {_size(self.limit)}, held {_size(self.used)}: {_size(self.store)} of it in the store; "
        text += f"reserved by floors {_size(self.reserved_within)}"
        return text + (f"; floor of all {_size(self.floor)}" if self.floor else "")


def state_of(pool: VirtualMemoryPool) -> str:
    """``awake``, ``asleep`` (some of it, at least) or ``closed``: the one place that words it."""
    if pool.is_closed:
        return "closed"
    return "asleep" if pool.is_asleep else "awake"


def where_asleep(pool: VirtualMemoryPool, most: int | None = None) -> str:
    """Where what sleeps of it is: ``host``, or by tag; empty where nothing does, or nobody has said where to yet.

    Each place in ``most`` columns, where that is given.
    """
    places = pool.asleep
    if most is not None:
        places = {tag: without_middle(one_line(place), most) for tag, place in places.items()}
    if list(places) == [""]:
        return one_line(places[""])
    each = (f"{tag or 'the rest'}: {place}" for tag, place in sorted(places.items(), reverse=True))
    return one_line(", ".join(each))


def asleep_in_words(size: int, where: str) -> str:
    """``100 MiB (host)``."""
    return f"{_size(size)} ({where})" if where else _size(size)


def rows_of(pools: Iterable[VirtualMemoryPool]) -> list[Row]:
    """A row each, as they are now. Walks the pools."""
    return [
        Row(
            name=one_line(pool.name),
            state=state_of(pool),
            asleep=where_asleep(pool, _PLACE),
            stats=pool.stats(),
            limit=pool.physical_limit,
            floor=pool.floor,
            priority=pool.priority,
        )
        for pool in pools
    ]


def part_of(shared: SharedMemoryPool, models: Iterable[VirtualMemoryPool]) -> Part:
    """The models of a SharedMemoryPool, as they are now."""
    rows = rows_of(models)
    stats = shared.global_stats()
    return Part(
        name=shared.name,
        rows=rows,
        limit=stats.physical_limit,
        used=stats.physical_usage,
        store=stats.store_bytes,
        floor=shared.floor,
    )


def of_shared_pool(shared: SharedMemoryPool, models: Iterable[VirtualMemoryPool]) -> str:
    """The table of one SharedMemoryPool."""
    part = part_of(shared, models)
    lines, apart = _fitted([_HEADS, *map(_cells, part.rows), _total(part.rows)])
    title = f"{shared.name} on {shared.device}{', closed' if shared.is_closed else ''}"
    return "\n".join([title, *lines, *apart, *_elsewhere(part.rows), *_wrapped(part.line())])


def of_device(device: _C.Device, title: str, alone: Sequence[Row], parts: Sequence[Part]) -> str:
    """The table of a device.

    Args:
        alone: models that stand directly under its limit.
        parts: those of each SharedMemoryPool.
    """
    everything = [*alone, *(row for part in parts for row in part.rows)]
    inner = [_cells(row, indent="  ") for part in parts for row in part.rows]
    (heads, *cells, total), apart = _fitted([_HEADS, *map(_cells, alone), *inner, _total(everything)])
    lines = [title, heads, *cells[: len(alone)]]
    at = len(alone)
    for part in parts:
        lines += [*_wrapped(f"{part.name}: {part.line()}", indent=6), *cells[at : at + len(part.rows)]]
        at += len(part.rows)
    return "\n".join([*lines, total, *apart, *_elsewhere(everything), *_wrapped(_line_of(device, alone, parts))])


def _elsewhere(rows: Sequence[Row]) -> list[str]:
    """Who sleeps, how much and where, and who has spilled. Not in columns: a path in one would make the table wide."""
    asleep = [row for row in rows if row.stats.asleep_bytes or row.asleep]
    spilled = [row for row in rows if row.stats.spilled_bytes]
    lines = []
    if asleep:
        each = (f"{row.name} {asleep_in_words(row.stats.asleep_bytes, row.asleep)}" for row in asleep)
        lines.append(f"asleep {_size(sum(row.stats.asleep_bytes for row in asleep))}: {'; '.join(each)}")
    if spilled:
        each = (f"{row.name} {_size(row.stats.spilled_bytes)}" for row in spilled)
        lines.append(f"in host memory {_size(sum(row.stats.spilled_bytes for row in spilled))}: {'; '.join(each)}")
    return [part for line in lines for part in _wrapped(line)]


def _wrapped(line: str, indent: int = 2) -> list[str]:
    return wrapped(line, _WIDTH, indent)


def _line_of(device: _C.Device, alone: Sequence[Row], parts: Sequence[Part]) -> str:
    held = device.committed_bytes
    in_pools = sum(row.stats.physical_usage for row in [*alone, *(row for part in parts for row in part.rows)])
    reserved = sum(row.left_of_floor for row in alone) + sum(part.reserved for part in parts)
    free, total = device.memory_info()
    return (
        f"limit {_size(device.limit)}, held {_size(held)}: {_size(max(0, held - in_pools))} of it no model's (in the "
        f"store, made by hand, or what sparse tensors show as zero); reserved by floors {_size(reserved)}; the device "
        f"has {_size(free)} of {_size(total)} free"
    )


def _cells(row: Row, indent: str = "") -> tuple[str, ...]:
    limits = (_size(row.limit), _size(row.floor), str(row.priority))
    return (indent + row.name, row.state, *_sizes([row]), *limits)


def _total(rows: Sequence[Row]) -> tuple[str, ...]:
    return ("total", str(len(rows)), *_sizes(rows), "", "", "")


def _sizes(rows: Sequence[Row]) -> list[str]:
    """The columns of sizes, summed."""
    fields = ("allocated_bytes", "idle_bytes", "stranded_bytes", "quarantined_bytes", "physical_usage")
    return [_size(sum(getattr(row.stats, field) for row in rows)) for field in fields]


def _size(size: int | None) -> str:
    return "none" if size is None else _C.format_bytes(size)


def _fitted(table: Sequence[Sequence[str]]) -> tuple[list[str], list[str]]:
    """A line for each of the table's, and what has no room in these: lines below them.

    Of too wide a table columns go in which nothing stands; then limits, floors
    and priorities go below it; then names are shortened.
    """
    columns = [list(column) for column in zip(*table, strict=True)]
    for head, empty in _EMPTY.items():
        if _width(columns) > _WIDTH:
            columns = [each for each in columns if each[0] != head or set(each[1:-1]) - {empty}]
    apart: list[str] = []
    if _width(columns) > _WIDTH:
        apart = _limits_in_words(table)
        columns = [each for each in columns if each[0] not in _LIMITS]
    if (excess := _width(columns) - _WIDTH) > 0:
        most = max(map(columns_of, columns[0])) - excess
        # The middle goes: names of models often begin alike.
        columns[0] = [without_middle(name, most) for name in columns[0]]
    return _aligned(list(zip(*columns, strict=True))), apart


def _width(columns: Sequence[Sequence[str]]) -> int:
    return sum(max(map(columns_of, column)) for column in columns) + len(_GAP) * (len(columns) - 1)


def _limits_in_words(table: Sequence[Sequence[str]]) -> list[str]:
    """Of the models that have any."""
    heads, *rows, _ = table
    told = []
    for row in rows:
        cells = dict(zip(heads, row, strict=True))
        own = [f"{head} {cells[head]}" for head in _LIMITS if cells[head] != _EMPTY[head]]
        if own:
            told.append(f"{cells['model'].strip()} {', '.join(own)}")
    return _wrapped(f"limits: {'; '.join(told)}") if told else []


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(columns_of, column)) for column in zip(*table, strict=True)]
    return [
        _GAP.join(
            padded(cell, width, at_the_left=k >= _TEXTS)
            for k, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in table
    ]
