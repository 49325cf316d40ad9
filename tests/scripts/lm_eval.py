"""The probability of continuations, as lm-evaluation-harness computes it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

PAIRS = [("the cat sat on", " the mat"), ("the cat sat on", " a hat"), ("a dog", " ran")]


def run(model: Any, tokenizer: Any) -> list[float]:
    scores = []
    for context, continuation in PAIRS:
        start = tokenizer.encode(context)
        added = tokenizer.encode(continuation)
        ids = torch.tensor([[*start, *added][:-1]], device=model.device)
        with torch.no_grad():
            logits = F.log_softmax(model(ids).logits, dim=-1)
        logits = logits[:, len(start) - 1 :]
        wanted = torch.tensor([added], device=model.device)
        is_greedy = (logits.argmax(dim=-1) == wanted).all()
        taken = torch.gather(logits, 2, wanted.unsqueeze(-1)).squeeze(-1)
        scores += [float(taken.sum()), float(bool(is_greedy))]
    return scores
