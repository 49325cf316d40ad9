"""Steps of a run: scaled, clipped, skipped, refused, and the same in any number of processes."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import tuning
from processes import run_together
from torch import Tensor
from trainers import (
    LENGTHS,
    NUM_STEPS,
    Case,
    Trained,
    make_batches,
    make_dataset,
    make_layout,
    make_part,
    train,
    train_all,
    write_run,
)
from transformers import AutoModelForCausalLM

from duoka import TuneSettings
from duoka.errors import TrainingError
from duoka.tuner import trainer as module
from duoka.tuner.data import OptimizerStep
from duoka.tuner.part import ModelPart
from duoka.tuner.run import RunDirectory
from duoka.tuner.trainer import Trainer
from duoka.tuner.tune import resume

SETTINGS: dict[str, Any] = {"seq_length": 32, "batch": 4, "lr": 1e-2}
Make = Callable[..., tuple[Trainer, ModelPart]]


@pytest.fixture
def make(llama: Path, alone: None) -> Make:
    """A trainer of all of a model, and what it trains."""

    def make(**options: Any) -> tuple[Trainer, ModelPart]:
        settings = TuneSettings(**{**SETTINGS, **options})
        layout = make_layout(llama, settings)
        part = make_part(layout, settings)
        return Trainer(settings, layout, 0, part, NUM_STEPS), part

    return make


def step_of(number: int = 0, **options: Any) -> OptimizerStep:
    return make_batches(TuneSettings(**{**SETTINGS, **options}))[number]


def values(part: ModelPart) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in part.trained.items()}


def have_changed(part: ModelPart, before: dict[str, Tensor]) -> bool:
    return any(not torch.equal(value, before[name]) for name, value in part.trained.items())


def overflow(part: ModelPart) -> Any:
    """Let a gradient be infinite whatever the scale; what is returned ends it."""
    return next(iter(part.trained.values())).register_hook(lambda gradient: gradient / 0)


def test_dropout_is_drawn_by_seed_and_step(make: Make) -> None:
    """What came before changes nothing."""

    def losses(seed: int, *numbers: int) -> list[float]:
        trainer, part = make(lora_dropout=0.5, seed=seed, lr=1e-9)
        for name, parameter in part.trained.items():
            torch.nn.init.constant_(parameter, 0.1 if "lora_B" in name else 1.0)
        return [trainer.step(number, step_of()).loss for number in numbers]

    first, second, third = losses(2**32 - 1, 0, 1, 0)
    assert first == pytest.approx(third)
    assert losses(2**32 - 1, 1) == pytest.approx([second])
    assert first != pytest.approx(second)
    assert losses(7, 0) != pytest.approx([first])


# ── float16 ──


def test_a_step_that_overflows_is_skipped(make: Make) -> None:
    trainer, part = make(dtype="float16")
    before = values(part)
    expected = trainer.evaluate([step_of()])["eval_loss"]
    trainer.scale, trainer.steps_since_scaled = 2.0**60, 5
    report = trainer.step(0, step_of())
    assert report.is_skipped
    assert report.loss == pytest.approx(expected, rel=1e-3)
    assert report.grad_norm == 0
    assert (trainer.scale, trainer.steps_since_scaled) == (2.0**59, 0)
    assert not have_changed(part, before)
    assert not any(trainer.optimizer.state.values())
    assert all(parameter.grad is None for parameter in part.trained.values())
    trainer.scale = 2.0**10
    assert not trainer.step(1, step_of(1)).is_skipped
    assert have_changed(part, before)


def test_the_scale_grows_after_so_many_steps(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_GROWTH_STEPS", 3)
    trainer, part = make(dtype="float16")
    trainer.scale = 0.5  # as after overflows; it grows past one like past others
    seen = []
    for number in range(7):
        handle = overflow(part) if number == 4 else None
        trainer.step(number, step_of(number))
        if handle is not None:
            handle.remove()
        seen.append((trainer.scale, trainer.steps_since_scaled))
    assert seen == [(0.5, 1), (0.5, 2), (1, 0), (1, 1), (0.5, 0), (0.5, 1), (0.5, 2)]


@pytest.mark.parametrize("scale", [2.0**-6, 2.0**16])
def test_the_scale_changes_nothing_of_a_step(make: Make, scale: float) -> None:
    reports, trained = [], []
    for other in (scale, 2.0**10):
        trainer, part = make(dtype="float16", optimizer="sgd")
        trainer.scale = other
        reports.append(trainer.step(0, step_of()))
        trained.append(values(part))
    assert reports[0].loss == pytest.approx(reports[1].loss)
    assert reports[0].grad_norm == pytest.approx(reports[1].grad_norm, rel=0.01)
    for name, value in trained[0].items():
        torch.testing.assert_close(value, trained[1][name], rtol=0.01, atol=1e-4)


def test_what_overflows_at_every_scale_ends_the_run(make: Make) -> None:
    trainer, part = make(dtype="float16", save_every=2)
    before = values(part)
    trainer.scale = 2.0**-12
    overflow(part)
    assert [trainer.step(number, step_of()).is_skipped for number in range(2)] == [True, True]
    with pytest.raises(
        TrainingError, match=r"norm of the gradients is (inf|nan) in step 3"
    ) as ended:
        trainer.step(2, step_of())
    assert "with the loss scaled down to 6.10352e-05" in str(ended.value)
    assert "float16 overflows above 65504" in (ended.value.hint or "")
    assert "the last checkpoint" in (ended.value.hint or "")
    assert not have_changed(part, before)


def test_a_resumed_run_goes_on_with_its_scale(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Skipped steps, growth and dropout come as in a run that was never stopped."""
    monkeypatch.setattr(module, "_FIRST_SCALE", 2.0**23)
    monkeypatch.setattr(module, "_GROWTH_STEPS", 3)
    settings = TuneSettings(
        **SETTINGS, dtype="float16", lora_dropout=0.2, epochs=4, save_every=3, keep=9
    )
    directory = RunDirectory(tmp_path / "run")
    write_run(directory, settings, make_layout(llama, settings))

    def run() -> tuple[list[Any], dict[str, Any]]:
        with tuning.one_process(monkeypatch):
            resume(directory)
        state = json.loads((directory.checkpoints / "step-000008/checkpoint.json").read_text())
        seen = [(entry["loss"], entry["is_skipped"]) for entry in directory.read_metrics()]
        return seen, state["state"]

    whole = run()
    skipped = [is_skipped for _, is_skipped in whole[0]]
    assert any(skipped[:3])
    assert any(skipped[3:])
    assert not all(skipped)
    for step in (6, 8):
        shutil.rmtree(directory.checkpoints / f"step-{step:06d}")
    assert run() == whole


# ── losses ──


@pytest.fixture(scope="module")
def mean_loss(llama: Path) -> float:
    """The loss of the plain model over all trained tokens, one sample after another."""
    model = AutoModelForCausalLM.from_pretrained(llama)
    data, total = make_dataset(LENGTHS), 0.0
    for sample in range(len(data)):
        ids, is_trained = (torch.tensor(array) for array in data.tokens(sample))
        with torch.no_grad():
            logits = model(ids[None].long()).logits[0]
        losses = F.cross_entropy(logits[:-1], ids[1:].long(), reduction="none")
        total += float(losses[is_trained[1:]].sum())
    return total / int(data.is_trained.sum())


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_an_evaluation_is_the_mean_over_trained_tokens(
    make: Make, mean_loss: float, micro_batch: int
) -> None:
    trainer, part = make(micro_batch=micro_batch, lora_dropout=0.9)
    steps = [step_of(number, micro_batch=micro_batch) for number in range(2)]
    assert trainer.evaluate(steps) == pytest.approx({"eval_loss": mean_loss}, rel=1e-5)
    for name, parameter in part.trained.items():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    assert trainer.evaluate(steps) == trainer.evaluate(steps)  # nothing is dropped
    assert part.model.training


def test_a_loss_that_is_no_number_names_step_and_samples(make: Make) -> None:
    trainer, part = make()
    step = step_of()
    token = int(step.micro_batches[2].tensors()["input_ids"][0, 0])
    spoilt = [
        place
        for micro_batch in step.micro_batches
        if (micro_batch.tensors()["input_ids"] == token).any()
        for place in micro_batch.places
    ]
    assert len(spoilt) < len(step.micro_batches)
    part.model.model.embed_tokens.weight.data[token] = torch.nan
    with pytest.raises(TrainingError) as ended:
        trainer.step(2, step)
    assert str(ended.value) == f"the loss is nan in step 3, for the samples of {spoilt[0]}"


@pytest.mark.parametrize(
    ("options", "number", "hint"),
    [
        ({}, 0, "the first steps already failed: check the weights and these samples"),
        ({"save_every": 3}, 2, "start a run with a lower --lr, a longer --warmup or a lower --max"),
        ({"save_every": 2}, 2, "the last checkpoint"),
    ],
)
def test_gradients_that_are_no_numbers_end_a_run(
    make: Make, options: Any, number: int, hint: str
) -> None:
    trainer, part = make(**options, dtype="bfloat16")
    overflow(part)
    with pytest.raises(TrainingError, match=rf"gradients is (inf|nan) in step {number + 1}\b") as e:
        trainer.step(number, step_of())
    assert hint in (e.value.hint or "")
    assert ("checkpoint" in (e.value.hint or "")) == ("checkpoint" in hint)


# ── gradients ──


@pytest.mark.parametrize("limit", [0.0, 0.05, 1e9])
def test_gradients_are_clipped_as_torch_clips_them(make: Make, limit: float) -> None:
    options = {"optimizer": "sgd", "lr": 1.0, "lr_schedule": "constant"}
    trainer, part = make(**options, max_grad_norm=limit)
    report = trainer.step(0, step_of())
    _, other = make(**options)
    for micro_batch in step_of().micro_batches:
        share = micro_batch.trained_tokens / step_of().trained_tokens
        (share * other.loss(micro_batch.tensors(), other.device)).backward()
    parameters = list(other.trained.values())
    norm = torch.nn.utils.clip_grad_norm_(parameters, limit or math.inf)
    torch.optim.SGD(parameters, lr=1.0).step()
    assert report.grad_norm == pytest.approx(float(norm))
    for name, value in part.trained.items():
        torch.testing.assert_close(value, other.trained[name])


def test_a_signal_is_answered_at_the_end_of_a_step(make: Make) -> None:
    trainer, _ = make()
    assert not trainer.step(0, step_of()).stops
    trainer.is_asked_to_stop = True
    assert trainer.step(1, step_of()).stops


def test_waiting_for_others_is_not_busy(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that only moves while other processes are waited for, and in the passes."""
    now = 0.0

    def passing(seconds: float, call: Callable[..., Any]) -> Callable[..., Any]:
        def passed(*args: Any, **kwargs: Any) -> Any:
            nonlocal now
            now += seconds
            return call(*args, **kwargs)

        return passed

    trainer, part = make()
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(dist, "barrier", passing(1.0, dist.barrier))
    monkeypatch.setattr(part, "loss", passing(0.75, part.loss))
    report = trainer.step(0, step_of())
    assert report.seconds == 4
    assert [process.busy_share for process in report.processes] == pytest.approx([0.75], rel=1e-3)


# ── several processes ──

SHARED = TuneSettings(**SETTINGS, optimizer="sgd", max_grad_norm=0.5)
PAIRS = TuneSettings(**{**SETTINGS, "batch": 2}, dpo=True)
CASES = {
    "stages": Case(SHARED, stages=2),
    "replicas": Case(SHARED, replicas=2),
    "one sample": Case(SHARED, replicas=2, lengths=(9,)),
    # In one of the processes nothing is trained.
    "first stage": Case(TuneSettings(**SETTINGS, lora_target=("0.self_attn.v_proj",)), stages=2),
    "last stage": Case(TuneSettings(**SETTINGS, lora_target=("1.self_attn.v_proj",)), stages=2),
    "pairs in stages": Case(PAIRS, stages=2, lengths=(*LENGTHS, 11)),
    "pairs in replicas": Case(PAIRS, replicas=2, lengths=(*LENGTHS, 11)),
    "nan in a stage": Case(SHARED, stages=2, damage="nan"),
    "nan in a replica": Case(SHARED, replicas=2, damage="nan"),
}
Together = dict[str, list[Trained]]


@pytest.fixture(scope="module")
def together(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Together:
    """What each process has made of each case."""
    store = tmp_path_factory.mktemp("together") / "store"
    processes = run_together(2, train_all, store, llama, CASES)
    return {name: [process[name] for process in processes] for name in CASES}


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("name", [name for name in CASES if "nan" not in name])
def test_processes_learn_what_one_does(
    name: str, together: Together, llama: Path, alone: None
) -> None:
    """Also in the last step of an epoch, which has no micro-batch for some of them."""
    case = CASES[name]
    one = train(llama, Case(case.settings, lengths=case.lengths))
    parameters: dict[str, Tensor] = {}
    for process in together[name]:
        assert process.error == ""
        assert process.evaluation == pytest.approx(one.evaluation, rel=1e-5)
        for report, expected in zip(process.reports, one.reports, strict=True):
            assert report.loss == pytest.approx(expected.loss, rel=1e-5)
            assert report.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
            assert report.rewards == pytest.approx(expected.rewards, abs=1e-5)
        for key, value in process.parameters.items():
            torch.testing.assert_close(value, parameters.setdefault(key, value))
    assert parameters.keys() == one.parameters.keys()
    for key, value in one.parameters.items():
        torch.testing.assert_close(parameters[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("name", ["nan in a stage", "nan in a replica"])
def test_what_goes_wrong_in_one_process_ends_all(name: str, together: Together) -> None:
    other, failed = together[name]
    assert other.error.startswith("LostError")
    assert failed.error.startswith("TrainingError: the loss is nan in step 1")
    assert other.reports == failed.reports == []
