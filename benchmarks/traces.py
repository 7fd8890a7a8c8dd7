"""The recorded programs of tests/data, for ``_C.replay``: alone, again and again, and several in turn."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .machine import ROOT

DATA = ROOT / "tests" / "data"


class Program(NamedTuple):
    op: np.ndarray
    id: np.ndarray
    size: np.ndarray
    stream: np.ndarray


class Recorded(NamedTuple):
    """Peak allocated, and what native and expandable segments (where known) reserved over it: tests/data/README.md.

    The traces hold no times; ``seconds`` is what the recorded steps took, on an H100 or H200.
    """

    allocated_gib: float
    seconds: float
    native: float
    expandable: float | None = None


RECORDED = {
    "train": Recorded(36.45, 4.2, 1.835, 1.080),
    "vision": Recorded(10.93, 2.0, 1.522, 1.042),
    "lora": Recorded(30.55, 3.45, 1.485, 1.047),
    "serve": Recorded(7.14, 10.5, 1.493, 1.044),
    "two": Recorded(17.09, 5.1, 1.518, 1.100),
    "continuous": Recorded(7.30, 3.9, 1.171, 1.046),
    "own_train": Recorded(36.25, 3.5, 1.438),
    "own_checkpointed": Recorded(22.93, 3.9, 2.095),
    "own_serve": Recorded(6.54, 4.4, 1.621),
    "own_continuous": Recorded(4.17, 2.1, 5.109),
    "own_vision": Recorded(13.13, 3.5, 1.318),
    "own_turns": Recorded(6.81, 6.7, 1.134),
    "own_lora": Recorded(30.99, 2.5, 1.233),
    "own_graphs": Recorded(14.95, 1.5, 1.429),
    "own_two_models": Recorded(9.02, 4.0, 1.752),
}


def load(name: str) -> Program:
    with np.load(DATA / f"{name}.npz") as trace:
        return Program(
            trace["op"].astype(np.uint8), *(trace[key].astype(np.uint64) for key in ("id", "size", "stream"))
        )


def evenly(program: Program, seconds: float) -> np.ndarray:
    """When each step was, in microseconds, had they been as long as each other."""
    times: np.ndarray = np.linspace(0, seconds * 1e6, len(program.op)).astype(np.uint64)
    return times


def repeated(program: Program, times: int) -> Program:
    """What it does after its weights are there (the blocks that it never frees), so many times."""
    lasting = np.setdiff1d(program.id[program.op == 0], program.id[program.op != 0])
    loaded = int(np.flatnonzero(np.isin(program.id[: len(program.op) // 4], lasting))[-1]) + 1
    columns = [[column[:loaded]] for column in program]
    body = Program(*(column[loaded:] for column in program))
    own = ~np.isin(body.id, program.id[:loaded])
    body = Program(*(column[own] for column in body))
    left = np.setdiff1d(body.id[body.op == 0], body.id[body.op != 0])
    nothing: np.ndarray = np.zeros(len(left), np.uint64)
    for number in range(1, times + 1):
        first = np.uint64(number * (int(program.id.max()) + 1))
        added = (body.op, body.id + first, body.size, body.stream)
        gone: np.ndarray = np.ones(len(left), np.uint8)
        freed = (gone, left + first, nothing, nothing)
        for column, *values in zip(columns, added, freed, strict=True):
            column.extend(values)
    return Program(*(np.concatenate(column) for column in columns))


PARTS = 8


def cut(program: Program) -> list[slice]:
    """In parts, each of which ends where little is live."""
    sizes: dict[int, int] = {}
    live: np.ndarray = np.zeros(len(program.op), np.int64)
    now = 0
    for step, (op, block, size) in enumerate(zip(program.op, program.id, program.size, strict=True)):
        now += int(size) if op == 0 else -sizes.pop(int(block), 0)
        if op == 0:
            sizes[int(block)] = int(size)
        live[step] = now
    length = len(live) // PARTS
    ends = [0]
    for part in range(1, PARTS):
        first = part * length - length // 2
        ends.append(first + int(live[first : first + length].argmin()) + 1)
    return [slice(*ends_of) for ends_of in itertools.pairwise([*ends, len(live)])]


def in_turn(names: Sequence[str], passes: int) -> tuple[Program, np.ndarray]:
    """A part of each in turn, all of it so many times; and the model of each step."""
    programs = [load(name) for name in names]
    parts = [cut(program) for program in programs]
    columns: list[list[np.ndarray]] = [[], [], [], [], []]

    def go_on(model: int, *steps: np.ndarray) -> None:
        for column, values in zip(columns, (*steps, np.full(len(steps[0]), model, np.uint8)), strict=True):
            column.append(values)

    for _ in range(passes):
        for part in range(PARTS):
            for model, program in enumerate(programs):
                op, block, size, stream = (column[parts[model][part]] for column in program)
                go_on(model, op, block * np.uint64(len(names)) + np.uint64(model), size, stream)
        for model, program in enumerate(programs):
            left = np.setdiff1d(program.id[program.op == 0], program.id[program.op != 0])
            nothing: np.ndarray = np.zeros(len(left), np.uint64)
            block = left * np.uint64(len(names)) + np.uint64(model)
            go_on(model, np.ones(len(left), np.uint8), block, nothing, nothing)
    op, block, size, stream, model_of = (np.concatenate(column) for column in columns)
    return Program(op, block, size, stream), model_of
