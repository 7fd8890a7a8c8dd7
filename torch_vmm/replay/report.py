"""Outcomes as text: a line every so many steps, then the totals."""

from __future__ import annotations

from torch_vmm import _C

from .outcome import Outcome

_WIDTHS = (12, 14, 14, 14)


def text(outcome: Outcome, rows: int) -> str:
    """What one device's program reserved then, and would reserve now.

    Args:
        outcome: of the replay.
        rows: lines of the series; each shows the greatest of its steps.
    """
    return "\n".join([*_head(outcome), "", *_series(outcome, rows), "", *_totals(outcome), *_remarks(outcome)])


def _head(outcome: Outcome) -> list[str]:
    program = outcome.program
    title = f"device {program.device}: {program.steps} allocations and frees"
    if program.opening:
        title += f", after {program.opening} blocks that lived before"
    if outcome.limit is not None:
        title += f"; replayed on {_C.format_bytes(outcome.limit)}"
    return [title]


def _series(outcome: Outcome, rows: int) -> list[str]:
    lines = [_line("up to step", "allocated", "reserved then", "by torch_vmm")]
    lines += [
        _line(str(each.up_to), _size(each.allocated), _size(each.recorded), _size(each.ours))
        for each in outcome.samples(rows)
    ]
    return lines


def _totals(outcome: Outcome) -> list[str]:
    program = outcome.program
    peak, then, ours = _size(program.allocated_peak), outcome.recorded_peak, outcome.reserved_peak
    rows = [
        ("", "then", "torch_vmm"),
        ("peak allocated", peak, peak),
        ("peak reserved", _size(then), _size(ours)),
        ("over peak allocated", _ratio(outcome.ratio(then)), _ratio(outcome.ratio(ours))),
        ("segments got and given back", str(program.segment_events[-1]), ""),
        ("  in the second half", str(outcome.late_events()), ""),
        ("driver calls", "", str(sum(outcome.calls.values()))),
        ("  in the second half", "", "-" if (late := outcome.late_calls()) is None else str(late)),
    ]
    kinds = ", ".join(f"{count} {name}" for name, count in outcome.calls.items())
    return [f"{label:28}{left:>14}{right:>14}".rstrip() for label, left, right in rows] + [f"  ({kinds})"]


def _remarks(outcome: Outcome) -> list[str]:
    lines = [f"note: {note}" for note in outcome.program.notes]
    lines += [
        f"out of memory then: {_C.format_bytes(refusal.size)} asked after step {refusal.step}"
        for refusal in outcome.program.refusals[:5]
    ]
    if len(outcome.program.refusals) > 5:
        lines.append(f"out of memory then: {len(outcome.program.refusals) - 5} times more")
    if outcome.refused is not None:
        lines.append(f"out of memory under torch_vmm at step {outcome.refused}; its numbers end there")
    return ["", *lines] if lines else []


def _line(*cells: str) -> str:
    return "".join(f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=True))


def _size(size: int | None) -> str:
    return "-" if size is None else _C.format_bytes(size)


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.3f}"
