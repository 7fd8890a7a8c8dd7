"""Whatever cannot be is refused in our words, with the argument's name."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

import torch_vmm
from tests.helpers import MIB, PAGE
from torch_vmm.sizes import show

Pool = torch_vmm.VirtualMemoryPool
Shared = torch_vmm.SharedMemoryPool
Manager = torch_vmm.VirtualMemoryManager

NOT_SIZES = [
    -1,
    1.5,
    float("nan"),
    float("inf"),
    True,
    "",
    "nan",
    "1e6",
    "many",
    "9" * 50,
    "1" * 100_000,
    "8EiB",
    "2MiB\0",
    "\ud800",
    "２MiB",
    b"2MiB",
    [1],
    {},
    2**63,
    2**64,
    10**400,
    10**5000,
    np.float64(2),
    np.bool_(True),
    np.array([4096]),
    torch.tensor([4096, 1]),
    torch.tensor(1.5),
]
NOT_FLAGS = ["no", "", 0, 1, None, [], 1.0]
NOT_NAMES = [3, None, b"llama", "", "\ud800", "a\0b", ["llama"], 1.5, True]


def shown(value: object) -> str:
    return show(value)[:20]


def refused(name: str, ask: Callable[[], object]) -> str:
    """The words with which ``ask`` is refused; they hold the argument's name, and no more of its value than fits."""
    with pytest.raises(torch_vmm.InvalidArgumentError) as raised:
        ask()
    text = str(raised.value)
    assert name in text
    assert len(text) < 400
    return text


@pytest.mark.parametrize("value", NOT_SIZES, ids=shown)
def test_sizes(value: object, pool: Pool, shared: Shared, manager: Manager, device: str) -> None:
    range_ = manager.reserve(PAGE)
    physical = manager.alloc_physical(PAGE)
    asks: dict[str, list[Callable[[], object]]] = {
        "capacity": [lambda: Pool(value, device=device)],  # type: ignore[arg-type]
        "page_size": [
            lambda: Pool("8MiB", value, device),  # type: ignore[arg-type]
            lambda: shared.register_model("new", page_size=value),  # type: ignore[arg-type]
        ],
        "physical_limit": [
            lambda: Pool("8MiB", device=device, physical_limit=value),  # type: ignore[arg-type]
            lambda: Shared(value, device),  # type: ignore[arg-type]
            lambda: setattr(pool, "physical_limit", value),
            lambda: setattr(shared, "physical_limit", value),
            lambda: shared.register_model("new", physical_limit=value),  # type: ignore[arg-type]
        ],
        "virtual_capacity": [lambda: shared.register_model("new", value)],  # type: ignore[arg-type]
        "floor": [lambda: shared.register_model("new", floor=value)],  # type: ignore[arg-type]
        "keep_bytes": [lambda: pool.trim(value)],  # type: ignore[arg-type]
        "offset": [
            lambda: pool.allocate(value, PAGE),  # type: ignore[arg-type]
            lambda: pool.deallocate(value, PAGE),  # type: ignore[arg-type]
            lambda: pool.is_mapped(value, PAGE),  # type: ignore[arg-type]
            lambda: pool.tensor(value, 4),  # type: ignore[arg-type]
            lambda: manager.map(range_, physical, value),  # type: ignore[arg-type]
            lambda: manager.unmap(range_, value, PAGE),  # type: ignore[arg-type]
        ],
        "size": [
            lambda: pool.allocate(0, value),  # type: ignore[arg-type]
            lambda: manager.reserve(value),  # type: ignore[arg-type]
            lambda: manager.alloc_physical(value),  # type: ignore[arg-type]
            lambda: manager.unmap(range_, 0, value),  # type: ignore[arg-type]
        ],
        "alignment": [lambda: manager.reserve(PAGE, value)],  # type: ignore[arg-type]
    }
    for name, calls in asks.items():
        for ask in calls:
            refused(name, ask)
    assert (len(shared), pool.physical_memory_usage) == (0, 0)
    manager.close()


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(torch_vmm.NotAvailableError, match=r"^there is no device cpu:1; the only one is cpu:0$"):
        Pool("2MiB", device="cpu:1")
    for ask in (
        torch_vmm.enable,
        torch_vmm.is_enabled,
        torch_vmm.last_out_of_memory,
        torch_vmm.debug.check,
        torch_vmm.debug.report,
        torch_vmm.strict,
    ):
        with pytest.raises(torch_vmm.NotAvailableError, match=r"^there is no device cpu:1; the only one is cpu:0$"):
            ask("cpu:1")


def test_sizes_that_are_too_large_are_called_so(pool: Pool, device: str, manager: Manager) -> None:
    for text in ("8EiB", "9223372036854775808", "1ZiB", "100000PiB"):
        assert "too large" in refused("capacity", lambda text=text: Pool(text, device=device))
    assert "64 TiB" in refused("capacity", lambda: Pool("1EiB", device=device))
    assert "beyond the end" in refused("size", lambda: pool.allocate(0, "1EiB"))
    pool.physical_limit = "1EiB"  # type: ignore[assignment]
    assert pool.physical_limit == 2**60


@pytest.mark.parametrize("value", [np.int64(PAGE), np.uint8(200), torch.tensor(PAGE), "2 MiB", "2097152"])
def test_sizes_of_every_kind(value: object, device: str) -> None:
    with Pool(value, device=device, physical_limit=value) as pool:  # type: ignore[arg-type]
        assert pool.capacity == PAGE
    pool.close()


def test_what_is_no_multiple_of_the_granularity(manager: Manager) -> None:
    for ask in (manager.reserve, manager.alloc_physical):
        assert refused("size 1 ", lambda ask=ask: ask(1)) == (
            "size 1 must be a multiple of the granularity, 2097152 (2 MiB)"
        )
    assert "alignment, 8388608 (8 MiB)" in refused("size", lambda: manager.reserve("4MiB", "8MiB"))


@pytest.mark.parametrize("page_size", ["1TiB", "32TiB", 2**50, "1PiB"])
def test_pages_larger_than_the_device(page_size: object, device: str, shared: Shared) -> None:
    for ask in (
        lambda: Pool("8MiB", page_size, device),  # type: ignore[arg-type]
        lambda: shared.register_model("new", page_size=page_size),  # type: ignore[arg-type]
    ):
        with pytest.raises(torch_vmm.InvalidPageSizeError, match="is more than the device has, ") as raised:
            ask()
        assert (raised.value.page_size, raised.value.granularity) == (raised.value.page_size, PAGE)


@pytest.mark.parametrize(
    "priority", [2**31, -(2**31) - 1, 2**70, 1.5, True, "3", None, np.float64(1), 10**5000], ids=shown
)
def test_priorities(priority: object, shared: Shared) -> None:
    assert "2**31 - 1" in refused("priority", lambda: shared.register_model("new", priority=priority))  # type: ignore[arg-type]


@pytest.mark.parametrize("priority", [2**31 - 1, -(2**31), np.int8(-3), 0])
def test_priorities_that_can_be(priority: int, shared: Shared) -> None:
    assert shared.register_model("new", "8MiB", priority=priority).priority == int(priority)


@pytest.mark.parametrize("name", NOT_NAMES, ids=repr)
def test_names(name: object, shared: Shared, device: str) -> None:
    if name is not None:
        refused("name", lambda: Pool("8MiB", device=device, name=name))  # type: ignore[arg-type]
    for ask in (
        lambda: shared.register_model(name),  # type: ignore[arg-type]
        lambda: shared.unregister_model(name),  # type: ignore[arg-type]
        lambda: shared[name],  # type: ignore[index]
        lambda: shared.allocate_for_model(name, PAGE),  # type: ignore[arg-type]
        lambda: shared.get_model_stats(name),  # type: ignore[arg-type]
    ):
        refused("model_id", ask)
    refused("model", lambda: torch_vmm.use_model(name))  # type: ignore[arg-type]
    assert name not in shared


@pytest.mark.parametrize("flag", NOT_FLAGS, ids=repr)
def test_flags(flag: object, make_pool: Callable[..., Pool], shared: Shared, manager: Manager) -> None:
    pool = make_pool("8MiB")
    shared.register_model("llama", "8MiB")
    refused("force", lambda: pool.close(force=flag))  # type: ignore[arg-type]
    refused("force", lambda: shared.unregister_model("llama", flag))  # type: ignore[arg-type]
    refused("force", lambda: shared.close(flag))  # type: ignore[arg-type]
    refused("abbreviated", lambda: pool.memory_summary(flag))  # type: ignore[arg-type]
    refused("exportable", lambda: manager.alloc_physical(PAGE, exportable=flag))  # type: ignore[arg-type]
    assert not pool.is_closed


def test_numpys_flags(make_pool: Callable[..., Pool]) -> None:
    pool = make_pool("8MiB")
    pool.close(force=np.bool_(True))  # type: ignore[arg-type]
    assert pool.is_closed


@pytest.mark.parametrize(
    "shape", ["", "3", b"12", {}, {1: 2}, -1, (2, -1), 1.5, (1.5,), True, [None], (0, 2**70), [[1]]]
)
def test_shapes(shape: object, pool: Pool, manager: Manager) -> None:
    pool.allocate(0, PAGE)
    range_ = manager.reserve(PAGE)
    refused("shape", lambda: pool.tensor(0, shape))  # type: ignore[arg-type]
    refused("shape", lambda: manager.tensor(range_, 0, shape, torch.uint8))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float32", None, float, np.float32, 3])
def test_dtypes(dtype: object, pool: Pool) -> None:
    refused("dtype", lambda: pool.tensor(0, 4, dtype))  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [3, 7, -1, 2**40, 10**400, "READ", None, True, 1.0], ids=shown)
def test_access_flags(value: object, manager: Manager) -> None:
    refused("AccessFlags", lambda: torch_vmm.AccessFlags(value))
    range_ = manager.reserve(PAGE)
    refused("flags", lambda: manager.set_access(range_, value))  # type: ignore[arg-type]


def test_access_flags_that_can_be() -> None:
    flags = [torch_vmm.AccessFlags(value) for value in (0, 1, 2, np.int64(2), torch_vmm.AccessFlags.READ)]
    assert [str(flag) for flag in flags] == ["None", "Read", "ReadWrite", "ReadWrite", "Read"]


@pytest.mark.parametrize("kind", ["VirtualAddressRange", "PhysicalAllocation", "MappingRecord"])
def test_records_are_made_by_a_manager(kind: str) -> None:
    for arguments in ((), (1, 2), ("x",)):
        assert "VirtualMemoryManager." in refused(
            kind, lambda arguments=arguments: getattr(torch_vmm, kind)(*arguments)
        )


def test_what_a_range_contains(manager: Manager) -> None:
    range_ = manager.reserve(PAGE)
    assert [range_.contains(at) for at in (range_.base, np.int64(range_.end - 1), range_.end, -1, 2**70)] == [
        True,
        True,
        False,
        False,
        False,
    ]
    for bad in (1.5, "x", None, True):
        refused("address", lambda bad=bad: range_.contains(bad))


def test_no_device_at_all(manager: Manager) -> None:
    range_ = manager.reserve(PAGE)
    refused("device", lambda: manager.set_access(range_, torch_vmm.AccessFlags.READ, device=[]))
    for device in (10**5000, np.int64(4096), np.bool_(True), [0], 1.5, "cuda:1e3"):
        refused("device", lambda device=device: torch_vmm.is_enabled(device))
    assert torch_vmm.is_enabled(np.int64(1)) == torch_vmm.is_enabled("cuda:1") == torch_vmm.is_enabled()  # type: ignore[arg-type]


def test_addresses_of_every_kind(pool: Pool) -> None:
    for address in (pool.base_address, np.int64(pool.base_address), torch.tensor(pool.base_address).item()):
        assert torch_vmm.pool_of(address) is pool
    for bad in (1.5, "x", None, True, [1], 1j):
        refused("pool_of", lambda bad=bad: torch_vmm.pool_of(bad))
    assert torch_vmm.pool_of(10**5000) is None


def test_a_pool_of_one_page_is_enough(device: str) -> None:
    with Pool(1, device=device) as pool:
        assert pool.capacity == PAGE
        pool.allocate(0, 1)
        assert pool.memory_allocated() == 2 * MIB
    pool.close(force=True)


def test_what_tensors_hold_is_never_shown() -> None:
    tensor = torch.tensor(4711.0)  # it might be asleep
    itself: list[object] = []
    itself.append(itself)
    assert show(itself) == "[[...]]"
    for value in (tensor, [tensor], {"weight": tensor}, {tensor: 1}, [{"layers": (1, [tensor])}]):
        assert "4711" not in show(value)
        assert "tensor" in show(value)
    state = torch.nn.Linear(2, 2).state_dict()
    assert show(state) == "an OrderedDict with tensors"
