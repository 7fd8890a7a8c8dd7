"""Memory that has to come from the driver first: a big block, giving it back, growth in steps."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from . import allocators, machine
from .measurement import Measurement

KIND = "cuda"
ALLOCATORS = allocators.GPU_ALLOCATORS
_MIB, _GIB = 2**20, 2**30


@machine.one_cpu()
def measure(allocator: str, quick: bool) -> list[Measurement]:
    """Times in ms of the CPU's clock; each begins and ends with an idle GPU."""
    gib = 8 if quick else 20
    rows = []

    def timed(case: str, action: Callable[[], None]) -> None:
        torch.cuda.synchronize()
        began = time.perf_counter()
        action()
        torch.cuda.synchronize()
        rows.append(Measurement(case, "time", (time.perf_counter() - began) * 1e3, "ms"))

    held: list[torch.Tensor] = []

    def grow(total: int, step: int) -> Callable[[], None]:
        def action() -> None:
            held.extend(torch.empty(step, dtype=torch.uint8, device="cuda") for _ in range(total // step))

        return action

    for name, step in {"one block": gib * _GIB, "256 MiB steps": 256 * _MIB, "24 MiB steps": 24 * _MIB}.items():
        timed(f"{gib} GiB in {name}", grow(gib * _GIB, step))
        held.clear()
        timed(f"empty_cache after {gib} GiB in {name}", torch.cuda.empty_cache)
    timed("1 GiB in 64 KiB steps", grow(_GIB, 64 * 2**10))
    held.clear()
    return rows
