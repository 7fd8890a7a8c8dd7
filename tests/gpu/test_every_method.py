"""Each function of torch's memory interface is called once, and each virtual method behind it is reached.

What they answer is other tests' matter; here none may be missing, and none may
say that it is not supported. A function or a method that a newer torch adds
fails the tests that compare the lists.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.cuda import _memory_viz

import torch_vmm
from tests.gpu import programs
from tests.torch_headers import virtual_methods

memory = torch.cuda.memory


def block(size: int = 1000) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cuda")


# -- What takes more than a line ---------------------------------------------------------------------------------------


def lend_and_return() -> None:
    memory.caching_allocator_delete(memory.caching_allocator_alloc(1000))


def swap_once_initialized() -> None:
    """As with the native allocator, it comes too late."""
    with pytest.raises(RuntimeError, match="Can't swap an already initialized allocator"):
        memory.change_current_allocator(torch_vmm.allocator())


def a_block_in_a_pool(pool: torch.cuda.MemPool) -> torch.Tensor:
    with torch.cuda.use_mem_pool(pool):
        return block()


def route_a_stream() -> None:
    """torch takes it in a capture only."""
    pool = torch.cuda.MemPool()
    with pytest.raises(RuntimeError, match="Expected stream capture to be under way"):
        torch._C._cuda_beginAllocateCurrentStreamToPool(0, pool.id)


def route_a_device() -> None:
    pool = torch.cuda.MemPool()
    torch._C._cuda_beginAllocateToPool(0, pool.id)
    x = block()
    torch._C._cuda_endAllocateToPool(0, pool.id)
    torch._C._cuda_releasePool(0, pool.id)
    del x


def count_the_living() -> None:
    pool = torch.cuda.MemPool()
    x = a_block_in_a_pool(pool)
    assert torch._C._cuda_checkPoolLiveAllocations(0, pool.id, {x.data_ptr()})
    assert not torch._C._cuda_checkPoolLiveAllocations(0, pool.id, set())


def go_back_to_a_checkpoint() -> None:
    """The way cudagraph trees go back: a tensor that lived then gets its memory again."""
    pool = torch.cuda.MemPool()
    x = a_block_in_a_pool(pool)
    state = torch._C._cuda_getCheckpointState(0, pool.id)
    address = x.data_ptr()
    storage = torch._C._construct_storage_from_data_pointer(address, x.device, 1000)  # owns nothing
    del x
    assert torch._C._cuda_checkPoolLiveAllocations(0, pool.id, set())
    torch._C._cuda_setCheckpointPoolState(0, state, [], [storage._cdata])
    assert torch._C._cuda_checkPoolLiveAllocations(0, pool.id, {address})
    del storage  # which owned the block by now
    assert torch._C._cuda_checkPoolLiveAllocations(0, pool.id, set())


def capture(pool: Any = None) -> None:
    x = torch.ones(1000, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        y = x + 1
    graph.replay()
    assert y.sum().item() == 2000
    graph.reset()


def make_a_graphed_callable() -> None:
    layer = torch.nn.Linear(16, 16).cuda()
    graphed = torch.cuda.make_graphed_callables(layer, (torch.ones(4, 16, device="cuda"),))
    graphed(torch.ones(4, 16, device="cuda")).sum().backward()


def record_history(**options: Any) -> None:
    try:
        memory._record_memory_history(**options)
        with torch.profiler.record_function("Torch-Compiled Region: 0/0"):
            block()
        assert torch._C._cuda_isHistoryEnabled()
        memory._snapshot()
    finally:
        memory._record_memory_history(None)


def dump(folder: Path) -> None:
    memory._dump_snapshot(str(folder / "snapshot.pickle"))
    snapshot = memory._snapshot()
    # The drawing itself is done by a script that torch fetches.
    assert _memory_viz.memory(snapshot, format_flamegraph=str)
    assert _memory_viz.segments(snapshot, format_flamegraph=str)


def attach_metadata() -> None:
    memory._set_memory_metadata("test_every_method")
    assert memory._get_memory_metadata() == "test_every_method"
    memory._set_memory_metadata("")


def see_an_out_of_memory_error() -> None:
    seen = []
    torch._C._cuda_attach_out_of_memory_observer(lambda *figures: seen.append(figures))
    with pytest.raises(torch.OutOfMemoryError):
        block(2**45)
    assert len(seen) == 1


def look_for_the_largest_workspace() -> None:
    """cuDNN asks for it when it looks for the fastest way."""
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        torch.nn.functional.conv2d(torch.ones(1, 3, 9, 11, device="cuda"), torch.ones(5, 3, 3, 3, device="cuda"))


def copy_when_written() -> None:
    x = torch.ones(1000, device="cuda")
    y = torch._lazy_clone(x)
    y.add_(1)
    assert (x.sum().item(), y.sum().item()) == (1000, 2000)


def pin() -> None:
    """Host memory is torch's own, whoever has the device's."""
    torch.ones(1000).pin_memory().to("cuda", non_blocking=True)


def lock() -> None:
    with memory._free_mutex():
        pass


# -- Functions ---------------------------------------------------------------------------------------------------------

CALLS: dict[str, Callable[[], object]] = {
    "caching_allocator_alloc": lend_and_return,
    "caching_allocator_delete": lend_and_return,
    "caching_allocator_enable": lambda: memory.caching_allocator_enable(True),
    "get_per_process_memory_fraction": memory.get_per_process_memory_fraction,
    "set_per_process_memory_fraction": lambda: memory.set_per_process_memory_fraction(1.0),
    "empty_cache": memory.empty_cache,
    "memory_stats": memory.memory_stats,
    "memory_stats_as_nested_dict": memory.memory_stats_as_nested_dict,
    "reset_accumulated_memory_stats": memory.reset_accumulated_memory_stats,
    "reset_peak_memory_stats": memory.reset_peak_memory_stats,
    "reset_max_memory_allocated": memory.reset_max_memory_allocated,
    "reset_max_memory_cached": memory.reset_max_memory_cached,
    "host_memory_stats": memory.host_memory_stats,
    "host_memory_stats_as_nested_dict": memory.host_memory_stats_as_nested_dict,
    "reset_accumulated_host_memory_stats": memory.reset_accumulated_host_memory_stats,
    "reset_peak_host_memory_stats": memory.reset_peak_host_memory_stats,
    "memory_allocated": memory.memory_allocated,
    "max_memory_allocated": memory.max_memory_allocated,
    "memory_reserved": memory.memory_reserved,
    "max_memory_reserved": memory.max_memory_reserved,
    "memory_cached": memory.memory_cached,
    "max_memory_cached": memory.max_memory_cached,
    "memory_snapshot": memory.memory_snapshot,
    "memory_summary": memory.memory_summary,
    "list_gpu_processes": memory.list_gpu_processes,
    "mem_get_info": memory.mem_get_info,
    "get_allocator_backend": memory.get_allocator_backend,
    "CUDAPluggableAllocator": lambda: memory.CUDAPluggableAllocator(
        torch_vmm.library_path(), "torch_vmm_malloc", "torch_vmm_free"
    ),
    "change_current_allocator": swap_once_initialized,
    "MemPool": torch.cuda.MemPool,
    "use_mem_pool": lambda: a_block_in_a_pool(torch.cuda.MemPool()),
    # torch.cuda.graphs
    "is_current_stream_capturing": torch.cuda.is_current_stream_capturing,
    "graph_pool_handle": lambda: capture(torch.cuda.graph_pool_handle()),
    "CUDAGraph": capture,
    "graph": capture,
    "make_graphed_callables": make_a_graphed_callable,
    # torch.accelerator.memory, but for the names that torch.cuda.memory has too
    "get_memory_info": torch.accelerator.memory.get_memory_info,
}

# What torch.cuda.memory's functions and others call, by the name in torch._C.
PRIVATE_CALLS: dict[str, Callable[[], object]] = {
    "_cuda_CUDAAllocator": lambda: isinstance(torch_vmm.allocator(), torch._C._cuda_CUDAAllocator),
    "_cuda_CUDAAllocator_AllocatorState": go_back_to_a_checkpoint,
    "_cuda_attach_out_of_memory_observer": see_an_out_of_memory_error,
    "_cuda_beginAllocateCurrentStreamToPool": route_a_stream,
    "_cuda_beginAllocateCurrentThreadToPool": lambda: a_block_in_a_pool(torch.cuda.MemPool()),
    "_cuda_beginAllocateToPool": route_a_device,
    "_cuda_canDeviceAccessPeer": lambda: [
        torch.cuda.can_device_access_peer(0, peer) for peer in range(1, torch.cuda.device_count())
    ],
    "_cuda_changeCurrentAllocator": swap_once_initialized,
    "_cuda_checkPoolLiveAllocations": count_the_living,
    "_cuda_cudaCachingAllocator_enable": lambda: memory.caching_allocator_enable(True),
    "_cuda_cudaCachingAllocator_raw_alloc": lend_and_return,
    "_cuda_cudaCachingAllocator_raw_delete": lend_and_return,
    "_cuda_cudaHostAllocator": pin,
    "_cuda_customAllocator": CALLS["CUDAPluggableAllocator"],
    "_cuda_emptyCache": memory.empty_cache,
    "_cuda_endAllocateToPool": route_a_device,
    "_cuda_getAllocator": memory._get_current_allocator,
    "_cuda_getAllocatorBackend": memory.get_allocator_backend,
    "_cuda_getCheckpointState": go_back_to_a_checkpoint,
    "_cuda_getMemoryFraction": memory.get_per_process_memory_fraction,
    "_cuda_getMemoryMetadata": attach_metadata,
    "_cuda_get_conv_benchmark_empty_cache": torch._C._cuda_get_conv_benchmark_empty_cache,
    "_cuda_hostMemoryStats": memory.host_memory_stats,
    "_cuda_ipc_collect": torch.cuda.ipc_collect,
    "_cuda_isHistoryEnabled": record_history,
    "_cuda_lock_mutex": lock,
    "_cuda_memorySnapshot": memory._snapshot,
    "_cuda_memoryStats": memory.memory_stats,
    "_cuda_record_memory_history": record_history,
    "_cuda_record_memory_history_legacy": lambda: record_history(enabled=True),
    "_cuda_releasePool": route_a_device,
    "_cuda_resetAccumulatedHostMemoryStats": memory.reset_accumulated_host_memory_stats,
    "_cuda_resetAccumulatedMemoryStats": memory.reset_accumulated_memory_stats,
    "_cuda_resetPeakHostMemoryStats": memory.reset_peak_host_memory_stats,
    "_cuda_resetPeakMemoryStats": memory.reset_peak_memory_stats,
    "_cuda_setCheckpointPoolState": go_back_to_a_checkpoint,
    "_cuda_setMemoryFraction": lambda: memory.set_per_process_memory_fraction(1.0),
    "_cuda_setMemoryMetadata": attach_metadata,
    "_cuda_unlock_mutex": lock,
    "_MemPool": torch.cuda.MemPool,
}
OF_THE_ALLOCATOR = re.compile(
    r"^_cuda_\w*(lloc|emory|Pool|heckpoint|istory|emptyCache|empty_cache|ipc|Peer|_mutex)|^_MemPool$"
)


def test_no_public_function_is_left_out() -> None:
    public = {*memory.__all__, *torch.cuda.graphs.__all__, *torch.accelerator.memory.__all__}
    assert public <= set(CALLS)


def test_no_private_function_is_left_out() -> None:
    assert {name for name in dir(torch._C) if OF_THE_ALLOCATOR.match(name)} <= set(PRIVATE_CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_the_function_works(name: str) -> None:
    CALLS[name]()


@pytest.mark.parametrize("name", sorted(torch.accelerator.memory.__all__))
def test_the_accelerators_function_works(name: str) -> None:
    getattr(torch.accelerator.memory, name)()


@pytest.mark.parametrize("name", PRIVATE_CALLS)
def test_the_private_function_works(name: str) -> None:
    if hasattr(torch._C, name):
        PRIVATE_CALLS[name]()


def test_dumps_and_plots_work(tmp_path: Path) -> None:
    dump(tmp_path)
    assert (tmp_path / "snapshot.pickle").stat().st_size > 0


# -- Virtual methods ---------------------------------------------------------------------------------------------------


def share() -> None:
    """What a queue of torch.multiprocessing sends, and what its receiver does in the end."""
    x = block()
    sent = x.untyped_storage()._share_cuda_()
    counter, offset = sent[4:6]
    torch.UntypedStorage._release_ipc_counter(counter, offset, device=x.device)
    del x
    torch.cuda.ipc_collect()


# How Python reaches each.
REACHED: dict[str, Callable[[], object]] = {
    "allocate": block,
    "beginAllocateToPool": route_a_device,
    "cacheInfo": look_for_the_largest_workspace,
    "checkPoolLiveAllocations": count_the_living,
    "copy_data": copy_when_written,
    "createOrIncrefPool": torch.cuda.MemPool,
    "emptyCache": memory.empty_cache,
    "enable": lambda: memory.caching_allocator_enable(True),
    "endAllocateToPool": route_a_device,
    "getCheckpointState": go_back_to_a_checkpoint,
    "getDeviceStats": memory.memory_stats,
    "getMemoryFraction": memory.get_per_process_memory_fraction,
    "getMemoryInfo": torch.accelerator.memory.get_memory_info,
    "getPoolUseCount": lambda: torch.cuda.MemPool().use_count(),
    "getUserMetadata": attach_metadata,
    "init": torch.cuda.init,
    "initialized": torch._C._accelerator_isAllocatorInitialized,
    "isHistoryEnabled": record_history,
    "is_simple_data_ptr": copy_when_written,
    "markCaptureBegin": capture,
    "markCaptureEnd": capture,
    "memcpyAsync": lambda: block().copy_(block()),
    "name": memory.get_allocator_backend,
    "popCompileContext": lambda: record_history(compile_context=True),
    "pushCompileContext": lambda: record_history(compile_context=True),
    "raw_alloc_with_stream": lend_and_return,
    "raw_delete": lend_and_return,
    "raw_deleter": go_back_to_a_checkpoint,
    "recordAnnotation": lambda: record_history(global_record_annotations=True),
    "recordHistory": record_history,
    "recordStream": lambda: block().record_stream(torch.cuda.Stream()),
    "releasePool": route_a_device,
    "resetAccumulatedStats": memory.reset_accumulated_memory_stats,
    "resetPeakStats": memory.reset_peak_memory_stats,
    "setCheckpointPoolState": go_back_to_a_checkpoint,
    "setMemoryFraction": lambda: memory.set_per_process_memory_fraction(1.0),
    "setNoSplit": lambda: torch.cuda.MemPool(no_split=True),
    "setUseOnOOM": lambda: torch.cuda.MemPool(use_on_oom=True),
    "setUserMetadata": attach_metadata,
    "shareIpcHandle": share,
    "snapshot": memory.memory_snapshot,
}

# What this process does not reach, and who does.
ELSEWHERE = {
    "allocateWithAddress": "torch's C++ since 2.13",
    "annotateMemory": "torch's C++ since 2.14",
    "attachAllocatorTraceTracker": "NCCL: test_nccl_follows_a_pools_segments",
    "attachOomRejectionObserver": "torch's C++ since 2.12",
    "attachOutOfMemoryObserver": "_cuda_attach_out_of_memory_observer, above",
    "enablePeerAccess": "two GPUs: tests/gpu2",
    "getBaseAllocation": "torch's C++ alone",
    "getContextForPointer": "torch's C++ since 2.12",
    "getExpandableSegmentSizes": "torch's C++ alone",
    "getIpcDevPtr": "a second process: the tests of CUDA IPC",
    "isEnabled": "torch's C++ alone",
    "raw_alloc": "torch's C++ alone",
    "supportsUserMetadata": "torch's C++ since 2.14",
}


def test_every_virtual_method_is_accounted_for() -> None:
    assert virtual_methods() <= set(REACHED) | set(ELSEWHERE)


@pytest.mark.parametrize(
    "method",
    [pytest.param(name, marks=pytest.mark.needs_gpu("cuDNN")) if name == "cacheInfo" else name for name in REACHED],
)
def test_the_method_answers(method: str) -> None:
    REACHED[method]()


@pytest.mark.needs_gpu("NCCL")
def test_nccl_follows_a_pools_segments() -> None:
    """NCCL, of one rank, throws at the end if a segment came or went unannounced; its trackers stay for good."""
    program = """
        import torch, torch_vmm, torch.distributed as dist
        torch_vmm.enable("cuda")
        device = torch.device("cuda", 0)
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
        backend = dist.distributed_c10d._get_default_group()._get_backend(device)
        pool = torch.cuda.MemPool()

        def inside(elements):
            with torch.cuda.use_mem_pool(pool):
                return torch.ones(elements, device=device)

        def reduced(tensors):
            for tensor in tensors:
                dist.all_reduce(tensor)
                assert tensor.sum(dtype=torch.float64).item() == tensor.numel()

        before = [inside(size) for size in (100, 10**6, 10**7)]
        backend.register_mem_pool(pool)
        reduced(before)
        after = [inside(size) for size in (200, 2 * 10**6, 2 * 10**7)]
        reduced(after)
        del before
        torch.cuda.empty_cache()
        reduced(after)
        after += [inside(size) for size in (10**7, 3 * 10**7)]
        reduced(after)
        backend.deregister_mem_pool(pool)
        del after[1:3]
        torch.cuda.empty_cache()
        backend.register_mem_pool(pool)
        reduced(after)
        backend.deregister_mem_pool(pool)
        dist.destroy_process_group()
        del after, pool
        torch.cuda.empty_cache()
        print("done")
    """
    with programs.running({"nccl": program}) as processes:
        programs.expect_done(processes["nccl"])
