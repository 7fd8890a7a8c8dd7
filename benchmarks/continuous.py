"""Continuous batching from one elastic range a request (``examples/continuous_batching.py``) beside concatenation.

``torch_vmm`` serves from slots of a sparse tensor under torch_vmm; ``concatenation`` makes each layer's cache anew at
each token, under torch's own allocator. Both read theirs by the same kernel, so they must say the same tokens. A
process serves all requests once to warm up, and then for the numbers:

- ``tokens a second``, prompts included; ``step``: the time of all of it over the number of steps;
- ``caches copied``: bytes of keys and values that were moved because others came or went;
- ``held over needed``: the caches' memory over what their positions need, at its peak; of concatenation what the
  allocator holds at its peak beyond the model's weights, since what it copies it holds twice, and in pieces.
"""

from __future__ import annotations

import gc
import json
import zlib

import torch

from examples import continuous_batching as example

from . import machine
from .measurement import Measurement, Part, Row
from .runner import one_scale
from .workloads.measuring import settle_algorithms

KIND = "cuda"
KINDS = ("cuda", "cpu")
ALLOCATORS = ("torch_vmm", "concatenation")
RUNS = 2
_REPEATED = 4  # in each process, and once before to warm up
NEEDS_LOOPS = False
HAS_SCALES = True
_CASE = "requests that join and leave"
_AHEAD, _WASTE = 1.3, 1.02
"""What is aimed at: tokens a second over concatenation's, and held over needed."""


# -- The runner's side -------------------------------------------------------------------------------------------------

parts = one_scale


def remarks(rows: list[Row]) -> list[str]:
    """How the two compare, and whether that is what is aimed at."""
    values = {(row["metric"], row["allocator"]): row["value"] for row in rows}
    ours, theirs = values.get(("tokens a second", "torch_vmm")), values.get(("tokens a second", "concatenation"))
    lines = []
    if ours is not None and theirs is not None:
        lines.append(f"{ours / theirs:.2f} times concatenation's tokens a second (aim: {_AHEAD})")
    waste = values.get(("held over needed", "torch_vmm"))
    if waste is not None:
        lines.append(f"{waste:.4f} of what is needed is held (aim: {_WASTE})")
    return lines


def complaints(rows: list[Row]) -> list[str]:
    """Different tokens."""
    said = {value for row in rows if row["unit"] == "crc32" for value in row["runs"]}
    return [f"{_CASE}: DIFFERENT TOKENS: {len(said)} crc32"] if len(said) > 1 else []


# -- The measuring process ---------------------------------------------------------------------------------------------


def measure_part(allocator: str, kind: str, quick: bool, part: Part) -> list[Measurement]:
    """Serves once to warm up, and then for the numbers."""
    scale = example.SCALES[str(part["scale"])]
    torch.set_num_threads(1)  # what is pinned has one CPU
    settle_algorithms(is_deterministic=False, is_strict=True)
    rows = []
    with machine.one_cpu():
        net = example.made(scale, kind)
        caches = "elastic" if allocator == "torch_vmm" else "concatenating"
        _served(net, scale, caches)
        for _ in range(1 if quick else _REPEATED):
            held = 0
            gc.collect()
            if kind == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                held = torch.cuda.memory_reserved()
            served = _served(net, scale, caches)
            if kind == "cuda" and allocator != "torch_vmm":
                served.held_bytes = torch.cuda.max_memory_reserved() - held
            rows += _told(served)
    return rows


def _told(served: example.Served) -> list[Measurement]:
    count = sum(map(len, served.tokens))
    rows = [
        ("tokens a second", count / served.seconds, "tokens/s"),
        ("step", served.seconds / served.steps * 1e3, "ms"),
        ("caches copied", served.copied_bytes / 2**30, "GiB"),
        ("held over needed", served.held_bytes / served.needed_bytes, "ratio"),
        ("needed", served.needed_bytes / 2**30, "GiB"),
        ("tokens, exactly", zlib.crc32(json.dumps(served.tokens).encode()), "crc32"),
    ]
    return [Measurement(_CASE, metric, value, unit) for metric, value, unit in rows]


def _served(net: example.Decoder, scale: example.Scale, caches: str) -> example.Served:
    requests = example.drawn(net, scale.requests, scale.prompts, scale.new)
    return example.serve(net, requests, example.caches_of(caches, net, scale), scale.most)
