"""Two image models in turn, at a resolution of its own each step: one segments, one takes noise away."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .program import Program, made_on


@dataclass(frozen=True)
class VisionSizes:
    """``batches`` images a step, whose sides are multiples of 32 up to ``largest``; ``channels`` of the first stage."""

    steps: int  # even: half of them segment
    batches: tuple[int, ...]
    smallest: int
    largest: int
    channels: int
    depth: int  # residual blocks a stage
    classes: int = 21


SIZES = {
    "small": VisionSizes(steps=4, batches=(1, 2), smallest=32, largest=96, channels=8, depth=1, classes=5),
    "full": VisionSizes(steps=24, batches=(1, 2, 4), smallest=192, largest=512, channels=64, depth=2),
}


class Residual(nn.Module):
    """Two convolutions beside a shortcut. GroupNorm has no state, so models that share steps stay alike."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1, dilation: int = 1, time: int = 0) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.GroupNorm(8, inputs), nn.GroupNorm(8, outputs)
        self.conv_1 = nn.Conv2d(inputs, outputs, 3, stride, dilation, dilation)
        self.conv_2 = nn.Conv2d(outputs, outputs, 3, 1, dilation, dilation)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride) if (inputs, stride) != (outputs, 1) else nn.Identity()
        self.time = nn.Linear(time, outputs) if time else None

    def forward(self, x: Tensor, time: Tensor | None = None) -> Tensor:
        y = self.conv_1(F.silu(self.norm_1(x)))
        if self.time is not None and time is not None:
            y = y + self.time(time)[:, :, None, None]
        out: Tensor = self.shortcut(x) + self.conv_2(F.silu(self.norm_2(y)))
        return out


class Segmenter(nn.Module):
    """A residual encoder to an eighth of the size, a pyramid of dilated convolutions, and a class for each pixel."""

    def __init__(self, channels: int, depth: int, classes: int) -> None:
        super().__init__()
        stages: list[nn.Module] = [nn.Conv2d(3, channels, 7, 2, 3)]
        width = channels
        for stride, dilation in ((2, 1), (2, 1), (1, 2)):
            stages.append(Residual(width, 2 * width, stride, dilation))
            width *= 2
            stages += [Residual(width, width, 1, dilation) for _ in range(depth)]
        self.encoder = nn.Sequential(*stages)
        self.pyramid = nn.ModuleList([nn.Conv2d(width, channels, 3, 1, rate, rate) for rate in (1, 6, 12)])
        self.whole = nn.Conv2d(width, channels, 1)
        self.head = nn.Sequential(
            nn.Conv2d(4 * channels, channels, 3, 1, 1), nn.SiLU(), nn.Conv2d(channels, classes, 1)
        )

    def forward(self, images: Tensor) -> Tensor:
        x = self.encoder(images)
        whole = self.whole(x.mean((2, 3), keepdim=True)).expand(-1, -1, *x.shape[2:])
        y = torch.cat([*(conv(x) for conv in self.pyramid), whole], dim=1)
        return F.interpolate(self.head(F.silu(y)), images.shape[2:], mode="nearest")


class Looks(nn.Module):
    """Attention over all places of an image."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(8, channels)
        self.to_qkv, self.to_out = nn.Conv2d(channels, 3 * channels, 1), nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.to_qkv(self.norm(x)).flatten(2).transpose(1, 2).unsqueeze(1)
        seen = F.scaled_dot_product_attention(*qkv.chunk(3, dim=-1))
        out: Tensor = x + self.to_out(seen.squeeze(1).transpose(1, 2).reshape(x.shape))
        return out


class UNet(nn.Module):
    """Down over three stages and up again, with what was on the way down beside it; told how much noise there is."""

    def __init__(self, channels: int, depth: int) -> None:
        super().__init__()
        time = 4 * channels
        self.of_time = nn.Sequential(nn.Linear(1, time), nn.SiLU(), nn.Linear(time, time))
        self.first, self.last = nn.Conv2d(3, channels, 3, 1, 1), nn.Conv2d(channels, 3, 3, 1, 1)
        widths = [channels, 2 * channels, 4 * channels]
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        for width, following in zip(widths, [*widths[1:], widths[-1]], strict=True):
            stage = [Residual(width, width, time=time) for _ in range(depth)]
            self.down.append(nn.ModuleList([*stage, Residual(width, following, stride=2, time=time)]))
        self.middle = nn.Sequential(Looks(widths[-1]), Residual(widths[-1], widths[-1]))
        for width, below in zip(reversed(widths), reversed([*widths[1:], widths[-1]]), strict=True):
            stage = [Residual(below + width, width, time=time)]
            stage += [Residual(width, width, time=time) for _ in range(depth - 1)]
            self.up.append(nn.ModuleList(stage))

    def forward(self, images: Tensor, noise: Tensor) -> Tensor:
        time = self.of_time(noise)
        x, passed = self.first(images), []
        for stage in self.down:
            assert isinstance(stage, nn.ModuleList)
            *blocks, smaller = stage
            for block in blocks:
                x = block(x, time)
            passed.append(x)
            x = smaller(x, time)
        x = self.middle(x)
        for stage in self.up:
            assert isinstance(stage, nn.ModuleList)
            x = torch.cat([F.interpolate(x, scale_factor=2.0, mode="nearest"), passed.pop()], dim=1)
            for block in stage:
                x = block(x, time)
        out: Tensor = self.last(x)
        return out


class Vision(Program):
    """Weights in float32, under autocast on a GPU. Its results are losses."""

    is_deterministic = True
    is_strict = False

    def __init__(self, device: str, sizes: VisionSizes) -> None:
        self._device, self._sizes = device, sizes
        with made_on(device, seed=6, dtype=torch.float32):
            self.segmenter = Segmenter(sizes.channels, sizes.depth, sizes.classes)
            self.unet = UNet(sizes.channels, sizes.depth)
        self._optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-4) for net in (self.segmenter, self.unet)]
        draw = random.Random(6)

        def side() -> int:
            return 32 * draw.randint(sizes.smallest // 32, sizes.largest // 32)

        self.plan = [(draw.choice(sizes.batches), side(), side()) for _ in range(sizes.steps)]
        """For each step the images, their height and width; even steps segment."""

    def warm_up(self) -> None:
        for number in range(2):
            self._step(number, 1, self._sizes.smallest, self._sizes.smallest)

    def run(self) -> Iterator[Tensor]:
        for number, (batch, height, width) in enumerate(self.plan):
            yield self._step(number, batch, height, width)

    def _step(self, number: int, batch: int, height: int, width: int) -> Tensor:
        images = torch.randn(batch, 3, height, width, device=self._device)
        with torch.autocast(self._device, torch.bfloat16, enabled=self._device == "cuda"):
            loss = self._denoised(images) if number % 2 else self._segmented(images)
        loss.backward()
        self._optimizers[number % 2].step()
        self._optimizers[number % 2].zero_grad(set_to_none=True)
        return loss.detach()

    def _segmented(self, images: Tensor) -> Tensor:
        batch, _, height, width = images.shape
        classes = torch.randint(0, self._sizes.classes, (batch * height * width,), device=self._device)
        # Flat: over images the loss is a sum in no particular order.
        said = self.segmenter(images).permute(0, 2, 3, 1).reshape(-1, self._sizes.classes)
        return F.cross_entropy(said.float(), classes)

    def _denoised(self, images: Tensor) -> Tensor:
        amount = torch.rand(len(images), 1, device=self._device)
        noise = torch.randn_like(images)
        share = amount[:, :, None, None]
        return F.mse_loss(self.unet((1 - share) * images + share * noise, amount).float(), noise)
