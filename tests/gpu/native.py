"""The same work under torch's own allocator: one process for the whole session, which never imports torch_vmm.

A process has one allocator, so what is compared runs twice: here, and in a
worker that is started by the first test that asks. Requests and answers are
lines of JSON. The worker starts each workload with an empty cache and holds no
GPU memory between two but its context's.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import IO, Any, Generic, TypeVar

import torch

from tests.helpers import ROOT

T = TypeVar("T")

_WORKLOADS = "tests.gpu.workloads."
_PATIENCE_S = 300.0


class NativeError(RuntimeError):
    """A workload raised in the worker, or the worker ended.

    Attributes:
        type: the exception's class, without its module.
        text: what the exception said.
    """

    def __init__(self, type: str, text: str, where: str = "") -> None:  # noqa: A002
        super().__init__(f"under the native allocator: {type}: {text}\n{where}")
        self.type = type
        self.text = text


class Pending(Generic[T]):
    """A workload that the worker has been sent."""

    def __init__(self, worker: _Worker, number: int) -> None:
        self._worker, self._number = worker, number

    def result(self) -> T:
        """Its result, waited for.

        Raises:
            NativeError: it raised, or the worker ended or gave no answer in time.
        """
        answer = self._worker.answer(self._number)
        if "error" in answer:
            raise NativeError(**answer["error"])
        return answer["result"]  # type: ignore[no-any-return]


def on_native(function: Callable[..., T], **kwargs: Any) -> T:
    """What ``function(**kwargs)`` returns under torch's own allocator.

    Args:
        function: at the top of a module below tests.gpu.workloads.
        kwargs: what JSON can say; so must the result be (tuples come back as lists).

    Raises:
        NativeError: it raised there.
    """
    return begin_on_native(function, **kwargs).result()


def begin_on_native(function: Callable[..., T], **kwargs: Any) -> Pending[T]:
    """The same without waiting: ``result()`` of what is returned does. Workloads run one after another.

    For work that neither fills the GPU nor looks at its free memory: it shares the GPU with what runs here meanwhile.
    """
    if not function.__module__.startswith(_WORKLOADS) or "." in function.__qualname__:
        raise ValueError(f"{function.__module__}.{function.__qualname__} is not at the top of a module of workloads")
    return _worker().send(function, kwargs)


def both(function: Callable[..., T], **kwargs: Any) -> tuple[T, T]:
    """What ``function(**kwargs)`` returns here and under torch's own allocator, one after the other."""
    ours = function(**kwargs)
    return json.loads(json.dumps(ours)), on_native(function, **kwargs)


def start() -> None:
    """Starts the worker, so that its imports overlap with what runs here. It leaves CUDA alone until asked."""
    _worker()


class _Worker:
    """The process, seen from the tests."""

    def __init__(self) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - what it prints; no pipe that could fill up
        ours = ("TORCH_VMM_", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.native"],
            cwd=ROOT,
            env={**environment, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests: IO[bytes] = self._process.stdin
        self._pipe = self._process.stdout.fileno()
        self._sent = 0
        self._begun = b""  # of an answer that has not come whole
        self._answers: list[dict[str, Any]] = []  # in the order of the requests
        self._broken = False
        atexit.register(self.end)

    def usable(self) -> bool:
        return not self._broken and self._process.poll() is None

    def send(self, function: Callable[..., T], kwargs: dict[str, Any]) -> Pending[T]:
        request = {"module": function.__module__, "function": function.__name__, "kwargs": kwargs}
        line = json.dumps(request).encode() + b"\n"
        number, self._sent = self._sent, self._sent + 1
        try:
            self._requests.write(line)
            self._requests.flush()
        except BrokenPipeError:
            pass  # it has ended: who waits for the answer is told
        return Pending(self, number)

    def answer(self, number: int) -> dict[str, Any]:
        deadline = time.monotonic() + _PATIENCE_S
        while len(self._answers) <= number:
            if not select.select([self._pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
                self._process.kill()
                return self._ended(f"no answer in {_PATIENCE_S:.0f} s")
            piece = os.read(self._pipe, 1 << 16)
            if not piece:
                return self._ended(f"the worker ended with status {self._process.wait()}")
            *whole, self._begun = (self._begun + piece).split(b"\n")
            self._answers.extend(json.loads(line) for line in whole)
            self._broken = any("last" in answer for answer in self._answers)
        return self._answers[number]

    def _ended(self, text: str) -> dict[str, Any]:
        self._said.seek(0)
        return {"error": {"type": "WorkerEnded", "text": text, "where": self._said.read().decode()[-8000:]}}

    def end(self) -> None:
        """Its stdin ends, and so does it."""
        try:
            self._requests.close()
            self._process.wait(timeout=20)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()


_current: _Worker | None = None


def _worker() -> _Worker:
    """The session's; a new one where a workload broke the last."""
    global _current
    if _current is None or not _current.usable():
        _current = _Worker()
    return _current


# -- The worker's side -------------------------------------------------------------------------------------------------


def answer_to(line: str) -> dict[str, Any]:
    """Runs what a request asks for, and says how it went. Errors of queued work belong to the workload."""
    try:
        request = json.loads(line)
        module = importlib.import_module(request["module"])
        _expect_native()
        result = getattr(module, request["function"])(**request["kwargs"])
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        json.dumps(result)
        return {"result": result}
    except Exception as error:
        return {"error": {"type": type(error).__name__, "text": str(error), "where": traceback.format_exc()}}


def _expect_native() -> None:
    backend = torch.cuda.memory.get_allocator_backend()
    assert backend == "native", f"the worker's allocator is {backend}"
    assert "torch_vmm" not in sys.modules, "a module of workloads imports torch_vmm"


def _leave_nothing() -> None:
    """Gives all GPU memory back, that of torch's libraries too."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def _serve() -> None:
    # Workloads, and processes that they start, get neither the requests nor the answers' file.
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    for line in requests:
        answer = answer_to(line)
        try:
            _leave_nothing()  # before the answer: whoever gets it may look at the GPU's free memory
        except Exception:
            answer["last"] = True  # after a fault on the GPU this process can do no more
            raise
        finally:
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


if __name__ == "__main__":
    _serve()
