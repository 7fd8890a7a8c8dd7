"""What tests do to the stand-in, beside CUDA's own calls (driver/control.h)."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

OUT_OF_MEMORY = 2
NOT_SUPPORTED = 801
CAPTURE_UNSUPPORTED = 900
CAPTURE_INVALIDATED = 901
CAPTURE_IMPLICIT = 906


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libcuda.so.1")
        library.standin_calls.restype = ctypes.c_size_t
    except (OSError, AttributeError):
        return None
    return library


def is_here() -> bool:
    """Is this process's CUDA the stand-in?"""
    return _library() is not None


def less(number: int, by: int) -> int:
    """``number``; on the stand-in, whose kernels are the CPU's, a ``by``-th of it."""
    return number // by if is_here() else number


def driver() -> ctypes.CDLL:
    """The driver's entry points, for calls that torch does not know of."""
    library = _library()
    assert library is not None, "not the stand-in"
    return library


def _handle(stream: torch.cuda.Stream) -> ctypes.c_void_p:
    torch.cuda.mem_get_info(stream.device)  # its context is this thread's now
    return ctypes.c_void_p(stream.cuda_stream)


PATIENCE_S = 20.0


@contextmanager
def held(stream: torch.cuda.Stream, seconds: float | None = None) -> Iterator[None]:
    """Nothing that is queued on the stream is done before the end of this, or before ``seconds`` have passed.

    Without ``seconds`` nobody may wait for it inside: after a while it is let go, and the test fails.
    """
    handle, over = _handle(stream), threading.Event()

    def let_go() -> None:
        over.set()
        driver().standin_release(handle)

    timer = threading.Timer(PATIENCE_S if seconds is None else seconds, let_go)
    driver().standin_hold(handle)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        driver().standin_release(handle)
    assert seconds is not None or not over.is_set(), "something waited for a stream that was held"


def calls(name: str) -> int:
    """Calls of an entry point so far, by its name in the documentation."""
    return int(driver().standin_calls(name.encode()))


@contextmanager
def failing(name: str, nth: int = 1, code: int = OUT_OF_MEMORY) -> Iterator[None]:
    """Inside, the ``nth`` call of an entry point from now on does nothing but answer ``code``."""
    driver().standin_fail(name.encode(), ctypes.c_size_t(nth), code)
    try:
        yield
    finally:
        driver().standin_fail_no_more()
