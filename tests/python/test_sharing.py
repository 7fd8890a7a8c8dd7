"""benchmarks/sharing: the trace, the server's order, models in pools, and the search for a load."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import torch_vmm
from benchmarks import sharing
from benchmarks.measurement import Row, percentile
from benchmarks.sharing import hosted, measuring, picture, trace
from benchmarks.sharing.scales import Scale, scale_of
from benchmarks.sharing.server import AllResident, Clock, Model, Request, Server, Told
from benchmarks.sharing.trace import Arrival, Shape
from tests.helpers import ROOT

SMALL, FULL = scale_of("small", 0), scale_of("full", 79 << 30)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """What is computed is so small that threads, on a machine that others use, would wait for each other most."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# -- The trace ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "load", "digest"),
    [
        (FULL.shape, FULL.most_load, 2052838077),
        (FULL.with_sleepers, FULL.most_load, 1026979938),
        (SMALL.shape, SMALL.most_load, 130395891),
    ],
)
def test_the_trace_is_the_same_wherever_it_is_drawn(shape: Shape, load: float, digest: int) -> None:
    drawn = trace.drawn(shape, load)
    assert trace.digest(drawn) == digest
    assert trace.digest(trace.drawn(shape, load, seed=1)) != digest


def test_bursts_move_from_model_to_model() -> None:
    shape, load = FULL.shape, FULL.most_load
    drawn = trace.drawn(shape, load)
    assert drawn == sorted(drawn, key=lambda each: each.at)
    assert len(drawn) == pytest.approx(load * shape.seconds, abs=6)
    assert all(shape.prompts[0] <= each.prompt <= shape.prompts[1] for each in drawn)
    assert all(shape.new[0] <= each.new <= shape.new[1] for each in drawn)
    for period, (model, _) in enumerate(shape.bursting):
        begin = period * shape.period_s
        own = [each for each in drawn if each.model == model]
        within = [each for each in own if begin <= each.at < begin + shape.burst_s]
        assert len(within) >= shape.burst_share * len(own) - 1


def test_a_higher_load_is_a_lower_one_with_more_among_it() -> None:
    drawn = trace.drawn(FULL.with_sleepers, FULL.most_load)
    half, quarter = trace.played(drawn, 0.5), trace.played(drawn, 0.25)
    assert set(quarter) < set(half) < set(drawn) == set(trace.played(drawn, 1.0))
    for model in {each.model for each in drawn}:  # each has its part of it
        counts = [sum(each.model == model for each in those) for those in (drawn, half, quarter)]
        assert counts[1] == pytest.approx(counts[0] / 2, abs=2)
        assert counts[2] == pytest.approx(counts[0] / 4, abs=2)
    assert {each.name for each in FULL.sleeping} < {each.model for each in drawn}


# -- The server --------------------------------------------------------------------------------------------------------


class Still(Clock):
    """Stands still but for what is computed and waited for."""

    def start(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        return self.at

    def wait_until(self, at: float) -> None:
        self.at = max(self.at, at)


class Memory:
    def __init__(self, requests: int) -> None:
        self.free = requests


class Counting:
    """A model that takes 100 ms for a prompt and 10 ms for a step, and says its requests' tokens by number."""

    def __init__(self, name: str, memory: Memory, clock: Still) -> None:
        self.name, self.memory, self.clock = name, memory, clock
        self.running: list[int] = []
        self.admitted: list[float] = []

    def admit(self, request: Request) -> int:
        if not self.memory.free:
            raise torch.OutOfMemoryError("none is free")
        self.memory.free -= 1
        self.admitted.append(request.arrival.at)
        self.running.append(1)
        self.clock.at += 0.1
        return 0

    def step(self) -> None:
        self.clock.at += 0.01

    def said(self) -> list[int]:
        said = list(self.running)
        self.running = [count + 1 for count in self.running]
        return said

    def leave(self, rows: list[int]) -> None:
        self.memory.free += len(rows)
        self.running = [count for row, count in enumerate(self.running) if row not in rows]


def asked(model: str, *times: float, new: int = 3) -> list[Arrival]:
    return [Arrival(at, model, 1, new, 0.0) for at in times]


def served(
    groups: Sequence[Sequence[Model]], clock: Clock, arrivals: list[Arrival], goal_s: float = 60.0
) -> list[Request]:
    return Server(groups, goal_s, clock).serve(sorted(arrivals, key=lambda each: each.at))


def test_every_request_gets_its_tokens_in_order() -> None:
    clock = Still()
    models = [Counting(name, Memory(2), clock) for name in "ab"]
    requests = served([models], clock, asked("a", 0, 0, 0.05, 1) + asked("b", 0.1, new=1) + asked("b", 5, new=9))
    assert all(request.tokens == list(range(request.arrival.new)) for request in requests)
    assert [model.memory.free for model in models] == [2, 2]
    assert requests[-1].first_s == pytest.approx(0.1)  # it came when nobody else was there
    told = Told.of(requests, 60.0)
    assert (told.offered, told.admitted, told.refused, told.late) == (6, 6, 0, 0)
    assert told.tokens == 4 * 3 + 1 + 9


def test_who_finds_no_memory_waits_and_nobody_overtakes_within_a_limit() -> None:
    clock, memory = Still(), Memory(1)
    a, b = Counting("a", memory, clock), Counting("b", memory, clock)
    requests = served([[a, b]], clock, asked("a", 0.0, 0.01) + asked("b", 0.02), goal_s=60.0)
    firsts = [request.arrival.at + (request.first_s or 0.0) for request in requests]
    assert firsts == sorted(firsts)
    assert requests[1].first_s == pytest.approx(0.1 + 2 * 0.01 + 0.1 - 0.01)  # after the first had its three tokens


def test_models_with_a_limit_of_their_own_do_not_wait_for_each_other() -> None:
    clock = Still()
    a, b = Counting("a", Memory(1), clock), Counting("b", Memory(1), clock)
    requests = served([[a], [b]], clock, asked("a", 0.0, 0.01, new=50) + asked("b", 0.02))
    late, other = requests[1].first_s, requests[2].first_s
    assert late is not None
    assert other is not None
    assert other < 0.25 < 0.5 < late


def test_who_has_waited_longer_than_the_goal_is_refused() -> None:
    clock = Still()
    a = Counting("a", Memory(1), clock)
    requests = served([[a]], clock, asked("a", 0.0, 0.1, 0.2, 3.0, new=100), goal_s=0.5)
    assert [request.is_refused for request in requests] == [False, True, True, False]
    told = Told.of(requests, 0.5)
    assert (told.offered, told.admitted, told.refused, told.late) == (4, 2, 2, 0)
    assert told.first_p99_s == float("inf")
    assert told.first_p50_s == pytest.approx(0.1)


def test_running_requests_go_on_between_prompts() -> None:
    clock = Still()
    a = Counting("a", Memory(9), clock)
    requests = Server([[a]], 60.0, clock, prefills=2).serve(asked("a", *[0.0] * 5, new=4))
    firsts = [request.first_s or 0.0 for request in requests]
    gaps = [later - earlier for earlier, later in pairwise(firsts)]
    assert gaps == pytest.approx([0.1, 0.11, 0.1, 0.11])


def test_it_can_end_when_everybody_was_heard() -> None:
    clock = Still()
    a = Counting("a", Memory(1), clock)
    requests = Server([[a]], 60.0, clock).serve(asked("a", 0.0, 0.1, new=1000), to_the_end=False)
    assert all(request.first_s is not None for request in requests)
    assert len(requests[1].tokens) < 1000
    assert a.memory.free == 1
    assert a.running == []


class OneAtATime(AllResident):
    """Of the models one is there; another one comes 0.3 s after it was called."""

    def __init__(self, there: str, clock: Still) -> None:
        self.there, self.clock = there, clock
        self.coming: tuple[str, float] | None = None
        self.calls: list[tuple[str, list[str]]] = []
        self.room_asked: list[list[str]] = []

    def is_there(self, model: Model) -> bool:
        if self.coming is not None and self.clock.now() >= self.coming[1]:
            self.there, self.coming = self.coming[0], None
        return model.name == self.there

    def call(self, model: Model, idle: list[Model]) -> bool:
        names = [each.name for each in idle]
        self.calls.append((model.name, names))
        if self.there in names:
            self.there, self.coming = "", (model.name, self.clock.now() + 0.3)
        return self.coming is not None and self.coming[0] == model.name

    def make_room(self, idle: list[Model]) -> None:
        self.room_asked.append([each.name for each in idle])


def test_who_sleeps_is_called_when_nobody_needs_the_others() -> None:
    clock = Still()
    models = [Counting(name, Memory(1), clock) for name in "abc"]
    residence = OneAtATime("a", clock)
    arrivals = asked("a", 0.0, new=30) + asked("b", 0.05) + asked("c", 4.0)
    requests = Server([models], 60.0, clock, residence=residence).serve(arrivals)
    assert all(request.tokens == list(range(request.arrival.new)) for request in requests)
    assert residence.calls[0] == ("b", ["c"])  # a computes
    assert residence.calls[-1][0] == "c"
    assert requests[2].first_s == pytest.approx(0.4, abs=0.01)


def test_who_waits_in_front_may_take_the_place_of_whom_others_wait_for() -> None:
    clock = Still()
    models = [Counting(name, Memory(1), clock) for name in "abc"]
    residence = OneAtATime("a", clock)
    arrivals = asked("b", 0.0) + asked("a", 0.0) + asked("b", 0.0)
    requests = Server([models], 60.0, clock, residence=residence).serve(arrivals)
    assert residence.calls[0] == ("b", ["c", "a"])  # one for whom nobody waits would go first
    assert [each.first_s for each in requests] == pytest.approx([0.4, 0.82, 1.24], abs=0.02)


def test_only_models_unused_for_as_long_as_the_goal_make_room() -> None:
    clock, memory = Still(), Memory(2)
    models = [Counting(name, memory, clock) for name in "abc"]
    residence = OneAtATime("", clock)
    residence.is_there = lambda model: True  # type: ignore[method-assign]
    arrivals = asked("b", 0.0) + asked("c", 2.0) + asked("a", 2.2, 2.2, 2.2, new=100)
    Server([models], 1.5, clock, residence=residence).serve(arrivals)
    assert residence.room_asked
    assert all(names == ["b"] for names in residence.room_asked)


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(k) for k in range(1, 101)]
    assert [percentile(values, share) for share in (0.5, 0.99, 1.0)] == [50.0, 99.0, 100.0]
    assert percentile([7.0], 0.99) == 7.0
    assert percentile([1.0, 2.0, 3.0], 0.5) == 2.0
    assert percentile([1.0, 2.0], 0.5) == 1.0


# -- The search for a load ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [-9, -4, -1, 0, 1, 2, 3, 4, 7, 8, 13])
@pytest.mark.parametrize("begin", [0, 4])
def test_the_highest_load_that_holds_is_found(threshold: int, begin: int) -> None:
    played: list[int] = []

    def holds(step: int) -> bool:
        played.append(step)
        return step <= threshold

    assert measuring.highest(holds, begin, tries=20, most=40) == (threshold, threshold + 1)
    assert len(set(played)) == len(played)


def test_a_search_that_ends_early_says_what_it_does_not_know() -> None:
    assert measuring.highest(lambda step: True, 0, tries=2, most=40) == (4, None)
    assert measuring.highest(lambda step: True, 0, tries=9, most=6) == (6, None)
    assert measuring.highest(lambda step: False, 0, tries=2, most=40) == (None, -4)


# -- Models in pools ---------------------------------------------------------------------------------------------------


def close(groups: list[list[hosted.Hosted]]) -> None:
    for shared in {id(model.shared): model.shared for group in groups for model in group}.values():
        shared.close(force=True)


@pytest.fixture(scope="module")
def together(device: str) -> Iterator[list[list[hosted.Hosted]]]:
    groups = hosted.under_one_limit(SMALL, device)
    yield groups
    close(groups)


def at_once(scale: Scale, names: Sequence[str], each: int = 3) -> list[Arrival]:
    return [Arrival(0.0, name, 20 + 5 * k, 6 + k, 0.0) for k in range(each) for name in names]


def fresh(groups: list[list[hosted.Hosted]]) -> list[list[hosted.Hosted]]:
    """So that they draw the same prompts."""
    for group in groups:
        for model in group:
            model._generator.manual_seed(0)
    return groups


def test_a_request_among_others_is_told_what_it_is_told_alone(together: list[list[hosted.Hosted]], device: str) -> None:
    names = [spec.name for spec in SMALL.resident]
    requests = Server(fresh(together), 60.0).serve(at_once(SMALL, names))
    for spec in SMALL.resident:
        groups = hosted.alone(spec, SMALL, device)
        mine = [request for request in requests if request.arrival.model == spec.name]
        try:
            for request in mine:  # in the order of their prompts
                (by_itself,) = Server(groups, 60.0).serve([request.arrival])
                assert by_itself.tokens == request.tokens
        finally:
            close(groups)
        assert len({tuple(request.tokens) for request in mine}) > 1


def test_memory_goes_back_and_the_room_to_compute_stays(together: list[list[hosted.Hosted]]) -> None:
    Server(fresh(together), 60.0).serve(at_once(SMALL, [spec.name for spec in SMALL.resident]))
    for model in together[0]:
        assert model.cache_pool.memory_allocated() == 0
        assert model.pool.floor == model.working_bytes >= model.pool.memory_allocated() > 0
    assert together[0][0].shared.physical_limit == SMALL.limit


def test_a_third_is_full_when_the_whole_is_not(together: list[list[hosted.Hosted]], device: str) -> None:
    groups = hosted.in_thirds(SMALL, device)
    try:
        assert [group[0].shared.physical_limit for group in groups] == [SMALL.limit // 3] * 3
        request = Request(Arrival(0.0, SMALL.resident[0].name, 40, 24, 0.0))
        counts = []
        for model in (groups[0][0], together[0][0]):
            count = 0
            with contextlib.suppress(torch.OutOfMemoryError):
                while True:
                    model.admit(request)
                    count += 1
            model.step()  # those that are there go on
            assert len(model.said()) == count
            model.leave(list(range(count)))
            counts.append(count)
        assert counts[1] >= 2 * counts[0] > 0
    finally:
        close(groups)


def test_models_that_do_not_fit_sleep_and_wake(device: str) -> None:
    groups, sleepers = hosted.with_sleepers(SMALL, device)
    models = {model.name: model for model in groups[0]}
    try:
        assert sum(model.working_bytes for model in models.values()) > SMALL.limit
        assert [models[spec.name].pool.is_asleep for spec in SMALL.sleeping] == [True, True]
        first, second = (spec.name for spec in SMALL.sleeping)
        server = Server(groups, 60.0, residence=sleepers)
        arrivals = at_once(SMALL, [first, SMALL.resident[0].name, second], each=2)
        requests = server.serve(arrivals)
        assert all(len(request.tokens) == request.arrival.new for request in requests)
        assert sleepers.woken >= 2
        again = Server(fresh(groups), 60.0, residence=sleepers).serve(arrivals[:1])
        fresh(groups)
        assert again[0].tokens == Server(groups, 60.0, residence=sleepers).serve(arrivals[:1])[0].tokens
        shared = groups[0][0].shared
        assert shared.global_stats().physical_usage <= shared.physical_limit
    finally:
        close(groups)


def test_transformers_own_decoding_says_the_same(together: list[list[hosted.Hosted]]) -> None:
    pytest.importorskip("transformers")
    for model in together[0]:
        fresh(together)
        arrival = Arrival(0.0, model.name, 31, 12, 0.0)
        (request,) = Server(together, 60.0).serve([arrival])
        prompt = torch.randint(0, model._vocabulary, (31,), generator=torch.Generator().manual_seed(0))
        net = model._net._model  # type: ignore[attr-defined]
        ours = net.config._attn_implementation
        net.set_attn_implementation("sdpa")
        try:
            with torch.no_grad(), model.pool:
                text = prompt[None]
                for _ in range(arrival.new):
                    text = torch.cat([text, net(text).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
        finally:
            net.set_attn_implementation(ours)
        assert request.tokens == text[0, 31:].tolist()


# -- What is said of it ------------------------------------------------------------------------------------------------


def test_a_load_is_measured_and_drawn(together: list[list[hosted.Hosted]], tmp_path: Path) -> None:
    scale = replace(SMALL, shape=replace(SMALL.shape, period_s=0.1, burst_s=0.05), goal_s=60.0, searched=1)
    trial = measuring.Trial(scale, scale.shape, together, "three models")
    trial.search(0, tries=1)
    found = {(row.case, row.metric): row.value for row in trial.rows}
    offered = found["three models, 50 requests a second", "offered"]
    assert offered == len(trace.played(trace.drawn(scale.shape, scale.most_load), 50 / scale.most_load))
    assert found["three models, 50 requests a second", "refused"] == 0
    goal = "three models, first token within 60 s for 99 %"
    assert found[goal, "admitted load"] == pytest.approx(offered / scale.shape.seconds)
    assert (goal, "lowest load that misses it") not in found
    over_time = [row for row in trial.rows if row.case.endswith(measuring.OVER_TIME)]
    names = {row.metric for row in over_time}
    assert names == {"seconds", *together[0][0].shared.models}
    rows = [
        Row(case=row.case, allocator="torch_vmm", metric=row.metric, value=0.0, unit=row.unit, runs=[])
        for row in over_time
    ]
    for row, measured in zip(rows, over_time, strict=True):
        same = [each.value for each in over_time if each.metric == measured.metric]
        row["runs"] = same
    pytest.importorskip("matplotlib")
    assert picture.draw(rows, tmp_path / "picture.png") == "picture.png"
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    assert picture.draw([], tmp_path / "none.png") is None


def row(case: str, allocator: str, metric: str, value: float) -> Row:
    return Row(case=case, allocator=allocator, metric=metric, value=value, unit="requests/s", runs=[value])


def test_it_is_said_how_far_the_aims_are() -> None:
    lone = "one request, llama-3b, the others idle"
    rows = [
        row("three", "static", "admitted load", 3.0),
        row("three", "static", "lowest load that misses it", 3.5),
        row("three", "torch_vmm", "admitted load", 7.5),
        row(lone, "torch_vmm", "time to first token", 21.0),
        row(lone, "alone", "time to first token", 20.0),
    ]
    said = sharing.remarks(rows)
    assert said[0] == "three: 2.50 times the load of static thirds (aim: 2)"
    assert "no load that torch_vmm misses was found" in said[1]
    assert said[2] == f"{lone}: 1.050 times what it takes alone (aim: 1.1)"


def test_the_benchmark_runs_on_host_memory(tmp_path: Path) -> None:
    options = ["--device", "cpu", "--quick", "--allocators", "alone", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "benchmarks", *options, "sharing"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "sharing-cpu.json").read_text())
    assert result["benchmark"] == "sharing"
    cases = {each["case"] for each in result["rows"]}
    assert {f"one request, {spec.name}, the others idle" for spec in SMALL.resident} < cases


def test_a_smaller_gpu_gets_smaller_models_and_a_larger_one_the_same() -> None:
    assert scale_of("full", 150 << 30) == FULL
    half = scale_of("full", 40 << 30)
    assert half.limit == 38 << 30
    for small, full in zip(half.resident, FULL.resident, strict=True):
        assert small.width == full.width
        assert small.layers == pytest.approx(full.layers / 2, abs=1)


def test_nothing_is_left(device: str) -> None:
    before = torch_vmm.current_pool(device).memory_allocated()
    groups = hosted.alone(SMALL.resident[0], SMALL, device)
    close(groups)
    assert torch_vmm.current_pool(device).memory_allocated() == before
