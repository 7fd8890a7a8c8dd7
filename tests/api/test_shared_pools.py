"""SharedMemoryPool: models by id under one limit."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest
import torch

import torch_vmm
from tests.helpers import MIB, PAGE, assert_models_add_up, holds, is_zero, stamp, tensor_in
from torch_vmm import _C

Shared = torch_vmm.SharedMemoryPool
MakeShared = Callable[..., Shared]


# -- Models ------------------------------------------------------------------------------------------------------------


def test_an_empty_one(shared: Shared, device: str) -> None:
    assert shared.physical_limit == 64 * MIB
    assert shared.device == torch.device("cuda:0" if device == "cuda" else "cpu")
    assert (len(shared.models), list(shared), dict(shared.models)) == (0, [], {})
    assert assert_models_add_up(shared) == torch_vmm.GlobalMemoryStats(64 * MIB, 0, 0, 0, 0, 0, 0, 0)


def test_a_registered_model_has_a_pool(shared: Shared) -> None:
    pool = shared.register_model("llama", virtual_capacity="32MiB", physical_limit="16MiB", floor="2MiB", priority=3)
    assert isinstance(pool, torch_vmm.VirtualMemoryPool)
    assert (pool.model_id, pool.name, pool.capacity, pool.physical_limit) == ("llama", "llama", 32 * MIB, 16 * MIB)
    assert pool.device == shared.device
    assert shared["llama"] is shared.models["llama"] is pool


def test_a_model_that_names_no_capacity_has_plenty(shared: Shared, memory: _C.Device) -> None:
    assert shared.register_model("llama").capacity >= memory.total_bytes
    assert shared["llama"].physical_limit is None


def test_models_is_a_view_in_order_of_registration(shared: Shared) -> None:
    models = shared.models
    for model_id in ("b", "c", "a"):
        shared.register_model(model_id, "8MiB")
    assert list(models) == list(shared) == ["b", "c", "a"]
    assert [pool.model_id for pool in models.values()] == ["b", "c", "a"]
    assert "c" in models
    assert "c" in shared
    assert "d" not in models
    assert 3 not in shared
    assert models.get("d") is None
    assert models.get("") is models.get(3) is None  # type: ignore[call-overload]
    with pytest.raises(TypeError):
        models["d"] = models["c"]  # type: ignore[index]
    shared.unregister_model("c")
    assert list(models) == ["b", "a"]


def test_an_id_is_taken_once(shared: Shared) -> None:
    first = shared.register_model("llama", "8MiB")
    with pytest.raises(torch_vmm.ModelExistsError) as raised:
        shared.register_model("llama", "8MiB")
    assert raised.value.model_id == "llama"
    assert shared["llama"] is first
    shared.unregister_model("llama")
    assert shared.register_model("llama", "8MiB") is not first


@pytest.mark.parametrize(
    "act",
    [
        lambda shared: shared["qwen"],
        lambda shared: shared.models["qwen"],
        lambda shared: shared.unregister_model("qwen"),
        lambda shared: shared.allocate_for_model("qwen", PAGE),
        lambda shared: shared.deallocate_for_model("qwen", 0, PAGE),
        lambda shared: shared.get_model_stats("qwen"),
    ],
)
def test_an_id_that_is_not_registered(shared: Shared, act: Callable[[Shared], object]) -> None:
    shared.register_model("llama", "8MiB")
    with pytest.raises(torch_vmm.ModelNotFoundError, match="llama") as raised:
        act(shared)
    assert raised.value.model_id == "qwen"
    assert isinstance(raised.value, KeyError)


@pytest.mark.parametrize("model_id", ["", 3, None])
def test_ids_that_cannot_be(shared: Shared, model_id: object) -> None:
    with pytest.raises(torch_vmm.InvalidArgumentError):
        shared.register_model(model_id)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"floor": "65MiB"},
        {"floor": "8MiB", "physical_limit": "4MiB"},
        {"floor": -1},
        {"physical_limit": -1},
        {"virtual_capacity": 0},
        {"virtual_capacity": "many"},
        {"priority": "high"},
        {"page_size": 3 * MIB},
    ],
)
def test_options_that_cannot_be(shared: Shared, options: dict[str, object]) -> None:
    with pytest.raises(torch_vmm.InvalidArgumentError):
        shared.register_model("llama", **options)  # type: ignore[arg-type]
    assert list(shared) == []


@pytest.mark.parametrize("limit", [0, -1, 1.5, None, "plenty"])
def test_limits_that_cannot_be(shared: Shared, device: str, limit: object) -> None:
    with pytest.raises(torch_vmm.InvalidArgumentError):
        torch_vmm.SharedMemoryPool(limit, device=device)  # type: ignore[arg-type]
    with pytest.raises(torch_vmm.InvalidArgumentError):
        shared.physical_limit = limit  # type: ignore[assignment]
    assert shared.physical_limit == 64 * MIB


def test_its_repr_says_who_and_how_full(shared: Shared) -> None:
    shared.register_model("llama", "8MiB")
    shared.register_model("qwen", "8MiB")
    shared.allocate_for_model("qwen", 2 * PAGE)
    for part in (str(shared.device), "4 MiB of 64 MiB", "llama, qwen"):
        assert part in repr(shared)


# -- Explicit pages by model -------------------------------------------------------------------------------------------


def test_each_allocation_of_a_model_has_its_own_place(shared: Shared) -> None:
    pool = shared.register_model("llama", virtual_capacity="32MiB")
    addresses = [shared.allocate_for_model("llama", size) for size in (PAGE, 3 * PAGE, "2MiB", 100)]
    offsets = [address - pool.base_address for address in addresses]
    assert offsets == [0, PAGE, 4 * PAGE, 5 * PAGE]
    for seed, (offset, size) in enumerate(zip(offsets, (PAGE, 3 * PAGE, PAGE, 100), strict=True)):
        stamp(pool.tensor(offset, size), seed)
    for seed, (offset, size) in enumerate(zip(offsets, (PAGE, 3 * PAGE, PAGE, 100), strict=True)):
        assert holds(pool.tensor(offset, size), seed)
    assert shared.get_model_stats("llama").physical_usage == 6 * PAGE
    assert assert_models_add_up(shared).physical_usage == 6 * PAGE


def test_the_first_free_span_that_fits_is_taken(shared: Shared) -> None:
    pool = shared.register_model("llama", virtual_capacity="32MiB")
    for _ in range(6):
        shared.allocate_for_model("llama", PAGE)
    shared.deallocate_for_model("llama", PAGE, PAGE)
    shared.deallocate_for_model("llama", 3 * PAGE, 2 * PAGE)
    assert shared.allocate_for_model("llama", 2 * PAGE) == pool.base_address + 3 * PAGE
    assert shared.allocate_for_model("llama", 2 * PAGE) == pool.base_address + 6 * PAGE
    assert shared.allocate_for_model("llama", PAGE) == pool.base_address + PAGE


def test_models_do_not_see_each_others_memory(shared: Shared) -> None:
    pools = [shared.register_model(model_id, "16MiB") for model_id in "abc"]
    for seed, pool in enumerate(pools):
        assert shared.allocate_for_model(pool.name, 2 * PAGE) == pool.base_address
        stamp(pool.tensor(0, 2 * PAGE), seed)
    assert all(holds(pool.tensor(0, 2 * PAGE), seed) for seed, pool in enumerate(pools))


def test_a_model_whose_addresses_are_used_up(shared: Shared) -> None:
    shared.register_model("llama", virtual_capacity=4 * PAGE)
    shared.allocate_for_model("llama", 3 * PAGE)
    with pytest.raises(torch_vmm.OutOfMemoryError) as raised:
        shared.allocate_for_model("llama", 2 * PAGE)
    assert (raised.value.requested, raised.value.pool) == (2 * PAGE, "llama")
    shared.allocate_for_model("llama", PAGE)


@pytest.mark.parametrize("size", [0, 8 * MIB + 1, 2**64 - 1, 2**64, -1])
def test_sizes_that_cannot_be(shared: Shared, size: int) -> None:
    shared.register_model("llama", virtual_capacity="8MiB")
    with pytest.raises(torch_vmm.InvalidRangeError) as raised:
        shared.allocate_for_model("llama", size)
    assert (raised.value.size, raised.value.capacity) == (size, 8 * MIB)
    with pytest.raises(torch_vmm.InvalidRangeError):
        shared.deallocate_for_model("llama", 0, size)


def test_deallocating_what_is_not_there(shared: Shared) -> None:
    shared.register_model("llama", virtual_capacity="8MiB")
    shared.allocate_for_model("llama", PAGE)
    with pytest.raises(torch_vmm.NotMappedError) as raised:
        shared.deallocate_for_model("llama", 0, 2 * PAGE)
    assert (raised.value.offset, raised.value.size) == (PAGE, PAGE)
    shared.deallocate_for_model("llama", 0, PAGE)


# -- The limit that they share -----------------------------------------------------------------------------------------


def test_the_shared_limit_stops_all_models(make_shared: MakeShared) -> None:
    shared = make_shared(8 * PAGE)
    for model_id in ("llama", "qwen"):
        shared.register_model(model_id, "64MiB")
    shared.allocate_for_model("llama", 5 * PAGE)
    shared.allocate_for_model("qwen", 2 * PAGE)
    with pytest.raises(torch_vmm.OutOfMemoryError) as raised:
        shared.allocate_for_model("qwen", 2 * PAGE)
    error = raised.value
    assert (error.requested, error.available, error.limit, error.pool) == (2 * PAGE, PAGE, 8 * PAGE, "qwen")
    for part in ("qwen", "llama", "16 MiB", "10 MiB"):  # who asked, who holds what, the limit
        assert part in str(error)
    assert assert_models_add_up(shared).physical_usage == 7 * PAGE
    shared.allocate_for_model("qwen", PAGE)
    shared.deallocate_for_model("llama", 0, 2 * PAGE)
    shared.allocate_for_model("qwen", 2 * PAGE)
    assert assert_models_add_up(shared).physical_usage == 8 * PAGE


def test_unaligned_requests_count_as_whole_pages(make_shared: MakeShared) -> None:
    shared = make_shared(2 * PAGE)
    pool = shared.register_model("llama", "64MiB")
    pool.allocate(PAGE - 1, 2)
    assert assert_models_add_up(shared).physical_usage == 2 * PAGE
    with pytest.raises(torch_vmm.OutOfMemoryError):
        pool.allocate(4 * PAGE, 1)
    pool.deallocate(0, 1)
    pool.allocate(4 * PAGE, 1)


def test_a_models_own_limit_stops_it_first(shared: Shared) -> None:
    pool = shared.register_model("llama", physical_limit="4MiB")
    shared.register_model("qwen")
    kept = tensor_in(pool, 4 * MIB)
    with pytest.raises(torch_vmm.OutOfMemoryError) as raised:
        shared.allocate_for_model("llama", PAGE)
    assert (raised.value.limit, raised.value.available) == (4 * MIB, 0)
    shared.allocate_for_model("qwen", 60 * MIB)
    del kept


def test_the_shared_limit_can_be_changed(make_shared: MakeShared) -> None:
    shared = make_shared("8MiB")
    shared.register_model("llama")
    shared.allocate_for_model("llama", "8MiB")
    with pytest.raises(torch_vmm.OutOfMemoryError):
        shared.allocate_for_model("llama", PAGE)
    shared.physical_limit = "10MiB"
    assert shared.physical_limit == 10 * MIB
    shared.allocate_for_model("llama", PAGE)
    shared.physical_limit = 2 * PAGE
    assert assert_models_add_up(shared).physical_usage == 10 * MIB  # in use: it stays
    shared.deallocate_for_model("llama", 0, "8MiB")
    assert assert_models_add_up(shared).physical_usage <= 2 * PAGE
    shared.allocate_for_model("llama", PAGE)


def test_lowering_the_limit_gives_idle_memory_back_at_once(make_shared: MakeShared, memory: _C.Device) -> None:
    shared = make_shared("32MiB")
    pool = shared.register_model("llama")
    kept, gone = tensor_in(pool, 8 * MIB), tensor_in(pool, 24 * MIB)
    stamp(kept, 2)
    del gone
    assert assert_models_add_up(shared).physical_usage == 32 * MIB
    before = memory.committed_bytes
    shared.physical_limit = "12MiB"
    assert assert_models_add_up(shared).physical_usage <= 12 * MIB
    assert memory.committed_bytes <= before - 20 * MIB
    assert holds(kept, 2)


# -- The end -----------------------------------------------------------------------------------------------------------


def test_unregistering_what_is_in_use(shared: Shared) -> None:
    pool = shared.register_model("llama")
    shared.allocate_for_model("llama", 2 * PAGE)
    tensor = tensor_in(pool, 3 * MIB)
    with pytest.raises(torch_vmm.StillInUseError) as raised:
        shared.unregister_model("llama")
    assert (raised.value.live_bytes, raised.value.live_blocks) == (2 * PAGE + 3 * MIB, 2)
    assert shared["llama"] is pool
    del tensor
    shared.deallocate_for_model("llama", 0, 2 * PAGE)
    shared.unregister_model("llama")
    assert "llama" not in shared
    assert pool.is_closed


def test_tensors_survive_a_forced_unregistering(make_shared: MakeShared) -> None:
    shared = make_shared("16MiB")
    pool = shared.register_model("llama")
    tensor = stamp(tensor_in(pool, 4 * MIB), 5)
    shared.unregister_model("llama", force=True)
    renewed = shared.register_model("llama")
    assert renewed is not pool
    other = tensor_in(renewed, 12 * MIB).fill_(1)
    with pytest.raises(torch.OutOfMemoryError):
        tensor_in(renewed, 4 * MIB)  # what is left of the former model counts
    assert holds(tensor, 5)
    assert torch_vmm.pool_of(tensor) is pool
    del tensor
    more = tensor_in(renewed, 4 * MIB)
    assert is_zero(more)
    del other


def test_a_models_pool_can_be_closed_by_itself(shared: Shared) -> None:
    pool = shared.register_model("llama")
    shared.allocate_for_model("llama", PAGE)
    with pytest.raises(torch_vmm.StillInUseError):
        pool.close()
    pool.close(force=True)
    assert pool.is_closed
    assert list(shared) == []
    pool.close()


def test_closing_ends_all_models(make_shared: MakeShared, memory: _C.Device) -> None:
    before = memory.committed_bytes
    with make_shared("16MiB") as shared:
        pools = [shared.register_model(model_id) for model_id in ("llama", "qwen")]
        for pool in pools:
            shared.allocate_for_model(pool.name, 2 * PAGE)
        with pytest.raises(torch_vmm.StillInUseError):
            shared.close()
        assert not any(pool.is_closed for pool in pools)  # all or nothing
        for pool in pools:
            pool.deallocate(0, 2 * PAGE)
    assert shared.is_closed
    assert all(pool.is_closed for pool in pools)
    assert memory.committed_bytes == before
    for ask in (
        lambda: shared.register_model("new"),
        lambda: shared["llama"],
        lambda: shared.allocate_for_model("llama", PAGE),
    ):
        with pytest.raises(torch_vmm.InvalidArgumentError, match="closed"):
            ask()
    shared.close()


def test_one_that_is_dropped_ends_with_its_last_tensor(device: str, memory: _C.Device) -> None:
    gc.collect()
    before = (memory.committed_bytes, len(memory.pools()))
    shared = torch_vmm.SharedMemoryPool("16MiB", device=device)
    tensor = stamp(tensor_in(shared.register_model("llama"), 4 * MIB), 5)
    shared.register_model("qwen")
    del shared
    gc.collect()
    assert holds(tensor, 5)
    assert len(memory.pools()) == before[1] + 1
    with pytest.raises(torch_vmm.ModelNotFoundError), torch_vmm.use_model("llama"):
        pass
    del tensor
    gc.collect()
    assert len(memory.pools()) == before[1]
    memory.empty_cache()
    assert memory.committed_bytes <= before[0]


def test_a_models_pool_keeps_its_shared_pool(device: str) -> None:
    pool = torch_vmm.SharedMemoryPool("16MiB", device=device).register_model("only-held-here")
    gc.collect()
    with torch_vmm.use_model("only-held-here") as entered:
        assert entered is pool
        tensor = torch.empty(1000, device=device)
    assert torch_vmm.pool_of(tensor) is pool
    del tensor
    pool.close()


# -- Threads -----------------------------------------------------------------------------------------------------------


def test_sixteen_threads_never_exceed_the_limit(make_shared: MakeShared, memory: _C.Device) -> None:
    limit = 24 * PAGE
    shared = make_shared(limit)
    elsewhere = memory.committed_bytes
    pools = [shared.register_model(f"model-{thread}", "256MiB") for thread in range(16)]
    over: list[tuple[str, int]] = []
    wrong: list[str] = []
    failures = [0] * 16
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            # What the driver gave, and what the shared pool says of itself.
            seen = {
                "the driver gave": memory.committed_bytes - elsewhere,
                "global_stats() says": shared.global_stats().physical_usage,
            }
            over.extend((who, usage) for who, usage in seen.items() if usage > limit)

    def work(thread: int) -> None:
        kept: list[tuple[torch.Tensor, int]] = []
        for step in range(60):
            seed = thread * 100 + step
            try:
                tensor = tensor_in(pools[thread], (1 + step % 3) * PAGE - 512 * (step % 5))
            except torch.OutOfMemoryError:
                failures[thread] += 1
            else:
                stamp(tensor[:4096], seed)
                stamp(tensor[-4096:], seed + 1)
                kept.append((tensor, seed))
            if len(kept) > step % 4:
                tensor, seed = kept.pop(0)
                if not (holds(tensor[:4096], seed) and holds(tensor[-4096:], seed + 1)):
                    wrong.append(f"thread {thread}, step {step}")

    watcher = threading.Thread(target=watch)
    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(16)]
    watcher.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    watcher.join()
    assert over == []
    assert wrong == []
    assert sum(failures) > 0  # else the limit was never felt
    assert assert_models_add_up(shared).allocated_bytes == 0


def test_a_request_that_fits_after_reclaim_never_fails(make_shared: MakeShared) -> None:
    shared = make_shared(32 * PAGE)
    pools = [shared.register_model(f"model-{thread}", "256MiB") for thread in range(16)]
    failed: list[str] = []

    def work(thread: int) -> None:
        # At most 2 pages live in each of 16 threads: always within the limit,
        # but what is idle moves from model to model all the time.
        for step in range(40):
            try:
                tensor = tensor_in(pools[(thread + step) % 16], (1 + step % 2) * PAGE)
                tensor[::4096] = 1
                del tensor
            except torch.OutOfMemoryError as error:  # noqa: PERF203
                failed.append(str(error))

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def test_models_come_and_go_on_many_threads(shared: Shared) -> None:
    wrong: list[str] = []

    def work(thread: int) -> None:
        for step in range(15):
            pool = shared.register_model(f"{thread}-{step}", "32MiB")
            tensor = stamp(tensor_in(pool, PAGE), step)
            if not holds(tensor, step) or torch_vmm.pool_of(tensor) is not pool:
                wrong.append(pool.name)
            del tensor
            shared.unregister_model(pool.name)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert list(shared) == []
