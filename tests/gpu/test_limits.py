"""Limits that torch sets, and the device's own: what is refused, in which words, and what is tried before."""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import torch_vmm
from tests.consistency import check_device, check_pool
from tests.gpu.conftest import Busy
from tests.gpu.native import both
from tests.gpu.patterns import intact, queue_stamp
from tests.gpu.programs import Process, expect_done, running
from tests.gpu.workloads import statistics as work
from tests.helpers import GIB, MIB

pytestmark = pytest.mark.alone  # most of it fills the GPU, or a share of it, and reads what is free

MakeShared = Callable[..., torch_vmm.SharedMemoryPool]
MakePool = Callable[..., torch_vmm.VirtualMemoryPool]


@pytest.fixture(autouse=True)
def _numbers_agree() -> Iterator[None]:
    """After each test all numbers of the device agree, and torch's own limit is off."""
    yield
    torch.cuda.synchronize()
    assert torch.cuda.get_per_process_memory_fraction() == 1.0
    check_device()


def block_in(pool: torch_vmm.VirtualMemoryPool, size: int) -> torch.Tensor:
    with pool:
        return torch.empty(size, dtype=torch.uint8, device="cuda")


# -- The fraction ------------------------------------------------------------------------------------------------------


def test_the_fraction_is_answered_and_refused_as_natively() -> None:
    ours, native = both(work.fractions)
    assert ours == native
    assert ours["refused"] == {"-0.1": "ValueError", "1.1": "ValueError", "1": "TypeError", "'0.5'": "TypeError"}


def test_the_fraction_comes_back_exactly() -> None:
    try:
        for fraction in (0.9, 1 / 3, 0.7000000000000001, 0.5, 1.0):
            torch.cuda.set_per_process_memory_fraction(fraction)
            assert torch.cuda.get_per_process_memory_fraction() == fraction
            assert torch.cuda.get_per_process_memory_fraction("cuda:0") == fraction
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_beyond_the_fraction_errors_and_their_counts_are_the_native_ones() -> None:
    ours, native = both(work.beyond_the_fraction)
    assert ours == native
    assert ours["errors"] == [
        ["OutOfMemoryError", f"CUDA out of memory. Tried to allocate {amount}", "GPU 0"]
        for amount in ("2.00 GiB", "512.00 MiB")
    ]
    assert ours["intact"]
    assert (ours["num_ooms"], ours["num_alloc_retries"]) == (2, 2)


def test_what_costs_the_native_allocator_a_flush_is_met_from_idle_memory() -> None:
    """The documented difference: idle chunks back the new block where they are, so there is nothing to try again."""
    ours, native = both(work.met_by_a_flush)
    assert native == {"num_ooms": 0, "num_alloc_retries": 1}
    assert ours == {"num_ooms": 0, "num_alloc_retries": 0}


def test_the_fraction_caps_what_all_models_reserve_together(make_shared: MakeShared) -> None:
    shared = make_shared("4GiB")
    models = [shared.register_model(f"model-{number}") for number in range(3)]
    torch.cuda.empty_cache()
    cap = torch.cuda.memory_reserved() + 300 * MIB
    blocks: list[torch.Tensor] = []

    def fill() -> None:
        for number in range(1000):
            blocks.append(block_in(models[number % 3], 7 * MIB))
            assert torch.cuda.memory_reserved() <= cap

    with work.capped(300 * MIB):
        with pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory\. Tried to allocate 7\.00 MiB"):
            fill()
        assert 200 * MIB < sum(block.numel() for block in blocks) <= 300 * MIB
        blocks.clear()
        large = block_in(models[0], 256 * MIB)  # what the others had
        assert torch.cuda.memory_reserved() <= cap
        del large
    assert block_in(models[1], 400 * MIB).numel() == 400 * MIB


def test_threads_together_do_not_overshoot_the_fraction(make_shared: MakeShared) -> None:
    shared = make_shared("4GiB")
    models = [shared.register_model(f"model-{number}") for number in range(4)]
    refused = [0] * 4

    def fits(number: int, size: int, blocks: list[torch.Tensor]) -> bool:
        try:
            blocks.append(block_in(models[number], size))
        except torch.OutOfMemoryError:
            return False
        return True

    def work_in(number: int) -> None:
        blocks: list[torch.Tensor] = []
        for turn in range(60):
            if not fits(number, (1 + (turn * 7 + number) % 23) * MIB, blocks):
                refused[number] += 1
                del blocks[::2]

    torch.cuda.empty_cache()
    cap = torch.cuda.memory_reserved() + 256 * MIB
    with work.capped(256 * MIB):
        torch.cuda.reset_peak_memory_stats()
        threads = [threading.Thread(target=work_in, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert torch.cuda.max_memory_reserved() <= cap
    assert sum(refused) > 0
    assert torch.cuda.memory_stats()["num_ooms"] >= sum(refused)


def test_a_fraction_of_nothing_refuses_every_new_chunk() -> None:
    kept = queue_stamp(torch.empty(3 * MIB, dtype=torch.uint8, device="cuda"), 1)
    torch.cuda.set_per_process_memory_fraction(0.0)
    try:
        assert torch.cuda.get_per_process_memory_fraction() == 0.0
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert intact(kept, 1)


_HEAD = """
import torch, torch_vmm
torch_vmm.enable()
MIB = 2**20
def block(size):
    return torch.empty(int(size), dtype=torch.uint8, device="cuda")
def capped_at(fraction):
    total = torch.cuda.get_device_properties(0).total_memory
    assert torch.cuda.get_per_process_memory_fraction() == fraction, torch.cuda.get_per_process_memory_fraction()
    try:
        block(1.5 * fraction * total)
    except torch.OutOfMemoryError as error:
        assert str(error).startswith("CUDA out of memory. Tried to allocate"), error
    else:
        raise AssertionError("no error")
    kept = block(0.5 * fraction * total)
    assert torch.cuda.memory_reserved() <= fraction * total
    assert torch.cuda.memory_stats()["num_ooms"] == 1
    torch.cuda.set_per_process_memory_fraction(1.0)
    block(1.5 * fraction * total)
"""

# Each needs a process in which nothing has been allocated.
PROGRAMS = {
    "the fraction before the first allocation": """
torch.cuda.set_per_process_memory_fraction(0.01)
capped_at(0.01)
""",
    "the fraction of the configuration": """
capped_at(0.01)
""",
    "sizes that torch would not split": """
def sizes(numbers):
    return [numbers["oversize_allocations." + metric] for metric in ("current", "peak", "allocated", "freed")]
blocks = [block(size * MIB) for size in (63, 64, 100)]
stats = torch.cuda.memory_stats()
assert stats["max_split_size"] == 64 * MIB, stats["max_split_size"]
assert sizes(stats) == [2, 2, 2, 0], sizes(stats)
pool = torch_vmm.VirtualMemoryPool("1GiB")
with pool:
    inside = block(64 * MIB)
assert sizes(pool.memory_stats()) == [1, 1, 1, 0], sizes(pool.memory_stats())
assert pool.memory_stats()["max_split_size"] == 64 * MIB
assert sizes(torch.cuda.memory_stats()) == [3, 3, 3, 0]
del blocks, inside
assert sizes(torch.cuda.memory_stats()) == [0, 3, 3, 3]
torch.cuda.reset_peak_memory_stats()
torch.cuda.reset_accumulated_memory_stats()
assert sizes(torch.cuda.memory_stats()) == [0, 0, 0, 0]
""",
    "segments that torch would expand": """
import warnings
warnings.simplefilter("error")
kept = block(MIB)
settings = torch.cuda.memory._snapshot()["allocator_settings"]
assert settings["expandable_segments"] is True, settings
""",
    "numbers before CUDA is initialised": """
assert torch.cuda.memory_stats() == {} == torch.cuda.memory_stats_as_nested_dict()
assert torch.cuda.memory_allocated() == torch.cuda.max_memory_reserved() == 0
torch.cuda.empty_cache()
assert torch.cuda.get_allocator_backend() == "torch_vmm"
assert not torch.cuda.is_initialized()
torch.cuda.init()
assert torch.cuda.memory_allocated() == torch.cuda.memory_reserved() == 0
assert torch.cuda.memory_snapshot() == []
assert len(torch.cuda.memory_stats()) >= 122
torch.cuda.reset_peak_memory_stats()
torch.cuda.memory_summary()
""",
}
_CONFIGURATION = {
    "the fraction of the configuration": "per_process_memory_fraction:0.01",
    "sizes that torch would not split": "max_split_size_mb:64",
    "segments that torch would expand": "expandable_segments:True",
}


@pytest.fixture(scope="module")
def started() -> Iterator[dict[str, Process]]:
    programs = {}
    for name, body in PROGRAMS.items():
        setting = f'import os\nos.environ["PYTORCH_CUDA_ALLOC_CONF"] = "{_CONFIGURATION.get(name, "")}"\n'
        programs[name] = (setting if name in _CONFIGURATION else "") + _HEAD + body + 'print("done")\n'
    with running(programs) as processes:
        yield processes


@pytest.mark.no_memcheck  # other processes
@pytest.mark.parametrize("name", PROGRAMS)
def test_from_the_first_allocation(started: dict[str, Process], name: str) -> None:
    expect_done(started[name])


# -- What can't be -----------------------------------------------------------------------------------------------------


def test_more_than_any_device_has_is_refused_as_natively() -> None:
    ours, native = both(work.beyond_the_device)
    assert ours == native
    beyond = ["OutOfMemoryError", "CUDA out of memory. Tried to allocate more than 1EB memory"]
    assert ours["errors"][str(2**62)] == ours["errors"][str(2**60)] == beyond
    assert ours["errors"][str(2**42)][1:] == ["CUDA out of memory. Tried to allocate 4096.00 GiB", "GPU 0"]


def test_misuse_raises_what_it_raises_natively() -> None:
    ours, native = both(work.misused)
    assert ours == native
    assert ours["nothing"] == ours["the block held meanwhile"] == "fine"


def test_memory_by_pointer_is_counted_as_natively() -> None:
    ours, native = both(work.by_pointer)
    assert ours == native
    assert ours["nothing"] == 0
    assert ours["on the side stream"] == [False] * 4 + [True] * 2


def test_memory_by_pointer_belongs_to_the_model(make_pool: MakePool) -> None:
    pool = make_pool("1GiB")
    with pool:
        pointer = torch.cuda.caching_allocator_alloc(5 * MIB)
    assert torch_vmm.pool_of(pointer) is pool
    assert pool.memory_allocated() == 5 * MIB
    torch.cuda.caching_allocator_delete(pointer)
    assert pool.memory_allocated() == 0


@pytest.mark.parametrize("size", [-1, -(2**40), 2**62])
def test_a_size_that_is_none_is_an_error_and_nothing_else(size: int) -> None:
    before = torch.cuda.memory_stats()
    with pytest.raises(RuntimeError):
        torch.cuda.caching_allocator_alloc(size)
    assert torch.cuda.memory_stats() == before


def test_without_the_cache_memory_is_cudas_as_natively(make_pool: MakePool) -> None:
    ours, native = both(work.uncached)
    assert ours == native
    assert ours["silent"]
    assert ours["intact"]
    assert ours["silent at its end"]
    with make_pool("1GiB") as pool:  # a model's, too
        assert work.uncached() == ours
    assert pool.memory_allocated() == 0


# -- The device itself -------------------------------------------------------------------------------------------------


@contextmanager
def held_by_another_library(size: int) -> Iterator[None]:
    """``size`` bytes of the device are a library's that has its memory from CUDA itself."""
    driver = ctypes.CDLL("libcuda.so.1")
    torch.cuda.synchronize()  # makes torch's context this thread's
    address = ctypes.c_uint64()
    status = driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size))
    assert status == 0, f"cuMemAlloc: {status}"
    try:
        yield
    finally:
        driver.cuMemFree_v2(address)


@pytest.mark.needs_gpu("2.5 GiB, touched")
@pytest.mark.no_memcheck  # it fills the GPU
def test_when_the_device_runs_out_idle_memory_is_taken_before_the_error_with_both_figures(make_pool: MakePool) -> None:
    giver, taker = make_pool("64GiB", name="giver"), make_pool("64GiB", name="taker")
    kept = queue_stamp(block_in(giver, 10 * MIB), 1)
    torch.cuda.empty_cache()
    block_in(giver, 2 * GIB)
    assert giver.memory_reserved() >= 2 * GIB
    ooms = torch.cuda.memory_stats()["num_ooms"]
    with held_by_another_library(torch.cuda.mem_get_info()[0] - GIB):
        assert torch.cuda.mem_get_info()[0] <= GIB
        taken = block_in(taker, 5 * GIB // 2)  # 1 GiB is free, 2 GiB are idle in the other pool
        queue_stamp(taken, 2)
        assert giver.memory_reserved() < GIB
        assert torch.cuda.memory_stats()["num_ooms"] == ooms
        with pytest.raises(torch.OutOfMemoryError) as caught:
            block_in(taker, 2 * GIB)
        free, total = torch.cuda.mem_get_info()
        assert intact(taken, 2)
        assert intact(kept, 1)
    text = str(caught.value)
    assert text.startswith("CUDA out of memory. Tried to allocate 2.00 GiB")
    # What the device has and has free; what the pools hold.
    assert f"{round(total / GIB, 1):g} GiB" in text or f"{total / GIB:.2f} GiB" in text, text
    told = re.search(r"free ([\d.]+) (\w+)|of which ([\d.]+) (\w+) is free", text)
    assert told is not None, text
    amount, unit = (group for group in told.groups() if group is not None)
    assert abs(float(amount) * {"B": 1, "KiB": 1024, "MiB": MIB, "GiB": GIB}[unit] - free) < 128 * MIB, text
    assert re.search(r"'taker' 2\.50? GiB", text), text
    assert torch.cuda.memory_stats()["num_ooms"] == ooms + 1
    assert block_in(taker, 4 * GIB).numel() == 4 * GIB
    check_pool(taker)
    del taken, kept


def test_what_waits_for_a_stream_is_waited_for_before_an_error(make_pool: MakePool, busy: Busy) -> None:
    pool = make_pool("1GiB", physical_limit="64MiB")
    side = torch.cuda.Stream()
    block = queue_stamp(block_in(pool, 40 * MIB), 1)
    copy = torch.empty_like(block)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        kernel = busy(60)
        copy.copy_(block)
    block.record_stream(side)
    del block
    again = queue_stamp(block_in(pool, 40 * MIB), 2)
    assert kernel.query(), "the block was given out under the copy"
    stats = check_pool(pool, fresh=True)
    assert (stats["num_ooms"], stats["num_alloc_retries"]) == (0, 1)
    assert intact(copy, 1)
    assert intact(again, 2)


def share(block: torch.Tensor) -> tuple[bytes, int]:
    """Shares ``block`` as torch.multiprocessing does; returns where its receivers are counted.

    While they are, the block's memory is torch's to keep, whatever becomes of the tensor.
    """
    try:
        shared = block.untyped_storage()._share_cuda_()
    except torch.AcceleratorError as error:
        pytest.skip(f"CUDA's events cannot be shared between processes here: {error}")
    return shared[4], shared[5]


def test_memory_that_torch_itself_keeps_is_collected_before_an_error(make_pool: MakePool) -> None:
    """torch registers one free-memory callback: it frees shared tensors whose receivers are gone."""
    pool = make_pool("1GiB", physical_limit="64MiB")
    block = block_in(pool, 40 * MIB)
    counter, offset = share(block)
    del block
    assert pool.memory_allocated() == 40 * MIB
    with pytest.raises(torch.OutOfMemoryError):  # the receiver still counts
        block_in(pool, 40 * MIB)
    torch.UntypedStorage._release_ipc_counter(counter, offset, device="cuda:0")
    assert pool.memory_allocated() == 40 * MIB
    again = block_in(pool, 40 * MIB)
    assert pool.memory_allocated() == 40 * MIB
    assert pool.memory_stats()["num_ooms"] == 1
    assert intact(queue_stamp(again, 3), 3)


# -- cuDNN -------------------------------------------------------------------------------------------------------------


@pytest.mark.needs_gpu("cuDNN")
@pytest.mark.parametrize("limit", [None, "192MiB"])
def test_cudnn_finds_its_workspaces_by_benchmark(make_pool: MakePool, limit: str | None) -> None:
    if not torch.backends.cudnn.is_available():
        pytest.skip("no cuDNN")
    pool = make_pool("16GiB", physical_limit=limit)
    results = []
    for benchmark in (False, True):
        with pool, torch.backends.cudnn.flags(enabled=True, benchmark=benchmark):
            torch.manual_seed(3)
            net = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 16, 5, stride=2)).cuda()
            source = torch.randn(8, 16, 48, 48, device="cuda", requires_grad=True)
            out = net(source)
            out.square().mean().backward()
            assert source.grad is not None
            results.append((out.detach().clone(), source.grad.clone(), net[0].weight.grad.clone()))
        del net, source, out
    for plain, benchmarked in zip(*results, strict=True):
        torch.testing.assert_close(benchmarked, plain, rtol=1e-2, atol=1e-2)  # as near as TF32 comes
    check_pool(pool)
    if limit is not None:
        assert pool.max_memory_reserved() <= 192 * MIB
