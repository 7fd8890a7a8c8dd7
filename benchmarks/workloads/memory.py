"""The memory of the device that a program runs on: what the allocator in use says of it, and a limit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch


class Memory:
    """Of ``"cuda"``, under any allocator; of ``"cpu"``, where only torch_vmm tells anything and keeps a limit."""

    def __init__(self, kind: str, allocator: str) -> None:
        self.kind = kind
        self._tells_calls = allocator != "cudaMallocAsync"
        self._host = None
        if kind == "cpu" and allocator == "torch_vmm":
            from torch_vmm import _C

            self._host = _C.device("cpu")

    def statistics(self) -> Mapping[str, int] | None:
        """``torch.cuda.memory_stats``'s keys; ``None`` where nobody counts."""
        if self.kind == "cuda":
            return torch.cuda.memory_stats()
        return None if self._host is None else self._host.statistics()

    def driver_calls(self) -> int | None:
        """So far, as the allocator counts them; ``None`` where it does not."""
        stats = self.statistics()
        if stats is None or not self._tells_calls:
            return None
        return stats["num_device_alloc"] + stats["num_device_free"]

    def start_over(self) -> None:
        """Gives back what is unused, and forgets the peaks."""
        self.synchronize()
        if self.kind == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        elif self._host is not None:
            self._host.empty_cache()
            self._host.reset_peaks()

    def synchronize(self) -> None:
        """Waits until the device is idle."""
        if self.kind == "cuda":
            torch.cuda.synchronize()

    @contextmanager
    def limited(self, limit: int) -> Iterator[None]:
        """Inside, no more than ``limit`` bytes are reserved; cudaMallocAsync counts what is allocated.

        Raises:
            RuntimeError: torch's allocator of host memory knows no limit.
        """
        if self.kind == "cuda":
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))
        elif self._host is not None:
            self._host.set_limit(limit)
        else:
            raise RuntimeError("torch's allocator of host memory knows no limit")
        try:
            yield
        finally:
            if self.kind == "cuda":
                torch.cuda.set_per_process_memory_fraction(1.0)
            elif self._host is not None:
                self._host.set_limit(None)
