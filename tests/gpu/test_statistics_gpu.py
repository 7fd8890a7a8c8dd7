"""torch.cuda's memory functions against sums over the tensors that live."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

import torch_vmm
from tests.consistency import KEYS
from tests.gpu.conftest import Busy
from tests.gpu.memory import bytes_in
from tests.helpers import GIB, MIB, rounded
from torch_vmm import _C

MakeShared = Callable[..., torch_vmm.SharedMemoryPool]
MakePool = Callable[..., torch_vmm.VirtualMemoryPool]


def test_every_key_of_the_native_allocator_is_there(make_pool: MakePool) -> None:
    assert set(torch.cuda.memory_stats()) >= KEYS
    assert set(make_pool("1GiB").memory_stats()) >= KEYS


def test_random_allocations_are_counted_exactly(make_shared: MakeShared) -> None:
    shared = make_shared("4GiB")
    pools = [shared.register_model(f"model-{number}") for number in range(3)]
    chance = random.Random(5)
    live: list[tuple[int, torch.Tensor]] = []
    base = torch.cuda.memory_stats()
    most = [0, 0, 0]
    for _ in range(600):
        if live and chance.random() < 0.45:
            live.pop(chance.randrange(len(live)))
        else:
            number, size = chance.randrange(3), int(2 ** chance.uniform(0, 24))
            live.append((number, bytes_in(pools[number], size)))
        for number, pool in enumerate(pools):
            sizes = [block.numel() for owner, block in live if owner == number]
            stats = pool.memory_stats()
            expected = sum(map(rounded, sizes))
            most[number] = max(most[number], expected)
            assert stats["allocated_bytes.all.current"] == expected == pool.memory_allocated()
            assert stats["active_bytes.all.current"] == expected
            assert stats["requested_bytes.all.current"] == sum(sizes)
            assert stats["allocation.all.current"] == len(sizes)
            assert stats["allocated_bytes.small_pool.current"] == sum(rounded(size) for size in sizes if size <= MIB)
            assert stats["reserved_bytes.all.current"] == pool.physical_memory_usage >= expected
            assert stats["allocated_bytes.all.peak"] == most[number]
    now = torch.cuda.memory_stats()
    for key in ("allocated_bytes.all", "requested_bytes.all", "allocation.all"):
        grown = now[f"{key}.current"] - base[f"{key}.current"]
        assert grown == sum(pool.memory_stats()[f"{key}.current"] for pool in pools)
        flow = (now[f"{key}.allocated"] - now[f"{key}.freed"]) - (base[f"{key}.allocated"] - base[f"{key}.freed"])
        assert flow == grown


def test_the_device_is_the_sum_of_its_pools(make_shared: MakeShared) -> None:
    shared = make_shared("1GiB")
    kept = [bytes_in(shared.register_model(f"model-{number}"), (number + 1) * 9 * MIB) for number in range(3)]
    device = _C.device("cuda")
    assert torch.cuda.memory_allocated() == sum(
        pool.statistics()["allocated_bytes.all.current"] for pool in device.pools()
    )
    assert torch.cuda.memory_reserved() == sum(pool.physical_bytes for pool in device.pools())
    assert torch.cuda.memory_reserved() <= device.committed_bytes
    del kept


def test_the_peak_is_the_devices_own(make_shared: MakeShared) -> None:
    shared = make_shared("1GiB")
    one, other = shared.register_model("one"), shared.register_model("other")
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    for pool in (one, other):
        bytes_in(pool, 100 * MIB)  # one after the other
    assert torch.cuda.max_memory_allocated() - base == 100 * MIB
    assert one.max_memory_allocated() == other.max_memory_allocated() == 100 * MIB
    kept = [bytes_in(pool, 100 * MIB) for pool in (one, other)]  # both at once
    assert torch.cuda.max_memory_allocated() - base == 200 * MIB
    del kept
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated() == base
    assert torch.cuda.max_memory_reserved() == torch.cuda.memory_reserved()


def test_accumulated_counts_can_be_reset(make_pool: MakePool) -> None:
    pool = make_pool("1GiB")
    kept = bytes_in(pool, MIB)
    torch.cuda.reset_accumulated_memory_stats()
    pool.reset_accumulated_memory_stats()
    before = torch.cuda.memory_stats()
    assert before["allocation.all.allocated"] == before["allocation.all.freed"] == 0
    bytes_in(pool, 2 * MIB)
    after = torch.cuda.memory_stats()
    assert after["allocated_bytes.all.allocated"] == after["allocated_bytes.all.freed"] == 2 * MIB
    assert pool.memory_stats()["allocation.all.allocated"] == 1
    assert pool.memory_allocated() == kept.numel()


def test_torch_accelerator_says_the_same(make_pool: MakePool) -> None:
    kept = bytes_in(make_pool("1GiB"), 50 * MIB)
    assert torch.accelerator.memory_allocated() == torch.cuda.memory_allocated() >= 50 * MIB
    assert torch.accelerator.memory_reserved() == torch.cuda.memory_reserved()
    assert torch.accelerator.max_memory_allocated() == torch.cuda.max_memory_allocated()
    assert torch.accelerator.memory_stats()["allocated_bytes.all.current"] == torch.cuda.memory_allocated()
    del kept
    torch.accelerator.empty_cache()


@pytest.mark.alone  # it looks at the GPU's free memory
def test_empty_cache_gives_idle_memory_back_to_the_driver(make_pool: MakePool) -> None:
    pool = make_pool("8GiB")
    kept = bytes_in(pool, 3 * MIB)
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    bytes_in(pool, GIB)
    assert pool.memory_reserved() >= GIB
    torch.cuda.synchronize()
    assert free - torch.cuda.mem_get_info()[0] >= GIB
    torch.cuda.empty_cache()
    assert pool.memory_reserved() < 64 * MIB
    assert free - torch.cuda.mem_get_info()[0] < 64 * MIB
    assert int(kept.fill_(7).sum()) == 7 * kept.numel()


def test_a_free_that_waits_for_a_stream_is_active_not_allocated(make_pool: MakePool, busy: Busy) -> None:
    pool = make_pool("1GiB")
    side = torch.cuda.Stream()
    block = bytes_in(pool, 5 * MIB)
    with torch.cuda.stream(side):
        busy(50)
        block.fill_(1)
    block.record_stream(side)
    del block
    stats = pool.memory_stats()
    assert stats["allocated_bytes.all.current"] == 0
    assert stats["active_bytes.all.current"] == stats["requested_bytes.all.current"] == 5 * MIB
    assert pool.stats().quarantined_bytes >= 5 * MIB
    side.synchronize()
    bytes_in(pool, 512)
    assert pool.memory_stats()["active_bytes.all.current"] == 0
    assert pool.stats().quarantined_bytes == 0


def test_summaries_can_be_read(make_pool: MakePool) -> None:
    pool = make_pool("1GiB", name="read me")
    kept = bytes_in(pool, 300 * MIB)
    for text in (torch.cuda.memory_summary(), pool.memory_summary(), pool.memory_summary(abbreviated=True)):
        assert "Allocated memory" in text
        assert "Reserved" in text or "GPU reserved memory" in text
    assert "read me" in pool.memory_summary()
    assert "307200 KiB" in pool.memory_summary()  # in torch's way: up to six digits
    del kept


def test_snapshots_tile_and_add_up(make_shared: MakeShared) -> None:
    shared = make_shared("1GiB")
    pools = [shared.register_model(f"model-{number}") for number in range(2)]
    live = [bytes_in(pools[number % 2], 1000 + number * 77_777) for number in range(80)]
    del live[::3]
    for pool in pools:
        segments = pool.memory_snapshot()
        assert [segment["address"] for segment in segments] == sorted(segment["address"] for segment in segments)
        for segment in segments:
            assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
        stats = pool.memory_stats()
        assert sum(segment["total_size"] for segment in segments) == stats["reserved_bytes.all.current"]
        assert sum(segment["allocated_size"] for segment in segments) == stats["allocated_bytes.all.current"]
        assert sum(segment["active_size"] for segment in segments) == stats["active_bytes.all.current"]


@pytest.mark.parametrize("size", [1, 511, 512, 513, MIB, MIB + 1])
def test_sizes_are_rounded_as_torch_does(make_pool: MakePool, size: int) -> None:
    pool = make_pool("1GiB")
    kept = bytes_in(pool, size)
    assert pool.memory_allocated() == rounded(size)
    assert kept.data_ptr() % 512 == 0


def test_an_empty_tensor_takes_nothing(make_pool: MakePool) -> None:
    pool = make_pool("1GiB")
    kept = bytes_in(pool, 0)
    assert kept.data_ptr() == 0
    assert pool.memory_allocated() == pool.memory_reserved() == 0


def test_a_free_that_waited_for_a_stream_is_counted_though_the_model_sleeps(
    make_shared: MakeShared, busy: Busy
) -> None:
    model = make_shared("1GiB").register_model("llama")
    before = torch.cuda.memory_stats()
    tensor = bytes_in(model, 100 * MIB)
    side = torch.cuda.Stream()
    tensor.record_stream(side)
    torch.cuda.synchronize()
    model.sleep()
    with torch.cuda.stream(side):
        busy(50)
    del tensor
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    for key in ("active_bytes.all.current", "requested_bytes.all.current"):
        assert after[key] == before[key]
