"""The command line: python -m torch_vmm, and the console script."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch_vmm
from tests.helpers import MIB, ROOT, python
from tests.python.memory_history import History, write
from torch_vmm import _C


def environment(**further: str) -> dict[str, str]:
    """Without this suite's settings: the demo's models need more than its small host "device"."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_VMM_")}
    return {**kept, **further}


def cli(*arguments: str, fresh: bool = False, **further: str) -> subprocess.CompletedProcess[str]:
    """What the command says; ``fresh`` in a Python that has imported nothing, which takes seconds more."""
    if not fresh:
        main = f"""
            import os, sys
            del os.environ["TORCH_VMM_HOST_BYTES"]
            os.environ.update({further})
            sys.argv = ["torch_vmm", *{arguments}]
            from torch_vmm.__main__ import main
            sys.exit(main())
        """
        return python(main, timeout=400)
    command = [sys.executable, "-m", "torch_vmm", *arguments]
    env = environment(**further)
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=400)


def test_the_version() -> None:
    done = cli("--version", fresh=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        f"torch_vmm {torch_vmm.__version__}, built for torch {_C.built_for_torch}; running torch {torch.__version__}\n"
    )


@pytest.mark.parametrize("arguments", [["dance"], [], ["info", "--xml"], ["--seconds", "3"]])
def test_arguments_that_cannot_be(arguments: list[str]) -> None:
    done = cli(*arguments)
    assert done.returncode == 2
    assert "usage:" in done.stderr
    assert "Traceback" not in done.stderr


def test_info_names_devices_and_options() -> None:
    done = cli("info", TORCH_VMM_SCRUB="0")
    assert (done.returncode, done.stderr) == (0, "")
    assert "cpu:0" in done.stdout
    assert "granularity 2 MiB" in done.stdout
    assert "TORCH_VMM_SCRUB [flag, default 1; now 0]" in done.stdout


def test_info_as_json() -> None:
    done = cli("info", "--json", TORCH_VMM_HOST_BYTES="1GiB")
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert told["version"] == torch_vmm.__version__
    assert told["torch"] == torch.__version__
    cpu = told["devices"][-1]
    assert cpu == {
        "device": "cpu:0",
        "name": "host",
        "total_bytes": 2**30,
        "free_bytes": 2**30,
        "granularity": 2**21,
    }
    assert (told["no_gpu"] is None) == (len(told["devices"]) > 1)
    values = {option["variable"]: option["value"] for option in told["options"]}
    assert values["TORCH_VMM_HOST_BYTES"] == "1GiB"
    assert values["TORCH_VMM_SCRUB"] is None
    assert set(values) == {variable for _, variable, *_ in _C.option_table()}


@pytest.mark.parametrize("arguments", [["info"], ["info", "--json"], ["demo", "--device", "cpu", "--plain"]])
def test_an_error_is_a_line_and_no_traceback(arguments: list[str]) -> None:
    done = cli(*arguments, fresh=arguments[0] == "demo", TORCH_VMM_SCRUB="maybe")
    assert done.returncode == 1
    assert done.stderr == "torch-vmm: TORCH_VMM_SCRUB='maybe': give 1 or 0 (true/false, on/off)\n"


def test_a_value_that_is_cut_within_a_character_is_a_line_too() -> None:
    done = cli("info", TORCH_VMM_DEBUG="x" + "\u00e9" * 40)
    assert done.returncode == 1
    assert "is not a debug mode" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_reader_that_goes_away() -> None:
    command = [sys.executable, "-m", "torch_vmm", "info", "--json"]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(100) == 141
    assert errors == ""


@pytest.mark.parametrize("arguments", ["info", "info --json", "replay DUMP"])
@pytest.mark.parametrize(("to", "why"), [(">/dev/full", "No space left on device"), (">&-", "it is closed")])
def test_output_that_cannot_be_written_is_a_line(tmp_path: Path, arguments: str, to: str, why: str) -> None:
    history = History()
    history.segment(MIB, 2 * MIB)
    history.alloc(MIB, MIB)
    arguments = arguments.replace("DUMP", str(write(tmp_path / "dump", history)))
    command = f"exec {sys.executable} -m torch_vmm {arguments} {to}"
    done = subprocess.run(["sh", "-c", command], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, f"torch-vmm: standard output: {why}\n")


def test_an_extension_that_is_missing_is_a_line_too(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "torch_vmm", tmp_path / "torch_vmm", ignore=shutil.ignore_patterns("_C.*", "__pycache__"))
    command = [sys.executable, "-m", "torch_vmm", "info"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(PYTHONPATH=str(tmp_path)), capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.startswith("torch-vmm: torch_vmm's extension (torch_vmm._C) has not been built")
    assert "Traceback" not in done.stderr
