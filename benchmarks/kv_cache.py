"""Tokens a second and memory of a decoding loop with ``ElasticKVCache`` beside a dynamic and a static cache.

A language model (``workloads/transformer.py``) answers one batch, greedily, with a cache for all layers:

- ``torch_vmm``: ``ElasticKVCache``, under torch_vmm;
- ``dynamic``: ``transformers.DynamicCache`` where it can be imported, else the same by ``torch.cat``; under torch's own
  allocator, as are the others;
- ``static``: made once for the longest text, written at a position, and masked beyond it, as ``transformers`` has it;
- ``preallocated``: the same memory, of which attention reads the part that is written: the best that there can be
  without a graph.

``static`` reads by another kernel, since it masks; all others must say the same tokens. ``preallocated`` is the speed
to be near: nothing is copied, and nothing is read in vain.

- ``tokens a second`` of decoding, prompts not included; ``a token``: the time of one step;
- ``peak allocated`` and ``peak reserved``: the device's, weights included; ``cache``: what its positions need.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import time
import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import lockstep
from .measurement import Measurement, Part, Row
from .runner import one_scale
from .workloads.measuring import settle_algorithms
from .workloads.memory import Memory
from .workloads.program import dtype_of, made_on
from .workloads.transformer import LanguageModel, LayerCache, NetSizes, StaticCache, growing_caches

KIND = "cuda"
KINDS = ("cuda", "cpu")
ALLOCATORS = ("torch_vmm", "dynamic", "static", "preallocated")
RUNS = 2
_REPEATED = 7  # in each process, and once before to warm up
NEEDS_LOOPS = False
HAS_SCALES = True
HAS_PASSES = True  # for --lockstep
_NEAR = 0.03


@dataclass(frozen=True)
class _Sizes:
    net: NetSizes
    batch: int
    prompt: int
    new: int

    @property
    def cache_values(self) -> int:
        """Values of all keys and values at the end."""
        return 2 * self.net.layers * self.net.width * self.batch * (self.prompt + self.new)


_SIZES = {
    "small": _Sizes(NetSizes(64, 2, 4, 256), batch=2, prompt=40, new=24),
    "full": _Sizes(NetSizes(2048, 16, 16, 32000), batch=16, prompt=2048, new=128),
}


# -- The runner's side -------------------------------------------------------------------------------------------------

parts = one_scale


def remarks(rows: list[Row]) -> list[str]:
    """How near it is to the static cache's speed and the dynamic one's memory."""
    values = {(row["metric"], row["allocator"]): row["value"] for row in rows}
    lines = []
    for metric, other, is_speed in (
        ("tokens a second", "static", True),
        ("tokens a second", "preallocated", True),
        ("tokens a second", "dynamic", True),
        ("peak reserved", "dynamic", False),
        ("peak allocated", "dynamic", False),
    ):
        ours, theirs = values.get((metric, "torch_vmm")), values.get((metric, other))
        if ours and theirs:
            share = ours / theirs
            is_near = share >= 1 - _NEAR if is_speed else share <= 1 + _NEAR
            lines.append(f"{metric}: {share:.3f} times {other}'s{'' if is_near else ', NOT within 3 %'}")
    return lines


def complaints(rows: list[Row]) -> list[str]:
    """Different tokens where the same kernel reads."""
    said = {value for row in rows if row["unit"] == "crc32" and row["allocator"] != "static" for value in row["runs"]}
    return [f"DIFFERENT TOKENS: {len(said)} crc32"] if len(said) > 1 else []


# -- The caches --------------------------------------------------------------------------------------------------------


class _OfLayer:
    """One layer of a cache with ``update(keys, values, layer)``, as the model asks for it."""

    def __init__(self, cache: Any, layer: int) -> None:
        self._cache, self._layer = cache, layer

    def extended(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        both: tuple[Tensor, Tensor] = self._cache.update(keys, values, self._layer)
        return both


class _Preallocated:
    """Keys and values of a layer in memory for the longest text; shown as far as they are written."""

    def __init__(self, batch: int, length: int, sizes: NetSizes, dtype: torch.dtype, device: str) -> None:
        shape = (batch, sizes.heads, length, sizes.width // sizes.heads)
        self._keys, self._values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        self._length = 0

    def extended(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        before, self._length = self._length, self._length + keys.shape[2]
        self._keys[:, :, before : self._length] = keys
        self._values[:, :, before : self._length] = values
        return self._keys[:, :, : self._length], self._values[:, :, : self._length]


class _Answering:
    """One answer to one batch, token by token, with a cache of its own."""

    def __init__(self, net: LanguageModel, sizes: _Sizes, allocator: str, device: str) -> None:
        self._net, self._sizes, self._device = net, sizes, device
        length, dtype = sizes.prompt + sizes.new, dtype_of(device)
        self._position = torch.zeros(1, dtype=torch.int64, device=device)
        self._places = torch.arange(length, device=device) if allocator == "static" else None
        layers = range(sizes.net.layers)
        self._caches: list[LayerCache]
        if allocator == "static":
            self._caches = [StaticCache(sizes.batch, length, sizes.net, self._position, dtype) for _ in layers]
        elif allocator == "preallocated":
            self._caches = [_Preallocated(sizes.batch, length, sizes.net, dtype, device) for _ in layers]
        elif allocator == "torch_vmm":
            import torch_vmm

            cache = torch_vmm.ElasticKVCache(max_length=length)
            self._caches = [_OfLayer(cache, layer) for layer in layers]
        elif importlib.util.find_spec("transformers") is not None:
            from transformers.cache_utils import DynamicCache

            dynamic = DynamicCache()
            self._caches = [_OfLayer(dynamic, layer) for layer in layers]
        else:
            self._caches = growing_caches(sizes.net)

    def begin(self) -> Tensor:
        """Reads the prompt; the first token of each answer (batch, 1)."""
        generator = torch.Generator().manual_seed(7)
        shape = (self._sizes.batch, self._sizes.prompt)
        prompt = torch.randint(0, self._sizes.net.vocabulary, shape, generator=generator).to(self._device)
        token = self._net.after_last(prompt, self._caches).argmax(-1, keepdim=True)
        self._position.fill_(self._sizes.prompt)
        return token

    def next(self, token: Tensor) -> Tensor:
        """The one behind it."""
        seen = None if self._places is None else (self._places <= self._position)[None, None, None]
        token = self._net.after_last(token, self._caches, seen).argmax(-1, keepdim=True)
        self._position += 1
        return token


# -- The measuring process ---------------------------------------------------------------------------------------------


def measure_part(allocator: str, kind: str, quick: bool, part: Part) -> list[Measurement]:
    """Answers once to warm up, and then for the numbers."""
    sizes, memory = _SIZES[str(part["scale"])], Memory(kind, allocator)
    torch.set_num_threads(1)  # what is pinned has one CPU
    settle_algorithms(is_deterministic=False, is_strict=True)
    place, wait = lockstep.measured(part)
    with place, torch.no_grad():
        with made_on(kind, seed=7):
            net = LanguageModel(sizes.net).requires_grad_(False).eval()
        wait()
        _answer(net, sizes, allocator, kind, memory)
        rows = []
        for _ in range(1 if quick else _REPEATED):
            wait()
            gc.collect()
            memory.start_over()
            tokens, seconds = _answer(net, sizes, allocator, kind, memory)
            rows += _told(sizes, kind, memory, tokens, seconds)
    return rows


def _told(sizes: _Sizes, kind: str, memory: Memory, tokens: list[list[int]], seconds: float) -> list[Measurement]:
    case = f"batch {sizes.batch}, {sizes.prompt} + {sizes.new} tokens"
    steps = sizes.new - 1
    rows = [
        Measurement(case, "tokens a second", sizes.batch * steps / seconds, "tokens/s"),
        Measurement(case, "a token", seconds / steps * 1e3, "ms"),
        Measurement(case, "cache", sizes.cache_values * dtype_of(kind).itemsize / 2**30, "GiB"),
        Measurement(case, "tokens, exactly", zlib.crc32(json.dumps(tokens).encode()), "crc32"),
    ]
    stats = memory.statistics()
    if stats is not None:
        rows += [
            Measurement(case, f"peak {what}", stats[f"{what}_bytes.all.peak"] / 2**30, "GiB")
            for what in ("allocated", "reserved")
        ]
    return rows


def _answer(
    net: LanguageModel, sizes: _Sizes, allocator: str, kind: str, memory: Memory
) -> tuple[list[list[int]], float]:
    """The tokens, and the seconds of all steps behind the first."""
    answering = _Answering(net, sizes, allocator, kind)
    said = [answering.begin()]
    memory.synchronize()
    began = time.perf_counter()
    for _ in range(sizes.new - 1):
        said.append(answering.next(said[-1]))
    memory.synchronize()
    seconds = time.perf_counter() - began
    return torch.cat(said, dim=1).tolist(), seconds
