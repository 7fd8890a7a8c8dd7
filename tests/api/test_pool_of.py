"""Which pool holds a tensor or an address: pool_of."""

from __future__ import annotations

import gc

import pytest
import torch

import torch_vmm

Pool = torch_vmm.VirtualMemoryPool
Shared = torch_vmm.SharedMemoryPool


def test_pool_of_views_and_addresses(device: str, llama: Pool) -> None:
    with llama:
        tensor = torch.empty(100, 100, device=device)
    for view in (tensor[50:], tensor.t(), tensor[100:], tensor.view(-1)[:0]):
        assert torch_vmm.pool_of(view) is llama
    assert torch_vmm.pool_of(tensor.data_ptr()) is llama
    assert torch_vmm.pool_of(llama.base_address) is llama
    assert torch_vmm.pool_of(llama.base_address + llama.capacity - 1) is llama
    assert torch_vmm.pool_of(llama.base_address + llama.capacity) is not llama


def test_pool_of_what_is_in_none(device: str) -> None:
    import numpy as np

    assert torch_vmm.pool_of(torch.from_numpy(np.zeros(10))) is None
    assert torch_vmm.pool_of(torch.empty(0, device=device)) is None
    assert torch_vmm.pool_of(torch.empty(10, device="meta")) is None
    for address in (0, 4096, -1, 2**64):
        assert torch_vmm.pool_of(address) is None


@pytest.mark.parametrize("thing", ["tensor", 1.5, None, True])
def test_pool_of_what_is_neither(thing: object) -> None:
    with pytest.raises(torch_vmm.InvalidArgumentError):
        torch_vmm.pool_of(thing)  # type: ignore[arg-type]


def test_pool_of_a_tensor_without_storage(device: str) -> None:
    with pytest.raises(torch_vmm.InvalidArgumentError):
        torch_vmm.pool_of(torch.eye(3, device=device).to_sparse())


def test_one_pool_is_one_object(roomy: Shared, device: str) -> None:
    llama = roomy.register_model("llama", "64MiB")
    number = id(llama)
    with llama:
        tensor = torch.empty(10, device=device)
        found = {id(torch_vmm.current_pool(device)), id(torch_vmm.pool_of(tensor)), id(roomy["llama"])}
    assert found == {number}
    del llama
    gc.collect()
    again = torch_vmm.pool_of(tensor)
    assert again is roomy["llama"]
    assert again is not None
    assert again.model_id == "llama"
    again.close(force=True)
