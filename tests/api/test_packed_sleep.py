"""Models that sleep in host memory packed: every bit is as before, whatever it was, and less of it lies there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import torch_vmm
from tests.api.sleeping import stop
from tests.helpers import MIB, tensor_in
from torch_vmm import SharedMemoryPool, VirtualMemoryPool


def _draw() -> torch.Generator:
    return torch.Generator().manual_seed(16)


def _normal(count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, generator=_draw()).mul_(0.02).to(dtype)


def _random(count: int, dtype: torch.dtype) -> torch.Tensor:
    whole = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=_draw())
    return whole.view(dtype)


def _odd(count: int) -> torch.Tensor:
    """NaNs with all kinds of bits, infinities and denormals among weights."""
    weights = _normal(count, torch.bfloat16).view(torch.int16)
    odd = torch.tensor([0x7FC0, 0x7F81, 0x7F80, -0x80, 0x0001, -0x8000, -1], dtype=torch.int16)
    weights[::50] = odd[torch.arange(len(weights[::50])) % len(odd)]
    return weights.view(torch.bfloat16)


KINDS: dict[str, Callable[[int], torch.Tensor]] = {
    "bf16": lambda count: _normal(count, torch.bfloat16),
    "float16": lambda count: _normal(count, torch.float16),
    "float32": lambda count: _normal(count, torch.float32),
    "float64": lambda count: _normal(count, torch.float64),
    "random bits": lambda count: _random(count, torch.uint8),
    "int8": lambda count: _normal(count, torch.float32).mul(5000).to(torch.int8),
    "int64": torch.arange,
    "zeros": torch.zeros,
    "odd": _odd,
}
SIZES = (1, 3, 31, 255, 511, 513, 4097, 16385, 70_001, MIB + 1, 3 * MIB)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().view(torch.uint8)


def _held(model: VirtualMemoryPool, contents: list[torch.Tensor]) -> list[torch.Tensor]:
    with model:
        return [content.to(model.device, copy=True) for content in contents]


def _are_equal(tensors: list[torch.Tensor], contents: list[torch.Tensor]) -> bool:
    return all(torch.equal(_bits(a), _bits(b)) for a, b in zip(tensors, contents, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_every_bit_is_as_before(model: VirtualMemoryPool, kind: str) -> None:
    contents = [KINDS[kind](size) for size in SIZES]
    tensors = _held(model, contents)
    for _ in range(2):
        model.sleep(packed=True)
        assert model.asleep == {"": "host, packed"}
        assert model.physical_memory_usage == 0
        model.wake()
        assert _are_equal(tensors, contents)


def test_weights_take_less_host_memory_and_fit_a_lower_limit(
    limited: SharedMemoryPool, model: VirtualMemoryPool, tmp_path: Path
) -> None:
    contents = [_normal(40 * MIB, torch.bfloat16)]  # 80 MiB; packed 57
    tensors = _held(model, contents)
    limited.host_backup_limit = "64MiB"
    with pytest.raises(torch_vmm.OutOfMemoryError, match="host_backup_limit"):
        model.sleep()
    model.sleep(packed=True)
    assert limited.host_backup_bytes == 64 * MIB
    assert "llama 80 MiB (host, packed)" in str(limited)
    assert "(host, packed)" in repr(model)
    model.wake()
    limited.host_backup_limit = "32MiB"
    with pytest.raises(torch_vmm.OutOfMemoryError, match="host_backup_limit"):
        model.sleep(packed=True)
    assert not model.is_asleep
    model.sleep(["host", tmp_path / "backup"], packed=True)
    assert model.asleep == {"": str(tmp_path / "backup")}
    model.wake()
    assert _are_equal(tensors, contents)


def test_what_is_freed_meanwhile_does_not_come(model: VirtualMemoryPool) -> None:
    """A unit of packed memory holds many small tensors, and comes back in part."""
    contents = [_normal(300 + k % 5 * 4001, torch.bfloat16) for k in range(200)]
    tensors = _held(model, contents)
    model.sleep(packed=True)
    del tensors[::3], contents[::3]
    model.wake()
    assert _are_equal(tensors, contents)


def test_tags_go_where_they_are_sent(model: VirtualMemoryPool) -> None:
    contents = [_normal(MIB, torch.bfloat16)]
    with model.tag("weights"):
        weights = [contents[0].to(model.device, copy=True)]
    with model.tag("cache"):
        cache = torch.ones(MIB, device=model.device)
    model.sleep({"weights": "host", "cache": "discard"}, packed=True)
    assert model.asleep == {"weights": "host, packed", "cache": "discarded"}
    model.wake("weights")
    assert _are_equal(weights, contents)
    model.wake()
    assert not cache.any()


def test_a_swap(limited: SharedMemoryPool, model: VirtualMemoryPool) -> None:
    other = limited.register_model("qwen")
    contents = [_normal(40 * MIB, torch.bfloat16), _odd(40 * MIB), KINDS["random bits"](1000)]
    tensors = _held(model, contents)
    model.sleep(packed=True)
    theirs = _held(other, contents)
    for out, into, come in ((other, model, tensors), (model, other, theirs)):
        torch_vmm.swap(out, into, packed=True)
        assert out.asleep == {"": "host, packed"}
        assert _are_equal(come, contents)


def test_what_is_sealed_is_packed_once(model: VirtualMemoryPool) -> None:
    contents = [_normal(MIB, torch.bfloat16)]
    with model.tag("weights"):
        weights = [contents[0].to(model.device, copy=True)]
    model.seal(weights)
    moved = []
    for _ in range(2):
        moved.append(model.sleep(packed=True).progress[0])
        model.wake()
    assert moved == [2 * MIB, 0]
    assert _are_equal(weights, contents)
    model.unseal(weights)


@pytest.mark.parametrize("stops", ["sleep", "wake"])
def test_stopped_it_is_whole(model: VirtualMemoryPool, stops: str) -> None:
    contents = [_normal(16 * MIB, torch.bfloat16) for _ in range(3)]
    tensors = _held(model, contents)
    if stops == "wake":
        model.sleep(packed=True)
    with pytest.raises(KeyboardInterrupt):
        model.wake(progress=stop) if stops == "wake" else model.sleep(packed=True, progress=stop)
    assert model.is_asleep == (stops == "wake")
    model.wake()
    assert _are_equal(tensors, contents)
    tensor_in(model, 512)


@pytest.mark.parametrize("keep", ["discard", "/tmp/", {"": "/tmp/"}])
def test_it_is_for_host_memory(model: VirtualMemoryPool, keep: object) -> None:
    tensor_in(model, 512)
    with pytest.raises(torch_vmm.InvalidArgumentError, match='packed=True is for what goes to "host"'):
        model.sleep(keep, packed=True)  # type: ignore[arg-type]
    with pytest.raises(torch_vmm.InvalidArgumentError, match="packed"):
        model.sleep(packed=3)  # type: ignore[arg-type]
    assert not model.is_asleep
