"""What several tests use: units, patterns that show aliasing, other processes."""

from __future__ import annotations

import functools
import gc
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:  # some tests must not import it
    import torch_vmm

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
PAGE = 2 * MIB
"""Bytes: the granularity of both drivers."""

ROOT = Path(__file__).resolve().parent.parent


def rounded(size: int) -> int:
    """Bytes that a request of ``size`` counts as: torch's rounding to 512."""
    return -(-size // 512) * 512


def stream(device: str, name: int) -> torch.cuda.Stream | int:
    """A stream to ask for a buffer on. On the CPU they are told apart by number; a GPU's others are in tests/gpu.

    Once a process has made torch's streams, former addresses wait longer, which other tests here would see.
    """
    return torch.cuda.current_stream() if device == "cuda" else name


def close_all(made: list[Any]) -> None:
    """Ends the pools that a fixture has made, whatever is alive in them, and lets go of them."""
    for pool in made:
        pool.close(force=True)
    made.clear()
    gc.collect(0)


def assert_adds_up(pool: torch_vmm.VirtualMemoryPool) -> torch_vmm.MemoryStats:
    """Every mapped byte is in use, idle, stranded or quarantined, once."""
    stats = pool.stats()
    parts = stats.allocated_bytes + stats.idle_bytes + stats.stranded_bytes + stats.quarantined_bytes
    assert stats.physical_usage == parts == pool.physical_memory_usage
    assert stats.mapped_pages == stats.physical_usage // pool.page_size
    ratio = stats.stranded_bytes / stats.physical_usage if stats.physical_usage else 0.0
    assert math.isclose(stats.fragmentation_ratio, ratio)
    return stats


def assert_models_add_up(shared: torch_vmm.SharedMemoryPool) -> torch_vmm.GlobalMemoryStats:
    """The same of all models under one limit, beside each model's own."""
    stats = shared.global_stats()
    held = stats.allocated_bytes + stats.idle_bytes + stats.stranded_bytes + stats.quarantined_bytes
    assert stats.physical_usage == held + stats.store_bytes
    assert stats.physical_limit == shared.physical_limit
    assert stats.num_models == len(shared.models)
    models = [shared.get_model_stats(model_id) for model_id in shared]
    assert sum(model.physical_usage for model in models) + stats.store_bytes <= stats.physical_usage
    assert sum(model.allocated_bytes for model in models) == stats.allocated_bytes
    return stats


def tensor_in(pool: torch_vmm.VirtualMemoryPool, size: int) -> torch.Tensor:
    """One of `size` bytes of that model."""
    with pool:
        return torch.empty(size, dtype=torch.uint8, device=pool.device)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _pattern(size: int, seed: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    # Made by numpy, so that no pool is touched. 251 is prime to every page.
    whole = np.arange(seed % 251, seed % 251 + 251, dtype=np.uint32) * (1 + seed % 241) % 251
    return np.resize((whole + 1).astype(np.uint8), size)


def stamp(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Fills all memory of ``tensor`` with a pattern of its own; no byte of it is 0. Returns the tensor."""
    flat = _bytes_of(tensor)
    flat.copy_(torch.from_numpy(_pattern(flat.numel(), seed)))
    return tensor


def holds(tensor: torch.Tensor, seed: int) -> bool:
    """Does ``tensor`` still hold what ``stamp(tensor, seed)`` wrote, in every byte?"""
    found = _bytes_of(tensor).cpu().numpy()
    return bool(np.array_equal(found, _pattern(found.size, seed)))


def is_zero(tensor: torch.Tensor) -> bool:
    """Is every byte 0?"""
    return not _bytes_of(tensor).cpu().numpy().any()


def _environment() -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_VMM_")}
    env.update(PYTHONPATH=str(ROOT), TORCH_VMM_HOST_BYTES="2GiB", OMP_NUM_THREADS="1")
    return env


@functools.cache
def _server() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "fork_server.py")],
        env=_environment(),
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


class Forked:
    """``code`` in a process forked from one that has imported torch and torch_vmm (tests/fork_server.py)."""

    def __init__(self, code: str, environment: Mapping[str, str]) -> None:
        self._code = code
        self._status: int | None = None
        self._folder = tempfile.TemporaryDirectory()
        self.out, self.err = Path(self._folder.name, "stdout"), Path(self._folder.name, "stderr")
        self.pid = self._ask(code=code, environment=dict(environment), stdout=str(self.out), stderr=str(self.err))

    @staticmethod
    def _ask(**request: object) -> int:
        server = _server()
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        return int(server.stdout.readline())

    def wait(self, timeout: float) -> subprocess.CompletedProcess[str]:
        """Its end; killed after ``timeout`` seconds."""
        if self._status is None:
            self._status = self._ask(wait=self.pid, timeout=timeout)
        return subprocess.CompletedProcess([self._code], self._status, self.out.read_text(), self.err.read_text())


def python(
    code: str, *, fresh: bool = False, timeout: float = 120, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs ``code`` in a process of its own; its output is text.

    Args:
        fresh: in a Python that has imported nothing; else torch and torch_vmm
            are imported already, which saves seconds (tests/fork_server.py).
        timeout: seconds until it is killed.
        environment: further variables.
    """
    code = textwrap.dedent(code)
    if fresh:
        return subprocess.run(
            [sys.executable, "-c", code],
            env=_environment() | environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    return Forked(code, environment).wait(timeout)


def run(code: str, *, fresh: bool = False, timeout: float = 120, **environment: str) -> str:
    """The same, where it must end well and say nothing on stderr; returns what it printed."""
    done = python(code, fresh=fresh, timeout=timeout, **environment)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert done.stderr == "", done.stderr
    return done.stdout


_GPU_IS_WAITED_FOR = """
import os, signal
try:
    torch.cuda.synchronize()
except RuntimeError as error:
    assert "illegal" in str(error).lower(), error
    os.kill(os.getpid(), signal.SIGSEGV)  # the context is lost; so it ends as a process on the CPU does
"""


def faults(program: str, touch: str, *, printed: str, device: str = "cpu") -> bool:
    """Does ``touch`` access memory that it must not, in a process of its own?

    Args:
        program: what comes before; it imports torch.
        touch: a line or several.
        printed: all that ``program`` prints: that far it must have come.
    """
    wait = _GPU_IS_WAITED_FOR if device == "cuda" else ""
    done = python(f"{program}\nimport sys; sys.stdout.flush()\n{touch}\n{wait}\nprint('reached')", timeout=300)
    ends = {(-signal.SIGSEGV, printed): True, (0, f"{printed}reached\n"): False}
    assert (done.returncode, done.stdout) in ends, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return ends[done.returncode, done.stdout]
