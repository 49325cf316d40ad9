"""Steps of many sequences over a paged cache: one call of a model for all their chunks.

All tokens of a step are one packed row, [1, tokens]. Prefill chunks come first, then the sequences
with one new token each, by length. What attention needs to know of them is in two places:

- on the device a table of numbers, which goes from layer to layer as an argument. For each token it
  has the slot of the cache that its keys and values are written to (the slot mapping), and for each
  group of sequences the pages to gather (their block tables, one after another);
- on the host the plan of the attention calls: groups of sequences, cut into tiles of queries.

Every size is one of a finite set (`forecast.serving`), padding included, so that a step takes the
memory that any other of its size takes. An example, with pages of 16 tokens:

    chunks in order     tokens 40 (start 0) │ 1 (position 99) │ 1 (position 110)
    packed row          0 … 39              │ 40              │ 41              │ padding to 48
    pages of each       3                   │ 7               │ 7
    groups              one sequence        │ two sequences, 7 pages each
    tiles (queries)     rows 0 … 47         │ rows 40, 41

A tile has a power of two of rows, or all: it computes queries beside its own, and drops their
results.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from duoka.errors import ModelError
from duoka.forecast.serving import FIRST, PIECE_ROWS, Capacity, StepSize, WarmUp, padded, power
from duoka.models.kv_cache import new_cache

from ..devices import peak_bytes
from ..draw import draw_in_every_way
from ..lost_gpu import find_lost_gpu
from . import paged_attention
from .chunk import Chunk
from .paged_attention import PagedCache

# Sequences are padded together where the longest is at most so many times as long as the shortest,
# and where padding makes them at most so many times as many.
_PADDING = 1.25
_SERVED = frozenset({"full_attention", "sliding_attention"})


class QueryTile(NamedTuple):
    """Queries of one attention call: `rows` of them from `first` on in the packed row.

    Those of the slice `inner` are its own. Of the gathered pages of each sequence they see `pages`
    from the page `skipped` on.
    """

    first: int
    rows: int
    inner: slice
    skipped: int
    pages: int


class SequenceGroup(NamedTuple):
    """Sequences of an attention call, with the same number of `pages` each.

    Their block tables begin at `offset` in the step's list of pages. Several sequences have one
    query each, in one tile.
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
    """

    def __init__(self, chunks: Sequence[Chunk], cache: PagedCache) -> None:
        # Chunks of 3, 1 and 2 tokens are packed as 3, 2, 1: `offsets` is [0, 3, 5, 6], `_chunk_of`
        # is [0, 0, 0, 1, 1, 2]. If those of 3 and 1 tokens have a row, `last_rows` begins with 2
        # and 5: the last token of each, in the caller's order. Its padding repeats token 0.
        self.cache = cache
        order = sorted(range(len(chunks)), key=lambda at: _order(chunks[at]))
        self.chunks = [chunks[at] for at in order]
        lengths = [len(chunk.tokens) for chunk in self.chunks]
        self.offsets = np.cumsum([0, *lengths])  # cu_seqlens
        number = int(self.offsets[-1])
        ends = dict(zip(order, self.offsets[1:].tolist(), strict=True))
        rows = [ends[at] - 1 for at, chunk in enumerate(chunks) if chunk.row is not None]
        capacity = cache.capacity
        self.num_tokens = capacity.tokens(number)
        self.last_rows = rows + [0] * (capacity.logits(len(rows)) - len(rows))
        self.windows: dict[int, int] = {}  # by layer that has called attention
        self._groups: dict[int, list[SequenceGroup]] = {}
        self._chunk_of = np.repeat(np.arange(len(lengths)), lengths)  # by token

    @classmethod
    def of_size(cls, size: StepSize, cache: PagedCache) -> PagedStep:
        """Make a step of a size that computes padding alone, with a single tile."""
        capacity = cache.capacity
        pages = [cache.scratch_page] * -(-size.tokens // capacity.page_tokens)
        step = cls([Chunk(0, [0] * size.tokens, 0, pages, row=())], cache)
        step.last_rows = [0] * size.logits
        gathered = capacity.gathered_pages
        tile = QueryTile(0, size.rows, slice(0, size.rows), 0, gathered)
        step._groups = {
            window: [SequenceGroup(1, gathered, 0, (tile,))] for window in cache.windows
        }
        return step

    def enter(self, layer: int, window: int) -> None:
        """Note a layer's call; ModelError for a second one, whose keys would replace these."""
        if layer in self.windows:
            raise ModelError(f"layer {layer} calls attention more than once")
        if window not in self.cache.windows:
            raise ModelError(f"layer {layer} has a sliding window that its attention ignores")
        self.windows[layer] = window

    def groups(self, window: int) -> list[SequenceGroup]:
        """Return the groups for layers that look back over `window` tokens (0: over all)."""
        return self._groups[window]

    # The table of t tokens, for the windows 0 and w. One tensor is one copy from the host, and one
    # more for each further device of a dispatched model.
    #
    #     0, 1, … gathered_tokens - 1 │ slots │ positions │ pages          │ positions │ pages
    #     key positions               │ [t]   │ [t]       │ [page_numbers] │ [t]       │ …
    #                                 │ all   │ window 0                   │ window w
    def parts(self, window: int) -> tuple[slice, slice, slice]:
        """Return where the table has the slot mapping, positions in what is gathered, and pages."""
        capacity, number = self.cache.capacity, self.num_tokens
        slots = capacity.gathered_tokens
        at = self.cache.windows.index(window)
        positions = slots + number + at * (number + capacity.page_numbers)
        end = positions + number
        return (
            slice(slots, slots + number),
            slice(positions, end),
            slice(end, end + capacity.page_numbers),
        )

    def inputs(self, device: torch.device) -> dict[str, Any]:
        """Make the arguments of the model's `forward`, but for the logits to keep."""
        tokens = np.zeros((2, self.num_tokens), np.int64)
        used = len(self._chunk_of)
        tokens[0, :used] = [token for chunk in self.chunks for token in chunk.tokens]
        starts = np.array([chunk.start for chunk in self.chunks])
        positions = np.arange(used) - self.offsets[self._chunk_of] + starts[self._chunk_of]
        tokens[1, :used] = positions
        on_device = torch.from_numpy(tokens).to(device)
        return {
            "input_ids": on_device[:1],
            "position_ids": on_device[1:],
            "use_cache": False,
            "step": self,
            "step_table": self._table(positions, device),
        }

    def _table(self, positions: NDArray[np.int64], device: torch.device) -> Tensor:
        """Make the table for attention: numbers from 0 on, then its `parts`.

        Its size follows from the number of tokens alone; a step fills as much of it as it needs.
        """
        cache, number = self.cache, self.num_tokens
        size, gathered = cache.capacity.page_tokens, cache.capacity.gathered_tokens
        # A chunk from position 35 on, with pages of 16 and the block table [7, 2, 9]: `first` is 2,
        # its pages are [9], and its slots are 9 * 16 + 3, 9 * 16 + 4, …
        slots = np.full(number, cache.scratch_page * size)
        for at, chunk in enumerate(self.chunks):
            tokens = slice(self.offsets[at], self.offsets[at + 1])
            first = chunk.start // size
            pages = np.array(chunk.pages[first : -(-chunk.end // size)])
            slots[tokens] = (
                pages[positions[tokens] // size - first] * size + positions[tokens] % size
            )
        parts = [slots]
        # Pages that lie before the window of a chunk's first token aren't gathered. Window 6, pages
        # of 4, positions 10 … 12: token 10 sees 5 … 10, so page 0 is left out, and positions
        # relative to the first gathered key are 6 … 8.
        for window in cache.windows:
            numbers = cache.capacity.page_numbers
            firsts = np.array([_first_page(chunk, window, size) for chunk in self.chunks])
            relative = np.zeros(number, np.int64)
            relative[: len(positions)] = positions - firsts[self._chunk_of] * size
            pages = self._pages(window, firsts)
            assert len(pages) <= numbers, "page numbers are bounded"
            parts += [relative, np.pad(pages, (0, numbers - len(pages)))]
        filled = torch.from_numpy(np.concatenate(parts))
        table = torch.empty(gathered + len(filled), dtype=torch.long, device=device)
        torch.arange(gathered, out=table[:gathered])
        table[gathered:].copy_(filled)
        return table

    def _pages(self, window: int, firsts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Form the groups; return the block tables of all of them, one after another."""
        capacity, scratch = self.cache.capacity, self.cache.scratch_page
        if window in self._groups:
            return np.full(capacity.gathered_pages, scratch)
        lengths = [-(-chunk.end // capacity.page_tokens) for chunk in self.chunks] - firsts
        groups, tables, offset = [], list[NDArray[np.int64]](), 0
        for start, stop in self._runs(lengths.tolist()):
            is_several, row = stop - start > 1, int(self.offsets[start])
            number = min(power(stop - start), self.num_tokens)
            pages = capacity.padded_pages(int(lengths[start:stop].max()))
            table = np.full((number, pages), scratch)
            tile = self._tile(row, stop - start, 0, pages)
            # Line i of the table is for row tile.first + i, and a tile at the end of the packed row
            # begins early. Of 16 rows with 7 sequences in rows 9 … 15, the tile has rows 8 … 15:
            # line 0, for the row of another chunk, keeps scratch pages.
            first_line = tile.inner.start if is_several else 0
            for line, index in enumerate(range(start, stop), first_line):
                first, length = firsts[index], lengths[index]
                table[line, :length] = self.chunks[index].pages[first : first + length]
            tiles: tuple[QueryTile, ...] = (tile,)
            if not is_several:
                tiles = tuple(self._tiles(start, int(firsts[start]), window, pages))
            groups.append(SequenceGroup(number, pages, offset, tiles))
            tables.append(table.ravel())
            offset += table.size
        self._groups[window] = groups
        return np.concatenate(tables)

    # Decoding sequences of similar length are computed together: their queries are one tile, their
    # pages one table, padded to the longest. With lengths of 7, 7, 7, 8 and 20 pages the first four
    # form a group of 4 × 8 pages; 20 exceeds 7 by more than `_PADDING`. A group has a power of two
    # of sequences: seven are padded to eight with scratch pages, five are cut to four.
    def _runs(self, lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield runs of chunks that form a group: one new token each, and about equally long."""
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
    # queries, the last one widened to 128 rows. They see 16, 32 and 40 pages: keys behind a tile's
    # last query aren't multiplied, which saves up to half of the pairs of a long prompt.
    def _tiles(self, index: int, first: int, window: int, pages: int) -> Iterator[QueryTile]:
        """Cut a chunk into tiles; whole pages of keys that no query of a tile sees are left out."""
        chunk, size = self.chunks[index], self.cache.capacity.page_tokens
        for offset in range(0, len(chunk.tokens), PIECE_ROWS):
            number = min(PIECE_ROWS, len(chunk.tokens) - offset)
            start = chunk.start + offset
            skipped = max(0, (start - window + 1) // size - first) if window else 0
            seen = padded(-(-(start + number) // size) - first - skipped)
            row = int(self.offsets[index]) + offset
            yield self._tile(row, number, skipped, min(seen, pages - skipped))

    def _tile(self, row: int, number: int, skipped: int, pages: int) -> QueryTile:
        """Make the tile of `number` queries from a row on, widened to a known number of rows."""
        rows = min(power(number), self.num_tokens)
        first = max(0, min(row, self.num_tokens - rows))
        return QueryTile(first, rows, slice(row - first, row - first + number), skipped, pages)


class PagedModel:
    """Calls a model with steps over a paged cache; a step can be computed again.

    Parameters
    ----------
    model : PreTrainedModel
        One that `reads_pages`, on one device, dispatched over several, or a part of one.
    capacity : Capacity
    device : torch.device, optional
        Where inputs are made: the device of the model's first module.
    """

    def __init__(
        self, model: PreTrainedModel, capacity: Capacity, device: torch.device | None = None
    ) -> None:
        self.model: Any = model
        self.device: torch.device = model.device if device is None else device
        self._attention_before = model.config._attn_implementation
        paged_attention.register()
        self.model.set_attn_implementation(paged_attention.NAME)
        self.cache = PagedCache(capacity, {0, *_windows_of(model)})
        self._takes_rows = "logits_to_keep" in inspect.signature(model.forward).parameters

    def close(self) -> None:
        """Give the model its own attention back; the cache is gone."""
        self.model.set_attn_implementation(self._attention_before)
        del self.cache

    @torch.no_grad()
    def start(self) -> None:
        """Run the first step, and so make the pages.

        Raises
        ------
        ModelError
            If the model's code does more than causal attention, once in each layer.
        """
        step = self.step(size=FIRST)
        logits = self.call(step, self.device)()
        self.refuse_other_windows(step)
        draw_in_every_way(logits)

    def warm_up(self, warm_up: WarmUp = "every") -> None:
        """Run the first step and steps of other sizes: failures come now."""
        self.start()
        for size in self.cache.capacity.warm_up_steps(warm_up, self._reserved_bytes):
            self.try_out(size)

    def try_out(self, size: StepSize) -> None:
        """Run a step of a size, and all that can be made of its logits."""
        draw_in_every_way(self.run(size=size))

    def step(self, chunks: Sequence[Chunk] = (), size: StepSize | None = None) -> PagedStep:
        """Make a step of chunks; with a size, of padding alone."""
        return (
            PagedStep(chunks, self.cache) if size is None else PagedStep.of_size(size, self.cache)
        )

    @torch.no_grad()
    def run(self, chunks: Sequence[Chunk] = (), size: StepSize | None = None) -> Tensor:
        """Compute a step where all of the model is in this process; see `call`."""
        return self.call(self.step(chunks, size), self.device)()

    def call(self, step: PagedStep, device: torch.device) -> Callable[[], Tensor]:
        """Return a function that calls the model with a step, whose inputs are made on a device.

        It returns the logits of `step.last_rows`, [rows, vocabulary]: of the chunks that have a
        row, in their order, then padding.
        """
        # As numbers rows are on no device: a tensor would go to the first block's.
        rows, inputs = step.last_rows, step.inputs(device)
        if self._takes_rows:
            inputs["logits_to_keep"] = rows

        def run() -> Tensor:
            logits: Tensor = self.model(**inputs).logits
            return logits[0] if self._takes_rows else logits[0, rows]

        return run

    def refuse_other_windows(self, step: PagedStep) -> None:
        """Raise ModelError where a layer's own cache forgets more tokens than its attention."""
        for number, window in enumerate(_windows_of(self.model)):
            if step.windows.get(number, window) != window:
                raise ModelError(f"layer {number} has a sliding window that its attention ignores")

    def _reserved_bytes(self) -> int:
        """Return the most that the allocators of the model's devices have reserved together."""
        peaks = map(peak_bytes, {parameter.device for parameter in self.model.parameters()})
        return sum(peak.reserved_bytes for peak in peaks if peak is not None)


@contextmanager
def reading_pages(model: PreTrainedModel) -> Iterator[None]:
    """Turn errors of a model's code that reads its mask into ModelError: there is no mask.

    Errors of memory and of lost GPUs stay.
    """
    try:
        yield
    except (ModelError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever that code raises
        if find_lost_gpu(error):
            raise
        raise ModelError(f"{type(model).__name__} doesn't support a paged KV cache") from error


def reads_pages(model: PreTrainedModel) -> bool:
    """Return True if all layers keep keys and values, and call attention by an interface.

    That is transformers' `AttentionInterface`.
    """
    config = model.config.get_text_config(decoder=True)
    return (
        getattr(model, "_supports_attention_backend", False)
        and not model.config.is_encoder_decoder
        and not getattr(model, "_is_stateful", False)
        and not getattr(config, "num_kv_shared_layers", 0)
        and set(getattr(config, "layer_types", None) or ()) <= _SERVED
    )


def _order(chunk: Chunk) -> tuple[bool, int]:
    """Sort prefill chunks first, then decoding sequences by length."""
    is_single = len(chunk.tokens) == 1
    return is_single, chunk.end if is_single else 0


def _first_page(chunk: Chunk, window: int, page_tokens: int) -> int:
    """Return the first page in the window of a chunk."""
    return max(0, chunk.start - window + 1) // page_tokens if window else 0


def _windows_of(model: PreTrainedModel) -> list[int]:
    """Return how many tokens each layer's own cache keeps; 0 where it keeps all."""
    layers = getattr(new_cache(model), "layers", [])
    return [layer.sliding_window if layer.is_sliding else 0 for layer in layers]
