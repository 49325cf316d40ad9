"""Serving: the steps over a paged cache, as a finite set of sizes.

Requests come and go in any order, but a step is padded to one of these sizes, and takes memory as
these do. What layers need for the time of their attention is as large in every step: as the most
keys that are gathered at once. So two steps of one size do the same, whatever is in them.

Between two steps nothing of theirs is left. What the allocator has then are its segments, and where
in them the pages and weights lie; so the sizes of its segments are all that a step changes. Where
no step of any size needs a further segment, none ever will, in whatever order they come. A step
may have several pieces of attention, one after another, which leave nothing either: each finds what
the same piece, as the only one, has found.

It knows nothing of tensors, and of who asks for what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from .workload import Workload

PAGE_TOKENS = 16
PIECE_ROWS = 256
"""Queries that attend to their keys in one kernel, at most."""
_GATHERED_TOKENS = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """The size of a step.

    Parameters
    ----------
    tokens : int
        Of all sequences together, padding included.
    rows : int
        Queries of a piece of its attention.
    logits : int
        Tokens after which there are logits.
    """

    tokens: int
    rows: int
    logits: int


WarmUp = Literal["first", "largest", "every"]
"""The steps to run before any request comes: the one that makes the pages, and which others."""
FIRST = StepSize(tokens=1, rows=1, logits=2)
"""The step in which pages are made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The capacity of an engine with a paged cache.

    Parameters
    ----------
    sequences : int
        Running requests.
    context_tokens : int
        Tokens of a request: prompt and generated.
    pages, page_tokens : int
        Of the cache, and tokens of a page.
    step_tokens : int
        Tokens that are computed at once.
    whole_prompts : bool
        Whether a prompt has to be read at once.
    is_int8 : bool
        Whether pages have 8-bit integers, with a scale for each token and head.
    """

    sequences: int
    context_tokens: int
    pages: int
    page_tokens: int
    step_tokens: int
    whole_prompts: bool = False
    is_int8: bool = False

    @classmethod
    def of(cls, workload: Workload) -> Capacity:
        """Return the capacity of a workload, by default with the fewest pages possible."""
        chunk = workload.prefill_chunk_tokens
        assert chunk != "auto", "resolve the chunk first"
        return cls(
            sequences=workload.batch,
            context_tokens=workload.context_tokens,
            pages=workload.pages or least_pages(workload),
            page_tokens=PAGE_TOKENS,
            step_tokens=max(chunk or workload.prompt_tokens, workload.batch),
            is_int8=workload.has_int8_cache,
        )

    @property
    def context_pages(self) -> int:
        """The most pages to gather of a sequence, padding included."""
        return padded(-(-self.context_tokens // self.page_tokens))

    @property
    def gathered_pages(self) -> int:
        """The most pages to gather at once."""
        several = min(self.sequences * self.context_pages, _GATHERED_TOKENS // self.page_tokens)
        return max(self.context_pages, several)

    @property
    def gathered_tokens(self) -> int:
        """Tokens of the gathered pages."""
        return self.gathered_pages * self.page_tokens

    @property
    def page_numbers(self) -> int:
        """The longest block table of a step, for layers of equal windows.

        Up to a fifth of the sequences computed together may be padding, and the longest is at most
        1.25 times as long as the shortest; `context_pages` has that already.
        """
        return (-(-5 * self.sequences // 4) + 1) * self.context_pages

    def padded_pages(self, number: int) -> int:
        """Return the pages to gather for so many of a sequence, with padding."""
        return min(padded(number), self.context_pages)

    def tokens(self, number: int) -> int:
        """Return the tokens of a step of so many tokens, with padding."""
        return min(padded(number), max(self.step_tokens, number))

    def logits(self, number: int) -> int:
        """Return the rows of logits of a step with so many, with padding.

        They are never one alone, which would be sorted by another kernel.
        """
        return max(2, min(power(number), self.sequences))

    def steps(self) -> list[StepSize]:
        """Return all sizes of steps, the largest first.

        What is before the last layer doesn't depend on how many logits there are, nor these on the
        pieces: each of both comes with every number of tokens, not with each of the other.
        """
        # The sizes of logits and of rows don't meet: n-th largest with n-th largest covers each.
        sizes = []
        for tokens in reversed(_distinct(map(self.tokens, range(1, self.step_tokens + 1)))):
            rows = _distinct(power(number) for number in range(1, min(tokens, PIECE_ROWS) + 1))
            most = min(self.sequences, tokens)
            logits = _distinct(map(self.logits, range(1, most + 1)))
            for number in range(max(len(rows), len(logits))):
                row = rows[-1 - min(number, len(rows) - 1)]
                logit = logits[-1 - min(number, len(logits) - 1)]
                sizes.append(StepSize(tokens=tokens, rows=min(row, tokens), logits=logit))
        return sizes

    def largest_steps(self) -> list[StepSize]:
        """Return the sizes with the most tokens."""
        sizes = self.steps()
        return [size for size in sizes if size.tokens == sizes[0].tokens]

    def warm_up_steps(
        self, warm_up: WarmUp, reserved_bytes: Callable[[], int]
    ) -> Iterator[StepSize]:
        """Yield the sizes of the steps to run after the first one, before any request comes.

        All sizes are repeated until none of them makes the allocators reserve more memory
        (`reserved_bytes`): no later step will then. Where nobody counts memory (0), the steps of
        most tokens will do.
        """
        reserved, now = -1, reserved_bytes()
        if warm_up == "largest" or (warm_up == "every" and not now):
            yield from self.largest_steps()
        elif warm_up == "every":
            while reserved < now:
                yield from self.steps()
                reserved, now = now, reserved_bytes()


def least_pages(workload: Workload) -> int:
    """Return the pages of a request of the whole context."""
    return -(-workload.context_tokens // PAGE_TOKENS)


def padded(number: int) -> int:
    """Round up to a step size; sizes grow by at most a quarter, and include powers of 2.

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


def _distinct(numbers: Iterator[int] | Sequence[int]) -> list[int]:
    return sorted(set(numbers))


# What a size may depend on in a step: its tokens t, the rows r of a piece of attention and l of
# logits, the tokens n that are gathered at most, the numbers p of pages, and the pages g of the
# cache. Work depends on how many pairs of a query and a key there are as well.
SERVING_MONOMIALS = ("1", "t", "r", "l", "n", "p", "g", "rn")


def serving_monomials(
    size: StepSize, *, gathered: int, numbers: int = 0, pages: int = 0, pairs: int | None = None
) -> tuple[int, ...]:
    """Return the values of `SERVING_MONOMIALS` at a step."""
    pairs = size.rows * gathered if pairs is None else pairs
    return (1, size.tokens, size.rows, size.logits, gathered, numbers, pages, pairs)
