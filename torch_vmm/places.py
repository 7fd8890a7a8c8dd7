"""Where what sleeps is kept: ``keep=`` as it was given, and as the extension takes it.

It moves nothing.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Union

import torch

from torch_vmm import _C
from torch_vmm.devices import DeviceKey
from torch_vmm.errors import InvalidArgumentError
from torch_vmm.sizes import show, to_flag, to_path

Place = Union[str, "os.PathLike[str]", torch.device]
"""``"host"``, ``"discard"``, another GPU (``"device:1"``, ``"cuda:1"``, a ``torch.device``), or the path of a file or
folder.
"""

Places = Place | Sequence[Place]
"""One place, or several: the first that has room is taken."""

Keep = Places | Mapping[str, Places]
"""Where all of a model goes, or what is under each tag; ``""`` is what has no tag."""

Parsed = tuple[str, str, int]
"""One place: its kind, a file's absolute path, and a device's ordinal."""

_HOST: Parsed = ("host", "", 0)
_PACKED: Parsed = ("host, packed", "", 0)
_DISCARDED: Parsed = ("discard", "", 0)
_POISONED: Parsed = ("poison", "", 0)
_ON_HOST = '"host", "discard", or a path ("./llama.sleep", a pathlib.Path)'
_ACCEPTED = '"host", "discard", "device:1", or a path ("./llama.sleep", a pathlib.Path)'
_DEVICE = re.compile(r"(?:device|cuda):(\d{1,3})")


def _may_be_folder(path: str) -> bool:
    """Not where it is missing, or something else; one that may not be looked into may be."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


def _to_file(path: str) -> Parsed:
    path = to_path(path, "keep")
    # abspath drops the separator at the end, which says that it is to be a folder.
    if path.endswith(os.sep) and not _may_be_folder(path):
        raise InvalidArgumentError(f"keep={show(path)}: there is no such folder")
    if not _may_be_folder(folder := os.path.dirname(os.path.abspath(path))):
        raise InvalidArgumentError(f"keep={show(path)}: there is no folder {show(folder)}")
    try:
        return ("file", os.path.abspath(path).encode(sys.getfilesystemencoding()).decode(), 0)
    except UnicodeError as error:
        raise InvalidArgumentError(f"keep={show(path)}: give a path that is text") from error


def _to_device(place: object, named: int, device: DeviceKey) -> Parsed:
    if device.kind != "cuda":
        raise InvalidArgumentError(f"keep={show(place)}: a model in host memory does not go to a GPU; give {_ON_HOST}")
    if named == device.ordinal:
        raise InvalidArgumentError(f"keep={show(place)} is the model's own device; name another one")
    count = _C.device_count("cuda")
    if named >= count:
        raise InvalidArgumentError(f"keep={show(place)}: there is no such device; {count} are visible")
    return ("device", "", named)


def _to_place(place: object, device: DeviceKey) -> Parsed:
    if isinstance(place, torch.device) and place.type == "cuda" and place.index is not None:
        return _to_device(place, place.index, device)
    if isinstance(place, os.PathLike):
        path = os.fspath(place)
        if isinstance(path, str) and path:
            return _to_file(path)
    if isinstance(place, str):
        if place in ("host", "discard"):
            return (place, "", 0)
        if number := _DEVICE.fullmatch(place):
            return _to_device(place, int(number[1]), device)
        if os.sep in place:
            return _to_file(place)
    raise InvalidArgumentError(f"keep={show(place)}: give {_accepted(device)}")


def _accepted(device: DeviceKey) -> str:
    return _ON_HOST if device.kind == "cpu" else _ACCEPTED


def _to_places(places: object, device: DeviceKey) -> list[Parsed]:
    if isinstance(places, str | bytes | os.PathLike | Mapping) or not isinstance(places, Iterable):
        return [_to_place(places, device)]
    found = [_to_place(place, device) for place in places]
    if not found:
        raise InvalidArgumentError(f"keep={show(places)}: no place; give {_accepted(device)}")
    return found


class Wishes(NamedTuple):
    """What a sleep does beside keeping contents."""

    release: bool = False
    packed: bool = False
    poison: bool = False


def to_keep(keep: Keep, wishes: Wishes, device: DeviceKey) -> tuple[list[Parsed] | None, dict[str, list[Parsed]]]:
    """Where all goes, and where each tag does."""
    everywhere = None
    by_tag = {}
    if isinstance(keep, Mapping):
        for tag, places in keep.items():
            if not isinstance(tag, str):
                raise InvalidArgumentError(f'keep={{{show(tag)}: ...}}: a tag is text, "" for what has none')
            try:
                by_tag[tag] = _to_places(places, device)
            except InvalidArgumentError as error:
                raise InvalidArgumentError(f"keep[{show(tag)}]{str(error).removeprefix('keep')}") from None
    else:
        everywhere = _to_places(keep, device)
    named = [everywhere or [], *by_tag.values()]
    if to_flag(wishes.packed, "packed") and not _replace(_HOST, _PACKED, named):
        raise InvalidArgumentError(f'packed=True is for what goes to "host", and keep={show(keep)} sends nothing there')
    if to_flag(wishes.poison, "poison") and not _replace(_DISCARDED, _POISONED, named):
        raise InvalidArgumentError(f"poison=True is for what is discarded, and keep={show(keep)} discards nothing")
    return everywhere, by_tag


def _replace(place: Parsed, by: Parsed, named: list[list[Parsed]]) -> bool:
    """Whether there was any."""
    found = any(place in places for places in named)
    for places in named:
        places[:] = [by if each == place else each for each in places]
    return found
