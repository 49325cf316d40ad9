"""The scheduler: which tokens of which sequences a step computes.

Several steps may be on their way at once, each in another stage. A sequence that answers is in one
of them at a time: each takes its share of those that answer, or one takes all of them where the
forecast says that so they are faster. What a step can hold beside goes to prompts, in pieces, in
the order in which they came; pieces of one prompt follow one another through the stages, and last
equally long where the forecast knows seconds. It knows nothing of tensors.

A sequence is admitted when there are pages for the tokens that it has, and one more for each that
is running: how long an answer becomes is not known. Where pages run out, the youngest sequence is
preempted: it gives its pages up, returns to the head of the queue, and is recomputed later, prompt
and answer so far. A sequence only ever gives way to an older one, and one alone always fits, so the
oldest one goes on and all of them end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from duoka.forecast.forecast import Forecast
from duoka.forecast.serving import Capacity

from .pages import PagePool
from .sequence import Sequence
from .step import Chunk, Outcome

# Prompts are read in so many pieces for each stage, of at least so many tokens.
_PIECES_PER_STAGE = 2
_LEAST_PROMPT_TOKENS = 32


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
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
    def half(self) -> ScheduledChunk:
        """The first half of it."""
        return ScheduledChunk(self.sequence, self.start, self.num_tokens // 2)


class Scheduler:
    """Sequences that wait and those that are on their way, with their pages.

    Parameters
    ----------
    capacity : Capacity
    num_steps : int
        Steps that are on their way at the same time.
    forget : callable, optional
        Told the number of each sequence that has ended: for who has more of it.
    forecast : Forecast, optional
        Of stages that work at the same time: by it steps are cut where it knows seconds.
    """

    def __init__(
        self,
        capacity: Capacity,
        num_steps: int = 1,
        forget: Callable[[int], None] | None = None,
        forecast: Forecast | None = None,
    ) -> None:
        self.capacity = capacity
        self._num_steps = num_steps
        self.num_preempted = 0
        self._forget = forget
        self._speeds = () if forecast is None else forecast.serving_speeds
        self._step_seconds = None if forecast is None else forecast.step_seconds
        self.pool = PagePool(capacity.pages, capacity.page_tokens)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    @property
    def most_tokens(self) -> int:
        """The tokens of a sequence that there is memory for."""
        return min(self.capacity.context_tokens, self.capacity.pages * self.capacity.page_tokens)

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait for its turn."""
        self.waiting.append(sequence)

    def next_step(self) -> list[ScheduledChunk]:
        """What is to be computed next, beside what is on its way; nothing where nobody waits."""
        self._end_cancelled()
        self._admit()
        wanted = [sequence for sequence in self.running if not sequence.is_cancelled]
        answering = [sequence for sequence in wanted if sequence.is_answering]
        ready = [sequence for sequence in answering if sequence.num_left]
        share = -(-len(answering) // self._num_steps)
        if not self._is_grouped(len(answering)):
            share = 0 if len(ready) < len(answering) else len(ready)
        # The oldest first; the youngest may have to make room for it.
        ready = [sequence for sequence in ready[:share] if self._has_room(sequence)]
        pieces = [ScheduledChunk(sequence, sequence.scheduled, 1) for sequence in ready]
        left = self._prompt_tokens(len(pieces))
        for sequence in [sequence for sequence in wanted if sequence.is_running]:
            number = 0 if sequence.is_answering else sequence.num_left
            is_cut = number > left and self.capacity.whole_prompts
            if number and left > 0 and not (is_cut and pieces):
                pieces.append(ScheduledChunk(sequence, sequence.scheduled, min(left, number)))
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

    def computed(self, piece: ScheduledChunk, outcome: Outcome) -> None:
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
            taken = self.pool.take(sequence.tokens, sequence.num_tokens, spare=len(self.running))
            if taken is None:
                return
            self.waiting.popleft()
            sequence.pages, sequence.computed = taken
            sequence.scheduled = sequence.computed
            if not sequence.is_preempted:  # what it finds now may be its own
                sequence.shared_tokens = sequence.computed
            sequence.is_running = True
            self.running.append(sequence)

    def _has_room(self, sequence: Sequence) -> bool:
        """Give a sequence pages for its next token; younger ones are preempted for it.

        False where it has to wait: for older ones, or for what is being computed.
        """
        if not sequence.is_running:  # preempted a moment ago
            return False
        missing = self.pool.pages_for(sequence.num_tokens) - len(sequence.pages)
        while self.pool.num_free < missing:
            youngest = next(s for s in reversed(self.running) if s is sequence or not s.is_in_step)
            if youngest is sequence:
                return False
            self._end(youngest)
            youngest.computed = youngest.scheduled = 0
            youngest.is_preempted = True
            self.waiting.appendleft(youngest)
            self.num_preempted += 1
        sequence.pages += self.pool.more(missing)
        return True

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
