"""benchmarks/latency: percentiles, the slowest operations, and why they were."""

from __future__ import annotations

import pytest

from benchmarks import latency, report
from benchmarks.measurement import Row

TIMES = [100.0] * 985 + [5000.0 + k for k in range(14)] + [90_000.0]


def rows_of(slow: list[tuple[int, int, int, int, int]]) -> dict[str, float]:
    return {one.metric: one.value for one in latency.told("1000 operations", TIMES, slow)}


@pytest.mark.parametrize(("share", "wanted"), [(0.5, 50), (0.99, 99), (0.999, 100), (1.0, 100), (0.001, 1)])
def test_percentiles_are_times_that_were_measured(share: float, wanted: float) -> None:
    assert latency.percentile([float(k) for k in range(1, 101)], share) == wanted


def test_the_ten_slowest_are_told_with_what_came_with_them() -> None:
    rows = rows_of([(999, 2**20, 3, 2, 1), (998, 0, 0, 0, 0)])
    assert (rows["p50"], rows["p99"], rows["p99.9"], rows["worst"]) == (100, 5004, 5013, 90_000)
    assert rows["worst 1"] == 90_000
    assert [rows[f"worst 1, {name}"] for name in ("bytes", "mapped", "unmapped", "climbs")] == [2**20, 3, 2, 1]
    assert (rows["worst 2"], rows["worst 2, bytes"], rows["worst 2, mapped"]) == (5013, 0, 0)
    assert rows["worst 3, bytes"] == -1  # nobody looked
    assert "worst 11" not in rows


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ((2**20, 3, 2, 0), "1 MiB: 3 mapped, 2 unmapped"),
        ((512, 1, 0, 2), "0.5 KiB: 2 climbs, 1 mapped"),
        ((0, 0, 0, 0), "a free: no driver call, no climb"),
        ((-1, 0, 0, 0), "not looked at: no driver call, no climb"),
    ],
)
def test_each_has_a_reason(values: tuple[int, int, int, int], text: str) -> None:
    assert latency.reason(*values) == text


def test_the_table_has_percentiles_and_the_remarks_the_rest() -> None:
    measured = latency.told("1000 operations", TIMES, [(999, 2**20, 3, 2, 0)])
    rows = [
        Row(case=one.case, allocator=allocator, metric=one.metric, value=one.value, unit=one.unit, runs=[one.value])
        for allocator in ("torch_vmm", "native")
        for one in measured
    ]
    shown = report.table(rows)
    assert len(shown.splitlines()) == 6
    remarks = latency.remarks(rows)
    assert len(remarks) == 2 * 11
    assert remarks[0] == "1000 operations, torch_vmm, the slowest of the first process:"
    assert remarks[1].split() == ["90.0", "µs", "1", "MiB:", "3", "mapped,", "2", "unmapped"]
