"""CUDA's own rules that torch_vmm builds on: what ends a capture, what waits for what.

By the driver's calls alone. They hold on a GPU; on the stand-in (tests/standin)
they are what makes the other tests there worth something.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.gpu.conftest import Busy

OK, INVALID_VALUE, ILLEGAL_STATE, NOT_READY = 0, 1, 401, 600
UNSUPPORTED, INVALIDATED, MERGE, UNMATCHED, UNJOINED = range(900, 905)
ISOLATION, IMPLICIT, CAPTURED_EVENT, WRONG_THREAD = range(905, 909)
GLOBAL, THREAD_LOCAL, RELAXED = range(3)
BLOCKING, NON_BLOCKING = 0, 1
NO_TIMING = 2
PER_THREAD = 2
"""The calling thread's own default stream, as a handle."""
MODES = [GLOBAL, THREAD_LOCAL, RELAXED]

Handle = ctypes.c_void_p


@pytest.fixture(scope="module")
def cuda(_enabled: None) -> ctypes.CDLL:
    """The driver, with torch's context current."""
    torch.cuda.init()
    torch.cuda.synchronize()
    return ctypes.CDLL("libcuda.so.1")


@pytest.fixture(scope="module")
def block(_enabled: None) -> torch.Tensor:
    return torch.zeros(4096, dtype=torch.uint8, device="cuda")


@pytest.fixture
def new_stream(cuda: ctypes.CDLL) -> Iterator[Callable[..., Handle]]:
    made: list[Handle] = []

    def make(flags: int = NON_BLOCKING) -> Handle:
        stream = Handle()
        assert cuda.cuStreamCreate(ctypes.byref(stream), flags) == OK
        made.append(stream)
        return stream

    yield make
    for stream in made:
        assert cuda.cuStreamDestroy_v2(stream) == OK


@pytest.fixture
def event(cuda: ctypes.CDLL) -> Iterator[Handle]:
    event = Handle()
    assert cuda.cuEventCreate(ctypes.byref(event), NO_TIMING) == OK
    yield event
    assert cuda.cuEventDestroy_v2(event) == OK


@pytest.fixture
def fill(cuda: ctypes.CDLL, block: torch.Tensor) -> Callable[..., int]:
    """``fill(stream, value)`` queues, or captures, a memset of all of ``block``."""

    def fill(stream: Handle | None, value: int = 1) -> int:
        address = ctypes.c_uint64(block.data_ptr())
        return int(cuda.cuMemsetD8Async(address, ctypes.c_ubyte(value), ctypes.c_size_t(block.numel()), stream))

    return fill


def begin(cuda: ctypes.CDLL, stream: Handle, mode: int) -> None:
    assert cuda.cuStreamBeginCapture_v2(stream, mode) == OK


def end(cuda: ctypes.CDLL, stream: Handle) -> int:
    """The code that the capture ends with; its graph is dropped."""
    graph = Handle()
    code = int(cuda.cuStreamEndCapture(stream, ctypes.byref(graph)))
    if graph.value:
        assert cuda.cuGraphDestroy(graph) == OK
    return code


@contextmanager
def thread_mode(cuda: ctypes.CDLL, mode: int) -> Iterator[None]:
    swapped = ctypes.c_int(mode)
    assert cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(swapped)) == OK
    yield
    assert cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(swapped)) == OK


def elsewhere(work: Callable[[], int]) -> int:
    """What ``work`` gives on another thread, in torch's context."""
    results: list[int] = []

    def run() -> None:
        torch.cuda.set_device(0)
        torch.cuda.mem_get_info()
        results.append(work())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return results[0]


def context(cuda: ctypes.CDLL) -> Handle:
    now = Handle()
    assert cuda.cuCtxGetCurrent(ctypes.byref(now)) == OK
    return now


# -- What ends a capture -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_nothing_ends_a_capture_of_work_alone(
    cuda: ctypes.CDLL, new_stream: Callable[..., Handle], fill: Callable[..., int], block: torch.Tensor, mode: int
) -> None:
    stream = new_stream()
    begin(cuda, stream, mode)
    assert fill(stream, 7) == OK
    graph, executable = Handle(), Handle()
    assert cuda.cuStreamEndCapture(stream, ctypes.byref(graph)) == OK
    assert cuda.cuGraphInstantiateWithFlags(ctypes.byref(executable), graph, ctypes.c_uint64(0)) == OK
    block.zero_()
    torch.cuda.synchronize()
    assert int(block.max()) == 0
    assert cuda.cuGraphLaunch(executable, stream) == OK
    assert cuda.cuStreamSynchronize(stream) == OK
    assert int(block.min()) == 7
    assert cuda.cuGraphExecDestroy(executable) == cuda.cuGraphDestroy(graph) == OK


@pytest.mark.parametrize(
    ("mode", "thread", "own", "answer", "ending"),
    [
        (GLOBAL, GLOBAL, True, UNSUPPORTED, INVALIDATED),
        (GLOBAL, THREAD_LOCAL, True, UNSUPPORTED, INVALIDATED),
        (GLOBAL, RELAXED, True, OK, OK),
        (GLOBAL, GLOBAL, False, UNSUPPORTED, INVALIDATED),
        (GLOBAL, THREAD_LOCAL, False, OK, OK),
        (GLOBAL, RELAXED, False, OK, OK),
        (THREAD_LOCAL, GLOBAL, True, UNSUPPORTED, INVALIDATED),
        (THREAD_LOCAL, RELAXED, True, OK, OK),
        (THREAD_LOCAL, GLOBAL, False, OK, OK),
        (RELAXED, GLOBAL, True, OK, OK),
        (RELAXED, GLOBAL, False, OK, OK),
    ],
)
@pytest.mark.parametrize("call", ["event query", "stream query", "malloc"])
def test_who_may_ask_beside_a_capture(
    cuda: ctypes.CDLL,
    new_stream: Callable[..., Handle],
    event: Handle,
    call: str,
    mode: int,
    thread: int,
    own: bool,
    answer: int,
    ending: int,
) -> None:
    stream, other = new_stream(), new_stream()
    assert cuda.cuEventRecord(event, other) == OK
    assert cuda.cuStreamSynchronize(other) == OK

    def malloc() -> int:
        address = ctypes.c_uint64()
        code = int(cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(512)))
        if code == OK:
            code = int(cuda.cuMemFree_v2(address))
        return code

    calls: dict[str, Callable[[], int]] = {
        "event query": lambda: int(cuda.cuEventQuery(event)),
        "stream query": lambda: int(cuda.cuStreamQuery(other)),
        "malloc": malloc,
    }

    def ask() -> int:
        with thread_mode(cuda, thread):
            return calls[call]()

    begin(cuda, stream, mode)
    found = ask() if own else elsewhere(ask)
    assert (found, end(cuda, stream)) == (answer, ending)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("own", [True, False], ids=["the capture's thread", "another thread"])
@pytest.mark.parametrize("call", ["cuCtxRecordEvent", "cuCtxSynchronize"])
def test_what_concerns_all_streams_ends_every_capture(
    cuda: ctypes.CDLL, new_stream: Callable[..., Handle], event: Handle, call: str, own: bool, mode: int
) -> None:
    stream, now = new_stream(), context(cuda)

    def ask() -> int:
        with thread_mode(cuda, RELAXED):
            code = cuda.cuCtxRecordEvent(now, event) if call == "cuCtxRecordEvent" else cuda.cuCtxSynchronize()
        return int(code)

    begin(cuda, stream, mode)
    found = ask() if own else elsewhere(ask)
    assert (found, end(cuda, stream)) == (UNSUPPORTED, INVALIDATED)


def test_a_captured_stream_is_not_waited_for(
    cuda: ctypes.CDLL, new_stream: Callable[..., Handle], event: Handle, fill: Callable[..., int]
) -> None:
    stream = new_stream()
    begin(cuda, stream, RELAXED)
    assert cuda.cuStreamSynchronize(stream) == UNSUPPORTED
    assert fill(stream) == INVALIDATED
    with thread_mode(cuda, GLOBAL):
        assert cuda.cuEventQuery(event) == OK
    status = ctypes.c_int()
    assert cuda.cuStreamIsCapturing(stream, ctypes.byref(status)) == OK
    assert status.value == 2
    assert end(cuda, stream) == INVALIDATED
    assert fill(stream) == OK


def test_work_elsewhere_leaves_a_capture_alone(
    cuda: ctypes.CDLL, new_stream: Callable[..., Handle], event: Handle, fill: Callable[..., int]
) -> None:
    stream, other = new_stream(), new_stream()
    begin(cuda, stream, GLOBAL)
    assert fill(other) == fill(None) == OK
    assert cuda.cuEventRecord(event, other) == OK
    third = new_stream()
    assert cuda.cuStreamWaitEvent(third, event, 0) == OK
    assert end(cuda, stream) == OK


def questions(cuda: ctypes.CDLL, event: Handle) -> dict[str, Callable[[Handle | None], int]]:
    """Calls that only ask, each on a stream; "of an event" asks for one that was recorded on it before."""
    out = ctypes.create_string_buffer(8)
    return {
        "cuStreamQuery": lambda stream: int(cuda.cuStreamQuery(stream)),
        "cuStreamGetFlags": lambda stream: int(cuda.cuStreamGetFlags(stream, out)),
        "cuStreamGetId": lambda stream: int(cuda.cuStreamGetId(stream, out)),
        "cuStreamGetPriority": lambda stream: int(cuda.cuStreamGetPriority(stream, out)),
        "cuStreamIsCapturing": lambda stream: int(cuda.cuStreamIsCapturing(stream, out)),
        "cuEventQuery of an event": lambda stream: int(cuda.cuEventRecord(event, stream) or cuda.cuEventQuery(event)),
        "cuEventRecord": lambda stream: int(cuda.cuEventRecord(event, stream)),
    }


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("question", "answer", "ending"),
    [
        ("cuStreamQuery", UNSUPPORTED, INVALIDATED),
        ("cuStreamGetFlags", UNSUPPORTED, INVALIDATED),
        ("cuStreamGetId", UNSUPPORTED, INVALIDATED),
        ("cuStreamGetPriority", OK, OK),
        ("cuStreamIsCapturing", OK, OK),
        ("cuEventQuery of an event", CAPTURED_EVENT, INVALIDATED),
        ("cuEventRecord", OK, OK),
    ],
)
def test_what_a_captured_stream_may_be_asked(
    cuda: ctypes.CDLL,
    new_stream: Callable[..., Handle],
    event: Handle,
    question: str,
    answer: int,
    ending: int,
    mode: int,
) -> None:
    """Even by a thread that says that it means no capture."""
    stream = new_stream()
    begin(cuda, stream, mode)
    with thread_mode(cuda, RELAXED):
        found = questions(cuda, event)[question](stream)
    assert (found, end(cuda, stream)) == (answer, ending)


def test_an_event_that_a_capture_has_had_is_recorded_elsewhere(
    cuda: ctypes.CDLL, new_stream: Callable[..., Handle], event: Handle
) -> None:
    """Neither while the capture runs nor afterwards does it harm, and the new record is what counts."""
    stream, other = new_stream(), new_stream()
    begin(cuda, stream, GLOBAL)
    assert cuda.cuEventRecord(event, stream) == OK
    assert cuda.cuEventRecord(event, other) == OK
    with thread_mode(cuda, RELAXED):
        assert cuda.cuEventSynchronize(event) == OK
    assert cuda.cuEventRecord(event, stream) == OK
    assert end(cuda, stream) == OK
    assert cuda.cuEventRecord(event, other) == OK
    assert cuda.cuEventSynchronize(event) == OK


# -- What waits for what -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_freeing_a_block_waits_for_every_stream_and_ends_no_capture(
    cuda: ctypes.CDLL, new_stream: Callable[..., Handle], busy: Busy, mode: int
) -> None:
    captured, address = new_stream(), ctypes.c_uint64()
    assert cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(1)) == OK
    foreign = torch.cuda.ExternalStream(new_stream().value or 0)
    begin(cuda, captured, mode)
    with thread_mode(cuda, RELAXED):
        with torch.cuda.stream(foreign):
            passed = busy(200)
        assert not passed.query()
        assert cuda.cuMemFree_v2(address) == OK
        assert passed.query()
    assert end(cuda, captured) == OK


@pytest.mark.parametrize(("flags", "covered"), [(BLOCKING, True), (NON_BLOCKING, False)])
def test_the_legacy_stream_comes_after_blocking_streams_alone(
    cuda: ctypes.CDLL, new_stream: Callable[..., Handle], event: Handle, busy: Busy, flags: int, covered: bool
) -> None:
    with torch.cuda.stream(torch.cuda.ExternalStream(new_stream(flags).value or 0)):
        passed = busy(300)
    assert cuda.cuEventRecord(event, None) == OK
    assert cuda.cuEventQuery(event) == (NOT_READY if covered else OK)
    assert not passed.query()


def test_the_legacy_stream_comes_after_other_threads_own_streams(cuda: ctypes.CDLL, event: Handle, busy: Busy) -> None:
    passed: list[torch.cuda.Event] = []

    def work() -> int:
        with torch.cuda.stream(torch.cuda.ExternalStream(PER_THREAD)):
            passed.append(busy(300))
        return OK

    assert elsewhere(work) == OK
    assert cuda.cuEventRecord(event, None) == OK
    assert cuda.cuEventQuery(event) == NOT_READY
    assert not passed[0].query()


# -- The legacy default stream -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "use", ["fill", "wait", "synchronize", "cuStreamQuery", "cuStreamGetFlags", "cuStreamGetPriority", "cuEventRecord"]
)
def test_the_legacy_stream_cannot_depend_on_a_captured_blocking_one(
    cuda: ctypes.CDLL, new_stream: Callable[..., Handle], event: Handle, fill: Callable[..., int], use: str, mode: int
) -> None:
    passed = Handle()
    assert cuda.cuEventCreate(ctypes.byref(passed), NO_TIMING) == OK
    uses = questions(cuda, event) | {
        "fill": fill,
        "wait": lambda stream: int(cuda.cuStreamWaitEvent(stream, passed, 0)),
        "synchronize": lambda stream: int(cuda.cuStreamSynchronize(stream)),
    }
    stream = new_stream(BLOCKING)
    begin(cuda, stream, mode)
    with thread_mode(cuda, RELAXED):
        found = uses[use](None)
    assert (found, end(cuda, stream)) == (IMPLICIT, INVALIDATED)
    assert cuda.cuEventDestroy_v2(passed) == OK


@pytest.mark.parametrize("mode", MODES)
def test_the_legacy_stream_may_be_asked_whether_it_can_be_used(
    cuda: ctypes.CDLL, new_stream: Callable[..., Handle], event: Handle, mode: int
) -> None:
    """One question does no harm; and beside a captured stream that does not block nothing does."""
    status = ctypes.c_int()
    stream = new_stream(BLOCKING)
    begin(cuda, stream, mode)
    assert cuda.cuStreamIsCapturing(None, ctypes.byref(status)) == IMPLICIT
    assert end(cuda, stream) == OK
    stream = new_stream(NON_BLOCKING)
    begin(cuda, stream, mode)
    with thread_mode(cuda, RELAXED):
        assert {call(None) for call in questions(cuda, event).values()} <= {OK, NOT_READY}
    assert end(cuda, stream) == OK


def test_the_legacy_stream_itself_is_not_captured(cuda: ctypes.CDLL) -> None:
    assert cuda.cuStreamBeginCapture_v2(None, RELAXED) == UNSUPPORTED


# -- Events and several streams ----------------------------------------------------------------------------------------


def fork(cuda: ctypes.CDLL, stream: Handle, event: Handle, side: Handle) -> None:
    assert cuda.cuEventRecord(event, stream) == OK
    assert cuda.cuStreamWaitEvent(side, event, 0) == OK


def test_streams_join_and_leave_a_capture_by_events(
    cuda: ctypes.CDLL, new_stream: Callable[..., Handle], event: Handle, fill: Callable[..., int]
) -> None:
    stream, side = new_stream(), new_stream()
    status = ctypes.c_int()
    begin(cuda, stream, RELAXED)
    fork(cuda, stream, event, side)
    assert cuda.cuStreamIsCapturing(side, ctypes.byref(status)) == OK
    assert status.value == 1
    assert fill(side) == OK
    fork(cuda, side, event, stream)
    assert end(cuda, stream) == OK
    assert cuda.cuStreamIsCapturing(side, ctypes.byref(status)) == OK
    assert status.value == 0


def test_a_stream_that_does_not_come_back_spoils_the_capture(
    cuda: ctypes.CDLL, new_stream: Callable[..., Handle], event: Handle, fill: Callable[..., int]
) -> None:
    stream, side = new_stream(), new_stream()
    begin(cuda, stream, RELAXED)
    fork(cuda, stream, event, side)
    assert fill(side) == OK
    assert end(cuda, stream) == UNJOINED


def test_a_captured_event_stands_for_nothing_outside(
    cuda: ctypes.CDLL, new_stream: Callable[..., Handle], event: Handle
) -> None:
    stream = new_stream()
    begin(cuda, stream, RELAXED)
    assert cuda.cuEventRecord(event, stream) == OK
    assert cuda.cuEventQuery(event) == CAPTURED_EVENT
    assert end(cuda, stream) == INVALIDATED
    begin(cuda, stream, RELAXED)
    assert cuda.cuEventRecord(event, stream) == OK
    assert cuda.cuEventSynchronize(event) == CAPTURED_EVENT
    assert end(cuda, stream) == INVALIDATED
    begin(cuda, stream, RELAXED)
    assert cuda.cuEventRecord(event, stream) == OK
    assert end(cuda, stream) == OK
    assert cuda.cuEventQuery(event) == cuda.cuStreamWaitEvent(stream, event, 0) == INVALID_VALUE


def test_a_capture_depends_on_nothing_outside(
    cuda: ctypes.CDLL, new_stream: Callable[..., Handle], event: Handle
) -> None:
    stream, other = new_stream(), new_stream()
    assert cuda.cuEventRecord(event, other) == OK
    begin(cuda, stream, RELAXED)
    assert cuda.cuStreamWaitEvent(stream, event, 0) == ISOLATION
    assert end(cuda, stream) == INVALIDATED


def test_two_captures_do_not_merge(cuda: ctypes.CDLL, new_stream: Callable[..., Handle], event: Handle) -> None:
    one, other = new_stream(), new_stream()
    begin(cuda, one, RELAXED)
    begin(cuda, other, RELAXED)
    assert cuda.cuEventRecord(event, one) == OK
    assert cuda.cuStreamWaitEvent(other, event, 0) == MERGE
    assert [end(cuda, one), end(cuda, other)] == [INVALIDATED, INVALIDATED]


def test_where_and_by_whom_a_capture_is_ended(
    cuda: ctypes.CDLL, new_stream: Callable[..., Handle], event: Handle
) -> None:
    stream, side = new_stream(), new_stream()
    begin(cuda, stream, RELAXED)
    fork(cuda, stream, event, side)
    assert end(cuda, side) == UNMATCHED
    assert end(cuda, stream) == INVALIDATED
    for mode in (GLOBAL, THREAD_LOCAL):
        begin(cuda, stream, mode)
        assert elsewhere(lambda: end(cuda, stream)) == WRONG_THREAD
        assert end(cuda, stream) == ILLEGAL_STATE, "that has ended it"
    begin(cuda, stream, RELAXED)
    assert elsewhere(lambda: end(cuda, stream)) == OK
