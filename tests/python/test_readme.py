"""The README's code runs and prints what the README says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from benchmarks.table import table

README = Path(__file__).resolve().parents[2] / "README.md"


def test_the_readme_prints_what_it_says() -> None:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    (program,) = (text for language, text in blocks if language == "python")
    (output,) = (text for language, text in blocks if language == "")
    run = subprocess.run(
        # Also on a machine with a GPU the printed lines are those of host memory.
        [sys.executable, "-c", program.replace('"cuda" if torch.cuda.is_available() else "cpu"', '"cpu"')],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == output


def test_the_table_is_that_of_the_result_files() -> None:
    assert table() in README.read_text()
