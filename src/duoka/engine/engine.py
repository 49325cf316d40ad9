"""The engine: many requests at once on one model, answered as they come."""

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
from itertools import count, islice
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
from duoka.runtime.lost_gpu import find_lost_gpu
from duoka.runtime.out_of_memory import describe
from duoka.runtime.prompt_reader import refuse_beyond

from .detokenizer import Detokenizer
from .executor import Result
from .grammar import GrammarCompiler
from .open_executor import open_executor
from .request import Completion, SamplingParams, TextPiece
from .scheduler import ScheduledChunk, Scheduler
from .sequence import Event
from .sequence import Sequence as EngineSequence
from .step import EngineStep, Outcome

K = TypeVar("K")
_GREEDY = SamplingParams()
Prompt = str | Sequence[int] | Sequence[ChatMessage]
"""A question, as text; the token ids of a whole prompt, as an `ImagePrompt` where there are images
among them; or the messages of a chat."""


class Load(NamedTuple):
    """Answers on their way and those that wait, pages that nobody needs, and answers put back."""

    running: int
    waiting: int
    free_pages: int
    num_preempted: int


class Stream:
    """An answer on its way: iterate over its text, plainly or `async`, or wait for its `result`."""

    def __init__(self, sequence: EngineSequence, events: SimpleQueue[Event]) -> None:
        self._sequence = sequence
        self._events = events
        self._completion: Completion | None = None
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[str]:
        """The text, piece by piece.

        Raises
        ------
        BaseException
            Why there is no answer.
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
    processes : bool, optional
        Whether each GPU has a process of its own, so that all work at the same time, each on other
        requests; by default wherever the plan has several GPUs and can be run so.
    max_new_tokens : int, optional
        The most tokens of an answer where its parameters don't say; by default the rest of the
        context. None is reserved for them: a request begins when there is memory for its prompt,
        and where memory runs out the youngest one is preempted and recomputed later.
    warm_up : {"every", "largest"}
        Of a plan for pages: whether steps of every size that there can be are tried before the
        first request, some hundreds, after which no further one needs more memory; or only those
        with the most tokens. These take the most by far, and are enough for work that ends soon.
        Later steps may still take a segment of memory from the device then, and where something
        else has that, one runs in smaller parts.
    on_failure : callable, optional
        Called in the engine's thread, before any request is told, where a GPU or a process is lost:
        nothing is computed any more then.
    trust_remote_code, adapter, progress, download_progress
        As for `load`; processes tell no progress of theirs.
    opened : OpenedModel, optional
        The model of the plan, where it is open already.

    Raises
    ------
    DuokaError
        As `load` does; before a weight is read, if the checkpoint has a rule for generating that
        the engine doesn't know.
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
        self._numbers = count()
        # Steps on their way, and pieces that are to be computed again before anything else.
        self._steps: dict[int, list[ScheduledChunk]] = {}
        self._again: deque[list[ScheduledChunk]] = deque()
        # Guards the scheduler; who has changed it wakes the executor.
        self._lock = threading.Lock()
        self._is_closed = False
        self.failure: Exception | None = None
        """Why nothing is computed any more, where a GPU or a process was lost."""
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
        """Cancel what is on its way, and end."""
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
        """Ask for an answer; it is on its way when this returns.

        Parameters
        ----------
        prompt : str, or sequence of ChatMessage or of int
            A question or a chat, of which the family's own prompt is made; or the tokens of a whole
            prompt.
        params : SamplingParams
        kept_ids : collection of int
            Special tokens that stay in the answer's text.
        on_event : callable, optional
            Called in the engine's thread with each piece of the answer, and when it has ended with
            all of it, or why there is none. The stream has nothing then.

        Raises
        ------
        UsageError
            If no memory is there for so long an answer, however long it waits, or for its images;
            or if its grammar can't be compiled.
        """
        tokens = self._tokens(prompt)
        is_chat = isinstance(prompt, str) or any(isinstance(part, ChatMessage) for part in prompt)
        if params.grammar is not None and is_chat:
            tokens.extend(self._reader.chat.content_start)
        if not tokens:
            raise UsageError("there is nothing to answer: the prompt is empty")
        refuse_beyond(tokens, self._num_embeddings)
        rest = max(1, self._scheduler.most_tokens - len(tokens))
        number = params.max_new_tokens or min(self._max_new_tokens, rest)
        self._scheduler.refuse_unfit(len(tokens), number)
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
                raise UsageError("the engine has been closed", hint="make another one")
            self._scheduler.add(sequence)
        self._executor.wake()
        return Stream(sequence, events)

    def as_completed(
        self,
        prompts: Iterable[tuple[K, Prompt]],
        params: SamplingParams | Callable[[K], SamplingParams] = _GREEDY,
    ) -> Iterator[tuple[K, Completion | Exception]]:
        """Answer prompts, each under a key of the caller's, in the order in which answers end.

        However many prompts there are, only so many are asked at a time as keep the engine busy. In
        the place of an answer stands why there is none. `params` may depend on the key.
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
        """Answer all prompts, each `n` times; the answers in the order of the prompts.

        Those to one prompt share its pages, and have seeds as `SamplingParams.split` says.
        """
        streams = [self.submit(prompt, chosen) for prompt in prompts for chosen in params.split(n)]
        return [stream.result() for stream in streams]

    @property
    def num_free_pages(self) -> int:
        """Pages that nobody needs."""
        with self._lock:
            return self._scheduler.pool.num_free

    def load(self) -> Load:
        """What is on its way now."""
        with self._lock:
            scheduler = self._scheduler
            return Load(
                running=len(scheduler.running),
                waiting=len(scheduler.waiting),
                free_pages=scheduler.pool.num_free,
                num_preempted=scheduler.num_preempted,
            )

    def busy_seconds(self) -> dict[str, float]:
        """For how long each GPU has computed since the start, as far as that is known."""
        return self._executor.busy_seconds()

    def peaks(self) -> list[PeakBytes]:
        """The peaks of the GPUs' memory, when the engine has been closed."""
        return self._executor.peaks()

    def _tokens(self, prompt: Prompt) -> list[int]:
        """The tokens of a prompt."""
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

    def _work(self, started: Future[None]) -> None:
        executor = self._executor
        try:
            executor.start()
            settings = executor.capacity, executor.num_steps, executor.forget
            self._scheduler = Scheduler(*settings, self._plan.forecast)
            started.set_result(None)
        except Exception as error:  # or nobody waits for it any more
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
        except Exception as error:  # what was lost, or a defect of duoka's
            self._fail(error)

    def _submit_steps(self) -> None:
        """Let as many steps be on their way as are worth it."""
        while len(self._steps) < self._executor.num_steps:
            with self._lock:
                pieces = self._next_again() or self._scheduler.next_step()
            if not pieces:
                return
            number = next(self._numbers)
            self._steps[number] = pieces
            self._executor.submit(EngineStep(number, [piece.chunk for piece in pieces]))

    def _next_again(self) -> list[ScheduledChunk]:
        """Pieces of a step that has failed; what is wanted of them."""
        while self._again:
            pieces = [piece for piece in self._again.popleft() if piece.is_current]
            if pieces:
                for piece in pieces:  # those that came after it have failed with it
                    piece.sequence.scheduled = piece.start + piece.num_tokens
                return pieces
        return []

    def _take(self, result: Result | None) -> None:
        """Take what a step came to."""
        with self._lock:
            if result is not None:
                pieces = self._steps.pop(result.number)
                if isinstance(result.outcomes, Exception):
                    self._retry(pieces, result.outcomes)
                    return
                for piece, outcome in zip(pieces, result.outcomes, strict=True):
                    self._computed(piece, outcome)

    def _computed(self, piece: ScheduledChunk, outcome: Outcome) -> None:
        if isinstance(outcome, torch.OutOfMemoryError):
            outcome = self._out_of_memory(outcome, piece.num_tokens)
        try:
            self._scheduler.computed(piece, outcome)
        except Exception as error:  # of its tokenizer, say: others aren't concerned
            self._scheduler.fail(piece.sequence, error)

    def _retry(self, pieces: Sequence[ScheduledChunk], error: Exception) -> None:
        """Compute each half of a failed step alone, as often as need be.

        So one that can't be computed ends by itself, and what doesn't fit at once, since something
        else has taken memory, goes on with less. Keys and values in pages that were stored already
        are stored again.
        """
        if len(pieces) > 1:
            middle = len(pieces) // 2
            self._again.extend([list(pieces[:middle]), list(pieces[middle:])])
            return
        (piece,) = pieces
        if isinstance(error, torch.OutOfMemoryError) and piece.num_tokens > 1:
            self._again.append([piece.half])
        else:
            self._computed(piece, error)

    def _out_of_memory(self, error: Exception, num_tokens: int) -> OutOfMemory:
        """What the one who asked is told of it."""
        text = f"out of memory, for {format_count(num_tokens, 'token')}: {describe(error)}"
        return OutOfMemory(text, self._plan, getattr(error, "available_bytes", {}))

    def _fail(self, error: Exception) -> None:
        """Nothing can be computed any more."""
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
