"""Recorded programs that take turns, in pools of their own, under one limit: how near their joint peak it may be.

Replays on host memory that is never touched: no GPU and no clock take part, so every run says the same.
"""

from __future__ import annotations

import functools

import numpy as np

from torch_vmm import _C

from .measurement import Measurement
from .traces import RECORDED, evenly, in_turn

KIND = "cpu"
ALLOCATORS = ("torch_vmm",)
RUNS = 1  # all are the same
NEEDS_LOOPS = False
_TOGETHER = (
    ("own_vision", "own_serve"),
    ("own_checkpointed", "own_turns"),
    ("own_serve", "own_turns", "own_continuous"),
)
_PASSES = 3
_DEVICE = 300 * 2**30  # bytes; more than any of them needs
_STEP = 0.005


def measure(allocator: str, quick: bool) -> list[Measurement]:
    """Limits over what all have allocated at most together; under three of them, driver calls and what is reserved."""
    del allocator
    rows = []
    for names in _TOGETHER[:1] if quick else _TOGETHER:
        program, models = in_turn(names, _PASSES)
        time_us = evenly(program, _PASSES * sum(RECORDED[name].seconds for name in names))

        within = functools.partial(_C.replay, *program, _DEVICE, models, time_us=time_us)
        peak = within()["allocated_peak"]
        share = 1.0
        while within(limit=int(share * peak))["refused_at"] is not None:
            share += _STEP
        case = ", ".join(names)
        rows.append(Measurement(case, "least limit above the joint peak", round(100 * (share - 1), 1), "%"))
        for of_peak in (1.05, 1.10, 1.20):
            under = within(limit=int(of_peak * peak))
            calls = np.frombuffer(under["driver_calls"], np.uint64)
            last = int(calls[-1] - calls[len(calls) * (_PASSES - 1) // _PASSES])
            rows.append(Measurement(case, f"driver calls, last pass, limit {of_peak:.2f}", last, "calls"))
            above = round(100 * (under["reserved_peak"] / peak - 1), 1)
            rows.append(Measurement(case, f"most reserved above the joint peak, limit {of_peak:.2f}", above, "%"))
    return rows
