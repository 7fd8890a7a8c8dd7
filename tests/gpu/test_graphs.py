"""CUDA graphs: what a capture computes, which memory it takes, and how long that stays.

Graphs of several models, and captures that fail, are in test_graph_pools.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torch_vmm
from tests.gpu.conftest import Busy
from tests.gpu.memory import bytes_in, places, segments_of, settle
from tests.gpu.native import both
from tests.gpu.patterns import intact, queue_check, queue_stamp
from tests.gpu.workloads import graphs
from tests.gpu.workloads.graphs import MODES, POOLS, captured, chain, numbers, other_stream
from tests.helpers import MIB, rounded
from torch_vmm import pool_of

pytestmark = pytest.mark.usefixtures("random_generator_is_ready")

MakePool = Callable[..., torch_vmm.VirtualMemoryPool]
MakeShared = Callable[..., torch_vmm.SharedMemoryPool]
Sleep = Callable[[float], None]


@pytest.fixture
def sleep(_cycles_per_ms: float) -> Sleep:
    """``sleep(ms)`` queues or captures a kernel of that length."""
    return lambda ms: torch.cuda._sleep(int(ms * _cycles_per_ms))


def lies_in(tensor: torch.Tensor, segments: list[dict[str, Any]]) -> bool:
    first = tensor.untyped_storage().data_ptr()
    last = first + tensor.untyped_storage().nbytes() - 1
    return any(s["address"] <= first and last < s["address"] + s["total_size"] for s in segments)


def meets(tensor: torch.Tensor, segments: list[dict[str, Any]]) -> bool:
    first = tensor.untyped_storage().data_ptr()
    last = first + tensor.untyped_storage().nbytes() - 1
    return any(s["address"] <= last and first < s["address"] + s["total_size"] for s in segments)


# -- What a graph computes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "on_side_stream"), [("global", False), ("thread_local", True), ("relaxed", True)], ids=MODES
)
@pytest.mark.parametrize("pool", POOLS)
def test_a_graph_computes_and_counts_as_under_the_native_allocator(pool: str, mode: str, on_side_stream: bool) -> None:
    ours, native = both(graphs.counted, pool=pool, mode=mode, on_side_stream=on_side_stream)
    assert ours == native
    assert ours["right"]
    assert ours["captured"] == ours["replayed"]
    assert ours["captured"]["allocated_bytes.all"] == 2 * MIB
    assert set(ours["ended"].values()) == {0}


def test_random_numbers_of_a_graph_are_those_of_the_native_allocator() -> None:
    ours, native = both(graphs.random_numbers, seed=5, replays=4)
    assert ours == native
    assert len(set(ours)) == len(ours)


@pytest.mark.parametrize("training", [graphs.graphed_callables, graphs.whole_step], ids=lambda f: f.__name__)
def test_graphed_training_gives_what_eager_training_gives(training: Callable[..., list[float]]) -> None:
    eager = training(graphed=False)
    ours, native = both(training, graphed=True)
    assert ours == native
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(eager), rtol=1e-4, atol=1e-6)
    assert eager[0] != eager[1]


def test_graphed_training_in_a_model_takes_that_models_memory(make_pool: MakePool) -> None:
    """Backward runs on autograd's threads: their memory is the capture's too."""
    model = make_pool("4GiB")
    default = torch_vmm.current_pool("cuda")
    before = default.memory_allocated()
    with model:
        layer = graphs.net(256)
        x = torch.randn(128, 256, device="cuda")

        def step() -> torch.Tensor:
            loss = layer(x).square().mean()
            gradients = torch.autograd.grad(loss, list(layer.parameters()))
            return torch.cat([gradient.flatten() for gradient in gradients])

        graph, gradients = captured(step)
        expected = step()
    graph.replay()
    torch.testing.assert_close(gradients, expected)
    assert pool_of(gradients) is model
    assert lies_in(gradients, segments_of(graph.pool()))
    assert not meets(x, segments_of(graph.pool()))
    assert default.memory_allocated() == before


def test_a_kept_graph_can_be_instantiated_again() -> None:
    x = numbers(1)
    graph, out = captured(lambda: chain(x), keep=True)
    assert graph.raw_cuda_graph() != 0
    for seed in range(3):
        graph.instantiate()
        x.copy_(numbers(1, seed))
        graph.replay()
        assert torch.equal(out, chain(numbers(1, seed)))


def test_dropout_in_a_graphed_module_draws_anew_each_time() -> None:
    layer = nn.Dropout(0.5).cuda().train()
    x = torch.ones(10_000, device="cuda")
    graph, out = captured(lambda: layer(x))
    found = []
    for _ in range(3):
        graph.replay()
        found.append(out.clone())
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])
    assert all(0.4 < float((one == 0).float().mean()) < 0.6 for one in found)


# -- Memory inside a capture -------------------------------------------------------------------------------------------


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


# -- For how long ------------------------------------------------------------------------------------------------------


def test_a_graphs_memory_stays_while_it_lives_and_goes_with_it(make_shared: MakeShared) -> None:
    shared = make_shared(112 * MIB)
    owner, other = shared.register_model("owner"), shared.register_model("other")
    with owner:
        x, result = numbers(8), torch.empty_like(numbers(8))
        settle()
        before = owner.memory_reserved()

        def work() -> torch.Tensor:
            temporary = chain(x)
            result.copy_(temporary)
            return torch.cat([temporary, temporary, temporary])

        graph, out = captured(work)
    pool_id = graph.pool()
    held = places(segments_of(pool_id))
    assert sum(size for _, size in held) >= 32 * MIB
    del out
    assert owner.memory_allocated() == 16 * MIB  # x and result: the graph holds nothing that is counted as in use
    for give_back in (torch.cuda.empty_cache, owner.empty_cache, owner.compact, owner.trim):
        give_back()
        assert places(segments_of(pool_id)) == held
    free = shared.physical_limit - shared.global_stats().physical_usage
    with pytest.raises(torch.OutOfMemoryError):
        bytes_in(other, free + 16 * MIB)
    filler = queue_stamp(bytes_in(other, free // (2 * MIB) * 2 * MIB), 9)
    for seed in range(5):
        x.copy_(numbers(8, seed))
        graph.replay()
        assert torch.equal(result, chain(numbers(8, seed)))
    assert places(segments_of(pool_id)) == held
    assert intact(filler, 9)
    del graph
    queue_stamp(bytes_in(other, 16 * MIB), 10)  # at once: what was the graph's can be had
    assert intact(filler, 9)
    settle()
    assert segments_of(pool_id) == []
    assert owner.memory_reserved() == before


def test_nothing_is_left_of_graphs_that_are_gone() -> None:
    x = numbers(4)
    settle()
    before = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), len(torch.cuda.memory_snapshot()))
    for _ in range(30):
        graph, out = captured(lambda: (chain(x), x.sum()))
        graph.replay()
        del graph, out
    settle()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), len(torch.cuda.memory_snapshot())) == before


def test_outputs_outlive_their_graph(make_pool: MakePool) -> None:
    model = make_pool("1GiB")
    with model:
        x = numbers(16)
        settle()
        before = model.memory_reserved()
        graph, out = captured(lambda: chain(x))
        graph.replay()
        pool_id, during = graph.pool(), model.memory_reserved()
        del graph
        settle()
        assert model.memory_allocated() == 32 * MIB
        assert 32 * MIB <= model.memory_reserved() < during
        assert lies_in(out, segments_of(pool_id))
        for seed in range(8):
            queue_stamp(torch.empty(16 * MIB, dtype=torch.uint8, device="cuda"), seed)
        assert torch.equal(out, chain(x))
    assert pool_of(out) is model
    del out
    settle()
    assert segments_of(pool_id) == []
    assert model.memory_allocated() == 16 * MIB
    assert model.memory_reserved() == before


def test_a_shared_pool_stays_until_the_last_graph_is_gone(make_pool: MakePool) -> None:
    model = make_pool("1GiB")
    with model:
        x = numbers(8)
        settle()
        before = model.memory_reserved()
        handle = torch.cuda.graph_pool_handle()
        made = [captured(lambda number=number: chain(x + number).sum(), pool=handle) for number in range(3)]
    held = places(segments_of(handle))
    assert all(tuple(graph.pool()) == tuple(handle) for graph, _ in made)
    while made:
        for number, (graph, out) in enumerate(made):
            graph.replay()
            assert int(out) == int(chain(x + number).sum())
        del graph, out
        made.pop()
        settle()
        assert places(segments_of(handle)) == (held if made else [])
    assert model.memory_reserved() == before


@pytest.mark.parametrize("how", ["deleted", "reset"])
def test_a_graph_that_ends_during_its_replay_keeps_its_memory_until_the_replay_is_over(
    make_shared: MakeShared, sleep: Sleep, how: str
) -> None:
    shared = make_shared(96 * MIB)
    owner, other = shared.register_model("owner"), shared.register_model("other")
    with owner:
        x = queue_stamp(torch.empty(16 * MIB, dtype=torch.uint8, device="cuda"), 5)
        result = torch.empty_like(x)

        def work() -> torch.Tensor:
            temporary = x.clone()
            late = torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")
            sleep(50)
            result.copy_(temporary)
            return late.fill_(0xAA)

        graph, out = captured(work)
    side = other_stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        graph.replay()
    del out
    if how == "reset":
        graph.reset()
    else:
        del graph
    # 16 MiB are free: the rest is what the replay reads and writes.
    taken = queue_stamp(bytes_in(other, 48 * MIB), 7)
    torch.cuda.synchronize()
    assert intact(taken, 7)
    assert intact(result, 5)


@pytest.mark.parametrize("what", ["aligned", "alias", "elastic", "sparse", "pages"])
def test_what_a_capture_makes_at_addresses_of_its_own_lives_as_long_as_its_graph(
    make_pool: MakePool, what: str
) -> None:
    pool = make_pool("1GiB")
    aliased = torch_vmm.aligned((MIB,))

    def make() -> torch.Tensor:
        if what == "aligned":
            return torch_vmm.aligned((MIB,))
        if what == "alias":
            return torch_vmm.alias(aliased)
        if what == "elastic":
            return torch_vmm.elastic((MIB,), max_shape=(4 * MIB,))
        if what == "sparse":
            sparse = torch_vmm.sparse((MIB,))
            sparse.commit(())
            return sparse
        pool.allocate(0, 4 * MIB)
        return pool.tensor(0, (MIB,), torch.float32)

    out = torch.zeros(8, device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = make()
        made.fill_(2)
        out.copy_(made[-8:])
    del made
    settle()
    for _ in range(2):
        out.zero_()
        graph.replay()
        assert out.tolist() == [2] * 8
    if what == "pages":
        with pytest.raises(torch_vmm.StillInUseError):
            pool.deallocate(0, 4 * MIB)
    del graph
    settle()
    if what == "pages":
        pool.deallocate(0, 4 * MIB)
    assert torch.cuda.memory_allocated() == before


def test_a_graph_replayed_on_other_streams() -> None:
    x = numbers(2)
    graph, out = captured(lambda: chain(x))
    for seed in range(8):
        stream = other_stream()
        with torch.cuda.stream(stream):
            stream.wait_stream(torch.cuda.default_stream())
            x.copy_(numbers(2, seed))
            graph.replay()
            verdict = (out != chain(numbers(2, seed))).sum()
        torch.cuda.default_stream().wait_stream(stream)
        assert int(verdict) == 0


# -- Beside other threads ----------------------------------------------------------------------------------------------


@pytest.mark.no_memcheck  # minutes: each thread waits for the other's every call
@pytest.mark.parametrize("mode", MODES)
def test_captures_while_another_thread_works_in_another_model(make_shared: MakeShared, mode: str) -> None:
    shared = make_shared("256MiB")
    mine, theirs = shared.register_model("mine"), shared.register_model("theirs")
    stream = other_stream()
    stop = threading.Event()
    verdicts: list[torch.Tensor] = []

    def work() -> None:  # waits for nothing on the GPU: a capture in global mode forbids that to all threads
        turn = 0
        with torch.cuda.stream(stream):
            while not stop.is_set():
                block = queue_stamp(bytes_in(theirs, 1 + turn * 777_777 % (24 * MIB)), turn)
                verdicts.append(queue_check(block, turn))
                del block
                turn += 1

    with mine:
        x = numbers(2)
        expected = chain(x)
    torch.cuda.synchronize()
    thread = threading.Thread(target=work)
    thread.start()
    try:
        made = []
        for _ in range(12):
            with mine:
                made.append(captured(lambda: chain(x), mode=mode))
            for graph, _ in made:
                graph.replay()
            del graph, _
        assert all(torch.equal(out, expected) for _, out in made)
    finally:
        stop.set()
        thread.join()
    assert len(verdicts) > 12
    stream.synchronize()  # the last of them are still queued there
    assert int(torch.stack(verdicts).sum()) == 0
    segments = [segments_of(graph.pool()) for graph, _ in made]
    assert all(lies_in(out, of) for (_, out), of in zip(made, segments, strict=True))
    assert all(pool_of(out) is mine for _, out in made)
    assert theirs.memory_allocated() == 0
    del made
    settle()
    assert mine.memory_allocated() == rounded(2 * x.nbytes)


@pytest.mark.no_memcheck  # minutes: each thread waits for the other's every call
def test_two_threads_capture_at_once(make_shared: MakeShared) -> None:
    shared = make_shared("256MiB")
    barrier = threading.Barrier(2)
    one_at_a_time = threading.Lock()  # torch's own list of captures, for pinned memory, knows no threads
    wrong: list[str] = []

    def work(model: torch_vmm.VirtualMemoryPool, seed: int) -> None:
        try:
            stream = other_stream()
            with model, torch.cuda.stream(stream):
                x = numbers(2, seed)
                expected = chain(x)
                stream.synchronize()
                for turn in range(5):
                    with one_at_a_time:
                        graph = torch.cuda.CUDAGraph()
                        graph.capture_begin(capture_error_mode="thread_local")
                    barrier.wait(timeout=60)
                    out = chain(x)
                    barrier.wait(timeout=60)
                    with one_at_a_time:
                        graph.capture_end()
                    graph.replay()
                    if not torch.equal(out, expected) or pool_of(out) is not model:
                        wrong.append(f"{seed}, turn {turn}")
                    if not lies_in(out, segments_of(graph.pool())):
                        wrong.append(f"{seed}, turn {turn}: in a segment of another pool")
                    with one_at_a_time:
                        del graph
        except Exception as error:
            barrier.abort()
            wrong.append(repr(error))

    chain(numbers(2))
    models = [shared.register_model(name) for name in ("one", "other")]
    threads = [threading.Thread(target=work, args=(model, seed)) for seed, model in enumerate(models)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    settle()
    assert [model.memory_allocated() for model in models] == [0, 0]
