"""CUDA graphs of several models beside each other, at their limits, and captures that fail."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable

import pytest
import torch

import torch_vmm
from tests.gpu.conftest import Busy
from tests.gpu.memory import bytes_in, places, segments_of, settle
from tests.gpu.native import both
from tests.gpu.patterns import intact, queue_check, queue_stamp
from tests.gpu.workloads import graphs
from tests.gpu.workloads.graphs import captured, chain, numbers, other_stream
from tests.helpers import MIB
from tests.standin.control import less
from torch_vmm import pool_of

pytestmark = pytest.mark.usefixtures("random_generator_is_ready")

MakePool = Callable[..., torch_vmm.VirtualMemoryPool]
MakeShared = Callable[..., torch_vmm.SharedMemoryPool]


# -- Whose memory ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_is", ["outside", "inside"])
def test_a_graphs_memory_counts_in_its_model(make_pool: MakePool, model_is: str) -> None:
    model = make_pool("1GiB", name="captured")
    default = torch_vmm.current_pool("cuda")
    with model:
        x = numbers(8)
    chain(x)
    settle()
    before, elsewhere = model.memory_stats(), default.memory_stats()
    graph = torch.cuda.CUDAGraph()
    if model_is == "outside":
        with model, torch.cuda.graph(graph):
            out = chain(x)
    else:
        with torch.cuda.graph(graph), model:
            out = chain(x)
    graph.replay()
    after = model.memory_stats()
    assert pool_of(out) is model
    assert after["allocated_bytes.all.current"] - before["allocated_bytes.all.current"] == 8 * MIB
    assert after["active_bytes.all.current"] - before["active_bytes.all.current"] == 8 * MIB
    assert after["allocation.all.current"] - before["allocation.all.current"] == 1
    held = after["reserved_bytes.all.current"] - before["reserved_bytes.all.current"]
    assert held == sum(segment["total_size"] for segment in segments_of(graph.pool()))
    assert held >= 16 * MIB
    assert model.physical_memory_usage == model.memory_reserved()
    assert {tuple(s["segment_pool_id"]) for s in model.memory_snapshot()} == {(0, 0), tuple(graph.pool())}
    for key in ("allocated_bytes.all.current", "reserved_bytes.all.current"):
        assert default.memory_stats()[key] == elsewhere[key]
    assert torch.equal(out, chain(numbers(8)))


def test_the_models_limit_holds_in_a_capture_and_beside_the_graph(make_pool: MakePool) -> None:
    model = make_pool("1GiB", physical_limit=64 * MIB, name="narrow")
    with model:
        graph, out = captured(lambda: torch.full((48 * MIB,), 7, dtype=torch.uint8, device="cuda"))
        with pytest.raises(torch.OutOfMemoryError, match="narrow"):
            torch.empty(24 * MIB, dtype=torch.uint8, device="cuda")
        beside = queue_stamp(torch.empty(12 * MIB, dtype=torch.uint8, device="cuda"), 1)
        second = torch.cuda.CUDAGraph()
        with pytest.raises(torch.OutOfMemoryError, match="narrow"):
            with torch.cuda.graph(second, pool=graph.pool()):
                torch.empty(24 * MIB, dtype=torch.uint8, device="cuda")
    assert model.max_memory_reserved() <= 64 * MIB
    graph.replay()
    assert bool((out == 7).all())
    assert intact(beside, 1)


@pytest.mark.parametrize("shared_handle", [False, True], ids=["pools of their own", "one handle for all"])
def test_graphs_of_several_models_share_nothing(make_shared: MakeShared, shared_handle: bool) -> None:
    shared = make_shared("1GiB")
    models = [shared.register_model(f"model-{number}") for number in range(3)]
    handle = torch.cuda.graph_pool_handle() if shared_handle else None
    made = []
    for number, model in enumerate(models):
        with model:
            x = numbers(4, number)
            made.append((x, *captured(lambda x=x: (chain(x), chain(x + 1)), pool=handle)))
    own = [
        set(places([s for s in model.memory_snapshot() if tuple(s["segment_pool_id"]) != (0, 0)])) for model in models
    ]
    assert all(own)
    assert sum(map(len, own)) == len(set().union(*own))
    held = [model.memory_reserved() for model in models]
    for turn in range(less(30, by=5)):
        order = random.Random(turn).sample(range(3), 3)
        for number in order:
            x, graph, _ = made[number]
            x.copy_(numbers(4, 10 * turn + number))
            graph.replay()
        for number in order:
            _, _, (one, other) = made[number]
            expected = numbers(4, 10 * turn + number)
            assert torch.equal(one, chain(expected))
            assert torch.equal(other, chain(expected + 1))
    assert [model.memory_allocated() for model in models] == [12 * MIB] * 3
    assert [model.memory_reserved() for model in models] == held
    del x, graph, _, one, other, made[1]
    settle()
    assert models[1].memory_allocated() == 0
    if not shared_handle:
        assert models[1].memory_reserved() == 0
    assert [models[0].memory_reserved(), models[2].memory_reserved()] == [held[0], held[2]]
    for x, graph, (one, _) in made:
        graph.replay()
        assert torch.equal(one, chain(x))


def test_a_graph_outlives_the_end_of_its_model(make_shared: MakeShared) -> None:
    shared = make_shared("128MiB")
    owner, other = shared.register_model("owner"), shared.register_model("other")
    x, result = numbers(8), torch.empty_like(numbers(8))
    with owner:
        graph, out = captured(lambda: result.copy_(chain(x)) + 1)
    with pytest.raises(torch_vmm.StillInUseError):
        shared.unregister_model("owner")
    shared.unregister_model("owner", force=True)
    filler: list[torch.Tensor] = []

    def fill() -> None:
        while True:
            filler.append(queue_stamp(bytes_in(other, 8 * MIB), len(filler)))

    with pytest.raises(torch.OutOfMemoryError):
        fill()
    for seed in range(3):
        x.copy_(numbers(8, seed))
        graph.replay()
        assert torch.equal(result, chain(x))
        assert torch.equal(out, result + 1)
    assert all(intact(block, seed) for seed, block in enumerate(filler))
    del graph, out
    settle()
    filler.clear()
    assert intact(queue_stamp(bytes_in(other, 120 * MIB), 1), 1)


# -- Growth ------------------------------------------------------------------------------------------------------------


def grow_at_the_limit(make_shared: MakeShared, during: Callable[[], None]) -> None:
    """A capture that needs what another model has just left idle, at the limit."""
    shared = make_shared(96 * MIB)
    giver, taker = shared.register_model("giver"), shared.register_model("taker")
    with taker:
        x = numbers(8)
        x + 1
    held = [bytes_in(giver, 80 * MIB).fill_(0xAA)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with taker, torch.cuda.graph(graph):
        small = x + 1
        during()
        held.clear()
        large = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        queue_stamp(large, 3)
        out = small + 1
    graph.replay()
    assert torch.equal(out, x + 2)
    assert intact(large, 3)
    assert shared.global_stats().physical_usage <= 96 * MIB
    assert giver.memory_reserved() <= 16 * MIB
    assert pool_of(large) is taker
    with pytest.raises(torch.OutOfMemoryError):
        bytes_in(giver, 64 * MIB)
    del large, out, small, graph
    assert intact(queue_stamp(bytes_in(giver, 64 * MIB), 4), 4)


def test_a_capture_takes_what_another_model_left_idle_at_the_limit(make_shared: MakeShared) -> None:
    grow_at_the_limit(make_shared, lambda: None)


@pytest.mark.no_memcheck
def test_a_capture_that_grows_at_the_limit_waits_for_whoever_may_be_reading(
    make_shared: MakeShared, busy: Busy
) -> None:
    stranger = other_stream()

    def work_elsewhere() -> None:
        with torch.cuda.stream(stranger):
            busy(50)

    grow_at_the_limit(make_shared, work_elsewhere)


# -- Thousands of replays ----------------------------------------------------------------------------------------------


def test_thousands_of_replays_while_other_models_come_and_go(make_shared: MakeShared) -> None:
    shared = make_shared("192MiB")
    owner = shared.register_model("graphs")
    others = [shared.register_model(f"other-{number}") for number in range(3)]
    replays, chance = less(2400, by=4), random.Random(3)
    x = numbers(1)
    with owner:
        first, count = captured(lambda: torch.zeros_like(x))
        first.replay()

        def step(count: torch.Tensor = count) -> torch.Tensor:
            count.add_(1)
            return chain(x + count)

        second, out = captured(step, pool=first.pool())
        count.zero_()
        # Its output is dropped: only the ordinary tensor shows whether its memory is still its own.
        result = torch.empty_like(x)
        third = captured(lambda: result.copy_(chain(x * 7)))[0]
    held = {*places(segments_of(first.pool())), *places(segments_of(third.pool()))}
    addresses = count.data_ptr(), out.data_ptr()
    reserved, allocated = owner.memory_reserved(), owner.memory_allocated()
    expected_result = chain(x * 7)
    live: list[tuple[int, torch.Tensor]] = []
    verdicts: list[torch.Tensor] = []
    grown = refused = 0

    def free_one() -> None:
        seed, block = live.pop(chance.randrange(len(live)))
        verdicts.append(queue_check(block, seed))

    for turn in range(1, replays + 1):
        second.replay()
        if turn % 3 == 0:
            third.replay()
        if live and chance.random() < 0.45:
            free_one()
        else:
            model, size = others[chance.randrange(3)], int(2 ** chance.uniform(0, 25))
            usage = model.memory_reserved()
            try:
                live.append((turn, queue_stamp(bytes_in(model, size), turn)))
                grown += model.memory_reserved() > usage and turn > 200
            except torch.OutOfMemoryError:
                refused += 1
                while len(live) > 2:
                    free_one()
        if turn % 60 == 0:
            verdicts.append((out != chain(x + turn)).sum())
            verdicts.append((result != expected_result).sum())
            result.zero_()
            third.replay()
        if turn % 150 == 0:
            torch.cuda.empty_cache()
        if turn % 90 == 0:
            others[chance.randrange(3)].trim()
            owner.trim()
        if turn % 300 == 0:
            assert owner.memory_reserved() == reserved
            assert {*places(segments_of(first.pool())), *places(segments_of(third.pool()))} == held
            assert shared.global_stats().physical_usage <= shared.physical_limit
    assert int(torch.stack(verdicts).sum()) == 0
    assert bool((count == replays).all())
    assert (count.data_ptr(), out.data_ptr()) == addresses
    assert owner.memory_allocated() == allocated
    assert grown > less(20, by=4)
    assert refused < 400
    live.clear()
    del count, out, first, second, third, step
    settle()
    assert owner.memory_allocated() == MIB  # result


# -- Failed captures ---------------------------------------------------------------------------------------------------


def expect_everything_works(model: torch_vmm.VirtualMemoryPool) -> None:
    """Ordinary work, captures and random numbers, in the model and outside of every model."""
    x = numbers(2)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert intact(queue_stamp(bytes_in(model, 3 * MIB), 1), 1)
    with model:
        graph, out = captured(lambda: chain(x))
        drawing, drawn = captured(lambda: torch.rand(1000, device="cuda"), pool=graph.pool())
    outside, beside = captured(lambda: chain(x + 1))
    for one in (graph, drawing, outside):
        one.replay()
    assert torch.equal(out, chain(x))
    assert torch.equal(beside, chain(x + 1))
    assert pool_of(out) is pool_of(drawn) is model
    before = drawn.clone()
    drawing.replay()
    assert not torch.equal(drawn, before)
    assert not torch.equal(torch.rand(1000, device="cuda"), torch.rand(1000, device="cuda"))


def test_out_of_memory_in_the_middle_of_a_capture(make_pool: MakePool) -> None:
    model = make_pool("1GiB", physical_limit=96 * MIB, name="narrow")
    with model:
        x = numbers(8)
        healthy, out = captured(lambda: chain(x))
    settle()
    before = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
    mine = (model.memory_allocated(), model.memory_reserved())
    ooms = model.memory_stats()["num_ooms"]

    def fail() -> None:
        graph = torch.cuda.CUDAGraph()
        kept = []
        with model, torch.cuda.graph(graph):
            kept.append(chain(x))
            while True:
                kept.append(torch.empty(8 * MIB, dtype=torch.uint8, device="cuda"))

    for _ in range(3):
        with pytest.raises(torch.OutOfMemoryError, match=r"(?s)CUDA out of memory\. Tried to allocate.*narrow"):
            fail()
        settle()
        assert (model.memory_allocated(), model.memory_reserved()) == mine
        assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before
    assert model.memory_stats()["num_ooms"] == ooms + 3
    expect_everything_works(model)
    settle()
    assert (model.memory_allocated(), model.memory_reserved()) == mine
    healthy.replay()
    assert torch.equal(out, chain(x))
    assert model.max_memory_reserved() <= 96 * MIB


def test_out_of_memory_in_a_pool_that_a_healthy_graph_uses(make_pool: MakePool) -> None:
    model = make_pool("1GiB", physical_limit=64 * MIB)
    with model:
        x = numbers(4)
        healthy, out = captured(lambda: chain(x))
        held = sum(s["total_size"] for s in segments_of(healthy.pool()))

        def fail() -> None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=healthy.pool()):
                first = chain(x)
                second = torch.empty(80 * MIB, dtype=torch.uint8, device="cuda")
                del first, second

        for _ in range(3):
            with pytest.raises(torch.OutOfMemoryError):
                fail()
            settle()
        assert model.memory_allocated() == 8 * MIB
        assert sum(s["total_size"] for s in segments_of(healthy.pool())) >= held
        again, later = captured(lambda: chain(x + 1), pool=healthy.pool())
    for one, result, expected in ((healthy, out, chain(x)), (again, later, chain(x + 1))):
        one.replay()
        assert torch.equal(result, expected)


def test_too_much_in_a_capture_is_told_as_by_the_native_allocator() -> None:
    ours, native = both(graphs.too_much, gib=1000)
    assert ours == native
    assert ours["type"] == "OutOfMemoryError"
    assert ours["right later"]


def _read_a_number(x: torch.Tensor) -> None:
    x.sum().item()


def _wait_for_the_gpu(x: torch.Tensor) -> None:
    torch.cuda.synchronize()


def _wait_for_the_stream(x: torch.Tensor) -> None:
    torch.cuda.current_stream().synchronize()


def _leave_a_stream_unjoined(x: torch.Tensor) -> None:
    side = other_stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add_(0)


def _raise_an_error_of_their_own(x: torch.Tensor) -> None:
    raise RuntimeError("capture: given up")


_ILLEGAL = (
    _read_a_number,
    _wait_for_the_gpu,
    _wait_for_the_stream,
    _leave_a_stream_unjoined,
    _raise_an_error_of_their_own,
)


@pytest.mark.parametrize("shares", [False, True], ids=["a pool of its own", "a healthy graph's pool"])
@pytest.mark.parametrize("illegal", _ILLEGAL, ids=lambda function: function.__name__.strip("_").replace("_", " "))
def test_an_illegal_call_in_a_capture(
    make_pool: MakePool, illegal: Callable[[torch.Tensor], None], shares: bool
) -> None:
    model = make_pool("1GiB", physical_limit=256 * MIB)
    with model:
        x = numbers(4)
        settle()
        alone = model.memory_reserved()
        healthy, out = captured(lambda: chain(x))
    expected = chain(x)
    x.sum().item()
    handle = healthy.pool() if shares else None
    settle()
    before = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
    mine = (model.memory_allocated(), model.memory_reserved())

    def fail() -> None:
        graph = torch.cuda.CUDAGraph()
        # torch.cuda.graph does not return to the stream before it when its capture ends in an error.
        with model, torch.cuda.stream(torch.cuda.current_stream()):
            with torch.cuda.graph(graph, pool=handle):
                held = [chain(x), torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")]
                illegal(x)
                del held

    for _ in range(2):
        # Of a pool in which a capture has failed torch's allocator of pinned memory believes that it still records.
        with pytest.raises(RuntimeError, match=r"(?i)captur|already recording"):
            fail()
        torch.ones(1, device="cuda")  # torch says nothing of a capture that ended so: the next request finds out
        settle()
        assert (model.memory_allocated(), torch.cuda.memory_allocated()) == (mine[0], before[0])
        if not shares:
            assert (model.memory_reserved(), torch.cuda.memory_reserved()) == (mine[1], before[1])
    expect_everything_works(model)
    settle()
    assert model.memory_allocated() == mine[0]
    healthy.replay()
    assert torch.equal(out, expected)
    del healthy, out
    settle()
    assert model.memory_allocated() == 4 * MIB
    assert model.memory_reserved() == alone


def test_after_an_illegal_call_random_numbers_and_earlier_graphs_go_on_at_once(make_pool: MakePool) -> None:
    """Where torch leaves its random generator believing in the capture, both would be refused."""
    model = make_pool("1GiB")
    x = numbers(1)
    drawing, drawn = captured(lambda: torch.rand(1000, device="cuda"))

    def fail() -> None:
        graph = torch.cuda.CUDAGraph()
        with model, torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
            held = x + 1
            _wait_for_the_gpu(held)

    with pytest.raises(RuntimeError):
        fail()
    first, second = (torch.rand(1000, device="cuda") for _ in range(2))
    assert not torch.equal(first, second)
    found = []
    for _ in range(2):
        drawing.replay()
        found.append(drawn.clone())
    assert not torch.equal(*found)
    expect_everything_works(model)


def test_a_failed_capture_that_a_mempool_finds_first_ends_quietly(make_pool: MakePool) -> None:
    """The pool's release comes before torch ends the capture, which since 2.14 it does again from a destructor."""
    model = make_pool("1GiB")
    x = numbers(1)

    def fail() -> None:
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.MemPool()
        with model, torch.cuda.stream(torch.cuda.current_stream()):
            with torch.cuda.graph(graph), torch.cuda.use_mem_pool(pool):
                held = x + 1
                _wait_for_the_gpu(held)

    with pytest.raises(RuntimeError):
        fail()
    gc.collect()
    expect_everything_works(model)


def test_a_mempool_that_a_graph_merely_entered_stays_another_graphs(make_pool: MakePool) -> None:
    """Since torch 2.15 a graph says which pools its capture entered, and releases them when it goes."""
    model = make_pool("1GiB")
    x = numbers(2)
    out = torch.empty_like(x)
    pool = torch.cuda.MemPool()
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with model:
        with torch.cuda.graph(first, pool=pool.id):
            result = (x + 1) * 2  # what is in between is free in the pool, and used at each replay
        with torch.cuda.graph(second), torch.cuda.use_mem_pool(pool):
            torch.mul(x, 3, out=out)
    del second
    gc.collect()
    torch.cuda.empty_cache()
    first.replay()
    torch.cuda.synchronize()
    assert torch.equal(result, (x + 1) * 2)


def test_a_failed_capture_leaves_a_running_one_alone(make_shared: MakeShared) -> None:
    """One capture goes wrong and its graph is gone while another, on its own stream, is under way."""
    shared = make_shared("256MiB")
    one, other = shared.register_model("one"), shared.register_model("other")
    with one:
        x = numbers(2)
    expected = chain(x)
    torch.cuda.synchronize()
    good, bad = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    streams = [other_stream(), other_stream()]
    with torch.cuda.stream(streams[0]), one:
        good.capture_begin(capture_error_mode="relaxed")
        first = chain(x)
    with torch.cuda.stream(streams[1]), other:
        bad.capture_begin(capture_error_mode="relaxed")
        lost = chain(x)
        with pytest.raises(RuntimeError):
            torch.cuda.current_stream().synchronize()
        with pytest.raises(RuntimeError):
            bad.capture_end()
    del lost, bad
    with torch.cuda.stream(streams[0]), one:
        second = chain(x)
        good.capture_end()
    good.replay()
    torch.cuda.synchronize()
    assert torch.equal(first, expected)
    assert torch.equal(second, expected)
    assert pool_of(first) is pool_of(second) is one
    assert other.memory_allocated() == 0
    settle()
    assert other.memory_reserved() == 0


def test_a_capture_right_after_another_was_dropped(make_pool: MakePool) -> None:
    """By capture_begin and capture_end: no cache is emptied and nothing waited for in between."""
    model = make_pool("1GiB")
    with model:
        x = numbers(2)
        settle()
        alone = model.memory_reserved()
    stream = other_stream()
    with model, torch.cuda.stream(stream):
        for turn in range(20):
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin()
            out = x + turn
            graph.capture_end()
            graph.replay()
            found = out == x + turn
            del graph, out
            assert bool(found.all())
    del found
    settle()
    assert model.memory_allocated() == 2 * MIB
    assert model.memory_reserved() == alone
