"""The programs of benchmarks/workloads do what they say, and compute what they compute under plain torch."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_vmm
from benchmarks.measurement import Part
from benchmarks.workloads import (
    PROGRAMS,
    continuous,
    lora,
    measuring,
    models,
    random_graphs,
    serving,
    static_serving,
    training,
    transformer,
    turns,
    vision,
)
from tests.helpers import MIB, Forked

MEASURED = {
    "working set",
    "peak reserved",
    "reserved / allocated",
    "driver calls, first half",
    "driver calls, second half",
}
TAKEN = {"first pass", "warm pass", "pass after empty_cache", "results", "results, exactly"}
LIMITS = [12 * MIB, 24 * MIB]


def part_of(program: str) -> Part:
    limit: Part = {"limit": 64 * MIB} if PROGRAMS[program].models > 1 else {}
    return {"program": program, "scale": "small", "passes": 2, "emptied": 1, **limit}


# -- Each program, under both allocators -------------------------------------------------------------------------------

WORKER = """
import json
from benchmarks.runner import Job, work
for part in json.loads({parts!r}):
    assert work(json.dumps(Job("workloads", {allocator!r}, "cpu", True, part)._asdict())) == 0
"""


@functools.cache
def started(allocator: str) -> Forked:
    parts = [part_of(program) for program in PROGRAMS]
    if allocator == "torch_vmm":
        parts += [{"program": "train", "scale": "small", "within": limit} for limit in LIMITS]
    return Forked(WORKER.format(parts=json.dumps(parts), allocator=allocator), {})


@functools.cache
def measured(allocator: str) -> dict[str, dict[str, float]]:
    """By case and metric, what the measuring process of that allocator says."""
    for each in ("torch_vmm", "native"):  # both at once
        started(each)
    done = started(allocator).wait(300)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("BENCHMARK RESULT ")]
    answers = [json.loads(line.removeprefix("BENCHMARK RESULT ")) for line in lines]
    assert all(answer["machine"]["device"] == "cpu" for answer in answers)
    found: dict[str, dict[str, float]] = {}
    for answer in answers:
        for case, metric, value, _unit in answer["measurements"]:
            assert metric not in found.setdefault(case, {})
            found[case][metric] = value
    return found


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_computes_what_it_does_under_plain_torch(program: str) -> None:
    ours, plain = measured("torch_vmm")[program], measured("native")[program]
    assert math.isfinite(ours["results"])
    assert ours["results, exactly"] == plain["results, exactly"]
    assert ours["results"] == plain["results"] != 0


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_is_measured(program: str) -> None:
    ours, plain = measured("torch_vmm")[program], measured("native")[program]
    assert ours.keys() == MEASURED | TAKEN
    assert plain.keys() == TAKEN  # torch's allocator of host memory tells nothing of itself
    assert 0 < ours["working set"] <= ours["peak reserved"] < 64 / 1024
    assert ours["reserved / allocated"] == pytest.approx(ours["peak reserved"] / ours["working set"])
    assert min(of[metric] for of in (ours, plain) for metric in TAKEN if metric.endswith(("pass", "empty_cache"))) > 0
    assert ours["driver calls, second half"] <= ours["driver calls, first half"] + 8


def test_no_two_programs_compute_the_same() -> None:
    exactly = [measured("native")[program]["results, exactly"] for program in PROGRAMS]
    assert len(set(exactly)) == len(exactly)


def test_more_memory_has_room_for_a_larger_batch() -> None:
    small, large = (measured("torch_vmm")[f"train within {limit / 2**30:.4g} GiB"]["largest batch"] for limit in LIMITS)
    assert 1 <= small < large < 1000


# -- What each does ----------------------------------------------------------------------------------------------------


def steps_of(program: Any) -> list[float]:
    return [float(result) for result in program.run()]


def shapes_into(module: torch.nn.Module) -> list[tuple[int, ...]]:
    """The shapes of the first argument, of each call from now on."""
    shapes: list[tuple[int, ...]] = []
    module.register_forward_pre_hook(lambda _, given: shapes.append(tuple(given[0].shape)))
    return shapes


def test_training_takes_the_shapes_of_its_plan_and_learns() -> None:
    program = training.Training("cpu", training.TRAIN["small"])
    planned = [shape for step in program.plan for shape in step]
    assert len({batch for batch, _ in planned}) > 1
    assert len({length for _, length in planned}) > 3
    shapes, before = shapes_into(program.net.embed), program.net.head.weight.detach().clone()
    assert len(steps_of(program)) == len(program.plan)
    assert shapes == planned
    assert not torch.equal(program.net.head.weight, before)
    assert all(weight.grad is None for weight in program.net.parameters())


def test_the_largest_batch_of_training_is_as_large_as_the_table_says() -> None:
    sizes = training.TRAIN["full"]
    small = training.Training("cpu", replace(sizes, net=training.TRAIN["small"].net))
    assert 23_000 < max(batch * length for ((batch, length),) in small.plan) <= 8 * 3071


def test_checkpointing_computes_blocks_twice_and_accumulates_into_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    program = training.Training("cpu", training.CHECKPOINTED["small"])
    updates: list[int] = []
    program._optimizer.register_step_post_hook(lambda *_: updates.append(1))
    through_a_block, through_all = shapes_into(program.net.blocks[0]), shapes_into(program.net.embed)
    steps = steps_of(program)
    assert len(updates) == len(steps) == len(program.plan)
    assert len(through_all) == len(steps) * training.CHECKPOINTED["small"].accumulated
    assert len(through_a_block) == 2 * len(through_all)


def test_checkpoints_change_no_loss() -> None:
    sizes = training.CHECKPOINTED["small"]
    losses = []
    for is_checkpointed in (True, False):
        program = training.Training("cpu", replace(sizes, is_checkpointed=is_checkpointed))
        losses.append(steps_of(program))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_serving_grows_its_caches_by_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    program = serving.Serving("cpu", serving.SIZES["small"])
    lengths: list[tuple[int, int]] = []
    extended = transformer.GrowingCache.extended

    def noted(self: transformer.GrowingCache, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        out = extended(self, keys, values)
        lengths.append((out[0].shape[0], out[0].shape[2]))
        return out

    monkeypatch.setattr(transformer.GrowingCache, "extended", noted)
    steps_of(program)
    layers = serving.SIZES["small"].net.layers
    assert len({prompt for _, prompt, _ in program.plan}) > 3
    wanted = [(batch, prompt + k) for batch, prompt, new in program.plan for k in range(new) for _ in range(layers)]
    assert lengths == wanted


def test_static_caches_stay_where_they_are() -> None:
    program = static_serving.StaticServing("cpu", static_serving.SIZES["small"])

    def places() -> dict[int, list[int]]:
        return {batch: [c.keys.data_ptr() for c in one.caches] for batch, one in program.decodings.items()}  # type: ignore[attr-defined]

    first = steps_of(program)
    before = places()
    assert set(before) == {min(b for b in (1, 2, 4) if b >= requests) for requests, _, _ in program.plan}
    assert len(before) > 1
    assert len(steps_of(program)) == len(first) == len(program.plan)
    assert places() == before


def test_static_and_growing_caches_say_the_same() -> None:
    sizes = static_serving.SIZES["small"]
    program = static_serving.StaticServing("cpu", replace(sizes, batches=(4,)))
    for requests, prompt, new in [(3, 17, 5), (1, 40, 3), (4, 4, 8)]:
        torch.manual_seed(prompt)
        static = program._generate(requests, prompt, new)
        torch.manual_seed(prompt)
        growing = serving.Serving("cpu", serving.SIZES["small"])
        growing.net = program.net
        torch.manual_seed(prompt)
        assert float(static) == pytest.approx(float(growing._generate(requests, prompt, new)), rel=1e-5)


def test_requests_join_and_leave_a_running_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = continuous.SIZES["small"]
    program = continuous.Continuous("cpu", sizes)
    running: list[int] = []
    lengths: list[int] = []
    after_last = program.net.after_last

    def noted(tokens: Tensor, caches: Any, mask: Tensor | None = None) -> Tensor:
        out = after_last(tokens, caches, mask)
        if mask is not None:
            running.append(len(tokens))
            lengths.append(caches[0].keys.shape[2])
        return out

    monkeypatch.setattr(program.net, "after_last", noted)
    steps = steps_of(program)
    assert len(running) == len(steps)
    assert sum(running) == sum(new for _, new in program.plan)  # each got its tokens
    assert max(running) == sizes.most
    ups = sum(b > a for a, b in pairwise(running))
    downs = sum(b < a for a, b in pairwise(running))
    assert ups >= 1
    assert downs >= 1
    assert any(b == a + 1 for a, b in pairwise(lengths))  # grown
    assert any(b < a for a, b in pairwise(lengths))  # cut to the longest that stayed


def test_what_a_request_is_told_does_not_depend_on_its_company() -> None:
    sums = []
    for most in (1, 3):
        program = continuous.Continuous("cpu", replace(continuous.SIZES["small"], most=most))
        torch.manual_seed(0)  # the prompts are drawn in the order in which they are admitted
        sums.append(sum(steps_of(program)))
    assert sums[0] == pytest.approx(sums[1], rel=1e-5)


def test_both_image_models_train_at_the_resolutions_of_the_plan() -> None:
    program = vision.Vision("cpu", vision.SIZES["small"])
    segmented, denoised = shapes_into(program.segmenter), shapes_into(program.unet)
    assert len(steps_of(program)) == len(program.plan)
    planned = [(batch, 3, height, width) for batch, height, width in program.plan]
    assert segmented == planned[::2]
    assert denoised == planned[1::2]
    assert len({(height, width) for _, _, height, width in planned}) > 2


def test_turns_train_on_what_was_generated() -> None:
    program = turns.Turns("cpu", turns.SIZES["small"])
    shapes = shapes_into(program.net.embed)
    steps_of(program)
    sizes = turns.SIZES["small"]
    wanted = []
    for prompt, new in program.plan:
        wanted += [(sizes.batch, prompt)] + [(sizes.batch, 1)] * (new - 1)
        wanted += [(sizes.batch // sizes.parts, prompt + new - 1)] * sizes.parts
    assert shapes == wanted


def test_lora_trains_its_small_matrices_only() -> None:
    program = lora.Lora("cpu", lora.SIZES["small"])
    before = {name: weight.detach().clone() for name, weight in program.net.named_parameters()}
    steps_of(program)
    changed = {name for name, weight in program.net.named_parameters() if not torch.equal(weight, before[name])}
    assert len(changed) == len(program.trained) == 8 * lora.SIZES["small"].net.layers
    assert all(name.endswith(("down.weight", "up.weight")) and "frozen" not in name for name in changed)
    assert len(set(program.plan)) > 2


def test_nodes_are_told_what_their_edges_say() -> None:
    program = random_graphs.RandomGraphs("cpu", random_graphs.SIZES["small"])
    shapes = shapes_into(program.layers[0])
    steps_of(program)
    assert [nodes for nodes, _ in shapes] == [nodes for nodes, _ in program.plan]
    assert len(set(program.plan)) == len(program.plan)
    layer = random_graphs.Passing(8)
    nodes, sources, targets = torch.randn(5, 8), torch.tensor([0, 1, 1, 4]), torch.tensor([2, 2, 3, 2])
    told = torch.zeros(5, 8)
    for source, target in zip(sources, targets, strict=True):
        told[target] += layer.message(torch.cat([nodes[source], nodes[target]]))
    wanted = nodes + layer.update(torch.cat([nodes, told], dim=1))
    torch.testing.assert_close(layer(nodes, sources, targets), wanted)


def test_models_take_turns_in_pools_of_their_own(device: str) -> None:
    places = measuring._places(PROGRAMS["three_models"], "torch_vmm", device, 100 * MIB)
    pools = [place for place in places if isinstance(place, torch_vmm.VirtualMemoryPool)]
    shared = measuring._shared.pop()
    try:
        assert isinstance(shared, torch_vmm.SharedMemoryPool)
        assert shared.physical_limit == 100 * MIB
        program = models.InTurn(device, "small", places)
        nets = [program.programs[0].net, program.programs[1].net, program.programs[2].unet]  # type: ignore[attr-defined]
        assert [torch_vmm.pool_of(next(net.parameters())) for net in nets] == pools == list(shared.models.values())
        order: list[int] = []
        for number, net in enumerate(nets[:2]):
            net.embed.register_forward_pre_hook(lambda *_, number=number: order.append(number))
        results = steps_of(program)
        assert len(results) == 3 * 4
        assert [a for k, a in enumerate(order) if k == 0 or order[k - 1] != a] == [0, 1] * 4
    finally:
        shared.close(force=True)  # type: ignore[attr-defined]


def test_each_pass_is_the_same_work() -> None:
    program = serving.Serving("cpu", serving.SIZES["small"])
    passes = []
    for _ in range(2):
        torch.manual_seed(5)
        passes.append(steps_of(program))
    assert passes[0] == passes[1]
