"""The command: reads the dump, replays each device's history, shows what came of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from torch_vmm.errors import InvalidArgumentError
from torch_vmm.lines import one_line

from . import dump as dumps
from .outcome import Outcome, replay
from .picture import svg
from .report import text
from .trace import programs

LEAST = 2**21  # bytes of a device: a page
LARGEST = 2**44  # its addresses are four times that, and a process's 2**47


@dataclass(frozen=True)
class Settings:
    """As the command line gives them."""

    file: Path
    device: int | None = None  # None: all that have a history
    limit: int | None = None  # bytes a device, from LEAST to LARGEST
    rows: int = 20
    as_json: bool = False
    out: Path | None = None  # where the picture goes, an .svg


def run(settings: Settings) -> int:
    """Print what came of it, and draw the picture.

    Returns:
        0; 1 where the program does not fit the limit.
    Raises:
        InvalidArgumentError: what is wrong with the file, the device or the picture's folder.
    """
    dump = dumps.read(settings.file)
    devices = dump.devices() if settings.device is None else [settings.device]
    outcomes = [replay(program, settings.limit) for program in programs(dump, devices)]
    if settings.out is not None:
        _write(settings.out, svg(outcomes, one_line(settings.file.name)))
    if settings.as_json:
        print(json.dumps([_as_plain(outcome, settings.rows) for outcome in outcomes], indent=2))
    else:
        print("\n\n".join(text(outcome, settings.rows) for outcome in outcomes))
        if settings.out is not None:
            print(f"\nthe picture: {one_line(str(settings.out))}")
    return 0 if all(outcome.refused is None for outcome in outcomes) else 1


def _as_plain(outcome: Outcome, rows: int) -> dict[str, object]:
    samples = [
        {"up_to_step": each.up_to, "allocated": each.allocated, "recorded": each.recorded, "torch_vmm": each.ours}
        for each in outcome.samples(rows)
    ]
    return outcome.totals() | {"series": samples}


def _write(path: Path, content: str) -> None:
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise InvalidArgumentError(f"--out={path}: {error.strerror}") from error
