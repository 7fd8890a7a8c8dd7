"""Memory that goes from one model to another, and two models that train in turn in pools of their own.

What torch has that is nearest to a model's pool is a ``torch.cuda.MemPool``: it
gives its memory to others when it is deleted.

``torch_vmm-unscrubbed`` is torch_vmm without zeroing what another model wrote
(``TORCH_VMM_SCRUB=0``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from . import allocators, machine
from .measurement import Measurement

KIND = "cuda"
ALLOCATORS = ("torch_vmm", allocators.UNSCRUBBED, "native")
INSTALLED = {allocators.UNSCRUBBED: "torch_vmm"}
_MIB, _GIB = 2**20, 2**30
_BLOCK = 64 * _MIB
_ROUNDS = 6


class _Models:
    """Two pools under one limit; ``turn()`` empties the one and opens the other."""

    def __init__(self, allocator: str, limit: int) -> None:
        self._ours = allocator == "torch_vmm"
        self._next = 0
        self._pool: torch.cuda.MemPool | None = None
        if self._ours:
            import torch_vmm

            shared = torch_vmm.SharedMemoryPool(physical_limit=limit)
            self._models = [shared.register_model(f"hand-over-{number}") for number in range(2)]

    def turn(self) -> AbstractContextManager[object]:
        self._next ^= 1
        if self._ours:
            return self._models[self._next]
        self._pool = None
        self._pool = torch.cuda.MemPool()
        return torch.cuda.use_mem_pool(self._pool)


def _hand_over(allocator: str, gib: int, streams: list[torch.cuda.Stream]) -> float:
    """Milliseconds until the next model has written all of what the last one left, the median of some rounds."""
    models = _Models(allocator, gib * _GIB + 256 * _MIB)
    held: list[torch.Tensor] = []
    times = []
    for number in range(_ROUNDS + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        held.clear()
        with models.turn(), torch.cuda.stream(streams[number % len(streams)]):
            held += [
                torch.empty(_BLOCK, dtype=torch.uint8, device="cuda").fill_(1) for _ in range(gib * _GIB // _BLOCK)
            ]
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e3)
    return sorted(times[1:])[_ROUNDS // 2]


def _in_turn(allocator: str, steps: int) -> float:
    """Milliseconds a step of two small language models that train in turn."""
    models: list[AbstractContextManager[object]] = [nullcontext(), nullcontext()]
    if allocator == "torch_vmm":
        import torch_vmm

        shared = torch_vmm.SharedMemoryPool(physical_limit=24 * _GIB)
        models = [shared.register_model(f"trained-{number}") for number in range(2)]
    trainers: list[Callable[[int], None]] = []
    for model in models:
        with model:
            trainers.append(_trainer())
    torch.manual_seed(0)
    lengths = torch.randint(128, 1536, (steps,)).tolist()
    began = 0.0
    for warm in (False, True):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for number, length in enumerate(lengths):
            if warm or number < 8:
                with models[number % 2]:
                    trainers[number % 2](length)
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / steps * 1e3


def _trainer() -> Callable[[int], None]:
    width, vocabulary = 1024, 16384
    layers = [nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True) for _ in range(6)]
    net = nn.Sequential(nn.Embedding(vocabulary, width), *layers, nn.Linear(width, vocabulary)).to(
        "cuda", torch.bfloat16
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)

    def step(length: int) -> None:
        numbers = torch.randint(0, vocabulary, (4, length), device="cuda")
        loss = nn.functional.cross_entropy(net(numbers).flatten(0, 1).float(), numbers.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


@machine.one_cpu()
def measure(allocator: str, quick: bool) -> list[Measurement]:
    """Wall time; each begins and ends with an idle GPU."""
    allocator = INSTALLED.get(allocator, allocator)
    gib = 1 if quick else 4
    one = [torch.cuda.current_stream()]
    case = f"{gib} GiB to another model"
    rows = [Measurement(f"{case}, same stream", "time", _hand_over(allocator, gib, one), "ms")]
    two = [torch.cuda.Stream() for _ in range(2)]  # torch makes 32 at once
    rows.append(Measurement(f"{case}, another stream", "time", _hand_over(allocator, gib, two), "ms"))
    steps = 16 if quick else 60
    rows.append(Measurement("two models train in turn", "a step", _in_turn(allocator, steps), "ms"))
    return rows
