"""Assisted decoding: candidates from the prompt, and from a smaller model."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import LlamaForCausalLM


def run(model: Any, tokenizer: Any) -> list[list[int]]:
    inputs = tokenizer("the cat sat on the cat sat on", return_tensors="pt").to(model.device)
    options = {"max_new_tokens": 10, "do_sample": False}
    looked_up = model.generate(**inputs, prompt_lookup_num_tokens=3, **options)
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = 1
    torch.manual_seed(1)
    draft = LlamaForCausalLM(config).eval().to(model.device)
    drafted = model.generate(**inputs, assistant_model=draft, **options)
    return [looked_up[0].tolist(), drafted[0].tolist()]
