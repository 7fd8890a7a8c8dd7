"""Work in flight while memory is freed, reused and handed over: the right content, and no waiting."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest
import torch

import torch_vmm
from tests.gpu.conftest import Busy, Stopwatch
from tests.gpu.memory import bytes_in
from tests.gpu.patterns import intact, queue_check, queue_stamp
from tests.helpers import MIB
from tests.standin.control import less

MakeShared = Callable[..., torch_vmm.SharedMemoryPool]
MakePool = Callable[..., torch_vmm.VirtualMemoryPool]

SIZE = less(384, by=8) * MIB
LIMIT = SIZE + less(16, by=8) * MIB  # holds one block of SIZE


def two_models(make_shared: MakeShared) -> list[torch_vmm.VirtualMemoryPool]:
    """A giver and a taker under LIMIT; memory has gone to and fro once, so that all kernels are loaded."""
    shared = make_shared(LIMIT)
    models = [shared.register_model("giver"), shared.register_model("taker")]
    for model in (*models, models[0]):
        bytes_in(model, SIZE)
    torch.cuda.synchronize()
    return models


def stream_of(where: str) -> torch.cuda.Stream:
    return torch.cuda.current_stream() if where == "the same stream" else torch.cuda.Stream()


# -- Hand-over ---------------------------------------------------------------------------------------------------------


@pytest.mark.alone  # it measures time
@pytest.mark.no_memcheck
@pytest.mark.parametrize("where", ["the same stream", "another stream"])
def test_memory_freed_under_a_long_kernel_is_handed_over_at_once(
    make_shared: MakeShared, busy: Busy, where: str
) -> None:
    giver, taker = two_models(make_shared)
    stream = stream_of(where)
    block = bytes_in(giver, SIZE).fill_(1)
    torch.cuda.synchronize()
    kernel = busy(300)
    block.fill_(0xAA)  # the late writer
    del block
    with Stopwatch() as watch, torch.cuda.stream(stream):
        taken = bytes_in(taker, SIZE)
    with torch.cuda.stream(stream):
        queue_stamp(taken, 7)
    assert not kernel.query(), "the GPU was waited for"
    assert watch.ms < 20
    torch.cuda.synchronize()
    assert intact(taken, 7)


@pytest.mark.parametrize("where", ["the same stream", "another stream"])
def test_handed_over_memory_is_zero_though_its_last_writer_is_late(
    make_shared: MakeShared, busy: Busy, where: str
) -> None:
    giver, taker = two_models(make_shared)
    stream = stream_of(where)
    block = bytes_in(giver, SIZE)
    torch.cuda.synchronize()
    busy(50)
    block.fill_(0xAA)
    del block
    with torch.cuda.stream(stream):
        found = torch.count_nonzero(bytes_in(taker, SIZE))
    torch.cuda.synchronize()
    assert int(found) == 0


@pytest.mark.alone  # it measures time
@pytest.mark.no_memcheck
def test_many_small_blocks_freed_under_a_long_kernel_are_handed_over_at_once(
    make_shared: MakeShared, busy: Busy
) -> None:
    giver, taker = two_models(make_shared)
    giver.empty_cache()
    # No more than some hundred: beyond a thousand launches in flight the next one waits.
    blocks = [bytes_in(giver, MIB) for _ in range(SIZE // MIB * 15 // 16)]
    torch.cuda.synchronize()
    kernel = busy(300)
    for block in blocks:
        block.fill_(0xAA)
    del block
    blocks.clear()
    with Stopwatch() as watch:
        taken = bytes_in(taker, SIZE)
    queue_stamp(taken, 3)
    assert not kernel.query(), "the GPU was waited for"
    # Chunks of 2 MiB: 180 of them move.
    assert watch.ms < 60
    assert intact(taken, 3)


@pytest.mark.alone  # it measures time
@pytest.mark.no_memcheck
def test_memory_goes_to_and_fro_under_queued_work(make_shared: MakeShared, busy: Busy) -> None:
    models = two_models(make_shared)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    kernel = busy(300)
    verdicts = []
    for turn in range(6):  # some hundred launches: beyond a thousand in flight the next one waits
        with torch.cuda.stream(streams[turn // 2 % 2]):
            block = bytes_in(models[turn % 2], SIZE)
            verdicts.append(torch.count_nonzero(block))
            queue_stamp(block, turn)
            verdicts.append(queue_check(block, turn))
            del block
    assert not kernel.query()
    torch.cuda.synchronize()
    assert [int(verdict) for verdict in verdicts] == [0] * len(verdicts)


def test_a_model_without_idle_memory_gives_none(make_shared: MakeShared) -> None:
    giver, taker = two_models(make_shared)
    block = queue_stamp(bytes_in(giver, SIZE), 5)
    with pytest.raises(torch.OutOfMemoryError):
        bytes_in(taker, SIZE)
    assert intact(block, 5)


def test_memory_recorded_on_another_stream_is_handed_over_when_that_is_done(
    make_shared: MakeShared, busy: Busy
) -> None:
    giver, taker = two_models(make_shared)
    side = torch.cuda.Stream()
    block = queue_stamp(bytes_in(giver, SIZE), 11)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        busy(50)
        verdict = queue_check(block, 11)
    block.record_stream(side)
    del block
    taken = queue_stamp(bytes_in(taker, SIZE), 12)  # waits, since the alternative is an error
    assert intact(taken, 12)
    assert int(verdict) == 0


def test_chunks_move_within_a_full_pool_under_queued_work(make_pool: MakePool, busy: Busy) -> None:
    pool = make_pool("1GiB", physical_limit="96MiB")
    blocks = [queue_stamp(bytes_in(pool, 8 * MIB), number) for number in range(12)]
    torch.cuda.synchronize()
    busy(50)
    kept = {}
    for number in range(11, -1, -1):
        block = blocks.pop()
        queue_stamp(block, number)  # the late writer
        if number % 2 == 0:
            kept[number] = block
    del block
    # Six holes of 8 MiB, and no memory beside them: only moving can back one of 40 MiB.
    large = queue_stamp(bytes_in(pool, 40 * MIB), 99)
    assert pool.physical_memory_usage <= 96 * MIB
    assert intact(large, 99)
    assert all(intact(block, number) for number, block in kept.items())


# -- Reuse -------------------------------------------------------------------------------------------------------------


def test_a_block_is_reused_at_once_on_its_own_stream(make_pool: MakePool, busy: Busy) -> None:
    pool = make_pool("1GiB", physical_limit="64MiB")
    block = bytes_in(pool, 48 * MIB)
    address = block.data_ptr()
    kernel = busy(100)
    block.fill_(1)
    del block
    again = bytes_in(pool, 48 * MIB)
    assert not kernel.query(), "the GPU was waited for"
    assert again.data_ptr() == address
    queue_stamp(again, 2)
    assert intact(again, 2)


@pytest.mark.parametrize("limit", ["64MiB", None], ids=["a full pool", "a pool with room"])
@pytest.mark.parametrize("size", [700, 48 * MIB])
def test_a_block_is_not_reused_too_early_on_another_stream(
    make_pool: MakePool, busy: Busy, size: int, limit: str | None
) -> None:
    pool = make_pool("1GiB", physical_limit=limit)
    block = bytes_in(pool, size)
    torch.cuda.synchronize()
    busy(50)
    block.fill_(0xAA)  # the late writer
    del block
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        others = [queue_stamp(bytes_in(pool, size), seed) for seed in range(1 if size > MIB else 50)]
    torch.cuda.synchronize()
    assert all(intact(other, seed) for seed, other in enumerate(others))


@pytest.mark.parametrize("size", [700, 3 * MIB + 512, 48 * MIB])
def test_record_stream_keeps_a_block_until_the_other_stream_is_done(make_pool: MakePool, busy: Busy, size: int) -> None:
    pool = make_pool("1GiB")
    side = torch.cuda.Stream()
    block = queue_stamp(bytes_in(pool, size), 1)
    result = bytes_in(pool, size)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        kernel = busy(100)
        result.copy_(block)
    block.record_stream(side)
    held = pool.memory_allocated()
    del block
    # As in torch: freed at the call, active until the other stream is done.
    assert pool.memory_allocated() < held
    assert pool.memory_stats()["active_bytes.all.current"] == held
    for seed in range(2, 6):
        queue_stamp(bytes_in(pool, size), seed)
    assert not kernel.query()
    torch.cuda.synchronize()
    bytes_in(pool, size)
    assert pool.memory_stats()["active_bytes.all.current"] == pool.memory_allocated()
    assert intact(result, 1)


def test_a_tensor_of_another_stream_is_safe_after_record_stream_of_both(make_pool: MakePool, busy: Busy) -> None:
    pool = make_pool("1GiB")
    sides = [torch.cuda.Stream(), torch.cuda.Stream()]
    block = queue_stamp(bytes_in(pool, 5 * MIB), 1)
    torch.cuda.synchronize()
    verdicts = []
    for ms, side in zip((20, 60), sides, strict=True):
        with torch.cuda.stream(side):
            busy(ms)
            verdicts.append(queue_check(block, 1))
        block.record_stream(side)
    del block
    for seed in range(2, 40):
        queue_stamp(bytes_in(pool, 5 * MIB), seed)
    torch.cuda.synchronize()
    assert [int(verdict) for verdict in verdicts] == [0, 0]


def test_memory_is_not_unmapped_under_a_kernel_that_uses_it(make_pool: MakePool, busy: Busy) -> None:
    pool = make_pool("1GiB")
    block = bytes_in(pool, 64 * MIB)
    torch.cuda.synchronize()
    busy(50)
    block.fill_(1)
    del block
    pool.empty_cache()  # waits; a fault would end the context
    assert pool.physical_memory_usage == 0
    torch.cuda.synchronize()


def test_a_stream_of_another_priority_is_a_stream_like_any_other(make_pool: MakePool, busy: Busy) -> None:
    pool = make_pool("1GiB", physical_limit="64MiB")
    with torch.cuda.stream(torch.cuda.Stream(priority=-1)):
        block = bytes_in(pool, 48 * MIB)
        busy(20)
        block.fill_(0xAA)
    del block
    taken = queue_stamp(bytes_in(pool, 48 * MIB), 4)
    assert intact(taken, 4)


# -- Copies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 511, 4097, 2 * MIB + 1, 33 * MIB + 13])
def test_copies_between_host_and_pool_keep_every_byte(make_pool: MakePool, size: int) -> None:
    pool = make_pool("1GiB")
    source = torch.randint(256, (size,), dtype=torch.uint8).pin_memory()
    with pool:
        block = source.to("cuda", non_blocking=True)
        other = block.clone()
    del block
    back = torch.empty_like(source).pin_memory()
    back.copy_(other, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(source, back)


def test_tensors_dropped_while_their_copy_is_queued(make_pool: MakePool, busy: Busy) -> None:
    pool = make_pool("1GiB", physical_limit="80MiB")
    size = 32 * MIB
    out = [torch.empty(size, dtype=torch.uint8).pin_memory() for _ in range(6)]
    busy(50)
    for seed, host in enumerate(out):
        block = queue_stamp(bytes_in(pool, size), seed)
        host.copy_(block, non_blocking=True)
        del block
    torch.cuda.synchronize()
    for seed, host in enumerate(out):
        assert intact(host, seed)


# -- Threads -----------------------------------------------------------------------------------------------------------


def test_threads_with_streams_of_their_own_under_a_tight_limit(make_shared: MakeShared) -> None:
    """What fits after reclaim never fails, the limit holds, and no block meets another."""
    threads, most = 8, less(24 * MIB, by=4)
    # Whole chunks may be stranded under a live block; twice the live sum is plenty.
    shared = make_shared(2 * threads * most)
    models = [shared.register_model(f"model-{number}") for number in range(3)]
    errors: list[str] = []
    done = threading.Event()

    def work(number: int) -> None:
        chance = random.Random(number)
        stream = torch.cuda.Stream()
        try:
            with torch.cuda.stream(stream):
                for turn in range(40):
                    seed = 1000 * number + turn
                    block = bytes_in(models[chance.randrange(3)], chance.randrange(1, most))
                    verdict = queue_check(queue_stamp(block, seed), seed)
                    del block
                    if int(verdict) != 0:
                        errors.append(f"thread {number}, turn {turn}: {int(verdict)} wrong")
        except Exception as error:
            errors.append(f"thread {number}: {error}")

    def watch() -> None:
        while not done.wait(0.002):
            used = shared.global_stats().physical_usage
            if used > shared.physical_limit:
                errors.append(f"{used} bytes are above the limit of {shared.physical_limit}")

    watcher = threading.Thread(target=watch)
    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for thread in (watcher, *workers):
        thread.start()
    for thread in workers:
        thread.join()
    done.set()
    watcher.join()
    assert errors == []


def test_a_tensor_freed_on_another_thread_goes_back_to_its_stream(make_pool: MakePool) -> None:
    pool = make_pool("1GiB")
    blocks = [bytes_in(pool, 3 * MIB)]
    address = blocks[0].data_ptr()
    thread = threading.Thread(target=blocks.clear)
    thread.start()
    thread.join()
    assert bytes_in(pool, 3 * MIB).data_ptr() == address
