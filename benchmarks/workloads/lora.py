"""LoRA: a frozen language model, and small trained matrices beside each of its large ones."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .program import Program, made_on
from .transformer import LanguageModel, NetSizes


@dataclass(frozen=True)
class LoraSizes:
    """A step is ``batch`` texts of a length from ``shortest`` to ``longest``."""

    net: NetSizes
    rank: int
    steps: int
    batch: int
    shortest: int
    longest: int


SIZES = {
    "small": LoraSizes(NetSizes(64, 2, 4, 256), rank=4, steps=5, batch=2, shortest=8, longest=64),
    "full": LoraSizes(NetSizes(4096, 20, 32, 32000), rank=16, steps=10, batch=4, shortest=64, longest=2048),
}


class Adapted(nn.Module):
    """``frozen``, and a product of two narrow matrices that are trained; at first that is 0."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.frozen(x) + self.up(self.down(x))
        return out


class Lora(Program):
    """Its results are losses."""

    is_deterministic = True

    def __init__(self, device: str, sizes: LoraSizes) -> None:
        self._device, self._sizes = device, sizes
        with made_on(device, seed=8):
            self.net = LanguageModel(sizes.net).requires_grad_(False)
            for block in self.net.blocks:
                for owner, names in ((block.attention, ("to_qkv", "to_out")), (block, ("up", "down"))):
                    for name in names:
                        setattr(owner, name, Adapted(getattr(owner, name), sizes.rank))
        self.trained = [weight for weight in self.net.parameters() if weight.requires_grad]
        self._optimizer = torch.optim.AdamW(self.trained, lr=1e-3)
        draw = random.Random(8)
        self.plan = [draw.randint(sizes.shortest, sizes.longest) for _ in range(sizes.steps)]
        """For each step the texts' length."""

    def warm_up(self) -> None:
        self._step(self._sizes.shortest)

    def run(self) -> Iterator[Tensor]:
        for length in self.plan:
            yield self._step(length)

    def _step(self, length: int) -> Tensor:
        tokens = torch.randint(0, self._sizes.net.vocabulary, (self._sizes.batch, length + 1), device=self._device)
        loss = self.net.loss(tokens)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach()
