"""Programs in processes of their own, many at once: a fresh torch takes seconds to start."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tests.helpers import ROOT

Process = subprocess.Popen[str]


def start(code: str) -> Process:
    """Starts ``code`` in a fresh Python that can import torch_vmm."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_VMM_")}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextmanager
def running(programs: Mapping[str, str]) -> Iterator[dict[str, Process]]:
    """All of them, by name, started at once; none is left over."""
    processes = {name: start(code) for name, code in programs.items()}
    try:
        yield processes
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()


def expect_done(process: Process) -> None:
    """It ends well, prints "done" alone, and torch_vmm has nothing to complain about."""
    out, err = process.communicate(timeout=180)
    assert process.returncode == 0, f"exit status {process.returncode}\n{out}\n{err}"
    assert out.strip() == "done"
    assert "torch_vmm:" not in err
    assert "Traceback" not in err
