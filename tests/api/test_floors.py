"""Floors where memory comes in pieces: what one reserves is there, however large the chunks that others have idle."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.helpers import MIB, tensor_in
from torch_vmm import SharedMemoryPool, VirtualMemoryPool

MakeShared = Callable[..., SharedMemoryPool]


def idle_in_one_chunk(shared: SharedMemoryPool, size: int) -> VirtualMemoryPool:
    """A model that has ``size`` bytes idle, in one chunk: what was away comes back in one a block."""
    model = shared.register_model("a")
    tensor = tensor_in(model, size)
    model.sleep(release=True)
    model.wake()
    del tensor
    assert [segment["total_size"] for segment in model.memory_snapshot()] == [size]
    return model


def test_a_floor_is_met_from_a_chunk_that_lies_across_anothers(make_shared: MakeShared) -> None:
    shared = make_shared("300MiB")
    a, b = idle_in_one_chunk(shared, 250 * MIB), shared.register_model("b")
    a.floor = b.floor = 100 * MIB
    first = tensor_in(b, 60 * MIB)
    second = tensor_in(b, 40 * MIB)
    back = tensor_in(a, 100 * MIB)  # its own is no less reserved
    assert shared.global_stats().physical_usage <= 300 * MIB
    del first, second, back


def test_what_is_above_a_floor_is_given_of_a_larger_chunk(make_shared: MakeShared) -> None:
    shared = make_shared("300MiB")
    a, b = idle_in_one_chunk(shared, 200 * MIB), shared.register_model("b")
    a.floor = 120 * MIB
    kept = tensor_in(b, 160 * MIB)
    back = tensor_in(a, 120 * MIB)
    del kept, back


def test_a_smaller_chunk_goes_before_one_across_the_floor(make_shared: MakeShared) -> None:
    shared = make_shared("300MiB")
    a = idle_in_one_chunk(shared, 200 * MIB)
    keeps = tensor_in(a, 200 * MIB)
    small = tensor_in(a, 30 * MIB)
    del keeps, small
    b = shared.register_model("b")
    a.floor = 200 * MIB
    b.floor = 90 * MIB
    assert 200 * MIB <= a.physical_memory_usage <= 210 * MIB
    kept = tensor_in(b, 90 * MIB)
    del kept


@pytest.mark.parametrize("limit", [245, 210])
def test_a_lowered_limit_takes_a_chunk_that_lies_across_a_floor(make_shared: MakeShared, limit: int) -> None:
    shared = make_shared("300MiB")
    a = idle_in_one_chunk(shared, 250 * MIB)
    a.floor = 200 * MIB
    shared.physical_limit = limit * MIB
    assert shared.global_stats().physical_usage <= limit * MIB
    back = tensor_in(a, 200 * MIB)
    del back
