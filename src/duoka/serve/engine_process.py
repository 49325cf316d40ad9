"""The process of an engine: ``python -m duoka.serve SOCKET``.

The process receives requests from the server, converts them to prompts, and sends back the events
of each request. A pool of threads tokenizes prompts and compiles grammars, so that a slow prompt
delays no other request.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from logging.handlers import QueueHandler
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import NoReturn

from duoka.base.quiet import quiet_libraries

with quiet_libraries():
    from duoka.api.load import OpenedModel
    from duoka.engine import Engine
    from duoka.engine.engine import Stream
    from duoka.engine.request import Completion, TextPiece, TokenChoice
    from duoka.models.text.answer_reader import AnswerReader
    from duoka.runtime.prompt_reader import PromptReader, PromptTooLong, refuse_beyond
    from duoka.runtime.publisher import BusyShares
from duoka.base.answer_parts import AnswerPart
from duoka.base.garbage import freeze_objects
from duoka.errors import DuokaError, MachineError
from duoka.models.text.token_bytes import TokenBytes
from duoka.runtime.lost_gpu import find_lost_gpu
from duoka.workers.worker import DEFECT, exit_now, run_with_channel

from .messages import (
    Begun,
    Broken,
    Counted,
    Delta,
    Ended,
    EngineRequest,
    EngineSettings,
    Failed,
    Status,
    Token,
)
from .questions import QuestionReader

_LOG = logging.getLogger(__name__)
_PROMPT_THREADS = 4
_SEND_SECONDS = 0.5


# Threads of the process:
#
#     main             receives requests and queues them; cancels generations, sends the status
#     duoka-prompts    chat template, tokenizer and grammar of a prompt, then `Engine.submit`
#     duoka-pictures   the same for prompts with images
#     duoka-engine     computes steps, and calls `_GenerationListener.take`
#     duoka-outbox     sends messages to the server
class EngineProcess:
    """Answers the server's requests with an engine.

    Parameters
    ----------
    settings : EngineSettings
    outbox : Outbox
        Sends messages to the server.
    """

    def __init__(self, settings: EngineSettings, outbox: Outbox) -> None:
        self.send = outbox.put
        plan, trust_code = settings.plan, settings.trust_remote_code
        opened = OpenedModel.open(plan, trust_remote_code=trust_code)
        self._engine = Engine(
            plan,
            max_new_tokens=settings.max_new_tokens,
            trust_remote_code=trust_code,
            adapter=settings.adapter,
            on_failure=outbox.send_last,
            opened=opened,
        )
        # A second tokenizer: the engine's thread decodes with its own while these threads encode.
        self._reader = PromptReader.open(opened.checkpoint, plan.workload)
        config, limit = opened.checkpoint.generation_config, self._engine.capacity.context_tokens
        self._questions = QuestionReader(self._reader, config, limit, settings.is_thinking)
        self._token_bytes = TokenBytes(self._reader.tokenizer)
        self._threads = ThreadPoolExecutor(_PROMPT_THREADS, "duoka-prompts")
        # One thread: decoding an image of a few hundred bytes can take 1.3 GB.
        self._picture_thread = ThreadPoolExecutor(1, "duoka-pictures")
        self._max_new_tokens = settings.max_new_tokens or plan.request.most_new_tokens
        self._lock = threading.Lock()
        # The generations of each open "generate" request, by number; cancelled requests are
        # removed.
        self._streams: dict[int, list[Stream]] = {}
        self._busy_shares = BusyShares(self._engine.busy_seconds)

    def serve(self, server: Connection) -> None:
        """Answer requests until the server closes the connection, which raises EOFError."""
        freeze_objects()
        self.send(self._engine.capacity)
        while True:
            request: EngineRequest = server.recv()
            if request.task == "end":
                self._cancel(request.number)
            elif request.task == "status":
                self.send(self._status())
            else:
                if request.task == "generate":
                    self._streams[request.number] = []
                has_pictures = any(turn.images for turn in request.prompt.messages or ())
                threads = self._picture_thread if has_pictures else self._threads
                threads.submit(self._answer, request)

    def _answer(self, request: EngineRequest) -> None:
        """Answer a request in a thread of the pool; send `Failed` if an error is raised."""
        number, prompt = request.number, request.prompt
        try:
            if request.task == "tokenize":
                tokens = list(self._questions.read(prompt).tokens)
                self.send(Counted(number=number, tokens=tokens))
            elif request.task == "detokenize":
                tokens = list(prompt.tokens or ())
                refuse_beyond(tokens, self._questions.num_tokens)
                text = str(self._reader.tokenizer.decode(tokens))
                self.send(Counted(number=number, text=text))
            elif number in self._streams:  # unless cancelled in the queue
                self._generate(request)
        except Exception as error:  # also of template or tokenizer code: fails only this request
            self._cancel(number)
            self.send(failed(number, error, prompt.field))

    def _generate(self, request: EngineRequest) -> None:
        """Submit the n generations of a request, then send `Begun`."""
        number = request.number
        question = self._questions.read(request.prompt, request.params)
        submit = partial(self._engine.submit, question.tokens, adapter=request.adapter)
        for choice, params in enumerate(question.params.split(request.n)):
            has_logprobs = params.logprobs is not None
            reader = question.open_reader()
            num_forced = len(params.forced_ids)
            listener = _GenerationListener(self, number, choice, reader, has_logprobs, num_forced)
            stream = submit(params, kept_ids=question.kept_ids, on_event=listener.take)
            with self._lock:
                streams = self._streams.get(number)
                if streams is not None:
                    streams.append(stream)
            if streams is None:  # cancelled or failed meanwhile
                stream.cancel()
        num_prompt = len(question.tokens) + len(question.params.forced_ids)
        used: dict[str, float | None] = {"max_output_tokens": self._max_new_tokens}
        used |= {"temperature": question.params.temperature, "top_p": question.params.top_p}
        self.send(Begun(number=number, prompt_tokens=num_prompt, params=used))

    def _cancel(self, number: int) -> None:
        """Cancel the remaining generations of a request."""
        with self._lock:
            streams = self._streams.pop(number, [])
        for stream in streams:
            stream.cancel()

    def token(self, choice: TokenChoice) -> Token:
        """Convert a token for the server: add texts and bytes to the token ids."""
        best = tuple((*self._spell(token), logprob) for token, logprob in choice.top_logprobs)
        return Token(*self._spell(choice.token), choice.logprob or 0.0, best)

    def _spell(self, token: int) -> tuple[str, bytes]:
        """Return the text and the bytes of a token id."""
        data = self._token_bytes.of(token)
        return data.decode(errors="replace"), data

    def _status(self) -> Status:
        """Collect the load and the memory of the engine."""
        load = self._engine.load()
        return Status(
            running=load.running,
            waiting=load.waiting,
            pages=self._engine.capacity.pages,
            free_pages=load.free_pages,
            preemptions=load.num_preempted,
            reserved_bytes={peak.device: peak.reserved_bytes for peak in self._engine.peaks()},
            busy_seconds=self._engine.busy_seconds(),
            busy_shares=self._busy_shares(),
            fallbacks=self._engine.fallbacks(),
            switches_thinking=self._reader.chat.reasoning.is_effective,
        )


@dataclass
class _GenerationListener:
    """Converts the engine's events of one generation to messages for the server."""

    process: EngineProcess
    number: int
    choice: int
    reader: AnswerReader
    has_logprobs: bool
    num_forced: int = 0  # tokens of the prompt that are generated again
    # Tokens whose text the reader holds back: it may belong to a part of another kind, such as a
    # tag.
    unsent_tokens: list[TokenChoice] = field(default_factory=list)
    num_tokens: int = 0

    def take(self, event: TextPiece | Completion | Exception) -> None:
        """Convert an event and send the messages; see `on_event` of `Engine.submit`."""
        if isinstance(event, TextPiece):
            self.num_tokens += len(event.tokens)
            self.unsent_tokens += event.tokens
            self._send(self.reader.feed(event.text))
            return
        if isinstance(event, Exception):
            self.process.send(failed(self.number, event))
            return
        # Remaining tokens, whose text is empty or was cut off, go with the last part, or alone.
        self.unsent_tokens += event.tokens[self.num_tokens :]
        is_cut = event.finish != "stop" or event.stop_text is not None
        self._send(self.reader.finish(is_cut=is_cut))
        if self.unsent_tokens and self.has_logprobs:
            self._send([AnswerPart("content", "")])
        has_calls = event.finish == "stop" and self.reader.num_calls
        self.process.send(
            Ended(
                number=self.number,
                choice=self.choice,
                finish="tool_calls" if has_calls else event.finish,
                new_tokens=max(0, len(event.tokens) - self.num_forced),
                shared_tokens=event.shared_tokens,
                stop_text=event.stop_text,
            )
        )

    def _send(self, parts: Sequence[AnswerPart]) -> None:
        """Send the parts as `Delta`s, with the unsent tokens."""
        # One token may end a part and begin the next ("</think>Hi"): the first part gets all
        # tokens.
        for part in parts:
            tokens, self.unsent_tokens = self.unsent_tokens, []
            logprobs = map(self.process.token, tokens if self.has_logprobs else ())
            self.process.send(
                Delta(
                    number=self.number,
                    choice=self.choice,
                    **part._asdict(),
                    num_tokens=len(tokens),
                    tokens=tuple(logprobs),
                )
            )


def failed(number: int, error: Exception, field: str | None = None) -> Failed:
    """Convert the error of a request to a message with an HTTP status.

    `field` is the wrong field of the request, unless the error has a `param`.
    """
    is_client_error = isinstance(error, DuokaError) and not isinstance(error, MachineError)
    is_too_long = isinstance(error, PromptTooLong)  # whose hint is for the operator
    hint = None if is_too_long else getattr(error, "hint", None)
    text = f"{type(error).__name__}: {str(error)[:300]}"
    if isinstance(error, DuokaError):
        text = str(error)[:1000]
    if not is_client_error:  # the text of another error may quote the prompt
        _LOG.error("a request failed: %s", text if isinstance(error, DuokaError) else type(error))
    return Failed(
        number=number,
        status=400 if is_client_error else 500,
        text=f"{text}; {hint}" if hint else text,
        code="context_length_exceeded" if is_too_long else None,
        param=getattr(error, "param", None) or field,
    )


def _make_broken(error: BaseException) -> Broken:
    """Convert the error that ends the engine to a message; print the traceback of a defect."""
    error = find_lost_gpu(error) or error
    if isinstance(error, DuokaError):
        return Broken(f"{error}; {error.hint}" if error.hint else f"{error}", error.exit_code)
    traceback.print_exception(error)
    return Broken(f"{type(error).__name__}: {str(error)[:300]}", DEFECT)


class Outbox:
    """Sends the messages of all threads and the log to the server, in batches of all queued."""

    def __init__(self, server: Connection) -> None:
        self._server = server
        self._queue: SimpleQueue[object] = SimpleQueue()
        logger = logging.getLogger("duoka")
        logger.addHandler(QueueHandler(self._queue))
        logger.setLevel(logging.INFO)  # the server filters
        self._thread = threading.Thread(target=self._work, name="duoka-outbox", daemon=True)
        self._thread.start()

    def put(self, message: object) -> None:
        """Queue a message, from any thread."""
        self._queue.put(message)

    def send_last(self, error: BaseException) -> NoReturn:
        """Send the reason and exit the process; the server then fails the open requests."""
        broken = _make_broken(error)
        self._queue.put(broken)
        self._thread.join(_SEND_SECONDS)
        exit_now(broken.code)

    def _work(self) -> None:
        """Send queued messages until `Broken` is sent or the server is gone."""
        messages: list[object] = []
        while not any(isinstance(message, Broken) for message in messages):
            messages = [self._queue.get()]
            with suppress(Empty):
                while True:
                    messages.append(self._queue.get_nowait())
            try:
                self._server.send(messages)
            except OSError:  # the server is gone, which the main thread sees as well
                return


def main() -> None:
    """Run the process of an engine."""
    run_with_channel(_serve)


def _serve(server: Connection) -> None:
    """Open the engine with the server's settings and serve; send a fatal error to the server."""
    settings: EngineSettings = server.recv()
    outbox = Outbox(server)
    try:
        EngineProcess(settings, outbox).serve(server)
    except (EOFError, ConnectionError):  # the server is gone
        raise
    except BaseException as error:
        outbox.send_last(error)
