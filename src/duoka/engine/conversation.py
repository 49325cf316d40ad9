"""A conversation within the planned context."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress

from PIL.Image import Image

from duoka.models.text.image_prompts import images_of
from duoka.models.text.messages import ChatMessage
from duoka.runtime.prompt_reader import PromptReader, refuse_long

from .engine import Engine
from .request import Completion, SamplingParams


class Conversation:
    """Questions and answers with a model, with the earlier rounds as context.

    The engine's pages hold the history, if it has pages: of each prompt only the end is computed.
    `answers` are all finished answers.

    When the history exceeds the planned prompt or the planned number of images, the oldest rounds
    are dropped, `num_forgotten` so far; the system's message stays.
    """

    def __init__(
        self,
        engine: Engine,
        reader: PromptReader,
        params: SamplingParams,
        *,
        system: str | None = None,
    ) -> None:
        self._engine = engine
        self._reader = reader
        self._params = params
        self.answers: list[Completion] = []
        self._system = [ChatMessage(role="system", content=system)] if system else []
        self._rounds: list[tuple[ChatMessage, ChatMessage]] = []
        self._shown: list[Image] = []
        self.num_forgotten = 0

    @property
    def messages(self) -> tuple[ChatMessage, ...]:
        """All messages before the next question."""
        return (*self._system, *(message for round_ in self._rounds for message in round_))

    def clear(self) -> None:
        """Drop all rounds; the system's message stays."""
        self._rounds.clear()
        self._shown.clear()
        self.num_forgotten = 0

    def show(self, *images: Image) -> None:
        """Show images with the next question.

        Raises
        ------
        UsageError
            If the model takes none, or no memory was planned for so many, or for so large ones;
            none of them is shown then.
        """
        self._reader.check_images([*self._shown, *images])
        self._shown += images

    def ask(self, question: str) -> Generator[str, None, None]:
        """Ask a question; the answer comes in pieces.

        When the caller stops in the middle (an exception, Ctrl-C, `close`), the generation ends
        and the text so far becomes the answer in the history.

        Raises
        ------
        UsageError
            If the question alone is longer than the planned prompt.
        """
        message = ChatMessage(role="user", content=question, images=tuple(self._shown))
        prompt = self._prompt(message)
        answer = ""
        stream = self._engine.submit(prompt, self._params)
        try:
            for piece in strip_start(stream):
                answer += piece
                yield piece
        finally:
            stream.cancel()
            if answer:
                reply = ChatMessage(role="assistant", content=answer.rstrip())
                self._rounds.append((message, reply))
                self._shown.clear()
            with suppress(Exception):  # where it failed, that is on its way already
                self.answers.append(stream.result())

    def _prompt(self, message: ChatMessage) -> list[int]:
        """Return the ids of the history and a question, without as many rounds as don't fit."""
        workload = self._reader.workload
        limit = workload.prompt_tokens
        while self._rounds and len(images_of([*self.messages, message])) > workload.images:
            self._forget()
        while True:
            prompt = self._reader.chat.prompt([*self.messages, message])
            if len(prompt) <= limit:
                return prompt
            if not self._rounds:
                refuse_long(len(prompt), limit)
            self._forget()

    def _forget(self) -> None:
        """Drop the oldest round."""
        del self._rounds[0]
        self.num_forgotten += 1


def strip_start(pieces: Iterable[str]) -> Iterator[str]:
    """Drop the white space before a text: ChatGLM begins with an empty line of metadata."""
    has_text = False
    for piece in pieces:
        text = piece if has_text else piece.lstrip()
        has_text = has_text or bool(text)
        if text:
            yield text
