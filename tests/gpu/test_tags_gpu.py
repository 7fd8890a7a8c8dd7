"""Tags over several streams, in graphs and MemPools; sealing waits for writers, and a write after that faults."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

import torch_vmm
from tests.gpu.conftest import Busy
from tests.gpu.patterns import intact, queue_stamp
from tests.helpers import MIB, faults
from torch_vmm import sealed

pytestmark = pytest.mark.usefixtures("random_generator_is_ready")

MakePool = Callable[..., torch_vmm.VirtualMemoryPool]


def block(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def tag_of(pool: torch_vmm.VirtualMemoryPool, tensor: torch.Tensor) -> str | None:
    (found,) = {
        segment.get("tag")
        for segment in pool.memory_snapshot()
        if segment["address"] <= tensor.data_ptr() < segment["address"] + segment["total_size"]
    }
    return found


def test_streams_share_no_chunk_of_another_tag(make_pool: MakePool) -> None:
    pool = make_pool("1GiB")
    streams = [torch.cuda.Stream() for _ in range(3)]
    kept: list[tuple[str | None, torch.Tensor, int]] = []
    for step in range(60):
        name = ("weights", "cache", None)[step % 3]
        with torch.cuda.stream(streams[step // 3 % 3]), pool.tag(name) if name else pool:
            block(1 + step * 4099 % 70_000)  # freed on that stream
            kept.append((name, queue_stamp(block(1 + step * 77_773 % (3 * MIB)), step), step))
        if step % 4 == 3:
            del kept[step % len(kept)]
    torch.cuda.synchronize()
    assert all(tag_of(pool, tensor) == name for name, tensor, _ in kept)
    assert all(intact(tensor, seed) for _, tensor, seed in kept)
    assert set(pool.tags) == {"weights", "cache"}


def test_a_graphs_memory_is_of_the_tag(make_pool: MakePool) -> None:
    pool = make_pool("1GiB")
    graph = torch.cuda.CUDAGraph()
    with pool.tag("activations"), torch.cuda.graph(graph):
        out = block(8 * MIB).fill_(3)
    graph.replay()
    assert bool((out == 3).all())
    assert pool.tags == {"activations": 8 * MIB}
    assert {(each.get("tag"), tuple(each["segment_pool_id"])) for each in pool.memory_snapshot()} == {
        ("activations", tuple(graph.pool()))
    }
    with pool.tag("others"), pytest.raises(torch_vmm.InvalidArgumentError):
        pool.seal(out)  # captured work writes to it whenever it is replayed
    del out, graph
    gc.collect()
    assert pool.tags["activations"] == 0


def test_a_mem_pool_keeps_tags_apart(make_pool: MakePool) -> None:
    pool, mem_pool = make_pool("1GiB"), torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(mem_pool):
        with pool.tag("weights"):
            weights = block(1000)
        with pool:
            plain = block(1000)
    assert (tag_of(pool, weights), tag_of(pool, plain)) == ("weights", None)
    assert {tuple(each["segment_pool_id"]) for each in pool.memory_snapshot()} == {tuple(mem_pool.id)}
    assert pool.tags == {"weights": 1024}


def test_a_seal_of_a_tag_waits_for_queued_writers(busy: Busy, make_pool: MakePool) -> None:
    pool = make_pool("1GiB")
    with pool.tag("weights"):
        tensors = [block(size) for size in (100, 40_000, 5 * MIB)]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        running = busy(50)
        for tensor in tensors:
            tensor.fill_(3)
    pool.seal(tensors)
    assert running.query()
    assert all(map(sealed, tensors))
    assert all(bool((tensor == 3).all()) for tensor in tensors)
    with pool.tag("weights"):
        more = queue_stamp(block(40_000), 1)
    assert intact(more, 1)
    del tensors
    gc.collect()
    with pool.tag("weights"):
        assert intact(queue_stamp(block(5 * MIB), 2), 2)


PROGRAM = """
import torch, torch_vmm
torch_vmm.enable()
pool = torch_vmm.current_pool()
with pool.tag("weights"):
    weight, bias = torch.full((1024, 1024), 2.0, device="cuda"), torch.ones(10, device="cuda")
pool.seal([weight, bias])
print(float(weight.sum()), float(bias.sum()))
"""


@pytest.mark.needs_gpu("faults")
def test_a_write_to_what_is_sealed_faults() -> None:
    assert faults(PROGRAM, "bias += 1", printed="2097152.0 10.0\n", device="cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_poison_is_there_before_anybody_reads(make_pool: MakePool, dtype: torch.dtype, busy: Busy) -> None:
    pool = make_pool("512MiB")
    side = torch.cuda.Stream()
    with pool.tag("cache"):
        lost = torch.ones(64 * MIB // dtype.itemsize, dtype=dtype, device="cuda")
    with pool:
        kept = torch.arange(MIB, device="cuda")
    for release in (False, True):
        pool.sleep({"cache": "discard", "": "host"}, release=release, poison=True)
        with make_pool("512MiB"):
            block(64 * MIB).fill_(1)  # may have the memory meanwhile
        busy(20)
        handle = pool.wake(blocking=False)
        handle.wait_for(lost)
        with torch.cuda.stream(side):
            read = torch.stack([lost.isnan().all(), lost.view(torch.int16).eq(-1).all()])
        handle.wait()
        side.synchronize()
        assert read.tolist() == [True, True]
        assert torch.equal(kept, torch.arange(MIB, device="cuda"))
        lost.zero_()
