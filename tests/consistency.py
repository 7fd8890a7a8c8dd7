"""One checker for all numbers: statistics against the snapshot, both against live tensors, models against the device.

It holds under torch's own allocator too (tests/gpu/workloads/statistics.py runs
it there), so what it asks is torch's meaning of the numbers and not ours. There
is no torch_vmm in that process, hence the imports inside functions.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tests.helpers import rounded

if TYPE_CHECKING:
    import torch_vmm

Stats = Mapping[str, int]
Segment = dict[str, Any]

PARTS = ("all", "small_pool", "large_pool")
METRICS = ("current", "peak", "allocated", "freed")
COUNTED = (
    "allocation",
    "segment",
    "active",
    "inactive_split",
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "requested_bytes",
)
"""The families that torch counts for all blocks, the small and the large ones."""
OVERSIZE = ("oversize_allocations", "oversize_segments")
EVENTS = ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free")
KEYS = frozenset(
    [f"{family}.{part}.{metric}" for family in COUNTED for part in PARTS for metric in METRICS]
    + [f"{family}.{metric}" for family in OVERSIZE for metric in METRICS]
    + [*EVENTS, "max_split_size"]
)
"""The 122 keys of torch.cuda.memory_stats() with the native allocator of torch 2.11; later ones only add some."""

_SUMS = {
    "allocated_size": "allocated_bytes",
    "active_size": "active_bytes",
    "requested_size": "requested_bytes",
    "total_size": "reserved_bytes",
}
_STATES = ("active_allocated", "active_pending_free", "inactive")


def check_device(device: int = 0, *, fresh: bool = False) -> Stats:
    """torch.cuda.memory_stats(device) and memory_snapshot() say the same, and each makes sense. Returns the former.

    Nothing may allocate or free on another thread meanwhile.

    Args:
        fresh: nothing has reset the accumulated statistics in this process.
    """
    return _check(
        f"cuda:{device}",
        lambda: torch.cuda.memory_stats(device),
        lambda: [segment for segment in torch.cuda.memory_snapshot() if segment["device"] == device],
        fresh,
    )


def check_pool(pool: torch_vmm.VirtualMemoryPool, *, fresh: bool = False) -> Stats:
    """The same for one pool, of a GPU or of the CPU. Returns its memory_stats().

    Args:
        fresh: nothing has reset the pool's accumulated statistics.
    """
    name = f"pool {pool.name!r}"
    for _ in range(10):  # a fence may pass in between
        whole = pool.stats()
        stats = _check(name, pool.memory_stats, pool.memory_snapshot, fresh)
        if pool.stats() == whole:
            break
    else:
        raise AssertionError(f"{name}: the numbers do not hold still; something allocates meanwhile")
    parts = whole.allocated_bytes + whole.idle_bytes + whole.stranded_bytes + whole.quarantined_bytes
    assert parts == whole.physical_usage == stats["reserved_bytes.all.current"], (name, whole)
    assert whole.allocated_bytes == stats["allocated_bytes.all.current"] == pool.memory_allocated(), (name, whole)
    assert pool.memory_reserved() == stats["reserved_bytes.all.current"], name
    assert pool.max_memory_allocated() == stats["allocated_bytes.all.peak"], name
    assert pool.max_memory_reserved() == stats["reserved_bytes.all.peak"], name
    if fresh:
        mapped = stats["num_device_alloc"] - stats["num_device_free"]
        # A chunk that has moved may be mapped where it was, too, in case it comes back.
        assert mapped >= stats["segment.all.current"], f"{name}: {mapped} chunks are mapped"
    # What no one else can have while its chunks are partly used.
    assert stats["inactive_split_bytes.all.current"] == whole.stranded_bytes, (name, whole)
    return stats


def check_sums(pools: Iterable[torch_vmm.VirtualMemoryPool], device: str | int = "cuda") -> None:
    """All models' numbers sum to the device's. Peaks do not, and are left out.

    Args:
        pools: every open pool of the device but the default one, which is added here.
    """
    from torch_vmm import _C
    from torch_vmm.devices import to_device

    gc.collect()  # dropped pools and tensors of earlier tests
    key = to_device(device)
    memory = _C.device(key.kind, key.ordinal)
    whole = memory.statistics()
    models = [pool.memory_stats() for pool in pools]
    models.append(_C.default_pool(key.kind, key.ordinal).statistics())
    assert memory.statistics() == whole, "the numbers do not hold still: something allocates meanwhile"
    for name in sorted(_summed_keys()):
        total = sum(stats[name] for stats in models)
        assert total == whole[name], f"{name}: the models' sum is {total}, the device's number {whole[name]}"
    # What pools that have ended counted is in the device's numbers alone.
    for name in [f"{family}.{part}.allocated" for family in COUNTED for part in PARTS] + ["num_ooms"]:
        if not name.startswith("inactive"):
            assert sum(stats[name] for stats in models) <= whole[name], name


def _summed_keys() -> set[str]:
    currents = {f"{family}.{part}.current" for family in COUNTED for part in PARTS}
    return currents | {f"{family}.current" for family in OVERSIZE}


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """What the storages of ``tensors`` count as: each once, rounded up to 512 bytes."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(rounded(size) for size in storages.values())


def check_live(tensors: Iterable[torch.Tensor], before: int = 0, device: int = 0) -> None:
    """All that is allocated is these tensors, and ``before``: torch.cuda.memory_allocated() before they were made."""
    found, expected = torch.cuda.memory_allocated(device), before + tensor_bytes(tensors)
    assert found == expected, f"{found} bytes are allocated, live tensors take {expected}"


# -- Parts of it -------------------------------------------------------------------------------------------------------


def _check(name: str, read: Callable[[], Stats], look: Callable[[], list[Segment]], fresh: bool) -> Stats:
    stats, segments = _at_one_moment(name, read, look)
    check_numbers(name, stats, fresh)
    check_segments(name, segments)
    for part in PARTS:
        chosen = [segment for segment in segments if part in ("all", segment["segment_type"] + "_pool")]
        blocks = [block for segment in chosen for block in segment["blocks"]]
        for field, family in _SUMS.items():
            _equal(name, stats, f"{family}.{part}.current", sum(segment[field] for segment in chosen))
        states = [block["state"] for block in blocks]
        _equal(name, stats, f"allocation.{part}.current", states.count("active_allocated"))
        _equal(name, stats, f"active.{part}.current", len(states) - states.count("inactive"))
    return stats


def _at_one_moment(
    name: str, read: Callable[[], Stats], look: Callable[[], list[Segment]]
) -> tuple[Stats, list[Segment]]:
    # A fence may pass in between: then what was pending is free in one and not in the other.
    for _ in range(10):
        stats, segments = read(), look()
        if read() == stats:
            return stats, segments
    raise AssertionError(f"{name}: the numbers do not hold still; something allocates meanwhile")


def _equal(name: str, stats: Stats, key: str, expected: int) -> None:
    assert stats[key] == expected, f"{name}: {key} is {stats[key]}, the snapshot has {expected}"


def check_numbers(name: str, stats: Stats, fresh: bool = False) -> None:
    """What holds for memory_stats() alone."""
    missing = KEYS - stats.keys()
    assert not missing, f"{name} lacks {sorted(missing)}"
    for family in COUNTED:
        for metric in ("current", "allocated", "freed"):
            whole, small, large = (stats[f"{family}.{part}.{metric}"] for part in PARTS)
            assert whole == small + large, f"{name}: {family}.{metric}: {whole} is not {small} + {large}"
        # The parts need not have been at their peaks at the same time.
        whole, small, large = (stats[f"{family}.{part}.peak"] for part in PARTS)
        assert max(small, large) <= whole <= small + large, f"{name}: {family}.peak: {whole} of {small} and {large}"
    counted = [f"{family}.{part}" for family in COUNTED for part in PARTS]
    for key in (*counted, *OVERSIZE):
        current, peak, allocated, freed = (stats[f"{key}.{metric}"] for metric in METRICS)
        assert 0 <= current <= peak, f"{name}: {key}: current {current}, peak {peak}"
        assert allocated >= 0 <= freed, f"{name}: {key}: allocated {allocated}, freed {freed}"
        # After a reset, what was there at that moment has come and not been counted.
        earlier = current - (allocated - freed)
        assert earlier == 0 if fresh else earlier >= 0, f"{name}: {key}: {allocated} came, {freed} left, {current} stay"
    for part in PARTS:
        allocated, active, requested, reserved, split = (
            stats[f"{family}.{part}.current"]
            for family in (
                "allocated_bytes",
                "active_bytes",
                "requested_bytes",
                "reserved_bytes",
                "inactive_split_bytes",
            )
        )
        assert allocated <= active <= reserved, f"{name}: {part}: {allocated} <= {active} <= {reserved}"
        assert requested <= active, f"{name}: {part}: {requested} <= {active}"
        assert split <= reserved - active, f"{name}: {part}: {split} of {reserved} - {active} are split"
        assert (split == 0) == (stats[f"inactive_split.{part}.current"] == 0), f"{name}: {part}: {split}"
        assert stats[f"allocation.{part}.current"] <= stats[f"active.{part}.current"], f"{name}: {part}"
    assert all(stats[key] >= 0 for key in EVENTS), name


def check_segments(name: str, segments: Sequence[Segment]) -> None:
    """What holds for memory_snapshot() alone: sorted, apart, tiled by their blocks, sums right."""
    end = 0
    for segment in segments:
        at = segment["address"]
        assert at >= end, f"{name}: the segment at {at:#x} begins before {end:#x}, where the one before it ends"
        end = at + segment["total_size"]
        assert segment["segment_type"] in ("small", "large"), segment["segment_type"]
        assert segment["blocks"], f"{name}: no blocks in the segment at {at:#x}"
        sizes = dict.fromkeys(_STATES, 0)
        requested = 0
        for block in segment["blocks"]:
            assert block["address"] == at, f"{name}: block at {block['address']:#x}, the one before it ends at {at:#x}"
            assert block["size"] > 0 == block["size"] % 512, f"{name}: {block['size']} bytes at {at:#x}"
            at += block["size"]
            sizes[block["state"]] += block["size"]
            if block["state"] != "inactive":
                assert block["requested_size"] <= block["size"], f"{name}: {block}"
                requested += block["requested_size"]
        assert at == end, f"{name}: the blocks end at {at:#x}, their segment at {end:#x}"
        assert segment["allocated_size"] == sizes["active_allocated"], f"{name}: segment at {segment['address']:#x}"
        assert segment["active_size"] == sizes["active_allocated"] + sizes["active_pending_free"], name
        assert segment["requested_size"] == requested, f"{name}: segment at {segment['address']:#x}"
