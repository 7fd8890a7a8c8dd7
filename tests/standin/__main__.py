"""Python on the CUDA stand-in, which is built first.

    python -m tests.standin -m pytest tests/gpu -k streams
    STANDIN_DEVICES=2 python -m tests.standin -m pytest tests/gpu2/test_peers.py

What follows is what Python is given. It sees CUDA devices of host memory, and
so does every process that it starts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def build() -> Path:
    """The folder with the libraries."""
    done = subprocess.run([ROOT / "scripts" / "build_standin", sys.executable], stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(done.returncode)
    return ROOT / done.stdout.strip()


def environment(libraries: Path) -> dict[str, str]:
    """For a process that shall have the stand-in for its CUDA."""
    return {
        **os.environ,
        # Before torch asks for it by its name, which it does with a path of its own.
        "LD_PRELOAD": str(libraries / "libcudart.so.13"),
        # Kernels are small here; the threads of many processes would only get into each other's way.
        "OMP_NUM_THREADS": "1",
        # Nor is a result's block of some MiB given back to the system in between.
        "MALLOC_MMAP_THRESHOLD_": str(2**30),
        "MALLOC_TRIM_THRESHOLD_": str(2**32),
    }


if __name__ == "__main__":
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], environment(build()))
