"""What a program is: made for a device and a size, it does the same pass of steps again and again.

A program knows its own work only. Who measures it, under which allocator and in
whose pool it runs, is no business of its.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor

SCALES = ("small", "full")
"""``small`` takes well under a second a pass on one core; ``full`` is for a GPU with 80 GiB."""


class Program(ABC):
    """Weights and a plan of steps, drawn once from a seed: each pass asks for the same sizes in the same order."""

    is_deterministic: ClassVar[bool] = False
    """Whether torch must choose deterministic algorithms, so that two processes sum gradients in one order."""
    is_strict: ClassVar[bool] = True
    """Of a deterministic one: what has no deterministic algorithm is an error, not a warning.

    Flash attention's backward has one that torch takes where errors are asked for only.
    """
    tolerance: ClassVar[float] = 0.0
    """By how much, relatively, two processes' results may differ. 0: bit for bit."""

    @abstractmethod
    def warm_up(self) -> None:
        """Something small of everything: kernels are loaded and optimizers have their state. Not measured."""

    @abstractmethod
    def run(self) -> Iterator[Tensor]:
        """One pass. After each step one number on the device that depends on all that the step computed."""


def dtype_of(device: str) -> torch.dtype:
    """What weights are kept in: bfloat16 on a GPU; a CPU computes faster and exactly in float32."""
    return torch.float32 if device == "cpu" else torch.bfloat16


@contextmanager
def made_on(device: str, seed: int, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Modules made inside are on ``device``, in ``dtype`` at once: a copy in another one would double the peak."""
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or dtype_of(device))
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)
