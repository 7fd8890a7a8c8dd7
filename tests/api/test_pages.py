"""Explicit pages of a pool: allocate(offset, size) and its kind, tensors over them and beside them."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest
import torch

import torch_vmm
from tests.helpers import MIB, PAGE, assert_adds_up, holds, is_zero, stamp

Pool = torch_vmm.VirtualMemoryPool
MakePool = Callable[..., Pool]


# -- Explicit pages ----------------------------------------------------------------------------------------------------


def test_allocate_backs_the_range_with_zeros(pool: Pool) -> None:
    assert pool.allocate(4 * PAGE, 3 * PAGE) == pool.base_address + 4 * PAGE
    assert pool.physical_memory_usage == 3 * PAGE
    assert is_zero(pool.tensor(4 * PAGE, 3 * PAGE))
    stats = assert_adds_up(pool)
    assert (stats.allocated_bytes, stats.mapped_pages) == (3 * PAGE, 3)


def test_is_mapped_by_page(pool: Pool) -> None:
    pool.allocate(PAGE, 2 * PAGE)
    assert [pool.is_mapped(page * PAGE, PAGE) for page in range(4)] == [False, True, True, False]
    assert pool.is_mapped(PAGE, 2 * PAGE)
    assert not pool.is_mapped(0, 2 * PAGE)
    assert not pool.is_mapped(2 * PAGE, PAGE + 1)
    assert pool.is_mapped(2 * PAGE + 77, 1)


def test_unaligned_ranges_cover_whole_pages(pool: Pool) -> None:
    address = pool.allocate(PAGE + 100, PAGE)  # two pages
    assert pool.base_address + PAGE <= address <= pool.base_address + PAGE + 100
    assert pool.physical_memory_usage == 2 * PAGE
    assert pool.is_mapped(PAGE, 2 * PAGE)
    pool.deallocate(3 * PAGE - 1, 1)
    assert not pool.is_mapped(2 * PAGE, 1)
    assert pool.is_mapped(PAGE, PAGE)


def test_sizes_may_be_text(pool: Pool) -> None:
    assert pool.allocate("4MiB", "2 MiB") == pool.base_address + 4 * MIB
    assert pool.is_mapped("4mib", "2097152")
    pool.deallocate("4MiB", "2MiB")
    assert not pool.is_mapped("4MiB", 1)


def test_every_page_keeps_its_own_content(pool: Pool) -> None:
    pages = list(range(0, 32, 2)) + list(range(1, 32, 2))
    for page in pages:
        pool.allocate(page * PAGE, PAGE)
        stamp(pool.tensor(page * PAGE, PAGE), page)
    assert pool.physical_memory_usage == pool.capacity
    assert all(holds(pool.tensor(page * PAGE, PAGE), page) for page in pages)
    for page in range(0, 32, 3):
        pool.deallocate(page * PAGE, PAGE)
    assert all(holds(pool.tensor(page * PAGE, PAGE), page) for page in pages if page % 3)


def test_a_hole_can_be_made_and_filled(make_pool: MakePool) -> None:
    pool = make_pool("64MiB", page_size=PAGE)
    pool.allocate(0, 8 * PAGE)
    stamp(pool.tensor(0, 8 * PAGE), 1)
    before = [pool.tensor(0, 3 * PAGE).clone(), pool.tensor(5 * PAGE, 3 * PAGE).clone()]
    pool.deallocate(3 * PAGE, 2 * PAGE)
    assert pool.physical_memory_usage == 6 * PAGE
    assert torch.equal(pool.tensor(0, 3 * PAGE), before[0])
    assert torch.equal(pool.tensor(5 * PAGE, 3 * PAGE), before[1])
    pool.allocate(3 * PAGE, 2 * PAGE)
    assert holds(stamp(pool.tensor(3 * PAGE, 2 * PAGE), 2), 2)
    assert torch.equal(pool.tensor(5 * PAGE, 3 * PAGE), before[1])


def test_addresses_stay_while_memory_comes_and_goes(pool: Pool) -> None:
    first = pool.allocate(0, PAGE)
    pool.deallocate(0, PAGE)
    assert pool.allocate(0, PAGE) == first
    pool.deallocate(0, PAGE)
    assert pool.physical_memory_usage == 0


def test_a_range_that_is_taken_names_its_first_taken_page(pool: Pool) -> None:
    pool.allocate(5 * PAGE, PAGE)
    with pytest.raises(torch_vmm.AlreadyMappedError) as raised:
        pool.allocate(3 * PAGE, 4 * PAGE)
    assert (raised.value.offset, raised.value.size) == (5 * PAGE, PAGE)
    assert pool.physical_memory_usage == PAGE
    assert not pool.is_mapped(3 * PAGE, 1)
    pool.allocate(3 * PAGE, 2 * PAGE)


def test_a_range_that_is_not_held_names_its_first_missing_page(pool: Pool) -> None:
    pool.allocate(0, 4 * PAGE)
    pool.deallocate(2 * PAGE, PAGE)
    with pytest.raises(torch_vmm.NotMappedError) as raised:
        pool.deallocate(PAGE, 3 * PAGE)
    assert (raised.value.offset, raised.value.size) == (2 * PAGE, PAGE)
    assert pool.is_mapped(0, 2 * PAGE)
    assert pool.is_mapped(3 * PAGE, PAGE)


@pytest.mark.parametrize("call", ["allocate", "deallocate", "is_mapped"])
@pytest.mark.parametrize(
    ("offset", "size"),
    [
        (0, 0),
        (0, 64 * MIB + 1),
        (64 * MIB, 1),
        (PAGE, 2**64 - PAGE),
        (2**64 - PAGE, 2 * PAGE),
        (2**63, PAGE),
        (2**64, PAGE),
        (-PAGE, PAGE),
        (0, -1),
    ],
)
def test_ranges_that_cannot_be(pool: Pool, call: str, offset: int, size: int) -> None:
    with pytest.raises(torch_vmm.InvalidRangeError) as raised:
        getattr(pool, call)(offset, size)
    assert (raised.value.offset, raised.value.size, raised.value.capacity) == (offset, size, 64 * MIB)
    assert pool.physical_memory_usage == 0


# -- Tensors over explicit pages ---------------------------------------------------------------------------------------


def test_a_tensor_over_pages_has_its_shape_and_place(pool: Pool) -> None:
    pool.allocate(PAGE, PAGE)
    tensor = pool.tensor(PAGE + 1024, (5, 6), torch.float32)
    assert (tensor.shape, tensor.dtype, tensor.device) == ((5, 6), torch.float32, pool.device)
    assert tensor.data_ptr() == pool.base_address + PAGE + 1024
    assert torch_vmm.pool_of(tensor) is pool


def test_a_tensor_over_pages_that_are_not_held(pool: Pool) -> None:
    pool.allocate(0, PAGE)
    with pytest.raises(torch_vmm.NotMappedError) as raised:
        pool.tensor(PAGE - 4, (8,), torch.uint8)
    assert (raised.value.offset, raised.value.size) == (PAGE, PAGE)


def test_a_tensor_over_pages_that_is_not_aligned(pool: Pool) -> None:
    pool.allocate(0, PAGE)
    with pytest.raises(torch_vmm.InvalidArgumentError, match="align"):
        pool.tensor(2, (8,), torch.float32)


@pytest.mark.parametrize(("offset", "size"), [(0, 0), (64 * MIB - 1, 2), (2**64 - 8, 8), (-1, 1)])
def test_a_tensor_beyond_the_pool(pool: Pool, offset: int, size: int) -> None:
    with pytest.raises(torch_vmm.InvalidRangeError) as raised:
        pool.tensor(offset, size, torch.uint8)
    assert (raised.value.offset, raised.value.size, raised.value.capacity) == (offset, size, 64 * MIB)


def test_a_tensor_over_pages_keeps_a_pool_that_is_dropped(device: str) -> None:
    pool = torch_vmm.VirtualMemoryPool("64MiB", device=device)
    pool.allocate(0, PAGE)
    view = stamp(pool.tensor(0, (1024, 1024)), 6)[100:]
    expected = view.clone()
    address = pool.base_address
    del pool
    gc.collect()
    torch_vmm.VirtualMemoryPool("64MiB", device=device).allocate(0, PAGE)
    assert torch.equal(view, expected)
    kept = torch_vmm.pool_of(view)
    assert kept is not None
    assert kept.base_address == address
    assert not kept.is_closed
    del view, kept
    gc.collect()
    assert torch_vmm.pool_of(address) is None


# -- Tensors beside explicit pages -------------------------------------------------------------------------------------


def test_neither_takes_the_others_memory(make_pool: MakePool) -> None:
    pool = make_pool(8 * PAGE, page_size=PAGE)
    with pool:
        tensor = stamp(torch.empty(2 * PAGE, dtype=torch.uint8, device=pool.device), 1)
    offset = tensor.data_ptr() - pool.base_address
    with pytest.raises(torch_vmm.AlreadyMappedError) as raised:
        pool.allocate(offset, PAGE)
    assert raised.value.offset == offset // PAGE * PAGE
    with pytest.raises(torch_vmm.NotMappedError):
        pool.deallocate(offset, PAGE)
    assert pool.is_mapped(offset, 2 * PAGE)
    taken = 0
    for page in range(8):
        if not pool.is_mapped(page * PAGE, 1):
            pool.allocate(page * PAGE, PAGE)
            stamp(pool.tensor(page * PAGE, PAGE), page)
            taken += 1
    assert taken == 6
    assert holds(tensor, 1)
    with pool, pytest.raises(torch.OutOfMemoryError):
        torch.empty(PAGE, dtype=torch.uint8, device=pool.device)
    del tensor
    with pool:
        tensor = stamp(torch.empty(2 * PAGE, dtype=torch.uint8, device=pool.device), 9)
    assert torch_vmm.pool_of(tensor) is pool
    assert_adds_up(pool)


# -- Threads ----------------------------------------------------------------------------------------------------------


def test_one_page_goes_to_one_thread(make_pool: MakePool) -> None:
    pool = make_pool("64MiB", page_size=PAGE)
    barrier = threading.Barrier(8)
    won: list[int] = []
    lost: list[int] = []

    def work(thread: int) -> None:
        for page in range(32):
            barrier.wait()
            try:
                pool.allocate(page * PAGE, PAGE)
            except torch_vmm.AlreadyMappedError:
                lost.append(page)
            else:
                won.append(page)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == list(range(32))
    assert sorted(lost) == sorted(list(range(32)) * 7)
