"""Ten programs as people run them, under each allocator: waste, first and warm passes, driver calls, equal results.

1 ``train`` and 2 ``checkpointed``: a language model, shapes varying; 3 ``serve``: caches that grow;
4 ``static_serve``: caches that stay, CUDA graphs; 5 ``continuous``: requests join and leave; 6 ``vision``: two image
models at varying resolution; 7 ``turns``: generate, then train; 8 ``lora``; 9 ``graphs``: messages, sizes random;
10 ``two_models`` and ``three_models``: in turns, in pools of their own under one limit, 5 % (32 MiB at least) above the
peak of what they need together. That peak is measured first, under torch's own allocator. Torch's allocators have
neither pools nor a limit there.

A process makes one program, warms up, gives back what that left, and runs the same pass again and again. Its rows:

- ``working set``: the peak of what is allocated; ``peak reserved``, and one over the other;
- ``first pass`` and ``warm pass`` (each of the others), CPU's clock, the GPU idle at both ends; a first pass also loads
  kernels, and there is one a process;
- ``pass after empty_cache``: of those behind them each begins without idle memory, and has to get it anew. Memory and
  driver calls are those of the passes before;
- ``driver calls`` in the first and the second half of the passes: chunks mapped and unmapped (ours), segments
  allocated and freed (torch's own). cudaMallocAsync does not tell, and torch's allocator of host memory tells nothing;
- ``results``: the mean of what the steps computed, and a crc32 of all of it. They must be equal under all allocators,
  bit for bit where the program's ``tolerance`` is 0.

In lockstep the allocators' processes take their passes in turn, on one CPU; the GPU holds what all of them need.

With a limit it asks for the largest batch instead (``largest.py``).
"""

from .measuring import KIND, KINDS, complaints, measure_part, parts, remarks
from .programs import PROGRAMS

ALLOCATORS = {
    "cuda": ("torch_vmm", "native", "expandable", "cudaMallocAsync", "native-tuned"),
    "cpu": ("torch_vmm", "native"),
}
RUNS = 3
NEEDS_LOOPS = False

__all__ = [
    "ALLOCATORS",
    "KIND",
    "KINDS",
    "NEEDS_LOOPS",
    "PROGRAMS",
    "RUNS",
    "complaints",
    "measure_part",
    "parts",
    "remarks",
]
