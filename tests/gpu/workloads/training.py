"""Training of a GPT-2 and of a ResNet, some steps of each.

A program is a generator: each step gives what can be compared, exactly where
nothing else is said, and draws its random numbers from a seed of its own, so
that programs can take turns in one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

DEVICE = "cuda"
_WIDTH, _LAYERS, _HEADS, _LENGTH, _VOCABULARY = 768, 12, 12, 128, 50257


def fingerprint(tensors: Iterable[Tensor]) -> int:
    """A sum over all bits of tensors of 32-bit numbers: whole numbers add up the same in any order."""
    return sum(int(tensor.detach().contiguous().view(torch.int32).sum(dtype=torch.int64)) for tensor in tensors)


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_qkv, self.to_out = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.to_qkv(x).unflatten(-1, (3, _HEADS, -1)).permute(2, 0, 3, 1, 4)
        dropout = 0.1 if self.training else 0.0
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout)
        out: Tensor = self.to_out(seen.transpose(1, 2).flatten(2))
        return out


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.Sequential(nn.LayerNorm(_WIDTH), _Attention(), nn.Dropout(0.1))
        self.think = nn.Sequential(
            nn.LayerNorm(_WIDTH),
            nn.Linear(_WIDTH, 4 * _WIDTH),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * _WIDTH, _WIDTH),
            nn.Dropout(0.1),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(x)
        out: Tensor = x + self.think(x)
        return out


class Gpt2(nn.Module):
    """124 million parameters; the output layer shares the embedding's. Every block is recomputed in backward()."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(_VOCABULARY, _WIDTH), nn.Embedding(_LENGTH, _WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(_LAYERS))
        self.norm = nn.LayerNorm(_WIDTH)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, numbers: Tensor) -> Tensor:
        x = self.words(numbers) + self.places.weight[: numbers.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return F.linear(self.norm(x), self.words.weight)


def train_gpt2(seed: int, dtype: str, steps: int = 4, batches: int = 2) -> Iterator[list[float]]:
    """Each step: loss, gradients' norm, loss scale. In the end the parameters' fingerprint.

    Mixed precision, with a gradient scaler for float16; ``batches`` are
    accumulated in a step. Of the attention kernels the plain one: the
    others add gradients up in no fixed order.
    """
    torch.manual_seed(seed)
    with torch.device(DEVICE):
        model = Gpt2()
        data = [torch.randint(_VOCABULARY, (2, _LENGTH - 31 * number)) for number in range(batches)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.1)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**10, enabled=dtype == "float16")
    for step in range(steps):
        torch.manual_seed(1000 * seed + step)
        total = torch.zeros((), device=DEVICE)
        with sdpa_kernel(SDPBackend.MATH):  # backward() too: it computes the blocks again
            for numbers in data:
                with torch.autocast(DEVICE, dtype=getattr(torch, dtype)):
                    logits = model(numbers[:, :-1])
                    loss = F.cross_entropy(logits.flatten(0, 1).float(), numbers[:, 1:].flatten()) / batches
                scaler.scale(loss).backward()
                total += loss.detach()
                del logits, loss
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        yield [float(total), float(norm), scaler.get_scale()]
    yield [fingerprint(model.parameters())]


def train_resnet(seed: int, batch: int, size: int, steps: int = 5) -> Iterator[list[float]]:
    """Each step: the loss. The same only as far as cuDNN chooses the same algorithms, which it does by their speed."""
    from torchvision.models import resnet18

    torch.manual_seed(seed)
    with torch.device(DEVICE):
        model = resnet18(num_classes=10)
        images = torch.randn(batch, 3, size, size)
        labels = torch.randint(10, (batch,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(steps):
        # Deterministic: what a process has chosen once, gives the same again.
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=True, allow_tf32=False):
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield [float(loss.detach())]
        del loss


def train_resnet_quickly() -> list[float]:
    """Losses of steps in shapes that no other program has, so that cuDNN chooses anew."""
    return [loss for (loss,) in train_resnet(seed=13, batch=8, size=112, steps=3)]
