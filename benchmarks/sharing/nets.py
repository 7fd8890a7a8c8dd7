"""The language models that are served: ``transformers``' own, by its configurations, with random weights.

Where ``transformers`` is not installed a small decoder of the examples stands in for it, which is good for host memory
only: there nothing but the server is looked at.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor, nn

from examples import continuous_batching as batching

from ..workloads.program import made_on

Attend = Callable[[int], Callable[[Tensor, Tensor, Tensor], Tensor]]
"""Of a layer: what (rows, heads, size) of queries, keys and values make of each other and of what is cached."""

_ATTENTION = "torch_vmm_slots"


@dataclass(frozen=True)
class NetSpec:
    """A model's configuration. Heads are as many for keys and values as for queries."""

    name: str
    family: str
    """``"llama"`` or ``"qwen2"``."""
    width: int
    inner: int
    layers: int
    heads: int
    vocabulary: int

    @property
    def cache(self) -> batching.Sizes:
        """What its caches are made for."""
        return batching.Sizes(self.width, self.layers, self.heads, self.vocabulary)

    def scaled(self, share: float) -> NetSpec:
        """With fewer layers: weights and caches shrink alike."""
        return replace(self, layers=max(2, round(self.layers * share)))


class Net(Protocol):
    """A decoder over rows: tokens of one prompt, or the newest of several requests."""

    def states(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """What the last layer says of each token (rows, width)."""

    def logits(self, states: Tensor) -> Tensor:
        """(rows, vocabulary)."""


class OfTransformers(nn.Module):
    """A causal language model of ``transformers``. Its attention reads the caches of whoever calls."""

    def __init__(self, spec: NetSpec) -> None:
        super().__init__()
        import transformers

        # Whatever the version, its attention is a function that it looks up by name and to which it hands arguments
        # that it does not know through all layers.
        transformers.AttentionInterface.register(_ATTENTION, _attention)
        configuration, model = {
            "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
            "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        }[spec.family]
        made = configuration(
            vocab_size=spec.vocabulary,
            hidden_size=spec.width,
            intermediate_size=spec.inner,
            num_hidden_layers=spec.layers,
            num_attention_heads=spec.heads,
            num_key_value_heads=spec.heads,
            max_position_embeddings=1 << 16,
            tie_word_embeddings=False,
            attn_implementation=_ATTENTION,
        )
        self._model: Any = model(made)

    def states(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        out: Tensor = self._model.model(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False, attend=attend
        ).last_hidden_state[0]
        return out

    def logits(self, states: Tensor) -> Tensor:
        out: Tensor = self._model.lm_head(states)
        return out


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, *, attend: Attend, **_: object
) -> tuple[Tensor, None]:
    """In transformers' manner: (1, heads, rows, size) in, (1, rows, heads, size) out."""
    del attention_mask  # none is made for an attention that transformers does not know
    rows = (each[0].transpose(0, 1) for each in (query, key, value))
    return attend(module.layer_idx)(*rows).unsqueeze(0).contiguous(), None


class StandIn(batching.Decoder):
    """The examples' decoder, which has no positions."""

    def states(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        del positions
        out: Tensor = self.norm(self._through(tokens, attend))
        return out

    def logits(self, states: Tensor) -> Tensor:
        out: Tensor = self.head(states)
        return out


def made(spec: NetSpec, device: str) -> Net:
    """The model, in bfloat16 on a GPU; weights are drawn where they stay."""
    has_transformers = importlib.util.find_spec("transformers") is not None
    with made_on(device, seed=11):
        net = OfTransformers(spec) if has_transformers else StandIn(spec.cache)
        return net.requires_grad_(False).eval()
