"""Beam search over a padded batch, several answers for each."""

from __future__ import annotations

from typing import Any


def run(model: Any, tokenizer: Any) -> list[str]:
    batch = tokenizer(["the cat", "a small dog"], return_tensors="pt", padding=True)
    found = model.generate(
        **batch.to(model.device),
        num_beams=4,
        num_return_sequences=2,
        max_new_tokens=6,
        early_stopping=True,
        do_sample=False,
    )
    texts: list[str] = tokenizer.batch_decode(found, skip_special_tokens=True)
    return texts
