"""How a MemoryPool and its buffers end: freed, collected, closed, on any thread, with the process."""

from __future__ import annotations

import contextlib
import copy
import gc
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torch_vmm
from tests.helpers import MIB, PAGE, holds, rounded, run, stamp, stream
from tests.raw_memory import at_address
from torch_vmm import _C, MemoryPool, PooledBuffer, PoolStats

MakeBuffers = Callable[[], MemoryPool]


def test_a_buffer_goes_back_when_collected(buffers: MemoryPool) -> None:
    buffer = buffers.alloc(1000)
    assert buffers.stats().allocated_bytes == rounded(4000)
    del buffer
    assert buffers.stats() == PoolStats(0, rounded(4000), 1, 1, buffers.stats().cached_bytes)


def test_streams_that_come_and_go_leave_nothing_behind(device: str) -> None:
    """In a process of its own: they make all that waits for a device's streams dearer, and so lazier."""
    if device != "cpu":
        pytest.skip("needs streams that are numbers")
    run(f"""
        import torch_vmm

        buffers = torch_vmm.MemoryPool("cpu")
        for number in range(1, 1001):
            buffers.alloc(256, stream=number).free()
        assert buffers.stats().cached_bytes <= 300 * {PAGE}
    """)


def test_a_stream_lives_as_long_as_the_memory_that_it_uses(buffers: MemoryPool) -> None:
    in_use_at_end: list[int] = []

    class Owned(int):
        def __del__(self) -> None:
            in_use_at_end.append(buffers.stats().allocated_bytes)

    def a_stream() -> Any:
        return Owned(5) if buffers.device.type == "cpu" else Owned(0)

    shown = buffers.alloc(1000, stream=a_stream())
    shown.record_stream(a_stream())
    tensor = shown.tensor()
    del shown
    assert in_use_at_end == []
    del tensor
    recorded = buffers.alloc(1000)
    recorded.record_stream(a_stream())
    del recorded
    assert in_use_at_end == [0, 0, 0], "each after the memory had gone back"


def test_a_stream_that_is_recorded_again_is_kept_once(buffers: MemoryPool) -> None:
    class Stream:
        def __init__(self, number: int) -> None:
            self.number = number

        def __index__(self) -> int:
            return self.number

    numbers = (5, 6) if buffers.device.type == "cpu" else (0,)
    first = [Stream(number) for number in numbers]
    kept = [weakref.ref(each) for each in first]
    buffer = buffers.alloc(1000, stream=first[0])
    for _ in range(100):
        for each in (*first, *map(Stream, numbers), *numbers):
            buffer.record_stream(each)
    assert buffer._streams is not None
    assert len(buffer._streams) <= 5, "its own, and of both objects and numbers one a stream"
    del first, each
    assert all(made() is not None for made in kept)
    buffer.free()
    del buffer
    gc.collect()
    assert all(made() is None for made in kept)


def test_a_cycle_through_a_stream_is_collected(buffers: MemoryPool) -> None:
    class Worker(int):
        scratch: PooledBuffer

    for record in (False, True):
        worker = Worker(5 if buffers.device.type == "cpu" else 0)
        worker.scratch = buffers.alloc(1000, stream=None if record else worker)
        if record:
            worker.scratch.record_stream(worker)
        del worker
        gc.collect()
        assert buffers.stats().allocated_bytes == 0


def test_a_cycle_is_collected(buffers: MemoryPool) -> None:
    holder: dict[str, object] = {"buffer": buffers.alloc(1000)}
    holder["self"] = holder
    del holder
    gc.collect()
    assert buffers.stats().allocated_bytes == 0


def test_a_reader_in_the_same_cycle_reads_to_its_end(buffers: MemoryPool, device: str) -> None:
    read: list[bool] = []

    class Job:
        def __init__(self, buffer: PooledBuffer) -> None:
            buffer.tensor().fill_(7)
            name = "__array_interface__" if device == "cpu" else "__cuda_array_interface__"
            self.buffer, (self.address, _) = buffer, getattr(buffer, name)["data"]
            self.me = self

        def __del__(self) -> None:
            other = buffers.alloc(1 << 18)
            other.tensor().fill_(99)
            buffers.trim(0)
            read.append(bool((at_address(self.address, 1 << 20, device).view(torch.float32) == 7).all()))
            other.free()

    Job(buffers.alloc(1 << 18))  # made before it, so it is what the collector finishes first
    gc.collect()
    assert read == [True]
    gc.collect()  # what torch does for the first time leaves frames in cycles, a finalizer's among them
    assert buffers.stats().allocated_bytes == 0


def test_an_array_interface_keeps_nobody_from_freeing(buffers: MemoryPool, device: str) -> None:
    buffer = buffers.alloc(1000)
    name = "__array_interface__" if device == "cpu" else "__cuda_array_interface__"
    assert getattr(buffer, name)["data"][0] == buffer.device_ptr
    shown = buffer.tensor()
    with pytest.raises(torch_vmm.StillInUseError):
        buffer.free()
    del shown
    buffer.free()
    assert buffers.stats().allocated_bytes == 0


def test_freed_twice_is_fine(buffers: MemoryPool) -> None:
    buffer = buffers.alloc(1000)
    buffer.free()
    buffer.free()
    assert buffer.is_freed
    assert "freed" in repr(buffer)
    assert len(buffer) == 1000
    assert buffers.stats().free_count == 1


def test_nothing_of_a_freed_one_can_be_used(buffers: MemoryPool) -> None:
    buffer = buffers.alloc(1000)
    buffer.free()
    uses: list[Callable[[], object]] = [
        lambda: buffer.device_ptr,
        buffer.tensor,
        buffer.__dlpack__,
        buffer.__dlpack_device__,
        lambda: buffer.record_stream(None),
        lambda: torch.from_dlpack(buffer),
        buffer.__enter__,
    ]
    uses.append(lambda: buffer.__array_interface__ if buffers.device.type == "cpu" else buffer.__cuda_array_interface__)
    for use in uses:
        with pytest.raises(torch_vmm.InvalidArgumentError, match="freed"):
            use()


def test_a_tensor_keeps_the_memory(buffers: MemoryPool) -> None:
    buffer = buffers.alloc(1000)
    tensor = buffer.tensor()[10:20]
    stamp(tensor, 3)
    with pytest.raises(torch_vmm.StillInUseError) as caught:
        buffer.free()
    assert caught.value.live_bytes == 4000
    assert caught.value.live_blocks == 1
    assert not buffer.is_freed
    del buffer, caught  # whose traceback has it
    assert buffers.stats().free_count == 0
    buffers.alloc(1000)
    assert holds(tensor, 3)
    del tensor
    assert buffers.stats().allocated_bytes == 0


def test_forced_it_goes_with_the_last_tensor(buffers: MemoryPool) -> None:
    buffer = buffers.alloc(1000)
    tensor, other = buffer.tensor(), buffer.tensor()
    buffer.free(force=True)
    assert buffer.is_freed
    with pytest.raises(torch_vmm.InvalidArgumentError, match="freed"):
        buffer.tensor()
    del tensor
    assert buffers.stats().free_count == 0
    del other
    assert buffers.stats().free_count == 1


def test_a_with_frees_it(buffers: MemoryPool) -> None:
    with buffers.alloc(1000) as buffer:
        shown = buffer.tensor()
        stamp(shown, 9)
    assert buffer.is_freed
    assert holds(shown, 9)
    del shown
    assert buffers.stats().free_count == 1


def test_a_pool_in_use_is_not_closed(make_buffers: MakeBuffers) -> None:
    pool = make_buffers()
    buffer = pool.alloc(1000)
    with pytest.raises(torch_vmm.StillInUseError) as caught:
        pool.close()
    assert caught.value.live_bytes == rounded(4000)
    assert caught.value.live_blocks == 1
    assert not pool.is_closed
    buffer.free()
    pool.close()
    pool.close()
    assert pool.is_closed
    assert "closed" in repr(pool)
    for use in (lambda: pool.alloc(1), lambda: pool.alloc(0), lambda: pool.trim(0), lambda: pool.set_threshold(0)):
        with pytest.raises(torch_vmm.InvalidArgumentError, match="closed"):
            use()
    with pytest.raises(torch_vmm.InvalidArgumentError, match="closed"), pool:
        pass
    assert pool.stats() == PoolStats(0, rounded(4000), 1, 1, 0)


def test_closed_by_force_its_buffers_live_on(make_buffers: MakeBuffers, memory: _C.Device) -> None:
    before = memory.committed_bytes
    pool = make_buffers()
    buffer = pool.alloc(MIB)
    stamp(buffer.tensor(), 4)
    pool.close(force=True)
    assert holds(buffer.tensor(), 4)
    buffer.free()
    memory.empty_cache()
    assert memory.committed_bytes <= before


def test_the_with_of_a_pool(device: str) -> None:
    with MemoryPool(device) as pool:
        buffer = pool.alloc(1000)
        del buffer
    assert pool.is_closed
    with pytest.raises(torch_vmm.StillInUseError), MemoryPool(device) as pool:
        buffer = pool.alloc(1000)
    with pytest.raises(torch_vmm.NotCopyableError), MemoryPool(device) as pool:
        copy.copy(pool.alloc(1000))  # the traceback has it
    assert pool.is_closed
    del buffer


def test_buffers_keep_a_dropped_pool(device: str, memory: _C.Device) -> None:
    memory.empty_cache()
    before = memory.committed_bytes
    pool = MemoryPool(device)
    gone = weakref.ref(pool)
    buffer = pool.alloc(1000)
    stamp(buffer.tensor(), 2)
    del pool
    gc.collect()
    assert gone() is None
    assert holds(buffer.tensor(), 2)
    assert memory.committed_bytes == before + PAGE
    del buffer
    memory.empty_cache()
    assert memory.committed_bytes == before


def test_buffers_go_back_on_any_thread(buffers: MemoryPool) -> None:
    made = [buffers.alloc(1000 * (k + 1)) for k in range(40)]
    threads = [threading.Thread(target=lambda: made.pop() and None) for _ in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert buffers.stats().free_count == 40
    assert buffers.stats().allocated_bytes == 0


def test_threads_share_a_pool(buffers: MemoryPool, device: str) -> None:
    buffers.set_threshold("8MiB")
    wrong: list[str] = []

    def work(number: int) -> None:
        mine = stream(device, 16 * number)
        rng = random.Random(number)
        kept: list[tuple[PooledBuffer, int]] = []
        for step in range(60):
            seed = number * 1000 + step
            buffer = buffers.alloc(rng.choice([100, 3000, 400_000]), torch.uint8, mine)
            stamp(buffer.tensor(), seed)
            if isinstance(mine, torch.cuda.Stream):
                torch.cuda.current_stream().synchronize()
            kept.append((buffer, seed))
            if len(kept) > 5:
                old, was = kept.pop(rng.randrange(len(kept)))
                if not holds(old.tensor(), was):
                    wrong.append(f"{was}")
            if step % 20 == 0:
                buffers.trim(0)
                buffers.stats()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert buffers.stats().allocation_count == buffers.stats().free_count == 240


def test_a_free_and_a_view_at_the_same_moment(buffers: MemoryPool) -> None:
    """One of them is refused; never is freed memory shown."""
    for _ in range(100):
        buffer = buffers.alloc(1000)
        shown: list[torch.Tensor] = []

        def show(buffer: PooledBuffer = buffer, shown: list[torch.Tensor] = shown) -> None:
            with contextlib.suppress(torch_vmm.InvalidArgumentError):
                shown.append(buffer.tensor())

        thread = threading.Thread(target=show)
        thread.start()
        try:
            buffer.free()
        except torch_vmm.StillInUseError:
            thread.join()
            assert len(shown) == 1
        thread.join()
        assert buffer.is_freed == (not shown)


@pytest.mark.parametrize("end", ["", "sys.exit(0)", "del pool", "pool.close(force=True)"])
def test_the_process_may_end_at_any_moment(device: str, end: str) -> None:
    program = f"""
        import sys, threading, torch, torch_vmm
        pool = torch_vmm.MemoryPool({device!r})
        pool.set_threshold(0)
        kept, shown = pool.alloc(1000), pool.alloc(1000).tensor()
        cycle = [pool.alloc(1000), shown]; cycle.append(cycle)
        sys.modules["torch_vmm"].kept = pool.alloc(1000)
        many = [pool.alloc(10) for _ in range(20_000)]

        def drop():
            while many:
                many.pop()

        threading.Thread(target=drop, daemon=True).start()
        if {device!r} == "cuda":
            native = torch_vmm.NativeMemoryPool()
            address = native.alloc_async(1000)
        print(pool.stats().free_count >= 0, flush=True)
        {end}
    """
    assert run(program) == "True\n"


def test_at_exit_and_in_a_forked_child(device: str) -> None:
    if device == "cuda":
        pytest.skip("a child of a process that has used CUDA ends as it likes")
    program = """
        import os, torch, torch_vmm
        pool = torch_vmm.MemoryPool("cpu")
        kept = pool.alloc(1000)
        tensor = kept.tensor()
        cycle = [pool.alloc(1000)]; cycle.append(cycle)
        child = os.fork()
        if child == 0:
            try:
                pool.alloc(1)
            except torch_vmm.NotAvailableError:
                print("refused", flush=True)
            print(repr(pool), flush=True)
            del kept, cycle, pool
            os._exit(0)
        os.waitpid(child, 0)
        print(pool.stats().allocation_count)
    """
    assert run(program) == "refused\nMemoryPool('buffers-1', cpu: out of reach in a forked process)\n2\n"
