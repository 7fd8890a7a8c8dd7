"""CuPy and Numba with torch's caching allocator in place of their own, by the hooks that they offer."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

_SIZES = (1, 1000, 300_000, 5_000_000, 77)  # numbers of eight bytes


def cupy_through_torch() -> AbstractContextManager[Any]:
    """Inside, on this thread, CuPy's arrays are made of torch's memory."""
    import cupy

    def allocate(size: int, device: int) -> int:
        return torch.cuda.caching_allocator_alloc(size, device, cupy.cuda.get_current_stream().ptr)

    def free(address: int, _device: int) -> None:
        torch.cuda.caching_allocator_delete(address)

    return cupy.cuda.using_allocator(cupy.cuda.PythonFunctionAllocator(allocate, free).malloc)


@functools.cache
def numba_through_torch() -> None:
    """From now on Numba's arrays are made of torch's memory. To be called before Numba has used the GPU."""
    import numpy

    if not hasattr(numpy, "row_stack"):  # Numba asks for aliases that NumPy 2.5 has no more
        numpy.row_stack = numpy.vstack
    if not hasattr(numpy, "in1d"):
        numpy.in1d = numpy.isin
    if not hasattr(numpy, "trapz"):
        numpy.trapz = numpy.trapezoid
    from numba import cuda

    class TorchMemory(cuda.HostOnlyCUDAMemoryManager):  # type: ignore[misc, name-defined]
        interface_version = 1

        def initialize(self) -> None:
            pass

        def memalloc(self, size: int) -> Any:
            address = torch.cuda.caching_allocator_alloc(size, self.context.device.id, 0)  # Numba's default stream

            def free() -> None:
                torch.cuda.caching_allocator_delete(address)

            return cuda.MemoryPointer(self.context, ctypes.c_void_p(address), size, finalizer=free)

        def get_memory_info(self) -> Any:
            free, total = torch.cuda.mem_get_info(self.context.device.id)
            return cuda.MemoryInfo(free=free, total=total)

        def get_ipc_handle(self, memory: Any) -> Any:
            raise NotImplementedError("torch shares its memory by itself")

    cuda.set_memory_manager(TorchMemory)


def compute_with_cupy(seed: int) -> Iterator[list[int]]:
    """Each step: sums over kept and new arrays after arithmetic, a sort and a running sum; whole numbers, so exact."""
    import cupy

    kept: list[Any] = []
    for position, size in enumerate(_SIZES):
        with cupy_through_torch():
            numbers = cupy.arange(size, dtype=cupy.int64) * 7919 % 10007 + 1000 * seed + position
            ordered = cupy.sort(numbers)
            total = cupy.cumsum(ordered)[-1]
            # torch works on the same memory, and CuPy sees it.
            torch.as_tensor(numbers, device="cuda").add_(1)
            kept.append(numbers)
            found = [int(total), int((ordered[1:] >= ordered[:-1]).sum()), *(int(array.sum()) for array in kept)]
        yield found
        del ordered, total, numbers
        if position % 2:
            del kept[0]


def compute_with_numba(seed: int) -> Iterator[list[int]]:
    """Each step: sums over kept and new arrays that a kernel of Numba's has written."""
    numba_through_torch()
    from numba import cuda

    kernel = _numba_kernel()
    kept: list[Any] = []
    for position, size in enumerate(_SIZES):
        numbers = cuda.device_array(size, dtype="int64")
        kernel[-(-size // 128), 128](numbers, 1000 * seed + position)
        copied = cuda.to_device(numbers.copy_to_host())
        torch.as_tensor(numbers, device="cuda").add_(1)
        kept += [numbers, copied]
        yield [int(array.copy_to_host().sum()) for array in kept]
        del numbers, copied
        if position % 2:
            del kept[:2]


@functools.cache
def _numba_kernel() -> Any:
    from numba import cuda

    @cuda.jit  # type: ignore[misc]
    def fill(numbers: Any, offset: int) -> None:
        at = cuda.grid(1)
        if at < numbers.size:
            numbers[at] = at * 7919 % 10007 + offset

    return fill
