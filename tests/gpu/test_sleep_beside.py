"""A model that goes to sleep beside what others do at that moment. Each in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gpu.programs import Process, expect_done, running

pytestmark = pytest.mark.no_memcheck  # other processes

_BEGIN = """
import torch, torch_vmm
torch_vmm.enable()
gpu = torch_vmm.SharedMemoryPool("512MiB")
a, b = gpu.register_model("a"), gpu.register_model("b")
"""

_PROGRAMS = {
    # No allocation made it known, so no clock knows it either.
    "a library's own stream": """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
with a:
    x, y = torch.zeros(2**22, device="cuda"), torch.ones(2**22, device="cuda")
with b:
    z = torch.zeros(2**22, device="cuda")
torch.cuda.synchronize()
stream = ctypes.c_void_p()
assert cuda.cuStreamCreate(ctypes.byref(stream), 1) == 0
with torch.cuda.stream(torch.cuda.ExternalStream(stream.value)):
    torch.cuda._sleep(200_000_000)
    x.copy_(y)
a.sleep()
with b:
    other = torch.zeros(2**24, device="cuda")
torch.cuda.synchronize()
assert not other.any() and not z.any()
del other
a.wake()
assert bool((x == 1).all())
""",
    "trees of graphs": """
first = torch.compile(lambda x: x * 2 + 1, backend="cudagraphs")
second = torch.compile(lambda x: x * 3 - 1, backend="cudagraphs")
with a:
    xa = torch.ones(64, 64, device="cuda")
    for _ in range(4):
        mine = first(xa).clone()
a.sleep()
with b:
    xb = torch.ones(64, 64, device="cuda")
    try:  # all trees are in one pool of graphs, which goes back and forth in time as a whole
        second(xb)
    except RuntimeError as error:
        assert "model 'a' is asleep" in str(error), error
a.wake()
with a:
    assert bool((first(xa) == 3).all()) and bool((mine == 3).all())
with b:
    for _ in range(4):
        assert bool((second(xb) == 2).all())
""",
}


@pytest.fixture(scope="module")
def started() -> Iterator[dict[str, Process]]:
    with running({name: _BEGIN + code + '\nprint("done")\n' for name, code in _PROGRAMS.items()}) as processes:
        yield processes


@pytest.mark.parametrize("name", _PROGRAMS)
def test_all_is_as_it_was(started: dict[str, Process], name: str) -> None:
    expect_done(started[name])
