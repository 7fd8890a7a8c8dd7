"""What is told to Python's logging: events of models, and nothing of their tensors."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator

import pytest
import torch

import torch_vmm
from tests.helpers import MIB, python, tensor_in
from torch_vmm import SharedMemoryPool, VirtualMemoryPool

MakeShared = Callable[..., SharedMemoryPool]
MakePool = Callable[..., VirtualMemoryPool]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Callable[[], list[tuple[str, str]]]:
    """Level and text of what was told since the last call."""
    caplog.set_level(logging.DEBUG, logger="torch_vmm")

    def told() -> list[tuple[str, str]]:
        found = [(each.levelname, each.getMessage()) for each in caplog.records if each.name == "torch_vmm"]
        caplog.clear()
        return found

    return told


Log = Callable[[], list[tuple[str, str]]]


def test_a_model_comes_and_goes(shared: SharedMemoryPool, log: Log) -> None:
    on = shared.device
    shared.register_model("llama")
    shared.register_model("qwen", physical_limit="32MiB", floor="8MiB", priority=2)
    assert log() == [
        ("DEBUG", f"model 'llama' on {on} registered: physical_limit none, floor 0 B, priority 0"),
        ("DEBUG", f"model 'qwen' on {on} registered: physical_limit 32 MiB, floor 8 MiB, priority 2"),
    ]
    kept = tensor_in(shared["qwen"], 4 * MIB)
    with pytest.raises(torch_vmm.StillInUseError):
        shared.unregister_model("qwen")
    with pytest.raises(torch_vmm.ModelExistsError):
        shared.register_model("llama")
    assert log() == []
    shared["llama"].close()
    shared.unregister_model("qwen", force=True)
    assert log() == [
        ("DEBUG", f"model 'llama' on {on} unregistered"),
        ("DEBUG", f"model 'qwen' on {on} unregistered, 4 MiB live on"),
    ]
    del kept


def test_closing_is_told_once(make_shared: MakeShared, make_pool: MakePool, log: Log) -> None:
    shared, pool = make_shared(), make_pool(name="scratch")
    shared.register_model("llama")
    shared.register_model("qwen")
    log()
    for _ in range(2):
        shared.close()
        pool.close()
    assert log() == [
        ("DEBUG", f"{shared.name} on {shared.device} closed, with its models 'llama', 'qwen'"),
        ("DEBUG", f"pool 'scratch' on {pool.device} closed"),
    ]


def test_sleep_and_wake_are_told_once(shared: SharedMemoryPool, log: Log) -> None:
    llama = shared.register_model("llama")
    kept = tensor_in(llama, 4 * MIB)
    log()
    for action in (llama.sleep, llama.sleep, llama.wake, llama.wake):
        action()
    told = log()
    assert [level for level, _ in told] == ["INFO", "INFO"]
    assert told[0][1].startswith(f"model 'llama' on {shared.device} went to sleep: 4 MiB in 0.")
    assert told[1][1].startswith(f"model 'llama' on {shared.device} woke: 4 MiB in 0.")
    assert told[1][1].endswith("/s")
    del kept


def test_a_swap_tells_of_each_model_what_moved_of_it(shared: SharedMemoryPool, log: Log) -> None:
    out, into = shared.register_model("out"), shared.register_model("into")
    coming = tensor_in(into, 4 * MIB)
    into.sleep()
    going = tensor_in(out, 10 * MIB)
    log()
    torch_vmm.swap(out=out, into=into)
    assert sorted(text.split(" in 0.")[0] for _, text in log()) == [
        f"model 'into' on {shared.device} woke: 4 MiB",
        f"model 'out' on {shared.device} went to sleep: 10 MiB",
    ]
    del coming, going


def test_a_part_that_wakes_or_follows_to_sleep_is_told(pool: VirtualMemoryPool, log: Log) -> None:
    with pool.tag("w"):
        weights = torch.empty(2 * MIB, dtype=torch.uint8, device=pool.device)
    kept = tensor_in(pool, 4 * MIB)
    log()
    pool.sleep({})
    assert log() == []
    pool.sleep({"w": "host"})
    pool.sleep()
    pool.wake("w")
    pool.wake("w")
    pool.wake()
    whose = f"pool {pool.name!r} on {pool.device}"
    assert [text.split(" in 0.")[0] for _, text in log()] == [
        f"{whose} went to sleep: 2 MiB",
        f"{whose} went to sleep: 4 MiB",
        f"{whose} woke in part ('w'): 2 MiB",
        f"{whose} woke: 4 MiB",
    ]
    del weights, kept


def test_what_is_set_is_told(shared: SharedMemoryPool, pool: VirtualMemoryPool, log: Log) -> None:
    on, llama = shared.device, shared.register_model("llama")
    log()
    llama.physical_limit = "32MiB"
    llama.physical_limit = None
    llama.floor = 8 * MIB
    llama.priority = -1
    llama.spill = None
    pool.physical_limit = "1.5 MiB"
    shared.physical_limit = "48MiB"
    shared.floor = "16MiB"
    shared.priority = 3
    shared.spill_limit = "4MiB"
    shared.host_backup_limit = "64MiB"
    assert log() == [
        ("DEBUG", f"model 'llama' on {on}: physical_limit set to 32 MiB"),
        ("DEBUG", f"model 'llama' on {on}: physical_limit set to none"),
        ("DEBUG", f"model 'llama' on {on}: floor set to 8 MiB"),
        ("DEBUG", f"model 'llama' on {on}: priority set to -1"),
        ("DEBUG", f"model 'llama' on {on}: spill set to none"),
        ("DEBUG", f"pool {pool.name!r} on {on}: physical_limit set to 1.5 MiB"),
        ("DEBUG", f"{shared.name} on {on}: physical_limit set to 48 MiB"),
        ("DEBUG", f"{shared.name} on {on}: floor set to 16 MiB"),
        ("DEBUG", f"{shared.name} on {on}: priority set to 3"),
        ("DEBUG", f"{shared.name} on {on}: spill_limit set to 4 MiB"),
        ("DEBUG", f"{shared.name} on {on}: host_backup_limit set to 64 MiB"),
    ]


@pytest.mark.parametrize("name", ["physical_limit", "floor", "priority"])
def test_what_could_not_be_set_is_not_told(shared: SharedMemoryPool, log: Log, name: str) -> None:
    llama = shared.register_model("llama")
    log()
    for whose in (shared, llama):
        with pytest.raises(torch_vmm.InvalidArgumentError):
            setattr(whose, name, "no value")
    assert log() == []


def test_tensors_tell_nothing(shared: SharedMemoryPool, log: Log) -> None:
    llama = shared.register_model("llama", "1GiB")
    log()
    kept = [tensor_in(llama, size) for size in (100, MIB, 16 * MIB)]
    del kept[1]
    llama.allocate("512MiB", "2MiB")
    llama.deallocate("512MiB", "2MiB")
    llama.trim()
    assert log() == []


def test_a_request_that_hits_a_limit_is_told_whoever_yields(make_shared: MakeShared, log: Log) -> None:
    shared = make_shared("64MiB")
    llama, qwen = shared.register_model("llama"), shared.register_model("qwen")
    idle = tensor_in(qwen, 40 * MIB)
    del idle
    log()
    kept = tensor_in(llama, 40 * MIB)
    with pytest.raises(torch.OutOfMemoryError):
        tensor_in(llama, 40 * MIB)
    told: list[tuple[str, str]] = []
    until = time.monotonic() + 30
    while len(told) < 2 and time.monotonic() < until:
        time.sleep(0.01)
        told += log()
    assert [level for level, _ in told] == ["INFO", "INFO"]
    met, refused = (text for _, text in told)
    assert met.startswith(f"on {shared.device} a limit was hit: 40 MiB for llama (full: {shared.name}): met; ")
    assert "of qwen" in met
    assert refused.startswith(f"on {shared.device} a limit was hit: 40 MiB for llama (full: {shared.name}): refused; ")
    del kept


def test_what_was_thrown_away_is_told_as_asleep(shared: SharedMemoryPool, log: Log) -> None:
    llama = shared.register_model("llama")
    kept = tensor_in(llama, 4 * MIB)
    log()
    llama.sleep("discard")
    ((level, text),) = log()
    assert level == "INFO"
    assert text.startswith(f"model 'llama' on {shared.device} went to sleep: 4 MiB, none of it copied, in ")
    llama.wake()
    del kept


def test_a_handler_that_hits_a_limit_itself_is_told_of_no_more(make_shared: MakeShared) -> None:
    shared = make_shared("64MiB")
    model = shared.register_model("model")
    told: list[str] = []

    class Hits(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())
            with pytest.raises(torch.OutOfMemoryError):
                tensor_in(model, 80 * MIB)
            raise SystemExit  # nor does it end the thread

    handler = Hits()
    logger = logging.getLogger("torch_vmm")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        model.priority = 1
        for number in (1, 2):
            with pytest.raises(torch.OutOfMemoryError):
                tensor_in(model, 80 * MIB)
            until = time.monotonic() + 30
            while len(told) < number and time.monotonic() < until:
                time.sleep(0.01)
        time.sleep(0.2)
        assert len(told) == 2
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)


def test_the_thread_that_tells_ends_with_the_interpreter() -> None:
    told = python("""
        import logging, sys
        import torch, torch_vmm
        logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
        torch_vmm.enable("cpu")
        shared = torch_vmm.SharedMemoryPool("64MiB", "cpu")
        model = shared.register_model("model")
        try:
            with model:
                torch.empty(80 << 20, dtype=torch.uint8)
        except torch.OutOfMemoryError:
            print("refused")
    """)
    assert told.returncode == 0
    # The last one is told all the same.
    assert sum("a limit was hit: 80 MiB for model" in line for line in told.stdout.splitlines()) == 1
    assert "refused\n" in told.stdout


def test_nothing_is_put_into_words_that_nobody_wants(
    shared: SharedMemoryPool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, logger="torch_vmm")
    monkeypatch.setattr("torch_vmm.events._whose", lambda whose: pytest.fail("put into words"))
    monkeypatch.setattr("torch_vmm.events._size", lambda size: pytest.fail("put into words"))
    llama = shared.register_model("llama")
    llama.floor = "2MiB"
    shared.unregister_model("llama")
    shared.close()
    assert caplog.records == []


def test_no_handler_is_installed() -> None:
    assert logging.getLogger("torch_vmm").handlers == []
    assert logging.getLogger("torch_vmm").level == logging.NOTSET


# -- Logging that fails -----------------------------------------------------------------------------------------------


@pytest.fixture
def into(limited: SharedMemoryPool) -> Iterator[VirtualMemoryPool]:
    """A model that is asleep before logging fails."""
    into = limited.register_model("into")
    kept = tensor_in(into, 4 * MIB)
    into.sleep()
    yield into
    del kept


@pytest.fixture(params=["a filter", "a handler"])
def failing(
    request: pytest.FixtureRequest,
    model: VirtualMemoryPool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[list[str]]:
    """What Python shows of what the program's own logging raises, from here on: the model is made."""
    caplog.set_level(logging.DEBUG, logger="torch_vmm")
    shown: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda told: shown.append(f"{told.object!r}: {told.exc_value}"))

    def fail(record: logging.LogRecord) -> bool:
        raise ValueError("no disk to log to")

    logger = logging.getLogger("torch_vmm")
    handler = logging.Handler()
    if request.param == "a filter":
        logger.addFilter(fail)
    else:
        monkeypatch.setattr(handler, "emit", fail)
        logger.addHandler(handler)
    yield shown
    logger.removeFilter(fail)
    logger.removeHandler(handler)


_FAILED = "logging.getLogger('torch_vmm'): no disk to log to"


@pytest.mark.parametrize(
    ("do", "is_done"),
    [
        pytest.param(do, is_done, id=name)
        for name, do, is_done in [
            ("register", lambda shared, _: shared.register_model("qwen"), lambda shared, _: "qwen" in shared),
            (
                "limit",
                lambda _, model: setattr(model, "physical_limit", MIB),
                lambda _, model: model.physical_limit == MIB,
            ),
            (
                "shared limit",
                lambda shared, _: setattr(shared, "physical_limit", MIB),
                lambda shared, _: shared.physical_limit == MIB,
            ),
            ("floor", lambda _, model: setattr(model, "floor", MIB), lambda _, model: model.floor == MIB),
            ("sleep", lambda _, model: model.sleep(), lambda _, model: model.is_asleep),
            ("sleep behind", lambda _, model: model.sleep(blocking=False).wait(), lambda _, model: model.is_asleep),
            (
                "unregister",
                lambda shared, _: shared.unregister_model("llama", True),
                lambda shared, _: len(shared) == 0,
            ),
            ("close", lambda shared, _: shared.close(force=True), lambda shared, _: shared.is_closed),
        ]
    ],
)
def test_logging_that_fails_ends_nothing(
    limited: SharedMemoryPool,
    model: VirtualMemoryPool,
    failing: list[str],
    do: Callable[[SharedMemoryPool, VirtualMemoryPool], object],
    is_done: Callable[[SharedMemoryPool, VirtualMemoryPool], bool],
) -> None:
    kept = tensor_in(model, 4 * MIB)
    do(limited, model)
    assert is_done(limited, model)
    assert failing == [_FAILED]
    del kept


def test_logging_that_fails_ends_no_swap(into: VirtualMemoryPool, model: VirtualMemoryPool, failing: list[str]) -> None:
    kept = tensor_in(model, 4 * MIB)
    torch_vmm.swap(out=model, into=into)
    assert (model.is_asleep, into.is_asleep) == (True, False)
    assert failing == [_FAILED] * 2, "of each model"
    into.sleep()
    model.wake()
    assert not model.is_asleep
    del kept


def test_ctrl_c_within_logging_is_raised(shared: SharedMemoryPool, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(record: logging.LogRecord) -> bool:
        raise KeyboardInterrupt

    logger = logging.getLogger("torch_vmm")
    monkeypatch.setattr(logger, "filter", interrupted)
    with pytest.raises(KeyboardInterrupt):
        shared.register_model("llama")


# -- A function for pressure that fails --------------------------------------------------------------------------------


def test_what_a_pressure_function_raised_is_an_error_that_names_who_asked(
    shared: SharedMemoryPool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[BaseException | None] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda told: shown.append(told.exc_value))
    first, second = shared.register_model("first"), shared.register_model("second")
    kept = tensor_in(first, 60 * MIB)

    @shared.on_pressure
    def fail(requested: int, pool: VirtualMemoryPool) -> bool:
        raise RuntimeError("no idea what to evict")

    with pytest.raises(torch.OutOfMemoryError):
        tensor_in(second, 16 * MIB)
    (record,) = (each for each in caplog.records if each.name == "torch_vmm")
    assert record.levelname == "ERROR"
    assert record.getMessage() == (
        f"on_pressure for model 'second' on {shared.device}, which asked for 16 MiB, raised RuntimeError"
    )
    assert record.exc_info is not None
    assert [record.exc_info[1]] == shown
    assert str(shown[0]) == "no idea what to evict"
    del kept, fail


def test_ctrl_c_within_one_is_no_error(
    shared: SharedMemoryPool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda told: None)
    model = shared.register_model("model")

    def interrupted(requested: int, pool: VirtualMemoryPool) -> bool:
        raise KeyboardInterrupt

    def ask() -> None:
        with pytest.raises(torch_vmm.OutOfMemoryError):
            model.allocate(0, 128 * MIB)
        for _ in range(1000):
            pass  # Python looks for signals

    shared.on_pressure(interrupted)
    with pytest.raises(KeyboardInterrupt):
        ask()
    assert caplog.records == []


@pytest.mark.parametrize(("logs", "times"), [(False, 1), (True, 2)])
def test_where_no_logs_are_taken_it_is_shown_once(device: str, logs: bool, times: int) -> None:
    done = python(
        f"""
        import logging, torch, torch_vmm
        torch_vmm.enable({device!r})
        if {logs}:
            logging.basicConfig()
        shared = torch_vmm.SharedMemoryPool("16MiB", device={device!r})
        shared.on_pressure(lambda requested, pool: 1 // 0)
        try:
            shared.register_model("llama").allocate(0, "32MiB")
        except torch_vmm.OutOfMemoryError:
            print("refused")
        """
    )
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr
    assert done.stderr.count("ZeroDivisionError: ") == times
