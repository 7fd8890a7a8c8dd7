"""A recorded program beside the same program under this allocator: series, totals and samples of both."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch_vmm import _C

from .trace import Program

# Room to spare: a program is held against a limit only where one was asked for.
_LEAST_DEVICE = 80 * 2**30
_SPARE = 2


@dataclass(frozen=True)
class Sample:
    """The greatest of each within some steps; bytes."""

    up_to: int  # the last of these steps
    allocated: int
    recorded: int | None  # None: not known
    ours: int | None  # None: the replay ended before


@dataclass(frozen=True)
class Outcome:
    """Both, step by step; the first entry of each series is how things stood before step 1."""

    program: Program
    limit: int | None  # bytes of the device that it was replayed on; None: as many as it takes
    reserved: array[int]  # bytes, by this allocator
    driver_calls: array[int]  # by this allocator, since the start
    calls: Mapping[str, int]  # by kind
    reserved_peak: int
    refused: int | None  # the step that did not fit; the series end before it

    @property
    def recorded_peak(self) -> int | None:
        """Bytes reserved in the recording; ``None``: not known."""
        return None if self.program.reserved is None else self.program.reserved_peak

    def ratio(self, reserved: int | None) -> float | None:
        """``reserved`` over the peak of what is allocated: 1 is the least that can be.

        ``None`` where it is not known, and for a replay that ended before the peak.
        """
        if reserved is None or self.program.allocated_peak == 0:
            return None
        ratio = reserved / self.program.allocated_peak
        return ratio if ratio >= 1 else None

    def late_events(self) -> int:
        """Events of segments in the second half of the recording's steps."""
        return self._late(self.program.segment_events)

    def late_calls(self) -> int | None:
        """Driver calls in the same steps; ``None`` for a replay that ended before."""
        return self._late(self.driver_calls) if self.refused is None else None

    def _late(self, counts: Sequence[int]) -> int:
        return counts[-1] - counts[(self.program.steps + 1) // 2]

    def samples(self, count: int) -> list[Sample]:
        """At most ``count``, of equally many steps each; what stood before step 1 is in the first."""
        entries = self.program.steps + 1
        edges = [entries * k // min(count, entries) for k in range(min(count, entries) + 1)]
        return [
            Sample(
                end - 1,
                max(self.program.allocated[start:end]),
                None if self.program.reserved is None else max(self.program.reserved[start:end]),
                max(self.reserved[start:end], default=None),
            )
            for start, end in itertools.pairwise(edges)
        ]

    def totals(self) -> dict[str, Any]:
        """All of it but the series, for machines; sizes in bytes."""
        recorded, ours = self.ratio(self.recorded_peak), self.ratio(self.reserved_peak)
        return {
            "device": self.program.device,
            "steps": self.program.steps,
            "live_before": self.program.opening,
            "allocated_peak": self.program.allocated_peak,
            "recorded": {
                "reserved_peak": self.recorded_peak,
                "ratio": None if recorded is None else round(recorded, 4),
                "segment_events": self.program.segment_events[-1],
                "segment_events_second_half": self.late_events(),
                "out_of_memory_after": [refusal.step for refusal in self.program.refusals],
            },
            "torch_vmm": {
                "reserved_peak": self.reserved_peak,
                "ratio": None if ours is None else round(ours, 4),
                "driver_calls": sum(self.calls.values()),
                "driver_calls_second_half": self.late_calls(),
                "calls": dict(self.calls),
                "out_of_memory_at": self.refused,
            },
            "notes": self.program.notes,
        }


def replay(program: Program, limit: int | None = None) -> Outcome:
    """Run the program on a device of host memory that is never touched.

    Args:
        program: of one device.
        limit: bytes that the device has; by default more than any allocator would need.
    """
    device_bytes = limit or max(_LEAST_DEVICE, _SPARE * program.allocated_peak)
    done = _C.replay(program.op, program.id, program.size, program.stream, device_bytes, time_us=program.time_us)
    series = {name: array("Q", done[name]) for name in ("reserved", "driver_calls")}
    for values in series.values():
        values.insert(0, 0)
        del values[: min(program.opening, len(values) - 1)]
    refused = done["refused_at"]
    return Outcome(
        program,
        limit,
        **series,
        calls=done["calls"],
        reserved_peak=done["reserved_peak"],
        refused=None if refused is None else max(0, refused - program.opening + 1),
    )
