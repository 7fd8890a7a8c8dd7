"""NCCL over memory in our pools, on two GPUs: collectives, registered memory, DDP and FSDP2.

A torchrun takes seconds to start, so each configuration is one run that many
tests look at. The ranks check their own numbers (workloads_nccl.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.gpu2.launch import Launched, torchrun
from tests.helpers import MIB

WORKLOADS = "tests.gpu2.workloads_nccl"

DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
# Only NCCL's "Simple" protocol uses registered memory; left to itself it takes that for large tensors alone.
REGISTERING = {**DETERMINISTIC, "NCCL_PROTO": "Simple", "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "REG"}
HOOK = {**REGISTERING, "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "1"}

MEM_POOLS = ["mem_pool", "mem_pool_of_ours", "mem_pool_in_a_model"]
TRAININGS = ["ddp", "fsdp"]


@pytest.fixture(scope="module")
def plain() -> Launched:
    """Collectives and training under torch_vmm."""
    checks = ["collectives", "hand_over", *TRAININGS, "ddp_in_models", "fsdp_in_models"]
    return torchrun(WORKLOADS, "ours", *checks, environment=DETERMINISTIC)


@pytest.fixture(scope="module")
def hooked() -> Launched:
    """The same with all memory registered with NCCL, as it comes and goes."""
    return torchrun(WORKLOADS, "ours", "collectives", "hand_over", *TRAININGS, "ddp_in_models", environment=HOOK)


@pytest.fixture(scope="module")
def registered() -> Launched:
    """MemPools that are registered with NCCL, under torch_vmm."""
    return torchrun(WORKLOADS, "ours", *MEM_POOLS, environment=REGISTERING)


@pytest.fixture(scope="module")
def native() -> Launched:
    """The same code under torch's own allocator."""
    return torchrun(WORKLOADS, "native", *TRAININGS, environment=DETERMINISTIC)


def answers(launched: Launched, check: str) -> list[Any]:
    return [rank[check] for rank in launched.ranks]


def test_each_side_ran_under_its_allocator(plain: Launched, native: Launched) -> None:
    assert [rank["backend"] for rank in plain.ranks] == ["torch_vmm"] * 2
    assert [rank["backend"] for rank in native.ranks] == ["native"] * 2


@pytest.mark.parametrize("run", ["plain", "hooked"])
class TestCollectives:
    """The ranks compared each element; these show that the memory under the tensors did change."""

    @pytest.fixture
    def launched(self, run: str, request: pytest.FixtureRequest) -> Launched:
        found: Launched = request.getfixturevalue(run)
        return found

    def test_memory_is_given_back_between_collectives(self, launched: Launched) -> None:
        assert all(answer["given_back"] >= 100 * MIB for answer in answers(launched, "collectives"))

    def test_models_take_memory_from_each_other_between_collectives(self, launched: Launched) -> None:
        assert all(answer["taken"] >= 100 * MIB for answer in answers(launched, "hand_over"))

    def test_addresses_are_used_again_with_other_memory(self, launched: Launched) -> None:
        for answer in answers(launched, "hand_over"):
            assert len(set(answer["addresses"])) < len(answer["addresses"])


def test_nothing_complains(plain: Launched, registered: Launched) -> None:
    for launched in (plain, registered):
        assert "torch_vmm:" not in launched.stderr


@pytest.mark.parametrize("check", MEM_POOLS)
class TestRegisteredMemPools:
    """``ProcessGroupNCCL.register_mem_pool``; the ranks compared each element."""

    def test_collectives_are_right_in_it(self, check: str, registered: Launched) -> None:
        assert len(answers(registered, check)) == 2

    def test_its_free_memory_is_given_back_while_it_lives(self, check: str, registered: Launched) -> None:
        assert all(answer["given_back"] >= 20 * MIB for answer in answers(registered, check))

    def test_its_memory_belongs_to_the_model_that_is_open(self, check: str, registered: Launched) -> None:
        wanted = check == "mem_pool_in_a_model"
        assert all(answer["owned"] is wanted for answer in answers(registered, check))


RECORD = r"register comm \S+ buffer 0x(?P<address>[0-9a-f]+) size (?P<size>\d+)"
# What a peer maps for a record is one of the driver's handles, of that size.
USE = r"IPC register buffer \S+ size \d+ \(baseAddr 0x(?P<used>[0-9a-f]+) size (?P<handle>\d+)\)"


def uses(log: str) -> Iterator[tuple[int, int, int]]:
    """Of each record that peers map: its address, its size and the size of the handle.

    In the order of the log: an address is another record's once its memory has left.
    """
    sizes: dict[int, int] = {}
    for found in re.finditer(f"{RECORD}|{USE}", log):
        if found["address"] is not None:
            sizes[int(found["address"], 16)] = int(found["size"])
        else:
            address = int(found["used"], 16)
            yield address, sizes.get(address, 0), int(found["handle"])


@pytest.mark.parametrize("run", ["registered", "hooked"])
class TestWhatNcclIsTold:
    """Read from NCCL's log. NCCL trusts a record to lie in one of the driver's handles; a second one goes wrong."""

    @pytest.fixture
    def logs(self, run: str, request: pytest.FixtureRequest) -> list[str]:
        launched: Launched = request.getfixturevalue(run)
        found = [log for log in launched.logs if "register comm" in log]
        assert len(found) == 2
        return found

    def test_peers_read_and_write_our_memory_without_a_copy(self, logs: list[str]) -> None:
        assert all(any(uses(log)) for log in logs)

    def test_no_record_spans_two_handles(self, logs: list[str]) -> None:
        wrong = [
            f"{address:#x}: a record of {size} bytes, a handle of {handle}"
            for log in logs
            for address, size, handle in uses(log)
            if size > handle
        ]
        assert wrong == []

    def test_memory_that_leaves_is_taken_back_from_peers(self, logs: list[str]) -> None:
        for log in logs:  # at the end NCCL takes all back by itself
            assert 0 <= log.find("IPC deregistered buffer") < log.rfind("register comm")

    def test_no_registration_fails(self, logs: list[str]) -> None:
        for log in logs:
            assert "failed to IPC register" not in log
            assert "Cuda failure" not in log


class TestTraining:
    @pytest.mark.parametrize("run", ["plain", "hooked"])
    @pytest.mark.parametrize("check", TRAININGS)
    def test_it_gives_bit_for_bit_what_native_gives(
        self, check: str, run: str, native: Launched, request: pytest.FixtureRequest
    ) -> None:
        ours: Launched = request.getfixturevalue(run)
        assert answers(ours, check) == answers(native, check)

    def test_the_losses_are_of_a_model_that_learns(self, native: Launched) -> None:
        for check in TRAININGS:
            for answer in answers(native, check):
                assert answer["losses"][-1] < answer["losses"][0]

    @pytest.mark.parametrize("check", TRAININGS)
    def test_two_models_by_turns_give_what_one_gives(self, check: str, plain: Launched, native: Launched) -> None:
        for ours, alone in zip(answers(plain, f"{check}_in_models"), answers(native, check), strict=True):
            assert ours["models"] == [alone, alone]

    @pytest.mark.parametrize("check", TRAININGS)
    def test_weights_gradients_and_buckets_lie_in_their_model(self, check: str, plain: Launched) -> None:
        for answer in answers(plain, f"{check}_in_models"):
            assert answer["strays"] == []
            assert answer["default_grew"] < MIB

    def test_so_they_do_where_all_memory_is_registered(self, hooked: Launched, native: Launched) -> None:
        for ours, alone in zip(answers(hooked, "ddp_in_models"), answers(native, "ddp"), strict=True):
            assert ours["models"] == [alone, alone]
            assert ours["strays"] == []
