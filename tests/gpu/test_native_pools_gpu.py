"""NativeMemoryPool in captures, and on threads that have used no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import torch_vmm
from tests.helpers import MIB
from torch_vmm import NativeMemoryPool


@pytest.fixture
def native() -> Iterator[NativeMemoryPool]:
    pool = NativeMemoryPool("cuda")
    yield pool
    pool.destroy(force=True)


def test_a_capture_refuses_both_and_goes_on(native: NativeMemoryPool) -> None:
    address = native.alloc_async(MIB)
    counted = torch.zeros(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        counted += 1
        captured = torch.cuda.current_stream()
        with pytest.raises(torch_vmm.NotAvailableError, match="the stream is being captured"):
            native.alloc_async(MIB, captured)
        with pytest.raises(torch_vmm.NotAvailableError, match="the stream is being captured"):
            native.free_async(address, captured)
        counted += 1
    graph.replay()
    assert counted.tolist() == [2] * 4
    native.free_async(address)


def test_a_thread_that_has_used_no_gpu(native: NativeMemoryPool) -> None:
    stream = torch.cuda.Stream()
    with ThreadPoolExecutor(1) as pool:
        address = pool.submit(native.alloc_async, MIB, stream).result()
        stream.synchronize()
        pool.submit(native.free_async, address, stream).result()
