"""The exceptions: what they are, what they carry, that they travel."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import torch_vmm

VALUES: dict[str, tuple[tuple[type[BaseException], ...], dict[str, object]]] = {
    "InvalidArgumentError": ((ValueError,), {}),
    "InvalidPageSizeError": ((torch_vmm.InvalidArgumentError, ValueError), {"page_size": 3, "granularity": 4}),
    "InvalidRangeError": ((torch_vmm.InvalidArgumentError, ValueError), {"offset": 1, "size": 2, "capacity": 3}),
    "AlreadyMappedError": ((), {"offset": 1, "size": 2}),
    "NotMappedError": ((), {"offset": 1, "size": 2}),
    "OutOfMemoryError": (
        (torch.OutOfMemoryError,),
        {"requested": 4, "available": 3, "limit": 2, "pool": "llama"},
    ),
    "ModelExistsError": ((), {"model_id": "llama"}),
    "ModelNotFoundError": ((KeyError,), {"model_id": "llama"}),
    "StillInUseError": ((), {"live_bytes": 512, "live_blocks": 1}),
    "AsleepError": ((), {"model_id": "llama"}),
    "DriverError": ((), {"call": "cuMemMap", "code": 1, "name": "CUDA_ERROR_INVALID_VALUE"}),
    "NotAvailableError": ((), {"reason": "no driver"}),
    "MemoryDamageError": ((), {"damages": ()}),
}


def make(name: str) -> torch_vmm.VmmError:
    error: torch_vmm.VmmError = getattr(torch_vmm, name)("what happened", **VALUES[name][1])
    return error


@pytest.mark.parametrize("name", VALUES)
def test_an_error_is_what_the_table_says(name: str) -> None:
    error = make(name)
    bases, attributes = VALUES[name]
    assert isinstance(error, (torch_vmm.VmmError, RuntimeError))
    assert all(isinstance(error, base) for base in bases)
    assert {attribute: getattr(error, attribute) for attribute in attributes} == attributes
    assert str(error) == "what happened"
    assert error.args == ("what happened",)


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_an_error_can_be_pickled(name: str, protocol: int) -> None:
    error = make(name)
    error.add_note("seen by a worker") if hasattr(error, "add_note") else None
    for twin in (pickle.loads(pickle.dumps(error, protocol)), copy.copy(error), copy.deepcopy(error)):
        assert type(twin) is type(error)
        assert str(twin) == str(error)
        assert vars(twin) == vars(error)


def test_only_the_right_ones_are_values_or_keys() -> None:
    values = {name for name in VALUES if isinstance(make(name), ValueError)}
    assert values == {"InvalidArgumentError", "InvalidPageSizeError", "InvalidRangeError"}
    assert {name for name in VALUES if isinstance(make(name), KeyError)} == {"ModelNotFoundError"}
    assert {name for name in VALUES if isinstance(make(name), torch.OutOfMemoryError)} == {"OutOfMemoryError"}


def test_errors_from_the_extension_can_be_pickled() -> None:
    raised: list[torch_vmm.VmmError] = []
    shared = torch_vmm.SharedMemoryPool("4MiB", device="cpu")
    shared.register_model("llama", "8MiB")
    for act in (
        lambda: shared["qwen"],
        lambda: shared.register_model("llama"),
        lambda: shared.allocate_for_model("llama", "8MiB"),
        lambda: shared.allocate_for_model("llama", 0),
        lambda: shared.deallocate_for_model("llama", 0, 1),
        lambda: torch_vmm.VirtualMemoryPool("1MiB", page_size=5, device="cpu"),
    ):
        try:
            act()
        except torch_vmm.VmmError as error:  # noqa: PERF203
            raised.append(error)
    assert [type(error).__name__ for error in raised] == [
        "ModelNotFoundError",
        "ModelExistsError",
        "OutOfMemoryError",
        "InvalidRangeError",
        "NotMappedError",
        "InvalidPageSizeError",
    ]
    for error in raised:
        twin = pickle.loads(pickle.dumps(error))
        assert (type(twin), str(twin), vars(twin)) == (type(error), str(error), vars(error))
    shared.close()
