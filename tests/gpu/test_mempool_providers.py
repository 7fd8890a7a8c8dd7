"""torch.cuda.MemPool whose memory another allocator gives; and torch_vmm as the provider under torch's own."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.cuda import MemPool, use_mem_pool

import torch_vmm
from tests.gpu.conftest import Busy
from tests.gpu.memory import empty, pool_id_of, settle, size_of
from tests.gpu.patterns import intact, queue_stamp
from tests.gpu.programs import Process, expect_done, running
from tests.helpers import MIB

pytestmark = pytest.mark.usefixtures("random_generator_is_ready")

_PROVIDER = r"""
#include <dlfcn.h>
#include <stddef.h>
#include <map>
#include <mutex>
#include <stdexcept>

static std::mutex mutex;
static std::map<char*, size_t> blocks;

static void* find(const char* name) {
  if (void* found = dlsym(RTLD_DEFAULT, name)) return found;
  for (const char* library : {"libcudart.so.13", "libcudart.so.12", "libcudart.so"})
    if (void* opened = dlopen(library, RTLD_NOW)) return dlsym(opened, name);
  return nullptr;
}

extern "C" {
long allocations = 0, frees = 0, live_bytes = 0, limit_bytes = 0, is_closed = 0;

void* provider_malloc(size_t size, int, void*) {
  static auto* const allocate = reinterpret_cast<int (*)(void**, size_t)>(find("cudaMalloc"));
  std::lock_guard<std::mutex> lock(mutex);
  void* block = nullptr;
  if (is_closed) throw std::runtime_error("closed for today");
  if (limit_bytes > 0 && live_bytes + long(size) > limit_bytes) return nullptr;
  if (allocate(&block, size) != 0) return nullptr;
  blocks[static_cast<char*>(block)] = size;
  live_bytes += long(size);
  ++allocations;
  return block;
}

void provider_free(void* block, size_t, int, void*) {
  static auto* const release = reinterpret_cast<int (*)(void*)>(find("cudaFree"));
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = blocks.find(static_cast<char*>(block));
  if (found == blocks.end()) { frees = -1000000; return; }  // not ours, or freed twice
  live_bytes -= long(found->second);
  blocks.erase(found);
  ++frees;
  release(block);
}

int provider_holds(char* address, size_t size) {
  std::lock_guard<std::mutex> lock(mutex);
  auto after = blocks.upper_bound(address);
  if (after == blocks.begin()) return 0;
  --after;
  return address + size <= after->first + after->second;
}
}
"""


class Provider:
    """A foreign allocator: cudaMalloc and cudaFree with books of their own."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        self._library.provider_holds.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        self.allocator = torch.cuda.memory.CUDAPluggableAllocator(path, "provider_malloc", "provider_free").allocator()

    def __getitem__(self, name: str) -> int:
        return ctypes.c_long.in_dll(self._library, name).value

    def __setitem__(self, name: str, value: int) -> None:
        ctypes.c_long.in_dll(self._library, name).value = value

    def holds(self, tensor: torch.Tensor) -> bool:
        return bool(self._library.provider_holds(tensor.data_ptr(), tensor.nbytes))


# Somebody's own functions, which call torch_vmm's.
_WRAPPER = r"""
#include <dlfcn.h>
#include <stddef.h>

static void* find(const char* name) { return dlsym(dlopen("LIBRARY", RTLD_NOW | RTLD_NOLOAD), name); }

extern "C" void* wrapper_malloc(size_t size, int device, void* stream) {
  return reinterpret_cast<void* (*)(size_t, int, void*)>(find("torch_vmm_malloc"))(size, device, stream);
}

extern "C" void wrapper_free(void* block, size_t size, int device, void* stream) {
  reinterpret_cast<void (*)(void*, size_t, int, void*)>(find("torch_vmm_free"))(block, size, device, stream);
}
"""


def compiled(code: str, folder: Path) -> str:
    """The path of the shared library that it makes."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    source, library = folder / "provider.cpp", folder / "libprovider.so"
    source.write_text(code)
    subprocess.run([compiler, "-std=c++17", "-shared", "-fPIC", str(source), "-o", str(library), "-ldl"], check=True)
    return str(library)


@pytest.fixture(scope="module")
def _provider(tmp_path_factory: pytest.TempPathFactory) -> Provider:
    return Provider(compiled(_PROVIDER, tmp_path_factory.mktemp("provider")))


@pytest.fixture
def provider(_provider: Provider) -> Iterator[Provider]:
    for name in ("allocations", "frees"):
        _provider[name] = 0
    yield _provider
    for name in ("limit_bytes", "is_closed"):
        _provider[name] = 0


def test_our_own_c_functions_as_a_provider() -> None:
    settle()
    allocated = torch.cuda.memory_allocated()
    functions = torch.cuda.memory.CUDAPluggableAllocator(
        torch_vmm.library_path(), "torch_vmm_malloc", "torch_vmm_free"
    ).allocator()
    pool = MemPool(functions)
    with use_mem_pool(pool):
        block = queue_stamp(empty(30 * MIB), 30 * MIB)
        assert pool_id_of(block) == tuple(pool.id)
    assert torch.cuda.memory_allocated() - allocated == 30 * MIB, "it is counted once"
    assert size_of(pool) >= 30 * MIB
    assert intact(block, block.numel())
    del block, pool
    settle()


def test_a_provider_that_calls_our_c_functions(tmp_path: Path) -> None:
    settle()
    path = compiled(_WRAPPER.replace("LIBRARY", torch_vmm.library_path()), tmp_path)
    pool = MemPool(torch.cuda.memory.CUDAPluggableAllocator(path, "wrapper_malloc", "wrapper_free").allocator())
    with use_mem_pool(pool):
        block = queue_stamp(empty(30 * MIB), 30 * MIB)  # of the pool's segment, which is a block of the model's
    assert size_of(pool) >= 30 * MIB
    assert intact(block, block.numel())
    del block, pool
    settle()


def test_a_foreign_provider_gives_the_memory_and_gets_it_back(provider: Provider) -> None:
    settle()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    pool = MemPool(provider.allocator)
    with use_mem_pool(pool):
        blocks = [queue_stamp(empty(size), size) for size in (1000, MIB, 30 * MIB)]
    outside = empty(30 * MIB)
    assert provider["allocations"] > 0
    assert all(provider.holds(block) for block in blocks)
    assert not provider.holds(outside)
    del outside
    assert torch.cuda.memory_allocated() - allocated == 1024 + 31 * MIB
    assert size_of(pool) == provider["live_bytes"] >= 31 * MIB
    assert all(pool_id_of(block) == tuple(pool.id) for block in blocks)
    assert all(intact(block, block.numel()) for block in blocks)
    before = provider["allocations"]
    del blocks[2]
    with use_mem_pool(pool):
        blocks.append(queue_stamp(empty(30 * MIB), 30 * MIB))
    assert provider["allocations"] == before, "what was freed was not reused"
    assert all(intact(block, block.numel()) for block in blocks)
    del blocks
    del pool
    settle()
    assert provider["live_bytes"] == 0
    assert provider["frees"] == provider["allocations"]
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == (allocated, reserved)


def test_a_foreign_providers_memory_has_its_part_in_the_peaks(provider: Provider) -> None:
    settle()
    pool = MemPool(provider.allocator)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    ours = empty(20 * MIB)
    with use_mem_pool(pool):
        empty(30 * MIB)
    del ours
    empty(10 * MIB)
    stats = torch.cuda.memory_stats()
    start = before["allocated_bytes.all.current"]
    assert stats["allocated_bytes.all.peak"] - start == 50 * MIB
    assert stats["allocated_bytes.all.freed"] - before["allocated_bytes.all.freed"] == 60 * MIB
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13):
        reserved = stats[f"reserved_bytes_by_private_pools.{'_'.join(map(str, pool.id))}.all.current"]
        assert reserved == provider["live_bytes"] >= 30 * MIB
    del pool
    settle()
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] == start


def test_a_foreign_providers_tensors_outlive_the_pool(provider: Provider) -> None:
    pool = MemPool(provider.allocator)
    with use_mem_pool(pool):
        block = queue_stamp(empty(5 * MIB), 1)
    del pool
    settle()
    assert provider.holds(block)
    assert intact(block, 1)
    del block
    settle()
    assert provider["live_bytes"] == 0
    assert provider["frees"] == provider["allocations"] > 0


def test_empty_cache_leaves_a_living_pools_segments_alone(provider: Provider) -> None:
    """As natively: whoever keeps the pool may free segments itself that nothing is in (vLLM's sleep mode does)."""
    pool = MemPool(provider.allocator)
    with use_mem_pool(pool):
        kept, freed = queue_stamp(empty(6 * MIB), 1), queue_stamp(empty(40 * MIB), 2)
    torch.cuda.synchronize()
    del freed
    before = provider["live_bytes"]
    for _ in range(2):
        torch.cuda.empty_cache()
    assert provider["frees"] == 0
    assert provider["live_bytes"] == size_of(pool) == before
    assert intact(kept, 1)
    del kept, pool
    settle()
    assert provider["live_bytes"] == 0


def test_a_pool_that_is_gone_keeps_its_segments_until_queued_work_is_done(provider: Provider, busy: Busy) -> None:
    result = empty(8 * MIB)
    pool = MemPool(provider.allocator)
    with use_mem_pool(pool):
        block = queue_stamp(empty(8 * MIB), 1)
    torch.cuda.synchronize()
    kernel = busy(50)
    result.copy_(block)
    del block, pool
    assert provider["live_bytes"] > 0 or kernel.query(), "freed under its reader"
    settle()
    assert provider["live_bytes"] == 0
    assert intact(result, 1)


def test_a_block_waits_for_the_streams_that_it_is_recorded_on(provider: Provider, busy: Busy) -> None:
    """On both of them: its address serves again when they have passed, and not before."""
    pool = MemPool(provider.allocator)
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    for size in (20 * MIB, 2 * MIB - 512, 1000):
        with use_mem_pool(pool):
            block = queue_stamp(empty(size), 1)
        where = block.data_ptr()
        torch.cuda.synchronize()
        kernels = []
        for stream in (first, second):
            with torch.cuda.stream(stream):
                kernels.append(busy(30))
            block.record_stream(stream)
        del block
        with use_mem_pool(pool):
            other = empty(size)
        assert other.data_ptr() != where or all(kernel.query() for kernel in kernels)
        torch.cuda.synchronize()
        with use_mem_pool(pool):
            again = empty(size)
        assert where in (other.data_ptr(), again.data_ptr())
        del other, again
    del pool
    settle()
    assert provider["live_bytes"] == 0


def test_a_foreign_provider_that_has_no_more(provider: Provider) -> None:
    provider["limit_bytes"] = 64 * MIB
    pool = MemPool(provider.allocator)
    with use_mem_pool(pool):
        block = queue_stamp(empty(24 * MIB), 1)
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            empty(60 * MIB)
        more = queue_stamp(empty(24 * MIB), 2)
    assert intact(block, 1)
    assert intact(more, 2)
    assert intact(queue_stamp(empty(60 * MIB), 3), 3)
    del block, more, pool
    settle()
    assert provider["live_bytes"] == 0


def test_what_a_foreign_provider_says_is_in_the_error(provider: Provider) -> None:
    provider["is_closed"] = 1
    pool = MemPool(provider.allocator)
    with use_mem_pool(pool), pytest.raises(torch.OutOfMemoryError, match="closed for today"):
        empty(5 * MIB)
    provider["is_closed"] = 0
    with use_mem_pool(pool):
        assert provider.holds(empty(5 * MIB))


@pytest.fixture
def room_for() -> Iterator[Callable[[int], None]]:
    """Limits the process to what it holds and that many bytes."""

    def limit(size: int) -> None:
        settle()
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + size) / total)

    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_torchs_limit_is_of_a_foreign_providers_memory_too(provider: Provider, room_for: Callable[[int], None]) -> None:
    pool = MemPool(provider.allocator)
    room_for(80 * MIB)
    with use_mem_pool(pool):
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            empty(100 * MIB)
        block = queue_stamp(empty(40 * MIB), 1)
    ours = empty(38 * MIB)
    with pytest.raises(torch.OutOfMemoryError, match="'MemPools of other allocators' 40 MiB"):
        empty(38 * MIB)
    del ours
    with use_mem_pool(pool):
        assert provider.holds(queue_stamp(empty(38 * MIB), 2)), "what ours held unused made no room"
    del block, pool
    settle()
    assert provider["live_bytes"] == 0
    empty(76 * MIB)  # what went back is not counted any more


def test_more_than_the_limit_allows_empties_no_cache(provider: Provider, room_for: Callable[[int], None]) -> None:
    room_for(80 * MIB)
    pool = MemPool(provider.allocator)
    empty(40 * MIB)
    reserved, retries = torch.cuda.memory_reserved(), torch.cuda.memory_stats()["num_alloc_retries"]
    with use_mem_pool(pool), pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        empty(reserved + 100 * MIB)
    assert torch.cuda.memory_reserved() == reserved
    assert torch.cuda.memory_stats()["num_alloc_retries"] == retries + 1


def test_on_oom_a_foreign_providers_unused_memory_serves(provider: Provider, room_for: Callable[[int], None]) -> None:
    """As torch's own test_mempool_limited_memory_with_allocator."""
    room_for(80 * MIB)
    keeps, lends = MemPool(provider.allocator), MemPool(provider.allocator, use_on_oom=True)
    with use_mem_pool(keeps):
        kept = empty(40 * MIB)
    with use_mem_pool(lends):
        lent = empty(40 * MIB)
    where = lent.data_ptr()
    with pytest.raises(torch.OutOfMemoryError):
        empty(40 * MIB)
    del kept, lent
    block = queue_stamp(empty(30 * MIB), 1)
    assert block.data_ptr() == where
    with pytest.raises(torch.OutOfMemoryError):
        empty(30 * MIB)
    torch.cuda.set_per_process_memory_fraction(1.0)
    assert intact(block, 1)
    del block
    with use_mem_pool(lends):
        assert empty(40 * MIB).data_ptr() == where


def test_no_split_gives_each_block_a_segment_of_a_foreign_provider(provider: Provider) -> None:
    pool = MemPool(provider.allocator, no_split=True)
    with use_mem_pool(pool):
        blocks = [queue_stamp(empty(size), size) for size in (4 * MIB, 4 * MIB, 1000, 1000)]
    assert provider["allocations"] == 4
    assert [len(segment["blocks"]) for segment in pool.snapshot()] == [1, 1, 1, 1]
    assert all(intact(block, block.numel()) for block in blocks)
    del blocks[1]
    with use_mem_pool(pool):
        blocks.append(empty(6 * MIB))
    assert provider["allocations"] == 4


def test_beside_a_foreign_provider_ours_goes_on(provider: Provider) -> None:
    foreign, own = MemPool(provider.allocator), MemPool()
    with use_mem_pool(foreign):
        first = queue_stamp(empty(3 * MIB), 1)
        with use_mem_pool(own):
            second = queue_stamp(empty(3 * MIB), 2)
        third = queue_stamp(empty(3 * MIB), 3)
    assert [provider.holds(tensor) for tensor in (first, second, third)] == [True, False, True]
    assert all(intact(tensor, seed) for seed, tensor in enumerate((first, second, third), start=1))


_NATIVE_HEAD = """
import gc, threading
import torch, torch_vmm
outside = torch.ones(1000, device="cuda")
assert torch.cuda.get_allocator_backend() == "native"
ours = torch_vmm.current_pool("cuda")
def empty(size):
    return torch.empty(size, dtype=torch.uint8, device="cuda")
def nothing_is_left(model=ours):
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert model.memory_allocated() == 0, model.memory_summary()
"""

# The native allocator asks torch_vmm for segments.
_UNDER_NATIVE = {
    "tensors outlive their pool": """
        pool = torch.cuda.MemPool(torch_vmm.allocator())
        with torch.cuda.use_mem_pool(pool):
            kept = empty(5_000_000).fill_(7)
        assert pool.use_count() == 1 and len(pool.snapshot()) == 1
        del pool
        torch.cuda.empty_cache()
        assert torch_vmm.pool_of(kept) is ours and int((kept == 7).sum()) == 5_000_000
        del kept
        nothing_is_left()
        assert int(outside.sum()) == 1000
    """,
    "a pool in each thread, each in its model": """
        shared = torch_vmm.SharedMemoryPool("512MiB")
        wrong = []
        # Natively no pool may end while another thread is in one, so all of them end at the end.
        pools = [torch.cuda.MemPool(torch_vmm.allocator()) for _ in range(3)]
        def work(model, number):
            try:
                pool = pools[number - 1]
                stream = torch.cuda.Stream()
                with model, torch.cuda.use_mem_pool(pool), torch.cuda.stream(stream):
                    for turn in range(50):
                        block = empty(1 + turn * 99_991).fill_(number)
                        if torch_vmm.pool_of(block) is not model or not bool((block == number).all()):
                            wrong.append((number, turn))
                stream.synchronize()
                del block
            except Exception as error:
                wrong.append(repr(error))
        models = [shared.register_model(f"model-{number}") for number in range(3)]
        threads = [threading.Thread(target=work, args=(model, 1 + number)) for number, model in enumerate(models)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert wrong == [], wrong
        pools.clear()
        for model in models: nothing_is_left(model)
    """,
    "a graph captured into it": """
        pool = torch.cuda.MemPool(torch_vmm.allocator())
        x = torch.arange(2**20, device="cuda")
        (x * 3 + 1).sum()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool.id):
            out = x * 3 + 1
        assert torch_vmm.pool_of(out) is ours
        for turn in range(100):
            x.add_(1)
            graph.replay()
            if turn % 10 == 0:
                torch.cuda.empty_cache()
                ours.empty_cache()
                assert torch.equal(out, x * 3 + 1)
        assert torch.equal(out, x * 3 + 1)
        del pool
        torch.cuda.empty_cache()
        graph.replay()
        assert torch.equal(out, x * 3 + 1)
        del graph, out
        nothing_is_left()
    """,
    "on_pressure stays away, as native holds its lock": """
        shared = torch_vmm.SharedMemoryPool("64MiB")
        model = shared.register_model("model")
        called = []
        @shared.on_pressure
        def relieve(size, asker):
            called.append(size)
            return False
        pool = torch.cuda.MemPool(torch_vmm.allocator())
        with model, torch.cuda.use_mem_pool(pool):
            blocks = [empty(20 * 2**20) for _ in range(3)]
            try:
                empty(20 * 2**20)
                raise SystemExit("beyond the limit")
            except torch.OutOfMemoryError:
                pass
            assert called == []
        del blocks, pool
        nothing_is_left(model)
    """,
    "nested in a pool of the native allocator": """
        native, pool = torch.cuda.MemPool(), torch.cuda.MemPool(torch_vmm.allocator())
        with torch.cuda.use_mem_pool(native):
            first = empty(3_000_000).fill_(1)
            with torch.cuda.use_mem_pool(pool):
                second = empty(3_000_000).fill_(2)
            third = empty(3_000_000).fill_(3)
        assert [torch_vmm.pool_of(t) for t in (first, second, third)] == [None, ours, None]
        assert [int(t[-1]) for t in (first, second, third)] == [1, 2, 3]
        del first, second, third, native, pool
        nothing_is_left()
    """,
}


@pytest.fixture(scope="module")
def under_native() -> Iterator[dict[str, Process]]:
    programs = {}
    for name, code in _UNDER_NATIVE.items():
        body = "\n".join(line[8:] if line.startswith(" " * 8) else line for line in code.splitlines())
        programs[name] = f"{_NATIVE_HEAD}{body}\nprint('done')\n"
    with running(programs) as processes:
        yield processes


@pytest.mark.no_memcheck  # other processes, many at once
@pytest.mark.parametrize("name", _UNDER_NATIVE)
def test_under_the_native_allocator(under_native: dict[str, Process], name: str) -> None:
    expect_done(under_native[name])
