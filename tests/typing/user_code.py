"""What users write, for mypy and pyright to read: it is checked (tests/python/test_types.py), never run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import torch

import torch_vmm
from torch_vmm.memory_saver import torch_memory_saver


def becoming_the_allocator() -> None:
    torch_vmm.enable()
    torch_vmm.enable(device="cpu")
    torch.cuda.memory.change_current_allocator(torch_vmm.allocator())
    torch.cuda.memory.change_current_allocator(
        torch.cuda.memory.CUDAPluggableAllocator(torch_vmm.library_path(), "torch_vmm_malloc", "torch_vmm_free")
    )
    with torch.cuda.use_mem_pool(torch.cuda.MemPool(torch_vmm.allocator())):
        pass
    with torch.cuda.use_mem_pool(torch.cuda.MemPool(torch_vmm.allocator().allocator(), use_on_oom=True)):
        pass
    enabled: bool = torch_vmm.is_enabled() and torch_vmm.is_enabled(torch.device("cuda", 1))
    print(enabled)


def pools() -> int:
    with torch_vmm.SharedMemoryPool("40GiB", device="cuda:0") as gpu:
        llama = gpu.register_model("llama", "64GiB", physical_limit=16 << 30, floor="1GiB", priority=1)
        with llama, torch_vmm.use_model("llama") as entered:
            net = torch.nn.Linear(8, 8)
            reveal: torch_vmm.VirtualMemoryPool = entered
        llama.physical_limit = None
        gpu.physical_limit = 1 << 30
        names: list[str] = [*gpu, *gpu.models]
        stats: torch_vmm.GlobalMemoryStats = gpu.global_stats()
        pool = torch_vmm.VirtualMemoryPool("1TiB", page_size=2 << 20, physical_limit="1GiB", name="scratch")
        address: int = pool.allocate(0, "4MiB")
        view: torch.Tensor = pool.tensor(0, (1024, 1024), torch.float32)
        found: torch_vmm.VirtualMemoryPool | None = torch_vmm.pool_of(net.weight)
        with gpu.record_timeline(interval=0.1) as timeline:
            samples: list[torch_vmm.TimelineSample] = timeline.samples
        timeline.save("occupancy.svg")
        table: str = torch_vmm.report("cuda:0") + str(gpu)
        print(table, samples[0].physical_bytes["llama"] + samples[-1].store_bytes)
        print(names, stats.store_bytes, address, view, found, reveal)
        return len(gpu) + pool.stats().idle_bytes + torch_vmm.current_pool("cpu").memory_allocated()


def ranges() -> int:
    table = torch_vmm.elastic((10, 4), torch.float32, "cuda", max_shape=(1000, 4))
    grown: torch_vmm.ElasticTensor = table.resize_(20)
    table.reserve(30)
    plain: torch.Tensor = torch.nn.functional.relu(grown) + table[1]
    cache = torch_vmm.ElasticKVCache(4096)
    keys, values = cache.update(plain, plain, layer_idx=0)
    print(keys, values, cache.get_seq_length(), table.max_shape, table.reserved_rows)
    ring = torch_vmm.aligned((1 << 20,), torch.float32, "cpu")
    twice: torch.Tensor = torch_vmm.alias(ring, 2, read_only=True)
    whole: torch.Tensor = torch_vmm.concat_views([ring, ring])
    pool = torch_vmm.current_pool("cpu")
    pool.seal([ring])
    pool.unseal(ring)
    state: bool = torch_vmm.sealed(ring)
    print(twice, whole, state, pool.shared_bytes)
    huge: torch_vmm.SparseTensor = torch_vmm.sparse((1 << 40,), torch.float16, "cpu", zeros=False, page_size="4MiB")
    huge.commit((slice(0, 4),))
    spans: list[slice] = huge.committed_spans()
    print(spans, huge.is_committed(5), huge.page_size)
    return table.shrink_to_fit() + huge.decommit(slice(None))


@torch_vmm.use_model("llama")
def decorated(count: int, *, scale: float = 1.0) -> torch.Tensor:
    return torch.ones(count) * scale


@torch_vmm.use_model("llama", device="cuda")
def stream(count: int) -> Iterator[int]:
    yield from range(count)


@torch_vmm.use_model("llama")
async def serve(prompt: str) -> str:
    carried = torch_vmm.carry(decorated)
    answer: torch.Tensor = await asyncio.to_thread(carried, 3, scale=2.0)
    return f"{prompt}{answer}"


def types_are_kept() -> tuple[torch.Tensor, Iterator[int]]:
    return decorated(3, scale=2), stream(3)


def strictness() -> None:
    torch_vmm.strict()
    with torch_vmm.strict("cuda:0", action="warn"):
        pass


def low_level() -> None:
    with torch_vmm.VirtualMemoryManager("cuda") as manager:
        range_: torch_vmm.VirtualAddressRange = manager.reserve("64MiB", alignment="2MiB")
        physical: torch_vmm.PhysicalAllocation = manager.alloc_physical(manager.granularity, device="cpu")
        manager.map(range_, physical, offset=0)
        manager.set_access(range_, torch_vmm.AccessFlags.READ_WRITE, device=["cuda:0", "cuda:1"])
        records: list[torch_vmm.MappingRecord] = manager.mappings(range_)
        inside: bool = range_.contains(range_.base + records[0].va_offset)
        print(inside, manager.tensor(range_, 0, 16, torch.uint8))


def buffers(n: int) -> torch.Tensor:
    with torch_vmm.MemoryPool("cuda:0") as pool, torch_vmm.NativeMemoryPool(max_size_bytes="1GiB") as native:
        pool.set_threshold("1GiB")
        pool.set_threshold(None)
        side = torch.cuda.Stream()
        with pool.alloc(n, torch.bfloat16, side) as buffer:
            other: torch_vmm.PooledBuffer = pool.alloc(n, stream=side.cuda_stream)
            buffer.record_stream(torch.cuda.current_stream())
            shown: torch.Tensor = other.tensor()
        stats: torch_vmm.PoolStats = pool.stats()
        address: int = native.alloc_async("1MiB", stream=side)
        native.free_async(address, side)
        native.release_threshold = 1 << 20
        driver: torch_vmm.NativePoolStats = native.stats()
        print(len(buffer), stats.cached_bytes - pool.trim(0), driver.used_bytes, native.raw)
        return shown


def errors() -> None:
    try:
        decorated(1 << 40)
    except torch_vmm.OutOfMemoryError as error:
        short: int = error.requested - error.available
        print(short, error.limit, error.pool)
    except torch.OutOfMemoryError:
        refusal = torch_vmm.last_out_of_memory()
        if refusal is not None:
            for holder in refusal.holders:
                print(holder.name, holder.allocated + holder.idle)
    except torch_vmm.StillInUseError as error:
        print(error.live_bytes, error.live_blocks)


def evicts(shop: torch_vmm.SharedMemoryPool, pool: torch_vmm.VirtualMemoryPool) -> bool:
    @shop.on_pressure
    def evict(requested: int, asker: torch_vmm.VirtualMemoryPool) -> bool:
        return requested > 0 and not asker.is_asleep

    shop.on_pressure(lambda requested, asker: asker.trim() > requested)
    shop.on_pressure(None)
    return evict(1, pool)


def saves() -> None:
    torch_memory_saver.memory_margin_bytes = "1GiB"
    torch_memory_saver.memory_margin_bytes = 1 << 30
    margin: int = torch_memory_saver.memory_margin_bytes
    with torch_memory_saver.region("weights", enable_cpu_backup=True):
        print(decorated(8), margin)
