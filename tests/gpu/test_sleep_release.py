"""What the driver, and other processes, have of a model that sleeps: all of it, where it is released."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.gpu.memory import settle
from tests.gpu.patterns import intact, queue_stamp
from tests.gpu.programs import expect_done, start
from tests.helpers import GIB, KIB, MIB
from tests.standin import control
from torch_vmm import SharedMemoryPool, VirtualMemoryPool

pytestmark = pytest.mark.alone  # they look at the GPU's free memory

MakeShared = Callable[..., SharedMemoryPool]

SIZE = control.less(2 * GIB, by=8)
NEAR = 64 * MIB


def made(model: VirtualMemoryPool) -> list[torch.Tensor]:
    """Tensors of ``SIZE`` bytes in all, large and small."""
    sizes = [SIZE // 2, SIZE // 4, *[SIZE // 64] * 15, *[64 * KIB] * (SIZE // 64 // (64 * KIB))]
    assert sum(sizes) == SIZE
    with model:
        return [queue_stamp(torch.empty(size, dtype=torch.uint8, device="cuda"), k) for k, size in enumerate(sizes)]


def are_intact(tensors: list[torch.Tensor]) -> bool:
    return all(intact(tensor, seed) for seed, tensor in enumerate(tensors))


def free_bytes() -> int:
    """What the driver has left."""
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


@pytest.fixture
def model(make_shared: MakeShared) -> VirtualMemoryPool:
    settle()
    return make_shared(2 * SIZE).register_model("llama")


@pytest.mark.parametrize("keep", ["host", "discard", "file"])
def test_the_driver_has_what_is_released(model: VirtualMemoryPool, keep: str, tmp_path: Path) -> None:
    tensors = made(model)
    assert are_intact(tensors)
    settle()
    for _ in range(2):
        before = free_bytes()
        model.sleep(keep if keep != "file" else tmp_path / "llama", release=True)
        assert abs(free_bytes() - before - SIZE) <= NEAR
        model.wake()
        assert abs(free_bytes() - before) <= NEAR
        if keep != "discard":
            assert are_intact(tensors)
            settle()


def test_no_store_holds_anything_once_the_cache_is_emptied(make_shared: MakeShared) -> None:
    settle()
    shared = make_shared(2 * SIZE)
    model = shared.register_model("llama")
    tensors = made(model)
    assert are_intact(tensors)
    settle()
    before = free_bytes()
    model.sleep()
    assert shared.global_stats().store_bytes >= SIZE, "for the other models"
    torch.cuda.empty_cache()
    stats = shared.global_stats()
    assert (stats.store_bytes, stats.physical_usage, stats.asleep_bytes) == (0, 0, SIZE)
    assert abs(free_bytes() - before - SIZE) <= NEAR
    model.wake()
    assert are_intact(tensors)


_TAKES_NEARLY_ALL = """
import torch

free = torch.cuda.mem_get_info()[0]
assert free > {expected}, free
block = torch.empty(free - 2**29, dtype=torch.uint8, device="cuda")
block[-1] = 3
assert int(block[-1]) == 3
print("done")
"""


@pytest.mark.needs_gpu("its memory is each process's own")
@pytest.mark.no_memcheck  # another process
def test_another_process_has_it_at_once(model: VirtualMemoryPool) -> None:
    tensors = made(model)
    settle()
    before = free_bytes()
    model.sleep(release=True)
    expect_done(start(_TAKES_NEARLY_ALL.format(expected=before + SIZE - GIB)))  # but for its context
    model.wake()
    assert are_intact(tensors)
