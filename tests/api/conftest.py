"""Models, and where a tensor made here and now is, for the tests of routing and of sleep; pools of buffers."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch

import torch_vmm
from tests.api.evicting import Evicting
from tests.helpers import close_all
from torch_vmm import _C, MemoryPool


@pytest.fixture
def roomy(make_shared: Callable[..., torch_vmm.SharedMemoryPool]) -> torch_vmm.SharedMemoryPool:
    """512 MiB for all models: on a GPU every thread that multiplies leaves 32 MiB of cuBLAS's behind."""
    return make_shared("512MiB")


@pytest.fixture
def limited(make_shared: Callable[..., torch_vmm.SharedMemoryPool]) -> torch_vmm.SharedMemoryPool:
    """256 MiB for all models: what one that sleeps leaves to others can be told."""
    return make_shared("256MiB")


@pytest.fixture
def model(limited: torch_vmm.SharedMemoryPool) -> torch_vmm.VirtualMemoryPool:
    """The one that sleeps."""
    return limited.register_model("llama")


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


@pytest.fixture
def make_buffers(device: str, memory: _C.Device) -> Iterator[Callable[[], MemoryPool]]:
    """Makes pools, and ends them after the test. What others left behind is not in the device's numbers."""
    gc.collect()
    memory.empty_cache()
    made: list[MemoryPool] = []

    def make() -> MemoryPool:
        made.append(MemoryPool(device))
        return made[-1]

    yield make
    close_all(made)


@pytest.fixture
def buffers(make_buffers: Callable[[], MemoryPool]) -> MemoryPool:
    return make_buffers()


@pytest.fixture
def evicting(make_shared: Callable[..., torch_vmm.SharedMemoryPool]) -> Iterator[Evicting]:
    evicting = Evicting(make_shared("64MiB"))
    yield evicting
    # The function that a test gives knows all of this, and is known by it: such a circle is collected late.
    evicting.kept.clear()


@pytest.fixture
def manager(device: str) -> Iterator[torch_vmm.VirtualMemoryManager]:
    """Closed after the test, which leaves nothing of it in use."""
    manager = torch_vmm.VirtualMemoryManager(device)
    yield manager
    gc.collect(0)
    manager.close()
