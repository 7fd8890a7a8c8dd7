"""Runs a benchmark: a process for each measurement, one allocator after the other, as often as is asked.

What does not depend on time can be measured by several processes at once; of benchmarks with passes, the processes of
all allocators can take them in turn (``lockstep.py``).
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

from . import allocators, lockstep, machine
from .measurement import TIMES, Answer, Measurement, Part, Row

_ANSWER = "BENCHMARK RESULT "
_TIMEOUT_S = 300


class Options(NamedTuple):
    """What the command line asks of a benchmark. ``programs``, ``scale`` and ``limit`` are for those with parts."""

    kind: str  # "cuda" or "cpu"
    quick: bool
    programs: list[str] | None = None  # None: all
    scale: str | None = None  # None: what fits the kind
    limit: int | None = None  # bytes: the largest batch within it is asked for
    at_once: int = 1  # processes beside each other; of more than one, what takes time says nothing and is left out
    lockstep: bool = False  # of a benchmark with passes: its allocators' processes take them in turn


class Job(NamedTuple):
    """What one process measures."""

    benchmark: str
    allocator: str
    kind: str
    quick: bool
    part: Part

    def said(self) -> str:
        program = self.part.get("program")
        return f"{self.benchmark}{f', {program}' if program else ''}: {self.allocator}"


Ask = Callable[[str, Part], list[Measurement] | None]
"""Measures a part under an allocator, once; ``None`` where that failed."""


def one_scale(options: Options, ask: Ask) -> list[Part]:
    """The ``parts`` of a benchmark that has one, of the scale that is asked for or fits the kind."""
    del ask
    scale = options.scale or ("full" if options.kind == "cuda" and not options.quick else "small")
    return [{"kind": options.kind, "scale": scale}]


Turn = tuple[list[str], Part]
"""Allocators that measure a part: one, or all of them in lockstep."""


class Outcome(NamedTuple):
    rows: list[Row]
    machine: dict[str, str | int]
    failed: list[str]  # what was to be measured by now, or in this round, and is not there
    rounds: int = 0  # begun


def module(name: str) -> ModuleType:
    """The benchmark of that name."""
    return import_module(f"benchmarks.{name}")


def kind_of(name: str, device: str) -> str:
    """Where a benchmark runs: on ``device`` if it can, else where it must."""
    kinds: tuple[str, ...] = getattr(module(name), "KINDS", ())
    return device if device in kinds else module(name).KIND


def allocators_of(name: str, kind: str) -> list[str]:
    """Those that the benchmark knows there."""
    known: tuple[str, ...] | dict[str, tuple[str, ...]] = module(name).ALLOCATORS
    return list(known[kind] if isinstance(known, dict) else known)


def run(name: str, chosen: list[str], runs: int, options: Options) -> Iterator[Outcome]:
    """Every part under each of ``chosen``, in turn, ``runs`` times, another one first each time; after each what there
    is, so that a series that is cut off loses the one that it was at.
    """
    rows: dict[tuple[str, str, str], Row] = {}
    facts: dict[str, str | int] = {}
    failed: list[str] = []

    def measured(chosen: list[str], part: Part) -> list[list[Measurement] | None]:
        """Of one allocator, or of several in lockstep."""
        nonlocal facts
        jobs = [Job(name, allocator, options.kind, options.quick, part) for allocator in chosen]
        answers = _in_lockstep(jobs) if len(jobs) > 1 else [_spawn(jobs[0])]
        found: list[list[Measurement] | None] = []
        for job, answer in zip(jobs, answers, strict=True):
            if answer is None:
                failed.append(job.said())
            else:
                facts = answer.machine
            found.append(None if answer is None else answer.measurements)
        return found

    def said(chosen: list[str], part: Part) -> str:
        return Job(name, ", ".join(chosen), options.kind, options.quick, part).said()

    def turn(number: int, chosen: list[str], part: Part) -> list[list[Measurement]]:
        print(f"{said(chosen, part)}, run {number + 1} of {runs}", file=sys.stderr, flush=True)
        every = measured(chosen, part)
        return [[each for each in found or [] if options.at_once == 1 or each.unit not in TIMES] for found in every]

    parts = _parts(name, options, lambda allocator, part: measured([allocator], part)[0])
    together = [chosen] if options.lockstep and len(chosen) > 1 else [[allocator] for allocator in chosen]
    turns = [(group, part) for part in parts for group in together]
    if options.at_once > 1:  # three times the largest program do not fit 140 GiB
        turns.sort(key=lambda each: together.index(each[0]))
    with ThreadPoolExecutor(options.at_once) as pool:
        for number in range(runs):
            ordered = turns if options.at_once > 1 else _another_first(turns, len(together), number)
            answers = pool.map(lambda each, number=number: turn(number, *each), ordered)
            ahead = [said(*each) for each in ordered]
            for (group, _), every in zip(ordered, answers, strict=True):
                for allocator, measurements in zip(group, every, strict=True):
                    for each in measurements:
                        _add(rows, allocator, each)
                del ahead[0]
                yield Outcome(list(rows.values()), facts, failed + ahead, number + 1)


def _another_first(turns: list[Turn], width: int, number: int) -> list[Turn]:
    """Within each part the allocators by turns: who always came first would always meet the cooler machine."""
    return [
        each
        for begin in range(0, len(turns), width)
        for each in (*turns[begin : begin + width][number % width :], *turns[begin : begin + width][: number % width])
    ]


def _parts(name: str, options: Options, measured: Ask) -> list[Part]:
    plan: Callable[[Options, Ask], list[Part]] | None = getattr(module(name), "parts", None)
    return [{}] if plan is None else plan(options, measured)


def _add(rows: dict[tuple[str, str, str], Row], allocator: str, one: Measurement) -> None:
    key = (one.case, one.metric, allocator)
    empty = Row(case=one.case, allocator=allocator, metric=one.metric, value=0.0, unit=one.unit, runs=[])
    row = rows.setdefault(key, empty)
    row["runs"].append(rounded(one.value))
    # Of whole numbers the median is one that was measured.
    is_whole = all(isinstance(value, int) for value in row["runs"])
    row["value"] = (statistics.median_low if is_whole else statistics.median)(row["runs"])
    if not is_whole:
        row["value"] = rounded(row["value"])


def rounded(value: float) -> float:
    """Five digits; a whole number as it is."""
    return value if isinstance(value, int) else float(f"{value:.5g}")


def _spawn(job: Job) -> Answer | None:
    try:
        done = subprocess.run(
            _command(job),
            cwd=machine.ROOT,
            env=allocators.environment(job.allocator),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        print(f"{job.said()}: took more than {_TIMEOUT_S} s", file=sys.stderr)
        return None
    return _answer(job, done)


def _in_lockstep(jobs: list[Job]) -> list[Answer | None]:
    workers = []
    for job in jobs:
        told = job._replace(part={**job.part, "lockstep": 1})
        environment = allocators.environment(job.allocator)
        workers.append(lockstep.Worker(_command(told), machine.ROOT, environment, _TIMEOUT_S))
    return [_answer(job, done) for job, done in zip(jobs, lockstep.run(workers), strict=True)]


def _command(job: Job) -> list[str]:
    return [sys.executable, "-m", "benchmarks", "--worker", json.dumps(job._asdict())]


def _answer(job: Job, done: subprocess.CompletedProcess[str]) -> Answer | None:
    for line in done.stdout.splitlines():
        if line.startswith(_ANSWER) and done.returncode == 0:
            answer = json.loads(line[len(_ANSWER) :])
            return Answer(answer["machine"], [Measurement(*values) for values in answer["measurements"]])
    print(f"{job.said()}: exit status {done.returncode}\n{done.stdout}{done.stderr}", file=sys.stderr)
    return None


# -- The measuring process ---------------------------------------------------------------------------------------------


def work(text: str) -> int:
    """Does the job that ``text`` says, and prints the answer; returns the exit status."""
    job = Job(**json.loads(text))
    benchmark = module(job.benchmark)
    # Of benchmarks that compare ways to use one allocator: which that is.
    installed: str = getattr(benchmark, "INSTALLED", {}).get(job.allocator, job.allocator)
    allocators.install(installed, job.kind)
    facts = machine.facts(job.kind)
    import torch

    torch.zeros(1, device=job.kind)
    with allocators.work(installed, job.kind):
        measurements: list[Measurement]
        if job.part:
            measurements = benchmark.measure_part(job.allocator, job.kind, job.quick, job.part)
        else:
            measurements = benchmark.measure(job.allocator, job.quick)
    print(_ANSWER + json.dumps(Answer(facts, measurements)._asdict()), flush=True)
    return 0
