"""``torch-vmm demo`` shows three models in three pools, ``info`` what there is, ``replay`` a recorded program.

``python -m torch_vmm`` is the same.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch

import torch_vmm
from torch_vmm import _C
from torch_vmm.demo import run as demo
from torch_vmm.replay import run as replay
from torch_vmm.sizes import to_bytes

_LEAST_OF_DEMO = 3 * 2**21  # bytes: a page for each of its models
INTERRUPTED = 130  # as a shell reports it
_CLOSED_PIPE = 141


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="torch-vmm", description=__doc__.split("\n")[0].replace("``", ""))
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", required=True, metavar="{demo,info,replay}")

    shows = commands.add_parser("demo", help="three real models in three pools under one limit")
    shows.add_argument("--device", choices=("cpu", "cuda"), help="default: the GPU where there is one")
    shows.add_argument("--plain", action="store_true", help="plain lines, in a terminal too")
    shows.add_argument(
        "--seconds",
        type=_seconds,
        metavar="N",
        help="of work, without start-up; by default 36, on a GPU 25, or as long as learning needs",
    )
    shows.add_argument(
        "--limit", type=_limit_of_demo, metavar="SIZE", help='such as "600MiB"; default: 60 %% of what all need'
    )
    # For tests: as without --seconds, in less time; and a training that learns nothing.
    shows.add_argument("--least-steps", action="store_true", help=argparse.SUPPRESS)
    shows.add_argument("--learning-rate-scale", type=float, default=1.0, help=argparse.SUPPRESS)

    tells = commands.add_parser("info", help="devices, driver, granularity and options")
    tells.add_argument("--json", action="store_true", help="as one JSON object, sizes in bytes")

    replays = commands.add_parser("replay", help="a recorded memory history: reserved then, and by torch_vmm")
    replays.add_argument("dump", type=Path, help="what torch.cuda.memory._dump_snapshot() wrote")
    replays.add_argument("--device", type=_count, metavar="N", help="this one alone; default: all with a history")
    replays.add_argument(
        "--limit", type=_limit_of_device, metavar="SIZE", help='of a device, such as "24GiB"; default: none'
    )
    replays.add_argument("--rows", type=_rows, default=20, metavar="N", help="lines of the series; default 20")
    replays.add_argument("--out", type=_picture, metavar="FILE", help="draw it too, as .svg")
    replays.add_argument("--json", action="store_true", help="as one JSON list, an object a device, sizes in bytes")
    return parser


def _version() -> str:
    return f"torch_vmm {torch_vmm.__version__}, built for torch {_C.built_for_torch}; running torch {torch.__version__}"


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= 24 * 3600:
        raise argparse.ArgumentTypeError(f"{text!r}: give seconds, above 0 and up to a day")
    return seconds


def _size(text: str) -> int:
    try:
        size = to_bytes(text, "--limit")
    except torch_vmm.InvalidArgumentError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("--limit=")) from error
    if size == 0:
        raise argparse.ArgumentTypeError("'0': models need some memory")
    return size


def _limit_of_demo(text: str) -> int:
    if (size := _size(text)) < _LEAST_OF_DEMO:
        least = _C.format_bytes(_LEAST_OF_DEMO)
        raise argparse.ArgumentTypeError(f"{text!r}: three models need a page of 2 MiB each, {least} at least")
    return size


def _limit_of_device(text: str) -> int:
    if not replay.LEAST <= (size := _size(text)) <= replay.LARGEST:
        least, most = _C.format_bytes(replay.LEAST), _C.format_bytes(replay.LARGEST)
        raise argparse.ArgumentTypeError(f"{text!r}: a device has {least} at least and {most} at most")
    return size


def _count(text: str, least: int = 0) -> int:
    if not text.isdecimal() or len(text) > 6 or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number, from {least}")
    return int(text)


def _rows(text: str) -> int:
    return _count(text, least=1)


def _picture(text: str) -> Path:
    if (path := Path(text)).suffix != ".svg":
        raise argparse.ArgumentTypeError(f"{text!r}: a picture is an .svg file")
    return path


def _demo(arguments: argparse.Namespace) -> int:
    device = demo.choose_device(arguments.device)
    settings = demo.Settings(
        device=device,
        seconds=demo.DEFAULT_SECONDS[device] if arguments.seconds is None else arguments.seconds,
        least_steps=arguments.seconds is None or arguments.least_steps,
        limit=arguments.limit,
        plain=arguments.plain,
        learning_rate_scale=arguments.learning_rate_scale,
    )
    return demo.run(settings)


def _gather() -> dict[str, Any]:
    """What ``info`` tells; sizes in bytes."""
    no_gpu = None
    try:
        gpus = [_C.device("cuda", ordinal) for ordinal in range(_C.device_count("cuda"))]
        if not gpus:
            _C.device("cuda")  # says why
    except torch_vmm.NotAvailableError as error:
        gpus, no_gpu = [], str(error)
    devices = []
    for device in [*gpus, _C.device("cpu")]:
        free, total = device.memory_info()
        devices.append(
            {
                "device": f"{device.kind}:{device.ordinal}",
                "name": device.name,
                "total_bytes": total,
                "free_bytes": free,
                "granularity": device.granularity,
            }
        )
    options = [
        {
            "variable": variable,
            "unit": unit,
            "default": default,
            "value": os.environ.get(variable),
            "sentence": sentence,
        }
        for _, variable, default, unit, sentence in _C.option_table()
    ]
    return {
        "version": torch_vmm.__version__,
        "built_for_torch": _C.built_for_torch,
        "torch": torch.__version__,
        "devices": devices,
        "no_gpu": no_gpu,
        "options": options,
    }


def _info(arguments: argparse.Namespace) -> int:
    told = _gather()
    if arguments.json:
        print(json.dumps(told, indent=2))
        return 0
    print(_version())
    if told["no_gpu"] is not None:
        print(told["no_gpu"])
    for device in told["devices"]:
        total, free, grain = (_C.format_bytes(device[key]) for key in ("total_bytes", "free_bytes", "granularity"))
        print(f"{device['device']}  {device['name']}, {total} ({free} free), granularity {grain}")
    print("\noptions (set in the environment):")
    for option in told["options"]:
        value = "" if option["value"] is None else f"; now {option['value']}"
        print(f"  {option['variable']} [{option['unit']}, default {option['default']}{value}]")
        print(f"      {option['sentence']}")
    return 0


def _replay(arguments: argparse.Namespace) -> int:
    return replay.run(
        replay.Settings(
            file=arguments.dump,
            device=arguments.device,
            limit=arguments.limit,
            rows=arguments.rows,
            as_json=arguments.json,
            out=arguments.out,
        )
    )


_COMMANDS = {"demo": _demo, "info": _info, "replay": _replay}


def main() -> int:
    """Run the command line; returns the exit status."""
    arguments = _parser().parse_args()
    if sys.stdout is None:
        return _no_output("it is closed")
    try:
        status = _COMMANDS[arguments.command](arguments)
        sys.stdout.flush()
    except torch_vmm.VmmError as error:
        print(f"torch-vmm: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ntorch-vmm: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # whoever read our output has gone
        _drop_output()
        return _CLOSED_PIPE
    except OSError as error:
        if error.filename is not None:
            raise
        _drop_output()
        return _no_output(error.strerror or str(error))
    return status


def _drop_output() -> None:
    """What is buffered goes nowhere: else it would fail once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _no_output(why: str) -> int:
    print(f"torch-vmm: standard output: {why}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
