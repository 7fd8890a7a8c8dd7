"""The ways to become torch's allocator, each in a fresh process; all start at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gpu.programs import Process, expect_done, running

_USE = """
x = torch.ones(1000, 1000, device="cuda", requires_grad=True)
(x @ x).sum().backward()
torch.cuda.synchronize()
"""

_STATISTICS = """
assert torch.cuda.memory_allocated() >= 8_000_000, torch.cuda.memory_allocated()
assert torch.accelerator.memory_allocated() == torch.cuda.memory_allocated()
assert torch.accelerator.memory_reserved() == torch.cuda.memory_reserved() > 0
assert torch.accelerator.max_memory_allocated() == torch.cuda.max_memory_allocated()
assert torch_vmm.pool_of(x) is torch_vmm.current_pool("cuda")
assert torch_vmm.is_enabled("cuda")
"""

_MODELS = """
gpu = torch_vmm.SharedMemoryPool("64MiB")
with gpu.register_model("one") as one:
    y = torch.ones(1000, device="cuda")
assert torch_vmm.pool_of(y) is one
try:
    with one:
        torch.empty(2**27, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    assert "one" in str(error)
else:
    raise AssertionError("the limit did not hold")
"""


_TOO_LATE = """
for become in (torch_vmm.enable, lambda: torch.cuda.memory.change_current_allocator(torch_vmm.allocator())):
    try:
        become()
    except RuntimeError as error:
        text = str(error)
        assert become is not torch_vmm.enable or isinstance(error, torch_vmm.NotAvailableError)
    else:
        raise AssertionError("not refused")
    assert "initializ" in text or "initialis" in text, text
assert not torch_vmm.is_enabled("cuda")
y = torch.ones(1000, device="cuda")
assert float(y.sum()) == 1000 and torch_vmm.pool_of(y) is None
"""

_CHANGE = "torch.cuda.memory.change_current_allocator(torch_vmm.allocator())\n"

PROGRAMS = {
    "enable": "torch_vmm.enable()\ntorch_vmm.enable('cuda:0')\n" + _USE + _STATISTICS + _MODELS,
    "change_current_allocator": _CHANGE + _USE + _STATISTICS + _MODELS,
    "enable after change_current_allocator and use": _CHANGE + _USE + "torch_vmm.enable()\n" + _STATISTICS,
    "its name": "torch_vmm.enable()\nassert torch.cuda.get_allocator_backend() == 'torch_vmm'\n",
    "what may come before": """
torch.cuda.is_available()
torch.cuda.device_count()
torch.manual_seed(3)
torch_vmm.VirtualMemoryManager("cuda").close()
torch_vmm.enable()
"""
    + _USE
    + _STATISTICS,
    "too late: a tensor": "torch.ones(1, device='cuda')\n" + _TOO_LATE,
    "too late: the current device": "torch.cuda.current_device()\n" + _TOO_LATE,
    "too late: properties": "torch.cuda.get_device_properties(0)\n" + _TOO_LATE,
    # torch's plain wrapper counts nothing, so torch.cuda.memory_* cannot; the pools can.
    "CUDAPluggableAllocator": """
alloc = torch.cuda.memory.CUDAPluggableAllocator(torch_vmm.library_path(), "torch_vmm_malloc", "torch_vmm_free")
torch.cuda.memory.change_current_allocator(alloc)
"""
    + _USE
    + """
assert torch_vmm.pool_of(x) is torch_vmm.pool_of(x.grad) is torch_vmm.current_pool("cuda")
assert not torch_vmm.is_enabled("cuda")
held = torch_vmm.current_pool("cuda").memory_allocated()
assert held >= 8_000_000
del x
assert torch_vmm.current_pool("cuda").memory_allocated() < held
"""
    + _MODELS,
    "MemPool beside the native allocator": """
outside = torch.ones(1000, device="cuda")
pool = torch.cuda.MemPool(torch_vmm.allocator())
with torch.cuda.use_mem_pool(pool):
    inside = torch.ones(10_000_000, device="cuda")
    small = torch.arange(100, device="cuda")
torch.cuda.synchronize()
assert torch_vmm.pool_of(outside) is None
assert torch_vmm.pool_of(inside) is torch_vmm.pool_of(small) is torch_vmm.current_pool("cuda")
assert torch_vmm.current_pool("cuda").memory_allocated() >= 40_000_000
assert torch.cuda.memory_allocated() >= 40_000_000
assert float(inside.sum()) == 10_000_000 and int(small.sum()) == 4950
assert not torch_vmm.is_enabled("cuda")
del inside, small
del pool
torch.cuda.empty_cache()
assert torch_vmm.current_pool("cuda").memory_allocated() == 0
""",
    # Where the model has no more, the native allocator says out of memory, and goes on.
    "MemPool in a model with a limit": """
model = torch_vmm.VirtualMemoryPool("1GiB", physical_limit="128MiB")
torch.ones(1, device="cuda")
pool = torch.cuda.MemPool(torch_vmm.allocator())
with torch.cuda.use_mem_pool(pool), model:
    first = torch.ones(2**26, dtype=torch.uint8, device="cuda")
    try:
        torch.ones(2**27, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        pass
    else:
        raise AssertionError("the limit did not hold")
assert torch_vmm.pool_of(first) is model
assert int((first == 1).sum()) == 2**26
""",
    **{
        f"a seed before the first use of CUDA, which is {what}": f"""
torch_vmm.enable()
torch.manual_seed(1234)
{make}
assert torch.cuda.is_initialized()
assert torch.cuda.memory_allocated() >= 2**22, torch.cuda.memory_allocated()
x = {x}
x.normal_()
again = torch.empty(2**20, device="cuda")
torch.manual_seed(1234)
again.normal_()
assert torch.equal(x, again), "the seed was not applied"
"""
        for what, (make, x) in {
            "aligned()": ("made = torch_vmm.aligned((2**20,))", "made"),
            "elastic()": ("made = torch_vmm.elastic((2**20,))", "made"),
            "a buffer": ("made = torch_vmm.MemoryPool().alloc(2**20)", "made.tensor()"),
            "explicit pages": (
                "made = torch_vmm.VirtualMemoryPool('1GiB'); made.allocate(0, '4MiB')",
                "made.tensor(0, (2**20,), torch.float32)",
            ),
        }.items()
    },
    "a child forked from a process whose CUDA is torch's alone": """
import os
torch.ones(1, device="cuda")
child = os.fork()
if child == 0:
    try:
        torch_vmm.MemoryPool()
    except RuntimeError as error:  # torch's own, or where CUDA itself refuses, ours
        os._exit(0 if "fork" in str(error) or isinstance(error, torch_vmm.NotAvailableError) else 2)
    os._exit(1)
assert os.waitpid(child, 0)[1] == 0
""",
    "pools without becoming torch's allocator": """
pool = torch_vmm.VirtualMemoryPool("64MiB")
pool.allocate(0, "4MiB")
x = pool.tensor(0, (2**20,), torch.float32)
y = torch.ones(2**20, device="cuda")
x.copy_(y)
assert float(x.sum()) == 2**20
assert torch_vmm.pool_of(x) is pool and torch_vmm.pool_of(y) is None
""",
}


@pytest.fixture(scope="module")
def started() -> Iterator[dict[str, Process]]:
    programs = {name: f"import torch, torch_vmm\n{code}\nprint('done')\n" for name, code in PROGRAMS.items()}
    with running(programs) as processes:
        yield processes


@pytest.mark.no_memcheck  # other processes, many at once
@pytest.mark.parametrize("way", PROGRAMS)
def test_in(started: dict[str, Process], way: str) -> None:
    expect_done(started[way])
