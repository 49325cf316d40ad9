"""Answers by transformers' own `generate`, one prompt at a time: what the engine is held against.

The cache, the chunks and the passes of images are those that a plan says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

import duoka
from duoka.engine.detokenizer import Detokenizer
from duoka.models.cache_argument import cache_name
from duoka.models.kv_cache import new_cache
from duoka.runtime.call.encode_images import image_arguments
from duoka.runtime.prompt_reader import PromptReader


class Answer(NamedTuple):
    text: str
    new_tokens: int
    finish: str


def answer(
    model: Any, reader: PromptReader, prompt: Sequence[int], max_new_tokens: int | None = None
) -> Answer:
    """The greedy answer to a prompt."""
    work, stops = reader.workload, set(reader.chat.stop_ids)
    ids = torch.tensor([list(prompt)], device=model.device)
    options: dict[str, Any] = image_arguments(model, [prompt], ids.device, work.vision_batch)
    if work.cache != "dynamic":
        cache = new_cache(model, work.cache)
        options |= {cache_name(model): cache}
    is_pair = model.config.is_encoder_decoder
    if not is_pair:
        options["prefill_chunk_size"] = work.prefill_chunk_tokens
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens or work.new_tokens,
        do_sample=False,
        eos_token_id=list(stops) or None,
        pad_token_id=next(iter(stops), 0),
        **options,
    )
    row = output[0, 1 if is_pair else len(prompt) :].tolist()
    end = next((place for place, token in enumerate(row) if token in stops), None)
    text = Detokenizer(reader.tokenizer, (), prompt)
    pieces = [*map(text.add, row[:end]), text.finish()]
    return Answer("".join(pieces), len(row[:end]), "length" if end is None else "stop")


def answers(plan: duoka.Plan, prompts: Sequence[Sequence[int]], **options: Any) -> list[Answer]:
    """The same of several, by a model that is loaded for it on the plan's GPUs."""
    model = duoka.load(plan)
    reader = PromptReader.open(duoka.Checkpoint.open(plan.source), plan.workload)
    return [answer(model, reader, prompt, **options) for prompt in prompts]
