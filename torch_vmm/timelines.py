"""What the models of a SharedMemoryPool held over time: sampled on a thread, saved as a trace or a picture.

It asks for counters, which no model at work waits for, walks none but those that sleep, and knows no policy.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch_vmm import _C
from torch_vmm._guarded import Guarded
from torch_vmm.errors import InvalidArgumentError, NotAvailableError, VmmError
from torch_vmm.sizes import show, to_path

if TYPE_CHECKING:
    from torch_vmm.shared_pools import SharedMemoryPool

_PICTURES = (".png", ".svg", ".pdf")
_LONGEST = 24 * 3600.0  # seconds between two samples


@dataclass(frozen=True)
class TimelineSample:
    """What the models of a SharedMemoryPool held at one moment, in bytes.

    They are looked at one after the other: memory that goes from one to another
    in between may be in both, or in neither. A model that was unregistered
    while tensors lived on in it is there as ``"name (closed)"`` until they are
    gone.
    """

    seconds: float
    """Since the recording began."""
    allocated_bytes: dict[str, int]
    """In live tensors and explicit pages, by model; without what sleeps."""
    physical_bytes: dict[str, int]
    """Mapped, by model."""
    store_bytes: int
    """Held by the chunk store, mapped nowhere."""
    physical_limit: int
    """Of all models together."""


class Timeline(Guarded, guarded=True):
    """A recording of what the models of a SharedMemoryPool hold
    (:meth:`SharedMemoryPool.record_timeline`).

    ``with`` ends it after the block, whatever happens there. What was recorded
    stays when the pool is closed or gone.
    """

    _instead_of_a_copy = "it is recorded on a thread of this process; keep another reference to it, or its samples"
    _shared: weakref.ref[SharedMemoryPool]
    _device: str
    _began: float
    _samples: list[TimelineSample]
    _stopped: threading.Event
    _process: int
    _thread: threading.Thread

    def __init__(self, shared: SharedMemoryPool, interval: float) -> None:
        if shared.is_closed:
            raise InvalidArgumentError("the SharedMemoryPool is closed")
        # It may be forgotten while it records: neither is kept for the thread's sake.
        self._shared = weakref.ref(shared)
        self._device = str(shared.device)
        self._began = time.monotonic()
        self._samples = [_look(shared, self._began)]
        self._stopped = threading.Event()
        self._process = os.getpid()
        self._thread = threading.Thread(
            target=_record,
            args=(weakref.ref(self), self._stopped, interval),
            name="torch_vmm timeline",
            daemon=True,
        )
        self._thread.start()

    @property
    def samples(self) -> list[TimelineSample]:
        """What was seen so far, oldest first; another list each time."""
        return list(self._samples)

    def stop(self) -> None:
        """Ends the recording with a last sample; twice is fine.

        In a forked child, where nothing is recorded, it does nothing.
        """
        # Another process may have been forked off just while the thread held the event's lock.
        if os.getpid() != self._process or self._stopped.is_set():
            return
        self._stopped.set()
        self._thread.join()
        self._sample()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes what was recorded so far to a file, by its suffix.

        ``.json`` is a trace for Perfetto or ``chrome://tracing``: a counter a
        model, with ``allocated`` and ``idle`` (mapped and not allocated), one
        for the store and one for the limit, in bytes. ``.png``, ``.svg`` and
        ``.pdf`` are pictures by matplotlib: what is mapped, model upon model,
        and the limit as a line, over seconds.

        Raises:
            InvalidArgumentError: no path, or another suffix.
            NotAvailableError: a picture, and there is no matplotlib.
            OSError: the file cannot be written.
        """
        file = Path(to_path(path, "path"))
        suffix = file.suffix.lower()
        if suffix == ".json":
            file.write_text(json.dumps(_trace(self.samples, f"torch_vmm on {self._device}"), separators=(",", ":")))
        elif suffix in _PICTURES:
            _draw(self.samples, f"physical memory of the models on {self._device}", file)
        else:
            raise InvalidArgumentError(
                f"path={show(str(path))}: give a name that ends in .json (a trace), or in {', '.join(_PICTURES)} "
                f"(a picture)"
            )

    def _sample(self) -> bool:
        """Takes one; whether there can be more."""
        shared = self._shared()
        if shared is None:
            return False
        with contextlib.suppress(VmmError):  # a forked child, or a driver that has gone
            self._samples.append(_look(shared, self._began))
            return not shared.is_closed
        return False

    def __enter__(self) -> Timeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        samples = self.samples
        state = "recording" if self._thread.is_alive() else "stopped"
        return f"Timeline({self._device}: {len(samples)} samples in {samples[-1].seconds:.1f} s, {state})"


def to_interval(interval: object) -> float:
    """Seconds between two samples.

    Raises:
        InvalidArgumentError: no number, not above 0, or more than a day.
    """
    if not isinstance(interval, bool | str) and hasattr(interval, "__float__"):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            seconds = float(interval)
            if 0 < seconds <= _LONGEST:
                return seconds
    raise InvalidArgumentError(f"interval={show(interval)}: give seconds above 0 and up to a day, such as 0.01")


def _record(recorded: weakref.ref[Timeline], stopped: threading.Event, interval: float) -> None:
    while not stopped.wait(interval):
        timeline = recorded()
        if timeline is None or not timeline._sample():
            return
        del timeline


def _look(shared: SharedMemoryPool, began: float) -> TimelineSample:
    allocated: dict[str, int] = {}
    physical: dict[str, int] = {}
    for model in shared._handles():
        name = f"{model.name} (closed)" if model.is_closed else model.name
        # In this order: what is allocated in between is mapped as well.
        allocated[name] = allocated.get(name, 0) + _allocated(model)
        physical[name] = physical.get(name, 0) + model.physical_bytes
    stats = shared._handle.global_stats()
    return TimelineSample(
        seconds=time.monotonic() - began,
        allocated_bytes=allocated,
        physical_bytes=physical,
        store_bytes=stats["store_bytes"],
        physical_limit=stats["physical_limit"],
    )


def _allocated(model: _C.Pool) -> int:
    """What lives in it and has memory here."""
    return int(model.memory_stats()["allocated_bytes"]) if _C.is_asleep(model) else model.live_bytes_here


def _models(samples: Sequence[TimelineSample]) -> list[str]:
    """All that there were, in order of appearance."""
    return list(dict.fromkeys(name for sample in samples for name in sample.physical_bytes))


# -- As a trace --------------------------------------------------------------------------------------------------------


def _trace(samples: Sequence[TimelineSample], process: str) -> dict[str, Any]:
    """Chrome's trace event format: counters, times in microseconds."""
    models, pid = _models(samples), os.getpid()
    events: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "pid": pid, "args": {"name": process}}]
    for sample in samples:
        counters: list[tuple[str, dict[str, int]]] = []
        for name in models:
            # 0 for one that is no more: a counter stays at its last value else.
            allocated, physical = sample.allocated_bytes.get(name, 0), sample.physical_bytes.get(name, 0)
            counters.append((name, {"allocated": allocated, "idle": max(0, physical - allocated)}))
        # In brackets: names that a model hardly has.
        counters.append(("(store)", {"store": sample.store_bytes}))
        counters.append(("(physical limit)", {"limit": sample.physical_limit}))
        at = round(sample.seconds * 1e6)
        events += [{"name": name, "ph": "C", "pid": pid, "ts": at, "args": args} for name, args in counters]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


# -- As a picture ------------------------------------------------------------------------------------------------------


def _draw(samples: Sequence[TimelineSample], title: str, file: Path) -> None:
    try:
        # Not by pyplot: that has a state of its own, and may open windows.
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NotAvailableError(
            f"{file.name}: pictures are drawn by matplotlib, which cannot be imported ({error}): "
            "pip install matplotlib, or save a .json"
        ) from error
    models = _models(samples)
    limits = [sample.physical_limit for sample in samples]
    heights = [sum(sample.physical_bytes.values()) + sample.store_bytes for sample in samples]
    unit, name = (2**30, "GiB") if max(*limits, *heights) >= 2**30 else (2**20, "MiB")
    seconds = [sample.seconds for sample in samples]
    areas = [[sample.physical_bytes.get(model, 0) / unit for sample in samples] for model in models]
    areas.append([sample.store_bytes / unit for sample in samples])

    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.add_subplot()
    # A sample holds until the next one.
    drawn = axes.stackplot(seconds, *areas, step="post", linewidth=0)
    drawn[-1].set_facecolor("lightgrey")
    (line,) = axes.step(seconds, [limit / unit for limit in limits], where="post", color="black", linestyle="--")
    axes.set(title=title, xlabel="seconds", ylabel=name, xlim=(0, max(seconds[-1], 1e-3)))
    axes.set_ylim(bottom=0)
    labels = [*map(_label, models), "in the store", "limit"]
    # The highest first, as they are drawn.
    axes.legend([line, *reversed(drawn)], list(reversed(labels)), loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(file)


def _label(name: str) -> str:
    """A name that matplotlib shows as it is: ``$`` begins a formula."""
    return name.replace("$", r"\$")
