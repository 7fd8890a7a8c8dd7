"""Ranges with memory under them, for the tests of VirtualMemoryManager."""

from __future__ import annotations

import torch_vmm
from tests.helpers import PAGE

READ_WRITE = torch_vmm.AccessFlags.READ_WRITE


def backed(manager: torch_vmm.VirtualMemoryManager, pages: int) -> torch_vmm.VirtualAddressRange:
    """A range with a mapping of its own for each page, readable and writable."""
    range_ = manager.reserve(pages * PAGE)
    for page in range(pages):
        manager.map(range_, manager.alloc_physical(PAGE), page * PAGE)
    manager.set_access(range_, READ_WRITE)
    return range_
