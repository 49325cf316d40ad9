"""Serving: the steps over a paged cache, as a finite set of sizes.

Requests arrive and finish in any order, but every step is padded to one of these sizes, and its
memory depends on the size alone. Attention that reads pages in place, by block tables, has no
workspace; that of attention over gathered keys has the same size in every step, the one of the most
keys gathered at once. So two steps of one size allocate the same, for any requests.

A step frees all that it allocates. Between steps the allocator holds only the weights and pages, at
fixed addresses, and its segments; so the set of segments is all that a step can change. Once no
size of step needs a new segment, no later step will, in any order. A step may run its attention in
several pieces, one after another. Each piece frees its memory too, so every piece starts from the
same free memory as a single piece.

This module knows nothing of tensors or of individual requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from .workload import BLOCK_TABLE_PAGE_TOKENS, LATENT_PAGE_TOKENS, Workload

PIECE_ROWS = 256
"""The most queries of one piece of attention (one kernel call)."""
_GATHERED_TOKENS = 8192
_MOST_GRAPH_TOKENS = 256
"""The most tokens of a step that is replayed as a CUDA graph; larger steps keep a GPU busy."""
_MOST_GRAPH_KEYS = 2**15
"""The most keys gathered by such a step, which gathers the full context of each sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """The size of a step.

    Parameters
    ----------
    tokens : int
        Tokens of all sequences together, padding included.
    rows : int
        Queries in each piece of attention, at most `PIECE_ROWS`; 1 with block tables, where no
        memory depends on it.
    logits : int
        Tokens for which logits are computed.
    """

    tokens: int
    rows: int
    logits: int


WarmUp = Literal["first", "largest", "every"]
"""The steps to run before the first request: only the step that allocates the pages, or also the
largest sizes, or every size."""
FIRST = StepSize(tokens=1, rows=1, logits=2)
"""The step that allocates the pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The capacity of an engine with a paged cache.

    Parameters
    ----------
    sequences : int
        The most running requests.
    context_tokens : int
        The most tokens of a request: prompt and generated tokens.
    pages, page_tokens : int
        Pages of the cache, and tokens per page.
    step_tokens : int
        The most tokens of a step.
    whole_prompts : bool
        True if a prompt must be prefilled in a single step.
    is_int8 : bool
        True if pages hold 8-bit integers, with a scale for each token and head.
    gathers : bool
        True if pages of any size are gathered: attention that reads them in place failed a test.
    graph_tokens : int
        The most tokens of a decode step that is a CUDA graph, where attention reads pages in place
        or gathers latents; see `most_graph_tokens`.
    """

    sequences: int
    context_tokens: int
    pages: int
    page_tokens: int
    step_tokens: int
    whole_prompts: bool = False
    is_int8: bool = False
    gathers: bool = False
    graph_tokens: int = 0

    @classmethod
    def of(cls, workload: Workload) -> Capacity:
        """Return the capacity of a workload; by default with pages for one full-length request."""
        chunk = workload.prefill_chunk_tokens
        assert chunk != "auto", "resolve the chunk first"
        return cls(
            sequences=workload.batch,
            context_tokens=workload.context_tokens,
            pages=workload.pages or least_pages(workload),
            page_tokens=workload.page_tokens,
            step_tokens=min(
                max(chunk or workload.prompt_tokens, workload.batch),
                workload.batch * workload.context_tokens,
            ),
            is_int8=workload.has_int8_cache,
            graph_tokens=_MOST_GRAPH_TOKENS
            if workload.cuda_graphs is True
            else int(workload.cuda_graphs),
        )

    @property
    def context_pages(self) -> int:
        """The most pages gathered from one sequence, padding included."""
        return padded(-(-self.context_tokens // self.page_tokens))

    @property
    def has_block_tables(self) -> bool:
        """True if attention reads the pages in place (FlashAttention with block tables)."""
        return self.page_tokens == BLOCK_TABLE_PAGE_TOKENS and not self.gathers

    @property
    def gathered_pages(self) -> int:
        """The most pages gathered at once, from one sequence or several."""
        if self.has_block_tables:
            return 0
        several = min(self.sequences * self.context_pages, _GATHERED_TOKENS // self.page_tokens)
        return max(self.context_pages, several)

    @property
    def gathered_tokens(self) -> int:
        """The tokens of `gathered_pages`."""
        return self.gathered_pages * self.page_tokens

    @property
    def attended_tokens(self) -> int:
        """The most keys of one piece of attention, padding included."""
        pages = self.context_pages if self.has_block_tables else self.gathered_pages
        return pages * self.page_tokens

    @property
    def page_numbers(self) -> int:
        """The most block table entries of a step, for all layers with the same attention window.

        Up to a fifth of the sequences computed together may be padding. The padding of each to the
        longest sequence is included in `context_pages`. Block tables that attention reads have
        entries of half the size, and the numbers of queries and keys of each sequence beside them.
        """
        counts = self.sequences + 2 if self.has_block_tables else 0
        return (-(-5 * self.sequences // 4) + 1) * self.context_pages + counts

    def padded_pages(self, number: int) -> int:
        """Return the pages to gather for a sequence of `number` pages, padding included."""
        return min(padded(number), self.context_pages)

    def tokens(self, number: int) -> int:
        """Return the padded number of tokens of a step of `number` tokens."""
        return min(padded(number), max(self.step_tokens, number))

    def logits(self, number: int) -> int:
        """Return the padded number of rows of logits of a step with `number` rows.

        At least 2, because a single row would be sorted by another kernel.
        """
        return max(2, min(power(number), self.sequences))

    def steps(self) -> list[StepSize]:
        """Return all step sizes, the largest first.

        The layers' memory depends on tokens and rows, the memory of logits on tokens and logits. So
        every pair (tokens, rows) and every pair (tokens, logits) occurs, but not every triple.
        """
        # Pairing the n-th largest rows with the n-th largest logits covers all values of both.
        sizes = []
        for tokens in reversed(_sort_distinct(map(self.tokens, range(1, self.step_tokens + 1)))):
            most_rows = 1 if self.has_block_tables else min(tokens, PIECE_ROWS)
            rows = _sort_distinct(power(number) for number in range(1, most_rows + 1))
            most = min(self.sequences, tokens)
            logits = _sort_distinct(map(self.logits, range(1, most + 1)))
            for number in range(max(len(rows), len(logits))):
                row = rows[-1 - min(number, len(rows) - 1)]
                logit = logits[-1 - min(number, len(logits) - 1)]
                sizes.append(StepSize(tokens=tokens, rows=min(row, tokens), logits=logit))
        return sizes

    @property
    def most_graph_tokens(self) -> int:
        """The most tokens of a decode step that is a CUDA graph; 0 if no step is."""
        if self.page_tokens != LATENT_PAGE_TOKENS:
            return self.graph_tokens if self.has_block_tables else 0
        most = _MOST_GRAPH_KEYS // (self.context_pages * self.page_tokens)
        return min(self.graph_tokens, most)

    def graph_steps(self) -> list[StepSize]:
        """Return the sizes of the steps of decoding sequences that are CUDA graphs, largest first.

        With 10 sequences these have 10, 8, 7, …, 1 tokens: 9 sequences are padded to 10.
        """
        most = min(self.sequences, self.most_graph_tokens)
        sizes = _sort_distinct(map(self.tokens, range(1, most + 1)))
        return [StepSize(tokens=size, rows=1, logits=self.logits(size)) for size in sizes[::-1]]

    def largest_steps(self) -> list[StepSize]:
        """Return the step sizes with the most tokens."""
        sizes = self.steps()
        return [size for size in sizes if size.tokens == sizes[0].tokens]

    def warm_up_steps(
        self, warm_up: WarmUp, reserved_bytes: Callable[[], int]
    ) -> Iterator[StepSize]:
        """Yield the sizes of the steps to run after the first step, before the first request.

        With "every", all sizes are repeated until a round doesn't increase `reserved_bytes()`: then
        no later step will. On devices without memory accounting (0), the largest sizes run once.
        """
        reserved, now = -1, reserved_bytes()
        if warm_up == "largest" or (warm_up == "every" and not now):
            yield from self.largest_steps()
        elif warm_up == "every":
            while reserved < now:
                yield from self.steps()
                reserved, now = now, reserved_bytes()


def least_pages(workload: Workload) -> int:
    """Return the number of pages that a request of the full context needs."""
    return -(-workload.context_tokens // workload.page_tokens)


def padded(number: int) -> int:
    """Round up to a padded size; padding adds at most a quarter, and powers of 2 are kept.

    Examples
    --------
    >>> [padded(number) for number in (1, 8, 9, 16, 17, 1000)]
    [1, 8, 10, 16, 20, 1024]
    """
    unit = 1 << max(0, (number - 1).bit_length() - 3)
    return -(-number // unit) * unit


def power(number: int) -> int:
    """Round up to a power of 2.

    Examples
    --------
    >>> [power(number) for number in (1, 2, 3, 200)]
    [1, 2, 4, 256]
    """
    return 1 << max(0, number - 1).bit_length()


def _sort_distinct(numbers: Iterator[int] | Sequence[int]) -> list[int]:
    """Return the distinct numbers in ascending order."""
    return sorted(set(numbers))


# An allocation size may depend on the step's tokens t, rows r of a piece of attention and rows l of
# logits, on the gathered tokens n, the block table entries p, and the pages g of the cache. Work
# also depends on the number of (query, key) pairs, rn.
SERVING_MONOMIALS = ("1", "t", "r", "l", "n", "p", "g", "rn")


def serving_monomials(
    size: StepSize, *, gathered: int, numbers: int = 0, pages: int = 0, pairs: int | None = None
) -> tuple[int, ...]:
    """Return the values of `SERVING_MONOMIALS` at a step.

    `pairs` are the (query, key) pairs of its attention; None is rows times gathered tokens.
    """
    pairs = size.rows * gathered if pairs is None else pairs
    return (1, size.tokens, size.rows, size.logits, gathered, numbers, pages, pairs)
