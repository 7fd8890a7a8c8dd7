"""Outcomes as one picture, in SVG, a panel a device. Written by hand: it needs no package, and any browser shows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from xml.sax.saxutils import escape

from torch_vmm import _C

from .outcome import Outcome, Sample

_WIDTH, _PANEL = 1000, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 90, 20, 64, 46  # margins of a panel
_ENTRY = 240  # of the legend
_POINTS = 800  # along the axis: finer than a screen shows
_ALLOCATED, _THEN, _OURS, _REFUSED = "#c9d3df", "#c8641e", "#1f5fa8", "#b00020"
_STYLE = "text{font:13px sans-serif;fill:#222}.grid{stroke:#e3e3e3}.line{fill:none;stroke-width:1.6}"


def svg(outcomes: Sequence[Outcome], title: str) -> str:
    """The whole file."""
    height = _PANEL * len(outcomes)
    panels = "".join(
        f'<g transform="translate(0,{_PANEL * k})">{_panel(outcome, title)}</g>' for k, outcome in enumerate(outcomes)
    )
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}"><title>{escape(title)}</title><style>{_STYLE}</style>'
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>{panels}</svg>\n'
    )


class _Axes:
    """Steps to the right, bytes upwards."""

    def __init__(self, steps: int, top: int) -> None:
        self.steps, self.unit = max(steps, 1), _round_step(top)
        self.top = -(-max(top, 1) // self.unit) * self.unit

    def x(self, step: int) -> float:
        return round(_LEFT + (_WIDTH - _LEFT - _RIGHT) * step / self.steps, 1)

    def y(self, size: int) -> float:
        return round(_PANEL - _BOTTOM - (_PANEL - _TOP - _BOTTOM) * size / self.top, 1)

    def draw(self) -> str:
        lines = []
        for size in range(0, self.top + 1, self.unit):
            y = self.y(size)
            lines.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
            lines.append(_text(_LEFT - 8, y + 4, _C.format_bytes(size), "end"))
        for k in range(6):
            step = self.steps * k // 5
            lines.append(_text(self.x(step), _PANEL - _BOTTOM + 20, str(step), "middle" if k < 5 else "end"))
        return "".join([*lines, _text(_LEFT, _PANEL - 8, "allocations and frees")])


def _panel(outcome: Outcome, title: str) -> str:
    program = outcome.program
    samples = outcome.samples(_POINTS)
    highest = max(program.allocated_peak, outcome.reserved_peak, program.reserved_peak)
    axes = _Axes(program.steps, highest)
    parts = [axes.draw(), _area(axes, samples)]
    if program.reserved is not None:
        parts.append(_line(axes, samples, lambda each: each.recorded, _THEN))
    parts.append(_line(axes, samples, lambda each: each.ours, _OURS))
    refusals = [(refusal.step, _THEN) for refusal in program.refusals]
    if outcome.refused is not None:
        refusals.append((outcome.refused, _OURS))
    for step, colour in refusals:
        x = axes.x(step)
        parts.append(
            f'<line x1="{x}" x2="{x}" y1="{_TOP}" y2="{_PANEL - _BOTTOM}" stroke="{_REFUSED}" stroke-dasharray="4 3"/>'
            f'<circle cx="{x}" cy="{_TOP}" r="4" fill="{colour}"><title>out of memory, step {step}</title></circle>'
        )
    return "".join([_text(_LEFT, 24, f"{title}, device {program.device}"), _legend(outcome), *parts])


def _legend(outcome: Outcome) -> str:
    entries = [(_ALLOCATED, f"allocated, peak {_C.format_bytes(outcome.program.allocated_peak)}")]
    if outcome.recorded_peak is not None:
        entries.append((_THEN, f"reserved then, {_peak(outcome, outcome.recorded_peak)}"))
    entries.append((_OURS, f"torch_vmm, {_peak(outcome, outcome.reserved_peak)}"))
    if outcome.program.refusals or outcome.refused is not None:
        entries.append((_REFUSED, "out of memory"))
    return "".join(
        f'<rect x="{_LEFT + _ENTRY * k}" y="37" width="12" height="12" fill="{colour}"/>'
        + _text(_LEFT + _ENTRY * k + 18, 48, words)
        for k, (colour, words) in enumerate(entries)
    )


def _peak(outcome: Outcome, reserved: int) -> str:
    ratio = outcome.ratio(reserved)
    return _C.format_bytes(reserved) + ("" if ratio is None else f" ({ratio:.3f} ×)")


def _area(axes: _Axes, samples: Sequence[Sample]) -> str:
    points = [f"{axes.x(each.up_to)},{axes.y(each.allocated)}" for each in samples]
    ends = [f"{axes.x(samples[-1].up_to)},{axes.y(0)}", f"{axes.x(samples[0].up_to)},{axes.y(0)}"]
    return f'<polygon points="{" ".join(points + ends)}" fill="{_ALLOCATED}"/>'


def _line(axes: _Axes, samples: Sequence[Sample], of: Callable[[Sample], int | None], colour: str) -> str:
    known = [(each.up_to, size) for each in samples if (size := of(each)) is not None]
    points = " ".join(f"{axes.x(step)},{axes.y(size)}" for step, size in known)
    return f'<polyline class="line" points="{points}" stroke="{colour}"/>'


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(words)}</text>'


def _round_step(top: int) -> int:
    """Bytes between two lines of the grid, so that there are five at most: 1, 2 or 5 times a binary unit."""
    unit = 1
    while True:
        for factor in (1, 2, 5, 10, 20, 50, 100, 200, 500):
            if factor * unit * 5 >= top:
                return factor * unit
        unit *= 1024
