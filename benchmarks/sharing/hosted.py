"""Models in pools: weights, activations and caches of each, under the limits that are compared.

Each model has two pools. In one are its weights and what it computes with; it has a floor as high as that has ever
needed, so that no cache takes the room to compute in. In the other are its caches, which grow as far as the limit
allows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

import torch_vmm

from ..workloads.program import dtype_of
from . import nets
from .caches import ReservedCaches
from .decoding import Decoding
from .nets import NetSpec
from .scales import Scale
from .server import Model, Request

_WARM_BATCH, _WARM_PROMPT = 32, 16
_WARM_STEPS = _WARM_BATCH.bit_length()


class Hosted:
    """A model that is served: greedily, each request from memory that was reserved for all of it.

    Args:
        shared: whose limit bounds it.
        keeps: the caches' memory stays when requests are done, as nobody else wants it.
    """

    def __init__(
        self, spec: NetSpec, scale: Scale, shared: torch_vmm.SharedMemoryPool, device: str, keeps: bool = False
    ) -> None:
        self.name = spec.name
        self._keeps = keeps
        self.shared = shared
        self.pool = shared.register_model(spec.name)
        self.cache_pool = shared.register_model(f"{spec.name}, caches")
        self._device, self._vocabulary = device, spec.vocabulary
        with self.pool:
            self._net = nets.made(spec, device)
            self._tokens = torch.empty(0, dtype=torch.int64, device=device)
        with self.cache_pool:
            self._caches = ReservedCaches(
                spec.cache, scale.slots, scale.longest, dtype_of(device), device, scale.page_size
            )
        self._decoding = Decoding(self._net, self._caches, device)
        self._generator = torch.Generator().manual_seed(0)

    def warm_up(self, scale: Scale) -> None:
        """Loads kernels, and keeps the room that it takes to compute the longest prompt."""
        self.pool.compact()
        self.pool.reset_peak_memory_stats()
        for count, length in enumerate([scale.shape.prompts[1], *[_WARM_PROMPT] * (_WARM_BATCH - 1)], start=1):
            try:
                self._read(torch.zeros(length, dtype=torch.int64), length + _WARM_STEPS)
            except torch.OutOfMemoryError:  # so many there will never be
                break
            if count & (count - 1) == 0:
                self.step()
            if count == 1:  # and all that it takes is loaded
                with torch.no_grad(), self.pool:
                    self._decoding.capture()
        self.leave(list(range(len(self.said()))))
        # Blocks do not always lie as well as they did now.
        self.working_bytes = self.pool.max_memory_reserved() + 2 * scale.page_size
        self.pool.floor = self.working_bytes

    # -- What the server asks --------------------------------------------------------------------------------------

    def admit(self, request: Request) -> int:
        """Reads the prompt, whose tokens are drawn here."""
        arrival = request.arrival
        prompt = torch.randint(0, self._vocabulary, (arrival.prompt,), generator=self._generator)
        return int(self._read(prompt, arrival.prompt + arrival.new))

    def step(self) -> None:
        """Queues a token of every request."""
        with torch.no_grad(), self.pool:
            self._tokens = self._decoding.step(self._tokens)

    def said(self) -> list[int]:
        """Waits for them."""
        tokens: list[int] = self._tokens.tolist()
        return tokens

    def leave(self, rows: list[int]) -> None:
        """Their slots' pages serve who comes next here, or go to the others."""
        self._caches.leave(rows)
        with self.pool:
            staying = [row for row in range(len(self._tokens)) if row not in rows]
            self._tokens = self._tokens[torch.tensor(staying, dtype=torch.int64, device=self._device)]
        if not staying and not self._keeps:
            self._caches.trim()

    # ----------------------------------------------------------------------------------------------------------------

    def _read(self, prompt: Tensor, reserved: int) -> Tensor:
        with self.cache_pool:
            self._caches.join(len(prompt), reserved)
        try:
            with torch.no_grad(), self.pool:
                on_device = prompt.to(self._device)
                positions = torch.arange(len(prompt), device=self._device)
                states = self._net.states(on_device, positions, self._writing)
                token = self._net.logits(states[-1:]).argmax(-1)
                self._tokens = torch.cat([self._tokens, token])
        except torch.OutOfMemoryError:  # no room to compute in: nobody has come
            self._caches.leave([len(self._caches.lengths) - 1])
            self._caches.trim()
            raise
        return token

    def _writing(self, layer: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        def causal(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            self._caches.begin(layer, keys, values)
            q, k, v = (each.transpose(0, 1).unsqueeze(0) for each in (query, keys, values))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)

        return causal


def in_thirds(scale: Scale, device: str) -> list[list[Hosted]]:
    """Each model has its part of the limit for itself."""
    limit = scale.limit // len(scale.resident)
    return [_together((spec,), scale, limit, device) for spec in scale.resident]


def under_one_limit(scale: Scale, device: str) -> list[list[Hosted]]:
    """All of them share it."""
    return [_together(scale.resident, scale, scale.limit, device)]


def alone(spec: NetSpec, scale: Scale, device: str) -> list[list[Hosted]]:
    """One model has all of it, and all that it needs is at hand."""
    return [_together((spec,), scale, scale.limit, device, keeps=True)]


def _together(specs: tuple[NetSpec, ...], scale: Scale, limit: int, device: str, keeps: bool = False) -> list[Hosted]:
    shared = torch_vmm.SharedMemoryPool(limit, device)
    group = []
    for spec in specs:
        group.append(Hosted(spec, scale, shared, device, keeps))
        group[-1].warm_up(scale)
    return group


def use_libraries_outside(device: str) -> None:
    """cuBLAS keeps its workspace in the pool that is open at its first product: in none that goes to sleep."""
    one = torch.ones(64, 64, device=device, dtype=dtype_of(device))
    F.linear(one, one, one[0])
    one @ one


# -- Models that sleep -------------------------------------------------------------------------------------------------


def with_sleepers(scale: Scale, device: str) -> tuple[list[list[Hosted]], Sleepers]:
    """All models share one limit, under which they do not fit: those that were made first sleep."""
    shared = torch_vmm.SharedMemoryPool(scale.limit, device)
    made: list[Hosted] = []
    for spec in (*scale.sleeping, *scale.resident):
        made.append(Hosted(spec, scale, shared, device))
        made[-1].warm_up(scale)
        if spec in scale.sleeping:
            made[-1].pool.floor = 0  # asleep it needs no room
            made[-1].pool.sleep()
    return [made], Sleepers(made)


class Sleepers:
    """Models go to sleep in host memory when others need theirs, the one longest unused first.

    One transfer at a time, beside what the others compute.
    """

    def __init__(self, models: list[Hosted]) -> None:
        self._by_name = {model.name: model for model in models}
        self._shared = models[0].shared
        self._coming: Hosted | None = None
        self._going: Hosted | None = None
        self._transfer: torch_vmm.Transfer | None = None
        self.woken = 0

    def is_there(self, model: Model) -> bool:
        self._settle()
        return model.name not in self._moving and not self._by_name[model.name].pool.is_asleep

    def call(self, model: Model, idle: list[Model]) -> bool:
        self._settle()
        hosted = self._by_name[model.name]
        if hosted is self._coming:
            return True
        if self._transfer is not None:
            return False
        lacking = hosted.working_bytes - self._room()
        leaving = self._awake(idle) if lacking > 0 else []
        enough = [each for each in leaving if each.working_bytes >= lacking]
        if lacking > 0 and not enough:
            if leaving:
                self._send(leaving[0])  # not enough, but a beginning
            return False
        try:
            if enough:  # both directions at once
                enough[0].pool.floor = 0
                hosted.pool.floor = hosted.working_bytes
                self._going = enough[0]
                self._transfer = torch_vmm.swap(out=enough[0].pool, into=hosted.pool, blocking=False)
            else:
                hosted.pool.floor = hosted.working_bytes
                self._transfer = hosted.pool.wake(blocking=False)
        except torch_vmm.OutOfMemoryError:
            self._undo(hosted)
            return False
        self._coming = hosted
        return True

    def _room(self) -> int:
        """Bytes that neither caches hold nor models that are awake need."""
        models = self._by_name.values()
        needed = sum(each.working_bytes for each in models if not each.pool.is_asleep)
        return self._shared.physical_limit - needed - sum(each.cache_pool.memory_allocated() for each in models)

    def _undo(self, hosted: Hosted) -> None:
        """It found no room after all, since what others have freed was not let go of yet: all is as it was."""
        hosted.pool.floor = 0
        if self._going is not None:
            self._going.pool.floor = self._going.working_bytes
        self._going = self._coming = None

    def make_room(self, idle: list[Model]) -> None:
        self._settle()
        awake = self._awake(idle)
        if self._transfer is None and awake:
            self._send(awake[0])

    def _send(self, hosted: Hosted) -> None:
        hosted.pool.floor = 0
        self._transfer, self._going = hosted.pool.sleep(blocking=False), hosted

    def _awake(self, idle: list[Model]) -> list[Hosted]:
        found = [self._by_name[model.name] for model in idle if model.name not in self._moving]
        return [hosted for hosted in found if not hosted.pool.is_asleep]

    @property
    def _moving(self) -> set[str]:
        return {model.name for model in (self._coming, self._going) if model is not None}

    def _settle(self) -> None:
        """Takes note of a transfer that has ended."""
        if self._transfer is None or not self._transfer.done:
            return
        transfer, self._transfer = self._transfer, None
        try:
            transfer.wait()
        except torch_vmm.OutOfMemoryError:  # as a swap may tell on its way only
            if self._coming is None:
                raise
            self._undo(self._coming)
            return
        self.woken += self._coming is not None
        self._coming = self._going = None
