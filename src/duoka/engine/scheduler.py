"""The scheduler: chooses the sequences and tokens that each step computes.

Several steps may be in flight at once, each in another pipeline stage. The module uses no tensors.

*Decode micro-batches.* A decoding sequence is in one step at a time. With S steps in flight, the
decoding sequences are divided into S micro-batches of equal size, or kept in one step if that is
faster by the forecast.

*Chunked prefill.* The rest of a step's token budget goes to prompts, first come, first served. The
chunks of a prompt follow one another through the stages; if the forecast has seconds, chunks are
cut to take equally long.

*Preemption.* The length of a generation is unknown, so a sequence is admitted when pages are free
for its tokens so far, and one more page for each running sequence. When pages run out, the youngest
sequence is preempted: it releases its pages, returns to the head of the queue, and is recomputed
later (prompt and generated tokens). A sequence is preempted only for an older one, and a single
sequence always fits, so the oldest sequence always advances and all sequences finish.

*Asynchronous scheduling.* A decode step may be scheduled while the step before it computes the
tokens that it continues, so that the GPU needn't wait for the host. The host then learns one step
too late that a generation has ended, and drops the further token.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items

from duoka.forecast.forecast import Forecast
from duoka.forecast.serving import Capacity
from duoka.runtime.call.chunk import Chunk

from .pages import PagePool
from .request import Outcome, TokenChoice
from .sequence import Sequence

_LOG = logging.getLogger(__name__)
# Unread prompt tokens are divided into so many chunks per stage, each of at least so many tokens.
_CHUNKS_PER_STAGE = 2
_LEAST_PROMPT_TOKENS = 32


class Scheduler:
    """Schedules queued and running sequences, and manages their pages.

    Parameters
    ----------
    capacity : Capacity
    num_steps : int
        The number of steps in flight at the same time: one per pipeline stage.
    forget : callable, optional
        Called with the number of each sequence that ends or is preempted, to free its state.
    forecast : Forecast, optional
        The plan's forecast, for the sizes of micro-batches and prefill chunks. Without seconds in
        it, sizes are equal in tokens.
    runs_ahead : bool
        True if one step is scheduled while another is in flight, both in the same stage.
    """

    def __init__(
        self,
        capacity: Capacity,
        num_steps: int = 1,
        forget: Callable[[int], None] | None = None,
        forecast: Forecast | None = None,
        *,
        runs_ahead: bool = False,
    ) -> None:
        self.capacity = capacity
        self._num_steps = num_steps
        self._runs_ahead = runs_ahead
        self._rows: dict[int, int] = {}  # of logits, by sequence, in the latest step
        self.num_preempted = 0
        self._forget = forget
        self._speeds = () if forecast is None else forecast.serving_speeds
        self._step_seconds = None if forecast is None else forecast.step_seconds
        self.pool = PagePool(capacity.pages, capacity.page_tokens)
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}
        """Running sequences by their number, the oldest first."""

    @property
    def most_tokens(self) -> int:
        """The most tokens of a sequence, prompt and generated."""
        return min(self.capacity.context_tokens, self.capacity.pages * self.capacity.page_tokens)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.append(sequence)

    # Example: two stages, two steps in flight; decoding sequences a … e; prompt chunks p0 … p3:
    #
    #     stage 0   a b c p0 │ d e p1   │ a b c p2 │ d e p3
    #     stage 1            │ a b c p0 │ d e p1   │ a b c p2
    #
    # A decoding sequence needs its previous token, which the last stage samples, so it is in one
    # step at a time; two micro-batches keep two stages busy. The tokens of a prompt are known: p1
    # enters stage 0 while p0 is in stage 1. Each stage computes steps in order, so p0's keys are in
    # the pages of that stage when p1 arrives.
    #
    # With asynchronous scheduling (one stage) a, b, c are in every step. While step n samples token
    # 7 of a, step n + 1 is scheduled with the token "row of a in step n", and samples token 8:
    #
    #     host   schedule n + 1 │ texts of n - 1 │ wait for n │ schedule n + 2 │ texts of n │ …
    #     GPU    ────── step n ────────────────────┤├──────── step n + 1 ───────────────────┤├ …
    #
    # A grammar or a penalty needs the tokens on the host: with such a sequence steps follow one
    # another, as a step without it would delay it.
    def next_step(self) -> list[Chunk]:
        """Choose the chunks of the next step; empty if no sequence can advance now."""
        self._end_cancelled()
        self._admit()
        running = self.running.values()
        is_ahead = self._runs_ahead and any(sequence.is_in_step for sequence in running)
        if is_ahead and not all(sequence.can_run_ahead for sequence in running):
            return []
        sequences = [sequence for sequence in running if not sequence.is_cancelled]
        decoding = [sequence for sequence in sequences if sequence.is_decoding]
        ready = [sequence for sequence in sequences if sequence.is_ready(ahead=self._runs_ahead)]
        # `share` is the size of a decode micro-batch. With 5 decoding sequences and 2 steps in
        # flight, a step takes up to 3 that are in no step. Ungrouped, a step takes all of them,
        # once none is in a step. A single stage takes all.
        share = -(-len(decoding) // self._num_steps)
        if self._num_steps == 1:
            share = len(ready)
        elif not self._is_grouped(len(decoding)):
            share = 0 if len(ready) < len(decoding) else len(ready)
        # The oldest sequence gets pages first; younger ones may be preempted for it.
        chunks = []
        for sequence in ready[:share]:
            if self._take_page(sequence):
                chunks.append(self._make_chunk(sequence, 1))
            elif self._runs_ahead and sequence.number in self.running:
                # Younger sequences would stay in steps, and keep their pages.
                sequences = sequences[: sequences.index(sequence)]
                break
        token_budget = self._prefill_budget(len(chunks))
        for sequence in sequences:
            is_prefilling = sequence.number in self.running and not sequence.is_decoding
            number = max(0, sequence.num_left) if is_prefilling else 0
            is_cut = number > token_budget and self.capacity.whole_prompts
            if number and token_budget > 0 and not (is_cut and chunks):
                chunks.append(self._make_chunk(sequence, min(token_budget, number)))
                token_budget -= len(chunks[-1].tokens)
        self._note_rows(chunks)
        return chunks

    def schedule_again(self, chunks: Items[Chunk]) -> list[Chunk]:
        """Return the chunks of a failed step to retry, without chunks of ended sequences."""
        renewed = []
        for chunk in chunks:
            sequence = self._find_running(chunk)
            if sequence is not None:  # later chunks of the sequence have failed, too
                sequence.scheduled = chunk.start
                if not sequence.is_cancelled:  # its tokens may end before the chunk
                    renewed.append(self._make_chunk(sequence, len(chunk.tokens)))
        self._note_rows(renewed)
        return renewed

    def _make_chunk(self, sequence: Sequence, num_tokens: int) -> Chunk:
        """Return the next `num_tokens` tokens of a sequence as a chunk; mark them as scheduled."""
        start, end = sequence.scheduled, sequence.scheduled + num_tokens
        sequence.scheduled = end
        ahead = end - sequence.num_tokens  # 1: behind the token that the step in flight samples
        return Chunk(
            sequence.number,
            sequence.tokens[start:end] if ahead <= 0 else [-1 - self._rows[sequence.number]],
            start,
            sequence.pages,
            sequence.row(ahead) if ahead >= 0 else None,
            None if start else sequence.images,
            sequence.adapter,
        )

    def _note_rows(self, chunks: Items[Chunk]) -> None:
        """Note the row of logits of each sequence in a step.

        When a further step is scheduled, at most this one is in flight: a sequence that awaits a
        token awaits it from one of these rows.
        """
        if chunks:
            sampled = [chunk.sequence for chunk in chunks if chunk.row is not None]
            self._rows = {sequence: row for row, sequence in enumerate(sampled)}

    def _find_running(self, chunk: Chunk) -> Sequence | None:
        """Return the running sequence of a chunk; None if it has ended or was preempted.

        Also None if tokens before the chunk are not computed, since an earlier chunk has failed:
        what a step has computed ahead of a failed one is dropped here.
        """
        sequence = self.running.get(chunk.sequence)
        return sequence if sequence is not None and chunk.start == sequence.computed else None

    def _is_grouped(self, num_decoding: int) -> bool:
        """Return True if `num_decoding` sequences decode faster in micro-batches than together."""
        loads = [load for load in self._speeds if load.requests <= num_decoding]
        return not loads or loads[-1].is_grouped

    # Example without seconds: step_tokens 512, 2 steps in flight, 3 decoded tokens, prompts with
    # 180 and 900 unread tokens. The budget is 509, a chunk has 1080 / (2 * 2) = 270 tokens: this
    # step reads 180 of the first prompt and 90 of the second. With 1 step in flight, it reads 180
    # and 329.
    def _prefill_budget(self, num_decoding: int) -> int:
        """Return the token budget for prompts in a step with `num_decoding` decoded tokens."""
        budget = self.capacity.step_tokens - num_decoding
        if self._num_steps == 1 or self.capacity.whole_prompts:
            return budget
        # Pipelining: M chunks pass S stages in M + S - 1 steps. If a whole prompt takes 8 units of
        # time in each of S = 2 stages, it takes 16 in one chunk, and (4 + 1) * 2 = 10 in M = 4.
        reading = [s for s in self.running.values() if not s.is_decoding]
        if self._step_seconds is not None and reading:
            tokens, past = sum(s.num_tokens for s in reading), reading[0].scheduled
            chunk = self._step_seconds.piece(tokens, past, num_decoding, self._num_steps)
        else:
            unread = sum(s.num_tokens - s.computed for s in reading)
            chunk = -(-unread // (_CHUNKS_PER_STAGE * self._num_steps))
        return min(budget, max(_LEAST_PROMPT_TOKENS, chunk))

    def computed(self, chunk: Chunk, outcome: Outcome) -> None:
        """Process the outcome of a chunk: add the next token, or end or fail the sequence."""
        sequence = self._find_running(chunk)
        if sequence is None:  # ended, preempted, or an earlier chunk failed
            return
        error = outcome if isinstance(outcome, Exception) else None
        try:
            if not isinstance(outcome, Exception):
                self._advance(sequence, chunk.end, outcome)
        except Exception as raised:  # from its tokenizer or callback: other sequences continue
            error = raised
        if error is not None:
            if sequence.number in self.running:
                self._end(sequence)
            sequence.fail(error)

    def _advance(self, sequence: Sequence, end: int, choice: TokenChoice | None) -> None:
        """Count the tokens up to `end` as computed, and add the next token."""
        size, num_before = self.capacity.page_tokens, sequence.computed
        sequence.computed = end
        # A step ahead may be one token beyond those of a cancelled sequence.
        if num_before // size < end // size <= sequence.num_tokens // size:
            self.pool.share(sequence.pages, sequence.tokens, end, sequence.adapter)
        if choice is None or sequence.is_cancelled:
            return
        finish = sequence.add(choice)
        if finish is not None:
            self._end(sequence)
            sequence.finish(finish)

    def fail_all(self, error: Exception) -> None:
        """End all running and queued sequences with an error, after the engine has failed."""
        for sequence in [*self.running.values()]:
            self._end(sequence)
            sequence.fail(error)
        while self.waiting:
            self.waiting.popleft().fail(error)

    def cancel_all(self) -> None:
        """Cancel all queued and running sequences, when the results of steps no longer matter."""
        for sequence in (*self.running.values(), *self.waiting):
            sequence.is_cancelled = True
            sequence.scheduled = sequence.computed
        self._end_cancelled()

    def _end(self, sequence: Sequence) -> None:
        """Stop running a sequence; release its pages and the executor's state."""
        del self.running[sequence.number]
        self.pool.give_back(sequence.pages)
        sequence.pages = []
        if self._forget is not None:
            self._forget(sequence.number)

    def _admit(self) -> None:
        """Start queued sequences, first come, first served, as long as there are pages for them."""
        while self.waiting and len(self.running) < self.capacity.sequences:
            sequence = self.waiting[0]
            if self._can_share_soon(sequence):
                return
            pages = self.pool.take(
                sequence.tokens, sequence.num_tokens, len(self.running), sequence.adapter
            )
            if pages is None:
                return
            self.waiting.popleft()
            sequence.pages, sequence.computed = pages
            sequence.scheduled = sequence.computed
            if not sequence.is_preempted:  # which may share its own earlier pages
                sequence.shared_tokens = sequence.computed
            self.running[sequence.number] = sequence

    # Example: A, B, C, D run, the oldest first; no page is free, and A needs one. D is in a step
    # that writes to D's pages, so C is preempted: C releases its pages and becomes the first in the
    # queue. Admitted again, C shares its full pages that were not evicted. If instead C needs the
    # page, C waits for D's step.
    def _take_page(self, sequence: Sequence) -> bool:
        """Allocate the page for a sequence's next token; preempt younger sequences if necessary.

        Return False if the sequence was preempted itself, or has to wait: no younger sequence can
        be preempted, because each is in a step.
        """
        if sequence.number not in self.running:  # preempted a moment ago
            return False
        missing = self.pool.pages_for(sequence.scheduled + 1) - len(sequence.pages)
        while self.pool.num_free < missing:
            youngest = next(
                s for s in reversed(self.running.values()) if s is sequence or not s.is_in_step
            )
            if youngest is sequence:
                return False
            self._end(youngest)
            _LOG.info("request %d is preempted: no page is free", youngest.number)
            youngest.computed = youngest.scheduled = 0
            youngest.is_preempted = True
            self.waiting.appendleft(youngest)
            self.num_preempted += 1
        sequence.pages += self.pool.allocate(missing)
        return True

    def _can_share_soon(self, sequence: Sequence) -> bool:
        """Return True if a running sequence is computing further pages that `sequence` can share.

        The common prefix must be at least half of `sequence`. So of several generations from one
        prompt, the first computes the pages, and the others wait to share them.
        """
        # Example: pages of 16 tokens, two requests with the same prompt of 100 tokens. While the
        # first has computed 32 tokens, the second waits, since max(48, 50) tokens are equal. Once
        # the first has computed 96, its next page would end at 112, behind the prompt: the second
        # is admitted with 6 shared pages.
        size, tokens = self.capacity.page_tokens, sequence.tokens
        for running in self.running.values():
            end = max((running.computed // size + 1) * size, len(tokens) // 2)
            shareable = min(len(tokens), len(running.tokens)) - 1
            is_like = end <= shareable and sequence.adapter == running.adapter
            if is_like and tokens[:end] == running.tokens[:end]:
                return True
        return False

    def _end_cancelled(self) -> None:
        """End the cancelled sequences that are in no step."""
        # A step in flight writes to the pages of its sequences, so those are released later.
        for sequence in [s for s in self.running.values() if s.is_cancelled and not s.is_in_step]:
            _LOG.info("request %d is cancelled", sequence.number)
            self._end(sequence)
            sequence.finish("cancelled")
        for sequence in [s for s in self.waiting if s.is_cancelled]:
            _LOG.info("request %d is cancelled in the queue", sequence.number)
            self.waiting.remove(sequence)
            sequence.finish("cancelled")
