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
