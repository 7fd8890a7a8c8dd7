"""Tensors whose rows are a quarter of a chunk, for the tests of aliases and seals."""

from __future__ import annotations

import torch

import torch_vmm
from tests.helpers import PAGE

ROW = PAGE // 4


def rows(device: str, n: int) -> torch.Tensor:
    """``n`` of them, on chunks of their own."""
    return torch_vmm.aligned((n, ROW), torch.uint8, device)
