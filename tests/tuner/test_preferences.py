"""DPO: steps equal to those of TRL's `DPOTrainer`, and to a plain loop."""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import tuning
from peft import PeftModel
from torch import Tensor
from torch.nn.functional import logsigmoid
from trainers import NUM_STEPS, make_layout, make_part
from transformers import AutoModelForCausalLM

from duoka import TuneSettings
from duoka.models.text.prompts import chat_format
from duoka.models.trainable import adapted_layers
from duoka.tuner.data import Batches, read_dataset
from duoka.tuner.part import ModelPart
from duoka.tuner.preferences import as_reference, preference_loss
from duoka.tuner.run import RunDirectory
from duoka.tuner.trainer import Trainer
from duoka.tuner.tune import TuneResult, export_result, resume, tune

SETTINGS: dict[str, Any] = {
    "dpo": True,
    "seq_length": 32,
    "batch": 4,
    "micro_batch": 2,
    "lr": 3e-3,
    "lr_schedule": "constant",
    "warmup": 0,
}
TRL = json.loads(Path(__file__).with_name("trl_dpo.json").read_text())


def write_pairs(path: Path, number: int = 12) -> Path:
    """Questions, each with a right and a wrong answer."""
    rows = (
        {
            "prompt": [{"role": "user", "content": f"{n}+{n}?"}],
            "chosen": [{"role": "assistant", "content": f"{2 * n}" + "!" * (n % 5)}],
            "rejected": [{"role": "assistant", "content": f"no {n}" + "?" * (n % 3)}],
        }
        for n in range(number)
    )
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.fixture
def batches(tmp_path: Path) -> Batches:
    """The pairs in their order, in steps of four."""
    chat = chat_format(tuning.make_tokenizer(), {"model_type": "llama"})
    path = write_pairs(tmp_path / "pairs.jsonl")
    dataset = read_dataset([path], chat, TuneSettings(dpo=True), seq_length=32)
    return Batches(dataset, batch=4, micro_batch=2, shuffle=False)


def make_trainer(model: Path, **options: Any) -> tuple[Trainer, ModelPart]:
    """A trainer whose adapters have values by their names, as in benchmarks/trl_dpo.py."""
    settings = TuneSettings(**{**SETTINGS, **options})
    layout = make_layout(model, settings)
    part = make_part(layout, settings)
    for name, parameter in part.trained.items():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    return Trainer(settings, layout, 0, part, NUM_STEPS), part


def test_steps_are_those_of_trl(llama: Path, batches: Batches, alone: None) -> None:
    trainer, _ = make_trainer(llama)
    measured = [batches[0]]
    evaluations = [trainer.evaluate(measured)]
    for number, expected in enumerate(TRL["steps"]):
        report = trainer.step(number, batches[number])
        found = {"loss": report.loss, "grad_norm": report.grad_norm}
        found |= {f"rewards/{name}": value for name, value in report.rewards.items()}
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
        if number % 3 == 2:
            evaluations.append(trainer.evaluate(measured))
    for evaluation, expected in zip(evaluations, TRL["evaluations"], strict=True):
        assert evaluation == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_a_step_is_that_of_a_plain_loop(llama: Path, batches: Batches, alone: None) -> None:
    trainer, part = make_trainer(llama, optimizer="sgd", max_grad_norm=0, dpo_beta=0.7)
    step = batches[1]
    plain = AutoModelForCausalLM.from_pretrained(llama)
    other = make_trainer(llama)[1]
    losses = []
    for micro_batch in step.micro_batches:
        rewards = []
        for (sample,) in micro_batch.rows:
            ids, is_trained = map(torch.tensor, batches.dataset.tokens(sample))
            policy, reference = (
                log_prob(model(ids[None].long()).logits[0], ids, is_trained)
                for model in (other.model, plain)
            )
            rewards.append(0.7 * (policy - reference.detach()))
        pairs = zip(rewards[::2], rewards[1::2], strict=True)
        losses += [-logsigmoid(chosen - rejected) for chosen, rejected in pairs]
    expected = torch.stack(losses).mean()
    expected.backward()  # type: ignore[no-untyped-call]
    report = trainer.step(0, step)
    assert report.loss == pytest.approx(expected.item(), rel=1e-5)
    for name, before in make_trainer(llama)[1].trained.items():
        gradient = other.trained[name].grad
        assert gradient is not None
        torch.testing.assert_close(part.trained[name], before - 3e-3 * gradient)


def log_prob(logits: Tensor, ids: Tensor, is_trained: Tensor) -> Tensor:
    """The log probability of a sample's trained tokens."""
    chosen = logits[:-1].log_softmax(-1).gather(1, ids[1:, None].long())[:, 0]
    return chosen[is_trained[1:]].sum()


def test_the_reference_has_no_adapters(llama: Path) -> None:
    _, part = make_trainer(llama, lora_dropout=0.5)
    plain = AutoModelForCausalLM.from_pretrained(llama)
    ids = torch.arange(9)[None]
    with as_reference(part.model):
        assert not part.model.training
        torch.testing.assert_close(part.model(ids).logits + 0, plain(ids).logits)
    assert part.model.training
    assert all(parameter.requires_grad for parameter in part.trained.values())
    assert not any(layer.disable_adapters for _, layer in adapted_layers(part.model))


def test_the_loss_of_pairs() -> None:
    log_probs, reference = torch.tensor([-1.0, -2, -3, -1]), torch.tensor([-2.0, -2, -2, -2])
    loss, rewards = preference_loss(log_probs, reference, 0.5)
    margins = torch.tensor([0.5, -1.0])
    assert loss == pytest.approx(float(-margins.sigmoid().log().mean()))
    assert rewards.tolist() == pytest.approx([0.0, 0.25, 0.5, -0.25])


def start(llama: Path, tmp_path: Path, gpus: str) -> tuple[TuneResult, list[dict[str, Any]]]:
    """A run on nine pairs, evaluated on three, and its metrics."""
    data = write_pairs(tmp_path / "pairs.jsonl")
    options = {**SETTINGS, "seq_length": None, "lr": 1e-2, "save_every": 1}
    settings = TuneSettings(**options, eval_data=("25%",))
    path = tmp_path / gpus.replace(":", " ")
    result = tune(llama, data, gpus, save=path, settings=settings, replicas=1)
    return result, [*RunDirectory(path).read_metrics()]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_a_run_is_evaluated_resumed_and_merged(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tuning.one_process(monkeypatch):
        result, metrics = start(llama, tmp_path, "virtual:64MiB")
    assert [entry.get("eval_loss", 1.0) < 0.69 for entry in metrics] == [False, True] * 3
    directory = RunDirectory(result.directory)
    shutil.rmtree(directory.checkpoints / "step-000003")
    with tuning.one_process(monkeypatch):
        assert resume(directory).steps == 3
    for entry, expected in zip(directory.read_metrics(), metrics, strict=True):
        assert entry.get("rewards") == pytest.approx(expected.get("rewards"))
        assert entry.get("eval_loss") == pytest.approx(expected.get("eval_loss"))
    merged = AutoModelForCausalLM.from_pretrained(export_result(result.directory, merge=True))
    assert result.result is not None
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(llama), result.result)
    ids = torch.arange(9)[None]
    torch.testing.assert_close(merged(ids).logits, adapted(ids).logits)


@pytest.mark.nightly
@pytest.mark.process
def test_three_gpus_learn_the_same(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two do in test_trainer.py, as stages and as replicas."""
    with tuning.one_process(monkeypatch):
        _, expected = start(llama, tmp_path, "virtual:64MiB")
    _, metrics = start(llama, tmp_path, "virtual:3x64MiB")
    for entry, one in zip(metrics, expected, strict=True):
        for key in {"loss", "eval_loss", "grad_norm", "rewards"} & one.keys():
            assert entry[key] == pytest.approx(one[key], rel=1e-4, abs=1e-5), key
