"""Continuous batching: requests join a running batch and leave it, whose caches grow by a token each step."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from .program import Program, made_on
from .serving import said
from .transformer import GrowingCache, LanguageModel, LayerCache, NetSizes


@dataclass(frozen=True)
class ContinuousSizes:
    """``requests`` a pass, ``most`` at once, prompts from ``shortest`` to ``longest``, ``new`` tokens at most."""

    net: NetSizes
    requests: int
    most: int
    shortest: int
    longest: int
    new: int


SIZES = {
    "small": ContinuousSizes(NetSizes(64, 2, 4, 256), requests=8, most=3, shortest=4, longest=40, new=8),
    "full": ContinuousSizes(NetSizes(2048, 12, 16, 32000), requests=24, most=12, shortest=64, longest=2048, new=48),
}


@dataclass
class _Request:
    prompt: int
    new: int  # tokens to come
    length: int = 0  # so far


class _Batch:
    """What runs: a row a request, shorter ones padded on the left, ``seen`` saying which places are theirs."""

    def __init__(self, layers: int, device: str) -> None:
        self.requests: list[_Request] = []
        self.caches = [GrowingCache() for _ in range(layers)]
        self.seen = torch.zeros(0, 0, dtype=torch.bool, device=device)
        self.tokens = torch.zeros(0, 1, dtype=torch.int64, device=device)

    def join(self, request: _Request, caches: list[GrowingCache], token: Tensor) -> None:
        """Takes a request whose prompt is in ``caches``, and its first token (1, 1)."""
        request.length = request.prompt
        self.requests.append(request)
        seen = torch.ones(1, request.prompt, dtype=torch.bool, device=token.device)
        longest = max(self.seen.shape[1], request.prompt)
        self.seen = torch.cat([_padded(self.seen, longest), _padded(seen, longest)])
        self.tokens = torch.cat([self.tokens, token])
        for own, other in zip(self.caches, caches, strict=True):
            own.keys, own.values = _stacked(own.keys, other.keys, longest), _stacked(own.values, other.values, longest)

    def leave(self) -> None:
        """Lets go of the requests that are done; the rest is copied, no longer than its longest."""
        staying = [row for row, request in enumerate(self.requests) if request.new > 0]
        if len(staying) == len(self.requests):
            return
        self.requests = [self.requests[row] for row in staying]
        rows = torch.tensor(staying, dtype=torch.int64, device=self.tokens.device)
        cut = self.seen.shape[1] - max((request.length for request in self.requests), default=0)
        self.seen, self.tokens = self.seen[rows, cut:], self.tokens[rows]
        for cache in self.caches:
            assert cache.keys is not None
            assert cache.values is not None
            cache.keys, cache.values = _kept(cache.keys, rows, cut), _kept(cache.values, rows, cut)


def _padded(rows: Tensor, length: int) -> Tensor:
    return F.pad(rows, (length - rows.shape[1], 0))


def _stacked(upper: Tensor | None, lower: Tensor | None, length: int) -> Tensor:
    """(batch, heads, length, width) of each, one above the other, padded on the left."""
    parts = [F.pad(part, (0, 0, length - part.shape[2], 0)) for part in (upper, lower) if part is not None]
    return torch.cat(parts)


def _kept(cache: Tensor, rows: Tensor, cut: int) -> Tensor | None:
    return cache[:, :, cut:].index_select(0, rows) if len(rows) else None


class Continuous(Program):
    """Greedy. A step is a token of every running request; its results are sums over their logits."""

    def __init__(self, device: str, sizes: ContinuousSizes) -> None:
        self._device, self._sizes = device, sizes
        with made_on(device, seed=5):
            self.net = LanguageModel(sizes.net).requires_grad_(False).eval()
        draw = random.Random(5)
        self.plan = [
            (draw.randint(sizes.shortest, sizes.longest), draw.randint(2, sizes.new)) for _ in range(sizes.requests)
        ]
        """For each request the prompt's length and the tokens to come."""

    def warm_up(self) -> None:
        for _ in self._serve([(self._sizes.shortest, 2), (self._sizes.shortest + 1, 3)]):
            pass

    def run(self) -> Iterator[Tensor]:
        return self._serve(self.plan)

    def _serve(self, plan: list[tuple[int, int]]) -> Iterator[Tensor]:
        waiting = [_Request(prompt, new) for prompt, new in plan]
        batch = _Batch(self._sizes.net.layers, self._device)
        while waiting or batch.requests:
            # One joins a step: so they come and go all the time.
            if waiting and len(batch.requests) < self._sizes.most:
                self._admit(batch, waiting.pop(0))
            yield self._decode(batch)
            batch.leave()

    @torch.no_grad()
    def _admit(self, batch: _Batch, request: _Request) -> None:
        caches = [GrowingCache() for _ in range(self._sizes.net.layers)]
        prompt = torch.randint(0, self._sizes.net.vocabulary, (1, request.prompt), device=self._device)
        token = self.net.after_last(prompt, list[LayerCache](caches)).argmax(-1, keepdim=True)
        batch.join(request, caches, token)

    @torch.no_grad()
    def _decode(self, batch: _Batch) -> Tensor:
        batch.seen = F.pad(batch.seen, (0, 1), value=1.0)
        logits = self.net.after_last(batch.tokens, list[LayerCache](batch.caches), batch.seen[:, None, None])
        batch.tokens = logits.argmax(-1, keepdim=True)
        for request in batch.requests:
            request.new -= 1
            request.length += 1
        return said(logits)
