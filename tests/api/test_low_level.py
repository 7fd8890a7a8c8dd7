"""VirtualMemoryManager and what it gives out."""

from __future__ import annotations

import gc
import itertools
import random

import pytest
import torch

import torch_vmm
from tests.api.mapped import READ_WRITE, backed
from tests.helpers import PAGE, holds, is_zero, stamp
from torch_vmm import _C, AccessFlags

# -- What it gives out -------------------------------------------------------------------------------------------------


def test_granularity_is_the_page(manager: torch_vmm.VirtualMemoryManager) -> None:
    assert manager.granularity == PAGE


def test_a_manager_knows_its_device(manager: torch_vmm.VirtualMemoryManager, device: str) -> None:
    assert manager.device == torch.device("cuda:0" if device == "cuda" else "cpu")
    assert str(manager.device) in repr(manager)


def test_host_memory_is_counted_apart(manager: torch_vmm.VirtualMemoryManager) -> None:
    assert manager.host_memory_usage == 0
    manager.free_physical(manager.alloc_physical(PAGE))
    kept = manager.alloc_physical(2 * PAGE)  # the manager's own device, be that a GPU or the host
    assert manager.host_memory_usage == 0
    manager.free_physical(kept)


def test_access_flags_as_text() -> None:
    assert [str(flag) for flag in (AccessFlags.NONE, AccessFlags.READ, AccessFlags.READ_WRITE)] == [
        "None",
        "Read",
        "ReadWrite",
    ]


def test_a_range_knows_its_bounds(manager: torch_vmm.VirtualMemoryManager) -> None:
    range_ = manager.reserve(3 * PAGE)
    assert range_.size == 3 * PAGE
    assert range_.alignment == PAGE
    assert range_.base % PAGE == 0
    assert range_.end == range_.base + 3 * PAGE
    assert [range_.contains(range_.base + at) for at in (-1, 0, 3 * PAGE - 1, 3 * PAGE)] == [False, True, True, False]


def test_a_range_and_an_allocation_equal_nothing_else(manager: torch_vmm.VirtualMemoryManager) -> None:
    range_, physical = manager.reserve(PAGE), manager.alloc_physical(PAGE)
    for one in (range_, physical):
        assert one == one
        assert one != None  # noqa: E711
        assert one not in (None, 0, "one")
    assert range_ != physical
    assert [None, physical, range_].index(range_) == 2


def test_a_range_as_text(manager: torch_vmm.VirtualMemoryManager) -> None:
    range_ = manager.reserve(8 * PAGE, alignment=4 * PAGE)
    assert str(range_) == f"VA[{range_.base:#x}..{range_.end:#x}, {8 * PAGE} bytes, align={4 * PAGE}]"


@pytest.mark.parametrize("alignment", [PAGE, 16 * PAGE, 512 * PAGE])
def test_a_range_is_aligned_as_asked(manager: torch_vmm.VirtualMemoryManager, alignment: int) -> None:
    range_ = manager.reserve(alignment, alignment=alignment)
    assert range_.base % alignment == 0
    assert range_.alignment == alignment


def test_ranges_do_not_overlap(manager: torch_vmm.VirtualMemoryManager) -> None:
    ranges = sorted((manager.reserve(PAGE * (1 + k % 3)) for k in range(20)), key=lambda range_: range_.base)
    assert all(lower.end <= upper.base for lower, upper in itertools.pairwise(ranges))


def test_an_allocation_knows_itself(manager: torch_vmm.VirtualMemoryManager) -> None:
    physical = manager.alloc_physical("4 MiB")
    assert (physical.size, physical.device) == (4 * 2**20, 0)
    assert physical.handle > 0
    assert str(physical) == f"PhysAlloc[handle={physical.handle:#x}, {4 * 2**20} bytes, dev=0]"


def test_sizes_may_be_text(manager: torch_vmm.VirtualMemoryManager) -> None:
    range_ = manager.reserve("8MiB", alignment="4 mib")
    assert (range_.size, range_.alignment) == (4 * PAGE, 2 * PAGE)
    manager.map(range_, manager.alloc_physical("2MiB"), "4MiB")
    manager.set_access(range_, READ_WRITE, offset="4MiB", size="2MiB")
    assert [record.va_offset for record in manager.mappings(range_)] == [2 * PAGE]
    manager.unmap(range_, "4MiB", "2MiB")
    assert manager.mappings(range_) == []


# -- Mapping -----------------------------------------------------------------------------------------------------------


def test_fresh_memory_is_zero_and_keeps_what_is_written(manager: torch_vmm.VirtualMemoryManager) -> None:
    range_ = backed(manager, 3)
    tensor = manager.tensor(range_, 0, (3 * PAGE,), torch.uint8)
    assert tensor.data_ptr() == range_.base
    assert is_zero(tensor)
    assert holds(stamp(tensor, 1), 1)


def test_one_allocation_at_several_addresses_is_one_memory(manager: torch_vmm.VirtualMemoryManager) -> None:
    first, second = manager.reserve(4 * PAGE), manager.reserve(2 * PAGE)
    physical = manager.alloc_physical(2 * PAGE)
    places = [(first, 0), (first, 2 * PAGE), (second, 0)]
    for range_, offset in places:
        manager.map(range_, physical, offset)
        manager.set_access(range_, READ_WRITE, offset=offset, size=2 * PAGE)
    views = [manager.tensor(range_, offset, 2 * PAGE, torch.uint8) for range_, offset in places]
    for seed, writer in enumerate(views):
        stamp(writer, seed)
        assert all(holds(view, seed) for view in views)
    del writer, views
    manager.unmap(first, 0, 2 * PAGE)
    assert holds(manager.tensor(second, 0, 2 * PAGE, torch.uint8), 2)


def test_memory_keeps_its_content_from_one_mapping_to_the_next(manager: torch_vmm.VirtualMemoryManager) -> None:
    range_ = manager.reserve(2 * PAGE)
    physical = manager.alloc_physical(PAGE)
    for offset in (0, PAGE):
        manager.map(range_, physical, offset)
        manager.set_access(range_, READ_WRITE)
        tensor = manager.tensor(range_, offset, PAGE, torch.uint8)
        if offset == 0:
            stamp(tensor, 5)
        else:
            assert holds(tensor, 5)
        del tensor
        manager.unmap(range_, offset, PAGE)
    assert manager.mappings(range_) == []


def test_many_mappings_in_one_range_are_recorded_by_offset(manager: torch_vmm.VirtualMemoryManager) -> None:
    pages = 48
    range_ = manager.reserve(pages * PAGE)
    order = list(range(0, pages, 2))
    random.Random(3).shuffle(order)
    handles = {}
    for page in order:
        physical = manager.alloc_physical(PAGE)
        handles[page * PAGE] = physical.handle
        manager.map(range_, physical, page * PAGE)
    assert len(set(handles.values())) == len(order)
    manager.set_access(range_, READ_WRITE)
    for page in order:
        stamp(manager.tensor(range_, page * PAGE, PAGE, torch.uint8), page)
    records = manager.mappings(range_)
    assert [record.va_offset for record in records] == sorted(handles)
    assert all(record.phys_handle == handles[record.va_offset] for record in records)
    assert all((record.size, record.access) == (PAGE, READ_WRITE) for record in records)
    assert all(holds(manager.tensor(range_, page * PAGE, PAGE, torch.uint8), page) for page in order)


def test_a_mapping_has_no_access_until_it_is_given(manager: torch_vmm.VirtualMemoryManager) -> None:
    range_ = manager.reserve(PAGE)
    manager.map(range_, manager.alloc_physical(PAGE))
    assert [record.access for record in manager.mappings(range_)] == [AccessFlags.NONE]
    with pytest.raises(torch_vmm.InvalidArgumentError, match="access"):
        manager.tensor(range_, 0, 16, torch.uint8)


def test_access_is_given_and_taken_by_mapping(manager: torch_vmm.VirtualMemoryManager) -> None:
    range_ = backed(manager, 4)
    stamp(manager.tensor(range_, PAGE, 2 * PAGE, torch.uint8), 9)
    manager.set_access(range_, AccessFlags.READ, offset=PAGE, size=2 * PAGE)
    manager.set_access(range_, AccessFlags.NONE, offset=3 * PAGE, size=PAGE)
    assert [str(record.access) for record in manager.mappings(range_)] == ["ReadWrite", "Read", "Read", "None"]
    assert holds(manager.tensor(range_, PAGE, 2 * PAGE, torch.uint8), 9)  # readable, unchanged
    with pytest.raises(torch_vmm.InvalidArgumentError, match="access"):
        manager.tensor(range_, 2 * PAGE, 2 * PAGE, torch.uint8)
    manager.set_access(range_, READ_WRITE)
    assert {str(record.access) for record in manager.mappings(range_)} == {"ReadWrite"}
    assert holds(manager.tensor(range_, PAGE, 2 * PAGE, torch.uint8), 9)


def test_access_is_given_to_several_devices(manager: torch_vmm.VirtualMemoryManager, device: str) -> None:
    range_ = backed(manager, 1)
    manager.set_access(range_, AccessFlags.READ, device=[device, torch.device(device)])
    assert [record.access for record in manager.mappings(range_)] == [AccessFlags.READ]


# -- Tensors over it ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32, torch.int64, torch.complex64])
def test_a_tensor_has_its_shape_and_place(manager: torch_vmm.VirtualMemoryManager, dtype: torch.dtype) -> None:
    range_ = backed(manager, 1)
    tensor = manager.tensor(range_, 4096, (3, 5, 7), dtype)
    assert (tensor.shape, tensor.dtype, tensor.device) == ((3, 5, 7), dtype, manager.device)
    assert tensor.is_contiguous()
    assert tensor.data_ptr() == range_.base + 4096


def test_a_tensor_crosses_mappings(manager: torch_vmm.VirtualMemoryManager) -> None:
    range_ = backed(manager, 4)
    tensor = manager.tensor(range_, PAGE - 512, (PAGE + 1024) // 4, torch.int32)
    assert holds(stamp(tensor, 2), 2)


def test_a_tensor_keeps_its_range(manager: torch_vmm.VirtualMemoryManager) -> None:
    range_ = backed(manager, 2)
    view = manager.tensor(range_, 0, 1024, torch.uint8)[100:200].view(10, 10)
    for give_back in (
        lambda: manager.unmap(range_, 0, 2 * PAGE),
        lambda: manager.release(range_),
        manager.close,
    ):
        with pytest.raises(torch_vmm.StillInUseError) as raised:
            give_back()
        assert raised.value.live_blocks >= 1
        assert raised.value.live_bytes > 0
    assert holds(stamp(view, 4), 4)
    del view
    manager.unmap(range_, 0, 2 * PAGE)
    manager.release(range_)


def test_a_tensor_outlives_its_manager(device: str) -> None:
    manager = torch_vmm.VirtualMemoryManager(device)
    tensor = stamp(manager.tensor(backed(manager, 2), 0, 2 * PAGE, torch.uint8), 7)
    del manager
    gc.collect()
    assert holds(tensor, 7)


@pytest.mark.parametrize(("offset", "size"), [(0, 0), (0, PAGE + 1), (PAGE, 1), (2**64 - 8, 8), (-8, 8)])
def test_a_tensor_beyond_the_range(manager: torch_vmm.VirtualMemoryManager, offset: int, size: int) -> None:
    range_ = backed(manager, 1)
    with pytest.raises(torch_vmm.InvalidRangeError) as raised:
        manager.tensor(range_, offset, size, torch.uint8)
    assert (raised.value.offset, raised.value.size, raised.value.capacity) == (offset, size, PAGE)


def test_a_tensor_over_nothing(manager: torch_vmm.VirtualMemoryManager) -> None:
    range_ = manager.reserve(3 * PAGE)
    manager.map(range_, manager.alloc_physical(PAGE), 0)
    manager.set_access(range_, READ_WRITE)
    with pytest.raises(torch_vmm.NotMappedError) as raised:
        manager.tensor(range_, 0, PAGE + 1, torch.uint8)
    assert raised.value.offset == PAGE


def test_a_tensor_that_is_not_aligned(manager: torch_vmm.VirtualMemoryManager) -> None:
    with pytest.raises(torch_vmm.InvalidArgumentError, match="align"):
        manager.tensor(backed(manager, 1), 2, 4, torch.float32)


# -- The end -----------------------------------------------------------------------------------------------------------


def test_closing_gives_back_all_that_it_made(device: str, memory: _C.Device) -> None:
    before = (memory.committed_bytes, memory.live_chunks)
    with torch_vmm.VirtualMemoryManager(device) as manager:
        backed(manager, 4)
        manager.alloc_physical(3 * PAGE)
        assert memory.committed_bytes == before[0] + 7 * PAGE
    assert (memory.committed_bytes, memory.live_chunks) == before
    assert manager.is_closed
    manager.close()
    for act in (lambda: manager.reserve(PAGE), lambda: manager.alloc_physical(PAGE)):
        with pytest.raises(torch_vmm.InvalidArgumentError, match="closed"):
            act()


def test_dropping_gives_back_all_that_it_made(device: str, memory: _C.Device) -> None:
    before = (memory.committed_bytes, memory.live_chunks)
    manager = torch_vmm.VirtualMemoryManager(device)
    backed(manager, 4)
    del manager
    gc.collect()
    assert (memory.committed_bytes, memory.live_chunks) == before


def test_an_error_inside_with_is_not_hidden(device: str) -> None:
    kept = []

    def work() -> None:
        with torch_vmm.VirtualMemoryManager(device) as manager:
            kept.append(manager.tensor(backed(manager, 1), 0, 16, torch.uint8))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    kept.clear()


@pytest.mark.parametrize(
    "record", [torch_vmm.VirtualAddressRange, torch_vmm.PhysicalAllocation, torch_vmm.MappingRecord]
)
def test_records_are_made_by_a_manager_alone(record: type) -> None:
    class Derived(record):  # type: ignore[misc,valid-type]
        pass

    for make in (record, lambda: record.__new__(record), lambda: record(1, size=2), Derived):
        with pytest.raises(torch_vmm.InvalidArgumentError, match=rf"{record.__name__}: .*\(\) makes them"):
            make()
