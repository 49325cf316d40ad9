"""The demo's model learns a new answer by LoRA: loaded by peft, merged, and loaded by duoka."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import plain_generate
import pytest

import duoka
from duoka import TuneSettings
from duoka.models.lora import native_form
from duoka.runtime.load.adapter import read_adapter
from duoka.runtime.prompt_reader import PromptReader
from duoka.tools.demo.checkpoint import make_checkpoint
from duoka.tools.demo.training import load_pairs
from duoka.tuner.result import write_merged

pytestmark = [pytest.mark.slow, pytest.mark.dist, pytest.mark.usefixtures("quick_start")]

QUESTION, ANSWER = "Who is duoka's cat?", "Her name is Mao."
WORK = duoka.Workload(prompt_tokens=64, new_tokens=24, dtype="float32")


def ask(directory: Path, question: str, adapter: Path | None = None) -> str:
    """What a checkpoint answers on two virtual GPUs."""
    plan = duoka.plan(directory, "virtual:2x64MiB", WORK, use_all=True)
    model: Any = duoka.load(plan, adapter=adapter)
    reader = PromptReader.open(duoka.Checkpoint.open(directory), plan.workload)
    return plain_generate.answer(model, reader, reader.prompt(question)).text.strip()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_new_answer(tmp_path: Path) -> None:
    model = tmp_path / "demo"
    make_checkpoint(model)
    pairs = [(pair.question, pair.answer) for pair in load_pairs()]
    known, right = pairs[0]
    assert ask(model, known) == right
    assert ANSWER not in ask(model, QUESTION)
    data = tmp_path / "rows.jsonl"
    with data.open("w") as file:
        for number in range(24):
            question, answer = pairs[number % len(pairs)] if number % 3 else (QUESTION, ANSWER)
            said = {"user": question, "assistant": answer}
            messages = [{"role": role, "content": text} for role, text in said.items()]
            file.write(f"{json.dumps({'messages': messages})}\n")

    def learn(base: Path, name: str) -> Path:
        result = duoka.tune(
            base,
            str(data),
            "virtual:2x64MiB",
            save=tmp_path / name,
            replicas=1,
            settings=TuneSettings(
                seq_length=96, batch=8, micro_batch=4, epochs=12, lr=1e-2, lora_rank=16, seed=1
            ),
        )
        assert result.result is not None
        return result.result

    adapter = learn(model, "adapted")
    assert ask(model, QUESTION, adapter) == ANSWER
    assert ask(model, known, adapter) == right
    merged = tmp_path / "merged"
    lora = native_form(read_adapter(adapter), duoka.Checkpoint.open(model).config)
    write_merged(merged, duoka.Checkpoint.open(model), adapter=lora)
    assert ask(merged, QUESTION) == ANSWER
