"""SharedMemoryPool.on_pressure: others beside it, on threads of their own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import pytest
import torch

import torch_vmm
from tests.api.evicting import Evicting, quiet
from tests.helpers import MIB, tensor_in
from torch_vmm import SharedMemoryPool, VirtualMemoryPool

MakeShared = Callable[..., SharedMemoryPool]


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
