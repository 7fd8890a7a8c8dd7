"""benchmarks/buffers, kv_cache and continuous on host memory: they run, and their files have the form that all have."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import allocators, buffers, continuous, kv_cache
from benchmarks.measurement import Row
from tests.helpers import ROOT

NAMES = ("buffers", "kv_cache", "continuous")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What one quick run of each writes."""
    folder: Path = tmp_path_factory.mktemp("results")
    command = [sys.executable, "-m", "benchmarks", "--device", "cpu", "--quick", "--out", str(folder), *NAMES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return {name: json.loads((folder / f"{name}-cpu.json").read_text()) for name in NAMES}


def rows_of(result: dict[str, Any], allocator: str) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["case"], row["metric"]): row for row in result["rows"] if row["allocator"] == allocator}


@pytest.mark.parametrize("name", NAMES)
def test_the_file_has_the_form_that_all_have(results: dict[str, dict[str, Any]], name: str) -> None:
    result = results[name]
    said = {"benchmark", "command", "date", "commit", "machine", "rounds", "settings", "failed", "rows"}
    assert result.keys() == said
    assert result["benchmark"] == name
    assert result["machine"]["device"] == "cpu"
    for row in result["rows"]:
        assert row.keys() == {"case", "allocator", "metric", "value", "unit", "runs"}
        assert len(row["runs"]) == 1
        assert row["value"] >= 0


def test_buffers_are_measured_one_and_mixed_on_one_stream_and_on_four(results: dict[str, dict[str, Any]]) -> None:
    ours, native = rows_of(results["buffers"], "torch_vmm"), rows_of(results["buffers"], "native")
    assert ours.keys() == native.keys()
    cases = {case for case, _ in ours}
    for on in ("1 stream", "4 streams"):
        assert {f"pair 512 B, {on}", f"churn 512 B - 1 MiB, 1000 live, {on}", f"random up to 1 MB, {on}"} <= cases
    assert "Python, a buffer of 1000 floats" in cases
    assert all(row["unit"] == "ns" and row["value"] > 0 for row in [*ours.values(), *native.values()])


def test_caches_are_measured_by_tokens_and_memory(results: dict[str, dict[str, Any]]) -> None:
    (case,) = {row["case"] for row in results["kv_cache"]["rows"]}
    said = set()
    for allocator in kv_cache.ALLOCATORS:
        rows = rows_of(results["kv_cache"], allocator)
        assert rows[case, "tokens a second"]["value"] > 0
        said.add(rows[case, "tokens, exactly"]["value"])
    assert len(said) == 1  # on the CPU the masked kernel says the same, too
    assert rows_of(results["kv_cache"], "torch_vmm")[case, "peak allocated"]["value"] > 0


def test_requests_that_join_and_leave_say_the_same_and_copy_nothing(results: dict[str, dict[str, Any]]) -> None:
    rows = {name: rows_of(results["continuous"], name) for name in continuous.ALLOCATORS}
    (case,) = {case for case, _ in rows["torch_vmm"]}
    assert (
        rows["torch_vmm"][case, "caches copied"]["value"] == 0 < rows["concatenation"][case, "caches copied"]["value"]
    )
    exactly = {each[case, "tokens, exactly"]["value"] for each in rows.values()}
    assert len(exactly) == 1


def row(
    allocator: str, value: float, case: str = "pair 512 B, 1 stream", metric: str = "time", unit: str = "ns"
) -> Row:
    return Row(case=case, allocator=allocator, metric=metric, value=value, unit=unit, runs=[value])


def test_what_buffers_are_to_be_ahead_of_and_near_is_said() -> None:
    rows = [row("torch_vmm", 100), row(allocators.DRIVER, 1000), row(allocators.NATIVE_POOL, 1040), row("native", 90)]
    said = buffers.remarks(rows)
    assert any("1.040 of the driver's calls" in line and "MORE" not in line for line in said)
    assert any("BEHIND native" in line for line in said)
    assert not any("BEHIND driver" in line for line in said)
    first = [row(*each, metric="first") for each in (("torch_vmm", 900), (allocators.RMM_POOL, 300))]
    assert not buffers.remarks(first)
    assert any(
        "BEHIND rmm-pool" in line for line in buffers.remarks([*first, row(allocators.RESERVED, 400, metric="first")])
    )
    assert not buffers.remarks([*first, row(allocators.RESERVED, 200, metric="first")])
    assert "MORE THAN" in buffers.remarks([row(allocators.DRIVER, 1000), row(allocators.NATIVE_POOL, 1100)])[0]


def test_different_tokens_are_complained_about() -> None:
    one, other = row("torch_vmm", 1, metric="tokens, exactly", unit="crc32"), row("dynamic", 2, unit="crc32")
    assert kv_cache.complaints([one, other])
    assert not kv_cache.complaints([one, row("static", 2, unit="crc32")])
    assert continuous.complaints([one, row("concatenation", 2, unit="crc32")])


def test_rmm_is_left_out_where_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "_rmm_folders", lambda: None)
    why = buffers.missing(allocators.RMM_POOL)
    assert why is not None
    assert "RMM" in why
    assert buffers.missing("torch_vmm") is None


def test_names_are_those_of_the_files_form() -> None:
    assert kv_cache.remarks(
        [row("torch_vmm", 97, metric="tokens a second"), row("static", 100, metric="tokens a second")]
    )
    assert continuous.remarks([row("torch_vmm", 1.01, metric="held over needed")]) == [
        "1.0100 of what is needed is held (aim: 1.02)"
    ]
