"""The hot path on host memory, beside torch's own CPU allocator; needs no GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from . import allocators, loops, machine
from .measurement import Measurement

KIND = "cpu"
ALLOCATORS = allocators.HOST_ALLOCATORS
_MIB = 2**20


def measure(allocator: str, quick: bool) -> list[Measurement]:
    """Times in ns, or in ms where memory is written."""
    run = loops.load()
    count = 20_000 if quick else 100_000
    rounds: dict[str, Callable[[], float]] = {
        "pair 512 B": partial(run.host_pair_ns, 512, count),
        "pair 1 MiB": partial(run.host_pair_ns, _MIB, count),
        "pair 64 MiB": partial(run.host_pair_ns, 64 * _MIB, count // 10),
        "at::empty of 1000 floats": partial(run.empty_ns, "cpu", count),
    }
    times = {name: min(machine.rounds_ns(a_round, 3)) for name, a_round in rounds.items()}
    churns = {
        "churn 512 B - 1 MiB, 1000 live": (512, _MIB, 1000, count),
        "churn 1 MiB - 32 MiB, 50 live": (_MIB, 32 * _MIB, 50, count // 10),
    }
    for name, (lowest, highest, live, operations) in churns.items():
        churn = run.HostChurn(lowest, highest, live, operations, 1)
        times[name] = min(machine.rounds_ns(churn.round_ns, 3))
        del churn  # with its blocks
    zeros_ms = min(machine.rounds_ns(lambda: _zeros_ms(20), 3))
    times["pair 512 B, 2 threads"] = run.host_crew_pair_ns(512, count // 2, [run.Opened(), run.Opened()])
    rows = [Measurement(case, "time", value, "ns") for case, value in times.items()]
    rows.append(Measurement("torch.zeros of 64 MiB, again and again", "time", zeros_ms, "ms"))
    return rows


def _zeros_ms(count: int) -> float:
    torch.zeros(16 * _MIB)
    began = time.perf_counter()
    for _ in range(count):
        torch.zeros(16 * _MIB)
    return (time.perf_counter() - began) / count * 1e3
