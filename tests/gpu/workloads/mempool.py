"""torch.cuda.MemPool as torch's own interface uses it: what every allocator must answer."""

from __future__ import annotations

import gc

import torch

from tests.gpu.workloads.graphs import a_living_graph, captured


def use_counts() -> dict[str, int]:
    """``MemPool.use_count()`` where it should change, by what was done last."""
    counts = {}
    pool, other = torch.cuda.MemPool(), torch.cuda.MemPool()
    counts["made"] = pool.use_count()
    with torch.cuda.use_mem_pool(pool):
        counts["in use"] = pool.use_count()
        with torch.cuda.use_mem_pool(other):
            counts["in use around another"] = pool.use_count()
            counts["the other"] = other.use_count()
            x = torch.ones(1000, device="cuda")
        counts["after the other"] = other.use_count()
    counts["no longer in use"] = pool.use_count()
    del x
    with a_living_graph():
        graph, out = captured(lambda: torch.ones(1000, device="cuda"), pool=pool.id)
        counts["with a graph"] = pool.use_count()
        second, _ = captured(lambda: torch.zeros(1000, device="cuda"), pool=pool.id)
        counts["with two graphs"] = pool.use_count()
        del out
        counts["without an output"] = pool.use_count()
        graph.reset()
        counts["with the second graph"] = pool.use_count()
        del second
        gc.collect(0)
        counts["without graphs"] = pool.use_count()
    return counts


def ids() -> dict[str, object]:
    """How ids follow each other, and what a pool says that it was made with."""
    first, handle, second = torch.cuda.MemPool(), torch.cuda.graph_pool_handle(), torch.cuda.MemPool()
    graph, _ = captured(lambda: torch.ones(8, device="cuda"))
    own = graph.pool()
    return {
        "user made": [first.id[0], handle[0], second.id[0]],
        "steps": [handle[1] - first.id[1], second.id[1] - handle[1]],
        "a graph's own": [own[0] > 0, own[1]],
    }


def errors() -> dict[str, str]:
    """What is refused, and with which error."""
    pool = torch.cuda.MemPool()
    refused = {}
    try:
        with torch.cuda.use_mem_pool(pool), torch.cuda.use_mem_pool(pool):
            pass
    except Exception as error:
        refused["recording twice"] = type(error).__name__
    try:
        torch._C._cuda_endAllocateToPool(0, (0, 2**40))
    except Exception as error:
        refused["ending what never began"] = type(error).__name__
    return refused


def counted(mib: list[int]) -> dict[str, dict[str, int]]:
    """What torch counts of blocks made in a pool: made, half of them freed, the pool gone, all freed."""
    keys = ("allocated_bytes.all.current", "requested_bytes.all.current", "active_bytes.all.current")
    base = torch.cuda.memory_stats()

    def grown() -> dict[str, int]:
        stats = torch.cuda.memory_stats()
        return {key: stats[key] - base[key] for key in keys}

    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        blocks = [torch.empty(size * 2**20 + 1, dtype=torch.uint8, device="cuda") for size in mib]
    counts = {"made": grown()}
    del blocks[::2]
    counts["half"] = grown()
    del pool
    counts["without the pool"] = grown()
    del blocks
    counts["freed"] = grown()
    return counts
