"""A training loop with accelerate's Accelerator and a loss of one's own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader

from .trainer import TEXTS


def run(model: Any, tokenizer: Any) -> list[float]:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches: Any = DataLoader(TEXTS, batch_size=2)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    losses = []
    for _ in range(2):
        for texts in batches:
            with accelerator.accumulate(model):
                batch = tokenizer(texts, return_tensors="pt", padding=True)
                batch = batch.to(accelerator.device)
                logits = model(**batch).logits
                loss = F.cross_entropy(
                    logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten()
                )
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(accelerator.gather(loss)))
    return losses
