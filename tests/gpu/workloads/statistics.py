"""What torch's memory functions answer: statistics, limits, misuse, the profiler."""

from __future__ import annotations

import gc
import json
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from tests.consistency import EVENTS, PARTS, check_device
from tests.helpers import GIB, MIB

Numbers = dict[str, int]

# The families that do not depend on how an allocator gets its memory.
EXACT = ("allocation", "allocated_bytes", "active", "active_bytes", "requested_bytes")

# The native allocator does not split off what is left of a large block when that is at most 1 MiB, and counts it with
# the block. These sizes, in this order, leave more than that, or nothing.
SMALL = [1, 511, 512, 513, 4096, 100_000, MIB - 512, MIB]
LARGE = [MIB + 1, 5 * MIB + 700, 10 * MIB, 12 * MIB, 32 * MIB]


def _bytes(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def _settled() -> dict[str, int]:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return dict(torch.cuda.memory_stats())


def _since(before: Numbers, peaks: bool = False) -> Numbers:
    """How the exact families have changed; peaks as the height above what was there before (they were reset then)."""
    now = torch.cuda.memory_stats()
    changes: Numbers = {}
    for key in (f"{family}.{part}" for family in EXACT for part in PARTS):
        for metric in ("current", "allocated", "freed"):
            changes[f"{key}.{metric}"] = now[f"{key}.{metric}"] - before[f"{key}.{metric}"]
        if peaks:
            changes[f"{key}.peak"] = now[f"{key}.peak"] - before[f"{key}.current"]
    return changes


def _events(before: Numbers) -> Numbers:
    now = torch.cuda.memory_stats()
    return {key: now[key] - before[key] for key in EVENTS}


def outcome(call: Callable[[], Any]) -> str:
    """How a call ends: "fine", or the type of its error."""
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return "fine"


def refusal(size: int) -> list[str]:
    """What programs may look for in an out-of-memory error: its type, how it begins, the amount, whose memory."""
    try:
        _bytes(size)
    except Exception as error:
        kind, text = type(error).__name__, str(error)
    else:
        return ["fine"]
    if found := re.match(r"CUDA out of memory\. Tried to allocate more than 1EB memory", text):
        return [kind, found.group()]
    found = re.match(r"CUDA out of memory\. Tried to allocate [\d.]+ [KMG]iB", text)
    return [kind, found.group() if found else text, *re.findall(r"GPU \d+", text)[:1]]


@contextmanager
def capped(room: int) -> Iterator[None]:
    """At most ``room`` bytes above what is reserved now, by torch's memory fraction."""
    _settled()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + room) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


# -- Names -------------------------------------------------------------------------------------------------------------


def names() -> dict[str, Any]:
    """The keys of every table of numbers, and the rows of the printed one."""
    kept = _bytes(1)

    def shape(value: Any) -> Any:
        return {key: shape(each) for key, each in sorted(value.items())} if isinstance(value, dict) else None

    def rows(text: str) -> list[str]:
        return [line.split("|")[1].strip() for line in text.splitlines() if line.count("|") == 6]

    stats = torch.cuda.memory_stats()
    segments = [segment for segment in torch.cuda.memory_snapshot() if segment["allocated_size"] != 0]
    del kept
    return {
        "keys": list(stats),
        "types": sorted({type(value).__name__ for value in stats.values()}),
        "nested": shape(torch.cuda.memory_stats_as_nested_dict()),
        "accelerator": list(torch.accelerator.memory_stats()),
        "rows": rows(torch.cuda.memory_summary()),
        "abbreviated": rows(torch.cuda.memory_summary(abbreviated=True)),
        "widths": sorted({len(line) for line in torch.cuda.memory_summary().splitlines()}),
        "max_split_size": stats["max_split_size"],
        "segment": sorted(segments[0]),
        "block": sorted(segments[0]["blocks"][0]),
    }


def processes() -> str:
    """How list_gpu_processes() begins, or what it raises."""
    try:
        return torch.cuda.list_gpu_processes().splitlines()[0]
    except Exception as error:
        return type(error).__name__


# -- Counting ----------------------------------------------------------------------------------------------------------


def counted() -> list[Numbers]:
    """Blocks of all kinds come, go and come again; how the numbers have changed after each stage."""
    before = _settled()
    torch.cuda.reset_peak_memory_stats()
    stages = []
    live = [_bytes(size) for size in SMALL]
    stages.append(_since(before, peaks=True))
    live += [_bytes(size) for size in LARGE]
    stages.append(_since(before, peaks=True))
    del live[::2]
    stages.append(_since(before, peaks=True))
    live.clear()
    torch.cuda.reset_peak_memory_stats()
    live = [_bytes(size) for size in (12 * MIB, 32 * MIB, 700)]
    live += [live[0].view(-1), live[0].clone(), live[2] + 1]
    stages.append(_since(before, peaks=True))
    live.clear()
    stages.append(_since(before, peaks=True))
    return stages


def reset() -> dict[str, Any]:
    """What the two resets leave."""
    before = _settled()
    kept = [_bytes(3000), _bytes(10 * MIB)]
    _bytes(12 * MIB)
    torch.cuda.reset_peak_memory_stats()
    after_peaks = _since(before, peaks=True)
    torch.cuda.reset_accumulated_memory_stats()
    stats = torch.cuda.memory_stats()
    zeros = {key: stats[key] for key in (*EVENTS, *(f"{family}.all.allocated" for family in EXACT))}
    flows = {key: value for key, value in stats.items() if key.endswith((".allocated", ".freed"))}
    _bytes(12 * MIB)
    del kept
    now = torch.cuda.memory_stats()
    result = {
        "peaks": after_peaks,
        "zeros": zeros,
        "not zero": sorted(key for key, value in flows.items() if value != 0),
        "allocated": {part: now[f"allocated_bytes.{part}.allocated"] for part in PARTS},
        "freed": {part: now[f"allocated_bytes.{part}.freed"] for part in PARTS},
        "peak": now["allocated_bytes.all.peak"] - before["allocated_bytes.all.current"],
    }
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_accumulated_memory_stats()
    return result


def deferred() -> list[Numbers]:
    """A block that another stream uses when it is freed: the numbers before, while it waits, and after."""
    side = torch.cuda.Stream()
    before = _settled()
    stages = []
    block = _bytes(10 * MIB)
    with torch.cuda.stream(side):
        torch.cuda._sleep(400_000_000)
    block.record_stream(side)
    stages.append(_since(before))
    del block
    stages.append(_since(before))
    other = _bytes(10 * MIB)
    stages.append(_since(before))
    side.synchronize()
    last = _bytes(12 * MIB)
    stages.append(_since(before))
    del other, last
    stages.append(_since(before))
    return stages


def flushed() -> Numbers:
    """Events of an empty_cache()."""
    before = _settled()
    torch.cuda.empty_cache()
    changes = _events(before)
    return {"num_sync_all_streams": changes["num_sync_all_streams"], "num_ooms": changes["num_ooms"]}


def consistent() -> int:
    """Every number agrees with the snapshot at each stage of some work; returns how many were looked at."""
    _settled()
    check_device()
    live = [_bytes(size) for size in (*SMALL, *LARGE)]
    check_device()
    del live[1::2]
    stats = check_device()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
    live[-1].record_stream(side)
    live.clear()
    check_device()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    check_device()
    return len(stats)


# -- The profiler ------------------------------------------------------------------------------------------------------


def profiled() -> dict[str, Any]:
    """What torch's profiler says of some operations' memory: bytes for each, and the totals of each event."""
    source = torch.ones(1000, dtype=torch.uint8, device="cuda")
    base = torch.cuda.memory_allocated()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as prof:
        kept = torch.empty(3000, dtype=torch.uint8, device="cuda")
        large = torch.empty(10 * MIB, dtype=torch.uint8, device="cuda")
        total = source + 1
        copy = large.clone()
        del kept, large
        empty = torch.empty(0, dtype=torch.uint8, device="cuda")
    held = torch.cuda.memory_allocated() - base
    by_operation: Numbers = {}
    for event in prof.key_averages():
        if event.self_device_memory_usage != 0:
            by_operation[event.key] = event.self_device_memory_usage
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        prof.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    events = sorted((event for event in events if event["name"] == "[memory]"), key=lambda event: event["ts"])
    told = [event["args"] for event in events if event["args"]["Device Type"] == 1]
    del total, copy, empty
    return {
        "by operation": by_operation,
        "bytes": [args["Bytes"] for args in told],
        "devices": sorted({args["Device Id"] for args in told}),
        "allocated": [args["Total Allocated"] - base for args in told],
        "reserved is enough": all(args["Total Reserved"] >= args["Total Allocated"] for args in told),
        "held": held,
    }


# -- Limits ------------------------------------------------------------------------------------------------------------


def fractions() -> dict[str, Any]:
    """What set_per_process_memory_fraction() gives back, and what it refuses."""
    answers = {}
    for fraction in (0.9, 0.25, 0.5, 1.0):
        torch.cuda.set_per_process_memory_fraction(fraction)
        answers[str(fraction)] = abs(torch.cuda.get_per_process_memory_fraction() - fraction) < 1e-6
    refused = {
        repr(fraction): outcome(lambda fraction=fraction: torch.cuda.set_per_process_memory_fraction(fraction))
        for fraction in (-0.1, 1.1, 1, "0.5")
    }
    return {"answers": answers, "refused": refused}


def beyond_the_fraction() -> dict[str, Any]:
    """Requests above the cap: the error, its counts, and what still works."""
    with capped(256 * MIB):
        before = dict(torch.cuda.memory_stats())
        kept = _bytes(64 * MIB).fill_(3)
        errors = [refusal(size) for size in (2 * GIB, 512 * MIB)]
        events = _events(before)
        numbers = _since(before)
        fits = _bytes(128 * MIB).fill_(4)
        intact = int(kept.min()) == int(kept.max()) == 3 and int(fits.min()) == int(fits.max()) == 4
    return {
        "errors": errors,
        "num_ooms": events["num_ooms"],
        "num_alloc_retries": events["num_alloc_retries"],
        "numbers": numbers,
        "intact": intact,
    }


def met_by_a_flush() -> Numbers:
    """Two idle blocks of 64 MiB and no room for a third: then one of 128 MiB is asked for."""
    with capped(144 * MIB):
        halves = [_bytes(64 * MIB) for _ in range(2)]
        halves.clear()
        before = dict(torch.cuda.memory_stats())
        _bytes(128 * MIB)
        events = _events(before)
    return {"num_ooms": events["num_ooms"], "num_alloc_retries": events["num_alloc_retries"]}


def beyond_the_device() -> dict[str, Any]:
    """Requests that no device could meet."""
    before = _settled()
    errors = {str(size): refusal(size) for size in (2**62, 2**60, 2**59, 2**42)}
    numbers = _since(before)
    return {"errors": errors, "numbers": numbers, "num_ooms": _events(before)["num_ooms"]}


def misused() -> dict[str, str]:
    """Devices and pointers that are none: what each function raises."""
    held = torch.cuda.caching_allocator_alloc(4096)
    block = torch.cuda.caching_allocator_alloc(4096)
    torch.cuda.caching_allocator_delete(block)
    cases: dict[str, Callable[[], Any]] = {
        "stats of device 99": lambda: torch.cuda.memory_stats(99),
        "peaks of device 99": lambda: torch.cuda.reset_peak_memory_stats(99),
        "totals of device 99": lambda: torch.cuda.reset_accumulated_memory_stats(99),
        "fraction of device 99": lambda: torch.cuda.set_per_process_memory_fraction(0.5, 99),
        "fraction asked of device 99": lambda: torch.cuda.get_per_process_memory_fraction(99),
        "stats of the cpu": lambda: torch.cuda.memory_stats("cpu"),
        "tensor on device 99": lambda: torch.empty(1, device="cuda:99"),
        "memory of device 99": lambda: torch.cuda.caching_allocator_alloc(512, 99),
        "stream of text": lambda: torch.cuda.caching_allocator_alloc(512, stream="0"),
        "nothing": lambda: torch.cuda.caching_allocator_delete(0),
        "a pointer of nobody's": lambda: torch.cuda.caching_allocator_delete(0x1000),
        "freed before": lambda: torch.cuda.caching_allocator_delete(block),
        "inside a block": lambda: torch.cuda.caching_allocator_delete(held + 512),
        "a stream for an empty tensor": lambda: torch.empty(0, device="cuda").record_stream(torch.cuda.Stream()),
    }
    outcomes = {name: outcome(call) for name, call in cases.items()}
    outcomes["the block held meanwhile"] = outcome(lambda: torch.cuda.caching_allocator_delete(held))
    return outcomes


def by_pointer() -> dict[str, Any]:
    """caching_allocator_alloc and _delete: what they count, on which stream."""
    before = _settled()
    torch.cuda.reset_peak_memory_stats()
    side = torch.cuda.Stream()
    sizes = [1, 512, 5000, 10 * MIB]
    pointers = [torch.cuda.caching_allocator_alloc(size) for size in sizes]
    pointers.append(torch.cuda.caching_allocator_alloc(10 * MIB, "cuda:0", side))
    pointers.append(torch.cuda.caching_allocator_alloc(700, 0, side.cuda_stream))
    nothing = torch.cuda.caching_allocator_alloc(0)
    live = _since(before, peaks=True)
    streams = {
        block["address"]: segment["stream"]
        for segment in torch.cuda.memory_snapshot()
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }
    on_side = [streams.get(pointer) == side.cuda_stream for pointer in pointers]
    for pointer in pointers:
        torch.cuda.caching_allocator_delete(pointer)
    return {
        "live": live,
        "gone": _since(before),
        "nothing": nothing,
        "aligned": all(pointer % 512 == 0 for pointer in pointers),
        "on the side stream": on_side,
    }


def uncached() -> dict[str, Any]:
    """With the cache disabled memory comes from CUDA itself, past all counters."""
    before = _settled()
    inside = _bytes(12 * MIB)
    torch.cuda.memory.caching_allocator_enable(False)
    try:
        held = _since(before)
        outside = _bytes(20 * MIB).fill_(7)
        raw = torch.cuda.caching_allocator_alloc(5 * MIB)
        silent = _since(before) == held
        torch.cuda.caching_allocator_delete(raw)
        try:
            torch.empty(1 << 60, dtype=torch.uint8, device="cuda")
            too_much = ""
        except torch.OutOfMemoryError as error:
            too_much = str(error)
        del inside
        freed = _since(before)
    finally:
        torch.cuda.memory.caching_allocator_enable(True)
    intact = bool((outside == 7).all())
    numbers = _since(before)["allocated_bytes.all.current"]
    del outside
    return {
        "held": held,
        "silent": silent,
        "too much": too_much,
        "freed": freed,
        "intact": intact,
        "silent at its end": _since(before)["allocated_bytes.all.current"] == numbers,
    }
