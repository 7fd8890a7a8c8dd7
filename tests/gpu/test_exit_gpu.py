"""No crash and no noise however a process ends: in any order, forked, killed, with work queued.

All programs start at once, each in its own process; every test looks at one.
"""

from __future__ import annotations

import signal
import textwrap
import time
from collections.abc import Iterator

import pytest
import torch

from tests.gpu.programs import Process, expect_done, running, start

_HEAD = """
import os, sys, threading
import torch, torch_vmm
torch_vmm.enable()
gpu = torch_vmm.SharedMemoryPool("512MiB")
one, other = gpu.register_model("one"), gpu.register_model("other")
def block(pool, mib=8):
    with pool:
        return torch.ones(mib * 2**20, dtype=torch.uint8, device="cuda")
"""

# Each prints "done" last.
PROGRAMS = {
    "tensors alive in globals": """
        a, b, c = block(one), block(other), torch.ones(5, device="cuda")
        print("done")
    """,
    "tensors die before their pool": """
        a = block(one)
        del a
        gpu.close()
        print("done")
    """,
    "pools die before their tensors": """
        a, b = block(one), block(other)
        gpu.close(force=True)
        del gpu, one, other
        assert int(a.sum()) == a.numel()
        print("done")
    """,
    "a pool that was never used": """
        pool = torch_vmm.VirtualMemoryPool("1GiB")
        print("done")
    """,
    "inside a model": """
        one.__enter__()
        a = torch.ones(8, device="cuda")
        print("done")
    """,
    "sys.exit inside a model": """
        with one:
            a = torch.ones(8, device="cuda")
            print("done")
            sys.exit(0)
    """,
    "tensors in a cycle": """
        class Node: pass
        node = Node()
        node.me, node.block = node, block(one)
        print("done")
    """,
    "a tensor that an atexit handler frees": """
        import atexit
        held = [block(one)]
        atexit.register(held.clear)
        print("done")
    """,
    "work still queued": """
        a = block(one)
        torch.cuda._sleep(400_000_000)
        a.fill_(2)
        del a
        print("done")
    """,
    "a manager with mappings and tensors": """
        manager = torch_vmm.VirtualMemoryManager("cuda")
        range_ = manager.reserve("4MiB")
        manager.map(range_, manager.alloc_physical("4MiB"))
        manager.set_access(range_, torch_vmm.AccessFlags.READ_WRITE)
        a = manager.tensor(range_, 0, (1024,), torch.float32)
        print("done")
    """,
    "autograd's threads": """
        with one:
            x = torch.randn(1000, 1000, device="cuda", requires_grad=True)
            (x @ x).sum().backward()
        print("done")
    """,
    "a forked child that ends by os._exit": """
        a = block(one)
        torch.cuda.synchronize()
        child = os.fork()
        if child == 0:
            del a
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert int(a.sum()) == a.numel()
        print("done")
    """,
    "a forked child that runs to its end": """
        a, held = block(one), [block(other)]
        torch.cuda.synchronize()
        child = os.fork()
        if child == 0:
            held.clear()
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert int(a.sum()) == a.numel() == held[0].numel()
        print("done")
    """,
    "a forked child that asks for memory": """
        a = block(one)
        child = os.fork()
        if child == 0:
            try:
                one.allocate("256MiB", "2MiB")
            except torch_vmm.NotAvailableError:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert int(a.sum()) == a.numel()
        print("done")
    """,
    "multiprocessing's fork": """
        import multiprocessing
        a = block(one)
        child = multiprocessing.get_context("fork").Process(target=lambda: None)
        child.start()
        child.join()
        assert child.exitcode == 0
        assert int(a.sum()) == a.numel()
        print("done")
    """,
    "a child made by exec": """
        import subprocess
        a = block(one)
        subprocess.run([sys.executable, "-c", "pass"], check=True)
        assert int(a.sum()) == a.numel()
        print("done")
    """,
}

_ENDLESS = """
held = block(one, 400)
torch.cuda.synchronize()
print("ready", flush=True)
while True:
    block(other, 16).fill_(1)
"""


def program(body: str) -> str:
    return _HEAD + textwrap.dedent(body)


@pytest.fixture(scope="module")
def started() -> Iterator[dict[str, Process]]:
    with running({name: program(body) for name, body in PROGRAMS.items()}) as processes:
        yield processes


@pytest.mark.no_memcheck  # other processes, many at once
@pytest.mark.parametrize("name", PROGRAMS)
def test_ends_well(started: dict[str, Process], name: str) -> None:
    expect_done(started[name])


@pytest.mark.needs_gpu("its memory is each process's own")
@pytest.mark.alone  # it looks at the GPU's free memory
@pytest.mark.no_memcheck  # another process
def test_a_killed_process_gives_all_its_memory_back() -> None:
    free = torch.cuda.mem_get_info()[0]
    process = start(program(_ENDLESS))
    for _ in range(600):
        if process.out.exists() and process.out.read_text() == "ready\n":
            break
        time.sleep(0.1)
    assert free - torch.cuda.mem_get_info()[0] >= 400 * 2**20
    assert process.wait(0).returncode == -signal.SIGKILL
    for _ in range(100):
        if free - torch.cuda.mem_get_info()[0] < 64 * 2**20:
            return
        time.sleep(0.05)
    pytest.fail(f"{free - torch.cuda.mem_get_info()[0]} bytes are missing")
