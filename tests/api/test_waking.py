"""Waking where memory is short, and what is said of what sleeps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import torch_vmm
from tests.helpers import MIB, run, tensor_in

MakeShared = Callable[..., torch_vmm.SharedMemoryPool]


@pytest.mark.parametrize("sizes", [(68, 122), (74, 126), (92, 118)])
def test_idle_memory_wakes_a_model_before_anybody_is_asked(sizes: tuple[int, int]) -> None:
    """The chunks that are idle are not of the sizes that it had. (On a GPU queued work may use them, and that is waited
    for behind whoever is asked.)"""
    torch_vmm.enable("cpu")
    shared = torch_vmm.SharedMemoryPool("192MiB", "cpu")
    a, b, c = (shared.register_model(name) for name in "abc")
    kept = tensor_in(a, sizes[0] * MIB).fill_(7)
    a.sleep()
    others = tensor_in(c, 40 * MIB)
    idle = tensor_in(b, sizes[1] * MIB)
    del idle
    asked: list[int] = []

    def ask(requested: int, pool: torch_vmm.VirtualMemoryPool) -> bool:
        asked.append(requested)
        return c.sleep().done

    shared.on_pressure(ask)
    a.wake()
    assert asked == []
    assert not c.is_asleep
    assert bool((kept == 7).all())
    assert shared.global_stats().physical_usage <= 192 * MIB
    del others
    shared.close(force=True)


def test_beside_many_streams_idle_memory_wakes_a_model_too() -> None:
    """Where a device has many, they are not all asked for the sake of a few addresses."""
    run("""
        import torch_vmm
        from tests.api.test_waking import test_idle_memory_wakes_a_model_before_anybody_is_asked as wakes

        torch_vmm.enable("cpu")
        buffers = torch_vmm.MemoryPool("cpu")
        for number in range(1, 65):
            buffers.alloc(256, stream=number).free()
        wakes((68, 122))
    """)


def test_what_is_on_its_way_to_sleep_is_not_there(model: torch_vmm.VirtualMemoryPool) -> None:
    """Whoever read it would end the process."""
    kept = tensor_in(model, 64 * MIB).fill_(1)
    for _ in range(3):
        going = model.sleep(blocking=False)
        with pytest.raises(torch_vmm.AsleepError):
            going.wait_for(kept)
        going.wait()
        model.wake()
        assert bool((kept == 1).all())


def test_a_tag_that_sleeps_is_named(model: torch_vmm.VirtualMemoryPool) -> None:
    with model.tag("cache"):
        kept = torch.ones(MIB, device=model.device)
    model.sleep({"cache": "host"})
    with model:
        torch.ones(1, device=model.device)
    with (
        pytest.raises(RuntimeError, match=r"tag 'cache' of model .* is asleep; wake\('cache'\) first"),
        model.tag("cache"),
    ):
        torch.ones(MIB, device=model.device)
    model.sleep()
    with pytest.raises(RuntimeError, match=r"model .* is asleep; wake\(\) it first"), model.tag("cache"):
        torch.ones(MIB, device=model.device)
    model.wake()
    assert kept.all()


@pytest.mark.parametrize("room", [1, 34])
def test_a_refused_wake_says_what_all_of_it_takes(model: torch_vmm.VirtualMemoryPool, room: int) -> None:
    """And one that is given that much wakes."""
    kept = [tensor_in(model, 32 * MIB).fill_(1)]
    with model.tag("weights"):
        kept.append(torch.ones(8 * MIB, dtype=torch.uint8, device=model.device))
    model.sleep()
    model.physical_limit = room * MIB
    with pytest.raises(torch_vmm.OutOfMemoryError, match=rf"raise the limit of .* by {40 - room} MiB") as caught:
        model.wake()
    assert (caught.value.requested, caught.value.available) == (40 * MIB, room * MIB)
    assert model.is_asleep
    model.physical_limit = 40 * MIB
    model.wake()
    assert all(bool(each.all()) for each in kept)


def test_what_sleepers_left_is_to_be_had(make_shared: MakeShared) -> None:
    """By the whole limit, and the advice goes by it."""
    shared = make_shared("50MiB")
    one, other = shared.register_model("one"), shared.register_model("other")
    kept = tensor_in(one, 20 * MIB)
    one.sleep()
    with pytest.raises(torch_vmm.OutOfMemoryError, match=r"raise the limit of .* by 10 MiB") as caught:
        other.allocate(0, 60 * MIB)
    assert caught.value.available == 50 * MIB
    other.allocate(0, 50 * MIB)
    other.deallocate(0, 50 * MIB)
    one.wake()
    del kept


def test_what_sleepers_left_makes_no_room_in_a_floor(make_shared: MakeShared) -> None:
    shared = make_shared("64MiB")
    shared.register_model("reserver").floor = 32 * MIB
    sleeper, asker = shared.register_model("sleeper"), shared.register_model("asker")
    slept = tensor_in(sleeper, 24 * MIB)
    sleeper.sleep("discard")
    with pytest.raises(torch_vmm.OutOfMemoryError, match=r"raise the limit of .* by 8 MiB") as caught:
        asker.allocate(0, 40 * MIB)
    assert caught.value.available == 32 * MIB
    asker.allocate(0, 32 * MIB)
    del slept


def test_what_sleeps_already_is_where_it_was(make_shared: MakeShared, tmp_path: object) -> None:
    shared = make_shared("64MiB")
    model, other = shared.register_model("model"), shared.register_model("other")
    kept = tensor_in(model, 4 * MIB).fill_(1)
    model.sleep("discard")
    model.sleep("host")
    assert model.asleep == {"": "discarded"}
    torch_vmm.swap(model, other)
    assert model.asleep == {"": "discarded"}
    model.wake()
    assert not kept.any()
    kept.fill_(1)
    model.sleep("host")
    model.sleep("discard")
    assert model.asleep == {"": "host"}
    model.sleep(f"{tmp_path}/")
    assert model.asleep == {"": "host"}
    model.wake()
    assert bool((kept == 1).all())


def test_what_holds_nothing_wakes_with_the_last_that_did(make_shared: MakeShared) -> None:
    model = make_shared("64MiB").register_model("model")
    with model.tag("weights"):
        weights = torch.ones(MIB, dtype=torch.uint8, device=model.device)
    with model.tag("cache"):
        cache = torch.ones(MIB, dtype=torch.uint8, device=model.device)
    with model.tag("optimizer"):
        moments = torch.ones(MIB, dtype=torch.uint8, device=model.device)
    del cache
    model.sleep()
    assert model.asleep == {"weights": "host", "optimizer": "host"}
    model.wake("optimizer")
    with model.tag("cache"), pytest.raises(RuntimeError, match="asleep"):
        torch.empty(MIB, dtype=torch.uint8, device=model.device)
    for tag in model.asleep:
        model.wake(tag)
    assert not model.is_asleep
    assert model.asleep == {}
    assert bool((weights == 1).all())
    assert bool((moments == 1).all())
    with model.tag("cache"):
        torch.empty(MIB, dtype=torch.uint8, device=model.device)


def of_tags(model: torch_vmm.VirtualMemoryPool, *tags: str) -> list[torch.Tensor]:
    """A tensor in each tag, and one that held one."""
    made = []
    for tag in (*tags, "empty"):
        with model.tag(tag):
            made.append(torch.ones(40 * MIB, dtype=torch.uint8, device=model.device))
    return made[:-1]


def test_what_holds_nothing_wakes_behind_two_wakes_at_once(make_shared: MakeShared) -> None:
    model = make_shared("256MiB").register_model("model")
    kept = of_tags(model, "weights", "optimizer")
    for _ in range(5):
        model.sleep()
        for waking in [model.wake(tag, blocking=False) for tag in ("weights", "optimizer")]:
            waking.wait()
        assert not model.is_asleep
    assert all(bool((each == 1).all()) for each in kept)


def test_what_holds_nothing_can_be_woken_while_the_rest_is_on_its_way(make_shared: MakeShared) -> None:
    model = make_shared("256MiB").register_model("model")
    kept = of_tags(model, "weights")
    model.sleep()
    waking = model.wake("weights", blocking=False)
    model.wake("empty")
    with model.tag("empty"):
        torch.empty(MIB, dtype=torch.uint8, device=model.device)
    waking.wait()
    assert not model.is_asleep
    assert bool((kept[0] == 1).all())


@pytest.mark.parametrize("woken", ["weights", []])
def test_what_holds_nothing_sleeps_on_where_nothing_wakes(make_shared: MakeShared, woken: str | list[str]) -> None:
    model = make_shared("256MiB").register_model("model")
    kept = of_tags(model, "weights")
    model.sleep(keep={"empty": "discard"})
    model.wake(woken)
    assert model.asleep == {"empty": "nothing"}
    model.wake("empty")
    assert not model.is_asleep
    del kept


def test_what_sleeps_and_holds_nothing_at_all_can_be_found_and_woken(make_shared: MakeShared) -> None:
    model = make_shared("64MiB").register_model("model")
    model.sleep()
    assert model.asleep == {"": "nothing"}
    for tag in model.asleep:
        model.wake(tag)
    assert not model.is_asleep


def test_the_advice_knows_what_is_above_the_limit(make_shared: MakeShared) -> None:
    shared = make_shared("128MiB")
    a, b = shared.register_model("a"), shared.register_model("b")
    kept = tensor_in(a, 90 * MIB)
    shared.physical_limit = "4MiB"  # type: ignore[assignment]
    with pytest.raises(torch.OutOfMemoryError):
        tensor_in(b, 4 * MIB)
    told = torch_vmm.last_out_of_memory(b.device)
    assert told is not None
    assert "by 90 MiB" in told.advice
    assert "tensors of 90 MiB" in told.advice
    shared.physical_limit = "94MiB"  # type: ignore[assignment]
    assert tensor_in(b, 4 * MIB).numel() == 4 * MIB
    del kept


@pytest.mark.parametrize("answer", [None, False])
def test_a_function_that_was_asked_for_nothing_is_in_the_report(make_shared: MakeShared, answer: object) -> None:
    shared = make_shared("64MiB")
    model = shared.register_model("model")
    shared.on_pressure(lambda requested, pool: answer)  # type: ignore[arg-type, return-value]
    kept = tensor_in(model, 40 * MIB)
    with pytest.raises(torch.OutOfMemoryError):
        tensor_in(model, 40 * MIB)
    assert model.reclaim_report().rungs["on_pressure"].tried == 1
    del kept
