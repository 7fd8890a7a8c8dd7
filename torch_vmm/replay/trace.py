"""One device's history as a program of allocations and frees, with what the allocator held meanwhile.

A history is seldom whole: torch keeps the latest entries, and recording may begin in the middle. So what lived before
it is gathered from both ends: a block that is freed without having been allocated, and one that is live in the
segments without the history knowing of it. What was reserved is known at the end, from the segments, and is counted
back from there.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch_vmm.errors import InvalidArgumentError
from torch_vmm.sizes import show

from .dump import Dump

ALLOCATE, FREE = 0, 1
_ALIGNMENT = 512  # bytes; torch rounds blocks up to it
_GAINED = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
_LARGEST = 2**63 - 1
_MOST_LIVE = 2**43  # bytes: no device has as many; the replay's has twice that, and four times the addresses
_LATEST_US = 2**53  # what _C.replay takes


@dataclass(frozen=True)
class Refusal:
    """An out-of-memory error in the history."""

    step: int  # after which it was
    size: int  # bytes asked for


@dataclass
class Program:
    """What ``_C.replay`` takes, and the allocator's own numbers.

    The first ``opening`` operations allocate what lived before the history began. Each one after them is a step. The
    numbers have one entry more than there are steps: the first is how things stood before step 1.
    """

    device: int
    op: array[int] = field(default_factory=lambda: array("B"))
    id: array[int] = field(default_factory=lambda: array("Q"))
    size: array[int] = field(default_factory=lambda: array("Q"))
    stream: array[int] = field(default_factory=lambda: array("Q"))
    time_us: array[int] = field(default_factory=lambda: array("Q"))  # never falls; where the history has no times: 0
    opening: int = 0
    allocated: array[int] = field(default_factory=lambda: array("Q"))  # bytes of live blocks, rounded to 512
    reserved: array[int] | None = None  # bytes; None: the history does not tell
    reserved_peak: int = 0  # also between two steps
    segment_events: array[int] = field(default_factory=lambda: array("Q"))  # since the start
    refusals: list[Refusal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what was missing, in words

    @property
    def steps(self) -> int:
        """Allocations and frees in the history."""
        return len(self.op) - self.opening

    @property
    def allocated_peak(self) -> int:
        """Bytes."""
        return max(self.allocated)


@dataclass(frozen=True)
class _Block:
    id: int
    size: int
    stream: int


class _Reader:
    """Goes through the entries once, oldest first."""

    def __init__(self, dump: Dump, device: int) -> None:
        self.entries = dump.trace(device)
        self.where = f"{dump.path}: device {device}"
        self.segments = [each for each in dump.segments if self._plain(each, "a segment").get("device") == device]
        # Memory serves again when its free is completed; what was recorded without that tells less.
        completes = any(isinstance(entry, dict) and entry.get("action") == "free_completed" for entry in self.entries)
        self.free = "free_completed" if completes else "free_requested"
        self.program = Program(device)
        self.live: dict[int, _Block] = {}  # by address
        self.seen: set[int] = set()  # addresses that the history knows
        self.before: list[tuple[int, _Block]] = []  # with their addresses
        self.steps: list[tuple[int, _Block, int]] = []  # ALLOCATE or FREE, and when
        self.now = 0  # us
        self.streams: dict[int, int] = {0: 0}
        self.change = 0  # of what is reserved, since the start
        self.changes: list[int] = [0]  # the same after each step
        self.lowest_change = self.highest_change = 0
        self.events = 0
        self.again = self.unknown = 0

    def read(self) -> Program:
        for number, entry in enumerate(self.entries):
            where = f"entry {number}"
            action = self._plain(entry, where).get("action")
            if not isinstance(action, str):
                raise InvalidArgumentError(f"{self.where}: {where}: 'action' is {show(action)}, not text")
            self._tell_time(entry.get("time_us"))
            if action == "alloc":
                self._allocate(self._number(entry, "addr", where), entry, where)
            elif action == self.free:
                self._free(self._number(entry, "addr", where), entry, where)
            elif action == "oom":
                self.program.refusals.append(Refusal(len(self.steps), self._number(entry, "size", where)))
            elif action in _GAINED:
                self.events += 1
                self.change += _GAINED[action] * self._number(entry, "size", where)
                self.lowest_change = min(self.lowest_change, self.change)
                self.highest_change = max(self.highest_change, self.change)
        if not self.steps:
            raise InvalidArgumentError(f"{self.where}: its history has neither an allocation nor a free")
        # What came after the last step belongs to it.
        self.changes[-1], self.program.segment_events[-1] = self.change, self.events
        self._find_what_lives_on()
        self._assemble()
        self._count_back()
        return self.program

    def _allocate(self, address: int, entry: Mapping[str, Any], where: str) -> None:
        if address in self.live:  # its free is missing; it comes just before
            self.again += 1
            self._step(FREE, self.live.pop(address))
        self.live[address] = block = self._block(entry, "size", where)
        self.seen.add(address)
        self._step(ALLOCATE, block)

    def _free(self, address: int, entry: Mapping[str, Any], where: str) -> None:
        block = self.live.pop(address, None)
        if block is None:
            if address in self.seen:
                self.unknown += 1
                return
            block = self._block(entry, "size", where)
            self.before.append((address, block))
            self.seen.add(address)
        self._step(FREE, block)

    def _step(self, op: int, block: _Block) -> None:
        if not self.steps:
            self.program.segment_events.append(0)
        self.steps.append((op, block, self.now))
        self.changes.append(self.change)
        self.program.segment_events.append(self.events)

    def _tell_time(self, time_us: object) -> None:
        """What is no time, or an earlier one (threads write their entries a little late), is passed over."""
        if isinstance(time_us, int) and self.now < time_us <= _LATEST_US:
            self.now = time_us

    def _find_what_lives_on(self) -> None:
        for segment in self.segments:
            address = self._number(segment, "address", "a segment")
            blocks = segment.get("blocks")
            for block in blocks if isinstance(blocks, list) else []:
                size = self._number(self._plain(block, "a block"), "size", "a block")
                at = self._number(block, "address", "a block") if "address" in block else address
                if str(block.get("state", "")).startswith("active") and at not in self.seen:
                    asked = "requested_size" if block.get("requested_size") else "size"
                    stream = {**block, "stream": segment.get("stream", 0)}
                    self.before.append((at, self._block(stream, asked, "a block")))
                address += size

    def _assemble(self) -> None:
        program = self.program
        began = self.steps[0][2]
        opening = [(ALLOCATE, block, began) for _, block in sorted(self.before, key=lambda each: each[0])]
        program.opening = len(opening)
        allocated = array("Q", [0])
        for op, block, time_us in opening + self.steps:
            program.op.append(op)
            program.id.append(block.id)
            program.size.append(block.size)
            program.stream.append(block.stream)
            program.time_us.append(time_us)
            rounded = -(-block.size // _ALIGNMENT) * _ALIGNMENT
            live = allocated[-1] + (rounded if op == ALLOCATE else -rounded)
            if live > _MOST_LIVE:
                raise InvalidArgumentError(
                    f"{self.where}: with a block of {block.size} bytes {live} are in use, which no device has"
                )
            allocated.append(live)
        program.allocated = allocated[program.opening :]
        if self.again:
            program.notes.append(
                f"{_frees(self.again, 'is', 'are')} not in the history: taken to come before the next use"
            )
        if self.unknown:
            program.notes.append(
                f"{_frees(self.unknown, 'of a block that was', 'of blocks that were')} not live: passed over"
            )

    def _count_back(self) -> None:
        program = self.program
        start = sum(self._number(each, "total_size", "a segment") for each in self.segments) - self.change
        reserved = [start + change for change in self.changes]
        holds_all = all(have >= live for have, live in zip(reserved, program.allocated, strict=True))
        if start + self.lowest_change < 0 or not holds_all:
            program.notes.append(
                "what was reserved cannot be known: it would be less than what was live (a model slept, or the history "
                "lacks events of segments)"
            )
            return
        program.reserved = array("Q", reserved)
        program.reserved_peak = start + self.highest_change

    def _block(self, entry: Mapping[str, Any], size: str, where: str) -> _Block:
        stream = entry.get("stream", 0)
        if not isinstance(stream, int):
            raise InvalidArgumentError(f"{self.where}: {where}: 'stream' is {show(stream)}, not a number")
        number = self.streams.setdefault(stream, len(self.streams))
        return _Block(len(self.before) + len(self.steps), self._number(entry, size, where), number)

    def _number(self, entry: Mapping[str, Any], key: str, where: str) -> int:
        value = entry.get(key)
        if not isinstance(value, int) or not 0 <= value <= _LARGEST:
            raise InvalidArgumentError(f"{self.where}: {where}: {key!r} is {show(value)}, not a number of bytes")
        return value

    def _plain(self, entry: object, where: str) -> Mapping[str, Any]:
        if not isinstance(entry, dict):
            raise InvalidArgumentError(f"{self.where}: {where} is {show(entry)}, not a dict")
        return entry


def _frees(count: int, of_one: str, of_many: str) -> str:
    return f"1 free {of_one}" if count == 1 else f"{count} frees {of_many}"


def programs(dump: Dump, devices: Iterable[int]) -> list[Program]:
    """What each of these devices did.

    Raises:
        InvalidArgumentError: names the device, and the entry that cannot be.
    """
    return [_Reader(dump, device).read() for device in devices]
