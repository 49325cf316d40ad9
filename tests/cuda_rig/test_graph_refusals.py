"""What CUDA refuses while a graph is captured, with CUDA's own errors."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from cuda_rig.cuda_calls import (
    CAPTURED_EVENT,
    GLOBAL,
    ILLEGAL_STATE,
    IMPLICIT,
    INVALIDATED,
    ISOLATION,
    MERGE,
    RELAXED,
    THREAD_LOCAL,
    UNJOINED,
    UNMATCHED,
    UNSAFE_CALLS,
    UNSUPPORTED,
    WRONG_THREAD,
    begin_capture,
    call,
    end_capture,
    fill,
    make_stream,
    pointer,
    record_event,
    take_memory,
)
from cuda_rig.values import values

pytestmark = pytest.mark.cuda_rig(gpus="24GiB,12GiB")


@contextmanager
def refusal(error: str) -> Iterator[None]:
    """Expect a capture whose work is refused, and which gives no graph."""
    with (
        pytest.raises(torch.AcceleratorError, match="cudaErrorStreamCaptureInvalidated"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
        pytest.raises((torch.AcceleratorError, RuntimeError), match=error),
    ):
        yield


@pytest.mark.parametrize(
    "wait",
    [
        lambda: torch.cuda.current_stream().synchronize(),
        lambda: torch.cuda.current_stream().query(),
        lambda: torch.cuda.synchronize(),
        lambda: torch.ones(2, device="cuda").sum().item(),
        lambda: torch.ones(2, device="cuda").nonzero(),
    ],
    ids=["stream", "query", "device", "item", "nonzero"],
)
@pytest.mark.parametrize("computes", [False, True], ids=["", "values"])
def test_waiting_is_refused(wait: Callable[[], object], computes: bool) -> None:
    torch.ones(2, device="cuda").nonzero()
    with values() if computes else torch.no_grad(), refusal("cudaErrorStreamCaptureUnsupported"):
        wait()


@pytest.mark.parametrize("wait", [torch.cuda.Event.query, torch.cuda.Event.synchronize])
def test_waiting_for_events_is_refused(wait: Callable[[torch.cuda.Event], object]) -> None:
    event = torch.cuda.Event()
    event.record()
    with refusal("cudaErrorStreamCaptureUnsupported"):
        wait(event)


@pytest.mark.parametrize("wait", [torch.cuda.Event.query, torch.cuda.Event.synchronize])
def test_a_captured_event_is_never_over(wait: Callable[[torch.cuda.Event], object]) -> None:
    event = torch.cuda.Event()
    with refusal("cudaErrorCapturedEvent"):
        event.record()
        wait(event)


@pytest.mark.parametrize("way", ["to", "from"])
def test_pytorch_refuses_pageable_memory(way: str) -> None:
    numbers, host = torch.ones(4, device="cuda"), torch.ones(4)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        numbers.add_(1)
        with pytest.raises(RuntimeError, match="unless the CPU tensor is pinned"):
            numbers.copy_(host) if way == "to" else numbers.cpu()


@pytest.mark.parametrize("way", ["to", "from"])
def test_pageable_memory_is_refused(way: str) -> None:
    numbers, host = torch.ones(4, device="cuda"), torch.ones(4)
    stream = make_stream()
    begin_capture(stream, RELAXED)
    places = [pointer(numbers.data_ptr()), pointer(host.data_ptr())]
    if way == "to":
        places.reverse()
    assert call("cudaMemcpyAsync", *places, ctypes.c_size_t(16), 4, stream) == UNSUPPORTED
    assert end_capture(stream) == INVALIDATED


@pytest.mark.parametrize("name", UNSAFE_CALLS)
@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL])
def test_unsafe_calls_are_refused(name: str, mode: int) -> None:
    take_memory()
    stream = make_stream()
    begin_capture(stream, mode)
    assert UNSAFE_CALLS[name]() == UNSUPPORTED
    assert end_capture(stream) == INVALIDATED
    assert UNSAFE_CALLS[name]() == 0


@pytest.mark.parametrize("name", UNSAFE_CALLS)
def test_relaxed_captures_and_threads_make_unsafe_calls(name: str) -> None:
    take_memory()
    stream, mode = make_stream(), ctypes.c_int(RELAXED)
    begin_capture(stream, RELAXED)
    assert UNSAFE_CALLS[name]() == 0
    assert end_capture(stream) == 0
    take_memory()
    begin_capture(stream)
    assert call("cudaThreadExchangeStreamCaptureMode", ctypes.byref(mode)) == 0
    assert mode.value == GLOBAL
    assert UNSAFE_CALLS[name]() == 0
    assert end_capture(stream) == 0


@pytest.mark.parametrize(("mode", "error"), [(GLOBAL, UNSUPPORTED), (THREAD_LOCAL, 0)])
def test_a_global_capture_binds_other_threads(mode: int, error: int) -> None:
    stream, errors = make_stream(), []
    begin_capture(stream, mode)
    thread = threading.Thread(target=lambda: errors.append(UNSAFE_CALLS["cudaMalloc"]()))
    thread.start()
    thread.join()
    assert errors == [error]
    assert end_capture(stream) == (INVALIDATED if error else 0)


def test_cublas_is_not_initialized_in_a_capture() -> None:
    """The warm-up that PyTorch asks for."""
    weight = torch.ones(4, 4, device="cuda")
    with refusal("CUBLAS_STATUS_NOT_INITIALIZED"):
        weight @ weight


def test_the_legacy_stream_would_wait_for_a_blocking_one() -> None:
    numbers, legacy = torch.ones(4, device="cuda"), pointer()
    free, blocking = make_stream(), make_stream(is_blocking=True)
    begin_capture(free)
    assert fill(numbers, legacy) == 0
    assert end_capture(free) == 0
    for use in (
        lambda: fill(numbers, legacy),
        lambda: call("cudaStreamSynchronize", legacy),
        lambda: call("cudaEventRecord", record_event(free), legacy),
        lambda: call("cudaMemset", pointer(numbers.data_ptr()), 0, ctypes.c_size_t(8)),
    ):
        begin_capture(blocking)
        assert use() == IMPLICIT
        assert end_capture(blocking) == INVALIDATED
        assert use() == 0
    remote = torch.ones(4, device="cuda:1")
    begin_capture(blocking)
    remote.add_(1)  # in the legacy stream of another GPU
    assert end_capture(blocking) == 0


def test_streams_are_joined_before_the_end() -> None:
    numbers = torch.ones(4, device="cuda")
    main, side = make_stream(), make_stream()
    for is_joined, works, error in (
        (False, True, UNJOINED), (True, True, 0), (False, False, 0),
    ):  # fmt: skip
        begin_capture(main)
        assert call("cudaStreamWaitEvent", side, record_event(main), 0) == 0
        if works:
            assert fill(numbers, side) == 0
        if is_joined:
            assert call("cudaStreamWaitEvent", main, record_event(side), 0) == 0
        assert end_capture(main) == error
        assert fill(numbers, side) == 0  # executes again


def test_captures_do_not_merge_or_wait_for_what_is_outside() -> None:
    first, second, outside = make_stream(), make_stream(), make_stream()
    event = record_event(outside)
    begin_capture(first)
    begin_capture(second)
    assert call("cudaStreamWaitEvent", second, record_event(first), 0) == MERGE
    assert (end_capture(first), end_capture(second)) == (INVALIDATED, INVALIDATED)
    begin_capture(first)
    assert call("cudaStreamWaitEvent", first, event, 0) == ISOLATION
    assert end_capture(first) == INVALIDATED


def test_events_of_a_capture_serve_no_other() -> None:
    stream, other, legacy = make_stream(), make_stream(), pointer()
    begin_capture(stream)
    event = record_event(stream)
    assert call("cudaStreamWaitEvent", legacy, event, 0) == IMPLICIT
    assert end_capture(stream) == INVALIDATED
    begin_capture(stream)
    event = record_event(stream)
    assert end_capture(stream) == 0
    assert call("cudaStreamWaitEvent", other, event, 0) == CAPTURED_EVENT
    assert call("cudaEventQuery", event) == CAPTURED_EVENT
    time = ctypes.byref(ctypes.c_float())
    assert call("cudaEventElapsedTime", time, record_event(other), event) == CAPTURED_EVENT
    assert call("cudaEventRecord", event, other) == 0
    assert call("cudaEventQuery", event) == 0


def test_callbacks_are_refused_and_host_functions_run_at_each_launch() -> None:
    calls: list[None] = []
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: calls.append(None))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream = pointer(torch.cuda.current_stream().cuda_stream)
        assert call("cudaLaunchHostFunc", stream, function, None) == 0
    assert not calls
    graph.replay()
    graph.replay()
    assert len(calls) == 2
    stream = make_stream()
    begin_capture(stream)
    assert call("cudaStreamAddCallback", stream, function, None, 0) == UNSUPPORTED
    assert (end_capture(stream), len(calls)) == (INVALIDATED, 2)


def test_a_destroyed_stream_invalidates_its_capture() -> None:
    main, side = make_stream(), make_stream()
    begin_capture(main)
    assert call("cudaStreamWaitEvent", side, record_event(main), 0) == 0
    assert call("cudaStreamDestroy", side) == 0
    assert end_capture(main) == INVALIDATED
    begin_capture(main)
    assert call("cudaStreamDestroy", main) == 0
    assert UNSAFE_CALLS["cudaMalloc"]() == 0


def test_the_legacy_stream_is_not_asked_during_a_blocking_capture() -> None:
    stream, status = make_stream(is_blocking=True), ctypes.c_int()
    begin_capture(stream)
    assert call("cudaStreamIsCapturing", pointer(), ctypes.byref(status)) == IMPLICIT
    assert call("cudaStreamIsCapturing", stream, ctypes.byref(status)) == 0
    assert status.value == 1
    assert end_capture(stream) == 0


def test_captures_end_where_they_began() -> None:
    main, side, errors = make_stream(), make_stream(), []
    assert end_capture(main) == ILLEGAL_STATE
    begin_capture(main)
    assert call("cudaStreamBeginCapture", main, GLOBAL) == ILLEGAL_STATE
    assert call("cudaStreamWaitEvent", side, record_event(main), 0) == 0
    assert end_capture(side) == UNMATCHED
    assert end_capture(main) == INVALIDATED
    begin_capture(main)
    thread = threading.Thread(target=lambda: errors.append(end_capture(main)))
    thread.start()
    thread.join()
    assert (errors, end_capture(main)) == ([WRONG_THREAD], INVALIDATED)
    begin_capture(main, RELAXED)
    thread = threading.Thread(target=lambda: errors.append(end_capture(main)))
    thread.start()
    thread.join()
    assert errors[1:] == [0]
    assert call("cudaStreamBeginCapture", pointer(), GLOBAL) == UNSUPPORTED  # the legacy stream
