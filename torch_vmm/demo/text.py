"""A character-level transformer that learns to write Python, and then does."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from . import corpus
from .workload import LossCurve, Workload


@dataclass(frozen=True)
class Size:
    width: int
    layers: int
    heads: int
    context: int  # characters
    batch: int  # sequences in most steps
    large_batch: int  # sequences in a turn's first step
    learning_rate: float


SIZES = {
    "cpu": Size(width=128, layers=3, heads=4, context=96, batch=16, large_batch=64, learning_rate=4e-3),
    "cuda": Size(width=512, layers=8, heads=8, context=512, batch=32, large_batch=64, learning_rate=1e-3),
}
_WARM_UP_STEPS = 20
_SAMPLE = 200  # characters written before and after the training


class TransformerBlock(nn.Module):
    """Attention and a feed-forward layer, each after a norm and with a residual."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.to_qkv, self.to_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.to_qkv(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        x = x + self.to_out(seen.transpose(1, 2).reshape(batch, length, width))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return out


class Transformer(nn.Module):
    """Predicts the next character: int64 [batch, length] to logits [batch, length, vocabulary]."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(corpus.VOCABULARY, size.width)
        self.position = nn.Parameter(torch.zeros(size.context, size.width))
        self.blocks = nn.Sequential(
            *[TransformerBlock(size.width, size.heads, causal=True) for _ in range(size.layers)]
        )
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, corpus.VOCABULARY)
        nn.init.normal_(self.embed.weight, std=0.02)
        nn.init.normal_(self.position, std=0.02)

    def forward(self, numbers: Tensor) -> Tensor:
        x = self.embed(numbers) + self.position[: numbers.shape[1]]
        out: Tensor = self.head(self.norm(self.blocks(x)))
        return out


def _indented(text: str) -> list[str]:
    """Lines of ``text`` that fit a terminal of 80 columns."""
    return [f"        {line}" for whole in text.strip().splitlines() for line in textwrap.wrap(whole, 70) or [""]]


class TextModel(Workload):
    """Trains a ``Transformer`` on Python's own sources."""

    name = "writer"
    share = 0.55
    least_steps = 8

    def __init__(self, device: str, learning_rate_scale: float) -> None:
        self._size = SIZES[device]
        self._text = corpus.load().to(device)
        self._net = Transformer(self._size).to(device)
        self._rate = self._size.learning_rate * learning_rate_scale
        self._optimizer = torch.optim.AdamW(self._net.parameters(), lr=self._rate, betas=(0.9, 0.95))
        self.losses = LossCurve()
        self._wrote_before = self.write(_SAMPLE)

    def step(self, number: int) -> None:
        size = self._size
        starts = torch.randint(
            len(self._text) - size.context,
            (size.large_batch if number == 0 else size.batch, 1),
            device=self._text.device,
        )
        numbers = self._text[starts + torch.arange(size.context + 1, device=self._text.device)].long()
        logits = self._net(numbers[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), numbers[:, 1:].flatten())
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate * min(1.0, (len(self.losses) + 1) / _WARM_UP_STEPS)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)  # gradients need not rest in memory
        self.losses.add(loss.detach())

    @torch.no_grad()
    def write(self, length: int, prompt: str = "\ndef ", temperature: float = 0.6) -> str:
        """Continue ``prompt`` by ``length`` characters, sampled from the model."""
        numbers = corpus.encode(prompt)
        for _ in range(length):
            seen = torch.tensor([numbers[-self._size.context :]], device=self._text.device)
            chances = F.softmax(self._net(seen)[0, -1] / temperature, dim=-1)
            numbers.append(int(torch.multinomial(chances, 1)))
        return corpus.decode(numbers)

    def headline(self) -> str:
        return f"loss {self.losses.end:.2f}"

    def report(self) -> list[str]:
        return [
            f"loss {self.losses.start:.3f} -> {self.losses.end:.3f} in {len(self.losses)} steps",
            "    before that it wrote:",
            *_indented(self._wrote_before),
            "    now it writes:",
            *_indented(self.write(_SAMPLE)),
        ]

    def complaint(self) -> str | None:
        return self.losses.complaint(most=0.75)
