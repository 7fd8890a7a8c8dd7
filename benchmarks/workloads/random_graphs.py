"""Message passing over batches of graphs whose nodes and edges are as many as chance has it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .program import Program, made_on


@dataclass(frozen=True)
class GraphSizes:
    """A step is ``fewest`` to ``most`` nodes, with up to ``degree`` times as many edges."""

    width: int
    layers: int
    steps: int
    fewest: int
    most: int
    degree: int


SIZES = {
    "small": GraphSizes(width=16, layers=2, steps=5, fewest=50, most=400, degree=6),
    "full": GraphSizes(width=128, layers=4, steps=20, fewest=10_000, most=200_000, degree=10),
}


class Passing(nn.Module):
    """Each edge says something of both its ends; each node takes the sum of what it is told."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, width))
        self.update = nn.Sequential(nn.LayerNorm(2 * width), nn.Linear(2 * width, width), nn.ReLU())

    def forward(self, nodes: Tensor, sources: Tensor, targets: Tensor) -> Tensor:
        ends = torch.cat([nodes.index_select(0, sources), nodes.index_select(0, targets)], dim=1)
        told = torch.zeros_like(nodes).index_add_(0, targets, self.message(ends))
        out: Tensor = nodes + self.update(torch.cat([nodes, told], dim=1))
        return out


class RandomGraphs(Program):
    """In float32. Its results are losses."""

    is_deterministic = True

    def __init__(self, device: str, sizes: GraphSizes) -> None:
        self._device, self._sizes = device, sizes
        with made_on(device, seed=9, dtype=torch.float32):
            self.layers = nn.ModuleList([Passing(sizes.width) for _ in range(sizes.layers)])
            self.head = nn.Linear(sizes.width, 1)
        weights = [*self.layers.parameters(), *self.head.parameters()]
        self._optimizer = torch.optim.AdamW(weights, lr=1e-3)
        draw = random.Random(9)
        self.plan = []
        """For each step its nodes and edges."""
        for _ in range(sizes.steps):
            nodes = draw.randint(sizes.fewest, sizes.most)
            self.plan.append((nodes, draw.randint(nodes, sizes.degree * nodes)))

    def warm_up(self) -> None:
        self._step(self._sizes.fewest, 2 * self._sizes.fewest)

    def run(self) -> Iterator[Tensor]:
        for nodes, edges in self.plan:
            yield self._step(nodes, edges)

    def _step(self, nodes: int, edges: int) -> Tensor:
        features = torch.randn(nodes, self._sizes.width, device=self._device)
        sources, targets = torch.randint(0, nodes, (2, edges), device=self._device)
        # What is to be learned: how many edges end at a node.
        wanted = torch.zeros(nodes, device=self._device).index_add_(0, targets, features.new_ones(edges))
        for layer in self.layers:
            features = layer(features, sources, targets)
        loss = F.mse_loss(self.head(features).squeeze(1), wanted)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach()
