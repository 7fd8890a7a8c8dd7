"""Each driver call of an allocation fails in turn: torch is told, nothing is lost, and the next request works."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import torch_vmm
from tests.consistency import check_device
from tests.gpu.memory import bytes_in, settle
from tests.gpu.patterns import intact, queue_stamp
from tests.gpu.programs import expect_done, running
from tests.helpers import MIB
from tests.standin import control
from torch_vmm import _C

MakePool = Callable[..., torch_vmm.VirtualMemoryPool]
MakeShared = Callable[..., torch_vmm.SharedMemoryPool]

UNKNOWN = 999
CALLS = ["cuMemCreate", "cuMemMap", "cuMemSetAccess"]


def books() -> tuple[int, ...]:
    device = _C.device("cuda")
    return (device.live_chunks, device.committed_bytes, torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0])


@pytest.mark.parametrize("code", [control.OUT_OF_MEMORY, UNKNOWN])
@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("call", CALLS)
def test_growth_that_fails_leaves_no_trace(make_pool: MakePool, call: str, nth: int, code: int) -> None:
    pool = make_pool("1GiB", page_size="2MiB")
    kept = queue_stamp(bytes_in(pool, 5 * MIB), 1)
    settle()
    before = books()
    calls = control.calls(call)
    with control.failing(call, nth, code):
        told: RuntimeError | None = None
        try:
            bytes_in(pool, 6 * MIB)  # what fails once may work when it is tried again
        except RuntimeError as error:
            told = error.with_traceback(None)
    if told is not None:
        assert isinstance(told, torch.OutOfMemoryError) == (code == control.OUT_OF_MEMORY), told
        assert code == control.OUT_OF_MEMORY or call in str(told)
    assert control.calls(call) > calls
    settle()
    assert books() == before
    assert intact(kept, 1)
    assert intact(queue_stamp(bytes_in(pool, 6 * MIB), 2), 2)
    check_device()


def test_a_first_allocation_that_fails_does_not_spoil_the_next(make_pool: MakePool) -> None:
    with control.failing("cuMemAddressReserve"):
        with pytest.raises(torch_vmm.OutOfMemoryError):
            make_pool("1GiB")
    assert intact(queue_stamp(bytes_in(make_pool("1GiB"), MIB), 1), 1)


@pytest.mark.parametrize("call", ["cuEventCreate", "cuEventRecord", "cuStreamWaitEvent"])
def test_memory_between_streams_when_no_point_can_be_recorded(make_shared: MakeShared, call: str) -> None:
    """It is not handed over unordered: the request fails, or waits, or takes other memory."""
    shared = make_shared("64MiB")
    giver, taker = shared.register_model("giver"), shared.register_model("taker")
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(one):
        block = queue_stamp(bytes_in(giver, 48 * MIB), 1)
    torch.cuda.synchronize()
    with control.held(one):
        with torch.cuda.stream(one):
            block.fill_(0xAA)  # the late writer
        del block
        with torch.cuda.stream(other), control.failing(call, 1, UNKNOWN):
            try:
                taken = queue_stamp(bytes_in(taker, 8 * MIB), 2)
            except RuntimeError:
                taken = None
    torch.cuda.synchronize()
    assert taken is None or intact(taken, 2)
    assert intact(queue_stamp(bytes_in(taker, 40 * MIB), 3), 3)
    check_device()


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_packing_that_fails_leaves_a_model_as_it_was(make_shared: MakeShared, nth: int) -> None:
    """The first on the way out is the survey's, which the way back has none of."""
    model = make_shared("512MiB").register_model("model")
    blocks = [queue_stamp(bytes_in(model, 48 * MIB), seed) for seed in range(2)]
    with control.failing("cuLaunchKernel", nth, UNKNOWN):
        with pytest.raises(torch_vmm.VmmError, match="cuLaunchKernel"):
            model.sleep(packed=True)
    assert not model.is_asleep
    model.sleep(packed=True)
    with control.failing("cuLaunchKernel", min(nth, 3), UNKNOWN):
        with pytest.raises(torch_vmm.VmmError, match="cuLaunchKernel"):
            model.wake()
    assert model.is_asleep
    model.wake()
    assert all(intact(block, seed) for seed, block in enumerate(blocks))


def test_slabs_that_cannot_be_pinned_are_packed_by_the_cpu(make_shared: MakeShared) -> None:
    model = make_shared("512MiB").register_model("model")
    block = queue_stamp(bytes_in(model, 48 * MIB), 1)
    calls = control.calls("cuLaunchKernel")
    with control.failing("cuMemHostRegister"):  # of the table's slab, which all steps need
        model.sleep(packed=True)
    model.wake()
    assert control.calls("cuLaunchKernel") == calls
    assert intact(block, 1)


_NO_KERNELS = """
import torch, torch_vmm
from tests.standin import control
torch_vmm.enable()
model = torch_vmm.SharedMemoryPool("64MiB").register_model("model")
with model:
    x = torch.ones(1000, device="cuda")
for call in ("cuModuleLoadData", "cuModuleGetFunction"):
    with control.failing(call):
        try:
            model.sleep(packed=True)
        except torch_vmm.NotAvailableError as error:
            assert "memory cannot be packed: loading kernels for sm_90: " + call in str(error), error
        else:
            raise AssertionError("it slept")
    assert not model.is_asleep and float(x.sum()) == 1000
model.sleep(packed=True)  # it is tried again
model.wake()
assert float(x.sum()) == 1000
print("done")
"""


def test_without_kernels_it_is_refused_before_anything_moves() -> None:
    with running({"refused": _NO_KERNELS}) as processes:
        expect_done(processes["refused"])
