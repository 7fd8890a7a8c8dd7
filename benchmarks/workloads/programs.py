"""The eleven programs by name, and those whose batch can be chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from . import continuous, lora, random_graphs, serving, static_serving, training, turns, vision
from .models import InTurn, Place
from .program import Program


class Entry(NamedTuple):
    """How a program is made, and what it is compared by."""

    make: Callable[[str, str, list[Place]], Program]  # device, scale, and a place for each model
    kind: type[Program]
    models: int = 1  # each wants a place of its own where there are more


PROGRAMS: dict[str, Entry] = {
    "train": Entry(lambda device, scale, _: training.Training(device, training.TRAIN[scale]), training.Training),
    "checkpointed": Entry(
        lambda device, scale, _: training.Training(device, training.CHECKPOINTED[scale]), training.Training
    ),
    "serve": Entry(lambda device, scale, _: serving.Serving(device, serving.SIZES[scale]), serving.Serving),
    "static_serve": Entry(
        lambda device, scale, _: static_serving.StaticServing(device, static_serving.SIZES[scale]),
        static_serving.StaticServing,
    ),
    "continuous": Entry(
        lambda device, scale, _: continuous.Continuous(device, continuous.SIZES[scale]), continuous.Continuous
    ),
    "vision": Entry(lambda device, scale, _: vision.Vision(device, vision.SIZES[scale]), vision.Vision),
    "turns": Entry(lambda device, scale, _: turns.Turns(device, turns.SIZES[scale]), turns.Turns),
    "lora": Entry(lambda device, scale, _: lora.Lora(device, lora.SIZES[scale]), lora.Lora),
    "graphs": Entry(
        lambda device, scale, _: random_graphs.RandomGraphs(device, random_graphs.SIZES[scale]),
        random_graphs.RandomGraphs,
    ),
    "two_models": Entry(InTurn, InTurn, models=2),
    "three_models": Entry(InTurn, InTurn, models=3),
}


def _train(device: str, scale: str, batch: int) -> Program:
    return training.Training(device, _short(training.TRAIN[scale], scale, batch))


def _checkpointed(device: str, scale: str, batch: int) -> Program:
    return training.Training(device, _short(training.CHECKPOINTED[scale], scale, batch))


def _short(sizes: training.TrainingSizes, scale: str, batch: int) -> training.TrainingSizes:
    """Texts so short that some ninety fit 40 GiB: a hundredth of the memory is about one of them."""
    if scale == "full":
        sizes = replace(sizes, steps=6 // sizes.accumulated + 2, shortest=64, longest=256)
    return replace(sizes, batches=(batch,))


def _vision(device: str, scale: str, batch: int) -> Program:
    sizes = vision.SIZES[scale]
    if scale == "full":
        sizes = replace(sizes, steps=8, smallest=96, largest=192)
    return vision.Vision(device, replace(sizes, batches=(batch,)))


BATCHES: dict[str, Callable[[str, str, int], Program]] = {
    "train": _train,
    "checkpointed": _checkpointed,
    "vision": _vision,
}
"""Those whose largest batch can be asked for, made with batches of one size."""
