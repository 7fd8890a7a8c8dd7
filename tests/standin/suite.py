"""The CUDA suites on the stand-in, in several processes: what ``make adapter-test`` runs.

    python -m tests.standin -m tests.standin.suite [--third-of-api] [arguments for pytest]

Starting a process and importing torch takes as long as many a test file, so
files share processes. Two things keep them apart: memory waits for more once a
process has seen a stream that torch does not know, so files that make such
streams are among themselves; and what is left goes by folder, for order matters
least within one.

``--third-of-api``: of tests/api, which runs on host memory and on GPUs as well,
a third of the files; each state of the sources has its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from tests import side_by_side

ROOT = Path(__file__).resolve().parent.parent.parent
THIRD = "--third-of-api"


def _third() -> int:
    """0, 1 or 2: by the tree of the last commit, as what scripts/cpp_tests begins with; 0 where there is none."""
    command = ["git", "rev-parse", "--short=8", "HEAD^{tree}"]
    tree = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    return int(tree[:8] or "0", 16) % 3


def groups(third: int | None = None) -> dict[str, list[Path]]:
    """Files that share a process, what takes longest first. ``third``: the one of tests/api that is enough."""
    gpu = sorted((ROOT / "tests" / "gpu").glob("test_*.py"), key=lambda file: -file.stat().st_size)
    foreign = [file for file in gpu if "ExternalStream" in file.read_text()]
    known = [file for file in gpu if file not in foreign]
    api = sorted((ROOT / "tests" / "api").glob("test_*.py"))
    adapter = sorted((ROOT / "tests" / "adapter").glob("test_*.py"))
    parts = {f"tests/api, third {k + 1} of 3": api[k::3] for k in range(3) if third in (None, k)}
    parts |= {f"tests/gpu, part {k + 1} of 4": known[k::4] for k in range(4)}
    return parts | {"tests/adapter": adapter, "tests/gpu with foreign streams": foreign}


def main() -> int:
    began = time.monotonic()
    for_pytest = [argument for argument in sys.argv[1:] if argument != THIRD]
    parts = {
        name: [*(str(file.relative_to(ROOT)) for file in files), *for_pytest]
        for name, files in groups(_third() if THIRD in sys.argv else None).items()
    }
    # One more than there are cores: a process waits a quarter of its time for those that it starts. With two more,
    # programs of a set time got too little done to be a test.
    processes = int(os.environ.get("JOBS") or os.cpu_count() or 1) + 1
    return side_by_side.summary(side_by_side.in_parts(parts, processes), began)


if __name__ == "__main__":
    sys.exit(main())
