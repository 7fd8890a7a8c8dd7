"""Every question that torch can ask of an allocator is answered by ours: read from torch's headers and our sources."""

from __future__ import annotations

import re

import pytest

from tests.helpers import ROOT
from tests.torch_headers import final_methods, overridden_methods, virtual_methods

ADAPTER = ROOT / "csrc" / "torch_adapter"

# What torch's own classes answer rightly for us, and why.
LEFT_TO_TORCH = {
    "is_simple_data_ptr": "a block's context is its address, which is what Allocator looks at",
    "getMemoryInfo": "CUDAAllocator asks the driver",
}


def test_the_headers_are_read_whole() -> None:
    found = virtual_methods()
    assert {"allocate", "raw_deleter", "emptyCache", "recordStream", "snapshot", "memcpyAsync", "name"} <= found
    assert len(found) >= 45  # torch 2.11 has 46
    assert "copy_data" in final_methods()


@pytest.mark.parametrize("method", sorted(virtual_methods()))
def test_it_is_overridden(method: str) -> None:
    ours = overridden_methods((ADAPTER / "cuda_allocator.h").read_text())
    assert method in ours | final_methods() | set(LEFT_TO_TORCH)


# What a method that is not written yet would say.
UNFINISHED = re.compile(r"throw_not_yet|in this version|later version|(?:does|do) not yet|TODO")


@pytest.mark.parametrize("source", sorted(path.name for path in ADAPTER.iterdir()))
def test_no_method_is_left_for_later(source: str) -> None:
    found = [line.strip() for line in (ADAPTER / source).read_text().splitlines() if UNFINISHED.search(line)]
    assert found == []
