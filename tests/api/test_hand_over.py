"""Memory that goes from one model to another under one limit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import torch_vmm
from tests.helpers import MIB, assert_models_add_up, holds, is_zero, python, stamp, tensor_in

Shared = torch_vmm.SharedMemoryPool
MakeShared = Callable[..., Shared]


@pytest.mark.parametrize("explicit", [False, True])
def test_idle_memory_goes_to_who_asks_and_is_zero_there(make_shared: MakeShared, explicit: bool) -> None:
    shared = make_shared("32MiB")
    first, second = shared.register_model("first"), shared.register_model("second")
    for round_ in range(3):
        giver, taker = (first, second) if round_ % 2 == 0 else (second, first)
        tensors = [stamp(tensor_in(giver, 4 * MIB), seed) for seed in range(6)]
        tensors += [stamp(tensor_in(giver, 1000), seed) for seed in range(100)]  # small ones, in slabs
        assert giver.physical_memory_usage > 24 * MIB
        tensors.clear()
        if explicit:
            offset = shared.allocate_for_model(taker.name, "32MiB") - taker.base_address
            assert is_zero(taker.tensor(offset, 32 * MIB))
            shared.deallocate_for_model(taker.name, offset, "32MiB")
        else:
            seen = [tensor_in(taker, 8 * MIB) for _ in range(4)]
            assert all(is_zero(tensor) for tensor in seen)
            assert taker.physical_memory_usage == 32 * MIB
            del seen
        assert assert_models_add_up(shared).physical_usage <= 32 * MIB


def test_pages_that_were_given_up_are_zero_for_the_next_model(make_shared: MakeShared) -> None:
    shared = make_shared("16MiB")
    first, second = shared.register_model("first"), shared.register_model("second")
    shared.allocate_for_model("first", "16MiB")
    stamp(first.tensor(0, 16 * MIB), 3)
    shared.deallocate_for_model("first", 0, "16MiB")
    shared.allocate_for_model("second", "16MiB")
    assert is_zero(second.tensor(0, 16 * MIB))


def test_what_an_unregistered_model_held_is_zero_for_the_others(make_shared: MakeShared) -> None:
    shared = make_shared("16MiB")
    first, second = shared.register_model("first"), shared.register_model("second")
    stamp(tensor_in(first, 16 * MIB), 3)
    shared.unregister_model("first")
    assert is_zero(tensor_in(second, 16 * MIB))


@pytest.mark.parametrize("ends", ["sys.exit()", "os._exit(0)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_what_a_process_that_ended_held_is_seen_by_nobody(make_shared: MakeShared, device: str, ends: str) -> None:
    python(
        f"""
        import os, signal, sys, torch, torch_vmm
        torch_vmm.enable({device!r})
        shared = torch_vmm.SharedMemoryPool("192MiB", {device!r})
        awake, asleep, freed = (shared.register_model(name) for name in ("awake", "asleep", "freed"))
        tensors = []
        for model in (awake, asleep, freed):
            with model:
                tensors.append(torch.full((32 << 20,), 165, dtype=torch.uint8, device={device!r}))
        asleep.sleep()
        tensors.pop()
        if {device!r} == "cuda":
            torch.cuda.synchronize()
        {ends}
        """
    )
    shared = make_shared("192MiB")
    seen = [tensor_in(shared.register_model(f"model {number}"), 48 * MIB) for number in range(4)]
    assert all(is_zero(tensor) for tensor in seen)


def test_memory_in_use_is_never_taken(make_shared: MakeShared) -> None:
    shared = make_shared("16MiB")
    first, second = shared.register_model("first"), shared.register_model("second")
    tensors = [stamp(tensor_in(first, 2 * MIB), seed) for seed in range(6)]
    del tensors[1::2]
    taken = [stamp(tensor_in(second, 2 * MIB), 50 + seed) for seed in range(5)]
    with pytest.raises(torch.OutOfMemoryError):
        tensor_in(second, 2 * MIB)
    assert all(holds(tensor, seed) for tensor, seed in zip(tensors, (0, 2, 4), strict=True))
    assert all(holds(tensor, 50 + seed) for seed, tensor in enumerate(taken))


def test_a_floor_is_not_taken(make_shared: MakeShared) -> None:
    shared = make_shared("16MiB")
    first, second = shared.register_model("first", floor="6MiB"), shared.register_model("second")
    tensors = [tensor_in(first, 2 * MIB) for _ in range(8)]
    tensors.clear()
    assert first.stats().idle_bytes == 16 * MIB
    taken = tensor_in(second, 10 * MIB)
    assert first.physical_memory_usage >= 6 * MIB
    with pytest.raises(torch.OutOfMemoryError):
        tensor_in(second, 2 * MIB)
    del taken


# A floor is a reservation: what is left of it is nobody else's, held or not.


def test_others_do_not_grow_into_what_is_left_of_a_floor(make_shared: MakeShared) -> None:
    shared = make_shared("200MiB")
    first, second = shared.register_model("first"), shared.register_model("second", floor="150MiB")
    taken = tensor_in(first, 50 * MIB)
    with pytest.raises(torch.OutOfMemoryError, match=r"floor of 150 MiB reserves another 150 MiB"):
        tensor_in(first, 2 * MIB)
    own = tensor_in(second, 150 * MIB)
    with pytest.raises(torch.OutOfMemoryError):
        tensor_in(second, 2 * MIB)
    assert first.physical_memory_usage + second.physical_memory_usage == 200 * MIB
    del taken, own


def test_floors_that_exceed_the_limit_together_are_refused(make_shared: MakeShared) -> None:
    shared = make_shared("200MiB")
    first = shared.register_model("first", floor="120MiB")
    with pytest.raises(torch_vmm.InvalidArgumentError, match="120 MiB of other floors"):
        shared.register_model("second", floor="100MiB")
    assert list(shared) == ["first"]
    second = shared.register_model("second", floor="80MiB")
    with pytest.raises(torch_vmm.InvalidArgumentError, match="above the limit 200 MiB"):
        first.floor = "121MiB"
    assert first.floor == 120 * MIB
    second.floor = "70MiB"
    first.floor = "130MiB"


def test_a_floor_that_is_raised_comes_at_once_as_far_as_others_are_idle(make_shared: MakeShared) -> None:
    shared = make_shared("64MiB")
    first, second = shared.register_model("first"), shared.register_model("second")
    kept = tensor_in(first, 32 * MIB)
    tensor_in(first, 32 * MIB)  # idle from now on
    second.floor = "48MiB"
    assert first.physical_memory_usage == 32 * MIB
    own = tensor_in(second, 32 * MIB)
    with pytest.raises(torch.OutOfMemoryError):
        tensor_in(second, 16 * MIB)  # the first still uses it
    del kept
    with pytest.raises(torch.OutOfMemoryError):
        tensor_in(first, 32 * MIB)  # what it gave is the other's
    more = tensor_in(second, 16 * MIB)
    del own, more


def test_a_floor_ends_with_its_model(make_shared: MakeShared) -> None:
    shared = make_shared("64MiB")
    first = shared.register_model("first")
    shared.register_model("second", floor="64MiB")
    with pytest.raises(torch.OutOfMemoryError):
        tensor_in(first, 2 * MIB)
    shared.unregister_model("second")
    del_me = tensor_in(first, 64 * MIB)
    del del_me


def test_a_limit_goes_before_the_floors(make_shared: MakeShared) -> None:
    shared = make_shared("64MiB")
    first = shared.register_model("first", floor="48MiB")
    tensor_in(first, 48 * MIB)  # idle from now on
    assert first.physical_memory_usage == 48 * MIB
    shared.physical_limit = "32MiB"
    assert shared.global_stats().physical_usage <= 32 * MIB
    shared.physical_limit = "64MiB"
    del_me = tensor_in(first, 48 * MIB)
    del del_me


def test_what_is_left_of_a_floor_is_a_value_too(make_shared: MakeShared) -> None:
    shared = make_shared("64MiB")
    first = shared.register_model("first")
    shared.register_model("second", floor="40MiB")
    with pytest.raises(torch.OutOfMemoryError, match=r"reserved by floors 40 MiB"):
        tensor_in(first, 32 * MIB)
    refusal = torch_vmm.last_out_of_memory(shared.device)
    assert refusal is not None
    (holder,) = refusal.holders
    assert (holder.name, holder.floor, holder.reserved, holder.allocated) == ("second", 40 * MIB, 40 * MIB, 0)
    assert "give 'second' a lower floor" in refusal.advice
    assert refusal.available == 24 * MIB


def test_the_lower_priority_gives_first(make_shared: MakeShared) -> None:
    shared = make_shared("24MiB")
    low, high = shared.register_model("low", priority=-1), shared.register_model("high", priority=5)
    asker = shared.register_model("asker")
    tensors = [tensor_in(pool, 8 * MIB) for pool in (high, low)]
    tensors.clear()
    kept = tensor_in(asker, 16 * MIB)
    assert (low.physical_memory_usage, high.physical_memory_usage) == (0, 8 * MIB)
    del kept
