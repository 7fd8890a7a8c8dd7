"""A pool's numbers as plain values, and torch's table of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch_vmm.lines import centred, cut, wrapped

_WIDTH = 75


@dataclass(frozen=True)
class MemoryStats:
    """What a pool's memory is at one moment, in bytes.

    ``physical_usage`` is the sum of ``allocated_bytes``, ``idle_bytes``,
    ``stranded_bytes`` and ``quarantined_bytes``.
    """

    virtual_capacity: int
    """Bytes of addresses."""
    physical_usage: int
    """Bytes mapped."""
    mapped_pages: int
    """``physical_usage`` in pages of the pool's ``page_size``."""
    fragmentation_ratio: float
    """``stranded_bytes / physical_usage``; 0 when nothing is mapped."""
    allocated_bytes: int
    """In use by tensors and by explicit pages."""
    idle_bytes: int
    """Mapped, unused, in whole chunks: others can have them."""
    stranded_bytes: int
    """Mapped, unused, in chunks that are partly used."""
    quarantined_bytes: int
    """Freed, but queued work may still use them."""
    asleep_bytes: int = 0
    """Of tensors whose memory is elsewhere while the model sleeps; in none of the
    others.
    """
    spilled_bytes: int = 0
    """Of host memory, mapped for tensors that found none here; in none of the
    others.
    """


@dataclass(frozen=True)
class GlobalMemoryStats:
    """The same for a SharedMemoryPool, over its models and what it keeps unmapped,
    in bytes.

    ``physical_usage`` is the sum of ``allocated_bytes``, ``idle_bytes``,
    ``stranded_bytes``, ``quarantined_bytes`` and ``store_bytes``.
    """

    physical_limit: int
    """Bytes that all models together may hold."""
    physical_usage: int
    """Bytes that they hold; never above the limit, unless that was lowered since."""
    num_models: int
    allocated_bytes: int
    idle_bytes: int
    stranded_bytes: int
    quarantined_bytes: int
    store_bytes: int
    """Held by the chunk store, mapped nowhere."""
    asleep_bytes: int = 0
    """Of tensors of models that sleep; in none of the others."""
    spilled_bytes: int = 0
    """Of host memory, held for what models spilled; in none of the others."""


@dataclass(frozen=True)
class PoolStats:
    """What a MemoryPool has given out, and what it keeps. Bytes of buffers are
    rounded up to 512, as torch's are.
    """

    allocated_bytes: int
    """In live buffers."""
    peak_bytes: int
    """The most that ``allocated_bytes`` has been."""
    allocation_count: int
    """Buffers made so far; empty ones are none."""
    free_count: int
    """Of these, buffers that are freed."""
    cached_bytes: int
    """Held beyond ``allocated_bytes``: free, waiting for queued work, or the rest of a chunk with live buffers."""


@dataclass(frozen=True)
class NativePoolStats:
    """What the driver counts of a NativeMemoryPool, in bytes."""

    used_bytes: int
    """Allocated, and not yet freed in the order of a stream."""
    peak_used_bytes: int
    """The most that ``used_bytes`` has been."""
    reserved_bytes: int
    """Held of the device's memory."""
    peak_reserved_bytes: int
    """The most that ``reserved_bytes`` has been."""


def _bytes(value: int, like: int) -> str:
    """``value`` in the unit that shows ``like`` with at most six digits."""
    units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    shift = 0
    while like >> (10 * shift) >= 768 * 1024 and shift + 1 < len(units):
        shift += 1
    return f"{value >> (10 * shift):6d} {units[shift]:<3}"


def _count(value: int, like: int) -> str:
    units = [" ", "K", "M"]
    step = 0
    while like // 1000**step >= 750_000 and step + 1 < len(units):
        step += 1
    return f"{value // 1000**step:7d} {units[step]} "


_FAMILIES: list[tuple[str, str, Callable[[int, int], str]]] = [
    ("allocated_bytes", "Allocated memory", _bytes),
    ("active_bytes", "Active memory", _bytes),
    ("requested_bytes", "Requested memory", _bytes),
    ("reserved_bytes", "Reserved memory", _bytes),
    ("inactive_split_bytes", "Non-releasable memory", _bytes),
    ("allocation", "Allocations", _count),
    ("active", "Active allocs", _count),
    ("segment", "Reserved segments", _count),
    ("inactive_split", "Non-releasable allocs", _count),
]
_PARTS = [("all", ""), ("large_pool", "      from large pool"), ("small_pool", "      from small pool")]
_WHOLES = [("oversize_allocations", "Oversize allocations"), ("oversize_segments", "Oversize segments")]


def memory_summary(stats: Mapping[str, int], title: str, abbreviated: bool, remark: str = "") -> str:
    """The table of ``torch.cuda.memory_summary`` for one pool.

    Args:
        stats: with the keys of ``torch.cuda.memory_stats``.
        title: whose numbers these are.
        abbreviated: without the rows of the small and the large pool.
        remark: stands beneath the counts of events.
    """
    counters = f"OOMs: {stats['num_ooms']}"
    retries = f"reclaims: {stats['num_alloc_retries']}"
    heads = "".join(f"| {head:<10} " for head in ("Cur Usage", "Peak Usage", "Tot Alloc", "Tot Freed"))
    lines = [
        "=" * _WIDTH,
        centred(cut(title, _WIDTH), _WIDTH),
        "-" * _WIDTH,
        f"{counters:^37}|{retries:^37}",
        *(centred(line, _WIDTH) for line in wrapped(remark, _WIDTH, breaks_words=True)),
        "=" * _WIDTH,
        f"{'Metric':^23}{heads}",
    ]
    for family, name, form in _FAMILIES:
        lines.append("-" * _WIDTH)
        whole = _row(stats, f"{family}.all")
        for part, label in _PARTS[:1] if abbreviated else _PARTS:
            values = _row(stats, f"{family}.{part}")
            # A part is shown in the unit of the whole, so that the column adds up.
            cells = "".join(f"| {form(value, like)} " for value, like in zip(values, whole, strict=True))
            lines.append(f" {label or name:<22}{cells}")
    for family, name in _WHOLES:
        cells = "".join(f"| {_count(value, value)} " for value in _row(stats, family))
        lines += ["-" * _WIDTH, f" {name:<22}{cells}"]
    lines.append("=" * _WIDTH)
    return "".join(f"|{line}|\n" for line in lines)


def _row(stats: Mapping[str, int], key: str) -> list[int]:
    return [stats[f"{key}.{what}"] for what in ("current", "peak", "allocated", "freed")]
