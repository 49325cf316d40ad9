"""Flash attention over few queries: memory of partial outputs, one for each split of the keys.

If a batch has fewer pairs of heads and query blocks than the multiprocessors can run at a time,
PyTorch's kernel splits the keys to use all multiprocessors (FlashDecoding, 2023). It allocates a
partial output in fp32 and its logsumexp for each split. The number of splits depends on the number
of multiprocessors; that of an RTX 3090 is assumed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

_MULTIPROCESSORS = 82
_CONCURRENT = 2 * _MULTIPROCESSORS
_BUSY, _NEARLY = 0.8, 0.85000002  # 0.85 in fp32, in which the kernel compares
_QUERY_BLOCK = 64
_MOST_SPLITS = 128


@dataclass(frozen=True, slots=True)
class FlashShape:
    """The head counts and head size of attention, which determine the splits of the keys."""

    heads: int
    key_heads: int
    head_dim: int

    def part_rows(self, batch: int, query: int, keys: int) -> int:
        """Return the number of rows of all partial outputs; 0 if the keys aren't split.

        Examples
        --------
        >>> shape = FlashShape(8, 4, 256)
        >>> [shape.part_rows(1, *tokens) for tokens in ((1000, 1000), (4000, 4000), (1, 2000))]
        [48000, 0, 256]
        """
        heads = self.heads
        if query == 1 and heads > self.key_heads:
            # With one query, the heads that share a key head are treated as several queries.
            heads, query = self.key_heads, heads // self.key_heads
        key_block = 256 if self.head_dim <= 64 else 128 if self.head_dim <= 128 else 64
        splits = _splits(batch * heads * -(-query // _QUERY_BLOCK), -(-keys // key_block))
        return splits * batch * heads * query if splits > 1 else 0


class PartBytes(int):
    """The bytes of partial outputs, with the attention's shape and the bytes per row."""

    shape: FlashShape
    row_bytes: int

    @classmethod
    def of(cls, shape: FlashShape, row_bytes: int, batch: int, query: int, keys: int) -> PartBytes:
        """Return the bytes of partial outputs; 1 without splits, so that all steps allocate."""
        bytes_ = cls(max(row_bytes * shape.part_rows(batch, query, keys), 1))
        bytes_.shape, bytes_.row_bytes = shape, row_bytes
        return bytes_


@cache
def _splits(blocks: int, key_blocks: int) -> int:
    """Return the smallest number of splits with nearly the best use of the multiprocessors."""
    if blocks >= _BUSY * _CONCURRENT:
        return 1
    # Blocks of work run in waves over the multiprocessors; the share of busy multiprocessors is
    # highest if the last wave is full (`num_splits_heuristic` in FlashAttention's flash_api.cpp).
    # For 100 blocks of 8 key blocks each, 1, 2, 3, 4 and 8 splits give shares of 0.61, 0.61, 0.91,
    # 0.81 and 0.98: 0.91 is the first share of at least 85 % of 0.98, so there are 3 splits.
    shares = {}
    for splits in range(1, min(_MOST_SPLITS, _CONCURRENT, key_blocks) + 1):
        # Skip a number of splits with as many key blocks per split as one split fewer.
        if splits == 1 or -(-key_blocks // splits) != -(-key_blocks // (splits - 1)):
            waves = blocks * splits / _CONCURRENT
            shares[splits] = waves / -(-blocks * splits // _CONCURRENT)
    best = max(shares.values(), default=0.0)
    return next((splits for splits, share in shares.items() if share >= _NEARLY * best), 1)
