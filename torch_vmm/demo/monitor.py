"""Watches the pools while the models work: what they hold, the limit, what changes hands."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch_vmm import GlobalMemoryStats, MemoryStats, SharedMemoryPool


@dataclass(frozen=True)
class Usage:
    """Bytes of one pool, or of all, at one moment; ``mapped`` is the sum of the others."""

    allocated: int = 0  # in live tensors
    idle: int = 0  # unused, in whole chunks: others can have it
    stranded: int = 0  # unused, in chunks that are partly used
    waiting: int = 0  # freed, but queued work may still use it
    mapped: int = 0  # physical memory held

    def in_mib(self) -> tuple[int, int, int, int, int]:
        """The same in whole MiB, rounded so that the first four still add up to the last."""
        parts = (self.allocated, self.idle, self.stranded, self.waiting)
        rounded = [part // 2**20 for part in parts]
        whole = round(self.mapped / 2**20)
        # What rounding down lost goes to those that lost most.
        by_loss = sorted(range(len(parts)), key=lambda part: parts[part] % 2**20, reverse=True)
        for part in by_loss[: max(0, whole - sum(rounded))]:
            rounded[part] += 1
        return rounded[0], rounded[1], rounded[2], rounded[3], sum(rounded)


@dataclass(frozen=True)
class Sample:
    """Bytes at one moment."""

    models: dict[str, Usage]
    total: Usage
    limit: int


def handed_over(before: dict[str, int], after: dict[str, int], taker: str) -> int:
    """Bytes that went from other models to ``taker`` between two readings of their mapped bytes."""
    given = sum(max(0, before[model] - after[model]) for model in before if model != taker)
    return min(given, max(0, after[taker] - before[taker]))


class Monitor:
    """Samples a shared pool on a thread of its own, from ``with monitor:`` to its end.

    Args:
        shared: the pool to watch.
        period_s: seconds between samples.
    """

    def __init__(self, shared: SharedMemoryPool, period_s: float = 0.02) -> None:
        self._shared = shared
        self._period_s = period_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="demo monitor", daemon=True)
        self.samples = 0
        self.most_mapped = 0
        self.over_limit: Sample | None = None
        self.handed_over_to = dict.fromkeys(shared.models, 0)
        self.latest = self._sample()

    def __enter__(self) -> Monitor:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._look()

    @contextmanager
    def turn(self, model: str) -> Iterator[None]:
        """Counts what other models give to ``model`` inside; none but it may allocate there."""
        before = self._mapped()
        yield
        self.handed_over_to[model] += handed_over(before, self._mapped(), model)

    def _mapped(self) -> dict[str, int]:
        return {model: pool.physical_memory_usage for model, pool in self._shared.models.items()}

    def _watch(self) -> None:
        while not self._stop.wait(self._period_s):
            self._look()

    def _look(self) -> None:
        self.latest = sample = self._sample()
        self.samples += 1
        self.most_mapped = max(self.most_mapped, sample.total.mapped)
        if sample.total.mapped > sample.limit:
            self.over_limit = sample

    def _sample(self) -> Sample:
        models = {}
        for model, pool in self._shared.models.items():
            models[model] = _usage(pool.stats())
        of_all = self._shared.global_stats()
        return Sample(models, _usage(of_all, of_all.store_bytes), of_all.physical_limit)


def _usage(stats: MemoryStats | GlobalMemoryStats, store_bytes: int = 0) -> Usage:
    """What the chunk store keeps counts as idle: anyone can have it."""
    return Usage(
        allocated=stats.allocated_bytes,
        idle=stats.idle_bytes + store_bytes,
        stranded=stats.stranded_bytes,
        waiting=stats.quarantined_bytes,
        mapped=stats.physical_usage,
    )
