"""Models whose memory a pressure function may take, for the tests of on_pressure."""

from __future__ import annotations

import sys

import pytest

from tests.helpers import MIB, tensor_in
from torch_vmm import SharedMemoryPool, VirtualMemoryPool


class Evicting:
    """Two models under 64 MiB; the first one's tensors may be dropped, one by one."""

    def __init__(self, shared: SharedMemoryPool) -> None:
        self.shared = shared
        self.first, self.second = shared.register_model("first"), shared.register_model("second")
        self.kept = [tensor_in(self.first, 16 * MIB) for _ in range(4)]
        self.calls: list[tuple[int, VirtualMemoryPool]] = []

    def evict(self, requested: int, pool: VirtualMemoryPool) -> bool:
        self.calls.append((requested, pool))
        if self.kept:
            self.kept.pop()
            return True
        return False


def quiet(monkeypatch: pytest.MonkeyPatch) -> list[BaseException | None]:
    """What goes to sys.unraisablehook, which says nothing then."""
    shown: list[BaseException | None] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda told: shown.append(told.exc_value))
    return shown
