"""Types: user code passes mypy and pyright, its mistakes are found, and the stub is true to the extension."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT

SAMPLES = ROOT / "tests" / "typing"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, timeout=500)


def mistakes() -> list[int]:
    """The lines that a checker must complain of, and no others."""
    lines = (SAMPLES / "mistakes.py").read_text().splitlines()
    return [number for number, line in enumerate(lines, 1) if line.endswith("# wrong")]


def test_mypy() -> None:
    done = run("mypy", "--strict", "--no-error-summary", str(SAMPLES))
    complaints = [line.split(":")[:2] for line in done.stdout.splitlines() if ": error:" in line]
    assert [Path(file).name for file, _ in complaints if "user_code" in file] == [], done.stdout
    assert [int(line) for _, line in complaints] == mistakes(), done.stdout + done.stderr


def test_pyright(tmp_path: Path) -> None:
    if importlib.util.find_spec("basedpyright") is None:
        pytest.skip("needs basedpyright (pip install basedpyright)")
    settings = {
        "include": [str(SAMPLES)],
        "extraPaths": [str(ROOT)],
        "typeCheckingMode": "strict",  # pyright's own, not basedpyright's
    }
    (tmp_path / "pyright.json").write_text(json.dumps(settings))
    done = run(
        "basedpyright", "--project", str(tmp_path / "pyright.json"), "--pythonpath", sys.executable, "--outputjson"
    )
    found = json.loads(done.stdout)["generalDiagnostics"]
    errors = [(Path(each["file"]).name, each["range"]["start"]["line"] + 1) for each in found]
    assert sorted(errors) == [("mistakes.py", line) for line in mistakes()], done.stdout


def test_the_stub_is_true_to_the_extension(tmp_path: Path) -> None:
    # It keeps nothing from one time to the next, and reading the others' would take most of it.
    settings = tmp_path / "mypy.ini"
    settings.write_text(
        "[mypy]\n[mypy-torch.*,transformers.*,sklearn.*,matplotlib.*,numpy.*]\nfollow_imports = skip\n"
        "[mypy-torch_vmm.*]\nignore_errors = true\n"  # `make lint` says them
    )
    done = run("mypy.stubtest", "torch_vmm._C", "--concise", "--mypy-config-file", str(settings))
    assert "torch_vmm._C.Pool" in done.stdout, done.stdout + done.stderr  # it looked
    # pybind11's metaclass has no name in Python, and this one's base is torch's.
    known = (
        "is inconsistent, metaclass differs",
        'CUDAAllocator.__init__ is inconsistent, stub does not have *args parameter "args"',
    )
    assert [line for line in done.stdout.splitlines() if not line.endswith(known)] == []


def test_every_class_of_the_stub_has_its_docstring_or_is_a_value() -> None:
    text = (ROOT / "torch_vmm" / "_C.pyi").read_text()
    for name, body in re.findall(r"^class (\w+)[^\n]*:\n((?:    .*\n|\n)+)", text, re.MULTILINE):
        assert name.startswith("_") or body.lstrip().startswith('"""'), name
