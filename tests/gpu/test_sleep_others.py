"""What one model's libraries keep, others use: its sleep must not take it from them. Each in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gpu.programs import Process, expect_done, running

pytestmark = [
    pytest.mark.needs_gpu("cuBLAS, and graphs that draw random numbers"),
    pytest.mark.no_memcheck,  # other processes
]

_BEGIN = """
import torch, torch_vmm
torch_vmm.enable()
gpu = torch_vmm.SharedMemoryPool("8GiB")
a, b = gpu.register_model("a"), gpu.register_model("b")
"""

_PROGRAMS = {
    "products": """
with a:
    x = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    usual = x @ x
a.sleep()
with b:
    y = torch.ones(2048, 2048, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        assert float((y @ y)[0, 0]) == 2048
torch.cuda.synchronize()
assert a.physical_memory_usage < 2**26
a.wake()
assert torch.equal(x @ x, usual)
""",
    "a workspace is no model's": """
with a:
    x = torch.randn(512, 512, device="cuda")
    x @ x
torch.cuda.synchronize()
assert a.memory_allocated() == x.nbytes, a.memory_allocated()
del x
gpu.unregister_model("a")
with b:
    y = torch.ones(512, 512, device="cuda")
    assert float((y @ y)[0, 0]) == 512
""",
    "products on streams": """
streams = [torch.cuda.Stream() for _ in range(3)]
def multiply(of):
    with of:
        for stream in streams:
            with torch.cuda.stream(stream):
                z = torch.ones(1024, 1024, device="cuda")
                assert float((z @ z)[0, 0]) == 1024
    torch.cuda.synchronize()
multiply(a)
a.sleep()
multiply(b)
""",
    "graphs that draw": """
graphs = []
for model in (a, b):
    with model:
        out = torch.zeros(1000, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out.copy_(torch.rand(1000, device="cuda"))
        graphs.append((graph, out))
a.sleep()
graph, out = graphs[1]
seen = set()
for _ in range(3):
    graph.replay()
    torch.cuda.synchronize()
    seen.add(float(out.sum()))
assert len(seen) == 3
a.wake()
graph, out = graphs[0]
graph.replay()
torch.cuda.synchronize()
assert 0 <= float(out.min()) < float(out.max()) < 1
""",
    "graphs that multiply": """
def captured(model):
    with model:
        x = torch.ones(1024, 1024, device="cuda")
        x @ x
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = x @ x
        return graph, out, x
first, second = captured(a), captured(b)
a.sleep()
for _ in range(2):
    second[1].zero_()
    second[0].replay()
    torch.cuda.synchronize()
    assert float(second[1][5, 5]) == 1024
a.wake()
b.sleep()
first[1].zero_()
first[0].replay()
torch.cuda.synchronize()
assert float(first[1][5, 5]) == 1024
b.wake()
""",
    "backward and attention": """
def train(model):
    with model:
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(256, 4, 512, dropout=0.1, batch_first=True).cuda()
        x = torch.randn(8, 64, 256, device="cuda")
        layer(x).square().mean().backward()
        return layer, [float(p.grad.abs().sum()) for p in layer.parameters()]
first = train(a)
a.sleep()
second = train(b)
torch.cuda.synchronize()
assert all(abs(p - q) <= 1e-3 * abs(p) for p, q in zip(first[1], second[1]))
a.wake()
""",
}


@pytest.fixture(scope="module")
def started() -> Iterator[dict[str, Process]]:
    with running({name: _BEGIN + code + '\nprint("done")\n' for name, code in _PROGRAMS.items()}) as processes:
        yield processes


@pytest.mark.parametrize("name", _PROGRAMS)
def test_others_go_on(started: dict[str, Process], name: str) -> None:
    expect_done(started[name])
