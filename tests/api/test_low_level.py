"""VirtualMemoryManager and what it gives out."""

from __future__ import annotations

import gc
import itertools
import random
from collections.abc import Iterator

import pytest
import torch

import torch_vmm
from tests.helpers import PAGE, holds, is_zero, stamp
from torch_vmm import _C, AccessFlags

READ_WRITE = AccessFlags.READ_WRITE


@pytest.fixture
def manager(device: str) -> Iterator[torch_vmm.VirtualMemoryManager]:
    manager = torch_vmm.VirtualMemoryManager(device)
    yield manager
    gc.collect(0)
    manager.close()


def backed(manager: torch_vmm.VirtualMemoryManager, pages: int) -> torch_vmm.VirtualAddressRange:
    """A range with a mapping of its own for each page, readable and writable."""
    range_ = manager.reserve(pages * PAGE)
    for page in range(pages):
        manager.map(range_, manager.alloc_physical(PAGE), page * PAGE)
    manager.set_access(range_, READ_WRITE)
    return range_


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


# -- Bad input ---------------------------------------------------------------------------------------------------------


def test_reserving_nothing(manager: torch_vmm.VirtualMemoryManager) -> None:
    with pytest.raises(torch_vmm.InvalidArgumentError):
        manager.reserve(0)


def test_alignment_zero(manager: torch_vmm.VirtualMemoryManager) -> None:
    with pytest.raises(torch_vmm.InvalidArgumentError, match="alignment"):
        manager.reserve(PAGE, alignment=0)


def test_alignment_no_power_of_two(manager: torch_vmm.VirtualMemoryManager) -> None:
    with pytest.raises(torch_vmm.InvalidArgumentError, match="power of two"):
        manager.reserve(6 * PAGE, alignment=3 * PAGE)


def test_alignment_below_the_granularity(manager: torch_vmm.VirtualMemoryManager) -> None:
    with pytest.raises(torch_vmm.InvalidArgumentError, match="granularity"):
        manager.reserve(PAGE, alignment=4096)


def test_a_size_no_multiple_of_the_alignment(manager: torch_vmm.VirtualMemoryManager) -> None:
    with pytest.raises(torch_vmm.InvalidArgumentError, match="alignment"):
        manager.reserve(6 * PAGE, alignment=4 * PAGE)


@pytest.mark.parametrize("size", [1, PAGE - 1, PAGE + 4096])
def test_a_size_no_multiple_of_the_granularity(manager: torch_vmm.VirtualMemoryManager, size: int) -> None:
    for ask in (manager.reserve, manager.alloc_physical):
        with pytest.raises(torch_vmm.InvalidArgumentError, match="granularity"):
            ask(size)


@pytest.mark.parametrize("size", [-1, 1.5, True, None, "2 pages", 2**63])
def test_a_size_that_is_none(manager: torch_vmm.VirtualMemoryManager, size: object) -> None:
    for ask in (manager.reserve, manager.alloc_physical):
        with pytest.raises(torch_vmm.InvalidArgumentError):
            ask(size)  # type: ignore[operator]


def test_more_addresses_than_there_are(manager: torch_vmm.VirtualMemoryManager) -> None:
    with pytest.raises(torch_vmm.OutOfMemoryError):
        manager.reserve(2**62)
    assert manager.reserve(PAGE).size == PAGE


def test_allocating_nothing(manager: torch_vmm.VirtualMemoryManager) -> None:
    with pytest.raises(torch_vmm.InvalidArgumentError):
        manager.alloc_physical(0)


def test_more_memory_than_there_is(manager: torch_vmm.VirtualMemoryManager, memory: _C.Device) -> None:
    size = (memory.total_bytes // PAGE + 1) * PAGE
    with pytest.raises(torch_vmm.OutOfMemoryError) as raised:
        manager.alloc_physical(size)
    assert isinstance(raised.value, torch.OutOfMemoryError)
    assert raised.value.requested == size
    assert raised.value.available < size
    assert holds(stamp(manager.tensor(backed(manager, 1), 0, PAGE, torch.uint8), 3), 3)


def test_an_offset_that_is_not_aligned(manager: torch_vmm.VirtualMemoryManager) -> None:
    range_ = backed(manager, 2)
    physical = manager.alloc_physical(PAGE)
    for act in (
        lambda: manager.map(range_, physical, 4096),
        lambda: manager.unmap(range_, 4096, PAGE),
        lambda: manager.set_access(range_, READ_WRITE, offset=4096, size=PAGE),
    ):
        with pytest.raises(torch_vmm.InvalidRangeError) as raised:
            act()
        assert (raised.value.offset, raised.value.size, raised.value.capacity) == (4096, PAGE, 2 * PAGE)


@pytest.mark.parametrize("offset", [2**64 - PAGE, 2**64, -PAGE])
def test_an_offset_that_overflows(manager: torch_vmm.VirtualMemoryManager, offset: int) -> None:
    range_ = backed(manager, 2)
    physical = manager.alloc_physical(PAGE)
    for act in (
        lambda: manager.map(range_, physical, offset),
        lambda: manager.unmap(range_, offset, PAGE),
        lambda: manager.set_access(range_, READ_WRITE, offset=offset, size=PAGE),
    ):
        with pytest.raises(torch_vmm.InvalidRangeError) as raised:
            act()
        assert (raised.value.offset, raised.value.size, raised.value.capacity) == (offset, PAGE, 2 * PAGE)


def test_beyond_the_range(manager: torch_vmm.VirtualMemoryManager) -> None:
    range_ = backed(manager, 2)
    physical = manager.alloc_physical(2 * PAGE)
    for act in (
        lambda: manager.map(range_, physical, PAGE),
        lambda: manager.unmap(range_, PAGE, 2 * PAGE),
        lambda: manager.set_access(range_, READ_WRITE, offset=PAGE, size=2 * PAGE),
    ):
        with pytest.raises(torch_vmm.InvalidRangeError) as raised:
            act()
        assert (raised.value.offset, raised.value.size, raised.value.capacity) == (PAGE, 2 * PAGE, 2 * PAGE)


def test_mapping_twice(manager: torch_vmm.VirtualMemoryManager) -> None:
    range_ = manager.reserve(4 * PAGE)
    manager.map(range_, manager.alloc_physical(PAGE), 2 * PAGE)
    large = manager.alloc_physical(3 * PAGE)
    with pytest.raises(torch_vmm.AlreadyMappedError) as raised:
        manager.map(range_, large, PAGE)
    assert (raised.value.offset, raised.value.size) == (2 * PAGE, PAGE)
    assert [record.va_offset for record in manager.mappings(range_)] == [2 * PAGE]
    manager.free_physical(large)


def test_unmapping_a_part(manager: torch_vmm.VirtualMemoryManager) -> None:
    range_ = manager.reserve(3 * PAGE)
    manager.map(range_, manager.alloc_physical(3 * PAGE))
    manager.set_access(range_, READ_WRITE)
    stamp(manager.tensor(range_, 0, 3 * PAGE, torch.uint8), 8)
    for offset, size in [(0, PAGE), (PAGE, PAGE), (PAGE, 2 * PAGE)]:
        with pytest.raises(torch_vmm.InvalidRangeError, match="whole"):
            manager.unmap(range_, offset, size)
    assert holds(manager.tensor(range_, 0, 3 * PAGE, torch.uint8), 8)


def test_access_to_a_part(manager: torch_vmm.VirtualMemoryManager) -> None:
    range_ = manager.reserve(2 * PAGE)
    manager.map(range_, manager.alloc_physical(2 * PAGE))
    with pytest.raises(torch_vmm.InvalidRangeError, match="whole"):
        manager.set_access(range_, READ_WRITE, offset=0, size=PAGE)


def test_unmapping_what_is_not_mapped(manager: torch_vmm.VirtualMemoryManager) -> None:
    range_ = manager.reserve(3 * PAGE)
    manager.map(range_, manager.alloc_physical(PAGE), 0)
    with pytest.raises(torch_vmm.NotMappedError) as raised:
        manager.unmap(range_, 0, 2 * PAGE)
    assert (raised.value.offset, raised.value.size) == (PAGE, PAGE)
    assert len(manager.mappings(range_)) == 1


def test_access_to_what_is_not_mapped(manager: torch_vmm.VirtualMemoryManager) -> None:
    range_ = manager.reserve(2 * PAGE)
    for size in (None, PAGE):
        with pytest.raises(torch_vmm.NotMappedError) as raised:
            manager.set_access(range_, READ_WRITE, offset=PAGE, size=size)
        assert raised.value.offset == PAGE


def test_freeing_what_is_mapped(manager: torch_vmm.VirtualMemoryManager) -> None:
    range_ = manager.reserve(2 * PAGE)
    physical = manager.alloc_physical(PAGE)
    manager.map(range_, physical, 0)
    manager.map(range_, physical, PAGE)
    with pytest.raises(torch_vmm.StillInUseError) as raised:
        manager.free_physical(physical)
    assert (raised.value.live_bytes, raised.value.live_blocks) == (PAGE, 2)
    manager.unmap(range_, 0, 2 * PAGE)
    manager.free_physical(physical)


def test_releasing_what_holds_mappings(manager: torch_vmm.VirtualMemoryManager) -> None:
    range_ = backed(manager, 3)
    with pytest.raises(torch_vmm.StillInUseError) as raised:
        manager.release(range_)
    assert (raised.value.live_bytes, raised.value.live_blocks) == (3 * PAGE, 3)
    manager.unmap(range_, 0, 3 * PAGE)
    manager.release(range_)


def test_another_managers_objects(manager: torch_vmm.VirtualMemoryManager, device: str) -> None:
    with torch_vmm.VirtualMemoryManager(device) as other:
        theirs, our_range = backed(other, 1), manager.reserve(PAGE)
        their_memory, our_memory = other.alloc_physical(PAGE), manager.alloc_physical(PAGE)
        for act in (
            lambda: manager.release(theirs),
            lambda: manager.free_physical(their_memory),
            lambda: manager.map(theirs, our_memory),
            lambda: manager.map(our_range, their_memory),
            lambda: manager.unmap(theirs, 0, PAGE),
            lambda: manager.set_access(theirs, READ_WRITE),
            lambda: manager.mappings(theirs),
            lambda: manager.tensor(theirs, 0, 1, torch.uint8),
        ):
            with pytest.raises(torch_vmm.InvalidArgumentError, match="another"):
                act()
        assert len(other.mappings(theirs)) == 1


def test_use_after_release(manager: torch_vmm.VirtualMemoryManager) -> None:
    range_ = manager.reserve(PAGE)
    manager.release(range_)
    physical = manager.alloc_physical(PAGE)
    for act in (
        lambda: manager.release(range_),
        lambda: manager.map(range_, physical),
        lambda: manager.unmap(range_, 0, PAGE),
        lambda: manager.set_access(range_, READ_WRITE),
        lambda: manager.mappings(range_),
        lambda: manager.tensor(range_, 0, 1, torch.uint8),
    ):
        with pytest.raises(torch_vmm.InvalidArgumentError, match="released"):
            act()


def test_a_released_range_is_not_the_next_one_at_its_address(manager: torch_vmm.VirtualMemoryManager) -> None:
    old = manager.reserve(PAGE)
    manager.release(old)
    renewed = [manager.reserve(PAGE) for _ in range(4)]
    with pytest.raises(torch_vmm.InvalidArgumentError, match="released"):
        manager.release(old)
    assert all(manager.mappings(range_) == [] for range_ in renewed)


def test_use_after_free(manager: torch_vmm.VirtualMemoryManager) -> None:
    physical = manager.alloc_physical(PAGE)
    manager.free_physical(physical)
    for act in (lambda: manager.free_physical(physical), lambda: manager.map(manager.reserve(PAGE), physical)):
        with pytest.raises(torch_vmm.InvalidArgumentError, match="freed"):
            act()


def test_a_device_that_does_not_exist(manager: torch_vmm.VirtualMemoryManager, device: str) -> None:
    with pytest.raises(torch_vmm.NotAvailableError, match="99"):
        torch_vmm.VirtualMemoryManager(f"{device}:99")
    with pytest.raises((torch_vmm.NotAvailableError, torch_vmm.InvalidArgumentError), match="99"):
        manager.alloc_physical(PAGE, device=f"{device}:99")
    range_ = backed(manager, 1)
    with pytest.raises((torch_vmm.NotAvailableError, torch_vmm.InvalidArgumentError), match="99"):
        manager.set_access(range_, READ_WRITE, device=f"{device}:99")
    assert len(manager.mappings(range_)) == 1


def test_objects_of_another_kind(manager: torch_vmm.VirtualMemoryManager) -> None:
    range_, physical = manager.reserve(PAGE), manager.alloc_physical(PAGE)
    for act in (
        lambda: manager.release(physical),  # type: ignore[arg-type]
        lambda: manager.free_physical(range_),  # type: ignore[arg-type]
        lambda: manager.map(physical, range_),  # type: ignore[arg-type]
        lambda: manager.mappings(None),  # type: ignore[arg-type]
        lambda: manager.set_access(range_, 3),  # type: ignore[arg-type]
        lambda: manager.tensor(range_, 0, 4, "float32"),  # type: ignore[arg-type]
        lambda: manager.tensor(range_, 0, (-4,), torch.uint8),
        lambda: manager.tensor(range_, 0, 1.5, torch.uint8),  # type: ignore[arg-type]
    ):
        with pytest.raises(torch_vmm.InvalidArgumentError):
            act()


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
