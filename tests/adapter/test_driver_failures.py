"""Each driver call of an allocation fails in turn: torch is told, nothing is lost, and the next request works."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import torch_vmm
from tests.consistency import check_device
from tests.gpu.memory import bytes_in, settle
from tests.gpu.patterns import intact, queue_stamp
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
