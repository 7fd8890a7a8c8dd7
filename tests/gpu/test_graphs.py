"""CUDA graphs: what a capture computes, and how long its memory stays.

What a capture may use is in test_capture_memory.py; graphs of several models, and captures that fail, are in
test_graph_pools.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

import torch_vmm
from tests.gpu.conftest import Sleep
from tests.gpu.memory import bytes_in, lies_in, meets, places, segments_of, settle
from tests.gpu.native import both
from tests.gpu.patterns import intact, queue_check, queue_stamp
from tests.gpu.workloads import graphs
from tests.gpu.workloads.graphs import MODES, POOLS, captured, chain, numbers, other_stream
from tests.helpers import MIB, rounded
from torch_vmm import pool_of

pytestmark = pytest.mark.usefixtures("random_generator_is_ready")

MakePool = Callable[..., torch_vmm.VirtualMemoryPool]
MakeShared = Callable[..., torch_vmm.SharedMemoryPool]


# -- What a graph computes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "on_side_stream"), [("global", False), ("thread_local", True), ("relaxed", True)], ids=MODES
)
@pytest.mark.parametrize("pool", POOLS)
def test_a_graph_computes_and_counts_as_under_the_native_allocator(pool: str, mode: str, on_side_stream: bool) -> None:
    ours, native = both(graphs.counted, pool=pool, mode=mode, on_side_stream=on_side_stream)
    assert ours == native
    assert ours["right"]
    assert ours["captured"] == ours["replayed"]
    assert ours["captured"]["allocated_bytes.all"] == 2 * MIB
    assert set(ours["ended"].values()) == {0}


def test_random_numbers_of_a_graph_are_those_of_the_native_allocator() -> None:
    ours, native = both(graphs.random_numbers, seed=5, replays=4)
    assert ours == native
    assert len(set(ours)) == len(ours)


@pytest.mark.parametrize("training", [graphs.graphed_callables, graphs.whole_step], ids=lambda f: f.__name__)
def test_graphed_training_gives_what_eager_training_gives(training: Callable[..., list[float]]) -> None:
    eager = training(graphed=False)
    ours, native = both(training, graphed=True)
    assert ours == native
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(eager), rtol=1e-4, atol=1e-6)
    assert eager[0] != eager[1]


def test_graphed_training_in_a_model_takes_that_models_memory(make_pool: MakePool) -> None:
    """Backward runs on autograd's threads: their memory is the capture's too."""
    model = make_pool("4GiB")
    default = torch_vmm.current_pool("cuda")
    with model:
        layer = graphs.net(256)
        x = torch.randn(128, 256, device="cuda")

        def step() -> torch.Tensor:
            loss = layer(x).square().mean()
            gradients = torch.autograd.grad(loss, list(layer.parameters()))
            return torch.cat([gradient.flatten() for gradient in gradients])

        for _ in range(2):  # at first cuBLAS makes its workspaces, which are everybody's
            before = default.memory_allocated()
            graph, gradients = captured(step)
            expected = step()
    graph.replay()
    torch.testing.assert_close(gradients, expected)
    assert pool_of(gradients) is model
    assert lies_in(gradients, segments_of(graph.pool()))
    assert not meets(x, segments_of(graph.pool()))
    assert default.memory_allocated() == before


def test_a_kept_graph_can_be_instantiated_again() -> None:
    x = numbers(1)
    graph, out = captured(lambda: chain(x), keep=True)
    assert graph.raw_cuda_graph() != 0
    for seed in range(3):
        graph.instantiate()
        x.copy_(numbers(1, seed))
        graph.replay()
        assert torch.equal(out, chain(numbers(1, seed)))


def test_dropout_in_a_graphed_module_draws_anew_each_time() -> None:
    layer = nn.Dropout(0.5).cuda().train()
    x = torch.ones(10_000, device="cuda")
    graph, out = captured(lambda: layer(x))
    found = []
    for _ in range(3):
        graph.replay()
        found.append(out.clone())
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])
    assert all(0.4 < float((one == 0).float().mean()) < 0.6 for one in found)


# -- For how long ------------------------------------------------------------------------------------------------------


def test_a_graphs_memory_stays_while_it_lives_and_goes_with_it(make_shared: MakeShared) -> None:
    shared = make_shared(112 * MIB)
    owner, other = shared.register_model("owner"), shared.register_model("other")
    with owner:
        x, result = numbers(8), torch.empty_like(numbers(8))
        settle()
        before = owner.memory_reserved()

        def work() -> torch.Tensor:
            temporary = chain(x)
            result.copy_(temporary)
            return torch.cat([temporary, temporary, temporary])

        graph, out = captured(work)
    pool_id = graph.pool()
    held = places(segments_of(pool_id))
    assert sum(size for _, size in held) >= 32 * MIB
    del out
    assert owner.memory_allocated() == 16 * MIB  # x and result: the graph holds nothing that is counted as in use
    for give_back in (torch.cuda.empty_cache, owner.empty_cache, owner.compact, owner.trim):
        give_back()
        assert places(segments_of(pool_id)) == held
    free = shared.physical_limit - shared.global_stats().physical_usage
    with pytest.raises(torch.OutOfMemoryError):
        bytes_in(other, free + 16 * MIB)
    filler = queue_stamp(bytes_in(other, free // (2 * MIB) * 2 * MIB), 9)
    for seed in range(5):
        x.copy_(numbers(8, seed))
        graph.replay()
        assert torch.equal(result, chain(numbers(8, seed)))
    assert places(segments_of(pool_id)) == held
    assert intact(filler, 9)
    del graph
    queue_stamp(bytes_in(other, 16 * MIB), 10)  # at once: what was the graph's can be had
    assert intact(filler, 9)
    settle()
    assert segments_of(pool_id) == []
    assert owner.memory_reserved() == before


def test_nothing_is_left_of_graphs_that_are_gone() -> None:
    x = numbers(4)
    settle()
    before = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), len(torch.cuda.memory_snapshot()))
    for _ in range(30):
        graph, out = captured(lambda: (chain(x), x.sum()))
        graph.replay()
        del graph, out
    settle()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), len(torch.cuda.memory_snapshot())) == before


def test_outputs_outlive_their_graph(make_pool: MakePool) -> None:
    model = make_pool("1GiB")
    with model:
        x = numbers(16)
        settle()
        before = model.memory_reserved()
        graph, out = captured(lambda: chain(x))
        graph.replay()
        pool_id, during = graph.pool(), model.memory_reserved()
        del graph
        settle()
        assert model.memory_allocated() == 32 * MIB
        assert 32 * MIB <= model.memory_reserved() < during
        assert lies_in(out, segments_of(pool_id))
        for seed in range(8):
            queue_stamp(torch.empty(16 * MIB, dtype=torch.uint8, device="cuda"), seed)
        assert torch.equal(out, chain(x))
    assert pool_of(out) is model
    del out
    settle()
    assert segments_of(pool_id) == []
    assert model.memory_allocated() == 16 * MIB
    assert model.memory_reserved() == before


def test_a_shared_pool_stays_until_the_last_graph_is_gone(make_pool: MakePool) -> None:
    model = make_pool("1GiB")
    with model:
        x = numbers(8)
        settle()
        before = model.memory_reserved()
        handle = torch.cuda.graph_pool_handle()
        made = [captured(lambda number=number: chain(x + number).sum(), pool=handle) for number in range(3)]
    held = places(segments_of(handle))
    assert all(tuple(graph.pool()) == tuple(handle) for graph, _ in made)
    while made:
        for number, (graph, out) in enumerate(made):
            graph.replay()
            assert int(out) == int(chain(x + number).sum())
        del graph, out
        made.pop()
        settle()
        assert places(segments_of(handle)) == (held if made else [])
    assert model.memory_reserved() == before


@pytest.mark.parametrize("how", ["deleted", "reset"])
def test_a_graph_that_ends_during_its_replay_keeps_its_memory_until_the_replay_is_over(
    make_shared: MakeShared, sleep: Sleep, how: str
) -> None:
    shared = make_shared(96 * MIB)
    owner, other = shared.register_model("owner"), shared.register_model("other")
    with owner:
        x = queue_stamp(torch.empty(16 * MIB, dtype=torch.uint8, device="cuda"), 5)
        result = torch.empty_like(x)

        def work() -> torch.Tensor:
            temporary = x.clone()
            late = torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")
            sleep(50)
            result.copy_(temporary)
            return late.fill_(0xAA)

        graph, out = captured(work)
    side = other_stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        graph.replay()
    del out
    if how == "reset":
        graph.reset()
    else:
        del graph
    # 16 MiB are free: the rest is what the replay reads and writes.
    taken = queue_stamp(bytes_in(other, 48 * MIB), 7)
    torch.cuda.synchronize()
    assert intact(taken, 7)
    assert intact(result, 5)


@pytest.mark.parametrize("what", ["aligned", "alias", "elastic", "sparse", "pages"])
def test_what_a_capture_makes_at_addresses_of_its_own_lives_as_long_as_its_graph(
    make_pool: MakePool, what: str
) -> None:
    pool = make_pool("1GiB")
    aliased = torch_vmm.aligned((MIB,))

    def make() -> torch.Tensor:
        if what == "aligned":
            return torch_vmm.aligned((MIB,))
        if what == "alias":
            return torch_vmm.alias(aliased)
        if what == "elastic":
            return torch_vmm.elastic((MIB,), max_shape=(4 * MIB,))
        if what == "sparse":
            sparse = torch_vmm.sparse((MIB,))
            sparse.commit(())
            return sparse
        pool.allocate(0, 4 * MIB)
        return pool.tensor(0, (MIB,), torch.float32)

    out = torch.zeros(8, device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = make()
        made.fill_(2)
        out.copy_(made[-8:])
    del made
    settle()
    for _ in range(2):
        out.zero_()
        graph.replay()
        assert out.tolist() == [2] * 8
    if what == "pages":
        with pytest.raises(torch_vmm.StillInUseError):
            pool.deallocate(0, 4 * MIB)
    del graph
    settle()
    if what == "pages":
        pool.deallocate(0, 4 * MIB)
    assert torch.cuda.memory_allocated() == before


def test_what_an_alias_shows_lives_as_long_as_the_graph_that_was_captured_with_it() -> None:
    shown = torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")  # a block of torch's, on whole chunks
    before = torch.cuda.memory_allocated() - 8 * MIB
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = torch_vmm.alias(shown)
        made.fill_(9)
    address = shown.data_ptr()
    del made, shown
    settle()
    others = [torch.full((8 * MIB,), 3, dtype=torch.uint8, device="cuda") for _ in range(4)]
    assert address not in [other.data_ptr() for other in others]
    graph.replay()
    torch.cuda.synchronize()
    assert all(bool(other.eq(3).all()) for other in others)
    del graph, others
    settle()
    assert torch.cuda.memory_allocated() == before


def test_a_graph_replayed_on_other_streams() -> None:
    x = numbers(2)
    graph, out = captured(lambda: chain(x))
    for seed in range(8):
        stream = other_stream()
        with torch.cuda.stream(stream):
            stream.wait_stream(torch.cuda.default_stream())
            x.copy_(numbers(2, seed))
            graph.replay()
            verdict = (out != chain(numbers(2, seed))).sum()
        torch.cuda.default_stream().wait_stream(stream)
        assert int(verdict) == 0


# -- Beside other threads ----------------------------------------------------------------------------------------------


@pytest.mark.no_memcheck  # minutes: each thread waits for the other's every call
@pytest.mark.parametrize("mode", MODES)
def test_captures_while_another_thread_works_in_another_model(make_shared: MakeShared, mode: str) -> None:
    shared = make_shared("256MiB")
    mine, theirs = shared.register_model("mine"), shared.register_model("theirs")
    stream = other_stream()
    stop = threading.Event()
    verdicts: list[torch.Tensor] = []

    def work() -> None:  # waits for nothing on the GPU: a capture in global mode forbids that to all threads
        turn = 0
        with torch.cuda.stream(stream):
            while not stop.is_set():
                block = queue_stamp(bytes_in(theirs, 1 + turn * 777_777 % (24 * MIB)), turn)
                verdicts.append(queue_check(block, turn))
                del block
                turn += 1

    with mine:
        x = numbers(2)
        expected = chain(x)
    torch.cuda.synchronize()
    thread = threading.Thread(target=work)
    thread.start()
    try:
        made = []
        for _ in range(12):
            with mine:
                made.append(captured(lambda: chain(x), mode=mode))
            for graph, _ in made:
                graph.replay()
            del graph, _
        assert all(torch.equal(out, expected) for _, out in made)
    finally:
        stop.set()
        thread.join()
    assert len(verdicts) > 12
    stream.synchronize()  # the last of them are still queued there
    assert int(torch.stack(verdicts).sum()) == 0
    segments = [segments_of(graph.pool()) for graph, _ in made]
    assert all(lies_in(out, of) for (_, out), of in zip(made, segments, strict=True))
    assert all(pool_of(out) is mine for _, out in made)
    assert theirs.memory_allocated() == 0
    del made
    settle()
    assert mine.memory_allocated() == rounded(2 * x.nbytes)


@pytest.mark.no_memcheck  # minutes: each thread waits for the other's every call
def test_two_threads_capture_at_once(make_shared: MakeShared) -> None:
    shared = make_shared("256MiB")
    barrier = threading.Barrier(2)
    one_at_a_time = threading.Lock()  # torch's own list of captures, for pinned memory, knows no threads
    wrong: list[str] = []

    def work(model: torch_vmm.VirtualMemoryPool, seed: int) -> None:
        try:
            stream = other_stream()
            with model, torch.cuda.stream(stream):
                x = numbers(2, seed)
                expected = chain(x)
                stream.synchronize()
                for turn in range(5):
                    with one_at_a_time:
                        graph = torch.cuda.CUDAGraph()
                        graph.capture_begin(capture_error_mode="thread_local")
                    barrier.wait(timeout=60)
                    out = chain(x)
                    barrier.wait(timeout=60)
                    with one_at_a_time:
                        graph.capture_end()
                    graph.replay()
                    if not torch.equal(out, expected) or pool_of(out) is not model:
                        wrong.append(f"{seed}, turn {turn}")
                    if not lies_in(out, segments_of(graph.pool())):
                        wrong.append(f"{seed}, turn {turn}: in a segment of another pool")
                    with one_at_a_time:
                        del graph
        except Exception as error:
            barrier.abort()
            wrong.append(repr(error))

    chain(numbers(2))
    models = [shared.register_model(name) for name in ("one", "other")]
    threads = [threading.Thread(target=work, args=(model, seed)) for seed, model in enumerate(models)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    settle()
    assert [model.memory_allocated() for model in models] == [0, 0]
