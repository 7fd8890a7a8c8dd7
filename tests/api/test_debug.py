"""torch_vmm.debug and TORCH_VMM_DEBUG: memory errors planted in real kernels, each in a process of its own."""

from __future__ import annotations

import json
import textwrap
from typing import Any

import pytest
import torch

import torch_vmm
from tests.helpers import python, run

OPENING = """
import gc
import json
import sys

import torch

import torch_vmm
from tests.raw_memory import at_address

device = {device!r}
torch_vmm.enable(device)
pool = torch_vmm.VirtualMemoryPool("4GiB", device=device, name="llama")


def done():
    gc.collect()
    if device != "cpu":
        torch.cuda.synchronize()


def make(size):
    with pool:
        return torch.zeros(size, dtype=torch.uint8, device=device)
"""


def program(code: str, device: str) -> str:
    return OPENING.format(device=device) + textwrap.dedent(code)


def tell(code: str, device: str, mode: str) -> Any:
    """What the program printed last, which is JSON; stderr may name damages."""
    result = python(program(code, device), TORCH_VMM_DEBUG=mode)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


# -- canary ------------------------------------------------------------------------------------------------------------


# On a GPU that others use too the work was not done yet when x was freed: report() looks again.
@pytest.mark.parametrize(("first", "count"), [(1000, 1), (1023, 3), (-1, 1), (-512, 8)])
def test_a_kernel_that_writes_beside_a_tensor_is_found_at_the_free(device: str, first: int, count: int) -> None:
    code = f"""
    x = make(1000)
    beside = at_address(x.data_ptr() + {first}, {count}, device)
    beside.fill_(1)
    del x, beside
    done()
    report = torch_vmm.debug.report(device)
    (damage,) = report.damages
    block = damage.block
    print(json.dumps([report.damaged, damage.first, damage.bytes, block.requested, block.pool, block.stack]))
    """
    damaged, at, wrong, requested, pool, stack = tell(code, device, "canary")
    assert (damaged, at, wrong, requested, pool) == (1, first, count, 1000, "llama")
    assert "in make" in stack[0]
    assert "in <module>" in stack[-1]


def test_the_damage_is_said_on_stderr_when_it_is_found(device: str) -> None:
    code = """
    x = make(1000)
    at_address(x.data_ptr() + 1000, 4, device).fill_(1)
    del x
    done()
    make(10)
    """
    result = python(program(code, device), TORCH_VMM_DEBUG="canary")
    assert result.returncode == 0
    first, second, *_ = result.stderr.splitlines()
    assert first.startswith("torch_vmm: debug: 4 bytes outside a freed block of 1000 bytes at 0x")
    assert first.endswith("were overwritten, the first at offset 1000, 0 bytes beyond its end; allocated at:")
    assert second.endswith(" in make")


def test_check_raises_while_the_tensor_lives(device: str) -> None:
    code = """
    x, y = make(1000), make(3 << 20)
    torch_vmm.debug.check(device)
    at_address(y.data_ptr() + (3 << 20), 4, device).fill_(1)
    try:
        torch_vmm.debug.check(device)
    except torch_vmm.MemoryDamageError as error:
        (damage,) = error.damages
        print(json.dumps([damage.block.requested, damage.first, damage.block.is_freed, str(error)]))
    """
    requested, first, is_freed, text = tell(code, device, "canary")
    assert (requested, first, is_freed) == (3 << 20, 3 << 20, False)
    assert "in make" in text


def test_a_damaged_block_faults_where_it_does(device: str) -> None:
    code = """
    x = make(1000)
    at_address(x.data_ptr() + 1001, 1, device).fill_(1)
    try:
        torch_vmm.debug.check(device)
    except torch_vmm.MemoryDamageError as error:
        (damage,) = error.damages
    report = torch_vmm.debug.report(device)
    faults = [block.faults for block in (damage.block, report.damages[0].block, report.blocks[0])]
    print(json.dumps([faults[0][0] - x.data_ptr(), faults[0][1] > faults[0][0], faults == [faults[0]] * 3]))
    """
    assert tell(code, device, "guard") == [1024, True, True]


@pytest.mark.parametrize("mode", ["canary", "guard", "canary,sample=1/3", "guard,sample=1/3"])
def test_a_program_without_errors_runs_as_ever(device: str, mode: str) -> None:
    code = """
    with pool:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(300, 400), torch.nn.ReLU(), torch.nn.Linear(400, 10)).to(device)
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(5):
            loss = model(torch.ones(64, 300, device=device)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    torch_vmm.debug.check(device)
    stats = pool.stats()
    assert stats.physical_usage == (
        stats.allocated_bytes + stats.idle_bytes + stats.stranded_bytes + stats.quarantined_bytes
    )
    print(torch_vmm.debug.report(device).watched > 10)
    """
    assert run(program(code, device), TORCH_VMM_DEBUG=mode) == "True\n"


# -- guard -------------------------------------------------------------------------------------------------------------


def test_addresses_are_explained(device: str) -> None:
    code = """
    x = make(1000)
    at = x.data_ptr()
    told = {}

    def add(name, address):
        found = torch_vmm.debug.explain(address)[0]
        told[name] = [found.where, found.distance, found.is_own, found.block.is_freed, str(found)]

    add("inside", at + 10)
    add("beyond", at + 1024)
    add("before", at - 4)
    (block,) = torch_vmm.debug.report(device).blocks
    told["faults"] = [block.faults[0] - at, block.faults[1] > block.faults[0]]
    told["tensor"] = torch_vmm.debug.explain(x)[0].where
    del x
    done()
    make(10)
    add("freed", at)
    print(json.dumps(told))
    """
    told = tell(code, device, "guard")
    assert told["inside"][:4] == ["inside", 10, True, False]
    assert told["beyond"][:4] == ["beyond", 24, True, False]
    assert told["before"][:4] == ["before", 4, True, False]
    assert told["faults"] == [1024, True]
    assert told["tensor"] == "inside"
    assert told["freed"][:4] == ["inside", 0, True, True]
    assert "pool 'llama'" in told["freed"][4]
    assert "in make" in told["freed"][4]


def test_it_counts_as_ever_and_takes_whole_pages(device: str) -> None:
    code = """
    x = make(1000)
    stats = pool.stats()
    print(json.dumps([stats.allocated_bytes, stats.physical_usage, pool.memory_stats()["requested_bytes.all.current"]]))
    """
    assert tell(code, device, "guard") == [1024, 2 << 20, 1000]


def test_an_out_of_memory_error_says_that_pages_are_whole(device: str) -> None:
    code = """
    pool.physical_limit = "8MiB"
    kept = []
    try:
        while True:
            kept.append(make(1000))
    except torch.OutOfMemoryError as error:
        print(json.dumps([len(kept), str(error)]))
    """
    made, text = tell(code, device, "guard")
    assert made == 4
    assert "TORCH_VMM_DEBUG" in text


# -- the mode itself ---------------------------------------------------------------------------------------------------


def test_off_is_no_mode(device: str) -> None:
    code = "x = make(1000)\nprint(json.dumps([torch_vmm.debug.mode(), torch_vmm.debug.report(device)]))"
    assert tell(code, device, "off") == [None, None]


@pytest.mark.parametrize("mode", ["1", "Guard", "guard,", "guard,1/100", "guard,sample=100", "canary,sample=1/0"])
def test_another_mode_is_an_error_that_says_what_is_right(mode: str) -> None:
    code = """
    import torch_vmm
    try:
        torch_vmm.VirtualMemoryPool("64MiB", device="cpu")
    except torch_vmm.InvalidArgumentError as error:
        print(error)
    """
    said = run(code, TORCH_VMM_DEBUG=mode)
    assert said.startswith(f"TORCH_VMM_DEBUG: '{mode}' is not a debug mode: ")
    assert 'give "off", or "guard" or "canary"' in said
    assert ",sample=1/100" in said


def test_without_it_nothing_is_known(device: str) -> None:
    code = """
    x = make(1000)
    torch_vmm.debug.check(device)
    print(torch_vmm.debug.mode(), torch_vmm.debug.report(device), torch_vmm.debug.explain(x))
    """
    assert run(program(code, device)) == "None None []\n"


def test_what_is_no_address_is_refused() -> None:
    for wrong in ("0x7f", -1, 2**64, 1.5):
        with pytest.raises(torch_vmm.InvalidArgumentError, match="neither a tensor nor an address"):
            torch_vmm.debug.explain(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["guard", "canary"])
def test_a_stack_begins_where_the_user_called(device: str, mode: str) -> None:
    code = """
    buffers = torch_vmm.MemoryPool(device)

    def take():
        return buffers.alloc(1000), buffers.alloc(1000, torch.float32, None)

    kept = take()
    print(json.dumps([block.stack for block in torch_vmm.debug.report(device).blocks]))
    """
    stacks = tell(code, device, mode)
    assert len(stacks) == 2
    assert all(stack[0].endswith(" in take") and stack[1].endswith(" in <module>") for stack in stacks)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_not_all_well() -> None:
    with pytest.raises(torch_vmm.NotAvailableError, match="nothing was looked at"):
        torch_vmm.debug.check()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_report_of_a_gpu_that_is_not_there_is_not_off() -> None:
    code = """
    import torch_vmm
    print(torch_vmm.debug.report("cpu"))
    try:
        print(torch_vmm.debug.report())
    except torch_vmm.NotAvailableError as error:
        print(error)
    """
    assert run(code) == "None\nNone\n"
    assert 'report("cpu")' in run(code, TORCH_VMM_DEBUG="guard").splitlines()[1]
