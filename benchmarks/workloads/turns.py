"""Generating and training in turns, with the same weights: what reinforcement learning does with a language model."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from .program import Program, made_on
from .transformer import LanguageModel, NetSizes, growing_caches


@dataclass(frozen=True)
class TurnsSizes:
    """A step generates for ``batch`` prompts and trains on ``parts`` equal parts of what was said."""

    net: NetSizes
    steps: int
    batch: int
    parts: int
    shortest: int
    longest: int
    new: int


SIZES = {
    "small": TurnsSizes(NetSizes(64, 2, 4, 256), steps=3, batch=4, parts=2, shortest=4, longest=32, new=8),
    "full": TurnsSizes(NetSizes(1536, 12, 12, 32000), steps=10, batch=16, parts=2, shortest=64, longest=768, new=96),
}


class Turns(Program):
    """Rewards even tokens. Its results are losses."""

    is_deterministic = True

    def __init__(self, device: str, sizes: TurnsSizes) -> None:
        self._device, self._sizes = device, sizes
        with made_on(device, seed=7):
            self.net = LanguageModel(sizes.net)
        self._optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-4)
        draw = random.Random(7)
        self.plan = [
            (draw.randint(sizes.shortest, sizes.longest), draw.randint(2, sizes.new)) for _ in range(sizes.steps)
        ]
        """For each step the prompts' length and the tokens to come."""

    def warm_up(self) -> None:
        self._step(self._sizes.shortest, 2)

    def run(self) -> Iterator[Tensor]:
        for prompt, new in self.plan:
            yield self._step(prompt, new)

    def _step(self, prompt: int, new: int) -> Tensor:
        text = self._generate(prompt, new)
        return self._learn(text, prompt)

    @torch.no_grad()
    def _generate(self, prompt: int, new: int) -> Tensor:
        """Prompts and answers (batch, prompt + new)."""
        caches = growing_caches(self._sizes.net)
        tokens = torch.randint(0, self._sizes.net.vocabulary, (self._sizes.batch, prompt), device=self._device)
        text = [tokens]
        for _ in range(new):
            logits = self.net.after_last(text[-1], caches).float()
            # The largest of logits with Gumbel noise is a sample; torch.multinomial sums in no particular order.
            text.append((logits - torch.empty_like(logits).exponential_().log()).argmax(-1, keepdim=True))
        return torch.cat(text, dim=1)

    def _learn(self, text: Tensor, prompt: int) -> Tensor:
        rewards = (text[:, prompt:] % 2 == 0).float()
        rewards -= rewards.mean()
        losses = []
        for part, reward in zip(text.chunk(self._sizes.parts), rewards.chunk(self._sizes.parts), strict=True):
            logits = self.net(part[:, :-1])[:, prompt - 1 :]
            surprise = F.cross_entropy(logits.flatten(0, 1).float(), part[:, prompt:].flatten(), reduction="none")
            loss = (surprise * reward.flatten()).mean() / self._sizes.parts
            loss.backward()
            losses.append(loss.detach())
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).sum()
