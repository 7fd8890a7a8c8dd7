"""Training a language model on batches of varying size and length; with checkpoints and accumulation too."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .program import Program, made_on
from .transformer import LanguageModel, NetSizes


@dataclass(frozen=True)
class TrainingSizes:
    """A step is ``accumulated`` batches, of a size out of ``batches`` and a length from ``shortest`` to ``longest``."""

    net: NetSizes
    steps: int
    batches: tuple[int, ...]
    shortest: int
    longest: int
    accumulated: int = 1
    is_checkpointed: bool = False


TRAIN = {
    "small": TrainingSizes(NetSizes(64, 2, 4, 256), steps=6, batches=(1, 2, 4), shortest=8, longest=64),
    "full": TrainingSizes(NetSizes(2048, 12, 16, 50304), steps=24, batches=(1, 2, 4, 8), shortest=64, longest=3071),
}
CHECKPOINTED = {
    "small": TrainingSizes(
        NetSizes(64, 2, 4, 256), 2, batches=(1, 2), shortest=8, longest=48, accumulated=3, is_checkpointed=True
    ),
    "full": TrainingSizes(
        NetSizes(2048, 16, 16, 50304), 4, batches=(1, 2, 4, 8), shortest=64, longest=3071, accumulated=4,
        is_checkpointed=True,
    ),
}  # fmt: skip


class Training(Program):
    """Its results are losses."""

    is_deterministic = True

    def __init__(self, device: str, sizes: TrainingSizes) -> None:
        self._device, self._sizes = device, sizes
        with made_on(device, seed=1):
            self.net = LanguageModel(sizes.net, sizes.is_checkpointed)
        self._optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-4)
        draw = random.Random(8)
        self.plan = [
            [
                (draw.choice(sizes.batches), draw.randint(sizes.shortest, sizes.longest))
                for _ in range(sizes.accumulated)
            ]
            for _ in range(sizes.steps)
        ]
        """For each step the (batch, length) of what it accumulates."""

    def warm_up(self) -> None:
        self._step([(1, self._sizes.shortest)])

    def run(self) -> Iterator[Tensor]:
        for shapes in self.plan:
            yield self._step(shapes)

    def _step(self, shapes: list[tuple[int, int]]) -> Tensor:
        losses = [self._accumulate(batch, length, len(shapes)) for batch, length in shapes]
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).sum()

    def _accumulate(self, batch: int, length: int, parts: int) -> Tensor:
        tokens = torch.randint(0, self._sizes.net.vocabulary, (batch, length + 1), device=self._device)
        loss = self.net.loss(tokens) / parts
        loss.backward()
        return loss.detach()
