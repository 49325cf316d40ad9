"""The loss of sentences: the model's own, and one from its logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

SENTENCES = ["the cat sat on the mat", "mat the on sat"]


def run(model: Any, tokenizer: Any) -> list[float]:
    batch = tokenizer(SENTENCES, return_tensors="pt", padding=True).to(model.device)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    with torch.no_grad():
        outputs = model(**batch, labels=labels)
        loss = nn.CrossEntropyLoss(reduction="none")
        shifted = outputs.logits[:, :-1].transpose(1, 2), labels[:, 1:]
        each = loss(*shifted).sum(1) / (shifted[1] != -100).sum(1)
    total = outputs.loss + each.mean()
    return [float(outputs.loss), *each.tolist(), float(total)]
