"""A plan for training is loaded for transformers' Trainer and peft, or a loop of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import newcomer
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments

import duoka
from duoka import Training, Workload
from duoka.errors import UsageError
from duoka.models.chunked_loss import chunked_head

ONE, THREE = "virtual:1x64MiB", "virtual:3x64MiB"
PUBLISHED = ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]
NATIVE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"]
TEXTS = ("What is NVLink?", "A link between GPUs.", "a dog ran", "the fish swam")

# What these libraries warn of in their own versions is none of a script's business.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def chatglm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trained") / "glm-4-9b-chat"
    newcomer._write_glm4(path)
    return path


def make_plan(
    chatglm: Path, gpus: str, *, dtype: str = "float32", batch: int = 2, **training: Any
) -> duoka.Plan:
    workload = Workload(
        batch=batch, prompt_tokens=32, new_tokens=0, dtype=dtype, training=Training(**training)
    )
    return duoka.plan(chatglm, gpus, workload, use_all=True)


def load(chatglm: Path, gpus: str, **options: Any) -> Any:
    return duoka.load(make_plan(chatglm, gpus, **options))


def adapted(model: Any) -> Any:
    torch.manual_seed(0)
    targets = duoka.lora_targets(model, PUBLISHED)
    return get_peft_model(model, LoraConfig(r=4, target_modules=targets))


def train(
    model: Any, chatglm: Path, directory: Path, resume: Path | None = None, **options: Any
) -> list[float]:
    """The losses and the norms of gradients of three steps, and the loss of an evaluation."""
    tokenizer = duoka.tokenizer(chatglm)
    rows = [{"input_ids": ids, "labels": ids} for ids in tokenizer(list(TEXTS))["input_ids"]]
    arguments = {
        "per_device_train_batch_size": 2,
        "max_steps": 3,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        **options,
    }
    trainer = Trainer(
        model=model,
        args=TrainingArguments(output_dir=str(directory), **arguments),
        train_dataset=rows,
        eval_dataset=rows,
        data_collator=DataCollatorForSeq2Seq(tokenizer),
    )
    trainer.train(resume_from_checkpoint=resume and str(resume))
    history = trainer.state.log_history
    logged = [entry[key] for key in ("loss", "grad_norm") for entry in history if key in entry]
    found = trainer.predict(rows)
    assert found.predictions.shape[0] == len(rows)
    trainer.save_model()
    return [*logged, found.metrics["test_loss"]]


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "checkpointing": ({"gradient_checkpointing": True}, {}),
    "checkpointing-of-trainer": ({}, {"gradient_checkpointing": True}),
    "smoothing-accumulation-clipping": (
        {},
        {
            "label_smoothing_factor": 0.1,
            "gradient_accumulation_steps": 2,
            "max_grad_norm": 0.01,
            "optim": "sgd",
        },
    ),
    "full": ({"method": "full"}, {}),
    "full-in-32-bit": ({"method": "full", "master_weights": True, "dtype": "bfloat16"}, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_trainer_learns_the_same_on_three_gpus(case: str, chatglm: Path, tmp_path: Path) -> None:
    training, options = CASES[case]
    found = []
    for gpus in (ONE, THREE):
        model = load(chatglm, gpus, **training)
        if training.get("method") != "full":
            model = adapted(model)
        found.append(train(model, chatglm, tmp_path / gpus[8], **options))
    assert found[1] == pytest.approx(found[0], rel=1e-4)
    assert found[0][0] > found[0][-1]


@pytest.mark.slow
def test_training_goes_on_and_its_adapter_is_read(chatglm: Path, tmp_path: Path) -> None:
    def trained(directory: Path, **options: Any) -> list[float]:
        return train(adapted(load(chatglm, THREE)), chatglm, directory, **options)

    straight = trained(tmp_path / "straight")
    trained(tmp_path / "run", save_strategy="steps", save_steps=2)
    checkpoint = tmp_path / "run" / "checkpoint-2"
    again = trained(tmp_path / "again", resume=checkpoint)
    assert again[-1] == pytest.approx(straight[-1], rel=1e-5)

    ids = torch.tensor([duoka.tokenizer(chatglm)(TEXTS[0])["input_ids"]])
    plan = duoka.plan(chatglm, "virtual:2x64MiB", Workload(prompt_tokens=32))
    with torch.no_grad():
        merged = duoka.load(plan, adapter=tmp_path / "again")(ids).logits
        read = PeftModel.from_pretrained(load(chatglm, THREE), tmp_path / "again").eval()
        assert torch.allclose(read(input_ids=ids).logits, merged, atol=1e-5)


@pytest.mark.usefixtures("single_sequences")
def test_what_a_plan_for_training_is_loaded_as(chatglm: Path) -> None:
    plan = make_plan(chatglm, THREE, batch=1, gradient_checkpointing=True)
    with pytest.raises(UsageError, match="the plan is for training, and the engine only generates"):
        duoka.Engine(plan)
    model: Any = duoka.load(plan)
    assert model.training
    assert model.is_gradient_checkpointing
    assert chunked_head(model) is not None
    assert not any(parameter.requires_grad for parameter in model.parameters())
    whole = load(chatglm, THREE, batch=1, method="full", master_weights=True, dtype="bfloat16")
    assert {parameter.dtype for parameter in whole.parameters()} == {torch.float32}
    assert all(parameter.requires_grad for parameter in whole.parameters())


@pytest.mark.usefixtures("single_sequences")
def test_published_names_of_targets(chatglm: Path) -> None:
    # Its trace is there already.
    model = load(chatglm, THREE, batch=1, gradient_checkpointing=True)
    assert duoka.lora_targets(model, PUBLISHED) == NATIVE
    assert duoka.lora_targets(model, NATIVE) == NATIVE
    assert duoka.lora_targets(model, ["self_attention.dense"]) == ["self_attn.o_proj"]
    with pytest.raises(UsageError, match="did you mean 'q_proj'"):
        duoka.lora_targets(model, ["q_projj"])
