"""Writes C++ that defines every CUDA function that torch's libraries name and the stand-in lacks.

    python3 missing_calls.py --torch LIB_FOLDER --have OBJECT... --out FILE driver|runtime

torch's libraries are loaded with all their symbols bound, so that each must be
there. What is defined here says its name on stderr and answers "not supported".
"""

from __future__ import annotations

import argparse
import re
import subprocess
from pathlib import Path

PATTERNS = {
    "runtime": re.compile(r"^(?:__)?cuda[A-Z]\w*$"),
    # Not cuBLAS's, cuFile's and other libraries' names, which begin alike.
    "driver": re.compile(
        r"^cu(?:Array|Ctx|Device|Driver|Event|Func|Get|Graph|Green|Init|Ipc|Kernel|Launch|Library|Link|Mem|Module"
        r"|Multicast|Occupancy|Pointer|Profiler|Stream|TensorMap|Thread)\w*$"
    ),
}


def names(option: str, files: list[Path]) -> set[str]:
    """Symbols of one kind: ``--undefined-only`` or ``--defined-only``, without versions."""
    command = ["nm", *option.split(), *map(str, files)]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {line.split()[-1].split("@")[0] for line in listed.splitlines() if line.split()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=list(PATTERNS))
    parser.add_argument("--torch", type=Path, required=True, help="torch's folder of libraries")
    parser.add_argument("--have", type=Path, nargs="+", required=True, help="objects of the stand-in")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    wanted = names("-D --undefined-only", sorted(arguments.torch.glob("lib*.so")))
    wanted = {name for name in wanted if PATTERNS[arguments.kind].match(name)}
    missing = sorted(wanted - names("--defined-only", arguments.have))
    lines = ['extern "C" {', "int refuse_missing_call(const char* name);"]
    lines += [f'int {name}() {{ return refuse_missing_call("{name}"); }}' for name in missing]
    arguments.out.write_text("\n".join([*lines, "}"]) + "\n")


if __name__ == "__main__":
    main()
