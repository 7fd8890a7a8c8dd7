"""More models than fit, under one limit: who was not used for longest sleeps, and a use wakes it.

``python -m examples.least_recently_used [--device cpu]``

Nobody plans who is awake. A model that is used asks for its memory, be it to wake or for a tensor. Where there is none
left, ``on_pressure`` puts one idle model to sleep, and is called again while that does not do.
"""

from __future__ import annotations

import argparse
import itertools
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import torch_vmm

NAMES = ("ash", "birch", "cedar", "elm", "fir")


@dataclass
class Model:
    """A network and its pool."""

    pool: torch_vmm.VirtualMemoryPool
    in_use: threading.Lock = field(default_factory=threading.Lock)
    net: nn.Module = field(default_factory=nn.Identity)
    last_used: int = 0
    uses: int = 0
    wakes: int = 0
    sleeps: int = 0


class Models:
    """As many as one likes, each of which fits alone. Any thread may run any of them."""

    def __init__(self, physical_limit: int, device: str) -> None:
        self.shared = torch_vmm.SharedMemoryPool(physical_limit, device=device)
        self.shared.on_pressure(self._make_room)
        self.models: dict[str, Model] = {}
        self._clock = itertools.count(1)

    def add(self, name: str, make: Callable[[], nn.Module]) -> None:
        """A further model. Others may go to sleep for its weights."""
        model = Model(self.shared.register_model(name), last_used=next(self._clock))
        with model.in_use, model.pool:
            self.models[name] = model
            model.net = make()

    def run(self, name: str, x: Tensor) -> Tensor:
        """What a model makes of ``x``, which is nobody's.

        Raises:
            torch.OutOfMemoryError: it does not fit beside those that other threads use at this moment.
        """
        model = self.models[name]
        with model.in_use:
            model.last_used = next(self._clock)
            model.uses += 1
            if model.pool.is_asleep:
                model.pool.wake()
                model.wakes += 1
            with model.pool, torch.inference_mode():
                y: Tensor = model.net(x)
            return y.clone()  # outside of the model: what is in it sleeps with it

    def _make_room(self, requested: int, asker: torch_vmm.VirtualMemoryPool) -> bool:
        """Puts one model to sleep. Called by whoever asks, so the lock of a model in use is not waited for."""
        for model in sorted(self.models.values(), key=lambda each: each.last_used):
            if not model.in_use.acquire(blocking=False):
                continue
            try:
                if not model.pool.is_asleep:
                    model.pool.sleep()
                    model.sleeps += 1
                    return True
            finally:
                model.in_use.release()
        return False


def network(seed: int, width: int, device: str) -> nn.Module:
    """Four square layers."""
    torch.manual_seed(seed)
    layers = [nn.Linear(width, width, device=device) for _ in range(4)]
    return nn.Sequential(*itertools.chain.from_iterable((layer, nn.ReLU()) for layer in layers))


def filled(width: int, device: str) -> Models:
    """Five models, of which three are awake at most."""
    models = Models(physical_limit=14 * width * width * 4, device=device)
    for seed, name in enumerate(NAMES):
        models.add(name, lambda seed=seed: network(seed, width, device))  # type: ignore[misc]
    return models


def requests(count: int) -> list[str]:
    """Who is asked for, one after the other: some often, some rarely."""
    return random.Random(0).choices(NAMES, weights=(8, 4, 2, 1, 1), k=count)


def main() -> None:
    """Serves requests, and prints who was awake at each, and how often each came and went."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    try:
        torch_vmm.enable(device)
        torch_vmm.current_pool(device)  # there is such a device
    except torch_vmm.VmmError as error:
        parser.exit(2, f"{error}\n")
    width = 1024 if torch.device(device).type == "cpu" else 8192
    models = filled(width, device)
    x = torch.randn(16, width, device=device)
    print("request  " + "".join(f"{name:<8}" for name in NAMES) + "held")
    for number, used in enumerate(requests(24)):
        models.run(used, x)
        states = ["used" if name == used else "." if models.models[name].pool.is_asleep else "awake" for name in NAMES]
        held = models.shared.global_stats().physical_usage >> 20
        print(f"{number:>7}  " + "".join(f"{state:<8}" for state in states) + f"{held} MiB")
    print(f"\nmodel    uses  wakes  sleeps   (limit {models.shared.physical_limit >> 20} MiB)")
    for name, model in models.models.items():
        print(f"{name:<8}{model.uses:>5}{model.wakes:>7}{model.sleeps:>8}")


if __name__ == "__main__":
    main()
