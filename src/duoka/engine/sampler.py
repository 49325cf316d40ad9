"""Sampling: a token for each row of logits, each row with its own parameters.

The random number of a row depends only on its seed and its position in the generation, so a
generation doesn't depend on the other rows of a step. Tokens are drawn by inverse transform
sampling (`runtime.draw`). The parameters of a row are small, plain data, since they are sent to
another process in each step.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from duoka.runtime.devices import empty_host, record_event, send, wait
from duoka.runtime.draw import BANNED, LogitChange, change, draw, mask, with_log_probabilities

from .request import SamplingParams, TokenChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRow:
    """The parameters for sampling one row of logits.

    Parameters
    ----------
    params : SamplingParams
        Without `stop` and `grammar`, which sampling doesn't need.
    seed : int
    place : int
        The position of the token to sample: the number of generated tokens so far.
    prompt, answer : sequence of int
        The tokens so far; empty if no penalty depends on them.
    banned : sequence of int
        Tokens to sample only if `allowed` permits no others.
    allowed : bytes, optional
        Bit mask of the tokens that may be sampled, the lowest bit of a byte first; None for all.
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


class SampledTokens:
    """The tokens sampled for rows of logits, on their way to the host.

    Nothing of them is kept on the device.

    Parameters
    ----------
    tokens : Tensor
        [rows], on the device.
    rows : sequence of SamplingRow
    raw : Tensor
        The logits, [rows, vocabulary], for log-probabilities.
    """

    def __init__(self, tokens: Tensor, rows: Sequence[SamplingRow], raw: Tensor) -> None:
        self._rows = rows
        self._has_logprobs = any(row.params.logprobs is not None for row in rows)
        values = with_log_probabilities(raw, tokens) if self._has_logprobs else tokens
        self._on_host = empty_host(values.shape, values.dtype, values.device)
        self._on_host.copy_(values, non_blocking=True)
        self._copied = record_event(values.device)

    def choices(self) -> list[TokenChoice]:
        """Wait for the tokens; return them, with log-probabilities where requested."""
        wait(self._copied)
        values = self._on_host.tolist()
        if not self._has_logprobs:
            return [TokenChoice(token=token) for token in values]
        return [
            _make_choice(row, *numbers) for row, numbers in zip(self._rows, values, strict=True)
        ]


def sample(
    logits: Tensor, rows: Sequence[SamplingRow], keep: Callable[[Tensor], None] | None = None
) -> SampledTokens:
    """Sample a token for each row of logits, [rows, vocabulary]; the host doesn't wait.

    `keep` is called with the tokens on the device, [rows].
    """
    # Order: raw logits → penalties, biases, banned tokens → grammar mask → argmax for greedy rows;
    # for others temperature → top-k → top-p and min-p → draw by the row's random number.
    # Log-probabilities are those of the raw logits.
    raw = logits.float()
    changed = raw
    if any(row.changes_logits for row in rows):
        changed, vocabulary = raw.clone(), logits.shape[-1]
        changes = [_collect_changes(row, vocabulary) for row in rows]
        change(changed, [(at, *pair) for at, row in enumerate(changes) for pair in row.items()])
        if any(row.allowed is not None for row in rows):
            mask(changed, _join_masks(rows, vocabulary))
    tokens = changed.argmax(dim=-1)
    if not all(row.params.is_greedy for row in rows):
        columns = _make_columns(rows, raw)
        is_drawn = columns[-1, :, 0] > 0
        tokens = torch.where(is_drawn, draw(changed, *columns[:-1]), tokens)
    if keep is not None:
        keep(tokens)
    return SampledTokens(tokens, rows, raw)


def _collect_changes(row: SamplingRow, vocabulary: int) -> dict[int, LogitChange]:
    """Collect the changes of a row's logits by penalties, biases and bans, by token id."""
    # Example: a token has logit 2, and is in the prompt and twice in the answer. With penalties of
    # 1.25 (repetition), 0.5 (presence), 0.25 (frequency) and a bias of 1, its logit becomes
    #     2 / 1.25 - (0.5 + 2 * 0.25) + 1 = 1.6
    params = row.params
    changes: dict[int, LogitChange] = {}
    if params.repetition_penalty != 1:
        changes |= dict.fromkeys((*row.prompt, *row.answer), LogitChange(params.repetition_penalty))
    for token, times in Counter(row.answer).items() if params.has_penalties else ():
        penalty = params.presence_penalty + params.frequency_penalty * times
        changes[token] = _add_to_change(changes.get(token), -penalty)
    for token, bias in params.logit_bias.items():
        changes[token] = _add_to_change(changes.get(token), bias)
    changes |= dict.fromkeys(row.banned, BANNED)
    return {token: change for token, change in changes.items() if 0 <= token < vocabulary}


def _add_to_change(change: LogitChange | None, addend: float) -> LogitChange:
    """Add a number to a change of a logit; None stands for no change yet."""
    change = change or LogitChange()
    return LogitChange(change.divisor, change.addend + addend)


def _join_masks(rows: Sequence[SamplingRow], vocabulary: int) -> bytes:
    """Join the rows' masks, each padded or cut to the vocabulary; a row without one allows all."""
    size = -(-vocabulary // 8)
    masks = (row.allowed for row in rows)
    return b"".join(
        b"\xff" * size if mask is None else mask[:size].ljust(size, b"\0") for mask in masks
    )


def _make_columns(rows: Sequence[SamplingRow], logits: Tensor) -> Tensor:
    """Return [6, rows, 1] on the device of the logits: the parameters of `draw`; 0 if greedy."""
    columns = [
        [row.params.temperature or 1.0 for row in rows],
        [row.params.top_k or logits.shape[-1] for row in rows],
        [row.params.top_p for row in rows],
        [row.params.min_p for row in rows],
        [_random_number(row.seed, row.place) for row in rows],
        [not row.params.is_greedy for row in rows],
    ]
    return send(torch.tensor(columns, dtype=torch.float32), logits.device)[..., None]


# A shared generator with state would make a generation depend on the rows drawn before. Python
# hashes a text seed with SHA-512, so the number is the same in every process, whatever
# PYTHONHASHSEED is.
def _random_number(seed: int, place: int) -> float:
    """Return a random number in [0, 1) that depends only on the seed and the position."""
    return random.Random(f"{seed}/{place}").random()


def _make_choice(row: SamplingRow, token: float, logprob: float, *best: float) -> TokenChoice:
    """Make a row's `TokenChoice` of the numbers of `with_log_probabilities`."""
    number, half = row.params.logprobs, len(best) // 2
    if number is None:
        return TokenChoice(token=int(token))
    pairs = zip(map(int, best[half : half + number]), best[:number], strict=False)
    return TokenChoice(token=int(token), logprob=logprob, top_logprobs=tuple(pairs))
