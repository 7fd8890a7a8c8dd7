"""What torch's memory history says of fixed programs."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from tests.gpu.memory import settle
from tests.helpers import MIB

Entry = dict[str, Any]

PAIR_ACTIONS = ("alloc", "free_requested", "free_completed")


@contextmanager
def recorded(**options: Any) -> Iterator[None]:
    """The history of what happens inside, and only that."""
    settle()
    torch.cuda.memory._record_memory_history(**{"stacks": "python", "clear_history": True, **options})
    try:
        yield
    finally:
        torch.cuda.memory._record_memory_history(None)


def entries(*actions: str) -> list[Entry]:
    """The device's history, of these actions only where some are named."""
    trace = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    return [entry for entry in trace if not actions or entry["action"] in actions]


def _bytes(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def _finish_frees() -> None:
    """What was recorded on another stream is free after this, under any allocator."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def program(steps: int, seed: int) -> list[list[Any]]:
    """A random program with several streams: its (action, size, number of the block) in order."""
    chosen = random.Random(seed)
    side = torch.cuda.Stream()
    with recorded():
        live: list[torch.Tensor] = []
        for step in range(steps):
            if len(live) < 3 or chosen.random() < 0.55:
                live.append(_bytes(chosen.choice([1, 700, 4096, 300_000, MIB, MIB + 5, 3 * MIB, 12 * MIB])))
                if chosen.random() < 0.2:
                    live[-1].record_stream(side)
            else:
                live.pop(chosen.randrange(len(live)))
                _finish_frees()
            if step == steps // 2:
                torch.cuda.memory_snapshot()
        while live:
            live.pop()
            _finish_frees()
        with suppress(torch.OutOfMemoryError):
            _bytes(2**50)
        trace = entries()
    said: list[list[Any]] = []
    numbers: dict[int, int] = {}
    for entry in trace:
        action = entry["action"]
        if action in PAIR_ACTIONS:
            if action == "alloc":
                numbers[entry["addr"]] = len(said)
            said.append([action, entry["size"], numbers[entry["addr"]]])
        elif action == "oom":
            said.append([action, entry["size"], entry["device_free"] > 0])
        elif action == "snapshot":
            said.append([action, entry["addr"], 0])
    return said


def dumped(folder: str, steps: int, seed: int) -> dict[str, Any]:
    """A random program in the middle of which recording begins; its dump's file, and what torch counts at its end."""
    chosen = random.Random(seed)
    live = [_bytes(chosen.choice([700, 3 * MIB, 12 * MIB])) for _ in range(12)]
    path = os.path.join(folder, f"{os.getpid()}.pickle")
    with recorded(context=None):
        torch.cuda.reset_peak_memory_stats()
        for _ in range(steps):
            if len(live) < 8 or chosen.random() < 0.5:
                live.append(_bytes(chosen.choice([1, 700, 300_000, MIB, 3 * MIB, 12 * MIB, 40 * MIB])))
            else:
                live.pop(chosen.randrange(len(live)))
            if chosen.random() < 0.02:
                _finish_frees()
        with suppress(torch.OutOfMemoryError):
            _bytes(2**50)
        counted = torch.cuda.memory_stats()
        torch.cuda.memory._dump_snapshot(path)
    keys = {"requested": "requested_bytes.all", "reserved": "reserved_bytes.all"}
    numbers = {f"{name}_{when}": counted[f"{key}.{when}"] for name, key in keys.items() for when in ("current", "peak")}
    return {"path": path, **numbers}


def _make() -> list[torch.Tensor]:
    return [_bytes(3 * MIB)]


def _drop(blocks: list[torch.Tensor]) -> None:
    blocks.clear()


def _functions(frames: list[Entry]) -> list[str]:
    """Which of this file's two functions are on the stack."""
    return sorted({frame["name"] for frame in frames} & {"_make", "_drop"})


def frames(enabled: str, context: str | None) -> dict[str, list[str]]:
    """Whose stack traces are where at this level."""
    found: dict[str, list[str]] = {}
    with recorded(enabled=enabled, context=context):
        blocks = _make()
        address = blocks[0].data_ptr()
        for segment in torch.cuda.memory_snapshot():
            for block in segment["blocks"]:
                if block["address"] == address:
                    found["block"] = _functions(block.get("frames", []))
        _drop(blocks)
        trace = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
        for entry in trace:
            if entry["action"] in PAIR_ACTIONS and entry["addr"] == address:
                found[entry["action"]] = _functions(entry.get("frames", []))
    return found


def skipped(actions: list[str]) -> list[str]:
    """Which actions are still in the history, or the error."""
    try:
        with recorded(skip_actions=actions):
            _drop(_make())
            torch.cuda.memory_snapshot()
            return sorted({entry["action"] for entry in entries(*PAIR_ACTIONS, "snapshot")})
    except (RuntimeError, ValueError) as error:
        return [type(error).__name__]


def bounded(max_entries: int, blocks: int) -> list[int]:
    """Sizes of the entries that a short history keeps."""
    with recorded(max_entries=max_entries, skip_actions=["free_requested", "free_completed"]):
        kept = [_bytes(1000 + k) for k in range(blocks)]
        sizes = [entry["size"] for entry in entries("alloc")]
        del kept
    return sizes


def kept_when_recording_again(clear_history: bool) -> int:
    """How many blocks' entries outlive a second beginning."""
    with recorded():
        blocks = _make()
        torch.cuda.memory._record_memory_history(stacks="python", clear_history=clear_history)
        count = len(entries("alloc"))
        _drop(blocks)
    return count


def compile_contexts() -> list[str]:
    """What entries say of compiled regions: outside, inside, inside another, outside."""
    said: list[str] = []
    with recorded(compile_context=True):
        held = _make()
        with torch._C._profiler._RecordFunctionFast("Torch-Compiled Region: 0/0"):
            held += _make()
            with torch._C._profiler._RecordFunctionFast("Torch-Compiled Region: 1/0"):
                held += _make()
        held += _make()
        said += [entry.get("compile_context", "") for entry in entries("alloc")]
        _drop(held)
    return said


def annotations() -> list[list[str]]:
    """What ranges of the program leave in the snapshot."""
    with recorded(global_record_annotations=True):
        with torch.profiler.record_function("the middle"):
            held = _make()
        noted = torch.cuda.memory._snapshot().get("external_annotations", [])
        _drop(held)
    said = [[str(note.get("name")), str(note.get("stage"))] for note in noted]
    return [note for note in said if note[0] == "the middle"]


def metadata() -> list[str]:
    """The user's own words on entries."""
    with recorded():
        held = _make()
        torch.cuda.memory._set_memory_metadata("step 1")
        held += _make()
        assert torch.cuda.memory._get_memory_metadata() == "step 1"
        torch.cuda.memory._set_memory_metadata("")
        held += _make()
        said = [entry["user_metadata"] for entry in entries("alloc")]
        _drop(held)
    return said
