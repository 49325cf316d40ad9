"""A chat conversation whose history is kept within the planned context."""

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

    With a paged cache, prefix caching keeps the history's keys and values: only the new end of each
    prompt is computed. `answers` are the completions so far.

    When the history exceeds the planned prompt length or number of images, the oldest rounds are
    dropped (`num_forgotten` counts them); the system message is kept.
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
        self._pending_images: list[Image] = []
        self.num_forgotten = 0

    @property
    def messages(self) -> tuple[ChatMessage, ...]:
        """The system message and the messages of all rounds in the history."""
        return (*self._system, *(message for round_ in self._rounds for message in round_))

    def clear(self) -> None:
        """Drop all rounds and pending images; the system message is kept."""
        self._rounds.clear()
        self._pending_images.clear()
        self.num_forgotten = 0

    def show(self, *images: Image) -> None:
        """Add images to the next question.

        Raises
        ------
        UsageError
            If the model doesn't support images, or the images exceed the planned number or size;
            no image is added then.
        """
        self._reader.check_images([*self._pending_images, *images])
        self._pending_images += images

    def ask(self, question: str) -> Generator[str, None, None]:
        """Ask a question; yield the pieces of the answer.

        When the caller stops early (an exception, Ctrl-C, `close` of the generator), the
        generation is cancelled and its text so far becomes the answer in the history.

        Raises
        ------
        UsageError
            If the question alone is longer than the planned prompt.
        """
        message = ChatMessage(role="user", content=question, images=tuple(self._pending_images))
        prompt = self._build_prompt(message)
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
                self._pending_images.clear()
            with suppress(Exception):  # if it failed, the loop above has raised the error
                self.answers.append(stream.result())

    def _build_prompt(self, message: ChatMessage) -> list[int]:
        """Return the token ids of history and question; drop the oldest rounds until they fit."""
        workload = self._reader.workload
        limit = workload.prompt_tokens
        while self._rounds and len(images_of([*self.messages, message])) > workload.images:
            self._drop_oldest_round()
        while True:
            prompt = self._reader.chat.prompt([*self.messages, message])
            if len(prompt) <= limit:
                return prompt
            if not self._rounds:
                refuse_long(len(prompt), limit)
            self._drop_oldest_round()

    def _drop_oldest_round(self) -> None:
        """Drop the oldest round."""
        del self._rounds[0]
        self.num_forgotten += 1


def strip_start(pieces: Iterable[str]) -> Iterator[str]:
    """Strip the leading white space of a text in pieces: ChatGLM begins with an empty line."""
    has_text = False
    for piece in pieces:
        text = piece if has_text else piece.lstrip()
        has_text = has_text or bool(text)
        if text:
            yield text
