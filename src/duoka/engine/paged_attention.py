"""Attention over pages: a layer's keys and values lie in pages, on the layer's device.

All tokens of a step are one packed row, [1, tokens]; which sequence a token is of, and where its
earlier tokens are, the step says, that comes to the attention function as one of its arguments. The
model's own code isn't changed: it calls this function by transformers' `AttentionInterface`.

Sequences with one new token each are computed together, padded to the longest of those that are
about as long; others one by one. Scores of a whole context are never there at once: where no fused
kernel serves (sinks, soft caps), queries are taken in pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from duoka.errors import ModelError

from .step import Chunk

NAME = "duoka_paged"
# Sequences are padded together where the longest is at most so many times as long as the shortest.
_PADDING = 1.25
# Where scores have to be there, so many at a time.
_MOST_SCORES = 2**24


class PagedCache:
    """Keys and values in pages, for each layer where its first keys come from.

    Parameters
    ----------
    num_pages : int
        One more is made, which nobody has.
    page_tokens : int
    """

    def __init__(self, num_pages: int, page_tokens: int) -> None:
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's keys and values: [pages * page_tokens, heads, head_dim]."""
        if index not in self._layers:
            rows = (self.num_pages + 1) * self.page_tokens
            self._layers[index] = (
                key.new_zeros(rows, key.shape[1], key.shape[3]),
                value.new_zeros(rows, value.shape[1], value.shape[3]),
            )
        return self._layers[index]

    @property
    def scratch_page(self) -> int:
        """A page that is nobody's."""
        return self.num_pages


class Group(NamedTuple):
    """Sequences that are computed together.

    `rows` are those of their tokens in the packed row, as many of each sequence; `slots`,
    [sequences, keys], where the keys that may be seen lie in the cache; `mask`, [sequences, 1,
    queries, keys], which are. Without one it is a sequence from its beginning.
    """

    rows: slice | Tensor
    slots: Tensor
    mask: Tensor | None


class PagedStep:
    """The sequences of one step, as attention needs them.

    Index tensors are made once for all layers that are on a device and look back as far.
    """

    def __init__(self, chunks: Sequence[Chunk], cache: PagedCache) -> None:
        self.cache = cache
        self.offsets = [0, *accumulate(len(chunk.tokens) for chunk in chunks)]
        self.chunks = chunks
        self.windows: dict[int, int] = {}  # of the layers that have been called
        self._slots: dict[torch.device, Tensor] = {}
        self._groups: dict[tuple[torch.device, int], list[Group]] = {}

    def enter(self, layer: int, window: int) -> None:
        """Note a layer's call; ModelError for a second one, whose keys would replace these."""
        if layer in self.windows:
            raise ModelError(f"layer {layer} calls attention more than once")
        self.windows[layer] = window

    def slots(self, device: torch.device) -> Tensor:
        """Where each token's keys and values go: [tokens]."""
        if device not in self._slots:
            slots = [self._slot(chunk, at) for chunk in self.chunks for at in chunk.places]
            self._slots[device] = torch.tensor(slots, device=device)
        return self._slots[device]

    def groups(self, device: torch.device, window: int) -> list[Group]:
        """The groups of all sequences, where layers look back over `window` tokens; 0: over all."""
        key = device, window
        if key not in self._groups:
            self._groups[key] = [
                self._group(members, device, window) for members in self._together(window)
            ]
        return self._groups[key]

    def _slot(self, chunk: Chunk, place: int) -> int:
        size = self.cache.page_tokens
        return chunk.pages[place // size] * size + place % size

    def _together(self, window: int) -> Iterator[list[int]]:
        """Those that are computed together: with one new token each, and about as long."""
        chunks = self.chunks
        singles = [i for i, chunk in enumerate(chunks) if len(chunk.tokens) == 1 and not window]
        yield from ([index] for index in range(len(chunks)) if index not in singles)
        singles.sort(key=lambda index: chunks[index].end)
        members: list[int] = []
        for index in singles:
            if members and chunks[index].end > _PADDING * chunks[members[0]].end:
                yield members
                members = []
            members.append(index)
        if members:
            yield members

    def _group(self, members: Sequence[int], device: torch.device, window: int) -> Group:
        chunks = [self.chunks[index] for index in members]
        rows: slice | Tensor = slice(self.offsets[members[0]], self.offsets[members[0] + 1])
        if len(members) > 1:
            rows = torch.tensor([self.offsets[index] for index in members], device=device)
        first = max(0, chunks[0].start - window + 1) if window else 0
        end = max(chunk.end for chunk in chunks)
        nobodys = self.cache.scratch_page * self.cache.page_tokens
        slots = [
            [self._slot(chunk, at) if at < chunk.end else nobodys for at in range(first, end)]
            for chunk in chunks
        ]
        mask = None
        if len(members) > 1 or chunks[0].start or (window and end > window):
            queries = torch.tensor([list(chunk.places) for chunk in chunks], device=device)
            keys = torch.arange(first, end, device=device)
            mask = keys <= queries[..., None]
            if window:
                mask &= keys > queries[..., None] - window
            mask = mask[:, None]
        return Group(rows, torch.tensor(slots, device=device), mask)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    step: PagedStep | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Store a step's keys and values, and attend to those of each sequence.

    `query` is [1, heads, tokens, head_dim], `key` and `value` have their own numbers of heads; the
    result is [1, tokens, heads, head_dim]. Of transformers' `options` count `scaling`, `softcap`,
    `sliding_window`, and `s_aux`: sinks.
    """
    if step is None or not _is_plain(module, attention_mask, options):
        raise ModelError(f"{type(module).__name__} has a mask or a bias of its own, or looks ahead")
    window = _window_of(attention_mask, options.get("sliding_window"))
    step.enter(module.layer_idx, window)
    keys, values = step.cache.layer(module.layer_idx, key, value)
    slots = step.slots(key.device)
    keys.index_copy_(0, slots, key[0].transpose(0, 1))
    values.index_copy_(0, slots, value[0].transpose(0, 1))
    scaling, softcap, sinks = (options.get(name) for name in ("scaling", "softcap", "s_aux"))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = query.new_empty(query.shape[2], query.shape[1], value.shape[-1])
    for rows, places, mask in step.groups(key.device, window):
        # [sequences, heads, queries or keys, head_dim]
        queries = query[0, :, rows].transpose(0, 1).unflatten(0, (len(places), -1)).transpose(1, 2)
        seen_keys, seen_values = (states[places].transpose(1, 2) for states in (keys, values))
        if softcap is not None or sinks is not None:
            attended = _in_pieces(queries, seen_keys, seen_values, mask, scale, softcap, sinks)
        else:
            attended = _fused(queries, seen_keys, seen_values, mask, scale)
        output[rows] = attended.transpose(1, 2).flatten(0, 1)
    return output[None], None


def _fused(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attention by a fused kernel, causal where there is no mask; heads of queries share keys'."""
    groups = query.shape[1] // key.shape[1]
    if query.shape[2] == 1 and groups > 1:  # they become queries of the head that they share
        packed = query.reshape(query.shape[0], key.shape[1], groups, query.shape[3])
        attended = F.scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scale)
        return attended.reshape(query.shape[0], query.shape[1], 1, value.shape[3])
    if groups > 1:
        key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale
    )


def _in_pieces(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention with scores that are there, of so many queries at a time.

    A soft cap bounds scores (Gemma 2); sinks are one more score of each head, to which nothing
    belongs (GPT-OSS).
    """
    if mask is None:
        places = torch.arange(query.shape[2], device=query.device)
        mask = (places[None] <= places[:, None])[None, None]
    groups = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
    per_query = query.shape[0] * query.shape[1] * key.shape[2]
    size = max(1, _MOST_SCORES // per_query)
    parts = []
    for queries, seen in zip(query.split(size, dim=2), mask.split(size, dim=2), strict=True):
        scores = queries @ key.transpose(2, 3) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
        if sinks is not None:
            column = sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1).to(scores.dtype)
            scores = torch.cat([scores, column], dim=-1)
        shares = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
        parts.append(shares[..., : key.shape[2]] @ value)
    return torch.cat(parts, dim=2)


def _window_alone(*_: Any, local_size: int | None = None, device: Any = "cpu", **__: Any) -> Tensor:
    """In the place of a mask, which is made from the step: the window, as a size of nothing."""
    return torch.empty(local_size or 0, 0, device=device)


def _is_plain(module: Any, mask: Tensor | None, options: Mapping[str, Any]) -> bool:
    """Whether each token sees those before it, and nothing else is added to scores."""
    is_masked = mask is not None and mask.numel() > 0
    is_causal = getattr(module, "is_causal", True)
    return is_causal and not is_masked and options.get("position_bias") is None


def _window_of(mask: Tensor | None, sliding_window: int | None) -> int:
    """How many tokens a layer looks back; 0 for all. Some say so in their mask alone."""
    return (sliding_window or 0) if mask is None else mask.shape[0]


def register() -> None:
    """Let models have this attention by its name."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, _window_alone)
