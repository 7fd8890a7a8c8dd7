"""Memory that is asked for without a device is the current one's, as torch has it, however that came to be current."""

from __future__ import annotations

import pytest

from tests.helpers import run

BEGINS = """
import random, threading

import torch
import torch_vmm
from torch_vmm import _C

torch_vmm.enable("cuda")

def taken():
    '''The device whose memory the allocator gives to who names none, and no guard sets.'''
    address = torch._C._cuda_cudaCachingAllocator_raw_alloc(512, 0)
    of = [device for device in range(torch.cuda.device_count()) if address in live(device)]
    torch._C._cuda_cudaCachingAllocator_raw_delete(address)
    (device,) = of
    return device

def live(device):
    return {
        block["address"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == device
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }

def agree(times=3):
    for _ in range(times):
        found, said = taken(), torch._C._cuda_getDevice()
        assert found == said, (found, said)
    return found
"""

PROGRAMS = {
    "one after the other": """
for device in (0, 1, 0, 0, 1, 1, 0):
    torch.cuda.set_device(device)
    assert agree() == device
    with torch.cuda.device(1 - device):
        assert agree() == 1 - device
    assert agree() == device
""",
    # The first device has no context: torch remembers it as the current one, and makes it none.
    "the second first": """
held = [torch.ones(3, device="cuda:1") for _ in range(3)]
assert torch._C._cuda_getDevice() == 0
assert agree() == 0
y = torch.ones(3, device="cuda")
assert y.device.index == 0
assert agree() == 0
with torch.cuda.device(1):
    assert agree() == 1
assert agree() == 0
""",
    "the second alone": """
with torch.cuda.device(1):
    for _ in range(3):
        assert agree() == 1
torch.cuda.set_device(1)
assert agree() == 1
""",
    # It remembers what is not so any more when the first device gets its context on another thread.
    "remembered while another thread begins": """
torch.cuda.init()
held = [torch.ones(3, device="cuda:1") for _ in range(3)]
assert torch._C._cuda_getDevice() == 0
thread = threading.Thread(target=lambda: torch.ones(3, device="cuda:0"))
thread.start()
thread.join()
for _ in range(3):
    assert agree() == 0
with torch.cuda.device(1):
    assert agree() == 1
assert agree() == 0
""",
    "guards within guards, on threads": """
def work(seed):
    dice = random.Random(seed)
    try:
        for _ in range(30):
            if dice.random() < 0.3:
                torch.cuda.set_device(dice.randrange(2))
            with torch.cuda.device(dice.randrange(2)):
                agree(1)
                with torch.cuda.device(dice.randrange(2)):
                    agree(2)
                    torch.ones(3, device=f"cuda:{dice.randrange(2)}")
                    agree(1)
                agree(1)
            with torch.cuda.stream(torch.cuda.Stream(dice.randrange(2))):
                agree(1)
    except BaseException as error:
        failed.append(repr(error))

failed = []
threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not failed, failed
""",
    "backward on both": """
x = torch.ones(8, device="cuda:0", requires_grad=True)
y = torch.ones(8, device="cuda:1", requires_grad=True)
for _ in range(3):
    loss = (x * x).sum() + (y * y).sum().to("cuda:0")
    loss.backward()
    agree()
assert x.grad.device.index == 0 and y.grad.device.index == 1
assert torch_vmm.pool_of(x.grad).device.index == 0 and torch_vmm.pool_of(y.grad).device.index == 1
""",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_memory_is_the_current_devices(name: str) -> None:
    run(BEGINS + PROGRAMS[name] + "\nprint('done')", fresh=True)
