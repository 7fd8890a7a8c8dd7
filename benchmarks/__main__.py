"""Runs benchmarks, each (benchmark, allocator) in a process of its own, and writes one file for each.

``python -m benchmarks``                      all that the GPU can run
``python -m benchmarks hot_path training``    these
``python -m benchmarks --device cpu``         what needs no GPU
"""

from __future__ import annotations

import argparse
import importlib
import json
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from types import ModuleType

from . import allocators, loops, machine
from .measurement import Answer, Measurement, Result, Row

_FOLDER = Path(__file__).resolve().parent
_NAMES = {
    "cuda": ("driver_ops", "hot_path", "cold_path", "hand_over", "observed", "training"),
    "cpu": ("host_path", "instructions"),
}
_ANSWER = "BENCHMARK RESULT "
_TIMEOUT_S = 300


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = _parser()
    arguments = parser.parse_args()
    unknown = set(arguments.names) - {name for names in _NAMES.values() for name in names}
    if unknown:
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}")
    if arguments.worker:
        return _work(arguments.names[0], arguments.worker, arguments.quick)
    names = arguments.names or list(_NAMES[arguments.device])
    needs_gpu = any(_module(name).KIND == "cuda" for name in names)
    if needs_gpu and not _has_gpu():
        print("no GPU here; what needs none: python -m benchmarks --device cpu", file=sys.stderr)
        return 2
    loops.build()
    folder = arguments.out or _FOLDER / ("scratch" if arguments.quick else "results")
    folder.mkdir(parents=True, exist_ok=True)
    complete = True
    for name in names:
        why_not = _prepare(name)
        if why_not is not None:
            print(f"{name}: left out; {why_not}", file=sys.stderr)
            complete &= name not in arguments.names
            continue
        chosen = arguments.allocators.split(",") if arguments.allocators else list(_module(name).ALLOCATORS)
        unknown = set(chosen) - set(_module(name).ALLOCATORS)
        if unknown:
            parser.error(
                f"{name} does not know {', '.join(sorted(unknown))}, but {', '.join(_module(name).ALLOCATORS)}"
            )
        runs = arguments.runs or (1 if arguments.quick else getattr(_module(name), "RUNS", 2))
        rows, facts, failed = _run(name, chosen, runs, arguments.quick)
        complete &= not failed
        if not rows:
            continue
        result = Result(
            benchmark=name,
            command=_command(names, arguments),
            date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            commit=machine.commit(),
            machine=facts,
            rows=rows,
        )
        file = folder / f"{name}-{machine.device_tag(str(facts['device']))}.json"
        file.write_text(json.dumps(result, indent=1) + "\n")
        print(f"\n{name}, written to {file}\n{_table(rows)}\n", flush=True)
        print(", ".join(f"{key} {value}" for key, value in facts.items()), flush=True)
    return 0 if complete else 1


def _command(names: list[str], arguments: argparse.Namespace) -> str:
    """What makes the same result again; where it was written is nobody's business."""
    runs = ["--runs", str(arguments.runs)] if arguments.runs else []
    chosen = ["--allocators", arguments.allocators] if arguments.allocators else []
    return shlex.join(["python", "-m", "benchmarks", *(["--quick"] if arguments.quick else []), *runs, *chosen, *names])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = [name for names in _NAMES.values() for name in names]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(every)}")
    parser.add_argument("--device", choices=tuple(_NAMES), default="cuda", help="whose benchmarks, where none is named")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: benchmarks/results, with --quick scratch")
    parser.add_argument("--quick", action="store_true", help="less of everything, to see that it works")
    parser.add_argument(
        "--runs", type=int, metavar="N", help="repetitions, interleaved; default 2 (hot_path: 7), with --quick 1"
    )
    parser.add_argument("--allocators", metavar="A,B", help="only these; default: all that the benchmark knows")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"benchmarks.{name}")


def _prepare(name: str) -> str | None:
    """Makes what a benchmark needs beside the loops; where it cannot run here, says why not."""
    prepare: Callable[[], str | None] = getattr(_module(name), "prepare", lambda: None)
    return prepare()


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


# -- The runner's side -------------------------------------------------------------------------------------------------


def _run(name: str, chosen: list[str], runs: int, quick: bool) -> tuple[list[Row], dict[str, str | int], list[str]]:
    """Each of ``chosen`` ``runs`` times, in turn. Returns rows, machine, and the allocators that failed."""
    rows: dict[tuple[str, str, str], Row] = {}
    facts: dict[str, str | int] = {}
    failed: list[str] = []
    for number in range(runs):
        for allocator in chosen:
            print(f"{name}: {allocator}, run {number + 1} of {runs}", file=sys.stderr, flush=True)
            answer = _spawn(name, allocator, quick)
            if answer is None:
                failed.append(allocator)
                continue
            facts = answer.machine
            for one in answer.measurements:
                key = (one.case, one.metric, allocator)
                row = rows.setdefault(
                    key,
                    Row(case=one.case, allocator=allocator, metric=one.metric, value=0.0, unit=one.unit, runs=[]),
                )
                row["runs"].append(_rounded(one.value))
                row["value"] = _rounded(statistics.median(row["runs"]))
    return list(rows.values()), facts, failed


def _spawn(name: str, allocator: str, quick: bool) -> Answer | None:
    command = [sys.executable, "-m", "benchmarks", name, "--worker", allocator, *(["--quick"] if quick else [])]
    try:
        done = subprocess.run(
            command,
            cwd=_FOLDER.parent,
            env=allocators.environment(allocator),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        print(f"{name}, {allocator}: took more than {_TIMEOUT_S} s", file=sys.stderr)
        return None
    for line in done.stdout.splitlines():
        if line.startswith(_ANSWER) and done.returncode == 0:
            answer = json.loads(line[len(_ANSWER) :])
            return Answer(answer["machine"], [Measurement(*values) for values in answer["measurements"]])
    print(f"{name}, {allocator}: exit status {done.returncode}\n{done.stdout}{done.stderr}", file=sys.stderr)
    return None


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def _table(rows: list[Row]) -> str:
    """Cases down, allocators across; in brackets torch_vmm's value as a share of each other one's."""
    columns = list(dict.fromkeys(row["allocator"] for row in rows))
    values = {(row["case"], row["metric"], row["allocator"]): row["value"] for row in rows}
    runs = {(row["case"], row["metric"], row["allocator"]): row["runs"] for row in rows}
    lines = {(row["case"], row["metric"]): row["unit"] for row in rows}
    width = max(len(f"{case}: {metric}, {unit}") for (case, metric), unit in lines.items())
    out = [" " * width + "".join(f"{column:>34}" for column in columns)]
    for (case, metric), unit in lines.items():
        ours = values.get((case, metric, "torch_vmm"))
        cells = []
        for column in columns:
            value = values.get((case, metric, column))
            if value is None:
                cells.append("-")
                continue
            each = runs[case, metric, column]
            mine = runs.get((case, metric, "torch_vmm"), [])
            spread = f" {min(each):.4g}..{max(each):.4g}" if len(each) > 1 else ""
            share = ""
            if ours is not None and value and column != "torch_vmm":
                is_apart = max(mine) < min(each) or min(mine) > max(each)
                share = f" (x{ours / value:.2f})" if is_apart else " (=)"
            cells.append(f"{value:.4g}{share}{spread}")
        out.append(f"{f'{case}: {metric}, {unit}':{width}}" + "".join(f"{cell:>34}" for cell in cells))
    return "\n".join(
        [*out, "Medians, and the least and the most of the runs. x: torch_vmm's over this one's; =: within the spread."]
    )


# -- The measuring process ---------------------------------------------------------------------------------------------


def _work(name: str, allocator: str, quick: bool) -> int:
    benchmark = _module(name)
    allocators.install(allocator, benchmark.KIND)
    facts = machine.facts(benchmark.KIND)
    import torch

    torch.zeros(1, device=benchmark.KIND)
    with allocators.work(allocator, benchmark.KIND):
        measurements: list[Measurement] = benchmark.measure(allocator, quick)
    print(_ANSWER + json.dumps(Answer(facts, measurements)._asdict()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
