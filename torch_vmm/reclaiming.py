"""What became of requests that a model could not meet by itself: ``pool.reclaim_report()``.

The extension climbs the ladder and notes each decision; here they are values
and a text. It decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch_vmm import _C
from torch_vmm.lines import one_line, wrapped

_WIDTH = 80  # columns of a report


@dataclass(frozen=True)
class RungCounts:
    """What one rung of the reclaim ladder did for a model since it was made."""

    tried: int
    """Requests that it was climbed for; those that it could not have helped are
    not counted.
    """
    changed: int
    """Of these: memory came free, or had meanwhile, so the request was tried
    again.
    """
    met: int
    """Of these: the request found what it wanted."""
    bytes: int
    """That it gathered for requests, or gave back to the driver; of ``on_pressure`` also
    what models that the function put to sleep or trimmed left.
    """


@dataclass(frozen=True)
class ReclaimStep:
    """One rung under one request."""

    rung: str
    """Its name, as in :attr:`ReclaimReport.rungs`."""
    result: str
    """``passed over`` (it could not have helped, or nobody is there),
    ``nothing`` (it changed nothing), ``in vain`` (there was still too little)
    or ``met``.
    """
    bytes: int
    seconds: float
    """Waits included."""
    yielded: tuple[tuple[str, int], ...]
    """Whose idle memory it took, and how many bytes of it."""


@dataclass(frozen=True)
class ReclaimDecision:
    """One request that climbed."""

    requested: int
    """Bytes."""
    asker: str
    """The model, or a part of it: a tag's memory, a graph's, a tensor's."""
    refused_by: str
    """The limit that was full at first; empty: the device, or addresses."""
    met: bool
    """``False``: it ended with ``torch.OutOfMemoryError``."""
    steps: tuple[ReclaimStep, ...]
    """In the order in which they were climbed."""

    def __str__(self) -> str:
        steps = [_in_words(step) for step in self.steps if step.result != "passed over"]
        end = "met" if self.met else "refused"
        why = f" (full: {self.refused_by})" if self.refused_by else ""
        return one_line(f"{_C.format_bytes(self.requested)} for {self.asker}{why}: {end}; " + "; ".join(steps))


@dataclass(frozen=True)
class ReclaimReport:
    """The reclaim ladder as one model saw it; ``str()`` is a table and the
    latest decisions, each from the beginning of a line.
    """

    requests: int
    """That the model could not meet by itself, and that climbed."""
    refused: int
    """Of these, those that ended with ``torch.OutOfMemoryError``."""
    rungs: dict[str, RungCounts]
    """By name, in the order in which they are climbed."""
    latest: tuple[ReclaimDecision, ...]
    """The last 32 decisions, the oldest first."""

    def __str__(self) -> str:
        lines = [f"{self.requests} requests climbed, {self.refused} were refused"]
        lines.append(f"{'rung':<14}{'tried':>10}{'changed':>10}{'met':>10}{'bytes':>14}")
        for name, counts in self.rungs.items():
            size = _C.format_bytes(counts.bytes)
            lines.append(f"{name:<14}{counts.tried:>10}{counts.changed:>10}{counts.met:>10}{size:>14}")
        for decision in self.latest:
            lines += wrapped(str(decision), _WIDTH, 2)
        return "\n".join(lines)


def report_of(handle: _C.Pool) -> ReclaimReport:
    """Of a model and its parts."""
    found = handle.reclaim_report()
    return ReclaimReport(
        requests=found["requests"],
        refused=found["refused"],
        rungs={name: RungCounts(*counts) for name, counts in found["rungs"].items()},
        latest=tuple(decision_of(each) for each in found["latest"]),
    )


def decision_of(values: _C._ReclaimDecision) -> ReclaimDecision:
    """As the extension tells it."""
    requested, asker, refused_by, met, steps = values
    return ReclaimDecision(requested, asker, refused_by, met, tuple(ReclaimStep(*step) for step in steps))


def _in_words(step: ReclaimStep) -> str:
    text = f"{step.rung} {step.result}"
    if step.bytes:
        text += f" with {_C.format_bytes(step.bytes)}"
    if step.yielded:
        text += " of " + ", ".join(f"{name} {_C.format_bytes(size)}" for name, size in step.yielded)
    return text + f" in {step.seconds * 1e3:.2f} ms"
