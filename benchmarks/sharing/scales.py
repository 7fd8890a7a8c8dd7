"""How large what is served is: the models, the trace, the goal and the loads."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .nets import NetSpec
from .trace import Shape

_GIB, _MIB = 2**30, 2**20


@dataclass(frozen=True)
class Scale:
    """What a run is made of.

    Args:
        resident: models whose weights are there all the time.
        sleeping: those that do not fit beside them.
        limit: bytes that all models share.
        shape: the trace of the resident models.
        goal_s: the latency that is held: the 99th percentile of the time to the first token.
        sleeping_goal_s: the same where models sleep: one that wakes in the place of another takes a second.
        load: requests a second, from which the search for the highest load begins with thirds; with elastic pools it
            begins at twice that.
        most_load: for which the trace is drawn.
        searched: traces that are played at most to find a highest load.
        slots: requests of a model at once, at most.
        page_size: the grain of the caches. A page costs some 50 us to map, whatever its size, and the first token waits
            for it; of each request half a one is wasted.
    """

    resident: tuple[NetSpec, ...]
    sleeping: tuple[NetSpec, ...]
    limit: int
    shape: Shape
    goal_s: float
    sleeping_goal_s: float
    load: float
    most_load: float
    searched: int
    slots: int
    page_size: int

    @property
    def longest(self) -> int:
        """Positions of a request, at most."""
        return self.shape.prompts[1] + self.shape.new[1]

    @property
    def with_sleepers(self) -> Shape:
        """The trace in which the sleeping models are asked as well, now and then."""
        return replace(self.shape, sparse=tuple(each.name for each in self.sleeping), sparse_share=0.1)


# Weights take a third of 80 GiB, and contexts are long, so that what bounds the load is the caches. A burst is over,
# and its requests are answered, before the next one begins with another model: the case for sharing. The models' shares
# of the requests are such that a burst of each asks for about as much memory.
_FULL = Scale(
    resident=(
        NetSpec("llama-3b", "llama", 3072, 8192, 26, 24, 32000),
        NetSpec("llama-7b", "llama", 4096, 11008, 32, 32, 32000),
        NetSpec("qwen-3b", "qwen2", 2560, 6912, 32, 20, 151936),
    ),
    sleeping=(
        NetSpec("llama-13b", "llama", 5120, 13824, 40, 40, 32000),
        NetSpec("qwen-14b", "qwen2", 5120, 13696, 40, 40, 151936),
    ),
    limit=77 * _GIB,
    shape=Shape(
        (("llama-3b", 1.15), ("llama-7b", 0.7), ("qwen-3b", 1.15)),
        periods=3,
        period_s=6.0,
        burst_s=2.0,
        prompts=(2048, 4096),
        new=(64, 128),
    ),
    goal_s=1.0,
    sleeping_goal_s=3.0,
    load=1.7,
    most_load=40.0,
    searched=4,
    slots=128,
    page_size=32 * _MIB,
)
# For host memory, where a page (2 MiB) holds more than a request needs.
_SMALL = Scale(
    resident=(
        NetSpec("llama-3b", "llama", 64, 172, 2, 4, 256),
        NetSpec("llama-7b", "llama", 96, 256, 3, 4, 256),
        NetSpec("qwen-3b", "qwen2", 64, 172, 2, 4, 512),
    ),
    sleeping=(
        NetSpec("llama-13b", "llama", 512, 1376, 4, 8, 256),
        NetSpec("qwen-14b", "qwen2", 512, 1376, 4, 8, 512),
    ),
    limit=72 * _MIB,
    shape=Shape(
        (("llama-3b", 1.0), ("llama-7b", 1.0), ("qwen-3b", 1.0)),
        periods=3,
        period_s=0.5,
        burst_s=0.2,
        prompts=(16, 48),
        new=(16, 32),
    ),
    goal_s=0.5,
    sleeping_goal_s=1.0,
    load=50.0,
    most_load=800.0,
    searched=4,
    slots=32,
    page_size=2 * _MIB,
)


def scale_of(name: str, free_bytes: int) -> Scale:
    """``"full"`` for a GPU with that much free: a smaller one than 80 GiB gets the same models with fewer layers, a
    larger one the same limit; or ``"small"``."""
    if name == "small":
        return _SMALL
    limit = min(_FULL.limit, free_bytes - 2 * _GIB)  # the rest is cuBLAS's, and what torch makes outside the models
    share = limit / _FULL.limit
    return replace(
        _FULL,
        resident=tuple(each.scaled(share) for each in _FULL.resident),
        sleeping=tuple(each.scaled(share) for each in _FULL.sleeping),
        limit=limit,
    )
