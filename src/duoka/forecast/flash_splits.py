"""Flash attention over few queries: the keys are split, and parts of the output are added up.

Where the heads and blocks of queries of a prompt are fewer than the multiprocessors can take at a
time, PyTorch's kernel splits the keys until they are busy (FlashDecoding, 2023), and holds a part
of the output, in fp32, and its logsumexp for each split. How many splits there are depends on the
number of multiprocessors, which is taken to be an RTX 3090's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

_MULTIPROCESSORS = 82
_AT_A_TIME = 2 * _MULTIPROCESSORS
_BUSY, _NEARLY = 0.8, 0.85000002  # the kernel reckons in fp32, which decides where shares are equal
_QUERIES = 64
_MOST_SPLITS = 128


@dataclass(frozen=True, slots=True)
class FlashShape:
    """The shape of a model's attention, which decides on the splits of its keys."""

    heads: int
    key_heads: int
    head_dim: int

    def part_rows(self, batch: int, query: int, keys: int) -> int:
        """Return the rows of all parts together; 0 without splits.

        Examples
        --------
        >>> shape = FlashShape(8, 4, 256)
        >>> [shape.part_rows(1, *tokens) for tokens in ((1000, 1000), (4000, 4000), (1, 2000))]
        [48000, 0, 256]
        """
        heads = self.heads
        if query == 1 and heads > self.key_heads:
            # One query: those of the heads that share their keys take the place of more queries.
            heads, query = self.key_heads, heads // self.key_heads
        key_block = 256 if self.head_dim <= 64 else 128 if self.head_dim <= 128 else 64
        splits = _splits(batch * heads * -(-query // _QUERIES), -(-keys // key_block))
        return splits * batch * heads * query if splits > 1 else 0


class PartBytes(int):
    """The bytes of parts, with their shape and the bytes of a row."""

    shape: FlashShape
    row_bytes: int

    @classmethod
    def of(cls, shape: FlashShape, row_bytes: int, batch: int, query: int, keys: int) -> PartBytes:
        """Return the bytes to charge; a single byte without splits, so that all steps are alike."""
        bytes_ = cls(max(row_bytes * shape.part_rows(batch, query, keys), 1))
        bytes_.shape, bytes_.row_bytes = shape, row_bytes
        return bytes_


@cache
def _splits(blocks: int, key_blocks: int) -> int:
    """Return the fewest splits with nearly the best use of the multiprocessors."""
    if blocks >= _BUSY * _AT_A_TIME:
        return 1
    # Blocks of work run in waves over the multiprocessors; the share of busy ones is best where the
    # last wave is full (`num_splits_heuristic` in FlashAttention's flash_api.cpp). For 100 blocks
    # of 8 key blocks each, 1, 2, 3, 4 and 8 splits keep shares of 0.61, 0.61, 0.91, 0.81 and 0.98
    # busy: 0.91 is the first of at least 85 % of 0.98, so there are 3 splits.
    shares = {}
    for splits in range(1, min(_MOST_SPLITS, _AT_A_TIME, key_blocks) + 1):
        # As many key blocks in each as with one split fewer would leave the last one empty.
        if splits == 1 or -(-key_blocks // splits) != -(-key_blocks // (splits - 1)):
            waves = blocks * splits / _AT_A_TIME
            shares[splits] = waves / -(-blocks * splits // _AT_A_TIME)
    best = max(shares.values(), default=0.0)
    return next((splits for splits, share in shares.items() if share >= _NEARLY * best), 1)
