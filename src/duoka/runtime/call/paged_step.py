"""A step of many sequences over a paged cache: its layout, and the table of numbers on the device.

All tokens of a step are one packed row, [1, tokens]. Prefill chunks come first, then the sequences
with one new token each, by length. A step is described in two places:

- on the device a table of numbers, which one asynchronous copy from pinned memory fills. It has the
  tokens and their positions, the slot of the cache to write each token's keys and values to (the
  slot mapping), and for each group of sequences the pages to gather (their block tables, one after
  another). Every layer gets the table as an argument;
- on the host the plan of the attention calls: groups of sequences, cut into tiles of queries.

With block tables, attention is one call for all sequences, so there are no groups and tiles.

The host never reads from the device during a step; only the sampled tokens are copied back.

Every size is one of a finite set (`forecast.serving`), padding included, so that all steps of one
size take the same memory. An example, with pages of 16 tokens:

    chunks in order     tokens 40 (start 0) │ 1 (position 99) │ 1 (position 110)
    packed row          0 … 39              │ 40              │ 41              │ padding to 48
    pages of each       3                   │ 7               │ 7
    groups              one sequence        │ two sequences, 7 pages each
    tiles (queries)     rows 0 … 47         │ rows 40, 41

A tile has a power of two of rows, or all rows: results for queries of other chunks among them are
dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from duoka.errors import ModelError
from duoka.forecast.serving import PIECE_ROWS, StepSize, padded, power

from ..devices import pinned
from .chunk import Chunk
from .paged_cache import PagedCache

# The limit of two ratios in a group: of its longest to its shortest sequence, and of the number of
# sequences with padding, a power of two, to the number without.
_PADDING = 1.25


class QueryTile(NamedTuple):
    """The queries of one attention call: `rows` rows of the packed row, from `first` on.

    The slice `inner` of these rows are the queries of the chunk; the others' results are dropped.
    The queries attend to `pages` of the sequence's gathered pages, after the first `skipped`.
    """

    first: int
    rows: int
    inner: slice
    skipped: int
    pages: int


class SequenceGroup(NamedTuple):
    """Sequences whose pages are gathered together, each with `pages` pages, padding included.

    Their block tables begin at `offset` in the step's list of pages. A group is either a single
    sequence, or several with one query each, in one tile.
    """

    sequences: int
    pages: int
    offset: int
    tiles: tuple[QueryTile, ...]


class PagedStep:
    """The chunks of a step, arranged for attention.

    Parameters
    ----------
    chunks : sequence of Chunk
    cache : PagedCache

    Attributes
    ----------
    is_decoding : bool
        True if the step has one token of each sequence, after which one is sampled.
    """

    def __init__(self, chunks: Sequence[Chunk], cache: PagedCache) -> None:
        # Chunks of 3, 1 and 2 tokens are packed as 3, 2, 1: `offsets` is [0, 3, 5, 6], `_chunk_of`
        # is [0, 0, 0, 1, 1, 2]. If the chunks of 3 and 1 tokens have a `row`, `last_rows` begins
        # with 2 and 5: the last token of each, in the caller's order. Padding repeats token 0.
        self.cache = cache
        capacity = cache.capacity
        number = sum(len(chunk.tokens) for chunk in chunks)
        self.num_tokens = capacity.tokens(number)
        self.is_decoding = all(len(c.tokens) == 1 and c.row is not None for c in chunks)
        is_graph = self.is_decoding and number <= capacity.most_graph_tokens
        self._gathers_all = is_graph and not capacity.has_block_tables
        if self._gathers_all:
            padding = Chunk(-1, [0], 0, [cache.scratch_page], row=None)
            chunks = [*chunks, *[padding] * (self.num_tokens - number)]
        order = sorted(range(len(chunks)), key=lambda at: _sort_key(chunks[at]))
        self.chunks = [chunks[at] for at in order]
        lengths = [len(chunk.tokens) for chunk in self.chunks]
        self.offsets = np.cumsum([0, *lengths])  # cu_seqlens
        ends = dict(zip(order, self.offsets[1:].tolist(), strict=True))
        rows = [ends[at] - 1 for at, chunk in enumerate(chunks) if chunk.row is not None]
        self.last_rows = rows + [0] * (capacity.logits(len(rows)) - len(rows))
        self.windows: dict[int, int] = {}  # by layer that has called attention
        self._groups: dict[int, list[SequenceGroup]] = {}
        self._chunk_of = np.repeat(np.arange(len(lengths)), lengths)  # by token

    @classmethod
    def of_decoding(cls, size: StepSize, cache: PagedCache, token: int) -> PagedStep:
        """Make a step of a given size, as the fewest decoding sequences need, over scratch pages.

        Each has one token, `token`, at a position of its own.
        """
        number = next(
            n for n in range(1, size.tokens + 1) if cache.capacity.tokens(n) == size.tokens
        )
        pages = [cache.scratch_page]
        return cls([Chunk(at, [token], at + 1, pages, row=()) for at in range(number)], cache)

    @property
    def takes_sampled(self) -> bool:
        """True if the previous step samples tokens of this one (see `Chunk`)."""
        return any(chunk.tokens[0] < 0 for chunk in self.chunks)

    @classmethod
    def of_size(cls, size: StepSize, cache: PagedCache) -> PagedStep:
        """Make a step of a given size that computes padding alone, in a single tile."""
        capacity = cache.capacity
        # With block tables a sequence has at most as many queries as keys.
        most = capacity.attended_tokens if capacity.has_block_tables else size.tokens
        chunks = []
        for start in range(0, size.tokens, most):
            number = min(most, size.tokens - start)
            pages = [cache.scratch_page] * -(-number // capacity.page_tokens)
            chunks.append(Chunk(start, [0] * number, 0, pages, row=()))
        step = cls(chunks, cache)
        step.last_rows = [0] * size.logits
        gathered = capacity.gathered_pages
        tile = QueryTile(0, size.rows, slice(0, size.rows), 0, gathered)
        step._groups = {
            window: [SequenceGroup(1, gathered, 0, (tile,))] for window in cache.windows
        }
        return step

    def enter(self, layer: int, window: int) -> int:
        """Note a layer's call, and return its window; `window` is that of its arguments.

        Raise ModelError for a second call, or for an unknown window.
        """
        if layer in self.windows:
            raise ModelError(f"layer {layer} calls attention more than once")
        window = self.cache.layer_windows.get(layer, window)
        if window not in self.cache.windows:
            raise ModelError(f"layer {layer} has a sliding window that its attention ignores")
        self.windows[layer] = window
        return window

    def groups(self, window: int) -> list[SequenceGroup]:
        """Return the groups for layers with a sliding window of `window` tokens (0: no window)."""
        return self._groups[window]

    # The table of t tokens and l rows of logits, for the windows 0 and w. As one tensor it needs a
    # single copy from the host, and one more for each further device of a dispatched model.
    #
    #     0, 1, … gathered_tokens - 1 │ slots │ positions │ pages │ positions … │ inputs
    #     the positions of keys       │ [t]   │ window 0          │ window w    │ [2t + l]
    #
    # The inputs are the tokens, their positions, and the rows of logits. With stacked adapters they
    # come after the adapter of each token, and the one that owns each rank. Where attention reads
    # pages in place, block tables are in the place of key positions, and of positions and pages:
    #
    #     slots │ block tables   │ inputs
    #     [t]   │ [page_numbers] │ [2t + l]
    def parts(self, window: int) -> tuple[slice, slice]:
        """Return slices of the table: positions in gathered keys, and pages to gather."""
        capacity, number = self.cache.capacity, self.num_tokens
        at = self.cache.windows.index(window)
        positions = capacity.gathered_tokens + number + at * (number + capacity.page_numbers)
        end = positions + number
        return slice(positions, end), slice(end, end + capacity.page_numbers)

    def slots(self, table: Tensor) -> Tensor:
        """Return the slot mapping, [tokens]: the slot of the cache for each token."""
        start = self.cache.capacity.gathered_tokens
        return table[start : start + self.num_tokens]

    def foreign_ranks(self, table: Tensor) -> Tensor:
        """Return for each token which ranks belong to other adapters, [tokens, ranks]."""
        number, ranks = self.num_tokens, len(self.cache.rank_owners)
        stop = len(table) - 2 * number - len(self.last_rows)
        chosen, owners = table[stop - ranks - number : stop].split((number, ranks))
        return torch.ne(chosen[:, None], owners)

    def block_tables(self, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the block tables, all int32.

        Returns
        -------
        offsets : Tensor
            [sequences + 1]: the first row of each sequence, then the end (cu_seqlens).
        used : Tensor
            [sequences]: the number of keys of each sequence.
        tables : Tensor
            [sequences, context_pages]: the pages of each sequence.
        """
        capacity, number = self.cache.capacity, self.num_tokens
        numbers = table[number : number + capacity.page_numbers].view(torch.int32)
        rows, width = capacity.sequences + 1, capacity.context_pages
        sizes = rows + 1, rows, rows * width
        offsets, used, tables, _ = numbers.split((*sizes, len(numbers) - sum(sizes)))
        return offsets, used, tables.view(rows, width)

    def inputs(self, device: torch.device) -> dict[str, Any]:
        """Fill a new table on a device; return the arguments of the model's `forward`.

        The host doesn't wait for the device.
        """
        numbers = self.numbers()
        table = self.new_table(device, len(numbers))
        fill(table, numbers)
        return self.arguments(table)

    def new_table(self, device: torch.device, size: int) -> Tensor:
        """Make a table on a device, with the positions of keys and room for `size` numbers."""
        gathered = self.cache.capacity.gathered_tokens
        table = torch.empty(gathered + size, dtype=torch.long, device=device)
        torch.arange(gathered, out=table[:gathered])
        return table

    def numbers(self) -> Tensor:
        """Return the table behind the positions of keys, on the host."""
        return torch.from_numpy(np.concatenate([*self._table_parts()]))

    def arguments(self, table: Tensor) -> dict[str, Any]:
        """Return the arguments of the model's `forward`; `logits_to_keep` is `last_rows`."""
        sizes = self.num_tokens, self.num_tokens, len(self.last_rows)
        _, tokens, positions, rows = table.split((len(table) - sum(sizes), *sizes))
        return {
            "input_ids": tokens[None],
            "position_ids": positions[None],
            "logits_to_keep": rows,
            "use_cache": False,
            "step": self,
            "step_table": table,
        }

    def _table_parts(self) -> Iterator[NDArray[np.int64]]:
        """Yield the parts of the table behind the key positions; unused entries are padding.

        Their sizes depend on the numbers of tokens and of rows alone.
        """
        cache, number = self.cache, self.num_tokens
        size, used = cache.capacity.page_tokens, len(self._chunk_of)
        starts = np.array([chunk.start for chunk in self.chunks])
        positions = np.arange(used) - self.offsets[self._chunk_of] + starts[self._chunk_of]
        # A chunk from position 35 on, with pages of 16 and the block table [7, 2, 9]: `first` is 2,
        # `pages` is [9], and the slots are 9 * 16 + 3, 9 * 16 + 4, …
        slots = np.full(number, cache.scratch_page * size)
        for at, chunk in enumerate(self.chunks):
            tokens = slice(self.offsets[at], self.offsets[at + 1])
            first = chunk.start // size
            pages = np.array(chunk.pages[first : -(-chunk.end // size)])
            slots[tokens] = (
                pages[positions[tokens] // size - first] * size + positions[tokens] % size
            )
        yield slots
        # Pages before the window of a chunk's first token aren't gathered. Window 6, pages of 4,
        # positions 10 … 12: token 10 attends to 5 … 10, so page 0 is left out, and the positions,
        # counted from the first gathered key, are 6 … 8.
        for window in () if cache.capacity.has_block_tables else cache.windows:
            firsts = np.array([_first_page(chunk, window, size) for chunk in self.chunks])
            yield _padded(positions - firsts[self._chunk_of] * size, number)
            yield _padded(self._form_groups(window, firsts), cache.capacity.page_numbers)
        if cache.capacity.has_block_tables:
            yield _padded(self._make_block_tables(), cache.capacity.page_numbers)
        if cache.rank_owners:
            yield _padded([self.chunks[at].adapter for at in self._chunk_of], number)
            yield np.array(cache.rank_owners)
        yield _padded([token for chunk in self.chunks for token in chunk.tokens], number)
        yield _padded(positions, number)
        yield np.array(self.last_rows, np.int64)

    # Two chunks of 3 and 1 tokens at positions 0 and 300, padded to 5 tokens, for 3 sequences,
    # pages of 256 tokens, and contexts of at most 2 pages; s is the scratch page:
    #
    #     cu_seqlens   0 3 4 5 5      queries: rows 0 … 2, row 3, row 4 (padding), none
    #     used         3 301 1 0      keys of each sequence, those of this step included
    #     tables       7 s │ 2 9 │ s s │ s s
    #
    # Padding has a sequence of its own over the scratch page, with as many keys as queries.
    def _make_block_tables(self) -> NDArray[np.int64]:
        """Return the block tables: pairs of int32 as int64."""
        capacity, rows = self.cache.capacity, self.cache.capacity.sequences + 1
        offsets, used = np.zeros(rows + 1, np.int32), np.zeros(rows, np.int32)
        tables = np.full((rows, capacity.context_pages), self.cache.scratch_page, np.int32)
        ends, number = self.offsets[1:], len(self.chunks)
        offsets[1 : number + 1] = ends
        used[:number] = [chunk.end for chunk in self.chunks]
        for row, chunk in enumerate(self.chunks):
            pages = chunk.pages[: -(-chunk.end // capacity.page_tokens)]
            tables[row, : len(pages)] = pages
        if number < rows:
            padding = min(self.num_tokens - int(ends[-1]), capacity.attended_tokens)
            used[number], offsets[number + 1 :] = padding, ends[-1] + padding
        self.max_queries = int(np.diff(offsets).max())
        numbers = np.concatenate([offsets, used, tables.ravel()])
        return np.resize(numbers, len(numbers) + len(numbers) % 2).view(np.int64)

    def _form_groups(self, window: int, firsts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Form the groups for a window; return the block tables of all groups, concatenated."""
        capacity, scratch = self.cache.capacity, self.cache.scratch_page
        if window in self._groups:
            return np.full(capacity.gathered_pages, scratch)
        lengths = [-(-chunk.end // capacity.page_tokens) for chunk in self.chunks] - firsts
        if self._gathers_all:
            lengths[:] = capacity.context_pages
        groups, tables, offset = [], list[NDArray[np.int64]](), 0
        for start, stop in self._group_ranges(lengths.tolist()):
            is_several, row = stop - start > 1, int(self.offsets[start])
            number = min(power(stop - start), self.num_tokens)
            pages = capacity.padded_pages(int(lengths[start:stop].max()))
            table = np.full((number, pages), scratch)
            tile = self._make_tile(row, stop - start, 0, pages)
            # Line i of the table is for row tile.first + i, and a tile at the end of the packed row
            # begins early. Of 16 rows with 7 sequences in rows 9 … 15, the tile has rows 8 … 15:
            # line 0, for a row of another chunk, keeps scratch pages.
            first_line = tile.inner.start if is_several else 0
            for line, index in enumerate(range(start, stop), first_line):
                first, length = firsts[index], lengths[index]
                known = self.chunks[index].pages[first : first + length]
                table[line, : len(known)] = known
            tiles: tuple[QueryTile, ...] = (tile,)
            if not is_several and not self._gathers_all:
                tiles = tuple(self._cut_tiles(start, int(firsts[start]), window, pages))
            groups.append(SequenceGroup(number, pages, offset, tiles))
            tables.append(table.ravel())
            offset += table.size
        self._groups[window] = groups
        return np.concatenate(tables)

    # In a step that is a CUDA graph, all sequences have the pages of a full context, the unused of
    # which are scratch pages, so that the groups depend on the number of tokens alone.
    #
    # Decoding sequences of similar length form a group: their queries are one tile, their pages one
    # table, padded to the longest. With lengths of 7, 7, 7, 8 and 20 pages the first four form a
    # group of 4 × 8 pages, as 20 is more than `_PADDING` times 7. The number of sequences is a
    # power of two: seven are padded to eight with scratch pages, of five only four form a group.
    def _group_ranges(self, lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield ranges of chunks that form a group: one chunk, or several decoding sequences."""
        capacity, start = self.cache.capacity, 0
        while start < len(self.chunks):
            stop, longest = start + 1, lengths[start]
            is_single = len(self.chunks[start].tokens) == 1
            while is_single and stop < len(self.chunks) and stop - start < PIECE_ROWS:
                longest = max(longest, lengths[stop])
                number = power(stop + 1 - start) * capacity.padded_pages(longest)
                if longest > _PADDING * lengths[start] or number > capacity.gathered_pages:
                    break
                stop += 1
            if min(power(stop - start), self.num_tokens) > _PADDING * (stop - start):
                stop = start + power(stop - start) // 2
            yield start, stop
            start = stop

    # 600 tokens from position 0 on, with pages of 16 and no window: tiles of 256, 256 and 88
    # queries, the last widened to 128 rows. They attend to 16, 32 and 40 pages: keys after a tile's
    # last query aren't multiplied, which saves up to half of the pairs of a long prompt.
    def _cut_tiles(self, index: int, first: int, window: int, pages: int) -> Iterator[QueryTile]:
        """Cut a chunk into tiles, each without the pages that no query of the tile attends to."""
        chunk, size = self.chunks[index], self.cache.capacity.page_tokens
        for offset in range(0, len(chunk.tokens), PIECE_ROWS):
            number = min(PIECE_ROWS, len(chunk.tokens) - offset)
            start = chunk.start + offset
            skipped = max(0, (start - window + 1) // size - first) if window else 0
            seen = padded(-(-(start + number) // size) - first - skipped)
            row = int(self.offsets[index]) + offset
            yield self._make_tile(row, number, skipped, min(seen, pages - skipped))

    def _make_tile(self, row: int, number: int, skipped: int, pages: int) -> QueryTile:
        """Make the tile of `number` queries from a row on, widened to a power of two of rows."""
        rows = min(power(number), self.num_tokens)
        first = max(0, min(row, self.num_tokens - rows))
        return QueryTile(first, rows, slice(row - first, row - first + number), skipped, pages)


def fill(table: Tensor, numbers: Tensor) -> None:
    """Copy numbers of the host to the end of a table; the host doesn't wait for the device."""
    table[len(table) - len(numbers) :].copy_(pinned(numbers, table.device), non_blocking=True)


def _padded(numbers: Sequence[int] | NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Return numbers as an array of a given size, padded with zeros."""
    array = np.zeros(size, np.int64)
    array[: len(numbers)] = numbers  # fails if there are more
    return array


def _sort_key(chunk: Chunk) -> tuple[bool, int]:
    """Return a key that sorts prefill chunks first, then decoding sequences by length."""
    is_single = len(chunk.tokens) == 1
    return is_single, chunk.end if is_single else 0


def _first_page(chunk: Chunk, window: int, page_tokens: int) -> int:
    """Return the index of the first page that a chunk's first token attends to (0: no window)."""
    return max(0, chunk.start - window + 1) // page_tokens if window else 0
