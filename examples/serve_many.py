"""Three language models in one process, under a limit that does not hold them all: memory goes where requests are.

``python -m examples.serve_many [--device cpu]``

Each model has a pool for its weights and what it computes with, and one for its requests' caches. A burst of requests
takes what the other models leave idle; when that is not enough, a model that nobody asks goes to sleep in host memory,
and wakes for its next request. A request that finds no memory waits. `benchmarks/sharing` measures it at full size.
"""

from __future__ import annotations

import argparse
import random
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

import torch_vmm

try:
    from examples import continuous_batching as batching
except ModuleNotFoundError as error:
    if error.name != "examples":
        raise
    raise SystemExit(f"{error}: run it as python -m examples.serve_many, in the folder of the repository") from None

NAMES = ("llama", "qwen", "phi")


@dataclass
class Request:
    """A prompt for a model, how many tokens to come, and the turn at which it comes."""

    model: str
    turn: int
    prompt: Tensor
    new: int
    tokens: list[int] = field(default_factory=list)
    first_ms: float = 0.0  # from its turn to its first token


class Served:
    """A model in its pools: who waits for it, and who runs."""

    def __init__(self, name: str, scale: batching.Scale, shared: torch_vmm.SharedMemoryPool, device: str) -> None:
        self.name, self.naps, self.used = name, 0, 0
        self.waiting, self.running = deque[Request](), list[Request]()
        self.pool, self.cache_pool = shared.register_model(name), shared.register_model(f"{name}, caches")
        with self.pool:
            self.net = batching.made(scale, device, seed=NAMES.index(name))
            self.tokens = torch.empty(0, dtype=torch.int64, device=device)
        with self.cache_pool:
            caches = batching.caches_of("elastic", self.net, scale)
        assert isinstance(caches, batching.ElasticCaches)
        self.caches = caches
        # The longest prompt shows how much room it takes to compute: no cache may take that.
        self.admit(Request(name, 0, torch.zeros(scale.prompts[1], dtype=torch.int64, device=device), 1))
        self.leave([0])
        self.room = self.pool.max_memory_reserved()
        self.pool.floor = self.room

    def admit(self, request: Request) -> None:
        """Takes memory for all that the request will need, and reads its prompt.

        Raises:
            torch.OutOfMemoryError: there is no such memory now.
        """
        with torch.no_grad(), self.pool:
            token = self.net.admit(request.prompt, self.caches, reserved=len(request.prompt) + request.new)
            self.tokens = torch.cat([self.tokens, token])
        request.tokens.append(int(token))
        self.running.append(request)

    def step(self) -> None:
        """A token for every request; those that have all of theirs leave, and their memory is anyone's."""
        self.leave([row for row, request in enumerate(self.running) if len(request.tokens) == request.new])
        if self.running:
            with torch.no_grad(), self.pool:
                self.tokens = self.net.decode(self.tokens, self.caches)
            for request, token in zip(self.running, self.tokens.tolist(), strict=True):
                request.tokens.append(token)

    def leave(self, rows: list[int]) -> None:
        """Requests in these rows of the batch are done."""
        self.caches.leave(rows)
        staying = [row for row in range(len(self.running)) if row not in rows]
        self.running = [self.running[row] for row in staying]
        self.tokens = self.tokens[staying]
        if not staying:
            self.caches.trim()


class Server:
    """Serves the models of one SharedMemoryPool, turn by turn."""

    def __init__(self, names: Sequence[str], scale: batching.Scale, limit: int, device: str) -> None:
        # cuBLAS keeps its workspace in the pool that is open at its first product: in none that goes to sleep.
        one = torch.ones(64, 64, device=device)
        F.linear(one, one, one[0]) @ one
        self.shared, self.turn = torch_vmm.SharedMemoryPool(limit, device), 0
        server = weakref.proxy(self)  # the pool holds the function, and the models' caches hold the pool
        self.shared.on_pressure(lambda requested, pool: server.send_to_sleep())
        self.models: dict[str, Served] = {}
        for name in names:
            self.models[name] = Served(name, scale, self.shared, device)

    def send_to_sleep(self) -> bool:
        """One that nobody asks, and of those the one longest unused; whether there was any."""
        idle = [each for each in self.models.values() if not (each.waiting or each.running or each.pool.is_asleep)]
        if not idle:
            return False
        model = min(idle, key=lambda each: each.used)
        model.pool.floor = 0  # while it sleeps, others have its room
        model.pool.sleep()
        model.naps += 1
        return True

    def wake(self, model: Served) -> bool:
        """Whether its weights are back; else the others need all the memory."""
        try:
            model.pool.floor = model.room
            model.pool.wake()  # asks on_pressure where memory is short
        except (torch_vmm.OutOfMemoryError, torch_vmm.InvalidArgumentError):  # or floors have left too little of it
            model.pool.floor = 0
            return self.send_to_sleep() and self.wake(model)
        return True

    def serve(self, requests: Sequence[Request]) -> None:
        """Greedily, until every request has its tokens."""
        coming, came = deque(requests), dict[int, float]()
        self.turn = 0
        while coming or any(model.waiting or model.running for model in self.models.values()):
            while coming and coming[0].turn <= self.turn:
                came[id(coming[0])] = time.perf_counter()
                self.models[coming[0].model].waiting.append(coming.popleft())
            for model in self.models.values():
                for request in self._admitted(model):
                    request.first_ms = (time.perf_counter() - came[id(request)]) * 1e3
                if model.running:
                    model.step()
                    model.used = self.turn
            self.turn += 1

    def _admitted(self, model: Served) -> Iterator[Request]:
        while model.waiting and (not model.pool.is_asleep or self.wake(model)):
            try:
                model.admit(model.waiting[0])
            except torch.OutOfMemoryError:
                return  # it waits for its turn
            yield model.waiting.popleft()


def drawn(names: Sequence[str], scale: batching.Scale, device: str) -> list[Request]:
    """A burst of requests for each model, one after the other, and another one for the first."""
    found = []
    for burst, name in enumerate([*names, names[0]]):
        draw, generator = random.Random(burst), torch.Generator().manual_seed(burst)
        for _ in range(scale.requests):
            prompt = torch.randint(0, scale.sizes.vocabulary, (draw.randint(*scale.prompts),), generator=generator)
            found.append(Request(name, burst * 2 * scale.new[1], prompt.to(device), draw.randint(*scale.new)))
    return found


LIMITS = {"small": 52 << 20, "full": 5 << 30}


def main() -> None:
    """Serves all together, then each alone, and prints what became of the requests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    try:
        torch_vmm.enable(device)
        torch_vmm.current_pool(device)  # there is such a device
    except torch_vmm.VmmError as error:
        parser.exit(2, f"{error}\n")
    name = "small" if torch.device(device).type == "cpu" else "full"
    scale, limit = batching.SCALES[name], LIMITS[name]
    server, requests = Server(NAMES, scale, limit, device), drawn(NAMES, scale, device)
    server.serve(requests)
    print(server.shared)
    same = 0
    for model in server.models.values():
        mine = [request for request in requests if request.model == model.name]
        firsts = sorted(request.first_ms for request in mine)
        print(
            f"{model.name}: {len(mine)} requests, {sum(len(each.tokens) for each in mine)} tokens, slept {model.naps} "
            f"times; first token after {firsts[len(firsts) // 2]:.0f} ms (median), {firsts[-1]:.0f} (longest)"
        )
        alone = [request for request in drawn(NAMES, scale, device) if request.model == model.name]
        Server([model.name], scale, limit, device).serve(alone)
        same += sum(one.tokens == other.tokens for one, other in zip(mine, alone, strict=True))
    # In bfloat16 sums depend on how many requests are in a batch, and with them which of two tokens that are near wins.
    print(f"{same} of {len(requests)} requests were told what they are told when their model has all the memory")


if __name__ == "__main__":
    main()
