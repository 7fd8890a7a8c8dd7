"""The table that the runner prints."""

from __future__ import annotations

from .measurement import TIMES, Row, is_for_tables

_LEGEND = (
    "Medians, and the least and the most of the runs. x: torch_vmm's over this one's; =: within the spread, or a time "
    "that was taken once."
)


def table(all_rows: list[Row]) -> str:
    """Cases down, allocators across; in brackets torch_vmm's value as a share of each other one's."""
    rows = [row for row in all_rows if is_for_tables(row)]
    columns = list(dict.fromkeys(row["allocator"] for row in rows))
    values = {(row["case"], row["metric"], row["allocator"]): row["value"] for row in rows}
    runs = {(row["case"], row["metric"], row["allocator"]): row["runs"] for row in rows}
    lines = {(row["case"], row["metric"]): row["unit"] for row in rows}
    width = max(len(f"{case}: {metric}, {unit}") for (case, metric), unit in lines.items())
    out = [" " * width + "".join(f"{column:>34}" for column in columns)]
    for (case, metric), unit in lines.items():
        ours = values.get((case, metric, "torch_vmm"))
        cells = []
        for column in columns:
            value = values.get((case, metric, column))
            if value is None:
                cells.append("-")
                continue
            each = runs[case, metric, column]
            mine = runs.get((case, metric, "torch_vmm"), [])
            spread = f" {min(each):.4g}..{max(each):.4g}" if len(each) > 1 else ""
            share = ""
            if ours is not None and value and column != "torch_vmm":
                share = f" (x{ours / value:.2f})" if _are_apart(mine, each, unit) else " (=)"
            cells.append(f"{value:.4g}{share}{spread}")
        out.append(f"{f'{case}: {metric}, {unit}':{width}}" + "".join(f"{cell:>34}" for cell in cells))
    return "\n".join([*out, _LEGEND])


def _are_apart(mine: list[float], others: list[float], unit: str) -> bool:
    """Of times, one run says nothing of its spread; what is counted is the same in every run."""
    if unit in TIMES and min(len(mine), len(others)) < 2:
        return False
    return max(mine) < min(others) or min(mine) > max(others)
