"""What VirtualMemoryManager refuses, and that it is as before then."""

from __future__ import annotations

import pytest
import torch

import torch_vmm
from tests.api.mapped import READ_WRITE, backed
from tests.helpers import PAGE, holds, stamp
from torch_vmm import _C


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
    for size in (2**50, 2**62):
        with pytest.raises(torch_vmm.OutOfMemoryError) as raised:
            manager.reserve(size)
        assert (raised.value.requested, raised.value.available, raised.value.limit) == (size, 0, 2**47)
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


def test_an_offset_in_a_hole_that_is_not_aligned(manager: torch_vmm.VirtualMemoryManager) -> None:
    range_ = manager.reserve(4 * PAGE)
    manager.map(range_, manager.alloc_physical(PAGE), 2 * PAGE)
    with pytest.raises(torch_vmm.InvalidRangeError, match="offset must be a multiple of the granularity"):
        manager.set_access(range_, READ_WRITE, offset=5)
    assert [mapping.access for mapping in manager.mappings(range_)] == [torch_vmm.AccessFlags.NONE]


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
