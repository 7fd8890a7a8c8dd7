"""A pool's numbers: torch.cuda's names, keys and meanings, against what is really alive."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torch_vmm
from tests.helpers import KIB, MIB, PAGE, holds, rounded, stamp, tensor_in
from torch_vmm import _C

Pool = torch_vmm.VirtualMemoryPool
FAMILIES = [
    "active",
    "active_bytes",
    "allocated_bytes",
    "allocation",
    "inactive_split",
    "inactive_split_bytes",
    "requested_bytes",
    "reserved_bytes",
    "segment",
]
METRICS = ["allocated", "current", "freed", "peak"]
COUNTERS = [
    "max_split_size",
    "num_alloc_retries",
    "num_device_alloc",
    "num_device_free",
    "num_ooms",
    "num_sync_all_streams",
]


@pytest.fixture
def big(make_pool: Callable[..., Pool]) -> Pool:
    """4 GiB of addresses, chunks as the pool likes."""
    return make_pool("4GiB")


def made_in(pool: Pool, size: int) -> torch.Tensor:
    with pool:
        return torch.empty(size, dtype=torch.uint8, device=pool.device)


def assert_true(pool: Pool, live: list[torch.Tensor]) -> dict[str, int]:
    """Every number that can be known from the live tensors and the pool's other faces."""
    stats = pool.memory_stats()
    sizes = [tensor.untyped_storage().nbytes() for tensor in live]
    for kind, chosen in (
        ("all", sizes),
        ("small_pool", [size for size in sizes if size <= MIB]),
        ("large_pool", [size for size in sizes if size > MIB]),
    ):
        assert stats[f"allocation.{kind}.current"] == len(chosen)
        assert stats[f"allocated_bytes.{kind}.current"] == sum(map(rounded, chosen))
        assert stats[f"requested_bytes.{kind}.current"] == sum(chosen)
    for family in FAMILIES:
        for metric in METRICS if family not in ("inactive_split", "inactive_split_bytes") else ["current"]:
            if metric == "peak":
                continue
            parts = [stats[f"{family}.{kind}.{metric}"] for kind in ("small_pool", "large_pool")]
            assert stats[f"{family}.all.{metric}"] == sum(parts), (family, metric)
        whole = {metric: stats[f"{family}.all.{metric}"] for metric in METRICS}
        assert whole["peak"] >= whole["current"] >= 0
    assert stats["active_bytes.all.current"] == stats["allocated_bytes.all.current"]
    assert stats["reserved_bytes.all.current"] == pool.physical_memory_usage == pool.memory_reserved()
    assert pool.memory_allocated() == stats["allocated_bytes.all.current"] == pool.stats().allocated_bytes
    assert pool.max_memory_allocated() == stats["allocated_bytes.all.peak"]
    assert pool.max_memory_reserved() == stats["reserved_bytes.all.peak"]
    return stats


def test_the_keys_are_torchs(big: Pool) -> None:
    expected = {f"{family}.{kind}.{metric}" for family in FAMILIES for kind in KINDS for metric in METRICS}
    expected |= {f"{family}.{metric}" for family in ("oversize_allocations", "oversize_segments") for metric in METRICS}
    expected |= set(COUNTERS)
    assert len(expected) == 122
    keys = list(big.memory_stats())
    assert expected <= set(keys)
    assert keys == sorted(keys)
    if big.device.type == "cuda":
        torch.cuda.init()  # before it torch says nothing
        assert keys == list(torch.cuda.memory_stats(big.device))
    assert all(isinstance(value, int) for value in big.memory_stats().values())


KINDS = ["all", "small_pool", "large_pool"]


def test_an_untouched_pool_counts_nothing(big: Pool) -> None:
    assert set(big.memory_stats().values()) <= {0, -1, 2**63 - 1, 2**64 - 1}  # max_split_size has no limit
    assert assert_true(big, [])["num_ooms"] == 0


@pytest.mark.parametrize("size", [1, 511, 512, 513, 4 * KIB, MIB - 1, MIB, MIB + 1, 2 * MIB, 5 * MIB + 77, 33 * MIB])
def test_a_tensor_counts_as_its_size_rounded_to_512(big: Pool, size: int) -> None:
    tensor = made_in(big, size)
    stats = assert_true(big, [tensor])
    assert stats["allocated_bytes.all.current"] == rounded(size)
    assert tensor.data_ptr() % 512 == 0
    kind = "small_pool" if size <= MIB else "large_pool"
    assert stats[f"segment.{kind}.current"] >= 1
    assert stats["reserved_bytes.all.current"] % PAGE == 0
    assert stats["reserved_bytes.all.current"] >= rounded(size)
    del tensor
    assert assert_true(big, [])[f"allocated_bytes.{kind}.freed"] == rounded(size)


def test_nothing_costs_nothing(big: Pool) -> None:
    tensors = [made_in(big, 0) for _ in range(3)]
    assert assert_true(big, [])["allocation.all.allocated"] == 0
    del tensors


def test_explicit_pages_count_too(big: Pool) -> None:
    big.allocate(0, 3 * PAGE)
    big.allocate(8 * PAGE, 1)
    stats = big.memory_stats()
    assert stats["allocated_bytes.all.current"] == big.memory_allocated() == 4 * PAGE
    assert stats["reserved_bytes.all.current"] == big.memory_reserved() == 4 * PAGE
    big.deallocate(0, 3 * PAGE)
    assert (big.memory_allocated(), big.memory_reserved()) == (PAGE, PAGE)
    assert (big.max_memory_allocated(), big.max_memory_reserved()) == (4 * PAGE, 4 * PAGE)


@pytest.mark.parametrize("seed", range(3))
def test_numbers_stay_true_through_a_random_program(big: Pool, seed: int) -> None:
    chance = random.Random(seed)
    live: list[tuple[torch.Tensor, int]] = []
    allocated = freed = peak = total = 0
    for step in range(200):
        if live and chance.random() < 0.45:
            tensor, stamp_seed = live.pop(chance.randrange(len(live)))
            assert holds(tensor, stamp_seed), f"seed {seed}, step {step}"
            freed += rounded(tensor.numel())
            total -= rounded(tensor.numel())
            del tensor
        else:
            size = int(2 ** chance.uniform(0, 23))
            live.append((stamp(made_in(big, size), step), step))
            allocated += rounded(size)
            total += rounded(size)
            peak = max(peak, total)
        if step % 10 == 0:
            stats = assert_true(big, [tensor for tensor, _ in live])
            assert stats["allocated_bytes.all.allocated"] == allocated
            assert stats["allocated_bytes.all.freed"] == freed
            assert stats["allocated_bytes.all.peak"] == peak
            assert_tiles(big)
        if step % 50 == 49:
            big.trim("4MiB")
    assert all(holds(tensor, stamp_seed) for tensor, stamp_seed in live)


def test_peaks_can_be_reset(big: Pool) -> None:
    kept, gone = made_in(big, 2 * MIB), made_in(big, 10 * MIB)
    del gone
    assert big.max_memory_allocated() == 12 * MIB
    assert big.max_memory_reserved() >= 12 * MIB
    big.reset_peak_memory_stats()
    assert big.max_memory_allocated() == 2 * MIB
    assert big.max_memory_reserved() == big.memory_reserved()
    assert big.memory_stats()["allocated_bytes.all.allocated"] == 12 * MIB
    del kept


def test_totals_can_be_reset(big: Pool) -> None:
    kept, gone = made_in(big, 2 * MIB), made_in(big, 10 * MIB)
    del gone
    big.reset_accumulated_memory_stats()
    stats = assert_true(big, [kept])
    assert stats["allocated_bytes.all.allocated"] == stats["allocated_bytes.all.freed"] == 0
    assert stats["allocation.all.allocated"] == stats["num_device_alloc"] == 0
    assert stats["allocated_bytes.all.current"] == 2 * MIB
    assert stats["allocated_bytes.all.peak"] == 12 * MIB
    del kept
    assert big.memory_stats()["allocated_bytes.all.freed"] == 2 * MIB


def test_driver_calls_are_counted(big: Pool) -> None:
    tensor = made_in(big, 8 * MIB)
    stats = big.memory_stats()
    assert stats["num_device_alloc"] == stats["segment.all.current"] >= 1
    assert stats["num_device_free"] == 0
    del tensor
    big.empty_cache()
    after = big.memory_stats()
    assert after["num_device_free"] == stats["num_device_alloc"]
    assert after["segment.all.current"] == 0
    assert after["num_sync_all_streams"] == stats["num_sync_all_streams"] + 1


def test_an_out_of_memory_is_counted(make_pool: Callable[..., Pool]) -> None:
    pool = make_pool("64MiB", physical_limit="8MiB")
    for _ in range(3):
        with pytest.raises(torch.OutOfMemoryError):
            made_in(pool, 9 * MIB)
    assert pool.memory_stats()["num_ooms"] == 3
    assert pool.memory_stats()["num_alloc_retries"] >= 1


def test_pools_count_apart_and_add_up(make_pool: Callable[..., Pool], memory: _C.Device) -> None:
    before = memory.statistics()
    pools = [make_pool("256MiB") for _ in range(3)]
    tensors = [made_in(pool, (k + 1) * 3 * MIB) for k, pool in enumerate(pools)]
    for k, (pool, tensor) in enumerate(zip(pools, tensors, strict=True)):
        assert assert_true(pool, [tensor])["allocated_bytes.all.current"] == (k + 1) * 3 * MIB
    after = memory.statistics()
    key = "allocated_bytes.large_pool.current"
    assert after[key] - before[key] == 18 * MIB
    reserved = "reserved_bytes.all.current"
    assert after[reserved] - before[reserved] == sum(pool.memory_reserved() for pool in pools)
    assert after["allocated_bytes.all.peak"] >= after["allocated_bytes.all.current"]


def test_the_devices_peak_is_its_own(make_pool: Callable[..., Pool], memory: _C.Device) -> None:
    first, second = make_pool("256MiB"), make_pool("256MiB")
    memory.reset_peaks()
    base = memory.statistics()["allocated_bytes.large_pool.current"]
    for pool in (first, second):  # one after the other: 16 MiB at a time, never 32
        tensor = made_in(pool, 16 * MIB)
        del tensor
    assert first.max_memory_allocated() == second.max_memory_allocated() == 16 * MIB
    assert memory.statistics()["allocated_bytes.large_pool.peak"] == base + 16 * MIB


# -- The table ---------------------------------------------------------------------------------------------------------


def test_the_summary_is_torchs_table(big: Pool) -> None:
    tensors = [made_in(big, 3 * MIB), made_in(big, 100)]
    text = big.memory_summary()
    lines = text.splitlines()
    assert {len(line) for line in lines} == {77}
    assert all(line.startswith("|") and line.endswith("|") for line in lines)
    assert repr(big.name) in lines[1]
    assert str(big.device) in lines[1]
    allocated = next(line for line in lines if "Allocated memory" in line)
    assert [cell.split() for cell in allocated.strip("|").split("|")[1:]] == [
        ["3072", "KiB"],
        ["3072", "KiB"],
        ["3072", "KiB"],
        ["0", "B"],
    ]
    assert sum("from large pool" in line for line in lines) == 9
    del tensors


def test_the_short_summary_leaves_the_parts_out(big: Pool) -> None:
    short = big.memory_summary(abbreviated=True)
    assert "from large pool" not in short
    assert "Allocated memory" in short
    assert len(short) < len(big.memory_summary())


# -- The snapshot ------------------------------------------------------------------------------------------------------


def assert_tiles(pool: Pool) -> list[dict[str, Any]]:
    """Segments in order, blocks that tile them, and sums that are the statistics."""
    segments = pool.memory_snapshot()
    stats = pool.memory_stats()
    end = 0
    for segment in segments:
        assert segment["address"] >= end
        end = segment["address"] + segment["total_size"]
        assert pool.base_address <= segment["address"]
        assert end <= pool.base_address + pool.capacity
        at = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == at
            at += block["size"]
        assert at == end
        live = [block for block in segment["blocks"] if block["state"] == "active_allocated"]
        assert segment["allocated_size"] == sum(block["size"] for block in live)
        assert segment["requested_size"] == sum(block["requested_size"] for block in live)
    assert sum(segment["total_size"] for segment in segments) == stats["reserved_bytes.all.current"]
    assert sum(segment["allocated_size"] for segment in segments) == stats["allocated_bytes.all.current"]
    assert sum(segment["requested_size"] for segment in segments) == stats["requested_bytes.all.current"]
    return segments


def test_the_snapshot_shows_every_block(big: Pool) -> None:
    tensors = [made_in(big, size) for size in (100, 600, 3 * MIB, 7 * MIB)]
    segments = assert_tiles(big)
    blocks = {
        block["address"]: (block["size"], block["requested_size"], segment["segment_type"])
        for segment in segments
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }
    assert blocks == {
        tensor.data_ptr(): (rounded(tensor.numel()), tensor.numel(), "small" if tensor.numel() <= MIB else "large")
        for tensor in tensors
    }
    for key in ("device", "stream", "active_size", "segment_pool_id", "is_expandable"):
        assert all(key in segment for segment in segments)
    del tensors
    big.empty_cache()
    assert assert_tiles(big) == []


def test_the_snapshot_is_what_memory_viz_reads(big: Pool) -> None:
    from torch.cuda._memory_viz import segsum

    tensors = [made_in(big, 3 * MIB), made_in(big, 100)]
    snapshot = {"segments": big.memory_snapshot(), "device_traces": []}
    assert "3.0MiB" in segsum(snapshot)
    del tensors


# -- On a GPU, torch's own functions -----------------------------------------------------------------------------------


def test_torch_cuda_reports_the_device(make_pool: Callable[..., Pool], memory: _C.Device) -> None:
    if memory.kind == "cpu":
        pytest.skip("torch has no such functions for the host")
    pools = [make_pool("256MiB") for _ in range(2)]
    before = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
    tensors = [made_in(pool, 5 * MIB) for pool in pools]
    assert torch.cuda.memory_allocated() - before[0] == 10 * MIB
    assert torch.cuda.memory_reserved() - before[1] == sum(pool.memory_reserved() for pool in pools)
    assert torch.cuda.memory_stats() == dict(sorted(memory.statistics().items()))
    assert torch.accelerator.memory_allocated() == torch.cuda.memory_allocated()
    assert "PyTorch CUDA memory summary" in torch.cuda.memory_summary()
    free, total = torch.cuda.mem_get_info()
    assert 0 < free < total == memory.total_bytes
    del tensors


def test_what_one_model_resets_the_device_goes_on_counting(
    make_pool: Callable[..., torch_vmm.VirtualMemoryPool], memory: _C.Device
) -> None:
    a, b = make_pool("64MiB"), make_pool("64MiB")
    kept = [tensor_in(a, 1000) for _ in range(5)] + [tensor_in(b, 1000) for _ in range(7)]
    before = memory.statistics()
    assert a.memory_stats()["allocation.all.allocated"] == 5
    a.reset_accumulated_memory_stats()
    assert a.memory_stats()["allocation.all.allocated"] == 0
    assert memory.statistics() == before
    del kept
    after = memory.statistics()
    assert after["allocation.all.freed"] == before["allocation.all.freed"] + 12
    assert after["allocation.all.allocated"] - after["allocation.all.freed"] == after["allocation.all.current"]
