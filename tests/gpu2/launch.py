"""Programs of two ranks, one a GPU, under torchrun; each rank hands back JSON."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers import ROOT

RANKS = 2

RESULTS = "RANK_RESULTS_DIR"
"""The variable that names the folder for what the ranks hand back."""


@dataclass(frozen=True)
class Launched:
    """What came of one torchrun."""

    ranks: list[dict[str, Any]]
    """What each rank handed to :func:`hand_back`, in order of rank."""
    logs: list[str]
    """NCCL's own log of each process, in no particular order; empty unless NCCL_DEBUG asks for one."""
    stderr: str


def hand_back(result: Mapping[str, Any]) -> None:
    """Called by a rank: keeps ``result`` for whoever launched it. A later call replaces an earlier one's."""
    path = Path(os.environ[RESULTS], f"rank{os.environ['RANK']}.json")
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(result))
    unfinished.replace(path)


def _read(folder: Path, rank: int) -> dict[str, Any]:
    path = folder / f"rank{rank}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def _end(process: subprocess.Popen[str]) -> None:
    """torchrun gives each rank a session of its own and ends them when it is asked to end."""
    process.send_signal(signal.SIGTERM)
    try:
        process.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def torchrun(
    module: str, *arguments: str, environment: Mapping[str, str] | None = None, timeout: float = 150
) -> Launched:
    """Runs ``python -m module arguments`` as two ranks; both must end well.

    Args:
        module: one that calls :func:`hand_back`.
        environment: what comes on top of this process's environment, which the ranks get as it is.
        timeout: seconds until all is ended.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run"),
                *("--standalone", "--nproc-per-node", str(RANKS)),
                # Or torchrun asks for the machine's name, which need not be known in a container.
                *("--local-addr", "127.0.0.1"),
                *("-m", module, *arguments),
            ],
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",  # torchrun warns without it
                "NCCL_DEBUG_FILE": str(folder / "nccl.%p.log"),
                RESULTS: name,
                **(environment or {}),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            _end(process)
            so_far = "\n".join(f"rank {rank}: {_read(folder, rank)}" for rank in range(RANKS))
            raise AssertionError(f"not done after {timeout} s; by then\n{so_far}") from None
        ranks = [_read(folder, rank) for rank in range(RANKS)]
        assert process.returncode == 0, f"exit status {process.returncode}\n{ranks}\n{out}\n{err[-8000:]}"
        logs = [path.read_text(errors="replace") for path in sorted(folder.glob("nccl.*.log"))]
    return Launched(ranks, logs, err)
