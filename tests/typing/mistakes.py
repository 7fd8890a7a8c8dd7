"""Mistakes that a type checker must find, each on a line that ends in ``# wrong``."""

from __future__ import annotations

import torch

import torch_vmm

gpu = torch_vmm.SharedMemoryPool("1GiB")
llama = gpu.register_model("llama")
gpu.register_model(3)  # wrong
gpu.register_model("qwen", priority="high")  # wrong
llama.limit = "1GiB"  # wrong
llama.capacity = 3  # wrong
llama.tensor(0, 4, "float32")  # wrong
torch_vmm.use_model(gpu)  # wrong
torch_vmm.strict(action="loudly")  # wrong
torch.cuda.MemPool(torch_vmm.library_path())  # wrong
buffers = torch_vmm.MemoryPool()
buffers.alloc(3, "float32")  # wrong
buffers.alloc(3, stream="main")  # wrong
buffers.threshold = 0  # wrong
buffers.trim(1.5)  # wrong
torch_vmm.NativeMemoryPool().free_async("there")  # wrong
gpu.on_pressure(3)  # wrong
