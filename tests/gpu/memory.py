"""Memory of one model, of one private pool, and none that is merely idle: what many GPU tests ask for."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:  # workloads run where torch_vmm must not be imported
    import torch_vmm


def bytes_in(pool: torch_vmm.VirtualMemoryPool, size: int) -> torch.Tensor:
    with pool:
        return torch.empty(size, dtype=torch.uint8, device="cuda")


def empty(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def size_of(pool: torch.cuda.MemPool) -> int:
    """Bytes mapped in it."""
    return sum(segment["total_size"] for segment in pool.snapshot())


def pool_id_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The id of the private pool whose segment holds it."""
    address = tensor.untyped_storage().data_ptr()
    (found,) = (
        tuple(segment["segment_pool_id"])
        for segment in torch.cuda.memory_snapshot()
        if segment["address"] <= address < segment["address"] + segment["total_size"]
    )
    return found


def lies_in(tensor: torch.Tensor, segments: list[dict[str, Any]]) -> bool:
    """All of its memory."""
    first = tensor.untyped_storage().data_ptr()
    last = first + tensor.untyped_storage().nbytes() - 1
    return any(s["address"] <= first and last < s["address"] + s["total_size"] for s in segments)


def meets(tensor: torch.Tensor, segments: list[dict[str, Any]]) -> bool:
    """Any of it."""
    first = tensor.untyped_storage().data_ptr()
    last = first + tensor.untyped_storage().nbytes() - 1
    return any(s["address"] <= last and first < s["address"] + s["total_size"] for s in segments)


def settle() -> None:
    """Gives back whatever nobody holds."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def segments_of(pool_id: tuple[int, int]) -> list[dict[str, Any]]:
    return [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == tuple(pool_id)]


def places(segments: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Where memory is mapped: stretches and their sizes, however torch's segments cut them."""
    found: list[tuple[int, int]] = []
    for segment in segments:
        if found and sum(found[-1]) == segment["address"]:
            found[-1] = (found[-1][0], found[-1][1] + segment["total_size"])
        else:
            found.append((segment["address"], segment["total_size"]))
    return found
