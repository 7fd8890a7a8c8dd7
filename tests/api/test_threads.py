"""Models on several threads, and a `with` that is held across a suspension or closed elsewhere."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

import torch_vmm
from tests.helpers import MIB, holds, stamp

Pool = torch_vmm.VirtualMemoryPool
Shared = torch_vmm.SharedMemoryPool


# -- Held across a suspension ------------------------------------------------------------------------------------------


def hold(pool: Pool) -> Iterator[None]:
    with pool:
        yield


def test_a_with_that_is_closed_out_of_order_is_noticed(llama: Pool, qwen: Pool, here: Callable[[], str]) -> None:
    first, second = hold(llama), hold(qwen)
    next(first)
    next(second)
    assert here() == "qwen"
    with pytest.raises(torch_vmm.VmmError) as raised:
        next(first)
    for part in ("llama", "qwen", "yield", "use_model"):  # both models, the cause, the cure
        assert part in str(raised.value)
    assert here() == "qwen"  # the other one stays
    with pytest.raises(StopIteration):
        next(second)
    assert here() == "default"
    with llama:
        assert here() == "llama"


def test_tasks_that_hold_a_with_across_an_await_are_noticed(llama: Pool, qwen: Pool, here: Callable[[], str]) -> None:
    async def work(pool: Pool, turns: int) -> None:
        with pool:
            for _ in range(turns):
                await asyncio.sleep(0)

    async def main() -> list[object]:
        return await asyncio.gather(work(llama, 2), work(qwen, 4), return_exceptions=True)

    results = asyncio.run(main())
    assert isinstance(results[0], torch_vmm.VmmError)
    assert "llama" in str(results[0])
    assert "qwen" in str(results[0])
    assert results[1] is None
    assert here() == "default"


def test_a_with_that_is_closed_on_another_thread_is_noticed(llama: Pool, here: Callable[[], str]) -> None:
    generator = hold(llama)
    next(generator)
    errors: list[Exception] = []

    def close() -> None:
        try:
            next(generator)
        except torch_vmm.VmmError as error:
            errors.append(error)

    thread = threading.Thread(target=close)
    thread.start()
    thread.join()
    assert len(errors) == 1
    assert "thread" in str(errors[0])
    assert "llama" in str(errors[0])
    assert here() == "default"  # it was left all the same


# -- Threads -----------------------------------------------------------------------------------------------------------


def in_thread(function: Callable[[], object]) -> object:
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_a_thread_starts_in_the_default_pool_and_can_enter_a_model(
    llama: Pool, qwen: Pool, here: Callable[[], str]
) -> None:
    def work() -> list[str]:
        seen = [here()]
        with qwen:
            seen.append(here())
        return [*seen, here()]

    with llama:
        assert in_thread(work) == ["default", "qwen", "default"]
        assert here() == "llama"


def test_threads_enter_one_pool_at_once(llama: Pool, qwen: Pool, device: str) -> None:
    wrong: list[str] = []

    def work(thread: int) -> None:
        for step in range(50):
            outer, inner = (llama, qwen) if (thread + step) % 2 else (qwen, llama)
            with outer:
                first = torch.empty(100, device=device)
                with inner:
                    second = torch.empty(100, device=device)
                third = torch.empty(100, device=device)
            found = [torch_vmm.pool_of(tensor) for tensor in (first, second, third)]
            if found != [outer, inner, outer]:
                wrong.append(f"thread {thread}, step {step}: {found}")

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert (llama.memory_allocated(), qwen.memory_allocated()) == (0, 0)


def test_models_are_found_while_others_come_and_go(
    llama: Pool, device: str, make_shared: Callable[..., Shared]
) -> None:
    errors: list[BaseException] = []
    done = threading.Event()

    def come_and_go() -> None:
        while not done.is_set():
            torch_vmm.SharedMemoryPool("4MiB", device=device).register_model("passing", "4MiB")

    def find() -> None:
        try:
            for _ in range(200):
                with torch_vmm.use_model("llama") as pool:
                    assert pool is llama
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    threads = [threading.Thread(target=work) for work in (come_and_go, find, find)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_leaving_what_was_not_entered(llama: Pool) -> None:
    with pytest.raises(torch_vmm.VmmError, match="more often"):
        llama.__exit__(None, None, None)


def test_a_thread_may_free_what_another_made(llama: Pool, device: str) -> None:
    with llama:
        tensors = [stamp(torch.empty(MIB, dtype=torch.uint8, device=device), seed) for seed in range(10)]

    def work() -> bool:
        good = all(holds(tensor, seed) for seed, tensor in enumerate(tensors))
        tensors.clear()
        return good

    assert in_thread(work) is True
    assert llama.memory_allocated() == 0
