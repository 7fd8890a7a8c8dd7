"""ElasticKVCache: what attention reads equals what concatenation gives, position by position."""

from __future__ import annotations

import contextlib
import copy
import inspect
import pickle
import re
import sys
from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_vmm
from tests.api.states import states
from tests.helpers import PAGE

Cache = torch_vmm.ElasticKVCache
Pool = torch_vmm.VirtualMemoryPool


@pytest.fixture(autouse=True, params=["nothing", "transformers"])
def beside(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where transformers was imported before, a cache is one of its, and all of this holds as well."""
    if request.param == "transformers":
        pytest.importorskip("transformers")
    else:
        monkeypatch.delitem(sys.modules, "transformers", raising=False)


class Concatenating:
    """What a dynamic cache does, as plainly as can be."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        if layer in self.layers:
            before = self.layers[layer]
            keys, values = torch.cat([before[0], keys], dim=-2), torch.cat([before[1], values], dim=-2)
        self.layers[layer] = keys, values
        return keys, values


def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    scores = (query @ keys.transpose(-1, -2)) / keys.shape[-1] ** 0.5
    return torch.softmax(scores, dim=-1) @ values


def test_a_decoding_loop_equals_concatenation(device: str) -> None:
    elastic, plain = Cache(1024), Concatenating()
    for step, added in enumerate([33, 1, 1, 1, 5, 1, 1, 70, 1]):
        for layer in range(3):
            keys, values = states(device, added, seed=100 * step + layer)
            ours, theirs = elastic.update(keys, values, layer), plain.update(keys, values, layer)
            assert torch.equal(ours[0], theirs[0])
            assert torch.equal(ours[1], theirs[1])
            assert torch.equal(attend(keys, *ours), attend(keys, *theirs))
    assert elastic.get_seq_length() == elastic.get_seq_length(2) == 114
    assert elastic.get_seq_length(3) == 0
    assert len(elastic) == len(list(elastic)) == 3


def test_it_grows_in_place_in_the_model_that_is_open(make_pool: Callable[..., Pool], device: str) -> None:
    pool = make_pool("64MiB")
    cache = Cache(1 << 20)
    with pool:
        first, _ = cache.update(*states(device, 10), 0)
    assert pool.memory_allocated() == 2 * PAGE  # of keys and of values
    address, before = first.data_ptr(), first.clone()
    for _ in range(50):
        keys, values = cache.update(*states(device, 100), 0)
    assert keys.data_ptr() == address
    assert torch.equal(first, before)  # a view of the first ten
    used = sum(-(-each.numel() * 4 // PAGE) * PAGE for each in (keys, values))
    assert pool.memory_allocated() == used == torch_vmm.pool_of(keys).memory_allocated()


def test_queries_of_many_steps_have_gradients(device: str) -> None:
    elastic, plain = Cache(1 << 16), Concatenating()
    gradients = []
    for cache in (elastic, plain):
        query = torch.ones(2, 4, 1, 32, device=device, requires_grad=True)
        loss = torch.zeros((), device=device)
        for step, added in enumerate([1, 1, 3, 9000, 1, 9000, 1]):  # onto further pages, too
            keys, values = cache.update(*states(device, added, seed=step), 0)
            loss = loss + attend(query, keys, values).sum() + (query * keys).sum()
        loss.backward()
        gradients.append(query.grad)
    torch.testing.assert_close(*gradients)
    assert elastic.get_seq_length() == 18007


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("change", ["crop", "reorder", "nothing"])
def test_autograd_notices_other_positions(change: str, settled: bool, device: str) -> None:
    cache = Cache(1 << 16)
    cache.update(*states(device, 5), 0)
    cache.update(*states(device, 5, seed=1), 0)
    if settled:
        copy.deepcopy(cache)  # the tensors underneath have as many rows as there are positions
    query = torch.ones(2, 4, 1, 32, device=device, requires_grad=True)
    keys, _ = cache.update(*states(device, 1, seed=2), 0)
    loss = (query * keys).sum()
    expected = keys.sum(2, keepdim=True)
    if change == "crop":
        cache.crop(5)
    elif change == "reorder":
        cache.reorder_cache(torch.tensor([1, 0]))
    else:
        cache.crop(11)
    with torch.inference_mode():
        cache.update(*states(device, 6, seed=3), 0)
    if change == "nothing":
        loss.backward()
        assert torch.equal(query.grad, expected)
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_crop_and_reset_give_pages_back(make_pool: Callable[..., Pool], device: str) -> None:
    pool = make_pool("64MiB")
    cache = Cache(1 << 20)
    given = states(device, 5000)
    with pool:
        cache.update(*given, 0)
    assert pool.memory_allocated() > 4 * PAGE
    cache.crop(50)
    cache.crop(-10)
    assert pool.memory_allocated() == 2 * PAGE
    assert cache.get_seq_length() == 40
    ((keys, values),) = cache
    assert torch.equal(keys, given[0][..., :40, :])
    assert torch.equal(values, given[1][..., :40, :])
    del keys, values
    cache.reset()
    assert cache.get_seq_length() == pool.memory_allocated() == 0
    cache.update(*states(device, 3, batch=5), 0)  # another batch
    assert cache.get_seq_length() == 3


def test_beam_search_reorders_it(device: str) -> None:
    cache, plain = Cache(256), Concatenating()
    for seed in range(3):
        plain.update(*states(device, 7, seed=seed), 0)
        cache.update(*states(device, 7, seed=seed), 0)
        order = torch.tensor([1, 1] if seed == 1 else [1, 0], device=device)
        cache.reorder_cache(order)
        plain.layers[0] = (plain.layers[0][0][order], plain.layers[0][1][order])
    ((keys, values),) = cache
    assert torch.equal(keys, plain.layers[0][0])
    assert torch.equal(values, plain.layers[0][1])
    cache.layers[0].batch_repeat_interleave(3)
    assert torch.equal(cache.layers[0].keys, keys.repeat_interleave(3, dim=0))
    cache.layers[0].batch_select_indices(torch.tensor([5]))
    assert torch.equal(cache.layers[0].values, values[1:])


def test_what_does_not_fit_leaves_it_as_it_was(make_pool: Callable[..., Pool], device: str) -> None:
    pool = make_pool("64MiB", physical_limit=2 * PAGE)
    cache = Cache(5000)
    keys, values = states(device, 100)
    with pool:
        cache.update(keys, values, 0)
    with pytest.raises(torch_vmm.OutOfMemoryError):
        cache.update(*states(device, 4900), 0)
    with pytest.raises(torch_vmm.InvalidArgumentError, match="5000 positions after 100 are more than max_length=5000"):
        cache.update(*states(device, 5000), 0)
    with pytest.raises(torch_vmm.InvalidArgumentError, match="another batch"):
        cache.update(*states(device, 1, batch=3), 0)
    ((kept, _),) = cache
    assert torch.equal(kept, keys)
    assert pool.memory_allocated() == 2 * PAGE
    for wrong in (0, -1, 1.5, "many"):
        with pytest.raises(torch_vmm.InvalidArgumentError, match="max_length"):
            Cache(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "indices", [[2, 0], slice(1, None), torch.tensor([True, False, True]), torch.tensor([-1, 0, 1])]
)
def test_a_layer_takes_any_choice_of_its_batch(device: str, indices: object) -> None:
    cache = Cache(100)
    keys, values = states(device, 4, batch=3)
    cache.update(keys, values, 0)
    cache.layers[0].batch_select_indices(indices)
    assert torch.equal(cache.layers[0].keys, keys[indices])
    assert torch.equal(cache.layers[0].values, values[indices])
    shown, _ = cache.update(keys[indices], values[indices], 0)
    assert torch.equal(shown, torch.cat([keys[indices]] * 2, dim=2))


def test_what_would_be_ignored_is_refused(device: str) -> None:
    cache = Cache(100)
    keys, values = states(device, 4)
    cache.update(keys, values, 0)
    layer = cache.layers[0]
    for name in ("keys", "values"):
        with pytest.raises(torch_vmm.InvalidArgumentError, match=rf"layer\.{name} = .*in place"):
            setattr(layer, name, keys[:, :, 1:])
    assert torch.equal(layer.keys, keys)


def test_a_first_update_that_fails_leaves_nothing(make_pool: Callable[..., Pool], device: str) -> None:
    pool = make_pool("64MiB", physical_limit=PAGE)  # for the keys alone
    cache = Cache(5000)
    keys, values = states(device, 3)
    with pool:
        with pytest.raises(torch_vmm.OutOfMemoryError):
            cache.update(keys, values, 2)
        with pytest.raises(torch_vmm.InvalidArgumentError, match="the same batch and positions"):
            cache.update(keys, values[:1], 0)
        with pytest.raises(torch_vmm.InvalidArgumentError, match="the same batch and positions"):
            cache.update(keys, values[:, :, :1], 0)
        assert len(cache) == cache.get_seq_length() == 0
        pool.physical_limit = 64 * PAGE
        cache.update(keys, values, 0)
    assert len(cache) == 1


def test_states_and_layers_that_cannot_be(device: str) -> None:
    cache = Cache(10)
    keys, values = states(device, 3)
    for _ in range(2):  # before there is a layer, and after
        for wrong in (None, keys[0], [1.0]):
            for given in ((wrong, values), (keys, wrong)):
                with pytest.raises(torch_vmm.InvalidArgumentError, match="_states"):
                    cache.update(*given, 0)  # type: ignore[arg-type]
        for layer in (-1, "0", None, 0.0, 4096, 10**9, 2**70):
            with pytest.raises(torch_vmm.InvalidArgumentError, match="layer_idx="):
                cache.update(keys, values, layer)  # type: ignore[arg-type]
        before = cache.get_seq_length()
        with pytest.raises(torch_vmm.InvalidArgumentError, match="max_length=10"):
            cache.update(*states(device, 11 - before), 0)
        assert cache.get_seq_length() == before
        cache.update(keys, values, 0)
    with pytest.raises(torch_vmm.InvalidArgumentError, match=r"torch.float64, where the cache has torch.float32"):
        cache.update(keys, values.double(), 0)
    assert cache.get_seq_length() == 6
    with pytest.raises(torch_vmm.InvalidArgumentError, match=r"max_length=4611686018427387904: .* addresses"):
        Cache(2**62).update(keys, values, 0)


@pytest.mark.parametrize("order", [[1, 0], [1, 1, 0]])
def test_a_reordering_that_finds_no_memory_changes_nothing(
    make_pool: Callable[..., Pool], device: str, order: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool("64MiB", physical_limit="32MiB")
    cache = Cache(50_000)
    with pool:
        for layer in range(3):
            cache.update(*states(device, 1000, seed=layer), layer)
        before = [(keys.clone(), values.clone()) for keys, values in cache if keys is not None and values is not None]
        pool.physical_limit = pool.memory_allocated() + 2 * PAGE  # for one layer more, not for three
        beams = torch.tensor(order)
        with monkeypatch.context() as patch:
            if len(order) == 2:
                patch.setattr(torch, "empty", refuse)
            with pytest.raises(torch.OutOfMemoryError):
                cache.reorder_cache(beams)
        assert all(torch.equal(keys, old) for (keys, _), (old, _) in zip(cache, before, strict=True))
        assert all(torch.equal(values, old) for (_, values), (_, old) in zip(cache, before, strict=True))
        pool.physical_limit = "64MiB"
        cache.reorder_cache(torch.tensor(order))
    assert all(torch.equal(keys, old[order]) for (keys, _), (old, _) in zip(cache, before, strict=True))
    assert all(torch.equal(values, old[order]) for (_, values), (_, old) in zip(cache, before, strict=True))


def refuse(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("no such memory")


def test_no_order_of_the_batch(device: str) -> None:
    cache = Cache(64)
    for layer in range(2):
        cache.update(*states(device, 3, seed=layer), layer)
    before = [keys.clone() for keys, _ in cache if keys is not None]
    for wrong in (torch.tensor([0.0, 1.0]), torch.tensor(0), [1, 0], torch.tensor([0, 2]), torch.tensor([-1, 0])):
        with pytest.raises(torch_vmm.InvalidArgumentError, match="beam_idx"):
            cache.reorder_cache(wrong)  # type: ignore[arg-type]
    assert all(torch.equal(keys, old) for (keys, _), old in zip(cache, before, strict=True))


def test_states_that_cannot_be_copied_leave_the_cache_as_it_was(device: str) -> None:
    cache = Cache(100)
    keys, values = states(device, 2)
    cache.update(keys, values, 0)
    for wrong in (values.to_sparse(), values.to("meta")):
        with pytest.raises(torch_vmm.InvalidArgumentError, match="value_states of layout"):
            cache.update(keys * 5, wrong, 0)
        assert cache.get_seq_length() == 2
    shown = cache.update(keys * 9, values * 9, 0)
    assert torch.equal(shown[0], torch.cat([keys, keys * 9], dim=2))
    assert torch.equal(shown[1], torch.cat([values, values * 9], dim=2))


def test_what_a_cache_does_not_do_is_named(device: str) -> None:
    cache = Cache(8)
    cache.update(*states(device, 3), 0)
    for repeats in (0, -1, "x", 1.5):
        with pytest.raises(torch_vmm.InvalidArgumentError, match=r"repeats=.*: give a whole number"):
            cache.layers[0].batch_repeat_interleave(repeats)
    assert cache.get_seq_length() == 3


def test_states_of_another_device_are_refused(device: str) -> None:
    keys, values = states(device, 2)
    with FakeTensorMode():  # pretends to be of any device
        elsewhere = states("cpu" if device == "cuda" else "cuda", 2)
    others = [elsewhere, *([states("cpu", 2)] if device == "cuda" else [])]
    cache = Cache(100)
    for theirs in others:
        there = re.escape(str(theirs[0].device))
        with pytest.raises(torch_vmm.InvalidArgumentError, match=rf"keys on {keys.device} and values on {there}"):
            cache.update(keys, theirs[1], 0)
    assert len(cache) == 0
    cache.update(keys, values, 0)
    for theirs in others:
        there = re.escape(str(theirs[0].device))
        for given in ((theirs[0], values), (keys, theirs[1]), theirs):
            with pytest.raises(
                torch_vmm.InvalidArgumentError, match=rf"states on {there}, where the cache is on {keys.device}"
            ):
                cache.update(*given, 0)
        assert cache.get_seq_length() == 2


def test_no_number_of_positions(device: str) -> None:
    cache = Cache(100)
    for layer in range(3):
        cache.update(*states(device, 2), layer)
    for wrong in (1.0, True, "2", None):
        with pytest.raises(torch_vmm.InvalidArgumentError, match=r"crop\(\): max_length="):
            cache.crop(wrong)  # type: ignore[arg-type]
        with pytest.raises(torch_vmm.InvalidArgumentError, match=r"crop\(\): max_length="):
            cache.layers[0].crop(wrong)
        assert [cache.get_seq_length(layer) for layer in range(3)] == [2, 2, 2]
    for layer in (-1, "0", None):
        with pytest.raises(torch_vmm.InvalidArgumentError, match="layer_idx="):
            cache.get_seq_length(layer)  # type: ignore[arg-type]


def test_an_empty_cache_is_a_cache() -> None:
    assert bool(Cache())
    assert len(Cache()) == 0


def test_a_deep_copy_is_a_cache_of_its_own(make_pool: Callable[..., Pool], device: str) -> None:
    ours, theirs = make_pool("64MiB"), make_pool("64MiB")
    prefix = Cache(256, layers=4)
    given = states(device, 7)
    with ours:
        for layer in range(2):
            prefix.update(*given, layer)
    with theirs:
        made = copy.deepcopy(prefix)
    assert type(made) is type(prefix)
    assert len(made) == 4
    assert theirs.memory_allocated() == ours.memory_allocated() == 4 * PAGE
    more = states(device, 5, seed=1)
    keys, values = made.update(*more, 0)
    assert torch.equal(keys, torch.cat([given[0], more[0]], dim=-2))
    assert torch.equal(values, torch.cat([given[1], more[1]], dim=-2))
    made.update(*more, 3)
    keys.zero_()
    assert (prefix.get_seq_length(), prefix.get_seq_length(1), prefix.get_seq_length(3)) == (7, 7, 0)
    assert torch.equal(prefix.layers[0].keys, given[0])
    with pytest.raises(torch_vmm.InvalidArgumentError, match="max_length=256"):
        made.update(*states(device, 250), 0)
    for refused in (pickle.dumps, copy.copy):
        for each in (prefix, prefix.layers[0]):
            with pytest.raises(torch_vmm.NotCopyableError, match="deepcopy"):
                refused(each)  # type: ignore[operator]


def test_first_used_in_inference_mode_it_works_outside(device: str) -> None:
    cache, plain = Cache(64), Concatenating()
    for step in range(4):
        given = states(device, 3, seed=step)
        plain.update(*given, 0)
        with torch.inference_mode(step % 2 == 0):
            keys, _ = cache.update(*given, 0)
            if step == 2:
                cache.reorder_cache(torch.tensor([0, 1]))
        assert torch.equal(keys, plain.layers[0][0])
    keys.mul_(2)
    cache.crop(-1)


def test_what_it_shows_of_itself(make_pool: Callable[..., Pool], device: str) -> None:
    assert list(inspect.signature(Cache).parameters) == ["max_length", "layers"]
    cache = Cache(5000, layers=2)
    assert repr(cache) == "ElasticKVCache(max_length=5000: 2 layers of 0 positions, 0 B)"
    with make_pool("1GiB"):
        cache.update(*states(device, 7), 1)
    assert repr(cache) == "ElasticKVCache(max_length=5000: 2 layers of 7 positions, 4 MiB)"


@pytest.mark.parametrize("name", ["max_length", "layer", "reset"])
@pytest.mark.parametrize("beside", ["nothing"], indirect=True)  # transformers sets on its caches what it likes
def test_it_takes_no_misspelt_attribute(name: str) -> None:
    cache = Cache(5000)
    with pytest.raises(AttributeError, match=name):
        setattr(cache, name, 3)
    cache.layers = []


@pytest.mark.parametrize("digits", [19, 5000])  # Python writes no number of more than 4300
def test_a_length_beyond_all_addresses_is_named(device: str, digits: int) -> None:
    cache = Cache(10 ** (digits - 1))
    assert "max_length=" in repr(cache)
    with pytest.raises(torch_vmm.InvalidArgumentError, match=r"max_length=.* than there are addresses"):
        cache.update(*states(device, 1), 0)


def test_a_layer_that_is_not_used_yet_shows_none(device: str) -> None:
    cache = torch_vmm.ElasticKVCache(16, layers=3)
    states = torch.ones(1, 2, 3, 4, device=device)
    cache.update(states, states, 1)
    assert [(keys is None, values is None) for keys, values in cache] == [(True, True), (False, False), (True, True)]
    assert len(list(cache)) == len(cache) == 3


def test_an_update_of_which_only_the_keys_fit_takes_nothing(make_pool: Callable[..., Pool], device: str) -> None:
    pool = make_pool("64MiB", physical_limit=8 * PAGE)
    cache = Cache(100_000)
    keys, values = states(device, 100)
    with pool:
        cache.update(keys, values, 0)
    one = states(device, 1)[0]
    more = 6 * PAGE // (one.numel() * one.element_size())
    with pytest.raises(torch_vmm.OutOfMemoryError):
        cache.update(*states(device, more), 0)
    assert pool.memory_allocated() == 2 * PAGE
    ((kept_keys, kept_values),) = cache
    assert torch.equal(kept_keys, keys)
    assert torch.equal(kept_values, values)
    cache.update(*states(device, 1), 0)
    assert cache.get_seq_length() == 101


def test_a_nested_tensor_is_no_state(device: str) -> None:
    nested = torch.nested.nested_tensor([torch.zeros(2, 3, 4), torch.zeros(2, 5, 4)], device=device)
    with pytest.raises(torch_vmm.InvalidArgumentError, match="nested"):
        Cache(100).update(nested, nested, 0)


@pytest.mark.parametrize("of_layer", [0, 1])
def test_a_refused_update_that_was_cropped_meanwhile_keeps_what_is_left(
    make_shared: Callable[..., torch_vmm.SharedMemoryPool], device: str, of_layer: int
) -> None:
    """The crop does not get to all of the pages: an alias shows some of a layer's."""
    shared = make_shared("200MiB")
    model = shared.register_model("llama")
    prompt, more = (torch.arange(4096.0 * n).reshape(1, 1, n, 4096).to(device) for n in (2048, 3000))
    cache = Cache(1 << 14)
    with model:
        cache.update(prompt, prompt, 0)
        cache.update(prompt, prompt, 1)
    shown = torch_vmm.alias(cache.layers[of_layer].keys.detach())
    held = model.stats().physical_usage

    def spare(requested: int, pool: Pool) -> bool:
        with contextlib.suppress(torch_vmm.StillInUseError):
            cache.crop(500)
        return False

    shared.on_pressure(spare)
    with model, pytest.raises(torch_vmm.OutOfMemoryError):
        cache.update(more, more, 1)
    assert model.stats().physical_usage < held, "what it took went back, and more"
    for layer in cache.layers:
        assert torch.equal(layer.keys, prompt[:, :, :500])
    shared.on_pressure(None)
    cache.update(prompt[:, :, :7], prompt[:, :, :7], 1)
    assert torch.equal(cache.layers[1].values, torch.cat([prompt[:, :, :500], prompt[:, :, :7]], 2))
    del shown


@pytest.mark.parametrize("indices", [0, torch.tensor(0), torch.tensor([[0]])])
def test_indices_of_other_dimensions_leave_the_cache_as_it_was(device: str, indices: object) -> None:
    cache = Cache(100)
    states = torch.arange(24.0).reshape(1, 2, 3, 4).to(device)
    cache.update(states, states, 0)
    with pytest.raises(torch_vmm.InvalidArgumentError, match="one dimension"):
        cache.layers[0].batch_select_indices(indices)
    keys, values = cache.update(states, states, 0)
    assert torch.equal(keys, torch.cat([states, states], 2))
    assert torch.equal(values, keys)
