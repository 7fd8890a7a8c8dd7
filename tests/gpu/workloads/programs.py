"""The real programs by name: generators that give one result a step, so that several can take turns."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from tests.gpu.workloads.generation import generate
from tests.gpu.workloads.other_libraries import compute_with_cupy, compute_with_numba
from tests.gpu.workloads.training import train_gpt2, train_resnet

Steps = Iterator[list[Any]]

PROGRAMS: dict[str, Callable[[], Steps]] = {
    "gpt2 in float16": partial(train_gpt2, seed=1, dtype="float16"),
    "gpt2 in bfloat16": partial(train_gpt2, seed=2, dtype="bfloat16"),
    "llama, dynamic cache": partial(generate, "llama", seed=3, cache="dynamic"),
    "llama, static cache": partial(generate, "llama", seed=4, cache="static"),
    "qwen2, dynamic cache": partial(generate, "qwen2", seed=5, cache="dynamic"),
    "qwen3, static cache": partial(generate, "qwen3", seed=6, cache="static"),
    "resnet": partial(train_resnet, seed=7, batch=16, size=96),
    "another resnet": partial(train_resnet, seed=8, batch=12, size=80),
    "cupy": partial(compute_with_cupy, seed=9),
    "another cupy": partial(compute_with_cupy, seed=10),
    "numba": partial(compute_with_numba, seed=11),
    "another numba": partial(compute_with_numba, seed=12),
}

NEEDS = {
    "llama": "transformers",
    "qwen": "transformers",
    "resnet": "torchvision",
    "cupy": "cupy",
    "numba": "numba.cuda",
}
"""The package that a program needs, by a word in its name."""


def settle() -> None:
    """Frees what is unreachable, and what torch's libraries keep for their next call."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()


def alone(program: str) -> dict[str, list[Any]]:
    """The results of a program's steps, and how many bytes and blocks it asked for in all and left behind."""
    settle()
    before = torch.cuda.memory_stats()
    results = list(PROGRAMS[program]())
    settle()
    after = torch.cuda.memory_stats()

    def grown(*keys: str) -> list[int]:
        return [after[key] - before[key] for key in keys]

    return {
        "results": results,
        "asked": grown("requested_bytes.all.allocated", "allocation.all.allocated"),
        "left": grown("requested_bytes.all.current", "allocation.all.current", "active.all.current"),
    }
