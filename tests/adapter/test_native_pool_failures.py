"""The driver's calls for its own pools fail in turn: each failure is shown, or counted where nobody can be told."""

from __future__ import annotations

import os

import pytest
import torch

import torch_vmm
from tests.helpers import MIB, python
from tests.standin import control
from torch_vmm import NativeMemoryPool

UNKNOWN = 999


def test_making_one() -> None:
    with control.failing("cuMemPoolCreate", 1, UNKNOWN), pytest.raises(torch_vmm.DriverError) as caught:
        NativeMemoryPool("cuda")
    assert (caught.value.call, caught.value.code) == ("cuMemPoolCreate", UNKNOWN)


def test_allocating_and_freeing() -> None:
    with NativeMemoryPool("cuda", "64MiB") as pool:
        with control.failing("cuMemAllocFromPoolAsync"), pytest.raises(torch_vmm.OutOfMemoryError) as refused:
            pool.alloc_async("64MiB")
        assert refused.value.requested == 64 * MIB
        with control.failing("cuMemAllocFromPoolAsync", 1, UNKNOWN), pytest.raises(torch_vmm.DriverError):
            pool.alloc_async("64MiB")
        address = pool.alloc_async("64MiB")  # what failed was not counted
        with control.failing("cuMemFreeAsync", 1, UNKNOWN), pytest.raises(torch_vmm.DriverError) as caught:
            pool.free_async(address)
        assert caught.value.call == "cuMemFreeAsync"
        assert pool.stats().used_bytes == 64 * MIB
        pool.free_async(address)


def test_its_numbers() -> None:
    with NativeMemoryPool("cuda") as pool:
        for nth in (1, 2, 3, 4):
            with control.failing("cuMemPoolGetAttribute", nth, UNKNOWN), pytest.raises(torch_vmm.DriverError):
                pool.stats()
        with control.failing("cuMemPoolTrimTo", 1, UNKNOWN), pytest.raises(torch_vmm.DriverError):
            pool.trim(0)
        with control.failing("cuMemPoolSetAttribute", 1, UNKNOWN), pytest.raises(torch_vmm.DriverError):
            pool.release_threshold = 1


def test_destroying_one_is_shown_and_tried_again() -> None:
    pool = NativeMemoryPool("cuda")
    pool.alloc_async(1000)
    with control.failing("cuMemPoolDestroy", 1, UNKNOWN), pytest.raises(torch_vmm.DriverError) as caught:
        pool.destroy(force=True)
    assert caught.value.call == "cuMemPoolDestroy"
    assert not pool.is_destroyed
    pool.destroy()  # what was freed stays freed


def test_a_destructor_says_and_counts(capfd: pytest.CaptureFixture[str]) -> None:
    before = NativeMemoryPool.destructor_failures()
    pool = NativeMemoryPool("cuda")
    with control.failing("cuMemPoolDestroy", 1, UNKNOWN):
        del pool
    assert NativeMemoryPool.destructor_failures() == before + 1
    assert "cuMemPoolDestroy" in capfd.readouterr().err


def test_what_is_freed_on_a_stream_serves_others_when_it_is_done() -> None:
    mine, other = torch.cuda.Stream(), torch.cuda.Stream()
    with NativeMemoryPool("cuda") as pool:
        first = pool.alloc_async(MIB, mine)
        with control.held(mine):
            pool.free_async(first, mine)
            second = pool.alloc_async(MIB, other)
            assert second != first
        torch.cuda.synchronize()
        pool.free_async(second, other)


def test_a_device_without_pools_is_named() -> None:
    program = """
        import torch_vmm
        try:
            torch_vmm.NativeMemoryPool("cuda")
        except torch_vmm.NotAvailableError as error:
            print(error.reason)
        torch_vmm.MemoryPool("cuda").alloc(10).free()  # which needs none
    """
    kept = {name: os.environ[name] for name in ("LD_PRELOAD",) if name in os.environ}
    done = python(program, fresh=True, STANDIN_MEMORY_POOLS="0", **kept)
    assert done.returncode == 0, done.stderr
    assert "CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED" in done.stdout
