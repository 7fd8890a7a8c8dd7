"""The stand-in is as strict as it says: mistakes that CUDA would let pass, or die of later, end the process at once."""

from __future__ import annotations

import re
import signal

import pytest
import torch

from tests.helpers import MIB, python
from tests.standin import control

_HEAD = """
import ctypes, torch, torch_vmm
torch_vmm.enable()
from tests.standin import control
torch.cuda.init()
torch.cuda.synchronize()
cu = control.driver()
def made(call, *arguments):
    handle = ctypes.c_void_p()
    assert call(ctypes.byref(handle), *arguments) == 0
    return handle
def fill(address, size, stream=None):
    return cu.cuMemsetD8Async(ctypes.c_uint64(address), ctypes.c_ubyte(1), ctypes.c_size_t(size), stream)
manager = torch_vmm.VirtualMemoryManager("cuda")
range_ = manager.reserve("2MiB")
manager.map(range_, manager.alloc_physical("2MiB"))
READ, READ_WRITE = torch_vmm.AccessFlags.READ, torch_vmm.AccessFlags.READ_WRITE
"""

MISTAKES = {
    "a write without access": ("fill(range_.base, 100)", "may not be written"),
    "a write to what may be read": (
        "manager.set_access(range_, READ); fill(range_.base, 100)",
        "cuMemsetD8Async: on device 0 writes 100 bytes at 0x[0-9a-f]+, which may not be written",
    ),
    "a write beyond a mapping": (
        "manager.set_access(range_, READ_WRITE); fill(range_.base + range_.size - 8, 16)",
        "is not mapped|ends",
    ),
    "work that is queued when its memory is unmapped": (
        """
manager.set_access(range_, READ_WRITE)
with control.held(torch.cuda.current_stream()):
    assert fill(range_.base, 100) == 0
    assert cu.cuMemUnmap(ctypes.c_uint64(range_.base), ctypes.c_size_t(range_.size)) == 0
""",
        "cuMemsetD8Async: .*is not mapped",
    ),
    "a kernel that is queued when its memory is unmapped": (
        """
manager.set_access(range_, READ_WRITE)
x = torch.empty(8, device="cuda")
storage = torch._C._construct_storage_from_data_pointer(range_.base, x.device, 4096)
view = torch.empty(0, device="cuda").set_(storage)
with control.held(torch.cuda.current_stream()):
    torch.add(x, 1, out=view[:8])
    assert cu.cuMemUnmap(ctypes.c_uint64(range_.base), ctypes.c_size_t(range_.size)) == 0
""",
        "aten::add.out: .*writes 32 bytes .*is not mapped",
    ),
    "a copy out of a block that was freed": (
        """
block = ctypes.c_uint64()
assert cu.cuMemAlloc_v2(ctypes.byref(block), ctypes.c_size_t(512)) == cu.cuMemFree_v2(block) == 0
fill(block.value, 100)
""",
        "was freed",
    ),
    "a block that is freed twice": (
        """
block = ctypes.c_uint64()
assert cu.cuMemAlloc_v2(ctypes.byref(block), ctypes.c_size_t(512)) == cu.cuMemFree_v2(block) == 0
cu.cuMemFree_v2(block)
""",
        "cuMemFree: 0x[0-9a-f]+ was freed before",
    ),
    "a stream that is no more": (
        "s = made(cu.cuStreamCreate, 1); cu.cuStreamDestroy_v2(s); fill(range_.base, 1, s)",
        "cuMemsetD8Async: on a stream that was destroyed",
    ),
    "an event that is no more": (
        "e = made(cu.cuEventCreate, 0); cu.cuEventDestroy_v2(e); cu.cuEventQuery(e)",
        "cuEventQuery: on an event that was destroyed",
    ),
    "a handle that never was": ("cu.cuMemRelease(ctypes.c_uint64(99))", "cuMemRelease: of no chunk: 99"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_ends_the_process(mistake: str) -> None:
    code, message = MISTAKES[mistake]
    done = python(_HEAD + code + "\nprint('it went on')\n")
    assert "it went on" not in done.stdout
    assert done.returncode == -signal.SIGABRT, done.stderr
    assert re.search(f"^CUDA stand-in: .*({message})", done.stderr, re.MULTILINE), done.stderr


def test_what_is_not_aligned_is_refused() -> None:
    with pytest.raises(RuntimeError):
        torch.cuda.caching_allocator_delete(torch.empty(8, device="cuda").data_ptr() + 1)
    code = """
number, one = ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(1)
assert cu.cuMemAddressReserve(number, one, one, ctypes.c_uint64(0), ctypes.c_uint64(0)) == 1
where = bytes([1, 0, 0, 0, 0, 0, 0, 0, 1]) + bytes(55)  # pinned, no handle type, on a device: the first
assert cu.cuMemCreate(number, ctypes.c_size_t(2**21), where, ctypes.c_uint64(0)) == 0
assert cu.cuMemCreate(number, ctypes.c_size_t(2**20), where, ctypes.c_uint64(0)) == 1
print("done")
"""
    assert python(_HEAD + code).stdout == "done\n"


def test_a_stream_goes_on_behind_an_operator_that_fails() -> None:
    made = torch.zeros(5, device="cuda")
    with pytest.raises(RuntimeError, match="must match"):
        made.add_(torch.ones(7, device="cuda"))
    made.copy_(torch.ones(5))  # from pageable memory, which waits for the stream
    assert made.sum().item() == 5


def test_a_kernel_of_cuda_alone_fails_by_its_name(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="operation not supported"):
        torch._masked_scale(torch.ones(8, device="cuda"), torch.ones(8, dtype=torch.uint8, device="cuda"), 2.0)
    assert "CUDA stand-in: there is no launch of " in capfd.readouterr().err


def test_work_behind_a_hold_waits_and_so_does_what_waits_for_it() -> None:
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    block, copy = torch.zeros(2 * MIB, dtype=torch.uint8, device="cuda"), torch.zeros(2 * MIB, dtype=torch.uint8)
    copy = copy.cuda()
    torch.cuda.synchronize()
    with control.held(one):
        with torch.cuda.stream(one):
            block.fill_(7)
        event = one.record_event()
        other.wait_event(event)
        with torch.cuda.stream(other):
            copy.copy_(block)
        assert not event.query()
        assert not other.query()
        default = torch.zeros(8, device="cuda")
        assert torch.cuda.current_stream().query(), "a stream that waits for nobody goes on"
    assert event.query()
    assert other.query()
    assert int(copy.min()) == 7
    del default


def test_calls_are_counted_and_can_be_made_to_fail() -> None:
    before = control.calls("cuEventCreate")
    assert control.calls("cuNoSuchCall") == 0
    event = torch.cuda.Event()
    event.record()
    assert control.calls("cuEventCreate") == before + 1
    with control.failing("cuEventCreate", nth=2, code=control.NOT_SUPPORTED):
        torch.cuda.Event().record()
        with pytest.raises(RuntimeError, match="operation not supported"):
            torch.cuda.Event().record()
        torch.cuda.Event().record()
