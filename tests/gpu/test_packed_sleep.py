"""Packed sleep beside what only CUDA has: graphs, and streams that compute or write meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.gpu.patterns import intact, queue_stamp
from tests.helpers import MIB
from torch_vmm import SharedMemoryPool

MakeShared = Callable[..., SharedMemoryPool]


def _weights(count: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(count)
    return torch.randn(count, generator=draw).mul_(0.02).to(torch.bfloat16)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().view(torch.int16)


def test_a_graph_that_was_captured_before(make_shared: MakeShared) -> None:
    model = make_shared("512MiB").register_model("model")
    host = _weights(4 * MIB + 24)
    with model:
        weights = host.cuda()
        graph = torch.cuda.CUDAGraph()
        weights.clone()  # warm
        with torch.cuda.graph(graph):
            result = weights.clone()
    graph.replay()
    for _ in range(2):
        model.sleep(packed=True)
        model.wake()
        assert torch.equal(_bits(result), _bits(host)), "what the graph had written"
        result.zero_()
        graph.replay()
        assert torch.equal(_bits(result), _bits(host))


def test_another_model_computes_meanwhile(make_shared: MakeShared) -> None:
    shared = make_shared("512MiB")
    model, other = shared.register_model("model"), shared.register_model("other")
    host = _weights(24 * MIB)
    with model:
        weights = host.cuda()
    stream = torch.cuda.Stream()
    with other, torch.cuda.stream(stream):
        theirs = [queue_stamp(torch.empty(MIB, dtype=torch.uint8, device="cuda"), seed) for seed in range(8)]
        for _ in range(3):
            handle = model.sleep(packed=True, blocking=False)
            for each in theirs:
                torch.empty_like(each).copy_(each)
            handle.wait()
            handle = model.wake(blocking=False)
            for each in theirs:
                torch.empty_like(each).copy_(each)
            handle.wait_for(weights)
            handle.wait()
            assert torch.equal(_bits(weights), _bits(host))
    torch.cuda.synchronize()
    assert all(intact(each, seed) for seed, each in enumerate(theirs))


def test_what_is_being_written_when_it_goes_is_packed_as_written(make_shared: MakeShared) -> None:
    model = make_shared("512MiB").register_model("model")
    host = _weights(8 * MIB).pin_memory()
    streams = [torch.cuda.Stream() for _ in range(3)]
    with model:
        weights = [torch.zeros(8 * MIB, dtype=torch.bfloat16, device="cuda") for _ in streams]
    torch.cuda.synchronize()
    for stream, each in zip(streams, weights, strict=True):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            each.copy_(host, non_blocking=True)
    model.sleep(packed=True)
    model.wake()
    assert all(torch.equal(_bits(each), _bits(host)) for each in weights)
