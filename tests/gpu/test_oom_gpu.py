"""Out of memory on the GPU: torch's own error, with the whole story, and everything goes on afterwards."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import torch_vmm
from tests.gpu.patterns import intact, queue_stamp
from tests.helpers import GIB, MIB
from tests.standin.control import less
from torch_vmm import _C

pytestmark = pytest.mark.alone  # it fills the GPU

MakeShared = Callable[..., torch_vmm.SharedMemoryPool]
MakePool = Callable[..., torch_vmm.VirtualMemoryPool]


def block_in(pool: torch_vmm.VirtualMemoryPool, size: int) -> torch.Tensor:
    with pool:
        return torch.empty(size, dtype=torch.uint8, device="cuda")


def test_more_than_the_gpu_has(make_pool: MakePool) -> None:
    pool = make_pool("8TiB")
    kept = queue_stamp(block_in(pool, 10 * MIB), 1)
    total = torch.cuda.mem_get_info()[1]
    with pytest.raises(torch.cuda.OutOfMemoryError, match=r"CUDA out of memory\. Tried to allocate"):
        block_in(pool, 2 * total)
    with pytest.raises(torch.OutOfMemoryError):
        block_in(pool, 2**60)
    assert intact(kept, 1)
    assert intact(queue_stamp(block_in(pool, 100 * MIB), 2), 2)


def test_more_than_the_gpu_has_leaves_everything_as_it_was(make_pool: MakePool) -> None:
    pool = make_pool("8TiB")
    device = _C.device("cuda")
    with pytest.raises(torch.OutOfMemoryError):  # gives back all that is idle anywhere
        block_in(pool, 2 * torch.cuda.mem_get_info()[1])
    torch.cuda.empty_cache()
    before = (device.live_chunks, device.committed_bytes, torch.cuda.memory_allocated())
    for _ in range(3):
        with pytest.raises(torch.OutOfMemoryError):
            block_in(pool, 2 * torch.cuda.mem_get_info()[1])
    torch.cuda.empty_cache()
    assert (device.live_chunks, device.committed_bytes, torch.cuda.memory_allocated()) == before
    assert pool.physical_memory_usage == 0


def test_the_error_says_who_asked_what_the_limits_are_and_who_holds_what(make_shared: MakeShared) -> None:
    shared = make_shared("512MiB")
    eager = shared.register_model("eager", physical_limit="256MiB")
    other = shared.register_model("other")
    held = block_in(other, 300 * MIB)
    mine = block_in(eager, 100 * MIB)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        block_in(eager, 200 * MIB)
    message = str(caught.value)
    for expected in ("eager", "200.0 MiB", "256.0 MiB", "512.0 MiB"):
        assert expected.replace(".0", "") in message.replace(".0", "")
    assert "'other'" not in message  # what it holds does not count under eager's own limit
    refusal = torch_vmm.last_out_of_memory()
    assert refusal is not None
    assert (refusal.requested, refusal.limit, refusal.pool) == (200 * MIB, 256 * MIB, "eager")
    assert [holder.name for holder in refusal.holders] == ["eager"]
    assert refusal.advice in message
    del held, mine


def test_an_error_by_the_limit_counts_as_one(make_pool: MakePool) -> None:
    pool = make_pool("1GiB", physical_limit="64MiB")
    before = torch.cuda.memory_stats()["num_ooms"]
    with pytest.raises(torch.OutOfMemoryError):
        block_in(pool, 65 * MIB)
    assert pool.memory_stats()["num_ooms"] == 1
    assert torch.cuda.memory_stats()["num_ooms"] == before + 1


def test_what_fits_after_reclaim_never_fails(make_shared: MakeShared) -> None:
    limit, step = less(256 * MIB, by=8), less(MIB, by=8)
    shared = make_shared(limit)
    models = [shared.register_model(f"model-{number}") for number in range(4)]
    for turn in range(40):
        block = queue_stamp(block_in(models[turn % 4], (200 + turn) * step), turn)
        assert intact(block, turn)
        assert shared.global_stats().physical_usage <= limit
        del block


@pytest.mark.needs_gpu("it trains with large batches")
def test_training_goes_on_with_a_smaller_batch(make_pool: MakePool) -> None:
    pool = make_pool("8GiB", physical_limit="384MiB")
    with pool:
        model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)]).cuda()

        def fits(batch: int) -> bool:
            try:
                model(torch.randn(batch, 1024, device="cuda")).square().mean().backward()
            except torch.OutOfMemoryError:
                model.zero_grad()
                return False
            return True

        batch = 2**16
        while not fits(batch):
            batch //= 2
        assert 16 < batch < 2**16
        assert all(fits(batch) for _ in range(3))
    assert pool.max_memory_reserved() <= 384 * MIB


def test_an_error_inside_backward_reaches_the_caller(make_pool: MakePool) -> None:
    pool = make_pool("1GiB", physical_limit="160MiB")
    with pool:
        x = torch.ones(8 * MIB, device="cuda", requires_grad=True)  # 32 MiB
        y = x.sin()
        z = y.cos().sum()
        del y
        hog = torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            z.backward()
        del hog, z
        x.sin().sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, x.detach().cos())


def test_a_limit_below_what_is_held_stops_requests_until_it_fits(make_pool: MakePool) -> None:
    pool = make_pool("1GiB")
    blocks = [queue_stamp(block_in(pool, 32 * MIB), seed) for seed in range(4)]
    pool.physical_limit = 64 * MIB
    with pytest.raises(torch.OutOfMemoryError):
        block_in(pool, 16 * MIB)
    assert all(intact(block, seed) for seed, block in enumerate(blocks))
    del blocks[1:]
    assert intact(queue_stamp(block_in(pool, 16 * MIB), 9), 9)


def test_the_device_fraction_is_a_limit_like_any_other() -> None:
    total = torch.cuda.mem_get_info()[1]
    used = torch.cuda.memory_reserved()
    torch.cuda.set_per_process_memory_fraction((used + GIB) / total)
    try:
        assert torch.cuda.get_per_process_memory_fraction() == pytest.approx((used + GIB) / total)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2 * GIB, dtype=torch.uint8, device="cuda")
        torch.empty(GIB // 4, dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


@pytest.mark.needs_gpu("4 GiB, touched")
@pytest.mark.no_memcheck  # all of the GPU's memory
def test_the_gpu_itself_runs_full_and_recovers(make_pool: MakePool) -> None:
    torch.cuda.empty_cache()
    pools = [make_pool("1TiB") for _ in range(2)]
    blocks: list[torch.Tensor] = []

    def fill() -> None:
        while True:
            blocks.append(block_in(pools[len(blocks) % 2], 4 * GIB))

    with pytest.raises(torch.OutOfMemoryError):
        fill()
    assert len(blocks) * 4 * GIB > torch.cuda.mem_get_info()[1] // 2
    held = len(blocks)
    blocks.clear()
    # All that the other pool has idle can be had.
    blocks.extend(block_in(pools[0], 4 * GIB) for _ in range(held - 1))
    assert intact(queue_stamp(blocks[0], 1), 1)
