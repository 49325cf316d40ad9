"""The scheduler: the tokens of which sequences a step computes.

Several steps may be in flight at once, each in another pipeline stage. It knows nothing of tensors.

*Decode micro-batches.* A sequence that decodes is in one step at a time. With S steps in flight the
decoding sequences are dealt to S micro-batches of equal size, or all of them go into one step where
the forecast says that this is faster.

*Chunked prefill.* The rest of a step's token budget goes to prompts, in the order in which they
came. Chunks of one prompt follow one another through the stages; where the forecast knows seconds,
they are cut so that each takes equally long.

*Preemption.* A sequence is admitted when there are pages for the tokens that it has, and one page
more for each running sequence: nobody knows how long a generation becomes. Where pages run out, the
youngest sequence is preempted: it gives its pages up, returns to the head of the queue, and is
recomputed later, prompt and generated tokens. A sequence only ever gives way to an older one, and
one alone always fits, so the oldest one goes on and all of them end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items

from duoka.forecast.forecast import Forecast
from duoka.forecast.serving import Capacity
from duoka.runtime.call.chunk import Chunk

from .pages import PagePool
from .request import Outcome, TokenChoice
from .sequence import Sequence

# Prompts are read in so many chunks for each stage, of at least so many tokens.
_CHUNKS_PER_STAGE = 2
_LEAST_PROMPT_TOKENS = 32


class Scheduler:
    """Queued and running sequences, with their pages.

    Parameters
    ----------
    capacity : Capacity
    num_steps : int
        Steps that are in flight at the same time.
    forget : callable, optional
        Called with the number of each sequence that has ended, for an executor that keeps state.
    forecast : Forecast, optional
        Of stages that work at the same time; steps are cut by it where it knows seconds.
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
        self.running: dict[int, Sequence] = {}
        """By number, the oldest first."""

    @property
    def most_tokens(self) -> int:
        """The most tokens of a sequence."""
        return min(self.capacity.context_tokens, self.capacity.pages * self.capacity.page_tokens)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.append(sequence)

    # Two stages, so two steps in flight; decoding sequences a … e, and a prompt in chunks p0 … p3:
    #
    #     stage 0   a b c p0 │ d e p1   │ a b c p2 │ d e p3
    #     stage 1            │ a b c p0 │ d e p1   │ a b c p2
    #
    # A decoding sequence waits for its own token, which the last stage samples: it is in one step
    # at a time, so two micro-batches keep two stages busy. The tokens of a prompt are known: p1
    # enters stage 0 while p0 is in stage 1. Each stage computes steps in their order, so the keys
    # of p0 are in its pages when p1 comes.
    def next_step(self) -> list[Chunk]:
        """Choose the chunks to compute next, beside those in flight; none if there is no work."""
        self._end_cancelled()
        self._admit()
        sequences = [sequence for sequence in self.running.values() if not sequence.is_cancelled]
        decoding = [sequence for sequence in sequences if sequence.is_decoding]
        ready = [sequence for sequence in decoding if sequence.num_left]
        # The size of a decode micro-batch. With 5 decoding sequences and 2 steps in flight a step
        # takes 3 of those that no other step has; undivided, it waits until no step has any.
        share = -(-len(decoding) // self._num_steps)
        if not self._is_grouped(len(decoding)):
            share = 0 if len(ready) < len(decoding) else len(ready)
        # The oldest first; the youngest may be preempted for it.
        chunks = [
            self._schedule(sequence, 1) for sequence in ready[:share] if self._has_pages(sequence)
        ]
        token_budget = self._prompt_tokens(len(chunks))
        for sequence in sequences:
            is_prefilling = sequence.number in self.running and not sequence.is_decoding
            number = sequence.num_left if is_prefilling else 0
            is_cut = number > token_budget and self.capacity.whole_prompts
            if number and token_budget > 0 and not (is_cut and chunks):
                chunks.append(self._schedule(sequence, min(token_budget, number)))
                token_budget -= len(chunks[-1].tokens)
        return chunks

    def schedule_again(self, chunks: Items[Chunk]) -> list[Chunk]:
        """Take the chunks of a failed step again, without those of ended sequences."""
        renewed = []
        for chunk in chunks:
            sequence = self._current(chunk)
            if sequence is not None:  # later chunks of it have failed with this one
                sequence.scheduled = chunk.start
                renewed.append(self._schedule(sequence, len(chunk.tokens)))
        return renewed

    def _schedule(self, sequence: Sequence, num_tokens: int) -> Chunk:
        """Take the next tokens of a sequence for a step."""
        start, end = sequence.scheduled, sequence.scheduled + num_tokens
        sequence.scheduled = end
        return Chunk(
            sequence.number,
            sequence.tokens[start:end],
            start,
            sequence.pages,
            sequence.row if end == sequence.num_tokens else None,
            None if start else sequence.images,
        )

    def _current(self, chunk: Chunk) -> Sequence | None:
        """Return the sequence of a chunk if it runs, and all earlier tokens have been computed."""
        sequence = self.running.get(chunk.sequence)
        return sequence if sequence is not None and chunk.start == sequence.computed else None

    def _is_grouped(self, num_decoding: int) -> bool:
        """Return True if so many decode faster in a micro-batch for each step than all in one."""
        loads = [load for load in self._speeds if load.requests <= num_decoding]
        return not loads or loads[-1].is_grouped

    # With step_tokens 512, 2 steps in flight, 3 decoded tokens, and prompts of 180 and 900 unread
    # tokens: the budget is 509, chunks are of 1080 / (2 * 2) = 270 tokens, and this step reads 180
    # tokens of the first prompt and 90 of the second. With one step in flight it reads 180 and 329.
    def _prompt_tokens(self, num_decoding: int) -> int:
        """Return the token budget for prompts of a step with so many decoded tokens."""
        budget = self.capacity.step_tokens - num_decoding
        if self._num_steps == 1 or self.capacity.whole_prompts:
            return budget
        # Each stage reads another chunk: M chunks take M + S - 1 steps through S stages.
        # Of 8 units of time for each of S = 2 stages a whole prompt takes 16, and M = 4 chunks of 2
        # take (4 + 1) * 2 = 10.
        reading = [s for s in self.running.values() if not s.is_decoding]
        if self._step_seconds is not None and reading:
            tokens, past = sum(s.num_tokens for s in reading), reading[0].scheduled
            chunk = self._step_seconds.piece(tokens, past, num_decoding, self._num_steps)
        else:
            unread = sum(s.num_tokens - s.computed for s in reading)
            chunk = -(-unread // (_CHUNKS_PER_STAGE * self._num_steps))
        return min(budget, max(_LEAST_PROMPT_TOKENS, chunk))

    def computed(self, chunk: Chunk, outcome: Outcome) -> None:
        """Take the outcome of a chunk: its sequence gets the next token, and may end with it."""
        sequence = self._current(chunk)
        if sequence is None:  # it has ended, or an earlier chunk of it has failed
            return
        error = outcome if isinstance(outcome, Exception) else None
        try:
            if not isinstance(outcome, Exception):
                self._advance(sequence, chunk.end, outcome)
        except Exception as raised:  # by its tokenizer, say: other sequences go on
            error = raised
        if error is not None:
            if sequence.number in self.running:
                self._end(sequence)
            sequence.fail(error)

    def _advance(self, sequence: Sequence, end: int, choice: TokenChoice | None) -> None:
        """Count the tokens up to `end` as computed, and add the next token."""
        size, already = self.capacity.page_tokens, sequence.computed
        sequence.computed = end
        if end // size > already // size:
            self.pool.share(sequence.pages, sequence.tokens, end)
        if choice is None or sequence.is_cancelled:
            return
        finish = sequence.add(choice)
        if finish is not None:
            self._end(sequence)
            sequence.finish(finish)

    def fail_all(self, error: Exception) -> None:
        """End all sequences: nothing is computed any more."""
        for sequence in [*self.running.values()]:
            self._end(sequence)
            sequence.fail(error)
        while self.waiting:
            self.waiting.popleft().fail(error)

    def cancel_all(self) -> None:
        """End all queued and running sequences; no step is in flight any more."""
        for sequence in (*self.running.values(), *self.waiting):
            sequence.is_cancelled = True
            sequence.scheduled = sequence.computed
        self._end_cancelled()

    def _end(self, sequence: Sequence) -> None:
        """Stop running a sequence, and free its pages."""
        del self.running[sequence.number]
        self.pool.give_back(sequence.pages)
        sequence.pages = []
        if self._forget is not None:
            self._forget(sequence.number)

    def _admit(self) -> None:
        """Let queued sequences run for which there are pages, first come, first served."""
        while self.waiting and len(self.running) < self.capacity.sequences:
            sequence = self.waiting[0]
            if self._can_share_soon(sequence):
                return
            pages = self.pool.take(sequence.tokens, sequence.num_tokens, spare=len(self.running))
            if pages is None:
                return
            self.waiting.popleft()
            sequence.pages, sequence.computed = pages
            sequence.scheduled = sequence.computed
            if not sequence.is_preempted:  # a preempted one may find its own pages
                sequence.shared_tokens = sequence.computed
            self.running[sequence.number] = sequence

    # A, B, C, D run, the oldest first, no page is free, and A needs one. D is in a step, which
    # writes to its pages: C is preempted. It loses its pages, and is first in the queue; admitted
    # again, it shares those of them that are full and not yet reused. If C needs the page, C waits
    # for D's step.
    def _has_pages(self, sequence: Sequence) -> bool:
        """Give a sequence the pages for its next token; younger sequences are preempted for it.

        Returns False where it has to wait: for older ones, or for what is being computed.
        """
        if sequence.number not in self.running:  # preempted a moment ago
            return False
        missing = self.pool.pages_for(sequence.num_tokens) - len(sequence.pages)
        while self.pool.num_free < missing:
            youngest = next(
                s for s in reversed(self.running.values()) if s is sequence or not s.is_in_step
            )
            if youngest is sequence:
                return False
            self._end(youngest)
            youngest.computed = youngest.scheduled = 0
            youngest.is_preempted = True
            self.waiting.appendleft(youngest)
            self.num_preempted += 1
        sequence.pages += self.pool.allocate(missing)
        return True

    def _can_share_soon(self, sequence: Sequence) -> bool:
        """Return True if a running sequence is computing pages for half of a sequence's tokens.

        Of several generations from one prompt the first computes it, and the others share that.
        """
        # Pages of 16, and two requests with one prompt of 100 tokens. While the first has computed
        # 32, the second waits, since max(48, 50) tokens are common. When the first has computed 96,
        # the next full page would end at 112, behind the prompt: the second is admitted with 6
        # shared pages.
        size, tokens = self.capacity.page_tokens, sequence.tokens
        for running in self.running.values():
            end = max((running.computed // size + 1) * size, len(tokens) // 2)
            shareable = min(len(tokens), len(running.tokens)) - 1
            if end <= shareable and tokens[:end] == running.tokens[:end]:
                return True
        return False

    def _end_cancelled(self) -> None:
        # Others can have the pages when nothing is written to them any more.
        for sequence in [s for s in self.running.values() if s.is_cancelled and not s.is_in_step]:
            self._end(sequence)
            sequence.finish("cancelled")
        for sequence in [s for s in self.waiting if s.is_cancelled]:
            self.waiting.remove(sequence)
            sequence.finish("cancelled")
