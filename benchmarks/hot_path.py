"""Allocations and frees that ask the driver for nothing, or seldom: pairs, threads, churn, torch.empty.

Of churn, replacements, at::empty and torch.empty it is the best of three rounds in each process.
"""

from __future__ import annotations

import time
from contextlib import ExitStack

import torch

from . import allocators, loops, machine
from .measurement import Measurement

KIND = "cuda"
ALLOCATORS = (*allocators.GPU_ALLOCATORS, allocators.FLOOR)
RUNS = 7
_KIB, _MIB, _GIB = 2**10, 2**20, 2**30
_PAIRS = {"512 B": 512, "64 KiB": 64 * _KIB, "1 MiB": _MIB, "20 MiB": 20 * _MIB, "1 GiB": _GIB}
_CHURNS = {
    "512 B - 1 MiB, 1000 live": (512, _MIB, 1000, 200_000),
    "2 MiB - 256 MiB, 200 live": (2 * _MIB, 256 * _MIB, 200, 20_000),
}
_THREADS = 8
_MODELS = 1000
_PENDING = 10_000


def measure(allocator: str, quick: bool) -> list[Measurement]:
    """Times in ns, memory in GiB."""
    run = loops.load()
    count = 30_000 if quick else 200_000
    times = {}
    with machine.one_cpu():
        for name, size in _PAIRS.items():
            times[f"pair {name}"] = run.gpu_pair_ns(size, count)
        if allocator != allocators.FLOOR:
            times[f"pair 512 B beside {_PENDING} pending frees"] = _pair_beside_pending_ns(run, count // 10)
        for name, (lowest, highest, live, operations) in _CHURNS.items():
            rounds = run.gpu_churn_ns(lowest, highest, live, operations // (10 if quick else 1), 1)
            times[f"churn {name}"] = min(rounds)
            times[f"churn {name}, first round"] = rounds[0]  # with the memory that it has to get
    rows = []
    if allocator != allocators.FLOOR:  # before a million live blocks
        reserved = torch.cuda.max_memory_reserved() / _GIB
        rows.append(Measurement("churn 2 MiB - 256 MiB, 200 live", "peak reserved", reserved, "GiB"))
    with machine.one_cpu():
        for live in (1000, 100_000 if quick else 1_000_000):
            times[f"replace one of {live} blocks of 512 B"] = run.gpu_replace_ns(512, live, count // 2)
        times["at::empty of 1000 floats"] = run.empty_ns("cuda:0", count // 4)
        times["torch.empty of 1000 floats"] = _python_empty_ns("cuda", count // 10)
    crew = [run.Opened() for _ in range(_THREADS)]
    each = count // _THREADS
    times[f"pair 512 B, {_THREADS} threads"] = run.gpu_crew_pair_ns(512, each, crew)
    models = _in_models(run, allocator, _THREADS)
    times[f"pair 512 B, {_THREADS} threads, a model each"] = run.gpu_crew_pair_ns(512, each, models)
    times[f"512 B, {_THREADS // 2} threads take, {_THREADS // 2} free"] = run.gpu_crew_hand_on_ns(512, each, crew)
    with machine.one_cpu():
        for number in (1, _MODELS):
            models = _in_models(run, allocator, number)
            times[f"pair 512 B, {number} opened in turn"] = run.gpu_switched_pair_ns(512, count, models)
    return [Measurement(case, "time", value, "ns") for case, value in times.items()] + rows


_models: list[object] = []  # a model that nobody holds is closed


def _in_models(run: loops.Loops, allocator: str, count: int) -> list[object]:
    """What so many threads, or turns, have open: a model each, where there are models."""
    if allocator != "torch_vmm":
        return [run.Opened() for _ in range(count)]
    import torch_vmm

    opened: list[object] = []
    shared = torch_vmm.SharedMemoryPool(physical_limit="1TiB", device=KIND)
    for number in range(count):
        with ExitStack() as stack:
            model = shared.register_model(f"model {number}", virtual_capacity="16GiB")
            _models.append(model)
            stack.enter_context(model)
            opened.append(run.Opened())
    return opened


def _pair_beside_pending_ns(run: loops.Loops, count: int) -> float:
    """With so many freed blocks that another stream still uses."""
    side = torch.cuda.Stream()
    blocks = [torch.empty(512, dtype=torch.uint8, device=KIND) for _ in range(_PENDING)]
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(1_000_000_000)  # half a second: longer than what is measured
    for block in blocks:
        block.record_stream(side)
    del block, blocks
    elapsed = run.gpu_pair_ns(512, count)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return elapsed


def _python_empty_ns(device: str, count: int) -> float:
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        for _ in range(count):
            torch.empty(1000, device=device)
        best = min(best, (time.perf_counter() - began) / count * 1e9)
    return best
