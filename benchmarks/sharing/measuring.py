"""Serves the trace at one load after the other, and finds the highest that is held; what it says of each."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch

import torch_vmm

from ..measurement import ONE_BY_ONE, Measurement, percentile
from ..workloads.measuring import settle_algorithms
from . import hosted, trace
from .hosted import Hosted
from .scales import Scale, scale_of
from .server import Residence, Server, Told
from .trace import Arrival, Shape

_GIB = 2**30
_STEPS = 4  # loads from one to its double
_EVERY_S = 0.15  # between two samples of the memory
_LONE = 9  # requests of each model that find nobody else
OVER_TIME = f"memory over time{ONE_BY_ONE}"
"""Ends the cases whose rows are series: of each model's pools, and of the seconds at which they were looked at."""
SECONDS = "seconds"
HELD, FAILED = "admitted load", "lowest load that misses it"


def load_at(scale: Scale, step: int) -> float:
    """Requests a second of a step on the ladder of loads."""
    return float(scale.load * 2 ** (step / _STEPS))


class Found(NamedTuple):
    """Steps on the ladder of loads."""

    held: int | None
    failed: int | None
    """The lowest that did not hold; ``None``: the search ended before it found one, so ``held`` is too low."""


def highest(holds: Callable[[int], bool], begin: int, tries: int, most: int) -> Found:
    """The highest step that holds, as far as so many tries tell; none above ``most``.

    Twice or half the load until one holds and one does not, then the one in the middle.
    """
    held: int | None = None
    failed: int | None = None
    step = begin
    for _ in range(tries):
        if holds(step):
            held = step
        else:
            failed = step
        if held is not None and failed is not None:
            if failed - held == 1:
                break
            step = (held + failed) // 2
        elif failed is None:
            if step == most:
                break
            step = min(step + _STEPS, most)
        else:
            step -= _STEPS
    return Found(held, failed)


class Trial:
    """Models that stand ready, and what was measured of them."""

    def __init__(
        self,
        scale: Scale,
        shape: Shape,
        groups: Sequence[Sequence[Hosted]],
        case: str,
        residence: Residence | None = None,
    ) -> None:
        self._scale, self._groups, self._case = scale, groups, case
        self._goal_s = scale.goal_s if residence is None else scale.sleeping_goal_s
        self._trace = trace.drawn(shape, scale.most_load)
        self._seconds = shape.seconds
        self._server = Server(groups, self._goal_s, residence=residence)
        self._admitted: dict[int, float] = {}
        self._offered: dict[int, float] = {}
        self._over_time: dict[int, list[Measurement]] = {}
        self.rows: list[Measurement] = []

    def holds(self, step: int) -> bool:
        """Plays the trace at a load; whether the goal was met."""
        load = load_at(self._scale, step)
        arrivals = trace.played(self._trace, load / self._scale.most_load)
        with ExitStack() as recording:
            timelines = [recording.enter_context(group[0].shared.record_timeline(_EVERY_S)) for group in self._groups]
            told = Told.of(self._server.serve(arrivals, to_the_end=False), self._goal_s)
        self._admitted[step], self._offered[step] = told.admitted / self._seconds, told.offered / self._seconds
        self._over_time[step] = _over_time(timelines)
        self.rows += self._told(f"{self._case}, {load:.3g} requests a second", told)
        return told.first_p99_s <= self._goal_s

    def search(self, begin: int, tries: int) -> None:
        """Finds the highest load."""
        most = next(step for step in range(100) if load_at(self._scale, step + 1) > self._scale.most_load)
        found = highest(self.holds, begin, tries, most)
        goal = f"{self._case}, first token within {self._goal_s:g} s for 99 %"
        if found.held is not None:
            self.rows.append(Measurement(goal, HELD, self._admitted[found.held], "requests/s"))
        if found.failed is not None:
            self.rows.append(Measurement(goal, FAILED, self._offered[found.failed], "requests/s"))
        shown = min(self._over_time) if found.held is None else found.held
        case = f"{self._case}, {load_at(self._scale, shown):.3g} requests a second, {OVER_TIME}"
        self.rows += [row._replace(case=case) for row in self._over_time[shown]]

    def _told(self, case: str, told: Told) -> list[Measurement]:
        rows = [
            Measurement(case, "admitted", told.admitted / self._seconds, "requests/s"),
            Measurement(case, "offered", told.offered, "requests"),
            Measurement(case, "refused", told.refused, "requests"),
            Measurement(case, "tokens", told.tokens, "tokens"),
        ]
        for share, seconds in (("p50", told.first_p50_s), ("p99", told.first_p99_s)):
            if seconds < float("inf"):  # else that request was refused
                rows.append(Measurement(case, f"time to first token, {share}", seconds * 1e3, "ms"))
        return rows


def _over_time(timelines: Sequence[torch_vmm.Timeline]) -> list[Measurement]:
    """A series each: what has the same name is the runs of one row."""
    rows = []
    for samples in zip(*(timeline.samples for timeline in timelines), strict=False):
        rows.append(Measurement("", SECONDS, samples[0].seconds, "s"))
        for sample in samples:
            rows += [Measurement("", name, size / _GIB, "GiB") for name, size in sample.physical_bytes.items()]
    return rows


def lone_requests(group: Sequence[Hosted], scale: Scale) -> list[Measurement]:
    """The time to the first token of requests that come one by one, to another model each time.

    Of the longest prompts, so that it is the GPU's time, and not Python's, that is looked at.
    """
    server = Server([list(group)], goal_s=60.0)
    times: dict[str, list[float]] = {model.name: [] for model in group}
    for _ in range(_LONE):
        for model in group:
            (request,) = server.serve([Arrival(0.0, model.name, scale.shape.prompts[1], 2, 0.0)])
            assert request.first_s is not None
            times[model.name].append(request.first_s)
    rows = []
    for name, found in times.items():
        case, ordered = f"one request, {name}, the others idle", sorted(found)
        rows.append(Measurement(case, "time to first token", percentile(ordered, 0.5) * 1e3, "ms"))
        rows.append(Measurement(case, "the slowest of them", ordered[-1] * 1e3, "ms"))
    return rows


def measure(way: str, kind: str, name: str) -> list[Measurement]:
    """All of one way to arrange memory, at a scale."""
    began = time.perf_counter()
    if kind == "cpu":
        torch.set_num_threads(1)
    settle_algorithms(is_deterministic=False, is_strict=True)
    hosted.use_libraries_outside(kind)
    scale = scale_of(name, torch.cuda.mem_get_info()[0] if kind == "cuda" else 0)
    gc.freeze()  # what is there so far is looked at no more, as servers do
    rows = {"alone": _alone, "static": _static, "torch_vmm": _elastic, "sleeping": _sleeping}[way](scale, kind)
    return [*rows, Measurement("all of it", "time", time.perf_counter() - began, "s")]


_THREE, _FIVE = "three models", "five models"


def _alone(scale: Scale, kind: str) -> list[Measurement]:
    rows = []
    for spec in scale.resident:
        (group,) = hosted.alone(spec, scale, kind)
        rows += lone_requests(group, scale)
        shared = group[0].shared
        del group
        gc.collect()  # modules know each other
        shared.close(force=True)
    return rows


def _static(scale: Scale, kind: str) -> list[Measurement]:
    trial = Trial(scale, scale.shape, hosted.in_thirds(scale, kind), _THREE)
    trial.search(0, scale.searched)
    return trial.rows


def _elastic(scale: Scale, kind: str) -> list[Measurement]:
    groups = hosted.under_one_limit(scale, kind)
    trial = Trial(scale, scale.shape, groups, _THREE)
    trial.search(_STEPS, scale.searched)
    return trial.rows + lone_requests(groups[0], scale)


def _sleeping(scale: Scale, kind: str) -> list[Measurement]:
    groups, sleepers = hosted.with_sleepers(scale, kind)
    trial = Trial(scale, scale.with_sleepers, groups, _FIVE, sleepers)
    trial.search(0, scale.searched - 1)
    return [*trial.rows, Measurement(f"{_FIVE}, in all", "woken", sleepers.woken, "models")]
