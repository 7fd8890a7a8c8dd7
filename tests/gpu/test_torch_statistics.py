"""torch's numbers: equal to what the native allocator says of the same work, and true of each model."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torch_vmm
from tests.consistency import KEYS, PARTS, check_device, check_live, check_pool, check_sums
from tests.gpu.conftest import Busy
from tests.gpu.native import both
from tests.gpu.workloads import statistics as work
from tests.helpers import MIB, rounded

MakeShared = Callable[..., torch_vmm.SharedMemoryPool]
MakePool = Callable[..., torch_vmm.VirtualMemoryPool]


@pytest.fixture(autouse=True)
def _numbers_agree() -> Iterator[None]:
    """Before and after each test all numbers of the device agree."""
    check_device()
    yield
    torch.cuda.synchronize()
    check_device()


def block_in(pool: torch_vmm.VirtualMemoryPool, size: int) -> torch.Tensor:
    with pool:
        return torch.empty(size, dtype=torch.uint8, device="cuda")


# -- Beside the native allocator ---------------------------------------------------------------------------------------


def test_all_names_are_the_native_ones(make_pool: MakePool) -> None:
    ours, native = both(work.names)
    assert len(KEYS) == 122
    assert set(native["keys"]) >= KEYS
    assert ours == native
    pool = make_pool("1GiB")
    kept = block_in(pool, 1)
    assert list(pool.memory_stats()) == native["keys"]
    (segment,) = pool.memory_snapshot()
    assert sorted(segment) == native["segment"]
    assert sorted(segment["blocks"][0]) == native["block"]
    del kept


def test_the_same_work_gives_the_same_numbers() -> None:
    ours, native = both(work.counted)
    for stage, (here, there) in enumerate(zip(ours, native, strict=True)):
        assert here == there, f"stage {stage}"
    # What the native allocator says is what the sizes say.
    sizes = [*work.SMALL, *work.LARGE]
    assert ours[1]["allocated_bytes.all.current"] == sum(map(rounded, sizes))
    assert ours[1]["requested_bytes.all.current"] == sum(sizes)
    assert ours[1]["allocation.small_pool.current"] == len(work.SMALL)
    assert ours[-1]["allocated_bytes.all.current"] == 0
    assert ours[-1]["allocated_bytes.all.allocated"] == ours[-1]["allocated_bytes.all.freed"]


def test_resets_leave_what_they_leave_natively() -> None:
    ours, native = both(work.reset)
    assert ours == native
    assert ours["not zero"] == []
    assert ours["allocated"]["all"] == 12 * MIB
    assert ours["peaks"]["allocated_bytes.all.peak"] == rounded(3000) + 10 * MIB


@pytest.mark.no_memcheck  # it relies on a kernel's length
def test_a_deferred_free_is_counted_as_natively() -> None:
    ours, native = both(work.deferred)
    assert ours == native
    before, waiting, beside, after, end = ours
    assert before["allocated_bytes.all.current"] == before["active_bytes.all.current"] == 10 * MIB
    assert waiting["allocated_bytes.all.current"] == waiting["allocation.all.current"] == 0
    assert waiting["active_bytes.all.current"] == waiting["requested_bytes.all.current"] == 10 * MIB
    assert beside["active_bytes.all.current"] == 20 * MIB
    assert after["active_bytes.all.current"] == 22 * MIB
    assert end["active_bytes.all.current"] == 0


def test_an_empty_cache_is_counted_as_natively() -> None:
    ours, native = both(work.flushed)
    assert ours == native == {"num_sync_all_streams": 1, "num_ooms": 0}


def test_the_checker_of_all_numbers_accepts_the_native_ones_too() -> None:
    ours, native = both(work.consistent)
    assert ours == native == len(KEYS)


def test_the_profiler_is_told_what_natively_it_is() -> None:
    ours, native = both(work.profiled)
    assert ours == native
    sizes = [rounded(3000), 10 * MIB, 1024, 10 * MIB]
    assert ours["bytes"] == [*sizes, -sizes[0], -sizes[1]]
    totals = [sum(ours["bytes"][: number + 1]) for number in range(len(ours["bytes"]))]
    assert ours["allocated"] == totals
    assert ours["held"] == totals[-1] == sum(ours["by operation"].values())
    assert ours["by operation"]["aten::empty"] >= sizes[0] + sizes[1]
    assert ours["by operation"]["[memory]"] == -sizes[0] - sizes[1]
    assert ours["reserved is enough"]


def test_the_profiler_sees_every_model(make_shared: MakeShared) -> None:
    shared = make_shared("1GiB")
    models = [shared.register_model(f"model-{number}") for number in range(2)]
    outside = work.profiled()
    for model in models:
        with model:
            inside = work.profiled()
        assert inside == outside


# -- Other faces of the same numbers -----------------------------------------------------------------------------------


def test_the_allocator_names_itself() -> None:
    assert torch.cuda.get_allocator_backend() == torch.cuda.memory.get_allocator_backend() == "torch_vmm"
    current = torch.cuda.memory._get_current_allocator()
    assert isinstance(current, torch.cuda.memory._CUDAAllocator)
    assert isinstance(current.allocator(), torch._C._cuda_CUDAAllocator)
    assert current.allocator() is torch_vmm.allocator()
    # To change to what is current already is refused, as natively: it has been used.
    with pytest.raises(RuntimeError):
        torch.cuda.memory.change_current_allocator(current)


def test_the_free_memory_is_the_drivers() -> None:
    free, total = torch.cuda.mem_get_info()
    assert torch.cuda.mem_get_info(0)[1] == torch.cuda.mem_get_info("cuda:0")[1] == total
    assert torch.accelerator.get_memory_info(0)[1] == total == torch.cuda.get_device_properties(0).total_memory
    assert torch.cuda.memory_reserved() <= total - free


def test_every_way_to_name_the_device_gives_the_same() -> None:
    kept = torch.empty(5000, device="cuda")
    expected = dict(torch.cuda.memory_stats())
    for device in (None, 0, "cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 0)):
        assert torch.cuda.memory_stats(device) == expected
        assert torch.cuda.memory_allocated(device) == expected["allocated_bytes.all.current"]
        assert torch.cuda.max_memory_reserved(device) == expected["reserved_bytes.all.peak"]
    del kept


def test_former_names_say_the_same() -> None:
    with pytest.warns(FutureWarning):
        assert torch.cuda.memory_cached() == torch.cuda.memory_reserved()
    with pytest.warns(FutureWarning):
        assert torch.cuda.max_memory_cached() == torch.cuda.max_memory_reserved()
    for reset in (torch.cuda.reset_max_memory_allocated, torch.cuda.reset_max_memory_cached):
        torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
        with pytest.warns(FutureWarning):
            reset()
        assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated()


def test_torch_accelerator_resets_and_empties_as_torch_cuda_does(make_pool: MakePool) -> None:
    pool = make_pool("1GiB")
    kept = block_in(pool, 20 * MIB)
    block_in(pool, 40 * MIB)
    assert torch.accelerator.memory_stats() == torch.cuda.memory_stats() == torch.accelerator.memory_stats(0)
    assert torch.accelerator.max_memory_reserved() == torch.cuda.max_memory_reserved()
    assert torch.accelerator.max_memory_allocated() > torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    assert torch.accelerator.max_memory_allocated() == torch.cuda.memory_allocated()
    assert pool.max_memory_allocated() == pool.memory_allocated() == 20 * MIB
    torch.accelerator.reset_accumulated_memory_stats()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == 0
    assert pool.memory_stats()["allocation.all.allocated"] == 0
    reserved = torch.accelerator.memory_reserved()
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved() <= reserved - 40 * MIB
    assert torch.accelerator.memory_reserved() == torch.cuda.memory_reserved()
    del kept


def test_the_processes_of_the_gpu_are_listed_as_natively() -> None:
    # Without pynvml, or in a container that hides other processes, it says so.
    ours, native = both(work.processes)
    assert ours == native


def test_pinned_host_memory_is_still_torchs_own(make_pool: MakePool) -> None:
    before = torch.cuda.memory_stats()
    with make_pool("1GiB"):
        pinned = torch.empty(5 * MIB, dtype=torch.uint8, pin_memory=True)
    assert torch.cuda.host_memory_stats()["active_bytes.current"] >= 5 * MIB
    assert pinned.is_pinned()
    assert torch.cuda.memory_stats() == before


# -- One model ---------------------------------------------------------------------------------------------------------


def test_models_sum_to_the_device_through_a_random_program(make_shared: MakeShared, busy: Busy) -> None:
    shared = make_shared("1GiB")
    models = [shared.register_model(f"model-{number}") for number in range(3)]
    default = torch_vmm.current_pool()
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    gc.collect()  # of earlier tests
    before = torch.cuda.memory_allocated()
    chance = random.Random(17)
    live: list[torch.Tensor] = []
    for step in range(160):
        if live and chance.random() < 0.45:
            block = live.pop(chance.randrange(len(live)))
            if chance.random() < 0.2:
                with torch.cuda.stream(streams[1]):
                    busy(1)
                block.record_stream(streams[1])
            del block
        else:
            size = int(2 ** chance.uniform(0, 24))
            with torch.cuda.stream(chance.choice(streams)):
                live.append(block_in(chance.choice([*models, default]), size))
        if step % 8 == 0:
            check_device()
            for model in models:
                check_pool(model, fresh=True)
        if step % 40 == 39:
            chance.choice(models).empty_cache()
            torch.cuda.synchronize()
            check_live(live, before)
    torch.cuda.synchronize()
    for model in (*models, default):
        block_in(model, 1)  # what waited for a stream is settled by the next request
    check_live(live, before)
    check_sums(models)
    live.clear()
    check_sums(models)
    torch.cuda.empty_cache()
    check_sums(models)


def test_statistics_are_the_sum_of_a_training_steps_tensors(make_pool: MakePool) -> None:
    pool = make_pool("8GiB")

    def train() -> list[torch.Tensor]:
        model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
        batch = torch.randn(256, 512, device="cuda")
        for _ in range(2):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        state = [value for each in optimizer.state.values() for value in each.values()]
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        return [batch, *model.parameters(), *gradients, *(value for value in state if value.is_cuda)]

    with pool:
        train()  # cuBLAS makes its workspaces, for this thread and for autograd's
        gc.collect()
        before, of_the_pool = torch.cuda.memory_allocated(), pool.memory_allocated()
        kept = train()
    check_live(kept, before)
    assert pool.memory_allocated() - of_the_pool == torch.cuda.memory_allocated() - before
    check_device()
    check_pool(pool, fresh=True)


def test_a_models_peaks_are_its_own_and_do_not_sum(make_shared: MakeShared) -> None:
    shared = make_shared("1GiB")
    models = [shared.register_model(f"model-{number}") for number in range(2)]
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    for model in models:
        block_in(model, 64 * MIB)
    assert [model.max_memory_allocated() for model in models] == [64 * MIB, 64 * MIB]
    assert torch.cuda.max_memory_allocated() - base == 64 * MIB
    models[0].reset_peak_memory_stats()
    assert models[0].max_memory_allocated() == 0
    assert models[1].max_memory_allocated() == torch.cuda.max_memory_allocated() - base == 64 * MIB


def test_stranded_memory_is_what_torch_calls_an_inactive_split(make_pool: MakePool) -> None:
    pool = make_pool("1GiB")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_stats()
    blocks = [block_in(pool, 700) for _ in range(40)]
    for part in ("all", "small_pool"):
        stranded = pool.memory_stats()[f"inactive_split_bytes.{part}.current"]
        assert stranded == 2 * MIB - 40 * 1024 == pool.stats().stranded_bytes
        assert pool.memory_stats()[f"inactive_split.{part}.current"] == 1
    now = torch.cuda.memory_stats()
    for key, rise in (("inactive_split", 1), ("inactive_split_bytes", stranded)):
        assert now[f"{key}.all.current"] - before[f"{key}.all.current"] == rise
        assert now[f"{key}.all.allocated"] - before[f"{key}.all.allocated"] >= rise
    del blocks[1:39]  # a hole of 38 KiB, and the rest
    stats = check_pool(pool, fresh=True)
    assert stats["inactive_split.small_pool.current"] == 2
    assert stats["inactive_split_bytes.small_pool.current"] == stranded + 38 * 1024
    blocks.clear()
    pool.empty_cache()
    stats = check_pool(pool, fresh=True)
    assert stats["inactive_split_bytes.all.current"] == stats["inactive_split.all.current"] == 0
    assert stats["inactive_split_bytes.all.peak"] == stranded + 38 * 1024


def test_a_models_table_has_torchs_rows(make_pool: MakePool) -> None:
    pool = make_pool("1GiB", name="read me")
    kept = block_in(pool, 300 * MIB)

    def rows(text: str) -> dict[str, list[str]]:
        lines = [line.strip("|").split("|") for line in text.splitlines() if line.count("|") == 6]
        return {cells[0].strip().replace("GPU ", "").lower(): cells[1:] for cells in lines if cells[0].strip()}

    for abbreviated in (False, True):
        ours, torchs = pool.memory_summary(abbreviated), torch.cuda.memory_summary(abbreviated=abbreviated)
        assert list(rows(ours)) == list(rows(torchs))
        assert {len(line) for line in ours.splitlines()} == {len(line) for line in torchs.splitlines()}
        assert "read me" in ours.splitlines()[1]
    assert [cell.split() for cell in rows(ours)["allocated memory"]] == [["307200", "KiB"]] * 3 + [["0", "B"]]
    del kept


def test_a_models_snapshot_is_its_part_of_the_devices(make_shared: MakeShared) -> None:
    shared = make_shared("1GiB")
    models = [shared.register_model(f"model-{number}") for number in range(2)]
    live = [block_in(models[number % 2], 1000 + number * 91_919) for number in range(60)]
    del live[::3]

    def told(segment: dict[str, Any]) -> dict[str, Any]:
        blocks = [(block["address"], block["size"], block["state"]) for block in segment["blocks"]]
        fields = ("device", "total_size", "allocated_size", "active_size", "requested_size", "stream", "segment_type")
        return {field: segment[field] for field in fields} | {"blocks": blocks}

    whole = {segment["address"]: told(segment) for segment in torch.cuda.memory_snapshot()}
    for model in models:
        mine = model.memory_snapshot()
        assert {segment["address"]: told(segment) for segment in mine}.items() <= whole.items()
        inside = range(model.base_address, model.base_address + model.capacity)
        assert all((address in inside) == (address in {s["address"] for s in mine}) for address in whole)


def test_the_parts_of_a_number_are_small_and_large_requests(make_pool: MakePool) -> None:
    pool = make_pool("1GiB")
    kept = [block_in(pool, MIB), block_in(pool, MIB + 1)]
    stats = check_pool(pool, fresh=True)
    assert [stats[f"allocated_bytes.{part}.current"] for part in PARTS] == [2 * MIB + 512, MIB, MIB + 512]
    assert [stats[f"requested_bytes.{part}.current"] for part in PARTS] == [2 * MIB + 1, MIB, MIB + 1]
    assert [stats[f"allocation.{part}.current"] for part in PARTS] == [2, 1, 1]
    assert stats["reserved_bytes.small_pool.current"] == 2 * MIB
    del kept
