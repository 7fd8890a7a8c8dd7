"""How many instructions an allocation and its free take: what no noise of a machine can hide, or excuse."""

from __future__ import annotations

import pytest

from benchmarks import instructions

# About a tenth above what was counted when they were set (g++ 12, -O2).
BOUNDS = {
    "pair 512 B": 330,
    "pair 20 MiB, after small ones": 330,
    "churn 512 B - 1 MiB, 1000 live": 845,
    "churn 2 MiB - 32 MiB, 200 live": 1700,
    "buffers 2 MiB - 32 MiB, 200 live": 1865,
    "miss 24 MiB": 24_000,
    "miss 32 MiB in the margin, nobody idle": 46_500,
    "hand-over, of 1000 chunks of 2 MiB": 40_500,
}


@pytest.fixture(scope="module", autouse=True)
def program() -> None:
    why_not = instructions.prepare()
    if why_not is not None and "must be installed" in why_not:
        pytest.skip(why_not)
    assert why_not is None


def test_every_case_has_a_bound() -> None:
    assert instructions.CASES.keys() == BOUNDS.keys()


@pytest.mark.parametrize("case", instructions.CASES)
def test_instructions_stay_below_their_bound(case: str) -> None:
    counted = instructions.a_step(instructions.CASES[case])
    print(f"{case}: {counted:.0f} instructions")
    assert 0 < counted <= BOUNDS[case]
