"""use_model as a decorator: of functions, methods, generators and coroutines."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import types
from collections.abc import AsyncIterator, Callable, Generator, Iterator

import pytest

import torch_vmm

Pool = torch_vmm.VirtualMemoryPool
Shared = torch_vmm.SharedMemoryPool


def test_a_function(llama: Pool, here: Callable[[], str]) -> None:
    @torch_vmm.use_model("llama")
    def work(first: int, *, second: int) -> tuple[int, str]:
        """Works."""
        return first + second, here()

    assert work(1, second=2) == (3, "llama")
    assert here() == "default"
    assert (work.__name__, work.__doc__) == ("work", "Works.")


def test_a_function_that_calls_itself(llama: Pool, here: Callable[[], str]) -> None:
    @torch_vmm.use_model(llama)
    def down(depth: int) -> list[str]:
        return [here()] + (down(depth - 1) if depth else [])

    assert down(3) == ["llama"] * 4
    assert here() == "default"


def test_a_function_decorated_before_its_model_exists(roomy: Shared, here: Callable[[], str]) -> None:
    work = torch_vmm.use_model("later")(here)
    with pytest.raises(torch_vmm.ModelNotFoundError):
        work()
    roomy.register_model("later", "64MiB")
    assert work() == "later"


def test_methods(llama: Pool, here: Callable[[], str]) -> None:
    class Server:
        @torch_vmm.use_model("llama")
        def answer(self) -> tuple[object, str]:
            return self, here()

        @torch_vmm.use_model("llama")
        @staticmethod
        def static() -> str:
            return here()

        @torch_vmm.use_model("llama")
        @classmethod
        def of_class(cls) -> tuple[type, str]:
            return cls, here()

    server = Server()
    assert server.answer() == (server, "llama")
    assert server.static() == Server.static() == "llama"
    assert Server.of_class() == (Server, "llama")


def test_a_generator_is_in_the_model_only_while_it_runs(llama: Pool, qwen: Pool, here: Callable[[], str]) -> None:
    @torch_vmm.use_model("llama")
    def steps(count: int) -> Generator[str, str, str]:
        told: list[str] = []
        for _ in range(count):
            word = yield here()
            told.append(word)
        return f"{here()} was told {told}"

    generator = steps(3)
    seen = [next(generator), here()]
    with qwen:
        seen += [generator.send("a"), here()]
    seen += [generator.send("b"), here()]
    assert seen == ["llama", "default", "llama", "qwen", "llama", "default"]
    with pytest.raises(StopIteration) as stop:
        generator.send("c")
    assert stop.value.value == "llama was told ['a', 'b', 'c']"
    assert here() == "default"


def test_a_generator_gets_what_is_thrown_and_what_closes_it(llama: Pool, here: Callable[[], str]) -> None:
    log: list[str] = []

    @torch_vmm.use_model("llama")
    def steps() -> Iterator[str]:
        try:
            while True:
                try:
                    yield here()
                except KeyError as error:  # noqa: PERF203
                    log.append(f"{error.args[0]} in {here()}")
        finally:
            log.append(f"closed in {here()}")

    generator = steps()
    assert isinstance(generator, Generator)
    next(generator)
    assert generator.throw(KeyError("thrown")) == "llama"
    generator.close()
    assert log == ["thrown in llama", "closed in llama"]
    generator = steps()
    next(generator)
    with pytest.raises(ValueError, match="passes through"):
        generator.throw(ValueError("passes through"))
    assert log[-1] == "closed in llama"
    assert here() == "default"


def test_two_generators_in_turn(llama: Pool, qwen: Pool, here: Callable[[], str]) -> None:
    def steps() -> Iterator[str]:
        while True:
            yield here()

    first, second = torch_vmm.use_model("llama")(steps)(), torch_vmm.use_model("qwen")(steps)()
    seen = [name for _ in range(3) for name in (next(first), next(second), here())]
    assert seen == ["llama", "qwen", "default"] * 3


def test_a_generator_that_yields_from_another(llama: Pool, qwen: Pool, here: Callable[[], str]) -> None:
    @torch_vmm.use_model("qwen")
    def inner() -> Generator[str, None, str]:
        yield here()
        return here()

    @torch_vmm.use_model("llama")
    def outer() -> Generator[str, None, None]:
        yield here()
        yield "returned " + (yield from inner())
        yield here()

    assert list(outer()) == ["llama", "qwen", "returned qwen", "llama"]


class Pause:
    """An awaitable that gives control away once, and passes on what comes back."""

    def __await__(self) -> Generator[str, str, str]:
        return (yield "paused")


def test_a_coroutine_is_in_the_model_only_while_it_runs(llama: Pool, here: Callable[[], str]) -> None:
    log: list[str] = []

    @torch_vmm.use_model("llama")
    async def work(name: str) -> str:
        log.append(here())
        told = await Pause()
        log.append(here())
        try:
            await Pause()
        except KeyError:
            log.append("caught in " + here())
        return f"{name} was told {told}"

    coroutine = work("it")
    assert log == []  # nothing runs before it is awaited
    assert coroutine.send(None) == "paused"
    assert here() == "default"
    assert coroutine.send("a word") == "paused"
    assert here() == "default"
    with pytest.raises(StopIteration) as stop:
        coroutine.throw(KeyError("thrown"))
    assert stop.value.value == "it was told a word"
    assert log == ["llama", "llama", "caught in llama"]
    assert here() == "default"


def test_a_coroutine_that_is_closed(llama: Pool, here: Callable[[], str]) -> None:
    log: list[str] = []

    @torch_vmm.use_model("llama")
    async def work() -> None:
        try:
            await Pause()
        finally:
            log.append(here())

    coroutine = work()
    coroutine.send(None)
    coroutine.close()
    assert log == ["llama"]
    assert here() == "default"


def test_tasks_that_take_turns(llama: Pool, qwen: Pool, here: Callable[[], str]) -> None:
    async def work(count: int) -> list[str]:
        seen = []
        for _ in range(count):
            seen.append(here())
            await asyncio.sleep(0)
        return seen

    async def main() -> list[list[str]]:
        return await asyncio.gather(
            torch_vmm.use_model("llama")(work)(5), torch_vmm.use_model("qwen")(work)(5), work(5)
        )

    assert asyncio.run(main()) == [["llama"] * 5, ["qwen"] * 5, ["default"] * 5]


def test_a_task_that_is_cancelled(llama: Pool, here: Callable[[], str]) -> None:
    log: list[str] = []

    @torch_vmm.use_model("llama")
    async def work() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            log.append(here())
            raise

    async def main() -> str:
        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return here()

    assert asyncio.run(main()) == "default"
    assert log == ["llama"]


def test_what_a_model_that_has_ended_leaves_to_be_done(roomy: Shared, here: Callable[[], str]) -> None:
    told: list[str] = []

    @torch_vmm.use_model("ends")
    async def task() -> None:
        try:
            await asyncio.sleep(100)
        finally:
            await asyncio.sleep(0)
            told.append(here())

    @torch_vmm.use_model("ends")
    def generator() -> Iterator[int]:
        try:
            yield 1
        finally:
            told.append(here())

    @torch_vmm.use_model("ends")
    async def async_generator() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            await asyncio.sleep(0)
            told.append(here())

    async def main() -> None:
        roomy.register_model("ends", "64MiB")
        begun = asyncio.create_task(task())
        steps, async_steps = generator(), async_generator()
        await asyncio.sleep(0)
        assert next(steps) == await anext(async_steps) == 1
        roomy.unregister_model("ends", force=True)
        begun.cancel()
        with pytest.raises(asyncio.CancelledError):
            await begun
        steps.close()  # type: ignore[attr-defined]
        await async_steps.aclose()  # type: ignore[attr-defined]

    asyncio.run(main())
    assert told == ["default"] * 3


def test_a_generator_goes_on_in_its_model_when_that_is_there_again(roomy: Shared, here: Callable[[], str]) -> None:
    @torch_vmm.use_model("ends")
    def generator() -> Iterator[str]:
        while True:
            try:
                yield here()
            except ValueError:  # noqa: PERF203
                yield "caught"

    roomy.register_model("ends", "64MiB")
    steps = generator()
    assert next(steps) == "ends"
    roomy.unregister_model("ends")
    assert steps.throw(ValueError()) == "caught"  # type: ignore[attr-defined]
    roomy.register_model("ends", "64MiB")
    assert next(steps) == "ends"


def test_a_generator_that_can_be_awaited(llama: Pool, here: Callable[[], str]) -> None:
    @torch_vmm.use_model(llama)
    @types.coroutine
    def work() -> Generator[None, None, str]:
        yield
        return here()

    async def main() -> str:
        return await work()

    assert asyncio.run(main()) == "llama"


def test_an_async_generator_is_in_the_model_only_while_it_runs(llama: Pool, here: Callable[[], str]) -> None:
    log: list[str] = []

    @torch_vmm.use_model("llama")
    async def steps() -> AsyncIterator[str]:
        try:
            while True:
                try:
                    await asyncio.sleep(0)
                    told = yield here()
                    log.append(f"told {told} in {here()}")
                except KeyError:  # noqa: PERF203
                    log.append("caught in " + here())
        finally:
            await asyncio.sleep(0)
            log.append("closed in " + here())

    async def main() -> list[str]:
        generator = steps()
        seen = [await generator.__anext__(), here()]
        seen += [await generator.asend("a"), here()]  # type: ignore[attr-defined]
        seen += [await generator.athrow(KeyError("thrown")), here()]  # type: ignore[attr-defined]
        await generator.aclose()  # type: ignore[attr-defined]
        return [*seen, here()]

    assert asyncio.run(main()) == ["llama", "default", "llama", "default", "llama", "default", "default"]
    assert log == ["told a in llama", "caught in llama", "closed in llama"]


def test_an_async_generator_ends(llama: Pool, here: Callable[[], str]) -> None:
    @torch_vmm.use_model("llama")
    async def steps() -> AsyncIterator[int]:
        for step in range(3):
            yield step

    async def main() -> list[int]:
        return [step async for step in steps()]

    assert asyncio.run(main()) == [0, 1, 2]


def test_objects_that_make_their_steps_when_called(llama: Pool, here: Callable[[], str]) -> None:
    class Task:
        async def __call__(self) -> str:
            await asyncio.sleep(0)
            return here()

    class Steps:
        def __call__(self) -> Iterator[str]:
            yield here()

    class More:
        async def __call__(self) -> AsyncIterator[str]:
            yield here()

    async def all_of(steps: AsyncIterator[str]) -> list[str]:
        return [name async for name in steps]

    decorate = torch_vmm.use_model("llama")
    assert asyncio.run(decorate(Task())()) == "llama"
    assert [(name, here()) for name in decorate(Steps())()] == [("llama", "default")]
    assert asyncio.run(all_of(decorate(More())())) == ["llama"]
    with llama:
        carried = torch_vmm.carry(Task())
    assert asyncio.run(carried()) == "llama"


def test_classes_are_not_decorated(llama: Pool) -> None:
    with pytest.raises(torch_vmm.InvalidArgumentError, match="methods"):

        @torch_vmm.use_model("llama")
        class Server:
            pass

    with pytest.raises(torch_vmm.InvalidArgumentError):
        torch_vmm.use_model("llama")(3)  # type: ignore[type-var]


def test_a_step_that_was_cancelled_and_went_on_asks_for_its_model_again(roomy: Shared) -> None:
    @torch_vmm.use_model("ends")
    async def yields() -> AsyncIterator[int]:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 0.01)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            yield 1
        yield 2

    async def main() -> None:
        roomy.register_model("ends", "64MiB")
        steps = yields()
        step = asyncio.create_task(anext(steps))  # type: ignore[arg-type]
        await asyncio.sleep(0.1)
        step.cancel()
        assert await step == 1
        roomy.unregister_model("ends")
        with pytest.raises(torch_vmm.ModelNotFoundError):
            await anext(steps)

    asyncio.run(main())


@pytest.mark.skipif(sys.version_info < (3, 11), reason="asyncio.timeout() is newer")
def test_a_task_that_went_on_after_a_timeout_asks_for_its_model_again(roomy: Shared) -> None:
    @torch_vmm.use_model("ends")
    async def task() -> None:
        try:
            async with asyncio.timeout(0.01):
                await asyncio.sleep(60)
        except TimeoutError:
            pass
        await asyncio.sleep(0.1)

    async def main() -> None:
        roomy.register_model("ends", "64MiB")
        running = asyncio.create_task(task())
        await asyncio.sleep(0.05)
        roomy.unregister_model("ends")
        with pytest.raises(torch_vmm.ModelNotFoundError):
            await running

    asyncio.run(main())


def test_a_task_whose_future_was_cancelled_cleans_up_without_its_model(roomy: Shared) -> None:
    told: list[str] = []

    @torch_vmm.use_model("ends")
    async def task(awaited: asyncio.Future[None]) -> None:
        try:
            await awaited
        finally:
            await asyncio.sleep(0)
            told.append("cleaned up")

    async def main() -> None:
        roomy.register_model("ends", "64MiB")
        awaited: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        running = asyncio.create_task(task(awaited))
        await asyncio.sleep(0)
        awaited.cancel()
        roomy.unregister_model("ends")
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(main())
    assert told == ["cleaned up"]


def test_steps_whose_model_ends_between_them_are_told_and_clean_up(roomy: Shared) -> None:
    told: list[str] = []

    @torch_vmm.use_model("ends")
    async def task(go_on: asyncio.Event) -> None:
        try:
            await go_on.wait()
        except torch_vmm.ModelNotFoundError:
            told.append("caught")
            raise
        finally:
            await asyncio.sleep(0)
            told.append("cleaned up")

    @torch_vmm.use_model("ends")
    def generator() -> Iterator[int]:
        try:
            yield 1
            yield 2
        finally:
            told.append("generator")

    @torch_vmm.use_model("ends")
    async def waits(go_on: asyncio.Event) -> AsyncIterator[int]:
        try:
            await go_on.wait()
        except torch_vmm.ModelNotFoundError:
            told.append("in its step")
        yield 3
        await asyncio.sleep(0)
        yield 4

    @torch_vmm.use_model("ends")
    async def yields() -> AsyncIterator[int]:
        try:
            yield 1
        except torch_vmm.ModelNotFoundError:
            told.append("between its steps")
        await asyncio.sleep(0)
        yield 2

    async def main() -> None:
        roomy.register_model("ends", "64MiB")
        go_on = asyncio.Event()
        begun, steps = asyncio.create_task(task(go_on)), generator()
        waiting, yielding = waits(go_on), yields()
        within_step = asyncio.create_task(anext(waiting))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        assert next(steps) == 1
        assert await anext(yielding) == 1
        roomy.unregister_model("ends")
        go_on.set()
        with pytest.raises(torch_vmm.ModelNotFoundError):
            await begun
        with pytest.raises(torch_vmm.ModelNotFoundError):
            next(steps)
        assert await within_step == 3
        assert await anext(waiting) == 4, "it has been told"
        await waiting.aclose()  # type: ignore[attr-defined]
        assert await anext(yielding) == 2
        with pytest.raises(StopAsyncIteration):
            await anext(yielding)

    asyncio.run(main())
    assert told == ["caught", "in its step", "cleaned up", "generator", "between its steps"]
