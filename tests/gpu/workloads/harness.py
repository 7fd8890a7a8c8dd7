"""What the tests of the harness itself send to the worker."""

from __future__ import annotations

import os
import sys

import torch


def describe(size: int) -> dict[str, object]:
    """Which allocator this is, and what it has before and after a tensor of ``size`` bytes. Prints, as programs do."""
    print("noise on stdout")
    before = [torch.cuda.memory_allocated(), torch.cuda.memory_reserved()]
    block = torch.zeros(size, dtype=torch.uint8, device="cuda")
    return {
        "allocator": torch.cuda.memory.get_allocator_backend(),
        "before": before,
        "allocated": torch.cuda.memory_allocated() - before[0],
        "content": int(block.sum()),
        "input": sys.stdin.read(),
    }


def too_much() -> None:
    """More than any GPU has."""
    torch.empty(2**50, dtype=torch.uint8, device="cuda")


def end() -> None:
    """The process ends without an answer."""
    os._exit(3)
