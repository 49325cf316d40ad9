"""Embeddings of sentences, pooled over their tokens."""

from __future__ import annotations

from typing import Any

import torch

from .sentence_scores import SENTENCES


def run(model: Any, tokenizer: Any) -> list[float]:
    batch = tokenizer(SENTENCES, return_tensors="pt", padding=True).to(model.device)
    with torch.no_grad():
        outputs = model(**batch, output_hidden_states=True)
    mask = batch["attention_mask"].unsqueeze(-1)
    pooled = [(layer * mask).sum(1) / mask.sum(1) for layer in outputs.hidden_states]
    similar = torch.cosine_similarity(pooled[-1][:1], pooled[-1][1:])
    together: list[float] = torch.cat([*pooled, outputs.hidden_states[0][:, 0]]).mean(1).tolist()
    return [*similar.tolist(), *together]
