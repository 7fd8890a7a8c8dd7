"""Models of one GPU that sleep in another one's memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import torch_vmm
from tests.gpu.patterns import intact, queue_stamp
from tests.helpers import KIB, MIB, run

SIZES = (KIB, 3 * MIB, 22 * MIB + 512, 300 * MIB)
BYTES = 325 * MIB  # that they hold


@pytest.fixture
def model() -> Iterator[torch_vmm.VirtualMemoryPool]:
    shared = torch_vmm.SharedMemoryPool("1GiB", "cuda:0")
    yield shared.register_model("llama")
    shared.close(force=True)
    torch.cuda.empty_cache()


def made(model: torch_vmm.VirtualMemoryPool) -> list[torch.Tensor]:
    with model:
        return [
            queue_stamp(torch.empty(size, dtype=torch.uint8, device="cuda:0"), seed) for seed, size in enumerate(SIZES)
        ]


def free_on(device: int) -> int:
    torch.cuda.synchronize(device)
    return torch.cuda.mem_get_info(device)[0]


def test_it_comes_back_as_it_was(model: torch_vmm.VirtualMemoryPool) -> None:
    tensors = made(model)
    for _ in range(3):
        model.sleep("device:1")
        assert model.asleep == {"": "cuda:1"}
        model.wake()
        assert all(intact(tensor, seed) for seed, tensor in enumerate(tensors))
        for seed, tensor in enumerate(tensors):
            queue_stamp(tensor, seed)


def test_what_it_leaves_there_is_kept_and_given_back(model: torch_vmm.VirtualMemoryPool) -> None:
    tensors = made(model)
    torch.cuda.empty_cache()
    before = free_on(1)
    model.sleep("device:1")
    asleep = before - free_on(1)
    assert BYTES <= asleep <= BYTES + 64 * MIB
    model.wake()
    assert before - free_on(1) == asleep
    model.sleep("device:1")
    assert before - free_on(1) == asleep
    model.wake()
    torch.cuda.empty_cache()
    assert free_on(1) == before
    assert all(intact(tensor, seed) for seed, tensor in enumerate(tensors))


def test_models_there_come_first(model: torch_vmm.VirtualMemoryPool) -> None:
    tensors = made(model)
    model.sleep("device:1")
    model.wake()
    torch.cuda.synchronize(1)
    free = torch.cuda.mem_get_info(1)[0]
    large = torch.empty(free + BYTES // 2, dtype=torch.uint8, device="cuda:1")  # more than is free
    with pytest.raises(torch.OutOfMemoryError, match="no room for"):
        model.sleep("device:1")
    assert not model.is_asleep
    model.sleep(["device:1", "host"])
    assert model.asleep == {"": "host"}
    model.wake()
    del large
    model.sleep("device:1")
    model.wake()
    assert all(intact(tensor, seed) for seed, tensor in enumerate(tensors))


def test_who_is_refused_there_learns_of_them(model: torch_vmm.VirtualMemoryPool) -> None:
    tensors = made(model)
    model.sleep("device:1")
    with pytest.raises(torch.OutOfMemoryError, match="models of other devices, asleep here"):
        torch.empty(torch.cuda.mem_get_info(1)[1] - BYTES // 2, dtype=torch.uint8, device="cuda:1")
    model.wake()
    assert all(intact(tensor, seed) for seed, tensor in enumerate(tensors))


def test_a_process_of_another_gpu_makes_no_context_on_the_first() -> None:
    run(
        """
        import torch, torch_vmm
        torch_vmm.enable()
        shared = torch_vmm.SharedMemoryPool("256MiB", "cuda:1")
        model = shared.register_model("llama")
        torch.cuda.set_device(1)
        with model:
            tensor = torch.arange(1 << 20, device="cuda:1")
        model.sleep("host")
        model.wake()
        assert torch.equal(tensor.cpu(), torch.arange(1 << 20))
        assert torch._C._cuda_hasPrimaryContext(1)
        assert not torch._C._cuda_hasPrimaryContext(0), "hundreds of MiB of it"
        """
    )
