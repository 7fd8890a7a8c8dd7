"""How benchmarks are planned, run in processes and compared: bisection, runner, lockstep and table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import benchmarks.__main__ as command_line
from benchmarks import hand_over, lockstep, machine, report, runner, standing
from benchmarks.measurement import Answer, Measurement, Part, Row
from benchmarks.runner import Job, Options
from benchmarks.workloads import PROGRAMS, largest, measuring, serving, training
from tests.helpers import MIB


def row(case: str, allocator: str, metric: str, unit: str, *runs: float) -> Row:
    return Row(case=case, allocator=allocator, metric=metric, value=runs[0], unit=unit, runs=list(runs))


# -- Planning and comparing --------------------------------------------------------------------------------------------


def test_models_in_turn_are_measured_first_for_their_limit() -> None:
    asked: list[tuple[str, Part]] = []

    def ask(allocator: str, part: Part) -> list[Measurement] | None:
        asked.append((allocator, part))
        return [Measurement("", "peak reserved", 99.0, "GiB"), Measurement("", "working set", 10.0, "GiB")]

    parts = measuring.parts(Options("cuda", False), ask)
    assert [part["program"] for part in parts] == list(PROGRAMS)
    assert {part["scale"] for part in parts} == {"full"}
    assert [(allocator, part["program"]) for allocator, part in asked] == [
        ("native", "two_models"),
        ("native", "three_models"),
    ]
    assert [part["limit"] for part in parts if "limit" in part] == [int(10.5 * 2**30)] * 2
    (small,) = measuring.parts(
        Options("cpu", True, ["two_models"]), lambda *_: [Measurement("", "working set", 2**-10, "GiB")]
    )
    assert small == {"program": "two_models", "scale": "small", "passes": 2, "emptied": 1, "limit": 33 * MIB}
    assert measuring.parts(Options("cpu", False, ["two_models"]), lambda *_: None) == []


def test_a_limit_asks_for_the_largest_batch() -> None:
    parts = measuring.parts(Options("cuda", False, limit=40 << 30), lambda *_: None)
    assert [part["program"] for part in parts] == ["train", "checkpointed", "vision"]
    assert all(part["within"] == 40 << 30 for part in parts)


def test_results_that_differ_are_complained_of() -> None:
    same = [row("train", a, "results, exactly", "crc32", 7, 7) for a in ("torch_vmm", "native")]
    assert measuring.complaints(same) == []
    assert measuring.remarks(same) == ["train: the same results, bit for bit, under torch_vmm, native"]
    other = [
        same[0],
        row("train", "native", "results, exactly", "crc32", 7, 8),
        row("train", "native", "results", "mean", 1.5, 1.5),
    ]
    (complaint,) = measuring.complaints(other)
    assert complaint.startswith("train: RESULTS DIFFER: means from 1.5 to 1.5, 2 different crc32")
    assert measuring.remarks(other) == []


def test_a_stated_tolerance_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training.Training, "tolerance", 1e-3)
    rows = [row("train", "native", "results, exactly", "crc32", 7, 8)]
    assert measuring.complaints([*rows, row("train", "native", "results", "mean", 1.0, 1.0005)]) == []
    assert len(measuring.complaints([*rows, row("train", "native", "results", "mean", 1.0, 1.002)])) == 1


def test_a_course_takes_its_time_between_idle_ends() -> None:
    ticks = iter(range(100))
    clock: Callable[[], float] = lambda: float(next(ticks) ** 2)  # noqa: E731

    class Counting(serving.Program):
        def warm_up(self) -> None: ...

        def run(self) -> Iterator[Tensor]:
            yield torch.tensor(1.0)
            yield torch.tensor(2.0)

    class Emptied(measuring.Memory):
        def start_over(self) -> None:
            emptied.append(next(ticks))

    emptied: list[int] = []
    taken = measuring.course("a", Counting(), Emptied("cpu", "native"), 3, 2, clock)
    rows = {one.metric: one.value for one in taken}
    # Emptied at 0, passes from 1 to 2, 3 to 4 and 5 to 6; emptied at 7, from 8 to 9, and at 10, from 11 to 12.
    assert emptied == [0, 7, 10]
    assert rows["first pass"] == 4 - 1
    assert [one.value for one in taken if one.metric == "warm pass"] == [16 - 9, 36 - 25]
    assert [one.value for one in taken if one.metric == "pass after empty_cache"] == [81 - 64, 144 - 121]
    assert rows["results"] == 1.5


# -- Bisection ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [0, 1, 2, 3, 37, 64, 99, 100])
def test_the_bisection_finds_what_fits(most: int) -> None:
    tried: list[int] = []

    def fits(batch: int) -> bool:
        tried.append(batch)
        return batch <= most

    assert largest.largest(fits, most=100) == most
    assert len(tried) == len(set(tried)) <= 14
    assert max(tried) <= 100


# -- The runner --------------------------------------------------------------------------------------------------------


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """What was measured: by a fake that is quick, and takes longer each time."""
    done: list[Job] = []

    def spawn(job: Job) -> Answer | None:
        done.append(job)
        case = str(job.part["program"])
        if case == "lora":
            return None
        facts: dict[str, str | int] = {"device": "cpu", "driver": "none", "torch": "2.11.0", "cores": 2}
        return Answer(
            facts,
            [
                Measurement(case, "warm pass", 1.23456789 + len(done), "s"),
                Measurement(case, "results, exactly", 4123456789, "crc32"),
                Measurement(case, "working set", 0.5, "GiB"),
            ],
        )

    monkeypatch.setattr(runner, "_spawn", spawn)
    return done


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--device", "cpu", *arguments])
    return command_line.main()


def test_processes_are_interleaved(monkeypatch: pytest.MonkeyPatch, jobs: list[Job], tmp_path: Path) -> None:
    assert call(monkeypatch, "--runs", "2", "--out", str(tmp_path), "--programs", "serve,turns", "workloads") == 0
    assert [(job.part["program"], job.allocator) for job in jobs] == [
        ("serve", "torch_vmm"),
        ("serve", "native"),
        ("turns", "torch_vmm"),
        ("turns", "native"),
        ("serve", "native"),  # another one first
        ("serve", "torch_vmm"),
        ("turns", "native"),
        ("turns", "torch_vmm"),
    ]
    assert {job.kind for job in jobs} == {"cpu"}


def test_the_file_says_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, jobs: list[Job], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "--runs", "3", "--out", str(tmp_path), "--programs", "serve", "workloads") == 0
    result = json.loads((tmp_path / "workloads-cpu.json").read_text())
    assert result["benchmark"] == "workloads"
    assert result["command"] == "python -m benchmarks --runs 3 --programs serve --device cpu workloads"
    said = {"benchmark", "command", "date", "commit", "machine", "rounds", "settings", "failed", "rows"}
    assert set(result) == said
    assert result["failed"] == []
    rows = {(row["allocator"], row["metric"]): row for row in result["rows"]}
    ours = rows["torch_vmm", "warm pass"]
    assert ours == row("serve", "torch_vmm", "warm pass", "s", 2.2346, 5.2346, 6.2346) | {"value": 5.2346}
    assert rows["native", "results, exactly"]["runs"] == [4123456789] * 3
    assert rows["native", "results, exactly"]["value"] == 4123456789
    out = capsys.readouterr().out
    assert "serve: warm pass, s" in out
    assert "5.235 2.235..6.235" in out
    assert "(=)" in out
    assert "crc32" not in out
    assert "serve: the same results, bit for bit, under torch_vmm, native" in out
    shown = standing._standing("workloads", result)
    assert "| serve | – | – | – | – | 5.235 | 4.235 | – | – |" in shown
    assert "crc32" not in shown


def test_a_process_that_fails_is_told_of(
    monkeypatch: pytest.MonkeyPatch, jobs: list[Job], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--runs", "1", "--out", str(tmp_path), "--allocators", "native", "--programs", "lora,serve"]
    assert call(monkeypatch, *arguments, "workloads") == 1
    assert "failed: workloads, lora: native" in capsys.readouterr().err
    assert {row["case"] for row in json.loads((tmp_path / "workloads-cpu.json").read_text())["rows"]} == {"serve"}


def test_a_series_that_is_cut_off_leaves_what_it_had(
    monkeypatch: pytest.MonkeyPatch, jobs: list[Job], tmp_path: Path
) -> None:
    spawn = runner._spawn

    def until_turns(job: Job) -> Answer | None:
        if job.part["program"] == "turns":
            raise KeyboardInterrupt
        return spawn(job)

    monkeypatch.setattr(runner, "_spawn", until_turns)
    with pytest.raises(KeyboardInterrupt):
        call(monkeypatch, "--runs", "1", "--out", str(tmp_path), "--programs", "serve,turns", "workloads")
    result = json.loads((tmp_path / "workloads-cpu.json").read_text())
    assert {(row["case"], row["allocator"]) for row in result["rows"]} == {("serve", "torch_vmm"), ("serve", "native")}
    assert result["failed"] == ["workloads, turns: torch_vmm", "workloads, turns: native"]


def test_the_largest_batch_has_a_file_of_its_own(
    monkeypatch: pytest.MonkeyPatch, jobs: list[Job], tmp_path: Path
) -> None:
    assert call(monkeypatch, "--quick", "--out", str(tmp_path), "--largest-batch", "12MiB", "workloads") == 0
    assert {job.part["within"] for job in jobs} == {12 * MIB}
    result = json.loads((tmp_path / "workloads-cpu_largest_batch.json").read_text())
    assert result["command"].endswith("--quick --largest-batch 12MiB --device cpu workloads")


def test_processes_beside_each_other_tell_no_times(
    monkeypatch: pytest.MonkeyPatch, jobs: list[Job], tmp_path: Path
) -> None:
    arguments = ["--runs", "2", "--at-once", "3", "--programs", "serve,turns"]
    assert call(monkeypatch, *arguments, "--out", str(tmp_path), "workloads") == 0
    assert len(jobs) == 8
    result = json.loads((tmp_path / "workloads-cpu_memory.json").read_text())
    assert "--at-once 3" in result["command"]
    assert {row["unit"] for row in result["rows"]} == {"crc32", "GiB"}
    assert {len(row["runs"]) for row in result["rows"]} == {2}


def test_in_lockstep_the_allocators_of_a_program_are_started_together(
    monkeypatch: pytest.MonkeyPatch, jobs: list[Job], tmp_path: Path
) -> None:
    together: list[list[Job]] = []

    def in_lockstep(some: list[Job]) -> list[Answer | None]:
        together.append(some)
        return [runner._spawn(job) for job in some]

    monkeypatch.setattr(runner, "_in_lockstep", in_lockstep)
    arguments = ["--runs", "1", "--lockstep", "--programs", "serve,turns"]
    assert call(monkeypatch, *arguments, "--out", str(tmp_path), "workloads") == 0
    assert [[job.allocator for job in some] for some in together] == [["torch_vmm", "native"]] * 2
    assert {job.part["passes"] for job in jobs} == {6}
    assert "--lockstep" in json.loads((tmp_path / "workloads-cpu.json").read_text())["command"]


def test_one_run_hands_over_with_and_without_scrubbing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command_line, "_has_gpu", lambda: True)
    monkeypatch.setattr(command_line.loops, "build", lambda: None)
    monkeypatch.delenv("TORCH_VMM_SCRUB", raising=False)
    scrubs: dict[str, str | None] = {}

    def answer(command: list[str], env: dict[str, str], **options: object) -> subprocess.CompletedProcess[str]:
        allocator = json.loads(command[-1])["allocator"]
        scrubs[allocator] = env.get("TORCH_VMM_SCRUB")
        facts: dict[str, str | int] = {"device": "cpu", "driver": "none", "torch": "2.11.0", "cores": 2}
        said = Answer(facts, [Measurement("4 GiB to another model", "time", float(len(allocator)), "ms")])
        return subprocess.CompletedProcess(command, 0, runner._ANSWER + json.dumps(said._asdict()), "")

    monkeypatch.setattr(runner.subprocess, "run", answer)
    monkeypatch.setattr(machine, "commit", lambda: "abcdef0")
    assert call(monkeypatch, "--runs", "1", "--out", str(tmp_path), "hand_over") == 0
    assert scrubs == {"torch_vmm": None, "torch_vmm-unscrubbed": "0", "native": None}
    heads = next(line.split() for line in capsys.readouterr().out.splitlines() if "native" in line)
    assert heads == ["torch_vmm", "torch_vmm-unscrubbed", "native"]
    result = json.loads((tmp_path / "hand_over-cpu.json").read_text())
    assert "| | torch_vmm | torch_vmm, unscrubbed | native |" in standing._standing("hand_over", result)


@pytest.mark.parametrize("allocator", hand_over.ALLOCATORS)
def test_what_hands_over_without_scrubbing_is_torch_vmm(monkeypatch: pytest.MonkeyPatch, allocator: str) -> None:
    asked: list[str] = []
    monkeypatch.setattr(hand_over, "_hand_over", lambda allocator, *_: asked.append(allocator) or 1.0)
    monkeypatch.setattr(hand_over, "_in_turn", lambda allocator, *_: asked.append(allocator) or 1.0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    assert len(hand_over.measure(allocator, quick=True)) == 3
    assert set(asked) == {"native" if allocator == "native" else "torch_vmm"}
    assert hand_over.INSTALLED.get(allocator, allocator) == asked[0]


def test_a_copy_of_a_checkout_is_told_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BENCHMARK_COMMIT", raising=False)
    assert machine.commit() != "abc1234"
    monkeypatch.setenv("BENCHMARK_COMMIT", "abc1234")
    assert machine.commit() == "abc1234"


def test_lockstep_is_for_what_has_passes() -> None:
    parser = command_line._parser()
    arguments = parser.parse_args(["--lockstep"])
    assert command_line._options("kv_cache", "cpu", arguments, parser).lockstep
    with pytest.raises(SystemExit):
        command_line._options("hot_path", "cuda", arguments, parser)


@pytest.mark.parametrize(
    ("number", "order"),
    [(0, "ours, one; native, one; ours, two; native, two"), (1, "native, one; ours, one; native, two; ours, two")],
)
def test_another_allocator_is_first_in_each_repetition(number: int, order: str) -> None:
    turns: list[runner.Turn] = [([name], {"program": part}) for part in ("one", "two") for name in ("ours", "native")]
    ordered = runner._another_first(turns, 2, number)
    assert "; ".join(f"{group[0]}, {part['program']}" for group, part in ordered) == order


@pytest.mark.parametrize(
    "arguments",
    [
        ["--programs", "sleep"],
        ["--allocators", "jemalloc"],
        ["--at-once", "0"],
        ["--at-once", "x"],
        ["--at-once", "2", "--lockstep"],
        ["--largest-batch", "1GiB", "--lockstep"],
    ],
)
def test_unknown_names_are_refused(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        call(monkeypatch, *arguments, "workloads")


def test_what_has_no_programs_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_line, "_prepare", lambda name: None)
    monkeypatch.setattr(command_line.loops, "build", lambda: None)
    with pytest.raises(SystemExit):
        call(monkeypatch, "--largest-batch", "1GiB", "host_path")


# -- Lockstep ----------------------------------------------------------------------------------------------------------


TAKES_TURNS = """
import sys, time
from benchmarks.lockstep import wait_for_turn
name, passes, file = sys.argv[1], int(sys.argv[2]), sys.argv[3]
for number in range(passes):
    wait_for_turn()
    with open(file, "a") as out:
        out.write(f"{name}{number} ")
        out.flush()
        time.sleep(0.02)
        out.write(f"{name} ")
print("it was", name)
sys.exit(3 if name == "c" else 0)
"""


def test_processes_in_lockstep_take_turns(tmp_path: Path) -> None:
    file = tmp_path / "order"
    asked: list[int] = []

    def cpu() -> int:
        asked.append(min(os.sched_getaffinity(0)))
        return asked[-1]

    workers = [
        lockstep.Worker(
            [sys.executable, "-c", TAKES_TURNS, name, passes, str(file)], machine.ROOT, dict(os.environ), 60
        )
        for name, passes in (("a", "3"), ("b", "3"), ("c", "1"), ("d", "0"))
    ]
    done = lockstep.run(workers, cpu)
    # A pass ends before the next one begins, and another one is first in each round.
    assert file.read_text() == "b0 b c0 c a0 a a1 a b1 b b2 b a2 a "
    assert [each.returncode for each in done] == [0, 0, 3, 0]
    assert [each.stdout for each in done] == [f"it was {name}\n" for name in "abcd"]
    assert len(asked) == 3


def test_a_process_that_hangs_is_ended() -> None:
    worker = lockstep.Worker([sys.executable, "-c", "import time; time.sleep(60)"], machine.ROOT, dict(os.environ), 0.5)
    (done,) = lockstep.run([worker])
    assert done.returncode == -9


# -- The table ---------------------------------------------------------------------------------------------------------


def test_a_table_compares_with_ours() -> None:
    shown = report.table([row("a", "torch_vmm", "t", "s", 2.0, 2.1), row("a", "native", "t", "s", 4.0, 4.2)])
    assert "(x0.50)" in shown
    assert "2 2..2.1" in shown


@pytest.mark.parametrize(("unit", "mark"), [("s", "4 (=)"), ("calls", "4 (x0.50)")])
def test_a_time_that_was_taken_once_differs_from_nothing(unit: str, mark: str) -> None:
    shown = report.table([row("a", "torch_vmm", "t", unit, 2.0), row("a", "native", "t", unit, 4.0)])
    assert mark in shown
