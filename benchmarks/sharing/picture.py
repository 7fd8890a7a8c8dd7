"""Memory over time, from the rows of a result: ``python -m benchmarks.sharing.picture RESULT.json PICTURE.png``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ..measurement import Row
from .measuring import OVER_TIME, SECONDS

_CACHES = ", caches"


def draw(rows: list[Row], file: Path) -> str | None:
    """One panel for each arrangement: what each model has mapped, its caches paler than its weights and activations.

    Returns:
        The file's name; ``None`` where there is no matplotlib, or nothing to draw.
    """
    try:
        # Not by pyplot: that has a state of its own, and may open windows.
        from matplotlib.figure import Figure
    except ImportError:
        return None
    series: dict[tuple[str, str], dict[str, list[float]]] = {}
    for row in rows:
        if row["case"].endswith(OVER_TIME):
            series.setdefault((row["allocator"], row["case"].removesuffix(f", {OVER_TIME}")), {})[row["metric"]] = row[
                "runs"
            ]
    if not series:
        return None
    figure = Figure(figsize=(10, 3 * len(series)), layout="constrained")
    panels = figure.subplots(len(series), sharey=True, squeeze=False)[:, 0]
    for axes, ((allocator, case), values) in zip(panels, series.items(), strict=True):
        seconds = _first_run(values[SECONDS])
        names = [name for name in values if name != SECONDS]
        models = [name.removesuffix(_CACHES) for name in names]
        colours = {model: f"C{k}" for k, model in enumerate(dict.fromkeys(sorted(models)))}
        drawn = axes.stackplot(seconds, *(values[name][: len(seconds)] for name in names), step="post", linewidth=0)
        for area, name, model in zip(drawn, names, models, strict=True):
            area.set(facecolor=colours[model], alpha=0.5 if name.endswith(_CACHES) else 1.0, label=name)
        axes.set(title=f"{allocator}: {case}", xlabel="seconds", ylabel="GiB", xlim=(0, seconds[-1]))
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small")
    figure.savefig(file, dpi=110)
    return file.name


def _first_run(seconds: list[float]) -> list[float]:
    """Of several repetitions, whose times follow each other, the first."""
    for k in range(1, len(seconds)):
        if seconds[k] < seconds[k - 1]:
            return seconds[:k]
    return seconds


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text())["rows"], Path(sys.argv[2]))
