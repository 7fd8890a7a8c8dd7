"""Elastic tensors and caches while something else goes on: on_pressure() takes their pages, their model sleeps."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch

import torch_vmm
from tests.helpers import MIB, PAGE

Pool = torch_vmm.VirtualMemoryPool
Shared = torch_vmm.SharedMemoryPool


def states(device: str, positions: int) -> torch.Tensor:
    """A fourth of a MiB for each position."""
    return torch.ones(1, 1, positions, MIB // 4, dtype=torch.uint8, device=device)


def ballast(size: int, device: str) -> list[torch.Tensor]:
    return [torch.empty(size, dtype=torch.uint8, device=device)]


def test_on_pressure_shrinks_the_tensor_that_grows(shared: Shared, device: str) -> None:
    with shared.register_model("a", "1GiB"):
        held = ballast(16 * MIB, device)
        tensor = torch_vmm.elastic((1, PAGE), torch.uint8, device, (64, PAGE))
        tensor.reserve(20)
    shrunk: list[int] = []

    @shared.on_pressure
    def evict(requested: int, pool: Pool) -> bool:
        if shrunk:
            return False
        held.clear()
        shrunk.append(tensor.shrink_to_fit())
        return True

    tensor.resize_(26)
    assert shrunk == [19 * PAGE]
    assert tensor.reserved_rows == 26
    tensor.fill_(1)  # all of it is there
    assert int(tensor.sum(dtype=torch.int64)) == 26 * PAGE


def test_on_pressure_crops_the_cache_that_grows(shared: Shared, device: str) -> None:
    with shared.register_model("a", "1GiB"):
        held = ballast(16 * MIB, device)
        cache = torch_vmm.ElasticKVCache(4096)
        cache.update(states(device, 40), states(device, 40), 0)
        held += ballast(8 * MIB, device)
    cropped: list[bool] = []

    @shared.on_pressure
    def evict(requested: int, pool: Pool) -> bool:
        if cropped:
            return False
        held.clear()
        cache.crop(8)
        cropped.append(True)
        return True

    keys, values = cache.update(states(device, 60), states(device, 60), 0)
    assert cropped
    assert keys.shape[2] == values.shape[2] == cache.get_seq_length() == 68
    assert int(keys.sum(dtype=torch.int64)) == int(values.sum(dtype=torch.int64)) == 68 * MIB // 4


def test_on_pressure_that_always_takes_from_the_cache_that_grows_is_named(shared: Shared, device: str) -> None:
    with shared.register_model("a", "1GiB"):
        cache = torch_vmm.ElasticKVCache(4096)
        cache.update(states(device, 40), states(device, 40), 0)
        held = ballast(44 * MIB - PAGE, device)

    @shared.on_pressure
    def evict(requested: int, pool: Pool) -> bool:
        return sum(store.shrink_to_fit() for store in cache.layers[0]._settle()) > 0

    with pytest.raises((torch_vmm.StillInUseError, torch_vmm.OutOfMemoryError)):
        cache.update(states(device, 8), states(device, 8), 0)
    assert cache.get_seq_length() == 40
    held.clear()
    keys, _ = cache.update(states(device, 8), states(device, 8), 0)
    assert int(keys.sum(dtype=torch.int64)) == 48 * MIB // 4


def test_a_sleeping_tensor_that_cannot_shrink_is_as_it_was(make_pool: Callable[..., Pool], device: str) -> None:
    pool = make_pool("64MiB")
    with pool:
        tensor = torch_vmm.elastic((16, PAGE), torch.uint8, device).fill_(3)
    tensor.resize_(2)
    pool.sleep(keep="host")
    with pytest.raises(torch_vmm.AsleepError):
        tensor.shrink_to_fit()
    assert tensor.reserved_rows == 16
    assert tensor.untyped_storage().nbytes() == 16 * PAGE
    pool.wake()
    assert (tensor == 3).all()
    assert tensor.shrink_to_fit() == 14 * PAGE


def test_a_cache_that_crops_while_its_model_sleeps_goes_on(make_pool: Callable[..., Pool], device: str) -> None:
    pool = make_pool("256MiB")
    cache = torch_vmm.ElasticKVCache(4096)
    with pool:
        for layer in range(2):
            cache.update(states(device, 40), states(device, 40), layer)
    pool.sleep(keep="host")
    with pytest.raises(torch_vmm.AsleepError):
        cache.crop(8)
    with pytest.raises(torch_vmm.AsleepError):
        cache.layers[1].crop(8)
    assert [cache.get_seq_length(layer) for layer in range(2)] == [40, 40], "nothing is cropped"
    pool.wake()
    with pool:
        for layer in range(2):
            keys, values = cache.update(states(device, 20), states(device, 20), layer)
            assert keys.shape[2] == values.shape[2] == 60
            assert int(values.sum(dtype=torch.int64)) == 60 * MIB // 4
    before = pool.memory_allocated()
    cache.crop(1)
    assert pool.memory_allocated() < before


@pytest.mark.parametrize("tag", ["", "caches"])
def test_a_cache_of_a_sleeping_model_is_not_touched(make_pool: Callable[..., Pool], device: str, tag: str) -> None:
    """Whoever wrote there, or read, would end the process."""
    pool = make_pool("256MiB")
    cache = torch_vmm.ElasticKVCache(4096)
    given = states(device, 4)
    with pool.tag(tag) if tag else pool:
        cache.update(given, given, 0)
    with pool.tag("weights"):
        weights = torch.ones(PAGE, dtype=torch.uint8, device=device)
    pool.sleep({"weights": "host"})
    for _ in range(2):
        cache.update(given, given, 0)
    assert cache.layers[0]._fits(given, given), "it is not asked for at each step"
    pool.sleep({tag: "host"})
    for touch in (
        lambda: cache.update(given, given, 0),
        lambda: cache.update(states(device, 99), states(device, 99), 0),
        lambda: cache.reorder_cache(torch.tensor([0])),
        lambda: cache.layers[0].batch_select_indices(torch.tensor([0])),
        lambda: cache.layers[0].batch_repeat_interleave(2),
        lambda: copy.deepcopy(cache),
        lambda: cache.crop(2),
    ):
        with pytest.raises(torch_vmm.AsleepError, match="asleep"):
            touch()
    pool.wake()
    keys, _ = cache.update(given, given, 0)
    assert keys.shape[2] == 16
    assert int(keys.sum(dtype=torch.int64)) == 16 * MIB // 4
    del weights


def test_a_cache_of_which_a_part_is_sealed_goes_on(make_pool: Callable[..., Pool], device: str) -> None:
    pool = make_pool("256MiB")
    cache = torch_vmm.ElasticKVCache(4096)
    with pool:
        cache.update(states(device, 40), states(device, 40), 0)
    _, store = cache.layers[0]._settle()
    pool.seal(store)
    with pytest.raises(torch_vmm.InvalidArgumentError, match="sealed"):
        cache.crop(8)
    pool.unseal(store)
    with pool:
        keys, values = cache.update(states(device, 60), states(device, 60), 0)
    assert keys.shape[2] == values.shape[2] == 68
    assert int(keys.sum(dtype=torch.int64)) == int(values.sum(dtype=torch.int64)) == 68 * MIB // 4


def test_a_growth_that_on_pressure_made_room_for_was_no_refusal(shared: Shared, device: str) -> None:
    with shared.register_model("a", "1GiB"):
        held = ballast(32 * MIB, device)
        tensor = torch_vmm.elastic((1, PAGE), torch.uint8, device, (64, PAGE))

    @shared.on_pressure
    def evict(requested: int, pool: Pool) -> bool:
        was_held = bool(held)
        held.clear()
        return was_held

    before = torch_vmm.last_out_of_memory(device)
    tensor.resize_(26)
    assert shared["a"].memory_stats()["num_ooms"] == 0
    assert shared["a"].reclaim_report().refused == 0
    assert torch_vmm.last_out_of_memory(device) == before
    with pytest.raises(torch.OutOfMemoryError):
        tensor.resize_(60)
    assert shared["a"].memory_stats()["num_ooms"] == 1, "though it was asked twice"
    assert torch_vmm.last_out_of_memory(device) != before


@pytest.mark.parametrize("makes", ["elastic", "sparse", "cache"])
def test_on_pressure_is_asked_where_pages_went_before(shared: Shared, device: str, makes: str) -> None:
    more = states(device, 100)
    with shared.register_model("a", "1GiB"):
        if makes == "elastic":
            tensor = torch_vmm.elastic((4, PAGE), torch.uint8, device, (64, PAGE))
            tensor.resize_(1)
            assert tensor.shrink_to_fit() == 3 * PAGE
            grow = functools.partial(tensor.resize_, 20)
        elif makes == "sparse":
            some = torch_vmm.sparse((64, PAGE), torch.uint8, device, zeros=False)
            some.commit(slice(0, 4))
            some.decommit(slice(1, 4))
            grow = functools.partial(some.commit, slice(0, 20))
        else:
            cache = torch_vmm.ElasticKVCache(4096)
            cache.update(states(device, 16), states(device, 16), 0)
            cache.crop(1)
            grow = functools.partial(cache.update, more, more, 0)
    with shared.register_model("b", "1GiB"):
        held = ballast(40 * MIB, device)

    @shared.on_pressure
    def evict(requested: int, pool: Pool) -> bool:
        was_held = bool(held)
        held.clear()
        return was_held

    grow()
    assert not held
