"""The published examples of torch_memory_saver 0.0.10 that capture CUDA graphs, with one import changed.

The others are in tests/api/test_memory_saver_examples.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import torch_vmm
from tests.gpu.memory import settle
from tests.gpu.workloads.graphs import other_stream
from tests.helpers import GIB, MIB
from tests.standin import control
from torch_vmm.memory_saver import torch_memory_saver

pytestmark = pytest.mark.usefixtures("fresh_saver", "random_generator_is_ready")

ROWS = 5


def held_with(tensor: torch.Tensor) -> int:
    """Bytes of memory that the model has in which the tensor is."""
    pool = torch_vmm.pool_of(tensor)
    assert pool is not None
    return pool.physical_memory_usage


@dataclass
class Graph:
    """Adds the mean of a cache to what is fed; most of its memory holds what it computes on the way."""

    graph: torch.cuda.CUDAGraph
    fed: torch.Tensor
    result: torch.Tensor

    def __call__(self, number: float) -> float:
        self.fed.fill_(number)
        self.graph.replay()
        return float(self.result)


def captured(cache: torch.Tensor, on_the_way: int, tag: str, enable_cpu_backup: bool = False) -> Graph:
    """One with ``on_the_way`` bytes twice at once."""
    fed = torch.zeros(ROWS, device="cuda")

    def work() -> torch.Tensor:
        answer = (fed + cache.mean(dim=1)).mean()
        return (torch.ones(on_the_way // 4, device="cuda") * answer).amax()

    warm = other_stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        work()
    torch.cuda.current_stream().wait_stream(warm)
    graph = torch.cuda.CUDAGraph()
    with torch_memory_saver.cuda_graph(graph, tag=tag, enable_cpu_backup=enable_cpu_backup):
        result = work()
    return Graph(graph, fed, result)


def made_cache(columns: int, tag: str = "kv_cache") -> torch.Tensor:
    with torch_memory_saver.region(tag=tag):
        return torch.full((ROWS, columns), 1.0, device="cuda")


# -- A cache and a graph over it ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("backup", [False, True])
def test_a_graph_and_its_cache_are_paused(backup: bool) -> None:
    cache = made_cache(MIB)  # 20 MiB
    graph = captured(cache, 16 * MIB, "graph", backup)
    assert graph(100) == 101
    address, held = cache.data_ptr(), held_with(cache)
    assert held >= 20 * MIB + 2 * 16 * MIB
    torch_memory_saver.pause("kv_cache")
    assert 2 * 16 * MIB <= held_with(cache) <= held - 20 * MIB
    torch_memory_saver.pause("graph")
    assert held_with(cache) == 0
    others = torch.zeros(held, dtype=torch.uint8, device="cuda")
    del others
    torch_memory_saver.resume("graph")
    assert float(graph.result) == (101 if backup else 0)
    torch_memory_saver.resume("kv_cache")
    assert cache.data_ptr() == address
    assert held_with(cache) == held
    cache.fill_(2)
    assert graph(200) == 202
    assert graph(300) == 302


@pytest.mark.parametrize("backup", [False, True])
def test_what_a_graph_was_given_once_is_kept_where_that_is_wanted(backup: bool) -> None:
    cache = made_cache(1000)
    graph = torch.cuda.CUDAGraph()
    with torch_memory_saver.cuda_graph(graph, tag="graph", enable_cpu_backup=backup):
        table = torch.empty(MIB, device="cuda")
        result = table + cache.mean()
    table.fill_(5)  # by no replay
    graph.replay()
    assert bool((result == 6).all())
    torch_memory_saver.pause("graph")
    kept = torch_memory_saver.get_cpu_backup(table)
    assert (kept is not None) is backup
    torch_memory_saver.resume("graph")
    assert bool((table == (5 if backup else 0)).all())
    table.fill_(7)
    graph.replay()
    assert bool((result == 8).all())


@pytest.mark.alone  # it looks at the GPU's free memory
@pytest.mark.no_memcheck
def test_the_driver_has_what_is_paused() -> None:
    size = GIB // 16 if control.is_here() else GIB
    cache = made_cache(size // 4 // ROWS)
    graph = captured(cache, size, "graph")
    assert graph(100) == 101
    settle()
    free = [torch.cuda.mem_get_info()[0]]
    for tag in ("kv_cache", "graph"):
        torch_memory_saver.pause(tag)
        settle()
        free.append(torch.cuda.mem_get_info()[0])
    assert abs(free[1] - free[0] - size) < size // 8
    assert abs(free[2] - free[1] - 2 * size) < size // 8
    torch_memory_saver.resume()
    settle()
    assert abs(torch.cuda.mem_get_info()[0] - free[0]) < size // 8
    cache.fill_(2)
    assert graph(200) == 202


# -- Several ----------------------------------------------------------------------------------------------------------


def test_one_graph_is_replayed_while_another_is_paused() -> None:
    caches = [made_cache(1000, f"cache {number}") for number in range(3)]
    graphs = [captured(cache, 8 * MIB, f"graph {number}", number == 1) for number, cache in enumerate(caches)]
    for paused in (0, 1, 2, 1):
        torch_memory_saver.pause(f"graph {paused}")
        torch_memory_saver.pause(f"cache {paused}")
        for number, graph in enumerate(graphs):
            if number != paused:
                assert graph(10 * number) == 10 * number + 1
        torch_memory_saver.resume(f"graph {paused}")
        torch_memory_saver.resume(f"cache {paused}")
        caches[paused].fill_(1)
        assert graphs[paused](5) == 6
    torch_memory_saver.pause()
    assert held_with(caches[0]) == 0
    torch_memory_saver.resume()
    for cache in caches:
        cache.fill_(3)
    assert [graph(1) for graph in graphs] == [4, 4, 4]


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_it_is_captured_as_torch_does(mode: str) -> None:
    x = torch.full((MIB,), 3.0, device="cuda")
    side, handle = other_stream(), torch.cuda.graph_pool_handle()
    graphs, results = [torch.cuda.CUDAGraph() for _ in range(2)], []
    for graph in graphs:  # in one pool
        with torch_memory_saver.cuda_graph(graph, handle, side, mode, "both"):
            assert torch.cuda.current_stream() == side
            results.append(x * 2)
    assert [tuple(graph.pool()) for graph in graphs] == [tuple(handle)] * 2
    assert results[0].data_ptr() != results[1].data_ptr()
    for number in range(2):
        x.fill_(number)
        for graph in graphs:
            graph.replay()
        assert all(bool((result == 2 * number).all()) for result in results)
        torch_memory_saver.pause("both")
        torch_memory_saver.resume("both")


# -- Training and generating in turns ----------------------------------------------------------------------------------


def test_weights_and_a_cache_under_a_captured_function() -> None:
    width, columns = 1024, 100_000
    cache = made_cache(columns)
    with torch_memory_saver.region(tag="model_weights"):
        linear = torch.nn.Linear(width, width, bias=False, device="cuda")
    fed = torch.zeros(width, device="cuda")

    def work() -> torch.Tensor:
        with torch.no_grad():
            answer: torch.Tensor = (fed[:ROWS] + cache.mean(dim=1)).mean() + linear(fed).mean()
            return answer

    torch.nn.init.ones_(linear.weight)
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()
    addresses = cache.data_ptr(), linear.weight.data_ptr()
    fed.fill_(100)
    graph.replay()
    assert float(result) == 101 + 100 * width
    held = held_with(cache)
    torch_memory_saver.pause("kv_cache")
    assert width * width * 4 <= held_with(cache) < held
    torch_memory_saver.pause("model_weights")
    assert held_with(cache) == 0
    torch_memory_saver.resume("model_weights")
    torch_memory_saver.resume("kv_cache")
    assert (cache.data_ptr(), linear.weight.data_ptr()) == addresses
    cache.fill_(2)
    torch.nn.init.constant_(linear.weight, 2)
    fed.fill_(200)
    graph.replay()
    assert float(result) == 202 + 2 * 200 * width
    torch_memory_saver.pause("kv_cache")
    assert bool((linear.weight == 2).all())
    torch_memory_saver.resume("kv_cache")
