"""Answers from CUDA: those of virtual GPUs, in Python and at the terminal."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_random
from cuda_rig.values import values

import duoka
from duoka import Checkpoint, Fleet, Workload
from duoka.cli.main import run
from duoka.engine import Engine, SamplingParams
from duoka.engine.conversation import Conversation
from duoka.runtime.prompt_reader import PromptReader
from duoka.tools.bench.quality import Quality, Windows, measure_quality
from duoka.tools.demo.checkpoint import CONFIG

pytestmark = [
    pytest.mark.cuda_rig(gpus="1GiB,1GiB", copy_limit="1GiB"),
    pytest.mark.usefixtures("engine_computes"),
]

TINY = {
    **CONFIG,
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "num_layers": 2,
    "num_attention_heads": 4,
    "kv_channels": 16,
}
SHORT = SamplingParams(max_new_tokens=4)
SIZES = ("--context", "96", "--new-tokens", "4")
QUESTIONS = ("What is NVLink?", "显存不足怎么办？")


@pytest.fixture(scope="module")
def chatglm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random(tmp_path_factory.mktemp("tiny-chatglm3"), TINY, seed=3)


def said(folder: Path, fleet: str) -> list[str]:
    """Answers to a batch, and to a conversation."""
    workload = Workload(batch=2, prompt_tokens=64, new_tokens=8, prefill_chunk_tokens=None)
    plan = duoka.plan(folder, fleet, workload, use_all=True)
    assert len(plan.devices) == 2
    reader = PromptReader.open(Checkpoint.open(folder), plan.workload)
    with Engine(plan, processes=False) as engine:
        batch = engine.generate([reader.prompt(text) for text in QUESTIONS], SHORT)
        conversation = Conversation(engine, reader, SHORT)
        rounds = ["".join(conversation.ask(text)) for text in QUESTIONS]
    return [*(completion.text for completion in batch), *rounds]


def test_a_batch_and_a_conversation(chatglm: Path) -> None:
    expected = said(chatglm, "virtual:2x64MiB")
    with values(most=None):
        assert said(chatglm, "2x64MiB") == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_many_requests_over_pages(dtype: Any, chatglm: Path) -> None:
    """In bfloat16 FlashAttention reads the pages in place."""
    work = Workload(
        cache="paged", batch=4, prompt_tokens=400, new_tokens=112, prefill_chunk_tokens=96,
        dtype=dtype, pages=40, page_tokens=16 if dtype == "float32" else 256,
    )  # fmt: skip
    prompts = [[(7 * length + at) % 60 for at in range(length)] for length in (3, 40, 290, 300)]

    def answer(fleet: str) -> list[list[int]]:
        plan = duoka.plan(chatglm, fleet, work)
        with Engine(plan) as engine:
            answers = engine.generate(prompts, SHORT)
        return [[choice.token for choice in each.tokens] for each in answers]

    expected = answer("virtual:64MiB")
    with values(most=None):
        assert answer("64MiB") == expected


def test_commands_detect_plan_load_and_answer(
    chatglm: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(*arguments: str) -> str:
        monkeypatch.setattr(sys, "stdin", io.StringIO(QUESTIONS[0]))
        assert run([*arguments[:1], str(chatglm), *SIZES, *arguments[1:]]) == 0, capsys.readouterr()
        return capsys.readouterr().out

    assert json.loads(told("check", "--gpus", "1,0", "--json"))["ok"]
    assert not torch.cuda.is_initialized()
    expected = told("chat", "--gpus", "virtual:64MiB")
    assert expected.strip()
    with values(most=None):
        assert told("chat", "--gpus", "1") == expected
        answered = json.loads(told("generate", "--gpus", "1,0", "--use-all", "--json"))
    assert answered["devices"] == ["cuda:1", "cuda:0"]
    assert answered["answers"][0]["text"] == expected.strip()


@pytest.mark.slow
def test_quality_is_measured_within_the_budget(chatglm: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("What is a GPU? Two of them fit what one does not. ")

    def measured(fleet: Fleet) -> Quality:
        windows = Windows(context_tokens=32)
        checkpoint = Checkpoint.open(chatglm)
        return measure_quality(checkpoint, text, fleet, forms=("int8",), windows=windows)

    expected = measured(Fleet.parse("virtual:64MiB"))
    with values(most=None):
        found = measured(fleet := Fleet.detect("1"))
    assert [score.weights for score in found.scores] == ["float32", "int8"]
    for score, right in zip(found.scores, expected.scores, strict=True):
        assert score.weight_bytes == right.weight_bytes
        assert score.perplexity == pytest.approx(right.perplexity, rel=1e-3)
    assert torch.cuda.memory_reserved(0) == 0
    assert 0 < torch.cuda.max_memory_reserved(1) <= fleet.budget_bytes
