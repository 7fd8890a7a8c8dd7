"""The memory of a capture: what it may use again, what is its own alone, and what happens beside it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import torch_vmm
from tests.gpu.conftest import Busy, Sleep
from tests.gpu.memory import bytes_in, lies_in, meets, segments_of, settle
from tests.gpu.patterns import intact, queue_stamp
from tests.gpu.workloads.graphs import MODES, captured, chain, numbers, other_stream
from tests.helpers import MIB

pytestmark = pytest.mark.usefixtures("random_generator_is_ready")

MakePool = Callable[..., torch_vmm.VirtualMemoryPool]
MakeShared = Callable[..., torch_vmm.SharedMemoryPool]


def test_a_capture_reuses_what_it_freed(make_pool: MakePool) -> None:
    model = make_pool("1GiB", physical_limit=80 * MIB)
    with model:
        x = numbers(16)
        graph, out = captured(lambda: chain(x, steps=20))  # 640 MiB of temporaries
    graph.replay()
    assert model.max_memory_reserved() <= 80 * MIB
    assert model.memory_allocated() == 32 * MIB
    assert torch.equal(out, chain(numbers(16), steps=20))


def test_what_a_capture_freed_serves_only_captures_in_the_same_pool(make_pool: MakePool) -> None:
    model = make_pool("1GiB")
    with model:
        x = numbers(8)
        graph, out = captured(lambda: chain(x).sum())
        mine = segments_of(graph.pool())
        assert sum(segment["total_size"] for segment in mine) >= 16 * MIB
        others = [queue_stamp(torch.empty(size, dtype=torch.uint8, device="cuda"), size) for size in range(1, 50)]
        others += [queue_stamp(torch.empty(size * MIB, dtype=torch.uint8, device="cuda"), size) for size in range(1, 9)]
        assert not any(meets(other, mine) for other in others)
        stranger, strange = captured(lambda: chain(x).sum())
        assert not meets(strange, mine)
        reserved = model.memory_reserved()
        sharer, shared = captured(lambda: chain(x).sum() + 1, pool=graph.pool())
        settle()
        assert model.memory_reserved() <= reserved
        assert lies_in(shared, segments_of(graph.pool()))
    for one in (graph, stranger, sharer):
        one.replay()
    expected = chain(numbers(8)).sum()
    assert [int(out), int(strange), int(shared)] == [int(expected), int(expected), int(expected) + 1]
    assert all(intact(other, size) for other, size in zip(others, [*range(1, 50), *range(1, 9)], strict=True))


def test_streams_that_fork_and_join_in_a_capture() -> None:
    x = numbers(4)
    sides = [other_stream() for _ in range(3)]

    def work() -> torch.Tensor:
        main = torch.cuda.current_stream()
        parts = []
        for number, side in enumerate(sides):
            side.wait_stream(main)
            with torch.cuda.stream(side):
                temporary = x * (number + 2)
                parts.append(temporary + number)
                del temporary
        total = x + 1
        for part, side in zip(parts, sides, strict=True):
            main.wait_stream(side)
            part.record_stream(main)
            total = total + part
        del parts, part
        late = [torch.full_like(x, -1) for _ in range(4)]  # would show what is reused too early
        return total + late[0] + 1

    graph, out = captured(work)
    pool_id = graph.pool()
    for seed in range(20):
        x.copy_(numbers(4, seed))
        graph.replay()
        assert torch.equal(out, numbers(4, seed) * 10 + 4)
    before = torch.cuda.memory_allocated()
    del out, graph
    settle()
    assert torch.cuda.memory_allocated() == before - 4 * MIB
    assert segments_of(pool_id) == []


@pytest.mark.parametrize("size", [1000, 4 * MIB])
def test_a_block_that_another_stream_still_uses_is_not_reused_within_the_capture(size: int, sleep: Sleep) -> None:
    source = queue_stamp(torch.empty(size, dtype=torch.uint8, device="cuda"), 3)
    result = torch.empty_like(source)
    side = other_stream()
    addresses = []

    def work() -> torch.Tensor:
        main = torch.cuda.current_stream()
        block = source.clone()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            sleep(5)
            result.copy_(block)
        block.record_stream(side)
        addresses[:] = [block.data_ptr()]
        del block
        later = torch.empty_like(source)
        addresses.append(later.data_ptr())
        later.fill_(0xAA)
        main.wait_stream(side)
        return later

    graph, later = captured(work)
    assert addresses[0] != addresses[1]
    for _ in range(3):
        result.zero_()
        graph.replay()
        assert intact(result, 3)
        assert bool((later == 0xAA).all())


def test_a_block_freed_on_a_stream_that_has_not_joined_is_not_the_others(sleep: Sleep) -> None:
    x = numbers(4)
    result = torch.empty_like(x)
    side = other_stream()
    addresses = []

    def work() -> None:
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            block = x + 1
            sleep(5)
            torch.mul(block, 2, out=result)
            addresses[:] = [block.data_ptr()]
            del block
        later = torch.full_like(x, -7)
        addresses.append(later.data_ptr())
        main.wait_stream(side)

    graph, _ = captured(work)
    assert addresses[0] != addresses[1]
    graph.replay()
    assert torch.equal(result, (x + 1) * 2)


def test_what_a_capture_recorded_on_a_stream_is_no_obstacle_to_a_checkpoint(busy: Busy) -> None:
    x = numbers(4)
    side = other_stream()

    def work() -> torch.Tensor:
        main = torch.cuda.current_stream()
        temporary = x + 1
        side.wait_stream(main)
        with torch.cuda.stream(side):
            out = temporary * 2
            temporary.record_stream(side)
        del temporary
        main.wait_stream(side)
        return out

    graph, out = captured(work)
    with torch.cuda.stream(side):
        busy(50)  # other work, by then
    torch._C._cuda_getCheckpointState(out.get_device(), graph.pool())
    graph.replay()
    assert torch.equal(out, (numbers(4) + 1) * 2)


def test_blocks_recorded_on_streams_are_free_when_the_capture_is_over(make_pool: MakePool) -> None:
    model = make_pool("1GiB")
    side = other_stream()
    with model:
        x = numbers(4)

        def work() -> torch.Tensor:
            main = torch.cuda.current_stream()
            block = x * 5
            side.wait_stream(main)
            with torch.cuda.stream(side):
                out = block + 1
            block.record_stream(side)
            main.wait_stream(side)
            return out

        graph, out = captured(work)
        settle()
        again, second = captured(work, pool=graph.pool())
    settle()
    assert model.memory_allocated() == 12 * MIB
    assert model.memory_stats()["active_bytes.all.current"] == model.memory_allocated()
    for one, result in ((graph, out), (again, second)):
        one.replay()
        assert torch.equal(result, x * 5 + 1)


@pytest.mark.parametrize("recorded_on", ["the capture's stream", "a side stream"])
def test_an_ordinary_block_freed_during_a_capture(make_pool: MakePool, busy: Busy, recorded_on: str) -> None:
    model = make_pool("1GiB")
    side = other_stream()
    x = numbers(1)
    held = [queue_stamp(bytes_in(model, 8 * MIB), 1)]
    copy = torch.empty_like(held[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        if recorded_on == "a side stream":
            with torch.cuda.stream(side):
                busy(20)
                copy.copy_(held[0])
            held[0].record_stream(side)
        else:
            held[0].record_stream(torch.cuda.current_stream())
        held.clear()
        out = x + 1
        filler = queue_stamp(bytes_in(model, 8 * MIB), 2)  # of the graph
    ordinary = queue_stamp(bytes_in(model, 8 * MIB), 3)
    graph.replay()
    assert torch.equal(out, x + 1)
    assert intact(filler, 2)
    assert intact(ordinary, 3)
    if recorded_on == "a side stream":
        torch.cuda.synchronize()
        assert intact(copy, 1)
    settle()
    assert model.memory_allocated() == 16 * MIB
    assert model.memory_stats()["active_bytes.all.current"] == 16 * MIB


@pytest.mark.parametrize("mode", MODES)
def test_emptying_caches_and_reading_numbers_does_not_disturb_a_capture(make_shared: MakeShared, mode: str) -> None:
    shared = make_shared("256MiB")
    model, other = shared.register_model("captured"), shared.register_model("other")
    with model:
        x = numbers(4)
    held = [bytes_in(other, 32 * MIB)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with model, torch.cuda.graph(graph, capture_error_mode=mode):
        temporary = x * 3
        address = temporary.data_ptr()
        del temporary
        held.clear()
        torch.cuda.empty_cache()
        model.empty_cache()
        other.trim()
        assert torch.cuda.memory_stats()["allocated_bytes.all.current"] == torch.cuda.memory_allocated()
        assert model.memory_snapshot()
        assert lies_in(x, torch.cuda.memory_snapshot())
        out = torch.full_like(x, 6)
        assert out.data_ptr() == address, "what the capture had freed went away"
        out = out + x
    graph.replay()
    assert torch.equal(out, x + 6)


def test_pages_freed_within_a_capture_go_once_it_is_over(make_pool: MakePool) -> None:
    pool = make_pool("2GiB")
    pool.allocate(0, "1GiB")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = torch.zeros(1, device="cuda")
        pool.deallocate(0, "1GiB")
    torch.cuda.synchronize()
    device = torch_vmm._C.device("cuda", 0)
    for _ in range(200):
        torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
    assert device.committed_bytes < 600 << 20
    del kept, graph
