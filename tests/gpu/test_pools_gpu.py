"""Pools and the low-level systems with kernels and copies on them, and the driver's own numbers beside ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

import torch_vmm
from tests.gpu.conftest import Busy, Stopwatch
from tests.gpu.patterns import intact, queue_check, queue_stamp
from tests.helpers import GIB, MIB, PAGE, is_zero, python
from torch_vmm import _C, AccessFlags

MakePool = Callable[..., torch_vmm.VirtualMemoryPool]
MakeShared = Callable[..., torch_vmm.SharedMemoryPool]


@pytest.fixture
def manager() -> Iterator[torch_vmm.VirtualMemoryManager]:
    with torch_vmm.VirtualMemoryManager("cuda") as manager:
        yield manager


def free_bytes() -> int:
    """What the driver has left."""
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


# -- VirtualMemoryPool -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [None, "2MiB", "16MiB"])
@pytest.mark.parametrize("size", [1, 12345, 2 * MIB, 37 * MIB + 5])
def test_kernels_on_explicit_pages(make_pool: MakePool, page_size: str | None, size: int) -> None:
    pool = make_pool("256MiB", page_size=page_size)
    offset = 48 * MIB
    assert pool.allocate(offset, size) == pool.base_address + offset
    block = pool.tensor(offset, (size,), torch.uint8)
    assert is_zero(block)
    assert intact(queue_stamp(block, 3), 3)


def test_a_kernel_works_across_chunks_as_on_ordinary_memory(make_pool: MakePool) -> None:
    pool = make_pool("256MiB", page_size="2MiB")
    pool.allocate(0, "64MiB")
    matrix = pool.tensor(4096, (1500, 1500), torch.float32).normal_()
    ordinary = matrix.clone()
    torch.testing.assert_close(matrix @ matrix, ordinary @ ordinary)
    assert torch.equal(matrix.cpu(), ordinary.cpu())


def test_scattered_pages_keep_their_content_while_others_come_and_go(make_pool: MakePool) -> None:
    pool = make_pool("1TiB", page_size="2MiB")
    places = [number * 7 * GIB for number in range(20)]

    def block_at(place: int, pages: int = 1) -> torch.Tensor:
        return pool.tensor(place, (pages * PAGE,), torch.uint8)

    for seed, place in enumerate(places):
        pool.allocate(place, PAGE)
        queue_stamp(block_at(place), seed)
    for place in places[::2]:
        pool.deallocate(place, PAGE)
    for place in places[::2]:
        pool.allocate(place + PAGE, 2 * PAGE)
        queue_stamp(block_at(place + PAGE, 2), 99)
    for seed, place in enumerate(places):
        assert intact(block_at(place), seed) if seed % 2 == 1 else intact(block_at(place + PAGE, 2), 99)
    assert pool.physical_memory_usage == 30 * PAGE


def test_pages_given_up_under_a_kernel_serve_another_place_at_once(make_pool: MakePool, busy: Busy) -> None:
    pool = make_pool("1GiB", page_size="2MiB", physical_limit="64MiB")
    pool.allocate(0, "64MiB")
    block = queue_stamp(pool.tensor(0, (64 * MIB,), torch.uint8), 1)
    torch.cuda.synchronize()
    kernel = busy(200)
    block.fill_(0xAA)  # the late writer
    del block
    pool.deallocate(0, "64MiB")
    pool.allocate("512MiB", "64MiB")
    assert not kernel.query(), "the GPU was waited for"
    queue_stamp(pool.tensor("512MiB", (64 * MIB,), torch.uint8), 2)
    torch.cuda.synchronize()
    assert intact(pool.tensor("512MiB", (64 * MIB,), torch.uint8), 2)


@pytest.mark.alone  # it looks at the GPU's free memory
def test_the_driver_sees_memory_come_and_go(make_pool: MakePool) -> None:
    pool = make_pool("64GiB")
    torch.cuda.empty_cache()
    before = free_bytes()
    pool.allocate(0, 512 * MIB)
    assert before - free_bytes() >= 512 * MIB
    pool.deallocate(0, 512 * MIB)
    pool.compact()
    torch.cuda.empty_cache()  # the chunk store's share
    assert before - free_bytes() < 64 * MIB


def test_two_pools_and_ordinary_tensors_do_not_meet(make_pool: MakePool) -> None:
    pools = [make_pool("1GiB") for _ in range(3)]
    blocks = []
    for seed in range(60):
        with pools[seed % 3]:
            blocks.append(queue_stamp(torch.empty(seed * 99_991 + 1, dtype=torch.uint8, device="cuda"), seed))
        blocks.append(queue_stamp(torch.empty(seed * 31_337 + 1, dtype=torch.uint8, device="cuda"), 100 + seed))
    for seed in range(60):
        assert intact(blocks[2 * seed], seed)
        assert intact(blocks[2 * seed + 1], 100 + seed)


def test_explicit_pages_handed_over_between_models_read_as_zero(make_shared: MakeShared, busy: Busy) -> None:
    shared = make_shared("64MiB")
    models = [shared.register_model(name) for name in ("one", "other")]
    verdicts = []
    busy(20)
    for turn in range(8):
        pool = models[turn % 2]
        offset = shared.allocate_for_model(pool.model_id or "", "64MiB") - pool.base_address
        block = pool.tensor(offset, (64 * MIB,), torch.uint8)
        verdicts.append(torch.count_nonzero(block))
        queue_stamp(block, turn)
        del block
        shared.deallocate_for_model(pool.model_id or "", offset, "64MiB")
    assert [int(verdict) for verdict in verdicts] == [0] * 8


@pytest.mark.needs_gpu("20 GiB, and how long they take")
@pytest.mark.alone  # it measures time
@pytest.mark.no_memcheck  # 20 GiB
def test_much_memory_takes_few_calls(make_pool: MakePool) -> None:
    pool = make_pool("40GiB")
    chunks = _C.device("cuda").live_chunks
    with Stopwatch() as watch:
        pool.allocate(0, 20 * GIB)
    assert _C.device("cuda").live_chunks - chunks < 100
    assert watch.ms < 250  # as 2 MiB pages 470 ms


@pytest.mark.needs_gpu("6 GiB, touched")
@pytest.mark.no_memcheck  # 6 GiB
def test_a_block_beyond_four_gib_keeps_every_byte(make_pool: MakePool) -> None:
    pool = make_pool("16GiB")
    with pool:
        block = torch.empty(6 * GIB + 12345, dtype=torch.uint8, device="cuda")
    assert intact(queue_stamp(block, 17), 17)


# -- VirtualMemoryManager ----------------------------------------------------------------------------------------------


def backed(
    manager: torch_vmm.VirtualMemoryManager, range_: torch_vmm.VirtualAddressRange, offset: int, size: int
) -> torch_vmm.PhysicalAllocation:
    physical = manager.alloc_physical(size)
    manager.map(range_, physical, offset)
    manager.set_access(range_, AccessFlags.READ_WRITE, offset=offset, size=size)
    return physical


def test_what_a_kernel_writes_through_one_alias_another_reads(manager: torch_vmm.VirtualMemoryManager) -> None:
    ranges = [manager.reserve(4 * PAGE) for _ in range(3)]
    physical = backed(manager, ranges[0], 0, 4 * PAGE)
    for range_ in ranges[1:]:
        manager.map(range_, physical)
        manager.set_access(range_, AccessFlags.READ_WRITE)
    views = [manager.tensor(range_, 0, (4 * PAGE,), torch.uint8) for range_ in ranges]
    for seed, writer in enumerate(views):
        queue_stamp(writer, seed)
        verdicts = [queue_check(view, seed) for view in views]
        assert [int(verdict) for verdict in verdicts] == [0, 0, 0]


def test_a_read_only_alias_reads_what_is_written_elsewhere(manager: torch_vmm.VirtualMemoryManager) -> None:
    writable, read_only = manager.reserve(PAGE), manager.reserve(PAGE)
    physical = backed(manager, writable, 0, PAGE)
    manager.map(read_only, physical)
    manager.set_access(read_only, AccessFlags.READ)
    queue_stamp(manager.tensor(writable, 0, (PAGE,), torch.uint8), 9)
    assert intact(manager.tensor(read_only, 0, (PAGE,), torch.uint8), 9)


def test_a_buffer_grows_in_place(manager: torch_vmm.VirtualMemoryManager) -> None:
    range_ = manager.reserve(64 * PAGE)
    for pages in (1, 2, 4, 8, 16, 32):
        backed(manager, range_, 0 if pages == 1 else pages // 2 * PAGE, PAGE if pages == 1 else pages // 2 * PAGE)
        buffer = manager.tensor(range_, 0, (pages * PAGE // 4,), torch.float32)
        if pages > 1:
            assert bool((buffer[: buffer.numel() // 2] == pages // 2).all())
            assert is_zero(buffer[buffer.numel() // 2 :])
        buffer.fill_(pages)
        del buffer


def test_host_memory_stands_beside_the_gpus_in_one_range(manager: torch_vmm.VirtualMemoryManager) -> None:
    if not _host_chunks(manager):
        pytest.skip("this driver has no host-located chunks")
    range_ = manager.reserve(4 * PAGE)
    backed(manager, range_, 0, 2 * PAGE)
    charged = _C.device("cuda").committed_bytes
    host = manager.alloc_physical(2 * PAGE, device="cpu")
    assert host.device == -1
    assert manager.host_memory_usage == 2 * PAGE
    assert _C.device("cuda").committed_bytes == charged, "it is no memory of the GPU's"
    manager.map(range_, host, 2 * PAGE)
    manager.set_access(range_, AccessFlags.READ_WRITE)
    block = manager.tensor(range_, 0, (4 * PAGE,), torch.uint8)
    assert is_zero(block)
    assert intact(queue_stamp(block, 21), 21)


def _host_chunks(manager: torch_vmm.VirtualMemoryManager) -> bool:
    try:
        manager.free_physical(manager.alloc_physical(PAGE, device="cpu"))
    except torch_vmm.NotAvailableError:
        return False
    return True


_FAULTS = {
    "a write where only reading is allowed": """
        manager.map(range_, manager.alloc_physical(PAGE))
        manager.set_access(range_, torch_vmm.AccessFlags.READ)
        block = manager.tensor(range_, 0, (PAGE,), torch.uint8)
        torch.cuda.synchronize()
        print("ready", flush=True)
        block.fill_(1)
    """,
    "a read of pages that were given back": """
        pool = torch_vmm.VirtualMemoryPool("64MiB")
        pool.allocate(0, PAGE)
        class Bare:  # what pool.tensor() shows is not given back: this holds nothing
            __cuda_array_interface__ = {
                "shape": (PAGE,), "typestr": "|u1", "data": (pool.base_address, False), "version": 2
            }
        block = torch.as_tensor(Bare(), device="cuda")
        pool.deallocate(0, PAGE)
        pool.trim()
        torch.cuda.synchronize()
        print("ready", flush=True)
        block.sum()
    """,
}


@pytest.mark.needs_gpu("a fault is an error here, and ends the process there: tests/adapter/test_standin.py")
@pytest.mark.no_memcheck  # the faults are meant
@pytest.mark.parametrize("case", _FAULTS)
def test_the_hardware_stops(case: str) -> None:
    code = f"""
import torch, torch_vmm
torch_vmm.enable()
torch.ones(8, dtype=torch.uint8, device="cuda").fill_(1).sum()
PAGE = {PAGE}
manager = torch_vmm.VirtualMemoryManager("cuda")
range_ = manager.reserve(PAGE)
try:
{_FAULTS[case]}
        torch.cuda.synchronize()
except RuntimeError as error:
    print("stopped:", str(error).splitlines()[0])
"""
    done = python(code)
    assert "ready" in done.stdout, done.stderr
    assert "stopped:" in done.stdout
    assert "CUDA error" in done.stdout or "illegal memory access" in done.stdout
    assert done.returncode >= 0, f"ended by signal {-done.returncode}\n{done.stderr}"
