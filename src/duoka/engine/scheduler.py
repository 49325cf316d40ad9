"""The scheduler: which tokens of which sequences a step computes.

Several steps may be on their way at once, each in another stage. A sequence that answers is in one
of them at a time: each takes its share of those that answer, or one takes all of them where the
forecast says that so they are faster. What a step can hold beside goes to prompts, in pieces, in
the order in which they came; pieces of one prompt follow one another through the stages, and last
equally long where the forecast knows seconds. It knows nothing of tensors.

A sequence is admitted when there are pages for all that it may come to have, so that none is ever
stopped to make room (`reserve`); or when there are some for what it has now (`optimistic`): where
pages run out, the youngest one is computed again later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from duoka.errors import UsageError
from duoka.forecast.forecast import Forecast
from duoka.forecast.serving import Capacity

from .pages import PagePool
from .sequence import Sequence
from .step import Chunk, Outcome

Admission = Literal["reserve", "optimistic"]
# Prompts are read in so many pieces for each stage, of at least so many tokens.
_PIECES_PER_STAGE = 2
_LEAST_PROMPT_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Piece:
    """What a step computes of a sequence: so many tokens, from the place `start` on."""

    sequence: Sequence
    start: int
    num_tokens: int

    @property
    def chunk(self) -> Chunk:
        """The same for the executor."""
        sequence, end = self.sequence, self.start + self.num_tokens
        is_last = end == sequence.num_tokens
        return Chunk(
            sequence.number,
            sequence.tokens[self.start : end],
            self.start,
            sequence.pages,
            sequence.row if is_last else None,
            None if self.start else sequence.images,
        )

    @property
    def is_current(self) -> bool:
        """Whether what it comes to is still wanted, and all before it has been computed."""
        return self.sequence.is_running and self.start == self.sequence.computed

    @property
    def half(self) -> Piece:
        """The first half of it."""
        return Piece(self.sequence, self.start, self.num_tokens // 2)


class Scheduler:
    """Sequences that wait and those that are on their way, with their pages.

    Parameters
    ----------
    capacity : Capacity
    num_steps : int
        Steps that are on their way at the same time.
    admission : {"reserve", "optimistic"}
    forget : callable, optional
        Told the number of each sequence that has ended: for who has more of it.
    forecast : Forecast, optional
        Of stages that work at the same time: by it steps are cut where it knows seconds.
    """

    def __init__(
        self,
        capacity: Capacity,
        num_steps: int = 1,
        admission: Admission = "reserve",
        forget: Callable[[int], None] | None = None,
        forecast: Forecast | None = None,
    ) -> None:
        self.capacity = capacity
        self._num_steps = num_steps
        self._is_optimistic = admission == "optimistic"
        self.num_preempted = 0
        self._forget = forget
        self._speeds = () if forecast is None else forecast.serving_speeds
        self._step_seconds = None if forecast is None else forecast.step_seconds
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
        """What is to be computed next, beside what is on its way; nothing where nobody waits."""
        self._end_cancelled()
        self._admit()
        wanted = [sequence for sequence in self.running if not sequence.is_cancelled]
        answering = [sequence for sequence in wanted if sequence.is_answering]
        ready = [sequence for sequence in answering if sequence.num_left]
        share = -(-len(answering) // self._num_steps)
        if not self._is_grouped(len(answering)):
            share = 0 if len(ready) < len(answering) else len(ready)
        if self._is_optimistic:  # the oldest first; the youngest may have to make room for it
            ready = [sequence for sequence in ready[:share] if self._has_room(sequence)]
        ready = [sequence for sequence in ready[:share] if sequence.is_running]
        pieces = [Piece(sequence, sequence.scheduled, 1) for sequence in ready]
        left = self._prompt_tokens(len(pieces))
        for sequence in [sequence for sequence in wanted if sequence.is_running]:
            number = 0 if sequence.is_answering else sequence.num_left
            is_cut = number > left and self.capacity.whole_prompts
            if number and left > 0 and not (is_cut and pieces):
                pieces.append(Piece(sequence, sequence.scheduled, min(left, number)))
                left -= pieces[-1].num_tokens
        for piece in pieces:
            piece.sequence.scheduled = piece.start + piece.num_tokens
        return pieces

    def _is_grouped(self, num_answering: int) -> bool:
        """Whether so many answer faster in a group for each step than all in one."""
        loads = [load for load in self._speeds if load.requests <= num_answering]
        return not loads or loads[-1].is_grouped

    def _prompt_tokens(self, num_answering: int) -> int:
        """How many tokens of prompts a step takes beside those that answer."""
        most = self.capacity.step_tokens - num_answering
        if self._num_steps == 1 or self.capacity.whole_prompts:
            return most
        # In pieces, each stage can read another one: of M pieces S stages make M + S - 1 steps.
        reading = [s for s in self.running if not s.is_answering]
        if self._step_seconds is not None and reading:
            tokens, past = sum(s.num_tokens for s in reading), reading[0].scheduled
            piece = self._step_seconds.piece(tokens, past, num_answering, self._num_steps)
        else:
            unread = sum(s.num_tokens - s.computed for s in reading)
            piece = -(-unread // (_PIECES_PER_STAGE * self._num_steps))
        return min(most, max(_LEAST_PROMPT_TOKENS, piece))

    @property
    def has_work(self) -> bool:
        """Whether anybody waits or is on the way."""
        return bool(self.waiting or self.running)

    def computed(self, piece: Piece, outcome: Outcome) -> None:
        """A piece has been computed; its sequence takes the next token, and may end with it."""
        sequence = piece.sequence
        if not piece.is_current:  # it has ended, or what was before this has failed
            return
        if isinstance(outcome, Exception):
            self.fail(sequence, outcome)
            return
        size, before = self.capacity.page_tokens, sequence.computed
        sequence.computed = piece.start + piece.num_tokens
        if sequence.computed // size > before // size:
            self.pool.share(sequence.pages, sequence.tokens, sequence.computed)
        finish = None
        if outcome is not None and not sequence.is_cancelled:
            finish = sequence.add(outcome)
        if finish is not None:
            self._end(sequence)
            sequence.finish(finish)

    def fail(self, sequence: Sequence, error: Exception) -> None:
        """End a sequence that can't be computed."""
        self._end(sequence)
        sequence.fail(error)

    def fail_all(self, error: Exception) -> None:
        """End all sequences: nothing is computed any more."""
        for sequence in list(self.running):
            self.fail(sequence, error)
        while self.waiting:
            self.waiting.popleft().fail(error)

    def cancel_all(self) -> None:
        """End all that wait or are on the way; no step is any more."""
        for sequence in (*self.running, *self.waiting):
            sequence.is_cancelled = True
            sequence.scheduled = sequence.computed
        self._end_cancelled()

    def _end(self, sequence: Sequence) -> None:
        """A sequence is no longer on its way, and others can have its pages."""
        self.running.remove(sequence)
        sequence.is_running = False
        self.pool.give_back(sequence.pages)
        sequence.pages = []
        if self._forget is not None:
            self._forget(sequence.number)

    def _admit(self) -> None:
        """Let sequences begin whose turn it is, first come, first served."""
        while self.waiting and len(self.running) < self.capacity.sequences:
            sequence = self.waiting[0]
            if self._is_worth_waiting(sequence):
                return
            tokens = sequence.most_tokens
            if self._is_optimistic:
                # Each of those on their way may soon need one more.
                if self.running and self.pool.num_free < self._pages_now(sequence):
                    return
                tokens = sequence.num_tokens
            taken = self.pool.take(sequence.tokens, tokens)
            if taken is None:
                return
            self.waiting.popleft()
            sequence.pages, sequence.computed = taken
            sequence.scheduled = sequence.computed
            sequence.shared_tokens = max(sequence.shared_tokens, sequence.computed)
            sequence.is_running = True
            self.running.append(sequence)

    def _pages_now(self, sequence: Sequence) -> int:
        """The pages that should be free for a sequence to begin."""
        return self.pool.pages_for(sequence.num_tokens) + len(self.running)

    def _has_room(self, sequence: Sequence) -> bool:
        """Whether a sequence has pages for its next token; the youngest ones give up theirs."""
        missing = self.pool.pages_for(sequence.num_tokens) - len(sequence.pages)
        while sequence.is_running and self.pool.num_free < missing:
            youngest = next((s for s in reversed(self.running) if not s.is_in_step), None)
            if youngest is None:
                return False  # what is being computed can't be given up
            self._end(youngest)
            youngest.computed = youngest.scheduled = 0
            self.waiting.appendleft(youngest)
            self.num_preempted += 1
        if sequence.is_running:
            sequence.pages += self.pool.more(missing)
        return sequence.is_running

    def _is_worth_waiting(self, sequence: Sequence) -> bool:
        """Whether pages are on their way that hold half of a sequence's tokens, or more of them.

        Of several answers to one prompt the first computes it, and the others share that.
        """
        size, tokens = self.capacity.page_tokens, sequence.tokens
        for other in self.running:
            end = max((other.computed // size + 1) * size, len(tokens) // 2)
            shareable = min(len(tokens), len(other.tokens)) - 1
            if end <= shareable and tokens[:end] == other.tokens[:end]:
                return True
        return False

    def _end_cancelled(self) -> None:
        # Others can have the pages when nothing is written to them any more.
        for sequence in [s for s in self.running if s.is_cancelled and not s.is_in_step]:
            self._end(sequence)
            sequence.finish("cancelled")
        for sequence in [s for s in self.waiting if s.is_cancelled]:
            self.waiting.remove(sequence)
            sequence.finish("cancelled")
