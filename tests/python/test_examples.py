"""The worked examples on host memory: what they compute equals what the usual way computes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import torch_vmm
from examples import continuous_batching as batching
from examples import embedding_table as embedding
from tests.helpers import ROOT

SCALE = replace(batching.SCALES["small"], prompts=(20, 300))


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


@pytest.mark.parametrize(
    ("name", "says"),
    [("continuous_batching", "the same tokens"), ("embedding_table", "a table of 8 GiB with 0.02 GiB")],
)
def test_an_example_runs_as_it_stands(name: str, says: str) -> None:
    command = [sys.executable, "-m", f"examples.{name}", "--device", "cpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert says in done.stdout


def test_nothing_is_left(net: batching.Decoder) -> None:
    before = torch_vmm.current_pool("cpu").memory_allocated()
    served(net, "elastic")
    assert torch_vmm.current_pool("cpu").memory_allocated() == before
