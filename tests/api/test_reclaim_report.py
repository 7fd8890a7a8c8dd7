"""pool.reclaim_report(): what the reclaim ladder did for a model, as counts and as the latest decisions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.helpers import MIB, tensor_in
from torch_vmm import _C, SharedMemoryPool
from torch_vmm.reclaiming import ReclaimDecision, ReclaimStep

MakeShared = Callable[..., SharedMemoryPool]

RUNGS = ["store", "other models", "callbacks", "on_pressure", "private pools", "queued work", "host memory"]


def test_a_model_that_never_climbed_has_nothing_to_tell(make_shared: MakeShared) -> None:
    model = make_shared("64MiB").register_model("a")
    kept = tensor_in(model, 32 * MIB)
    report = model.reclaim_report()
    assert (report.requests, report.refused, report.latest) == (0, 0, ())
    assert list(report.rungs) == RUNGS
    assert str(report).splitlines()[0] == "0 requests climbed, 0 were refused"
    del kept


def test_who_yielded_is_told(make_shared: MakeShared) -> None:
    shared = make_shared("64MiB")
    giver, asker = shared.register_model("giver"), shared.register_model("asker")
    del_me = tensor_in(giver, 64 * MIB)
    del del_me
    kept = tensor_in(asker, 40 * MIB)
    report = asker.reclaim_report()
    assert (report.requests, report.refused) == (1, 0)
    (decision,) = report.latest
    assert decision.met
    assert decision.requested == 40 * MIB
    assert decision.asker == "asker"
    assert [step.rung for step in decision.steps] == RUNGS[: len(decision.steps)]
    step = decision.steps[-1]
    assert step.result == "met"
    assert step.seconds >= 0
    assert report.rungs[step.rung].met == 1
    assert report.rungs[step.rung].bytes == step.bytes > 0
    if step.rung == "other models":
        assert {name for name, _ in step.yielded} == {"giver"}
        assert sum(size for _, size in step.yielded) == step.bytes
    assert "40 MiB for asker" in str(report)
    assert step.rung in str(decision)
    assert giver.reclaim_report().requests == 0
    del kept


def test_what_a_model_that_was_put_to_sleep_left_counts(make_shared: MakeShared) -> None:
    shared = make_shared("64MiB")
    sleeper, asker = shared.register_model("sleeper"), shared.register_model("asker")
    slept = tensor_in(sleeper, 40 * MIB)
    shared.on_pressure(lambda requested, pool: sleeper.sleep("discard").done)
    kept = tensor_in(asker, 40 * MIB)
    (step,) = [step for step in asker.reclaim_report().latest[-1].steps if step.rung == "on_pressure"]
    assert step.result == "met"
    assert step.bytes == 40 * MIB
    del slept, kept


def test_a_refusal_shows_every_rung_and_each_line_fits(make_shared: MakeShared) -> None:
    shared = make_shared("64MiB")
    holder, asker = shared.register_model("holder"), shared.register_model("asker")
    held = tensor_in(holder, 60 * MIB)
    with pytest.raises(torch.OutOfMemoryError):
        tensor_in(asker, 32 * MIB)
    report = asker.reclaim_report()
    assert (report.requests, report.refused) == (1, 1)
    (decision,) = report.latest
    assert not decision.met
    assert len(decision.steps) == len(RUNGS)
    assert "shared" in decision.refused_by.lower()
    assert decision.steps[RUNGS.index("on_pressure")].result == "passed over"  # nobody gave a function
    assert decision.steps[RUNGS.index("host memory")].result == "passed over"  # nor asked to spill
    assert decision.steps[RUNGS.index("queued work")].result == "in vain"
    lines = str(report).splitlines()
    assert all(len(line) <= 80 for line in lines), lines
    assert " ".join(line.strip() for line in lines[2 + len(RUNGS) :]) == str(decision)
    assert all(line.startswith("  ") for line in lines[3 + len(RUNGS) :])
    del held


def test_a_decision_is_one_line_whatever_models_are_called() -> None:
    step = ReclaimStep("others", "met", MIB, 0.001, (("a\tb", MIB),))
    decision = ReclaimDecision(MIB, "two\nlines", "limit of \x1b[31m", True, (step,))
    assert str(decision).isprintable()
    assert r"for two\nlines (full: limit of \x1b[31m): met; others met with 1 MiB of a\tb 1 MiB in" in str(decision)


def test_the_users_function_is_a_rung(make_shared: MakeShared) -> None:
    shared = make_shared("64MiB")
    holder, asker = shared.register_model("holder"), shared.register_model("asker")
    held = [tensor_in(holder, 60 * MIB)]

    @shared.on_pressure
    def evict(requested: int, pool: object) -> bool:
        held.clear()
        return True

    kept = tensor_in(asker, 32 * MIB)
    (decision,) = asker.reclaim_report().latest
    assert decision.steps[-1].rung == "on_pressure"
    assert decision.met
    shared.on_pressure(None)
    del kept


def test_who_is_more_important_gives_no_unit_while_others_have_memory(
    memory: _C.Device, make_shared: MakeShared
) -> None:
    memory.empty_cache()  # what tests before left idle yields as well where the device has no more
    shared = make_shared("1536MiB")
    low = shared.register_model("low")
    a, guard, b = (tensor_in(low, size) for size in (250 * MIB + 7 * 4096, 30 * MIB, 150 * MIB + 5 * 4096))
    high, ask = shared.register_model("high"), shared.register_model("ask")
    high.priority = 5
    kept = tensor_in(high, 512 * MIB)
    del kept, a, b
    had = high.physical_memory_usage
    taken = tensor_in(ask, 900 * MIB)
    assert {name for step in ask.reclaim_report().latest[-1].steps for name, _ in step.yielded} == {"low"}
    assert high.physical_memory_usage == had
    more = tensor_in(ask, 450 * MIB)  # low has not so much
    assert "high" in {name for step in ask.reclaim_report().latest[-1].steps for name, _ in step.yielded}
    del guard, taken, more


def test_room_that_was_there_is_not_what_queued_work_gave(make_shared: MakeShared) -> None:
    shared = make_shared("200MiB")
    giver, asker = shared.register_model("giver"), shared.register_model("asker")
    kept = tensor_in(giver, 100 * MIB)
    with pytest.raises(torch.OutOfMemoryError):
        tensor_in(asker, 120 * MIB)
    assert asker.reclaim_report().rungs["queued work"].bytes == 0
    del kept


def test_a_limit_that_a_function_raises_is_nobodys_memory(make_shared: MakeShared) -> None:
    shared = make_shared("200MiB")
    model = shared.register_model("m")

    def raise_limit(missing: int, pool: object) -> bool:
        assert shared.physical_limit is not None
        shared.physical_limit += 200 * MIB
        return True

    shared.on_pressure(raise_limit)
    kept = tensor_in(model, 400 * MIB)
    assert model.reclaim_report().rungs["on_pressure"].bytes == 0
    assert model.reclaim_report().rungs["on_pressure"].met == 1
    del kept
