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

from duoka.runtime.draw import draw, log_probabilities

from .request import SamplingParams, TokenChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
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


def sample(logits: Tensor, rows: Sequence[Row]) -> list[TokenChoice]:
    """Choose a token for each row of logits, [rows, vocabulary]."""
    raw = logits.float()
    changed = raw
    if any(row.changes_logits for row in rows):
        changed = raw.clone()
        for values, row in zip(changed, rows, strict=True):
            if row.changes_logits:
                _change(values, row)
        _mask(changed, rows)
    tokens = changed.argmax(dim=-1)
    drawn = [not row.params.is_greedy for row in rows]
    if any(drawn):
        is_drawn = torch.tensor(drawn, device=raw.device)
        tokens = torch.where(is_drawn, _draw(changed, rows), tokens)
    return _choices(raw, tokens, rows)


def _change(logits: Tensor, row: Row) -> None:
    """Apply penalties and biases to a row of logits, in place."""
    params, vocabulary = row.params, len(logits)
    if params.repetition_penalty != 1:
        seen = torch.tensor(sorted({*row.prompt, *row.answer}), device=logits.device)
        values = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    counts = Counter(row.answer)
    if counts and (params.presence_penalty or params.frequency_penalty):
        ids = torch.tensor(list(counts), device=logits.device)
        times = torch.tensor(list(counts.values()), device=logits.device, dtype=logits.dtype)
        logits[ids] -= params.presence_penalty + params.frequency_penalty * times
    for token, bias in params.logit_bias.items():
        if 0 <= token < vocabulary:
            logits[token] += bias
    # The least number there is, and not minus infinity, which is for what isn't allowed at all.
    banned = [token for token in row.banned if 0 <= token < vocabulary]
    logits[banned] = torch.finfo(logits.dtype).min


def _mask(logits: Tensor, rows: Sequence[Row]) -> None:
    """Leave only what is allowed of each row, in place."""
    masks = {index: row.allowed for index, row in enumerate(rows) if row.allowed is not None}
    if not masks:
        return
    size = -(-logits.shape[-1] // 8)
    packed = b"".join(mask[:size].ljust(size, b"\0") for mask in masks.values())
    octets = torch.frombuffer(bytearray(packed), dtype=torch.uint8).to(logits.device)
    bits = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=logits.device)
    allowed = (octets.view(len(masks), size, 1) & bits).flatten(1)[:, : logits.shape[-1]] != 0
    places = torch.tensor(list(masks), device=logits.device)
    logits[places] = logits[places].masked_fill(~allowed, -torch.inf)


def _draw(logits: Tensor, rows: Sequence[Row]) -> Tensor:
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


def _choices(raw: Tensor, tokens: Tensor, rows: Sequence[Row]) -> list[TokenChoice]:
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
