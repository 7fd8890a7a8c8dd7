"""Names for a pool's memory: what lies together under one, how much it is, and sealing all of it."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

import torch_vmm
from tests.helpers import MIB, PAGE, faults, holds, is_zero, rounded, stamp
from torch_vmm import _C, sealed

Pool = torch_vmm.VirtualMemoryPool


def make(device: str, size: int = 1000) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


def tag_at(pool: Pool, tensor: torch.Tensor) -> str | None:
    """The tag of the chunks under a tensor, by the pool's snapshot."""
    at = tensor.data_ptr()
    found = [
        segment.get("tag")
        for segment in pool.memory_snapshot()
        if segment["address"] < at + max(tensor.nbytes, 1) and at < segment["address"] + segment["total_size"]
    ]
    assert len(set(found)) == 1, "one tensor over chunks of several tags"
    return found[0]


@pytest.fixture
def tagged(make_pool: Callable[..., Pool]) -> Pool:
    """512 MiB of addresses, and no page size."""
    return make_pool("512MiB")


# -- What lies together ------------------------------------------------------------------------------------------------


def test_a_tag_opens_the_pool_and_counts_its_bytes(tagged: Pool, device: str) -> None:
    assert tagged.tags == {}
    with tagged.tag("weights") as entered:
        assert entered is tagged
        assert torch_vmm.current_pool(device) is tagged
        weight = make(device, 3 * MIB)
        bias = make(device)
    outside = make(device)
    assert torch_vmm.pool_of(weight) is tagged
    assert torch_vmm.pool_of(outside) is not tagged
    assert tagged.tags == {"weights": 3 * MIB + rounded(1000)}
    assert tagged.memory_allocated() == 3 * MIB + rounded(1000)
    assert (tag_at(tagged, weight), tag_at(tagged, bias)) == ("weights", "weights")
    del weight
    assert tagged.tags == {"weights": rounded(1000)}
    del bias
    assert tagged.tags == {"weights": 0}


@pytest.mark.parametrize("size", [1, 1000, 300_000, 3 * MIB])
def test_no_chunk_is_shared(tagged: Pool, device: str, size: int) -> None:
    kept: list[tuple[str | None, torch.Tensor]] = []
    for _ in range(12):
        for name in ("weights", "cache", None):
            with tagged.tag(name) if name else tagged:
                make(device, size)  # and is kept by the thread
                kept.append((name, make(device, size)))
    for name, tensor in kept:
        assert tag_at(tagged, tensor) == name
    segments = sorted((each["address"], each["total_size"]) for each in tagged.memory_snapshot())
    for (address, total), (following, _) in itertools.pairwise(segments):
        assert address + total <= following
    assert tagged.tags == {"cache": 12 * rounded(size), "weights": 12 * rounded(size)}


def test_the_innermost_wins(tagged: Pool, make_pool: Callable[..., Pool], device: str) -> None:
    other = make_pool("64MiB")
    with tagged.tag("weights"):
        with tagged.tag("cache"):
            inner = make(device)
        with tagged:
            plain = make(device)
        with other.tag("weights"):
            elsewhere = make(device)
        outer = make(device)
    assert [tag_at(tagged, each) for each in (inner, plain, outer)] == ["cache", None, "weights"]
    assert torch_vmm.pool_of(elsewhere) is other
    assert (tagged.tags, other.tags) == ({"cache": 1024, "weights": 1024}, {"weights": 1024})


def test_the_default_pool_has_tags_too(device: str) -> None:
    default = torch_vmm.current_pool(device)
    with default.tag("of the default pool"):
        tensor = make(device)
    assert torch_vmm.pool_of(tensor) is default
    assert default.tags["of the default pool"] == 1024


def test_ranges_are_of_the_tag_that_was_open(tagged: Pool, device: str) -> None:
    with tagged.tag("weights"):
        table = torch_vmm.elastic((10, 1000), torch.float32, device, (10_000, 1000))
        whole = torch_vmm.aligned((PAGE,), torch.uint8, device)
        holes = torch_vmm.sparse((4 * PAGE,), torch.uint8, device)
    assert tagged.tags == {"weights": 2 * PAGE}
    holes.commit(slice(0, 1))
    table.resize_(5000)
    assert tagged.tags["weights"] == tagged.memory_allocated() > 2 * PAGE + 20_000_000
    del table, whole, holes
    gc.collect()
    assert tagged.tags == {"weights": 0}


def test_a_limit_is_over_all_tags(make_pool: Callable[..., Pool], device: str) -> None:
    pool = make_pool("256MiB", physical_limit="16MiB")
    for name in ("one", "two", "one"):  # what one has idle serves the other
        with pool.tag(name):
            tensor = make(device, 16 * MIB)
        del tensor
    with pool:
        kept = make(device, 12 * MIB)
    with pool.tag("one"), pytest.raises(torch.OutOfMemoryError, match="limit"):
        make(device, 8 * MIB)
    refusal = torch_vmm.last_out_of_memory(device)
    assert refusal is not None
    assert (refusal.pool, refusal.limit) == (pool.name, 16 * MIB)
    assert kept.numel() == 12 * MIB


def test_numbers_of_the_pool_have_them_all(tagged: Pool, device: str) -> None:
    with tagged.tag("weights"):
        tensor = make(device, 5 * MIB)
    stats = tagged.stats()
    assert stats.allocated_bytes == 5 * MIB
    assert stats.virtual_capacity == tagged.capacity
    assert tagged.memory_reserved() == stats.physical_usage
    del tensor
    tagged.empty_cache()
    assert tagged.physical_memory_usage == 0


# -- Where the context goes --------------------------------------------------------------------------------------------


def test_backward_is_under_it(tagged: Pool, device: str) -> None:
    weight = torch.ones(500, 1000, device=device, requires_grad=True)
    with tagged.tag("gradients"):
        (weight * 2).sum().backward()
    assert weight.grad is not None
    assert tag_at(tagged, weight.grad) == "gradients"


def test_functions_run_under_it_and_steps_leave_it(tagged: Pool, device: str) -> None:
    weights = tagged.tag("weights")

    @weights
    def plain() -> torch.Tensor:
        return make(device)

    @weights
    def steps() -> Iterator[torch.Tensor]:
        yield make(device)
        yield make(device)

    @weights
    async def later() -> torch.Tensor:
        await asyncio.sleep(0)
        return make(device)

    found = [plain(), asyncio.run(later())]
    for each in steps():
        found.append(each)
        assert torch_vmm.current_pool(device) is not tagged
    assert [tag_at(tagged, each) for each in found] == ["weights"] * 4
    with weights, weights:  # again while it is open
        found.append(make(device))
    assert tagged.tags == {"weights": 5 * 1024}


def test_a_thread_starts_without_and_is_given_it(tagged: Pool, device: str) -> None:
    found: dict[str, torch.Tensor] = {}

    def work(name: str) -> None:
        found[name] = make(device)

    with tagged.tag("weights"):
        carried = torch_vmm.carry(work)
        threads = [threading.Thread(target=work, args=("bare",)), threading.Thread(target=carried, args=("carried",))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert torch_vmm.pool_of(found["bare"]) is not tagged
    assert tag_at(tagged, found["carried"]) == "weights"


def test_threads_under_tags_of_their_own(tagged: Pool, device: str) -> None:
    wrong: list[str] = []

    def work(number: int) -> None:
        alive: list[tuple[str, torch.Tensor]] = []
        for step in range(150):
            name = f"of {number}" if step % 2 else "shared"
            with tagged.tag(name):
                alive.append((name, make(device, 1 + step * 37 % 5000)))
            if step % 3 == 0:
                del alive[0]
        with lock:
            wrong.extend(name for name, tensor in alive if tag_at(tagged, tensor) != name)

    lock = threading.Lock()
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert wrong == []
    assert set(tagged.tags) == {"shared", *(f"of {number}" for number in range(4))}
    assert sum(tagged.tags.values()) == tagged.memory_allocated() == 0


# -- What cannot be ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", None, 3, b"weights", "a\0b", "\ud800"])
def test_bad_names_are_refused(tagged: Pool, name: object) -> None:
    with pytest.raises(torch_vmm.InvalidArgumentError, match="tag="):
        tagged.tag(name)  # type: ignore[arg-type]
    assert tagged.tags == {}


def test_a_closed_pool_has_no_tags_to_open(make_pool: Callable[..., Pool], device: str) -> None:
    pool = make_pool("64MiB")
    weights = pool.tag("weights")
    with weights:
        tensor = stamp(make(device, MIB), 1)
    with pytest.raises(torch_vmm.StillInUseError):
        pool.close()
    pool.close(force=True)
    with pytest.raises(torch_vmm.InvalidArgumentError, match="closed"):
        weights.__enter__()
    assert holds(tensor, 1)
    with pytest.raises(TypeError, match="copied"):
        weights.__reduce__()


def test_its_words_name_it(tagged: Pool, device: str) -> None:
    weights = tagged.tag("weights")
    assert repr(weights) == f"{tagged!r}.tag('weights')"
    weights.__enter__()
    with pytest.raises(torch_vmm.VmmError, match="tag 'weights' of model"), tagged.tag("cache"):
        weights.__exit__(None, None, None)


# -- Seals -------------------------------------------------------------------------------------------------------------


def test_all_of_a_tag_is_sealed(tagged: Pool, device: str) -> None:
    with tagged.tag("weights"):
        layers = torch.nn.Sequential(torch.nn.Linear(600, 600), torch.nn.Linear(600, 30)).to(device)
    with tagged:
        beside = stamp(make(device), 7)
    parameters = [each.detach() for each in layers.parameters()]
    for seed, each in enumerate(parameters):
        stamp(each, seed)
    if device == "cuda":  # what the constructor left on the way is not on the GPU
        assert sum(tagged.tags.values()) == sum(rounded(each.nbytes) for each in parameters)
    with pytest.raises(torch_vmm.InvalidArgumentError, match="share a chunk"):
        tagged.seal(parameters[1])  # its neighbours would be half sealed
    assert not any(map(sealed, parameters))
    tagged.seal(parameters)
    tagged.seal(parameters[0])  # again is fine
    assert all(map(sealed, parameters))
    assert not sealed(beside)
    stamp(beside, 8)
    assert all(holds(each, seed) for seed, each in enumerate(parameters))
    with tagged.tag("weights"):  # stands on further chunks
        more = [stamp(make(device, size), size) for size in (10, 5000, 3 * MIB)]
    assert not any(map(sealed, more))
    assert all(tag_at(tagged, each) == "weights" for each in more)
    with pytest.raises(torch_vmm.InvalidArgumentError, match="share a chunk"):
        tagged.unseal(parameters[1])
    tagged.unseal(parameters)
    assert not any(map(sealed, parameters))
    stamp(parameters[2], 9)


def test_what_was_sealed_serves_again(make_pool: Callable[..., Pool], device: str) -> None:
    pool = make_pool("256MiB", physical_limit="16MiB")
    for seed in range(4):
        with pool.tag("weights"):
            tensors = [stamp(make(device, size), seed) for size in (4000, 9 * MIB)]
        pool.seal(tensors)
        assert all(holds(each, seed) for each in tensors)
        del tensors
        assert pool.tags == {"weights": 0}
        with pool:
            plain = stamp(make(device, 16 * MIB), seed)
        del plain
    memory = _C.device(pool.device.type, pool.device.index or 0)
    memory.check()


def test_a_sealed_ranges_tag_goes_on(tagged: Pool, device: str) -> None:
    with tagged.tag("weights"):
        whole = torch_vmm.aligned((PAGE,), torch.uint8, device)
        loose = make(device, 100)
        tagged.seal([whole, loose])
        fresh = make(device, 100)
    assert sealed(whole)
    assert sealed(loose)
    assert not sealed(fresh)
    assert is_zero(whole)
    stamp(fresh, 1)


PROGRAM = """
import torch, torch_vmm
torch_vmm.enable("cpu")
pool = torch_vmm.current_pool("cpu")
with pool.tag("weights"):
    weight = torch.full((1024, 1024), 2.0)
    bias = torch.ones(10)
with pool:
    beside = torch.ones(10)
pool.seal([weight, bias])
print(float(weight.sum()), float(bias.sum()))
"""


@pytest.mark.parametrize(
    ("touch", "is_fault"),
    [
        ("weight[5, 5] = 1", True),
        ("bias[3] = 1", True),
        ("torch.nn.init.zeros_(weight)", True),
        ("beside[3] = 5; assert beside[3] == 5", False),
        ("pool.unseal([weight, bias]); weight[5, 5] = 1; bias.zero_()", False),
        ("del weight, bias\nwith pool.tag('weights'): torch.ones(1 << 20).zero_(); torch.ones(10).zero_()", False),
    ],
)
def test_a_write_to_what_is_sealed_faults(touch: str, is_fault: bool) -> None:
    assert faults(PROGRAM, touch, printed="2097152.0 10.0\n") is is_fault


def test_closing_counts_all_tags_that_are_in_use(make_pool: Callable[..., Pool], device: str) -> None:
    pool = make_pool("1GiB", name="counted")
    with pool.tag("a"):
        kept = [make(device, 3 * MIB)]
    with pool.tag("b"):
        kept.append(make(device, 5 * MIB))
    with pool:
        kept.append(make(device, 2 * MIB))
    with pytest.raises(torch_vmm.StillInUseError, match="'counted' still holds 3 live blocks") as refused:
        pool.close()
    assert refused.value.live_blocks == 3
    assert refused.value.live_bytes == sum(tensor.nbytes for tensor in kept)
    del kept[:2]
    with pytest.raises(torch_vmm.StillInUseError, match="'counted' still holds 1 live block,"):
        pool.close()
    kept.clear()


def test_a_method_is_not_taken_for_an_attribute(tagged: Pool) -> None:
    with pytest.raises(AttributeError, match=r"tag\(\) is a method"):
        tagged.tag = "weights"  # type: ignore[method-assign,assignment]
    with tagged.tag("weights"):
        pass


def test_sealing_says_what_is_no_tensor(tagged: Pool) -> None:
    with pytest.raises(torch_vmm.InvalidArgumentError, match="None is no tensor"):
        tagged.seal([None])  # type: ignore[list-item]


def test_sealing_says_what_is_not_committed(make_pool: Callable[..., Pool], device: str) -> None:
    with make_pool("1GiB") as pool:
        sparse = torch_vmm.sparse((4096, 1024), torch.float32, device)
        with pytest.raises(torch_vmm.InvalidArgumentError, match="not all is there"):
            pool.seal(sparse)
        del sparse
