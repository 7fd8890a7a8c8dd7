"""Models on their way to sleep and back: beside the program, waited for, stopped."""

from __future__ import annotations

import functools
import gc
import math
import re
import sys
import threading
import time
import unicodedata
from collections.abc import Callable

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import torch_vmm
from tests.api.sleeping import is_numbered, numbered, stop, told_by
from tests.helpers import MIB
from torch_vmm import SharedMemoryPool, VirtualMemoryPool, progress


def test_beside_the_program(model: VirtualMemoryPool) -> None:
    tensors = [numbered(model, 4 * MIB, first) for first in range(8)]
    handle = model.sleep(blocking=False)
    handle.wait()
    assert handle.done
    handle = model.wake(blocking=False)
    for first, tensor in enumerate(tensors):
        handle.wait_for(tensor)
        assert is_numbered(tensor, first)
    handle.wait()
    assert not model.is_asleep
    assert is_numbered(numbered(model, 1000))


def test_beside_a_program_that_never_lets_go_of_python(model: VirtualMemoryPool) -> None:
    tensor = numbered(model, 40 * MIB)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # whoever waits for Python's lock waits until this thread waits for something
    try:
        handle = model.sleep(blocking=False)
        deadline = time.monotonic() + 60
        while handle.progress[0] < 160 * MIB:
            assert time.monotonic() < deadline
    finally:
        sys.setswitchinterval(before)
    handle.wait()
    model.wake()
    assert is_numbered(tensor)


def test_two_threads_do_not_move_one_model_at_once(model: VirtualMemoryPool) -> None:
    tensor = numbered(model, 40 * MIB)
    inside, go_on = threading.Event(), threading.Event()

    def hold(done: int, total: int) -> None:
        inside.set()
        go_on.wait(10)

    thread = threading.Thread(target=lambda: model.sleep(progress=hold))
    thread.start()
    assert inside.wait(10)
    try:
        with pytest.raises(torch_vmm.VmmError, match="on its way"):
            model.wake()
        with pytest.raises(torch_vmm.VmmError, match="on its way"):
            model.sleep()
    finally:
        go_on.set()
        thread.join()
    assert model.is_asleep
    model.wake()
    assert is_numbered(tensor)


# -- What is waited for ------------------------------------------------------------------------------------------------


class Waits:
    """In the place of the extension's transfer: what was waited for."""

    done = total = 0

    def __init__(self) -> None:
        self.addresses: list[int] = []

    def wait_for(self, address: int, size: int) -> bool:
        self.addresses.append(address)
        return size > 0


def test_all_that_a_tensor_wraps_is_waited_for(model: VirtualMemoryPool) -> None:
    first, second, third = (numbered(model, 1000) for _ in range(3))
    model.sleep()
    handle = model.wake(blocking=False)
    handle.wait_for(TwoTensor(TwoTensor(first, second), TwoTensor(second, third)))
    handle.wait()
    waits = Waits()
    handle._moving = waits  # type: ignore[assignment]
    handle.wait_for(TwoTensor(TwoTensor(first, second), TwoTensor(second, third)))
    assert waits.addresses == [each.data_ptr() for each in (first, second, second, third)]
    with pytest.raises(torch_vmm.InvalidArgumentError, match="made of other tensors"):
        handle.wait_for(torch.eye(3).to_sparse())


def test_waiting_for_what_does_not_come_says_so(model: VirtualMemoryPool) -> None:
    with model.tag("weights"):
        weights = torch.ones(4 * MIB, dtype=torch.uint8, device=model.device)
    with model.tag("cache"):
        cache = torch.ones(4 * MIB, dtype=torch.uint8, device=model.device)
    model.sleep()
    handle = model.wake("weights", blocking=False)
    handle.wait_for(weights)
    with pytest.raises(torch_vmm.AsleepError):
        handle.wait_for(cache)
    handle.wait()
    model.wake()
    handle.wait_for(cache)
    assert int(cache[-1]) == int(weights[-1]) == 1


# -- Progress ----------------------------------------------------------------------------------------------------------


def test_progress_is_told_and_may_stop_it(model: VirtualMemoryPool) -> None:
    tensor = numbered(model, 40 * MIB)
    told: list[tuple[int, int]] = []
    model.sleep(progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (160 * MIB, 160 * MIB)
    assert told == sorted(told)
    model.wake()
    with pytest.raises(KeyboardInterrupt):
        model.sleep(progress=stop)
    assert not model.is_asleep
    assert is_numbered(tensor)
    model.sleep()
    with pytest.raises(KeyboardInterrupt):
        model.wake(progress=stop)
    assert model.is_asleep
    model.wake()
    assert is_numbered(tensor)


def test_a_function_of_four_numbers_is_told_rate_and_time_left(model: VirtualMemoryPool) -> None:
    tensor = numbered(model, 40 * MIB)
    told: list[tuple[int, int, float, float]] = []

    def tell(done: int, total: int, rate: float, left: float) -> None:
        told.append((done, total, rate, left))

    began = time.monotonic()
    model.sleep(progress=tell)
    seconds = time.monotonic() - began
    assert told[0] == (0, 160 * MIB, 0.0, math.inf)
    assert told[-1][:2] == (160 * MIB, 160 * MIB)
    assert told[-1][2] >= 160 * MIB / seconds
    assert told[-1][3] == 0.0
    for done, total, rate, left in told[1:]:
        assert left == pytest.approx((total - done) / rate)
    model.wake(progress=tell)
    assert is_numbered(tensor)


def test_what_a_function_may_take(model: VirtualMemoryPool) -> None:
    tensor = numbered(model, 4 * MIB)
    told: list[tuple[float, ...]] = []

    class Told:
        def __call__(self, *numbers: float, end: str = "") -> None:
            told.append(numbers)

    model.sleep(progress=Told())
    model.wake(progress=lambda done, total=0, rate=0.0, left=0.0: told.append((done, total)))
    assert {len(each) for each in told} == {2}, "as many as it has to"
    for takes_others in (lambda done: None, lambda a, b, c: None, lambda a, b, c, d, e: None, lambda *, done: None):
        with pytest.raises(torch_vmm.InvalidArgumentError, match="a function of two numbers, or of four"):
            model.sleep(progress=takes_others)
        assert not model.is_asleep

    def injected(function: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(function)
        def call(*numbers: float) -> object:
            return function(*numbers, "injected")

        return call

    class Broken(Told):
        @property
        def __signature__(self) -> object:
            raise RuntimeError

    needs_four: list[int] = []

    def four(done: int, total: int, rate: float, left: float) -> None:
        needs_four.append(done)

    for decorated in (torch.no_grad()(four), functools.lru_cache(four), functools.partial(torch.no_grad()(four))):
        needs_four.clear()
        model.sleep(progress=decorated)
        model.wake(progress=decorated)
        assert needs_four
    model.sleep(progress=injected(lambda done, total, what: told.append((done, total))))
    model.wake(progress=Broken())
    assert {len(each) for each in told} == {2}
    model.sleep(progress=max)  # tells nothing of what it takes, and is called with two
    model.wake()
    assert is_numbered(tensor)


@pytest.mark.parametrize("who", ["progress", "on_remap"])
@pytest.mark.parametrize("waits", ["wait", "wait_for"])
def test_one_that_would_wait_for_itself_says_so(model: VirtualMemoryPool, who: str, waits: str) -> None:
    tensor = numbered(model, 4 * MIB)
    model.sleep()
    begun: list[torch_vmm.Transfer] = []
    has_begun = threading.Event()
    said: list[str] = []

    def wait(*_: int) -> None:
        assert has_begun.wait(60)
        try:
            begun[0].wait() if waits == "wait" else begun[0].wait_for(tensor)
        except torch_vmm.VmmError as error:
            said.append(str(error))

    if who == "on_remap":
        model.on_remap(after=wait)
    begun.append(model.wake(blocking=False, progress=wait if who == "progress" else False))
    has_begun.set()
    begun[0].wait()
    assert said
    assert all("waits for itself: it calls this function" in each for each in said)
    assert is_numbered(tensor)


def test_what_is_discarded_after_all_is_none_at_the_end(
    limited: torch_vmm.SharedMemoryPool, model: VirtualMemoryPool
) -> None:
    limited.host_backup_limit = "32MiB"
    tensor = numbered(model, 10 * MIB)
    with model.tag("small"):
        small = torch.arange(MIB, dtype=torch.int32, device=model.device)
    told: list[tuple[int, int]] = []
    handle = model.sleep({"": ["host", "discard"]}, progress=lambda *numbers: told.append(numbers))
    assert model.asleep == {"": "discarded"}
    assert told[-1] == handle.progress == (0, 0)
    assert repr(handle) == "Transfer(llama to sleep: 0 B of 0 B, done)"
    model.wake()
    told.clear()
    places = {"": ["host", "discard"], "small": "host"}
    handle = model.sleep(places, blocking=False, progress=lambda *numbers: told.append(numbers))
    handle.wait()
    assert told[-1] == handle.progress == (4 * MIB, 4 * MIB), "the rest has moved"
    model.wake()
    assert is_numbered(small)
    assert not tensor.any()


def test_what_a_progress_raises_at_the_very_end_is_raised(
    limited: torch_vmm.SharedMemoryPool, model: VirtualMemoryPool
) -> None:
    limited.host_backup_limit = "32MiB"
    tensor = numbered(model, 10 * MIB)

    def refuse(moved: int, total: int) -> None:
        if moved == total:
            raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        model.sleep(["host", "discard"], progress=refuse)
    assert model.is_asleep, "it was done by then"
    model.wake()
    assert not tensor.any()


def columns_of(line: str) -> int:
    return sum(1 + (unicodedata.east_asian_width(each) in "WF") for each in line)


@pytest.mark.parametrize("name", ["llama", "a" * 100, "\u8a71\u3059" * 20, "two\nlines\tand\x1b[2J"])
@pytest.mark.parametrize("columns", [0, 3, 10, 20, 40, 80, 200])
def test_a_bar_is_one_line_of_whole_numbers(name: str, columns: int) -> None:
    bar = progress._Bar(name)
    for moved, seconds in ((0, 0.0), (0, 0.1), (640 * MIB, 0.1), (2048 * MIB, 2.0)):
        total = 2048 * MIB
        line = bar._line(moved, total, *progress._rate_and_left(moved, total, seconds), columns)
        assert columns_of(line) == columns
        assert line.isprintable()
        numbers = re.sub(r"^.*?(\[[# ]*\])?(?=( \d|$))", "", line.rstrip(), count=1) if columns >= 20 else ""
        assert re.fullmatch(r"( \S+ (B|MiB|GiB) of 2 GiB(, \S+ GiB/s(, \d+\.\d s left)?)?| \d+ %)?", numbers), line
        assert ("left" in line) == (columns >= 80 and moved > 0)
        assert moved or "/s" not in line


def test_a_bar_is_drawn_in_a_terminal(
    model: VirtualMemoryPool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tensor = numbered(model, 10 * MIB)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    model.sleep(progress=True)
    first, *_, last = capsys.readouterr().err.split("\r")[1:]
    assert "0 B of 40 MiB " in first + " "
    assert "/s" not in first
    assert last.endswith(" s left\n")
    model.wake()
    assert is_numbered(tensor)


def test_the_bar_of_what_is_discarded_after_all_ends(
    limited: torch_vmm.SharedMemoryPool,
    model: VirtualMemoryPool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    limited.host_backup_limit = "32MiB"
    tensor = numbered(model, 10 * MIB)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    model.sleep(["host", "discard"], progress=True)
    first, *_, last = capsys.readouterr().err.split("\r")[1:]
    assert "0 B of 40 MiB " in first + " "
    assert re.fullmatch(r"llama to sleep \[#+\] 0 B of 0 B *\n", last)
    model.wake()
    model.sleep("discard", progress=True)
    assert capsys.readouterr().err == "", "nothing was to move"
    del tensor


def test_a_terminal_that_goes_ends_no_wait(model: VirtualMemoryPool, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = numbered(model, 10 * MIB)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    told = told_by(model)

    def write(text: str) -> int:
        raise OSError("the terminal has gone")

    with monkeypatch.context() as away:
        away.setattr(sys.stderr, "write", write)
        handle = model.sleep(progress=True, blocking=False)
        with pytest.raises(OSError, match="the terminal has gone"):
            handle.wait()
        assert handle.done
        with pytest.raises(OSError, match="the terminal has gone"):
            model.sleep(progress=True)
    assert not model.is_asleep
    assert told == ["goes", "is back"] * 2
    assert is_numbered(tensor)


def test_a_model_that_was_unregistered_asleep_tells_when_it_is_back(
    limited: SharedMemoryPool, model: VirtualMemoryPool
) -> None:
    tensor = numbered(model, 1000)
    other = limited.register_model("other")
    lost = numbered(other, 1000)
    told = told_by(other)
    other.sleep()
    limited.unregister_model("other", force=True)
    del other
    gc.collect()
    pool = torch_vmm.pool_of(lost)
    assert pool is not None
    assert pool.model_id == "other"
    pool.wake()
    assert told == ["goes", "is back"]
    assert is_numbered(lost)
    assert is_numbered(tensor)


def test_what_stops_one_is_logged_where_the_wait_was_interrupted(
    model: VirtualMemoryPool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    numbered(model, 10 * MIB)
    may_go_on = threading.Event()

    def stop(moved: int, total: int) -> None:
        may_go_on.wait(60)
        raise InterruptedError("stopped")

    handle = model.sleep(progress=stop, blocking=False)

    class Interrupted:
        def wait(self) -> None:
            raise KeyboardInterrupt

        def is_set(self) -> bool:
            return False

    with monkeypatch.context() as interrupted:
        interrupted.setattr(handle, "_done", Interrupted())
        with pytest.raises(KeyboardInterrupt):
            handle.wait()
    may_go_on.set()
    while not handle.done:
        time.sleep(0.001)
    deadline = time.monotonic() + 60
    while "stopped" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.001)
    assert f"model 'llama' on {model.device}: going to sleep was stopped: InterruptedError: stopped" in caplog.text


def test_ctrl_c_while_a_transfers_thread_begins_stops_nothing(
    model: VirtualMemoryPool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tensor = numbered(model, 10 * MIB)
    start = threading.Thread.start
    begun: list[threading.Thread] = []

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        begun.append(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as within:
        within.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.sleep(blocking=False)
    begun[0].join()
    assert model.is_asleep
    assert "stopped" not in caplog.text
    model.wake()
    assert is_numbered(tensor)

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as within:
        within.setattr(threading.Thread, "start", refused)
        with pytest.raises(RuntimeError, match="new thread"):
            model.sleep(blocking=False)
    assert not model.is_asleep
    assert is_numbered(tensor)


def test_on_its_way_it_says_where_to(model: VirtualMemoryPool) -> None:
    tensor = numbered(model, 4 * MIB)
    said: set[str] = set()
    model.sleep(progress=lambda *_: said.add(str(model.asleep)))
    model.wake(progress=lambda *_: said.add(str(model.asleep)))
    assert said <= {"{'': 'host'}", "{}"}
    assert "{'': 'host'}" in said
    assert is_numbered(tensor)


def test_a_transfer_that_is_stopped_keeps_nothing_of_its_callers(model: VirtualMemoryPool) -> None:
    def serve() -> None:
        scratch = torch.ones(8 << 20, dtype=torch.uint8, device=model.device)
        model.sleep(progress=stop)
        del scratch

    def stop(moved: int, total: int) -> None:
        raise ValueError("stop")

    kept = numbered(model, 1000)
    gc.collect()
    gc.disable()
    try:
        with model:
            for _ in range(2):
                with pytest.raises(ValueError, match="stop") as raised:
                    serve()
                del raised
        assert model.memory_allocated() < 8 << 20
    finally:
        gc.enable()
    assert is_numbered(kept)


def test_waiting_for_a_transfer_shows_where_a_function_failed(model: VirtualMemoryPool) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    model.on_remap(after=fail)
    model.sleep()
    transfer = model.wake(blocking=False)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError) as raised:
            transfer.wait()
        assert raised.traceback[-1].name == "fail"
        assert len(raised.traceback) < 20
    model.on_remap()
