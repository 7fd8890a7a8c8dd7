"""The CUDA suites on the stand-in, in several processes: what ``make adapter-test`` runs.

    python -m tests.standin -m tests.standin.suite [arguments for pytest]

Starting a process and importing torch takes as long as many a test file, so
files share processes. Two things keep them apart: memory waits for more once a
process has seen a stream that torch does not know, so files that make such
streams are among themselves; and what is left goes by folder, for order matters
least within one.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from tests import side_by_side

ROOT = Path(__file__).resolve().parent.parent.parent


def groups() -> dict[str, list[Path]]:
    """Files that share a process, what takes longest first."""
    gpu = sorted((ROOT / "tests" / "gpu").glob("test_*.py"), key=lambda file: -file.stat().st_size)
    foreign = [file for file in gpu if "ExternalStream" in file.read_text()]
    known = [file for file in gpu if file not in foreign]
    api = sorted((ROOT / "tests" / "api").glob("test_*.py"))
    adapter = sorted((ROOT / "tests" / "adapter").glob("test_*.py"))
    return {
        **{f"tests/api and tests/adapter, part {k + 1} of 3": [*api, *adapter][k::3] for k in range(3)},
        **{f"tests/gpu, part {k + 1} of 4": known[k::4] for k in range(4)},
        "tests/gpu with foreign streams": foreign,
    }


def main() -> int:
    began = time.monotonic()
    parts = {
        name: [*(str(file.relative_to(ROOT)) for file in files), *sys.argv[1:]] for name, files in groups().items()
    }
    # One more than there are cores: a process waits a quarter of its time for those that it starts. With two more,
    # programs of a set time got too little done to be a test.
    processes = int(os.environ.get("JOBS") or os.cpu_count() or 1) + 1
    return side_by_side.summary(side_by_side.in_parts(parts, processes), began)


if __name__ == "__main__":
    sys.exit(main())
