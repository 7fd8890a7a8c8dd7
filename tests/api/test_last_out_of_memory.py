"""last_out_of_memory: the last refusal as a value."""

from __future__ import annotations

import dataclasses
import pickle
import re
from collections.abc import Callable

import pytest
import torch

import torch_vmm
from tests.helpers import MIB, PAGE, tensor_in
from torch_vmm import _C

Pool = torch_vmm.VirtualMemoryPool
Shared = torch_vmm.SharedMemoryPool


def last(device: str) -> torch_vmm.Refusal:
    refusal = torch_vmm.last_out_of_memory(device)
    assert refusal is not None
    return refusal


def test_a_tensors_refusal_has_the_values_that_torchs_error_has_not(
    device: str, make_shared: Callable[..., Shared], make_pool: Callable[..., Pool]
) -> None:
    shared = make_shared("64MiB")
    llama, qwen = shared.register_model("llama", "1GiB"), shared.register_model("qwen", "1GiB")
    outside = make_pool("64MiB")
    outside.allocate(0, "16MiB")
    with qwen:
        held = torch.empty(40 * MIB, dtype=torch.uint8, device=device)
    with llama, pytest.raises(torch.OutOfMemoryError) as raised:
        torch.empty(30 * MIB, dtype=torch.uint8, device=device)
    refusal = last(device)
    assert (refusal.requested, refusal.limit, refusal.pool) == (30 * MIB, 64 * MIB, "llama")
    assert refusal.available == 24 * MIB
    assert refusal.holders == (torch_vmm.Holder("qwen", 40 * MIB, 0, 0, 0, 0),)
    assert "free tensors of 6 MiB" in refusal.advice
    assert refusal.advice in str(raised.value)
    del held


@pytest.mark.parametrize("beyond", ["the limit", "the device"])
def test_what_nothing_could_meet_takes_nothing_from_anybody(
    device: str, memory: _C.Device, make_shared: Callable[..., Shared], beyond: str
) -> None:
    shared = make_shared("64MiB")
    llama, qwen = shared.register_model("llama"), shared.register_model("qwen")
    with llama:
        torch.empty(32 * MIB, dtype=torch.uint8, device=device)
    idle = llama.memory_stats()
    size = 65 * MIB if beyond == "the limit" else 2 * memory.total_bytes
    with qwen, pytest.raises(torch.OutOfMemoryError, match="out of memory") as raised:
        torch.empty(size, dtype=torch.uint8, device=device)
    assert ("ask for less: the device has" in str(raised.value)) == (beyond == "the device")
    assert (f"refused by the limit of {shared.name}" in str(raised.value)) == (beyond == "the limit")
    assert llama.memory_stats() == idle
    assert last(device).requested == size
    idle_bytes = {holder.name: holder.idle for holder in last(device).holders}
    assert idle_bytes["llama"] == 32 * MIB
    assert not idle_bytes.get("qwen")


def test_the_same_values_as_our_own_errors(device: str, make_pool: Callable[..., Pool]) -> None:
    pool = make_pool("64MiB", physical_limit=4 * PAGE, name="tight")
    with pytest.raises(torch_vmm.OutOfMemoryError) as raised:
        pool.allocate(0, 5 * PAGE)
    refusal = last(device)
    for name in ("requested", "available", "limit", "pool"):
        assert getattr(refusal, name) == getattr(raised.value, name)
    assert refusal.holders == ()
    with pytest.raises(torch_vmm.OutOfMemoryError):
        pool.allocate(0, 6 * PAGE)
    assert last(device).requested == 6 * PAGE


def test_what_a_floor_keeps_is_named(device: str, shared: Shared) -> None:
    llama = shared.register_model("llama", "1GiB")
    qwen = shared.register_model("qwen", "1GiB", floor="32MiB")
    with qwen:
        torch.empty(32 * MIB, dtype=torch.uint8, device=device)  # idle from now on
    with llama, pytest.raises(torch.OutOfMemoryError, match="its floor of 32 MiB keeps what is idle"):
        torch.empty(40 * MIB, dtype=torch.uint8, device=device)
    (holder,) = last(device).holders
    assert (holder.name, holder.idle, holder.floor) == ("qwen", 32 * MIB, 32 * MIB)
    assert "lower floor" in last(device).advice


def test_a_request_above_the_device_is_told_to_ask_for_less(device: str, make_pool: Callable[..., Pool]) -> None:
    pool = make_pool("8MiB")
    with pytest.raises(torch.OutOfMemoryError), pool:
        torch.empty(2**50, dtype=torch.uint8, device=device)
    assert last(device).advice.startswith("ask for less: the device has ")


def test_it_is_a_plain_value(device: str, pool: Pool) -> None:
    pool.physical_limit = PAGE
    with pytest.raises(torch_vmm.OutOfMemoryError):
        pool.allocate(0, 2 * PAGE)
    refusal = last(device)
    assert pickle.loads(pickle.dumps(refusal)) == refusal
    with pytest.raises(dataclasses.FrozenInstanceError):
        refusal.limit = 3  # type: ignore[misc]
    assert dataclasses.asdict(refusal)["pool"] == pool.name


def test_where_nothing_was_refused() -> None:
    assert torch_vmm.last_out_of_memory("cuda:7") is None
    with pytest.raises(torch_vmm.InvalidArgumentError):
        torch_vmm.last_out_of_memory("meta")


# -- What would help, helps --------------------------------------------------------------------------------------------


def advised(device: str) -> int:
    """Bytes by which the limit is to be raised."""
    found = re.search(r"raise the limit of \S+(?: \S+)? by ([\d.]+) (MiB|GiB)", last(device).advice)
    assert found, last(device).advice
    return int(float(found.group(1)) * MIB * (1024 if found.group(2) == "GiB" else 1))


def refused_and_helped(device: str, shared: Shared, model: Pool, size: int) -> int:
    """Asks for more than there is, raises the limit as advised, and asks again. Bytes advised."""
    with pytest.raises(torch.OutOfMemoryError):
        tensor_in(model, size)
    refusal = last(device)
    assert refusal.requested == size
    more = advised(device)
    assert shared.physical_limit is not None
    shared.physical_limit += more - PAGE
    with pytest.raises(torch.OutOfMemoryError):
        tensor_in(model, size)
    shared.physical_limit += PAGE
    tensor_in(model, size)
    return more


def full_beside_a_floor(make_shared: Callable[..., Shared]) -> tuple[Shared, Pool, list[torch.Tensor]]:
    """Of a limit of 64 MiB: one model's tensors of 54, and another model with a floor of 16."""
    shared = make_shared("64MiB")
    a, b = (shared.register_model(name) for name in "ab")
    held = [tensor_in(a, 9 * MIB) for _ in range(6)]
    b.floor = 16 * MIB
    return shared, b, held


def test_what_floors_claim_beyond_the_limit_is_missing_too(device: str, make_shared: Callable[..., Shared]) -> None:
    shared, _, held = full_beside_a_floor(make_shared)
    assert refused_and_helped(device, shared, shared.register_model("c"), 4 * MIB) == 10 * MIB
    del held


def test_ones_own_floor_claims_nothing_new(device: str, make_shared: Callable[..., Shared]) -> None:
    shared, b, held = full_beside_a_floor(make_shared)
    assert refused_and_helped(device, shared, b, 12 * MIB) == 2 * MIB
    del held


def test_what_other_parts_of_the_model_have_idle_is_there(device: str, make_shared: Callable[..., Shared]) -> None:
    shared = make_shared("100MiB")
    model = shared.register_model("m")
    with model.tag("t"):
        part = torch.empty(60 * MIB, dtype=torch.uint8, device=device)
    assert model.tags == {"t": 60 * MIB}
    del part
    with pytest.raises(torch.OutOfMemoryError):
        tensor_in(model, 120 * MIB)
    assert last(device).available == 100 * MIB
    assert refused_and_helped(device, shared, model, 120 * MIB) == 20 * MIB


def test_less_than_a_page_is_no_memory(device: str, make_shared: Callable[..., Shared]) -> None:
    shared = make_shared("64MiB")
    assert refused_and_helped(device, shared, shared.register_model("m"), 68_848_120) == 2 * MIB


def raised_by(asks: Callable[[], object]) -> torch_vmm.OutOfMemoryError:
    with pytest.raises(torch_vmm.OutOfMemoryError) as raised:
        asks()
    return raised.value


def test_what_is_no_pools_request_is_the_last_one_too(
    device: str, memory: _C.Device, make_shared: Callable[..., Shared]
) -> None:
    shared = make_shared("1GiB")
    model = shared.register_model("model")
    held = tensor_in(model, 4 * MIB)
    shared.host_backup_limit = 0  # type: ignore[assignment]

    with torch_vmm.VirtualMemoryManager(device) as manager:
        error = raised_by(lambda: manager.alloc_physical(2**46))
    assert (error.requested, error.pool) == (2**46, "VirtualMemoryManager")
    assert error.available <= memory.total_bytes
    assert dataclasses.astuple(last(device))[:4] == (error.requested, error.available, error.limit, error.pool)
    error = raised_by(model.sleep)
    assert (error.requested, error.available, error.limit, error.pool) == (4 * MIB, 0, 0, "model")
    assert "'model'" in str(error)
    assert dataclasses.astuple(last(device))[:4] == (error.requested, error.available, error.limit, error.pool)
    with model, pytest.raises(torch.OutOfMemoryError, match="more than 1EB"):
        torch.empty(2**60, dtype=torch.uint8, device=device)
    assert (last(device).requested, last(device).pool) == (2**60, "model")
    del held


def test_more_copies_than_there_are_addresses_say_how_much_that_is(device: str, pool: Pool) -> None:
    with pool:
        ring = torch_vmm.aligned((PAGE // 4,), torch.float32, device)
        error = raised_by(lambda: torch_vmm.alias(ring, 2**27))
    assert (error.requested, error.pool) == (2**27 * PAGE, pool.name)


def test_two_limits_that_refuse_are_both_to_be_raised(device: str, make_shared: Callable[..., Shared]) -> None:
    shared = make_shared("100MiB")
    a, c = shared.register_model("a"), shared.register_model("c", physical_limit="20MiB")
    held = tensor_in(a, 90 * MIB)
    with pytest.raises(torch.OutOfMemoryError):
        tensor_in(c, 30 * MIB)
    advice = last(device).advice
    assert f"raise the limit of pool 'c' by 10 MiB and that of {shared.name} by 20 MiB" in advice
    c.physical_limit = "30MiB"  # type: ignore[assignment]
    with pytest.raises(torch.OutOfMemoryError):
        tensor_in(c, 30 * MIB)
    assert f"raise the limit of {shared.name} by 20 MiB" in last(device).advice
    shared.physical_limit = "120MiB"  # type: ignore[assignment]
    assert tensor_in(c, 30 * MIB).nbytes == 30 * MIB
    del held


def test_a_floor_is_to_be_lower_only_where_that_would_do(device: str, make_shared: Callable[..., Shared]) -> None:
    shared = make_shared("100MiB")
    a, b = shared.register_model("a"), shared.register_model("b", floor="10MiB")
    for size, helps in ((300, False), (100, True)):
        with pytest.raises(torch.OutOfMemoryError):
            tensor_in(a, size * MIB)
        assert ("give 'b' a lower floor" in last(device).advice) == helps, last(device).advice
    b.floor = 0  # type: ignore[assignment]
    assert tensor_in(a, 100 * MIB).nbytes == 100 * MIB


@pytest.mark.parametrize("way", ["wake", "swap"])
def test_the_own_floor_of_what_wakes_counts_once(device: str, make_shared: Callable[..., Shared], way: str) -> None:
    shared = make_shared("140MiB")
    a, b = shared.register_model("a"), shared.register_model("b", floor="40MiB")
    asleep = tensor_in(b, 90 * MIB)
    b.sleep()
    awake = tensor_in(a, 50 * MIB)
    shared.physical_limit = "60MiB"  # type: ignore[assignment]
    wake = b.wake if way == "wake" else lambda: torch_vmm.swap(a, b)
    raised_by(wake)
    more = 80 if way == "wake" else 30
    assert f"by {more} MiB" in last(device).advice
    shared.physical_limit = (58 + more) * MIB  # type: ignore[assignment]
    raised_by(wake)
    shared.physical_limit = (60 + more) * MIB  # type: ignore[assignment]
    wake()
    assert not b.is_asleep
    if a.is_asleep:
        shared.physical_limit = "140MiB"  # type: ignore[assignment]
        a.wake()
    del asleep, awake
