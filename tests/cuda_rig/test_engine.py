"""The engine over CUDA: it takes what was forecast, and ends where its GPU does."""

from __future__ import annotations

import json
import os
import tempfile
import time
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch
import tuning

import duoka
from duoka.cli.main import run
from duoka.engine import Engine, SamplingParams
from duoka.errors import GpuLostError, MachineError
from duoka.forecast.allocator import LARGE_SEGMENT_BYTES, ROUND_BYTES, SMALL_SEGMENT_BYTES
from duoka.runtime.call import try_attention

WORK = duoka.Workload(
    cache="paged", batch=3, prompt_tokens=100, new_tokens=28, dtype="float32",
    prefill_chunk_tokens=20, pages=20,
)  # fmt: skip
# FlashAttention reads pages in place.
HALF = replace(WORK, dtype="bfloat16", page_tokens=256)
WORKS = {"float32": WORK, "bfloat16": HALF}
# The sampled tokens of the step in flight, which a step ahead takes as its own.
AHEAD_BYTES = ROUND_BYTES
PROMPTS = [[*range(length)] for length in (1, 5, 17, 60, 100)]


pytestmark = pytest.mark.usefixtures("engine_computes_small")


@pytest.mark.cuda_rig(gpus="1GiB")
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama", "float32"),
        ("tied", "bfloat16"),
        pytest.param("llama", "bfloat16", marks=pytest.mark.nightly),
        pytest.param("tied", "float32", marks=pytest.mark.nightly),
    ],
)
def test_a_thread_warms_up_and_takes_what_is_forecast(
    family: str, dtype: Any, tmp_path: Path
) -> None:
    """One workspace of cuBLAS, which each thread that computes has of its own.

    In bfloat16 FlashAttention reads the pages by block tables.
    """
    model = tuning.write_model(family, tmp_path / "model")
    plan = duoka.plan(model, "1GiB", WORKS[dtype])
    assert plan.workload.page_tokens == (16 if dtype == "float32" else 256)
    with Engine(plan) as engine:
        for temperature in (0.0, 1.0):
            params = SamplingParams(max_new_tokens=6, temperature=temperature, logprobs=2)
            assert len(engine.generate(PROMPTS, params)) == len(PROMPTS)
    (stage,) = plan.forecast.devices
    assert torch.cuda.max_memory_reserved(0) == stage.reserved_bytes
    allocated = torch.cuda.max_memory_allocated(0)
    assert 0.97 * stage.allocated_bytes <= allocated <= stage.allocated_bytes + AHEAD_BYTES


@pytest.mark.cuda_rig(gpus="1GiB,1GiB")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("gpus", ["0", "0,1"])
def test_generate_takes_what_is_forecast(
    gpus: str, dtype: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its pages are counted in the plan: those of four contexts.

    So are graphs, which one process with two GPUs doesn't have.
    """
    model = tuning.write_model("llama", tmp_path / "model")
    words = f"--gpus {gpus} --use-all --context 128 --new-tokens 50 --dtype {dtype} --json"
    prompts = [word for text in ("ab", "abc" * 9, "a", "b" * 30) for word in ("-p", text)]
    assert run(["generate", str(model), *words.split(), *prompts]) == 0
    measured = json.loads(capfd.readouterr().out)["measured"]
    assert len(measured["devices"]) == len(gpus.split(","))
    for peak, stage in zip(measured["devices"], measured["forecast"], strict=True):
        has_graphs, is_alone = dtype == "bfloat16", gpus == "0"
        pool_bytes = LARGE_SEGMENT_BYTES + SMALL_SEGMENT_BYTES if has_graphs else 0
        unused_bytes = 0 if is_alone else pool_bytes
        assert peak["reserved_bytes"] == stage["reserved_bytes"] - unused_bytes
        over = stage["allocated_bytes"] - peak["allocated_bytes"]
        assert -AHEAD_BYTES <= over <= max(ROUND_BYTES, 0.003 * pool_bytes, unused_bytes)


@pytest.mark.cuda_rig(gpus="1GiB")
@pytest.mark.usefixtures("expandable_segments")
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.nightly), "bfloat16"])
def test_it_takes_what_is_forecast_in_expandable_segments(dtype: Any, tmp_path: Path) -> None:
    test_a_thread_warms_up_and_takes_what_is_forecast("llama", dtype, tmp_path)


@pytest.mark.cuda_rig(gpus="1GiB", lost="0@9000")
def test_a_lost_gpu_ends_the_engine(tmp_path: Path) -> None:
    model = tuning.write_model("llama", tmp_path / "model")
    plan = duoka.plan(model, "1GiB", WORK)
    failures: list[Exception] = []
    with Engine(plan, warm_up="largest", on_failure=failures.append) as engine:
        with pytest.raises(GpuLostError, match="a GPU has failed: CUDA error: "):
            list(map(engine.generate, repeat(PROMPTS)))
        with pytest.raises(GpuLostError):
            engine.submit([1, 2])
    assert len(failures) == 1


@pytest.mark.cuda_rig(gpus="1GiB", lost="0@200")
def test_a_gpu_that_is_lost_while_it_warms_up(tmp_path: Path) -> None:
    plan = duoka.plan(tuning.write_model("llama", tmp_path / "model"), "1GiB", WORK)
    with pytest.raises(GpuLostError, match="CUDA error: "):
        Engine(plan)


@pytest.mark.parametrize(
    "lost",
    [pytest.param(n, marks=pytest.mark.cuda_rig(gpus="1GiB", lost=n)) for n in ("0@5", "0@900")],
)
def test_a_command_says_that_the_gpu_is_lost(
    lost: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = tuning.write_model("llama", tmp_path / "model")
    options = ["--gpus", "0", "--context", "128", "--new-tokens", "100", "-p", "ab"]
    assert run(["generate", str(model), *options]) == GpuLostError.exit_code
    said = capfd.readouterr().err
    assert "error: a GPU has failed: CUDA error: " in said
    assert "nvidia-smi" in said
    assert "Traceback" not in said


@pytest.mark.cuda_rig(gpus="1GiB")
@pytest.mark.parametrize("is_right", [True, False])
def test_attention_is_tested_on_the_gpu_before_it_reads_pages_in_place(
    is_right: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Outside of `values()` a kernel computes nothing, as a faulty one; the engine gathers then."""
    monkeypatch.delenv("DUOKA_ATTENTION")
    model = tuning.write_model("llama", tmp_path / "model")
    plan = duoka.plan(model, "1GiB", HALF)
    if not is_right:
        assert try_attention.find_fault(torch.device("cuda", 0), 8)  # kept for this process
    with Engine(plan) as engine:
        params = SamplingParams(max_new_tokens=6)
        assert len(engine.generate(PROMPTS, params)) == len(PROMPTS)
    told = [record.getMessage() for record in caplog.records]
    (stage,) = plan.forecast.devices
    if is_right:
        assert not told
        assert torch.cuda.max_memory_reserved(0) == stage.reserved_bytes
    else:
        assert "FlashAttention over pages can't be used (its results differ from" in told[0]


LOG = Path(tempfile.gettempdir()) / f"duoka-staged-{os.getpid()}"


@pytest.mark.cuda_rig(gpus="1GiB,1GiB", log=LOG)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_processes_take_what_is_forecast_and_wait_once_per_step(dtype: Any, tmp_path: Path) -> None:
    """A stage's host waits for its results, in a thread; activations are in pinned memory."""
    model = tuning.write_model("llama", tmp_path / "model")
    plan = duoka.plan(model, "1GiB,1GiB", WORKS[dtype], use_all=True)
    params = SamplingParams(max_new_tokens=20, min_new_tokens=20)
    with Engine(plan, processes=True) as engine:
        engine.generate([[1, 2, 3]], params)
        done = LOG.stat().st_size
        (answer,) = engine.generate([[3, 2, 1]], params)
    assert len(answer.tokens) == 20
    lines = LOG.read_text()[done:].splitlines()
    waits = sum(line.startswith("wait") for line in lines)
    assert waits == 20 * len(plan.devices)
    assert not [line for line in lines if line.startswith("copy -1") and "pageable" in line]
    for peak, stage in zip(engine.peaks(), plan.forecast.devices, strict=True):
        assert (peak.device, peak.reserved_bytes) == (stage.device, stage.reserved_bytes)
        # Graphs keep a workspace; no step was as large afterwards as the largest before.
        over = 0.003 * stage.allocated_bytes if dtype == "bfloat16" else ROUND_BYTES
        assert 0 <= stage.allocated_bytes - peak.allocated_bytes <= over
    LOG.unlink()


@pytest.mark.cuda_rig(gpus="1GiB,1GiB")
@pytest.mark.parametrize(
    "lost",
    [
        pytest.param("0@40000", marks=pytest.mark.cuda_rig(lost="0@40000")),
        pytest.param("1@40000", marks=[pytest.mark.cuda_rig(lost="1@40000"), pytest.mark.nightly]),
    ],
)
def test_a_lost_gpu_ends_the_processes(lost: str, tmp_path: Path) -> None:
    model = tuning.write_model("llama", tmp_path / "model")
    plan = duoka.plan(model, "1GiB,1GiB", HALF, use_all=True)
    params = SamplingParams(max_new_tokens=20, min_new_tokens=20)
    begin = time.monotonic()
    with (
        Engine(plan, processes=True, warm_up="largest") as engine,
        pytest.raises(MachineError, match=f"cuda:{lost[0]}|GPU has failed"),
    ):
        list(map(engine.generate, repeat(PROMPTS), repeat(params)))
    assert time.monotonic() - begin < 300  # it ends at all
