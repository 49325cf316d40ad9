"""The engine: steps of many sequences give the tokens that `generate` gives one by one."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import families
import torch
from families import Family
from sequences import sequence_of

from duoka.engine.executor import InlineExecutor
from duoka.engine.generation_rules import GenerationRules
from duoka.engine.scheduler import Scheduler
from duoka.forecast.serving import Capacity
from duoka.runtime.call.chunk import Chunk

NEW_TOKENS = 10


def prompts(rng: random.Random) -> list[list[int]]:
    """Prompts of different lengths, some of which begin alike."""
    common = [rng.randrange(3, families.VOCABULARY) for _ in range(9)]
    texts = [[rng.randrange(3, families.VOCABULARY) for _ in range(n)] for n in (1, 30, 7, 12, 3)]
    return [*texts, [*common, 5], [*common, 7, 8]]


def one_by_one(model: Any, prompt: list[int]) -> list[int]:
    start = 1 if model.config.is_encoder_decoder else len(prompt)
    with torch.no_grad():
        output = model.generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    answer: list[int] = output[0, start:].tolist()
    return answer


def at_once(model: Any, texts: list[list[int]], capacity: Capacity, rng: random.Random) -> Any:
    with patch("duoka.engine.executor._is_asynchronous", lambda model: True):  # as on a GPU
        executor = InlineExecutor(model, capacity)
        executor.start()
    capacity = executor.capacity
    ended: list[int] = []
    scheduler = Scheduler(capacity, forget=ended.append, runs_ahead=executor.runs_ahead)
    rules = GenerationRules.of(model)
    sequences = [sequence_of(text, NEW_TOKENS, rules=rules) for text in texts]
    coming = list(sequences)
    flying: deque[list[Chunk]] = deque()
    while coming or scheduler.waiting or scheduler.running or flying:
        if coming and (rng.random() < 0.5 or not (scheduler.waiting or scheduler.running)):
            scheduler.add(coming.pop(0))
        if len(flying) <= executor.runs_ahead and (chunks := scheduler.next_step()):
            most_tokens = max(capacity.step_tokens, len(chunks))
            assert sum(len(chunk.tokens) for chunk in chunks) <= most_tokens
            executor.submit(chunks)
            flying.append(chunks)
        elif flying:
            result = executor.wait()
            assert result is not None
            assert not isinstance(result, Exception)
            for chunk, outcome in zip(flying.popleft(), result, strict=True):
                scheduler.computed(chunk, outcome)
    assert scheduler.pool.num_free == capacity.pages
    assert sorted(ended) == [sequence.number for sequence in sequences]
    executor.close()
    return [sequence.tokens[len(sequence.prompt) :] for sequence in sequences], executor.is_paged


CAPACITY = Capacity(
    sequences=4, context_tokens=48, pages=40, page_tokens=4, step_tokens=16, whole_prompts=False
)


def check(family: Family) -> None:
    """Compare the tokens, and whether keys and values are in pages."""
    name, model = family.name, family.model()
    rng = random.Random(name)
    texts = prompts(rng)
    expected = [one_by_one(model, text) for text in texts]
    before = model.config._attn_implementation
    capacity = CAPACITY
    if name not in families.PAGED:
        capacity = replace(CAPACITY, step_tokens=4 * 38, whole_prompts=True)
    answers, is_paged = at_once(model, texts, capacity, rng)
    assert answers == expected
    assert model.config._attn_implementation == before
    assert is_paged == (name in families.PAGED) or name not in families.FAST
