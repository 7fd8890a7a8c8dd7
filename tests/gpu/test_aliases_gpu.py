"""Aliases and seals under queued work; on a GPU a write to a sealed page faults."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

import torch_vmm
from tests.gpu.conftest import Busy
from tests.helpers import PAGE, faults, holds, stamp
from torch_vmm import _C, alias, aligned, concat_views, sealed

MakePool = Callable[..., torch_vmm.VirtualMemoryPool]
ROW = PAGE // 4


def rows(n: int) -> torch.Tensor:
    return aligned((n, ROW), torch.uint8, "cuda")


def test_an_alias_that_dies_while_it_is_read(busy: Busy, make_pool: MakePool, memory: _C.Device) -> None:
    pool = make_pool("64MiB", physical_limit=8 * PAGE)
    with pool:
        tensor = stamp(rows(16), 1)
        twice = alias(tensor, 2)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        running = busy(1000)  # beside other processes a collection alone may take some 100 ms
        read = twice[8:24].clone()  # nobody records that stream
    del twice, tensor
    gc.collect()
    assert not running.query()
    assert pool.memory_allocated() == 0
    with pool:  # its memory is wanted elsewhere at once
        other = stamp(torch.empty(8 * PAGE, dtype=torch.uint8, device="cuda"), 2)
    side.synchronize()
    assert holds(torch.cat([read[8:], read[:8]]), 1)
    assert holds(other, 2)
    memory.empty_cache()
    assert not [each for each in memory.pools() if "aligned" in each.name]


def test_record_stream_on_an_alias_keeps_the_block_that_it_shows(busy: Busy, make_pool: MakePool) -> None:
    pool = make_pool("64MiB", page_size=PAGE)
    with pool:  # an ordinary tensor, whose stream may have its memory again at once
        block = stamp(torch.empty(4 * PAGE, dtype=torch.uint8, device="cuda"), 1)
        result = torch.empty_like(block)
        shown = alias(block)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        running = busy(1000)  # beside other processes a collection alone may take some 100 ms
        result.copy_(shown)
    shown.record_stream(side)
    del shown, block
    gc.collect()
    assert pool.memory_stats()["active_bytes.all.current"] == pool.memory_allocated() + 4 * PAGE
    with pool:
        other = stamp(torch.empty(4 * PAGE, dtype=torch.uint8, device="cuda"), 2)
    assert not running.query()
    torch.cuda.synchronize()
    assert holds(result, 1)
    assert holds(other, 2)


def test_a_graph_reads_through_an_alias() -> None:
    pieces = [stamp(rows(4), seed) for seed in (1, 2)]
    whole = concat_views(pieces)
    out = torch.empty_like(whole)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(whole)
    for seed in (3, 4):
        stamp(pieces[1], seed)
        graph.replay()
        assert holds(out[:4], 1)
        assert holds(out[4:], seed)


def test_a_seal_waits_for_queued_writers(busy: Busy, make_pool: MakePool) -> None:
    pool = make_pool("64MiB")
    with pool:
        tensor = rows(8)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        running = busy(50)
        tensor.fill_(3)
    pool.seal(tensor)
    assert running.query()
    assert sealed(tensor)
    assert bool((tensor == 3).all())
    pool.unseal(tensor)
    tensor.fill_(4)
    assert bool((tensor == 4).all())


PROGRAM = """
import torch, torch_vmm
torch_vmm.enable()
weight = torch_vmm.aligned((1024, 1024), torch.float32, "cuda").fill_(2)
torch_vmm.current_pool().seal(weight)
print(float(weight.sum()))
"""


@pytest.mark.needs_gpu("faults")
def test_a_write_to_a_sealed_page_faults() -> None:
    assert faults(PROGRAM, "weight += 1", printed="2097152.0\n", device="cuda")


READ_ONLY = """
import torch, torch_vmm
torch_vmm.enable()
weight = torch_vmm.aligned((1024, 1024), torch.float32, "cuda").fill_(2)
shown = torch_vmm.alias(weight, read_only=True)
weight += 1
print(float(shown.sum()))
"""


@pytest.mark.needs_gpu("faults")
def test_a_write_through_a_read_only_alias_faults() -> None:
    assert faults(READ_ONLY, "shown += 1", printed="3145728.0\n", device="cuda")
