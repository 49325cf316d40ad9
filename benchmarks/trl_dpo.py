"""What TRL's `DPOTrainer` reports on the pairs of tests/tuner/test_preferences.py.

Run it where TRL is installed beside duoka's own packages, with ``tests`` and ``tests/tuner`` on
``PYTHONPATH``::

    pip install trl==1.16.0
    PYTHONPATH=tests:tests/tuner python benchmarks/trl_dpo.py tests/tuner/trl_dpo.json
"""

from __future__ import annotations

import json
import sys
import tempfile
import zlib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import tuning
from datasets import Dataset
from peft import LoraConfig
from test_preferences import write_pairs
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

_NAMES = ("loss", "grad_norm", *(f"rewards/{name}" for name in ("chosen", "rejected")))
_NAMES += ("rewards/accuracies", "rewards/margins")


class _Sequential(DPOTrainer):  # type: ignore[misc]
    """Takes the pairs in their order."""

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


def _config(directory: Path) -> DPOConfig:
    """The settings of test_preferences.py."""
    return DPOConfig(
        output_dir=str(directory),
        beta=0.1,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=2,
        gradient_checkpointing=False,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        num_train_epochs=2,
        logging_steps=1,
        eval_strategy="epoch",
        save_strategy="no",
        bf16=False,
        use_cpu=True,
        report_to=[],
    )


def measure(directory: Path) -> dict[str, Any]:
    """Train for two epochs of three steps, evaluated on the first four pairs after each epoch."""
    model_path = tuning.write_model("shallow", directory / "model")
    lines = write_pairs(directory / "pairs.jsonl").read_text().splitlines()
    pairs = Dataset.from_list([json.loads(line) for line in lines])
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    tokenizer.pad_token = tokenizer.eos_token
    trainer = _Sequential(
        model=AutoModelForCausalLM.from_pretrained(model_path, dtype="float32"),
        args=_config(directory / "run"),
        train_dataset=pairs,
        eval_dataset=pairs.select(range(4)),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"),
    )
    for name, parameter in trainer.model.named_parameters():
        if parameter.requires_grad:
            seed = zlib.crc32(name.removeprefix("base_model.model.").encode())
            generator = torch.Generator().manual_seed(seed)
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    before = trainer.evaluate()
    trainer.train()
    log = trainer.state.log_history
    evaluations = [before, *(entry for entry in log if "eval_loss" in entry)]
    names = [f"eval_{name}" for name in _NAMES if name != "grad_norm"]
    packages = ("trl", "transformers", "peft", "torch")
    return {
        "versions": {name: version(name) for name in packages},
        "evaluations": [{name: entry[name] for name in names} for entry in evaluations],
        "steps": [{name: entry[name] for name in _NAMES} for entry in log if "loss" in entry],
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        measured = measure(Path(place))
    Path(sys.argv[1]).write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
