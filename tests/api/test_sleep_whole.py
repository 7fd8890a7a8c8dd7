"""What is said of a model that sleeps in parts, and what is left of one that ends on its way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import torch_vmm
from tests.api.sleeping import is_numbered, numbered
from tests.helpers import MIB, tensor_in
from torch_vmm import SharedMemoryPool, VirtualMemoryPool


def sealed_and_awake_again(model: VirtualMemoryPool, size: int) -> torch.Tensor:
    """Bytes of 3 that are in host memory too, in case it sleeps again."""
    with model:
        sealed = torch_vmm.aligned((size,), torch.uint8, model.device)
    sealed.fill_(3)
    model.seal(sealed)
    model.sleep()
    model.wake()
    return sealed


def ends(shared: SharedMemoryPool, tensors: list[torch.Tensor]) -> Callable[[int, int], None]:
    """For progress=: model 'm' has no tensors any more and is unregistered, once something has moved."""

    def end(done: int, total: int) -> None:
        if done > 0 and tensors:
            tensors.clear()
            shared.unregister_model("m", force=True)

    return end


# -- Where it is -------------------------------------------------------------------------------------------------------


def test_what_slept_before_stays_where_it_is(model: VirtualMemoryPool, tmp_path: Path) -> None:
    rest = numbered(model, 1000)
    with model.tag("a"):
        first = torch.arange(1, 1001, dtype=torch.int32, device=model.device)
    with model.tag("b"):
        second = torch.arange(2, 1002, dtype=torch.int32, device=model.device)
    model.sleep({"a": "host"})
    model.sleep({"b": str(tmp_path / "b")})
    model.sleep("discard")
    assert model.asleep == {"": "discarded", "a": "host", "b": str(tmp_path / "b")}
    model.wake()
    assert is_numbered(first, 1)
    assert is_numbered(second, 2)
    assert not rest.any()


def test_a_part_in_two_places_says_both(limited: SharedMemoryPool) -> None:
    model = limited.register_model("m")
    with model:
        thrown, shown = (torch_vmm.aligned((size * MIB,), torch.uint8, limited.device) for size in (4, 2))
    thrown.fill_(1)
    shown.fill_(2)
    alias = torch_vmm.alias(shown)
    model.sleep("discard")
    del alias
    assert model.asleep == {"": "discarded"}
    model.sleep("host")
    where = model.asleep
    model.wake()
    assert not thrown.any()
    assert bool(shown.eq(2).all())
    assert where == {"": "discarded and host"}


def test_what_is_not_packed_is_not_said_to_be(model: VirtualMemoryPool) -> None:
    sealed = sealed_and_awake_again(model, 2 * MIB)
    model.sleep("host", packed=True)
    assert model.asleep == {"": "host"}
    del sealed


def test_what_goes_again_has_a_file_of_its_own_and_says_so(limited: SharedMemoryPool, tmp_path: Path) -> None:
    model = limited.register_model("m")
    tensors = []
    for name in ("a", "b"):
        with model.tag(name):
            tensors.append(torch_vmm.aligned((2 * MIB,), torch.uint8, limited.device).fill_(len(tensors) + 1))
            torch.ones(4, device=limited.device)
    aliases = [torch_vmm.alias(tensor) for tensor in tensors]
    model.sleep("host")
    del aliases
    file = str(tmp_path / "f")
    said: list[dict[str, str]] = []
    model.sleep({"a": [file], "b": [file, "host"]}, progress=lambda done, total: said.append(model.asleep))
    assert model.asleep == {"a": file, "b": f"{file}.2"}
    assert said[0] == model.asleep
    model.wake()
    assert [int(tensor[0]) for tensor in tensors] == [1, 2]
    assert all(bool(tensor.eq(tensor[0]).all()) for tensor in tensors)


# -- Two parts at once -------------------------------------------------------------------------------------------------


def test_two_tags_go_to_one_folder_at_once(model: VirtualMemoryPool, tmp_path: Path) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    tensors = []
    for name in ("a", "b"):
        with model.tag(name):
            tensors.append(torch.arange(5, 5 + 20 * MIB, dtype=torch.int32, device=model.device))
    going = [
        threading.Thread(target=model.sleep, args=({name: str(folder)},), kwargs={"blocking": True}) for name in "ab"
    ]
    for thread in going:
        thread.start()
    for thread in going:
        thread.join()
    assert sorted(tmp_path.iterdir()) == [folder]
    assert len(list(folder.iterdir())) == 2
    model.wake()
    assert all(is_numbered(tensor, 5) for tensor in tensors)
    assert list(folder.iterdir()) == []


# -- Its end on the way ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", ["host", "file"])
def test_a_model_that_is_drained_on_its_way_keeps_no_backup(
    limited: SharedMemoryPool, tmp_path: Path, keep: str
) -> None:
    model = limited.register_model("m")
    tensors = [numbered(model, 2 * MIB) for _ in range(8)]
    model.sleep("host" if keep == "host" else str(tmp_path), progress=ends(limited, tensors))
    assert limited.global_stats().num_models == 0
    limited.release_host_backups()
    assert limited.host_backup_bytes == 0
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_drained_on_its_way_back_keeps_no_memory(limited: SharedMemoryPool) -> None:
    model = limited.register_model("m")
    tensors = [numbered(model, 2 * MIB) for _ in range(8)]
    model.sleep()
    model.wake(progress=ends(limited, tensors))
    limited.release_host_backups()
    assert limited.host_backup_bytes == 0
    everything = tensor_in(limited.register_model("next"), 256 * MIB)
    del everything


# -- Host memory -------------------------------------------------------------------------------------------------------


def test_a_lowered_bound_takes_what_awake_models_keep(limited: SharedMemoryPool) -> None:
    model = limited.register_model("m")
    sealed = sealed_and_awake_again(model, 16 * MIB)
    assert limited.host_backup_bytes >= 16 * MIB
    limited.host_backup_limit = limited.host_backup_bytes
    assert limited.host_backup_bytes >= 16 * MIB
    limited.host_backup_limit = 0
    assert limited.host_backup_bytes == 0
    limited.host_backup_limit = None
    model.sleep()
    model.wake()
    assert bool(sealed.eq(3).all())


# -- A swap ------------------------------------------------------------------------------------------------------------


def test_a_swap_of_more_than_a_models_own_addresses_asks_for_memory(limited: SharedMemoryPool) -> None:
    into, out, third = (
        limited.register_model("into", "64MiB"),
        limited.register_model("out"),
        limited.register_model("third"),
    )
    parts = []
    for name in "abcd":
        with into.tag(name):
            parts.append(torch.empty(50 * MIB, dtype=torch.uint8, device=into.device))
    into.sleep()
    held = [tensor_in(third, 100 * MIB)]
    going = tensor_in(out, 10 * MIB)
    asked = []

    def give(missing: int, pool: object) -> bool:
        asked.append(missing)
        had = bool(held)
        held.clear()
        return had

    limited.on_pressure(give)
    torch_vmm.swap(out=out, into=into)
    assert asked[0] == 200 * MIB
    assert not into.is_asleep
    del parts, going
