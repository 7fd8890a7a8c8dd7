"""Functions that are told when a model's memory goes, and when it is back: pool.on_remap()."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest
import torch

import torch_vmm
from tests.api.sleeping import is_numbered, numbered, told_by
from torch_vmm import _C, SharedMemoryPool, VirtualMemoryPool, sleeping


def tagged(model: VirtualMemoryPool, *tags: str) -> list[torch.Tensor]:
    """What the model has under each tag."""
    made = []
    for tag in tags:
        with model.tag(tag):
            made.append(torch.ones(1000, device=model.device))
    return made


class Held:
    """A function that waits within its first call until it may go on."""

    def __init__(self, function: Callable[..., object] = lambda: None) -> None:
        self._function = function
        self.inside, self.may_go_on = threading.Event(), threading.Event()

    def __call__(self, *args: object) -> object:
        if not self.inside.is_set():
            self.inside.set()
            assert self.may_go_on.wait(60)
        return self._function(*args)


def beside(function: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """A thread that calls it, and what it returned or raised."""
    ended: list[object] = []

    def call() -> None:
        try:
            ended.append(function())
        except Exception as error:
            ended.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread, ended


def test_whoever_knows_the_memory_is_told(model: VirtualMemoryPool) -> None:
    numbered(model, 1000)
    told = told_by(model)
    model.sleep()
    assert told == ["goes"]
    model.sleep()
    model.wake()
    model.wake()
    assert told == ["goes", "is back"]
    with pytest.raises(torch_vmm.InvalidArgumentError, match="before=3"):
        model.on_remap(3)  # type: ignore[arg-type]
    with pytest.raises(torch_vmm.InvalidArgumentError, match="after="):
        model.on_remap(after=model)  # it only decorates
    with pytest.raises(torch_vmm.InvalidArgumentError, match=r"after=.* without arguments"):
        model.on_remap(after=lambda _moved: None)  # type: ignore[misc, arg-type]
    model.on_remap(model.sleep)
    with pytest.raises(torch_vmm.VmmError, match="puts its own model to sleep"):
        model.sleep()
    assert not model.is_asleep
    assert told == ["goes", "is back", "goes", "is back"]
    told.clear()
    model.on_remap()  # takes them off
    model.sleep()
    model.wake()
    assert told == []


def test_functions_that_are_taken_off_may_end_whoever_has_them(model: VirtualMemoryPool) -> None:
    class Registered:
        def goes(self) -> None: ...
        def __del__(self) -> None:
            model.on_remap()  # from within on_remap()

    model.on_remap(Registered().goes)
    model.on_remap()


def test_where_one_of_them_refuses_those_before_it_are_told(model: VirtualMemoryPool) -> None:
    tensor = numbered(model, 1000)
    told: list[str] = []

    def refuse() -> None:
        told.append("refuses")
        raise ValueError("no")

    model.on_remap(lambda: told.append("first goes"), lambda: told.append("first is back"))
    model.on_remap(refuse, lambda: told.append("refuser is back"))
    model.on_remap(lambda: told.append("third goes"), lambda: told.append("third is back"))
    with pytest.raises(ValueError, match="no"):
        model.sleep()
    assert told == ["first goes", "refuses", "first is back"]
    assert not model.is_asleep
    assert is_numbered(tensor)


def test_they_are_told_whoever_holds_the_models_object(shared: torch_vmm.SharedMemoryPool, device: str) -> None:
    told = told_by(shared.register_model("a"))
    torch_vmm.current_pool(device).on_remap(lambda: told.append("default goes"))
    tensor = numbered(shared["a"], 1000)
    gc.collect()
    shared["a"].sleep()
    gc.collect()
    assert told == ["goes"]
    shared["a"].wake()
    assert told == ["goes", "is back"]
    assert is_numbered(tensor)
    del tensor
    shared.unregister_model("a")
    shared.register_model("a").sleep()
    assert told == ["goes", "is back"]  # another model


def test_what_goes_while_the_rest_comes_back_is_told_of(
    model: VirtualMemoryPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = tagged(model, "a", "w")
    told = told_by(model)
    model.sleep({"a": "host"})
    begin = Held(_C.sleep)
    with monkeypatch.context() as within:
        within.setattr(_C, "sleep", begin)
        going, went = beside(lambda: model.sleep({"w": "host"}))
        assert begin.inside.wait(60)  # it has seen that the model is asleep, and told nobody
        coming, came = beside(lambda: model.wake("a"))
        coming.join(0.3)
        assert told == ["goes"], "it is to go again"
        begin.may_go_on.set()
        going.join(60)
        coming.join(60)
    assert [type(each) for each in went + came] == [sleeping.Transfer] * 2
    assert list(model.asleep) == ["w"]
    assert told == ["goes"]
    model.wake()
    assert told == ["goes", "is back"]
    assert all(tensor.sum() == 1000 for tensor in held)


def test_what_was_stopped_while_the_rest_came_back_is_told_of(
    model: VirtualMemoryPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = tagged(model, "a", "w")
    told = told_by(model)
    model.sleep({"a": "host"})

    def refuse(*_: object) -> None:
        raise InterruptedError("stopped")

    stopped = Held(refuse)
    going, went = beside(lambda: model.sleep({"w": "host"}, progress=stopped))
    assert stopped.inside.wait(60)
    model.wake("a")
    assert told == ["goes"], "w is on its way"
    stopped.may_go_on.set()
    going.join(60)
    assert [type(each) for each in went] == [InterruptedError]
    assert not model.is_asleep
    assert told == ["goes", "is back"]
    assert all(tensor.sum() == 1000 for tensor in held)


def test_two_threads_that_take_it_away_tell_once(model: VirtualMemoryPool) -> None:
    held = tagged(model, "a", "w")
    told: list[str] = []
    first = Held(lambda: told.append("goes"))

    def refuse_again() -> None:
        if told.count("goes") > 1:
            raise ValueError("no")

    model.on_remap(first, lambda: told.append("is back"))
    model.on_remap(refuse_again)
    one, by_one = beside(lambda: model.sleep({"a": "host"}))
    assert first.inside.wait(60)
    with pytest.raises(torch_vmm.VmmError, match="model 'llama' is on its way to sleep or back: wait"):
        model.sleep({"w": "host"})  # and waits for no function, which may wait for this thread
    assert (told, model.is_asleep) == ([], False)
    beside(lambda: model.on_remap(lambda: told.append("later")))[0].join(60)  # waits for nobody
    first.may_go_on.set()
    one.join(60)
    assert [type(each) for each in by_one] == [sleeping.Transfer]
    model.sleep({"w": "host"})
    assert sorted(model.asleep) == ["a", "w"]
    assert told == ["goes", "later"], "what was given too late for the first is told of the second"
    model.wake()
    assert told == ["goes", "later", "is back"]
    assert all(tensor.sum() == 1000 for tensor in held)


def test_where_one_refuses_another_threads_sleep_asks_again(model: VirtualMemoryPool) -> None:
    numbered(model, 1000)
    told: list[str] = []

    def refuse_once() -> None:
        told.append("asked")
        if len(told) == 1:
            raise ValueError("no")

    asked = Held(refuse_once)
    model.on_remap(asked, lambda: told.append("is back"))
    one, by_one = beside(model.sleep)
    assert asked.inside.wait(60)
    with pytest.raises(torch_vmm.VmmError, match="is on its way to sleep or back: wait"):
        model.sleep()
    asked.may_go_on.set()
    one.join(60)
    assert [type(each) for each in by_one] == [ValueError]
    model.sleep()
    assert told == ["asked", "asked"]
    assert model.is_asleep


def test_nothing_goes_while_it_is_told_that_it_is_back(model: VirtualMemoryPool) -> None:
    tensor = numbered(model, 1000)
    told: list[str] = []
    back = Held(lambda: told.append("is back"))
    model.on_remap(lambda: told.append("goes"), back)
    model.sleep()
    handle = model.wake(blocking=False)
    assert back.inside.wait(60)
    with pytest.raises(torch_vmm.VmmError, match="model 'llama' is on its way to sleep or back: wait"):
        model.sleep()
    assert not model.is_asleep
    back.may_go_on.set()
    handle.wait()
    assert told == ["goes", "is back"]
    model.on_remap(after=lambda: model.sleep() if told.count("goes") < 3 else None)  # the same thread may
    model.sleep()
    model.wake()
    assert told == ["goes", "is back", "goes", "is back", "goes"]
    model.wake()
    assert told[5:] == ["is back"]
    assert is_numbered(tensor)


def test_two_models_whose_functions_take_each_other_away_do_not_wait_for_ever(
    limited: SharedMemoryPool, model: VirtualMemoryPool
) -> None:
    other = limited.register_model("other")
    tensors = [numbered(model, 1000), numbered(other, 1000)]
    both = threading.Barrier(2, timeout=60)
    errors: list[str] = []

    def take(away: VirtualMemoryPool) -> None:
        both.wait()
        try:
            away.sleep()
        except torch_vmm.VmmError as error:
            errors.append(str(error))
        both.wait()

    model.on_remap(lambda: take(other))
    other.on_remap(lambda: take(model))
    threads = [beside(each.sleep)[0] for each in (model, other)]
    for thread in threads:
        thread.join(60)
    assert sorted(errors) == [
        f"model {name!r} is on its way to sleep or back: wait() for that first" for name in ("llama", "other")
    ]
    for each in (model, other):
        assert each.is_asleep
        each.wake()
    assert all(map(is_numbered, tensors))


def test_a_closed_pool_takes_none(model: VirtualMemoryPool) -> None:
    model.close()
    with pytest.raises(torch_vmm.InvalidArgumentError, match="'llama' is closed"):
        model.on_remap(print)


def test_where_nothing_goes_nobody_is_told(model: VirtualMemoryPool) -> None:
    tensor = numbered(model, 1000)
    told = told_by(model)
    assert model.sleep({}).progress == (0, 0)
    assert told == []
    assert is_numbered(tensor)


def test_what_is_given_while_a_part_sleeps_is_told_that_the_rest_goes(model: VirtualMemoryPool) -> None:
    kept = numbered(model, 1000)
    with model.tag("cache"):
        cache = torch.ones(1000, device=model.device)
    model.sleep({"cache": "discard"})
    told = told_by(model)
    model.sleep()
    model.sleep()  # nothing goes
    assert told == ["goes"]
    model.wake()
    assert told == ["goes", "is back"]
    assert is_numbered(kept)
    del cache


def test_a_function_may_wait_for_a_wake_that_has_begun(model: VirtualMemoryPool) -> None:
    held = tagged(model, "a", "w")
    told = told_by(model)
    model.sleep({"a": "host"})
    comes = Held()
    coming = model.wake("a", blocking=False, progress=lambda *_: comes() and None)
    assert comes.inside.wait(60)

    def wait() -> None:
        told.append("waits")
        comes.may_go_on.set()
        coming.wait()
        told.append("has waited")

    model.on_remap(wait, lambda: told.append("is back for it"))
    going, went = beside(lambda: model.sleep({"w": "host"}))
    going.join(60)
    assert [type(each) for each in went] == [sleeping.Transfer]
    assert told == ["goes", "waits", "has waited"], "the first is still told that it goes"
    assert list(model.asleep) == ["w"]
    model.wake()
    assert told[3:] == ["is back", "is back for it"]
    assert all(tensor.sum() == 1000 for tensor in held)


def test_where_it_refuses_after_such_a_wake_those_before_it_are_told(model: VirtualMemoryPool) -> None:
    held = tagged(model, "a", "w")
    told = told_by(model)
    model.sleep({"a": "host"})

    def refuse() -> None:
        coming, came = beside(lambda: model.wake("a"))
        coming.join(60)
        assert [type(each) for each in came] == [sleeping.Transfer], "a thread of its own may"
        assert told == ["goes", "2 goes"]
        raise ValueError("not now")

    model.on_remap(lambda: told.append("2 goes"), lambda: told.append("2 is back"))
    model.on_remap(refuse, lambda: told.append("3 is back"))
    with pytest.raises(ValueError, match="not now"):
        model.sleep({"w": "host"})
    assert not model.is_asleep
    assert told == ["goes", "2 goes", "2 is back", "is back"]
    assert all(tensor.sum() == 1000 for tensor in held)


def test_another_threads_wake_waits_for_no_function(model: VirtualMemoryPool) -> None:
    held = tagged(model, "a", "w")
    model.sleep({"a": "host"})
    slow = Held()
    model.on_remap(slow)
    going, went = beside(lambda: model.sleep({"w": "host"}))
    assert slow.inside.wait(60)
    model.wake("a")
    assert not model.is_asleep
    slow.may_go_on.set()
    going.join(60)
    assert [type(each) for each in went] == [sleeping.Transfer]
    assert list(model.asleep) == ["w"]
    model.wake()
    assert all(tensor.sum() == 1000 for tensor in held)


def test_a_function_of_on_remap_does_not_wake_its_own_model(model: VirtualMemoryPool) -> None:
    kept = tagged(model, "a", "w")
    told = []
    model.sleep({"w": "host"})
    model.on_remap(lambda: told.append("goes"), lambda: told.append("is back"))
    model.on_remap(model.wake)
    with pytest.raises(torch_vmm.VmmError, match="must not wake it"):
        model.sleep()
    assert told == ["goes", "is back"]
    assert set(model.asleep) == {"w"}
    model.on_remap()
    model.wake()
    assert all(tensor.sum() == 1000 for tensor in kept)
