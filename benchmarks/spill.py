"""A training step that needs a tenth more memory than there is: spilled, beside one that fits.

A model whose activations decide the peak trains under three limits: one that
holds the peak, one a tenth below it with ``spill="host"``, and the same
without, which ends with an error. What is measured is a step's wall time, the
most that stood in host memory, and that the weights are equal afterwards.
"""

from __future__ import annotations

import gc
import time

import torch

from .measurement import Measurement, Row

KIND = "cuda"
ALLOCATORS = ("torch_vmm",)
RUNS = 3
NEEDS_LOOPS = False
_MIB, _GIB = 2**20, 2**30
_WARM, _STEPS = 2, 5
_SHARE = 10 / 11  # the limit, of what a step needs


def missing(allocator: str) -> str | None:
    """Why it cannot be measured here."""
    return None


class _Block(torch.nn.Module):
    """A residual block whose activations are eight times its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(
            torch.nn.LayerNorm(width),
            torch.nn.Linear(width, 4 * width),
            torch.nn.GELU(),
            torch.nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = self.inner(x)
        return x + inner


def _trained(rows: int, width: int, depth: int) -> tuple[list[float], torch.Tensor]:
    """Milliseconds of each step, and a sum over the weights."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(_Block(width) for _ in range(depth))).to("cuda", torch.bfloat16)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    batch = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
    times = []
    for _ in range(_WARM + _STEPS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        net(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e3)
    sums = torch.stack([weight.detach().double().sum() for weight in net.parameters()]).cpu()
    del net, optimizer, batch
    gc.collect()  # they know each other
    return times[_WARM:], sums


def measure(allocator: str, quick: bool) -> list[Measurement]:
    """Each limit in a SharedMemoryPool of its own."""
    import torch_vmm

    torch_vmm.enable()
    shape = (1024, 256, 4) if quick else (65536, 2048, 8)
    with torch_vmm.SharedMemoryPool("1TiB") as shared:
        model = shared.register_model("fits")
        with model:
            times, usual = _trained(*shape)
        peak = model.max_memory_reserved()
    case = f"a step of {peak / _GIB:.1f} GiB"
    rows = [Measurement(case, "that fits", _median(times), "ms")]
    limit = int(peak * _SHARE) // (2 * _MIB) * (2 * _MIB)
    with torch_vmm.SharedMemoryPool(limit) as shared:
        model = shared.register_model("spills", spill="host")
        with model:
            times, spilled = _trained(*shape)
        most = model.stats().spilled_bytes  # what was freed is still mapped
        climbed = model.reclaim_report().requests
    if not torch.equal(usual, spilled):
        raise RuntimeError("spilling changed the weights")
    rows.append(Measurement(case, "under a tenth less, spilled", _median(times), "ms"))
    rows.append(Measurement(case, "host memory for it", most / _MIB, "MiB"))
    rows.append(Measurement(case, "requests that climbed a step", climbed / (_WARM + _STEPS), ""))
    with torch_vmm.SharedMemoryPool(limit) as shared:
        try:
            with shared.register_model("fails"):
                _trained(*shape)
        except torch.OutOfMemoryError:
            rows.append(Measurement(case, "without spilling: ended by an error", 1, ""))
        else:
            rows.append(Measurement(case, "without spilling: ended by an error", 0, ""))
    return rows


def _median(times: list[float]) -> float:
    return sorted(times)[len(times) // 2]


def remarks(rows: list[Row]) -> list[str]:
    """What spilling costs."""
    found = {row["metric"]: row["value"] for row in rows}
    times = found["under a tenth less, spilled"] / found["that fits"]
    return [f"a step that spills takes {times:.2f} times one that fits"]
