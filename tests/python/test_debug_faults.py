"""TORCH_VMM_DEBUG=guard on host memory: an access to no memory ends the process, and a line says whose it was."""

from __future__ import annotations

import re
import signal
import textwrap

import pytest

from tests.helpers import python

OPENING = """
import torch

import torch_vmm
from tests.raw_memory import at_address

torch_vmm.enable("cpu")
pool = torch_vmm.VirtualMemoryPool("1GiB", device="cpu", name="llama")


def make(size):
    with pool:
        return torch.zeros(size, dtype=torch.uint8)


"""

# What a kernel of torch's does, by what the report says of it.
ERRORS = {
    "24 bytes beyond the end of a live block of 1000 bytes": """
        x = make(1000)
        at_address(x.data_ptr(), 5000, "cpu").fill_(1)
    """,
    "0 bytes beyond the end of a live block of 512 bytes": """
        x = make(512)
        at_address(x.data_ptr(), 600, "cpu").sum()
    """,
    r"byte \d+ of a freed block of 4096 bytes": """
        x = make(4096)
        view = at_address(x.data_ptr(), 4096, "cpu")
        del x
        make(10)
        view.add_(1)
    """,
    r"byte \d+ of a freed block of 4194304 bytes": """
        x = make(4194304)
        view = at_address(x.data_ptr(), 4194304, "cpu")
        del x
        pool.close()
        view.add_(1)
    """,
    "byte 5 of a freed block of 3000000 bytes": """
        x = make(3000000)
        last = at_address(x.data_ptr() + 5, 1, "cpu")
        del x
        torch.index_select(last, 0, torch.tensor([0]))
    """,
}


@pytest.mark.parametrize("said", ERRORS)
@pytest.mark.parametrize("faulthandler", [False, True])
def test_the_block_is_named_and_the_process_ends(said: str, faulthandler: bool) -> None:
    opening = "import faulthandler\nfaulthandler.enable()\n" if faulthandler else ""
    result = python(opening + OPENING + textwrap.dedent(ERRORS[said]), TORCH_VMM_DEBUG="guard")
    assert result.returncode == -signal.SIGSEGV
    line, *stack = result.stderr.splitlines()
    assert line.startswith("torch_vmm: debug: the CPU may not touch 0x")
    assert re.search(f": {said} at 0x", line)
    assert line.endswith("; allocated at:")
    assert "pool 'llama'" in line
    assert stack[0].endswith(" in make")
    assert stack[1].endswith(" in <module>")
    assert ("Fatal Python error: Segmentation fault" in result.stderr) == faulthandler


SEALED = {
    r"byte 8 of a live block of 4000 bytes at 0x\w+ \(pool 'llama": """
        with pool.tag("weights"):
            weight = torch.ones(1000)
        pool.seal(weight)
        print(float(weight.sum()), flush=True)
        weight[2] = 2
    """,
    "it is of pool 'llama .*' and of no watched block": """
        with pool:
            weight = torch_vmm.elastic((1000,), torch.float32, "cpu", max_shape=(1 << 22,)).fill_(1)
        pool.seal(weight)
        print(float(weight.sum()), flush=True)
        weight[2] = 2
    """,
}


@pytest.mark.parametrize("said", SEALED)
def test_a_write_to_what_is_sealed_is_said_to_be_one(said: str) -> None:
    result = python(OPENING + textwrap.dedent(SEALED[said]), TORCH_VMM_DEBUG="guard")
    assert result.returncode == -signal.SIGSEGV
    assert result.stdout == "1000.0\n"
    line = result.stderr.splitlines()[0]
    assert re.match(rf"torch_vmm: debug: the CPU may not write to 0x\w+, which is sealed: {said}", line), line


def test_what_was_sealed_is_no_longer_said_to_be() -> None:
    code = """
        with pool.tag("weights"):
            weight = torch.ones(1000)
        pool.seal(weight)
        pool.unseal(weight)
        weight[2] = 2
        at_address(weight.data_ptr(), 5000, "cpu").fill_(1)
    """
    line = python(OPENING + textwrap.dedent(code), TORCH_VMM_DEBUG="guard").stderr.splitlines()[0]
    assert "may not touch" in line
    assert "sealed" not in line


READ_ONLY = """
with pool:
    weight = torch_vmm.aligned((2 << 20,), torch.uint8, "cpu").fill_(1)
    shown = [torch_vmm.alias(weight, read_only=read_only) for read_only in (False, True, True)]
shown[0][:] = 2
print(int(shown[2][-1]), flush=True)
"""


def test_a_write_to_a_read_only_alias_is_said_to_be_one() -> None:
    result = python(OPENING + READ_ONLY + "del shown[1]\nshown[1][-1] = 3\n", TORCH_VMM_DEBUG="guard")
    assert result.returncode == -signal.SIGSEGV
    assert result.stdout == "2\n"
    said = r"torch_vmm: debug: the CPU may not write to 0x\w+: it is of an alias that was made with read_only=True\n"
    assert re.fullmatch(said, result.stderr), result.stderr


def test_another_fault_is_not_ours_to_explain() -> None:
    result = python(OPENING + "make(10)\nat_address(8, 8, 'cpu').sum()\n", TORCH_VMM_DEBUG="guard")
    assert result.returncode == -signal.SIGSEGV
    assert result.stderr == ""


def test_a_signal_that_was_sent_ends_the_process_as_ever() -> None:
    code = "import os, signal\nmake(10)\nos.kill(os.getpid(), signal.SIGSEGV)\n"
    assert python(OPENING + code, TORCH_VMM_DEBUG="guard").returncode == -signal.SIGSEGV


def test_an_address_of_no_watched_block_is_said_to_be_one() -> None:
    result = python(OPENING + "make(10)\nat_address(pool.base_address, 8, 'cpu').sum()\n", TORCH_VMM_DEBUG="guard")
    assert result.returncode == -signal.SIGSEGV
    assert "it is of pool 'llama' and of no watched block" in result.stderr


def test_without_the_mode_nothing_is_installed() -> None:
    result = python(OPENING + "make(10)\nat_address(pool.base_address + (900 << 20), 8, 'cpu').sum()\n")
    assert result.returncode == -signal.SIGSEGV
    assert result.stderr == ""
