"""Answers of the model in training: those of a plain loop, however the model is divided."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import tuning
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

import duoka
from duoka import TuneSettings
from duoka.errors import UsageError
from duoka.tuner.run import RunDirectory
from duoka.tuner.tune import TuneResult, export_result, resume

pytestmark = pytest.mark.dist

PROMPTS = ("1+1?", "Why is that?", "3+3?")
Run = Callable[..., TuneResult]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_start: None) -> Run:
    model = tuning.write_model("shallow", tmp_path / "model")
    chats = tuning.write_chats(tmp_path / "chats.jsonl", 8)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))

    def tune(gpus: str = "virtual:256MiB", replicas: int = 1, **more: Any) -> TuneResult:
        settings = TuneSettings(
            batch=4, lr=3e-2, epochs=4, eval_every=4, eval_data=(str(chats),),
            eval_prompts=(str(prompts),), seq_length=28, **more,
        )  # fmt: skip
        with tuning.one_process(monkeypatch) if "x" not in gpus else monkeypatch.context():
            return duoka.tune(
                model, str(chats), gpus, save=tmp_path / gpus, settings=settings, replicas=replicas
            )

    return tune


def samples(result: TuneResult) -> list[dict[str, Any]]:
    lines = (result.directory / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def plain_answers(model: Path) -> list[str]:
    """Greedy answers of at most 28 tokens with the prompt, by transformers alone."""
    tokenizer = tuning.make_tokenizer()
    plain = AutoModelForCausalLM.from_pretrained(model)
    answers = []
    for prompt in PROMPTS:
        turns = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        start = len(ids)
        while len(ids) < 28:
            with torch.no_grad():
                token = int(plain(torch.tensor([ids])).logits[0, -1].argmax())
            if token == tokenizer.eos_token_id:
                break
            ids.append(token)
        answers.append(tokenizer.decode(ids[start:], skip_special_tokens=True).strip())
    return answers


def test_answers_are_greedy(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    result = run()
    found = samples(result)
    assert [(entry["step"], entry["prompt"]) for entry in found] == [
        (step, prompt) for step in (4, 8) for prompt in PROMPTS
    ]
    answers = [entry["answer"] for entry in found]
    assert answers[3:] == plain_answers(export_result(result.directory, merge=True))
    assert answers[:3] != answers[3:]
    said = capfd.readouterr().err
    assert all(said.count(f"\n> {prompt}\n\n") == 2 for prompt in PROMPTS)
    assert answers[5] in said


def test_resumption_repeats_an_evaluation(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run()
    expected = samples(result)
    directory = RunDirectory(result.directory)
    lines = [entry for entry in directory.read_metrics() if entry.get("step") != 8]
    directory.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    with tuning.one_process(monkeypatch):
        resume(directory)
    assert samples(result) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpus", "replicas"), [("virtual:2x64MiB", 1), ("virtual:3x64MiB", 1), ("virtual:2x64MiB", 2)]
)
def test_any_number_of_gpus_answers_the_same(gpus: str, replicas: int, run: Run) -> None:
    assert samples(run(gpus, replicas)) == samples(run())


def test_prompts_need_evaluations() -> None:
    with pytest.raises(UsageError, match="--eval-prompts needs --eval") as refused:
        TuneSettings(eval_prompts=("a.txt",))
    assert refused.value.hint == "--eval DATA, or --eval 5%"
