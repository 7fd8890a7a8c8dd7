"""The contract suite that the host driver keeps (tests/contract), on CUDA."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]

sys.path.insert(0, str(ROOT / "scripts"))
import cuda_include  # noqa: E402

SOURCES = [
    *sorted((ROOT / "csrc" / "base").glob("*.cpp")),
    *(
        ROOT / "csrc" / "driver" / f"{name}.cpp"
        for name in ("address_book", "fence_table", "fork_watch", "nvrtc", "packing")
    ),
    *sorted((ROOT / "csrc" / "driver").glob("cuda_*.cpp")),
    *sorted((ROOT / "tests" / "contract").glob("*.cpp")),
    ROOT / "tests" / "gpu" / "driver_contract_main.cpp",
]


@pytest.mark.no_memcheck  # a process of its own, checked on its own
@pytest.mark.alone
def test_the_cuda_driver_keeps_the_contract(tmp_path: Path) -> None:
    compiler = os.environ.get("CXX", "/usr/bin/g++" if Path("/usr/bin/g++").exists() else "g++")
    flags = ["-std=c++20", "-O1", f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'tests'}", *cuda_include.include_flags()]

    def compiled(source: Path) -> str:
        made = tmp_path / f"{source.parent.name}_{source.stem}.o"
        subprocess.run([compiler, *flags, "-c", str(source), "-o", str(made)], check=True)
        return str(made)

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        objects = list(threads.map(compiled, SOURCES))
    program = tmp_path / "driver_contract"
    subprocess.run([compiler, *objects, "-o", str(program), "-ldl", "-lpthread"], check=True)
    # There is no torch in it, beside which the driver finds NVRTC.
    nvrtc = {str(path.parent) for path in Path(torch.__file__).parents[1].glob("nvidia/*/lib/libnvrtc.so.*")}
    folders = ":".join([*nvrtc, os.environ.get("LD_LIBRARY_PATH", "")])
    run = subprocess.run(
        [str(program)],
        env={**os.environ, "LD_LIBRARY_PATH": folders},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    print(run.stdout)
    last = run.stdout.strip().splitlines()[-1]
    assert run.returncode == 0, run.stdout + run.stderr
    assert ", 0 failed" in last
