"""Runs benchmarks, each measurement in a process of its own, and writes one file for each benchmark.

``python -m benchmarks``                                      all that the GPU can run
``python -m benchmarks hot_path workloads``                   these
``python -m benchmarks workloads --programs train,serve``     two of its programs
``python -m benchmarks workloads --largest-batch 40GiB``      what fits, instead of how fast
``python -m benchmarks workloads --lockstep``                 each pass of one allocator beside the others' in time
``python -m benchmarks workloads --at-once 3``                only what needs no quiet machine, in less time
``python -m benchmarks --device cpu``                         what needs no GPU
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

from . import allocators, loops, machine, report, runner
from .measurement import Result, Row

_FOLDER = Path(__file__).resolve().parent
_NAMES = {
    "cuda": (
        "driver_ops",
        "hot_path",
        "latency",
        "cold_path",
        "hand_over",
        "sleep",
        "spill",
        "observed",
        "workloads",
        "buffers",
        "kv_cache",
        "continuous",
        "sharing",
    ),
    "cpu": ("host_path", "instructions", "limits"),
}


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = _parser()
    arguments = parser.parse_args()
    if arguments.worker:
        return runner.work(arguments.worker)
    unknown = set(arguments.names) - {name for names in _NAMES.values() for name in names}
    if unknown:
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}")
    names = arguments.names or list(_NAMES[arguments.device])
    kinds = {name: runner.kind_of(name, arguments.device) for name in names}
    if "cuda" in kinds.values() and not _has_gpu():
        print("no GPU here; what needs none: python -m benchmarks --device cpu", file=sys.stderr)
        return 2
    if any(getattr(runner.module(name), "NEEDS_LOOPS", True) for name in names):
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
        complete &= _benchmark(name, kinds[name], arguments, parser, folder)
    return 0 if complete else 1


def _benchmark(
    name: str, kind: str, arguments: argparse.Namespace, parser: argparse.ArgumentParser, folder: Path
) -> bool:
    """Runs one and writes its file; whether all of it went well."""
    options = _options(name, kind, arguments, parser)
    known = runner.allocators_of(name, kind)
    asked = arguments.allocators.split(",") if arguments.allocators else known
    unknown = set(asked) - set(known)
    if unknown:
        parser.error(f"{name} does not know {', '.join(sorted(unknown))}, but {', '.join(known)}")
    chosen = [allocator for allocator in asked if _is_there(name, allocator)]
    runs = arguments.runs or (1 if arguments.quick else getattr(runner.module(name), "RUNS", 2))
    outcome, file = runner.Outcome([], {}, []), None
    for outcome in runner.run(name, chosen, runs, options):
        if outcome.rows:
            file = _write(name, arguments, options, outcome, folder)
    if file is None:
        return False
    print(f"\n{name}, written to {file}\n{report.table(outcome.rows)}\n", flush=True)
    draw: Callable[[list[Row], Path], str | None] = getattr(runner.module(name), "draw", lambda rows, file: None)
    picture = draw(outcome.rows, file)
    if picture is not None:
        print(f"its picture: {file.with_name(picture)}")
    remarks: Callable[[list[Row]], list[str]] = getattr(runner.module(name), "remarks", lambda rows: [])
    complaints: Callable[[list[Row]], list[str]] = getattr(runner.module(name), "complaints", lambda rows: [])
    wrong = complaints(outcome.rows)
    print("\n".join([*remarks(outcome.rows), *wrong, ""]), flush=True)
    print(", ".join(f"{key} {value}" for key, value in outcome.machine.items()), flush=True)
    for said in dict.fromkeys(outcome.failed):
        print(f"failed: {said}", file=sys.stderr)
    return not outcome.failed and not wrong


def _is_there(name: str, allocator: str) -> bool:
    """Whether a benchmark can measure that allocator here; where not, it is said why."""
    missing: Callable[[str], str | None] = getattr(runner.module(name), "missing", lambda allocator: None)
    why = missing(allocator)
    if why is not None:
        print(f"{name}: {allocator} left out; {why}", file=sys.stderr)
    return why is None


def _write(
    name: str, arguments: argparse.Namespace, options: runner.Options, outcome: runner.Outcome, folder: Path
) -> Path:
    result = Result(
        benchmark=name,
        command=_command(name, arguments),
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        commit=machine.commit(),
        machine=outcome.machine,
        rounds=outcome.rounds,
        settings=allocators.settings(),
        failed=list(dict.fromkeys(outcome.failed)),
        rows=outcome.rows,
    )
    tag = machine.device_tag(str(outcome.machine["device"]))
    what = "_largest_batch" if options.limit else "_memory" if options.at_once > 1 else ""
    file = folder / f"{name}-{tag}{what}.json"
    file.write_text(json.dumps(result, indent=1) + "\n")
    return file


def _options(name: str, kind: str, arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> runner.Options:
    programs = arguments.programs.split(",") if arguments.programs else None
    known: list[str] = list(getattr(runner.module(name), "PROGRAMS", []))
    has_scales = bool(known) or getattr(runner.module(name), "HAS_SCALES", False)
    if not known and (programs or arguments.largest_batch or (arguments.scale and not has_scales)):
        parser.error(f"{name} has no programs: name workloads alone")
    unknown = set(programs or []) - set(known)
    if unknown:
        parser.error(f"{name} has no {', '.join(sorted(unknown))}, but {', '.join(known)}")
    limit = None
    if arguments.largest_batch:
        from torch_vmm.sizes import to_bytes

        limit = to_bytes(arguments.largest_batch, "--largest-batch")
    if arguments.at_once < 1:
        parser.error(f"--at-once takes 1 process or more, not {arguments.at_once}")
    has_passes = bool(known) or getattr(runner.module(name), "HAS_PASSES", False)
    if arguments.lockstep and (not has_passes or limit is not None or arguments.at_once > 1):
        parser.error("--lockstep is for workloads and kv_cache, with neither --largest-batch nor --at-once")
    return runner.Options(
        kind, arguments.quick, programs, arguments.scale, limit, arguments.at_once, arguments.lockstep
    )


def _command(name: str, arguments: argparse.Namespace) -> str:
    """What makes the same file again; where it was written is nobody's business."""
    words = ["python", "-m", "benchmarks", *(["--quick"] if arguments.quick else [])]
    for option in ("runs", "allocators", "programs", "scale", "largest_batch"):
        value = getattr(arguments, option)
        words += [f"--{option.replace('_', '-')}", str(value)] if value else []
    words += ["--lockstep"] if arguments.lockstep else []
    words += ["--at-once", str(arguments.at_once)] if arguments.at_once > 1 else []
    words += ["--device", arguments.device] if arguments.device != "cuda" else []
    return shlex.join([*words, name])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = [name for names in _NAMES.values() for name in names]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(every)}")
    parser.add_argument(
        "--device",
        choices=tuple(_NAMES),
        default="cuda",
        help="whose benchmarks, where none is named; and where those run that can run on either",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: benchmarks/results, with --quick scratch")
    parser.add_argument("--quick", action="store_true", help="less of everything, to see that it works")
    parser.add_argument(
        "--runs",
        type=int,
        metavar="N",
        help="repetitions, interleaved; default 2 (buffers and continuous measure four times in each, kv_cache seven; "
        "hot_path: 7, latency and workloads: 3), with --quick 1",
    )
    parser.add_argument("--allocators", metavar="A,B", help="only these; default: all that the benchmark knows")
    parser.add_argument("--programs", metavar="A,B", help="only these programs of workloads; default: all")
    parser.add_argument(
        "--scale",
        choices=("small", "full"),
        help="of workloads, kv_cache, continuous and sharing: full is for 80 GiB; default: full on a GPU",
    )
    parser.add_argument(
        "--largest-batch", metavar="LIMIT", help="of workloads: instead, the largest batch that fits, such as 40GiB"
    )
    parser.add_argument(
        "--lockstep",
        action="store_true",
        help="of workloads and kv_cache: the allocators' processes take their passes in turn, on one CPU; the GPU "
        "holds them all",
    )
    parser.add_argument(
        "--at-once",
        type=int,
        default=1,
        metavar="N",
        help="processes beside each other; times are then left out, and the file is NAME_memory; default 1",
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser


def _prepare(name: str) -> str | None:
    """Makes what a benchmark needs beside the loops; where it cannot run here, says why not."""
    prepare: Callable[[], str | None] = getattr(runner.module(name), "prepare", lambda: None)
    return prepare()


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    sys.exit(main())
