"""What a benchmark hands back, and what a result file holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypedDict


class Measurement(NamedTuple):
    """One number from one process."""

    case: str  # what was done: "pair 512 B"
    metric: str  # what was measured of it: "time", "peak reserved"
    value: float
    unit: str


TIMES = ("s", "ms", "us", "ns")
"""The units of what depends on the machine's mood."""

Part = dict[str, str | int]
"""What one process of a benchmark with parts is told; empty for all others."""

ONE_BY_ONE = ", one by one"
"""Ends the case of rows that tell of single operations."""


class Answer(NamedTuple):
    """What one process has to say."""

    machine: dict[str, str | int]
    measurements: list[Measurement]


class Row(TypedDict):
    """One number over all repetitions."""

    case: str
    allocator: str
    metric: str
    value: float  # the median of the runs
    unit: str
    runs: list[float]


class _Circumstances(TypedDict, total=False):
    """What older files do not say."""

    rounds: int  # processes of each allocator; one may repeat what it measures
    settings: dict[str, str]  # that were in force beside each allocator's own, by variable
    failed: list[str]  # what was to be measured, and is not here


class Result(_Circumstances):
    """One file: every allocator's rows, from one run."""

    benchmark: str
    command: str
    date: str  # UTC, ISO 8601
    commit: str
    machine: dict[str, str | int]
    rows: list[Row]


def is_for_tables(row: Row) -> bool:
    """Whether it is a number to compare at a glance; fingerprints and single operations are not."""
    return row["unit"] != "crc32" and not row["case"].endswith(ONE_BY_ONE)


def percentile(ordered: Sequence[float], share: float) -> float:
    """The least of the ascending ``ordered`` that ``share`` of them do not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
