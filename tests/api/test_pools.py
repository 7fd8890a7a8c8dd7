"""VirtualMemoryPool: what it is made with, its limits, numbers and end. Its explicit pages are in test_pages.py."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import threading
from collections.abc import Callable

import pytest
import torch

import torch_vmm
from tests.helpers import GIB, MIB, PAGE, assert_adds_up, holds, stamp, tensor_in
from torch_vmm import _C

Pool = torch_vmm.VirtualMemoryPool
MakePool = Callable[..., Pool]


# -- What it is --------------------------------------------------------------------------------------------------------


def test_a_fresh_pool_is_addresses_only(pool: Pool, device: str) -> None:
    assert pool.capacity == 64 * MIB
    assert pool.page_size == PAGE
    assert pool.base_address % PAGE == 0
    assert pool.base_address > 0
    assert pool.device == torch.device("cuda:0" if device == "cuda" else "cpu")
    assert pool.model_id is None
    assert pool.physical_limit is None
    assert pool.physical_memory_usage == 0
    assert not pool.is_closed
    assert assert_adds_up(pool) == torch_vmm.MemoryStats(
        virtual_capacity=64 * MIB,
        physical_usage=0,
        mapped_pages=0,
        fragmentation_ratio=0.0,
        allocated_bytes=0,
        idle_bytes=0,
        stranded_bytes=0,
        quarantined_bytes=0,
    )


def test_a_huge_pool_costs_no_memory(make_pool: MakePool, memory: _C.Device) -> None:
    before = memory.committed_bytes
    pools = [make_pool("1TiB") for _ in range(4)]
    assert [pool.capacity for pool in pools] == [1024 * GIB] * 4
    assert memory.committed_bytes == before


def test_capacity_is_rounded_up_to_the_page(make_pool: MakePool) -> None:
    assert make_pool(1).capacity == PAGE
    assert make_pool("9MiB", page_size="4MiB").capacity == 12 * MIB


def test_page_size_defaults_to_the_granularity(make_pool: MakePool, memory: _C.Device) -> None:
    assert make_pool().page_size == memory.granularity == PAGE


def test_pools_do_not_overlap(make_pool: MakePool) -> None:
    pools = sorted((make_pool("1GiB") for _ in range(8)), key=lambda pool: pool.base_address)
    for lower, upper in itertools.pairwise(pools):
        assert lower.base_address + lower.capacity <= upper.base_address


def test_its_repr_says_which_and_how_full(make_pool: MakePool) -> None:
    pool = make_pool("64MiB", physical_limit="8MiB", name="scratch")
    pool.allocate(0, PAGE)
    for part in ("'scratch'", str(pool.device), "2 MiB mapped, capacity 64 MiB", "limit 8 MiB"):
        assert part in repr(pool)
    pool.close(force=True)
    assert "closed" in repr(pool)


def test_stats_are_frozen(pool: Pool) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        pool.stats().idle_bytes = 3  # type: ignore[misc]


@pytest.mark.parametrize("bad", [1.0, True, None, "", "two pages", b"2MiB"])
def test_sizes_that_are_none(make_pool: MakePool, pool: Pool, bad: object) -> None:
    for ask in (
        lambda: make_pool(bad),  # type: ignore[arg-type]
        lambda: pool.allocate(0, bad),  # type: ignore[arg-type]
        lambda: pool.allocate(bad, PAGE),  # type: ignore[arg-type]
        lambda: pool.trim(bad),  # type: ignore[arg-type]
    ):
        with pytest.raises(torch_vmm.InvalidArgumentError):
            ask()


@pytest.mark.parametrize("page_size", [3 * MIB, 65536, PAGE // 2, 1, 6 * MIB, -1, 2**63, 2**70])
def test_page_sizes_that_cannot_be(make_pool: MakePool, page_size: int) -> None:
    with pytest.raises(torch_vmm.InvalidPageSizeError) as raised:
        make_pool("64MiB", page_size=page_size)
    assert (raised.value.page_size, raised.value.granularity) == (page_size, PAGE)


def test_page_size_zero(make_pool: MakePool) -> None:
    with pytest.raises(torch_vmm.InvalidPageSizeError) as raised:
        make_pool("64MiB", page_size=0)
    assert raised.value.page_size == 0


@pytest.mark.parametrize("capacity", [0, -1, 2**61, 2**63 - 1, 2**63, 2**70])
def test_capacities_that_cannot_be(make_pool: MakePool, capacity: int) -> None:
    with pytest.raises(torch_vmm.InvalidArgumentError, match="capacity"):
        make_pool(capacity)


def test_more_addresses_than_there_are(device: str) -> None:
    pools: list[Pool] = []

    def exhaust() -> None:
        while len(pools) < 1000:
            pools.append(torch_vmm.VirtualMemoryPool("16TiB", device=device))

    with pytest.raises(torch_vmm.OutOfMemoryError, match="address"):
        exhaust()
    pools.pop().close()
    torch_vmm.VirtualMemoryPool("16TiB", device=device).close()
    for pool in pools:
        pool.close()


@pytest.mark.parametrize("page_size", [PAGE, 4 * PAGE])
def test_a_larger_page_is_given_back_as_a_whole(make_pool: MakePool, page_size: int) -> None:
    pool = make_pool("64MiB", page_size=page_size)
    pool.allocate(0, 1)
    assert pool.physical_memory_usage == page_size
    assert pool.stats().mapped_pages == 1
    pool.deallocate(page_size - 1, 1)
    assert pool.physical_memory_usage == 0


def test_large_requests_take_few_chunks(make_pool: MakePool, memory: _C.Device) -> None:
    pool = make_pool("1GiB")  # the pool chooses
    before = memory.live_chunks
    pool.allocate(0, "512MiB")
    assert memory.live_chunks - before == 1  # all of the request
    assert pool.physical_memory_usage == 512 * MIB
    pool.deallocate(0, "512MiB")


def test_a_device_that_does_not_exist(device: str) -> None:
    with pytest.raises(torch_vmm.NotAvailableError, match="99"):
        torch_vmm.VirtualMemoryPool("64MiB", device=f"{device}:99")


# -- Limits ------------------------------------------------------------------------------------------------------------


def test_a_pool_stops_at_its_limit(make_pool: MakePool) -> None:
    pool = make_pool("64MiB", page_size=PAGE, physical_limit=4 * PAGE, name="tight")
    assert pool.physical_limit == 4 * PAGE
    pool.allocate(0, 3 * PAGE)
    with pytest.raises(torch_vmm.OutOfMemoryError) as raised:
        pool.allocate(8 * PAGE, 2 * PAGE)
    error = raised.value
    assert isinstance(error, torch.OutOfMemoryError)
    assert (error.requested, error.available, error.limit, error.pool) == (2 * PAGE, PAGE, 4 * PAGE, "tight")
    for part in ("tight", "4 MiB", "8 MiB", "6 MiB"):  # who, how much, the limit, what is held
        assert part in str(error)
    assert pool.physical_memory_usage == 3 * PAGE
    assert not pool.is_mapped(8 * PAGE, 1)
    pool.allocate(8 * PAGE, PAGE)
    assert pool.physical_memory_usage == 4 * PAGE
    pool.deallocate(0, 2 * PAGE)
    pool.allocate(16 * PAGE, 2 * PAGE)
    assert pool.physical_memory_usage == 4 * PAGE


def test_a_limit_can_be_raised_lowered_and_lifted(make_pool: MakePool) -> None:
    pool = make_pool("64MiB", page_size=PAGE, physical_limit="4MiB")
    pool.allocate(0, 2 * PAGE)
    pool.physical_limit = 3 * PAGE
    pool.allocate(2 * PAGE, PAGE)
    pool.physical_limit = PAGE  # below what is in use: that stays, no more comes
    assert pool.physical_limit == PAGE
    assert pool.physical_memory_usage == 3 * PAGE
    with pytest.raises(torch_vmm.OutOfMemoryError):
        pool.allocate(3 * PAGE, PAGE)
    pool.deallocate(0, 2 * PAGE)
    with pytest.raises(torch_vmm.OutOfMemoryError):
        pool.allocate(3 * PAGE, PAGE)
    pool.deallocate(2 * PAGE, PAGE)
    pool.allocate(3 * PAGE, PAGE)
    pool.physical_limit = None
    assert pool.physical_limit is None
    pool.allocate(8 * PAGE, 8 * PAGE)


def test_above_a_lowered_limit_a_program_of_small_tensors_comes_to_a_stand(
    make_shared: Callable[..., torch_vmm.SharedMemoryPool],
) -> None:
    shared = make_shared("512MiB")
    model, other = shared.register_model("model"), shared.register_model("other")
    for size, count in ((4000, 6000), (MIB, 64)):
        held = [tensor_in(model, size) for _ in range(count)]
        model.physical_limit = 8 * MIB
        del held[::2]  # frees space, and hardly a chunk
        usage = model.stats().physical_usage
        assert usage > 8 * MIB
        for _ in range(3):
            with pytest.raises(torch.OutOfMemoryError, match=r"'model': limit 8 MiB, mapped"):
                tensor_in(model, size)
        assert model.stats().physical_usage <= usage
        tensor_in(other, size)
        held.clear()
        assert model.stats().physical_usage <= 8 * MIB
        held.append(tensor_in(model, size))
        model.physical_limit = None
        held += [tensor_in(model, size) for _ in range(count)]
        held.clear()
        model.empty_cache()


def test_limits_that_cannot_be(make_pool: MakePool, pool: Pool) -> None:
    for bad in (-1, 1.5, "much"):
        with pytest.raises(torch_vmm.InvalidArgumentError):
            make_pool(physical_limit=bad)
        with pytest.raises(torch_vmm.InvalidArgumentError):
            pool.physical_limit = bad  # type: ignore[assignment]
    assert pool.physical_limit is None


def test_what_the_device_does_not_have(make_pool: MakePool, memory: _C.Device) -> None:
    pool = make_pool(4 * memory.total_bytes)
    with pytest.raises(torch_vmm.OutOfMemoryError) as raised:
        pool.allocate(0, memory.total_bytes + PAGE)
    assert raised.value.requested == memory.total_bytes + PAGE
    assert raised.value.available < memory.total_bytes + PAGE
    assert pool.physical_memory_usage == 0
    pool.allocate(0, PAGE)
    assert holds(stamp(pool.tensor(0, PAGE), 1), 1)


# -- Giving back -------------------------------------------------------------------------------------------------------


def test_a_small_tensor_strands_the_rest_of_its_page(make_pool: MakePool) -> None:
    pool = make_pool()
    with pool:
        tensor = torch.empty(100, dtype=torch.uint8, device=pool.device)
    stats = assert_adds_up(pool)
    assert (stats.physical_usage, stats.allocated_bytes, stats.stranded_bytes) == (PAGE, 512, PAGE - 512)
    assert stats.fragmentation_ratio == pytest.approx((PAGE - 512) / PAGE)
    assert pool.compact() == 0
    del tensor


def test_compact_gives_back_what_nothing_uses(make_pool: MakePool, memory: _C.Device) -> None:
    memory.empty_cache()  # what closed pools have left would go with it
    pool = make_pool()
    with pool:
        tensors = [torch.empty(8 * MIB, dtype=torch.uint8, device=pool.device) for _ in range(4)]
    for seed, tensor in enumerate(tensors):
        stamp(tensor, seed)
    assert pool.physical_memory_usage == 32 * MIB
    del tensor, tensors[2], tensors[0]
    assert assert_adds_up(pool).idle_bytes == 16 * MIB
    before = memory.committed_bytes
    assert pool.compact() == 16 * MIB
    assert memory.committed_bytes == before - 16 * MIB
    assert assert_adds_up(pool).physical_usage == 16 * MIB
    assert [holds(tensor, seed) for tensor, seed in zip(tensors, (1, 3), strict=True)] == [True, True]
    assert pool.compact() == 0


def test_trim_keeps_what_it_is_told(make_pool: MakePool, memory: _C.Device) -> None:
    memory.empty_cache()  # what closed pools have left would go with it
    pool = make_pool()
    with pool:
        tensors = [torch.empty(4 * MIB, dtype=torch.uint8, device=pool.device) for _ in range(6)]
    tensors.clear()
    assert pool.trim("64MiB") == 0
    assert pool.trim("8MiB") == 16 * MIB
    assert assert_adds_up(pool).idle_bytes == 8 * MIB
    assert pool.trim() == 8 * MIB
    assert pool.physical_memory_usage == 0


def test_empty_cache_gives_all_back(make_pool: MakePool) -> None:
    pool = make_pool()
    with pool:
        torch.empty(4 * MIB, dtype=torch.uint8, device=pool.device)
    assert pool.physical_memory_usage == 4 * MIB
    pool.empty_cache()
    assert pool.physical_memory_usage == 0


# -- The end -----------------------------------------------------------------------------------------------------------


def test_closing_what_is_in_use(pool: Pool) -> None:
    pool.allocate(0, 3 * PAGE)
    with pytest.raises(torch_vmm.StillInUseError) as raised:
        pool.close()
    assert (raised.value.live_bytes, raised.value.live_blocks) == (3 * PAGE, 1)
    assert not pool.is_closed
    assert holds(stamp(pool.tensor(0, PAGE), 1), 1)
    pool.deallocate(0, 3 * PAGE)
    pool.close()
    assert pool.is_closed


def test_closing_gives_all_back(make_pool: MakePool, memory: _C.Device) -> None:
    memory.empty_cache()
    before = (memory.committed_bytes, len(memory.pools()))
    pool = make_pool()
    pool.allocate(0, 8 * PAGE)
    pool.deallocate(0, 8 * PAGE)
    pool.close()
    pool.close()
    memory.empty_cache()
    assert (memory.committed_bytes, len(memory.pools())) == before
    assert torch_vmm.pool_of(pool.base_address) is None


def test_a_closed_pool_takes_no_more_requests(pool: Pool) -> None:
    pool.close()
    for ask in (lambda: pool.allocate(0, PAGE), lambda: pool.deallocate(0, PAGE), pool.__enter__):
        with pytest.raises(torch_vmm.InvalidArgumentError, match="closed"):
            ask()
    with pytest.raises(torch_vmm.InvalidArgumentError, match="closed"), torch_vmm.use_model(pool):
        pass


def test_tensors_survive_a_forced_close(make_pool: MakePool, memory: _C.Device) -> None:
    memory.empty_cache()
    before = memory.committed_bytes
    pool = make_pool()
    pool.allocate(0, PAGE)
    with pool:
        tensors = [stamp(torch.empty(3 * MIB, dtype=torch.uint8, device=pool.device), seed) for seed in range(3)]
    pool.close(force=True)
    assert pool.is_closed
    make_pool().allocate(0, 16 * PAGE)
    assert all(holds(tensor, seed) for seed, tensor in enumerate(tensors))
    assert torch_vmm.pool_of(tensors[0]) is pool
    tensors.clear()
    assert torch_vmm.pool_of(pool.base_address) is None
    make_pool().close()
    memory.empty_cache()
    assert memory.committed_bytes == before + 16 * PAGE


def test_a_pool_that_is_dropped_ends_with_its_last_tensor(device: str, memory: _C.Device) -> None:
    before = {pool.base_address for pool in memory.pools()}
    pool = torch_vmm.VirtualMemoryPool("64MiB", device=device)
    with pool:
        tensor = stamp(torch.empty(3 * MIB, dtype=torch.uint8, device=device), 4)
    address = pool.base_address
    del pool
    gc.collect()
    with torch_vmm.VirtualMemoryPool("64MiB", device=device):
        other = torch.empty(8 * MIB, dtype=torch.uint8, device=device).fill_(255)
    assert holds(tensor, 4)
    left = torch_vmm.pool_of(tensor)
    assert left is not None
    assert (left.is_closed, left.base_address) == (True, address)
    del tensor, left, other
    gc.collect()
    assert torch_vmm.pool_of(address) is None
    assert {pool.base_address for pool in memory.pools()} <= before


def test_the_default_pool_never_ends(device: str) -> None:
    default = torch_vmm.current_pool(device)
    assert default.name == "default"
    with pytest.raises(torch_vmm.InvalidArgumentError, match="default"):
        default.close()


# -- Threads -----------------------------------------------------------------------------------------------------------


def test_threads_share_a_pool(make_pool: MakePool) -> None:
    pool = make_pool("64MiB", page_size=PAGE)
    wrong: list[str] = []

    def work(thread: int) -> None:
        # Each thread has four of the pages, so nobody may disturb anybody.
        for step in range(40):
            page = thread * 4 + step % 4
            pool.allocate(page * PAGE, PAGE)
            view = stamp(pool.tensor(page * PAGE, 65536), thread * 1000 + step)
            if not holds(view, thread * 1000 + step):
                wrong.append(f"page {page} changed at step {step}")
            del view  # it holds the page
            pool.deallocate(page * PAGE, PAGE)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert pool.physical_memory_usage == 0
