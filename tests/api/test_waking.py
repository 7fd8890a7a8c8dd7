"""Waking where memory is short, and what is said of what sleeps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import torch_vmm
from tests.helpers import MIB, tensor_in

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


def test_what_sleeps_and_holds_nothing_can_be_found_and_woken(make_shared: MakeShared) -> None:
    model = make_shared("64MiB").register_model("model")
    with model.tag("weights"):
        weights = torch.ones(MIB, dtype=torch.uint8, device=model.device)
    with model.tag("cache"):
        cache = torch.ones(MIB, dtype=torch.uint8, device=model.device)
    del cache
    model.sleep()
    assert model.asleep == {"weights": "host"}
    model.wake(["weights", ""])
    assert model.is_asleep
    assert model.asleep == {"cache": "nothing"}
    for tag in model.asleep:
        model.wake(tag)
    assert not model.is_asleep
    assert model.asleep == {}
    assert bool((weights == 1).all())


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
