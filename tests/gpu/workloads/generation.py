"""Text generation by transformers' Llama and Qwen models with random weights."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch

DEVICE = "cuda"
_SIZES: dict[str, Any] = {
    "vocab_size": 4000,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": None,  # so that every sequence grows to its full length
    "pad_token_id": 0,
}


def _model(kind: str, dtype: str, **sizes: int) -> Any:
    import transformers

    names = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }
    config, model = names[kind]
    with torch.device(DEVICE):
        return model(config(**{**_SIZES, **sizes})).to(getattr(torch, dtype)).eval()


def _clear_of_ties(model: Any, text: torch.Tensor) -> torch.Tensor:
    """The logits after ``text``, in whole numbers of bits: what the model computes, and not only its largest."""
    with torch.no_grad():
        return model(text).logits[:, -1].float().view(torch.int32).sum(dtype=torch.int64)


def generate(kind: str, seed: int, cache: str, dtype: str = "bfloat16", length: int = 24) -> Iterator[list[int]]:
    """Each step: the tokens that one call of ``generate()`` adds, flat; then what the logits after them sum to.

    Greedily, by sampling and by beams, for batches of several lengths.
    """
    torch.manual_seed(seed)
    model = _model(kind, dtype)
    ways: list[tuple[int, int, dict[str, Any]]] = [
        (1, 37, {"do_sample": False}),
        (3, 200, {"do_sample": True, "temperature": 0.9, "top_k": 40}),
        (2, 5, {"do_sample": False, "num_beams": 3}),
        (4, 64, {"do_sample": False}),
    ]
    options = {} if cache == "dynamic" else {"cache_implementation": cache, "disable_compile": True}
    for step, (batch, prompt, way) in enumerate(ways):
        torch.manual_seed(1000 * seed + step)
        given = torch.randint(1, 4000, (batch, prompt), device=DEVICE)
        text = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=length, **options, **way)
        assert text.shape == (batch, prompt + length)
        added = text[:, prompt:].flatten().tolist()
        yield [*added, int(_clear_of_ties(model, text))]


def generate_compiled(seed: int, length: int = 24) -> list[int]:
    """What a Llama generates with a static cache, whose steps transformers compiles into CUDA graphs by itself.

    In float32, where no two tokens are as likely as each other. In the end
    everything compiled is gone, and the graphs' memory with it.
    """
    torch.manual_seed(seed)
    model = _model("llama", "float32", num_hidden_layers=2)
    given = torch.randint(1, 4000, (2, 20), device=DEVICE)
    text: list[int] = []
    try:
        for _ in range(2):  # the second replays what the first recorded
            added = model.generate(
                given,
                attention_mask=torch.ones_like(given),
                max_new_tokens=length,
                do_sample=False,
                cache_implementation="static",
            )
            text += added[:, 20:].flatten().tolist()
    finally:
        del model
        forget_compiled()
    return text


def forget_compiled() -> None:
    """Drops all that torch.compile has made, CUDA graphs and their pools too."""
    torch.compiler.reset()
    gc.collect()
