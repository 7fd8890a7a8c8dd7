"""Stream-ordered buffers: ``MemoryPool`` and ``NativeMemoryPool`` beside torch, the driver's calls and RMM.

``torch_vmm`` is ``MemoryPool``, and ``torch_vmm-reserved`` one that begins with half of what is free: a buffer of that
size has been made and freed; ``driver`` is cuMemAllocFromPoolAsync and cuMemFreeAsync on a pool that keeps what it
has had, which ``NativeMemoryPool`` (set to do so too) is to be near; ``rmm-pool`` begins with half of what is free, as
in RMM's own benchmarks, and ``rmm-async`` is its resource over the driver's pool. RMM is measured where ``rmm`` can be
imported.

- ``pair``: a block of one size, taken and dropped; ``churn``: sizes mixed, some live, one replaced;
- ``random``: RMM's own pattern, random_allocations: 73 % of operations allocate, sizes uniform up to 1, 64 and 1024 MB,
  16 GB in use at most. ``first`` is the first round, whose memory may come from the driver, ``warm`` the median of the
  rest;
- all of that in C++, one virtual call from each allocator, on one stream and on four in turn, nothing queued on them;
- ``Python``: the same pair from Python, as a typed buffer (``torch.empty``, ``rmm.DeviceBuffer``) and as an address.
"""

from __future__ import annotations

import gc
import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from . import allocators, loops, machine
from .measurement import Measurement, Part, Row
from .runner import Ask, Options

KIND = "cuda"
KINDS = ("cuda", "cpu")
ALLOCATORS = {
    "cuda": (
        "torch_vmm",
        allocators.RESERVED,
        allocators.NATIVE_POOL,
        allocators.DRIVER,
        "native",
        "cudaMallocAsync",
        allocators.RMM_POOL,
        allocators.RMM_ASYNC,
    ),
    "cpu": allocators.HOST_ALLOCATORS,
}
RUNS = 2
_REPEATED = 4  # in each process: to start one takes longer than to measure
NEEDS_LOOPS = False
_KIB, _MIB, _GIB = 2**10, 2**20, 2**30
_SOURCE = "buffers"
_STREAMS = 4
_PAIRS = {"512 B": 512, "64 KiB": 64 * _KIB, "1 MiB": _MIB, "20 MiB": 20 * _MIB, "1 GiB": _GIB}
_BESIDE = ("cuCtxGetCurrent", "cuStreamIsCapturing", "cuThreadExchangeStreamCaptureMode")
_NEAR = 1.05
"""What NativeMemoryPool may take, times what the driver's calls alone do."""


# -- The runner's side -------------------------------------------------------------------------------------------------


def prepare() -> str | None:
    """Builds the loops, with RMM where its headers are."""
    rmm = _rmm_folders()
    if rmm is None:
        loops.build(_SOURCE)
        return None
    librmm, logger = rmm
    include = librmm / "include"
    folders = (librmm / "lib64", logger / "lib64")
    loops.build(
        _SOURCE,
        flags=(
            "-DBENCHMARK_RMM",
            *(f"-I{folder}" for folder in (include, include / "rapids", logger / "include")),
        ),
        link_flags=(
            *(flag for folder in folders for flag in (f"-L{folder}", f"-Wl,-rpath,{folder}")),
            "-lrmm",
            "-lrapids_logger",
        ),
    )
    return None


def missing(allocator: str) -> str | None:
    """Why it cannot be measured here, or ``None``."""
    if allocator in (allocators.RMM_POOL, allocators.RMM_ASYNC) and _rmm_folders() is None:
        return "RMM is not installed (rmm-cu13, librmm-cu13 and rapids-logger)"
    return None


def _rmm_folders() -> tuple[Path, Path] | None:
    """Those of librmm and of what it logs with."""
    found = []
    for name in ("rmm", "librmm", "rapids_logger"):
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            return None
        found.append(Path(spec.submodule_search_locations[0]))
    return found[1], found[2]


def parts(options: Options, ask: Ask) -> list[Part]:
    """One, which says the kind."""
    del ask
    return [{"kind": options.kind}]


def remarks(rows: list[Row]) -> list[str]:
    """How near NativeMemoryPool is to the driver's calls, and where MemoryPool is not ahead of another."""
    values = {(row["case"], row["metric"], row["allocator"]): row["value"] for row in rows}
    lines = []
    for (case, metric, allocator), value in values.items():
        bare = values.get((case, metric, allocators.DRIVER))
        if allocator == allocators.NATIVE_POOL and bare:
            share = value / bare
            far = "" if share <= _NEAR else f", MORE THAN {_NEAR}"
            lines.append(f"{case}, {metric}: NativeMemoryPool takes {share:.3f} of the driver's calls alone{far}")
        # Of those that have taken their memory beforehand by one that has, too.
        own = allocators.RESERVED if allocator == allocators.RMM_POOL and metric == "first" else "torch_vmm"
        ours = values.get((case, metric, own))
        if allocator not in ("torch_vmm", allocators.RESERVED) and ours is not None and ours > value:
            lines.append(f"{case}, {metric}: {own} is BEHIND {allocator}, {ours / value:.2f} times its {value:.4g}")
    return lines


# -- The measuring process ---------------------------------------------------------------------------------------------


def measure_part(allocator: str, kind: str, quick: bool, part: Part) -> list[Measurement]:
    """Times in ns."""
    del part
    run = loops.load_module(_SOURCE)
    with machine.one_cpu():
        source, keeps = _source(run, allocator, kind)
        rows: list[Measurement] = []
        for number in range(1 if quick else _REPEATED):
            rows += _in_cpp(run, source, kind, quick, is_first=number == 0)
        if allocator == allocators.DRIVER:
            stream = _streams(kind)[1]
            times = {which: source.beside_ns(which, 20_000, stream) for which in _BESIDE}
            rows += [Measurement(f"{which}, beside", "time", value, "ns") for which, value in times.items()]
        del source, keeps
        gc.collect()
        return rows + _in_python(allocator, kind, quick)


def _source(run: Any, allocator: str, kind: str) -> tuple[Any, object]:
    """Where the loops take memory from, and what has to live as long."""
    if allocator in ("torch_vmm", allocators.RESERVED):
        import torch_vmm

        pool = torch_vmm.MemoryPool(kind)
        if allocator == allocators.RESERVED:
            pool.alloc(_half_of_what_is_free(), torch.uint8, _streams(kind)[0]).free()
        return run.exported(*pool._handle.functions), pool
    if allocator == allocators.NATIVE_POOL:
        native = _native_pool()
        return run.exported(*native._handle.functions), native
    if allocator == allocators.DRIVER:
        return run.DriverPool(0), None
    if allocator == allocators.RMM_POOL:
        return run.rmm("pool", _half_of_what_is_free()), None
    if allocator == allocators.RMM_ASYNC:
        return run.rmm("async", 0), None
    return (run.torch_host() if kind == "cpu" else run.torch_gpu()), None


def _native_pool() -> Any:
    import torch_vmm

    pool = torch_vmm.NativeMemoryPool()
    pool.release_threshold = 2**62  # it keeps what it has had, as the others do
    return pool


def _half_of_what_is_free() -> int:
    return int(torch.cuda.mem_get_info()[0] // 2 // 256 * 256)


def _streams(kind: str) -> list[int]:
    if kind == "cpu":
        return list(range(1, 1 + _STREAMS))
    _kept_streams.extend(torch.cuda.Stream() for _ in range(_STREAMS - len(_kept_streams)))
    return [stream.cuda_stream for stream in _kept_streams]


_kept_streams: list[torch.cuda.Stream] = []


def _in_cpp(run: Any, source: Any, kind: str, quick: bool, is_first: bool) -> list[Measurement]:
    on_gpu = kind == "cuda"
    count = 2_000 if quick else 20_000
    rows = []
    for streams in (_streams(kind)[:1], _streams(kind)):
        on = "1 stream" if len(streams) == 1 else f"{len(streams)} streams"

        def told(case: str, metric: str, value: float, on: str = on) -> None:
            rows.append(Measurement(f"{case}, {on}", metric, value, "ns"))

        for name, size in _PAIRS.items():
            if on_gpu or size < _GIB:
                told(f"pair {name}", "time", run.pair_ns(source, size, count, streams))
        # Host memory of a machine that runs tests is little, and much of it is not asked for at once.
        mixed = {"512 B - 1 MiB, 1000 live": (512, _MIB, 1000 if on_gpu else 200)}
        if on_gpu:
            mixed["2 MiB - 256 MiB, 100 live"] = (2 * _MIB, 256 * _MIB, 100)
        for name, (lowest, highest, live) in mixed.items():
            times = run.churn_ns(source, lowest, highest, live, count // 5, 4, streams)
            told(f"churn {name}", "warm", median(times[1:]))
        most = 16_000 * _MIB if on_gpu else 64 * _MIB
        for megabytes in (1, 64, 1024) if on_gpu else (1,):
            made = 500 if quick else 2_000
            times = run.random_ns(source, megabytes * _MIB, most, made, 4, streams)
            if is_first:
                told(f"random up to {megabytes} MB", "first", times[0])
            told(f"random up to {megabytes} MB", "warm", median(times[1:]))
    if on_gpu:
        torch.cuda.synchronize()
    return rows


def _in_python(allocator: str, kind: str, quick: bool) -> list[Measurement]:
    count = 2_000 if quick else 20_000
    rows = []
    for case, pairs in _python_pairs(allocator, kind).items():
        pairs(count // 4)
        for _ in range(1 if quick else _REPEATED):
            began = time.perf_counter()
            pairs(count)
            rows.append(Measurement(f"Python, {case}", "time", (time.perf_counter() - began) / count * 1e9, "ns"))
    return rows


def _python_pairs(allocator: str, kind: str) -> dict[str, Callable[[int], None]]:
    """By case, what takes and drops so many blocks of 4000 bytes."""
    buffer, address = "a buffer of 1000 floats", "an address"
    if allocator == allocators.RESERVED:
        return {}  # it is the same
    if allocator == "torch_vmm":
        import torch_vmm

        pool = torch_vmm.MemoryPool(kind)

        def of_pool(count: int) -> None:
            for _ in range(count):
                pool.alloc(1000)

        return {buffer: of_pool}
    if allocator == allocators.NATIVE_POOL:
        native = _native_pool()

        def of_native(count: int) -> None:
            for _ in range(count):
                native.free_async(native.alloc_async(4000))

        return {address: of_native}
    if allocator == allocators.DRIVER:
        return _of_driver(address)
    if allocator in (allocators.RMM_POOL, allocators.RMM_ASYNC):
        return _of_rmm(allocator, buffer, address)

    def of_torch(count: int) -> None:
        for _ in range(count):
            torch.empty(1000, device=kind)

    return {buffer: of_torch}


def _of_driver(case: str) -> dict[str, Callable[[int], None]]:
    """By NVIDIA's own bindings, where they are."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return {}
    properties = driver.CUmemPoolProps()
    properties.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = 0
    error, pool = driver.cuMemPoolCreate(properties)
    assert error == driver.CUresult.CUDA_SUCCESS, error
    most = driver.cuuint64_t(2**62)
    driver.cuMemPoolSetAttribute(pool, driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, most)
    stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)

    def of_driver(count: int) -> None:
        for _ in range(count):
            _, at = driver.cuMemAllocFromPoolAsync(4000, pool, stream)
            driver.cuMemFreeAsync(at, stream)

    return {case: of_driver}


def _of_rmm(allocator: str, buffer: str, address: str) -> dict[str, Callable[[int], None]]:
    import rmm

    if allocator == allocators.RMM_POOL:
        resource = rmm.mr.PoolMemoryResource(rmm.mr.CudaMemoryResource(), initial_pool_size=_half_of_what_is_free())
    else:
        resource = rmm.mr.CudaAsyncMemoryResource()
    rmm.mr.set_current_device_resource(resource)

    def of_buffers(count: int) -> None:
        for _ in range(count):
            rmm.DeviceBuffer(size=4000)

    def of_addresses(count: int) -> None:
        for _ in range(count):
            resource.deallocate(resource.allocate(4000), 4000)

    return {buffer: of_buffers, address: of_addresses}
