"""Whose memory a tensor is: use_model, ``with pool:``, current_pool, pool_of."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator

import pytest
import torch

import torch_vmm
from tests.helpers import MIB, holds, rounded, stamp

Pool = torch_vmm.VirtualMemoryPool
Shared = torch_vmm.SharedMemoryPool
MakeShared = Callable[..., Shared]


@pytest.fixture
def shared(make_shared: MakeShared) -> Shared:
    """512 MiB for all models: on a GPU every thread that multiplies leaves 32 MiB of cuBLAS's behind."""
    return make_shared("512MiB")


@pytest.fixture
def llama(shared: Shared) -> Pool:
    return shared.register_model("llama", "256MiB")


@pytest.fixture
def qwen(shared: Shared, llama: Pool) -> Pool:
    return shared.register_model("qwen", "256MiB")


@pytest.fixture
def here(device: str) -> Callable[[], str]:
    """The name of the pool that a tensor made here and now is in."""

    def name() -> str:
        pool = torch_vmm.pool_of(torch.empty(10, device=device))
        assert pool is torch_vmm.current_pool(device)
        return pool.name

    return name


# -- Contexts ----------------------------------------------------------------------------------------------------------


def test_it_is_enabled(device: str) -> None:
    assert torch_vmm.is_enabled(device)
    torch_vmm.enable(device)  # again is fine
    assert torch_vmm.is_enabled(device)


def test_outside_every_model_is_the_default_pool(device: str, here: Callable[[], str]) -> None:
    assert here() == "default"
    default = torch_vmm.current_pool(device)
    assert default is torch_vmm.current_pool(torch.device(device))
    assert default.model_id is None
    assert torch_vmm.pool_of(torch.empty(10, device=device)) is default


def test_a_tensor_is_in_the_model_it_was_made_in(device: str, llama: Pool) -> None:
    with torch_vmm.use_model(llama) as entered:
        assert entered is llama
        assert torch_vmm.current_pool(device) is llama
        tensor = torch.empty(1000, device=device)
    assert torch_vmm.pool_of(tensor) is llama
    assert llama.base_address <= tensor.data_ptr() < llama.base_address + llama.capacity
    assert llama.memory_allocated() == rounded(4000)
    assert torch_vmm.pool_of(torch.empty(1000, device=device)) is not llama


def test_a_pool_is_a_context_of_its_own(llama: Pool, here: Callable[[], str]) -> None:
    with llama as entered:
        assert entered is llama
        assert here() == "llama"
    assert here() == "default"


def test_a_model_is_found_by_its_id(llama: Pool, qwen: Pool, here: Callable[[], str]) -> None:
    for model_id in ("llama", "qwen"):
        with torch_vmm.use_model(model_id) as entered:
            assert entered.name == here() == model_id


def test_contexts_nest_and_the_inner_one_wins(llama: Pool, qwen: Pool, here: Callable[[], str]) -> None:
    seen = []
    with llama:
        seen.append(here())
        with qwen:
            seen.append(here())
            with llama, llama:
                seen.append(here())
            seen.append(here())
        seen.append(here())
        with torch_vmm.use_model("qwen"):
            seen.append(here())
    seen.append(here())
    assert seen == ["llama", "qwen", "llama", "qwen", "llama", "qwen", "default"]


def test_the_default_pool_can_be_entered_too(device: str, llama: Pool, here: Callable[[], str]) -> None:
    default = torch_vmm.current_pool(device)
    with llama:
        with default:
            assert here() == "default"
        assert here() == "llama"


def test_one_context_can_be_entered_again(llama: Pool, here: Callable[[], str]) -> None:
    context = torch_vmm.use_model("llama")
    for _ in range(2):
        with context:
            with context:
                assert here() == "llama"
            assert here() == "llama"
        assert here() == "default"


def test_an_error_leaves_the_model(llama: Pool, here: Callable[[], str]) -> None:
    with pytest.raises(ZeroDivisionError), llama:
        _ = 1 / 0
    assert here() == "default"


def test_a_free_finds_its_pool_whatever_is_open(device: str, llama: Pool, qwen: Pool) -> None:
    with llama:
        tensor = torch.empty(MIB, dtype=torch.uint8, device=device)
    assert (llama.memory_allocated(), qwen.memory_allocated()) == (MIB, 0)
    with qwen:
        del tensor
        assert (llama.memory_allocated(), qwen.memory_allocated()) == (0, 0)


def test_memory_is_used_again_by_its_own_model_only(device: str, llama: Pool, qwen: Pool) -> None:
    with llama:
        tensor = torch.empty(4 * MIB, dtype=torch.uint8, device=device)
        address = tensor.data_ptr()
        del tensor
    with qwen:
        other = torch.empty(4 * MIB, dtype=torch.uint8, device=device)
    with llama:
        again = torch.empty(4 * MIB, dtype=torch.uint8, device=device)
    assert again.data_ptr() == address
    assert torch_vmm.pool_of(other) is qwen


def test_a_model_of_another_device_changes_nothing_here(device: str, here: Callable[[], str]) -> None:
    if device == "cpu":
        pytest.skip("needs two kinds of device")
    with torch_vmm.VirtualMemoryPool("64MiB", device="cpu") as elsewhere:
        assert here() == "default"
        assert torch_vmm.current_pool("cpu") is elsewhere


# -- What cannot be entered --------------------------------------------------------------------------------------------


def test_an_id_that_nobody_has(llama: Pool, qwen: Pool, here: Callable[[], str]) -> None:
    with pytest.raises(torch_vmm.ModelNotFoundError) as raised, torch_vmm.use_model("mistral"):
        pass
    assert raised.value.model_id == "mistral"
    assert "llama" in str(raised.value)
    assert "qwen" in str(raised.value)
    assert here() == "default"


def test_an_id_that_two_have(shared: Shared, llama: Pool, make_shared: Callable[..., Shared]) -> None:
    make_shared().register_model("llama", "64MiB")
    with pytest.raises(torch_vmm.InvalidArgumentError, match="2 SharedMemoryPools") as raised:
        with torch_vmm.use_model("llama"):
            pass
    assert str(shared.device) in str(raised.value)
    with torch_vmm.use_model(llama):
        pass


def test_an_id_on_another_device(device: str, llama: Pool) -> None:
    with torch_vmm.use_model("llama", device=device) as entered:
        assert entered is llama
    with pytest.raises(torch_vmm.ModelNotFoundError, match="cuda:7"), torch_vmm.use_model("llama", device="cuda:7"):
        pass
    with pytest.raises(torch_vmm.InvalidArgumentError, match="cuda:7"):
        torch_vmm.use_model(llama, device="cuda:7")


@pytest.mark.parametrize("model", [None, 3, b"llama", torch_vmm.SharedMemoryPool])
def test_what_is_no_model(model: object) -> None:
    with pytest.raises(torch_vmm.InvalidArgumentError):
        torch_vmm.use_model(model)  # type: ignore[arg-type]


def test_a_shared_pool_is_no_model(shared: Shared) -> None:
    with pytest.raises(torch_vmm.InvalidArgumentError, match="SharedMemoryPool"):
        torch_vmm.use_model(shared)  # type: ignore[arg-type]


def test_a_model_that_was_unregistered(shared: Shared, llama: Pool) -> None:
    context = torch_vmm.use_model("llama")
    shared.unregister_model("llama")
    with pytest.raises(torch_vmm.ModelNotFoundError), context:
        pass
    with pytest.raises(torch_vmm.InvalidArgumentError, match="closed"), llama:
        pass


# -- Models in earnest -------------------------------------------------------------------------------------------------


def network(device: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.LayerNorm(256), torch.nn.Linear(256, 10)
    ).to(device)


def test_all_of_a_training_step_is_in_the_model(device: str, llama: Pool) -> None:
    with llama:
        net = network(device)
        optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
        activations: list[torch.Tensor] = []
        for layer in net.children():
            layer.register_forward_hook(lambda _module, _inputs, output: activations.append(output))
        inputs = torch.randn(32, 64, device=device)
        loss = torch.nn.functional.cross_entropy(net(inputs), torch.arange(32, device=device) % 10)
        loss.backward()
        optimizer.step()
    parameters = list(net.parameters())
    gradients = [parameter.grad for parameter in parameters]
    state = [
        value
        for parameter in parameters
        for name, value in optimizer.state[parameter].items()
        if name != "step"  # torch keeps the count of steps on the host
    ]
    assert (len(parameters), len(activations), len(state)) == (6, 4, 12)
    for tensor in [inputs, loss, *parameters, *gradients, *activations, *state]:
        assert isinstance(tensor, torch.Tensor)
        assert torch_vmm.pool_of(tensor) is llama
    weights = sum(rounded(parameter.nbytes) for parameter in parameters)
    assert llama.memory_allocated() >= 4 * weights  # weights, gradients, two moments


def test_backward_makes_gradients_in_the_model_that_calls_it(device: str, llama: Pool, qwen: Pool) -> None:
    with llama:
        net = network(device)
        loss = net(torch.randn(8, 64, device=device)).square().sum()
    with qwen:
        loss.backward()
    assert all(torch_vmm.pool_of(parameter) is llama for parameter in net.parameters())
    assert all(
        torch_vmm.pool_of(parameter.grad) is qwen for parameter in net.parameters() if parameter.grad is not None
    )
    assert all(parameter.grad is not None for parameter in net.parameters())


def test_what_backward_makes_on_the_way_is_in_the_model(device: str, llama: Pool) -> None:
    made: list[str] = []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, value: torch.Tensor) -> torch.Tensor:
            return value * 2

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            pool = torch_vmm.pool_of(torch.empty(100, device=device))
            assert pool is not None
            made.append(pool.name)
            return gradient * 2

    value = torch.ones(10, device=device, requires_grad=True)
    with llama:
        Twice.apply(value).sum().backward()  # type: ignore[no-untyped-call]
    Twice.apply(value).sum().backward()  # type: ignore[no-untyped-call]
    assert made == ["llama", "default"]


def test_training_in_two_pools_gives_the_same_as_in_none(device: str, llama: Pool, qwen: Pool) -> None:
    def train(steps: int) -> torch.Tensor:
        net = network(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(1)
        for step in range(steps):
            inputs = torch.randn(16 + step % 5, 64, generator=generator).to(device)
            optimizer.zero_grad()
            net(inputs).square().mean().backward()
            optimizer.step()
        return torch.cat([parameter.detach().flatten() for parameter in net.parameters()]).cpu()

    expected = train(12)
    with llama:
        first = train(12)
    with qwen:
        second = train(12)
    assert torch.equal(first, expected)
    assert torch.equal(second, expected)


def test_what_is_freed_is_given_back_to_the_books(device: str, llama: Pool) -> None:
    with llama:
        tensors = [torch.empty(size, dtype=torch.uint8, device=device) for size in (1, 511, 512, 513, MIB, 5 * MIB + 3)]
        views = [tensor[:1] for tensor in tensors]
    expected = sum(rounded(tensor.numel()) for tensor in tensors)
    tensors.clear()
    gc.collect()
    assert llama.memory_allocated() == expected  # the views hold the storages
    views.clear()
    assert llama.memory_allocated() == 0


# -- pool_of -----------------------------------------------------------------------------------------------------------


def test_pool_of_views_and_addresses(device: str, llama: Pool) -> None:
    with llama:
        tensor = torch.empty(100, 100, device=device)
    for view in (tensor[50:], tensor.t(), tensor[100:], tensor.view(-1)[:0]):
        assert torch_vmm.pool_of(view) is llama
    assert torch_vmm.pool_of(tensor.data_ptr()) is llama
    assert torch_vmm.pool_of(llama.base_address) is llama
    assert torch_vmm.pool_of(llama.base_address + llama.capacity - 1) is llama
    assert torch_vmm.pool_of(llama.base_address + llama.capacity) is not llama


def test_pool_of_what_is_in_none(device: str) -> None:
    import numpy as np

    assert torch_vmm.pool_of(torch.from_numpy(np.zeros(10))) is None
    assert torch_vmm.pool_of(torch.empty(0, device=device)) is None
    assert torch_vmm.pool_of(torch.empty(10, device="meta")) is None
    for address in (0, 4096, -1, 2**64):
        assert torch_vmm.pool_of(address) is None


@pytest.mark.parametrize("thing", ["tensor", 1.5, None, True])
def test_pool_of_what_is_neither(thing: object) -> None:
    with pytest.raises(torch_vmm.InvalidArgumentError):
        torch_vmm.pool_of(thing)  # type: ignore[arg-type]


def test_pool_of_a_tensor_without_storage(device: str) -> None:
    with pytest.raises(torch_vmm.InvalidArgumentError):
        torch_vmm.pool_of(torch.eye(3, device=device).to_sparse())


def test_one_pool_is_one_object(shared: Shared, device: str) -> None:
    llama = shared.register_model("llama", "64MiB")
    number = id(llama)
    with llama:
        tensor = torch.empty(10, device=device)
        found = {id(torch_vmm.current_pool(device)), id(torch_vmm.pool_of(tensor)), id(shared["llama"])}
    assert found == {number}
    del llama
    gc.collect()
    again = torch_vmm.pool_of(tensor)
    assert again is shared["llama"]
    assert again is not None
    assert again.model_id == "llama"
    again.close(force=True)


# -- As a decorator ----------------------------------------------------------------------------------------------------


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


def test_a_function_decorated_before_its_model_exists(shared: Shared, here: Callable[[], str]) -> None:
    work = torch_vmm.use_model("later")(here)
    with pytest.raises(torch_vmm.ModelNotFoundError):
        work()
    shared.register_model("later", "64MiB")
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


def test_classes_are_not_decorated(llama: Pool) -> None:
    with pytest.raises(torch_vmm.InvalidArgumentError, match="methods"):

        @torch_vmm.use_model("llama")
        class Server:
            pass

    with pytest.raises(torch_vmm.InvalidArgumentError):
        torch_vmm.use_model("llama")(3)  # type: ignore[type-var]


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


def test_backward_on_threads_of_two_models(llama: Pool, qwen: Pool, device: str) -> None:
    wrong: list[str] = []

    def work(pool: Pool) -> None:
        for _ in range(10):
            with pool:
                net = network(device)
                net(torch.randn(8, 64, device=device)).sum().backward()
            for parameter in net.parameters():
                assert parameter.grad is not None
                if torch_vmm.pool_of(parameter.grad) is not pool:
                    wrong.append(pool.name)

    threads = [threading.Thread(target=work, args=(pool,)) for pool in (llama, qwen, llama, qwen)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
