"""Training a language model on batches of varying size and length: fragmentation, and what it costs in time."""

from __future__ import annotations

import random
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from . import allocators
from .measurement import Measurement

KIND = "cuda"
ALLOCATORS = allocators.GPU_ALLOCATORS
_GIB = 2**30
_WIDTH, _LAYERS, _HEADS, _VOCABULARY = 2048, 12, 16, 50304


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.to_qkv, self.to_out = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.to_qkv(self.norm_1(x)).view(batch, length, 3, _HEADS, _WIDTH // _HEADS)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.to_out(seen.transpose(1, 2).reshape(batch, length, _WIDTH))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return out


def measure(allocator: str, quick: bool) -> list[Measurement]:
    """Memory in GiB, times in s."""
    torch.manual_seed(0)
    random.seed(0)
    with torch.device("cuda"):
        embed = nn.Embedding(_VOCABULARY, _WIDTH)
        head = nn.Linear(_WIDTH, _VOCABULARY, bias=False)
        net = nn.Sequential(embed, *[_Block() for _ in range(_LAYERS)], head).bfloat16()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)

    def step(batch: int, length: int) -> None:
        numbers = torch.randint(0, _VOCABULARY, (batch, length), device="cuda")
        loss = F.cross_entropy(net(numbers).flatten(0, 1).float(), numbers.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def all_steps() -> float:
        began = time.perf_counter()
        for batch, length in shapes:
            step(batch, length)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    step(2, 256)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # what building the model left
    torch.cuda.reset_peak_memory_stats()
    steps = 15 if quick else 60
    shapes = [(random.choice([1, 2, 4, 8]), random.randrange(64, 3072)) for _ in range(steps)]
    cold, warm = all_steps(), all_steps()
    allocated, reserved = torch.cuda.max_memory_allocated() / _GIB, torch.cuda.max_memory_reserved() / _GIB
    case = f"{steps} steps"
    return [
        Measurement(case, "peak allocated", allocated, "GiB"),
        Measurement(case, "peak reserved", reserved, "GiB"),
        Measurement(case, "reserved / allocated", reserved / allocated, "ratio"),
        Measurement(case, "first time", cold, "s"),
        Measurement(case, "second time", warm, "s"),
        Measurement(case, "driver allocations", torch.cuda.memory_stats().get("num_device_alloc", 0), "calls"),
        Measurement(case, "retries", torch.cuda.memory_stats().get("num_alloc_retries", 0), "calls"),
    ]
