"""SharedMemoryPool.on_pressure: what a user's own function does for a request that finds no memory."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable

import pytest
import torch

import torch_vmm
from tests.helpers import MIB, tensor_in
from torch_vmm import SharedMemoryPool, VirtualMemoryPool

MakeShared = Callable[..., SharedMemoryPool]


class Evicting:
    """Two models under 64 MiB; the first one's tensors may be dropped, one by one."""

    def __init__(self, shared: SharedMemoryPool) -> None:
        self.shared = shared
        self.first, self.second = shared.register_model("first"), shared.register_model("second")
        self.kept = [tensor_in(self.first, 16 * MIB) for _ in range(4)]
        self.calls: list[tuple[int, VirtualMemoryPool]] = []

    def evict(self, requested: int, pool: VirtualMemoryPool) -> bool:
        self.calls.append((requested, pool))
        if self.kept:
            self.kept.pop()
            return True
        return False


@pytest.fixture
def evicting(make_shared: MakeShared) -> Evicting:
    return Evicting(make_shared("64MiB"))


def test_it_is_told_who_asks_for_how_much_and_called_while_it_has_more(evicting: Evicting) -> None:
    assert evicting.shared.on_pressure(evicting.evict) == evicting.evict
    taken = tensor_in(evicting.second, 40 * MIB)
    assert [(requested, pool is evicting.second) for requested, pool in evicting.calls] == [(40 * MIB, True)] * 3
    assert len(evicting.kept) == 1
    del taken
    evicting.calls.clear()
    taken = tensor_in(evicting.second, 40 * MIB)
    assert evicting.calls == []  # there is room
    del taken


def test_as_a_decorator(evicting: Evicting) -> None:
    @evicting.shared.on_pressure
    def evict(requested: int, pool: VirtualMemoryPool) -> bool:
        return evicting.evict(requested, pool)

    del evict
    taken = tensor_in(evicting.second, 16 * MIB)
    assert len(evicting.calls) == 1
    del taken


def test_a_request_that_it_cannot_help_fails_as_ever(evicting: Evicting) -> None:
    evicting.shared.on_pressure(lambda requested, pool: False)
    with pytest.raises(torch.OutOfMemoryError, match="'first' 64 MiB in use"):
        tensor_in(evicting.second, 16 * MIB)
    assert len(evicting.kept) == 4


def test_one_that_always_says_that_there_is_more_is_not_called_for_ever(evicting: Evicting) -> None:
    calls = []
    evicting.shared.on_pressure(lambda requested, pool: calls.append(requested) is None)
    with pytest.raises(torch.OutOfMemoryError):
        tensor_in(evicting.second, 16 * MIB)
    assert len(calls) == 64


def test_what_it_raises_is_shown_and_the_request_goes_on(evicting: Evicting, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[BaseException | None] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda told: shown.append(told.exc_value))

    def fail(requested: int, pool: VirtualMemoryPool) -> bool:
        raise RuntimeError("no idea what to evict")

    evicting.shared.on_pressure(fail)
    with pytest.raises(torch.OutOfMemoryError):
        tensor_in(evicting.second, 16 * MIB)
    assert [str(each) for each in shown] == ["no idea what to evict"]


def test_ctrl_c_within_it_comes_to_the_main_thread(evicting: Evicting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda told: None)

    def interrupted(requested: int, pool: VirtualMemoryPool) -> bool:
        raise KeyboardInterrupt

    # Pages, as it may come within `with` too, which would never be left then.
    def ask() -> None:
        with pytest.raises(torch_vmm.OutOfMemoryError):
            evicting.second.allocate(0, 16 * MIB)
        for _ in range(1000):
            pass  # Python looks for signals

    evicting.shared.on_pressure(interrupted)
    with pytest.raises(KeyboardInterrupt):
        ask()
    assert evicting.first.memory_allocated() == 64 * MIB


def test_what_it_allocates_itself_does_not_call_it_again(evicting: Evicting) -> None:
    failures: list[str] = []

    def greedy(requested: int, pool: VirtualMemoryPool) -> bool:
        try:
            tensor_in(pool, 16 * MIB)
        except torch.OutOfMemoryError as error:
            failures.append(str(error))
        scratch = tensor_in(pool, 16 * MIB) if not evicting.kept else None
        del scratch
        return evicting.evict(requested, pool)

    evicting.shared.on_pressure(greedy)
    taken = tensor_in(evicting.second, 16 * MIB)
    assert len(failures) == 1
    assert len(evicting.calls) == 1
    del taken


@pytest.mark.parametrize("how", ["trim", "limit", "unregister", "empty_cache"])
def test_it_may_do_what_anybody_may(evicting: Evicting, how: str) -> None:
    shared = evicting.shared

    def help_out(requested: int, pool: VirtualMemoryPool) -> bool:
        if how == "limit":
            shared.physical_limit = "96MiB"
            return True
        evicting.kept.clear()
        if how == "trim":
            evicting.first.trim()
        elif how == "unregister":
            shared.unregister_model("first")
        else:
            evicting.first.empty_cache()
        return True

    shared.on_pressure(help_out)
    assert tensor_in(evicting.second, 32 * MIB).numel() == 32 * MIB


def test_a_floor_may_be_lowered_in_it(make_shared: MakeShared) -> None:
    shared = make_shared("64MiB")
    first, second = shared.register_model("first"), shared.register_model("second", floor="64MiB")

    def lower(requested: int, pool: VirtualMemoryPool) -> bool:
        second.floor = "16MiB"
        return True

    shared.on_pressure(lower)
    assert tensor_in(first, 48 * MIB).numel() == 48 * MIB


def test_explicit_pages_are_requests_too(evicting: Evicting) -> None:
    evicting.shared.on_pressure(evicting.evict)
    evicting.second.allocate(0, 32 * MIB)
    assert len(evicting.calls) == 2


def test_a_tagged_part_and_the_other_pool(evicting: Evicting) -> None:
    evicting.shared.on_pressure(evicting.evict)
    with evicting.second, evicting.second.tag("kv"):
        taken = torch.empty(16 * MIB, dtype=torch.uint8, device=evicting.second.device)
    assert [pool is evicting.second for _, pool in evicting.calls] == [True]
    del taken


def test_the_last_one_set_is_called_and_none_after_none(evicting: Evicting, make_shared: MakeShared) -> None:
    other = Evicting(make_shared("64MiB"))
    other.shared.on_pressure(other.evict)
    evicting.shared.on_pressure(lambda requested, pool: pytest.fail("replaced"))
    evicting.shared.on_pressure(evicting.evict)
    taken = tensor_in(evicting.second, 16 * MIB)
    assert (len(evicting.calls), len(other.calls)) == (1, 0)
    assert evicting.shared.on_pressure(None) is None
    with pytest.raises(torch.OutOfMemoryError):
        tensor_in(evicting.second, 16 * MIB)
    assert len(evicting.calls) == 1
    del taken


@pytest.mark.parametrize("function", [1, "evict", object()])
def test_what_cannot_be_called_is_refused(evicting: Evicting, function: object) -> None:
    with pytest.raises(torch_vmm.InvalidArgumentError, match="on_pressure"):
        evicting.shared.on_pressure(function)  # type: ignore[arg-type]


@pytest.mark.parametrize("zeros", [True, False])
def test_rows_of_the_very_tensor_that_grows_may_be_given_up(make_shared: MakeShared, zeros: bool) -> None:
    shared = make_shared("32MiB")
    model = shared.register_model("cache")
    with model:
        cache = torch_vmm.sparse((64, MIB), dtype=torch.uint8, device=model.device, zeros=zeros)
    cache.commit(slice(0, 24))
    seen: list[int] = []

    def evict(requested: int, pool: VirtualMemoryPool) -> bool:
        if zeros:
            seen.append(int(cache[40].cpu().sum()))  # not committed: it reads as zero
        cache.decommit(slice(0, 8))
        return True

    shared.on_pressure(evict)
    cache.commit(slice(32, 48))
    assert cache.is_committed(slice(32, 48))
    assert cache.is_committed(slice(8, 24))
    assert not cache.is_committed(slice(0, 8))
    assert seen in ([], [0])


def test_a_closed_pool_calls_nobody(evicting: Evicting) -> None:
    evicting.kept.clear()
    evicting.shared.close()
    with pytest.raises(torch_vmm.InvalidArgumentError, match="closed"):
        evicting.shared.on_pressure(evicting.evict)


def test_a_function_that_knows_the_pool_keeps_neither_alive(device: str) -> None:
    def make() -> weakref.ref[SharedMemoryPool]:
        shared = SharedMemoryPool("64MiB", device=device)

        def relieve(requested: int, pool: VirtualMemoryPool) -> bool:
            return len(shared) == 0

        shared.on_pressure(relieve)
        return weakref.ref(shared)

    gone = make()
    gc.collect()
    assert gone() is None


def test_several_threads_under_pressure_all_end(make_shared: MakeShared) -> None:
    shared = make_shared("64MiB")
    cache, models = shared.register_model("cache"), [shared.register_model(f"model {k}") for k in range(4)]
    kept = [tensor_in(cache, 2 * MIB) for _ in range(24)]
    lock = threading.Lock()

    def evict(requested: int, pool: VirtualMemoryPool) -> bool:
        time.sleep(0.001)  # others go on meanwhile
        with lock:
            return bool(kept) and kept.pop() is not None

    shared.on_pressure(evict)
    failures: list[BaseException] = []

    def serve(model: VirtualMemoryPool) -> None:
        try:
            for _ in range(50):
                tensors = [tensor_in(model, 2 * MIB) for _ in range(6)]  # 48 MiB of all four, and the cache gives all
                assert all(tensor.numel() == 2 * MIB for tensor in tensors)
                tensors.clear()  # before the next six
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=serve, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert shared.global_stats().physical_usage <= 64 * MIB


# -- What it may do ----------------------------------------------------------------------------------------------------


def quiet(monkeypatch: pytest.MonkeyPatch) -> list[BaseException | None]:
    """What goes to sys.unraisablehook, which says nothing then."""
    shown: list[BaseException | None] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda told: shown.append(told.exc_value))
    return shown


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


# -- Time and threads --------------------------------------------------------------------------------------------------


def test_others_go_on_while_it_takes_long(make_shared: MakeShared) -> None:
    shared = make_shared("64MiB")
    cache, asking, busy = (shared.register_model(name) for name in ("cache", "asking", "busy"))
    kept = [tensor_in(cache, 48 * MIB)]
    inside, go_on = threading.Event(), threading.Event()

    def slow(requested: int, pool: VirtualMemoryPool) -> bool:
        inside.set()
        assert go_on.wait(60)
        kept.clear()
        return True

    shared.on_pressure(slow)
    taken: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: taken.append(tensor_in(asking, 48 * MIB)))
    thread.start()
    try:
        assert inside.wait(60)
        for _ in range(20):  # new memory, memory that it has, and what needs no model
            first, second = tensor_in(busy, 4 * MIB), tensor_in(busy, 8 * MIB)
            del first, second
            busy.trim()
        assert shared.global_stats().num_models == 3
        assert "asking" in str(shared)
        sleeping = tensor_in(busy, 4 * MIB)
        busy.sleep()
        busy.wake()
        del sleeping
    finally:
        go_on.set()
        thread.join(60)
    assert taken[0].numel() == 48 * MIB


def test_it_runs_on_the_thread_that_asks_and_in_its_model(evicting: Evicting) -> None:
    seen: list[tuple[int, VirtualMemoryPool]] = []

    def evict(requested: int, pool: VirtualMemoryPool) -> bool:
        seen.append((threading.get_ident(), torch_vmm.current_pool(pool.device)))
        return evicting.evict(requested, pool)

    evicting.shared.on_pressure(evict)
    asked: list[int] = []

    def ask() -> None:
        asked.append(threading.get_ident())
        tensor_in(evicting.second, 16 * MIB)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(60)
    assert seen == [(asked[0], evicting.second)]


def test_backward_is_under_pressure_too(evicting: Evicting) -> None:
    shared, second = evicting.shared, evicting.second
    shared.physical_limit = "128MiB"  # type: ignore[assignment]
    with second:
        weight = torch.ones(3 * MIB, device=second.device, requires_grad=True)
        loss = weight.square().sum()
    second.trim()
    shared.physical_limit = shared.global_stats().physical_usage
    shared.on_pressure(evicting.evict)
    with second:
        loss.backward()  # type: ignore[no-untyped-call]
    assert 1 <= len(evicting.calls) <= 4
    assert all(pool is second for _, pool in evicting.calls)
    assert weight.grad is not None
    assert bool((weight.grad == 2).all())


def all_end(work: list[Callable[[], object]]) -> None:
    """Runs each on a thread; all have to end, and well."""
    failures: list[BaseException] = []

    def run(each: Callable[[], object]) -> None:
        try:
            each()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(each,), daemon=True) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []


def test_several_threads_that_put_each_others_models_to_sleep(make_shared: MakeShared) -> None:
    shared = make_shared("64MiB")
    models = [shared.register_model(f"model {k}") for k in range(4)]
    locks = {model.name: threading.Lock() for model in models}
    tensors = {}
    for k, model in enumerate(models):
        tensors[model.name] = tensor_in(model, 24 * MIB).fill_(k)
        model.sleep()

    def doze(requested: int, pool: VirtualMemoryPool) -> bool:
        for model in models:
            if locks[model.name].acquire(blocking=False):
                try:
                    if not model.is_asleep:
                        return model.sleep().done
                finally:
                    locks[model.name].release()
        return False

    shared.on_pressure(doze)
    room = threading.Semaphore(2)  # so many are in use at once, and fit

    def use(seed: int) -> None:
        for turn in range(12):
            k = (seed + turn * (seed + 1)) % 4
            model = models[k]
            with room, locks[model.name]:
                model.wake()
                assert bool((tensors[model.name] == k).all())
                assert shared.global_stats().physical_usage <= 64 * MIB

    all_end([lambda seed=seed: use(seed) for seed in range(3)])  # type: ignore[misc]


def test_threads_whose_function_raises_for_some_of_them(
    make_shared: MakeShared, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = make_shared("64MiB")
    cache, models = shared.register_model("cache"), [shared.register_model(f"model {k}") for k in range(4)]
    kept = [tensor_in(cache, 2 * MIB) for _ in range(32)]
    shown, lock, calls = quiet(monkeypatch), threading.Lock(), []

    def evict(requested: int, pool: VirtualMemoryPool) -> bool:
        with lock:
            calls.append(requested)
            if len(calls) % 5 == 0:
                raise RuntimeError("not now")
            return bool(kept) and kept.pop() is not None

    shared.on_pressure(evict)
    refused: list[int] = []

    def serve(model: VirtualMemoryPool) -> None:
        for _ in range(20):
            with contextlib.suppress(torch.OutOfMemoryError):
                refused.append(1)
                assert tensor_in(model, 8 * MIB).numel() == 8 * MIB
                refused.pop()

    all_end([lambda model=model: serve(model) for model in models])  # type: ignore[misc]
    assert len(shown) == len(calls) // 5
    assert len(refused) <= len(shown)
    assert shared.global_stats().physical_usage <= 64 * MIB


def test_it_is_replaced_while_threads_are_under_pressure(make_shared: MakeShared) -> None:
    shared = make_shared("32MiB")
    models = [shared.register_model(f"model {k}") for k in range(2)]
    cache = shared.register_model("cache")
    kept: list[torch.Tensor] = [tensor_in(cache, 8 * MIB)]
    ended = threading.Event()

    def make() -> Callable[[int, VirtualMemoryPool], bool]:
        return lambda requested, pool: bool(kept) and kept.pop() is not None

    def replace() -> None:
        while not ended.is_set():
            shared.on_pressure(make())
            shared.on_pressure(None)
            shared.on_pressure(make())

    def ask(model: VirtualMemoryPool) -> None:
        try:
            for _ in range(200):
                tensor_in(model, 12 * MIB)
        except torch.OutOfMemoryError:
            pass  # none was set at that moment
        finally:
            ended.set()

    all_end([replace, *(lambda model=model: ask(model) for model in models)])  # type: ignore[misc]
