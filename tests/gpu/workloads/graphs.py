"""CUDA graphs as torch's own interface makes them: results and numbers that every allocator must give."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn

T = TypeVar("T")

POOLS = ("its own", "a handle", "another graph's", "kept")
MODES = ("global", "thread_local", "relaxed")


def chain(x: torch.Tensor, steps: int = 6) -> torch.Tensor:
    """Whole numbers out of whole numbers, each temporary dying as the next is made; three blocks live at most."""
    for step in range(steps):
        x = x * 3 + step
    return x


def numbers(mib: int, seed: int = 1) -> torch.Tensor:
    """``mib`` MiB of int64 on the GPU, different for each seed."""
    return torch.arange(mib * 2**17, dtype=torch.int64, device="cuda") * (2 * seed + 1) + seed


_streams: list[torch.cuda.Stream] = []


def other_stream() -> torch.cuda.Stream:
    """A stream that is neither the one of captures nor among the last few made here.

    torch hands out 32 streams in turn, so two objects may be one stream: ordinary work of a test on the stream that is
    being captured would become part of the graph.
    """
    of_captures = torch.cuda.graph.default_capture_stream
    if of_captures is None:
        of_captures = torch.cuda.graph.default_capture_stream = torch.cuda.Stream()
    while True:
        stream = torch.cuda.Stream()
        if stream not in (of_captures, *_streams):
            _streams.append(stream)
            del _streams[:-8]
            return stream


def captured(
    work: Callable[[], T],
    pool: tuple[int, int] | None = None,
    stream: torch.cuda.Stream | None = None,
    mode: str = "global",
    keep: bool = False,
) -> tuple[torch.cuda.CUDAGraph, T]:
    """A graph of ``work()`` and what that returned. ``work`` runs once before, so that its kernels are loaded."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=keep)
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=mode):
        result = work()
    # torch's generator writes its graph's offset, 0, on the capturing stream, and a replay's on the replaying one, with
    # nothing between: on a GPU that others use too the first replay drew what had been drawn before.
    torch.cuda.synchronize()
    return graph, result


@contextmanager
def a_living_graph() -> Iterator[torch.cuda.CUDAGraph]:
    """While any graph lives, torch's random generator keeps two small tensors; inside they are there already."""
    graph, _ = captured(lambda: torch.zeros(1, device="cuda"))
    yield graph
    graph.reset()


_COUNTED = ("allocated_bytes.all", "active_bytes.all", "requested_bytes.all", "allocation.all", "active.all")


def _counts() -> dict[str, int]:
    stats = torch.cuda.memory_stats()
    return {key: stats[f"{key}.current"] for key in _COUNTED}


def _grown(since: dict[str, int]) -> dict[str, int]:
    return {key: value - since[key] for key, value in _counts().items()}


def counted(pool: str, mode: str, on_side_stream: bool) -> dict[str, object]:
    """Captures, replays and ends a graph: what torch counted after each, and whether the results were right."""
    with a_living_graph() as other:
        x = numbers(2)
        expected, expected_later = chain(x), chain(x + 1)
        torch.cuda.synchronize()
        before = _counts()
        graph, out = captured(
            lambda: chain(x),
            pool={"a handle": torch.cuda.graph_pool_handle(), "another graph's": other.pool()}.get(pool),
            stream=other_stream() if on_side_stream else None,
            mode=mode,
            keep=pool == "kept",
        )
        result: dict[str, object] = {"captured": _grown(before)}
        graph.replay()
        right = bool(torch.equal(out, expected))
        x.add_(1)
        graph.replay()
        result["right"] = right and bool(torch.equal(out, expected_later))
        result["replayed"] = _grown(before)
        del out
        result["without output"] = _grown(before)
        graph.reset()
        result["ended"] = _grown(before)
    return result


def random_numbers(seed: int, replays: int) -> list[float]:
    """One number of each replay of a graph that draws random numbers, and one drawn after them."""
    torch.manual_seed(seed)
    graph, out = captured(lambda: torch.rand(4096, device="cuda"))
    found = []
    for _ in range(replays):
        graph.replay()
        found.append(float(out.double().sum()))
    found.append(float(torch.rand(4096, device="cuda").double().sum()))
    return found


def net(width: int = 64) -> nn.Sequential:
    """A small net, the same every time: its weights are made on the host."""
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)).cuda()


def batches(count: int, width: int = 64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(12)
    return [torch.randn(32, width, generator=generator).cuda() for _ in range(count)]


def checksums(model: nn.Module) -> list[float]:
    """A number of each parameter that shows the smallest difference."""
    return [float(parameter.detach().double().square().sum()) for parameter in model.parameters()]


def graphed_callables(graphed: bool, steps: int = 5) -> list[float]:
    """Trains two nets in a row, as they are or as graphed callables: losses, then the parameters' checksums."""
    model = nn.ModuleList([net(), net()])
    data = batches(steps)
    layers: tuple[Callable[..., torch.Tensor], ...] = (model[0], model[1])
    if graphed:
        samples = tuple((torch.randn(32, 64, device="cuda", requires_grad=inner),) for inner in (False, True))
        layers = torch.cuda.make_graphed_callables(layers, samples)  # type: ignore[assignment]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for x in data:
        optimizer.zero_grad()
        loss = (layers[1](layers[0](x)) - x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    found = losses + checksums(model)
    del model, layers, optimizer, loss
    gc.collect()  # a graphed module holds itself
    return found


def whole_step(graphed: bool, steps: int = 5) -> list[float]:
    """Trains with forward, backward and the optimizer in one graph, or without a graph. Results as above."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x = torch.zeros(32, 64, device="cuda")

    def step() -> torch.Tensor:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    side = other_stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # kernels and autograd's threads are there afterwards; with zeros only biases change
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph, loss = None, None
    if graphed:
        optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = step()
    losses = []
    for batch in batches(steps):
        x.copy_(batch)
        if graph is not None and loss is not None:
            graph.replay()
            losses.append(float(loss.detach()))
        else:
            losses.append(float(step().detach()))
    return losses + checksums(model)


def too_much(gib: int) -> dict[str, object]:
    """Asks for more than any GPU has in the middle of a capture: the error, and what a later capture gives."""
    x = numbers(1)
    graph = torch.cuda.CUDAGraph()
    told: dict[str, object] = {}
    try:
        with torch.cuda.graph(graph):
            held = x + 1
            torch.empty(gib * 2**30, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        told = {"type": type(error).__name__, "text": str(error).split(" GiB")[0]}
    del held, graph
    later, out = captured(lambda: chain(x))
    later.replay()
    return {**told, "right later": bool(torch.equal(out, chain(x)))}
