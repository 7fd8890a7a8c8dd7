"""Captures that nobody announces stay whole, and memory keeps what it holds meanwhile.

Other libraries begin them by the driver's calls alone.
They stay whole in every mode, on streams that torch knows and on ones that it
does not, whatever memory does meanwhile: natively they may die of a cudaMalloc,
here nothing that the allocator calls ends one. No test here waits for the GPU
by torch while a capture runs, since that alone would end it.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

import torch_vmm
from tests.gpu.memory import bytes_in, settle
from tests.gpu.patterns import intact, queue_check, queue_stamp
from tests.helpers import MIB

MakePool = Callable[..., torch_vmm.VirtualMemoryPool]
MakeShared = Callable[..., torch_vmm.SharedMemoryPool]

OK = 0
MODES = {"global": 0, "thread-local": 1, "relaxed": 2}
VALUE = 7


class ByHand:
    """A stream, and a capture on it of one memset of ``target``."""

    def __init__(self, kind: str, target: torch.Tensor) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._target = target
        self._made: ctypes.c_void_p | None = None
        if kind == "torch's":
            self._torchs = torch.cuda.Stream()  # stays alive
            self.handle = ctypes.c_void_p(self._torchs.cuda_stream)
        else:
            self.handle = self._made = ctypes.c_void_p()
            assert self._cuda.cuStreamCreate(ctypes.byref(self.handle), 0 if kind == "blocking" else 1) == OK

    def begin(self, mode: str) -> None:
        assert self._cuda.cuStreamBeginCapture_v2(self.handle, MODES[mode]) == OK
        self._fill()

    def _fill(self) -> None:
        address, size = ctypes.c_uint64(self._target.data_ptr()), ctypes.c_size_t(self._target.numel())
        assert self._cuda.cuMemsetD8Async(address, ctypes.c_ubyte(VALUE), size, self.handle) == OK

    def end(self) -> int:
        """The capture's code; where it is whole, its graph has run."""
        graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
        code = int(self._cuda.cuStreamEndCapture(self.handle, ctypes.byref(graph)))
        if code == OK:
            flags = ctypes.c_uint64(0)
            assert self._cuda.cuGraphInstantiateWithFlags(ctypes.byref(executable), graph, flags) == OK
            assert self._cuda.cuGraphLaunch(executable, self.handle) == OK
            assert self._cuda.cuStreamSynchronize(self.handle) == OK
            assert self._cuda.cuGraphExecDestroy(executable) == self._cuda.cuGraphDestroy(graph) == OK
        return code

    def close(self) -> None:
        if self._made is not None:
            assert self._cuda.cuStreamDestroy_v2(self._made) == OK


@pytest.fixture
def target() -> torch.Tensor:
    return torch.zeros(4096, dtype=torch.uint8, device="cuda")


@pytest.fixture(params=["torch's", "foreign", "blocking"])
def by_hand(request: pytest.FixtureRequest, target: torch.Tensor) -> Iterator[ByHand]:
    torch.cuda.synchronize()
    made = ByHand(request.param, target)
    yield made
    made.close()


@contextmanager
def on_another_thread(capture: ByHand, mode: str) -> Iterator[None]:
    """Begun and ended there; whole, or the test fails."""
    begun, over, codes = threading.Event(), threading.Event(), [-1]

    def work() -> None:
        torch.cuda.set_device(0)
        torch.cuda.mem_get_info()  # the context is this thread's
        capture.begin(mode)
        begun.set()
        over.wait(60)
        codes[0] = capture.end()

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(60)
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert codes == [OK]


def churn(shared: torch_vmm.SharedMemoryPool, streams: list[torch.cuda.Stream]) -> list[torch.Tensor]:
    """All that memory can do; returns how many bytes were wrong, as numbers on the device."""
    models = [shared[name] for name in ("one", "other")]
    kept: list[tuple[int, torch.Tensor]] = []
    wrong: list[torch.Tensor] = []
    for turn in range(24):
        stream, beside = streams[turn % 3], streams[(turn + 1) % 3]
        with torch.cuda.stream(stream):
            block = queue_stamp(bytes_in(models[turn % 2], (1 + turn * 5 % 7) * MIB), turn)
            if turn % 4 == 0:
                block.record_stream(beside)
            if len(kept) > 3:
                seed, old = kept.pop(turn % 4)
                stream.wait_stream(streams[seed % 3])
                wrong.append(queue_check(old, seed))
                old.record_stream(stream)
                del old
            kept.append((turn, block))
            del block
        if turn % 6 == 5:
            torch.cuda.empty_cache()
            models[turn % 2].trim()
            models[(turn + 1) % 2].compact()
            pages = models[0].allocate(models[0].capacity // 2, 2 * MIB)
            models[0].deallocate(pages - models[0].base_address, 2 * MIB)
    return wrong


@pytest.mark.parametrize("thread", ["its own", "another"])
@pytest.mark.parametrize("mode", MODES)
def test_a_capture_stays_whole_while_memory_comes_and_goes(
    make_shared: MakeShared, by_hand: ByHand, target: torch.Tensor, mode: str, thread: str
) -> None:
    shared = make_shared("40MiB")  # less than what is asked for: chunks are handed over and moved
    for name in ("one", "other"):
        shared.register_model(name, virtual_capacity="1GiB")
    streams = [torch.cuda.Stream() for _ in range(3)]
    if thread == "another":
        with on_another_thread(by_hand, mode):
            wrong = churn(shared, streams)
    else:
        by_hand.begin(mode)
        wrong = churn(shared, streams)
        assert by_hand.end() == OK
    torch.cuda.synchronize()
    assert [int(number) for number in wrong] == [0] * len(wrong)
    assert int(target.min()) == VALUE


def test_memory_freed_under_a_capture_comes_back_when_it_is_over(make_pool: MakePool, target: torch.Tensor) -> None:
    pool = make_pool("1GiB", physical_limit="64MiB")
    stream = torch.cuda.Stream()
    capture = ByHand("torch's", target)
    settle()
    with torch.cuda.stream(stream):
        block = bytes_in(pool, 48 * MIB)
    capture.begin("global")
    del block
    assert capture.end() == OK
    with torch.cuda.stream(torch.cuda.Stream()):
        assert intact(queue_stamp(bytes_in(pool, 48 * MIB), 3), 3)
    settle()
    assert pool.memory_reserved() == 0
