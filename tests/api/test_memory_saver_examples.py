"""The published examples of torch_memory_saver 0.0.10 that need no CUDA graph, with one import changed.

Graphs are in tests/gpu/test_memory_saver_graphs.py, two devices in tests/gpu2/test_memory_saver_devices.py.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_vmm
from tests.helpers import MIB, holds, run, stamp
from torch_vmm.memory_saver import torch_memory_saver

pytestmark = pytest.mark.usefixtures("fresh_saver")


def held_with(tensor: torch.Tensor) -> int:
    """Bytes of memory that the model has in which the tensor is."""
    pool = torch_vmm.pool_of(tensor)
    assert pool is not None
    return pool.physical_memory_usage


# -- The simple one ----------------------------------------------------------------------------------------------------


def test_paused_memory_goes_and_comes_back_to_its_address(device: str) -> None:
    normal = torch.full((10 * MIB,), 100, dtype=torch.uint8, device=device)
    with torch_memory_saver.region():
        pausable = torch.full((100 * MIB,), 100, dtype=torch.uint8, device=device)
    address, before = pausable.data_ptr(), held_with(pausable)
    assert before >= 100 * MIB
    for _ in range(2):
        torch_memory_saver.pause()
        assert held_with(pausable) == 0
        assert bool((normal == 100).all())
        torch_memory_saver.resume()
        assert held_with(pausable) == before
        assert pausable.data_ptr() == address
        pausable.fill_(100)
    assert bool((pausable == 100).all())
    assert bool((normal == 100).all())


def test_others_have_what_is_paused() -> None:
    printed = run(
        """
        import torch, torch_vmm
        from torch_vmm import _C
        from torch_vmm.memory_saver import TorchMemorySaver, torch_memory_saver

        key = torch_vmm.devices.to_device("cpu")
        TorchMemorySaver._key = lambda self: key
        torch_vmm.enable("cpu")
        MIB = 1 << 20


        def fits():
            try:
                return bool(torch.ones(80 * MIB, dtype=torch.uint8).all())
            except torch.OutOfMemoryError:
                return False


        with torch_memory_saver.region():
            pausable = torch.ones(80 * MIB, dtype=torch.uint8)
        print(fits())
        torch_memory_saver.pause()
        print(fits())
        torch_memory_saver.resume()
        print(fits())
        torch_memory_saver.pause()
        _C.device(*key).empty_cache()
        print(_C.device(*key).memory_info()[0] // MIB)
        """,
        TORCH_VMM_HOST_BYTES="128MiB",
    )
    assert printed == "False\nTrue\nFalse\n128\n"


def test_tags_go_and_come_in_any_order(device: str) -> None:
    tensors = {}
    for seed, tag in enumerate(("type1", "type2")):
        with torch_memory_saver.region(tag=tag, enable_cpu_backup=True):
            tensors[tag] = stamp(torch.empty(20 * MIB, dtype=torch.uint8, device=device), seed)
    both = held_with(tensors["type1"])
    torch_memory_saver.pause("type1")
    assert 20 * MIB <= held_with(tensors["type1"]) < both
    assert holds(tensors["type2"], 1)
    torch_memory_saver.pause("type2")
    assert held_with(tensors["type1"]) == 0
    torch_memory_saver.resume("type2")
    assert holds(tensors["type2"], 1)
    torch_memory_saver.resume("type1")
    assert holds(tensors["type1"], 0)
    torch_memory_saver.pause("type1")
    torch_memory_saver.resume("type1")
    assert held_with(tensors["type1"]) == both
    assert [holds(tensor, seed) for seed, tensor in enumerate(tensors.values())] == [True, True]


# -- Backups -----------------------------------------------------------------------------------------------------------


def test_a_backup_in_host_memory(device: str) -> None:
    with torch_memory_saver.region(enable_cpu_backup=True):
        kept = torch.full((20_000_000,), 10, dtype=torch.uint8, device=device)
        typed = torch.full((10, 20, 30), 1.5, device=device)
    with torch_memory_saver.region(enable_cpu_backup=False):
        lost = torch.full((20_000_000,), 20, dtype=torch.uint8, device=device)
    torch_memory_saver.pause()
    backup = torch_memory_saver.get_cpu_backup(typed)
    assert backup is not None
    assert (backup.device.type, backup.dtype, backup.shape) == ("cpu", typed.dtype, typed.shape)
    assert bool((backup == 1.5).all())
    unrelated = torch.full((20_000_000,), 30, dtype=torch.uint8, device=device)
    torch_memory_saver.resume()
    assert bool((kept == 10).all())
    assert bool((typed == 1.5).all())
    assert not bool((lost == 20).any())
    assert bool((unrelated == 30).all())


def test_a_backup_on_disk(device: str, tmp_path: Path) -> None:
    folder = tmp_path / "backups"
    torch_memory_saver.set_disk_backup_dir(str(folder))
    with torch_memory_saver.region(enable_disk_backup=True):
        large = torch.randn(13 * MIB // 4 + 12345, device=device)
        small = torch.full((7,), 10, dtype=torch.uint8, device=device)
    expected = large.cpu().clone(), small.cpu().clone()
    with torch_memory_saver.region(enable_disk_backup=False):
        lost = torch.full((20_000_000,), 20, dtype=torch.uint8, device=device)
    sizes = set()
    for _ in range(3):
        torch_memory_saver.pause()
        sizes.add(sum(os.path.getsize(folder / name) for name in os.listdir(folder)))
        torch.full((20_000_000,), 30, dtype=torch.uint8, device=device)
        torch_memory_saver.resume()
        assert torch.equal(large.cpu(), expected[0])
        assert torch.equal(small.cpu(), expected[1])
        assert not bool((lost == 20).any())
        assert os.listdir(folder) == []
    assert len(sizes) == 1
    assert sizes.pop() >= large.nbytes


def test_a_region_within_a_region(device: str) -> None:
    count = 5_000_000
    with torch_memory_saver.region(enable_cpu_backup=True):
        weights = torch.full((count,), 42.0, device=device)
        with torch_memory_saver.region(tag="grad_buffer", enable_cpu_backup=False):
            gradients = torch.full((count,), 99.0, device=device)
        later = torch.full((count,), 7.0, device=device)
    torch_memory_saver.pause()
    assert torch_memory_saver.get_cpu_backup(later) is not None
    assert torch_memory_saver.get_cpu_backup(gradients) is None
    torch_memory_saver.resume()
    assert bool((weights == 42).all())
    assert bool((later == 7).all())
    assert bool((gradients.fill_(0) == 0).all())
    torch_memory_saver.pause("grad_buffer")
    assert float(weights.double().sum()) == 42.0 * count
    torch_memory_saver.resume("grad_buffer")


# -- Training and generating in turns ----------------------------------------------------------------------------------


def test_an_engine_that_lies_in_one_region_works_outside_it_while_it_is_paused(device: str) -> None:
    def forward() -> float:
        ones = torch.ones(4 * MIB, device=device)
        return float((ones * sum(weight.float().mean() for weight in weights)).mean())

    with torch_memory_saver.region(enable_cpu_backup=True):
        weights = [torch.full((size,), 42, dtype=torch.uint8, device=device) for size in (16 * MIB, MIB, 1024, 42)]
        assert forward() == 4 * 42
        used = held_with(weights[0])
        torch_memory_saver.pause()
        assert held_with(weights[0]) == 0
        with pytest.raises(RuntimeError, match="asleep"):
            forward()
        with torch_memory_saver.disable():
            assert float(torch.full((16 * MIB,), 53, dtype=torch.uint8, device=device).float().mean()) == 53
        assert held_with(weights[0]) == 0
        torch_memory_saver.resume()
        assert forward() == 4 * 42
        assert held_with(weights[0]) <= used


class Policy(nn.Module):
    """What is trained, and generates: it turns a state of numbers into the next one."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            state = torch.tanh(layer(state)) + state
        return state


def generate(policy: Policy, cache: torch.Tensor) -> torch.Tensor:
    """Fills the cache, a state a row, each from the mean of those before."""
    with torch.no_grad():
        cache[0].fill_(0.5)
        for row in range(1, len(cache)):
            cache[row] = policy(cache[:row].mean(0))
    return cache.cpu().clone()


def train(policy: Policy, optimizer: torch.optim.Optimizer, states: torch.Tensor) -> float:
    """A step towards states that stay as they are."""
    states = states.to(policy.layers[0].weight.device)  # type: ignore[arg-type]
    loss = (policy(states) - states).square().mean()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


WIDTH, LAYERS, ROWS = 512, 8, 4096
WEIGHTS, CACHE = LAYERS * WIDTH * WIDTH * 4, ROWS * WIDTH * 4  # 8 MiB each


def reference(device: str, rounds: int) -> list[float]:
    """The losses where all is there all the time."""
    torch.manual_seed(0)
    policy = Policy(WIDTH, LAYERS).to(device)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    cache = torch.zeros(ROWS, WIDTH, device=device)
    return [train(policy, optimizer, generate(policy, cache[:24])[:24]) for _ in range(rounds)]


@pytest.mark.parametrize("update", ["from the backup", "while both are there"])
def test_training_and_generating_in_turns(device: str, update: str) -> None:
    expected = reference(device, rounds=4)
    torch.manual_seed(0)
    with torch_memory_saver.region("training", enable_cpu_backup=True):
        trained = Policy(WIDTH, LAYERS).to(device)
        optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)
    with torch_memory_saver.region("weights", enable_cpu_backup=True):
        serving = Policy(WIDTH, LAYERS).to(device)
        serving.load_state_dict(trained.state_dict())
    with torch_memory_saver.region("kv_cache"):
        cache = torch.zeros(ROWS, WIDTH, device=device)
    addresses = [tensor.data_ptr() for tensor in (*serving.parameters(), *trained.parameters(), cache)]
    torch_memory_saver.pause("training")
    losses = []
    for _ in range(4):
        states = generate(serving, cache[:24])
        assert held_with(cache) < WEIGHTS + CACHE + 4 * MIB, "neither weights that are trained nor their moments"
        torch_memory_saver.pause("kv_cache")
        torch_memory_saver.pause("weights")
        assert held_with(cache) == 0

        torch_memory_saver.resume("training")
        with torch_memory_saver.region("training", enable_cpu_backup=True):
            losses.append(train(trained, optimizer, states))
        optimizer.zero_grad(set_to_none=True)
        if update == "while both are there":
            torch_memory_saver.resume("weights")
            with torch.no_grad():
                for to, source in zip(serving.parameters(), trained.parameters(), strict=True):
                    to.copy_(source)
        torch_memory_saver.pause("training")
        if update == "from the backup":
            torch_memory_saver.resume("weights")
            with torch.no_grad():
                for to, source in zip(serving.parameters(), trained.parameters(), strict=True):
                    backup = torch_memory_saver.get_cpu_backup(source.data)
                    assert backup is not None
                    to.copy_(backup)
        torch_memory_saver.resume("kv_cache")
        assert not cache.any(), "it is discarded"
    assert losses == pytest.approx(expected, rel=1e-3)
    torch_memory_saver.resume()
    assert [tensor.data_ptr() for tensor in (*serving.parameters(), *trained.parameters(), cache)] == addresses
