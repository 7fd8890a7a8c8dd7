"""The names of torch_memory_saver, over models that sleep."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_vmm
from tests.helpers import MIB
from torch_vmm.memory_saver import TorchMemorySaver, configure_subprocess, torch_memory_saver


@pytest.fixture
def saver(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[TorchMemorySaver]:
    saver = object.__new__(TorchMemorySaver)  # not the process's own
    saver._begin()
    key = torch_vmm.devices.to_device(device)
    monkeypatch.setattr(saver, "_key", lambda: key)
    yield saver
    for saved in saver._saved.values():
        saved.shared.close(force=True)


def test_a_tag_is_paused_and_resumed_in_place(saver: TorchMemorySaver, device: str) -> None:
    with saver.region():
        tensor = torch.full((MIB,), 7, dtype=torch.uint8, device=device)
    address = tensor.data_ptr()
    pool = torch_vmm.pool_of(tensor)
    assert pool is not None
    saver.pause()
    assert pool.physical_memory_usage == 0
    saver.pause()
    saver.resume()
    assert tensor.data_ptr() == address
    assert not tensor.any(), "without a backup it is gone"
    tensor.fill_(1)


def test_backups_and_tags(saver: TorchMemorySaver, device: str, tmp_path: Path) -> None:
    saver.set_disk_backup_dir(tmp_path / "made")
    with saver.region("weights", enable_cpu_backup=True):
        weights = torch.arange(MIB, dtype=torch.int32, device=device)
    with saver.region("kv_cache"):
        cache = torch.ones(MIB, dtype=torch.int32, device=device)
    with saver.region("state", enable_disk_backup=True):
        state = torch.arange(1000, dtype=torch.int32, device=device)
    saver.pause("kv_cache")
    assert torch.equal(weights.cpu(), torch.arange(MIB, dtype=torch.int32))
    assert saver.get_cpu_backup(weights) is None, "it is not paused"
    saver.pause("weights")
    saver.pause("state")
    assert len(list((tmp_path / "made").iterdir())) == 1
    backup = saver.get_cpu_backup(weights[10:20])
    assert backup is not None
    assert backup.tolist() == list(range(10, 20))
    assert saver.get_cpu_backup(state) is not None
    assert saver.get_cpu_backup(cache) is None
    saver.resume("weights")
    assert torch.equal(weights.cpu(), torch.arange(MIB, dtype=torch.int32))
    saver.resume()
    assert torch.equal(state.cpu(), torch.arange(1000, dtype=torch.int32))
    assert not cache.any()
    assert list((tmp_path / "made").iterdir()) == []


def test_a_backup_is_of_what_torch_reads(saver: TorchMemorySaver, device: str) -> None:
    with saver.region(enable_cpu_backup=True):
        tensor = torch.complex(torch.arange(4.0, device=device), torch.arange(4.0, 8.0, device=device))
        real = torch.arange(4.0, device=device)
    views = [tensor, tensor.conj(), torch._neg_view(tensor), torch._neg_view(tensor.conj()), torch._neg_view(real)]
    expected = [view.cpu().clone() for view in views]
    saver.pause()
    for view, values in zip(views, expected, strict=True):
        backup = saver.get_cpu_backup(view)
        assert backup is not None
        assert not backup.is_conj()
        assert torch.equal(backup, values)
    saver.resume()
    assert saver.get_cpu_backup(tensor.conj()) is None


def test_disable(saver: TorchMemorySaver, device: str) -> None:
    with saver.region(enable_cpu_backup=True):
        inside = torch.zeros(1000, device=device)
        with saver.disable():
            outside = torch.zeros(1000, device=device)
    assert torch_vmm.pool_of(inside) is not torch_vmm.pool_of(outside)
    saver.pause()
    outside.fill_(1)
    saver.resume()


def test_pinned_memory_stays_where_that_is_wanted(saver: TorchMemorySaver, device: str) -> None:
    with saver.region(enable_cpu_backup=True):
        tensor = torch.arange(MIB, dtype=torch.int32, device=device)
    (saved,) = saver._saved.values()
    saver.pause()
    saver.resume()
    assert saved.shared.host_backup_bytes == 0
    saver.retain_cpu_backup = True
    assert saver.retain_cpu_backup
    saver.pause()
    saver.resume()
    assert saved.shared.host_backup_bytes > 0
    assert torch.equal(tensor.cpu(), torch.arange(MIB, dtype=torch.int32))


def test_a_margin_is_left(saver: TorchMemorySaver, device: str) -> None:
    with saver.region():
        torch.zeros(1000, device=device)
    (saved,) = saver._saved.values()
    whole = saved.shared.physical_limit
    saver.memory_margin_bytes = 64 * MIB
    assert saved.shared.physical_limit == whole - 64 * MIB
    assert saver.memory_margin_bytes == 64 * MIB


def test_what_cannot_be(saver: TorchMemorySaver) -> None:
    with pytest.raises(ValueError, match="give one of them"), saver.region("a", True, True):
        pass
    with pytest.raises(ValueError, match="cpu_backup_backend='mmap'"), saver.region("a", cpu_backup_backend="mmap"):
        pass
    with pytest.raises(ValueError, match="tag"), saver.region(""):
        pass
    with saver.region("a", True, cpu_backup_backend="mmap"):
        pass


@pytest.mark.parametrize("path", [None, b"/tmp", "", "a\0b", 3])
def test_a_folder_that_cannot_be(saver: TorchMemorySaver, path: Any) -> None:
    with pytest.raises(torch_vmm.InvalidArgumentError, match="path="):
        saver.set_disk_backup_dir(path)


def test_the_object_has_the_names() -> None:
    assert torch_memory_saver.enabled
    torch_memory_saver.hook_mode = "torch"
    assert torch_memory_saver.hook_mode == "torch"
    for name in ("region", "cuda_graph", "disable", "pause", "resume", "get_cpu_backup", "set_disk_backup_dir"):
        assert callable(getattr(torch_memory_saver, name))


def test_there_is_one_for_the_process() -> None:
    torch_memory_saver.memory_margin_bytes = 3 * MIB
    try:
        assert TorchMemorySaver() is torch_memory_saver
        assert torch_memory_saver.memory_margin_bytes == 3 * MIB, "made again it is as it was"
    finally:
        torch_memory_saver.memory_margin_bytes = 0
    with pytest.raises(torch_vmm.NotCopyableError, match="one for the process"):
        copy.copy(torch_memory_saver)


def test_subprocesses_need_nothing() -> None:
    before = dict(os.environ)
    with configure_subprocess() as given:
        assert given is None
        assert dict(os.environ) == before


def test_a_region_can_be_entered_again(saver: TorchMemorySaver, device: str) -> None:
    assert repr(saver) == "TorchMemorySaver(no region yet)"
    region, disabled = saver.region(), saver.disable()
    made = []
    for _ in range(2):
        with region:
            made.append(torch.ones(MIB, dtype=torch.uint8, device=device))
            with disabled:
                assert torch_vmm.pool_of(torch.ones(10, device=device)) is not torch_vmm.pool_of(made[0])
    assert torch_vmm.pool_of(made[0]) is torch_vmm.pool_of(made[1])
    assert repr(saver).startswith(f"TorchMemorySaver({made[0].device}: VirtualMemoryPool('torch_memory_saver', ")
    saver.pause()
    saver.resume()


def test_a_region_that_was_never_entered_is_nothing_to_pause(saver: TorchMemorySaver, device: str) -> None:
    with saver.region("weights", enable_cpu_backup=True):
        weights = torch.ones(MIB, dtype=torch.uint8, device=device)
    saver.pause("weights")
    cache = saver.region("kv_cache")  # to be entered later

    @saver.region("activations")
    def run() -> torch.Tensor:
        return torch.ones(MIB, dtype=torch.uint8, device=device)

    pool = torch_vmm.pool_of(weights)
    assert pool is not None
    saver.resume()
    assert not pool.is_asleep
    assert weights.all()
    saver.pause("kv_cache")
    saver.resume("kv_cache")
    saver.pause()
    assert pool.is_asleep
    saver.resume()
    with cache:
        kept = [torch.ones(MIB, dtype=torch.uint8, device=device)]
    kept.append(run())
    saver.pause()
    saver.resume()
    assert not any(each.any() for each in kept), "entered, they are paused with the rest"
    assert weights.all()


def test_no_two_regions_are_one(saver: TorchMemorySaver, device: str) -> None:
    with saver.region("x", enable_cpu_backup=True):
        kept = torch.full((MIB,), 7, dtype=torch.uint8, device=device)
    with saver.region("x (cpu backup)"):
        gone = torch.full((MIB,), 7, dtype=torch.uint8, device=device)
    with saver.region("x (no backup)"):
        gone_too = torch.full((MIB,), 7, dtype=torch.uint8, device=device)
    saver.pause()
    saver.resume()
    assert bool((kept == 7).all())
    assert not gone.any()
    assert not gone_too.any()
