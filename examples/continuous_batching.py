"""Continuous batching without a copy of a cache: requests join and leave, and each has one elastic range.

``python -m examples.continuous_batching [--device cpu]``

A request's keys and values, of all layers, lie position after position in addresses of its own, for as long a text as
there may be. Pages come as it grows and go when it leaves; nobody moves. All ranges are slots of one sparse tensor, so
that one call of attention reads all requests where they are, each of its own length, without padding.

``Concatenating`` is the usual way, for comparison: one contiguous cache a layer, made anew at each token.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import torch_vmm


@dataclass(frozen=True)
class Sizes:
    """Of the model. ``heads`` divides ``width``; a head is a multiple of 8 wide."""

    width: int
    layers: int
    heads: int
    vocabulary: int

    @property
    def head(self) -> int:
        """Width of a head."""
        return self.width // self.heads


@dataclass
class Request:
    """A prompt, how many tokens to come, and where in the batch they came."""

    prompt: Tensor  # (length,)
    new: int
    first: int = 0  # step
    rows: list[int] = field(default_factory=list)  # from then on


class Caches(Protocol):
    """Keys and values of all requests that run, in the order in which they joined."""

    lengths: list[int]
    copied_bytes: int
    """Of what was there already."""

    def join(self, length: int, reserved: int = 0) -> None:
        """A request, which begins with so many positions, and is not to want for memory for up to ``reserved``."""

    def leave(self, rows: list[int]) -> None:
        """Those requests are done."""

    def begin(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Those of the prompt, each (length, heads, size), of the request that joined last."""

    def step(self) -> None:
        """One more position for every request."""

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Takes the new position's of every request, each (requests, heads, size); what they see of all positions."""

    @property
    def held_bytes(self) -> int:
        """Of memory."""


# -- One elastic range each --------------------------------------------------------------------------------------------


class ElasticCaches:
    """A slot a request: addresses for ``longest`` positions, and memory for those that there are.

    Args:
        most: requests at once.
        longest: positions of a request, at most; they cost nothing.
        page_size: bytes, a position's at least, the grain in which memory comes: a request leaves half of one unused.
    """

    copied_bytes = 0

    def __init__(self, sizes: Sizes, most: int, longest: int, dtype: torch.dtype, device: str, page_size: int) -> None:
        self._row = 2 * sizes.layers * sizes.width * dtype.itemsize  # bytes of a position
        self._page = page_size
        whole = self._page // math.gcd(self._page, self._row)
        self._positions = -(-longest // whole) * whole  # a slot begins on a page
        shape = (most, self._positions, sizes.layers, 2, sizes.heads, sizes.head)
        self._store = torch_vmm.sparse(shape, dtype, device, zeros=False, page_size=page_size)
        # Of each layer (slots times positions, heads, size): views, most of which has no memory. Made once, since a
        # step that asks for them anew waits for Python more than for the GPU.
        rows = self._store.as_subclass(Tensor).flatten(0, 1)
        self._layers = [rows[:, layer].unbind(1) for layer in range(sizes.layers)]
        self._free = list(range(most))
        self._pages = [0] * most  # that each slot has
        self._slots: list[int] = []  # of each request
        self.lengths: list[int] = []

    def join(self, length: int, reserved: int = 0) -> None:
        """As every cache's.

        Raises:
            torch.OutOfMemoryError: there is no memory, or no slot. Nobody has joined.
        """
        if not self._free:
            raise torch.OutOfMemoryError(f"all {len(self._slots)} slots are taken")
        most = max(length, reserved)
        # The pages of who has just left serve who comes, so that the driver maps the difference only.
        slot = max(self._free, key=lambda each: self._pages[each])
        self._give_back(slot, beyond=self._needed(most))
        self._provide(slot, most)
        self._free.remove(slot)
        self._slots.append(slot)
        self.lengths.append(length)

    def leave(self, rows: list[int]) -> None:
        for row in sorted(rows, reverse=True):
            self._free.append(self._slots.pop(row))
            del self.lengths[row]

    def trim(self) -> None:
        """Gives back what those who have left held: nobody comes in their place."""
        for slot in self._free:
            self._give_back(slot)

    def begin(self, layer: int, keys: Tensor, values: Tensor) -> None:
        mine = self._store[self._slots[-1], : self.lengths[-1], layer]
        mine[:, 0] = keys
        mine[:, 1] = values

    def step(self) -> None:
        self.trim()
        for row, slot in enumerate(self._slots):
            self.lengths[row] += 1
            self._provide(slot, self.lengths[row])
        self._spans = Spans.of([slot * self._positions for slot in self._slots], self.lengths, self._store.device)
        _, first, lengths = self._spans.on_device
        self._newest = (first + lengths - 1)[:-1].long()

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        all_keys, all_values = self._layers[layer]
        all_keys.index_copy_(0, self._newest, keys)
        all_values.index_copy_(0, self._newest, values)
        return attention(query, all_keys, all_values, self._spans)

    @property
    def newest(self) -> Tensor:
        """The position that the step adds, of every request (requests,)."""
        return self._spans.on_device[2, :-1].long() - 1

    @property
    def held_bytes(self) -> int:
        return sum(self._pages) * self._page

    def _needed(self, length: int) -> int:
        return -(-length * self._row // self._page)

    def _provide(self, slot: int, length: int) -> None:
        has, needed = self._pages[slot], self._needed(length)
        if needed > has:
            # Whole pages come, and what is there stays: the first position may be there in part.
            self._store.commit((slot, slice(has * self._page // self._row, length)))
            self._pages[slot] = needed

    def _give_back(self, slot: int, beyond: int = 0) -> None:
        """All pages of a slot but the first ones; behind the work that is queued, and nobody waits for it."""
        if self._pages[slot] > beyond:
            self._store.decommit((slot, slice(-(-beyond * self._page // self._row), None)))
            self._pages[slot] = beyond


# -- The usual way -----------------------------------------------------------------------------------------------------


class Concatenating:
    """One contiguous cache a layer, request after request; whatever changes makes it anew."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype, device: str) -> None:
        empty = torch.empty(0, sizes.heads, sizes.head, dtype=dtype, device=device)
        self._layers = [(empty, empty) for _ in range(sizes.layers)]
        self.lengths: list[int] = []
        self.copied_bytes = 0

    def join(self, length: int, reserved: int = 0) -> None:
        del reserved  # it takes all of its memory anew at each token
        self.lengths.append(length)

    def leave(self, rows: list[int]) -> None:
        staying = [row for row in range(len(self.lengths)) if row not in rows]

        def kept(former: Tensor) -> Tensor:
            parts = former.split(self.lengths)
            made = torch.cat([former[:0], *(parts[row] for row in staying)])
            self.copied_bytes += made.nbytes
            return made

        self._layers = [(kept(keys), kept(values)) for keys, values in self._layers]
        self.lengths = [self.lengths[row] for row in staying]

    def begin(self, layer: int, keys: Tensor, values: Tensor) -> None:
        before = self._layers[layer]
        self._layers[layer] = (torch.cat([before[0], keys]), torch.cat([before[1], values]))
        self.copied_bytes += before[0].nbytes + before[1].nbytes

    def step(self) -> None:
        self._before = self.lengths
        self.lengths = [length + 1 for length in self.lengths]
        first = [0, *itertools.accumulate(self.lengths[:-1])]
        self._spans = Spans.of(first, self.lengths, self._layers[0][0].device)

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        made = []
        for former, new in zip(self._layers[layer], (keys, values), strict=True):
            parts = zip(former.split(self._before), new.split(1), strict=True)
            made.append(torch.cat([piece for pair in parts for piece in pair]))
            self.copied_bytes += former.nbytes
        self._layers[layer] = (made[0], made[1])
        return attention(query, made[0], made[1], self._spans)

    @property
    def held_bytes(self) -> int:
        return sum(keys.nbytes + values.nbytes for keys, values in self._layers)


# -- The model ---------------------------------------------------------------------------------------------------------


class Spans(NamedTuple):
    """Where each request's positions are among the rows of keys and values, for one step."""

    first: list[int]
    lengths: list[int]
    on_device: Tensor
    """int32, (3, requests + 1): row numbers 0, 1, 2 and so on; ``first``; ``lengths``. The last of these two is 0."""

    @classmethod
    def of(cls, first: list[int], lengths: list[int], device: torch.device) -> Spans:
        """In one copy to the device."""
        numbers = torch.tensor([range(len(first) + 1), [*first, 0], [*lengths, 0]], dtype=torch.int32)
        return cls(first, lengths, numbers.to(device, non_blocking=True))


def attention(query: Tensor, keys: Tensor, values: Tensor, spans: Spans) -> Tensor:
    """What one new position of every request sees of that request's positions.

    Args:
        query: (requests, heads, size).
        keys: (rows, heads, size); so are the values.
    """
    if query.is_cuda:
        # One kernel for all of them, which reads the rows in `spans` and no others.
        each, first, lengths = spans.on_device
        out: Tensor = torch.ops.aten._flash_attention_forward(
            query, keys, values, each, first, 1, max(spans.lengths), 0.0, False, False, seqused_k=lengths[:-1]
        )[0]
        return out
    seen = []
    for row, (begin, length) in enumerate(zip(spans.first, spans.lengths, strict=True)):
        own_keys, own_values = (each[begin : begin + length].transpose(0, 1) for each in (keys, values))
        seen.append(F.scaled_dot_product_attention(query[row].unsqueeze(1), own_keys, own_values).squeeze(1))
    return torch.stack(seen)


class Layer(nn.Module):
    """Attention and a feed-forward part, on (rows, width)."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.norm_1, self.norm_2 = nn.LayerNorm(sizes.width), nn.LayerNorm(sizes.width)
        self.to_qkv, self.to_out = nn.Linear(sizes.width, 3 * sizes.width), nn.Linear(sizes.width, sizes.width)
        self.up, self.down = nn.Linear(sizes.width, 4 * sizes.width), nn.Linear(4 * sizes.width, sizes.width)

    def forward(self, x: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        qkv = self.to_qkv(self.norm_1(x)).view(x.shape[0], 3, self.sizes.heads, self.sizes.head)
        x = x + self.to_out(attend(*qkv.unbind(1)).flatten(1))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return out


class Decoder(nn.Module):
    """A decoder-only language model; it has no positions, which would change nothing here."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embed = nn.Embedding(sizes.vocabulary, sizes.width)
        self.layers = nn.ModuleList([Layer(sizes) for _ in range(sizes.layers)])
        self.norm, self.head = nn.LayerNorm(sizes.width), nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def admit(self, prompt: Tensor, caches: Caches, reserved: int = 0) -> Tensor:
        """A request joins, with memory for ``reserved`` positions; its first token (1,)."""
        caches.join(len(prompt), reserved)

        def attend(number: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
            def causal(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
                caches.begin(number, keys, values)
                q, k, v = (each.transpose(0, 1).unsqueeze(0) for each in (query, keys, values))
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)

            return causal

        x = self._through(prompt, attend)
        first: Tensor = self.head(self.norm(x[-1:])).argmax(-1)
        return first

    def decode(self, tokens: Tensor, caches: Caches) -> Tensor:
        """The next token of every request (requests,)."""
        caches.step()
        x = self._through(tokens, lambda number: lambda query, k, v: caches.attend(number, query, k, v))
        token: Tensor = self.head(self.norm(x)).argmax(-1)
        return token

    def _through(self, tokens: Tensor, attend: Callable[[int], Callable[[Tensor, Tensor, Tensor], Tensor]]) -> Tensor:
        x: Tensor = self.embed(tokens)
        for number, layer in enumerate(self.layers):
            x = layer(x, attend(number))
        return x


# -- Serving -----------------------------------------------------------------------------------------------------------


@dataclass
class Served:
    """What serving took."""

    tokens: list[list[int]]  # of each request
    seconds: float
    steps: int
    copied_bytes: int
    held_bytes: int  # at the peak
    needed_bytes: int  # by the positions that there were at that peak


@torch.no_grad()
def serve(net: Decoder, requests: list[Request], caches: Caches, most: int) -> Served:
    """Greedy: all ``requests``, ``most`` at once, one joining a step; none ends before its tokens are there."""
    sizes, device = net.sizes, net.embed.weight.device
    row_bytes = 2 * sizes.layers * sizes.width * net.embed.weight.dtype.itemsize
    waiting, running = list(reversed(requests)), list[Request]()
    tokens, said, held, needed = torch.empty(0, dtype=torch.int64, device=device), list[Tensor](), 0, 0
    _synchronize(device)
    began = time.perf_counter()
    while waiting or running:
        if waiting and len(running) < most:
            running.append(waiting.pop())
            running[-1].first = len(said)
            tokens = torch.cat([tokens, net.admit(running[-1].prompt, caches)])
        tokens = net.decode(tokens, caches)
        for row, request in enumerate(running):
            request.rows.append(row)
        said.append(tokens)
        if caches.held_bytes > held:
            held, needed = caches.held_bytes, sum(caches.lengths) * row_bytes
        done = [row for row, request in enumerate(running) if len(request.rows) == request.new]
        if done:
            running = [request for row, request in enumerate(running) if row not in done]
            caches.leave(done)
            tokens = tokens[[row for row in range(len(tokens)) if row not in done]]
    _synchronize(device)
    seconds = time.perf_counter() - began
    return Served(list(_assembled(requests, said)), seconds, len(said), caches.copied_bytes, held, needed)


def _assembled(requests: list[Request], said: list[Tensor]) -> Iterator[list[int]]:
    """Each request's tokens."""
    steps = [step.tolist() for step in said]
    for request in requests:
        yield [steps[request.first + k][row] for k, row in enumerate(request.rows)]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def drawn(net: Decoder, count: int, prompts: tuple[int, int], new: tuple[int, int], seed: int = 0) -> list[Request]:
    """So many requests, prompts and answers of lengths between these."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    device, vocabulary = net.embed.weight.device, net.sizes.vocabulary
    requests = []
    for _ in range(count):
        prompt = torch.randint(0, vocabulary, (draw.randint(*prompts),), generator=generator)
        requests.append(Request(prompt.to(device), draw.randint(*new)))
    return requests


@dataclass(frozen=True)
class Scale:
    """How large an example is. Sizes in tokens; ``page_size`` in bytes."""

    sizes: Sizes
    requests: int
    most: int
    prompts: tuple[int, int]
    new: tuple[int, int]
    page_size: int

    @property
    def longest(self) -> int:
        """Positions of a request, at most."""
        return self.prompts[1] + self.new[1]


SCALES = {
    "small": Scale(Sizes(256, 4, 4, 256), 8, 3, (100, 400), (4, 12), 2 << 20),
    "full": Scale(Sizes(2048, 12, 16, 32000), 18, 12, (2048, 8192), (32, 96), 4 << 20),
}


def made(scale: Scale, device: str, seed: int = 0) -> Decoder:
    """The model, in bfloat16 on a GPU; a CPU computes faster in float32."""
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16)
    try:
        with torch.device(device):
            return Decoder(scale.sizes).requires_grad_(False).eval()
    finally:
        torch.set_default_dtype(before)


def caches_of(kind: str, net: Decoder, scale: Scale) -> Caches:
    """``"elastic"`` ones, or ``"concatenating"``."""
    weight = net.embed.weight
    if kind == "concatenating":
        return Concatenating(scale.sizes, weight.dtype, str(weight.device))
    return ElasticCaches(
        scale.sizes, scale.most, scale.longest, weight.dtype, str(weight.device), page_size=scale.page_size
    )


def main() -> None:
    """Serves the same requests both ways, and prints what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    try:
        torch_vmm.enable(device)
        torch_vmm.current_pool(device)  # there is such a device
    except torch_vmm.VmmError as error:
        parser.exit(2, f"{error}\n")
    scale = SCALES["small" if torch.device(device).type == "cpu" else "full"]
    net = made(scale, device)
    answers = {}
    for kind in ("concatenating", "elastic"):
        requests = drawn(net, scale.requests, scale.prompts, scale.new)
        served = serve(net, requests, caches_of(kind, net, scale), scale.most)
        answers[kind] = served.tokens
        count = sum(map(len, served.tokens))
        print(
            f"{kind}: {count / served.seconds:.0f} tokens a second, {served.copied_bytes / 2**20:.0f} MiB of caches "
            f"copied, {served.held_bytes / 2**20:.0f} MiB held for {served.needed_bytes / 2**20:.0f}"
        )
    print("the same tokens" if answers["concatenating"] == answers["elastic"] else "DIFFERENT TOKENS")


if __name__ == "__main__":
    main()
