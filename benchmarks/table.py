"""The README's table, from the committed result files: ``python -m benchmarks.table`` prints it.

A test compares the two, so neither can drift from the other.
"""

from __future__ import annotations

import json
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
DEVICE = "h200"
ALLOCATORS = {
    "torch_vmm": "torch_vmm",
    "native": "native",
    "expandable": "expandable segments",
    "cudaMallocAsync": "cudaMallocAsync",
}
# Label, benchmark, case, metric, unit.
ROWS = [
    ("allocate + free 512 B", "hot_path", "pair 512 B", "time", "ns"),
    ("allocate + free 20 MiB", "hot_path", "pair 20 MiB", "time", "ns"),
    ("the same, 512 B, 8 threads on one model, over all pairs", "hot_path", "pair 512 B, 8 threads", "time", "ns"),
    ("512 B, 4 threads allocate, 4 others free, over all", "hot_path", "512 B, 4 threads take, 4 free", "time", "ns"),
    ("1000 live blocks, 512 B to 1 MiB: one replaced", "hot_path", "churn 512 B - 1 MiB, 1000 live", "time", "ns"),
    ("200 live blocks, 2 to 256 MiB: one replaced", "hot_path", "churn 2 MiB - 256 MiB, 200 live", "time", "ns"),
    ("`torch.empty(1000)` from Python", "hot_path", "torch.empty of 1000 floats", "time", "ns"),
    ("first 20 GiB, in one block", "cold_path", "20 GiB in one block", "time", "ms"),
    ("first 20 GiB, in blocks of 24 MiB", "cold_path", "20 GiB in 24 MiB steps", "time", "ms"),
    (
        "4 GiB from one model to another, in blocks of 64 MiB, zeroed and written",
        "hand_over",
        "4 GiB to another model, same stream",
        "time",
        "ms",
    ),
    ("LoRA, varying lengths: reserved / allocated", "workloads", "lora", "reserved / allocated", "ratio"),
    ("its warm pass", "workloads", "lora", "warm pass", "s"),
    ("training with checkpoints: the same", "workloads", "checkpointed", "reserved / allocated", "ratio"),
    ("its warm pass", "workloads", "checkpointed", "warm pass", "s"),
    ("serving with growing caches: the same", "workloads", "serve", "reserved / allocated", "ratio"),
    ("its warm pass", "workloads", "serve", "warm pass", "s"),
]


def _value(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def table() -> str:
    """Markdown: a line on the machine, then a row a case, of the allocators that every file has."""
    files = {
        name: json.loads((RESULTS / f"{name}-{DEVICE}.json").read_text()) for name in sorted({row[1] for row in ROWS})
    }
    machine = files["hot_path"]["machine"]
    commits = ", ".join(sorted({file["commit"] for file in files.values()}))
    measured = [{row["allocator"] for row in file["rows"]} for file in files.values()]
    allocators = [allocator for allocator in ALLOCATORS if all(allocator in each for each in measured)]
    lines = [
        f"{machine['device']}, driver {machine['driver']}, torch {machine['torch']}, commit {commits}; medians of "
        f"{_runs(files)} runs.",
        "",
        f"| | {' | '.join(ALLOCATORS[allocator] for allocator in allocators)} |",
        f"|---|{'---|' * len(allocators)}",
    ]
    for label, benchmark, case, metric, unit in ROWS:
        cells = [_cell(files[benchmark]["rows"], case, metric, unit, allocator) for allocator in allocators]
        lines.append(f"| {label}{'' if unit == 'ratio' else ', ' + unit} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _runs(files: dict[str, dict[str, object]]) -> str:
    runs = [len(row["runs"]) for file in files.values() for row in file["rows"]]  # type: ignore[attr-defined]
    return str(min(runs)) if min(runs) == max(runs) else f"{min(runs)} to {max(runs)}"


def _cell(rows: list[dict[str, object]], case: str, metric: str, unit: str, allocator: str) -> str:
    for row in rows:
        if (row["case"], row["metric"], row["unit"], row["allocator"]) == (case, metric, unit, allocator):
            value = row["value"]
            assert isinstance(value, int | float)
            return _value(value)
    if allocator in ("torch_vmm", "native"):
        raise LookupError(f"no row {case!r}, {metric!r}, {unit!r} of {allocator}")
    return "–"


if __name__ == "__main__":
    print(table())
