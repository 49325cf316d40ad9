"""The engine: many requests at once on one model."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import islice
from operator import index
from queue import SimpleQueue
from typing import Literal, NamedTuple, TypeVar

import torch

from duoka.api.load import OpenedModel, Progress
from duoka.base.text import choose
from duoka.base.units import format_count
from duoka.errors import DuokaError, UsageError
from duoka.models.text.image_prompts import ImagePrompt, images_of
from duoka.models.text.messages import ChatMessage
from duoka.planner.out_of_memory import OutOfMemory
from duoka.planner.plan import Plan
from duoka.report.measured import PeakBytes
from duoka.runtime.call.chunk import Chunk
from duoka.runtime.lost_gpu import find_lost_gpu
from duoka.runtime.out_of_memory import describe
from duoka.runtime.prompt_reader import refuse_beyond, refuse_long

from .detokenizer import Detokenizer
from .executor import Result
from .grammar import GrammarCompiler
from .open_executor import open_executor
from .request import Completion, Outcome, SamplingParams, TextPiece
from .scheduler import Scheduler
from .sequence import Event
from .sequence import Sequence as EngineSequence

K = TypeVar("K")
_GREEDY = SamplingParams()
Prompt = str | Sequence[int] | Sequence[ChatMessage]
"""A question, as text; the token ids of a whole prompt, as an `ImagePrompt` where there are images
among them; or the messages of a chat."""


class Load(NamedTuple):
    """The numbers of running and queued requests, of free pages, and of preemptions so far."""

    running: int
    waiting: int
    free_pages: int
    num_preempted: int


class Stream:
    """A generation in progress: iterate over its text, plainly or `async`, or wait for `result`."""

    def __init__(self, sequence: EngineSequence, events: SimpleQueue[Event]) -> None:
        self._sequence = sequence
        self._events = events
        self._completion: Completion | None = None
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[str]:
        """Yield the text as it comes.

        Raises
        ------
        Exception
            The reason for which the generation failed.
        """
        while self._completion is None:
            if self._error is not None:
                raise self._error
            event = self._events.get()
            if isinstance(event, Exception):
                self._error = event
            elif isinstance(event, TextPiece):
                yield event.text
            else:
                self._completion = event

    async def __aiter__(self) -> AsyncIterator[str]:
        """Yield the text as it comes, without blocking the event loop."""
        pieces = iter(self)
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            yield piece

    def result(self) -> Completion:
        """Wait for the end, and return the completion."""
        for _ in self:
            pass
        assert self._completion is not None, "an answer ends with what it was"
        return self._completion

    def cancel(self) -> None:
        """Cancel the request; the completion contains the tokens generated so far."""
        self._sequence.is_cancelled = True


class Engine:
    """Computes many requests at once, over a paged cache on the GPUs of a plan.

    Use it as a context manager, or `close` it. All methods can be called from any thread.

    Parameters
    ----------
    plan : Plan
        For generating. Its batch is the number of requests that run at the same time, and its
        context the length of each; the cache has pages for all of them.
    processes : bool, optional
        Whether each GPU has a process of its own, so that all work at the same time, each on other
        requests; by default wherever the plan has several GPUs and allows it.
    max_new_tokens : int, optional
        The most generated tokens where a request's parameters don't limit them; by default the
        rest of the context. No memory is reserved for them: a request begins when there is memory
        for its prompt, and where memory runs out the youngest is preempted and recomputed later.
    warm_up : {"every", "largest"}
        Of a plan for pages: run steps of every size before the first request, some hundreds, after
        which no further step needs more memory; or only those with the most tokens. These take
        the most by far, and are enough for work that ends soon. Later steps may still allocate a
        segment of memory then, and where it isn't free, a step runs in smaller parts.
    on_failure : callable, optional
        Called in the engine's thread, before the requests fail, where a GPU or a process is lost:
        nothing is computed any more then.
    trust_remote_code, adapter, progress, download_progress
        As for `load`; the processes of GPUs report no progress.
    opened : OpenedModel, optional
        The model of the plan, where it is open already.

    Raises
    ------
    DuokaError
        As `load` does; before a weight is read, if the checkpoint has a generation rule that the
        engine doesn't know.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        processes: bool | None = None,
        max_new_tokens: int | None = None,
        warm_up: Literal["every", "largest"] = "every",
        on_failure: Callable[[Exception], None] | None = None,
        trust_remote_code: bool = False,
        adapter: str | os.PathLike[str] | None = None,
        progress: Progress | None = None,
        download_progress: Progress | None = None,
        opened: OpenedModel | None = None,
    ) -> None:
        warm_up = choose("warm_up", warm_up, ("every", "largest"))
        executor, self._num_embeddings, self._reader, self._rules = open_executor(
            plan,
            opened or OpenedModel.open(plan, trust_remote_code=trust_remote_code),
            processes,
            warm_up=warm_up,
            adapter=adapter,
            progress=progress,
            download_progress=download_progress,
        )
        self._executor = executor
        self._plan = plan
        self._on_failure = on_failure
        self._grammars = GrammarCompiler(
            self._reader.tokenizer, self._reader.chat.stop_ids, self._num_embeddings
        )
        # Chunks of the steps in flight; and of failed steps, to compute before any other.
        self._steps: deque[list[Chunk]] = deque()
        self._failed: deque[list[Chunk]] = deque()
        # Guards the scheduler; after a change the executor is woken.
        self._lock = threading.RLock()  # a callback of a request may call the engine
        self._is_closed = False
        self.failure: Exception | None = None
        """The reason for which nothing is computed any more: a lost GPU or process."""
        started = Future[None]()
        self._thread = threading.Thread(
            target=self._work, args=(started,), name="duoka-engine", daemon=True
        )
        self._thread.start()
        try:
            started.result()
        except BaseException:  # Ctrl-C, too: the thread ends as soon as it has warmed up
            started.cancel()
            raise
        self.capacity = executor.capacity
        said = max_new_tokens or plan.request.most_new_tokens
        self._max_new_tokens = said or self._scheduler.most_tokens

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel all requests, and end."""
        with self._lock:
            self._is_closed = True
        self._executor.wake()
        self._thread.join()
        self._executor.close()

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams = _GREEDY,
        *,
        kept_ids: Collection[int] = (),
        on_event: Callable[[Event], None] | None = None,
    ) -> Stream:
        """Queue a request.

        Parameters
        ----------
        prompt : str, or sequence of ChatMessage or of int
            A question or a chat, from which the family's own prompt is made; or the tokens of a
            whole prompt.
        params : SamplingParams
        kept_ids : collection of int
            Special tokens that stay in the text.
        on_event : callable, optional
            Called in the engine's thread with each piece of the text, and at the end with the
            completion or the error. The stream gets no events then.

        Raises
        ------
        UsageError
            If the request or its images exceed the plan, or its grammar can't be compiled.
        """
        # The caller's thread makes the tokens, checks the limits and compiles the grammar: a slow
        # prompt delays no step, and the engine's thread gets a finished sequence. The seed is fixed
        # here: a step that is computed again samples by the same random numbers.
        tokens = self._tokens(prompt)
        is_chat = isinstance(prompt, str) or any(isinstance(part, ChatMessage) for part in prompt)
        if params.grammar is not None and is_chat:
            tokens.extend(self._reader.chat.content_start)
        if not tokens:
            raise UsageError("the prompt is empty")
        refuse_beyond(tokens, self._num_embeddings)
        rest = max(1, self._scheduler.most_tokens - len(tokens))
        number = params.max_new_tokens or min(self._max_new_tokens, rest)
        refuse_long(len(tokens), self._scheduler.most_tokens, new_tokens=number)
        is_whole = self._reader.workload.prefill_chunk_tokens is None
        if isinstance(tokens, ImagePrompt) or (is_whole and not self._executor.is_paged):
            self._reader.check([tokens])
        matcher, detokenizer = None, None
        if params.grammar is not None:
            matcher, detokenizer = self._grammars.start(params.grammar)
        events = SimpleQueue[Event]()
        tell = on_event or events.put
        if is_chat and matcher is None:
            tell = partial(_tell_stripped, tell)
        seed = random.getrandbits(63) if params.seed is None else params.seed
        sequence = EngineSequence(
            tokens,
            replace(params, seed=seed, max_new_tokens=number),
            stop_ids=tuple(self._reader.chat.stop_ids),
            rules=self._rules,
            detokenizer=detokenizer
            or Detokenizer(self._reader.tokenizer, kept_ids, () if is_chat else tokens),
            matcher=matcher,
            on_event=tell,
        )
        with self._lock:
            if self.failure is not None:
                raise self.failure
            if self._is_closed:
                raise UsageError("the engine has been closed", hint="create a new Engine")
            self._scheduler.add(sequence)
        self._executor.wake()
        return Stream(sequence, events)

    def as_completed(
        self,
        prompts: Iterable[tuple[K, Prompt]],
        params: SamplingParams | Callable[[K], SamplingParams] = _GREEDY,
    ) -> Iterator[tuple[K, Completion | Exception]]:
        """Run prompts, each under a key of the caller's; yield results in the order they end.

        Only as many prompts are queued at a time as keep the engine busy. A failed prompt yields
        its error. `params` may depend on the key.
        """
        ended: SimpleQueue[tuple[K, Completion | Exception]] = SimpleQueue()
        coming = iter(prompts)
        num_asked = 0
        while True:
            for key, prompt in islice(coming, 2 * self.capacity.sequences - num_asked):
                num_asked += 1
                try:
                    chosen = params(key) if callable(params) else params
                    self.submit(prompt, chosen, on_event=partial(_put, ended, key))
                except DuokaError as error:
                    ended.put((key, error))
            if not num_asked:
                return
            yield ended.get()
            num_asked -= 1

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams = _GREEDY, *, n: int = 1
    ) -> list[Completion]:
        """Run all prompts, each `n` times; return completions in the order of the prompts.

        Generations from one prompt share its pages, and have the seeds of `SamplingParams.split`.
        """
        streams = [self.submit(prompt, chosen) for prompt in prompts for chosen in params.split(n)]
        return [stream.result() for stream in streams]

    @property
    def num_free_pages(self) -> int:
        """The number of free pages."""
        with self._lock:
            return self._scheduler.pool.num_free

    def load(self) -> Load:
        """Return the load now."""
        with self._lock:
            scheduler = self._scheduler
            return Load(
                running=len(scheduler.running),
                waiting=len(scheduler.waiting),
                free_pages=scheduler.pool.num_free,
                num_preempted=scheduler.num_preempted,
            )

    def busy_seconds(self) -> dict[str, float]:
        """Return the seconds that each GPU has computed since the start, where they are known."""
        return self._executor.busy_seconds()

    def peaks(self) -> list[PeakBytes]:
        """Return the peaks of the GPUs' memory, when the engine has been closed."""
        return self._executor.peaks()

    def _tokens(self, prompt: Prompt) -> list[int]:
        """Return the tokens of a prompt."""
        if isinstance(prompt, str):
            prompt = [ChatMessage(role="user", content=prompt)]
        if isinstance(prompt, ImagePrompt):
            return prompt
        messages = [part for part in prompt if isinstance(part, ChatMessage)]
        if messages:
            self._reader.check_images(images_of(messages))
            return self._reader.chat.prompt(messages)
        return [index(token) for token in prompt if not isinstance(token, ChatMessage)]

    # ── the engine's thread ──

    # This thread alone calls the executor's `start`, `submit` and `wait`, and `on_event` of
    # requests:
    #
    #     other threads   Engine.submit: queue the sequence under the lock, wake ─┐
    #     this thread     submit steps → wait for a step's end, or to be woken ◀──┘ → take result
    #
    # `on_event` is called under the lock, which is reentrant: a callback may submit a request.
    def _work(self, started: Future[None]) -> None:
        executor = self._executor
        try:
            executor.start()
            settings = executor.capacity, executor.num_steps, executor.forget
            self._scheduler = Scheduler(*settings, self._plan.forecast)
            started.set_result(None)
        except Exception as error:  # also where the constructor was interrupted
            executor.close()
            if not started.cancelled():
                started.set_exception(find_lost_gpu(error) or error)
            return
        try:
            while not self._is_closed:
                self._submit_steps()
                self._take(executor.wait())
            with self._lock:
                self._scheduler.cancel_all()
        except Exception as error:  # a lost GPU or process, or a defect of duoka's
            self._fail(error)

    def _submit_steps(self) -> None:
        """Submit steps until as many are in flight as the executor works on."""
        while len(self._steps) < self._executor.num_steps:
            with self._lock:
                chunks = self._next_failed() or self._scheduler.next_step()
            if not chunks:
                return
            self._steps.append(chunks)
            self._executor.submit(chunks)

    def _next_failed(self) -> list[Chunk]:
        """Return chunks of a failed step, those that are still wanted."""
        chunks: list[Chunk] = []
        while self._failed and not chunks:
            chunks = self._scheduler.schedule_again(self._failed.popleft())
        return chunks

    def _take(self, result: Result | None) -> None:
        """Take the result of a step."""
        if result is None:
            return
        with self._lock:
            chunks = self._steps.popleft()
            if isinstance(result, Exception):
                self._retry(chunks, result)
                return
            for chunk, outcome in zip(chunks, result, strict=True):
                self._scheduler.computed(chunk, self._explained(outcome, chunk))

    # Of the chunks a b c d, each of its own sequence, c can't be computed:
    #
    #     [a b c d] fails → [a b] runs, [c d] fails → [c] fails and ends its request, [d] runs
    #
    # One such chunk of n takes about 2 log2(n) further steps, before any new step. A chunk of 512
    # tokens for which there is no memory is tried with 256, 128, …; later steps read what is left.
    def _retry(self, chunks: Sequence[Chunk], error: Exception) -> None:
        """Compute each half of a failed step alone, as often as need be.

        So a chunk that can't be computed ends by itself, and chunks that don't fit at once, since
        something else has taken memory, go on with less. Keys and values that were written to pages
        already are written again.
        """
        if len(chunks) > 1:
            middle = len(chunks) // 2
            self._failed.extend([list(chunks[:middle]), list(chunks[middle:])])
            return
        (chunk,) = chunks
        middle = len(chunk.tokens) // 2
        if isinstance(error, torch.OutOfMemoryError) and middle:
            self._failed.append([replace(chunk, tokens=chunk.tokens[:middle])])
        else:
            self._scheduler.computed(chunk, self._explained(error, chunk))

    def _explained(self, outcome: Outcome, chunk: Chunk) -> Outcome:
        """Replace an out-of-memory error by the one that its requester gets."""
        if not isinstance(outcome, torch.OutOfMemoryError):
            return outcome
        tokens = format_count(len(chunk.tokens), "token")
        text = f"out of memory, for {tokens}: {describe(outcome)}"
        return OutOfMemory(text, self._plan, getattr(outcome, "available_bytes", {}))

    def _fail(self, error: Exception) -> None:
        """Fail all requests: nothing can be computed any more."""
        with self._lock:
            self.failure = error
        if self._on_failure is not None:
            self._on_failure(error)
        with self._lock:
            self._scheduler.fail_all(error)


def _tell_stripped(tell: Callable[[Event], None], event: Event) -> None:
    if isinstance(event, Completion):
        event = replace(event, text=event.text.strip())
    tell(event)


def _put(queue: SimpleQueue[tuple[K, Completion | Exception]], key: K, event: Event) -> None:
    if not isinstance(event, TextPiece):
        queue.put((key, event))
