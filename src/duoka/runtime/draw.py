"""Drawing tokens: what a device does to choose one for each row of logits.

All rows are treated alike, whatever is asked of each: what that takes follows from how many there
are. It knows nothing of requests.
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
    """A token of each row, [rows, vocabulary], where a number from 0 to below 1 falls.

    That is among the probabilities of those that are left, in falling order. What it goes by is
    [rows, 1].
    """
    ordered, tokens = logits.sort(dim=-1, descending=True)
    # The largest one becomes 0: what follows stays in range at any temperature.
    probabilities = torch.softmax((ordered - ordered[:, :1]) / temperatures, dim=-1)
    ranks = torch.arange(logits.shape[-1], device=logits.device)
    probabilities = probabilities.masked_fill(ranks >= top_k, 0.0)
    probabilities /= probabilities.sum(dim=-1, keepdim=True)
    # A token is left out when those before it have the share already; the first one stays.
    before = probabilities.cumsum(dim=-1) - probabilities
    least = min_p * probabilities[:, :1]
    dropped = ((before >= top_p) | (probabilities < least)) & (ranks > 0)
    sums = probabilities.masked_fill(dropped, 0.0).cumsum(dim=-1)
    places = torch.searchsorted(sums, numbers * sums[:, -1:], right=True)
    # Rounding may put a number at the very end.
    last = (sums < sums[:, -1:]).sum(dim=-1, keepdim=True)
    return tokens.gather(-1, torch.minimum(places, last))[:, 0]


class LogitChange(NamedTuple):
    """What a logit is divided by if it is positive, or else multiplied by, and what is added."""

    divisor: float = 1.0
    addend: float = 0.0


# The least number there is, and not minus infinity, which is for what isn't allowed at all.
BANNED = LogitChange(1.0, torch.finfo(torch.float32).min)


def change(logits: Tensor, changes: Sequence[tuple[int, int, LogitChange]]) -> None:
    """Change logits, [rows, vocabulary], in place: each row and token at most once.

    So many are changed at a time, however many there are.
    """
    for start in range(0, len(changes), _CHANGED):
        part = changes[start : start + _CHANGED]
        padding = [(0, _CHANGED - len(part)), (0, 0)]  # by the last: twice is the same as once
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
    """Leave only what is allowed, in place: a bit for each token of each row, the lowest first."""
    rows, vocabulary = logits.shape
    packed = torch.frombuffer(bytearray(octets), dtype=torch.uint8).to(logits.device)
    bits = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=logits.device)
    is_banned = (packed.view(rows, -1, 1) & bits).flatten(1)[:, :vocabulary] == 0
    logits.masked_fill_(is_banned, -torch.inf)


def log_probabilities(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Those of the tokens, [rows, 1], and of the likeliest ones with these, [rows, number]."""
    logprobs = torch.log_softmax(logits, dim=-1)
    best = logprobs.topk(min(MOST_LOGPROBS, logits.shape[-1]), dim=-1)
    return logprobs.gather(-1, tokens[:, None]), best.values, best.indices


def draw_in_every_way(logits: Tensor) -> None:
    """Do all that may be done to choose from rows of logits, one way after the other.

    So a device that has memory for this has it for any of the ways.
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
