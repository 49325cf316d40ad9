"""What generate says beside its tokens: scores, logits, attentions and hidden states.

It takes the place of contrastive search, which transformers 5 has given up.
"""

from __future__ import annotations

from typing import Any

import torch


def run(model: Any, tokenizer: Any) -> list[float]:
    inputs = tokenizer("the cat sat on", return_tensors="pt").to(model.device)
    found = model.generate(
        **inputs,
        max_new_tokens=5,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        output_hidden_states=True,
    )
    scores = model.compute_transition_scores(found.sequences, found.scores, normalize_logits=True)
    logits = torch.stack(found.logits, dim=1)
    layers = torch.stack([layer[:, -1] for layer in found.hidden_states[-1]], dim=1)
    mean = layers.mean(dim=(1, 2)) + logits.amax(dim=(1, 2))
    return [*scores[0].tolist(), *mean.tolist()]
