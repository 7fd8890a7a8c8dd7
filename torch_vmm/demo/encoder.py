"""A large encoder that serves bursts of requests and keeps nothing in between but its weights.

It is not trained: what counts is that its weights, and so its answers, stay the
same while the memory around them changes hands.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from . import corpus
from .text import TransformerBlock
from .workload import Workload


@dataclass(frozen=True)
class Size:
    width: int
    layers: int
    heads: int
    length: int  # characters of a request
    burst: int  # requests in the largest burst
    dtype: torch.dtype


SIZES = {
    "cpu": Size(width=512, layers=4, heads=8, length=128, burst=24, dtype=torch.float32),
    "cuda": Size(width=2048, layers=16, heads=16, length=512, burst=128, dtype=torch.bfloat16),
}
_BURSTS = (1.0, 0.25, 0.5, 0.25)  # of the largest, in turn
_TOLERANCE = 0.01  # of the largest number in an answer; bfloat16 rounds to 0.004


class Encoder(nn.Module):
    """Text to vectors: int64 [batch, length] to [batch, width], the mean over places of all layers' outputs."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(corpus.VOCABULARY, size.width)
        self.blocks = nn.ModuleList(TransformerBlock(size.width, size.heads, causal=False) for _ in range(size.layers))

    def forward(self, numbers: Tensor) -> Tensor:
        outputs = [self.embed(numbers)]
        for block in self.blocks:
            outputs.append(block(outputs[-1]))
        return torch.stack(outputs).mean(dim=(0, 2))


class EncoderModel(Workload):
    """Serves bursts of requests, and the same one again and again to see that its answer stays."""

    name = "encoder"
    share = 0.3
    least_steps = 2

    def __init__(self, device: str) -> None:
        self._size = SIZES[device]
        self._text = corpus.load(1_000_000).to(device)
        with torch.device(device):
            self._net = Encoder(self._size).to(self._size.dtype).eval()
        self._probe = self._text[: self._size.length].unsqueeze(0).long()
        with torch.no_grad():
            self._answer = self._net(self._probe)
        self._served = 0
        self._bursts = 0
        self._seconds = 0.0
        self._wrong_answers = 0

    @torch.no_grad()
    def step(self, number: int) -> None:
        requests = max(1, int(self._size.burst * _BURSTS[number % len(_BURSTS)]))
        began = time.perf_counter()
        starts = torch.randint(len(self._text) - self._size.length, (requests, 1), device=self._text.device)
        numbers = self._text[starts + torch.arange(self._size.length, device=self._text.device)].long()
        float(self._net(numbers).sum())  # the answers have arrived
        self._seconds += time.perf_counter() - began
        self._served += requests
        self._bursts += 1
        answer = self._net(self._probe)
        if not torch.allclose(answer, self._answer, rtol=0, atol=_TOLERANCE * float(self._answer.abs().max())):
            self._wrong_answers += 1

    def headline(self) -> str:
        return f"{self._served} requests"

    def report(self) -> list[str]:
        parameters = sum(parameter.numel() for parameter in self._net.parameters())
        return [
            f"{parameters / 1e6:.0f} million weights, {self._served} requests in {self._bursts} bursts "
            f"({self._served / self._seconds:.0f}/s), {self._wrong_answers} changed answers"
        ]

    def complaint(self) -> str | None:
        if self._wrong_answers == 0:
            return None
        return f"its answer to one and the same request changed in {self._wrong_answers} of {self._bursts} bursts"
