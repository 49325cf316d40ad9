"""The engine: many requests at once on one model."""

from __future__ import annotations

import asyncio
import logging
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
from typing import NamedTuple, TypeVar

import torch

from duoka.api.load import OpenedModel, Progress
from duoka.base.text import choose
from duoka.base.units import format_count
from duoka.errors import DuokaError, UsageError
from duoka.forecast.serving import WarmUp
from duoka.models.text.image_prompts import ImagePrompt, images_of
from duoka.models.text.messages import ChatMessage
from duoka.planner.out_of_memory import OutOfMemory
from duoka.planner.plan import Plan
from duoka.report.measured import Fallback, PeakBytes
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

_LOG = logging.getLogger(__name__)
K = TypeVar("K")
_GREEDY = SamplingParams()
Prompt = str | Sequence[int] | Sequence[ChatMessage]
"""The text of a question, which becomes a chat of one message; the messages of a chat; or the token
ids of a complete prompt (an `ImagePrompt` if the prompt contains images)."""


class Load(NamedTuple):
    """The numbers of running and queued requests, of free pages, and of preemptions so far."""

    running: int
    waiting: int
    free_pages: int
    num_preempted: int


class Stream:
    """A generation in progress: iterate over its text, also with `async for`, or call `result`."""

    def __init__(self, sequence: EngineSequence, events: SimpleQueue[Event]) -> None:
        self._sequence = sequence
        self._events = events
        self._completion: Completion | None = None
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[str]:
        """Yield the pieces of the text as they are generated; block between pieces.

        Raises
        ------
        Exception
            The error with which the generation failed.
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
        """Yield the pieces of the text as they are generated, without blocking the event loop."""
        pieces = iter(self)
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            yield piece

    def result(self) -> Completion:
        """Wait for the end of the generation; return the completion, or raise the error."""
        for _ in self:
            pass
        assert self._completion is not None, "an answer ends with what it was"
        return self._completion

    def cancel(self) -> None:
        """Cancel the request; the completion contains the tokens generated so far."""
        self._sequence.is_cancelled = True


class Engine:
    """Runs many requests at once, with continuous batching, on the GPUs of a plan.

    Use the engine as a context manager, or call `close`. All methods are thread-safe.

    Parameters
    ----------
    plan : Plan
        A plan for generation. Its batch is the largest number of requests that run at the same
        time, and its context the largest number of tokens (prompt and generated) of a request.
    processes : bool, optional
        Run one process per GPU, so that all GPUs work at the same time, each on other steps. True
        raises UsageError if the plan doesn't allow it. By default, on if the plan uses several
        GPUs and allows it.
    max_new_tokens : int, optional
        The most generated tokens of a request whose parameters set no limit; by default the limit
        requested with the plan, or else the rest of the context. No memory is reserved for them: a
        request starts when there are pages for its prompt, and when pages run out, the youngest
        request is preempted and recomputed later.
    warm_up : {"every", "largest", "first"}
        Steps to run before the first request, if the plan has a paged cache. "every": steps of
        every size, some hundreds, after which no step needs more memory. "largest": only the steps
        with the most tokens, which need by far the most memory; enough for short runs. "first": a
        step of one token, which allocates the pages. After "largest" and "first" a later step may
        still allocate a memory segment; if that fails, the step is split.
    on_failure : callable, optional
        Called in the engine's thread with the error when the engine fails for good (a lost GPU or
        process, or a defect), before its requests fail.
    trust_remote_code : bool
        Run the checkpoint's own model code.
    adapter : path, optional
        Directory of a LoRA adapter to merge into the weights, as for `load`.
    progress : callable, optional
        As for `load`; the processes of GPUs report no progress.
    download_progress : callable, optional
        As for `load`.
    opened : OpenedModel, optional
        The plan's model, if it has been opened already.

    Raises
    ------
    DuokaError
        As for `load`. UsageError before a weight is read if the checkpoint's generation config has
        a rule that the engine doesn't support.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        processes: bool | None = None,
        max_new_tokens: int | None = None,
        warm_up: WarmUp = "every",
        on_failure: Callable[[Exception], None] | None = None,
        trust_remote_code: bool = False,
        adapter: str | os.PathLike[str] | None = None,
        progress: Progress | None = None,
        download_progress: Progress | None = None,
        opened: OpenedModel | None = None,
    ) -> None:
        warm_up = choose("warm_up", warm_up, ("every", "largest", "first"))
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
        self._adapters = [name for name, _ in plan.workload.adapters]
        self._on_failure = on_failure
        self._grammars = GrammarCompiler(
            self._reader.tokenizer, self._reader.chat.stop_ids, self._num_embeddings
        )
        # The chunks of each step in flight; and parts of failed steps, to run before any new step.
        self._steps: deque[list[Chunk]] = deque()
        self._failed: deque[list[Chunk]] = deque()
        # Guards the scheduler; after a change, the executor is woken. Reentrant, since `on_event`
        # of a request is called under the lock and may call the engine.
        self._lock = threading.RLock()
        self._is_closed = False
        self.failure: Exception | None = None
        """The error with which the engine failed for good; None while it works."""
        started = Future[None]()
        self._thread = threading.Thread(
            target=self._work, args=(started,), name="duoka-engine", daemon=True
        )
        self._thread.start()
        try:
            started.result()
        except BaseException:  # also Ctrl-C: the thread ends when its warm-up is finished
            started.cancel()
            raise
        self.capacity = executor.capacity
        max_tokens = max_new_tokens or plan.request.most_new_tokens
        self._max_new_tokens = max_tokens or self._scheduler.most_tokens

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel all requests, end the engine's thread, and free its resources."""
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
        adapter: str | None = None,
    ) -> Stream:
        """Queue a request; return its stream.

        Parameters
        ----------
        prompt : str, or sequence of ChatMessage or of int
            A question or a chat, formatted with the model's chat template; or the token ids of a
            complete prompt.
        params : SamplingParams
            Parameters of sampling and the ends of the completion; by default greedy.
        kept_ids : collection of int
            Special tokens that are kept in the generated text; others are removed.
        on_event : callable, optional
            Called in the engine's thread with each piece of the text, and at the end with the
            completion or the error. The returned stream then receives no events: don't wait on it.
        adapter : str, optional
            Name of an adapter of the plan's workload; by default the model runs without adapter.

        Raises
        ------
        UsageError
            If the request or its images exceed the plan, its grammar can't be compiled, or the plan
            has no such adapter.
        """
        # Tokenization, checks and grammar compilation run in the caller's thread: no step waits.
        # The seed is fixed here, so that a recomputed step samples with the same random numbers.
        tokens = self._encode_prompt(prompt)
        is_chat = isinstance(prompt, str) or any(isinstance(part, ChatMessage) for part in prompt)
        grammar = params.grammar
        if grammar is not None and is_chat:
            tokens.extend(self._reader.chat.content_start(tokens))
        if not tokens:
            raise UsageError("the prompt is empty")
        refuse_beyond([*tokens, *params.forced_ids], self._num_embeddings)
        max_rest = max(1, self._scheduler.most_tokens - len(tokens))
        token_limit = params.max_new_tokens or min(self._max_new_tokens, max_rest)
        refuse_long(len(tokens), self._scheduler.most_tokens, new_tokens=token_limit)
        is_whole = self._reader.workload.prefill_chunk_tokens is None
        if isinstance(tokens, ImagePrompt) or (is_whole and not self._executor.is_paged):
            self._reader.check([tokens])
        matcher, detokenizer = (None, None) if grammar is None else self._grammars.start(grammar)
        events = SimpleQueue[Event]()
        send_event = on_event or events.put
        if is_chat and matcher is None:
            send_event = partial(_send_stripped, send_event)
        seed = random.getrandbits(63) if params.seed is None else params.seed
        sequence = EngineSequence(
            tokens,
            replace(params, seed=seed, max_new_tokens=token_limit),
            stop_ids=(*self._reader.chat.stop_ids, *params.stop_ids),
            rules=self._rules,
            detokenizer=detokenizer
            or Detokenizer(self._reader.tokenizer, kept_ids, () if is_chat else tokens),
            matcher=matcher,
            on_event=send_event,
        )
        if adapter is not None:
            sequence.adapter = 1 + self._adapters.index(choose("adapter", adapter, self._adapters))
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
        """Run (key, prompt) pairs; yield (key, completion) pairs in the order in which they finish.

        `prompts` is consumed lazily: at most twice as many requests as can run are submitted at a
        time. A failed prompt yields its error. `params` may be a function of the key.
        """
        ended: SimpleQueue[tuple[K, Completion | Exception]] = SimpleQueue()
        pending = iter(prompts)
        num_submitted = 0
        while True:
            for key, prompt in islice(pending, 2 * self.capacity.sequences - num_submitted):
                num_submitted += 1
                try:
                    chosen = params(key) if callable(params) else params
                    self.submit(prompt, chosen, on_event=partial(_put_result, ended, key))
                except DuokaError as error:
                    ended.put((key, error))
            if not num_submitted:
                return
            yield ended.get()
            num_submitted -= 1

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams = _GREEDY, *, n: int = 1
    ) -> list[Completion]:
        """Run all prompts; return completions in the order of the prompts.

        Parameters
        ----------
        prompts : sequence of prompts
            As for `submit`.
        params : SamplingParams
            As for `submit`; `SamplingParams.split` derives the seeds of the `n` completions.
        n : int
            Completions per prompt, which share its KV cache pages.
        """
        streams = [self.submit(prompt, chosen) for prompt in prompts for chosen in params.split(n)]
        return [stream.result() for stream in streams]

    def load(self) -> Load:
        """Return the current load."""
        with self._lock:
            scheduler = self._scheduler
            return Load(
                running=len(scheduler.running),
                waiting=len(scheduler.waiting),
                free_pages=scheduler.pool.num_free,
                num_preempted=scheduler.num_preempted,
            )

    def busy_seconds(self) -> dict[str, float]:
        """Return the computing seconds of each GPU since the start; empty if they are unknown."""
        return self._executor.busy_seconds()

    def fallbacks(self) -> list[Fallback]:
        """Return the features that aren't used on a device, so that it is slower than planned."""
        return self._executor.fallbacks()

    def peaks(self) -> list[PeakBytes]:
        """Return the peak memory of each GPU; final once the engine is closed."""
        return self._executor.peaks()

    def _encode_prompt(self, prompt: Prompt) -> list[int]:
        """Convert a prompt to token ids; an `ImagePrompt` is returned as is."""
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

    # Only this thread calls the executor's `start`, `submit` and `wait`, and the requests'
    # `on_event`:
    #
    #     other threads   Engine.submit: queue the sequence under the lock, wake ─┐
    #     this thread     submit steps → wait for a step's end, or to be woken ◀──┘ → take result
    #
    # `on_event` is called under the lock, which is reentrant: a callback may submit a request.
    def _work(self, started: Future[None]) -> None:
        """Run the engine's thread: start the executor, then compute steps until closed or failed.

        `started` gets the result, or the error, of starting.
        """
        executor = self._executor
        try:
            executor.start()
            settings = executor.capacity, executor.num_steps, executor.forget, self._plan.forecast
            self._scheduler = Scheduler(*settings, runs_ahead=executor.runs_ahead)
            started.set_result(None)
        except Exception as error:  # also InvalidStateError, if the constructor was interrupted
            executor.close()
            if not started.cancelled():
                started.set_exception(find_lost_gpu(error) or error)
            return
        try:
            while not self._is_closed:
                self._submit_steps()
                self._take_result(executor.wait())
            with self._lock:
                self._scheduler.cancel_all()
        except Exception as error:  # a lost GPU or process, or a defect of duoka
            self._fail(error)

    def _submit_steps(self) -> None:
        """Submit steps until enough are in flight for the executor, or there is no work."""
        while len(self._steps) < self._executor.num_steps + self._executor.runs_ahead:
            with self._lock:
                chunks = self._next_retry() or self._scheduler.next_step()
            if not chunks:
                return
            self._steps.append(chunks)
            self._executor.submit(chunks)

    def _next_retry(self) -> list[Chunk]:
        """Return the next chunks to retry, without chunks of ended requests; empty if none."""
        chunks: list[Chunk] = []
        while self._failed and not chunks:
            chunks = self._scheduler.schedule_again(self._failed.popleft())
        return chunks

    def _take_result(self, result: Result | None) -> None:
        """Process the result of the oldest step in flight; None means that `wait` was woken."""
        if result is None:
            return
        with self._lock:
            chunks = self._steps.popleft()
            if isinstance(result, Exception):
                self._retry(chunks, result)
                return
            for chunk, outcome in zip(chunks, result, strict=True):
                self._scheduler.computed(chunk, self._explain_outcome(outcome, chunk))

    # Bisection. Chunks a b c d belong to four sequences, and computing c always fails:
    #
    #     [a b c d] fails → [a b] runs, [c d] fails → [c] fails and ends its request, [d] runs
    #
    # One failing chunk among n costs about 2 log2(n) extra steps, which run before any new step. A
    # chunk of 512 tokens that runs out of memory is retried with its first 256, 128, … tokens;
    # later steps compute the others.
    def _retry(self, chunks: Sequence[Chunk], error: Exception) -> None:
        """Queue both halves of a failed step as steps of their own; fail a single chunk's request.

        Thus only the request of a failing chunk ends, and chunks that no longer fit in memory
        together run one after another. Keys and values that were already written to pages are
        overwritten.
        """
        tokens = sum(len(chunk.tokens) for chunk in chunks)
        _LOG.info("a step of %d tokens failed: %s", tokens, " ".join(describe(error).split()))
        if len(chunks) > 1:
            middle = len(chunks) // 2
            self._failed.extend([list(chunks[:middle]), list(chunks[middle:])])
            return
        (chunk,) = chunks
        middle = len(chunk.tokens) // 2
        if isinstance(error, torch.OutOfMemoryError) and middle:
            self._failed.append([replace(chunk, tokens=chunk.tokens[:middle])])
        else:
            self._scheduler.computed(chunk, self._explain_outcome(error, chunk))

    def _explain_outcome(self, outcome: Outcome, chunk: Chunk) -> Outcome:
        """Replace an out-of-memory error by one with the plan; return other outcomes unchanged."""
        if not isinstance(outcome, torch.OutOfMemoryError):
            return outcome
        tokens = format_count(len(chunk.tokens), "token")
        text = f"out of memory, for {tokens}: {describe(outcome)}"
        return OutOfMemory(text, self._plan, getattr(outcome, "available_bytes", {}))

    def _fail(self, error: Exception) -> None:
        """Record a permanent failure, report it, and fail all requests with it."""
        with self._lock:
            self.failure = error
        if self._on_failure is not None:
            self._on_failure(error)
        with self._lock:
            self._scheduler.fail_all(error)


def _send_stripped(send_event: Callable[[Event], None], event: Event) -> None:
    """Call `send_event` with an event; strip white space from the text of a completion."""
    if isinstance(event, Completion):
        event = replace(event, text=event.text.strip())
    send_event(event)


def _put_result(queue: SimpleQueue[tuple[K, Completion | Exception]], key: K, event: Event) -> None:
    """Queue the completion or the error of a request under its key; skip pieces of text."""
    if not isinstance(event, TextPiece):
        queue.put((key, event))
