"""Serving with caches that are made once, and a CUDA graph of the decoding step for each of several batch sizes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .program import Program, dtype_of, made_on
from .serving import said
from .transformer import LanguageModel, LayerCache, NetSizes, StaticCache


@dataclass(frozen=True)
class StaticSizes:
    """A step is one batch: requests up to the largest of ``batches``, in the next larger of these, prompt and answer
    in ``length`` tokens."""

    net: NetSizes
    steps: int
    batches: tuple[int, ...]
    shortest: int
    length: int
    new: int


SIZES = {
    "small": StaticSizes(NetSizes(64, 2, 4, 256), steps=6, batches=(1, 2, 4), shortest=4, length=64, new=8),
    "full": StaticSizes(
        NetSizes(2048, 16, 16, 32000), steps=24, batches=(1, 2, 4, 8, 16), shortest=64, length=1536, new=64
    ),
}


class Decoding:
    """Caches, and one decoding step over them, for one batch size. On a GPU the step is a graph's replay."""

    def __init__(self, net: LanguageModel, batch: int, length: int, device: str, graphs: GraphPool | None) -> None:
        self._net = net
        self.tokens = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self._places = torch.arange(length, device=device)
        self.caches: list[LayerCache] = [
            StaticCache(batch, length, net.sizes, self.position, dtype_of(device)) for _ in range(net.sizes.layers)
        ]
        self.logits = torch.zeros(batch, net.sizes.vocabulary, dtype=dtype_of(device), device=device)
        self._graph = None if graphs is None else graphs.captured(self._compute)

    def step(self) -> None:
        """From ``tokens``, which belong at ``position``, to ``logits``; both are then the next token's."""
        if self._graph is None:
            self._compute()
        else:
            self._graph.replay()

    def _compute(self) -> None:
        seen = (self._places <= self.position)[None, None, None]
        self.logits.copy_(self._net.after_last(self.tokens, self.caches, seen))
        self.tokens.copy_(self.logits.argmax(-1, keepdim=True))
        self.position += 1


class GraphPool:
    """Graphs that share one pool of memory, as they never run at once."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._side = torch.cuda.Stream()

    def captured(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """``work``, done once and captured."""
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):  # libraries want to be called once before
            work()
        torch.cuda.current_stream().wait_stream(self._side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            work()
        return graph


class StaticServing(Program):
    """Greedy. Its results are sums over the last logits."""

    def __init__(self, device: str, sizes: StaticSizes) -> None:
        self._device, self._sizes = device, sizes
        with made_on(device, seed=4):
            self.net = LanguageModel(sizes.net).requires_grad_(False).eval()
        self._graphs = GraphPool() if device == "cuda" else None
        self.decodings: dict[int, Decoding] = {}
        draw = random.Random(4)
        self.plan = [self._drawn(draw) for _ in range(sizes.steps)]
        """For each step its requests, the prompts' length and the tokens to come."""

    def _drawn(self, draw: random.Random) -> tuple[int, int, int]:
        new = draw.randint(2, self._sizes.new)
        return (
            draw.randint(1, max(self._sizes.batches)),
            draw.randint(self._sizes.shortest, self._sizes.length - new),
            new,
        )

    def warm_up(self) -> None:
        self._generate(1, self._sizes.shortest, 2)

    def run(self) -> Iterator[Tensor]:
        for requests, prompt, new in self.plan:
            yield self._generate(requests, prompt, new)

    def _decoding(self, requests: int) -> Decoding:
        """The one for so many requests, made when it is first needed."""
        batch = min(each for each in self._sizes.batches if each >= requests)
        if batch not in self.decodings:
            self.decodings[batch] = Decoding(self.net, batch, self._sizes.length, self._device, self._graphs)
        return self.decodings[batch]

    def _generate(self, requests: int, prompt: int, new: int) -> Tensor:
        with torch.no_grad():
            decoding = self._decoding(requests)
            tokens = torch.randint(0, self._sizes.net.vocabulary, (requests, prompt), device=self._device)
            first = self.net.after_last(tokens, decoding.caches)
            decoding.tokens.zero_()
            decoding.tokens[:requests].copy_(first.argmax(-1, keepdim=True))
            decoding.position.fill_(prompt)
            for _ in range(new - 1):
                decoding.step()
            return said(decoding.logits[:requests])
