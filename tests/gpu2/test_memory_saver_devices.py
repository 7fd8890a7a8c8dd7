"""The published examples of torch_memory_saver 0.0.10 on several devices, with one import changed."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

import torch_vmm
from tests.gpu.patterns import intact, queue_stamp
from tests.helpers import MIB
from torch_vmm.memory_saver import torch_memory_saver

pytestmark = pytest.mark.usefixtures("fresh_saver")

SIZE = 256 * MIB
DEVICES = (0, 1)


def in_region(device: int, seed: int, tag: str = "default", enable_cpu_backup: bool = False) -> torch.Tensor:
    """One of that device, which is the current one."""
    with torch.cuda.device(device), torch_memory_saver.region(tag, enable_cpu_backup):
        return queue_stamp(torch.empty(SIZE, dtype=torch.uint8, device=f"cuda:{device}"), seed)


def free() -> list[int]:
    """Of each device, once nothing is idle."""
    for device in DEVICES:
        torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return [torch.cuda.mem_get_info(device)[0] for device in DEVICES]


def test_pause_and_resume_are_of_all_devices() -> None:
    tensors = [in_region(device, device, "t") for device in DEVICES]
    addresses = [tensor.data_ptr() for tensor in tensors]
    made = free()
    torch_memory_saver.pause("t")
    paused = free()
    assert all(abs(now - before - SIZE) < 64 * MIB for now, before in zip(paused, made, strict=True))
    torch_memory_saver.resume("t")
    assert all(abs(now - before) < 64 * MIB for now, before in zip(free(), made, strict=True))
    assert [tensor.data_ptr() for tensor in tensors] == addresses
    for tensor in tensors:
        assert bool((tensor.fill_(2) == 2).all())


def test_what_a_device_keeps_is_its_own() -> None:
    kept = [in_region(device, device, "weights", enable_cpu_backup=True) for device in DEVICES]
    lost = in_region(1, 2, "kv_cache")
    torch_memory_saver.pause()
    for device, tensor in zip(DEVICES, kept, strict=True):
        pool, backup = torch_vmm.pool_of(tensor), torch_memory_saver.get_cpu_backup(tensor)
        assert pool is not None
        assert (pool.device.index, pool.physical_memory_usage) == (device, 0)
        assert backup is not None
        assert intact(backup, device)
    assert torch_memory_saver.get_cpu_backup(lost) is None
    torch_memory_saver.resume("weights")
    assert all(intact(tensor, device) for device, tensor in zip(DEVICES, kept, strict=True))
    torch_memory_saver.resume()
    assert not lost.any()


def test_a_region_is_of_the_device_that_is_current() -> None:
    before = [torch.cuda.memory_allocated(device) for device in DEVICES]
    with torch.cuda.device(1):
        with torch_memory_saver.region():
            elsewhere = queue_stamp(torch.empty(SIZE, dtype=torch.uint8, device="cuda:0"), 1)
        with torch_memory_saver.region():
            by_default = queue_stamp(torch.empty(SIZE, dtype=torch.uint8, device="cuda"), 2)
        with torch_memory_saver.region():
            by_name = queue_stamp(torch.empty(SIZE, dtype=torch.uint8, device="cuda:1"), 3)
    made = [torch.cuda.memory_allocated(device) for device in DEVICES]
    assert [now - then for now, then in zip(made, before, strict=True)] == [SIZE, 2 * SIZE]
    torch_memory_saver.pause()
    pool = torch_vmm.pool_of(by_default)
    assert pool is not None
    assert pool is torch_vmm.pool_of(by_name)
    assert pool.physical_memory_usage == 0
    assert intact(elsewhere, 1), "as with hook_mode='torch' it is of no region"
    torch_memory_saver.resume()
    assert not by_default.any()
    assert [torch.cuda.memory_allocated(device) for device in DEVICES] == made


def times_three_and_one(x: torch.Tensor) -> torch.Tensor:
    return x * 3 + 1


def captured(work: Callable[[], torch.Tensor], device: int) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device):
        work()
        torch.cuda.synchronize()
        with torch_memory_saver.cuda_graph(graph, stream=torch.cuda.Stream(), tag="graph"):
            return graph, work()


def test_graphs_of_both_devices_are_paused() -> None:
    fed = [torch.ones(32 * MIB, device=f"cuda:{device}") for device in DEVICES]
    graphs = [captured(functools.partial(times_three_and_one, fed[device]), device) for device in DEVICES]
    made = free()
    torch_memory_saver.pause("graph")
    assert all(now - before > 128 * MIB for now, before in zip(free(), made, strict=True))
    torch_memory_saver.resume("graph")
    for device, (graph, result) in enumerate(graphs):
        fed[device].fill_(device + 5)
        with torch.cuda.device(device):
            graph.replay()
        assert bool((result == 3 * (device + 5) + 1).all())
