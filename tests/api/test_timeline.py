"""record_timeline: what was held when, as values, as a trace and as a picture."""

from __future__ import annotations

import gc
import json
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_vmm
from tests.helpers import MIB, tensor_in
from torch_vmm import SharedMemoryPool, Timeline

MakeShared = Callable[..., SharedMemoryPool]


def comes_true(condition: Callable[[], bool]) -> bool:
    """Within ten seconds."""
    for _ in range(2000):
        if condition():
            return True
        time.sleep(0.005)
    return False


def test_what_has_spilled_is_in_no_ones_memory_here(make_shared: MakeShared) -> None:
    shared = make_shared("64MiB")
    model = shared.register_model("model", spill="host")
    here = tensor_in(model, 60 * MIB)
    there = tensor_in(model, 20 * MIB)
    with shared.record_timeline(interval=0.001) as timeline:
        assert comes_true(lambda: len(timeline.samples) > 0)
    assert timeline.samples[-1].allocated_bytes == {"model": 60 * MIB}
    del here, there


def recorders() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "torch_vmm timeline"]


@pytest.fixture(autouse=True)
def none_is_left() -> Any:
    yield
    gc.collect()
    assert comes_true(lambda: recorders() == [])


def test_what_sleeps_holds_no_memory(shared: SharedMemoryPool) -> None:
    llama = shared.register_model("llama")
    kept = tensor_in(llama, 8 * MIB)
    with llama.tag("cache"):
        cache = torch.empty(2 * MIB, dtype=torch.uint8, device=llama.device)
    with shared.record_timeline(interval=60) as timeline:
        llama.sleep({"": "host"})
    first, *_, last = timeline.samples
    assert first.allocated_bytes == {"llama": 10 * MIB}
    assert last.allocated_bytes == {"llama": llama.stats().allocated_bytes} == {"llama": 2 * MIB}
    with shared.record_timeline(interval=60) as timeline:
        llama.sleep()
    assert timeline.samples[-1].allocated_bytes == {"llama": 0}
    llama.wake()
    del kept, cache


def test_it_sees_what_models_hold(shared: SharedMemoryPool) -> None:
    llama, qwen = shared.register_model("llama"), shared.register_model("qwen")
    with shared.record_timeline(interval=0.001) as timeline:
        kept = tensor_in(llama, 8 * MIB)
        assert comes_true(lambda: timeline.samples[-1].allocated_bytes == {"llama": 8 * MIB, "qwen": 0})
        del kept
        assert comes_true(lambda: timeline.samples[-1].allocated_bytes["llama"] == 0)
        shared.physical_limit = "48MiB"
        kept = tensor_in(qwen, 2 * MIB)
    first, *_, last = timeline.samples
    assert first.physical_bytes == {"llama": 0, "qwen": 0}
    assert (first.store_bytes, first.physical_limit) == (0, 64 * MIB)
    # The last one is of the block's end, whenever the thread looked before.
    assert last.allocated_bytes == {"llama": 0, "qwen": 2 * MIB}
    assert last.physical_bytes == {each.name: each.physical_memory_usage for each in (llama, qwen)}
    assert last.store_bytes == shared.global_stats().store_bytes
    assert last.physical_limit == 48 * MIB
    assert max(sample.physical_bytes["llama"] for sample in timeline.samples) == 8 * MIB
    times = [sample.seconds for sample in timeline.samples]
    assert times == sorted(times)
    assert 0 <= times[0] < times[-1]
    del kept


def test_memory_under_a_tag_and_in_the_store_is_seen(shared: SharedMemoryPool) -> None:
    llama, going = shared.register_model("llama"), shared.register_model("going")
    with llama.tag("weights"):
        kept = torch.empty(4 * MIB, dtype=torch.uint8, device=llama.device)
    tensor_in(going, 16 * MIB)
    shared.unregister_model("going")
    with shared.record_timeline() as timeline:
        pass
    assert timeline.samples[-1].allocated_bytes == {"llama": 4 * MIB}
    assert timeline.samples[-1].store_bytes == shared.global_stats().store_bytes > 0
    del kept


def test_it_looks_as_often_as_it_was_told(shared: SharedMemoryPool) -> None:
    shared.register_model("llama")
    with shared.record_timeline(interval=3600) as rare, shared.record_timeline(interval=0.001) as often:
        assert comes_true(lambda: len(often.samples) > 20)
    assert len(rare.samples) == 2
    assert often.samples[-1].seconds >= 20 * 0.001


def test_stop_ends_it_and_twice_is_fine(shared: SharedMemoryPool) -> None:
    timeline = shared.record_timeline(0.001)
    assert "recording" in repr(timeline)
    assert len(recorders()) == 1
    timeline.stop()
    assert recorders() == []
    seen = timeline.samples
    assert len(seen) >= 2
    time.sleep(0.01)
    timeline.stop()
    assert timeline.samples == seen
    assert repr(timeline).startswith(f"Timeline({shared.device}: {len(seen)} samples in 0.")
    assert repr(timeline).endswith("stopped)")


def test_an_error_in_the_block_passes_and_ends_it(shared: SharedMemoryPool) -> None:
    with pytest.raises(RuntimeError, match="in the block"), shared.record_timeline() as timeline:
        raise RuntimeError("in the block")
    assert recorders() == []
    assert len(timeline.samples) >= 2


def test_models_may_come_and_go(shared: SharedMemoryPool) -> None:
    first = shared.register_model("first")
    kept = tensor_in(first, 4 * MIB)
    with shared.record_timeline(0.001) as timeline:

        def sees(*names: str) -> bool:
            return comes_true(lambda: list(timeline.samples[-1].physical_bytes) == list(names))

        assert sees("first")
        second = shared.register_model("second")
        assert sees("first", "second")
        shared.unregister_model("first", force=True)  # its memory is held still
        assert sees("second", "first (closed)")
        assert timeline.samples[-1].allocated_bytes["first (closed)"] == 4 * MIB
        del kept
        assert sees("second")
        second.close()
        assert sees()
    assert all(sample.allocated_bytes.keys() == sample.physical_bytes.keys() for sample in timeline.samples)


def test_it_ends_with_its_pool(make_shared: MakeShared, tmp_path: Path) -> None:
    shared = make_shared("32MiB")
    kept = tensor_in(shared.register_model("llama"), 4 * MIB)
    with shared.record_timeline(0.001) as timeline:
        shared.close(force=True)
        assert comes_true(lambda: recorders() == [])
    assert timeline.samples[-1].allocated_bytes == {"llama (closed)": 4 * MIB}
    timeline.save(tmp_path / "trace.json")
    with pytest.raises(torch_vmm.InvalidArgumentError, match="closed"):
        shared.record_timeline()
    del kept


def test_it_keeps_its_pool_as_little_as_its_pool_keeps_it(device: str, tmp_path: Path) -> None:
    shared = SharedMemoryPool("32MiB", device=device)
    shared.register_model("llama")
    timeline = shared.record_timeline(0.001)
    gone = weakref.ref(shared)
    del shared
    assert comes_true(lambda: gc.collect() >= 0 and gone() is None)
    assert comes_true(lambda: recorders() == [])
    timeline.stop()
    timeline.save(tmp_path / "trace.json")


def test_a_timeline_that_nobody_holds_ends(shared: SharedMemoryPool) -> None:
    def forget() -> weakref.ref[Timeline]:
        return weakref.ref(shared.record_timeline(0.001))

    gone = forget()
    assert comes_true(lambda: gone() is None)
    assert comes_true(lambda: recorders() == [])


@pytest.mark.parametrize(
    "interval", [0, -1, -0.01, float("nan"), float("inf"), 1e9, 10**400, True, "0.01", None, [], 1j]
)
def test_an_interval_that_cannot_be_is_refused(shared: SharedMemoryPool, interval: Any) -> None:
    with pytest.raises(torch_vmm.InvalidArgumentError, match=r"interval=.*: give seconds above 0"):
        shared.record_timeline(interval)
    assert recorders() == []


# -- Files -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def recorded(shared: SharedMemoryPool) -> Timeline:
    """Three models, one of which ends, of names that are hard to draw; the limit is lowered once."""
    llama, qwen = shared.register_model("llama"), shared.register_model("qwen $\\frac$")
    shared.register_model("going")
    with shared.record_timeline(0.001) as timeline:
        kept = [tensor_in(llama, 12 * MIB), tensor_in(qwen, 3 * MIB), tensor_in(shared["going"], 2 * MIB)]
        assert comes_true(lambda: timeline.samples[-1].allocated_bytes.get("going") == 2 * MIB)
        kept.clear()
        shared.unregister_model("going")
        shared.physical_limit = "48MiB"
        assert comes_true(lambda: "going" not in timeline.samples[-1].allocated_bytes)
    return timeline


def test_a_trace_has_a_counter_a_model(recorded: Timeline, tmp_path: Path) -> None:
    recorded.save(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    head, *events = trace["traceEvents"]
    assert (head["ph"], head["name"]) == ("M", "process_name")
    assert {event["ph"] for event in events} == {"C"}
    assert {(event["pid"]) for event in events} == {head["pid"]}
    by_name: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        by_name.setdefault(event["name"], []).append(event)
    by_name.pop("going (closed)", None)  # until the work that was queued on it has passed
    assert set(by_name) == {"llama", "qwen $\\frac$", "going", "(store)", "(physical limit)"}
    for name in ("llama", "qwen $\\frac$", "going"):
        for event, sample in zip(by_name[name], recorded.samples, strict=True):
            assert event["ts"] == round(sample.seconds * 1e6)
            allocated = sample.allocated_bytes.get(name, 0)
            idle = max(0, sample.physical_bytes.get(name, 0) - allocated)
            assert event["args"] == {"allocated": allocated, "idle": idle}
    # It does not stay at what it was.
    assert by_name["going"][-1]["args"] == {"allocated": 0, "idle": 0}
    assert max(event["args"]["allocated"] for event in by_name["going"]) == 2 * MIB
    assert [event["args"]["limit"] // MIB for event in (by_name["(physical limit)"][k] for k in (0, -1))] == [64, 48]
    assert by_name["(store)"][-1]["args"] == {"store": recorded.samples[-1].store_bytes}


@pytest.mark.parametrize("name", ["picture", "picture.txt", "picture.jpeg", "json", ".json", "picture.json.gz", 3])
def test_another_suffix_is_refused_with_those_that_there_are(recorded: Timeline, tmp_path: Path, name: Any) -> None:
    path = tmp_path / name if isinstance(name, str) else name
    with pytest.raises(torch_vmm.InvalidArgumentError, match=r"\.json.*\.png, \.svg, \.pdf|is not a path"):
        recorded.save(path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a\0b.json", "\ud800.json", "", None, b"trace.json"])
def test_what_is_no_path_is_refused(recorded: Timeline, name: Any) -> None:
    with pytest.raises(torch_vmm.InvalidArgumentError, match=r"path=.*(zero byte|is not a path|that is text)"):
        recorded.save(name)


def test_a_suffix_may_be_in_capitals_and_a_path_be_text(recorded: Timeline, tmp_path: Path) -> None:
    recorded.save(str(tmp_path / "TRACE.JSON"))
    assert json.loads((tmp_path / "TRACE.JSON").read_text())["traceEvents"]


def test_a_folder_that_is_not_there_is_an_os_error(recorded: Timeline, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        recorded.save(tmp_path / "none" / "trace.json")


def test_it_can_be_saved_while_it_records(shared: SharedMemoryPool, tmp_path: Path) -> None:
    with shared.record_timeline(0.001) as timeline:
        timeline.save(tmp_path / "early.json")
        saved = len(timeline.samples)  # or fewer: it goes on meanwhile
        assert comes_true(lambda: len(timeline.samples) > saved)
        timeline.save(tmp_path / "late.json")
    early, late = (json.loads((tmp_path / f"{when}.json").read_text())["traceEvents"] for when in ("early", "late"))
    assert len(early) < len(late)


def test_without_matplotlib_a_picture_says_what_to_install(
    recorded: Timeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(torch_vmm.NotAvailableError, match="pip install matplotlib") as raised:
        recorded.save(tmp_path / "picture.png")
    assert "pip install matplotlib" in raised.value.reason
    assert list(tmp_path.iterdir()) == []
    recorded.save(tmp_path / "trace.json")


@pytest.mark.parametrize(("suffix", "begins"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_a_picture_of_each_kind(recorded: Timeline, tmp_path: Path, suffix: str, begins: bytes) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / f"picture{suffix}"
    recorded.save(file)
    assert file.read_bytes().startswith(begins)


def texts_of(svg: Path) -> set[str]:
    """What matplotlib wrote: it draws texts as paths, and notes each before it."""
    return {line.strip()[5:-4] for line in svg.read_text().splitlines() if line.strip().startswith("<!-- ")}


def test_the_picture_names_models_limit_and_units(recorded: Timeline, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    recorded.save(tmp_path / "picture.svg")
    texts = texts_of(tmp_path / "picture.svg")
    assert {"llama", "going", "in the store", "limit", "seconds", "MiB"} <= texts
    assert r"qwen $\frac$" in texts  # no formula, which this could not be
    assert "GiB" not in texts


def test_large_memory_is_drawn_in_gib(make_shared: MakeShared, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    shared = make_shared("3GiB")
    with shared.record_timeline() as timeline:
        pass
    timeline.save(tmp_path / "picture.svg")
    assert {"GiB", "limit"} <= texts_of(tmp_path / "picture.svg")


def test_the_picture_stacks_what_is_mapped(recorded: Timeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.axes import Axes

    drawn: dict[str, Any] = {}
    stackplot, step = Axes.stackplot, Axes.step

    def noted_stack(axes: Any, x: Any, *areas: Any, **how: Any) -> Any:
        drawn.update(x=x, areas=areas)
        return stackplot(axes, x, *areas, **how)

    def noted_step(axes: Any, x: Any, y: Any, **how: Any) -> Any:
        drawn.update(limit=y)
        return step(axes, x, y, **how)

    monkeypatch.setattr(Axes, "stackplot", noted_stack)
    monkeypatch.setattr(Axes, "step", noted_step)
    recorded.save(tmp_path / "picture.png")
    samples = recorded.samples
    assert drawn["x"] == [sample.seconds for sample in samples]
    models = list(dict.fromkeys(name for sample in samples for name in sample.physical_bytes))
    assert models[:3] == ["llama", "qwen $\\frac$", "going"]
    assert set(models[3:]) <= {"going (closed)"}  # until the work that was queued on it has passed
    assert list(drawn["areas"]) == [
        *([sample.physical_bytes.get(name, 0) / MIB for sample in samples] for name in models),
        [sample.store_bytes / MIB for sample in samples],
    ]
    assert drawn["limit"] == [sample.physical_limit / MIB for sample in samples]
