"""The caches of a model's requests, each of which says at the beginning how long it may become."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

import torch_vmm
from examples import continuous_batching as batching

# Of each layer, of each request and one more: which of them it is, the row of its first position, its positions.
_NUMBER, _FIRST, _LENGTH = _ALL = range(3)
_KINDS = len(_ALL)


class Step:
    """One step, seen by its layers."""

    def __init__(self, keys: Tensor, values: Tensor, longest: int, numbers: Tensor) -> None:
        self._keys, self._values, self._longest = keys, values, longest
        self._numbers = numbers
        self._newest = (numbers[:, _FIRST, :-1] + numbers[:, _LENGTH, :-1] - 1).long().unbind(0)

    @property
    def newest(self) -> Tensor:
        """The position that the step adds, of every request (requests,)."""
        return self._numbers[0, _LENGTH, :-1].long() - 1

    def attending(self, layer: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """Takes the new position's of every request, each (requests, heads, size); what they see of all positions."""

        def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            self._keys.index_copy_(0, self._newest[layer], keys)
            self._values.index_copy_(0, self._newest[layer], values)
            numbers = self._numbers[layer]
            if query.is_cuda:
                spans = batching.Spans([], [self._longest], numbers)  # what the host says may not change in a graph
            else:
                spans = batching.Spans(numbers[_FIRST, :-1].tolist(), numbers[_LENGTH, :-1].tolist(), numbers)
            return batching.attention(query, self._keys, self._values, spans)

        return attend


class ReservedCaches:
    """A slot of addresses for each request, of which it takes memory for all that it may need, layer after layer.

    In a slot each layer's positions stand behind each other, keys and values side by side, so that a step reads a layer
    from one span of memory. (Were all layers of a position together, as where a request grows without having said how
    far, each layer would touch every page that the request has.)

    Args:
        most: requests at once.
        longest: positions of a request, at most; addresses cost nothing.
        page_size: bytes, the grain in which memory comes: a request leaves half of one unused.
    """

    def __init__(
        self, sizes: batching.Sizes, most: int, longest: int, dtype: torch.dtype, device: str, page_size: int
    ) -> None:
        self._sizes, self._longest = sizes, longest
        self._row = 2 * sizes.width * dtype.itemsize  # bytes of one position in one layer
        self._page = page_size
        whole = page_size // math.gcd(page_size, self._row)  # rows
        self._rows = -(-longest * sizes.layers // whole) * whole  # of a slot, which begins on a page
        shape = (most, self._rows, 2, sizes.heads, sizes.head)
        self._store = torch_vmm.sparse(shape, dtype, device, zeros=False, page_size=page_size)
        # (slots times rows, heads, size), most of it without memory. Made once: a step that asks for views anew waits
        # for Python more than for the GPU.
        self._keys, self._values = self._store.as_subclass(Tensor).flatten(0, 1).unbind(1)
        self._free = list(range(most))
        self._pages = [0] * most  # that each slot has
        self._slots: list[int] = []  # of each request
        self._reserved: list[int] = []  # positions of each request
        self.lengths: list[int] = []

    def join(self, length: int, reserved: int) -> None:
        """A request, of so many positions now and ``reserved`` at most.

        Raises:
            torch.OutOfMemoryError: there is no memory, or no slot. Nobody has joined.
        """
        if not self._free:
            raise torch.OutOfMemoryError(f"all {len(self._slots)} slots are taken")
        needed = -(-reserved * self._sizes.layers * self._row // self._page)
        # The pages of who has just left serve who comes, so that the driver maps the difference only.
        slot = max(self._free, key=lambda each: self._pages[each])
        self._give_back(slot, beyond=needed)
        if needed > self._pages[slot]:
            has = self._pages[slot]
            self._store.commit((slot, slice(has * self._page // self._row, needed * self._page // self._row)))
            self._pages[slot] = needed
        self._free.remove(slot)
        self._slots.append(slot)
        self._reserved.append(reserved)
        self.lengths.append(length)

    def leave(self, rows: list[int]) -> None:
        """Those requests are done."""
        for row in sorted(rows, reverse=True):
            self._free.append(self._slots.pop(row))
            del self.lengths[row], self._reserved[row]

    def trim(self) -> None:
        """Gives back what those who have left held: nobody comes in their place."""
        for slot in self._free:
            self._give_back(slot)

    def begin(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Those of the prompt, each (length, heads, size), of the request that joined last."""
        first = self._slots[-1] * self._rows + layer * self._reserved[-1]
        rows = slice(first, first + self.lengths[-1])
        self._keys[rows] = keys
        self._values[rows] = values

    def step(self, padded_to: int = 0) -> Tensor:
        """One more position for every request: what :meth:`at` wants to know of it. Copies of the last request stand
        behind them up to ``padded_to``: what they write is what it writes."""
        self.trim()
        self.lengths = [length + 1 for length in self.lengths]
        assert all(length <= most for length, most in zip(self.lengths, self._reserved, strict=True))
        lacking = max(0, padded_to - len(self.lengths))
        slots, reserved, lengths = (
            each + each[-1:] * lacking for each in ([*self._slots], [*self._reserved], [*self.lengths])
        )
        numbers = torch.zeros(self._sizes.layers, _KINDS, len(lengths) + 1, dtype=torch.int32)
        first = torch.tensor(slots) * self._rows
        numbers[:, _FIRST, :-1] = first + torch.arange(self._sizes.layers).unsqueeze(1) * torch.tensor(reserved)
        numbers[:, _LENGTH, :-1] = torch.tensor(lengths)
        numbers[:, _NUMBER] = torch.arange(len(lengths) + 1)
        return numbers

    def numbers_for(self, requests: int) -> Tensor:
        """Room on the device for what :meth:`step` tells of so many."""
        shape = (self._sizes.layers, _KINDS, requests + 1)
        return torch.zeros(shape, dtype=torch.int32, device=self._store.device)

    def at(self, numbers: Tensor) -> Step:
        """A step of which :meth:`step` told these numbers. On the device they may be others when it is replayed."""
        return Step(self._keys, self._values, self._longest, numbers.to(self._store.device, non_blocking=True))

    def _give_back(self, slot: int, beyond: int = 0) -> None:
        """All pages of a slot but the first ones; behind the work that is queued, and nobody waits for it."""
        if self._pages[slot] > beyond:
            self._store.decommit((slot, slice(-(-beyond * self._page // self._row), None)))
            self._pages[slot] = beyond
