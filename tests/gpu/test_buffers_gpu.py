"""Buffers under queued work: who gets their memory when, and CuPy and Numba over them."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import pytest
import torch

import torch_vmm
from tests.consistency import check_device
from tests.gpu.conftest import Busy
from tests.gpu.patterns import intact, queue_stamp
from tests.helpers import MIB, python
from torch_vmm import _C, MemoryPool


@pytest.fixture
def buffers() -> Iterator[MemoryPool]:
    pool = MemoryPool("cuda")
    yield pool
    gc.collect(0)
    pool.close(force=True)
    torch.cuda.synchronize()
    check_device()


@pytest.fixture
def streams() -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    return torch.cuda.Stream(), torch.cuda.Stream()


# -- The order of streams ----------------------------------------------------------------------------------------------


def test_its_own_stream_has_it_at_once(buffers: MemoryPool, busy: Busy) -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        first = buffers.alloc(4 * MIB, torch.uint8)
        place = first.device_ptr
        busy(50)
        queue_stamp(first.tensor(), 1)
        late = torch.cuda.Event()
        late.record()
        first.free()
        second = buffers.alloc(3 * MIB, torch.uint8)
        assert second.device_ptr == place
        assert not late.query(), "somebody waited"
        queue_stamp(second.tensor(), 2)
    stream.synchronize()
    assert intact(second.tensor(), 2)


def test_another_stream_has_it_behind_the_first(
    buffers: MemoryPool, streams: tuple[torch.cuda.Stream, torch.cuda.Stream], busy: Busy
) -> None:
    one, other = streams
    memory = _C.device("cuda")
    memory.empty_cache()
    first = buffers.alloc(64 * MIB, torch.uint8, one)
    memory.set_limit(memory.committed_bytes)  # so that there is no other memory
    try:
        with torch.cuda.stream(one):
            busy(50)
            first.tensor().fill_(0xAA)  # the late writer
            late = torch.cuda.Event()
            late.record()
        first.free()
        second = buffers.alloc(64 * MIB, torch.uint8, other)
        waited = late.query()
        with torch.cuda.stream(other):
            second.tensor().fill_(3)
        torch.cuda.synchronize()
    finally:
        memory.set_limit(None)
    assert not waited, "the CPU waited"
    assert (second.tensor() == 3).all().item(), "written by the stream that had freed it"


@pytest.mark.parametrize("seen", ["itself", "tensor", "dlpack", "part"])
def test_a_recorded_stream_reads_to_its_end(
    buffers: MemoryPool, streams: tuple[torch.cuda.Stream, torch.cuda.Stream], busy: Busy, seen: str
) -> None:
    one, reader = streams
    out = torch.empty(4 * MIB, dtype=torch.uint8, device="cuda")
    first = buffers.alloc(4 * MIB, torch.uint8, one)
    with torch.cuda.stream(one):
        queue_stamp(first.tensor(), 4)
        shown = {
            "itself": lambda: first,
            "tensor": first.tensor,
            "dlpack": lambda: torch.from_dlpack(first),
            "part": lambda: torch.from_dlpack(first.tensor()[MIB:]),  # a storage that begins within the buffer
        }[seen]()
    reader.wait_stream(one)
    with torch.cuda.stream(reader):
        busy(50)
        out.copy_(first.tensor())
    shown.record_stream(reader)  # a tensor's is what torch's own users call (FSDP, ProcessGroupNCCL)
    del shown
    first.free()
    with torch.cuda.stream(one):
        second = buffers.alloc(4 * MIB, torch.uint8)
        second.tensor().fill_(0xAA)
    torch.cuda.synchronize()
    assert intact(out, 4)


def test_one_that_is_collected_goes_back_on_its_own_stream(
    buffers: MemoryPool, streams: tuple[torch.cuda.Stream, torch.cuda.Stream], busy: Busy
) -> None:
    """Whatever stream is current where it is collected."""
    one, other = streams
    buffer = buffers.alloc(4 * MIB, torch.uint8, one)
    place = buffer.device_ptr
    with torch.cuda.stream(one):
        busy(50)
        buffer.tensor().fill_(0xAA)
        late = torch.cuda.Event()
        late.record()
    with torch.cuda.stream(other):
        del buffer
    again = buffers.alloc(4 * MIB, torch.uint8, one)
    assert again.device_ptr == place
    assert not late.query()


def test_a_threshold_waits_for_nothing(buffers: MemoryPool, busy: Busy) -> None:
    buffers.set_threshold(0)
    buffer = buffers.alloc(8 * MIB, torch.uint8)
    busy(2000)
    buffer.tensor().fill_(1)
    late = torch.cuda.Event()
    late.record()
    buffer.free()
    began = time.monotonic()
    while time.monotonic() < began + 1.2:  # from the first second on each call may give back
        assert buffers.stats().cached_bytes == 8 * MIB
    assert not late.query()
    torch.cuda.synchronize()
    assert buffers.stats().cached_bytes == 0


def test_a_captured_graph_uses_a_buffer(buffers: MemoryPool) -> None:
    buffer = buffers.alloc(1000)
    shown = buffer.tensor()
    shown.zero_()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        shown.add_(1)
    for _ in range(3):
        graph.replay()
    assert shown.sum().item() == 3000
    del shown, graph


def test_its_stream_is_the_one_given(buffers: MemoryPool) -> None:
    other = torch.cuda.Stream()
    assert buffers.alloc(1, stream=other).stream == other
    with torch.cuda.stream(other):
        assert buffers.alloc(1).stream == other
    assert buffers.alloc(1).stream == torch.cuda.current_stream()
    by_pointer = buffers.alloc(1, stream=other.cuda_stream)
    assert isinstance(by_pointer.stream, torch.cuda.Stream)
    assert by_pointer.stream.cuda_stream == other.cuda_stream
    assert by_pointer.__cuda_array_interface__["stream"] == other.cuda_stream
    assert buffers.alloc(1, stream=1).stream == torch.cuda.default_stream(), "cudaStreamLegacy"


def test_a_stream_that_is_another_on_each_thread_is_refused(buffers: MemoryPool) -> None:
    with pytest.raises(torch_vmm.InvalidArgumentError, match="per-thread default stream"):
        buffers.alloc(1000, stream=2)
    buffer = buffers.alloc(1000)
    buffer.record_stream(2)  # all of them are covered
    buffer.free()


def test_streams_of_other_libraries(buffers: MemoryPool) -> None:
    """By the protocol that CuPy and cuda.core follow."""
    mine = torch.cuda.Stream()

    class Theirs:
        def __cuda_stream__(self) -> tuple[int, int]:
            return (0, mine.cuda_stream)

    buffer = buffers.alloc(1, stream=Theirs())
    assert isinstance(buffer.stream, torch.cuda.Stream)
    assert buffer.stream.cuda_stream == mine.cuda_stream
    buffer.record_stream(Theirs())

    class Wrong:
        def __cuda_stream__(self) -> int:
            return mine.cuda_stream

    with pytest.raises(torch_vmm.InvalidArgumentError, match="is no stream of cuda:0"):
        buffers.alloc(1, stream=Wrong())  # type: ignore[arg-type]


def test_dlpack_waits_for_the_buffers_stream(buffers: MemoryPool, busy: Busy) -> None:
    mine = torch.cuda.Stream()
    buffer = buffers.alloc(1000, stream=mine)
    with torch.cuda.stream(mine):
        busy(50)
        buffer.tensor().fill_(3)
    assert torch.from_dlpack(buffer).sum().item() == 3000


@pytest.mark.parametrize("own", ["default", "mine", "captured", "joined"])
def test_dlpack_in_a_capture(buffers: MemoryPool, own: str) -> None:
    mine = torch.cuda.Stream()
    stream = {"default": torch.cuda.default_stream(), "captured": None}.get(own, mine)
    out = torch.zeros(1000, device="cuda")
    copied = torch.zeros(1000, device="cuda")
    before = buffers.alloc(1000, stream=stream)
    if own != "captured":
        with torch.cuda.stream(before.stream):
            before.tensor().fill_(3)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        if own == "captured":
            buffer = buffers.alloc(1000)
            buffer.tensor().fill_(3)
        else:
            buffer = before
        if own == "joined":
            mine.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(mine):
                buffer.tensor().add_(1)
        shown = torch.from_dlpack(buffer)
        assert shown.data_ptr() == buffer.device_ptr
        out.copy_(shown)
        copied.copy_(torch.from_dlpack(buffer, copy=True))
    for _ in range(2):
        graph.replay()
    want = 5 if own == "joined" else 3
    assert (out == want).all()
    assert (copied == want).all()
    buffer.tensor().fill_(7)
    torch.cuda.synchronize()
    if own != "captured":
        graph.replay()
        assert (copied == (8 if own == "joined" else 7)).all(), "copied before the replay"
    del shown, graph


def test_the_other_gpus_stream_is_refused(buffers: MemoryPool) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with pytest.raises(torch_vmm.InvalidArgumentError, match="cuda:1"):
        buffers.alloc(1, stream=torch.cuda.Stream(1))


# -- CuPy --------------------------------------------------------------------------------------------------------------


@pytest.mark.needs_gpu("CuPy")
@pytest.mark.parametrize("way", ["asarray", "from_dlpack"])
def test_cupy_reads_and_writes(buffers: MemoryPool, way: str) -> None:
    cupy = pytest.importorskip("cupy")
    buffer = buffers.alloc(1000, torch.int32)
    array = getattr(cupy, way)(buffer)
    assert array.data.ptr == buffer.device_ptr
    assert array.shape == (1000,)
    assert array.dtype == cupy.int32
    array[...] = cupy.arange(1000, dtype=cupy.int32)
    cupy.cuda.get_current_stream().synchronize()
    assert torch.equal(buffer.tensor().cpu(), torch.arange(1000, dtype=torch.int32))
    buffer.tensor().mul_(2)
    torch.cuda.synchronize()
    assert int(array.sum()) == 999 * 1000
    del array


@pytest.mark.needs_gpu("CuPy")
@pytest.mark.parametrize("way", ["asarray", "from_dlpack"])
def test_cupy_comes_after_the_buffers_stream(buffers: MemoryPool, way: str, busy: Busy) -> None:
    cupy = pytest.importorskip("cupy")
    stream = torch.cuda.Stream()
    buffer = buffers.alloc(1000, torch.int32, stream)
    with torch.cuda.stream(stream):
        busy(50)
        buffer.tensor().fill_(7)
    with cupy.cuda.Stream(non_blocking=True):
        assert int(getattr(cupy, way)(buffer).sum()) == 7000


@pytest.mark.needs_gpu("CuPy")
def test_a_cupy_array_keeps_the_buffer(buffers: MemoryPool) -> None:
    cupy = pytest.importorskip("cupy")
    buffer = buffers.alloc(1000, torch.int32)
    array = cupy.asarray(buffer)
    array.fill(5)
    del buffer
    gc.collect()
    assert buffers.stats().free_count == 0
    buffers.alloc(1000, torch.int32).tensor().fill_(6)
    torch.cuda.synchronize()
    assert int(array.sum()) == 5000
    del array
    gc.collect()
    assert buffers.stats().allocated_bytes == 0


@pytest.mark.needs_gpu("CuPy")
def test_on_a_stream_of_cupys(buffers: MemoryPool) -> None:
    cupy = pytest.importorskip("cupy")
    stream = cupy.cuda.Stream(non_blocking=True)
    given = stream if hasattr(stream, "__cuda_stream__") else stream.ptr
    buffer = buffers.alloc(1000, torch.float32, given)
    assert isinstance(buffer.stream, torch.cuda.Stream)
    assert buffer.stream.cuda_stream == stream.ptr
    assert buffer.__cuda_array_interface__["stream"] == stream.ptr
    with stream:
        cupy.asarray(buffer).fill(2)
    stream.synchronize()
    assert buffer.tensor().sum().item() == 2000
    buffer.free()
    torch.cuda.synchronize()


# -- Numba -------------------------------------------------------------------------------------------------------------


@pytest.mark.needs_gpu("Numba")
def test_numba_reads_and_writes() -> None:
    pytest.importorskip("numba")
    done = python(
        """
        import numpy, torch, torch_vmm

        for old, new in (("row_stack", "vstack"), ("in1d", "isin"), ("trapz", "trapezoid")):
            if not hasattr(numpy, old):  # Numba asks for aliases that NumPy 2.5 has no more
                setattr(numpy, old, getattr(numpy, new))
        from numba import cuda

        if not cuda.is_available():
            raise SystemExit("skip")
        with torch_vmm.MemoryPool("cuda") as buffers:
            buffer = buffers.alloc(1000, torch.float32)
            buffer.tensor().copy_(torch.arange(1000.0))
            array = cuda.as_cuda_array(buffer)
            assert array.shape == (1000,)
            assert array.device_ctypes_pointer.value == buffer.device_ptr
            assert float(array.copy_to_host().sum()) == 999 * 500

            @cuda.jit
            def double(values):
                k = cuda.grid(1)
                if k < values.size:
                    values[k] *= 2

            double[8, 128](array)
            cuda.synchronize()
            assert torch.equal(buffer.tensor().cpu(), torch.arange(1000.0) * 2)
            del array
            buffer.free()
        """,
        fresh=True,
    )
    if done.stderr.strip() == "skip":
        pytest.skip("Numba finds no GPU, or nothing to compile kernels with")
    assert done.returncode == 0, done.stdout + done.stderr


# -- The driver's own pools --------------------------------------------------------------------------------------------


def test_a_stream_may_use_the_drivers_memory_again_at_once(busy: Busy) -> None:
    mine = torch.cuda.Stream()
    with torch_vmm.NativeMemoryPool("cuda") as native:
        native.release_threshold = "1GiB"
        first = native.alloc_async(MIB, mine)
        with torch.cuda.stream(mine):
            late = busy(50)
        native.free_async(first, mine)
        again = native.alloc_async(MIB, mine)
        assert again == first
        assert not late.query()
        native.free_async(again, mine)


def test_the_drivers_memory_is_not_for_captures() -> None:
    static = torch.ones(4, device="cuda")
    with torch_vmm.NativeMemoryPool("cuda") as native:
        kept = native.alloc_async(1000)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            static.add_(1)
            with pytest.raises(torch_vmm.NotAvailableError, match="captured"):
                native.alloc_async(1000)
            with pytest.raises(torch_vmm.NotAvailableError, match="captured"):
                native.free_async(kept)
        graph.replay()
        assert static.sum().item() == 8
        native.free_async(kept)


@pytest.mark.needs_gpu("memory in bulk")
def test_the_drivers_pool_and_ours_do_not_touch(buffers: MemoryPool) -> None:
    cupy = pytest.importorskip("cupy")
    with torch_vmm.NativeMemoryPool("cuda") as native:
        address = native.alloc_async(64 * MIB)
        buffer = buffers.alloc(64 * MIB, torch.uint8)
        pointer = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(address, 64 * MIB, native), 0)
        theirs = cupy.ndarray((64 * MIB,), dtype=cupy.uint8, memptr=pointer)
        theirs.fill(3)
        queue_stamp(buffer.tensor(), 5)
        torch.cuda.synchronize()
        cupy.cuda.get_current_stream().synchronize()
        assert int(theirs.sum(dtype=cupy.int64)) == 3 * 64 * MIB
        assert intact(buffer.tensor(), 5)
        assert native.raw != buffers.raw_handle
        del theirs, pointer
        native.free_async(address)
