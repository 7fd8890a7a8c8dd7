"""Memory histories written by hand, in the format of ``torch.cuda.memory._snapshot``."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

Entry = dict[str, Any]


class History:
    """One device's allocator, told what to do: it keeps segments and blocks, and writes down what happens.

    Nothing decides here. The caller says where everything goes, as torch's own allocator would have.
    """

    def __init__(self, device: int = 0) -> None:
        self.device = device
        self.entries: list[Entry] = []
        self.segments: dict[int, Entry] = {}
        self.blocks: dict[int, tuple[int, int]] = {}  # size asked for and stream, by address

    def _tell(self, action: str, address: int, size: int, stream: int = 0) -> None:
        self.entries.append({"action": action, "addr": address, "size": size, "stream": stream, "frames": []})

    def segment(self, address: int, size: int, *, stream: int = 0, how: str = "segment_alloc") -> None:
        self.segments[address] = {"address": address, "total_size": size, "stream": stream}
        self._tell(how, address, size, stream)

    def drop_segment(self, address: int, how: str = "segment_free") -> None:
        gone = self.segments.pop(address)
        self._tell(how, address, gone["total_size"], gone["stream"])

    def alloc(self, address: int, size: int, stream: int = 0) -> None:
        self.blocks[address] = (size, stream)
        self._tell("alloc", address, size, stream)

    def request_free(self, address: int) -> None:
        self._tell("free_requested", address, *self.blocks[address])

    def complete_free(self, address: int) -> None:
        self._tell("free_completed", address, *self.blocks.pop(address))

    def free(self, address: int) -> None:
        self.request_free(address)
        self.complete_free(address)

    def out_of_memory(self, size: int) -> None:
        self.entries.append({"action": "oom", "device_free": 0, "size": size, "stream": 0, "frames": []})

    def forget(self) -> None:
        """Recording begins here: what happened so far is in the segments only."""
        self.entries.clear()

    def dump_segments(self) -> list[Entry]:
        return [segment | {"device": self.device, "blocks": self._tile(segment)} for segment in self.segments.values()]

    def _tile(self, segment: Entry) -> list[Entry]:
        start, end = segment["address"], segment["address"] + segment["total_size"]
        tiles: list[Entry] = []
        at = start
        for address, (size, _) in sorted(self.blocks.items()):
            if start <= address < end:
                rounded = -(-size // 512) * 512
                if address > at:
                    tiles.append({"size": address - at, "requested_size": 0, "state": "inactive"})
                tiles.append({"size": rounded, "requested_size": size, "state": "active_allocated"})
                at = address + rounded
        if at < end:
            tiles.append({"size": end - at, "requested_size": 0, "state": "inactive"})
        return tiles


def write(path: Path, *devices: History) -> Path:
    """The dump of these devices; those between them have no history."""
    traces: list[list[Entry]] = [[] for _ in range(max(device.device for device in devices) + 1)]
    for device in devices:
        traces[device.device] = device.entries
    segments = [segment for device in devices for segment in device.dump_segments()]
    path.write_bytes(pickle.dumps({"segments": segments, "device_traces": traces, "allocator_settings": {}}))
    return path
