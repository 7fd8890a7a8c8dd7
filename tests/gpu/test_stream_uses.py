"""record_stream, and every kind of stream: nothing is reused too early, everything as soon as it may be."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import torch_vmm
from tests.consistency import check_device, check_pool
from tests.gpu.conftest import Busy, Stopwatch
from tests.gpu.memory import bytes_in
from tests.gpu.patterns import intact, queue_check, queue_stamp
from tests.gpu.programs import Process, expect_done, running
from tests.helpers import MIB

MakePool = Callable[..., torch_vmm.VirtualMemoryPool]

PER_THREAD = 2  # cudaStreamPerThread, the same number on every thread


@pytest.fixture(autouse=True)
def _numbers_agree() -> Iterator[None]:
    """After each test all numbers of the device agree."""
    yield
    torch.cuda.synchronize()
    check_device()


def foreign_handle() -> int:
    """A stream that CUDA's driver made and torch does not know. It waits for no other stream.

    It stays: streams that are no more have processes of their own, below.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    torch.cuda.synchronize()  # makes torch's context this thread's
    handle = ctypes.c_void_p()
    assert driver.cuStreamCreate(ctypes.byref(handle), 1) == 0
    assert handle.value is not None
    return handle.value


KINDS = ["torch's", "the highest priority", "the lowest priority", "external", "per thread", "the default"]


@pytest.fixture(params=KINDS)
def stream(request: pytest.FixtureRequest) -> torch.cuda.Stream:
    """A stream of each kind."""
    lowest, highest = torch.cuda.Stream.priority_range()
    make: dict[str, Callable[[], torch.cuda.Stream]] = {
        "torch's": torch.cuda.Stream,
        "the highest priority": lambda: torch.cuda.Stream(priority=highest),
        "the lowest priority": lambda: torch.cuda.Stream(priority=lowest),
        "external": lambda: torch.cuda.ExternalStream(foreign_handle()),
        "per thread": lambda: torch.cuda.ExternalStream(PER_THREAD),
        "the default": torch.cuda.default_stream,
    }
    return make[request.param]()


@pytest.fixture
def home() -> Iterator[torch.cuda.Stream]:
    """The current stream of the test. The default one would not do: some streams wait for it, whatever is reused."""
    with torch.cuda.stream(torch.cuda.Stream()):
        yield torch.cuda.current_stream()


def state_at(segments: list[dict[str, Any]], address: int) -> str:
    """The state of the block that holds ``address``."""
    for segment in segments:
        for block in segment["blocks"]:
            if block["address"] <= address < block["address"] + block["size"]:
                return str(block["state"])
    return "not mapped"


def active(pool: torch_vmm.VirtualMemoryPool) -> int:
    return pool.memory_stats()["active_bytes.all.current"]


# -- Every kind of stream ----------------------------------------------------------------------------------------------


def test_a_streams_own_memory_is_reused_at_once_on_it(
    make_pool: MakePool, busy: Busy, stream: torch.cuda.Stream
) -> None:
    pool = make_pool("1GiB", physical_limit="64MiB")
    with torch.cuda.stream(stream):
        block = bytes_in(pool, 48 * MIB)
        address = block.data_ptr()
        assert {segment["stream"] for segment in pool.memory_snapshot()} == {stream.cuda_stream}
        kernel = busy(60)
        block.fill_(0xAA)
        block.record_stream(stream)  # its own: nothing to wait for
        del block
        assert active(pool) == 0
        again = bytes_in(pool, 48 * MIB)
        assert again.data_ptr() == address
        queue_stamp(again, 2)
        assert not kernel.query(), "the GPU was waited for"
        assert intact(again, 2)
    check_pool(pool, fresh=True)


@pytest.mark.parametrize("size", [700, 24 * MIB])
def test_memory_is_kept_from_others_until_its_stream_is_done(
    make_pool: MakePool, busy: Busy, home: torch.cuda.Stream, stream: torch.cuda.Stream, size: int
) -> None:
    pool = make_pool("1GiB", physical_limit="32MiB")
    with torch.cuda.stream(stream):
        block = bytes_in(pool, size)
        torch.cuda.synchronize()
        busy(40)
        block.fill_(0xAA)  # the late writer
    del block
    others = [queue_stamp(bytes_in(pool, size), seed) for seed in range(1 if size > MIB else 20)]
    torch.cuda.synchronize()
    assert all(intact(other, seed) for seed, other in enumerate(others))


@pytest.mark.parametrize("size", [700, 3 * MIB + 512])
def test_a_recorded_use_keeps_a_block_until_that_stream_is_done(
    make_pool: MakePool, busy: Busy, home: torch.cuda.Stream, stream: torch.cuda.Stream, size: int
) -> None:
    pool = make_pool("1GiB")
    block, result = queue_stamp(bytes_in(pool, size), 1), torch.empty(size, dtype=torch.uint8, device="cuda")
    address = block.data_ptr()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        kernel = busy(1000)  # mapping took more than 200 ms where other processes made their contexts
        result.copy_(block)
    block.record_stream(stream)
    block.record_stream(stream)
    held = active(pool)
    del block
    others = [queue_stamp(bytes_in(pool, size), seed) for seed in range(2, 6)]
    assert not kernel.query(), "the GPU was waited for"
    assert address not in {other.data_ptr() for other in others}
    assert state_at(pool.memory_snapshot(), address) == "active_pending_free"
    torch.cuda.synchronize()
    assert intact(result, 1)
    assert all(intact(other, seed) for seed, other in enumerate(others, 2))
    again = bytes_in(pool, size)
    assert again.data_ptr() == address
    assert active(pool) == pool.memory_allocated() == 5 * held
    check_pool(pool, fresh=True)


def test_two_objects_for_one_stream_are_one_stream(make_pool: MakePool, busy: Busy) -> None:
    pool = make_pool("1GiB", physical_limit="32MiB")
    handle = foreign_handle()
    with torch.cuda.stream(torch.cuda.ExternalStream(handle)):
        block = bytes_in(pool, 24 * MIB)
        kernel = busy(40)
    address = block.data_ptr()
    block.record_stream(torch.cuda.ExternalStream(handle))
    del block
    assert active(pool) == 0
    with torch.cuda.stream(torch.cuda.ExternalStream(handle)):
        assert bytes_in(pool, 24 * MIB).data_ptr() == address
    assert not kernel.query(), "the GPU was waited for"


def test_the_per_thread_streams_of_two_threads_are_two_streams(
    make_pool: MakePool, busy: Busy, home: torch.cuda.Stream
) -> None:
    """They have the same handle, and the free happens on another thread than the use."""
    pool = make_pool("1GiB")
    blocks = [queue_stamp(bytes_in(pool, 8 * MIB), 1)]
    result = torch.empty_like(blocks[0])
    address = blocks[0].data_ptr()
    torch.cuda.synchronize()
    kernels: list[torch.cuda.Event] = []
    used, done = threading.Event(), threading.Event()

    def use() -> None:
        with torch.cuda.stream(torch.cuda.ExternalStream(PER_THREAD)):
            kernels.append(busy(100))
            result.copy_(blocks[0])
            blocks[0].record_stream(torch.cuda.current_stream())
        used.set()
        done.wait()

    thread = threading.Thread(target=use)
    thread.start()
    assert used.wait(60)
    blocks.clear()
    others = [queue_stamp(bytes_in(pool, 8 * MIB), seed) for seed in range(2, 6)]
    running_still = not kernels[0].query()
    done.set()
    thread.join()
    torch.cuda.synchronize()
    assert running_still, "the GPU was waited for"
    assert address not in {other.data_ptr() for other in others}
    assert intact(result, 1)


# -- What is recorded --------------------------------------------------------------------------------------------------

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a slice": lambda block: block[5000:6000],
    "a transposed view": lambda block: block.view(-1, 512).t(),
    "another dtype": lambda block: block.view(torch.int64)[1:],
    "a view of a view": lambda block: block[1024:].view(-1, 1024)[1:, ::2],
    "an expanded element": lambda block: block[:1].expand(7),
    "a detached alias": lambda block: block.detach(),
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_use_of_a_view_is_a_use_of_the_whole_block(
    make_pool: MakePool, busy: Busy, home: torch.cuda.Stream, view: str
) -> None:
    pool = make_pool("1GiB")
    side = torch.cuda.Stream()
    block = queue_stamp(bytes_in(pool, 3 * MIB), 1)
    result = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
    address = block.data_ptr()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        kernel = busy(40)
        result.copy_(block)
    VIEWS[view](block).record_stream(side)
    del block
    assert active(pool) == 3 * MIB
    others = [queue_stamp(bytes_in(pool, 3 * MIB), seed) for seed in range(2, 5)]
    assert not kernel.query(), "the GPU was waited for"
    assert address not in {other.data_ptr() for other in others}
    torch.cuda.synchronize()
    assert intact(result, 1)


@pytest.mark.no_memcheck  # it relies on kernels' lengths
def test_a_block_waits_for_the_last_of_several_streams(
    make_pool: MakePool, busy: Busy, home: torch.cuda.Stream
) -> None:
    pool = make_pool("1GiB")
    sides = [torch.cuda.Stream() for _ in range(3)]
    settle = bytes_in(pool, 512)
    block = queue_stamp(bytes_in(pool, 9 * MIB), 1)
    address = block.data_ptr()
    torch.cuda.synchronize()
    kernels, verdicts = [], []
    for number, (ms, side) in enumerate(zip((20, 80, 150), sides, strict=True)):
        part = block[number * 3 * MIB : (number + 1) * 3 * MIB]
        with torch.cuda.stream(side):
            kernels.append(busy(ms))
            verdicts.append(queue_check(block, 1))
        part.record_stream(side)
    del block, part
    for kernel in kernels[:2]:
        kernel.synchronize()
        settle = bytes_in(pool, 512)  # each request looks at what is pending
        assert state_at(pool.memory_snapshot(), address) == "active_pending_free"
        assert pool.stats().quarantined_bytes == 9 * MIB
    assert not kernels[2].query(), "the GPU was waited for"
    for side in sides:
        side.synchronize()
    settle = bytes_in(pool, 512)
    assert state_at(pool.memory_snapshot(), address) != "active_pending_free"
    assert pool.stats().quarantined_bytes == 0
    assert [int(verdict) for verdict in verdicts] == [0, 0, 0]
    assert bytes_in(pool, 9 * MIB).data_ptr() == address
    del settle


def test_a_deferred_free_shows_in_every_number(make_pool: MakePool, busy: Busy, home: torch.cuda.Stream) -> None:
    pool = make_pool("1GiB")
    side = torch.cuda.Stream()
    blocks = [bytes_in(pool, size) for size in (5 * MIB + 7, 700, 2 * MIB)]
    addresses = [block.data_ptr() for block in blocks]
    active_before = torch.cuda.memory_stats()["active_bytes.all.current"]
    allocated_before = torch.cuda.memory_allocated()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        kernel = busy(200)
    for block in blocks[:2]:
        block.record_stream(side)
    del block
    blocks = blocks[2:]
    for segments in (pool.memory_snapshot(), torch.cuda.memory_snapshot()):
        states = [state_at(segments, address) for address in addresses]
        assert states == ["active_pending_free", "active_pending_free", "active_allocated"]
    stats = check_pool(pool, fresh=True)
    whole = check_device()
    assert not kernel.query()
    pending = 5 * MIB + 512 + 1024
    assert stats["allocated_bytes.all.current"] == 2 * MIB
    assert stats["active_bytes.all.current"] == 2 * MIB + pending
    assert stats["requested_bytes.all.current"] == 2 * MIB + 5 * MIB + 7 + 700
    assert (stats["allocation.all.current"], stats["active.all.current"]) == (1, 3)
    assert pool.stats().quarantined_bytes == pending
    assert whole["active_bytes.all.current"] == active_before
    assert torch.cuda.memory_allocated() == allocated_before - pending
    side.synchronize()
    bytes_in(pool, 1)
    assert active(pool) == pool.memory_allocated() == 2 * MIB
    assert torch.cuda.memory_stats()["active_bytes.all.current"] == active_before - pending
    check_pool(pool, fresh=True)


@pytest.mark.alone  # it measures time
@pytest.mark.no_memcheck
def test_nothing_is_reused_under_kernels_of_100_ms_and_all_of_it_at_once_afterwards(
    make_pool: MakePool, busy: Busy, home: torch.cuda.Stream
) -> None:
    pool, side, count, size = make_pool("1GiB"), torch.cuda.Stream(), 6, 8 * MIB
    warm = [bytes_in(pool, size) for _ in range(2 * count)]  # memory for two sets: no request goes to the driver
    warm.clear()
    results = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(count)]
    blocks = [queue_stamp(bytes_in(pool, size), seed) for seed in range(count)]
    addresses = {block.data_ptr() for block in blocks}
    reserved = pool.memory_reserved()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        kernel = busy(100)
        for block, result in zip(blocks, results, strict=True):
            result.copy_(block)
            block.record_stream(side)
    del block
    blocks.clear()
    with Stopwatch() as watch:
        others = [bytes_in(pool, size) for _ in range(count)]
    for seed, other in enumerate(others, 100):
        queue_stamp(other, seed)
    assert not kernel.query(), "the GPU was waited for"
    assert watch.ms < 10
    assert not addresses & {other.data_ptr() for other in others}
    side.synchronize()
    assert all(intact(result, seed) for seed, result in enumerate(results))
    with torch.cuda.stream(side):
        kernel = busy(100)  # other work of that stream does not matter any more
    with Stopwatch() as watch:
        again = [bytes_in(pool, size) for _ in range(count)]
    assert not kernel.query(), "the GPU was waited for"
    assert watch.ms < 10
    assert {block.data_ptr() for block in again} == addresses
    assert pool.memory_reserved() == reserved
    assert all(intact(other, seed) for seed, other in enumerate(others, 100))


@pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two GPUs")
def test_a_use_on_another_devices_stream_is_waited_for(make_pool: MakePool, busy: Busy) -> None:
    pool = make_pool("1GiB")
    side = torch.cuda.Stream(device=1)
    block = bytes_in(pool, 8 * MIB)
    address = block.data_ptr()
    with torch.cuda.stream(side):
        busy(1)
        side.synchronize()
        kernel = busy(100)
    block.record_stream(side)
    assert torch.cuda.current_device() == 0
    del block
    others = [bytes_in(pool, 8 * MIB) for _ in range(3)]
    assert not kernel.query(), "the other GPU was waited for"
    assert address not in {other.data_ptr() for other in others}
    assert state_at(pool.memory_snapshot(), address) == "active_pending_free"
    side.synchronize()
    assert bytes_in(pool, 8 * MIB).data_ptr() == address
    assert torch.cuda.current_device() == 0


# -- Streams that are no more ------------------------------------------------------------------------------------------

_HEAD = """
import ctypes
import torch, torch_vmm
torch_vmm.enable()
from tests.gpu.patterns import intact, queue_stamp
MIB = 2**20
pool = torch_vmm.VirtualMemoryPool("1GiB", physical_limit="64MiB")
torch.cuda.init()
torch.cuda.synchronize()
driver = ctypes.CDLL("libcuda.so.1")
handle = ctypes.c_void_p()
assert driver.cuStreamCreate(ctypes.byref(handle), 1) == 0
foreign = torch.cuda.ExternalStream(handle.value)
def destroy():
    assert driver.cuStreamDestroy_v2(handle) == 0
def block(size=20 * MIB):
    with pool:
        return torch.empty(size, dtype=torch.uint8, device="cuda")
def pending():
    return pool.memory_stats()["active_bytes.all.current"] - pool.memory_allocated()
result = torch.empty(20 * MIB, dtype=torch.uint8, device="cuda")
queue_stamp(result, 9)  # loads the kernels
torch.cuda.synchronize()
torch.cuda.set_stream(torch.cuda.Stream())
def copy_late(one):
    with torch.cuda.stream(foreign):
        torch.cuda._sleep(300_000_000)
        result.copy_(one)
def end():
    torch.cuda.synchronize()
    last = [block() for _ in range(3)]  # the limit: everything can be had again
    assert pending() == 0
    assert pool.memory_stats()["num_ooms"] == 0
    torch.cuda.synchronize()
    print("done")
"""

PROGRAMS = {
    "destroyed after the free": """
one = queue_stamp(block(), 1)
torch.cuda.synchronize()
copy_late(one)
one.record_stream(foreign)
del one
destroy()
others = [queue_stamp(block(), seed) for seed in (2, 3)]
torch.cuda.synchronize()
assert intact(result, 1)
assert all(intact(other, seed) for seed, other in enumerate(others, 2))
del others
end()
""",
    "destroyed before its own memory is freed": """
with torch.cuda.stream(foreign):
    one = queue_stamp(block(), 1)
torch.cuda.synchronize()
copy_late(one)
destroy()
del one
others = [queue_stamp(block(), seed) for seed in (2, 3, 4)]
torch.cuda.synchronize()
assert intact(result, 1)
assert all(intact(other, seed) for seed, other in enumerate(others, 2))
del others
pool.empty_cache()
assert pool.physical_memory_usage == 0
end()
""",
}


@pytest.fixture(scope="module")
def started() -> Iterator[dict[str, Process]]:
    with running({name: _HEAD + body for name, body in PROGRAMS.items()}) as processes:
        yield processes


@pytest.mark.no_memcheck  # other processes
@pytest.mark.parametrize(
    "name",
    [
        # A question about a dead stream may crash CUDA as well; the stand-in always ends the process.
        name if "own memory" in name else pytest.param(name, marks=pytest.mark.needs_gpu("CUDA is asked of the dead"))
        for name in PROGRAMS
    ],
)
def test_a_destroyed_stream_does_no_harm(started: dict[str, Process], name: str) -> None:
    expect_done(started[name])
