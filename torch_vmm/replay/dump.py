"""Reads a dump of ``torch.cuda.memory._dump_snapshot``. It knows the file, and nothing of what its entries mean.

A pickle can run any code when it is loaded, and a dump is what people send to each other. A dump has plain values
only (dicts, lists, numbers, text), so a pickle that names any class or function is refused before it is looked up.
"""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from torch_vmm.errors import InvalidArgumentError
from torch_vmm.sizes import show

HOW_TO_RECORD = (
    "call torch.cuda.memory._record_memory_history() before the program's first allocation, and "
    "torch.cuda.memory._dump_snapshot(FILE) after its last"
)
_PROTOCOL = b"\x80"  # how a pickle of protocol 2 and later begins; torch writes no older one
_STOP = b"."  # how every pickle ends


@dataclass(frozen=True)
class Dump:
    """What the file holds, in torch's own words."""

    path: Path
    segments: list[Any]  # memory as it was when the dump was written, of all devices
    traces: list[list[Any]]  # what happened before, by device; empty for a device without a history

    def devices(self) -> list[int]:
        """Those that have a history, with an allocation or a free in it where any has: the act of looking is an
        entry in that of each device.
        """
        recorded = [device for device, trace in enumerate(self.traces) if trace]
        return [device for device in recorded if any(map(_is_step, self.traces[device]))] or recorded

    def trace(self, device: int) -> list[Any]:
        """The history of a device.

        Raises:
            InvalidArgumentError: it has none; names those that have.
        """
        if device not in self.devices():
            known = ", ".join(map(str, self.devices()))
            raise InvalidArgumentError(f"{self.path}: no history of device {device}; there is one of {known}")
        return self.traces[device]


def _is_step(entry: object) -> bool:
    return not isinstance(entry, dict) or entry.get("action") in ("alloc", "free_requested", "free_completed")


class _PlainValues(pickle.Unpickler):
    """Loads numbers, text and containers; refuses whatever would have to be imported."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise InvalidArgumentError(
            f"it asks for {show(f'{module}.{name}')[1:-1]}, which no memory snapshot needs; nothing of it was run"
        )

    def persistent_load(self, pid: object) -> NoReturn:
        raise InvalidArgumentError("it refers to objects outside itself, which a memory snapshot does not")


def read(path: Path) -> Dump:
    """The dump in a file.

    Raises:
        InvalidArgumentError: names the file and what is wrong: it cannot be read, is no pickle, was cut short, would
            run code, is no memory snapshot, or has no history.
    """
    found = _load(path)
    if not isinstance(found, dict) or not isinstance(found.get("segments"), list):
        raise InvalidArgumentError(
            f"{path}: a pickle, but no memory snapshot: no 'segments' in it. To make one, {HOW_TO_RECORD}"
        )
    traces = found.get("device_traces")
    if not isinstance(traces, list) or not all(isinstance(trace, list) for trace in traces) or not any(traces):
        raise InvalidArgumentError(f"{path}: a snapshot without a history. To record one, {HOW_TO_RECORD}")
    return Dump(path, found["segments"], traces)


def _load(path: Path) -> object:
    try:
        with path.open("rb") as file:
            if file.read(1) != _PROTOCOL:
                raise InvalidArgumentError(f"{path}: not a pickle. To make a dump, {HOW_TO_RECORD}")
            if not file.seekable():
                raise InvalidArgumentError(f"{path}: a pipe, which cannot be read twice: give a file")
            file.seek(-1, os.SEEK_END)
            is_whole = file.read(1) == _STOP
            file.seek(0)
            return _PlainValues(file).load()
    except InvalidArgumentError as error:
        raise error if str(error).startswith(str(path)) else InvalidArgumentError(f"{path}: {error}") from None
    except OSError as error:
        raise InvalidArgumentError(f"{path}: {error.strerror or error}") from error
    except MemoryError:
        raise InvalidArgumentError(f"{path}: there is not enough memory here to read it") from None
    # What a damaged pickle makes Python's own reader raise is not bounded by its documentation.
    except Exception as error:
        if is_whole and not isinstance(error, EOFError):
            raise InvalidArgumentError(f"{path}: a damaged pickle ({type(error).__name__}: {error})") from error
        raise InvalidArgumentError(f"{path}: a pickle that was cut short, by a full disk perhaps") from error
