"""Three language models served in one process from a bursty trace, with memory in thirds, and under one limit.

Real models (``transformers`` configurations of about 3, 7 and 3 billion parameters, random weights) with continuous
batching; weights are resident, and what bounds the load is memory for caches. The same server and the same requests,
with other limits:

- ``static``: each model has a third of the memory for weights, caches and activations;
- ``torch_vmm``: elastic pools under one limit;
- ``sleeping``: the same, with a fourth and a fifth model (13 and 14 billion) that do not fit beside the others: who is
  not needed sleeps in host memory, and wakes when somebody asks;
- ``alone``: one of the three has all of it: what a request takes that meets nobody.

A request that finds no memory waits, first come first served, and is refused when the goal for its first token has
passed. The load goes up and down a ladder, to the highest at which 99 % of all requests, refused ones among them, have
their first token within the goal.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from ..measurement import Measurement, Part, Row
from ..runner import one_scale

KIND = "cuda"
KINDS = ("cuda", "cpu")
ALLOCATORS = ("alone", "static", "torch_vmm", "sleeping")
INSTALLED = dict.fromkeys(ALLOCATORS, "torch_vmm")
RUNS = 1
NEEDS_LOOPS = False
HAS_SCALES = True
_MORE_LOAD, _LONE = 2.0, 1.1
"""What is aimed at: the load over static thirds', and a lone request's time over that of having the GPU alone."""

parts = one_scale


def prepare() -> str | None:
    """Why it cannot run here. On host memory a small decoder of the examples will do, with a GPU it would not be what
    is promised."""
    import torch

    if torch.cuda.is_available() and importlib.util.find_spec("transformers") is None:
        return "transformers is not installed (pip install transformers)"
    return None


def remarks(rows: list[Row]) -> list[str]:
    """How what is measured stands to what is aimed at."""
    lines = []
    values = {(row["case"], row["metric"], row["allocator"]): row["value"] for row in rows}
    for (case, metric, allocator), value in values.items():
        if allocator != "torch_vmm":
            continue
        static, alone = values.get((case, metric, "static")), values.get((case, metric, "alone"))
        if metric == "admitted load" and static:
            lines.append(f"{case}: {value / static:.2f} times the load of static thirds (aim: {_MORE_LOAD:g})")
            lines += [
                f"{case}: no load that {each} misses was found, so its load is at least that, and the factor unknown"
                for each in ("static", "torch_vmm")
                if (case, "lowest load that misses it", each) not in values
            ]
        if metric == "time to first token" and alone:
            lines.append(f"{case}: {value / alone:.3f} times what it takes alone (aim: {_LONE:g})")
    return lines


def draw(rows: list[Row], file: Path) -> str | None:
    """The picture that goes with a result file; its name, or ``None`` where there is no matplotlib."""
    from . import picture

    return picture.draw(rows, file.with_suffix(".png"))


def measure_part(allocator: str, kind: str, quick: bool, part: Part) -> list[Measurement]:
    """All of one arrangement."""
    del quick  # the part says it
    from .measuring import measure

    return measure(allocator, kind, str(part["scale"]))
