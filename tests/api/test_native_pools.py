"""NativeMemoryPool, the driver's own pools: what they do, every error by name, and that the CPU has none."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator

import pytest
import torch

import torch_vmm
from tests.helpers import MIB, run
from torch_vmm import NativeMemoryPool, NativePoolStats


@pytest.fixture
def native(device: str) -> Iterator[NativeMemoryPool]:
    if device == "cpu":
        pytest.skip("the GPU's")
    pool = NativeMemoryPool(device)
    yield pool
    pool.destroy(force=True)


def view(address: int, size: int) -> torch.Tensor:
    """A tensor over the memory."""

    interface = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 2, "strides": None}

    class Memory:
        __cuda_array_interface__ = interface

    return torch.as_tensor(Memory(), device="cuda")


def test_on_the_cpu_it_says_that_it_needs_a_gpu() -> None:
    with pytest.raises(torch_vmm.NotAvailableError, match="needs a GPU") as caught:
        NativeMemoryPool("cpu")
    assert "device cpu:0 is none of CUDA's; MemoryPool works there" in caught.value.reason


def test_without_a_driver_it_says_so() -> None:
    program = """
        import torch_vmm
        try:
            torch_vmm.NativeMemoryPool("cuda")
        except torch_vmm.NotAvailableError as error:
            print("no" in error.reason and "GPU" in error.reason or "driver" in error.reason)
    """
    assert run(program, CUDA_VISIBLE_DEVICES="-1") == "True\n"


@pytest.mark.parametrize("wrong", [-1, "much", 1.5])
def test_a_maximum_that_cannot_be(wrong: object) -> None:
    with pytest.raises(torch_vmm.InvalidArgumentError, match="max_size_bytes"):
        NativeMemoryPool("cpu", wrong)  # type: ignore[arg-type]


def test_it_knows_itself(native: NativeMemoryPool) -> None:
    assert native.device == torch.device("cuda:0")
    assert native.device_ordinal == 0
    assert native.raw > 0
    assert native.max_size_bytes == 0
    assert not native.is_destroyed
    assert repr(native) == "NativeMemoryPool(cuda:0)"
    with pytest.raises(torch_vmm.NotCopyableError):
        copy.copy(native)


def test_memory_comes_and_goes(native: NativeMemoryPool) -> None:
    address = native.alloc_async("3MiB")
    shown = view(address, 3 * MIB)
    shown.fill_(7)
    assert shown.sum(dtype=torch.int64).item() == 7 * 3 * MIB
    stats = native.stats()
    assert isinstance(stats, NativePoolStats)
    assert stats.used_bytes >= 3 * MIB
    assert stats.peak_used_bytes >= stats.used_bytes
    assert stats.peak_reserved_bytes >= stats.reserved_bytes >= stats.used_bytes
    del shown
    native.free_async(address)
    torch.cuda.synchronize()
    assert native.stats().used_bytes == 0
    assert native.stats().peak_used_bytes == stats.peak_used_bytes
    before = native.stats().reserved_bytes
    assert native.trim(0) == before - native.stats().reserved_bytes
    assert native.stats().reserved_bytes == 0


def test_the_release_threshold(native: NativeMemoryPool) -> None:
    assert native.release_threshold == 0
    native.release_threshold = "64MiB"
    assert native.release_threshold == 64 * MIB
    with pytest.raises(torch_vmm.InvalidArgumentError):
        native.release_threshold = -1


def test_over_the_maximum(device: str) -> None:
    if device == "cpu":
        pytest.skip("the GPU's")
    with NativeMemoryPool(device, "64MiB") as pool:
        assert pool.max_size_bytes == 64 * MIB
        assert "at most 64 MiB" in repr(pool)
        address = pool.alloc_async("32MiB")
        with pytest.raises(torch_vmm.OutOfMemoryError) as caught:
            pool.alloc_async("33MiB")
        assert caught.value.requested == 33 * MIB
        assert caught.value.available == 32 * MIB
        assert caught.value.limit == 64 * MIB
        pool.free_async(address)


def test_more_than_the_device_has(native: NativeMemoryPool) -> None:
    with pytest.raises(torch_vmm.OutOfMemoryError) as caught:
        native.alloc_async(2**50)
    assert caught.value.requested == 2**50
    assert native.stats().used_bytes == 0


@pytest.mark.parametrize("size", [0, -1, "0 MiB", 1.5, True])
def test_sizes_that_cannot_be(native: NativeMemoryPool, size: object) -> None:
    with pytest.raises(torch_vmm.InvalidArgumentError, match="bytes"):
        native.alloc_async(size)  # type: ignore[arg-type]


def test_what_is_freed_wrongly(native: NativeMemoryPool) -> None:
    address = native.alloc_async(1000)
    foreign = torch.ones(10, device="cuda")
    for wrong in (address + 256, foreign.data_ptr(), 1):
        with pytest.raises(torch_vmm.InvalidArgumentError, match=f"{wrong:#x} is no live allocation"):
            native.free_async(wrong)
    for wrong in (-1, 1.5, "there", None):
        with pytest.raises(torch_vmm.InvalidArgumentError, match="address"):
            native.free_async(wrong)  # type: ignore[arg-type]
    native.free_async(address)
    with pytest.raises(torch_vmm.InvalidArgumentError, match="freed before"):
        native.free_async(address)


def test_streams_are_checked(native: NativeMemoryPool) -> None:
    address = native.alloc_async(1000)
    with pytest.raises(torch_vmm.InvalidArgumentError, match="stream"):
        native.alloc_async(1000, "main")  # type: ignore[arg-type]
    with pytest.raises(torch_vmm.InvalidArgumentError, match="stream"):
        native.free_async(address, -1)
    native.free_async(address, torch.cuda.current_stream())


def test_destroyed(device: str) -> None:
    if device == "cpu":
        pytest.skip("the GPU's")
    pool = NativeMemoryPool(device)
    address = pool.alloc_async(1000)
    with pytest.raises(torch_vmm.StillInUseError) as caught:
        pool.destroy()
    assert (caught.value.live_bytes, caught.value.live_blocks) == (1000, 1)
    pool.destroy(force=True)
    pool.destroy()
    assert pool.is_destroyed
    assert "destroyed" in repr(pool)
    for use in (
        lambda: pool.alloc_async(1),
        lambda: pool.free_async(address),
        pool.stats,
        lambda: pool.trim(0),
        lambda: pool.raw,
        lambda: pool.release_threshold,
        pool.__enter__,
    ):
        with pytest.raises(torch_vmm.InvalidArgumentError, match="destroyed"):
            use()


def test_its_with(device: str) -> None:
    if device == "cpu":
        pytest.skip("the GPU's")
    with NativeMemoryPool(device) as pool:
        pool.free_async(pool.alloc_async(1000))
    assert pool.is_destroyed
    with pytest.raises(torch_vmm.StillInUseError), NativeMemoryPool(device) as pool:
        pool.alloc_async(1000)
    pool.destroy(force=True)
    with pytest.raises(ZeroDivisionError), NativeMemoryPool(device) as pool:
        1 / (pool.alloc_async(1000) * 0)
    assert pool.is_destroyed


def test_one_that_is_dropped_ends(device: str) -> None:
    if device == "cpu":
        pytest.skip("the GPU's")
    before = NativeMemoryPool.destructor_failures()
    pool = NativeMemoryPool(device)
    pool.alloc_async(1000)
    del pool
    gc.collect()
    assert NativeMemoryPool.destructor_failures() == before
