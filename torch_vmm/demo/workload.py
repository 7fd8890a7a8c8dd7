"""What the demo asks of a model: steps of work, a headline, and whether it did well."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch


class Workload(ABC):
    """A model and its work. All its tensors are made in the pool it is called in."""

    name: str
    share: float  # of the demo's time
    least_steps: int  # of a turn, to learn on a machine however slow

    @abstractmethod
    def step(self, number: int) -> None:
        """Do the ``number``-th piece of work of a turn; number 0 is the one that needs most memory."""

    def finish_turn(self) -> None:
        """Do what belongs to the end of a turn."""
        return

    @abstractmethod
    def headline(self) -> str:
        """A few words on how it goes, such as ``loss 2.31``."""

    @abstractmethod
    def report(self) -> list[str]:
        """Lines for the summary."""

    @abstractmethod
    def complaint(self) -> str | None:
        """Why the outcome is not good enough, or None."""


class LossCurve:
    """Losses of a training run, first to last."""

    def __init__(self) -> None:
        self._losses: list[float] = []

    def add(self, loss: torch.Tensor) -> None:
        self._losses.append(float(loss))

    @property
    def start(self) -> float:
        """Mean of the first two steps."""
        return self._mean(self._losses[:2])

    @property
    def end(self) -> float:
        """Mean of the last eight steps."""
        return self._mean(self._losses[-8:])

    def __len__(self) -> int:
        return len(self._losses)

    def complaint(self, most: float) -> str | None:
        """None if the end is at most ``most`` times the start, else what is wrong."""
        if self.end <= most * self.start:
            return None
        wanted = f"it should have fallen below {most * self.start:.3f}"
        return f"the loss went from {self.start:.3f} to {self.end:.3f}; {wanted}"

    @staticmethod
    def _mean(losses: list[float]) -> float:
        return sum(losses) / len(losses) if losses else float("nan")
