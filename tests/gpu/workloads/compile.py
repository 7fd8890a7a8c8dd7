"""torch.compile(mode="reduce-overhead"): whole results, and how they came about."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tests.gpu.workloads.graphs import checksums


@contextmanager
def fresh_compiler() -> Iterator[None]:
    """Nothing compiled before is known inside, and nothing of what is made inside is left.

    Compiles in this process, as a dozen kernels are not worth starting workers for, and benchmarks nothing, so
    that every process takes the same kernels. cudagraph trees check what they believe of the allocator each time.
    """
    import torch._dynamo
    from torch._inductor import config
    from torch._inductor.cudagraph_trees import reset_cudagraph_trees

    settings: dict[str, Any] = {
        "compile_threads": 1,
        "deterministic": True,
        "triton.slow_path_cudagraph_asserts": True,
        "triton.fast_path_cudagraph_asserts": True,
    }

    def forget() -> None:
        torch._dynamo.reset()
        reset_cudagraph_trees()
        torch._dynamo.utils.counters.clear()
        gc.collect()

    forget()
    try:
        with config.patch(settings):
            yield
    finally:
        forget()
        torch.cuda.synchronize()


def skips() -> int:
    """How often cudagraphs were wanted and not used."""
    return int(torch._dynamo.utils.counters["inductor"]["cudagraph_skips"])


def tree_manager() -> Any:
    """Of device 0, or None."""
    from torch._inductor.cudagraph_trees import get_manager

    return get_manager(0, create_if_none_exists=False)


def recorded() -> int:
    """Graphs in the trees."""
    manager = tree_manager()
    if manager is None or manager.roots is None:
        return 0
    return sum(1 + node.num_descendants() for nodes in manager.roots.values() for node in nodes)


def reduce_overhead(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, mode="reduce-overhead", **options)


class Attention(nn.Module):
    """One layer of a small transformer. Attention is written out, since fused backwards add in any order."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = (part.transpose(1, 2) for part in parts.unbind(2))
        scores = query @ key.transpose(-1, -2) * (width // self.heads) ** -0.5
        x = x + self.out((scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, length, width))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm2(x))))


def transformer(width: int = 64, layers: int = 2) -> nn.Sequential:
    """The same every time: its weights are made on the host."""
    torch.manual_seed(21)
    return nn.Sequential(*[Attention(width, heads=4) for _ in range(layers)], nn.LayerNorm(width)).cuda()


def train(model: nn.Module, forward: Callable[..., torch.Tensor], steps: int, width: int = 64) -> list[float]:
    """Trains ``model`` through ``forward`` to repeat its input shifted by one; the loss of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    generator = torch.Generator().manual_seed(22)
    losses = []
    for _ in range(steps):
        batch = torch.randn(8, 33, width, generator=generator).cuda()
        torch.compiler.cudagraph_mark_step_begin()
        loss = (forward(batch[:, :-1].contiguous()) - batch[:, 1:]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
    return losses


def trained_transformer(compiled: bool, steps: int = 6) -> dict[str, Any]:
    """Losses and checksums of a transformer after some steps; how many graphs were recorded, and what was skipped."""
    with fresh_compiler():
        model = transformer()
        losses = train(model, reduce_overhead(model) if compiled else model, steps)
        result = {"losses": losses, "checksums": checksums(model), "graphs": recorded(), "skips": skips()}
        del model
    return result
