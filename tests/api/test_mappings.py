"""The kernel's mappings of a process: what would take all of them is refused, and the process goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import run

_LIMIT = Path("/proc/sys/vm/max_map_count")

PROGRAM = """
import threading
import torch, torch_vmm
pool = torch_vmm.current_pool("cpu")
ring = torch_vmm.aligned((1 << 21,), torch.uint8, "cpu")
try:
    {make}
except torch_vmm.OutOfMemoryError as error:
    assert "vm.max_map_count" in str(error), error
    print("refused", flush=True)
# All goes on: threads, the allocator's memory and torch's own, and what is smaller.
done = []
thread = threading.Thread(target=lambda: done.append(torch.ones(30 << 20).sum()))
thread.start()
thread.join()
assert done == [30 << 20]
half = torch_vmm.sparse((1 << 19, 1 << 21), torch.uint8, "cpu")  # 1 TiB
assert half[5, 7] == 0
twice = torch_vmm.alias(ring, 1000)
twice[-1] = 3
assert ring[-1] == 3
del half, twice
torch_vmm.aligned((64 << 20,), torch.uint8, "cpu").fill_(1)
print("well", flush=True)
"""


@pytest.mark.skipif(
    not _LIMIT.exists() or int(_LIMIT.read_text()) > 70_000, reason="this kernel allows a process more mappings"
)
@pytest.mark.parametrize(
    "make",
    ['torch_vmm.sparse((1 << 22, 1 << 21), torch.uint8, "cpu", zeros=True)', "torch_vmm.alias(ring, 65_000)"],
    ids=["8 TiB of zeros", "65000 copies"],
)
def test_the_last_mappings_are_left_to_the_process(make: str) -> None:
    assert run(PROGRAM.format(make=make)).split() == ["refused", "well"]
