"""A decoder-only language model, and the two kinds of cache that serving gives it.

It has no positions: they would change no allocation worth the name, and the
causal mask tells positions apart well enough for what is measured here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class NetSizes:
    """``width`` is a multiple of ``heads``."""

    width: int
    layers: int
    heads: int
    vocabulary: int


class LayerCache(Protocol):
    """Keys and values of one layer, each (batch, heads, length, width of a head)."""

    def extended(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Takes those of further tokens; returns what these tokens look at."""


class GrowingCache:
    """By ``torch.cat``: each token makes every layer's cache anew, a little larger."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def extended(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if self.keys is not None and self.values is not None:
            keys, values = torch.cat([self.keys, keys], dim=2), torch.cat([self.values, values], dim=2)
        self.keys, self.values = keys, values
        return keys, values


class StaticCache:
    """Made once for the longest text; a token is written at ``position``, a number on the device.

    Whoever decodes masks what lies beyond it. A prompt begins at 0 and looks at itself only.
    """

    def __init__(self, batch: int, length: int, sizes: NetSizes, position: Tensor, dtype: torch.dtype) -> None:
        shape = (batch, sizes.heads, length, sizes.width // sizes.heads)
        self.keys = torch.zeros(shape, dtype=dtype, device=position.device)
        self.values = torch.zeros_like(self.keys)
        self._position = position

    def extended(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        batch, _, length, _ = keys.shape
        if length > 1:
            self.keys[:batch, :, :length].copy_(keys)
            self.values[:batch, :, :length].copy_(values)
            return keys, values
        self.keys.index_copy_(2, self._position, keys)
        self.values.index_copy_(2, self._position, values)
        return self.keys, self.values


class Attention(nn.Module):
    def __init__(self, sizes: NetSizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.to_qkv, self.to_out = nn.Linear(sizes.width, 3 * sizes.width), nn.Linear(sizes.width, sizes.width)

    def forward(self, x: Tensor, cache: LayerCache | None, mask: Tensor | None) -> Tensor:
        batch, length, width = x.shape
        qkv = self.to_qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        if cache is not None:
            key, value = cache.extended(key, value)
        is_causal = mask is None and length > 1
        seen = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=is_causal)
        out: Tensor = self.to_out(seen.transpose(1, 2).reshape(batch, length, width))
        return out


class Block(nn.Module):
    def __init__(self, sizes: NetSizes) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(sizes.width), nn.LayerNorm(sizes.width)
        self.attention = Attention(sizes)
        self.up, self.down = nn.Linear(sizes.width, 4 * sizes.width), nn.Linear(4 * sizes.width, sizes.width)

    def forward(self, x: Tensor, cache: LayerCache | None, mask: Tensor | None) -> Tensor:
        x = x + self.attention(self.norm_1(x), cache, mask)
        out: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return out


class LanguageModel(nn.Module):
    """Tokens (batch, length) to logits. ``is_checkpointed``: backward() computes each block again."""

    def __init__(self, sizes: NetSizes, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.sizes, self.is_checkpointed = sizes, is_checkpointed
        self.embed = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList([Block(sizes) for _ in range(sizes.layers)])
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def features(self, tokens: Tensor, caches: list[LayerCache] | None = None, mask: Tensor | None = None) -> Tensor:
        """What the last block says of each token."""
        x: Tensor = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            cache = None if caches is None else caches[number]
            if self.is_checkpointed:
                x = checkpoint(block, x, cache, mask, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, cache, mask)
        out: Tensor = self.norm(x)
        return out

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits after each token."""
        logits: Tensor = self.head(self.features(tokens))
        return logits

    def after_last(self, tokens: Tensor, caches: list[LayerCache], mask: Tensor | None = None) -> Tensor:
        """The logits after the last token only (batch, vocabulary); the caches take all of them."""
        logits: Tensor = self.head(self.features(tokens, caches, mask)[:, -1])
        return logits

    def loss(self, tokens: Tensor) -> Tensor:
        """Of saying each token from those before it."""
        logits = self(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def growing_caches(sizes: NetSizes) -> list[LayerCache]:
    """One for each layer."""
    return [GrowingCache() for _ in range(sizes.layers)]
