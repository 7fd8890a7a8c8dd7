"""``python -m torch_vmm demo`` shows three models in three pools; ``info`` says what there is to work with."""

from __future__ import annotations

import argparse
import sys

import torch

import torch_vmm
from torch_vmm import _C
from torch_vmm.demo import run as demo
from torch_vmm.sizes import to_bytes


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m torch_vmm", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    shows = commands.add_parser("demo", help="three real models in three pools under one limit")
    shows.add_argument("--device", choices=("cpu", "cuda"), help="default: the GPU where there is one")
    shows.add_argument("--plain", action="store_true", help="plain lines, in a terminal too")
    shows.add_argument("--seconds", type=float, metavar="N", help="of work, without start-up; default 36, on a GPU 25")
    shows.add_argument("--limit", type=_size, metavar="SIZE", help='such as "600MiB"; default: 60 %% of what all need')
    shows.add_argument("--learning-rate-scale", type=float, default=1.0, help=argparse.SUPPRESS)

    commands.add_parser("info", help="devices, driver, granularity and options")
    return parser


def _size(text: str) -> int:
    try:
        return to_bytes(text, "--limit")
    except torch_vmm.InvalidArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _demo(arguments: argparse.Namespace) -> int:
    device = demo.choose_device(arguments.device)
    settings = demo.Settings(
        device=device,
        seconds=demo.DEFAULT_SECONDS[device] if arguments.seconds is None else arguments.seconds,
        limit=arguments.limit,
        plain=arguments.plain,
        learning_rate_scale=arguments.learning_rate_scale,
    )
    return demo.run(settings)


def _info() -> int:
    print(f"torch_vmm {torch_vmm.__version__}, built for torch {_C.built_for_torch}; running {torch.__version__}")
    try:
        gpus = [_C.device("cuda", ordinal) for ordinal in range(_C.device_count("cuda"))]
        if not gpus:
            print("no GPU: no CUDA driver, or none of its devices is visible")
    except torch_vmm.NotAvailableError as error:
        gpus = []
        print(f"no GPU: {error}")
    for device in [*gpus, _C.device("cpu")]:
        free, total = device.memory_info()
        print(
            f"{device.kind}:{device.ordinal}  {device.name}, {_C.format_bytes(total)} ({_C.format_bytes(free)} free), "
            f"granularity {_C.format_bytes(device.granularity)}"
        )
    print("\noptions (set in the environment):")
    for _, variable, default, unit, sentence in _C.option_table():
        print(f"  {variable} [{unit}, default {default}]\n      {sentence}")
    return 0


def main() -> int:
    """Run the command line; returns the exit status."""
    arguments = _parser().parse_args()
    return _demo(arguments) if arguments.command == "demo" else _info()


if __name__ == "__main__":
    sys.exit(main())
