"""Sizes, ranges, shapes and devices as users write them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal

import numpy as np
import pytest
import torch

import torch_vmm
from tests.helpers import GIB, KIB, MIB, run
from torch_vmm.devices import DeviceKey, to_device
from torch_vmm.sizes import show, to_bytes, to_optional_bytes, to_range, to_shape


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("4096B", 4096),
        ("2KiB", 2 * KIB),
        ("2MiB", 2 * MIB),
        ("2 MiB", 2 * MIB),
        ("  2   mib ", 2 * MIB),
        ("1.5 GiB", 3 * GIB // 2),
        ("0.5kib", 512),
        ("1TiB", 1024 * GIB),
        ("2KB", 2000),
        ("2MB", 2_000_000),
        ("1.5gb", 1_500_000_000),
        ("1 tb", 10**12),
    ],
)
def test_sizes_in_text(text: str, size: int) -> None:
    assert to_bytes(text, "size") == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "MiB",
        "2 pages",
        "2M",
        "-2MiB",
        "1.5",
        "1.5B",
        "1..5MiB",
        "2MiBs",
        "0x10",
        "1e6",
        "inf",
        "nan",
        "2MiB\0",
    ],
)
def test_texts_that_are_no_sizes(text: str) -> None:
    with pytest.raises(torch_vmm.InvalidArgumentError) as raised:
        to_bytes(text, "size")
    assert isinstance(raised.value, ValueError)
    for part in ("2MiB", "1.5 GiB", "2MB"):  # the accepted form
        assert part in str(raised.value)


@pytest.mark.parametrize("size", [0, 1, 2**63 - 1, np.int64(7), np.uint32(7), torch.Size([7])[0]])
def test_sizes_in_bytes(size: int) -> None:
    assert to_bytes(size, "size") == int(size)
    assert type(to_bytes(size, "size")) is int


@pytest.mark.parametrize("size", [-1, 2**63, 2**64, 1.0, 0.5, True, False, None, b"2MiB", [1], np.float32(1)])
def test_what_is_no_size(size: object) -> None:
    with pytest.raises(torch_vmm.InvalidArgumentError, match="limit"):
        to_bytes(size, "limit")  # type: ignore[arg-type]


def test_no_size_at_all() -> None:
    assert to_optional_bytes(None, "limit") is None
    assert to_optional_bytes("1KiB", "limit") == KIB


def test_ranges() -> None:
    assert to_range("1MiB", 5, 8 * MIB) == (MIB, 5)
    assert to_range(2**64 - 1, 2**64 - 1, 1) == (2**64 - 1, 2**64 - 1)  # the extension refuses it, with its reason
    for offset, size in [(-1, 1), (0, -1), (2**64, 1), (0, 2**64)]:
        with pytest.raises(torch_vmm.InvalidRangeError) as raised:
            to_range(offset, size, 77)
        assert vars(raised.value) == {"offset": offset, "size": size, "capacity": 77}


@pytest.mark.parametrize(
    ("shape", "sizes"), [(3, (3,)), ((), ()), ([2, 3], (2, 3)), (torch.Size([4, 5]), (4, 5)), (np.int64(3), (3,))]
)
def test_shapes(shape: object, sizes: tuple[int, ...]) -> None:
    assert to_shape(shape) == sizes  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [-1, (2, -1), 1.5, (1.5,), "3", True, None, [[1]]])
def test_what_is_no_shape(shape: object) -> None:
    with pytest.raises(torch_vmm.InvalidArgumentError):
        to_shape(shape)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ("cpu", ("cpu", 0)),
        (torch.device("cpu"), ("cpu", 0)),
        ("cuda", ("cuda", 0)),
        (None, ("cuda", 0)),
        ("cuda:3", ("cuda", 3)),
        (torch.device("cuda", 2), ("cuda", 2)),
        (0, ("cuda", 0)),
        (1, ("cuda", 1)),
    ],
)
def test_devices(given: object, key: tuple[str, int]) -> None:
    assert to_device(given) == key  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "given", ["meta", "xpu:0", "gpu", "cuda:x", "cuda:-1", "cuda:128", "cuda:256", -1, 256, 1.5, True, object()]
)
def test_what_is_no_device(given: object) -> None:
    with pytest.raises(torch_vmm.InvalidArgumentError, match="cuda"):
        to_device(given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "take",
    [
        torch_vmm.enable,
        torch_vmm.is_enabled,
        torch_vmm.current_pool,
        torch_vmm.VirtualMemoryManager,
        lambda device: torch_vmm.VirtualMemoryPool("1MiB", device=device),
        lambda device: torch_vmm.SharedMemoryPool("1MiB", device=device),
        lambda device: torch_vmm.use_model("llama", device=device),
    ],
)
def test_everything_that_takes_a_device_refuses_others(take: Callable[[object], object]) -> None:
    with pytest.raises(torch_vmm.InvalidArgumentError, match="meta"):
        take("meta")


def test_a_device_as_text() -> None:
    assert [str(DeviceKey("cpu", 0)), str(DeviceKey("cuda", 1))] == ["cpu", "cuda:1"]


@pytest.mark.parametrize(
    ("variable", "value", "shown"),
    [
        ("TORCH_VMM_HOST_BYTES", "lots", "2MiB"),
        ("TORCH_VMM_HOST_BYTES", "0", "set it to nothing for the default"),
        ("TORCH_VMM_SCRUB", "maybe", "1 or 0"),
        ("TORCH_VMM_NO_SUCH_THING", "1", "TORCH_VMM_SCRUB"),
    ],
)
def test_an_option_that_cannot_be_names_the_accepted_form(variable: str, value: str, shown: str) -> None:
    code = f"""
import torch_vmm
try:
    torch_vmm.VirtualMemoryPool("1MiB", device="cpu")
except torch_vmm.InvalidArgumentError as error:
    assert "{variable}" in str(error), error
    print(error)
"""
    assert shown in run(code, **{variable: value})


def test_importing_initialises_nothing() -> None:
    run(
        """
        import torch, torch_vmm
        assert not torch.cuda.is_initialized()
        assert not torch_vmm.is_enabled("cpu")
        assert not torch_vmm.is_enabled("cuda")
    """,
        fresh=True,
    )


@dataclass
class _Holder:
    weight: torch.Tensor


_ONE = torch.ones(3)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "None"),
        (3, "3"),
        ("x" * 99, repr("x" * 99)[:57] + "..."),
        ([1, ("a", 2.5)], "[1, ('a', 2.5)]"),
        (torch.device("cpu"), "device(type='cpu')"),
        (torch.float32, "torch.float32"),
        (_ONE, "a tensor of (3,), torch.float32 on cpu"),
        ([_ONE], "a list with tensors"),
        ([np.int64(-1), slice(1), ...], f"[{np.int64(-1)!r}, slice(None, 1, None), Ellipsis]"),
        ((slice(_ONE),), "a tuple with tensors"),
        (np.int64(5), repr(np.int64(5))),
        (range(-1, 3), "range(-1, 3)"),
        (Decimal("1.5"), "Decimal('1.5')"),
        ([_ONE.numpy()], "a list"),
        ([torch_vmm.elastic((3,), max_shape=(4,), device="cpu")], "a list with tensors"),
        ({"w": _ONE}.values(), "a dict_values"),
        (_Holder(_ONE), "a _Holder"),
        (_ONE.numpy(), "a ndarray"),
    ],
)
def test_a_value_in_a_message_reads_no_tensor(value: object, shown: str) -> None:
    """It may be asleep."""
    assert show(value) == shown
