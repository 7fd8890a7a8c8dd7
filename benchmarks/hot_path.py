"""Allocations and frees that ask the driver for nothing, or seldom: pairs, threads, churn, torch.empty.

Of what one thread does it is the best of three rounds in each process (churn: of six), each on the CPU that is the
quickest when it begins. One CPU for all of them was a neighbour's core half of the time: 150 ns an operation of the
small churn in three processes, 250 to 280 in four, and native's the same (an H200, 8ccd64e).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

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
_ROUNDS = 3
_CHURN_ROUNDS = 6  # the first has its memory to get
_THREADS = 8
_MODELS = 1000
_PENDING = 10_000


def measure(allocator: str, quick: bool) -> list[Measurement]:
    """Times in ns, memory in GiB."""
    run = loops.load()
    count = 30_000 if quick else 200_000
    times = {}
    for name, size in _PAIRS.items():
        times[f"pair {name}"] = _best_ns(partial(run.gpu_pair_ns, size, count))
    if allocator != allocators.FLOOR:
        beside = partial(_pair_beside_pending_ns, run, count // 10)
        times[f"pair 512 B beside {_PENDING} pending frees"] = _best_ns(beside)
    for name, (lowest, highest, live, operations) in _CHURNS.items():
        churn = run.GpuChurn(lowest, highest, live, operations // (10 if quick else 1), 1)
        rounds = machine.rounds_ns(churn.round_ns, _CHURN_ROUNDS)
        times[f"churn {name}"] = min(rounds)
        times[f"churn {name}, first round"] = rounds[0]
        del churn
    rows = []
    if allocator != allocators.FLOOR:  # before a million live blocks
        reserved = torch.cuda.max_memory_reserved() / _GIB
        rows.append(Measurement("churn 2 MiB - 256 MiB, 200 live", "peak reserved", reserved, "GiB"))
    for live in (1000, 100_000 if quick else 1_000_000):
        replacing = run.GpuReplacing(512, live, count // 2)
        times[f"replace one of {live} blocks of 512 B"] = _best_ns(replacing.round_ns)
        del replacing
    times["at::empty of 1000 floats"] = _best_ns(partial(run.empty_ns, "cuda:0", count // 4))
    times["torch.empty of 1000 floats"] = _best_ns(partial(_python_empty_ns, "cuda", count // 10))
    crew = [run.Opened() for _ in range(_THREADS)]
    each = count // _THREADS
    times[f"pair 512 B, {_THREADS} threads"] = run.gpu_crew_pair_ns(512, each, crew)
    models = _in_models(run, allocator, _THREADS)
    times[f"pair 512 B, {_THREADS} threads, a model each"] = run.gpu_crew_pair_ns(512, each, models)
    times[f"512 B, {_THREADS // 2} threads take, {_THREADS // 2} free"] = run.gpu_crew_hand_on_ns(512, each, crew)
    for number in (1, _MODELS):
        models = _in_models(run, allocator, number)
        times[f"pair 512 B, {number} opened in turn"] = _best_ns(partial(run.gpu_switched_pair_ns, 512, count, models))
    return [Measurement(case, "time", value, "ns") for case, value in times.items()] + rows


def _best_ns(a_round: Callable[[], float]) -> float:
    return min(machine.rounds_ns(a_round, _ROUNDS))


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
    began = time.perf_counter()
    for _ in range(count):
        torch.empty(1000, device=device)
    return (time.perf_counter() - began) / count * 1e9
