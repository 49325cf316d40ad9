"""Sampling of many rows at once is what one row after another gives, written out plainly."""

from __future__ import annotations

import math
import pickle
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from duoka.engine.grammar import token_bits
from duoka.engine.request import SamplingParams
from duoka.engine.sampler import SamplingRow, sample
from duoka.engine.sequence import Sequence

VOCABULARY = 37


def random_row(rng: random.Random) -> SamplingRow:
    params = SamplingParams(
        temperature=rng.choice([0.0, 0.7, 1.0, 2.0]),
        top_p=rng.choice([1.0, 0.8]),
        top_k=rng.choice([0, 3]),
        min_p=rng.choice([0.0, 0.1]),
        presence_penalty=rng.choice([0.0, 0.5]),
        frequency_penalty=rng.choice([0.0, 0.5]),
        repetition_penalty=rng.choice([1.0, 1.4]),
        logit_bias=rng.choice([{}, {3: 5.0, VOCABULARY + 7: 1.0}]),
        logprobs=rng.choice([None, 2]),
    )
    tokens = range(VOCABULARY)
    allowed = rng.sample(tokens, rng.randrange(1, VOCABULARY))
    return SamplingRow(
        params=params,
        seed=rng.randrange(2**40),
        place=rng.randrange(100),
        prompt=rng.choices(tokens, k=5),
        answer=rng.choices(tokens, k=5),
        banned=rng.choice([[], rng.sample(tokens, 9), [VOCABULARY + 1]]),
        # A tokenizer can have fewer tokens than there are logits, and more.
        allowed=rng.choice([None, token_bits(allowed), token_bits([*allowed, 200])]),
    )


def allows(row: SamplingRow, token: int) -> bool:
    mask = row.allowed
    if mask is None:
        return True
    return token // 8 < len(mask) and bool(mask[token // 8] >> token % 8 & 1)


def plainly(logits: list[float], row: SamplingRow) -> int:
    """The token of a row, step by step as the documentation has them."""
    params, counts = row.params, Counter(row.answer)
    values = dict(enumerate(logits))
    for token in {*row.prompt, *row.answer}:
        factor = params.repetition_penalty
        values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
    for token, number in counts.items():
        values[token] -= params.presence_penalty + params.frequency_penalty * number
    for token in values:
        values[token] += params.logit_bias.get(token, 0.0)
    values = {token: value for token, value in values.items() if allows(row, token)}
    usable = {token: value for token, value in values.items() if token not in row.banned}
    values = usable or dict.fromkeys(values, 0.0)
    if params.is_greedy:
        return max(values, key=lambda token: (values[token], -token))
    best = max(values.values())
    weights = {t: math.exp((value - best) / params.temperature) for t, value in values.items()}
    ranked = sorted(weights.items(), key=lambda item: -item[1])[: params.top_k or None]
    total = sum(weight for _, weight in ranked)
    kept, before = [], 0.0
    for token, weight in ranked:
        if not kept or (
            before < params.top_p and weight / total >= params.min_p * ranked[0][1] / total
        ):
            kept.append((token, weight))
        before += weight / total
    number = random.Random(f"{row.seed}/{row.place}").random() * sum(weight for _, weight in kept)
    for token, weight in kept:
        number -= weight
        if number < 0:
            return token
    return kept[-1][0]


def logits_of(rows: int) -> Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(rows)) * 3


@pytest.mark.parametrize("seed", range(8))
def test_rows_at_once_are_rows_one_by_one(seed: int) -> None:
    rng = random.Random(seed)
    rows = [random_row(rng) for _ in range(40)]
    logits = logits_of(40)
    before = logits.clone()
    choices = sample(logits, rows).choices()
    assert torch.equal(logits, before)
    for row, values, choice in zip(rows, before, choices, strict=True):
        assert choice.token == plainly(values.tolist(), row)
        if row.params.logprobs is not None:
            logprobs = torch.log_softmax(values, dim=-1)
            assert choice.logprob == pytest.approx(float(logprobs[choice.token]), abs=1e-5)
            assert [token for token, _ in choice.top_logprobs] == logprobs.topk(2).indices.tolist()


def test_what_is_banned_is_chosen_where_a_grammar_allows_nothing_else() -> None:
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature)
        row = SamplingRow(
            params=params, seed=0, place=0, banned=range(20), allowed=token_bits([4, 9])
        )
        tokens = {
            sample(logits_of(1), [replace(row, place=place)]).choices()[0].token
            for place in range(20)
        }
        assert tokens <= {4, 9}
        assert sample(logits_of(1), [replace(row, allowed=None)]).choices()[0].token >= 20


def row_of(params: SamplingParams) -> SamplingRow:
    params = replace(params, seed=0, max_new_tokens=5)
    return Sequence(range(100_000), params, stop_ids=(), detokenizer=None).row()  # type: ignore[arg-type]


def test_a_row_is_small_for_a_long_prompt() -> None:
    params = SamplingParams(temperature=1.0, stop=("x" * 10_000,))
    row = row_of(params)
    content = pickle.dumps(row)
    assert len(content) < 1000
    assert pickle.loads(content) == row
    assert list(row_of(replace(params, repetition_penalty=1.1)).prompt) == [*range(100_000)]
    assert not row_of(replace(params, presence_penalty=1.0)).prompt
