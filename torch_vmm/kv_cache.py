"""ElasticKVCache: keys and values of a growing sequence, without a copy of what is there."""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import sys
from collections.abc import Iterator
from typing import Any, NoReturn, SupportsIndex

import torch

from torch_vmm import _C
from torch_vmm._guarded import Guarded
from torch_vmm.elastic_tensor import ElasticTensor, elastic
from torch_vmm.errors import InvalidArgumentError, NotCopyableError, StillInUseError, VmmError
from torch_vmm.pools import VirtualMemoryPool
from torch_vmm.ranges import MOST_BYTES, outside_inference
from torch_vmm.sizes import show, to_index

_MOST_TRIES = 4  # to have memory for keys and values at once; one does, but for on_pressure()
_MOST_LAYERS = 1 << 12  # far above any model's; all up to a layer_idx are made


class _Layer:
    """One layer's keys and values: elastic tensors with the sequence first, shown as [batch, heads, sequence, size]."""

    is_compileable = False
    is_croppable = True
    is_sliding = False
    # crop(0) keeps all, as in transformers whose crop() says how many to remove; else none.
    _is_cut_by_removal = False

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None
        self.is_initialized = False
        self._stores: tuple[ElasticTensor, ElasticTensor] | None = None
        self._length = 0  # positions; the stores are told when it matters (_settle)
        # All positions that there is memory for, as [batch, heads, sequence, size]: a step that fits makes two
        # views of each, and neither asks the pool nor changes the stores.
        self._whole: tuple[torch.Tensor, torch.Tensor] | None = None
        # The same, with version counters of their own: new positions are no change of those that attention has saved.
        self._places: tuple[torch.Tensor, torch.Tensor] | None = None
        self._room = 0
        # Shapes, types and devices of the states that came last, of which nothing needs to be looked at again.
        self._usual: tuple[object, ...] | None = None
        # The pool of what is there, and how many of its sleeps had begun when all of it was last seen awake.
        self._pool: VirtualMemoryPool | None = None
        self._sleeps = -1

    @property
    def keys(self) -> torch.Tensor | None:
        return self._keys

    @keys.setter
    def keys(self, keys: object) -> None:
        raise _not_assigned("keys")

    @property
    def values(self) -> torch.Tensor | None:
        return self._values

    @values.setter
    def values(self, values: object) -> None:
        raise _not_assigned("values")

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        try:
            fits = self._fits(key_states, value_states)
        except RuntimeError:  # of a nested tensor's shape
            fits = False
        if not fits:
            self._require_states(key_states, value_states)
            if self._length + key_states.shape[2] > self._room or self._whole is None:
                self._make_room(key_states, value_states)
            self._require_there()
            self._usual = _kind(key_states, value_states)
        # Here is where each microsecond counts, and a context that changes nothing costs as much as a view.
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self._write(key_states, value_states)
        return self._write(key_states, value_states)

    def _write(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Behind what is there. REQUIRES: there is memory for them; no inference mode."""
        assert self._places is not None
        before, added = self._length, keys.shape[2]
        of_keys, of_values = self._places
        try:
            of_keys.narrow(2, before, added).copy_(keys.detach() if keys.requires_grad else keys)
            of_values.narrow(2, before, added).copy_(values.detach() if values.requires_grad else values)
        except Exception:
            self._require_states(keys, values)  # says what is wrong with them, if anything is
            raise
        # Last: positions that were not written whole are none.
        self._length = before + added
        return self._show()

    def _fits(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Whether they are as those before, and there is memory for them. Others may fit, too."""
        return (
            type(keys) is torch.Tensor
            and type(values) is torch.Tensor
            and self._usual == _kind(keys, values)
            and self._length + keys.shape[2] <= self._room
            and self._pool is not None
            and self._sleeps == self._pool._sleeps
        )

    def _require_there(self) -> None:
        """Raises AsleepError where any of its memory is elsewhere."""
        if self._stores is None or self._pool is None:
            return
        sleeps = self._pool._sleeps  # first: of one that begins meanwhile nothing is known
        if sleeps == self._sleeps:
            return
        keys, values = (store._backing for store in self._stores)
        are_awake = keys.require_there(keys.held) & values.require_there(values.held)
        if are_awake:
            self._sleeps = sleeps

    def _require_awake(self) -> None:
        """Raises AsleepError where it could give nothing back."""
        for store in self._stores or ():
            store._backing.require_awake()

    def _make_room(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        added = keys.shape[2]
        stores = self._stores or (self._store(keys), self._store(values))
        before = [(store._backing.held, store.untyped_storage().nbytes()) for store in stores]
        length = self._length
        try:
            self._reserve(stores, added)
        except BaseException:
            # Of one that sleeps, say, what it took stays until crop().
            for store, (held, stored) in zip(stores, before, strict=True):
                with contextlib.suppress(VmmError):
                    if store._backing.held > held:
                        store._keep(held, stored)
            if self._length < length:  # cropped by a function of on_pressure()
                with contextlib.suppress(VmmError):
                    self._give_back()
            raise
        self._begin(stores, self._length)

    def _reserve(self, stores: tuple[ElasticTensor, ElasticTensor], added: int) -> None:
        # Both or neither: a limit may have room for the keys alone. Again, where a function of on_pressure() has
        # cropped this very cache meanwhile; a function that never lets it have both is named.
        for _ in range(_MOST_TRIES):
            for store in stores:
                store.reserve(self._length + added)
            if min(store.reserved_rows for store in stores) >= self._length + added:
                break
        else:
            raise StillInUseError(
                f"update(): whenever there was memory for {added} more positions, a function of on_pressure() took it "
                f"from this very cache; have it spare the cache that grows",
                live_bytes=sum(store._backing.held for store in stores),
                live_blocks=len(stores),
            )

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None) -> None:
        values = key_states if value_states is None else value_states
        self._begin((self._store(key_states), self._store(values)))

    def _begin(self, stores: tuple[ElasticTensor, ElasticTensor], length: int | None = None) -> None:
        """Stands on ``stores`` from now on, of which ``length`` positions count; all that they have, unless told."""
        self._stores = stores
        self._length = stores[0].shape[0] if length is None else length
        self.dtype, self.device = stores[0].dtype, stores[0].device
        if self._pool is not stores[0]._backing.pool:
            self._pool, self._sleeps = stores[0]._backing.pool, -1
        self._room = min(store.reserved_rows for store in stores)
        with outside_inference():
            keys, values = self._up_to(stores[0]), self._up_to(stores[1])
            self._whole, self._places = (keys, values), (keys.data, values.data)
            self._show()
        self._usual = None
        self.is_initialized = True

    def _up_to(self, store: ElasticTensor) -> torch.Tensor:
        with _unchanged(store):
            store.resize_(self._room)
            whole: torch.Tensor = torch.Tensor.detach(store).permute(1, 2, 0, 3)  # no twin, whose rows would stay
            store.resize_(self._length)
        return whole

    def _settle(self) -> tuple[ElasticTensor, ...]:
        """The stores, with as many rows as there are positions."""
        for store in self._stores or ():
            if store.shape[0] != self._length:
                with _unchanged(store):
                    store.resize_(self._length)
        return self._stores or ()

    def _require_states(self, keys: object, values: object) -> None:
        """Before anything is changed."""
        for name, states in (("key_states", keys), ("value_states", values)):
            if not isinstance(states, torch.Tensor):
                raise InvalidArgumentError(f"update(): {name}={show(states)}: give a tensor")
            if states.is_nested:
                raise InvalidArgumentError(f"update(): {name} is a nested tensor: give a strided one, padded")
            if states.dim() != 4:
                raise InvalidArgumentError(
                    f"update(): {name} of shape {tuple(states.shape)}: give [batch, heads, new positions, size]"
                )
            if states.layout is not torch.strided or states.is_meta:
                raise InvalidArgumentError(
                    f"update(): {name} of layout {states.layout} on {states.device}: give a strided tensor with content"
                )
        assert isinstance(keys, torch.Tensor)
        assert isinstance(values, torch.Tensor)
        for k, states in enumerate((keys, values)):
            if self._stores is None:
                continue
            store = self._stores[k]
            batch, heads, _, size = states.shape
            if (batch, heads, size) != store.shape[1:]:
                raise InvalidArgumentError(
                    f"update(): states of shape {tuple(states.shape)}, where the cache has [batch, heads, sequence, "
                    f"size] of {(*store.shape[1:3], self._length, store.shape[3])}; reset() it for another batch"
                )
            if states.dtype != store.dtype:
                raise InvalidArgumentError(
                    f"update(): states of {states.dtype}, where the cache has {store.dtype}; convert them, or reset() "
                    f"it for another dtype"
                )
            if states.device != store.device:
                raise InvalidArgumentError(
                    f"update(): states on {states.device}, where the cache is on {store.device}; move them, or reset() "
                    f"it for another device"
                )
        if keys.device != values.device:
            raise InvalidArgumentError(
                f"update(): keys on {keys.device} and values on {values.device}; give both on one device"
            )
        if keys.shape[0] != values.shape[0] or keys.shape[2] != values.shape[2]:
            raise InvalidArgumentError(
                f"update(): keys of shape {tuple(keys.shape)} and values of shape {tuple(values.shape)}, which are "
                f"[batch, heads, new positions, size]; give the same batch and positions"
            )
        before, added = self.get_seq_length(), keys.shape[2]
        if before + added > self.max_length:
            raise InvalidArgumentError(
                f"update(): {added} positions after {before} are more than max_length={self.max_length}; make the "
                f"cache with a larger one"
            )

    def _store(self, states: torch.Tensor) -> ElasticTensor:
        batch, heads, _, size = states.shape
        row = (batch, heads, size)
        most = self.max_length * max(math.prod(row), 1) * states.dtype.itemsize
        if most > MOST_BYTES:
            raise InvalidArgumentError(
                f"max_length={show(self.max_length)}: as many positions of {row} in {states.dtype} are {show(most)} "
                f"bytes, more than there are addresses for one tensor, {_C.format_bytes(MOST_BYTES)}; make the cache "
                f"with a smaller one"
            )
        return elastic((0, *row), states.dtype, states.device, (self.max_length, *row))

    def _show(self) -> tuple[torch.Tensor, torch.Tensor]:
        """REQUIRES: no inference mode."""
        assert self._whole is not None
        self._keys = keys = self._whole[0].narrow(2, 0, self._length)
        self._values = values = self._whole[1].narrow(2, 0, self._length)
        return keys, values

    def get_seq_length(self, *_: Any) -> int:
        return self._length

    def get_max_length(self) -> int:
        return -1  # it grows, which is what transformers asks

    get_max_cache_shape = get_max_length

    def get_mask_sizes(self, query: Any) -> tuple[int, int]:
        # transformers 4 gives the positions, 5 their number.
        return self.get_seq_length() + (query if isinstance(query, int) else query.shape[0]), 0

    def crop(self, max_length: int) -> None:
        most = _to_length(max_length)
        self._require_awake()
        self._cut(most)
        self._give_back()

    def _cut(self, most: int) -> None:
        """Positions beyond ``most`` (below 0: the last so many) are none."""
        if most == 0 and self._is_cut_by_removal:
            return
        length = max(self._length + most if most < 0 else min(most, self._length), 0)
        if length == self._length:
            return
        self._length = length
        for store in self._stores or ():
            torch.autograd.graph.increment_version(store)  # other positions come in their place
        with outside_inference():
            self._show()

    def _give_back(self) -> None:
        """The pages of what is none."""
        if self._stores is None:
            return
        try:
            for store in self._settle():
                store.shrink_to_fit()
        finally:  # one may have shrunk before the other could not
            self._begin(self._stores)

    def reset(self) -> None:
        self._keys = self._values = self._stores = self._whole = self._places = self._usual = self._pool = None
        self._length = self._room = 0
        self.is_initialized = False

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Any) -> None:
        self._remake(lambda states: states[:, indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        if not isinstance(repeats, int) or repeats < 1:
            raise InvalidArgumentError(f"repeats={show(repeats)}: give a whole number of at least 1")
        self._remake(lambda states: states.repeat_interleave(repeats, dim=1))

    def _remake(self, change: Any) -> None:
        """Another order of the batch, or another number of it: here rows are copied."""
        self._take(self._changed(change))

    def _changed(self, change: Any) -> list[torch.Tensor]:
        """What keys and values become, beside what they are; all that can fail."""
        self._require_there()
        made: list[torch.Tensor] = []
        with torch.no_grad():
            for store in self._settle():
                changed = change(store)
                if changed.dim() != store.dim():
                    raise InvalidArgumentError(
                        f"indices that make {tuple(changed.shape[1:])} of {tuple(store.shape[1:])}: give a tensor of "
                        f"the batch's entries with one dimension"
                    )
                made.append(changed if changed.shape == store.shape else self._another(changed))
        return made

    def _take(self, made: list[torch.Tensor]) -> None:
        if self._stores is None:
            return
        keys, values = made
        if isinstance(keys, ElasticTensor) and isinstance(values, ElasticTensor):
            self._begin((keys, values))
            return
        with torch.no_grad():
            for store, changed in zip(self._settle(), made, strict=True):
                store.copy_(changed)

    def _another(self, rows: torch.Tensor) -> ElasticTensor:
        made = elastic(rows.shape, rows.dtype, rows.device, (self.max_length, *rows.shape[1:]))
        with torch.no_grad():
            made.copy_(rows)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> _Layer:
        self._require_there()
        made = type(self)(self.max_length)
        if self._stores is not None:
            keys, values = self._settle()
            made._begin((self._another(keys), self._another(values)))
        return made

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise _not_copyable()

    def offload(self) -> None:
        raise InvalidArgumentError("an ElasticKVCache does not offload: its memory is its model's pool's")

    prefetch = offload


class ElasticKVCache(Guarded, guarded=True):
    """A cache of keys and values that grows by mapping pages instead of
    concatenating.

    In the place of ``transformers.DynamicCache``: what attention reads is equal
    to it element by element, but each step writes the new positions only, where
    a concatenation copies all that is there and for a moment holds it twice.
    Where transformers (4.56 or newer) has been imported before, it is one of
    its ``Cache`` classes too, and ``generate(past_key_values=...)`` takes it.
    With an older one it is not, and a subclass of yours never is: these are
    for use by hand.

    No gradients flow through it. Those of queries over several steps are right,
    as positions that are there do not change; a ``backward()`` after
    :meth:`crop`, :meth:`reorder_cache` or the like, which change them, is an
    error.

    The sequence is the first dimension of an :func:`elastic` tensor for each
    layer's keys and one for its values, in the pool that is open when the layer
    is first used. What :meth:`update` returns shows them as
    ``[batch, heads, sequence, size]``, with a stride. ``copy.deepcopy`` makes a
    cache of its own, in the pool that is open then.

    Args:
        max_length: positions, at most; addresses for them cost nothing.
        layers: of the model; those that there are not are made when first used.
    Raises:
        InvalidArgumentError: no whole number above 0.
    """

    layers: list[Any]
    _max_length: int

    def __init__(self, max_length: int = 1 << 20, layers: int = 0) -> None:
        # Not by __new__, whose signature inspect and help() would show.
        if type(self) is ElasticKVCache and "transformers" in sys.modules:
            self.__class__ = _of_transformers()
        most, count = to_index(max_length), to_index(layers)
        if most is None or most <= 0:
            raise InvalidArgumentError(f"max_length={show(max_length)}: give a whole number of positions above 0")
        if count is None or not 0 <= count <= _MOST_LAYERS:
            raise InvalidArgumentError(f"layers={show(layers)}: give a whole number from 0 to {_MOST_LAYERS}")
        self._max_length = most
        self._begin()
        self.layers.extend(self._make_layer() for _ in range(count))

    def _begin(self) -> None:
        self.layers = []

    def _make_layer(self) -> Any:
        return _Layer(self._max_length)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds positions to a layer; returns all of its keys and values.

        Args:
            key_states: ``[batch, heads, new positions, size]``; so are the
                values.
            value_states: their size may be another one.
            layer_idx: which layer.
        Raises:
            InvalidArgumentError: beyond ``max_length``, of another batch, dtype
                or device than what is there, no such states or layer. The
                cache is as it was.
            OutOfMemoryError: the pool has no such memory. The cache is as it
                was.
            AsleepError: its model is asleep, or the tag that it was made under.
                The cache is as it was.
        """
        if type(layer_idx) is int and 0 <= layer_idx < len(self.layers):
            return self.layers[layer_idx].update(key_states, value_states)  # type: ignore[no-any-return]
        index = to_index(layer_idx)
        if index is None or not 0 <= index < _MOST_LAYERS:
            raise InvalidArgumentError(f"layer_idx={show(layer_idx)}: give a whole number from 0 to {_MOST_LAYERS - 1}")
        missing = [self._make_layer() for _ in range(len(self.layers), index + 1)]
        layer = missing[-1] if missing else self.layers[index]
        updated: tuple[torch.Tensor, torch.Tensor] = layer.update(key_states, value_states)
        self.layers.extend(missing)
        return updated

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions that a layer holds; 0 for one that is not there."""
        index = to_index(layer_idx)
        if index is None or index < 0:
            raise InvalidArgumentError(f"layer_idx={show(layer_idx)}: give a whole number from 0 on")
        return self.layers[index].get_seq_length() if index < len(self.layers) else 0

    def crop(self, max_length: int) -> None:
        """Keeps the first ``max_length`` positions (all but the last
        ``-max_length``), and gives the pages back.

        ``crop(0)`` keeps none; but a cache that is one of transformers' does as
        these do, and where their ``crop()`` says how many to remove it keeps
        all.

        What :meth:`update` returned before shows them still: to read positions
        there that are gone is a fault.

        Raises:
            InvalidArgumentError: no whole number, and the cache is as it was;
                or what it would give back is sealed: the positions are gone,
                and the pages stay until the next call.
            AsleepError: its model is asleep, or the tag that it was made under.
                The cache is as it was.
        """
        most = _to_length(max_length)
        for layer in self.layers:
            layer._require_awake()
        for layer in self.layers:
            layer._cut(most)
        for layer in self.layers:
            layer._give_back()

    def reset(self) -> None:
        """Forgets all positions, and gives the pages back."""
        for layer in self.layers:
            layer.reset()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Entry ``k`` of the batch becomes what entry ``beam_idx[k]`` is, as beam
        search asks.

        It takes memory for the largest layer's keys or values, once, before it
        changes any.

        Raises:
            InvalidArgumentError: no whole numbers in one dimension, or, on the
                CPU, one that is no entry.
            OutOfMemoryError: or torch's own; no such memory. The cache is as it
                was.
            AsleepError: its model is asleep. The cache is as it was.
        """
        layers = [layer for layer in self.layers if layer._stores is not None]
        _require_entries(beam_idx, min((layer._stores[0].shape[1] for layer in layers), default=None))
        for layer in layers:
            layer._require_there()
        stores = [store for layer in layers for store in layer._settle()]
        order = {store.device: beam_idx.to(store.device) for store in stores}
        if any(len(beam_idx) != store.shape[1] for store in stores):
            made = [layer._changed(lambda store: store.index_select(1, order[store.device])) for layer in layers]
            for layer, changed in zip(layers, made, strict=True):
                layer._take(changed)
            return
        most = {device: max(s.nbytes for s in stores if s.device == device) for device in order}
        scratch = {device: torch.empty(size, dtype=torch.uint8, device=device) for device, size in most.items()}
        with torch.no_grad():
            for store in stores:
                changed = scratch[store.device][: store.nbytes].view(store.dtype).view(store.shape)
                store.copy_(torch.index_select(store, 1, order[store.device], out=changed))

    def __deepcopy__(self, memo: dict[int, Any]) -> ElasticKVCache:
        """A cache of its own with the same content, in the pool that is open.

        Raises:
            AsleepError: its model is asleep.
        """
        made = object.__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        return made

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise _not_copyable()

    def __repr__(self) -> str:
        held = sum(store._backing.held for layer in self.layers for store in layer._stores or ())
        positions = max((layer.get_seq_length() for layer in self.layers), default=0)
        state = f"{len(self.layers)} layers of {positions} positions, {_C.format_bytes(held)}"
        return f"ElasticKVCache(max_length={show(self._max_length)}: {state})"

    def __len__(self) -> int:
        """Layers."""
        return len(self.layers)

    def __bool__(self) -> bool:
        """Whether it is a cache: also one that is empty."""
        return True

    def __iter__(self) -> Iterator[tuple[torch.Tensor | None, torch.Tensor | None]]:
        """Each layer's keys and values; ``(None, None)`` for a layer not used yet.

        Pairs under every version of transformers, whose own caches give a third
        for sliding windows since 5.
        """
        return ((layer.keys, layer.values) for layer in self.layers)


def _kind(keys: torch.Tensor, values: torch.Tensor) -> tuple[object, ...]:
    return keys.shape, values.shape, keys.dtype, values.dtype, keys.device, values.device


def _unchanged(store: ElasticTensor) -> contextlib.AbstractContextManager[None]:
    """For another number of rows: autograd saves views of a store, whose positions stay, and never the store."""
    return torch.autograd.grad_mode._unsafe_preserve_version_counter(store)


def _require_entries(order: object, batch: int | None) -> None:
    """Raises InvalidArgumentError for what is no order of a batch of so many."""
    if not isinstance(order, torch.Tensor) or order.dim() != 1 or order.dtype not in (torch.int32, torch.int64):
        raise InvalidArgumentError(f"beam_idx={show(order)}: give a tensor of whole numbers with one dimension")
    # On a GPU a look at them would wait for it.
    if batch is not None and order.device.type == "cpu" and len(order) != 0:
        least, most = (int(end) for end in torch.aminmax(order))
        if least < 0 or most >= batch:
            raise InvalidArgumentError(f"beam_idx={show(order)}: the batch has the entries 0 to {batch - 1}")


def _to_length(max_length: object) -> int:
    """Raises InvalidArgumentError for what is no number of positions."""
    length = to_index(max_length)
    if length is None:
        raise InvalidArgumentError(
            f"crop(): max_length={show(max_length)}: give a whole number of positions, or below 0 how many to drop"
        )
    return length


def _not_assigned(name: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"layer.{name} = ...: an ElasticKVCache's layer stands on memory of its own, which the next update() goes on "
        f"with; change layer.{name} in place, crop() it, or update() another cache with what it should hold"
    )


def _not_copyable() -> NotCopyableError:
    return NotCopyableError(
        "an ElasticKVCache cannot be pickled, nor copied by copy.copy(): it is memory of this process. copy.deepcopy() "
        "makes one of its own; to save it, save [(keys.clone(), values.clone()) for keys, values in cache if keys is "
        "not None] and update() another one with them",
        what="ElasticKVCache",
    )


_class_of_transformers: type[ElasticKVCache] | None = None


def _of_transformers() -> type[ElasticKVCache]:
    """The same as a ``transformers.Cache``; made once transformers is there, which nothing here imports. The plain one
    where its caches are not made of layers that are given, before 4.56.
    """
    global _class_of_transformers
    if _class_of_transformers is None:
        try:
            from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache
        except ImportError:
            return ElasticKVCache
        if "layers" not in inspect.signature(Cache.__init__).parameters:
            return ElasticKVCache

        is_by_removal = "tokens_to_remove" in inspect.signature(Cache.crop).parameters

        class Layer(_Layer, CacheLayerMixin):  # type: ignore[misc]
            _is_cut_by_removal = is_by_removal

        # Not guarded: a Cache has attributes that transformers sets as it likes. A DynamicCache, as an
        # EncoderDecoderCache crops and reorders no other.
        class Elastic(ElasticKVCache, DynamicCache):  # type: ignore[misc]
            def _begin(self) -> None:
                Cache.__init__(self, layers=[])

            def _make_layer(self) -> Any:
                return Layer(self._max_length)

        Elastic.__name__ = Elastic.__qualname__ = "ElasticKVCache"
        Elastic.__doc__ = ElasticKVCache.__doc__
        _class_of_transformers = Elastic
    return _class_of_transformers
