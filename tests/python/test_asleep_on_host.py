"""Host memory of a model that sleeps: an access ends the process, what needs no memory is answered."""

from __future__ import annotations

import signal

import pytest

from tests.helpers import python

OPENING = """
import copy

import torch

import torch_vmm

torch_vmm.enable("cpu")
pool = torch_vmm.VirtualMemoryPool("1GiB", device="cpu", name="llama")
with pool:
    x = torch.arange(1 << 20, dtype=torch.float32)
pool.sleep()
"""

ACCESSES = ["x[0].item()", "x.fill_(1)", "repr(x)", "x.clone()", "copy.deepcopy(x)", "x.numpy().sum()"]


@pytest.mark.parametrize("access", ACCESSES)
def test_an_access_ends_the_process_without_a_word(access: str) -> None:
    done = python(OPENING + access)
    assert done.returncode == -signal.SIGSEGV
    assert done.stderr == done.stdout == ""


def test_faulthandler_names_the_line() -> None:
    lines = OPENING + "import faulthandler\nfaulthandler.enable()\n"
    done = python(lines + "x.sum()")
    assert done.returncode == -signal.SIGSEGV
    assert f"line {len(lines.splitlines()) + 1} in <module>" in done.stderr


def test_what_needs_no_memory_is_answered() -> None:
    done = python(
        OPENING
        + """
assert x.shape == x.view(-1).shape == (1 << 20,) and x[5:].storage_offset() == 5 and x.data_ptr() > 0
assert torch_vmm.pool_of(x) is pool and pool.is_asleep
parameter = torch.nn.Parameter(x)
del x
pool.wake()
print(int(parameter[7]))
"""
    )
    assert (done.returncode, done.stdout) == (0, "7\n"), done.stderr
