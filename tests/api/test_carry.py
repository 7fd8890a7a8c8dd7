"""carry: a function that takes its model along to another thread, task or executor."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import gc
import threading
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import torch

import torch_vmm

Pool = torch_vmm.VirtualMemoryPool
Shared = torch_vmm.SharedMemoryPool
Here = Callable[[], str]


def in_thread(function: Callable[[], object]) -> object:
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_it_runs_in_the_model_that_was_open(llama: Pool, here: Here) -> None:
    with llama:
        work = torch_vmm.carry(here)
    assert in_thread(here) == "default"
    assert in_thread(work) == "llama"
    assert work() == "llama"  # on this thread, too, after the `with`
    assert here() == "default"


def test_what_is_open_where_it_is_called_is_closed_meanwhile(llama: Pool, qwen: Pool, here: Here) -> None:
    outside = torch_vmm.carry(here)
    with llama:
        inside = torch_vmm.carry(here)
    with qwen:
        assert [inside(), here(), outside(), here()] == ["llama", "qwen", "default", "qwen"]


def test_models_entered_inside_win(llama: Pool, qwen: Pool, here: Here) -> None:
    def work() -> list[str]:
        seen = [here()]
        with qwen:
            seen.append(here())
        return [*seen, here()]

    with llama:
        carried = torch_vmm.carry(work)
    assert carried() == ["llama", "qwen", "llama"]


def test_a_carried_function_carries_what_it_was_given(llama: Pool, qwen: Pool, here: Here) -> None:
    with llama:
        outer = torch_vmm.carry(lambda: in_thread(torch_vmm.carry(here)))
    with qwen:
        assert outer() == "llama"


def test_the_innermost_model_is_carried(llama: Pool, qwen: Pool, here: Here) -> None:
    with llama, qwen:
        work = torch_vmm.carry(here)
    assert work() == "qwen"


def test_arguments_results_and_errors_pass_through(llama: Pool) -> None:
    def work(first: int, *, second: int) -> float:
        """Divides."""
        return first / second

    with llama:
        carried = torch_vmm.carry(work)
    assert carried(1, second=2) == 0.5
    assert (carried.__name__, carried.__doc__) == ("work", "Divides.")
    with pytest.raises(ZeroDivisionError):
        carried(1, second=0)
    with llama:
        partial = torch_vmm.carry(functools.partial(work, 6))
    assert partial(second=3) == 2


def test_a_module_and_a_class_can_be_carried(llama: Pool, device: str) -> None:
    with llama:
        make = torch_vmm.carry(torch.nn.Linear)
    net = in_thread(lambda: make(8, 8, device=device))
    assert isinstance(net, torch.nn.Linear)
    assert torch_vmm.pool_of(net.weight) is llama
    with llama:
        forward = torch_vmm.carry(net)
    out = in_thread(lambda: forward(torch.ones(2, 8, device=device)))
    assert isinstance(out, torch.Tensor)
    assert torch_vmm.pool_of(out) is llama


def test_backward_on_another_thread_is_in_the_model(llama: Pool, device: str) -> None:
    value = torch.ones(100, device=device, requires_grad=True)
    with llama:
        work = torch_vmm.carry(lambda: value.square().sum().backward())
    in_thread(work)
    assert value.grad is not None
    assert torch_vmm.pool_of(value.grad) is llama


def test_what_cannot_be_called() -> None:
    with pytest.raises(torch_vmm.InvalidArgumentError):
        torch_vmm.carry(3)  # type: ignore[type-var]


def test_a_pool_that_was_closed_meanwhile(roomy: Shared, llama: Pool, here: Here) -> None:
    with llama:
        work = torch_vmm.carry(here)
    roomy.unregister_model("llama")
    with pytest.raises(torch_vmm.InvalidArgumentError, match="'llama' is closed"):
        work()
    assert here() == "default"


def test_it_keeps_its_pool(device: str, here: Here) -> None:
    pool = Pool("64MiB", device=device, name="kept")
    with pool:
        work = torch_vmm.carry(here)
    del pool
    gc.collect()
    assert work() == "kept"


def test_it_can_be_called_again_and_at_once_on_many_threads(llama: Pool, qwen: Pool, here: Here) -> None:
    def down(depth: int) -> list[str]:
        return [here()] + (carried(depth - 1) if depth else [])

    with llama:
        carried = torch_vmm.carry(down)
    barrier = threading.Barrier(6)
    seen: list[list[str]] = []

    def work() -> None:
        with qwen:
            barrier.wait()
            for _ in range(20):
                seen.append(carried(3))
                assert here() == "qwen"

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [["llama"] * 4] * 120


# -- asyncio and executors, as docs/guide.md shows them ----------------------------------------------------------------


def test_to_thread(llama: Pool, qwen: Pool, here: Here) -> None:
    async def serve() -> list[str]:
        # Not open across an await: only while the function is carried.
        with llama:
            work = torch_vmm.carry(here)
        bare, carried = await asyncio.gather(asyncio.to_thread(here), asyncio.to_thread(work))
        return [bare, carried, here()]

    assert asyncio.run(serve()) == ["default", "llama", "default"]


def test_a_decorated_coroutine_carries_its_model_to_threads(llama: Pool, qwen: Pool, here: Here) -> None:
    async def serve() -> str:
        return await asyncio.to_thread(torch_vmm.carry(here))

    async def main() -> list[str]:
        return await asyncio.gather(*(torch_vmm.use_model(pool)(serve)() for pool in (llama, qwen, llama)))

    assert asyncio.run(main()) == ["llama", "qwen", "llama"]


def test_executors(llama: Pool, qwen: Pool, here: Here) -> None:
    with concurrent.futures.ThreadPoolExecutor(2) as executor:
        with llama:
            work = torch_vmm.carry(lambda _: here())
        assert list(executor.map(work, range(8))) == ["llama"] * 8
        assert executor.submit(here).result() == "default"  # a worker is left as it was
        assert executor.submit(torch_vmm.use_model("qwen")(here)).result() == "qwen"


def test_an_executor_whose_workers_stay_in_a_model(llama: Pool, here: Here) -> None:
    with concurrent.futures.ThreadPoolExecutor(2, initializer=llama.__enter__) as executor:
        assert set(executor.map(lambda _: here(), range(8))) == {"llama"}
    assert here() == "default"


def test_run_in_executor(llama: Pool, here: Here) -> None:
    async def main() -> str:
        with llama:
            work = torch_vmm.carry(here)
        return await asyncio.get_running_loop().run_in_executor(None, work)

    assert asyncio.run(main()) == "llama"


def test_tasks_and_generators_are_in_the_model_only_while_they_run(llama: Pool, here: Here) -> None:
    async def task() -> str:
        await asyncio.sleep(0)
        return here()

    def steps() -> Iterator[str]:
        for _ in range(2):
            yield here()

    async def more() -> AsyncIterator[str]:
        for _ in range(2):
            yield here()

    with llama:
        carried, stepped, streamed = torch_vmm.carry(task), torch_vmm.carry(steps), torch_vmm.carry(more)

    async def main() -> list[str]:
        first = asyncio.create_task(carried())
        second = asyncio.create_task(task())
        return [await first, await second, here(), *[name async for name in streamed()]]

    assert asyncio.run(main()) == ["llama", "default", "default", "llama", "llama"]
    assert [(name, here()) for name in stepped()] == [("llama", "default")] * 2
