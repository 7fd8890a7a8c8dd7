#!/usr/bin/env python3
"""Run clang-tidy over base, driver, core and ipc, in parallel, and only where something changed.

    python3 scripts/clang_tidy.py [FILE...]

Takes its flags from build/cpp-plain/compile_commands.json (scripts/cpp_tests
configure plain). A file that passed is stamped with the hash of itself, all
headers, the flags and .clang-tidy, and is skipped until one of them changes.
Some are read at a time, as most of what a file costs is its headers: 124 alone
took 450 s of CPU.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DATABASE = ROOT / "build" / "cpp-plain" / "compile_commands.json"
CLANG_TIDY = Path(sys.executable).parent / "clang-tidy"  # scripts/requirements-test.txt pins it
STAMPS = ROOT / "build" / "clang-tidy"
FOLDERS = ("csrc/base", "csrc/driver", "csrc/core", "csrc/ipc")
AT_ONCE = 8


def digest_of(source: Path, headers: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in [source, *headers, ROOT / ".clang-tidy", DATABASE]:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def in_groups(sources: list[Path]) -> list[list[Path]]:
    """Files of one folder together, at most AT_ONCE; those that take longest first."""
    groups: list[list[Path]] = []
    for source in sorted(sources):
        fits = bool(groups) and groups[-1][0].parent == source.parent and len(groups[-1]) < AT_ONCE
        if fits:
            groups[-1].append(source)
        else:
            groups.append([source])
    return sorted(groups, key=lambda group: sum(file.stat().st_size for file in group), reverse=True)


def check(sources: list[Path]) -> tuple[bool, str]:
    text = "".join(f'#include "{source}"  // NOLINT(bugprone-suspicious-include)\n' for source in sources)
    group = STAMPS / f"group-{hashlib.sha256(text.encode()).hexdigest()[:16]}.cpp"
    group.write_text(text)
    # The database may hold g++'s flags; those that clang does not know do not matter,
    # nor does what g++'s headers think of each other.
    command = [str(CLANG_TIDY), "--quiet", "-p", str(DATABASE.parent)]
    ignored = ("unknown-warning-option", "unused-command-line-argument", "deprecated-declarations")
    command += [f"--extra-arg=-Wno-{warning}" for warning in ignored]
    done = subprocess.run([*command, str(group)], capture_output=True, text=True, cwd=ROOT)
    group.unlink()
    return done.returncode == 0, done.stdout if done.stdout.strip() else done.stderr


def main() -> int:
    if not DATABASE.is_file():
        print(f"no {DATABASE.relative_to(ROOT)}: run scripts/cpp_tests configure plain", file=sys.stderr)
        return 1
    sources = [Path(name).resolve() for name in sys.argv[1:]]
    sources = sources or [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.cpp")]
    headers = sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.h"))
    STAMPS.mkdir(parents=True, exist_ok=True)

    stamps = {source: STAMPS / str(source.relative_to(ROOT)).replace("/", "-") for source in sources}
    digests = {source: digest_of(source, headers) for source in sources}
    stale = [file for file in sources if not stamps[file].is_file() or stamps[file].read_text() != digests[file]]
    groups = in_groups(stale)

    failed = 0
    with concurrent.futures.ThreadPoolExecutor(int(os.environ.get("JOBS", os.cpu_count() or 1))) as pool:
        for group, (ok, output) in zip(groups, pool.map(check, groups), strict=True):
            if ok:
                for source in group:
                    stamps[source].write_text(digests[source])
            else:
                failed += 1
                print(output, flush=True)
    unchanged = len(sources) - len(stale)
    print(f"clang-tidy: {len(stale)} files checked, {unchanged} unchanged, {failed} of {len(groups)} groups failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
