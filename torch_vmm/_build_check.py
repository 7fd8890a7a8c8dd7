"""Is there an extension, and was it built for the torch that is running?

The virtual functions of torch's allocator differ from minor to minor, so an
extension built for another one would call the wrong function, or not load. So
this looks at the record that the build left beside the extension, before
loading it. It knows nothing of what the extension does.
"""

from __future__ import annotations

import importlib.machinery
import json
import sys
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent
_REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps ."
_HOW = (
    f"in the torch_vmm source folder, with this Python, run\n    {_REBUILD}\n"
    "or, to use it from that folder,\n    python setup.py build_ext --inplace"
)


def extension_path(folder: Path = _FOLDER) -> Path | None:
    """The extension file that this Python would import, or None."""
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = folder / f"_C{suffix}"
        if path.is_file():
            return path
    return None


def check() -> None:
    """Refuse to go on with an extension that is missing or was built for another torch.

    Call it before the first import of ``torch_vmm._C``.

    Raises:
        WrongTorchError: an ImportError; says what was found, what is needed, and how to build.
        SystemExit: the same, where this is the command line: nobody wants its traceback.
    """
    try:
        require_fitting()
    except ImportError as error:
        # A later import of the package makes its own, of which the package knows.
        sys.modules.pop("torch_vmm.errors", None)
        if _is_command_line():
            sys.exit(f"torch-vmm: {error}")
        raise


def _wrong(message: str) -> ImportError:
    from torch_vmm.errors import WrongTorchError  # which needs a torch

    return WrongTorchError(message)


def _is_command_line() -> bool:
    """Is this ``python -m torch_vmm`` or the console script?"""
    words = sys.orig_argv
    as_module = "-m" in words and words[words.index("-m") + 1 :][:1] == ["torch_vmm"]
    return as_module or Path(sys.argv[0]).name == "torch-vmm"


def require_fitting(folder: Path = _FOLDER, running: str | None = None) -> None:
    """The same for any folder and torch.

    Args:
        folder: where the extension is; the package's own folder.
        running: torch's version; by default that of the torch installed.
    Raises:
        WrongTorchError: says what was found, what is needed, and how to build.
        ImportError: the same, where there is no torch.
    """
    if running is None:
        try:
            import torch
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise ImportError("torch_vmm needs torch 2.11 to 2.15, and this Python has no torch") from error
        running = torch.__version__

    path = extension_path(folder)
    if path is None:
        others = sorted(file.name for file in folder.glob("_C.*.so"))
        found = f"; there is one for another Python: {', '.join(others)}" if others else ""
        raise _wrong(f"torch_vmm's extension (torch_vmm._C) has not been built{found}. To build it, {_HOW}")

    running_minor = ".".join(running.split(".")[:2])
    record = path.with_suffix(".json")
    try:
        built = str(json.loads(record.read_text())["minor"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _wrong(
            f"torch_vmm's extension has no record of the torch it was built for ({record.name}: {error!r}). "
            f"To build it for torch {running_minor}, {_HOW}"
        ) from error
    if built != running_minor:
        raise _wrong(
            f"torch_vmm was built for torch {built}, and torch {running} is running. An extension fits one minor "
            f"release of torch only. To rebuild it for torch {running_minor}, {_HOW}"
        )
