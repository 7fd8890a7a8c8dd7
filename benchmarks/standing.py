"""The tables of docs/performance.md, from the committed result files: ``python -m benchmarks.standing`` prints them.

A test compares them with the document, so neither can drift from the other.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

from .allocators import UNSCRUBBED
from .measurement import Result, Row, is_for_tables
from .table import DEVICE, RESULTS

_CALLS = ("reserve", "create", "map", "set_access", "unmap", "release")
_EMPTIED = "pass after empty_cache"
_BESIDE: tuple[str, ...] = ("torch_vmm", "native")
_NAMES = {"expandable": "expandable segments", UNSCRUBBED: "torch_vmm, unscrubbed"}


def tables() -> list[str]:
    """Markdown, each with a line above it that names its file, commit and machine."""
    found = [*sorted(RESULTS.glob("*-h?00*.json")), RESULTS / "limits-cpu.json"]
    files = {file.stem: result for file in found if (result := _read(file))}
    return [
        _floor(files[f"hot_path-{DEVICE}"]),
        _driver_calls(next(result for stem, result in files.items() if stem.startswith("driver_ops-"))),
        *(_standing(stem, result) for stem, result in files.items()),
    ]


def _read(file: Path) -> Result | None:
    """``None`` for a file of another form (before and after a change)."""
    content = json.loads(file.read_text())
    return cast(Result, content) if "benchmark" in content else None


def _floor(result: Result) -> str:
    rows = [row for row in result["rows"] if row["unit"] == "ns"]
    allocators = ("floor", "native")
    return _table(result, "torch itself, ns", rows, allocators)


def _driver_calls(result: Result) -> str:
    lines = [_source(result, "driver calls, µs"), "", f"| | {' | '.join(_CALLS)} |", f"|---|{'---|' * len(_CALLS)}"]
    for chunk in _chunks(result):
        values = {row["metric"]: row["value"] for row in result["rows"] if row["case"] == chunk}
        lines.append(f"| {chunk} | {' | '.join(_value(values[call]) for call in _CALLS)} |")
    return "\n".join(lines)


def _chunks(result: Result) -> list[str]:
    """The cases that are about driver calls alone."""
    return list(dict.fromkeys(row["case"] for row in result["rows"] if row["metric"] == "set_access"))


def _standing(title: str, result: Result) -> str:
    is_of_batches = any(row["metric"] == "largest batch" for row in result["rows"])
    if result["benchmark"] == "workloads" and not is_of_batches:
        return _workloads(title, result)
    chunks = _chunks(result)
    rows = [row for row in result["rows"] if row["case"] not in chunks and is_for_tables(row)]
    allocators = [name for name in dict.fromkeys(row["allocator"] for row in rows) if name != "floor"]
    return _table(result, title, rows, allocators)


def _workloads(title: str, result: Result) -> str:
    """A row a program, of the numbers that differ by hundredths: ours beside native's; of memory, every allocator's."""
    wanted = ("reserved / allocated", "first pass", _EMPTIED, "warm pass", "driver calls, second half")
    measured = {row["metric"] for row in result["rows"]}
    metrics = tuple(metric for metric in wanted if metric != _EMPTIED or metric in measured)
    allocators = _BESIDE
    if "warm pass" not in measured:
        metrics, allocators = metrics[:1], tuple(dict.fromkeys(row["allocator"] for row in result["rows"]))
    columns = [(metric, name) for metric in metrics for name in allocators]
    values = {(row["case"], row["metric"], row["allocator"]): row["value"] for row in result["rows"]}
    heads = " | ".join(f"{metric}: {name}" for metric, name in columns)
    lines = [_source(result, title), "", f"| | {heads} |", f"|---|{'---|' * len(columns)}"]
    for case in dict.fromkeys(row["case"] for row in result["rows"]):
        cells = [values.get((case, *column)) for column in columns]
        lines.append(f"| {case} | {' | '.join('–' if cell is None else f'{cell:.4g}' for cell in cells)} |")
    return "\n".join(lines)


def _table(result: Result, title: str, rows: list[Row], allocators: tuple[str, ...] | list[str]) -> str:
    values = {(row["case"], row["metric"], row["allocator"]): row["value"] for row in rows}
    names = [_NAMES.get(allocator, allocator) for allocator in allocators]
    lines = [_source(result, title), "", f"| | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for case, metric, unit in dict.fromkeys((row["case"], row["metric"], row["unit"]) for row in rows):
        cells = [values.get((case, metric, allocator)) for allocator in allocators]
        label = case if metric == "time" else f"{case}: {metric}"
        label += "" if unit == "ratio" or title.endswith(f", {unit}") else f", {unit}"
        lines.append(f"| {label} | {' | '.join('–' if cell is None else _value(cell) for cell in cells)} |")
    return "\n".join(lines)


def _source(result: Result, title: str) -> str:
    runs = sorted({len(row["runs"]) for row in result["rows"]})
    repeated = str(runs[0]) if len(runs) == 1 else f"{runs[0]} to {runs[-1]}"
    return (
        f"**{title}**: `{result['benchmark']}`, commit {result['commit'][:7]}, {result['machine']['device']}, driver "
        f"{result['machine']['driver']}, torch {result['machine']['torch']}; medians of {repeated} runs"
    )


def _value(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


if __name__ == "__main__":
    print("\n\n".join(tables()))
