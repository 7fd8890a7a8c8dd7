"""Two and three models taking turns, each in a place of its own: a pool, where the allocator has pools."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from torch import Tensor

from .program import Program
from .serving import Serving, ServingSizes
from .training import Training, TrainingSizes
from .transformer import NetSizes
from .vision import Vision, VisionSizes

Place = AbstractContextManager[object]

_TRAINED = {
    "small": TrainingSizes(NetSizes(64, 2, 4, 256), steps=4, batches=(1, 2), shortest=8, longest=64),
    "full": TrainingSizes(NetSizes(1536, 12, 12, 32000), steps=8, batches=(1, 2, 4), shortest=64, longest=2559),
}
_SERVED = {
    "small": ServingSizes(NetSizes(64, 2, 4, 256), steps=4, most=4, shortest=4, longest=48, new=8),
    "full": ServingSizes(NetSizes(2048, 16, 16, 32000), steps=8, most=16, shortest=64, longest=1536, new=24),
}
_SEEING = {
    "small": VisionSizes(steps=4, batches=(1, 2), smallest=32, largest=96, channels=8, depth=1, classes=5),
    "full": VisionSizes(steps=8, batches=(1, 2), smallest=192, largest=512, channels=64, depth=2),
}
_MAKE: list[Callable[[str, str], Program]] = [
    lambda device, scale: Training(device, _TRAINED[scale]),
    lambda device, scale: Serving(device, _SERVED[scale]),
    lambda device, scale: Vision(device, _SEEING[scale]),
]


class InTurn(Program):
    """One trains, one serves, a third one sees; each step is the next one's next. Results are those of their steps."""

    is_deterministic = True
    is_strict = False  # vision is one of them
    tolerance = 1e-3

    def __init__(self, device: str, scale: str, places: list[Place]) -> None:
        self._places = places
        self.programs: list[Program] = []
        for make, place in zip(_MAKE, places, strict=False):
            with place:
                self.programs.append(make(device, scale))

    def warm_up(self) -> None:
        for program, place in zip(self.programs, self._places, strict=True):
            with place:
                program.warm_up()

    def run(self) -> Iterator[Tensor]:
        passes = [program.run() for program in self.programs]
        while True:
            for steps, place in zip(passes, self._places, strict=True):
                with place:
                    result = next(steps, None)
                if result is None:
                    return
                yield result
