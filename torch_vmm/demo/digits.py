"""A small convolutional net that learns to read handwritten digits.

The 1797 images of 8 x 8 pixels ship inside scikit-learn; a fifth of them is
held out for the accuracy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .workload import LossCurve, Workload


@dataclass(frozen=True)
class Size:
    width: int  # channels
    batch: int  # images in most steps
    large_batch: int  # images in a turn's first step
    learning_rate: float


SIZES = {
    "cpu": Size(width=56, batch=96, large_batch=1437, learning_rate=3e-3),
    "cuda": Size(width=192, batch=512, large_batch=8192, learning_rate=1e-3),
}
_LEAST_ACCURACY = 0.9


class MissingPackageError(RuntimeError):
    """The demo needs a package that is not installed; the text says which."""


def load() -> tuple[Tensor, Tensor]:
    """Images, float32 [1797, 1, 8, 8] from 0 to 1, and digits, int64 [1797], in random order."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingPackageError(
            f"the digits ship in scikit-learn ({error}). Install the demo's packages: pip install scikit-learn rich"
        ) from error
    data = load_digits()
    order = torch.randperm(len(data.target))
    images = torch.tensor(data.images, dtype=torch.float32)[order].unsqueeze(1) / 16
    return images, torch.tensor(data.target, dtype=torch.int64)[order]


def _convolution(into: int, out: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(into, out, 3, padding=1, bias=False), nn.BatchNorm2d(out, momentum=0.3), nn.ReLU())


class DigitsModel(Workload):
    """Trains on four fifths of the images and is judged by the rest."""

    name = "digits"
    share = 0.15
    least_steps = 16

    def __init__(self, device: str, learning_rate_scale: float) -> None:
        self._size = SIZES[device]
        images, digits = (data.to(device) for data in load())
        held_out = len(digits) // 5
        self._images, self._digits = images[held_out:], digits[held_out:]
        self._test_images, self._test_digits = images[:held_out], digits[:held_out]
        width = self._size.width
        self._net = nn.Sequential(
            _convolution(1, width),
            _convolution(width, width),
            nn.MaxPool2d(2),
            _convolution(width, 2 * width),
            nn.Flatten(),
            nn.Linear(2 * width * 16, 10),
        ).to(device)
        self._optimizer = torch.optim.AdamW(self._net.parameters(), lr=self._size.learning_rate * learning_rate_scale)
        self.losses = LossCurve()
        self.accuracy = self._accuracy_before = self._measure()

    def step(self, number: int) -> None:
        images = self._size.large_batch if number == 0 else self._size.batch
        chosen = torch.randint(len(self._digits), (images,), device=self._digits.device)
        # Written a pixel higher, lower, to the left or right, it is the same digit.
        shift = [int(pixels) for pixels in torch.randint(-1, 2, (2,))]
        loss = F.cross_entropy(self._net(self._images[chosen].roll(shift, (2, 3))), self._digits[chosen])
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)  # gradients need not rest in memory
        self.losses.add(loss.detach())

    def finish_turn(self) -> None:
        self.accuracy = self._measure()

    @torch.no_grad()
    def _measure(self) -> float:
        """The share of the digits held out that it reads right."""
        self._net.eval()
        guesses = self._net(self._test_images).argmax(dim=1)
        self._net.train()
        return float((guesses == self._test_digits).float().mean())

    def headline(self) -> str:
        return f"loss {self.losses.end:.2f}, {self.accuracy:.0%} right"

    def report(self) -> list[str]:
        return [
            f"loss {self.losses.start:.3f} -> {self.losses.end:.3f} in {len(self.losses)} steps",
            f"    accuracy {self.accuracy:.1%} on {len(self._test_digits)} digits it has not seen; "
            f"{self._accuracy_before:.1%} before",
        ]

    def complaint(self) -> str | None:
        if self.accuracy < _LEAST_ACCURACY:
            return f"the accuracy is {self.accuracy:.1%}; it should be at least {_LEAST_ACCURACY:.0%}"
        return self.losses.complaint(most=0.5)
