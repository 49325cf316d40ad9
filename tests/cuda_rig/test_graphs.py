"""CUDA graphs on the rig: what a replay computes, and what it launches and takes."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cuda_rig.cuda_calls import (
    ILLEGAL_ADDRESS,
    UNSAFE_CALLS,
    begin_capture,
    call,
    fill,
    make_stream,
    place_of,
    pointer,
    take_memory,
)
from cuda_rig.values import values
from torch import nn
from torch.nn.attention.varlen import varlen_attn

import duoka.virtual.attention_numbers  # noqa: F401  (the kernel of varlen_attn on the CPU)

pytestmark = pytest.mark.cuda_rig(gpus="24GiB,12GiB")
LOG = Path(tempfile.gettempdir()) / f"duoka-graphs-{os.getpid()}"
MIB = 2**20


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


def test_what_is_drawn_is_as_without_a_graph() -> None:
    def draw() -> torch.Tensor:
        return numbers + torch.empty_like(numbers).exponential_()

    with values():
        numbers, graph = torch.tensor([1.0, 2.0]).cuda(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = draw()
        graph.replay()
        assert result.cpu().tolist() == draw().cpu().tolist()


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


def test_a_graph_is_part_of_another() -> None:
    numbers, source = torch.zeros(2, device="cuda"), torch.tensor([1.0, 2.0]).pin_memory()
    part, whole = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(part):
        numbers.copy_(source, non_blocking=True)
    with torch.cuda.graph(whole):
        part.replay()
    part.reset()
    assert numbers.cpu().tolist() == [0.0, 0.0]
    whole.replay()
    assert numbers.cpu().tolist() == [1.0, 2.0]


@pytest.mark.cuda_rig(lost="0@4")
def test_a_lost_gpu_launches_no_graph() -> None:
    numbers, graph = torch.ones(2, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        numbers.add_(1)
    graph.replay()
    graph.replay()
    with pytest.raises(torch.AcceleratorError, match="unknown error"):
        graph.replay()


def test_memory_that_is_gone_is_not_copied() -> None:
    take_memory()
    numbers, stream = torch.ones(2, device="cuda"), make_stream()
    graph, instance = pointer(), pointer()
    begin_capture(stream)
    places = pointer(numbers.data_ptr()), place_of("pinned")
    assert call("cudaMemcpyAsync", *places, ctypes.c_size_t(8), 4, stream) == 0
    assert call("cudaStreamEndCapture", stream, ctypes.byref(graph)) == 0
    flags = ctypes.c_ulonglong(0)
    assert call("cudaGraphInstantiateWithFlags", ctypes.byref(instance), graph, flags) == 0
    assert call("cudaGraphLaunch", instance, stream) == 0
    assert UNSAFE_CALLS["cudaFreeHost"]() == 0
    assert call("cudaGraphLaunch", instance, stream) == ILLEGAL_ADDRESS
