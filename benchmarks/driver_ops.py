"""What the driver's calls cost by chunk size, what mapping 20 GiB costs, and a hand-over between two models.

The others have no models to hand memory over between: they give it back and
ask again, as two processes would have to.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from . import allocators, machine
from .measurement import Measurement

KIND = "cuda"
ALLOCATORS = allocators.GPU_ALLOCATORS
_MIB, _GIB = 2**20, 2**30
_CHUNKS = {"2 MiB": 2 * _MIB, "16 MiB": 16 * _MIB, "64 MiB": 64 * _MIB, "256 MiB": 256 * _MIB, "1 GiB": _GIB}


class _Times:
    """Measurements of what happens in ``with times(case, metric, unit):``."""

    _SCALE = {"us": 1e6, "ms": 1e3}  # noqa: RUF012

    def __init__(self) -> None:
        self.rows: list[Measurement] = []

    @contextmanager
    def __call__(self, case: str, metric: str, unit: str, calls: int = 1) -> Iterator[None]:
        began = time.perf_counter()
        yield
        value = (time.perf_counter() - began) * self._SCALE[unit] / calls
        self.rows.append(Measurement(case, metric, value, unit))


@machine.one_cpu()
def measure(allocator: str, quick: bool) -> list[Measurement]:
    """Calls in µs each, larger operations in ms; the CPU's clock."""
    times = _Times()
    if allocator == "torch_vmm":
        for name, size in _CHUNKS.items():
            _calls(times, f"chunk of {name}", size, count=min(64, (4 if quick else 16) * _GIB // size))
        _map_much(times, gib=8 if quick else 20)
        _hand_over_between_models(times)
    else:
        _hand_over_by_driver(times)
    return times.rows


def _calls(times: _Times, case: str, size: int, count: int) -> None:
    from torch_vmm import AccessFlags, VirtualMemoryManager

    offsets = [size * number for number in range(count)]
    with VirtualMemoryManager("cuda") as manager:
        with times(case, "reserve", "us"):
            stretch = manager.reserve(size * count)
        with times(case, "create", "us", count):
            chunks = [manager.alloc_physical(size) for _ in offsets]
        with times(case, "map", "us", count):
            for chunk, offset in zip(chunks, offsets, strict=True):
                manager.map(stretch, chunk, offset)
        with times(case, "set_access", "us", count):
            for offset in offsets:
                manager.set_access(stretch, AccessFlags.READ_WRITE, offset=offset, size=size)
        with times(case, "unmap", "us", count):
            for offset in offsets:
                manager.unmap(stretch, offset, size)
        with times(case, "release", "us", count):
            for chunk in chunks:
                manager.free_physical(chunk)
        manager.release(stretch)


def _map_much(times: _Times, gib: int) -> None:
    from torch_vmm import VirtualMemoryPool

    for name, page_size in {"pages of 2 MiB": 2 * _MIB, "the pool's own choice": None}.items():
        with VirtualMemoryPool(capacity=2 * gib * _GIB, page_size=page_size, device="cuda") as pool:
            with times(f"{gib} GiB in {name}", "map", "ms"):
                pool.allocate(0, gib * _GIB)
            with times(f"{gib} GiB in {name}", "give back", "ms"):
                pool.deallocate(0, gib * _GIB)
                pool.trim()


def _hand_over_between_models(times: _Times) -> None:
    from torch_vmm import SharedMemoryPool

    with SharedMemoryPool(physical_limit=5 * _GIB, device="cuda") as shared:
        models = [shared.register_model("one"), shared.register_model("other")]
        taken = 0

        def take() -> torch.Tensor:
            nonlocal taken
            with models[taken % 2]:
                taken += 1
                return torch.empty(4 * _GIB, dtype=torch.uint8, device="cuda")

        _hand_over(times, take, give=lambda: None)


def _hand_over_by_driver(times: _Times) -> None:
    def take() -> torch.Tensor:
        return torch.empty(4 * _GIB, dtype=torch.uint8, device="cuda")

    _hand_over(times, take, give=torch.cuda.empty_cache)


def _hand_over(times: _Times, take: Callable[[], torch.Tensor], give: Callable[[], None]) -> None:
    """Four GiB, six times round, after two to warm up."""
    own = _Times()
    for number in range(8):
        block = take()
        torch.cuda.synchronize()
        del block
        with own(str(number), "until it can be used by a kernel", "ms"):
            give()
            block = take()
        with own(str(number), "until the GPU is idle again", "ms"):
            torch.cuda.synchronize()
        del block
        give()
    for metric in ("until it can be used by a kernel", "until the GPU is idle again"):
        values = sorted(row.value for row in own.rows if row.metric == metric and int(row.case) >= 2)
        times.rows.append(Measurement("hand over 4 GiB", metric, values[len(values) // 2], "ms"))
