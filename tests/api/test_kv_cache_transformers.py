"""ElasticKVCache beside transformers: a cache of its classes, which generate() takes for its own."""

from __future__ import annotations

import sys
import types

import pytest
import torch

import torch_vmm
from tests.api.states import states
from tests.helpers import run
from tests.standin import control
from torch_vmm import kv_cache

Cache = torch_vmm.ElasticKVCache


def test_generate_gives_what_the_dynamic_cache_gives(device: str) -> None:
    transformers = pytest.importorskip("transformers", minversion="4.56")
    if device == "cuda" and control.is_here():
        pytest.skip("the stand-in has no kernels for what generate() looks up")
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval().to(device)
    prompt = torch.randint(0, 128, (2, 7), device=device)

    def generate(cache: object, **options: object) -> object:
        return model.generate(
            prompt if "num_beams" in options or not options else prompt[:1],
            max_new_tokens=40,
            past_key_values=cache,
            pad_token_id=0,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
            **options,
        )

    for options in ({}, {"num_beams": 3}):
        cache = Cache(4096)
        assert isinstance(cache, transformers.Cache)
        ours, theirs = generate(cache, **options), generate(transformers.DynamicCache(config=config), **options)
        assert torch.equal(ours.sequences, theirs.sequences)
        assert all(torch.equal(a, b) for a, b in zip(ours.scores, theirs.scores, strict=True))
        assert cache.get_seq_length() == 46
    # Guesses that turn out wrong are cropped, none of them at times.
    for options in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": model}):
        ours, theirs = generate(Cache(4096), **options), generate(transformers.DynamicCache(config=config), **options)
        assert torch.equal(ours.sequences, theirs.sequences)


def test_in_an_encoder_decoder_cache_it_does_what_a_dynamic_one_does(device: str) -> None:
    transformers = pytest.importorskip("transformers", minversion="4.56")

    def caches(kind: type[object]) -> object:
        made = [kind(64), kind(64)] if kind is Cache else [kind(), kind()]
        for cache in made:
            torch.manual_seed(0)
            cache.update(*[torch.rand(2, 2, 5, 4, device=device) for _ in range(2)], 0)  # type: ignore[attr-defined]
        return transformers.EncoderDecoderCache(*made)

    ours, theirs = caches(Cache), caches(transformers.DynamicCache)
    for change in (
        lambda cache: cache.batch_repeat_interleave(2),
        lambda cache: cache.batch_select_indices(torch.tensor([3, 0], device=device)),
        lambda cache: cache.crop(-3),
    ):
        for cache in (ours, theirs):
            change(cache)
        for one, other in zip(ours.self_attention_cache.layers, theirs.self_attention_cache.layers, strict=True):  # type: ignore[attr-defined]
            assert torch.equal(one.keys, other.keys)
            assert torch.equal(one.values, other.values)


def test_it_is_a_cache_of_transformers_where_that_is_there() -> None:
    code = """
    import sys, types

    import torch_vmm

    plain = torch_vmm.ElasticKVCache(8)
    library, utils = types.ModuleType("transformers"), types.ModuleType("transformers.cache_utils")

    class Cache:
        def __init__(self, layers):
            self.layers, self.offloading = layers, False

        def __repr__(self):
            return "not ours"

        def crop(self, max_length):
            pass

    class CacheLayerMixin:
        pass

    class DynamicCache(Cache):
        pass

    utils.Cache, utils.CacheLayerMixin, utils.DynamicCache = Cache, CacheLayerMixin, DynamicCache
    sys.modules["transformers"], sys.modules["transformers.cache_utils"] = library, utils

    class Derived(torch_vmm.ElasticKVCache):
        def __init__(self, name):
            super().__init__(8)
            self.name = name

    made = torch_vmm.ElasticKVCache(8, layers=1)
    print(isinstance(made, Cache), isinstance(made.layers[0], CacheLayerMixin), made)
    print(isinstance(plain, Cache), isinstance(Derived("a"), Cache), Derived("b").name)
    """
    assert run(code).splitlines() == [
        "True True ElasticKVCache(max_length=8: 1 layers of 0 positions, 0 B)",
        "False False b",
    ]


@pytest.mark.parametrize("has", ["no caches", "caches", "caches that make their layers"])
def test_beside_an_older_transformers_it_is_plain(monkeypatch: pytest.MonkeyPatch, device: str, has: str) -> None:
    library, utils = types.ModuleType("transformers"), types.ModuleType("transformers.cache_utils")
    library.__path__ = []  # a package without further modules
    monkeypatch.setattr(kv_cache, "_class_of_transformers", None)
    monkeypatch.setitem(sys.modules, "transformers", library)
    monkeypatch.delitem(sys.modules, "transformers.cache_utils", raising=False)
    if has != "no caches":
        monkeypatch.setattr(utils, "Cache", type("Cache", (), {}), raising=False)
        if has != "caches":
            monkeypatch.setattr(utils, "CacheLayerMixin", type("CacheLayerMixin", (), {}), raising=False)
            monkeypatch.setattr(utils, "DynamicCache", type("DynamicCache", (utils.Cache,), {}), raising=False)
            utils.Cache.__init__ = lambda self, layer_classes: None
        monkeypatch.setitem(sys.modules, "transformers.cache_utils", utils)
    cache = Cache(8, layers=1)
    assert type(cache) is Cache
    keys, values = states(device, 3)
    shown = cache.update(keys, values, 0)
    assert torch.equal(shown[0], keys)
    assert torch.equal(shown[1], values)


@pytest.mark.parametrize(("parameter", "kept"), [("tokens_to_remove", 3), ("max_length", 0)])
def test_crop_of_none_does_as_that_of_transformers(parameter: str, kept: int) -> None:
    """Theirs says how many to remove since 5, and generate() then removes none at times."""
    code = f"""
    import sys, types

    import torch
    import torch_vmm

    library, utils = types.ModuleType("transformers"), types.ModuleType("transformers.cache_utils")

    class Cache:
        def __init__(self, layers):
            self.layers = layers

        def crop(self, {parameter}):
            pass

    class CacheLayerMixin:
        pass

    class DynamicCache(Cache):
        pass

    utils.Cache, utils.CacheLayerMixin, utils.DynamicCache = Cache, CacheLayerMixin, DynamicCache
    sys.modules["transformers"], sys.modules["transformers.cache_utils"] = library, utils
    torch_vmm.enable("cpu")
    with torch_vmm.VirtualMemoryPool("64MiB", device="cpu"):
        cache = torch_vmm.ElasticKVCache(8)
        cache.update(torch.ones(1, 1, 5, 4), torch.ones(1, 1, 5, 4), 0)
        cache.crop(-2)
        cache.crop(-0)
        print(cache.get_seq_length())
        cache.layers[0].crop(0)
        print(cache.get_seq_length())
    """
    assert run(code).split() == [str(kept)] * 2
