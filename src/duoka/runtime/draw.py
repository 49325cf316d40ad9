"""Drawing tokens: the operations by which a device samples a token from each row of logits.

Every row goes through the same operations, whatever its sampling parameters, so that the memory
depends on the number of rows alone. The host doesn't wait for the device. This module knows nothing
of requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .devices import send

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
    """Sample one token from each row of logits, [rows, vocabulary]; return the tokens, [rows].

    A row's probabilities are sorted in descending order, filtered, and summed up cumulatively. The
    row's number selects the token in whose interval of the sum it falls: with probabilities 0.5,
    0.3, 0.2 the number 0.6 draws the second token.

    Parameters
    ----------
    logits : Tensor
    temperatures, top_k, top_p, min_p : Tensor
        Sampling parameters of each row, [rows, 1].
    numbers : Tensor
        Random numbers from 0 to below 1, [rows, 1].
    """
    # Inverse transform sampling. Probabilities 0.5, 0.3, 0.15, 0.05 with top_p 0.7: the tokens
    # before each sum up to 0, 0.5, 0.8, 0.95, so the last two are dropped; `sums` is 0.5, 0.8, 0.8,
    # 0.8.
    # The number 0.9 becomes 0.9 * 0.8 = 0.72, in the share of the second token (0.5 to 0.8).
    ordered, tokens = logits.sort(dim=-1, descending=True)
    # The largest logit becomes 0, so that exponents stay in range at any temperature.
    probabilities = torch.softmax((ordered - ordered[:, :1]) / temperatures, dim=-1)
    ranks = torch.arange(logits.shape[-1], device=logits.device)
    probabilities = probabilities.masked_fill(ranks >= top_k, 0.0)
    probabilities /= probabilities.sum(dim=-1, keepdim=True)
    # A token is dropped if likelier tokens sum up to top_p already; the likeliest token stays.
    likelier = probabilities.cumsum(dim=-1) - probabilities
    threshold = min_p * probabilities[:, :1]
    is_dropped = ((likelier >= top_p) | (probabilities < threshold)) & (ranks > 0)
    sums = probabilities.masked_fill(is_dropped, 0.0).cumsum(dim=-1)
    places = torch.searchsorted(sums, numbers * sums[:, -1:], right=True)
    # Rounding may put a number behind the last token that isn't dropped.
    last_place = (sums < sums[:, -1:]).sum(dim=-1, keepdim=True)
    return tokens.gather(-1, torch.minimum(places, last_place))[:, 0]


class LogitChange(NamedTuple):
    """A change of a logit: divided by `divisor` if positive, else multiplied; then add `addend`."""

    divisor: float = 1.0
    addend: float = 0.0


# The smallest finite number: minus infinity marks tokens that a grammar excludes (`mask`).
BANNED = LogitChange(1.0, torch.finfo(torch.float32).min)


def change(logits: Tensor, changes: Sequence[tuple[int, int, LogitChange]]) -> None:
    """Change logits, [rows, vocabulary], in place, by (row, token, change), each at most once.

    Changes are made `_CHANGED` at a time, with padding, so that each time takes the same memory.
    """
    for start in range(0, len(changes), _CHANGED):
        part = changes[start : start + _CHANGED]
        padding = [(0, _CHANGED - len(part)), (0, 0)]  # repeats the last change
        places = np.pad(np.array([pair[:2] for pair in part], np.int64), padding, "edge")
        numbers = np.pad(np.array([pair[2] for pair in part], np.float32), padding, "edge")
        where = send(torch.from_numpy(places), logits.device)
        amounts = send(torch.from_numpy(numbers), logits.device)
        divisors, addends = amounts.unbind(dim=1)
        rows, tokens = where.unbind(dim=1)
        values = logits[rows, tokens]
        values = torch.where(values > 0, values / divisors, values * divisors).add_(addends)
        logits[rows, tokens] = values.clamp_(min=BANNED.addend)


def mask(logits: Tensor, octets: bytes) -> None:
    """Set the logits of all but the allowed tokens to -inf, in place.

    `octets` has a bit for each token of each row, lowest bit first: 1 allows the token.
    """
    # The octet 0b00000101, shifted right by 0, 1, 2, …, has the last bits 1, 0, 1, 0, …: tokens 0
    # and 2 are allowed.
    rows, vocabulary = logits.shape
    packed = send(torch.frombuffer(bytearray(octets), dtype=torch.uint8), logits.device)
    shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
    bits = (packed.view(rows, -1, 1) >> shifts).bitwise_and_(1)
    is_banned = bits.flatten(1)[:, :vocabulary] == 0
    logits.masked_fill_(is_banned, -torch.inf)


def with_log_probabilities(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return [rows, 2 + 2k] in float64, a row for each token, to be copied to the host at once.

    A row has the token, its log-probability, the log-probabilities of the k likeliest tokens (at
    most `MOST_LOGPROBS`), and those tokens.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    best = logprobs.topk(min(MOST_LOGPROBS, logits.shape[-1]), dim=-1)
    column = tokens[:, None]
    parts = column, logprobs.gather(-1, column), best.values, best.indices
    return torch.cat([part.double() for part in parts], dim=1)


def draw_in_every_way(logits: Tensor) -> None:
    """Run every path of sampling once: greedy, drawn, with changed logits, with log-probabilities.

    A device with enough memory for this has enough for any sampling parameters.
    """
    raw = logits.float()
    for is_changed in (False, True):
        changed = raw
        if is_changed:
            changed = raw.clone()
            change(changed, [(0, 0, LogitChange())])
            mask(changed, b"\xff" * len(raw) * -(-raw.shape[-1] // 8))
        tokens = changed.argmax(dim=-1)
        with_log_probabilities(raw, tokens)
        columns = torch.ones(6, len(raw), 1, device=raw.device)
        is_drawn = columns[-1, :, 0] > 0
        tokens = torch.where(is_drawn, draw(changed, *columns[:-1]), tokens)
        with_log_probabilities(raw, tokens)
        del changed, columns, is_drawn
