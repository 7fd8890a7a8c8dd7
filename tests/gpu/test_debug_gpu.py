"""TORCH_VMM_DEBUG on a GPU: each error is planted in a real kernel, in a process of its own.

After CUDA's error 700 a process' context is lost, so each program says what it
found in its last line, and what torch_vmm says by itself is on stderr.
"""

from __future__ import annotations

import json
import textwrap
from typing import Any

import pytest

from tests.helpers import python

HEAD = """
import gc
import json

import torch

import torch_vmm
from tests.raw_memory import at_address

torch_vmm.enable()
pool = torch_vmm.VirtualMemoryPool("8GiB", name="llama")
told = {}


def make(size):
    with pool:
        return torch.zeros(size, dtype=torch.uint8, device="cuda")


def faults(work):
    # Whether the device has faulted once the work is done.
    try:
        work()
        torch.cuda.synchronize()
    except RuntimeError as error:
        told["error"] = str(error)
        return True
    return False


def end():
    told["faulted"] = True
    report = torch_vmm.debug.report()
    told["report"] = str(report)
    told["live"] = [[block.requested, block.pool, block.stack] for block in report.blocks]
    told["freed"] = [[block.requested, block.pool, block.stack] for block in report.freed]
    # Whatever the program does next, torch_vmm says by itself what it knows: here it frees.
    try:
        make(10)
    except RuntimeError as error:
        told["later"] = str(error)
    print(json.dumps(told), flush=True)
    import os
    os._exit(0)


"""

TAIL = """
if faults(work):
    end()
print(json.dumps(told), flush=True)
"""

# A kernel that writes `count` bytes from `at` on, a thread a byte.
KERNEL = '''
source = r"""
extern "C" __global__ void write_bytes(unsigned char* at, int count) {
  int k = blockIdx.x * blockDim.x + threadIdx.x;
  if (k < count) at[k] = 1;
}
"""
compiled = torch.cuda._compile_kernel(source, "write_bytes")


def write(tensor, count):
    compiled(grid=((count + 255) // 256, 1, 1), block=(256, 1, 1), args=[tensor, count])
'''

FAULTS = {
    "torch's fill_ beyond the end": """
        x = make(1000)
        beyond = at_address(x.data_ptr(), 4096, "cuda")
        work = lambda: beyond.fill_(1)
    """,
    "torch's sum beyond the end": """
        x = make(512)
        beyond = at_address(x.data_ptr() + 512, 4, "cuda")
        work = lambda: beyond.sum()
    """,
    "torch's add_ to what was freed": """
        x = make(4096)
        former = at_address(x.data_ptr(), 4096, "cuda")
        torch.cuda.synchronize()
        del x
        make(10)
        torch.cuda.synchronize()
        make(10)
        work = lambda: former.add_(1)
    """,
    "a kernel of one's own beyond the end": KERNEL
    + """
x = make(3 << 20)
work = lambda: write(x, (3 << 20) + 1)
    """,
    "torch's index_copy_ into what was freed": """
        x = make(3 << 20)
        former = at_address(x.data_ptr(), 3 << 20, "cuda")
        index, value = torch.tensor([1 << 20], device="cuda"), torch.ones(1, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        del x
        make(10)
        torch.cuda.synchronize()
        make(10)
        work = lambda: former.index_copy_(0, index, value)
    """,
}

SIZES = {"fill_": 1000, "sum": 512, "add_": 4096}
"""Bytes of the tensor at fault; else 3 MiB."""


def outcome(code: str, mode: str) -> tuple[dict[str, Any], str]:
    result = python(HEAD + textwrap.dedent(code) + TAIL, timeout=300, TORCH_VMM_DEBUG=mode)
    assert result.stdout, f"exit code {result.returncode}\n{result.stderr}"
    return json.loads(result.stdout.splitlines()[-1]), result.stderr


@pytest.mark.needs_gpu("a fault is error 700 there, and ends the process here")
@pytest.mark.parametrize("name", FAULTS)
def test_the_kernel_faults_and_the_report_names_the_tensor(name: str) -> None:
    told, stderr = outcome(FAULTS[name], "guard")
    assert told.get("faulted"), told
    assert "illegal memory access" in told["error"]
    is_freed = "freed" in name
    requested = next((size for call, size in SIZES.items() if call in name), 3 << 20)
    candidates = told["freed" if is_freed else "live"]
    (block,) = [each for each in candidates if each[0] == requested]
    assert block[1] == "llama"
    assert "in make" in block[2][0]
    assert "touched an address without memory" in stderr
    assert f"of {requested} bytes" in stderr
    assert stderr.count("touched an address without memory") == 1
    if "later" in told:
        assert "debug mode 'guard'" in told["later"]


def test_what_is_right_does_not_fault() -> None:
    code = """
    def work():
        blocks = [make(1 + 37 * k) for k in range(64)]
        for block in blocks:
            block.fill_(1)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            with pool:
                other = torch.ones(3 << 20, dtype=torch.uint8, device="cuda")
            other.record_stream(torch.cuda.current_stream())
        del blocks, other
        gc.collect()
        torch.cuda.synchronize()
        torch_vmm.debug.check()
    """
    for mode in ("guard", "canary", "guard,sample=1/5", "canary,sample=1/5"):
        told, stderr = outcome(code, mode)
        assert told == {}
        assert stderr == ""


@pytest.mark.needs_gpu("it is compiled for one")
@pytest.mark.parametrize(("first", "count"), [(1000, 1), (1024, 8), (-8, 8)])
def test_a_canary_finds_a_kernel_of_ones_own(first: int, count: int) -> None:
    code = (
        KERNEL
        + f"""
x = make(1000)
beside = at_address(x.data_ptr() + {first}, {count}, "cuda")


def work():
    write(beside, {count})
    global x
    del x
    torch.cuda.synchronize()
    make(10)
    (damage,) = torch_vmm.debug.report().damages
    told["damage"] = [damage.first, damage.bytes, damage.block.requested, damage.block.pool]
"""
    )
    told, stderr = outcome(code, "canary")
    assert told == {"damage": [first, count, 1000, "llama"]}
    assert "overwritten" in stderr


def test_a_canary_finds_a_kernel_of_torchs_while_the_tensor_lives() -> None:
    code = """
    x = make(1000)
    beside = at_address(x.data_ptr() + 1001, 2, "cuda")

    def work():
        beside.fill_(1)
        try:
            torch_vmm.debug.check()
        except torch_vmm.MemoryDamageError as error:
            (damage,) = error.damages
            told["damage"] = [damage.first, damage.bytes, damage.block.is_freed]
    """
    told, _ = outcome(code, "canary")
    assert told == {"damage": [1001, 2, False]}


def test_a_graph_works_and_its_memory_is_not_watched() -> None:
    code = """
    def work():
        with pool:
            x = torch.ones(1000, device="cuda")
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                y = x * 2 + torch.ones(1000, device="cuda")
        x.fill_(3)
        graph.replay()
        torch.cuda.synchronize()
        told["result"] = float(y.sum())
        told["missed"] = torch_vmm.debug.report().missed > 0
        del graph, x, y
        gc.collect()
        torch_vmm.debug.check()
    """
    for mode in ("guard", "canary"):
        told, stderr = outcome(code, mode)
        assert told == {"result": 7000.0, "missed": True}
        assert stderr == ""


def test_work_that_is_queued_keeps_what_was_freed() -> None:
    code = """
    def work():
        x = torch.ones(1 << 20, device="cuda")
        torch.cuda._sleep(50_000_000)
        y = x * 2
        del x
        torch.empty(1, device="cuda")
        told["sum"] = float(y.sum())
    """
    for mode in ("guard", "canary"):
        assert outcome(code, mode)[0] == {"sum": float(2 << 20)}
