"""LoRA by peft, trained by transformers' Trainer."""

from __future__ import annotations

from typing import Any

from peft import LoraConfig, get_peft_model

from . import trainer


def run(model: Any, tokenizer: Any) -> list[float]:
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])
    adapted = get_peft_model(model, config)
    return trainer.run(adapted, tokenizer)
