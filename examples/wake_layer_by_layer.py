"""A model that computes before it is awake: each layer runs as soon as its weights have come.

``python -m examples.wake_layer_by_layer [--device cpu]``

``pool.wake(blocking=False)`` returns when there is memory for the weights, and a thread fills it, from the first on. A
hook before each module waits for that module's own, so the first layers run while the last are still on the bus. A pool
that wakes takes no requests until all of it is there, so what is computed meanwhile is allocated in another one.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import torch_vmm


@dataclass(frozen=True)
class Scale:
    """Of a model and its prompts, (``batch``, ``length``) of them. A head is 64 wide."""

    width: int
    layers: int
    batch: int
    length: int
    dtype: torch.dtype


SCALES = {
    "small": Scale(width=256, layers=8, batch=2, length=64, dtype=torch.float32),
    "full": Scale(width=4096, layers=32, batch=8, length=1024, dtype=torch.bfloat16),  # 12 GiB
}


class Block(nn.Module):
    """Attention to what came before, and two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width), and the same."""
        query, key, value = self.attention(self.before(x)).unflatten(-1, (3, -1, 64)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.between(x))))  # type: ignore[no-any-return]


def made(scale: Scale, device: str) -> nn.Module:
    """A model of random weights, the first layer's allocated first: in that order they wake."""
    torch.manual_seed(0)
    torch.set_default_dtype(scale.dtype)
    try:
        with torch.device(device):
            return nn.Sequential(*(Block(scale.width) for _ in range(scale.layers))).eval()
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def each_when_it_is_there(net: nn.Module, handle: torch_vmm.Transfer) -> Iterator[None]:
    """While this is open, a module of ``net`` waits for its weights before it runs."""

    def wait(module: nn.Module, arguments: object) -> None:
        # Those of modules within too: nn.MultiheadAttention, for one, uses them without calling the module.
        for weight in [*module.parameters(), *module.buffers()]:
            handle.wait_for(weight)

    own = [each for each in net.modules() if [*each.parameters(recurse=False), *each.buffers(recurse=False)]]
    hooks = [module.register_forward_pre_hook(wait) for module in own]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class Sleeper:
    """A model and its pools: one for what sleeps, and one for what it computes."""

    def __init__(self, scale: Scale, device: str) -> None:
        self.shared = torch_vmm.SharedMemoryPool("64GiB" if device != "cpu" else "1GiB", device=device)
        self.weights, self.work = self.shared.register_model("weights"), self.shared.register_model("work")
        with self.weights:
            self.net = made(scale, device)
        with self.work:
            self.prompts = torch.randn(scale.batch, scale.length, scale.width, device=device).to(scale.dtype)

    @torch.inference_mode()
    def run(self) -> Tensor:
        """What the model makes of the prompts."""
        with self.work:
            result: Tensor = self.net(self.prompts)
        if result.is_cuda:
            torch.cuda.synchronize()
        return result

    def wake_whole(self) -> Tensor:
        """All of it wakes, and then it runs."""
        self.weights.wake()
        return self.run()

    def wake_layer_by_layer(self) -> Tensor:
        """It runs while it wakes."""
        handle = self.weights.wake(blocking=False)
        with each_when_it_is_there(self.net, handle):
            result = self.run()
        handle.wait()  # for weights that were not needed; from here on tensors can be made in it again
        return result

    def timed(self, wake: Callable[[], Tensor]) -> tuple[float, Tensor]:
        """Seconds from asleep to the first result, and the result."""
        self.weights.sleep()
        began = time.perf_counter()
        result = wake()
        return time.perf_counter() - began, result


def main() -> None:
    """Wakes a model in both ways and prints how long the first result took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    try:
        torch_vmm.enable(device)
        torch_vmm.current_pool(device)  # there is such a device
    except torch_vmm.VmmError as error:
        parser.exit(2, f"{error}\n")
    sleeper = Sleeper(SCALES["small" if torch.device(device).type == "cpu" else "full"], device)
    awake = sleeper.run()
    sleeper.timed(sleeper.wake_whole)  # the first sleep pins memory, and first calls load kernels
    whole, after_all = sleeper.timed(sleeper.wake_whole)
    early, meanwhile = sleeper.timed(sleeper.wake_layer_by_layer)
    assert torch.equal(awake, after_all)
    assert torch.equal(awake, meanwhile)
    print(
        f"{sleeper.weights.memory_allocated() / 2**30:.2f} GiB of weights; the first result after {whole * 1e3:.1f} ms "
        f"where all wakes first, after {early * 1e3:.1f} ms layer by layer; the same result"
    )


if __name__ == "__main__":
    main()
