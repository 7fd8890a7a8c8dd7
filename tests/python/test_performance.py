"""docs/performance.md says what the result files say."""

from __future__ import annotations

import re
import subprocess

import pytest

from benchmarks.standing import tables
from tests.helpers import ROOT

DOCUMENT = (ROOT / "docs" / "performance.md").read_text()


def test_the_tables_are_those_of_the_result_files() -> None:
    for table in tables():
        assert table in DOCUMENT, f"python -m benchmarks.standing prints another table:\n{table}"
    assert DOCUMENT.count("|---|") == sum(table.count("|---|") for table in tables())


def test_the_commits_that_it_cites_are_there() -> None:
    git = ["git", "-C", str(ROOT)]
    shallow = subprocess.run([*git, "rev-parse", "--is-shallow-repository"], capture_output=True, text=True)
    if shallow.stdout.strip() != "false":
        pytest.skip("not a git checkout with its history")
    cited = set(re.findall(r"\b(?!\d{7}\b)[0-9a-f]{7}\b", DOCUMENT))  # seven digits are a number
    assert len(cited) >= 5
    for commit in cited:
        found = subprocess.run([*git, "cat-file", "-e", f"{commit}^{{commit}}"], capture_output=True)
        assert found.returncode == 0, commit
