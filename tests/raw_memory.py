"""Memory at an address as a tensor, whoever has it and however long it is: for writing where one must not."""

from __future__ import annotations

import torch


def at_address(address: int, size: int, device: str) -> torch.Tensor:
    """``size`` bytes there as ``torch.uint8``. Nobody keeps them alive, and nobody looks whether they exist."""
    place = torch.device(device)
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", torch.cuda.current_device())
    storage = torch._C._construct_storage_from_data_pointer(address, place, size)
    return torch.empty(0, dtype=torch.uint8, device=place).set_(storage, 0, (size,), (1,))
