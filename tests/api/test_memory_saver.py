"""The names of torch_memory_saver, over models that sleep."""

from __future__ import annotations

import copy
import os
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_vmm
from tests.helpers import MIB, run
from torch_vmm import _C
from torch_vmm.memory_saver import TorchMemorySaver, configure_subprocess, torch_memory_saver

Here = Callable[[], str]
MakeShared = Callable[..., torch_vmm.SharedMemoryPool]


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


def test_disabled_is_what_is_open_around_the_regions(
    saver: TorchMemorySaver, device: str, here: Here, make_shared: MakeShared
) -> None:
    shared = make_shared()
    own, other = shared.register_model("own"), shared.register_model("other")
    with own, saver.region(), saver.disable() as opened:
        assert opened is own
        assert here() == "own"
        with pytest.raises(torch.OutOfMemoryError):  # its limit holds
            torch.empty(128 * MIB, dtype=torch.uint8, device=device)
    with own, saver.region("a"), saver.region("b"), saver.disable():
        assert here() == "own"
        with saver.region("a"), saver.disable():
            assert here() == "own"
    with saver.region("a"), own, saver.region("b"), saver.disable():
        assert here() == "own", "as if there were no region"
    with own, saver.region("a"):
        with other, saver.region("b"), saver.disable():
            assert here() == "other"
        with saver.disable():
            assert here() == "own"
    with saver.region(), saver.disable():
        assert here() == "default", "what was around another time is not"
    with own, saver.disable():
        assert here() == "own"


def test_disabled_is_under_the_tag_that_is_around(
    saver: TorchMemorySaver, device: str, make_shared: MakeShared
) -> None:
    own = make_shared().register_model("own")
    with own.tag("weights"), saver.region(), saver.disable():
        kept = torch.empty(MIB, dtype=torch.uint8, device=device)
    assert own.tags == {"weights": kept.nbytes}


def test_disabled_is_the_default_model(
    saver: TorchMemorySaver, device: str, here: Here, make_shared: MakeShared
) -> None:
    own = make_shared().register_model("own")
    region, disabled = saver.region(), saver.disable()
    torch_vmm.set_default_model(own)
    try:
        with region, disabled:
            assert here() == "own"
    finally:
        torch_vmm.reset_default_model(device)
    with region, disabled:
        assert here() == "default"


def test_what_is_carried_to_another_thread_knows_no_model_around_it(
    saver: TorchMemorySaver, here: Here, make_shared: MakeShared
) -> None:
    own = make_shared().register_model("own")
    found: list[str] = []

    def work() -> None:
        with saver.disable():
            found.append(here())

    with saver.region():
        carried = torch_vmm.carry(work)

    def run() -> None:
        with own, saver.region():  # another time, on that thread
            pass
        carried()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == ["default"]


def test_each_thread_has_its_own_around(saver: TorchMemorySaver, here: Here, make_shared: MakeShared) -> None:
    own = make_shared().register_model("own")
    region, disabled = saver.region(), saver.disable()
    found: list[str] = []

    def work() -> None:
        with region, disabled:
            found.append(here())

    thread = threading.Thread(target=work)
    with own, region:
        thread.start()
        thread.join()
        with disabled:
            found.append(here())
    assert found == ["default", "own"]


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


def test_a_margin_is_of_what_is_free(saver: TorchMemorySaver, device: str, memory: _C.Device) -> None:
    with saver.region():
        kept = torch.zeros(1000, device=device)
    (saved,) = saver._saved.values()
    assert saved.shared.physical_limit == memory.total_bytes
    before = memory.memory_info()[0]
    saver.memory_margin_bytes = 64 * MIB
    after = memory.memory_info()[0]
    assert saver.memory_margin_bytes == 64 * MIB
    free = saved.shared.physical_limit - saved.shared.global_stats().physical_usage + 64 * MIB
    assert min(before, after) <= free <= max(before, after), "other processes may use the device"
    saver.memory_margin_bytes = "1TiB"  # type: ignore[assignment]  # any size
    with pytest.raises(torch.OutOfMemoryError), saver.region("other"):
        torch.zeros(MIB, device=device)
    saver.memory_margin_bytes = 0
    assert saved.shared.physical_limit == memory.total_bytes
    del kept


_ON_A_SMALL_DEVICE = """
import torch, torch_vmm
from torch_vmm import _C
from torch_vmm.memory_saver import TorchMemorySaver, torch_memory_saver as saver

MIB = 1 << 20
torch_vmm.enable("cpu")
key = torch_vmm.devices.to_device("cpu")
TorchMemorySaver._key = lambda self: key
memory = _C.device(*key)
saver.memory_margin_bytes = 64 * MIB
pool = torch_vmm.VirtualMemoryPool("512MiB", device="cpu")


def make(mib):
    return torch.empty(mib * MIB, dtype=torch.uint8)


def fill():
    made = []
    try:
        while True:
            made.append(make(16))
    except torch.OutOfMemoryError:
        return made
"""


def on_a_small_device(code: str) -> str:
    """What it prints, with a margin of 64 MiB on a device of 512 MiB."""
    return run(_ON_A_SMALL_DEVICE + textwrap.dedent(code), TORCH_VMM_HOST_BYTES="512MiB")


def test_regions_leave_the_margin_beside_what_others_hold() -> None:
    printed = on_a_small_device(
        """
        pool.allocate(0, 160 * MIB)
        with saver.region():
            made = fill()
        print(len(made) * 16, memory.memory_info()[0] // MIB)
        del made
        saver._saved[key].model.empty_cache()
        pool.deallocate(0, 160 * MIB)
        pool.empty_cache()
        with saver.region():
            made = fill()
        print(len(made) * 16, memory.memory_info()[0] // MIB)
        """
    )
    assert printed == "288 64\n448 64\n"


def test_a_region_that_finds_no_memory_looks_again() -> None:
    printed = on_a_small_device(
        """
        pool.allocate(0, 160 * MIB)
        with saver.region():
            made = fill()
            pool.deallocate(0, 160 * MIB)  # which leaves it idle there
            made += fill()
        print(len(made) * 16, memory.memory_info()[0] // MIB)
        """
    )
    assert printed == "448 64\n"


def test_below_the_margin_regions_go_on_in_what_they_have(saver: TorchMemorySaver, device: str) -> None:
    with saver.region("weights"):
        held = [torch.ones(MIB, dtype=torch.uint8, device=device) for _ in range(8)]
    (saved,) = saver._saved.values()
    saver.memory_margin_bytes = "1TiB"  # type: ignore[assignment]
    limit = saved.shared.physical_limit
    assert limit is not None
    for _ in range(3):
        with saver.region("weights"):
            del held[0]
            held.append(torch.ones(MIB, dtype=torch.uint8, device=device))  # where the other was
        assert saved.shared.physical_limit == limit, "nothing was to be given back"
        assert saved.shared.global_stats().physical_usage <= limit
    with pytest.raises(torch.OutOfMemoryError), saver.region("weights"):
        torch.ones(64 * MIB, dtype=torch.uint8, device=device)
    saver.memory_margin_bytes = 0


def test_what_rests_in_the_store_is_counted_once(saver: TorchMemorySaver, device: str, memory: _C.Device) -> None:
    with saver.region("weights"):
        kept = torch.ones(16 * MIB, dtype=torch.uint8, device=device)
    (saved,) = saver._saved.values()
    other = saved.shared.register_model("other")
    with other:
        idle = torch.ones(96 * MIB, dtype=torch.uint8, device=device)
    del idle
    if device == "cuda":
        torch.cuda.synchronize()  # what is still written to could not go
    saved.shared.unregister_model("other")
    stats = saved.shared.global_stats()
    saver.memory_margin_bytes = 64 * MIB
    free = memory.memory_info()[0]
    limit = saved.shared.physical_limit
    assert limit is not None
    assert limit <= stats.physical_usage + free - 64 * MIB + 96 * MIB, "other processes may use the device"
    assert limit <= memory.total_bytes
    saver.memory_margin_bytes = "1TiB"  # type: ignore[assignment]
    assert saved.shared.physical_limit <= 20 * MIB
    assert saved.shared.global_stats().store_bytes == 0, "it is the driver's"
    saver.memory_margin_bytes = 0
    del kept


def test_what_is_resumed_may_take_of_the_margin() -> None:
    printed = on_a_small_device(
        """
        with saver.region():
            made = fill()
        saver.pause()
        with pool:
            other = make(32)
        saver.resume()
        print(memory.memory_info()[0] // MIB)
        with saver.region():
            print(len(fill()))
        del other
        pool.empty_cache()
        saver.pause()
        saver.resume()
        print(memory.memory_info()[0] // MIB)
        """
    )
    assert printed == "32\n0\n64\n"


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


def test_a_prompt_completes_the_public_names() -> None:
    assert {name for name in dir(torch_vmm.memory_saver) if not name.startswith("__")} == {
        "TorchMemorySaver",
        "configure_subprocess",
        "torch_memory_saver",
    }
