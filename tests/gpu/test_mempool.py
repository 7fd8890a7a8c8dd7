"""torch.cuda.MemPool: which region memory lies in. Which model it is of, and who pays, is another question."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.cuda import MemPool, use_mem_pool

import torch_vmm
from tests.gpu.conftest import Busy
from tests.gpu.memory import empty, pool_id_of, settle, size_of
from tests.gpu.native import both
from tests.gpu.patterns import intact, queue_stamp
from tests.gpu.workloads import mempool
from tests.gpu.workloads.graphs import captured, chain, numbers
from tests.helpers import MIB
from torch_vmm import pool_of

pytestmark = pytest.mark.usefixtures("random_generator_is_ready")

MakePool = Callable[..., torch_vmm.VirtualMemoryPool]
MakeShared = Callable[..., torch_vmm.SharedMemoryPool]


# -- As torch's own ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workload", [mempool.use_counts, mempool.ids, mempool.errors], ids=lambda f: f.__name__)
def test_answers_as_the_native_allocator_does(workload: Callable[[], dict[str, Any]]) -> None:
    ours, native = both(workload)
    assert ours == native
    assert ours


def test_counts_as_the_native_allocator_does() -> None:
    sizes = [0, 3, 5, 12, 30]  # MiB and a byte: nothing that the native one would leave unsplit
    ours, native = both(mempool.counted, mib=sizes)
    assert ours == native
    assert ours["made"]["requested_bytes.all.current"] == sum(size * MIB + 1 for size in sizes)
    assert set(ours["freed"].values()) == {0}


# -- Region and model --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("provider", ["none", "torch_vmm"])
@pytest.mark.parametrize("outer", ["the model", "the MemPool"])
def test_the_model_pays_and_the_mempool_says_where(make_pool: MakePool, outer: str, provider: str) -> None:
    model = make_pool("1GiB", name="payer")
    default = torch_vmm.current_pool("cuda")
    pool = MemPool() if provider == "none" else MemPool(torch_vmm.allocator())
    settle()
    elsewhere = default.memory_allocated(), default.memory_reserved()
    with model:
        ordinary = queue_stamp(empty(3 * MIB), 1)
    if outer == "the model":
        with model, use_mem_pool(pool):
            blocks = [queue_stamp(empty(size), size) for size in (700, MIB, 5 * MIB)]
            assert torch_vmm.current_pool("cuda") is model
    else:
        with use_mem_pool(pool), model:
            blocks = [queue_stamp(empty(size), size) for size in (700, MIB, 5 * MIB)]
            assert torch_vmm.current_pool("cuda") is model
    assert all(pool_of(block) is model for block in (*blocks, ordinary))
    assert all(pool_id_of(block) == tuple(pool.id) for block in blocks)
    assert pool_id_of(ordinary) == (0, 0)
    assert model.memory_allocated() == 1024 + 9 * MIB
    assert model.memory_stats()["requested_bytes.all.current"] == 700 + 9 * MIB
    assert model.memory_stats()["allocation.all.current"] == 4
    in_region = [s for s in model.memory_snapshot() if tuple(s["segment_pool_id"]) == tuple(pool.id)]
    assert sum(segment["total_size"] for segment in in_region) == size_of(pool) >= 6 * MIB
    assert model.memory_reserved() == sum(segment["total_size"] for segment in model.memory_snapshot())
    assert (default.memory_allocated(), default.memory_reserved()) == elsewhere
    assert intact(ordinary, 1)
    assert all(intact(block, size) for block, size in zip(blocks, (700, MIB, 5 * MIB), strict=True))


def test_one_mempool_in_several_models_has_a_region_in_each(make_shared: MakeShared) -> None:
    shared = make_shared("256MiB")
    models = [shared.register_model(name) for name in ("one", "other")]
    pool = MemPool()
    blocks = []
    with use_mem_pool(pool):
        for turn in range(8):
            with models[turn % 2]:
                blocks.append(queue_stamp(empty(4 * MIB), turn))
        outside = queue_stamp(empty(4 * MIB), 8)
    assert [model.memory_allocated() for model in models] == [16 * MIB] * 2
    assert all(pool_of(block) is models[turn % 2] for turn, block in enumerate(blocks))
    assert pool_of(outside) is torch_vmm.current_pool("cuda")
    assert all(pool_id_of(block) == tuple(pool.id) for block in (*blocks, outside))
    assert size_of(pool) >= 36 * MIB
    # What one model frees in it, the other cannot have without paying for it.
    del blocks[::2]
    with use_mem_pool(pool), models[1]:
        blocks.append(queue_stamp(empty(12 * MIB), 9))
    assert [model.memory_allocated() for model in models] == [0, 28 * MIB]
    assert models[1].memory_reserved() >= 28 * MIB
    assert all(intact(block, seed) for block, seed in zip(blocks, (1, 3, 5, 7, 9), strict=True))
    assert intact(outside, 8)


def test_the_models_limit_holds_in_a_mempool(make_pool: MakePool) -> None:
    model = make_pool("1GiB", physical_limit=64 * MIB, name="narrow")
    pool = MemPool()
    with model:
        ordinary = queue_stamp(empty(24 * MIB), 1)
        with use_mem_pool(pool):
            inside = queue_stamp(empty(24 * MIB), 2)
            with pytest.raises(torch.OutOfMemoryError, match="narrow"):
                empty(24 * MIB)
        with pytest.raises(torch.OutOfMemoryError, match="narrow"):
            empty(24 * MIB)
        del ordinary
        with use_mem_pool(pool):
            more = queue_stamp(empty(24 * MIB), 3)
    assert model.max_memory_reserved() <= 64 * MIB
    assert model.memory_allocated() == 48 * MIB
    assert intact(inside, 2)
    assert intact(more, 3)


def test_regions_do_not_serve_each_other() -> None:
    first, second = MemPool(), MemPool()
    with use_mem_pool(first):
        kept = empty(1000)
        places = {queue_stamp(empty(4 * MIB), seed).data_ptr() for seed in range(3)}
    for where in (None, second):
        with use_mem_pool(where) if where else torch.cuda.device(0):
            others = [empty(4 * MIB) for _ in range(4)] + [empty(1000) for _ in range(20)]
        assert not places & {other.data_ptr() for other in others}
        assert all(pool_id_of(other) == (tuple(where.id) if where else (0, 0)) for other in others)
    with use_mem_pool(first):
        assert empty(4 * MIB).data_ptr() in places
    assert pool_id_of(kept) == tuple(first.id)


def test_the_inner_mempool_wins_and_the_outer_returns() -> None:
    first, second = MemPool(), MemPool()
    found = [empty(100)]
    with use_mem_pool(first):
        found.append(empty(100))
        with use_mem_pool(second):
            found.append(empty(100))
        found.append(empty(100))
    found.append(empty(100))
    expected = [(0, 0), first.id, second.id, first.id, (0, 0)]
    assert [pool_id_of(tensor) for tensor in found] == [tuple(one) for one in expected]


def test_each_thread_has_its_own_mempool(make_shared: MakeShared) -> None:
    shared = make_shared("512MiB")
    model = shared.register_model("threads")
    pools = [MemPool() for _ in range(4)]
    streams = [torch.cuda.Stream() for _ in pools]
    barrier = threading.Barrier(len(pools) + 1)
    wrong: list[str] = []

    def work(number: int) -> None:
        try:
            kept = []
            with use_mem_pool(pools[number]), model, torch.cuda.stream(streams[number]):
                barrier.wait(timeout=60)
                for turn in range(60):
                    seed = 100 * number + turn
                    kept.append((seed, queue_stamp(empty(1 + turn * 99_991 % (3 * MIB)), seed)))
                    if len(kept) > 6:
                        seed, block = kept.pop(turn % 7)
                        if not intact(block, seed):
                            wrong.append(f"thread {number}, turn {turn}")
                wrong.extend(
                    f"{seed} is elsewhere" for seed, block in kept if pool_id_of(block) != tuple(pools[number].id)
                )
                wrong.extend(f"{seed} is damaged" for seed, block in kept if not intact(block, seed))
        except Exception as error:
            barrier.abort()
            wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(pools))]
    for thread in threads:
        thread.start()
    barrier.wait(timeout=60)
    mine = empty(5 * MIB)  # while the threads are in their MemPools
    for thread in threads:
        thread.join()
    assert wrong == []
    assert pool_id_of(mine) == (0, 0)
    assert [pool.use_count() for pool in pools] == [1] * 4
    pools.clear()
    settle()
    assert model.memory_allocated() == model.memory_reserved() == 0


def test_an_error_inside_ends_the_use() -> None:
    pool = MemPool()
    with pytest.raises(ValueError, match="mine"):
        with use_mem_pool(pool):
            raise ValueError("mine")
    assert pool.use_count() == 1
    assert pool_id_of(empty(100)) == (0, 0)


# -- Giving back -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_what_is_free_in_a_living_mempool_is_given_back(where: str) -> None:
    settle()
    before = torch.cuda.memory_reserved()
    pool = MemPool()
    with use_mem_pool(pool):
        kept, freed = queue_stamp(empty(6 * MIB), 1), queue_stamp(empty(64 * MIB), 2)
        assert torch.cuda.memory_reserved() - before >= 70 * MIB
        del freed
        if where == "inside":
            torch.cuda.empty_cache()
            assert size_of(pool) < 64 * MIB
    torch.cuda.empty_cache()
    assert 6 * MIB <= size_of(pool) < 32 * MIB
    assert torch.cuda.memory_reserved() - before == size_of(pool)
    assert intact(kept, 1)
    del kept
    torch.cuda.empty_cache()
    assert pool.snapshot() == []
    assert torch.cuda.memory_reserved() == before
    with use_mem_pool(pool):
        assert intact(queue_stamp(empty(6 * MIB), 3), 3)


def test_the_models_own_empty_cache_reaches_its_mempools(make_shared: MakeShared) -> None:
    shared = make_shared("256MiB")
    one, other = shared.register_model("one"), shared.register_model("other")
    pool = MemPool()
    for model in (one, other):
        with model, use_mem_pool(pool):
            empty(32 * MIB)
    torch.cuda.synchronize()
    assert [one.memory_reserved(), other.memory_reserved()] == [32 * MIB] * 2
    one.empty_cache()
    assert [one.memory_reserved(), other.memory_reserved()] == [0, 32 * MIB]


def test_not_while_a_graph_that_was_captured_into_it_lives(make_pool: MakePool) -> None:
    model = make_pool("1GiB")
    pool = MemPool()
    with model:
        x = numbers(4)
        result = torch.empty_like(x)
        settle()
        alone = model.memory_reserved()
        graph, _ = captured(lambda: result.copy_(chain(x)), pool=pool.id)
    held = size_of(pool)
    assert held >= 8 * MIB
    for give_back in (torch.cuda.empty_cache, model.empty_cache, model.compact):
        give_back()
        assert size_of(pool) == held
    with model, use_mem_pool(pool):  # as natively: both know that they share it
        assert pool_id_of(empty(MIB)) == tuple(pool.id)
    for seed in range(3):
        x.copy_(numbers(4, seed))
        graph.replay()
        assert torch.equal(result, chain(x))
    del graph
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert pool.snapshot() == []
    assert model.memory_reserved() == alone


def test_a_mempool_that_is_gone_gives_its_memory_back_at_once() -> None:
    settle()
    before = torch.cuda.memory_reserved()
    pool = MemPool()
    with use_mem_pool(pool):
        empty(64 * MIB)
    assert torch.cuda.memory_reserved() >= before + 64 * MIB
    del pool
    assert torch.cuda.memory_reserved() == before


def test_what_a_mempool_leaves_idle_another_model_can_have(make_shared: MakeShared, busy: Busy) -> None:
    shared = make_shared(96 * MIB)
    owner, other = shared.register_model("owner"), shared.register_model("other")
    pool = MemPool()
    with owner, use_mem_pool(pool):
        kept, block = queue_stamp(empty(8 * MIB), 1), empty(64 * MIB)
        torch.cuda.synchronize()
        busy(20)
        block.fill_(0xAA)  # the late writer
        del block
    with other:
        taken = empty(64 * MIB)
    found = torch.count_nonzero(taken)  # takes memory itself
    with other:
        queue_stamp(taken, 2)
    assert int(found) == 0
    assert intact(taken, 2)
    assert intact(kept, 1)
    assert shared.global_stats().physical_usage <= 96 * MIB


@pytest.mark.parametrize("order", list(itertools.permutations(["tensor", "pool", "graph", "output"])), ids="-".join)
def test_they_can_go_in_any_order(make_pool: MakePool, order: tuple[str, ...]) -> None:
    model = make_pool("1GiB")
    with model:
        x = numbers(1)
        result = torch.empty_like(x)
        settle()
        alone = model.memory_reserved()
        pool = MemPool()
        with use_mem_pool(pool):
            tensor = queue_stamp(empty(3 * MIB + 1), 4)
        graph, output = captured(lambda: result.copy_(chain(x)) + 1, pool=pool.id)
    graph.replay()
    alive: dict[str, Any] = {"tensor": tensor, "pool": pool, "graph": graph, "output": output}
    expected = chain(x)
    del tensor, pool, graph, output
    for name in order:
        del alive[name]
        torch.cuda.empty_cache()
        with model:
            queue_stamp(empty(8 * MIB), 5)
        if "tensor" in alive:
            assert intact(alive["tensor"], 4)
        if "graph" in alive:
            result.zero_()
            alive["graph"].replay()
            assert torch.equal(result, expected)
        if "output" in alive:
            assert torch.equal(alive["output"], expected + 1)
    settle()
    assert model.memory_reserved() == alone
    assert model.memory_allocated() == 2 * MIB


# -- No capture --------------------------------------------------------------------------------------------------------


def test_memory_recorded_on_streams_is_reused_inside_when_its_fences_pass(make_pool: MakePool, busy: Busy) -> None:
    model = make_pool("1GiB")
    pool = MemPool()
    side = torch.cuda.Stream()
    with model, use_mem_pool(pool):
        block = empty(8 * MIB)
        address = block.data_ptr()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            kernel = busy(100)
            block.fill_(1)
        block.record_stream(side)
        del block
        assert model.memory_allocated() == 0
        assert model.memory_stats()["active_bytes.all.current"] == 8 * MIB
        meanwhile = empty(8 * MIB)
        assert not kernel.query()
        assert meanwhile.data_ptr() != address
        side.synchronize()
        afterwards = empty(8 * MIB)
        assert afterwards.data_ptr() == address
        assert model.memory_stats()["active_bytes.all.current"] == model.memory_allocated() == 16 * MIB


def test_out_of_memory_is_retried_inside(make_shared: MakeShared, busy: Busy) -> None:
    """With what other models hold idle, and with what only waits for a stream."""
    shared = make_shared(96 * MIB)
    giver, taker = shared.register_model("giver"), shared.register_model("taker")
    side = torch.cuda.Stream()
    pool = MemPool()
    with giver:
        idle, pending = empty(40 * MIB), empty(40 * MIB)
    torch.cuda.synchronize()
    with use_mem_pool(pool), taker:
        with torch.cuda.stream(side):
            busy(30)
            pending.fill_(0xAA)
        pending.record_stream(side)
        del idle, pending
        taken = queue_stamp(empty(80 * MIB), 6)
    torch.cuda.synchronize()
    assert intact(taken, 6)
    assert shared.global_stats().physical_usage <= 96 * MIB


@pytest.mark.parametrize("use_on_oom", [True, False])
def test_the_default_region_gets_what_a_mempool_has_free(make_pool: MakePool, use_on_oom: bool) -> None:
    """Natively only with ``use_on_oom``: there nothing leaves a living pool."""
    model = make_pool("1GiB", physical_limit=64 * MIB)
    pool = MemPool(use_on_oom=use_on_oom)
    with model:
        with use_mem_pool(pool):
            kept = queue_stamp(empty(8 * MIB), 1)
            empty(48 * MIB)
        taken = queue_stamp(empty(40 * MIB), 2)
    assert intact(kept, 1)
    assert intact(taken, 2)
    assert model.max_memory_reserved() <= 64 * MIB
    assert model.memory_allocated() == 48 * MIB
    assert model.memory_stats()["num_ooms"] == 0
    del pool, taken
    assert intact(kept, 1)
    del kept
    settle()
    assert model.memory_reserved() == 0


def test_without_splitting_a_block_is_reused_whole() -> None:
    pool = MemPool(no_split=True)
    with use_mem_pool(pool):
        first = empty(12 * MIB)
        start, end = first.data_ptr(), first.data_ptr() + 12 * MIB
        del first
        one, other = (queue_stamp(empty(3 * MIB), seed) for seed in range(2))
    assert one.data_ptr() == start
    assert not start <= other.data_ptr() < end
    assert intact(one, 0)
    assert intact(other, 1)


# -- Snapshots ---------------------------------------------------------------------------------------------------------


def test_a_mempools_snapshot_lists_its_own_segments(make_pool: MakePool) -> None:
    model = make_pool("1GiB")
    pool, other, unused = MemPool(), MemPool(), MemPool()
    with use_mem_pool(other):
        elsewhere = empty(4 * MIB)
    with use_mem_pool(pool):
        blocks = [empty(size) for size in (1, 5000, 3 * MIB, 9 * MIB)]
        with model:
            blocks.append(empty(2 * MIB))
        empty(5 * MIB)
    segments = pool.snapshot()
    assert {tuple(segment["segment_pool_id"]) for segment in segments} == {tuple(pool.id)}
    assert [s["address"] for s in segments] == sorted(s["address"] for s in segments)
    assert segments == [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == tuple(pool.id)]
    assert sum(segment["requested_size"] for segment in segments) == 5001 + 14 * MIB
    found = set()
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                found.add(address)
            address += block["size"]
        assert address == segment["address"] + segment["total_size"]
    assert found == {block.data_ptr() for block in blocks}
    assert pool_id_of(elsewhere) == tuple(other.id)
    assert unused.snapshot() == []
