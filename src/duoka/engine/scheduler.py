"""The scheduler: which tokens of which sequences a step computes.

Every sequence that answers gets its next token in each step; what the step can hold beside goes to
prompts, in pieces, in the order in which they came. A sequence is admitted when there are pages for
all that it may come to have: none is ever stopped again to make room. It knows nothing of tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from duoka.errors import UsageError

from .pages import PagePool
from .request import TokenChoice
from .sequence import Sequence
from .step import Chunk

Outcome = TokenChoice | Exception | None
"""What a piece comes to: a token, nothing yet, or why it can't be computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What memory is there for.

    Parameters
    ----------
    sequences : int
        Answers on their way at the same time.
    context_tokens : int
        Tokens of one of them: prompt and answer.
    pages, page_tokens : int
        Of the cache, and tokens of a page.
    step_tokens : int
        Tokens that are computed at once.
    whole_prompts : bool
        Whether a prompt has to be read at once.
    """

    sequences: int
    context_tokens: int
    pages: int
    page_tokens: int
    step_tokens: int
    whole_prompts: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """What a step computes of a sequence: so many tokens, from the place `start` on."""

    sequence: Sequence
    start: int
    num_tokens: int

    @property
    def wants_logits(self) -> bool:
        """Whether the next token can be chosen after it."""
        return self.start + self.num_tokens == self.sequence.num_tokens

    @property
    def chunk(self) -> Chunk:
        """The same for the executor."""
        end = self.start + self.num_tokens
        tokens = self.sequence.tokens[self.start : end]
        return Chunk(
            self.sequence.number, tokens, self.start, self.sequence.pages, self.wants_logits
        )

    def halves(self) -> list[Piece]:
        """The same in two."""
        first = self.num_tokens // 2
        second = Piece(self.sequence, self.start + first, self.num_tokens - first)
        return [Piece(self.sequence, self.start, first), second]


class Scheduler:
    """Sequences that wait and those that are on their way, with their pages.

    Who has more of a sequence than that is told to `forget` it, by its number, when it has ended.
    """

    def __init__(self, capacity: Capacity, forget: Callable[[int], None] | None = None) -> None:
        self.capacity = capacity
        self._forget = forget
        self.pool = PagePool(capacity.pages, capacity.page_tokens)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def refuse_unfit(self, prompt_tokens: int, new_tokens: int) -> None:
        """Raise UsageError for a request that no memory is there for, however long it waits."""
        tokens = prompt_tokens + new_tokens
        limit = min(self.capacity.context_tokens, self.capacity.pages * self.capacity.page_tokens)
        if tokens > limit:
            raise UsageError(
                f"{prompt_tokens} tokens of prompt and {new_tokens} new ones are {tokens}; there "
                f"is memory for {limit}",
                hint="ask for fewer new tokens, or plan with a larger --context",
            )

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait for its turn."""
        self.waiting.append(sequence)

    def next_step(self) -> list[Piece]:
        """What is to be computed next; nothing where nobody waits."""
        self._end_cancelled()
        self._admit()
        running = self.running
        pieces = [Piece(s, s.computed, 1) for s in running if s.num_tokens - s.computed == 1]
        left = self.capacity.step_tokens - len(pieces)
        for sequence in running:
            number = sequence.num_tokens - sequence.computed
            is_cut = number > left and self.capacity.whole_prompts
            if number > 1 and left > 0 and not (is_cut and pieces):
                pieces.append(Piece(sequence, sequence.computed, min(left, number)))
                left -= pieces[-1].num_tokens
        return pieces

    @property
    def has_work(self) -> bool:
        """Whether anybody waits or is on the way."""
        return bool(self.waiting or self.running)

    def computed(self, piece: Piece, outcome: Outcome) -> None:
        """A piece has been computed; its sequence takes the next token, and may end with it."""
        sequence = piece.sequence
        if isinstance(outcome, Exception):
            if sequence in self.running:
                self.end(sequence)
            sequence.fail(outcome)
            return
        size, before = self.capacity.page_tokens, sequence.computed
        sequence.computed = piece.start + piece.num_tokens
        if sequence.computed // size > before // size:
            self.pool.share(sequence.pages, sequence.tokens[: sequence.computed])
        finish = None if outcome is None else sequence.add(outcome)
        if finish is not None:
            self.end(sequence)
            sequence.finish(finish)

    def cancel_all(self) -> None:
        """End all that wait or are on the way."""
        for sequence in (*self.running, *self.waiting):
            sequence.is_cancelled = True
        self._end_cancelled()

    def end(self, sequence: Sequence) -> None:
        """A sequence is no longer on its way, and others can have its pages."""
        self.running.remove(sequence)
        self.pool.give_back(sequence.pages)
        sequence.pages = []
        if self._forget is not None:
            self._forget(sequence.number)

    def _admit(self) -> None:
        """Let sequences begin whose turn it is, first come, first served."""
        while self.waiting and len(self.running) < self.capacity.sequences:
            sequence = self.waiting[0]
            taken = self.pool.take(sequence.prompt, sequence.most_tokens)
            if taken is None:
                return
            self.waiting.popleft()
            sequence.pages, sequence.computed = taken
            sequence.shared_tokens = sequence.computed
            self.running.append(sequence)

    def _end_cancelled(self) -> None:
        for sequence in [s for s in self.running if s.is_cancelled]:
            self.end(sequence)
            sequence.finish("cancelled")
        for sequence in [s for s in self.waiting if s.is_cancelled]:
            self.waiting.remove(sequence)
            sequence.finish("cancelled")
