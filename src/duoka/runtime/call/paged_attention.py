"""Attention over a paged cache: a layer's keys and values are in pages on the layer's device.

The model's own code isn't changed: it calls `attend` through transformers' `AttentionInterface`.
One of the arguments is the step (`paged_step.PagedStep`), which knows the sequence of each token
and the pages with the sequence's earlier tokens.

Pages of 256 tokens are read in place by FlashAttention, in one kernel for all sequences of a step,
by means of block tables: without workspace, mask or padding of keys.

Where that is impossible, keys and values are gathered, page by page, into a workspace of constant
size. 8-bit pages are multiplied by their scales there (rounded as in `models.kv_cache.Int8Layer`).
Masks have a workspace too, and so have scores where no fused kernel can be used (sinks, soft caps),
or is slow: for latents (`latents`), whose many query heads share one large key head.
Only the number of tokens and the number of queries in a tile differ from step to step.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from duoka.errors import ModelError
from duoka.forecast.serving import PIECE_ROWS
from duoka.virtual import attention_numbers  # noqa: F401  (the CPU's kernel of `varlen_attn`)

from .latents import absorb_queries, expand_values, halves, keeps_latents
from .paged_cache import GatherWorkspace, Pages

if TYPE_CHECKING:
    from .paged_step import PagedStep, QueryTile, SequenceGroup

_States = tuple[Tensor, Tensor, Tensor]  # queries, keys and values: [tokens, heads, head_dim]
NAME = "duoka_paged"
NAME_WITHOUT_MASKS = "duoka_paged_without_masks"
# The number of scores that are materialised at a time. It is the same in every step, so that the
# forecast knows the memory, and suffices for all queries of a tile at traced context lengths.
# Scores take 64 MiB in float32, and the attention weights 32 MiB in 16 bit.
_MOST_SCORES = 2**24
# Fused kernels need head sizes that are a multiple of this number.
_ALIGNED = 8
_MOST_HEAD_DIM = 256  # of FlashAttention
# transformers' mask functions by which a token attends only to earlier tokens of its sequence.
_CAUSAL_MASKS = {
    "causal_mask_function", "sliding_window_overlay", "and_masks",
    "packed_sequence_mask_function", "remap_positions_for_packed_sequence",
}  # fmt: skip
_OPTIONS = ("scaling", "softcap", "sliding_window", "s_aux", "is_causal")
# Options that transformers' models pass to all attention functions, which ignore them.
_CHANGES_NOTHING = {"position_ids", "output_hidden_states", "output_router_logits"}


class Scoring(NamedTuple):
    """How a layer computes its attention weights.

    No fused kernel has a soft cap, which bounds scores (Gemma 2), or sinks, [heads], which are one
    more score for each head without a value (GPT-OSS).
    """

    scale: float
    softcap: float | None
    sinks: Tensor | None

    @property
    def is_plain(self) -> bool:
        """True if attention weights are a softmax of scaled products."""
        return self.softcap is None and self.sinks is None


class _ScoreWorkspace(NamedTuple):
    """Further buffers for a layer whose scores are materialised."""

    scores: Tensor
    weights: Tensor
    queries: Tensor
    attended: Tensor
    rows: tuple[Tensor, ...]

    @classmethod
    def new(cls, query: Tensor, value_dim: int, tokens: int, dtype: torch.dtype) -> _ScoreWorkspace:
        """Allocate buffers for queries over `tokens` keys, at most `_MOST_SCORES` at a time."""
        heads = query.shape[1]
        if heads * tokens > _MOST_SCORES:
            raise ModelError(
                f"{heads} heads and {tokens} tokens have {heads * tokens} attention scores per "
                f"token; the limit is {_MOST_SCORES}",
                hint=f"use a context of at most {_MOST_SCORES // heads} tokens",
            )
        rows = PIECE_ROWS * heads
        return cls(
            scores=query.new_empty(_MOST_SCORES, dtype=dtype),
            weights=query.new_empty(_MOST_SCORES),
            queries=query.new_empty(rows * max(query.shape[-1], value_dim)),
            attended=query.new_empty(rows * value_dim),
            rows=tuple(query.new_empty(rows, dtype=torch.float32) for _ in range(3)),
        )


# A call, for one new token at position 5 of a sequence with the block table [7, 2], pages of 4:
#
#     store     the token's keys and values into slot 9
#     gather    pages 7 and 2 into rows 0 … 7 of the workspace: the keys of positions 0 … 7
#     mask      rows 6 and 7: positions after 5, where page 2 has outdated contents
#     attend    1 query to 8 keys, for each head
#
# Storing comes first, so that tokens of a prefill chunk find each other's keys in the pages. All
# padding tokens write to the first slot of the scratch page, whose keys are masked, or seen only by
# queries whose results are dropped. Workspaces are freed when the call ends, and the caching
# allocator can give the same memory to the next layer.
def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    step: PagedStep | None = None,
    step_table: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Write a step's keys and values into pages, and attend to all keys of each sequence.

    Parameters
    ----------
    query : Tensor
        [1, heads, tokens, head_dim]; `key` and `value` may have fewer heads.
    step, step_table
        See `PagedStep`.
    options
        transformers' options. Those in `_OPTIONS` are applied (`s_aux` are sinks), those in
        `_CHANGES_NOTHING` are ignored, and all others are refused unless False, 0.0 or None.

    Returns
    -------
    tuple
        The result [1, tokens, heads, head_dim], and None in place of attention weights.
    """
    scaling, softcap, sliding_window, sinks, is_causal = (options.pop(x, None) for x in _OPTIONS)
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    is_masked = attention_mask is not None and attention_mask.numel() > 0
    if step is None or step_table is None or is_masked or not is_causal:
        raise ModelError(f"{type(module).__name__} has its own attention mask, or is not causal")
    _refuse_unknown(module, options)
    # Some models pass their window only through the mask: see `_make_window_mask`.
    window = sliding_window or 0 if attention_mask is None else attention_mask.shape[0]
    window = step.enter(module.layer_idx, window)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    weights = halves(module, step.cache.unpacked) if keeps_latents(module) else None
    query = query if weights is None else absorb_queries(weights[0], query)
    states = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    pages = step.cache.layer(module.layer_idx, *((key, value) if weights is None else (key,)))
    slots = step.slots(step_table)
    for cached, new in zip(pages, states[1:], strict=False):
        cached.store(slots, new)
    if not step.cache.capacity.has_block_tables:
        scoring = Scoring(scale, softcap, sinks)
        gathered = _attend_gathered(states, pages, step, step_table, window, scoring)
        result = gathered if weights is None else expand_values(weights[1], gathered)
        return result[None], None
    head_dim = query.shape[-1]
    is_sized = head_dim == value.shape[-1] <= _MOST_HEAD_DIM and not head_dim % _ALIGNED
    if softcap is not None or sinks is not None or not is_sized:
        raise ModelError(f"{type(module).__name__} can't read pages by block tables")
    tables, most = step.block_tables(step_table), step.max_queries
    stored = pages[0].states, pages[1].states
    return attend_in_place(states[0], *stored, tables, most, scale=scale, window=window)[None], None


def attend_in_place(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: tuple[Tensor, Tensor, Tensor],
    max_queries: int,
    *,
    scale: float | None,
    window: int,
) -> Tensor:
    """Attend by FlashAttention with block tables.

    Parameters
    ----------
    query : Tensor
        [tokens, heads, head_dim], as the result.
    keys, values : Tensor
        Pages: [pages, page_tokens, key heads, head_dim].
    tables : tuple
        See `PagedStep.block_tables`.
    max_queries : int
        The most queries of a sequence.
    scale : float, optional
    window : int
        The sliding window in tokens; 0 for full attention.
    """
    # Query i of n of a sequence with m keys attends to keys 0 … m - n + i; with a window of w, to
    # the last w of these. A single pass over the keys (num_splits=1) gives each sequence the same
    # result in any company. (Several passes are wrong for several sequences in torch 2.13: its
    # issue 194167.)
    offsets, used, block_table = tables
    attended = varlen_attn(
        query,
        keys,
        values,
        offsets,
        offsets,  # not read, since `seqused_k` has the numbers of keys
        max_queries,
        block_table.shape[1] * keys.shape[1],
        scale=scale,
        window_size=(window - 1, 0),  # (-1, 0) without a window
        enable_gqa=query.shape[1] != keys.shape[2],
        seqused_k=used,
        block_table=block_table,
        num_splits=1,
    )
    assert isinstance(attended, Tensor), "no logsumexps are requested"
    return attended


def _attend_gathered(
    states: _States,
    pages: tuple[Pages, ...],
    step: PagedStep,
    table: Tensor,
    window: int,
    scoring: Scoring,
) -> Tensor:
    """Attend to gathered pages, tile by tile; return [tokens, heads, head_dim]."""
    positions, numbers = (table[part] for part in step.parts(window))
    tokens, (query, key, value) = step.cache.capacity.gathered_tokens, states
    workspaces = [GatherWorkspace.new(part, tokens) for part in pages]
    masks = (
        query.new_empty(PIECE_ROWS * tokens),
        query.new_empty(PIECE_ROWS * tokens, dtype=torch.bool),
    )
    is_aligned = not (query.shape[-1] % _ALIGNED or value.shape[-1] % _ALIGNED)
    is_fused = scoring.is_plain and is_aligned and len(pages) > 1
    dtype = query.dtype if scoring.is_plain else torch.float32
    workspace = None if is_fused else _ScoreWorkspace.new(query, value.shape[-1], tokens, dtype)
    # [tokens, heads of keys, queries that share one, head_dim]
    heads = key.shape[1], query.shape[1] // key.shape[1]
    output = query.new_zeros(len(query), *heads, value.shape[-1])
    query = query.transpose(0, 1).unflatten(0, heads)
    layer = _Layer(query, table, positions, window, scoring, *masks, workspace)
    for group in step.groups(window):
        rows = numbers[group.offset : group.offset + group.sequences * group.pages]
        parts = [part.gather(rows, room) for part, room in zip(pages, workspaces, strict=True)]
        # Latents are a part of their keys.
        gathered = parts[0], parts[-1][..., : value.shape[-1]]
        for tile in group.tiles:
            # Without a name a tile's result is freed before the next tile is computed.
            output[tile.first : tile.first + tile.rows][tile.inner].copy_(
                layer.attend_tile(gathered, group, tile)[tile.inner]
            )
    return output.flatten(1, 2)


def _refuse_unknown(module: Any, options: dict[str, Any]) -> None:
    """Raise ModelError for unknown options, unless they are False, 0.0 or None."""
    for name in options.keys() - _CHANGES_NOTHING:
        if isinstance(options[name], Tensor) or options[name]:
            raise ModelError(f"{type(module).__name__} passes to its attention an unknown {name!r}")


class _Layer(NamedTuple):
    """A call of attention; `query` is [key heads, query heads per key head, tokens, head_dim].

    `bias` and `hidden` are buffers for masks. `workspace` is for materialised scores, None if a
    fused kernel can be used.
    """

    query: Tensor
    table: Tensor
    positions: Tensor
    window: int
    scoring: Scoring
    bias: Tensor
    hidden: Tensor
    workspace: _ScoreWorkspace | None

    # Shapes, with K key heads, G query heads per key head, n keys, and head size d:
    #
    #                   query            keys and values   bias
    #     one sequence  [K, G, rows, d]  [K, 1, n, d]      [1, 1, rows, n]
    #     several       [rows, K, G, d]  [rows, K, n, d]   [rows, 1, 1, n]
    #
    # Several sequences have one query each: row i of the tile attends to the keys of sequence i.
    def attend_tile(
        self, gathered: tuple[Tensor, Tensor], group: SequenceGroup, tile: QueryTile
    ) -> Tensor:
        """Attend for a tile; return [rows, key heads, query heads per key head, head_dim]."""
        keys, values = (_states_of(states, group, tile) for states in gathered)
        skipped = tile.skipped * (len(gathered[0]) // (group.sequences * group.pages))
        rows = slice(tile.first, tile.first + tile.rows)
        bias = self._mask(self.table[skipped : skipped + keys.shape[2]], self.positions[rows, None])
        query = self.query[:, :, rows]
        if group.sequences > 1:
            query = query.permute(2, 0, 1, 3)
        bias = bias[:, None, None] if group.sequences > 1 else bias[None, None]
        if self.workspace is None:
            result = _attend_fused(query, keys, values, bias, self.scoring.scale)
        else:
            result = self._attend_with_scores(query, keys, values, bias, self.workspace)
        return result if group.sequences > 1 else result.permute(2, 0, 1, 3)

    # Queries 4 and 5, keys 0 … 5, and a window of 3 (. is -inf):
    #     query 4   . . 0 0 0 .
    #     query 5   . . . 0 0 0
    # Positions count from the first gathered page. Padding of a block table is at its end, after
    # all queries of the sequence, so that the causal rule masks the padding.
    def _mask(self, keys: Tensor, queries: Tensor) -> Tensor:
        """Build the additive mask [queries, keys] for causal attention with an optional window."""
        shape = len(queries), len(keys)
        bias, hidden = (
            part[: shape[0] * shape[1]].view(shape) for part in (self.bias, self.hidden)
        )
        bias.zero_()
        bias.masked_fill_(torch.gt(keys, queries, out=hidden), -torch.inf)
        if self.window:
            bias.masked_fill_(torch.le(keys, queries - self.window, out=hidden), -torch.inf)
        return bias

    def _attend_with_scores(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, buffers: _ScoreWorkspace
    ) -> Tensor:
        """Attend with materialised scores, for as many queries at a time as the buffers hold."""
        if len(bias) > 1:
            query, key, value, bias = (part.transpose(0, 1) for part in (query, key, value, bias))
            # [key heads, sequences, query heads per key head, 1, …]
            result = self._attend_part(query.unsqueeze(3), key, value, bias.unsqueeze(2), buffers)
            return result.transpose(0, 1)[..., 0, :]
        # [key heads, 1, query heads per key head, rows, …]
        query, bias = query[:, None], bias[:, None]
        attended = _view(buffers.attended, *query.shape[:-1], value.shape[-1])
        per_row = query.shape[0] * query.shape[2] * key.shape[2]
        size = max(1, len(buffers.scores) // per_row)
        for start in range(0, query.shape[3], size):
            rows = slice(start, start + size)
            part = self._attend_part(query[:, :, :, rows], key, value, bias[:, :, :, rows], buffers)
            attended[:, :, :, rows].copy_(part)
        return attended[:, 0]

    def _attend_part(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, buffers: _ScoreWorkspace
    ) -> Tensor:
        """Return values weighted by softmax(scale · query · keyᵀ + bias), in the buffers.

        `query` is [key heads, sequences, sharing, rows, head_dim] with `sharing` query heads per
        key head; `key` and `value` are [key heads, sequences, keys, head_dim]; `bias` is broadcast.
        """
        heads, sequences, sharing, rows, _ = query.shape
        shape = heads, sequences, sharing * rows, key.shape[2]
        packed = _view(buffers.queries, *shape[:3], query.shape[-1])
        torch.mul(query, self.scoring.scale, out=packed.view(query.shape))
        weights = _view(buffers.weights, *shape)
        scores = _view(buffers.scores, *shape) if self.scoring.is_plain else weights
        for head in range(heads):
            torch.bmm(packed[head], key[head].transpose(1, 2), out=scores[head])
        if self.scoring.is_plain:
            scores.view(*query.shape[:4], -1).add_(bias)
            torch.softmax(scores, dim=-1, out=weights)
        else:
            self._normalize(weights, bias, query.shape[:4], buffers)
        attended = _view(buffers.queries, *shape[:3], value.shape[-1])  # queries have been read
        for head in range(heads):
            torch.bmm(weights[head], value[head], out=attended[head])
        return attended.view(*query.shape[:4], value.shape[-1])

    # The softmax is exact and in float32, in place: scores are shifted by the row's maximum m,
    # exponentiated, and divided by their sum. A sink s is a score without a value: m includes
    # s, and the sum includes exp(s - m). Scores 1, 2 and a sink of 2: m = 2, the sum is
    # e⁻¹ + 1 + 1, and the weights are 0.16 and 0.42; the remaining 0.42 belong to no value.
    def _normalize(
        self, weights: Tensor, bias: Tensor, shape: torch.Size, buffers: _ScoreWorkspace
    ) -> None:
        """Replace scores by attention weights, with a soft cap, sinks or both."""
        exact = _view(buffers.scores, *weights.shape).copy_(weights)
        if self.scoring.softcap is not None:
            exact.div_(self.scoring.softcap).tanh_().mul_(self.scoring.softcap)
        exact = exact.view(*shape, -1).add_(bias)
        maximum, total, sink = (_view(part, *shape, 1) for part in buffers.rows)
        torch.amax(exact, dim=-1, keepdim=True, out=maximum)
        if self.scoring.sinks is not None:
            sinks = self.scoring.sinks.view(shape[0], 1, shape[2], 1, 1)
            torch.maximum(maximum, sinks, out=maximum)
            torch.sub(sinks, maximum, out=sink).exp_()
        torch.sum(exact.sub_(maximum).exp_(), dim=-1, keepdim=True, out=total)
        if self.scoring.sinks is not None:
            total.add_(sink)
        weights.copy_(exact.div_(total).view(weights.shape))


def _view(buffer: Tensor, *shape: int) -> Tensor:
    """Return the first elements of a buffer as a tensor of a given shape."""
    return buffer[: math.prod(shape)].view(shape)


def _states_of(states: Tensor, group: SequenceGroup, tile: QueryTile) -> Tensor:
    """Return the gathered states that a tile attends to.

    Their shape is [sequences, heads, keys, head_dim] for several sequences, and [heads, 1, keys,
    head_dim] for a single one.
    """
    if group.sequences > 1:
        return states.view(group.sequences, -1, *states.shape[1:]).transpose(1, 2)
    size = len(states) // group.pages
    part: Tensor = states[tile.skipped * size : (tile.skipped + tile.pages) * size]
    return part.transpose(0, 1)[:, None]


# Grouped-query attention without repeated keys: with 8 query heads, 2 key heads and 64 queries of a
# sequence, the kernel gets a batch of 2 with 4 heads each, and keys that are expanded (stride 0).
def _attend_fused(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Attend by a fused kernel of `scaled_dot_product_attention`.

    For several sequences the query heads of one key head are passed as rows of that head. For a
    single sequence each key head is passed as an element of the batch, whose heads share its keys.
    """
    if len(bias) == 1:
        key, value = (states.expand(-1, query.shape[1], -1, -1) for states in (key, value))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale)


# transformers makes one mask per call of the model and kind of layer, and passes it to the layers.
# In its place the empty tensor [window, 0] takes no memory and is moved like a mask: so `attend`
# gets the window even from models that don't pass `sliding_window`.
def _make_window_mask(*, mask_function: Any, local_size: int = 0, **options: Any) -> Tensor:
    """Return an empty tensor [window, 0] in place of a mask; raise ModelError if not causal."""
    padding = options["attention_mask"]  # OPT's in transformers 5.17 masks nothing
    if not _is_causal(mask_function) or not (padding is None or padding.all()):
        raise ModelError("the model's mask is more than causal")
    return torch.empty(local_size, 0, device=options["device"])


# The mask of a sliding window is the closure `and_masks.<locals>.and_mask`, whose cell has the
# functions `sliding_window_overlay.<locals>.inner_mask` and `causal_mask_function`: the names of
# all three are known. Code with further overlays (blocks of image tokens) has an unknown function.
def _is_causal(mask: Any) -> bool:
    """Return True if a mask function, and all functions in its closure, are known as causal."""
    name = mask.__qualname__.partition(".")[0]
    if mask.__module__ != masking_utils.__name__ or name not in _CAUSAL_MASKS:
        return False
    parts = tree_leaves([cell.cell_contents for cell in mask.__closure__ or ()])
    return all(_is_causal(part) for part in parts if callable(part))


def register() -> None:
    """Register this attention with transformers under both names, with masks under `NAME`.

    transformers makes no masks for an attention without registered ones.
    """
    AttentionInterface.register(NAME, attend)
    AttentionInterface.register(NAME_WITHOUT_MASKS, attend)
    AttentionMaskInterface.register(NAME, _make_window_mask)
