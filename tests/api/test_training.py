"""Models in earnest: all of a training step is in the model, on autograd's threads too."""

from __future__ import annotations

import gc
import threading

import torch

import torch_vmm
from tests.helpers import MIB, rounded

Pool = torch_vmm.VirtualMemoryPool


def network(device: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.LayerNorm(256), torch.nn.Linear(256, 10)
    ).to(device)


def test_all_of_a_training_step_is_in_the_model(device: str, llama: Pool) -> None:
    with llama:
        net = network(device)
        optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
        activations: list[torch.Tensor] = []
        for layer in net.children():
            layer.register_forward_hook(lambda _module, _inputs, output: activations.append(output))
        inputs = torch.randn(32, 64, device=device)
        loss = torch.nn.functional.cross_entropy(net(inputs), torch.arange(32, device=device) % 10)
        loss.backward()
        optimizer.step()
    parameters = list(net.parameters())
    gradients = [parameter.grad for parameter in parameters]
    state = [
        value
        for parameter in parameters
        for name, value in optimizer.state[parameter].items()
        if name != "step"  # torch keeps the count of steps on the host
    ]
    assert (len(parameters), len(activations), len(state)) == (6, 4, 12)
    for tensor in [inputs, loss, *parameters, *gradients, *activations, *state]:
        assert isinstance(tensor, torch.Tensor)
        assert torch_vmm.pool_of(tensor) is llama
    weights = sum(rounded(parameter.nbytes) for parameter in parameters)
    assert llama.memory_allocated() >= 4 * weights  # weights, gradients, two moments


def test_backward_makes_gradients_in_the_model_that_calls_it(device: str, llama: Pool, qwen: Pool) -> None:
    with llama:
        net = network(device)
        loss = net(torch.randn(8, 64, device=device)).square().sum()
    with qwen:
        loss.backward()
    assert all(torch_vmm.pool_of(parameter) is llama for parameter in net.parameters())
    assert all(
        torch_vmm.pool_of(parameter.grad) is qwen for parameter in net.parameters() if parameter.grad is not None
    )
    assert all(parameter.grad is not None for parameter in net.parameters())


def test_what_backward_makes_on_the_way_is_in_the_model(device: str, llama: Pool) -> None:
    made: list[str] = []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, value: torch.Tensor) -> torch.Tensor:
            return value * 2

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            pool = torch_vmm.pool_of(torch.empty(100, device=device))
            assert pool is not None
            made.append(pool.name)
            return gradient * 2

    value = torch.ones(10, device=device, requires_grad=True)
    with llama:
        Twice.apply(value).sum().backward()  # type: ignore[no-untyped-call]
    Twice.apply(value).sum().backward()  # type: ignore[no-untyped-call]
    assert made == ["llama", "default"]


def test_training_in_two_pools_gives_the_same_as_in_none(device: str, llama: Pool, qwen: Pool) -> None:
    def train(steps: int) -> torch.Tensor:
        net = network(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(1)
        for step in range(steps):
            inputs = torch.randn(16 + step % 5, 64, generator=generator).to(device)
            optimizer.zero_grad()
            net(inputs).square().mean().backward()
            optimizer.step()
        return torch.cat([parameter.detach().flatten() for parameter in net.parameters()]).cpu()

    expected = train(12)
    with llama:
        first = train(12)
    with qwen:
        second = train(12)
    assert torch.equal(first, expected)
    assert torch.equal(second, expected)


def test_what_is_freed_is_given_back_to_the_books(device: str, llama: Pool) -> None:
    with llama:
        tensors = [torch.empty(size, dtype=torch.uint8, device=device) for size in (1, 511, 512, 513, MIB, 5 * MIB + 3)]
        views = [tensor[:1] for tensor in tensors]
    expected = sum(rounded(tensor.numel()) for tensor in tensors)
    tensors.clear()
    gc.collect()
    assert llama.memory_allocated() == expected  # the views hold the storages
    views.clear()
    assert llama.memory_allocated() == 0


def test_backward_on_threads_of_two_models(llama: Pool, qwen: Pool, device: str) -> None:
    wrong: list[str] = []

    def work(pool: Pool) -> None:
        for _ in range(10):
            with pool:
                net = network(device)
                net(torch.randn(8, 64, device=device)).sum().backward()
            for parameter in net.parameters():
                assert parameter.grad is not None
                if torch_vmm.pool_of(parameter.grad) is not pool:
                    wrong.append(pool.name)

    threads = [threading.Thread(target=work, args=(pool,)) for pool in (llama, qwen, llama, qwen)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
