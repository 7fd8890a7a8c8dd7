"""Who asks what of which model, and when: bursts that move from model to model, drawn once from a seed.

A trace is drawn for the highest load. Each arrival carries a mark between 0 and 1, and at a share of that load those
are played whose mark is below it: so two servers that are offered the same load see the same requests, and a higher
load is a lower one with more among it.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Arrival:
    """One request: at ``at`` seconds, a prompt of so many tokens, and so many to come."""

    at: float
    model: str
    prompt: int
    new: int
    mark: float


@dataclass(frozen=True)
class Shape:
    """How arrivals are spread. Tokens are drawn evenly between the bounds.

    Args:
        bursting: models whose bursts follow each other, with the number of requests of each's, relatively: a request
            of a larger model takes more memory.
        sparse: models that are asked now and then only, evenly over the time.
        periods: a burst in each.
        period_s: from one burst to the next.
        burst_s: how long a burst lasts.
        burst_share: of all requests to bursting models, those within bursts; the others come at any time.
        sparse_share: of all requests, those to each of ``sparse``.
    """

    bursting: tuple[tuple[str, float], ...]
    periods: int
    period_s: float
    burst_s: float
    prompts: tuple[int, int]
    new: tuple[int, int]
    burst_share: float = 0.85
    sparse: tuple[str, ...] = ()
    sparse_share: float = 0.0

    @property
    def seconds(self) -> float:
        """From the first moment to the last."""
        return self.periods * self.period_s


def drawn(shape: Shape, load: float, seed: int = 0) -> list[Arrival]:
    """The trace at ``load`` requests a second over its whole time; in order."""
    draw = random.Random(seed)
    total = load * shape.seconds
    to_bursting = total * (1 - shape.sparse_share * len(shape.sparse))
    models = [shape.bursting[period % len(shape.bursting)] for period in range(shape.periods)]
    weight = sum(share for _, share in models)
    found: list[tuple[float, str, float]] = []

    def spread(model: str, begin: float, length: float, count: int) -> None:
        """Marks are spread evenly: at each load, each burst has its part of the requests."""
        found.extend((begin + length * draw.random(), model, (k + 0.5) / count) for k in range(count))

    for period, (model, share) in enumerate(models):
        count = to_bursting * share / weight
        in_burst = round(count * shape.burst_share)
        spread(model, period * shape.period_s, shape.burst_s, in_burst)
        spread(model, 0.0, shape.seconds, round(count) - in_burst)
    for model in shape.sparse:
        spread(model, 0.0, shape.seconds, round(total * shape.sparse_share))
    return [
        Arrival(round(at, 4), model, draw.randint(*shape.prompts), draw.randint(*shape.new), round(mark, 4))
        for at, model, mark in sorted(found)
    ]


def played(trace: Sequence[Arrival], share: float) -> list[Arrival]:
    """What is played of a trace at a share of the load for which it was drawn."""
    return [arrival for arrival in trace if arrival.mark < share]


def digest(trace: Sequence[Arrival]) -> int:
    """The same for the same trace, and for no other."""
    rows = [[each.at, each.model, each.prompt, each.new, each.mark] for each in trace]
    return zlib.crc32(json.dumps(rows).encode())
