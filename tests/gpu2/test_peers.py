"""Two GPUs in one process: copies, kernels that reach the other's memory, and the caller's device left alone."""

from __future__ import annotations

import ctypes

import pytest
import torch

import torch_vmm
from tests.gpu.patterns import intact, queue_stamp
from tests.gpu.workloads import ipc
from tests.helpers import KIB, MIB

SIZES = (KIB, 3 * MIB, 22 * MIB + 512, 100 * MIB)


def bytes_on(device: int, size: int, seed: int) -> torch.Tensor:
    return queue_stamp(torch.empty(size, dtype=torch.uint8, device=f"cuda:{device}"), seed)


@pytest.fixture(scope="module", autouse=True)
def early(_enabled: None) -> list[list[torch.Tensor]]:
    """Tensors of both GPUs from before the first copy: torch lets a GPU into the other's memory only then."""
    return [[bytes_on(device, size, seed) for seed, size in enumerate(SIZES)] for device in (0, 1)]


def context() -> int:
    """The driver's context of this thread."""
    now = ctypes.c_void_p()
    assert ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(now)) == 0
    return now.value or 0


def seen_from(device: int, tensor: torch.Tensor) -> torch.Tensor:
    """The memory of another GPU's tensor as a tensor of ``device``, whose kernels then work on it."""
    where = torch.device("cuda", device)
    storage = torch._C._construct_storage_from_data_pointer(tensor.data_ptr(), where, tensor.numel())
    return torch.empty(0, dtype=torch.uint8, device=where).set_(storage)


@pytest.fixture
def peers(early: list[list[torch.Tensor]]) -> None:
    """Both GPUs reach each other's memory, and have been let in."""
    for source, target in ((0, 1), (1, 0)):
        if not torch.cuda.can_device_access_peer(source, target):
            pytest.skip("the two GPUs are no peers")
        early[source][0].to(f"cuda:{target}")


@pytest.mark.parametrize(("source", "target"), [(0, 1), (1, 0)])
def test_copies_of_memory_from_before(early: list[list[torch.Tensor]], source: int, target: int) -> None:
    for seed, tensor in enumerate(early[source]):
        copy = tensor.to(f"cuda:{target}")
        assert copy.device.index == target
        assert intact(copy, seed)
        assert intact(tensor, seed)


@pytest.mark.parametrize(("source", "target"), [(0, 1), (1, 0)])
def test_copies_of_memory_from_afterwards(peers: None, source: int, target: int) -> None:
    for seed, size in enumerate(SIZES):
        tensor = bytes_on(source, size, seed)
        into = bytes_on(target, size, 99)
        assert intact(into.copy_(tensor), seed)
    # A kernel of the source copies what has gaps.
    numbers = torch.arange(2 * MIB, device=f"cuda:{source}")
    assert torch.equal(numbers[::2].to(f"cuda:{target}").cpu(), torch.arange(0, 2 * MIB, 2))


def test_copies_between_models_of_two_gpus() -> None:
    pools = [torch_vmm.VirtualMemoryPool("1GiB", device=f"cuda:{device}") for device in (0, 1)]
    try:
        with pools[0], pools[1]:
            there = bytes_on(1, 22 * MIB, 5)
            here = there.to("cuda:0")
        assert torch_vmm.pool_of(there) is pools[1]
        assert torch_vmm.pool_of(here) is pools[0]
        assert intact(here, 5)
        assert torch_vmm.pool_of(bytes_on(1, KIB, 1)) is not pools[1]
    finally:
        del there, here
        for pool in pools:
            pool.close(force=True)


@pytest.mark.parametrize(("owner", "guest"), [(0, 1), (1, 0)])
def test_kernels_reach_the_others_memory(peers: None, early: list[list[torch.Tensor]], owner: int, guest: int) -> None:
    pool = torch_vmm.VirtualMemoryPool("1GiB", device=f"cuda:{owner}")
    with pool:
        late = [bytes_on(owner, size, seed) for seed, size in enumerate(SIZES)]
    torch.cuda.synchronize(owner)
    for seed, (before, after) in enumerate(zip(early[owner], late, strict=True)):
        for tensor in (before, after):
            view = seen_from(guest, tensor)
            assert intact(view, seed), "memory from before and from after the GPU was let in"
            queue_stamp(view, seed + 10)
            torch.cuda.synchronize(guest)
            assert intact(tensor, seed + 10)
            queue_stamp(tensor, seed)
        torch.cuda.synchronize(owner)
    del late, before, after, tensor, view
    pool.close(force=True)


def test_kernels_reach_memory_that_has_moved(peers: None) -> None:
    """Chunks that go from one model to another stay open to the peer."""
    shared = torch_vmm.SharedMemoryPool("256MiB", device="cuda:0")
    giver, taker = (shared.register_model(name) for name in ("giver", "taker"))
    with giver:
        bytes_on(0, 200 * MIB, 1)
    with taker:
        taken = bytes_on(0, 200 * MIB, 2)
    torch.cuda.synchronize(0)
    assert intact(seen_from(1, taken), 2)
    del taken
    shared.close(force=True)


def test_the_callers_device_stays(peers: None) -> None:
    for current in (0, 1):
        with torch.cuda.device(current):
            torch.ones(1, device="cuda")
            before = context()
            tensors = [bytes_on(device, 22 * MIB, 1) for device in (0, 1)]
            tensors[0].to("cuda:1")
            tensors[1].to("cuda:0")
            storages = [torch.UntypedStorage._new_shared_cuda(*ipc.share(tensor)) for tensor in tensors]
            del tensors, storages
            ipc.collect()
            torch.cuda.memory_stats(1 - current)
            torch.cuda.mem_get_info(1 - current)
            assert torch.cuda.current_device() == current
            assert context() == before


def test_each_gpu_has_its_own_numbers() -> None:
    before = [torch.cuda.memory_allocated(device) for device in (0, 1)]
    block = bytes_on(1, 10 * MIB, 1)
    assert torch.cuda.memory_allocated(0) == before[0]
    assert torch.cuda.memory_allocated(1) == before[1] + 10 * MIB
    assert torch_vmm.is_enabled("cuda:0")
    assert torch_vmm.is_enabled("cuda:1")
    assert torch_vmm.current_pool("cuda:0") is not torch_vmm.current_pool("cuda:1")
    del block


def test_models_on_each_gpu() -> None:
    pools = [torch_vmm.SharedMemoryPool("300MiB", device=f"cuda:{device}") for device in (0, 1)]
    models = [pool.register_model("one name") for pool in pools]
    for device, model in enumerate(models):
        with model:
            mine, other = bytes_on(device, 200 * MIB, 1), bytes_on(1 - device, KIB, 2)
        assert torch_vmm.pool_of(mine) is model
        assert torch_vmm.pool_of(other) not in models
        assert model.memory_allocated() == 200 * MIB
        assert models[1 - device].memory_allocated() == 0
        with pytest.raises(torch.OutOfMemoryError, match="one name"), model:
            bytes_on(device, 200 * MIB, 3)
        assert intact(mine, 1)
        del mine, other
        model.empty_cache()
    for pool in pools:
        pool.close(force=True)


def test_memory_of_another_process_is_reached_by_peers(peers: None) -> None:
    """What is opened on the second GPU, the first one reaches too."""
    tensor = bytes_on(1, 22 * MIB, 4)
    storage = torch.UntypedStorage._new_shared_cuda(*ipc.share(tensor))
    opened = torch.empty(0, dtype=torch.uint8, device="cuda:1").set_(storage)
    assert opened.data_ptr() != tensor.data_ptr()
    assert intact(opened, 4)
    assert intact(opened.to("cuda:0"), 4)
    assert intact(seen_from(0, opened), 4)
