"""torch.compile(mode="reduce-overhead"): cudagraph trees over our allocator, with all checks of their own on.

Whole numbers, so that what is compiled gives exactly what eager gives.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torch_vmm
from tests.gpu.memory import settle
from tests.gpu.native import both
from tests.gpu.patterns import intact, queue_stamp
from tests.gpu.workloads import compile as workload
from tests.gpu.workloads.compile import recorded, reduce_overhead, skips, tree_manager
from tests.gpu.workloads.graphs import numbers
from tests.helpers import MIB
from torch_vmm import pool_of

MakePool = Callable[..., torch_vmm.VirtualMemoryPool]
MakeShared = Callable[..., torch_vmm.SharedMemoryPool]

pytestmark = [
    pytest.mark.needs_gpu("kernels that triton makes"),
    pytest.mark.no_memcheck,  # compiling takes seconds each
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton"),
]


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    with workload.fresh_compiler():
        yield


def in_trees() -> list[dict[str, Any]]:
    """Segments of the pool that all cudagraph trees of the device share."""
    pool_id = tuple(tree_manager().cuda_graphs_thread_pool)
    return [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == pool_id]


def lies_in(tensor: torch.Tensor, segments: list[dict[str, Any]]) -> bool:
    return any(s["address"] <= tensor.data_ptr() < s["address"] + s["total_size"] for s in segments)


# -- Training ----------------------------------------------------------------------------------------------------------


def test_a_compiled_transformer_learns_what_it_learns_eagerly_and_natively() -> None:
    eager = workload.trained_transformer(compiled=False)
    ours, native = both(workload.trained_transformer, compiled=True)
    assert ours == native
    assert ours["skips"] == 0
    assert ours["graphs"] >= 2  # forward and backward
    assert eager["graphs"] == 0
    for key in ("losses", "checksums"):
        torch.testing.assert_close(torch.tensor(ours[key]), torch.tensor(eager[key]), rtol=1e-3, atol=1e-5)
    assert ours["losses"][-1] < ours["losses"][0]


@pytest.mark.usefixtures("_fresh_compiler")
def test_two_models_compiled_in_pools_of_their_own(make_shared: MakeShared) -> None:
    shared = make_shared("1GiB")
    pools = [shared.register_model(name) for name in ("one", "other")]
    default = torch_vmm.current_pool("cuda")
    torch._C._cuda_clearCublasWorkspaces()
    nets, losses = [], []
    for pool in pools:
        with pool:
            model = workload.transformer(layers=1)
            nets.append((model, reduce_overhead(model)))
    for turn in range(2):  # taking turns: each goes on where it was
        for pool, (model, forward) in zip(pools, nets, strict=True):
            with pool:
                losses.append(workload.train(model, forward, steps=4))
        assert recorded() >= 2 * (1 + turn)
    assert losses[0] == losses[1]
    assert losses[2] == losses[3]
    assert losses[0] != losses[2]
    assert skips() == 0
    for pool, (model, forward) in zip(pools, nets, strict=True):
        pool_id = tuple(tree_manager().cuda_graphs_thread_pool)
        assert any(tuple(s["segment_pool_id"]) == pool_id for s in pool.memory_snapshot())
        with pool, torch.no_grad():
            for _ in range(4):
                torch.compiler.cudagraph_mark_step_begin()
                out = forward(torch.ones(8, 32, 64, device="cuda"))
            assert pool_of(out) is pool
            torch.testing.assert_close(out, model(torch.ones(8, 32, 64, device="cuda")), rtol=1e-3, atol=1e-4)
            del out
    assert sum(s["allocated_size"] for s in default.memory_snapshot() if tuple(s["segment_pool_id"]) == pool_id) == 0
    nets.clear()
    del model, forward
    torch._dynamo.reset()
    torch._inductor.cudagraph_trees.reset_cudagraph_trees()
    torch._C._cuda_clearCublasWorkspaces()
    settle()
    assert [pool.memory_allocated() for pool in pools] == [0, 0]
    assert [pool.memory_reserved() for pool in pools] == [0, 0]


# -- Several graphs ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_fresh_compiler")
def test_several_graphs_hand_tensors_to_each_other(make_shared: MakeShared) -> None:
    """Three graphs in a row, with other models at work in between, whose memory no replay may touch."""
    shared = make_shared("256MiB")
    model, other = shared.register_model("compiled"), shared.register_model("other")

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 3 + 1
        torch._dynamo.graph_break()
        z = y * y + x
        torch._dynamo.graph_break()
        return z * 5 - y

    compiled = reduce_overhead(function)
    with model:
        x = numbers(2)
    for turn in range(8):
        x.copy_(numbers(2, turn))
        with model:
            out = compiled(x)
        with other:
            kept = queue_stamp(torch.empty((turn + 1) * 5 * MIB, dtype=torch.uint8, device="cuda"), turn)
        expected = function(numbers(2, turn))
        assert torch.equal(out, expected)
        if turn >= 2:
            assert lies_in(out, in_trees())
        if turn % 3 == 0:
            torch.cuda.empty_cache()
        assert pool_of(out) is model
        with model:
            again = out.clone()
        del out
        with model:
            compiled(x)
        assert intact(kept, turn)
        assert torch.equal(again, expected)
    assert skips() == 0
    assert recorded() >= 3


@pytest.mark.usefixtures("_fresh_compiler")
def test_a_branch_taken_late_starts_from_a_checkpoint() -> None:
    """After replays the allocator knows nothing of what lives: trees tell it, then warm up and record in the rest."""

    def root(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 3, x + 7

    def one(x: torch.Tensor) -> torch.Tensor:
        return x * x - 1

    def other(x: torch.Tensor) -> torch.Tensor:
        return (x + 5) * 2

    compiled = [reduce_overhead(function) for function in (root, one, other)]
    x = numbers(2)

    def turn(seed: int, *branches: int) -> None:
        torch.compiler.cudagraph_mark_step_begin()
        x.copy_(numbers(2, seed))
        first, second = compiled[0](x)
        expected = root(numbers(2, seed))
        for branch in branches:
            found = compiled[branch](first)
            assert torch.equal(found, (one, other)[branch - 1](expected[0]))
        # What lives across the checkpoint is what it was.
        assert torch.equal(first, expected[0])
        assert torch.equal(second, expected[1])

    for seed in range(4):
        turn(seed, 1)
    assert tree_manager().debug_checkpointing_counter == 0
    for seed in range(4, 8):
        turn(seed, 2)
    checkpoints = tree_manager().debug_checkpointing_counter
    assert checkpoints >= 1
    for seed in range(8, 12):
        turn(seed, 1, 2)
        turn(seed, 2, 1)
        turn(seed, 1)
    assert tree_manager().debug_checkpointing_counter > checkpoints
    assert skips() == 0
    assert recorded() >= 4


@pytest.mark.usefixtures("_fresh_compiler")
def test_outputs_of_earlier_steps() -> None:
    """Of warm-ups and recordings they are freed under their tensors, which say so; clones are for ever."""
    compiled = reduce_overhead(lambda x: x * 2 + 1)
    x = numbers(1)
    outputs, clones = [], []
    for turn in range(6):
        torch.compiler.cudagraph_mark_step_begin()
        x.copy_(numbers(1, turn))
        outputs.append(compiled(x))
        clones.append(outputs[-1].clone())
    assert all(torch.equal(one, numbers(1, turn) * 2 + 1) for turn, one in enumerate(clones))
    for warm_up_or_recording in outputs[:2]:
        with pytest.raises(RuntimeError, match="overwritten"):
            warm_up_or_recording + 1
    assert {output.data_ptr() for output in outputs[3:]} == {outputs[-1].data_ptr()}
    assert torch.equal(outputs[-1], clones[-1])
    del outputs  # what was freed under them is not freed again
    torch.compiler.cudagraph_mark_step_begin()
    assert torch.equal(compiled(x), clones[-1])
    assert skips() == 0


# -- Recompilation, mutation -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_fresh_compiler")
def test_new_shapes_are_recorded_anew() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x * 3 + 1).sum(0)

    compiled = reduce_overhead(function)
    for _ in range(4):
        for rows in (64, 640, 96, 6400):
            torch.compiler.cudagraph_mark_step_begin()
            x = torch.arange(rows * 100, device="cuda").view(rows, 100)
            assert torch.equal(compiled(x), function(x))
    assert skips() == 0
    assert recorded() >= 4


class Counting(nn.Module):
    """Changes a buffer of its own in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1000, dtype=torch.int64, device="cuda"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return x * 2 + self.count


@pytest.mark.usefixtures("_fresh_compiler")
def test_a_buffer_that_changes_in_each_call() -> None:
    module = Counting()
    address = module.count.data_ptr()
    compiled = reduce_overhead(module)
    x = torch.arange(1000, device="cuda")
    for turn in range(1, 9):
        torch.compiler.cudagraph_mark_step_begin()
        assert torch.equal(compiled(x), x * 2 + turn)
    assert bool((module.count == 8).all())
    assert module.count.data_ptr() == address
    assert skips() == 0
    assert recorded() >= 1


@pytest.mark.usefixtures("_fresh_compiler")
def test_inputs_that_are_changed_in_place() -> None:
    """The output of a graph may be changed by the next; an ordinary input sends torch around cudagraphs."""

    def change(x: torch.Tensor) -> torch.Tensor:
        x.mul_(3)
        return x + 1

    make, mutate = reduce_overhead(lambda x: x + 5), reduce_overhead(change)
    x = numbers(1)
    for turn in range(6):
        torch.compiler.cudagraph_mark_step_begin()
        x.copy_(numbers(1, turn))
        y = make(x)
        z = mutate(y)
        expected = (numbers(1, turn) + 5) * 3
        assert torch.equal(y, expected)
        assert torch.equal(z, expected + 1)
    assert skips() == 0
    assert recorded() >= 2
    ordinary = numbers(1)
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        assert torch.equal(mutate(ordinary), ordinary + 1)
    assert torch.equal(ordinary, numbers(1) * 27)
    assert skips() >= 1


# -- Backward ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_fresh_compiler")
def test_backward_of_two_compiled_parts(make_pool: MakePool) -> None:
    """Two forwards, then both backwards: what the second saved lives while the first's output does."""
    model = make_pool("1GiB")

    def half(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (x * weight).sin() * x

    compiled = reduce_overhead(half)
    with model:
        x = torch.linspace(-3, 3, 2**18, device="cuda")
        weights = [torch.full_like(x, value).requires_grad_() for value in (0.5, 1.5)]
    for _ in range(5):
        found, expected = [], []
        for function, gradients in ((half, expected), (compiled, found)):
            torch.compiler.cudagraph_mark_step_begin()
            with model:
                out = function(function(x, weights[0]), weights[1])
                out.square().sum().backward()
            gradients += [weight.grad.clone() for weight in weights if weight.grad is not None]
            assert all(pool_of(weight.grad) is model for weight in weights if weight.grad is not None)
            for weight in weights:
                weight.grad = None
            del out
        assert len(found) == len(expected) == 2
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert skips() == 0
    assert recorded() >= 2


# -- Afterwards --------------------------------------------------------------------------------------------------------


def test_nothing_is_left_when_the_trees_are_gone(make_pool: MakePool) -> None:
    model = make_pool("1GiB", physical_limit="256MiB")
    with model:
        x = numbers(8)
        settle()
        before = model.memory_allocated(), model.memory_reserved()
    for _ in range(2):
        with workload.fresh_compiler():
            compiled = reduce_overhead(lambda x: (x * 3 + 1).flip(0) * x)
            with model:
                for _ in range(4):
                    out = compiled(x)
                    with pytest.raises(torch.OutOfMemoryError):
                        torch.empty(300 * MIB, dtype=torch.uint8, device="cuda")
            assert recorded() == 1
            held = sum(segment["total_size"] for segment in in_trees())
            torch.cuda.empty_cache()
            assert sum(segment["total_size"] for segment in in_trees()) == held >= 8 * MIB
            assert model.memory_reserved() >= before[1] + held
            del out, compiled
        settle()
        assert (model.memory_allocated(), model.memory_reserved()) == before
