"""Fine-tuning by transformers' Trainer, with an evaluation whose metric reads the logits."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

TEXTS = ["the cat sat on the mat", "a dog ran", "the bird sang a song", "the fish swam"]


def run(model: Any, tokenizer: Any) -> list[float]:
    dataset = [tokenizer(text) for text in TEXTS]

    def accuracy(prediction: Any) -> dict[str, float]:
        labels = prediction.label_ids[:, 1:]
        hits = (prediction.predictions[:, :-1] == labels)[labels != -100]
        return {"accuracy": float(hits.mean())}

    with tempfile.TemporaryDirectory() as directory:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=directory,
                max_steps=3,
                per_device_train_batch_size=2,
                learning_rate=1e-3,
                logging_steps=1,
                optim="adamw_torch",
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=dataset,
            eval_dataset=dataset,
            data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
            compute_metrics=accuracy,
            preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1).where(
                labels != -100, torch.zeros_like(labels)
            ),
        )
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        found = trainer.evaluate()
    return [*losses, found["eval_loss"], found["eval_accuracy"]]
