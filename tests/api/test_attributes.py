"""Pools and managers as Python objects: no misspelt attributes, no copies, what can be read and set."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch

import torch_vmm
from tests.helpers import MIB, PAGE
from torch_vmm import _C

Pool = torch_vmm.VirtualMemoryPool
Shared = torch_vmm.SharedMemoryPool
Manager = torch_vmm.VirtualMemoryManager
Make = Callable[[], object]


@pytest.fixture
def objects(pool: Pool, shared: Shared, device: str) -> dict[str, object]:
    """One of each class that is more than a value."""
    manager = Manager(device)
    range_, physical = manager.reserve(PAGE), manager.alloc_physical(PAGE)
    manager.map(range_, physical)
    made = [pool, shared, manager, range_, physical, manager.mappings(range_)[0], torch_vmm.use_model(pool)]
    with shared.record_timeline() as timeline:
        made += [torch_vmm.strict(device, "off"), shared.models, timeline]
    return {type(each).__name__: each for each in made}


# -- Names that do not exist -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["limit", "phisical_limit", "flor", "model", "_private", "weights"])
@pytest.mark.parametrize(
    "kind",
    ["VirtualMemoryPool", "SharedMemoryPool", "VirtualMemoryManager", "use_model", "strict", "ModelsView", "Timeline"],
)
def test_a_name_that_does_not_exist_cannot_be_set(objects: dict[str, object], kind: str, name: str) -> None:
    with pytest.raises(AttributeError, match=f"a {kind} has no attribute '{name}'") as raised:
        setattr(objects[kind], name, 3)
    assert not hasattr(objects[kind], name)
    assert (raised.value.name, raised.value.obj) == (name, objects[kind])


@pytest.mark.parametrize("name", ["limit", "physical", "phisical_limit"])
def test_the_name_that_was_meant_is_named(pool: Pool, shared: Shared, name: str) -> None:
    for each in (pool, shared):
        with pytest.raises(AttributeError, match="did you mean 'physical_limit'"):
            setattr(each, name, "4MiB")


def test_what_another_class_has_is_told(pool: Pool, shared: Shared) -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'spill': each model has its own, .*\.spill = "):
        shared.spill = "host"  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"no attribute 'on_pressure': its SharedMemoryPool takes the function"):
        pool.on_pressure = lambda requested, asker: False  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["capacity", "base_address", "page_size", "device", "model_id", "name", "is_closed"])
def test_what_is_fixed_cannot_be_set(pool: Pool, name: str) -> None:
    with pytest.raises(AttributeError, match=name):
        setattr(pool, name, 3)


def test_what_can_be_set_is_set(pool: Pool, shared: Shared) -> None:
    pool.physical_limit = "4MiB"  # type: ignore[assignment]
    shared.physical_limit = "8MiB"  # type: ignore[assignment]
    assert (pool.physical_limit, shared.physical_limit) == (4 * MIB, 8 * MIB)


def test_a_method_can_be_replaced_in_a_test(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "compact", lambda: 7)
    assert pool.compact() == 7
    monkeypatch.undo()
    assert pool.compact() == 0


@pytest.mark.parametrize(("kind", "name"), [("SharedMemoryPool", "on_pressure"), ("VirtualMemoryPool", "on_remap")])
def test_a_function_is_given_to_a_method_and_not_set(objects: dict[str, object], kind: str, name: str) -> None:
    with pytest.raises(AttributeError, match=rf"{name}\(\) is a method of {kind}: it is called, not set"):
        setattr(objects[kind], name, lambda *_: True)


def test_a_subclass_may_have_attributes_of_its_own(device: str) -> None:
    class Arena(Pool):
        def __init__(self) -> None:
            super().__init__("8MiB", device=device)
            self.labels = ["weights"]

    with Arena() as arena:
        assert arena.labels == ["weights"]
        arena.more = 3  # type: ignore[attr-defined]
    assert torch_vmm.pool_of(arena.base_address) is arena
    arena.close()


def test_they_can_be_referred_to_weakly(objects: dict[str, object]) -> None:
    for kind in ("VirtualMemoryPool", "SharedMemoryPool", "VirtualMemoryManager"):
        assert weakref.ref(objects[kind])() is objects[kind]


# -- Copies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize(
    "kind",
    [
        "VirtualMemoryPool",
        "SharedMemoryPool",
        "VirtualMemoryManager",
        "VirtualAddressRange",
        "PhysicalAllocation",
        "MappingRecord",
        "use_model",
        "strict",
        "ModelsView",
        "Timeline",
    ],
)
def test_a_copy_is_refused_and_says_what_to_do(objects: dict[str, object], kind: str, how: Make) -> None:
    with pytest.raises(torch_vmm.NotCopyableError, match=f"a {kind} cannot be copied or pickled: ") as raised:
        how(objects[kind])  # type: ignore[call-arg]
    assert isinstance(raised.value, TypeError)
    assert raised.value.what == kind
    assert "another" in str(raised.value)


def test_a_network_that_holds_its_pool_says_so_when_it_is_copied(pool: Pool) -> None:
    net = torch.nn.Linear(2, 2)
    net.pool = pool  # type: ignore[assignment]
    with pytest.raises(torch_vmm.NotCopyableError, match="VirtualMemoryPool"):
        copy.deepcopy(net)


def test_values_are_copied_and_pickled(pool: Pool, shared: Shared) -> None:
    for value in (pool.stats(), shared.global_stats(), torch_vmm.AccessFlags.READ):
        assert copy.deepcopy(value) == pickle.loads(pickle.dumps(value)) == value


# -- Floor, priority, length -------------------------------------------------------------------------------------------


def test_floor_and_priority_can_be_read(shared: Shared, pool: Pool) -> None:
    llama = shared.register_model("llama", "8MiB", floor="4MiB", priority=-3)
    assert (llama.floor, llama.priority) == (4 * MIB, -3)
    assert (pool.floor, pool.priority) == (0, 0)
    assert (shared.floor, shared.priority) == (0, 0)


def test_floor_and_priority_can_be_set(shared: Shared, pool: Pool) -> None:
    for each in (shared, shared.register_model("llama", "8MiB"), pool):
        each.floor = "2MiB"
        each.priority = 7
        assert (each.floor, each.priority) == (2 * MIB, 7)
        each.floor = 0
        each.priority = -(2**31)
        assert (each.floor, each.priority) == (0, -(2**31))


@pytest.mark.parametrize(
    ("name", "value"),
    [("floor", -1), ("floor", "many"), ("floor", "1024TiB"), ("priority", "high"), ("priority", 2**31)],
)
def test_what_they_cannot_be(shared: Shared, pool: Pool, name: str, value: object) -> None:
    for each in (shared, shared.register_model("llama", "8MiB"), pool):
        with pytest.raises(torch_vmm.InvalidArgumentError):
            setattr(each, name, value)
        assert getattr(each, name) == 0


def test_a_closed_pool_has_no_floor_to_set(shared: Shared) -> None:
    llama = shared.register_model("llama", "8MiB", floor="4MiB")
    shared.unregister_model("llama")
    assert llama.floor == 0
    for name in ("floor", "priority"):
        with pytest.raises(torch_vmm.InvalidArgumentError, match="closed"):
            setattr(llama, name, 1)
    shared.close()
    for name in ("floor", "priority"):
        with pytest.raises(torch_vmm.InvalidArgumentError, match="closed"):
            setattr(shared, name, 1)


def test_the_length_of_a_shared_pool(shared: Shared) -> None:
    assert (len(shared), bool(shared)) == (0, True)
    shared.register_model("llama", "8MiB")
    shared.register_model("qwen", "8MiB")
    assert len(shared) == len(shared.models) == len(list(shared)) == 2
    shared.close()
    assert (len(shared), bool(shared)) == (0, True)


# -- Closed ------------------------------------------------------------------------------------------------------------

CLOSED_POOL: dict[str, Callable[[Pool], object]] = {
    "allocate": lambda pool: pool.allocate(0, PAGE),
    "deallocate": lambda pool: pool.deallocate(0, PAGE),
    "is_mapped": lambda pool: pool.is_mapped(0, PAGE),
    "tensor": lambda pool: pool.tensor(0, 4),
    "compact": lambda pool: pool.compact(),
    "trim": lambda pool: pool.trim(),
    "empty_cache": lambda pool: pool.empty_cache(),
    "physical_limit": lambda pool: setattr(pool, "physical_limit", "4MiB"),
    "with": lambda pool: pool.__enter__(),
    "use_model": lambda pool: torch_vmm.use_model(pool).__enter__(),
}
CLOSED_SHARED: dict[str, Callable[[Shared], object]] = {
    "register_model": lambda shared: shared.register_model("new"),
    "unregister_model": lambda shared: shared.unregister_model("llama"),
    "allocate_for_model": lambda shared: shared.allocate_for_model("llama", PAGE),
    "deallocate_for_model": lambda shared: shared.deallocate_for_model("llama", 0, PAGE),
    "get_model_stats": lambda shared: shared.get_model_stats("llama"),
    "[]": lambda shared: shared["llama"],
    "models[]": lambda shared: shared.models["llama"],
    "physical_limit": lambda shared: setattr(shared, "physical_limit", "4MiB"),
    "with": lambda shared: shared.__enter__(),
}


@pytest.mark.parametrize("call", CLOSED_POOL)
@pytest.mark.parametrize("whose", ["its own", "a model's", "of a closed SharedMemoryPool"])
def test_a_closed_pool_has_one_error(shared: Shared, make_pool: Callable[..., Pool], call: str, whose: str) -> None:
    pool = make_pool("8MiB", name="llama") if whose == "its own" else shared.register_model("llama", "8MiB")
    shared.close() if whose == "of a closed SharedMemoryPool" else pool.close()
    with pytest.raises(torch_vmm.InvalidArgumentError, match=r"^pool 'llama' is closed$"):
        CLOSED_POOL[call](pool)
    assert pool.memory_allocated() == 0  # numbers can be read
    assert "closed" in repr(pool)
    pool.close()


@pytest.mark.parametrize("call", CLOSED_SHARED)
def test_a_closed_shared_pool_has_one_error(shared: Shared, call: str) -> None:
    shared.register_model("llama", "8MiB")
    shared.close()
    with pytest.raises(torch_vmm.InvalidArgumentError, match=r"^the SharedMemoryPool is closed$"):
        CLOSED_SHARED[call](shared)
    assert shared.global_stats().num_models == 0
    shared.close()


def test_a_closed_manager_has_one_error(device: str) -> None:
    manager = Manager(device)
    range_, physical = manager.reserve(PAGE), manager.alloc_physical(PAGE)
    manager.close()
    for call in (
        lambda: manager.reserve(PAGE),
        lambda: manager.release(range_),
        lambda: manager.alloc_physical(PAGE),
        lambda: manager.free_physical(physical),
        lambda: manager.map(range_, physical),
        lambda: manager.unmap(range_, 0, PAGE),
        lambda: manager.set_access(range_, torch_vmm.AccessFlags.READ),
        lambda: manager.mappings(range_),
        lambda: manager.tensor(range_, 0, 4, torch.uint8),
        manager.__enter__,
    ):
        with pytest.raises(torch_vmm.InvalidArgumentError, match=r"^the VirtualMemoryManager is closed$"):
            call()  # type: ignore[operator]
    assert manager.granularity == _C.device(manager.device.type).granularity


def test_a_pool_holds_more_than_its_capacity_with_tags(make_pool: Callable[..., Pool], device: str) -> None:
    pool = make_pool("8MiB", name="llama")
    kept = []
    for tag in ("weights", "cache"):
        with pool.tag(tag):
            kept.append(torch.empty(6 * MIB, dtype=torch.uint8, device=device))
    assert repr(pool) == f"VirtualMemoryPool('llama', {pool.device}: 12 MiB mapped, capacity 8 MiB)"
