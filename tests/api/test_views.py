"""Live tensors over explicit memory: what they show stays, or the call that would take it is refused."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

import torch_vmm
from tests.api.mapped import backed
from tests.helpers import MIB, PAGE, holds, stamp
from torch_vmm import _C, AccessFlags

Pool = torch_vmm.VirtualMemoryPool
Shared = torch_vmm.SharedMemoryPool
Manager = torch_vmm.VirtualMemoryManager
QUANTIZED = ["quint8", "qint8", "qint32", "quint4x2", "quint2x4"]


@pytest.fixture
def manager(device: str) -> Iterator[Manager]:
    """Closed without a collection before: what showed its memory has gone by itself."""
    with Manager(device) as manager:
        yield manager


@pytest.fixture
def range_(manager: Manager) -> torch_vmm.VirtualAddressRange:
    """Four pages, each with memory of its own, readable and writable."""
    return backed(manager, 4)


# -- Pools -------------------------------------------------------------------------------------------------------------


def test_what_a_tensor_shows_cannot_be_deallocated(pool: Pool) -> None:
    pool.allocate(0, 4 * PAGE)
    view = stamp(pool.tensor(PAGE, PAGE), 3)[100:200]
    for offset, size in ((PAGE, PAGE), (0, 4 * PAGE), (2 * PAGE - 1, 1)):
        with pytest.raises(torch_vmm.StillInUseError, match=r"tensor\(\)") as raised:
            pool.deallocate(offset, size)
        assert raised.value.live_blocks == 1
        assert raised.value.live_bytes == PAGE
    pool.deallocate(2 * PAGE, 2 * PAGE)  # the others are free to go
    pool.deallocate(0, PAGE)
    assert view.sum().item() > 0
    del view
    pool.deallocate(PAGE, PAGE)
    assert pool.physical_memory_usage == 0


def test_every_kind_of_reference_counts(pool: Pool, device: str) -> None:
    pool.allocate(0, PAGE)
    holders: list[object] = [pool.tensor(0, 16), pool.tensor(0, 16).untyped_storage()]
    if device == "cpu":
        holders.append(pool.tensor(0, 16).numpy())
    while holders:
        with pytest.raises(torch_vmm.StillInUseError) as raised:
            pool.deallocate(0, PAGE)
        assert raised.value.live_blocks == len(holders)
        holders.pop()
    pool.deallocate(0, PAGE)


def test_only_explicit_pages_are_shown(pool: Pool, device: str) -> None:
    with pool:
        block = torch.empty(4 * MIB, dtype=torch.uint8, device=device)
    with pytest.raises(torch_vmm.NotMappedError):  # it goes when `block` does
        pool.tensor(block.data_ptr() - pool.base_address, 16)


def test_a_pool_closed_by_force_keeps_what_a_tensor_shows(make_pool: Callable[..., Pool], memory: _C.Device) -> None:
    gc.collect()  # what other tests have left goes now, and not below
    memory.empty_cache()
    before, pools = memory.committed_bytes, len(memory.pools())
    pool = make_pool("64MiB", page_size=PAGE)
    pool.allocate(0, 8 * PAGE)
    view = stamp(pool.tensor(2 * PAGE, 2 * PAGE), 5)
    with pytest.raises(torch_vmm.StillInUseError):
        pool.close()
    pool.close(force=True)
    assert pool.is_closed
    assert pool.physical_memory_usage == 2 * PAGE
    other = make_pool("64MiB", page_size=PAGE)
    other.allocate(0, 16 * PAGE)
    stamp(other.tensor(0, 16 * PAGE), 6)
    assert holds(view, 5)
    del view
    gc.collect()
    other.close(force=True)
    memory.empty_cache()
    assert (memory.committed_bytes, len(memory.pools())) == (before, pools)


def test_a_model_unregistered_by_force_keeps_what_a_tensor_shows(shared: Shared) -> None:
    llama, qwen = (shared.register_model(name, "64MiB", page_size=PAGE) for name in ("llama", "qwen"))
    llama.allocate(0, 8 * PAGE)
    view = stamp(llama.tensor(0, PAGE), 7)
    with pytest.raises(torch_vmm.StillInUseError):
        shared.unregister_model("llama")
    shared.unregister_model("llama", force=True)
    assert "llama" not in shared
    qwen.allocate(0, 64 * MIB - PAGE)  # all but the page that is shown
    with pytest.raises(torch_vmm.OutOfMemoryError) as raised:
        shared.register_model("phi", "64MiB").allocate(0, PAGE)
    assert "'llama (closed)' 2 MiB in use" in str(raised.value)
    assert holds(view, 7)
    del view
    shared["phi"].allocate(0, PAGE)


def test_a_shared_pool_closed_by_force_keeps_what_tensors_show(shared: Shared) -> None:
    pools = [shared.register_model(name, "64MiB", page_size=PAGE) for name in ("one", "other")]
    views = []
    for seed, pool in enumerate(pools):
        pool.allocate(0, 2 * PAGE)
        views.append(stamp(pool.tensor(PAGE, PAGE), seed))
    with pytest.raises(torch_vmm.StillInUseError):
        shared.close()
    shared.close(force=True)
    assert all(holds(view, seed) for seed, view in enumerate(views))
    assert shared.global_stats().allocated_bytes == 2 * PAGE
    views.clear()
    assert shared.global_stats().allocated_bytes == 0


def test_views_that_come_and_go_while_the_pool_is_closed_by_force(make_pool: Callable[..., Pool]) -> None:
    for _ in range(20):
        pool = make_pool("64MiB", page_size=PAGE)
        pool.allocate(0, 16 * PAGE)
        ready = threading.Barrier(5)
        errors: list[BaseException] = []

        def work(page: int, pool: Pool = pool, ready: threading.Barrier = ready, errors: list = errors) -> None:
            ready.wait()
            try:
                while True:
                    view = stamp(pool.tensor(page * PAGE, 4096), page)
                    assert holds(view, page)
            except torch_vmm.InvalidArgumentError:  # closed
                pass
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(page,)) for page in range(4)]
        for thread in threads:
            thread.start()
        ready.wait()
        pool.close(force=True)
        for thread in threads:
            thread.join()
        assert errors == []
        assert pool.physical_memory_usage == 0


# -- Managers ----------------------------------------------------------------------------------------------------------


def test_what_a_tensor_shows_cannot_be_unmapped(manager: Manager, range_: torch_vmm.VirtualAddressRange) -> None:
    view = stamp(manager.tensor(range_, PAGE, PAGE, torch.uint8), 1)[:10]
    for offset, size in ((PAGE, PAGE), (0, 4 * PAGE)):
        with pytest.raises(torch_vmm.StillInUseError) as raised:
            manager.unmap(range_, offset, size)
        assert (raised.value.live_blocks, raised.value.live_bytes) == (1, PAGE)
    manager.unmap(range_, 0, PAGE)  # other parts of the range may go
    manager.unmap(range_, 2 * PAGE, 2 * PAGE)
    with pytest.raises(torch_vmm.StillInUseError):
        manager.release(range_)
    with pytest.raises(torch_vmm.StillInUseError, match="drop that first"):
        manager.close()
    assert view.sum().item() > 0
    del view
    manager.unmap(range_, PAGE, PAGE)
    manager.release(range_)


def test_what_a_tensor_shows_stays_accessible(manager: Manager, range_: torch_vmm.VirtualAddressRange) -> None:
    view = stamp(manager.tensor(range_, 0, 16, torch.uint8), 2)
    for where in ({}, {"offset": 0, "size": PAGE}, {"device": [manager.device]}):
        with pytest.raises(torch_vmm.StillInUseError, match="NONE"):
            manager.set_access(range_, AccessFlags.NONE, **where)  # type: ignore[arg-type]
    assert holds(view, 2)
    manager.set_access(range_, AccessFlags.NONE, offset=PAGE, size=PAGE)
    manager.set_access(range_, AccessFlags.READ, offset=0, size=PAGE)
    assert holds(view, 2)
    del view
    manager.set_access(range_, AccessFlags.NONE)


# -- Dtypes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_dtypes_are_refused(
    name: str, pool: Pool, manager: Manager, range_: torch_vmm.VirtualAddressRange
) -> None:
    pool.allocate(0, PAGE)
    dtype = getattr(torch, name)
    for ask in (lambda: pool.tensor(0, 4, dtype), lambda: manager.tensor(range_, 0, 4, dtype)):
        with pytest.raises(torch_vmm.InvalidArgumentError, match=f"dtype torch.{name}: .* no scale"):
            ask()
    pool.deallocate(0, PAGE)  # a refused tensor holds nothing


def test_every_other_dtype_is_a_tensor(pool: Pool) -> None:
    pool.allocate(0, PAGE)
    dtypes = {found for name in dir(torch) if isinstance(found := getattr(torch, name), torch.dtype)}
    for dtype in dtypes - {getattr(torch, name) for name in QUANTIZED}:
        tensor = pool.tensor(0, (2, 3), dtype)
        assert (tensor.shape, tensor.dtype) == ((2, 3), dtype)
        tensor.view(torch.uint8).zero_()
        del tensor
    pool.deallocate(0, PAGE)


def test_a_tensor_that_could_not_be_made_holds_nothing(
    pool: Pool, manager: Manager, range_: torch_vmm.VirtualAddressRange
) -> None:
    pool.allocate(0, PAGE)
    with pytest.raises(torch_vmm.InvalidArgumentError, match="align"):
        pool.tensor(2, 4, torch.float32)
    with pytest.raises(torch_vmm.InvalidArgumentError, match="align"):
        manager.tensor(range_, 2, 4, torch.float32)
    pool.deallocate(0, PAGE)
    manager.unmap(range_, 0, 4 * PAGE)
