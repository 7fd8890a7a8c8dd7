"""The demo on the GPU: it learns, memory changes hands, and a broken run is an error."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.helpers import ROOT

pytestmark = pytest.mark.needs_gpu("it trains, and trains quickly")


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch_vmm", "demo", "--device", "cuda", "--plain", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.no_memcheck  # several GiB
def test_the_demo_succeeds() -> None:
    pytest.importorskip("sklearn", reason="the demo's digits ship in scikit-learn")
    done = demo("--seconds", "12")
    assert done.returncode == 0, done.stdout + done.stderr
    handed_over = re.search(r"^handed over +([\d.]+) GiB|^handed over +(\d+) MiB", done.stdout, re.MULTILINE)
    assert handed_over, done.stdout
    assert float(handed_over.group(1) or handed_over.group(2)) > 0


@pytest.mark.no_memcheck  # several GiB
def test_a_demo_that_learns_nothing_fails() -> None:
    pytest.importorskip("sklearn", reason="the demo's digits ship in scikit-learn")
    done = demo("--seconds", "2", "--learning-rate-scale", "0")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "demo failed: writer: the loss went from" in done.stderr
