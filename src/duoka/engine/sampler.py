"""Sampling: a token for each row of logits, each row by its own parameters.

The random number of a row follows from its seed and its position in the generation alone, so that a
generation doesn't depend on the others of a step. The token is drawn in whose share of the
probabilities, in falling order, that number falls. The parameters of a row are small, plain data:
they go to another process in each step.
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
    """The parameters by which a row of logits is sampled.

    Parameters
    ----------
    params : SamplingParams
        Without stop texts and grammar, which aren't needed here.
    seed : int
    place : int
        The number of generated tokens so far.
    prompt, answer : sequence of int
        The tokens so far, where penalties depend on them.
    banned : sequence of int
        Tokens that are sampled only where no other token is allowed.
    allowed : bytes, optional
        The only tokens to sample: a bit for each token, the lowest of a byte first.
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
        """True if logits are changed before sampling."""
        params = self.params
        is_biased = params.has_penalties or params.logit_bias or self.banned
        return bool(is_biased or self.allowed is not None)


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> list[TokenChoice]:
    """Sample a token for each row of logits, [rows, vocabulary]."""
    # The order: raw logits → penalties, biases, banned tokens → grammar → argmax; and where a row
    # is drawn, temperature → top-k → top-p and min-p → the row's number. Log-probabilities are of
    # raw logits.
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
    """Collect the changes of a row's logits by penalties and biases, by token."""
    # A token with logit 2, which is in the prompt and twice in the answer, with penalties of 1.25
    # (repetition), 0.5 (presence), 0.25 (frequency) and a bias of 1, becomes
    #     2 / 1.25 - (0.5 + 2 * 0.25) + 1 = 1.6
    params = row.params
    changes: dict[int, LogitChange] = {}
    if params.repetition_penalty != 1:
        changes |= dict.fromkeys((*row.prompt, *row.answer), LogitChange(params.repetition_penalty))
    for token, times in Counter(row.answer).items() if params.has_penalties else ():
        penalty = params.presence_penalty + params.frequency_penalty * times
        changes[token] = _add(changes.get(token), -penalty)
    for token, bias in params.logit_bias.items():
        changes[token] = _add(changes.get(token), bias)
    changes |= dict.fromkeys(row.banned, BANNED)
    return {token: change for token, change in changes.items() if 0 <= token < vocabulary}


def _add(change: LogitChange | None, addend: float) -> LogitChange:
    change = change or LogitChange()
    return LogitChange(change.divisor, change.addend + addend)


def _octets(rows: Sequence[SamplingRow], vocabulary: int) -> bytes:
    """Join the bits of the allowed tokens of each row; all tokens where a row has no bits."""
    size = -(-vocabulary // 8)
    masks = (row.allowed for row in rows)
    return b"".join(
        b"\xff" * size if mask is None else mask[:size].ljust(size, b"\0") for mask in masks
    )


def _draw(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Draw a token of each row at random, by its probability among the remaining tokens."""
    device = logits.device

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, device=device, dtype=torch.float32)[:, None]

    return draw(
        logits,
        temperatures=column([row.params.temperature or 1.0 for row in rows]),
        top_k=column([row.params.top_k or logits.shape[-1] for row in rows]),
        top_p=column([row.params.top_p for row in rows]),
        min_p=column([row.params.min_p for row in rows]),
        numbers=column([_uniform(row.seed, row.place) for row in rows]),
    )


# A generator with a state would make a generation depend on which other rows were drawn before.
# Python seeds with a text by its SHA-512: the number is the same in every process, whatever
# PYTHONHASHSEED is.
def _uniform(seed: int, place: int) -> float:
    """Return a number from 0 to below 1 that follows from the two alone."""
    return random.Random(f"{seed}/{place}").random()


def _choices(raw: Tensor, tokens: Tensor, rows: Sequence[SamplingRow]) -> list[TokenChoice]:
    """Make the outcomes of tokens, with log-probabilities where they are requested."""
    ids: list[int] = tokens.tolist()
    reported = [index for index, row in enumerate(rows) if row.params.logprobs is not None]
    choices = [TokenChoice(token=token) for token in ids]
    if not reported:
        return choices
    logprobs, best_values, best_ids = (part.tolist() for part in log_probabilities(raw, tokens))
    for index in reported:
        number = rows[index].params.logprobs or 0
        pairs = zip(best_ids[index][:number], best_values[index][:number], strict=True)
        choices[index] = TokenChoice(
            token=ids[index], logprob=logprobs[index][0], top_logprobs=tuple(pairs)
        )
    return choices
