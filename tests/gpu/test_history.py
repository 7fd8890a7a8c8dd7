"""torch's memory history and snapshots: what native's says of the same program, and whose memory it is."""

from __future__ import annotations

import pickle
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.cuda import _memory_viz

import torch_vmm
from tests.consistency import check_device
from tests.gpu.conftest import Busy
from tests.gpu.native import both
from tests.gpu.workloads import history as work
from tests.gpu.workloads.history import PAIR_ACTIONS, Entry, entries, recorded, settle
from tests.helpers import MIB, PAGE

MakePool = Callable[..., torch_vmm.VirtualMemoryPool]


@pytest.fixture(autouse=True)
def _leaves_no_history() -> Iterator[None]:
    settle()
    yield
    torch.cuda.memory._record_memory_history(None)
    torch.cuda.memory._set_memory_metadata("")
    assert not torch._C._cuda_isHistoryEnabled()
    settle()
    check_device()


def block(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def pages_of(segments: list[Entry]) -> set[int]:
    return {page for each in segments for page in range(each["address"], each["address"] + each["total_size"], PAGE)}


def check_pairs(trace: list[Entry]) -> None:
    """Every address goes alloc, free_requested, free_completed, round and round, with one size."""
    stage: dict[int, tuple[str, int]] = {}
    for entry in trace:
        if entry["action"] not in PAIR_ACTIONS:
            continue
        before, size = stage.get(entry["addr"], ("free_completed", entry["size"]))
        expected = PAIR_ACTIONS[(PAIR_ACTIONS.index(before) + 1) % len(PAIR_ACTIONS)]
        assert entry["action"] == expected, f"{entry['action']} of {entry['addr']:#x} after {before}"
        if entry["action"] != "alloc":
            assert entry["size"] == size
        stage[entry["addr"]] = (entry["action"], entry["size"])
    live = {address for address, (action, _) in stage.items() if action != "free_completed"}
    assert not live, "not freed in the history"


# -- Beside the native allocator ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_the_same_program_leaves_the_same_history(seed: int) -> None:
    ours, native = both(work.program, steps=150, seed=seed)
    assert ours == native
    assert [entry[0] for entry in ours].count("snapshot") == 1
    assert ours[-1][0] == "oom"


@pytest.mark.parametrize("context", [None, "state", "alloc", "all"])
def test_stack_traces_are_where_their_level_says(context: str | None) -> None:
    ours, native = both(work.frames, enabled="all", context=context)
    assert ours == native
    expected = {
        None: {"block": [], "alloc": [], "free_requested": [], "free_completed": []},
        "state": {"block": ["_make"], "alloc": [], "free_requested": [], "free_completed": []},
        "alloc": {key: ["_make"] for key in ("block", *PAIR_ACTIONS)},
        "all": {"block": ["_make"], "alloc": ["_make"], "free_requested": ["_drop"], "free_completed": ["_drop"]},
    }
    assert ours == expected[context]


def test_the_state_alone_keeps_the_blocks_stack_traces() -> None:
    ours, native = both(work.frames, enabled="state", context="all")
    assert ours == native
    assert ours["block"] == ["_make"]


@pytest.mark.parametrize("actions", [["alloc"], ["free_requested", "snapshot"], list(PAIR_ACTIONS), ["no such"]])
def test_skipped_actions_are_not_in_the_history(actions: list[str]) -> None:
    ours, native = both(work.skipped, actions=actions)
    assert ours == native


def test_a_short_history_keeps_the_latest() -> None:
    ours, native = both(work.bounded, max_entries=5, blocks=12)
    assert ours == native == [1000 + k for k in range(7, 12)]


@pytest.mark.parametrize(("clear", "count"), [(True, 0), (False, 1)])
def test_recording_again_keeps_the_history_or_clears_it(clear: bool, count: int) -> None:
    assert both(work.kept_when_recording_again, clear_history=clear) == (count, count)


def test_compiled_regions_are_named() -> None:
    ours, native = both(work.compile_contexts)
    assert ours == native
    assert ours[0] == ours[-1] == "N/A"


def test_annotations_are_in_the_snapshot() -> None:
    ours, native = both(work.annotations)
    assert ours == native


def test_the_users_words_are_on_the_entries() -> None:
    assert both(work.metadata) == (["", "step 1", ""], ["", "step 1", ""])


# -- What holds of every history ---------------------------------------------------------------------------------------


def test_c_frames_are_there_when_asked_for() -> None:
    with recorded(stacks="all"):
        kept = block(MIB)
        names = [frame["name"] for frame in entries("alloc")[-1]["frames"]]
    assert "test_c_frames_are_there_when_asked_for" in names
    assert any("at::" in name or "torch::" in name for name in names), names
    del kept


def test_times_are_those_of_the_wall_clock() -> None:
    began = time.time() * 1e6
    with recorded():
        for _ in range(20):
            block(1000)
        times = [entry["time_us"] for entry in entries(*PAIR_ACTIONS)]
    assert times == sorted(times)
    assert began - 1e5 <= times[0] <= times[-1] <= time.time() * 1e6 + 1e5


def test_every_block_is_allocated_and_freed_once_at_a_time(make_pool: MakePool) -> None:
    chosen = random.Random(4)
    pools = [make_pool("8GiB"), make_pool("8GiB", page_size="2MiB")]
    streams = [torch.cuda.Stream() for _ in range(3)]
    with recorded():
        before = pages_of(torch.cuda.memory_snapshot())
        live: list[torch.Tensor] = []
        for _ in range(600):
            pool = chosen.choice(pools)
            if len(live) > 30 or (live and chosen.random() < 0.4):
                live.pop(chosen.randrange(len(live)))
            else:
                with pool, torch.cuda.stream(chosen.choice(streams)):
                    live.append(block(chosen.choice([10, 5000, MIB, 2 * MIB + 1, 9 * MIB, 40 * MIB])))
                if chosen.random() < 0.3:
                    live[-1].record_stream(chosen.choice(streams))
            if chosen.random() < 0.05:
                pool.trim()
        during = torch.cuda.memory._snapshot()
        live.clear()
        settle()
        after = torch.cuda.memory._snapshot()
    trace = after["device_traces"][torch.cuda.current_device()]
    check_pairs(trace)
    # Chunks that came and went add up to what the snapshots show, page by page.
    for snapshot in (during, after):
        pages = set(before)
        for entry in snapshot["device_traces"][torch.cuda.current_device()]:
            if entry["action"] not in ("segment_map", "segment_unmap"):
                continue
            moved = set(range(entry["addr"], entry["addr"] + entry["size"], PAGE))
            if entry["action"] == "segment_map":
                assert not moved & pages, "mapped twice"
                pages |= moved
            else:
                assert moved <= pages, "unmapped twice"
                pages -= moved
        assert pages == pages_of(snapshot["segments"])


def test_a_free_that_waits_for_a_stream_completes_later(busy: Busy) -> None:
    side = torch.cuda.Stream()
    with recorded():
        kept = block(3 * MIB)
        address = kept.data_ptr()
        with torch.cuda.stream(side):
            busy(200)
        kept.record_stream(side)
        del kept
        waiting = torch.cuda.memory._snapshot()
        assert [entry["action"] for entry in entries(*PAIR_ACTIONS)] == ["alloc", "free_requested"]
        (pending,) = [
            each for segment in waiting["segments"] for each in segment["blocks"] if each["address"] == address
        ]
        assert pending["state"] == "active_pending_free"
        assert pending["frames"]
        settle()
        assert [entry["action"] for entry in entries(*PAIR_ACTIONS)] == list(PAIR_ACTIONS)


def test_threads_keep_their_own_words() -> None:
    def run(number: int) -> None:
        torch.cuda.memory._set_memory_metadata(f"thread {number}")
        for _ in range(50):
            block(10_000 + number)

    with recorded():
        threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        trace = entries(*PAIR_ACTIONS)
    check_pairs(trace)
    for number in range(4):
        words = {entry["user_metadata"] for entry in trace if entry["size"] == 10_000 + number}
        assert words == {f"thread {number}"}


def test_nothing_is_recorded_before_and_after() -> None:
    kept = block(MIB)
    with recorded():
        assert torch._C._cuda_isHistoryEnabled()
    del kept
    block(MIB)
    assert entries(*PAIR_ACTIONS) == []


# -- Out of memory -----------------------------------------------------------------------------------------------------

_seen: list[tuple[int, ...]] = []
_observing = False


def _observe(*numbers: int) -> None:
    if _observing:
        # No lock is held: what programs do here is to take a snapshot.
        torch.cuda.memory._snapshot()
        _seen.append(numbers)


@pytest.fixture
def seen() -> Iterator[list[tuple[int, ...]]]:
    """What an observer is told. torch has no way to detach one, so the same serves all tests."""
    global _observing
    if not hasattr(_observe, "attached"):
        torch._C._cuda_attach_out_of_memory_observer(_observe)
        _observe.attached = True  # type: ignore[attr-defined]
    _seen.clear()
    _observing = True
    yield _seen
    _observing = False


def test_observers_are_told_before_the_error_comes(seen: list[tuple[int, ...]]) -> None:
    total = torch.cuda.mem_get_info()[1]
    with recorded():
        with pytest.raises(torch.OutOfMemoryError):
            block(2**45 + 1)
        (entry,) = entries("oom")
    assert [(device, size) for device, size, _, _ in seen] == [(torch.cuda.current_device(), 2**45 + PAGE)]
    assert abs(seen[0][2] - total) < 1024 * MIB
    assert entry["size"] == 2**45 + 512
    assert entry["device_free"] == seen[0][3] > 0
    assert any(frame["name"] == "block" for frame in entry["frames"])


@pytest.mark.alone  # it takes what there is before the driver refuses the rest
@pytest.mark.parametrize("what", ["elastic", "sparse", "buffer", "pages"])
def test_whatever_finds_no_memory_tells_observers_and_the_history_once(
    seen: list[tuple[int, ...]], make_pool: MakePool, what: str
) -> None:
    much = 1 << 18, 1 << 20  # 256 GiB
    tensor = torch_vmm.elastic((4, 1 << 20), dtype=torch.uint8, max_shape=much) if what == "elastic" else None
    ask: Callable[[], object] = {
        "elastic": lambda: tensor.resize_(1 << 18),  # type: ignore[union-attr]
        "sparse": lambda: torch_vmm.sparse(much, dtype=torch.uint8).commit(()),
        "buffer": lambda: torch_vmm.MemoryPool().alloc(1 << 38, torch.uint8),
        "pages": lambda: make_pool("256GiB").allocate(0, "256GiB"),
    }[what]
    before = torch.cuda.memory_stats()["num_ooms"]
    with recorded():
        with pytest.raises(torch.OutOfMemoryError):
            ask()
        (entry,) = entries("oom")
    assert len(seen) == torch.cuda.memory_stats()["num_ooms"] - before == 1
    assert seen[0][0] == torch.cuda.current_device()
    assert entry["device_free"] == seen[0][3] > 0
    assert any(frame["name"] == "ask" or "test_whatever" in frame["name"] for frame in entry["frames"])


def test_observers_are_told_of_the_cap(seen: list[tuple[int, ...]]) -> None:
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(0.25)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            block(int(total * 0.3))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert abs(seen[0][2] - total // 4) < 1024 * MIB


def test_requests_that_succeed_tell_observers_nothing(seen: list[tuple[int, ...]]) -> None:
    block(64 * MIB)
    assert seen == []


# -- Models and private pools ------------------------------------------------------------------------------------------


def test_entries_name_the_model(make_pool: MakePool) -> None:
    one, two = make_pool("1GiB", name="one"), make_pool("1GiB", name="and; two")
    with recorded():
        with one:
            kept = [block(1001)]
        with two:
            torch.cuda.memory._set_memory_metadata("step 7")
            kept.append(block(1002))
            with pytest.raises(torch.OutOfMemoryError):
                block(2**40)
        kept.append(block(1003))
        kept.clear()
        words = {entry["size"]: entry["user_metadata"] for entry in entries("alloc")}
        assert words == {1001: "model: one", 1002: "step 7; model: and; two", 1003: "step 7"}
        assert entries("oom")[0]["user_metadata"] == "step 7; model: and; two"
        maps = {entry["user_metadata"] for entry in entries("segment_map")}
        assert {"model: one", "step 7; model: and; two"} <= maps
        for pool, size in ((one, 1001), (two, 1002), (torch_vmm.current_pool(), 1003)):
            assert {entry["size"] for entry in pool.memory_history() if entry["action"] in PAIR_ACTIONS} == {size}
    assert one.memory_history() == []


def test_entries_name_the_tag(make_pool: MakePool) -> None:
    one, default = make_pool("1GiB", name="one"), torch_vmm.current_pool()
    with recorded():
        with one.tag("weights"):
            torch.cuda.memory._set_memory_metadata("step 7")
            kept = [block(1001)]
        torch.cuda.memory._set_memory_metadata("")
        with default.tag("cache"):
            kept.append(block(1002))
        kept.clear()
        words = {entry["size"]: entry["user_metadata"] for entry in entries("alloc")}
        assert words == {1001: "step 7; tag: weights; model: one", 1002: "tag: cache"}
        for pool, size in ((one, 1001), (default, 1002)):
            assert {entry["size"] for entry in pool.memory_history() if entry["action"] in PAIR_ACTIONS} == {size}


def test_a_models_snapshot_includes_its_private_pools(make_pool: MakePool) -> None:
    model = make_pool("2GiB", name="parted")
    private = torch.cuda.MemPool()
    with model, torch.cuda.use_mem_pool(private):
        inside = block(5 * MIB)
    with torch.cuda.use_mem_pool(private):
        other = block(7 * MIB)
    with model:
        beside = block(3 * MIB)
    ids = {segment["segment_pool_id"] for segment in model.memory_snapshot()}
    assert ids == {(0, 0), private.id}
    assert torch_vmm.pool_of(inside) is model
    assert model.memory_allocated() == 8 * MIB
    assert model.memory_reserved() == sum(segment["total_size"] for segment in model.memory_snapshot())
    segments = private.snapshot()
    assert {segment["segment_pool_id"] for segment in segments} == {private.id}
    assert sum(segment["allocated_size"] for segment in segments) == 12 * MIB
    everything = torch.cuda.memory_snapshot()
    assert everything == sorted(everything, key=lambda segment: segment["address"])
    assert [segment for segment in everything if segment["segment_pool_id"] == private.id] == segments
    del inside, other, beside


def test_a_pools_numbers_nest_as_torchs_do(make_pool: MakePool) -> None:
    pool = make_pool("1GiB")
    with pool:
        kept = block(5 * MIB)
    nested = pool.memory_stats_as_nested_dict()
    assert nested["allocated_bytes"]["all"]["current"] == 5 * MIB
    native = torch.cuda.memory_stats_as_nested_dict()

    def names(tree: Any) -> Any:
        return {name: names(inner) for name, inner in tree.items()} if isinstance(tree, dict) else None

    assert names(nested) == names(native)
    del kept


# -- The viewer --------------------------------------------------------------------------------------------------------


def test_the_viewers_functions_take_the_dump(tmp_path: Path, make_pool: MakePool) -> None:
    pool = make_pool("1GiB", name="seen")
    with recorded():
        before = torch.cuda.memory._snapshot()
        with pool:
            kept = [block(size) for size in (100, 5000, 3 * MIB, 30 * MIB)]
        del kept[1]
        block(MIB)
        with pytest.raises(torch.OutOfMemoryError):
            block(2**50)
        torch.cuda.memory._dump_snapshot(str(tmp_path / "dump.pickle"))
    with (tmp_path / "dump.pickle").open("rb") as file:
        dump = pickle.load(file)
    assert "OutOfMemoryError" in _memory_viz.trace(dump)
    assert "total_reserved" in _memory_viz.segsum(dump)
    lines = _memory_viz.memory(dump, format_flamegraph=lambda text: text)
    assert "test_the_viewers_functions_take_the_dump" in lines
    compared = _memory_viz.compare(before["segments"], dump["segments"], format_flamegraph=lambda text: text)
    assert "seg_" in compared
    for page in (
        _memory_viz.trace_plot(dump),
        _memory_viz.trace_plot(dump, plot_segments=True),
        _memory_viz.trace_plot(dump, filter_freed=True),
        _memory_viz.segment_plot(dump),
    ):
        assert "snapshot.pickle" in page
    del kept
