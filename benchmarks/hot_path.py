"""Allocations and frees that find everything in the cache: pairs, threads, churn, torch.empty."""

from __future__ import annotations

import time

import torch

from . import allocators, loops
from .measurement import Measurement

KIND = "cuda"
ALLOCATORS = (*allocators.GPU_ALLOCATORS, allocators.FLOOR)
_KIB, _MIB, _GIB = 2**10, 2**20, 2**30
_PAIRS = {"512 B": 512, "64 KiB": 64 * _KIB, "1 MiB": _MIB, "20 MiB": 20 * _MIB, "1 GiB": _GIB}
_THREADS = 8


def measure(allocator: str, quick: bool) -> list[Measurement]:
    """Times in ns, memory in GiB."""
    run = loops.load()
    count = 30_000 if quick else 200_000
    times = {f"pair {name}": run.gpu_pair_ns(size, count, 1) for name, size in _PAIRS.items()}
    times[f"pair 512 B, {_THREADS} threads"] = run.gpu_pair_ns(512, count // _THREADS, _THREADS)
    times["churn 512 B - 1 MiB, 1000 live"] = run.gpu_churn_ns(512, _MIB, 1000, count, 1)
    times["churn 2 MiB - 256 MiB, 200 live"] = run.gpu_churn_ns(2 * _MIB, 256 * _MIB, 200, count // 10, 1)
    rows = [Measurement(case, "time", value, "ns") for case, value in times.items()]
    if allocator != allocators.FLOOR:
        reserved = torch.cuda.max_memory_reserved() / _GIB
        rows.append(Measurement("churn 2 MiB - 256 MiB, 200 live", "peak reserved", reserved, "GiB"))
    rows.append(Measurement("at::empty of 1000 floats", "time", run.empty_ns("cuda:0", count // 4), "ns"))
    rows.append(Measurement("torch.empty of 1000 floats", "time", _python_empty_ns("cuda", count // 10), "ns"))
    return rows


def _python_empty_ns(device: str, count: int) -> float:
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        for _ in range(count):
            torch.empty(1000, device=device)
        best = min(best, (time.perf_counter() - began) / count * 1e9)
    return best
