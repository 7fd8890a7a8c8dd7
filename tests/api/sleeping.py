"""What tests of sleep share: contents that show where they come from, who stops it, and who is told."""

from __future__ import annotations

import torch

from torch_vmm import VirtualMemoryPool


def numbered(pool: VirtualMemoryPool, count: int, first: int = 0) -> torch.Tensor:
    """One of that model that counts from `first`."""
    with pool:
        return torch.arange(first, first + count, dtype=torch.int32, device=pool.device)


def is_numbered(tensor: torch.Tensor, first: int = 0) -> bool:
    """Does it count so still?"""
    expected = torch.arange(first, first + tensor.numel(), dtype=torch.int32)
    return torch.equal(tensor.cpu(), expected)


def told_by(pool: VirtualMemoryPool) -> list[str]:
    """What its functions for remaps are told from now on, in order."""
    told: list[str] = []
    pool.on_remap(lambda: told.append("goes"), lambda: told.append("is back"))
    return told


def stop(done: int, total: int) -> None:
    """Ctrl-C as soon as something has moved: for progress=."""
    if done > 0:
        raise KeyboardInterrupt
