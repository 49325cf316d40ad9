"""Drawing tokens: the work of a device that samples a token from each row of logits.

All rows are computed alike, whatever their parameters, so that the memory follows from the number
of rows alone. Requests aren't known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

MOST_LOGPROBS = 20
_CHANGED = 1024


def draw(
    logits: Tensor,
    temperatures: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    numbers: Tensor,
) -> Tensor:
    """Draw a token of each row of logits, [rows, vocabulary].

    Probabilities are sorted in falling order, filtered, and summed up; the token is drawn in whose
    share of the sum the row's number falls. With probabilities 0.5, 0.3, 0.2 the number 0.6 draws
    the second token.

    Parameters
    ----------
    logits : Tensor
    temperatures, top_k, top_p, min_p : Tensor
        [rows, 1]
    numbers : Tensor
        From 0 to below 1, [rows, 1].
    """
    # Inverse transform sampling. Probabilities 0.5, 0.3, 0.15, 0.05 with top_p 0.7: likelier tokens
    # sum up to 0, 0.5, 0.8, 0.95, so the last two are dropped, and `sums` is 0.5, 0.8, 0.8, 0.8.
    # The number 0.9 becomes 0.9 * 0.8 = 0.72, in the share of the second token (0.5 to 0.8).
    ordered, tokens = logits.sort(dim=-1, descending=True)
    # The largest one becomes 0, so that exponents stay in range at any temperature.
    probabilities = torch.softmax((ordered - ordered[:, :1]) / temperatures, dim=-1)
    ranks = torch.arange(logits.shape[-1], device=logits.device)
    probabilities = probabilities.masked_fill(ranks >= top_k, 0.0)
    probabilities /= probabilities.sum(dim=-1, keepdim=True)
    # A token is dropped when likelier ones sum up to top_p already; the likeliest one stays.
    likelier = probabilities.cumsum(dim=-1) - probabilities
    threshold = min_p * probabilities[:, :1]
    is_dropped = ((likelier >= top_p) | (probabilities < threshold)) & (ranks > 0)
    sums = probabilities.masked_fill(is_dropped, 0.0).cumsum(dim=-1)
    places = torch.searchsorted(sums, numbers * sums[:, -1:], right=True)
    # Rounding may put a number behind the last token.
    last_place = (sums < sums[:, -1:]).sum(dim=-1, keepdim=True)
    return tokens.gather(-1, torch.minimum(places, last_place))[:, 0]


class LogitChange(NamedTuple):
    """A change of a logit: divided by `divisor` if positive, else multiplied; `addend` added."""

    divisor: float = 1.0
    addend: float = 0.0


# The smallest number, and not minus infinity, which is for tokens that a grammar excludes.
BANNED = LogitChange(1.0, torch.finfo(torch.float32).min)


def change(logits: Tensor, changes: Sequence[tuple[int, int, LogitChange]]) -> None:
    """Change logits, [rows, vocabulary], in place: each row and token at most once.

    `_CHANGED` of them are changed at a time, padding included.
    """
    for start in range(0, len(changes), _CHANGED):
        part = changes[start : start + _CHANGED]
        padding = [(0, _CHANGED - len(part)), (0, 0)]  # with the last one: twice is the same
        places = np.pad(np.array([pair[:2] for pair in part], np.int64), padding, "edge")
        numbers = np.pad(np.array([pair[2] for pair in part], np.float32), padding, "edge")
        where = torch.from_numpy(places).to(logits.device)
        amounts = torch.from_numpy(numbers).to(logits.device)
        divisors, addends = amounts.unbind(dim=1)
        rows, tokens = where.unbind(dim=1)
        values = logits[rows, tokens]
        values = torch.where(values > 0, values / divisors, values * divisors).add_(addends)
        logits[rows, tokens] = values.clamp_(min=BANNED.addend)


def mask(logits: Tensor, octets: bytes) -> None:
    """Mask all but the allowed tokens, in place: a bit for each token, the lowest first."""
    # The octet 0b00000101 and 1, 2, 4, …, 128 give 1, 0, 4, 0, …: tokens 0 and 2 are allowed.
    rows, vocabulary = logits.shape
    packed = torch.frombuffer(bytearray(octets), dtype=torch.uint8).to(logits.device)
    bits = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=logits.device)
    is_banned = (packed.view(rows, -1, 1) & bits).flatten(1)[:, :vocabulary] == 0
    logits.masked_fill_(is_banned, -torch.inf)


def log_probabilities(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities of the tokens, and of the likeliest tokens, with their ids."""
    logprobs = torch.log_softmax(logits, dim=-1)
    best = logprobs.topk(min(MOST_LOGPROBS, logits.shape[-1]), dim=-1)
    return logprobs.gather(-1, tokens[:, None]), best.values, best.indices


def draw_in_every_way(logits: Tensor) -> None:
    """Sample from rows of logits in every way, in turn.

    A device that has memory for this has memory for any of the ways.
    """
    raw = logits.float()
    for is_changed in (False, True):
        changed = raw
        if is_changed:
            changed = raw.clone()
            change(changed, [(0, 0, LogitChange())])
            mask(changed, b"\xff" * len(raw) * -(-raw.shape[-1] // 8))
        tokens = changed.argmax(dim=-1)
        log_probabilities(raw, tokens)
        is_drawn = torch.ones(len(raw), dtype=torch.bool, device=raw.device)
        columns = [torch.ones(len(raw), 1, device=raw.device) for _ in range(5)]
        tokens = torch.where(is_drawn, draw(changed, *columns), tokens)
        log_probabilities(raw, tokens)
        del changed, columns, is_drawn
