"""A profiler and a model that overlap in any order: both go on, and tensors are made where they should be."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, schedule

import torch_vmm

Pool = torch_vmm.VirtualMemoryPool

# enter and leave the model: M m; begin, step and end the profiler: P s p.
ORDERS = ["MPpm", "PMmp", "MPmp", "PMpm", "PMsmp", "MPspm", "MPsmsp", "PMspm", "PMsmMsmp"]


@pytest.mark.parametrize("order", ORDERS)
def test_a_profiler_and_a_model_overlap(
    device: str, here: Callable[[], str], llama: Pool, qwen: Pool, order: str
) -> None:
    models = contextlib.ExitStack()
    profilers: list[profile] = []
    with qwen:
        for step, what in enumerate(order):
            if what == "M":
                models.enter_context(llama)
            elif what == "m":
                models.close()
            elif what == "P" and not profilers:
                plan = schedule(wait=1, warmup=1, active=2, repeat=1) if "s" in order else None
                profilers.append(profile(activities=[ProfilerActivity.CPU], schedule=plan, profile_memory=True))
                profilers[0].__enter__()
            elif what == "s":
                profilers[0].step()
            elif what == "p" and profilers:
                profilers.pop().__exit__(None, None, None)
            inside = order[: step + 1].count("M") > order[: step + 1].count("m")
            assert here() == ("llama" if inside else "qwen"), order[: step + 1]
            assert float(torch.ones(100, device=device).sum()) == 100
        models.close()
    assert here() == "default"


def test_every_step_of_a_training_loop_may_be_in_a_model(device: str, here: Callable[[], str], llama: Pool) -> None:
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=1, warmup=1, active=2, repeat=1),
        profile_memory=True,
    ) as profiler:
        for _ in range(6):
            with llama:
                assert here() == "llama"
                profiler.step()
                assert here() == "llama"
            assert here() == "default"
    assert any(event.key == "aten::empty" for event in profiler.key_averages())
