"""One process, one device: ``--device cpu`` (the default) or ``--device cuda``.

Becoming torch's allocator cannot be undone, so it happens once, before the
first test. What needs a process without it starts one (tests/helpers.py).
"""

from __future__ import annotations

import os
import signal

# Before the extension reads it: a small host "device", so that it can be exhausted.
os.environ.setdefault("TORCH_VMM_HOST_BYTES", "2GiB")

from collections.abc import Callable, Iterator

import pytest

import torch_vmm
from tests.helpers import close_all
from torch_vmm import _C
from torch_vmm.devices import to_device

# A shell starts what runs in the background deaf to Ctrl-C, which tests send to themselves.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=["cpu", "cuda"], default="cpu", help="where tests/api allocate")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """``"cpu"`` or ``"cuda"``, with torch's tensors there made by torch_vmm."""
    chosen: str = request.config.getoption("--device")
    torch_vmm.enable(chosen)
    return chosen


@pytest.fixture(scope="session")
def memory(device: str) -> _C.Device:
    """All pools of the device under test: its granularity, its total, its books."""
    return _C.device(*to_device(device))


@pytest.fixture(autouse=True)
def books_balance(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test pools and chunk store sum to what the driver gave."""
    memory: _C.Device | None = request.getfixturevalue("memory") if "device" in request.fixturenames else None
    yield
    if memory is not None:
        memory.check()


@pytest.fixture
def make_pool(device: str) -> Iterator[Callable[..., torch_vmm.VirtualMemoryPool]]:
    """Makes pools on the device, and ends them after the test, whatever is alive in them."""
    made: list[torch_vmm.VirtualMemoryPool] = []

    def make(capacity: str | int = "64MiB", **options: object) -> torch_vmm.VirtualMemoryPool:
        made.append(torch_vmm.VirtualMemoryPool(capacity, device=device, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    close_all(made)


@pytest.fixture
def make_shared(device: str) -> Iterator[Callable[..., torch_vmm.SharedMemoryPool]]:
    """The same for SharedMemoryPools."""
    made: list[torch_vmm.SharedMemoryPool] = []

    def make(physical_limit: str | int = "64MiB") -> torch_vmm.SharedMemoryPool:
        made.append(torch_vmm.SharedMemoryPool(physical_limit, device=device))
        return made[-1]

    yield make
    close_all(made)


@pytest.fixture
def pool(make_pool: Callable[..., torch_vmm.VirtualMemoryPool]) -> torch_vmm.VirtualMemoryPool:
    """64 MiB of addresses in pages of 2 MiB, no limit."""
    return make_pool("64MiB", page_size="2MiB")


@pytest.fixture
def shared(make_shared: Callable[..., torch_vmm.SharedMemoryPool]) -> torch_vmm.SharedMemoryPool:
    """64 MiB for all models."""
    return make_shared("64MiB")


@pytest.fixture
def fresh_saver(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The process's torch_memory_saver knows no region and is of the device under test; its models end after it."""
    from torch_vmm.memory_saver import TorchMemorySaver, torch_memory_saver  # becomes CUDA's allocator

    monkeypatch.setattr(torch_memory_saver, "_saved", {})
    monkeypatch.setattr(torch_memory_saver, "_disk_dir", "")
    if device == "cpu":  # where there is a GPU, too
        key = to_device(device)
        monkeypatch.setattr(TorchMemorySaver, "_key", lambda self: key)
    yield
    close_all([saved.shared for saved in torch_memory_saver._saved.values()])
