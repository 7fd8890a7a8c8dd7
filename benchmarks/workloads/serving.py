"""Serving a language model, a batch of requests at a time, with caches that grow by ``torch.cat``."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .program import Program, made_on
from .transformer import LanguageModel, LayerCache, NetSizes, growing_caches


@dataclass(frozen=True)
class ServingSizes:
    """A step is up to ``most`` requests, prompts from ``shortest`` to ``longest``, ``new`` tokens each at most."""

    net: NetSizes
    steps: int
    most: int
    shortest: int
    longest: int
    new: int


SIZES = {
    "small": ServingSizes(NetSizes(64, 2, 4, 256), steps=5, most=4, shortest=4, longest=48, new=8),
    "full": ServingSizes(NetSizes(2048, 16, 16, 32000), steps=10, most=16, shortest=64, longest=1792, new=32),
}


class Serving(Program):
    """Greedy. Its results are sums over the last logits."""

    def __init__(self, device: str, sizes: ServingSizes) -> None:
        self._device, self._sizes = device, sizes
        with made_on(device, seed=3):
            self.net = LanguageModel(sizes.net).requires_grad_(False).eval()
        draw = random.Random(3)
        self.plan = [
            (draw.randint(1, sizes.most), draw.randint(sizes.shortest, sizes.longest), draw.randint(2, sizes.new))
            for _ in range(sizes.steps)
        ]
        """For each step its batch, the prompts' length and the tokens to come."""

    def warm_up(self) -> None:
        self._generate(1, self._sizes.shortest, 2)

    def run(self) -> Iterator[Tensor]:
        for batch, prompt, new in self.plan:
            yield self._generate(batch, prompt, new)

    def _generate(self, batch: int, prompt: int, new: int) -> Tensor:
        caches: list[LayerCache] = growing_caches(self._sizes.net)
        tokens = torch.randint(0, self._sizes.net.vocabulary, (batch, prompt), device=self._device)
        with torch.no_grad():
            logits = self.net.after_last(tokens, caches)
            for _ in range(new - 1):
                logits = self.net.after_last(logits.argmax(-1, keepdim=True), caches)
            return said(logits)


def said(logits: Tensor) -> Tensor:
    """One number that depends on all of ``logits``."""
    return logits.float().logsumexp(-1).sum()
