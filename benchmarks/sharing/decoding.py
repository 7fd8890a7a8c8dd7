"""One more token for every request of a model."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .caches import ReservedCaches
from .nets import Net

_SIZES = (1, 2, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64)


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    tokens: Tensor
    numbers: Tensor
    said: Tensor


class Decoding:
    """Steps of a model; on a GPU by CUDA graphs: from Python a step takes 1 ms a layer, of which the GPU computes a
    fifth."""

    def __init__(self, net: Net, caches: ReservedCaches, device: str) -> None:
        self._net, self._caches = net, caches
        self._graphs: dict[int, _Graph] = {}
        self._is_graphed = device.startswith("cuda")

    def capture(self) -> None:
        """Makes a graph for each number of requests, rounded up. More than 64 take a step from Python."""
        if not self._is_graphed:
            return
        memory = torch.cuda.graph_pool_handle()
        for size in reversed(_SIZES):  # the largest first: the others fit into its memory
            numbers = self._caches.numbers_for(size)
            tokens = torch.zeros(size, dtype=torch.int64, device=numbers.device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=memory):
                said = self._step(tokens, numbers)
            self._graphs[size] = _Graph(graph, tokens, numbers, said)
        self._graphs = dict(sorted(self._graphs.items()))

    def step(self, tokens: Tensor) -> Tensor:
        """The next token of every request, which is queued; (requests,), and so are ``tokens``."""
        count = len(tokens)
        graph = next((self._graphs[size] for size in self._graphs if size >= count), None)
        if graph is None:
            return self._step(tokens, self._caches.step())
        graph.numbers.copy_(self._caches.step(len(graph.tokens)), non_blocking=True)
        graph.tokens[:count].copy_(tokens)
        graph.tokens[count:] = tokens[-1]
        graph.graph.replay()
        return graph.said[:count].clone()

    def _step(self, tokens: Tensor, numbers: Tensor) -> Tensor:
        step = self._caches.at(numbers)
        states = self._net.states(tokens, step.newest, step.attending)
        return self._net.logits(states).argmax(-1)
