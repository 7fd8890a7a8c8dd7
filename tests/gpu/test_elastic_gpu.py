"""Elastic tensors that kernels read meanwhile: growth under queued work, graphs, shrinking behind the clock."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import torch_vmm
from tests.gpu.conftest import Busy
from tests.helpers import PAGE, holds, is_zero, stamp

MakePool = Callable[..., torch_vmm.VirtualMemoryPool]
ROW = PAGE // 4


def rows(n: int, most: int = 256) -> torch_vmm.ElasticTensor:
    return torch_vmm.elastic((n, ROW), torch.uint8, "cuda", (most, ROW))


def test_it_grows_while_queued_work_reads_it(busy: Busy) -> None:
    tensor = stamp(rows(4), 1)
    running = busy(1000)  # mapping took more than 200 ms where other processes made their contexts
    read = tensor[:4].clone()  # queued behind the kernel
    tensor.resize_(100)
    assert not running.query()  # growing waited for nobody
    tensor[4:].fill_(7)
    assert holds(read, 1)
    assert bool((tensor[4:] == 7).all())


def test_it_grows_on_another_stream_while_one_reads(busy: Busy) -> None:
    tensor = stamp(rows(8), 2)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        busy(100)
        read = tensor.clone()
    tensor.resize_(200)
    tensor[8:].fill_(3)
    torch.cuda.current_stream().wait_stream(side)
    assert holds(read, 2)
    assert holds(tensor[:8], 2)


def test_a_graph_goes_on_reading_it(make_pool: MakePool) -> None:
    tensor = rows(16)
    out = torch.zeros(ROW, dtype=torch.uint8, device="cuda")
    head = tensor[:4]
    stamp(tensor, 3)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(head[2])
    for seed, n in ((4, 200), (5, 64), (6, 256)):
        tensor.resize_(n)
        if n == 64:
            tensor.shrink_to_fit()
        stamp(head[2], seed)
        graph.replay()
        assert holds(out, seed)


def test_it_grows_in_a_capture() -> None:
    tensor = rows(4)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensor.resize_(64)
        tensor.fill_(9)
    graph.replay()
    assert bool((tensor == 9).all())
    tensor.zero_()
    graph.replay()
    assert bool((tensor == 9).all())


def test_in_a_capture_it_does_not_grow_over_pages_that_it_gave_back() -> None:
    """Those are zeroed first, which would be in the graph."""
    tensor = torch_vmm.elastic((64, PAGE // 4), max_shape=(256, PAGE // 4))
    tensor.fill_(1)
    torch.cuda.synchronize()
    tensor.resize_(61)
    tensor.shrink_to_fit()  # the chunk below has rows left, and stays mapped
    torch.cuda.synchronize()
    count = torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        count += 1
        with pytest.raises(torch_vmm.NotAvailableError, match="before the capture"):
            tensor.resize_(64)
    assert tensor.shape[0] == 61
    graph.replay()
    assert count.item() == 1
    tensor.resize_(200)
    assert not bool(tensor[61:].any())


def test_shrinking_waits_for_readers_and_not_the_caller(make_pool: MakePool, busy: Busy) -> None:
    pool = make_pool("64MiB", physical_limit=32 * PAGE)
    with pool:
        tensor = stamp(rows(128), 4)
    expected = tensor[8:].cpu()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        running = busy(200)
        read = tensor[8:].clone()  # nobody records that stream
    tensor.resize_(8)
    tensor.shrink_to_fit()
    assert not running.query()
    assert pool.memory_allocated() == 2 * PAGE
    with pool:  # its memory is wanted elsewhere at once
        stamp(torch.empty(28 * PAGE, dtype=torch.uint8, device="cuda"), 8)
    side.synchronize()
    assert torch.equal(read.cpu(), expected)


def test_new_rows_are_zero_after_another_model_had_the_memory(
    make_shared: Callable[..., torch_vmm.SharedMemoryPool],
) -> None:
    shared = make_shared("64MiB")
    llama, qwen = (shared.register_model(name, "64MiB") for name in ("llama", "qwen"))
    with qwen:
        secret = stamp(torch.empty(30 * PAGE, dtype=torch.uint8, device="cuda"), 8)
    del secret
    with llama:
        tensor = rows(4)
    tensor.resize_(100)
    assert is_zero(tensor)


@pytest.mark.parametrize("stream_of_growth", ["current", "side"])
def test_a_reader_on_the_stream_that_grew_it_sees_zeros(stream_of_growth: str) -> None:
    tensor = rows(1)
    stream = torch.cuda.current_stream() if stream_of_growth == "current" else torch.cuda.Stream()
    for n in (100, 10, 200, 0, 50):
        with torch.cuda.stream(stream):
            tensor.resize_(n)
            tensor.shrink_to_fit()
            tensor.resize_(n + 8)
            total = tensor[n:].sum()
            tensor.fill_(1)
        stream.synchronize()
        assert n % 4 != 0 or int(total) == 0
