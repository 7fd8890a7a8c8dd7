"""A Python that has imported torch and torch_vmm, and forks for each script that it is sent.

Each script runs in a process of its own, as ``__main__``, from its first line
to the interpreter's end, without the seconds that importing torch takes. The
server itself has used neither. tests/helpers.py talks to it: a line of JSON
with ``code``, ``environment``, ``stdout`` and ``stderr`` (paths) comes in, a
line with the child's process id goes out; a line with ``wait`` (that id) and
``timeout`` (seconds) is answered by its exit code (negative: the signal).
"""

import gc
import json
import os
import signal
import sys
import time

import torch

# The first step of an optimizer imports it, which takes as long as torch. Not
# Triton with it: what is frozen below is not collected at the end, and the leak
# check of its bindings (nanobind) would complain on every script's stderr.
sys.modules["triton"] = None  # type: ignore[assignment]
import torch._dynamo  # noqa: E402, F401

del sys.modules["triton"]

import torch_vmm  # noqa: E402, F401

gc.collect()
gc.freeze()  # a collection in a child looks at the child's own objects only


def wait(child: int, seconds: float) -> int:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -signal.SIGKILL


def become(request: dict) -> str:
    """In the child: takes its place, and returns what it is to run."""
    os.environ.update(request["environment"])
    for stream, path in ((0, os.devnull), (1, request["stdout"]), (2, request["stderr"])):
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.dup2(file, stream)
        os.close(file)
    sys.stdin = os.fdopen(0)
    return request["code"]


script = ""
for line in sys.stdin:
    request = json.loads(line)
    if "wait" in request:
        print(wait(request["wait"], request["timeout"]), flush=True)
        continue
    if (child := os.fork()) == 0:
        script = become(request)
        break
    print(child, flush=True)

if script:
    # Nothing of the server is left in the script's globals.
    for name in [name for name in globals() if not name.startswith("__") and name != "script"]:
        del globals()[name]
    exec(compile(globals().pop("script"), "script", "exec"))
