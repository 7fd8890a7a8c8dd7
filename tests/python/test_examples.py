"""The worked examples on host memory: what they compute equals what the usual way computes."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_vmm
from examples import continuous_batching as batching
from examples import embedding_table as embedding
from examples import least_recently_used as recent
from examples import serve_many as many
from examples import wake_layer_by_layer as waking
from tests.helpers import ROOT, python


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """A server and its function for pressure know each other; models found by name must be the next test's."""
    yield
    gc.collect()


SCALE = replace(batching.SCALES["small"], prompts=(20, 300))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """What is computed is so small that threads, on a machine that others use, would wait for each other most."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def net() -> batching.Decoder:
    return batching.made(SCALE, "cpu")


def served(net: batching.Decoder, kind: str) -> batching.Served:
    requests = batching.drawn(net, SCALE.requests, SCALE.prompts, SCALE.new)
    caches = batching.caches_of(kind, net, SCALE)
    done = batching.serve(net, requests, caches, SCALE.most)
    assert caches.lengths == []
    assert [len(tokens) for tokens in done.tokens] == [request.new for request in requests]
    return done


def test_requests_that_join_and_leave_say_the_same_tokens(net: batching.Decoder) -> None:
    elastic, usual = served(net, "elastic"), served(net, "concatenating")
    assert elastic.tokens == usual.tokens
    assert len({tuple(tokens) for tokens in elastic.tokens}) > 1
    assert elastic.copied_bytes == 0 < usual.copied_bytes
    # A page a request at most, and not less than there is.
    assert elastic.needed_bytes <= elastic.held_bytes < elastic.needed_bytes + SCALE.most * SCALE.page_size


def test_a_request_alone_says_what_it_says_among_others(net: batching.Decoder) -> None:
    together = served(net, "elastic").tokens
    for number in (0, 3, 7):
        alone = [batching.drawn(net, SCALE.requests, SCALE.prompts, SCALE.new)[number]]
        caches = batching.caches_of("elastic", net, SCALE)
        assert batching.serve(net, alone, caches, SCALE.most).tokens == [together[number]]


def test_a_slot_holds_what_it_says(net: batching.Decoder) -> None:
    caches = batching.caches_of("elastic", net, SCALE)
    assert isinstance(caches, batching.ElasticCaches)

    def admit(length: int) -> int:
        net.admit(torch.zeros(length, dtype=torch.int64), caches)
        assert caches.held_bytes == caches._store.committed_bytes
        return caches.held_bytes // SCALE.page_size

    with torch.no_grad():
        # A position is 8 KiB, a page 256 of them.
        assert [admit(length) for length in (1, 260, 300)] == [1, 3, 5]
        caches.leave([1])
        assert caches.lengths == [1, 300]
        assert admit(1) == 4  # of the two pages that were left one serves, and one goes
        caches.leave([1])
        net.decode(torch.zeros(2, dtype=torch.int64), caches)
        assert caches.lengths == [2, 2]
        assert caches.held_bytes == caches._store.committed_bytes == 2 * SCALE.page_size  # nobody came


def test_who_finds_no_memory_has_not_joined(net: batching.Decoder, device: str) -> None:
    shared = torch_vmm.SharedMemoryPool(3 * SCALE.page_size, device)
    with shared.register_model("caches"):
        caches = batching.caches_of("elastic", net, SCALE)
    assert isinstance(caches, batching.ElasticCaches)
    caches.join(100, reserved=300)  # a page is 256 positions
    assert caches.held_bytes == 2 * SCALE.page_size
    with pytest.raises(torch.OutOfMemoryError):
        caches.join(300)
    assert caches.lengths == [100]
    caches.join(200)
    caches.leave([0])
    caches.trim()
    assert caches.held_bytes == SCALE.page_size
    caches.join(300)
    caches.leave([0, 1])
    for _ in range(SCALE.most):
        caches.join(1)
    with pytest.raises(torch.OutOfMemoryError, match="slots"):
        caches.join(1)
    assert caches.lengths == [1] * SCALE.most
    shared.close(force=True)


def test_models_that_do_not_fit_are_served_and_say_what_they_say_alone(device: str) -> None:
    limit = many.LIMITS["small"]
    server, requests = many.Server(many.NAMES, SCALE, limit, device), many.drawn(many.NAMES, SCALE, device)
    assert sum(model.room for model in server.models.values()) > limit
    server.serve(requests)
    assert all(len(request.tokens) == request.new for request in requests)
    assert server.shared.global_stats().physical_usage <= limit
    models = list(server.models.values())
    assert all(model.naps > 0 for model in models)
    assert [model.cache_pool.memory_allocated() for model in models] == [0, 0, 0]
    for model in models:
        alone = [request for request in many.drawn(many.NAMES, SCALE, device) if request.model == model.name]
        many.Server([model.name], SCALE, limit, device).serve(alone)
        mine = [request for request in requests if request.model == model.name]
        assert [request.tokens for request in mine] == [request.tokens for request in alone]
    assert len({tuple(request.tokens) for request in requests}) > len(requests) // 2


def test_a_table_of_which_little_exists_learns_what_a_dense_one_of_its_rows_learns() -> None:
    plan = embedding.PLANS["small"]
    ids = plan.ids()
    table = embedding.table_of(plan, "cpu")
    losses = embedding.train(table, plan, ids, lambda step: embedding.commit_rows(table, step))
    # The same rows, and no others, in a table that exists.
    rows, compact = torch.unique(ids, return_inverse=True)
    dense = torch.zeros(len(rows), plan.width)
    wanted = embedding.train(dense, replace(plan, rows=len(rows)), ids_as(ids, compact), labels=ids)
    assert losses == wanted
    assert torch.equal(table[rows], dense)
    assert dense.abs().sum() > 0
    assert plan.table_bytes == 8 << 30
    assert table.committed_bytes <= plan.groups * table.page_size


def ids_as(ids: torch.Tensor, compact: torch.Tensor) -> torch.Tensor:
    return compact.view(ids.shape)


# -- Sleep and wake ----------------------------------------------------------------------------------------------------


@pytest.fixture
def sleeper(device: str) -> Iterator[waking.Sleeper]:
    sleeper = waking.Sleeper(waking.SCALES["small"], device)
    with sdpa_kernel(SDPBackend.MATH):  # the one that needs no kernel of CUDA's libraries
        yield sleeper
    sleeper.shared.close(force=True)


def test_layers_that_run_while_others_wake_compute_the_same(sleeper: waking.Sleeper) -> None:
    awake = sleeper.run()
    for _ in range(3):
        seconds, meanwhile = sleeper.timed(sleeper.wake_layer_by_layer)
        assert seconds > 0
        assert torch.equal(meanwhile, awake)
        assert not sleeper.weights.is_asleep
    assert torch.equal(sleeper.timed(sleeper.wake_whole)[1], awake)


def test_every_weight_is_waited_for_before_its_module_runs(
    sleeper: waking.Sleeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    names = {weight.data_ptr(): name for name, weight in sleeper.net.named_parameters()}
    wait_for = torch_vmm.Transfer.wait_for

    def noted(handle: torch_vmm.Transfer, weight: Tensor) -> None:
        told.append(names[weight.data_ptr()])
        wait_for(handle, weight)

    monkeypatch.setattr(torch_vmm.Transfer, "wait_for", noted)
    sleeper.timed(sleeper.wake_layer_by_layer)
    assert sorted(told) == sorted(names.values())  # each once
    assert [name.split(".")[0] for name in told] == sorted(name.split(".")[0] for name in told)  # layer after layer
    told.clear()
    sleeper.run()
    assert told == []  # the hooks are gone


class Borrowing(nn.Module):
    """Uses the weights of a module within without calling it, as nn.MultiheadAttention does."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.within = nn.Parameter(torch.ones(1)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.within.weight) * self.scale


def test_weights_that_a_module_uses_without_calling_theirs_are_waited_for() -> None:
    net, waited = Borrowing(), []

    class Handle:
        def wait_for(self, weight: Tensor) -> None:
            waited.append(weight.data_ptr())

    with waking.each_when_it_is_there(net, Handle()):  # type: ignore[arg-type]
        net(torch.ones(1, 4))
    assert set(waited) == {weight.data_ptr() for weight in net.parameters()}


class Watched:
    """The most that models held at any moment of a block, as a thread sees it."""

    def __init__(self, shared: torch_vmm.SharedMemoryPool) -> None:
        self.most, self._shared, self._ended = 0, shared, threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._ended.wait(0.0005):
            self.most = max(self.most, self._shared.global_stats().physical_usage)

    def __enter__(self) -> Watched:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


WIDTH = 1024


@pytest.fixture
def models(device: str) -> Iterator[recent.Models]:
    models = recent.filled(WIDTH, device)
    yield models
    models.shared.close(force=True)


def alone(name: str, x: Tensor) -> Tensor:
    """What a model computes that has its memory for itself."""
    with torch.inference_mode():
        result: Tensor = recent.network(recent.NAMES.index(name), WIDTH, str(x.device))(x)
    return result


def test_more_models_than_fit_compute_what_each_does_alone(models: recent.Models, device: str) -> None:
    limit = models.shared.physical_limit
    x = torch.randn(16, WIDTH, device=device)
    expected = {name: alone(name, x) for name in recent.NAMES}
    assert sum(model.pool.memory_allocated() for model in models.models.values()) > limit
    with Watched(models.shared) as watched:
        for name in recent.requests(30):
            assert torch.equal(models.run(name, x), expected[name])
            assert models.shared.global_stats().physical_usage <= limit
            assert not models.models[name].pool.is_asleep
    assert 0 < watched.most <= limit
    assert [model.uses for model in models.models.values()] == [recent.requests(30).count(n) for n in recent.NAMES]
    for model in models.models.values():
        assert model.sleeps == model.wakes + model.pool.is_asleep


def test_who_was_not_used_for_longest_goes(models: recent.Models, device: str) -> None:
    x = torch.zeros(1, WIDTH, device=device)
    for name in ("ash", "birch", "cedar", "ash", "elm"):
        models.run(name, x)
    assert {name for name, model in models.models.items() if not model.pool.is_asleep} == {"cedar", "ash", "elm"}


def test_results_are_kept_while_their_model_sleeps(models: recent.Models, device: str) -> None:
    x = torch.randn(4, WIDTH, device=device)
    results = [models.run(name, x) for name in recent.NAMES]
    assert models.models["ash"].pool.is_asleep
    assert all(torch.equal(result, alone(name, x)) for name, result in zip(recent.NAMES, results, strict=True))


def test_several_threads_use_more_models_than_fit(models: recent.Models, device: str) -> None:
    x = torch.randn(4, WIDTH, device=device)
    expected = {name: alone(name, x) for name in recent.NAMES}

    def serve(seed: int) -> bool:
        names = recent.requests(40)[seed::2]  # two threads use two models at most, and three fit
        return all(torch.equal(models.run(name, x), expected[name]) for name in names)

    with Watched(models.shared) as watched, ThreadPoolExecutor(2) as threads:
        assert all(threads.map(serve, range(2)))
    assert watched.most <= models.shared.physical_limit


# -- As they stand -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("continuous_batching", "the same tokens"),
        ("embedding_table", "a table of 8 GiB with 0.02 GiB"),
        ("wake_layer_by_layer", "the same result"),
        ("least_recently_used", "model    uses  wakes  sleeps   (limit 56 MiB)"),
        ("serve_many", "32 of 32 requests were told what they are told when their model has all the memory"),
    ],
)
def test_an_example_runs_as_it_stands(name: str, says: str) -> None:
    command = [sys.executable, "-m", f"examples.{name}", "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert says in done.stdout


@pytest.mark.parametrize(
    ("name", "named", "says"),
    [
        ("continuous_batching", "cuda", "no CUDA device can be used: "),
        ("embedding_table", "foo", "device='foo' is not a device: "),
        ("wake_layer_by_layer", "cpu:1", "there is no device cpu:1"),
        ("least_recently_used", "meta", "device='meta' has no pools: "),
        ("serve_many", "cpu:1", "there is no device cpu:1"),
    ],
)
def test_a_device_that_there_is_not_is_a_line(name: str, named: str, says: str) -> None:
    code = f"""
        import os, sys
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        sys.argv = ["{name}", "--device", "{named}"]
        from examples.{name} import main
        main()
    """
    done = python(code)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(says)
    assert done.stderr.count("\n") == 1


def test_nothing_is_left(net: batching.Decoder) -> None:
    before = torch_vmm.current_pool("cpu").memory_allocated()
    served(net, "elastic")
    assert torch_vmm.current_pool("cpu").memory_allocated() == before


def test_one_that_is_run_as_a_file_says_how_to_run_it(tmp_path: Path) -> None:
    (tmp_path / "torch_vmm").symlink_to(ROOT / "torch_vmm")  # as if it were installed
    words = [sys.executable, str(ROOT / "examples" / "serve_many.py")]
    done = subprocess.run(
        words, cwd=tmp_path, env=dict(os.environ, PYTHONPATH=str(tmp_path)), capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 1
    assert done.stderr == (
        "No module named 'examples': run it as python -m examples.serve_many, in the folder of the repository\n"
    )
