"""What torch's own tools cost: memory history, snapshots, CUDA graphs, private pools."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from . import machine
from .measurement import Measurement

KIND = "cuda"
ALLOCATORS = ("torch_vmm", "native", "expandable")
_LIVE = 2000
# What is recorded, and of what: torch's words.
_HISTORIES: dict[str, dict[str, str | None]] = {
    "off": {"enabled": None},
    "on, no stacks": {"enabled": "all", "context": None},
    "on, Python stacks": {"enabled": "all", "context": "all", "stacks": "python"},
    "on, all stacks": {"enabled": "all", "context": "all", "stacks": "all"},
}


@machine.one_cpu()
def measure(allocator: str, quick: bool) -> list[Measurement]:
    """Times in us and ms."""
    del allocator
    count = 2_000 if quick else 20_000
    rows = []
    record: Callable[..., None] = torch.cuda.memory._record_memory_history
    for name, options in _HISTORIES.items():
        record(**options, **({"max_entries": 10_000} if options["enabled"] else {}))
        rows.append(Measurement(f"torch.empty and free, history {name}", "time", 1e6 * _pair_s(count), "us"))
    record(enabled=None)
    live = [torch.empty(1000 + 7 * k, device="cuda") for k in range(_LIVE)]
    rows.append(
        Measurement(f"memory_snapshot of {_LIVE} blocks", "time", 1e3 * _best(torch.cuda.memory_snapshot), "ms")
    )
    rows.append(Measurement("memory_stats", "time", 1e3 * _best(torch.cuda.memory_stats), "ms"))
    del live
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        rows.append(Measurement("torch.empty and free in a MemPool", "time", 1e6 * _pair_s(count), "us"))
    return rows + _graph(20 if quick else 200)


def _pair_s(count: int) -> float:
    def pairs() -> None:
        for _ in range(count):
            torch.empty(1000, device="cuda")

    return _best(pairs) / count


def _best(work: Callable[[], object], runs: int = 3) -> float:
    best = float("inf")
    for _ in range(runs):
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best


def _graph(replays: int) -> list[Measurement]:
    """A chain of small layers, captured and replayed."""
    net = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(32)]).cuda()
    given = torch.randn(64, 512, device="cuda")
    with torch.no_grad():
        net(given)
        graphs = []

        def capture() -> None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                net(given)
            graphs.append(graph)

        capture_s = _best(capture)

    def replay() -> None:
        for _ in range(replays):
            graphs[-1].replay()
        torch.cuda.synchronize()

    return [
        Measurement("CUDA graph of 32 layers", "capture", 1e3 * capture_s, "ms"),
        Measurement("CUDA graph of 32 layers", "replay", 1e6 * _best(replay) / replays, "us"),
    ]
