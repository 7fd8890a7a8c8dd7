"""Sparse tensors under queued work: what reads zeros is waited for, what reads memory that goes is not."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

import torch_vmm
from tests.gpu.conftest import Busy
from tests.helpers import PAGE, holds, is_zero, stamp
from torch_vmm import _C

MakePool = Callable[..., torch_vmm.VirtualMemoryPool]
ROW = PAGE // 4


def table(rows: int = 1 << 12, zeros: bool = True) -> torch_vmm.SparseTensor:
    return torch_vmm.sparse((rows, ROW), torch.uint8, "cuda", zeros)


def test_zeros_that_queued_work_reads_stay_until_it_is_done(busy: Busy) -> None:
    tensor = table()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        running = busy(50)
        read = tensor[:64].clone()
    tensor.commit(slice(8, 12))
    assert running.query()
    stamp(tensor[8:12], 1)
    side.synchronize()
    assert is_zero(read)
    with torch.cuda.stream(side):
        busy(50)
        read = tensor[8:12].clone()
    tensor.decommit(slice(8, 12))
    assert is_zero(tensor[:64])
    side.synchronize()
    assert holds(read, 1)


def test_without_zeros_nobody_waits(busy: Busy) -> None:
    tensor = table(zeros=False)
    tensor.commit(slice(0, 16))
    stamp(tensor[:16], 2)
    expected = tensor[8:16].cpu()
    running = busy(1500)
    read = tensor[8:16].clone()
    tensor.decommit(slice(8, 16))
    tensor.commit(slice(16, 64))
    assert not running.query()
    assert torch.equal(read.cpu(), expected)
    tensor.commit(slice(8, 16))  # the same addresses
    assert is_zero(tensor[8:16])


def test_one_that_dies_while_it_is_read(busy: Busy, make_pool: MakePool, memory: _C.Device) -> None:
    pool = make_pool("64MiB")
    with pool:
        tensor = table()
    tensor.commit(slice(4, 8))
    stamp(tensor[4:8], 3)
    running = busy(200)
    read = tensor[:16].clone()
    del tensor
    gc.collect()
    assert not running.query()
    assert pool.memory_allocated() == 0  # its memory goes at once, its addresses later
    assert holds(read[4:8], 3)
    memory.empty_cache()
    assert not [each for each in memory.pools() if "sparse" in each.name]


def test_a_graph_reads_what_is_committed_later() -> None:
    tensor = table()
    out = torch.ones(2 * ROW, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(tensor[7:9].view(-1))
    graph.replay()
    assert is_zero(out)
    tensor.commit(slice(8, 9))
    stamp(tensor[8], 4)
    graph.replay()
    assert is_zero(out[:ROW])
    assert holds(out[ROW:], 4)
    tensor.decommit(slice(8, 9))
    graph.replay()
    assert is_zero(out)


@pytest.mark.parametrize("on_side_stream", [False, True])
def test_pages_begin_as_zero_on_the_stream_that_commits(on_side_stream: bool, make_pool: MakePool) -> None:
    pool = make_pool("64MiB", physical_limit=8 * PAGE)
    stream = torch.cuda.Stream() if on_side_stream else torch.cuda.current_stream()
    with pool:
        tensor = table()
    for round_ in range(6):
        with torch.cuda.stream(stream):
            rows = slice(round_ * 100, round_ * 100 + 32)
            tensor.commit(rows)
            total = tensor[rows].long().sum()
            tensor[rows].fill_(1)
        stream.synchronize()
        assert int(total) == 0
        tensor.decommit(rows)
