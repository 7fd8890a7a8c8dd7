"""Patterns written and checked by kernels: quick for large blocks, and queued like any other work."""

from __future__ import annotations

import torch

_PIECE = 8 * 2**20  # numbers handled at once: 64 MiB


def _numbers(block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All bytes of a contiguous ``block``: int64s, and the up to seven bytes that are left."""
    flat = block.detach().view(-1).view(torch.uint8)
    whole = flat.numel() // 8 * 8
    return flat[:whole].view(torch.int64), flat[whole:]


def queue_stamp(block: torch.Tensor, seed: int) -> torch.Tensor:
    """Fills ``block`` with a pattern of its own, on the current stream. Returns it."""
    numbers, rest = _numbers(block)
    for at in range(0, numbers.numel(), _PIECE):
        piece = numbers[at : at + _PIECE]
        torch.arange(at, at + piece.numel(), out=piece)
        piece.mul_(2 * seed + 3).add_(seed + 1)
    rest.fill_(seed % 255 + 1)
    return block


def queue_check(block: torch.Tensor, seed: int) -> torch.Tensor:
    """How many places of ``block`` do not hold ``queue_stamp(block, seed)``: a number on the device, without a wait."""
    numbers, rest = _numbers(block)
    wrong = (rest != seed % 255 + 1).sum()
    for at in range(0, numbers.numel(), _PIECE):
        piece = numbers[at : at + _PIECE]
        expected = torch.arange(at, at + piece.numel(), device=block.device).mul_(2 * seed + 3).add_(seed + 1)
        wrong = wrong + (piece != expected).sum()
    return wrong


def intact(block: torch.Tensor, seed: int) -> bool:
    """The same, waited for: does all of ``block`` hold the pattern?"""
    return int(queue_check(block, seed)) == 0
