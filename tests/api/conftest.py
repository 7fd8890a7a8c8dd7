"""Two models and where a tensor made here and now is: for the tests of routing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import torch_vmm


@pytest.fixture
def roomy(make_shared: Callable[..., torch_vmm.SharedMemoryPool]) -> torch_vmm.SharedMemoryPool:
    """512 MiB for all models: on a GPU every thread that multiplies leaves 32 MiB of cuBLAS's behind."""
    return make_shared("512MiB")


@pytest.fixture
def llama(roomy: torch_vmm.SharedMemoryPool) -> torch_vmm.VirtualMemoryPool:
    return roomy.register_model("llama", "256MiB")


@pytest.fixture
def qwen(roomy: torch_vmm.SharedMemoryPool, llama: torch_vmm.VirtualMemoryPool) -> torch_vmm.VirtualMemoryPool:
    return roomy.register_model("qwen", "256MiB")


@pytest.fixture
def here(device: str) -> Callable[[], str]:
    """The name of the pool that a tensor made here and now is in."""

    def name() -> str:
        pool = torch_vmm.pool_of(torch.empty(10, device=device))
        assert pool is torch_vmm.current_pool(device)
        return pool.name

    return name
