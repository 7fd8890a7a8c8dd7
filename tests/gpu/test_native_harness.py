"""The worker that runs workloads under torch's own allocator: that it is that one, and survives what it is given."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.native import NativeError, begin_on_native, both, on_native
from tests.gpu.workloads import harness
from tests.helpers import MIB
from tests.standin.control import less


def test_here_is_ours_and_there_is_the_native_one(device: str) -> None:
    assert torch.cuda.memory.get_allocator_backend() == "torch_vmm"
    native = on_native(harness.describe, size=8 * MIB)
    assert native == {"allocator": "native", "before": [0, 0], "allocated": 8 * MIB, "content": 0, "input": ""}


@pytest.mark.alone  # it looks at the GPU's free memory
def test_each_workload_starts_with_an_empty_cache(device: str) -> None:
    unit = less(MIB, by=16)
    on_native(harness.describe, size=1024 * unit)
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    pending = [begin_on_native(harness.describe, size=size * unit) for size in (512, 1024, 8)]
    answers = [each.result() for each in reversed(pending)]  # in any order
    assert [answer["before"] for answer in answers] == [[0, 0]] * 3
    assert [answer["allocated"] for answer in answers] == [8 * unit, 1024 * unit, 512 * unit]
    assert free - torch.cuda.mem_get_info()[0] < 64 * MIB


def test_errors_come_back_with_type_and_text(device: str) -> None:
    with pytest.raises(NativeError) as caught:
        on_native(harness.too_much)
    assert caught.value.type == "OutOfMemoryError"
    assert "Tried to allocate" in caught.value.text
    with pytest.raises(torch.OutOfMemoryError):
        both(harness.too_much)


def test_a_worker_that_ended_is_replaced(device: str) -> None:
    with pytest.raises(NativeError, match="status 3") as caught:
        on_native(harness.end)
    assert caught.value.type == "WorkerEnded"
    assert on_native(harness.describe, size=MIB)["allocator"] == "native"


def test_only_functions_of_workloads_can_be_sent() -> None:
    with pytest.raises(ValueError, match="not at the top"):
        on_native(test_only_functions_of_workloads_can_be_sent)
