"""Keys and values, for the tests of ElasticKVCache."""

from __future__ import annotations

import torch


def states(device: str, added: int, batch: int = 2, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values; the values' heads are of another size."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(batch, 4, added, 32, generator=generator)
    values = torch.randn(batch, 4, added, 16, generator=generator)
    return keys.to(device), values.to(device)
