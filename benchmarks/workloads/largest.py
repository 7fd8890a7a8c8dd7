"""The largest batch that fits a set limit, by bisection: what a smaller waste is worth to those who train.

A batch fits when one pass of its shapes, which vary, ends without running out of memory. Each attempt makes the
program anew on an empty cache, so none inherits the pieces of the one before.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from ..measurement import Measurement
from .memory import Memory
from .programs import BATCHES

_MOST = 4096  # a batch of so many is never the question


def largest(fits: Callable[[int], bool], most: int = _MOST) -> int:
    """The largest number up to ``most`` that ``fits``; 0 where not even 1 does. REQUIRES: what is smaller than one
    that fits, fits as well.

    Doubles until one does not fit, as large batches take longest to try.
    """
    fitting, beyond = 0, 1
    while beyond <= most and fits(beyond):
        fitting, beyond = beyond, 2 * beyond
    beyond = min(beyond, most + 1)
    while beyond - fitting > 1:
        middle = (fitting + beyond) // 2
        if fits(middle):
            fitting = middle
        else:
            beyond = middle
    return fitting


def measure(name: str, kind: str, scale: str, limit: int, memory: Memory) -> list[Measurement]:
    """One row: how many samples. Where host memory has no limit (torch's own allocator), none."""
    if kind == "cpu" and memory.statistics() is None:
        return []

    def fits(batch: int) -> bool:
        gc.collect()
        memory.start_over()
        with memory.limited(limit):
            return _runs(name, kind, scale, batch)

    return [Measurement(f"{name} within {limit / 2**30:.4g} GiB", "largest batch", largest(fits), "samples")]


def _runs(name: str, kind: str, scale: str, batch: int) -> bool:
    try:
        program = BATCHES[name](kind, scale, batch)
        program.warm_up()
        for _ in program.run():
            pass
        if kind == "cuda":
            torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        return False
    return True
