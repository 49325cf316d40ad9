"""The process of an engine: ``python -m duoka.serve SOCKET``.

It reads what the server asks, makes prompts of it, and sends back what comes. Prompts are made and
grammars compiled in threads of their own, so that a long one keeps nobody waiting.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from duoka.base.quiet import quiet_libraries

with quiet_libraries():
    from duoka.checkpoint.checkpoint import Checkpoint
    from duoka.engine import Engine, SamplingParams
    from duoka.engine.engine import Stream
    from duoka.engine.request import Completion, TextPiece, TokenChoice
    from duoka.models.text.answer_reader import AnswerReader
    from duoka.runtime.prompt_reader import PromptReader, PromptTooLong, refuse_beyond
from duoka.base.answer_parts import AnswerPart
from duoka.base.garbage import freeze_objects
from duoka.errors import DuokaError, MachineError
from duoka.models.text.token_bytes import TokenBytes
from duoka.runtime.lost_gpu import find_lost_gpu
from duoka.stages.workers import end_with_parent

from .messages import (
    Ask,
    Begin,
    Begun,
    Broken,
    Cancel,
    Count,
    Counted,
    Delta,
    Ended,
    Failed,
    Look,
    Ready,
    Spell,
    Status,
    Token,
    packed,
    read,
)
from .questions import QuestionReader

_PROMPT_THREADS = 4
_SEND_SECONDS = 0.5
_DEFECT = 70


class EngineProcess:
    """Answers what the server asks with an engine.

    Parameters
    ----------
    begin : Begin
    tell : callable
        Sends a message to the server; from any thread.
    """

    def __init__(self, begin: Begin, tell: Callable[[object], None]) -> None:
        self._tell = tell
        checkpoint = Checkpoint.open(begin.plan.source, trust_remote_code=begin.trust_remote_code)
        self._engine = Engine(
            begin.plan,
            processes=begin.processes,
            max_new_tokens=begin.max_new_tokens,
            trust_remote_code=begin.trust_remote_code,
            adapter=begin.adapter,
            on_failure=self._end,
        )
        self._reader = PromptReader.open(checkpoint, begin.plan.workload)
        self._questions = QuestionReader(
            self._reader, checkpoint.generation_config, self._engine.capacity.context_tokens
        )
        self._token_bytes = TokenBytes(self._reader.tokenizer)
        self._threads = ThreadPoolExecutor(_PROMPT_THREADS, "duoka-prompts")
        # One at a time: a picture of a few hundred bytes can take 1.3 GB while it is decoded.
        self._picture_thread = ThreadPoolExecutor(1, "duoka-pictures")
        self._lock = threading.Lock()
        # The answers of each request that has not ended; none of one that was cancelled early.
        self._streams: dict[int, list[Stream]] = {}
        self._shared_tokens = 0

    def serve(self, messages: Callable[[], list[Any]]) -> None:
        """Do what is asked until nobody asks any more."""
        freeze_objects()
        capacity = self._engine.capacity
        self._tell(
            Ready(
                context_tokens=capacity.context_tokens,
                sequences=capacity.sequences,
                pages=capacity.pages,
                page_tokens=capacity.page_tokens,
            )
        )
        while True:
            for message in messages():
                if isinstance(message, Cancel):
                    self._cancel(message.number)
                    continue
                if isinstance(message, Look):
                    self._tell_status()
                    continue
                if isinstance(message, Ask):
                    self._streams[message.number] = []
                turns = () if isinstance(message, Spell) else message.prompt.messages or ()
                has_pictures = any(turn.images for turn in turns)
                threads = self._picture_thread if has_pictures else self._threads
                threads.submit(self._do, message)

    def _do(self, message: Ask | Count | Spell) -> None:
        field = message.field if isinstance(message, Spell) else message.prompt.field
        try:
            if isinstance(message, Ask):
                if message.number in self._streams:  # not cancelled while it waited
                    self._ask(message)
            elif isinstance(message, Count):
                tokens = self._questions.read(message.prompt).tokens
                self._tell(Counted(number=message.number, tokens=list(tokens)))
            else:
                refuse_beyond(message.tokens, self._questions.num_tokens)
                text = self._reader.tokenizer.decode(list(message.tokens))
                self._tell(Counted(number=message.number, text=str(text)))
        except Exception as error:  # of a template's or tokenizer's code, say: one request's alone
            self._cancel(message.number)
            self._tell(failed(message.number, error, field))

    def _ask(self, ask: Ask) -> None:
        question = self._questions.read(ask.prompt, ask.params)
        answers = _Answers(ask, self)
        for choice, chosen in enumerate(question.params.split(ask.n)):
            answer = _Answer(choice, chosen, answers, question.open_reader())
            stream = self._engine.submit(
                question.tokens, chosen, kept_ids=question.kept_ids, on_event=answer.take
            )
            with self._lock:
                streams = self._streams.get(ask.number)
                if streams is not None:
                    streams.append(stream)
            if streams is None:  # cancelled, or failed, meanwhile
                stream.cancel()
        answers.begin(len(question.tokens))

    def _cancel(self, number: int) -> None:
        with self._lock:
            streams = self._streams.pop(number, [])
        for stream in streams:
            stream.cancel()

    def ended(self, number: int, completion: Completion | None) -> None:
        """All answers of a request have ended."""
        with self._lock:
            self._streams.pop(number, None)
            if completion is not None:
                self._shared_tokens += completion.shared_tokens

    def tell(self, message: object) -> None:
        """Send a message to the server."""
        self._tell(message)

    def token(self, choice: TokenChoice) -> Token:
        """A token as it is told, with its text."""
        best = tuple((*self._spelled(token), logprob) for token, logprob in choice.top_logprobs)
        return Token(*self._spelled(choice.token), choice.logprob or 0.0, best)

    def _spelled(self, token: int) -> tuple[str, bytes]:
        data = self._token_bytes.of(token)
        return data.decode(errors="replace"), data

    def _end(self, error: BaseException) -> None:
        """End this process with its engine; its open requests are told by the server."""
        broken = _broken(error)
        self._tell(broken)
        time.sleep(_SEND_SECONDS)
        os._exit(broken.code)

    def _tell_status(self) -> None:
        load = self._engine.load()
        reserved = {peak.device: peak.reserved_bytes for peak in self._engine.peaks()}
        self._tell(
            Status(
                running=load.running,
                waiting=load.waiting,
                pages=self._engine.capacity.pages,
                free_pages=load.free_pages,
                preemptions=load.num_preempted,
                shared_tokens=self._shared_tokens,
                reserved_bytes=reserved,
                busy_seconds=self._engine.busy_seconds(),
            )
        )


class _Answers:
    """What comes of a request, told when the engine has taken all of it.

    So what the engine refuses is an error, and no answer that breaks off.
    """

    def __init__(self, ask: Ask, process: EngineProcess) -> None:
        self.number, self.process = ask.number, process
        self._left = ask.n
        self._lock = threading.Lock()
        self._early: list[object] | None = []

    def begin(self, prompt_tokens: int) -> None:
        """Tell that it is on its way, and what has come already."""
        with self._lock:
            self.process.tell(Begun(number=self.number, prompt_tokens=prompt_tokens))
            for message in self._early or ():
                self.process.tell(message)
            self._early = None

    def tell(self, message: object) -> None:
        """Tell what comes."""
        with self._lock:
            if self._early is None:
                self.process.tell(message)
            else:
                self._early.append(message)

    def end(self, completion: Completion | None) -> None:
        """Note that an answer has ended; the engine's thread alone does."""
        self._left -= 1
        if not self._left:
            self.process.ended(self.number, completion)


class _Answer:
    """One of the answers to a request, as it comes."""

    def __init__(
        self, choice: int, params: SamplingParams, answers: _Answers, reader: AnswerReader
    ) -> None:
        self._choice, self._answers, self._reader = choice, answers, reader
        # Those of text that may still become a part of another kind.
        self._untold_tokens: list[TokenChoice] = []
        self._num_tokens = 0
        self._tells_tokens = params.logprobs is not None

    def take(self, event: TextPiece | Completion | Exception) -> None:
        """See `Engine.submit`'s `on_event`."""
        answers, number = self._answers, self._answers.number
        if isinstance(event, TextPiece):
            self._num_tokens += len(event.tokens)
            self._untold_tokens += event.tokens
            self._tell(self._reader.feed(event.text))
            return
        if isinstance(event, Exception):
            answers.tell(failed(number, event))
            answers.end(None)
            return
        # Those that brought no text, or one that was cut off, are told with the rest, or alone.
        self._untold_tokens += event.tokens[self._num_tokens :]
        is_cut = event.finish != "stop" or event.stop_text is not None
        self._tell(self._reader.finish(is_cut=is_cut))
        if self._untold_tokens and self._tells_tokens:
            self._tell([AnswerPart("content", "")])
        calls = event.finish == "stop" and self._reader.num_calls
        answers.tell(
            Ended(
                number=number,
                choice=self._choice,
                finish="tool_calls" if calls else event.finish,
                new_tokens=len(event.tokens),
                shared_tokens=event.shared_tokens,
                stop_text=event.stop_text,
            )
        )
        answers.end(event)

    def _tell(self, parts: Sequence[AnswerPart]) -> None:
        answers = self._answers
        for part in parts:
            tokens, self._untold_tokens = self._untold_tokens, []
            shown = map(answers.process.token, tokens if self._tells_tokens else ())
            answers.tell(
                Delta(
                    number=answers.number,
                    choice=self._choice,
                    **part._asdict(),
                    num_tokens=len(tokens),
                    tokens=tuple(shown),
                )
            )


def failed(number: int, error: Exception, field: str | None = None) -> Failed:
    """Why a request isn't answered, as HTTP has it; by a field of it, unless the error knows."""
    is_theirs = isinstance(error, DuokaError) and not isinstance(error, MachineError)
    is_too_long = isinstance(error, PromptTooLong)  # its hint is for whoever plans
    hint = None if is_too_long else getattr(error, "hint", None)
    text = (
        str(error)[:1000]
        if isinstance(error, DuokaError)
        else f"{type(error).__name__}: {str(error)[:300]}"
    )
    return Failed(
        number=number,
        status=400 if is_theirs else 500,
        text=f"{text}; {hint}" if hint else text,
        code="context_length_exceeded" if is_too_long else None,
        param=getattr(error, "param", None) or field,
    )


def _broken(error: BaseException) -> Broken:
    """Why an engine has ended; a defect is told with its traceback as well."""
    error = find_lost_gpu(error) or error
    if isinstance(error, DuokaError):
        return Broken(f"{error}; {error.hint}" if error.hint else f"{error}", error.exit_code)
    traceback.print_exception(error)
    return Broken(f"{type(error).__name__}: {str(error)[:300]}", _DEFECT)


class _Outbox:
    """Sends messages from all threads; what comes while it sends goes together."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._queue: SimpleQueue[object] = SimpleQueue()
        threading.Thread(target=self._work, name="duoka-outbox", daemon=True).start()

    def put(self, message: object) -> None:
        """Let a message be sent."""
        self._queue.put(message)

    def _work(self) -> None:
        while True:
            messages = [self._queue.get()]
            try:
                while True:
                    messages.append(self._queue.get_nowait())
            except Empty:
                pass
            try:
                self._connection.sendall(packed(messages))
            except OSError:  # the server is gone, which the main thread sees as well
                return


def main() -> None:
    """The entry of the process: the socket of the server is its last argument."""
    end_with_parent()
    connection = socket.socket(fileno=int(sys.argv[-1]))
    file = connection.makefile("rb")
    (begin,) = read(file)
    code = 0
    try:
        outbox = _Outbox(connection)
        process = EngineProcess(begin, outbox.put)
        process.serve(partial(read, file))
    except EOFError:  # the server is gone
        pass
    except BaseException as error:
        broken = _broken(error)
        code = broken.code
        connection.sendall(packed([broken]))
    sys.stderr.flush()
    os._exit(code)  # whatever threads and processes there are: they end with this one
