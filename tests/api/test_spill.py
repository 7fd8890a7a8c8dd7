"""spill="host": tensors that find no memory stand in the host's, counted and bounded apart."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

from tests.helpers import MIB, tensor_in
from torch_vmm import InvalidArgumentError, SharedMemoryPool, sealed

MakeShared = Callable[..., SharedMemoryPool]


def test_a_tensor_beyond_the_limit_is_right_and_counted_apart(make_shared: MakeShared) -> None:
    shared = make_shared("64MiB")
    model = shared.register_model("model", spill="host")
    assert model.spill == "host"
    kept = tensor_in(model, 60 * MIB).fill_(1)
    spilled = tensor_in(model, 20 * MIB).fill_(2)
    stats = model.stats()
    assert stats.physical_usage <= 64 * MIB
    assert stats.spilled_bytes == 20 * MIB
    assert shared.global_stats().spilled_bytes == 20 * MIB
    assert shared.global_stats().physical_usage <= 64 * MIB
    assert model.physical_memory_usage == stats.physical_usage
    assert model.memory_allocated() == 80 * MIB
    assert int(kept.sum(dtype=torch.int64)) == 60 * MIB
    assert int(spilled.sum(dtype=torch.int64)) == 40 * MIB
    assert model.reclaim_report().rungs["host memory"].met == 1
    del kept, spilled
    gc.collect()
    again = tensor_in(model, 20 * MIB)
    assert model.stats().physical_usage >= 20 * MIB  # on the device, now that there is room
    model.empty_cache()
    assert model.stats().spilled_bytes == 0
    del again


def test_tables_and_reprs_show_it(make_shared: MakeShared) -> None:
    shared = make_shared("64MiB")
    model = shared.register_model("model", spill="host")
    kept = tensor_in(model, 60 * MIB)
    assert "in host memory" not in str(shared)
    assert "in host memory" not in repr(model)
    spilled = tensor_in(model, 20 * MIB)
    assert "in host memory 20 MiB: model 20 MiB" in str(shared).splitlines()
    assert "20 MiB in host memory" in repr(model)
    del kept, spilled


def test_it_is_off_unless_asked_for_and_can_be_set_at_any_time(make_shared: MakeShared) -> None:
    shared = make_shared("64MiB")
    model = shared.register_model("model")
    assert model.spill is None
    kept = tensor_in(model, 60 * MIB)
    with pytest.raises(torch.OutOfMemoryError):
        tensor_in(model, 20 * MIB)
    model.spill = "host"
    spilled = tensor_in(model, 20 * MIB)
    model.spill = None
    with pytest.raises(torch.OutOfMemoryError):
        tensor_in(model, 20 * MIB)
    del kept, spilled


def test_its_bound_is_in_the_error(make_shared: MakeShared) -> None:
    shared = make_shared("64MiB")
    assert shared.spill_limit is None
    shared.spill_limit = "32MiB"
    assert shared.spill_limit == 32 * MIB
    model = shared.register_model("model", spill="host")
    kept = tensor_in(model, 60 * MIB)
    spilled = tensor_in(model, 20 * MIB)
    with pytest.raises(torch.OutOfMemoryError, match=r"spilled memory of .*: limit 32 MiB, mapped 20 MiB") as refused:
        tensor_in(model, 20 * MIB)
    assert "raise spill_limit by 8 MiB" in str(refused.value)
    shared.spill_limit = "40MiB"
    more = tensor_in(model, 20 * MIB)
    del kept, spilled, more


@pytest.mark.parametrize("spill", ["disk", "", 1, True])
def test_other_places_are_refused(make_shared: MakeShared, spill: object) -> None:
    shared = make_shared("64MiB")
    with pytest.raises(InvalidArgumentError, match="give 'host', or None"):
        shared.register_model("model", spill=spill)
    assert "model" not in shared.models
    model = shared.register_model("model")
    with pytest.raises(InvalidArgumentError, match="give 'host', or None"):
        model.spill = spill


def test_training_beyond_the_limit_ends_with_the_same_weights(make_shared: MakeShared) -> None:
    def trained(limit: str, spill: str | None) -> tuple[list[torch.Tensor], int]:
        shared = make_shared(limit)
        model = shared.register_model("model", spill=spill)
        torch.manual_seed(0)
        with model:
            device = shared.device
            net = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8))).to(device)
            optimizer = torch.optim.Adam(net.parameters())
            for _ in range(3):
                loss = net(torch.ones(2048, 512, device=device)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            most = model.stats().spilled_bytes
            weights = [parameter.detach().cpu().clone() for parameter in net.parameters()]
        return weights, most

    usual, none = trained("512MiB", None)
    beyond, spilled = trained("64MiB", "host")
    assert none == 0 < spilled
    assert all(torch.equal(a, b) for a, b in zip(usual, beyond, strict=True))


def test_what_has_spilled_is_not_sealed_and_says_why(make_shared: MakeShared) -> None:
    model = make_shared("64MiB").register_model("model", spill="host")
    with model.tag("weights"):
        weights = [torch.ones(20 * MIB, dtype=torch.uint8, device=model.device) for _ in range(4)]
    with pytest.raises(InvalidArgumentError, match="have spilled to host memory, which cannot be sealed: copy"):
        model.seal(weights)
    assert not any(map(sealed, weights))
    model.seal(weights[:3])
    assert sealed(weights[0])
    model.unseal(weights[:3])


def test_a_model_that_sleeps_keeps_what_it_spilled(make_shared: MakeShared) -> None:
    shared = make_shared("64MiB")
    model = shared.register_model("model", spill="host")
    kept = tensor_in(model, 60 * MIB).fill_(1)
    spilled = tensor_in(model, 20 * MIB).fill_(2)
    model.sleep()
    assert model.stats().physical_usage == 0
    assert model.stats().spilled_bytes == 20 * MIB
    model.wake()
    assert int(kept.sum(dtype=torch.int64)) == 60 * MIB
    assert int(spilled.sum(dtype=torch.int64)) == 40 * MIB
