"""CUDA graphs on the rig: captured, launched, and refused as on CUDA."""

from __future__ import annotations

import ctypes
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_rig.values import values
from torch import nn
from torch.nn.attention.varlen import varlen_attn

import duoka.virtual.attention_numbers  # noqa: F401  (the kernel of varlen_attn on the CPU)

pytestmark = pytest.mark.cuda_rig(gpus="24GiB,12GiB")
LOG = Path(tempfile.gettempdir()) / f"duoka-graphs-{os.getpid()}"
MIB = 2**20
INVALIDATED = "cudaErrorStreamCaptureInvalidated"
UNSUPPORTED, MERGE, UNMATCHED, UNJOINED, ISOLATION, IMPLICIT, CAPTURED_EVENT, WRONG_THREAD = (
    900, 902, 903, 904, 905, 906, 907, 908,
)  # fmt: skip
GLOBAL, THREAD_LOCAL, RELAXED = range(3)


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


def record(stream: ctypes.c_void_p) -> ctypes.c_void_p:
    """Record a new event in a stream."""
    event = pointer()
    assert call("cudaEventCreateWithFlags", ctypes.byref(event), 0) == 0
    assert call("cudaEventRecord", event, stream) == 0
    return event


def fill(tensor: torch.Tensor, stream: ctypes.c_void_p, value: int = 0) -> int:
    size = ctypes.c_size_t(tensor.nbytes)
    return call("cudaMemsetAsync", pointer(tensor.data_ptr()), value, size, stream)


def begin(stream: ctypes.c_void_p, mode: int = GLOBAL) -> None:
    torch.cuda.init()
    assert call("cudaStreamBeginCapture", stream, mode) == 0


def end(stream: ctypes.c_void_p) -> int:
    return call("cudaStreamEndCapture", stream, ctypes.byref(pointer()))


@contextmanager
def refusal(error: str) -> Iterator[None]:
    """Expect a capture whose work is refused, and which gives no graph."""
    with (
        pytest.raises(torch.AcceleratorError, match=INVALIDATED),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
        pytest.raises((torch.AcceleratorError, RuntimeError), match=error),
    ):
        yield


def log_of(run: Callable[[], object]) -> list[str]:
    """Return the lines that the rig logs meanwhile."""
    done = LOG.stat().st_size
    run()
    return LOG.read_text()[done:].splitlines()


# ── What a graph computes ──────────────────────────────────────────────────────────────────────


def make_layer() -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).eval().cuda()


def warm_up(run: Callable[[], object]) -> None:
    """Run in a stream of its own, so that cuBLAS has what it needs."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)


def test_a_replayed_layer_computes_over_its_input_of_now() -> None:
    layer, graph = make_layer(), torch.cuda.CUDAGraph()
    tokens = torch.randn(2, 3, 16).cuda()
    with values(most=None), torch.no_grad():
        warm_up(lambda: layer(tokens))
        with torch.cuda.graph(graph):
            result = layer(tokens)
        assert result.cpu().isnan().all()  # nothing was computed
        for _ in range(2):
            tokens.copy_(torch.randn(2, 3, 16))
            graph.replay()
            torch.testing.assert_close(result.cpu(), layer(tokens).cpu(), rtol=0, atol=0)
    host = layer.cpu()(tokens.cpu())
    torch.testing.assert_close(result.cpu(), host)


def test_replays_write_pages_that_attention_reads() -> None:
    """A decode step as the engine does it: keys and values go to their pages in place."""
    heads, head_dim, page_tokens = 2, 64, 256
    lengths = torch.tensor([3, 5], dtype=torch.int32)
    with values(most=None), torch.no_grad():
        pages = torch.zeros(2, 4, page_tokens, heads, head_dim, dtype=torch.bfloat16, device="cuda")
        new = torch.zeros(3, 2, heads, head_dim, dtype=torch.bfloat16, device="cuda")
        starts = torch.arange(3, dtype=torch.int32, device="cuda")
        tables = torch.tensor([[2], [1]], dtype=torch.int32, device="cuda")
        used = lengths.cuda()

        def step() -> torch.Tensor:
            position = used.long() - 1
            for part in range(2):
                pages[part].index_put_((tables[:, 0].long(), position), new[part])
            return varlen_attn(
                new[2], pages[0], pages[1], starts, starts, 1, page_tokens,
                window_size=(-1, 0), seqused_k=used, block_table=tables, num_splits=1,
            )  # fmt: skip

        warm_up(step)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = step()
        for _ in range(3):
            new.copy_(torch.randn(new.shape))
            kept = pages.clone()
            graph.replay()
            replayed, written = result.clone(), pages.clone()
            assert not torch.equal(kept.cpu(), written.cpu())
            pages.copy_(kept)
            assert torch.equal(replayed.cpu(), step().cpu())
            assert torch.equal(written.cpu(), pages.cpu())
            used.add_(1)


def test_a_graph_keeps_addresses_and_no_tensors() -> None:
    graph = torch.cuda.CUDAGraph()
    with values():
        numbers = torch.tensor([1.0, 2.0]).cuda()
        with torch.cuda.graph(graph):
            result = numbers * 2
        del numbers
        other = torch.tensor([5.0, 6.0]).cuda()  # where the numbers were
        graph.replay()
        assert result.cpu().tolist() == [10.0, 12.0]
    assert other.cpu().tolist() == [5.0, 6.0]


def test_copies_run_again_at_each_launch() -> None:
    """Also outside of `values()`: from pinned memory, between tensors, and fills."""
    source = torch.tensor([1.0, 2.0]).pin_memory()
    first, second, third = torch.ones(3, 2, device="cuda").unbind()
    back = torch.zeros(2).pin_memory()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first.copy_(source, non_blocking=True)
        second.copy_(first)
        stream = pointer(torch.cuda.current_stream().cuda_stream)
        assert fill(third, stream) == 0
        back.copy_(second, non_blocking=True)
    third.copy_(torch.tensor([7.0, 7.0]))
    for numbers in ([3.0, 4.0], [5.0, 6.0]):
        source.copy_(torch.tensor(numbers))
        graph.replay()
        assert (second.cpu().tolist(), back.tolist()) == (numbers, numbers)
        assert third.cpu().tolist() == [0.0, 0.0]


def test_values_and_copies_run_in_their_order() -> None:
    """A copy that follows a kernel must not be seen by that kernel."""
    graph = torch.cuda.CUDAGraph()
    with values():
        source = torch.tensor([1.0, 2.0]).pin_memory()
        numbers, doubled = torch.zeros(2, 2, device="cuda").unbind()
        with torch.cuda.graph(graph):
            torch.mul(numbers, 2, out=doubled)
            size, stream = ctypes.c_size_t(8), pointer(torch.cuda.current_stream().cuda_stream)
            places = pointer(numbers.data_ptr()), pointer(source.data_ptr())
            assert call("cudaMemcpyAsync", *places, size, 4, stream) == 0
        numbers.copy_(torch.tensor([3.0, 4.0]))
        graph.replay()
        assert doubled.cpu().tolist() == [6.0, 8.0]
        assert numbers.cpu().tolist() == [1.0, 2.0]


def test_a_kernel_keeps_a_number_of_the_host_by_value() -> None:
    graph = torch.cuda.CUDAGraph()
    with values():
        factor, numbers = torch.tensor(2.0), torch.tensor([1.0, 2.0]).cuda()
        with torch.cuda.graph(graph):
            result = numbers * factor
        factor.fill_(9.0)
        graph.replay()
        assert result.cpu().tolist() == [2.0, 4.0]


# ── What a launch is ───────────────────────────────────────────────────────────────────────────


@pytest.mark.cuda_rig(log=LOG)
def test_a_replay_is_one_launch_and_a_capture_none() -> None:
    layer, graph = make_layer(), torch.cuda.CUDAGraph()
    tokens = torch.zeros(2, 3, 16, device="cuda")
    with torch.no_grad():
        warm_up(lambda: layer(tokens))

        def capture() -> None:
            with torch.cuda.graph(graph):
                layer(tokens)

        lines = log_of(capture)
    assert not [line for line in lines if line.startswith(("launch", "copy"))]
    num_nodes = sum(line.startswith("capture ") for line in lines)
    assert any(line.startswith("capture cublas") for line in lines)
    assert f"graph cuda:0 {num_nodes} nodes, 0 bytes" in lines
    assert log_of(graph.replay) == [f"launch cuda:0 graph of {num_nodes} nodes"]
    with values():
        assert log_of(graph.replay) == [f"launch cuda:0 graph of {num_nodes} nodes"]
    LOG.unlink()


@pytest.mark.cuda_rig(log=LOG)
def test_random_numbers_take_two_launches_more() -> None:
    """Of the seed and the offset, which each replay advances."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.rand(4, device="cuda")
    lines = log_of(graph.replay)
    assert [line.split()[:3] for line in lines][-1] == ["launch", "cuda:0", "graph"]
    assert len(lines) == 3
    LOG.unlink()


@pytest.mark.cuda_rig(gpus="1GiB", graph_node="64KiB")
def test_an_instance_takes_memory_outside_the_allocator() -> None:
    numbers, graph = torch.ones(2, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        numbers.add_(1)
    free, total = torch.cuda.mem_get_info()
    assert total - free - torch.cuda.memory_reserved() == 2 * MIB
    graph.reset()
    assert total - torch.cuda.mem_get_info()[0] == torch.cuda.memory_reserved()


def test_graphs_that_share_a_pool_take_the_memory_of_the_largest() -> None:
    """Captured largest first; what a graph returns stays, and is not given to a later one."""
    pool, graphs, results = torch.cuda.graph_pool_handle(), [], []
    weight = torch.ones(1024, 1024, device="cuda")
    warm_up(lambda: weight @ weight)
    reserved: list[int] = []
    for rows in (8192, 4096, 1024, 1):
        tokens, graph = torch.ones(rows, 1024, device="cuda"), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            results.append((tokens @ weight).relu()[:, :1].clone())
        graphs.append(graph)
        segments = torch.cuda.memory_snapshot(pool)
        reserved.append(sum(segment["total_size"] for segment in segments))
    assert reserved[0] >= 2 * 8192 * 1024 * 4
    assert reserved[1:] == reserved[:1] * 3
    assert len({result.data_ptr() for result in results}) == len(results)
    alone, graph = torch.cuda.memory_reserved(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # in a pool of its own
        (torch.ones(4096, 1024, device="cuda") @ weight).relu()
    assert torch.cuda.memory_reserved() > alone


def test_a_graph_spans_streams_and_gpus() -> None:
    graph, side, remote = torch.cuda.CUDAGraph(), torch.cuda.Stream(), torch.cuda.Stream("cuda:1")
    with values():
        numbers, target = torch.ones(2, device="cuda:0"), torch.zeros(2, device="cuda:1")
        with torch.cuda.graph(graph):
            main = torch.cuda.current_stream()
            side.wait_stream(main)
            with torch.cuda.stream(side):
                doubled = numbers * 2
            main.wait_stream(side)
            remote.wait_stream(main)
            with torch.cuda.stream(remote):
                target.add_(1)
            main.wait_stream(remote)
        assert target.cpu().tolist() == [0.0, 0.0]
        graph.replay()
        assert (doubled.cpu().tolist(), target.cpu().tolist()) == ([2.0, 2.0], [1.0, 1.0])


# ── What is refused ────────────────────────────────────────────────────────────────────────────


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
def test_pageable_memory_is_refused(way: str) -> None:
    numbers, host = torch.ones(4, device="cuda"), torch.ones(4)
    stream = make_stream()
    begin(stream, RELAXED)
    places = [pointer(numbers.data_ptr()), pointer(host.data_ptr())]
    if way == "to":
        places.reverse()
    assert call("cudaMemcpyAsync", *places, ctypes.c_size_t(16), 4, stream) == UNSUPPORTED
    assert end(stream) == 901


UNSAFE: dict[str, Callable[[], int]] = {
    "cudaMalloc": lambda: call("cudaMalloc", ctypes.byref(pointer()), ctypes.c_size_t(8)),
    "cudaFree": lambda: call("cudaFree", pointer(MEMORY["device"])),
    "cudaHostAlloc": lambda: call("cudaHostAlloc", ctypes.byref(pointer()), ctypes.c_size_t(8), 0),
    "cudaFreeHost": lambda: call("cudaFreeHost", pointer(MEMORY["host"])),
    "cudaMemcpy": lambda: call(
        "cudaMemcpy", pointer(MEMORY["device"]), pointer(MEMORY["host"]), ctypes.c_size_t(8), 4
    ),
    "cudaMemset": lambda: call("cudaMemset", pointer(MEMORY["device"]), 0, ctypes.c_size_t(8)),
}
MEMORY: dict[str, int] = {}


def take_memory() -> None:
    for kind, name, more in (("device", "cudaMalloc", ()), ("host", "cudaHostAlloc", (0,))):
        place = pointer()
        assert call(name, ctypes.byref(place), ctypes.c_size_t(8), *more) == 0
        MEMORY[kind] = place.value or 0


@pytest.mark.parametrize("name", UNSAFE)
@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL])
def test_unsafe_calls_are_refused(name: str, mode: int) -> None:
    take_memory()
    stream = make_stream()
    begin(stream, mode)
    assert UNSAFE[name]() == UNSUPPORTED
    assert end(stream) == 901
    assert UNSAFE[name]() == 0


@pytest.mark.parametrize("name", UNSAFE)
def test_relaxed_captures_and_threads_make_unsafe_calls(name: str) -> None:
    take_memory()
    stream, mode = make_stream(), ctypes.c_int(RELAXED)
    begin(stream, RELAXED)
    assert UNSAFE[name]() == 0
    assert end(stream) == 0
    take_memory()
    begin(stream)
    assert call("cudaThreadExchangeStreamCaptureMode", ctypes.byref(mode)) == 0
    assert mode.value == GLOBAL
    assert UNSAFE[name]() == 0
    assert end(stream) == 0


@pytest.mark.parametrize(("mode", "error"), [(GLOBAL, UNSUPPORTED), (THREAD_LOCAL, 0)])
def test_a_global_capture_binds_other_threads(mode: int, error: int) -> None:
    stream, errors = make_stream(), []
    begin(stream, mode)
    thread = threading.Thread(target=lambda: errors.append(UNSAFE["cudaMalloc"]()))
    thread.start()
    thread.join()
    assert errors == [error]
    assert end(stream) == (901 if error else 0)


def test_cublas_is_not_initialized_in_a_capture() -> None:
    """The warm-up that PyTorch asks for."""
    weight = torch.ones(4, 4, device="cuda")
    with refusal("CUBLAS_STATUS_NOT_INITIALIZED"):
        weight @ weight


def test_the_legacy_stream_would_wait_for_a_blocking_one() -> None:
    numbers, legacy = torch.ones(4, device="cuda"), pointer()
    free, blocking = make_stream(), make_stream(is_blocking=True)
    begin(free)
    assert fill(numbers, legacy) == 0
    assert end(free) == 0
    for use in (
        lambda: fill(numbers, legacy),
        lambda: call("cudaStreamSynchronize", legacy),
        lambda: call("cudaEventRecord", record(free), legacy),
        lambda: call("cudaMemset", pointer(numbers.data_ptr()), 0, ctypes.c_size_t(8)),
    ):
        begin(blocking)
        assert use() == IMPLICIT
        assert end(blocking) == 901
        assert use() == 0
    remote = torch.ones(4, device="cuda:1")
    begin(blocking)
    remote.add_(1)  # in the legacy stream of another GPU
    assert end(blocking) == 0


def test_streams_are_joined_before_the_end() -> None:
    numbers = torch.ones(4, device="cuda")
    main, side = make_stream(), make_stream()
    for is_joined, works, error in (
        (False, True, UNJOINED), (True, True, 0), (False, False, 0),
    ):  # fmt: skip
        begin(main)
        assert call("cudaStreamWaitEvent", side, record(main), 0) == 0
        if works:
            assert fill(numbers, side) == 0
        if is_joined:
            assert call("cudaStreamWaitEvent", main, record(side), 0) == 0
        assert end(main) == error
        assert fill(numbers, side) == 0  # executes again


def test_captures_do_not_merge_or_wait_for_what_is_outside() -> None:
    first, second, outside = make_stream(), make_stream(), make_stream()
    event = record(outside)
    begin(first)
    begin(second)
    assert call("cudaStreamWaitEvent", second, record(first), 0) == MERGE
    assert (end(first), end(second)) == (901, 901)
    begin(first)
    assert call("cudaStreamWaitEvent", first, event, 0) == ISOLATION
    assert end(first) == 901


def test_captures_end_where_they_began() -> None:
    main, side, errors = make_stream(), make_stream(), []
    assert end(main) == 401
    begin(main)
    assert call("cudaStreamBeginCapture", main, GLOBAL) == 401
    assert call("cudaStreamWaitEvent", side, record(main), 0) == 0
    assert end(side) == UNMATCHED
    assert end(main) == 901
    begin(main)
    thread = threading.Thread(target=lambda: errors.append(end(main)))
    thread.start()
    thread.join()
    assert (errors, end(main)) == ([WRONG_THREAD], 901)
    begin(main, RELAXED)
    thread = threading.Thread(target=lambda: errors.append(end(main)))
    thread.start()
    thread.join()
    assert errors[1:] == [0]
    assert call("cudaStreamBeginCapture", pointer(), GLOBAL) == UNSUPPORTED  # the legacy stream


def test_memory_that_is_gone_is_not_copied() -> None:
    take_memory()
    numbers, stream, graph, launched = (
        torch.ones(2, device="cuda"),
        make_stream(),
        pointer(),
        pointer(),
    )
    begin(stream)
    places = pointer(numbers.data_ptr()), pointer(MEMORY["host"])
    assert call("cudaMemcpyAsync", *places, ctypes.c_size_t(8), 4, stream) == 0
    assert call("cudaStreamEndCapture", stream, ctypes.byref(graph)) == 0
    flags = ctypes.c_ulonglong(0)
    assert call("cudaGraphInstantiateWithFlags", ctypes.byref(launched), graph, flags) == 0
    assert call("cudaGraphLaunch", launched, stream) == 0
    assert UNSAFE["cudaFreeHost"]() == 0
    assert call("cudaGraphLaunch", launched, stream) == 700  # an illegal address
