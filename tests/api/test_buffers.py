"""MemoryPool and PooledBuffer: the order of streams, reuse, what is kept, numbers, and other libraries."""

from __future__ import annotations

import copy
import pickle
import random
import re
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

import torch_vmm
from tests.helpers import MIB, PAGE, holds, rounded, stamp, stream
from torch_vmm import _C, MemoryPool, PooledBuffer, PoolStats

MakeBuffers = Callable[[], MemoryPool]


# -- What they are -----------------------------------------------------------------------------------------------------


def test_a_pool_knows_its_device(buffers: MemoryPool, device: str) -> None:
    assert buffers.device == torch.device("cuda:0" if device == "cuda" else "cpu")
    assert buffers.device_ordinal == 0
    assert str(buffers.device) in repr(buffers)
    assert not buffers.is_closed
    assert buffers.threshold is None


def test_pools_have_handles_of_their_own(make_buffers: MakeBuffers) -> None:
    handles = [make_buffers().raw_handle for _ in range(5)]
    assert len(set(handles)) == 5
    assert min(handles) > 0


def test_a_buffer_knows_itself(buffers: MemoryPool, device: str) -> None:
    buffer = buffers.alloc(1000)
    assert len(buffer) == 1000
    assert buffer.dtype == torch.float32
    assert buffer.byte_size == 4000
    assert not buffer.is_empty
    assert not buffer.is_freed
    assert buffer.device == buffers.device
    assert buffer.device_ptr > 0
    assert buffer.device_ptr % 512 == 0
    assert "1000 of torch.float32" in repr(buffer)
    pool = torch_vmm.pool_of(buffer.device_ptr)
    assert pool is not None
    assert pool.memory_allocated() == rounded(4000)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.bfloat16, torch.float64, torch.complex128])
def test_any_dtype(buffers: MemoryPool, dtype: torch.dtype) -> None:
    buffer = buffers.alloc(33, dtype)
    assert buffer.byte_size == 33 * dtype.itemsize
    tensor = buffer.tensor()
    assert tensor.dtype == dtype
    assert tensor.shape == (33,)
    assert tensor.data_ptr() == buffer.device_ptr


@pytest.mark.parametrize(
    ("dtype", "copy"),
    [(torch.bfloat16, "float()"), (torch.float8_e4m3fn, "float()"), (torch.complex32, "to(torch.complex64)")],
)
def test_what_numpy_has_no_dtype_for_is_no_array(
    buffers: MemoryPool, device: str, dtype: torch.dtype, copy: str
) -> None:
    if device != "cpu":
        pytest.skip("the CPU's")
    buffer = buffers.alloc(33, dtype)
    with pytest.raises(TypeError, match=re.escape(f"numpy has no {dtype}: give buffer.tensor().{copy}, ")):
        np.asarray(buffer)
    assert not hasattr(buffer, "__array_interface__"), "whoever asks first goes another way"
    assert np.asarray(buffer.tensor().view(torch.uint8)).nbytes == buffer.byte_size
    assert torch.as_tensor(buffer).data_ptr() == buffer.device_ptr, "torch has it"


def test_what_the_cuda_array_interface_has_no_dtype_for_is_no_array(buffers: MemoryPool, device: str) -> None:
    if device == "cpu":
        pytest.skip("the GPU's")
    with pytest.raises(TypeError, match=r"has no torch\.float8_e4m3fn: give buffer\.tensor\(\)\.float\(\), "):
        _ = buffers.alloc(33, torch.float8_e4m3fn).__cuda_array_interface__


def test_an_empty_buffer_has_no_memory(buffers: MemoryPool) -> None:
    buffer = buffers.alloc(0)
    assert buffer.is_empty
    assert len(buffer) == buffer.byte_size == buffer.device_ptr == 0
    assert buffer  # it is a buffer all the same
    assert buffer.tensor().shape == (0,)
    assert torch.from_dlpack(buffer).shape == (0,)
    buffer.record_stream(None)
    buffer.free()
    with pytest.raises(torch_vmm.InvalidArgumentError, match="freed"):
        buffer.tensor()
    assert buffers.stats() == PoolStats(0, 0, 0, 0, 0)


def test_only_a_pool_makes_buffers() -> None:
    with pytest.raises(torch_vmm.InvalidArgumentError, match="alloc"):
        PooledBuffer()


def test_neither_is_copied(buffers: MemoryPool) -> None:
    for what in (buffers, buffers.alloc(1)):
        for way in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(torch_vmm.NotCopyableError):
                way(what)


def test_no_attribute_is_made_by_mistake(buffers: MemoryPool) -> None:
    with pytest.raises(AttributeError, match="threshold"):
        buffers.treshold = 0
    with pytest.raises(AttributeError):
        buffers.alloc(1).size = 3


# -- What cannot be ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [-1, 1.5, "4", None, True, 2**63, 2**61, torch.ones(2)])
def test_a_number_of_elements_that_cannot_be(buffers: MemoryPool, n: object) -> None:
    with pytest.raises(torch_vmm.InvalidArgumentError, match="n="):
        buffers.alloc(n)  # type: ignore[arg-type]
    with pytest.raises(torch_vmm.InvalidArgumentError, match="n="):
        buffers.alloc(10**5000)
    assert buffers.stats().allocation_count == 0


def test_more_than_there_is(buffers: MemoryPool) -> None:
    with pytest.raises(torch_vmm.OutOfMemoryError) as caught:
        buffers.alloc(2**60, torch.uint8)
    assert caught.value.requested == 2**60
    assert caught.value.pool.startswith("buffers-")
    assert buffers.stats().allocation_count == 0


@pytest.mark.parametrize("dtype", ["float32", np.float32, 4, None, torch.qint8])
def test_what_is_no_dtype(buffers: MemoryPool, dtype: object) -> None:
    with pytest.raises(torch_vmm.InvalidArgumentError, match="dtype"):
        buffers.alloc(1, dtype)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", ["main", -1, 1.5, 2**64, True, object()])
def test_what_is_no_stream(buffers: MemoryPool, wrong: object) -> None:
    buffer = buffers.alloc(1)
    with pytest.raises(torch_vmm.InvalidArgumentError, match="stream"):
        buffers.alloc(1, stream=wrong)  # type: ignore[arg-type]
    with pytest.raises(torch_vmm.InvalidArgumentError, match="stream"):
        buffer.record_stream(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [-1, "two", 1.5, 2**63])
def test_sizes_that_cannot_be(buffers: MemoryPool, wrong: object) -> None:
    with pytest.raises(torch_vmm.InvalidArgumentError, match="min_bytes"):
        buffers.trim(wrong)  # type: ignore[arg-type]
    with pytest.raises(torch_vmm.InvalidArgumentError, match="bytes"):
        buffers.set_threshold(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [-1, "cuda:-1", "tpu", "meta", 1.5])
def test_what_is_no_device(wrong: object) -> None:
    for cls in (MemoryPool, torch_vmm.NativeMemoryPool):
        with pytest.raises(torch_vmm.InvalidArgumentError, match="device"):
            cls(wrong)  # type: ignore[arg-type]


# -- Reuse -------------------------------------------------------------------------------------------------------------


def test_a_freed_one_is_used_again_at_once(buffers: MemoryPool) -> None:
    first = buffers.alloc(MIB)
    at = first.device_ptr
    first.free()
    assert buffers.alloc(MIB).device_ptr == at


def test_any_size_that_fits_uses_it(buffers: MemoryPool, memory: _C.Device) -> None:
    first = buffers.alloc(16 * MIB, torch.uint8)
    at, held = first.device_ptr, memory.committed_bytes
    first.free()
    parts = [buffers.alloc(6 * MIB, torch.uint8), buffers.alloc(10 * MIB, torch.uint8)]
    assert sorted(part.device_ptr for part in parts) == [at, at + 6 * MIB]
    assert memory.committed_bytes == held


def test_live_ones_never_overlap(buffers: MemoryPool, device: str) -> None:
    rng = random.Random(5)
    streams = [stream(device, 16 * k) for k in range(1, 4)]
    live: list[tuple[PooledBuffer, int]] = []
    for seed in range(200):
        if live and rng.random() < 0.45:
            buffer, was = live.pop(rng.randrange(len(live)))
            assert holds(buffer.tensor(), was)
            buffer.free()
        else:
            buffer = buffers.alloc(rng.choice([1, 100, 5000, 300_000, 1_000_000]), torch.uint8, rng.choice(streams))
            stamp(buffer.tensor(), seed)
            if device == "cuda":
                torch.cuda.synchronize()  # written on the current stream
            live.append((buffer, seed))
    for buffer, was in live:
        assert holds(buffer.tensor(), was)


def test_its_stream_is_the_one_given(buffers: MemoryPool, device: str) -> None:
    other = stream(device, 48)
    assert buffers.alloc(1, stream=other).stream == other
    assert buffers.alloc(1).stream == (torch.cuda.current_stream() if device == "cuda" else 0)


# -- Numbers -----------------------------------------------------------------------------------------------------------


def test_numbers_are_exact(buffers: MemoryPool, memory: _C.Device) -> None:
    before = memory.committed_bytes
    assert buffers.stats() == PoolStats(0, 0, 0, 0, 0)
    a, b = buffers.alloc(1000), buffers.alloc(3 * MIB, torch.uint8)
    a.free()
    held = memory.committed_bytes - before
    assert buffers.stats() == PoolStats(3 * MIB, 3 * MIB + rounded(4000), 2, 1, held - 3 * MIB)
    b.free()
    assert buffers.stats() == PoolStats(0, 3 * MIB + rounded(4000), 2, 2, held)


def test_the_device_counts_them_and_no_model_does(
    buffers: MemoryPool, make_shared: Callable[..., torch_vmm.SharedMemoryPool], memory: _C.Device
) -> None:
    model = make_shared("8MiB").register_model("small", "64MiB")
    with model:
        buffer = buffers.alloc(16 * MIB, torch.uint8)  # more than the model may have
    assert model.memory_allocated() == 0
    assert memory.committed_bytes >= 16 * MIB
    buffer.free()


def test_what_is_cached_serves_models(
    buffers: MemoryPool, make_pool: Callable[..., torch_vmm.VirtualMemoryPool], memory: _C.Device
) -> None:
    buffers.alloc(64 * MIB, torch.uint8).free()
    cached = buffers.stats().cached_bytes
    pool = make_pool("64MiB")
    memory.set_limit(memory.committed_bytes)
    try:
        pool.allocate(0, 64 * MIB)
    finally:
        memory.set_limit(None)
    assert buffers.stats().cached_bytes == cached - 64 * MIB


# -- Giving back -------------------------------------------------------------------------------------------------------


def test_trim_gives_back_what_was_freed_first(buffers: MemoryPool) -> None:
    made = [buffers.alloc(4 * MIB, torch.uint8) for _ in range(4)]
    places = [buffer.device_ptr for buffer in made]
    for k in (2, 0, 3, 1):
        made[k].free()
    assert buffers.trim("8MiB") == 8 * MIB
    assert buffers.stats().cached_bytes == 8 * MIB
    again = {buffers.alloc(4 * MIB, torch.uint8, stream=None).device_ptr for _ in [0]}
    assert again <= {places[3], places[1]}


def test_trim_to_nothing(buffers: MemoryPool, memory: _C.Device) -> None:
    before = memory.committed_bytes
    made = [buffers.alloc(n) for n in (1, 1000, MIB, 5 * MIB)]
    made.clear()
    held = memory.committed_bytes - before
    assert held > 0
    assert buffers.trim(0) == held
    assert buffers.stats().cached_bytes == 0
    assert memory.committed_bytes == before
    assert buffers.trim(0) == 0


def test_trim_leaves_what_is_live(buffers: MemoryPool) -> None:
    live = buffers.alloc(3 * MIB, torch.uint8)
    stamp(live.tensor(), 7)
    buffers.alloc(8 * MIB, torch.uint8).free()
    buffers.trim(0)
    assert holds(live.tensor(), 7)
    assert buffers.stats().cached_bytes < PAGE


def test_a_threshold_of_zero_leaves_steps_their_cache(buffers: MemoryPool, memory: _C.Device) -> None:
    buffers.set_threshold(0)
    assert buffers.threshold == 0
    places: set[int] = set()
    for _ in range(20):
        made = [buffers.alloc(4 * MIB, torch.uint8) for _ in range(3)]
        places |= {buffer.device_ptr for buffer in made}
        for buffer in made:
            buffer.free()
    assert len(places) == 3
    assert buffers.stats().cached_bytes == 12 * MIB


def test_a_threshold_of_zero_empties_a_pool_that_rests(buffers: MemoryPool, device: str) -> None:
    buffers.set_threshold(0)
    live = buffers.alloc(2 * MIB, torch.uint8)
    buffers.alloc(8 * MIB, torch.uint8).free()
    if device == "cuda":
        torch.cuda.synchronize()
    time.sleep(1.05)
    assert buffers.stats().cached_bytes == 0
    assert buffers.stats().allocated_bytes == live.byte_size


def test_a_threshold_keeps_that_much(buffers: MemoryPool, device: str) -> None:
    buffers.set_threshold("4MiB")
    made = [buffers.alloc(2 * MIB, torch.uint8) for _ in range(5)]
    made.clear()
    if device == "cuda":
        torch.cuda.synchronize()
    time.sleep(1.05)
    assert buffers.stats().cached_bytes == 4 * MIB
    buffers.set_threshold(None)
    assert buffers.threshold is None


# -- Other libraries ---------------------------------------------------------------------------------------------------


def test_dlpack_both_ways(buffers: MemoryPool) -> None:
    buffer = buffers.alloc(1000)
    theirs = torch.from_dlpack(buffer)
    assert theirs.data_ptr() == buffer.device_ptr
    theirs.copy_(torch.arange(1000.0))
    assert torch.equal(buffer.tensor().cpu(), torch.arange(1000.0))
    buffer.tensor().add_(1)
    assert theirs[999].item() == 1000
    with pytest.raises(torch_vmm.StillInUseError):
        buffer.free()
    del theirs
    buffer.free()


def test_dlpack_device(buffers: MemoryPool, device: str) -> None:
    kind, ordinal = buffers.alloc(1).__dlpack_device__()
    assert (int(kind), ordinal) == ((2, 0) if device == "cuda" else (1, 0))


def test_an_array_that_would_be_a_copy_is_refused_where_none_is_wanted(buffers: MemoryPool, device: str) -> None:
    buffer = buffers.alloc(4, torch.float32)
    if device == "cpu":
        with pytest.raises(ValueError, match="copy=False"):
            buffer.__array__(np.dtype(np.float64), copy=False)
        assert buffer.__array__(np.dtype(np.float32), copy=False).dtype == np.float32
    buffer.free(force=True)


def test_numpy_reads_and_writes(buffers: MemoryPool, device: str) -> None:
    buffer = buffers.alloc(1000, torch.int32)
    if device == "cuda":
        assert not hasattr(buffer, "__array_interface__")
        return
    assert not hasattr(buffer, "__cuda_array_interface__")
    for array in (np.asarray(buffer), np.from_dlpack(buffer)):  # type: ignore[arg-type]
        assert array.dtype == np.int32
        assert array.shape == (1000,)
        assert array.ctypes.data == buffer.device_ptr
    array = np.asarray(buffer)
    array[:] = np.arange(1000)
    assert buffer.tensor().tolist() == list(range(1000))
    place = buffer.device_ptr
    del buffer  # the array keeps it
    assert array[999] == 999
    assert buffers.alloc(1000, torch.int32).device_ptr != place


def test_the_cuda_array_interface(buffers: MemoryPool, device: str) -> None:
    if device == "cpu":
        pytest.skip("the GPU's")
    buffer = buffers.alloc(1000, torch.float64)
    interface = buffer.__cuda_array_interface__
    assert interface["version"] == 3
    assert interface["shape"] == (1000,)
    assert interface["typestr"] == "<f8"
    assert interface["data"] == (buffer.device_ptr, False)
    assert interface["strides"] is None
    assert interface["stream"] == 1  # the default one
    assert buffers.alloc(0).__cuda_array_interface__["data"] == (0, False)
    theirs = torch.as_tensor(buffer, device="cuda")
    assert theirs.data_ptr() == buffer.device_ptr


def test_a_tensor_of_it_made_in_inference_mode_works_outside(make_buffers: MakeBuffers) -> None:
    buffer = make_buffers().alloc(10)
    with torch.inference_mode():
        tensor = buffer.tensor()
    assert tensor.fill_(1).sum() == 10


@pytest.mark.parametrize("n", [1.5, "5", (2, 3)])
def test_a_bad_number_of_elements_is_shown_as_it_was_given(device: str, n: object) -> None:
    with MemoryPool(device) as pool, pytest.raises(torch_vmm.InvalidArgumentError) as refused:
        pool.alloc(n)  # type: ignore[arg-type]
    assert str(refused.value).startswith(f"n={n!r} is no number of elements")


def test_a_buffer_is_made_by_a_pool_alone() -> None:
    for make in (torch_vmm.PooledBuffer, lambda: torch_vmm.PooledBuffer.__new__(torch_vmm.PooledBuffer)):
        with pytest.raises(torch_vmm.InvalidArgumentError, match="alloc"):
            make()
