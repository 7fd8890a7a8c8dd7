"""SharedMemoryPool.on_pressure: when a user's own function is called, and for whom."""

from __future__ import annotations

import functools
import gc
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import torch

import torch_vmm
from tests.api.evicting import Evicting
from tests.helpers import MIB, tensor_in
from torch_vmm import SharedMemoryPool, VirtualMemoryPool

MakeShared = Callable[..., SharedMemoryPool]


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


def test_what_would_only_make_a_coroutine_is_refused(evicting: Evicting) -> None:
    async def later(requested: int, pool: VirtualMemoryPool) -> bool:
        return True

    def bit_by_bit(requested: int, pool: VirtualMemoryPool) -> Iterator[bool]:
        yield True

    async def both(requested: int, pool: VirtualMemoryPool) -> AsyncIterator[bool]:
        yield True

    class Called:
        async def __call__(self, requested: int, pool: VirtualMemoryPool) -> bool:
            return True

    for function in (later, bit_by_bit, both, functools.partial(later), Called(), Called().__call__):
        with pytest.raises(torch_vmm.InvalidArgumentError, match=r"on_pressure: .* only makes .* plain function"):
            evicting.shared.on_pressure(function)  # type: ignore[type-var]
    with pytest.raises(torch.OutOfMemoryError):
        tensor_in(evicting.second, 16 * MIB)


def test_ctrl_c_within_it_comes_to_the_main_thread(evicting: Evicting, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda told: shown.append(told.exc_type))

    def interrupted(requested: int, pool: VirtualMemoryPool) -> bool:
        raise KeyboardInterrupt

    def ask() -> None:
        with pytest.raises(torch_vmm.OutOfMemoryError):
            evicting.second.allocate(0, 16 * MIB)
        for _ in range(1000):
            pass  # Python looks for signals

    def make() -> None:
        try:
            with evicting.second:
                torch.empty(16 * MIB, dtype=torch.uint8, device=evicting.second.device)
        except torch.OutOfMemoryError:
            for _ in range(1000):
                pass

    evicting.shared.on_pressure(interrupted)
    with pytest.raises(KeyboardInterrupt):
        ask()
    with pytest.raises(KeyboardInterrupt):
        make()
    assert torch_vmm.current_pool(evicting.second.device).name == "default", "the model was left"
    assert shown == [KeyboardInterrupt] * 2
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


@pytest.mark.parametrize("function", [1, "evict", object(), lambda: True, lambda _requested: True])
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


def test_a_closed_pool_holds_no_function(make_shared: MakeShared) -> None:
    shared = make_shared("64MiB")

    def evict(requested: int, pool: VirtualMemoryPool) -> bool:
        return False

    shared.on_pressure(evict)
    alive = weakref.ref(evict)
    del evict
    shared.close()
    gc.collect()
    assert alive() is None
