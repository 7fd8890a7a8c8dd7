"""The GPU suite: what only a GPU has, and all of tests/api on it.

``pytest tests/gpu`` runs both. torch_vmm becomes torch's allocator at the start
of the session. Without a GPU every test is skipped, unless the CUDA stand-in is
there (tests/standin): then all but those marked ``needs_gpu``.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu.workloads import graphs
from tests.standin import control
from torch_vmm import _C

_HERE = Path(__file__).resolve().parent

Busy = Callable[..., torch.cuda.Event]
Sleep = Callable[[float], None]


def pytest_configure(config: pytest.Config) -> None:
    config.option.device = "cuda"
    if any(Path(argument).resolve() == _HERE for argument in config.args):
        config.args.append(str(_HERE.parent / "api"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    why = _why_not()
    for item in items:
        if why:
            item.add_marker(pytest.mark.skip(reason=why))
        elif control.is_here() and (needs := item.get_closest_marker("needs_gpu")) is not None:
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {needs.args[0]}"))


def _why_not() -> str:
    """Why the suite cannot run here, or "". Initialises nothing of CUDA."""
    try:
        gpus = _C.device_count("cuda")
    except RuntimeError as error:
        return f"no GPU: {error}"
    if gpus == 0 or not torch.cuda.is_available():
        return "no GPU: none is visible"
    return ""


@pytest.fixture(scope="session", autouse=True)
def _enabled(device: str) -> None:
    """torch_vmm is torch's allocator before anything touches CUDA."""


@pytest.fixture(autouse=True)
def _gpu_is_idle_afterwards(_enabled: None) -> Iterator[None]:
    """An error of queued work belongs to the test that queued it."""
    yield
    gc.collect(0)
    torch.cuda.synchronize()


@pytest.fixture(scope="session")
def _cycles_per_ms(_enabled: None) -> float:
    if control.is_here():
        return 1e6  # its clock stands still while somebody waits
    # Of the highest clock that there is. By one measured, beside other processes, which get slices of the GPU's time,
    # kernels were a fraction as long as asked for.
    return float(torch.cuda.get_device_properties(0).clock_rate)  # kHz


@pytest.fixture
def busy(_cycles_per_ms: float) -> Busy:
    """``busy(ms)`` queues a kernel of that length, or longer, on the current stream; returns an event after it.

    While ``event.query()`` is False the kernel has not ended.
    """

    def queue(ms: float) -> torch.cuda.Event:
        torch.cuda._sleep(int(ms * _cycles_per_ms))
        event = torch.cuda.Event()
        event.record()
        return event

    return queue


class Stopwatch:
    """Wall time of ``with Stopwatch() as watch:``, in ms; no less than the CPU's. On the stand-in it says nothing."""

    def __enter__(self) -> Stopwatch:
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.ms = 0.0 if control.is_here() else (time.perf_counter() - self._began) * 1e3


@pytest.fixture
def sleep(_cycles_per_ms: float) -> Sleep:
    """``sleep(ms)`` queues or captures a kernel of that length."""
    return lambda ms: torch.cuda._sleep(int(ms * _cycles_per_ms))


@pytest.fixture(scope="session", autouse=True)
def _kernels_are_loaded(_enabled: None) -> None:
    """Loads the kernels that tests use between a long kernel and its end: loading one waits for the GPU."""
    for dtype in (torch.uint8, torch.int64, torch.float32):
        block = torch.empty(4096, dtype=dtype, device="cuda")
        other = block.fill_(1).clone()
        other.copy_(block).mul_(3).add_(1)
        (block != other).sum()
        (block != 1).sum()
        torch.count_nonzero(block)
        torch.arange(64, dtype=dtype, device="cuda")
    torch.cuda.synchronize()


@pytest.fixture(scope="module")
def random_generator_is_ready(_enabled: None) -> Iterator[None]:
    """So that only what a test captures moves the numbers."""
    with graphs.a_living_graph():
        yield
