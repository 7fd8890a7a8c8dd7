"""How long single operations take: a million allocations and frees of mixed sizes, lifetimes and streams.

The same program twice: the first time memory has to come from the driver, then it is there. Of each, percentiles and
the ten slowest operations with what came with them: driver calls (ours: chunks mapped and unmapped; torch's own:
segments allocated and freed), climbs (a request that had to look for memory elsewhere; torch calls them retries), or
neither: then it was the machine, or a lock, or the allocator's own memory that grew. The counters are read only after
operations of 3 µs and more; faster ones can have made no driver call. Each time has the clock's two readings in it:
the floor says what they cost.
"""

from __future__ import annotations

from . import allocators, loops, machine
from .measurement import ONE_BY_ONE, Measurement, Row, percentile

KIND = "cuda"
ALLOCATORS = ("torch_vmm", "native", "expandable", allocators.FLOOR)
RUNS = 3
_ROUNDS = ("first time", "again")
_SHARES = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999}
_WORST = 10
_TOLD = {"bytes": "bytes", "mapped": "calls", "unmapped": "calls", "climbs": "climbs"}


def measure(allocator: str, quick: bool) -> list[Measurement]:
    """Times in ns."""
    count = 50_000 if quick else 1_000_000
    run = loops.load()
    with machine.one_cpu():
        rounds = run.gpu_latencies_ns(count, 1, len(_ROUNDS), allocator != allocators.FLOOR)
    rows = []
    for name, (times, slow) in zip(_ROUNDS, rounds, strict=True):
        rows += told(f"{count} operations, {name}", times, slow)
    return rows


def told(case: str, times: list[float], slow: list[loops.LongOperation]) -> list[Measurement]:
    """Percentiles of one round, and a row for each thing known of its ten slowest operations."""
    ordered = sorted(times)
    rows = [Measurement(case, name, percentile(ordered, share), "ns") for name, share in _SHARES.items()]
    rows.append(Measurement(case, "worst", ordered[-1], "ns"))
    known = {number: values for number, *values in slow}
    numbers = sorted(range(len(times)), key=times.__getitem__, reverse=True)[:_WORST]
    for rank, number in enumerate(numbers, 1):
        # One that did not take long had no driver call, and nobody looked what it was.
        values = known.get(number, [-1, 0, 0, 0])
        rows.append(Measurement(case + ONE_BY_ONE, f"worst {rank}", times[number], "ns"))
        for (name, unit), value in zip(_TOLD.items(), values, strict=True):
            rows.append(Measurement(case + ONE_BY_ONE, f"worst {rank}, {name}", value, unit))
    return rows


def reason(size: int, mapped: int, unmapped: int, climbs: int) -> str:
    """What the counters say of one operation."""
    large = f"{size / 2**20:.4g} MiB" if size >= 2**20 else f"{size / 2**10:.4g} KiB"
    what = "not looked at" if size < 0 else "a free" if size == 0 else large
    came = [
        *([f"{climbs} climb{'s' if climbs > 1 else ''}"] if climbs else []),
        *([f"{mapped} mapped"] if mapped else []),
        *([f"{unmapped} unmapped"] if unmapped else []),
    ]
    return f"{what}: {', '.join(came) or 'no driver call, no climb'}"


def remarks(rows: list[Row]) -> list[str]:
    """The ten slowest operations of each allocator's first process, and why they were."""
    told_of = [row for row in rows if row["case"].endswith(ONE_BY_ONE)]
    values = {(row["case"], row["allocator"], row["metric"]): row["runs"][0] for row in told_of}
    lines = []
    for case, allocator in dict.fromkeys((row["case"], row["allocator"]) for row in told_of):
        lines.append(f"{case.removesuffix(ONE_BY_ONE)}, {allocator}, the slowest of the first process:")
        for rank in range(1, _WORST + 1):
            metric = f"worst {rank}"
            if (case, allocator, metric) not in values:
                break
            known = [int(values[case, allocator, f"{metric}, {name}"]) for name in _TOLD]
            lines.append(f"  {values[case, allocator, metric] / 1e3:10.1f} µs  {reason(*known)}")
    return lines
