"""Error 700, as any of our driver calls may see it: said once on stderr, and in the exception where one is raised."""

from __future__ import annotations

import textwrap

import pytest

from tests.helpers import python

HEAD = """
import torch

import torch_vmm
from tests.standin import control

torch_vmm.enable()
pool = torch_vmm.VirtualMemoryPool("4GiB", name="llama")


def make(size):
    with pool:
        return torch.zeros(size, dtype=torch.uint8, device="cuda")


x = make(1000)
y = make(5000)
torch.cuda.synchronize()
"""

ILLEGAL_ADDRESS = 700


def run(code: str, mode: str) -> tuple[str, str]:
    result = python(HEAD + textwrap.dedent(code), TORCH_VMM_DEBUG=mode)
    assert result.returncode == 0, result.stderr
    return result.stdout, result.stderr


@pytest.mark.parametrize("call", ["cuEventRecord", "cuMemCreate"])
def test_it_is_said_once_with_the_newest_blocks(call: str) -> None:
    code = f"""
    del y
    del x
    with control.failing("{call}", 1, {ILLEGAL_ADDRESS}):
        try:
            make(64 << 20)
        except RuntimeError as error:
            print(error)
    make(10)
    """
    said, stderr = run(code, "guard")
    assert stderr.count("work on the device has touched an address without memory") == 1
    assert f"({call})" in stderr
    assert "of 5000 bytes" in stderr
    assert "of 1000 bytes" in stderr
    assert "in make" in stderr
    assert stderr.startswith("torch_vmm: debug mode 'guard' of device cuda:0: ")
    assert said == ""  # one call that fails once is tried again


@pytest.mark.parametrize("mode", ["guard", ""])
def test_the_exception_has_it_in_debug_mode_alone(mode: str) -> None:
    code = f"""
    try:
        with control.failing("cuMemFree", 1, {ILLEGAL_ADDRESS}):
            torch_vmm.debug.check()
            print("fine")
    except torch_vmm.DriverError as error:
        print(error.code, error)
    """
    environment = {"TORCH_VMM_DEBUG": mode} if mode else {}
    result = python(HEAD + textwrap.dedent(code), **environment)
    assert result.returncode == 0, result.stderr
    if not mode:
        assert result.stdout == "fine\n"
        return
    assert result.stdout.startswith(f"{ILLEGAL_ADDRESS} waiting for queued work, to look at what is watched in pool ")
    assert (
        "cuMemFree: CUDA_ERROR_ILLEGAL_ADDRESS (700)\ntorch_vmm: debug mode 'guard' of device cuda:0" in result.stdout
    )
    assert "of 5000 bytes" in result.stdout


@pytest.mark.parametrize("mode", ["guard", "canary"])
def test_patterns_are_read_on_a_stream_of_their_own(mode: str) -> None:
    code = """
    side = torch.cuda.Stream()
    calls = control.calls("cuStreamSynchronize")
    with control.held(side):
        with torch.cuda.stream(side):
            held = torch.zeros(10, device="cuda")
        torch_vmm.debug.report()
        del x
        print(control.calls("cuStreamSynchronize") - calls)
    torch.cuda.synchronize()
    make(10)
    print(control.calls("cuStreamSynchronize") > calls)
    torch_vmm.debug.check()
    """
    said, stderr = run(code, mode)
    assert said == "0\nTrue\n"
    assert stderr == ""


def test_a_report_looks_at_what_was_freed_before_the_gpu_was_done() -> None:
    code = """
    from tests.raw_memory import at_address

    at_address(x.data_ptr() + 1000, 1, "cuda").fill_(1)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with control.held(side):
        with torch.cuda.stream(side):
            held = torch.zeros(10, device="cuda")
        torch_vmm.debug.report()  # the clock knows the stream
        del x
        print(torch_vmm.debug.report().damaged)
    torch.cuda.synchronize()
    print(torch_vmm.debug.report().damaged)
    """
    said, _ = run(code, "canary")
    assert said == "0\n1\n"
