"""A tensor over two GPUs' memory: written from both, counted on each, undone by either's limit."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

import torch_vmm
from tests.gpu.patterns import intact, queue_check, queue_stamp
from tests.helpers import MIB
from torch_vmm import aligned, seen_from

Pool = torch_vmm.VirtualMemoryPool
ROW = MIB


@pytest.fixture(scope="module", autouse=True)
def peers(_enabled: None) -> None:
    for one, other in ((0, 1), (1, 0)):
        if not torch.cuda.can_device_access_peer(one, other):
            pytest.skip("the two GPUs are no peers")


@pytest.fixture
def pools() -> Iterator[tuple[Pool, Pool]]:
    made = [torch_vmm.VirtualMemoryPool("4GiB", device=f"cuda:{device}", name=f"of {device}") for device in (0, 1)]
    yield made[0], made[1]
    gc.collect()
    for pool in made:
        pool.close(force=True)


def over_both(first: int, second: int) -> torch.Tensor:
    return aligned((first + second, ROW), torch.uint8, placement=[("cuda:0", first), ("cuda:1", second)])


def allocated(pools: tuple[Pool, Pool]) -> tuple[int, int]:
    return pools[0].memory_allocated(), pools[1].memory_allocated()


def test_each_gpu_pays_for_its_share(pools: tuple[Pool, Pool]) -> None:
    before = [torch.cuda.memory_allocated(device) for device in (0, 1)]
    with pools[0], pools[1]:
        tensor = over_both(64, 32)
    assert tensor.device == torch.device("cuda:0")
    assert allocated(pools) == (64 * MIB, 32 * MIB)
    assert [torch.cuda.memory_allocated(device) - before[device] for device in (0, 1)] == [64 * MIB, 32 * MIB]
    assert int(tensor.count_nonzero()) == 0
    del tensor
    gc.collect()
    assert allocated(pools) == (0, 0)


def test_both_gpus_write_and_read_all_of_it(pools: tuple[Pool, Pool]) -> None:
    with pools[0], pools[1]:
        tensor = over_both(32, 32)
    other = seen_from(tensor, "cuda:1")
    assert other.device == torch.device("cuda:1")
    assert other.data_ptr() == tensor.data_ptr()
    for writer, reader, seed in ((tensor, other, 1), (other, tensor, 2)):
        queue_stamp(writer, seed)
        torch.cuda.synchronize(writer.device)
        assert intact(reader, seed)
    # Each half by the GPU whose memory it is not.
    queue_stamp(other[:32], 3)
    queue_stamp(tensor[32:], 4)
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    assert intact(tensor[:32], 3)
    assert intact(other[32:], 4)
    del other
    gc.collect()
    assert intact(tensor[32:], 4), "a view that has gone took nothing along"


def test_copies_to_and_from_either_gpu(pools: tuple[Pool, Pool]) -> None:
    with pools[0], pools[1]:
        tensor = over_both(16, 16)
    for device in (0, 1):
        source = queue_stamp(torch.empty(32, ROW, dtype=torch.uint8, device=f"cuda:{device}"), device)
        torch.cuda.synchronize(device)
        tensor.copy_(source)
        torch.cuda.synchronize(0)
        assert intact(tensor, device)
        assert intact(tensor.to(f"cuda:{device}"), device)
    assert torch.equal(tensor.cpu(), source.cpu())


def test_a_limit_of_one_gpu_undoes_all(pools: tuple[Pool, Pool]) -> None:
    pools[1].physical_limit = 16 * MIB
    with pools[0], pools[1]:
        with pytest.raises(torch_vmm.OutOfMemoryError) as caught:
            over_both(64, 32)
        assert caught.value.limit == 16 * MIB
        assert allocated(pools) == (0, 0)
        tensor = over_both(64, 16)
    assert allocated(pools) == (64 * MIB, 16 * MIB)
    assert intact(queue_stamp(tensor, 5), 5)


def test_its_memory_goes_behind_readers_on_both_gpus(pools: tuple[Pool, Pool]) -> None:
    """Who gets the memory next comes after work on either GPU that nobody told of."""
    for pool in pools:
        pool.physical_limit = 64 * MIB
    for reader in (0, 1):
        with pools[0], pools[1]:
            tensor = over_both(64, 64)
        queue_stamp(tensor, 7)
        torch.cuda.synchronize(0)
        view = seen_from(tensor, f"cuda:{reader}")
        with torch.cuda.device(reader):
            side = torch.cuda.Stream(reader)
            with torch.cuda.stream(side):
                torch.cuda._sleep(200_000_000)  # some 0.1 s
                wrong = queue_check(view, 7)
        del tensor, view
        gc.collect()
        with pools[0]:
            over_first = torch.full((64 * MIB,), 1, dtype=torch.uint8, device="cuda:0")
        with pools[1]:
            over_second = torch.full((64 * MIB,), 2, dtype=torch.uint8, device="cuda:1")
        side.synchronize()
        assert int(wrong) == 0, f"GPU {reader} read what came after"
        del over_first, over_second


def test_a_new_one_is_zero_for_both(pools: tuple[Pool, Pool]) -> None:
    """The memory is another model's former: each GPU's stream comes after the zeroing by the other."""
    shared = [torch_vmm.SharedMemoryPool("64MiB", device=f"cuda:{device}") for device in (0, 1)]
    givers, takers = ([each.register_model(name) for each in shared] for name in ("giver", "taker"))
    for giver in givers:
        with giver:
            queue_stamp(torch.empty(64 * MIB, dtype=torch.uint8, device=giver.device), 9)
    with takers[0], takers[1]:
        tensor = over_both(64, 64)
    assert int(tensor.count_nonzero()) == 0
    del tensor
    with takers[0], takers[1]:
        tensor = over_both(64, 64)
    assert int(seen_from(tensor, "cuda:1").count_nonzero()) == 0
    del tensor
    gc.collect()
    for each in shared:
        each.close(force=True)


def test_gpus_that_are_no_peers_are_named(monkeypatch: pytest.MonkeyPatch, pools: tuple[Pool, Pool]) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: False)
    with pools[0], pools[1], pytest.raises(torch_vmm.NotAvailableError, match=r"cuda:0 cannot reach .* cuda:1"):
        over_both(4, 4)
    assert allocated(pools) == (0, 0)


def test_boundaries_fall_on_pages(pools: tuple[Pool, Pool]) -> None:
    with pools[0], pools[1]:
        with pytest.raises(torch_vmm.InvalidArgumentError, match="give a multiple of 2 rows: 2 or 4"):
            over_both(3, 5)
        assert over_both(4, 3).shape == (7, ROW)


def test_many_that_come_and_go(pools: tuple[Pool, Pool]) -> None:
    for pool in pools:
        pool.physical_limit = 256 * MIB
    alive: list[tuple[torch.Tensor, int]] = []
    with pools[0], pools[1]:
        for step in range(60):
            first = 2 * (1 + step * 7 % 16)
            alive.append((queue_stamp(over_both(first, 34 - first), step), step))
            if len(alive) > 5:
                del alive[step % 5]
            assert all(intact(tensor, seed) for tensor, seed in alive)
    alive.clear()
    gc.collect()
    torch.cuda.empty_cache()
    assert [pool.physical_memory_usage for pool in pools] == [0, 0]
