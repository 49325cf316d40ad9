"""Steps of many sequences over a paged cache: the arguments of one call of a model.

All tokens of a step are one packed row, [1, tokens]. Prompts come first, in pieces or whole, then
the sequences with one new token each, by length. What attention needs to know of them is a table of
numbers on the device, which goes from layer to layer as an argument, and the plan of its pieces on
the host. Every size is one of a finite set (`forecast.serving`), padding included, so that a step
takes memory as any other of its size does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from duoka.errors import ModelError
from duoka.forecast.serving import FIRST, PIECE_ROWS, Capacity, StepSize, WarmUp, padded, power
from duoka.models.kv_cache import new_cache

from . import paged_attention
from .devices import peak_bytes
from .draw import draw_in_every_way
from .paged_attention import PagedCache

# Sequences are padded together where the longest is at most so many times as long as the shortest,
# and where there are at most so many times as many with those that are nobody's.
_PADDING = 1.25
_SERVED = frozenset({"full_attention", "sliding_attention"})


class TokenChunk(Protocol):
    """New tokens of a sequence."""

    @property
    def tokens(self) -> Sequence[int]:
        """The new ones."""

    @property
    def start(self) -> int:
        """The place of the first of them in their sequence."""

    @property
    def end(self) -> int:
        """The place behind the last one."""

    @property
    def pages(self) -> Sequence[int]:
        """Those of all tokens of the sequence."""

    @property
    def wants_logits(self) -> bool:
        """Whether the next token is to be chosen after it."""


class _Nobodys(NamedTuple):
    """A chunk of nobody's tokens."""

    tokens: Sequence[int]
    start: int
    end: int
    pages: Sequence[int]
    wants_logits: bool


class QueryTile(NamedTuple):
    """Queries that attend at once: `rows` of them from `first` on in the packed row.

    Of them those of `meant` count. They see keys among those gathered, from `skipped` pages on,
    so many `pages` of each sequence.
    """

    first: int
    rows: int
    meant: slice
    skipped: int
    pages: int


class SequenceGroup(NamedTuple):
    """Sequences that are computed together, each with so many `pages`.

    Their numbers begin at `at` in the table. Several have one query each, in one piece.
    """

    sequences: int
    pages: int
    at: int
    pieces: tuple[QueryTile, ...]


class PagedStep:
    """The sequences of one step, as attention needs them."""

    def __init__(self, chunks: Sequence[TokenChunk], cache: PagedCache) -> None:
        self.cache = cache
        order = sorted(range(len(chunks)), key=lambda at: _order(chunks[at]))
        self.chunks = [chunks[at] for at in order]
        lengths = [len(chunk.tokens) for chunk in self.chunks]
        self.offsets = np.cumsum([0, *lengths])
        number = int(self.offsets[-1])
        ends = dict(zip(order, self.offsets[1:].tolist(), strict=True))
        wanted = [ends[at] - 1 for at, chunk in enumerate(chunks) if chunk.wants_logits]
        capacity = cache.capacity
        self.num_tokens = capacity.tokens(number)
        self.last_rows = wanted + [0] * (capacity.logits(len(wanted)) - len(wanted))
        self.windows: dict[int, int] = {}  # the windows of the layers that have been called
        self._groups: dict[int, list[SequenceGroup]] = {}
        self._rows = np.repeat(np.arange(len(lengths)), lengths)  # of each token its chunk

    @classmethod
    def of_size(cls, size: StepSize, cache: PagedCache) -> PagedStep:
        """A step of a size, of nobody's tokens, with one piece of attention."""
        capacity = cache.capacity
        pages = [cache.scratch_page] * -(-size.tokens // capacity.page_tokens)
        step = cls([_Nobodys([0] * size.tokens, 0, size.tokens, pages, True)], cache)
        step.last_rows = [0] * size.logits
        numbers = capacity.gathered_pages
        piece = QueryTile(0, size.rows, slice(0, size.rows), 0, numbers)
        step._groups = {
            window: [SequenceGroup(1, numbers, 0, (piece,))] for window in cache.windows
        }
        return step

    def enter(self, layer: int, window: int) -> None:
        """Note a layer's call; ModelError for a second one, whose keys would replace these."""
        if layer in self.windows:
            raise ModelError(f"layer {layer} calls attention more than once")
        if window not in self.cache.windows:
            raise ModelError(f"layer {layer} has a window that its attention doesn't know")
        self.windows[layer] = window

    def groups(self, window: int) -> list[SequenceGroup]:
        """The groups of all sequences, where layers look back over `window` tokens; 0: over all."""
        return self._groups[window]

    def parts(self, window: int) -> tuple[slice, slice, slice]:
        """Where in the table are: slots of all tokens, their places in what is gathered, pages."""
        capacity, number = self.cache.capacity, self.num_tokens
        slots = capacity.gathered_tokens
        at = self.cache.windows.index(window)
        places = slots + number + at * (number + capacity.page_numbers)
        end = places + number
        return (
            slice(slots, slots + number),
            slice(places, end),
            slice(end, end + capacity.page_numbers),
        )

    def inputs(self, device: torch.device) -> dict[str, Any]:
        """The arguments of the model's `forward`, but for logits to keep."""
        number = self.num_tokens
        tokens = np.zeros((2, number), np.int64)
        tokens[0, : len(self._rows)] = [token for chunk in self.chunks for token in chunk.tokens]
        places = np.arange(len(self._rows)) - self.offsets[self._rows] + self._starts[self._rows]
        tokens[1, : len(self._rows)] = places
        on_device = torch.from_numpy(tokens).to(device)
        return {
            "input_ids": on_device[:1],
            "position_ids": on_device[1:],
            "use_cache": False,
            "step": self,
            "step_table": self._table(places, device),
        }

    @property
    def _starts(self) -> NDArray[np.int64]:
        return np.array([chunk.start for chunk in self.chunks])

    def _table(self, places: NDArray[np.int64], device: torch.device) -> Tensor:
        """What attention reads, at `parts`; before them are numbers from 0 on.

        It is as large for every step of as many tokens, and filled as far as this one needs.
        """
        cache, number = self.cache, self.num_tokens
        size, gathered = cache.capacity.page_tokens, cache.capacity.gathered_tokens
        slots = np.full(number, cache.scratch_page * size)
        for at, chunk in enumerate(self.chunks):
            tokens = slice(self.offsets[at], self.offsets[at + 1])
            first = chunk.start // size
            pages = np.array(chunk.pages[first : -(-chunk.end // size)])
            slots[tokens] = pages[places[tokens] // size - first] * size + places[tokens] % size
        parts = [slots]
        for window in cache.windows:
            numbers = cache.capacity.page_numbers
            firsts = np.array([_first(chunk, window, size) for chunk in self.chunks])
            relative = np.zeros(number, np.int64)
            relative[: len(places)] = places - firsts[self._rows] * size
            lists = self._pages(window, firsts)
            assert len(lists) <= numbers, "page numbers are bounded"
            parts += [relative, np.pad(lists, (0, numbers - len(lists)))]
        filled = torch.from_numpy(np.concatenate(parts))
        table = torch.empty(gathered + len(filled), dtype=torch.long, device=device)
        torch.arange(gathered, out=table[:gathered])
        table[gathered:].copy_(filled)
        return table

    def _pages(self, window: int, firsts: NDArray[np.int64]) -> NDArray[np.int64]:
        """The numbers of all groups' pages, one after the other."""
        capacity, scratch = self.cache.capacity, self.cache.scratch_page
        if window in self._groups:
            return np.full(capacity.gathered_pages, scratch)
        lengths = [-(-chunk.end // capacity.page_tokens) for chunk in self.chunks] - firsts
        groups, lists, at = [], list[NDArray[np.int64]](), 0
        for start, stop in self._together(lengths.tolist()):
            several, row = stop - start > 1, int(self.offsets[start])
            number = min(power(stop - start), self.num_tokens)
            pages = capacity.padded_pages(int(lengths[start:stop].max()))
            table = np.full((number, pages), scratch)
            piece = self._piece(row, stop - start, 0, pages)
            for line, index in enumerate(range(start, stop), piece.meant.start if several else 0):
                first, length = firsts[index], lengths[index]
                table[line, :length] = self.chunks[index].pages[first : first + length]
            pieces = (
                (piece,) if several else tuple(self._cut(start, int(firsts[start]), window, pages))
            )
            groups.append(SequenceGroup(number, pages, at, pieces))
            lists.append(table.ravel())
            at += table.size
        self._groups[window] = groups
        return np.concatenate(lists)

    def _together(self, lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Runs of chunks that are computed together: with one new token each, and about as long."""
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

    def _cut(self, index: int, first: int, window: int, pages: int) -> Iterator[QueryTile]:
        """The pieces of a chunk: keys that one needn't see are left out by whole pages."""
        chunk, size = self.chunks[index], self.cache.capacity.page_tokens
        for offset in range(0, len(chunk.tokens), PIECE_ROWS):
            number = min(PIECE_ROWS, len(chunk.tokens) - offset)
            start = chunk.start + offset
            skipped = max(0, (start - window + 1) // size - first) if window else 0
            seen = padded(-(-(start + number) // size) - first - skipped)
            row = int(self.offsets[index]) + offset
            yield self._piece(row, number, skipped, min(seen, pages - skipped))

    def _piece(self, row: int, number: int, skipped: int, pages: int) -> QueryTile:
        """A piece of so many queries from a row on; those beside them are computed, and dropped."""
        rows = min(power(number), self.num_tokens)
        first = max(0, min(row, self.num_tokens - rows))
        return QueryTile(first, rows, slice(row - first, row - first + number), skipped, pages)


class PagedStepper:
    """Calls a model with steps over a paged cache, which gives it paged attention.

    `device` is where its inputs are made, that of its first module.
    """

    def __init__(self, model: PreTrainedModel, capacity: Capacity, device: torch.device) -> None:
        self.model: Any = model
        paged_attention.register()
        self.model.set_attn_implementation(paged_attention.NAME)
        self.cache = PagedCache(capacity, {0, *_windows_of(model)})
        self.device = device
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters

    def start(self) -> None:
        """Run the first step, which makes the pages.

        Raises
        ------
        ModelError
            If the model's code does more than causal attention, once in each layer.
        """
        step = PagedStep.of_size(FIRST, self.cache)
        logits = self.run(step)
        self.refuse_other_windows(step)
        draw_in_every_way(logits)

    def warm_up(self, warm_up: WarmUp = "every") -> None:
        """Run the first step and those of other sizes: what can fail fails now."""
        self.start()
        for size in self.cache.capacity.warm_up_steps(warm_up, self._reserved_bytes):
            self.try_out(size)

    def _reserved_bytes(self) -> int:
        """The most that the allocators of the model's devices have reserved together."""
        places = {parameter.device for parameter in self.model.parameters()}
        peaks = (peak_bytes(place) for place in places)
        return sum(peak.reserved_bytes for peak in peaks if peak is not None)

    def try_out(self, size: StepSize) -> None:
        """Run a step of a size, and all that can be made of its logits."""
        draw_in_every_way(self.run(PagedStep.of_size(size, self.cache)))

    @torch.no_grad()
    def run(self, step: PagedStep) -> Tensor:
        """Run a step: the logits of `last_rows`, [rows, vocabulary]."""
        return self.call(step, self.device)()

    def call(self, step: PagedStep, device: torch.device) -> Callable[[], Tensor]:
        """What runs a step, whose inputs are made on a device."""
        # As numbers rows are on no device: a tensor would go to the first block's.
        rows, inputs = step.last_rows, step.inputs(device)
        if self._keeps:
            inputs["logits_to_keep"] = rows

        def run() -> Tensor:
            logits: Tensor = self.model(**inputs).logits
            return logits[0] if self._keeps else logits[0, rows]

        return run

    def refuse_other_windows(self, step: PagedStep) -> None:
        """Raise ModelError where a layer's own cache would forget tokens that it has seen here."""
        for number, window in enumerate(_windows_of(self.model)):
            if step.windows.get(number, window) != window:
                raise ModelError(f"layer {number} has a window that its attention doesn't know")


def _order(chunk: TokenChunk) -> tuple[bool, int]:
    """Prompts first, then sequences with one new token by length."""
    is_single = len(chunk.tokens) == 1
    return is_single, chunk.end if is_single else 0


def _first(chunk: TokenChunk, window: int, page_tokens: int) -> int:
    """The first page that any of a chunk's tokens sees."""
    return max(0, chunk.start - window + 1) // page_tokens if window else 0


def reads_pages(model: PreTrainedModel) -> bool:
    """Whether all layers keep keys and values, and call attention by transformers' interface."""
    config = model.config.get_text_config(decoder=True)
    return (
        getattr(model, "_supports_attention_backend", False)
        and not model.config.is_encoder_decoder
        and not getattr(model, "_is_stateful", False)
        and not getattr(config, "num_kv_shared_layers", 0)
        and set(getattr(config, "layer_types", None) or ()) <= _SERVED
    )


def _windows_of(model: PreTrainedModel) -> list[int]:
    """How far back each layer's own cache goes; 0 for one that forgets nothing."""
    layers = getattr(new_cache(model), "layers", [])
    return [layer.sliding_window if layer.is_sliding else 0 for layer in layers]
