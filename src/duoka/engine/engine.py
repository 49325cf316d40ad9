"""The engine: many requests at once on one model, answered as they come."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from operator import index
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from duoka.api.load import load
from duoka.checkpoint.checkpoint import Checkpoint
from duoka.errors import DuokaError, MachineError, ModelError, UsageError
from duoka.models.text.messages import Message
from duoka.planner.plan import Plan
from duoka.runtime import devices
from duoka.runtime.generate import PromptReader, num_embeddings, refuse_beyond
from duoka.runtime.stream import Detokenizer

from .cached import CachedExecutor
from .inline import InlineExecutor, reads_pages
from .request import Completion, SamplingParams
from .sampler import sample
from .scheduler import Capacity, Outcome, Piece, Scheduler
from .sequence import Sequence as EngineSequence

K = TypeVar("K")
PAGE_TOKENS = 16
_GREEDY = SamplingParams()
Prompt = str | Sequence[int] | Sequence[Message]
"""A question, as text; or the token ids of a whole prompt; or the messages of a chat."""


class Stream:
    """An answer on its way: iterate over its text, plainly or `async`, or wait for its `result`."""

    def __init__(self, sequence: EngineSequence) -> None:
        self._sequence = sequence
        self._completion: Completion | None = None

    def __iter__(self) -> Iterator[str]:
        """The text, piece by piece.

        Raises
        ------
        BaseException
            Why there is no answer.
        """
        while self._completion is None:
            event = self._sequence.events.get()
            if isinstance(event, BaseException):
                raise event
            if isinstance(event, str):
                yield event
            else:
                self._completion = event

    async def __aiter__(self) -> AsyncIterator[str]:
        """The same, without a thread that waits."""
        pieces = iter(self)
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            yield piece

    def result(self) -> Completion:
        """The whole answer, once it has ended."""
        for _ in self:
            pass
        assert self._completion is not None, "an answer ends with what it was"
        return self._completion

    def cancel(self) -> None:
        """Let nobody work on it any more; it ends with what there is."""
        self._sequence.is_cancelled = True


class Engine:
    """Answers many requests at once, over a paged cache on the GPUs of a plan.

    Use it as a context manager, or `close` it. All methods can be called from any thread.

    Parameters
    ----------
    plan : Plan
        For generating. Its batch is how many requests are answered at the same time, and its
        context how long one may be; the cache has pages for all of them.
    trust_remote_code, adapter
        As for `load`.

    Raises
    ------
    UsageError
        If the plan is for a cache of another kind.
    DuokaError
        As `load` does.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        trust_remote_code: bool = False,
        adapter: str | os.PathLike[str] | None = None,
    ) -> None:
        checkpoint = Checkpoint.open(plan.source, trust_remote_code=trust_remote_code)
        capacity = capacity_of(plan)
        model = load(plan, trust_remote_code=trust_remote_code, adapter=adapter)
        self._reader = PromptReader.open(checkpoint, plan.workload)
        self._executor, self.capacity = make_executor(model, capacity)
        self._scheduler = Scheduler(self.capacity, self._executor.forget)
        self._num_embeddings = num_embeddings(model)
        # Guards the scheduler, and wakes the thread when there is something to do.
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="duoka-engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what is on its way, and end."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()
        self._executor.close()

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams = _GREEDY,
        *,
        on_end: Callable[[Completion | Exception], None] | None = None,
    ) -> Stream:
        """Ask for an answer; it is on its way when this returns.

        Parameters
        ----------
        prompt : str, or sequence of Message or of int
            A question or a chat, of which the family's own prompt is made; or the tokens of a whole
            prompt.
        params : SamplingParams
        on_end : callable, optional
            Called in the engine's thread when the answer has ended, with it or why there is none.

        Raises
        ------
        UsageError
            If no memory is there for so long an answer, however long it waits.
        """
        tokens = self._tokens(prompt)
        if not tokens:
            raise UsageError("there is nothing to answer: the prompt is empty")
        refuse_beyond(tokens, self._num_embeddings)
        limit = self.capacity.context_tokens - len(tokens)
        most = self._reader.workload.new_tokens
        number = params.max_new_tokens or max(1, min(most, limit))
        self._scheduler.refuse_unfit(len(tokens), number)
        sequence = EngineSequence(
            tokens,
            params,
            seed=random.getrandbits(63) if params.seed is None else params.seed,
            max_new_tokens=number,
            stop_ids=tuple(self._reader.chat.stop_ids),
            detokenizer=Detokenizer(self._reader.tokenizer),
            on_end=on_end,
        )
        with self._changed:
            if self._is_closed:
                raise UsageError("the engine has been closed", hint="make another one")
            self._scheduler.add(sequence)
            self._changed.notify()
        return Stream(sequence)

    def as_completed(
        self, prompts: Iterable[tuple[K, Prompt]], params: SamplingParams = _GREEDY
    ) -> Iterator[tuple[K, Completion | Exception]]:
        """Answer prompts, each under a key of the caller's, in the order in which answers end.

        However many prompts there are, only so many are asked at a time as keep the engine busy. In
        the place of an answer stands why there is none.
        """
        ended: SimpleQueue[tuple[K, Completion | Exception]] = SimpleQueue()
        coming = iter(prompts)
        num_asked = 0
        while True:
            for key, prompt in islice(coming, 2 * self.capacity.sequences - num_asked):
                num_asked += 1
                try:
                    self.submit(prompt, params, on_end=partial(_put, ended, key))
                except DuokaError as error:
                    ended.put((key, error))
            if not num_asked:
                return
            yield ended.get()
            num_asked -= 1

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams = _GREEDY
    ) -> list[Completion]:
        """Answer all prompts; the answers in their order."""
        streams = [self.submit(prompt, params) for prompt in prompts]
        return [stream.result() for stream in streams]

    @property
    def num_free_pages(self) -> int:
        """Pages that nobody needs."""
        with self._changed:
            return self._scheduler.pool.num_free

    def _tokens(self, prompt: Prompt) -> list[int]:
        """The tokens of a prompt."""
        if isinstance(prompt, str):
            return self._reader.prompt(prompt)
        messages = [part for part in prompt if isinstance(part, Message)]
        if messages:
            return self._reader.chat.prompt(messages)
        return [index(token) for token in prompt if not isinstance(token, Message)]

    # ── the engine's thread ──

    def _work(self) -> None:
        while True:
            with self._changed:
                while not (self._is_closed or self._scheduler.has_work):
                    self._changed.wait()
                if self._is_closed:
                    self._scheduler.cancel_all()
                    return
                pieces = self._scheduler.next_step()
            outcomes = self._run(pieces)
            with self._changed:
                for piece, outcome in zip(pieces, outcomes, strict=True):
                    try:
                        self._scheduler.computed(piece, outcome)
                    except Exception as error:  # of its tokenizer, say: others aren't concerned
                        self._scheduler.computed(piece, error)

    def _run(self, pieces: Sequence[Piece]) -> list[Outcome]:
        """Compute pieces; what each comes to.

        Where that fails each half is run alone, as often as need be: so one that can't be computed
        ends by itself, and what doesn't fit at once, since something else has taken memory, goes on
        with less. Keys and values in pages that were stored already are stored again.
        """
        if len(pieces) > 1 and not self._executor.is_paged:
            return [outcome for piece in pieces for outcome in self._run([piece])]
        try:
            logits = self._executor.run([piece.chunk for piece in pieces])
            rows = [piece.sequence.row for piece in pieces if piece.wants_logits]
            choices = iter(sample(logits, rows))
            return [next(choices) if piece.wants_logits else None for piece in pieces]
        except Exception as error:
            is_memory = isinstance(error, torch.OutOfMemoryError)
            if is_memory:
                devices.give_back()
            if len(pieces) > 1:
                middle = len(pieces) // 2
                return [*self._run(pieces[:middle]), *self._run(pieces[middle:])]
            if is_memory and self._executor.is_paged and pieces[0].num_tokens > 1:
                first, second = pieces[0].halves()
                (outcome,) = self._run([first])
                return [outcome] if isinstance(outcome, Exception) else self._run([second])
            return [_for_asker(error)]


def capacity_of(plan: Plan) -> Capacity:
    """What the memory of a plan for generating is there for."""
    workload = plan.workload
    if workload.cache != "dynamic":
        raise UsageError(
            f"the engine has a cache of its own, and the plan is for one of the kind "
            f"{workload.cache!r}",
            hint="plan without --cache",
        )
    chunk = workload.prefill_chunk_tokens
    assert chunk != "auto", "a plan's workload is resolved"
    return Capacity(
        sequences=workload.batch,
        context_tokens=workload.context_tokens,
        pages=workload.batch * -(-workload.context_tokens // PAGE_TOKENS),
        page_tokens=PAGE_TOKENS,
        step_tokens=workload.batch * min(chunk or workload.prompt_tokens, workload.prompt_tokens),
        whole_prompts=chunk is None,
    )


def make_executor(
    model: PreTrainedModel, capacity: Capacity
) -> tuple[InlineExecutor | CachedExecutor, Capacity]:
    """What runs a model's steps, and what there is memory for then."""
    if reads_pages(model):
        with suppress(ModelError):  # code that wants more of attention than it is known to
            paged = InlineExecutor(model, capacity.pages, capacity.page_tokens)
            return paged, replace(capacity, whole_prompts=False)
    cached = CachedExecutor(model)
    # A sequence has one page, which is all of its cache.
    sequences = 1 if cached.keeps_state_in_modules else capacity.sequences
    return cached, replace(
        capacity, sequences=sequences, pages=sequences, page_tokens=capacity.context_tokens
    )


def _put(queue: SimpleQueue[tuple[K, Completion | Exception]], key: K, outcome: Any) -> None:
    queue.put((key, outcome))


def _for_asker(error: Exception) -> Exception:
    """An error as the one who asked is to see it."""
    if not isinstance(error, torch.OutOfMemoryError):
        return error
    return MachineError(
        f"out of memory, for a single token: {str(error)[:300]}",
        hint="something else uses the memory that the plan counted on",
    )
