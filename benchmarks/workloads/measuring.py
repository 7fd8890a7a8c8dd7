"""Measures one program in this process, plans which processes there are, and compares what they computed."""

from __future__ import annotations

import gc
import os
import struct
import time
import zlib
from collections.abc import Callable
from contextlib import nullcontext

import torch

from .. import lockstep
from ..measurement import Measurement, Part, Row
from ..runner import Ask, Options
from . import largest
from .memory import Memory
from .models import Place
from .program import Program
from .programs import BATCHES, PROGRAMS, Entry

KIND = "cuda"
KINDS = ("cuda", "cpu")
_GIB = 2**30
_HEADROOM, _LEAST_HEADROOM = 0.05, 32 * 2**20  # of the one limit over the joint peak; small pools are in whole pages
_MOST_STEPS = 2**14  # of all passes together


# -- The runner's side -------------------------------------------------------------------------------------------------


def parts(options: Options, ask: Ask) -> list[Part]:
    """One for each program. Of models under one limit, ``ask`` measures first what they need together."""
    scale = options.scale or ("full" if options.kind == "cuda" else "small")
    if options.limit is not None:
        chosen = [name for name in options.programs or BATCHES if name in BATCHES]
        return [{"program": name, "scale": scale, "within": options.limit} for name in chosen]
    planned: list[Part] = []
    for name in options.programs or PROGRAMS:
        passes, emptied = (2, 1) if options.quick else (6, 3) if options.lockstep else (3, 2)
        part: Part = {"program": name, "scale": scale, "passes": passes, "emptied": emptied}
        if PROGRAMS[name].models > 1:
            peak = _joint_peak(part, options.kind, ask)
            if peak is None:
                continue
            part = {**part, "limit": int(peak + max(peak * _HEADROOM, _LEAST_HEADROOM))}
        planned.append(part)
    return planned


def _joint_peak(part: Part, kind: str, ask: Ask) -> float | None:
    """Bytes. Torch's allocator of host memory does not tell: there it is ours that does, without a limit."""
    measured = ask("native" if kind == "cuda" else "torch_vmm", {**part, "passes": 1, "emptied": 0}) or []
    peaks = [one.value for one in measured if one.metric == "working set"]
    return peaks[0] * _GIB if peaks else None


def remarks(rows: list[Row]) -> list[str]:
    """Which programs computed the same everywhere, a line for each."""
    lines = []
    for case, values in _fingerprints(rows).items():
        measured = [row["allocator"] for row in rows if (row["case"], row["unit"]) == (case, "crc32")]
        if len(values) == 1 and len(measured) > 1:
            lines.append(f"{case}: the same results, bit for bit, under {', '.join(measured)}")
    return lines


def complaints(rows: list[Row]) -> list[str]:
    """Programs whose results differ by more than they may."""
    wrong = []
    for case, values in _fingerprints(rows).items():
        if len(values) == 1:
            continue
        tolerance = PROGRAMS[case].kind.tolerance
        means = [mean for row in rows if (row["case"], row["metric"]) == (case, "results") for mean in row["runs"]]
        apart = (max(means) - min(means)) / max(abs(mean) for mean in means)
        if tolerance == 0 or not apart <= tolerance:
            wrong.append(
                f"{case}: RESULTS DIFFER: means from {min(means)} to {max(means)}, {len(values)} different "
                f"crc32; allowed is {tolerance:.0e}"
            )
    return wrong


def _fingerprints(rows: list[Row]) -> dict[str, set[float]]:
    found: dict[str, set[float]] = {}
    for row in rows:
        if row["unit"] == "crc32":
            found.setdefault(row["case"], set()).update(row["runs"])
    return found


# -- The measuring process ---------------------------------------------------------------------------------------------


def measure_part(allocator: str, kind: str, quick: bool, part: Part) -> list[Measurement]:
    """One program: memory in GiB, times in s."""
    del quick  # the part says it
    name, scale = str(part["program"]), str(part["scale"])
    entry, memory = PROGRAMS[name], Memory(kind, allocator)
    torch.set_num_threads(1)  # what is pinned has one CPU
    settle_algorithms(entry.kind.is_deterministic, entry.kind.is_strict)
    place, wait = lockstep.measured(part)
    with place:
        if "within" in part:
            return largest.measure(name, kind, scale, int(part["within"]), memory)
        program = entry.make(kind, scale, _places(entry, allocator, kind, int(part.get("limit", 0))))
        return course(name, program, memory, int(part["passes"]), int(part["emptied"]), wait=wait)


def settle_algorithms(is_deterministic: bool, is_strict: bool) -> None:
    """Every process chooses the same ones; sums in no particular order are avoided where the program asks for it."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the size that torch gives it on this GPU anyway
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    # cuDNN plans attention anew for each shape, which takes longer than the step: a first pass would tell of that.
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.use_deterministic_algorithms(is_deterministic, warn_only=not is_strict)
    # It would write to all that torch.empty makes. (The module is a class with properties, as no one can type.)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


_shared: list[object] = []  # pools that nobody holds are closed


def _places(entry: Entry, allocator: str, kind: str, limit: int) -> list[Place]:
    """For several models pools of their own, under ``limit`` bytes (0: none), where the allocator has pools."""
    if entry.models == 1 or allocator != "torch_vmm":
        return [nullcontext() for _ in range(entry.models)]
    import torch_vmm

    shared = torch_vmm.SharedMemoryPool(physical_limit=limit or "1TiB", device=kind)
    _shared.append(shared)
    return [shared.register_model(f"model {number}") for number in range(entry.models)]


def course(
    case: str,
    program: Program,
    memory: Memory,
    passes: int,
    emptied: int = 0,
    clock: Callable[[], float] = time.perf_counter,
    wait: Callable[[], None] = lambda: None,
) -> list[Measurement]:
    """Runs ``passes`` (at least 1) of a program that was just made, then ``emptied`` more that begin without any idle
    memory, and says what they took.

    ``wait`` returns when the next pass may begin.
    """
    program.warm_up()
    record = torch.zeros(_MOST_STEPS, dtype=torch.float64, device=memory.kind)
    steps = 0

    def run_once() -> float:
        nonlocal steps
        began = clock()
        for result in program.run():
            record[steps].copy_(result)
            steps += 1
        memory.synchronize()
        return clock() - began

    gc.collect()
    memory.start_over()
    times: list[float] = []
    calls = [memory.driver_calls()]  # after each pass
    for _ in range(passes):
        wait()
        times.append(run_once())
        calls.append(memory.driver_calls())
    taken = [
        *_of_memory(case, memory),
        Measurement(case, "first pass", times[0], "s"),
        *(Measurement(case, "warm pass", each, "s") for each in times[1:]),
        *_of_calls(case, calls),
    ]
    for _ in range(emptied):
        wait()
        memory.start_over()
        taken.append(Measurement(case, "pass after empty_cache", run_once(), "s"))
    return [*taken, *_of_results(case, record[:steps].tolist())]


def _of_memory(case: str, memory: Memory) -> list[Measurement]:
    stats = memory.statistics()
    if stats is None:
        return []
    allocated, reserved = stats["allocated_bytes.all.peak"] / _GIB, stats["reserved_bytes.all.peak"] / _GIB
    return [
        Measurement(case, "working set", allocated, "GiB"),
        Measurement(case, "peak reserved", reserved, "GiB"),
        Measurement(case, "reserved / allocated", reserved / allocated, "ratio"),
    ]


def _of_calls(case: str, calls: list[int | None]) -> list[Measurement]:
    first, middle, last = calls[0], calls[len(calls) // 2], calls[-1]
    if first is None or middle is None or last is None:
        return []
    return [
        Measurement(case, "driver calls, first half", middle - first, "calls"),
        Measurement(case, "driver calls, second half", last - middle, "calls"),
    ]


def _of_results(case: str, results: list[float]) -> list[Measurement]:
    return [
        Measurement(case, "results", sum(results) / len(results), "mean"),
        Measurement(case, "results, exactly", zlib.crc32(struct.pack(f"{len(results)}d", *results)), "crc32"),
    ]
