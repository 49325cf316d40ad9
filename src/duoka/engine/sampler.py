"""Sampling: one token for each row of logits, each row by its own parameters.

The random number of a row follows from its seed and its place in the answer alone, so that an
answer is the same in any company. A token is chosen where that number falls among the probabilities
in falling order. What a row is sampled by is small, and plain data: it can go to another process in
each step.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from duoka.runtime.draw import BANNED, LogitChange, change, draw, log_probabilities, mask

from .request import SamplingParams, TokenChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRow:
    """What a row of logits is sampled by.

    Parameters
    ----------
    params : SamplingParams
        Of which texts and the grammar aren't needed here.
    seed : int
    place : int
        The number of tokens in the answer so far.
    prompt, answer : sequence of int
        The tokens so far, where penalties depend on them.
    banned : sequence of int
        Tokens that are chosen only where nothing else is allowed.
    allowed : bytes, optional
        The only tokens that are chosen: a bit for each, the lowest of a byte first.
    """

    params: SamplingParams
    seed: int
    place: int
    prompt: Sequence[int] = ()
    answer: Sequence[int] = ()
    banned: Sequence[int] = ()
    allowed: bytes | None = None

    @property
    def changes_logits(self) -> bool:
        """Whether it does more with logits than choose among them."""
        params = self.params
        is_biased = params.has_penalties or params.logit_bias or self.banned
        return bool(is_biased or self.allowed is not None)


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> list[TokenChoice]:
    """Choose a token for each row of logits, [rows, vocabulary]."""
    raw = logits.float()
    changed = raw
    if any(row.changes_logits for row in rows):
        changed, vocabulary = raw.clone(), logits.shape[-1]
        changes = [_changes(row, vocabulary) for row in rows]
        change(changed, [(at, *pair) for at, row in enumerate(changes) for pair in row.items()])
        if any(row.allowed is not None for row in rows):
            mask(changed, _octets(rows, vocabulary))
    tokens = changed.argmax(dim=-1)
    drawn = [not row.params.is_greedy for row in rows]
    if any(drawn):
        is_drawn = torch.tensor(drawn, device=raw.device)
        tokens = torch.where(is_drawn, _draw(changed, rows), tokens)
    return _choices(raw, tokens, rows)


def _changes(row: SamplingRow, vocabulary: int) -> dict[int, LogitChange]:
    """What penalties and biases do to a row's logits, by token."""
    params = row.params
    changes: dict[int, LogitChange] = {}
    if params.repetition_penalty != 1:
        changes |= dict.fromkeys((*row.prompt, *row.answer), LogitChange(params.repetition_penalty))
    for token, times in Counter(row.answer).items() if params.has_penalties else ():
        known = changes.get(token, LogitChange())
        subtracted = params.presence_penalty + params.frequency_penalty * times
        changes[token] = LogitChange(known.divisor, known.addend - subtracted)
    for token, bias in params.logit_bias.items():
        known = changes.get(token, LogitChange())
        changes[token] = LogitChange(known.divisor, known.addend + bias)
    changes |= dict.fromkeys(row.banned, BANNED)
    return {token: change for token, change in changes.items() if 0 <= token < vocabulary}


def _octets(rows: Sequence[SamplingRow], vocabulary: int) -> bytes:
    """What is allowed of each row, a bit for each token; all of it where nothing is said."""
    size = -(-vocabulary // 8)
    masks = (row.allowed for row in rows)
    return b"".join(
        b"\xff" * size if mask is None else mask[:size].ljust(size, b"\0") for mask in masks
    )


def _draw(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """A token of each row at random, by its probability among those that are left."""
    device = logits.device

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, device=device, dtype=torch.float32)[:, None]

    params = [row.params for row in rows]
    return draw(
        logits,
        temperatures=column([known.temperature or 1.0 for known in params]),
        top_k=column([known.top_k or logits.shape[-1] for known in params]),
        top_p=column([known.top_p for known in params]),
        min_p=column([known.min_p for known in params]),
        numbers=column([_uniform(row.seed, row.place) for row in rows]),
    )


def _uniform(seed: int, place: int) -> float:
    """A number from 0 to below 1, which follows from the two alone."""
    return random.Random(f"{seed}/{place}").random()


def _choices(raw: Tensor, tokens: Tensor, rows: Sequence[SamplingRow]) -> list[TokenChoice]:
    """The tokens, with log-probabilities where somebody wants them."""
    ids: list[int] = tokens.tolist()
    wanted = [index for index, row in enumerate(rows) if row.params.logprobs is not None]
    choices = [TokenChoice(token=token) for token in ids]
    if not wanted:
        return choices
    chosen, best_values, best_ids = (part.tolist() for part in log_probabilities(raw, tokens))
    for index in wanted:
        number = rows[index].params.logprobs or 0
        pairs = zip(best_ids[index][:number], best_values[index][:number], strict=True)
        choices[index] = TokenChoice(
            token=ids[index], logprob=chosen[index][0], top_logprobs=tuple(pairs)
        )
    return choices
