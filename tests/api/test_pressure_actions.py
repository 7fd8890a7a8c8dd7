"""SharedMemoryPool.on_pressure: what a user's own function may do in it, and raise."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

import torch_vmm
from tests.api.evicting import Evicting, quiet
from tests.helpers import MIB, tensor_in
from torch_vmm import SharedMemoryPool, VirtualMemoryPool

MakeShared = Callable[..., SharedMemoryPool]


def test_what_it_freed_before_it_raised_is_taken(evicting: Evicting, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = quiet(monkeypatch)

    def fail(requested: int, pool: VirtualMemoryPool) -> bool:
        evicting.kept.clear()
        raise RuntimeError("after all is done")

    evicting.shared.on_pressure(fail)
    assert tensor_in(evicting.second, 48 * MIB).numel() == 48 * MIB
    assert len(shown) == 1


@pytest.mark.parametrize("error", [SystemExit, GeneratorExit, MemoryError, torch_vmm.VmmError])
def test_whatever_it_raises_the_request_ends_as_ever(
    evicting: Evicting, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    shown = quiet(monkeypatch)

    def fail(requested: int, pool: VirtualMemoryPool) -> bool:
        raise error("no")

    evicting.shared.on_pressure(fail)
    for _ in range(2):  # it is called again by the next request
        with pytest.raises(torch.OutOfMemoryError):
            tensor_in(evicting.second, 16 * MIB)
    assert [type(each) for each in shown] == [error] * 2
    evicting.shared.on_pressure(evicting.evict)
    assert tensor_in(evicting.second, 16 * MIB).numel() == 16 * MIB


def test_an_answer_that_is_no_bool_is_what_python_takes_it_for(
    evicting: Evicting, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown, answers = quiet(monkeypatch), [[], None, 0, torch.ones(2), "yes"]

    def evict(requested: int, pool: VirtualMemoryPool) -> object:
        if answers[0] == "yes":
            evicting.kept.pop()
        return answers.pop(0)

    evicting.shared.on_pressure(evict)  # type: ignore[arg-type]
    for _ in range(4):  # the tensor of two is neither true nor false
        with pytest.raises(torch.OutOfMemoryError):
            tensor_in(evicting.second, 16 * MIB)
    assert [type(each) for each in shown] == [RuntimeError]
    assert tensor_in(evicting.second, 16 * MIB).numel() == 16 * MIB


def test_it_may_put_a_model_to_sleep(evicting: Evicting) -> None:
    for number, tensor in enumerate(evicting.kept):
        tensor.fill_(number + 1)

    def doze(requested: int, pool: VirtualMemoryPool) -> bool:
        evicting.calls.append((requested, pool))
        return evicting.first.sleep().done and len(evicting.calls) == 1

    evicting.shared.on_pressure(doze)
    taken = tensor_in(evicting.second, 40 * MIB)
    assert evicting.first.is_asleep
    assert len(evicting.calls) == 1
    assert evicting.shared.global_stats().physical_usage <= 64 * MIB
    del taken
    evicting.first.wake()
    assert all(bool((tensor == number + 1).all()) for number, tensor in enumerate(evicting.kept))


def test_it_may_begin_a_sleep_and_wait_for_it_the_next_time(evicting: Evicting) -> None:
    handles: list[torch_vmm.Transfer] = []

    def doze(requested: int, pool: VirtualMemoryPool) -> bool:
        if not handles:
            handles.append(evicting.first.sleep(blocking=False))
        else:
            handles[0].wait()
        return True

    evicting.shared.on_pressure(doze)
    assert tensor_in(evicting.second, 64 * MIB).numel() == 64 * MIB
    handles[0].wait()
    assert evicting.first.is_asleep


def test_a_model_that_wakes_is_one_that_asks(evicting: Evicting) -> None:
    third = evicting.shared.register_model("third")
    evicting.first.sleep()
    with third:
        kept = torch.arange(4 * MIB, dtype=torch.int32, device=third.device)
    third.sleep()
    evicting.first.wake()
    evicting.shared.on_pressure(evicting.evict)
    third.wake()
    assert [(requested, pool is third) for requested, pool in evicting.calls] == [(16 * MIB, True)]
    assert torch.equal(kept.cpu(), torch.arange(4 * MIB, dtype=torch.int32))


def test_models_of_which_each_puts_the_other_to_sleep(evicting: Evicting) -> None:
    first, second, calls = evicting.first, evicting.second, evicting.calls

    def doze(requested: int, pool: VirtualMemoryPool) -> bool:
        calls.append((requested, pool))
        other = first if pool is second else second
        return not other.is_asleep and other.sleep().done

    evicting.shared.on_pressure(doze)
    held = tensor_in(second, 40 * MIB).fill_(7)
    for number, tensor in enumerate(evicting.kept):
        first.wake()
        assert second.is_asleep
        tensor.fill_(number)
        second.wake()
        assert first.is_asleep
        assert bool((held == 7).all())
    assert len(calls) == 1 + 2 * 4
    first.wake()
    assert [int(tensor[-1]) for tensor in evicting.kept] == [0, 1, 2, 3]


def test_it_may_put_the_very_model_to_sleep_that_asks(evicting: Evicting) -> None:
    evicting.kept.pop()
    held = tensor_in(evicting.second, 8 * MIB).fill_(3)

    def doze(requested: int, pool: VirtualMemoryPool) -> bool:
        return pool.sleep().done

    evicting.shared.on_pressure(doze)
    with pytest.raises(RuntimeError, match="'second' is asleep"):
        tensor_in(evicting.second, 16 * MIB)
    assert evicting.second.is_asleep
    evicting.second.wake()
    assert bool((held == 3).all())


def test_a_sleep_in_it_that_cannot_be_is_told_and_nothing_is_lost(
    evicting: Evicting, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = quiet(monkeypatch)
    evicting.shared.host_backup_limit = 0  # type: ignore[assignment]
    evicting.kept[0].fill_(9)

    def doze(requested: int, pool: VirtualMemoryPool) -> bool:
        return evicting.first.sleep().done

    evicting.shared.on_pressure(doze)
    with pytest.raises(torch.OutOfMemoryError):
        tensor_in(evicting.second, 16 * MIB)
    assert "host_backup_limit" in str(shown[0])
    assert not evicting.first.is_asleep
    assert bool((evicting.kept[0] == 9).all())


def test_what_it_wakes_itself_does_not_call_it_again(evicting: Evicting) -> None:
    third = evicting.shared.register_model("third")
    evicting.kept.pop()
    kept = tensor_in(third, 16 * MIB)
    third.sleep()
    evicting.kept.append(tensor_in(evicting.first, 16 * MIB))
    raised: list[torch_vmm.OutOfMemoryError] = []

    def wake(requested: int, pool: VirtualMemoryPool) -> bool:
        evicting.calls.append((requested, pool))
        with pytest.raises(torch_vmm.OutOfMemoryError) as caught:
            third.wake()
        raised.append(caught.value)
        return evicting.kept.pop() is not None

    evicting.shared.on_pressure(wake)
    assert tensor_in(evicting.second, 16 * MIB).numel() == 16 * MIB
    assert len(evicting.calls) == len(raised) == 1
    assert third.is_asleep
    del kept


def test_pressure_comes_again_within_it_on_another_thread(evicting: Evicting) -> None:
    depth: list[int] = []

    def evict(requested: int, pool: VirtualMemoryPool) -> bool:
        depth.append(requested)
        if len(depth) == 1:  # another thread's request is one like any other, and this waits for it
            inner: list[torch.Tensor] = []
            thread = threading.Thread(target=lambda: inner.append(tensor_in(pool, 8 * MIB)))
            thread.start()
            thread.join(60)
            assert inner[0].numel() == 8 * MIB
        return evicting.evict(requested, pool)

    evicting.shared.on_pressure(evict)
    assert tensor_in(evicting.second, 32 * MIB).numel() == 32 * MIB
    assert depth[:2] == [32 * MIB, 8 * MIB]


def test_it_may_be_set_anew_from_within(evicting: Evicting) -> None:
    def evict(requested: int, pool: VirtualMemoryPool) -> bool:
        evicting.shared.on_pressure(evicting.evict)
        return True

    evicting.shared.on_pressure(evict)
    assert tensor_in(evicting.second, 16 * MIB).numel() == 16 * MIB
    assert len(evicting.calls) == 1

    def never_again(requested: int, pool: VirtualMemoryPool) -> bool:
        evicting.shared.on_pressure(None)
        return True

    evicting.shared.on_pressure(never_again)
    with pytest.raises(torch.OutOfMemoryError):
        tensor_in(evicting.second, 64 * MIB)
    assert len(evicting.calls) == 1


@pytest.mark.parametrize("how", ["the model that asks", "all"])
def test_it_may_end_what_asks(evicting: Evicting, how: str) -> None:
    def end(requested: int, pool: VirtualMemoryPool) -> bool:
        if how == "all":
            evicting.shared.close(force=True)
        else:
            pool.close(force=True)
        return True

    evicting.shared.on_pressure(end)
    with pytest.raises((RuntimeError, torch_vmm.VmmError), match=r"closed|asked"):
        tensor_in(evicting.second, 16 * MIB)
    assert evicting.second.is_closed


# -- Whoever asks is within an operator --------------------------------------------------------------------------------


def under_pressure(evicting: Evicting, act: Callable[[], object], inference: bool = False) -> None:
    """``act`` within a function that is called for a tensor of the second model."""

    def evict(requested: int, pool: VirtualMemoryPool) -> bool:
        if not evicting.kept:
            return False
        evicting.kept.clear()  # first: what is made in it needs room too
        act()
        return True

    evicting.shared.on_pressure(evict)
    with torch.inference_mode(inference):
        tensor_in(evicting.second, 48 * MIB)
    assert not evicting.kept


@pytest.mark.parametrize("inference", [False, True])
def test_autograd_works_in_it(evicting: Evicting, device: str, inference: bool) -> None:
    weight = torch.full((100,), 3.0, device=device, requires_grad=True)
    made: list[torch.Tensor] = []

    def act() -> None:
        made.extend([weight * 2, weight.to("cpu", torch.float64), weight[:50]])
        (weight * 2).sum().backward()

    under_pressure(evicting, act, inference)
    assert all(each.requires_grad and not each.is_inference() for each in made)
    assert made[2]._is_view()
    assert weight.grad is not None
    assert (weight.grad == 2).all()


def test_who_saved_a_tensor_learns_that_it_was_changed_in_it(evicting: Evicting, device: str) -> None:
    weight = torch.full((100,), 3.0, device=device, requires_grad=True)
    cache = torch.full((100,), 2.0, device=device)
    loss = (weight * cache).sum()
    under_pressure(evicting, cache.zero_)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
