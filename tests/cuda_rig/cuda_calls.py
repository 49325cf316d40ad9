"""Calls of CUDA's runtime past PyTorch: streams, captures and memory, by ctypes."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from typing import Any

import torch

GLOBAL, THREAD_LOCAL, RELAXED = range(3)  # modes of capture
ILLEGAL_STATE, ILLEGAL_ADDRESS, UNSUPPORTED, INVALIDATED = 401, 700, 900, 901
MERGE, UNMATCHED, UNJOINED, ISOLATION, IMPLICIT, CAPTURED_EVENT, WRONG_THREAD = range(902, 909)


def call(name: str, *arguments: Any) -> int:
    """Call a function of CUDA's runtime; its error doesn't stay for PyTorch's next check."""
    cuda = ctypes.CDLL(None)
    error: int = getattr(cuda, name)(*arguments)
    cuda.cudaGetLastError()
    return error


def pointer(value: int = 0) -> ctypes.c_void_p:
    return ctypes.c_void_p(value)


def make_stream(*, is_blocking: bool = False) -> ctypes.c_void_p:
    stream = pointer()
    assert call("cudaStreamCreateWithFlags", ctypes.byref(stream), int(not is_blocking)) == 0
    return stream


def record_event(stream: ctypes.c_void_p) -> ctypes.c_void_p:
    """Record a new event in a stream."""
    event = pointer()
    assert call("cudaEventCreateWithFlags", ctypes.byref(event), 0) == 0
    assert call("cudaEventRecord", event, stream) == 0
    return event


def fill(tensor: torch.Tensor, stream: ctypes.c_void_p, value: int = 0) -> int:
    size = ctypes.c_size_t(tensor.nbytes)
    return call("cudaMemsetAsync", pointer(tensor.data_ptr()), value, size, stream)


def begin_capture(stream: ctypes.c_void_p, mode: int = GLOBAL) -> None:
    torch.cuda.init()
    assert call("cudaStreamBeginCapture", stream, mode) == 0


def end_capture(stream: ctypes.c_void_p) -> int:
    return call("cudaStreamEndCapture", stream, ctypes.byref(pointer()))


UNSAFE_CALLS: dict[str, Callable[[], int]] = {
    "cudaMalloc": lambda: call("cudaMalloc", ctypes.byref(pointer()), ctypes.c_size_t(8)),
    "cudaFree": lambda: call("cudaFree", place_of("device")),
    "cudaHostAlloc": lambda: call("cudaHostAlloc", ctypes.byref(pointer()), ctypes.c_size_t(8), 0),
    "cudaFreeHost": lambda: call("cudaFreeHost", place_of("pinned")),
    "cudaHostRegister": lambda: call("cudaHostRegister", place_of("page"), ctypes.c_size_t(8), 0),
    "cudaHostUnregister": lambda: call("cudaHostUnregister", place_of("registered")),
    "cudaMemcpy": lambda: call(
        "cudaMemcpy", place_of("device"), place_of("pinned"), ctypes.c_size_t(8), 4
    ),
    "cudaMemset": lambda: call("cudaMemset", place_of("device"), 0, ctypes.c_size_t(8)),
}
MEMORY: dict[str, int] = {}
PAGES: list[mmap.mmap] = []  # kept, since the rig knows their addresses


def place_of(kind: str) -> ctypes.c_void_p:
    return pointer(MEMORY[kind])


def take_memory() -> None:
    """Fill `MEMORY` with new memory, a page of each kind."""
    for kind, name, more in (("device", "cudaMalloc", ()), ("pinned", "cudaHostAlloc", (0,))):
        place = pointer()
        assert call(name, ctypes.byref(place), ctypes.c_size_t(8), *more) == 0
        MEMORY[kind] = place.value or 0
    for kind in ("page", "registered"):
        PAGES.append(mmap.mmap(-1, mmap.PAGESIZE))
        MEMORY[kind] = ctypes.addressof(ctypes.c_char.from_buffer(PAGES[-1]))
    assert call("cudaHostRegister", place_of("registered"), ctypes.c_size_t(8), 0) == 0
